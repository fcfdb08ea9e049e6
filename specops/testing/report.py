"""What a run of the kit found: a report to read, the same as plain data, and an exception to fail a test with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


class NotConforming(AssertionError):
    """A backend or runner failed a check; the message is the report."""


@dataclass
class Finding:
    """One check that failed.

    Attributes:
        check: name of the check.
        problem: what is wrong with the smallest input, in words.
        case: name of the first case that failed.
        snippet: Python code that shows the problem with the smallest input that still fails.
        also: names of further cases of this check that failed.
    """

    check: str
    problem: str
    case: str
    snippet: str
    also: list[str] = field(default_factory=list)


@dataclass
class Report:
    """Result of :func:`specops.testing.check_backend` or :func:`specops.testing.check_runner`.

    Attributes:
        subject: what was checked, such as ``mine_mha``.
        device: where.
        checks: how many cases of each check ran.
        failed: how many of them failed.
        findings: one entry per check that failed.
        skipped: reasons why cases did not run, and for how many. What a backend does not declare is not asked of it.
        stopped: why the run ended early, None if it did not.
        seconds: how long it took.
    """

    subject: str
    device: str
    checks: dict[str, int] = field(default_factory=dict)
    failed: int = 0
    findings: list[Finding] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=dict)
    stopped: str | None = None
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether something was checked, all of it passed, and nothing was left out early."""
        return bool(self.checks) and not self.failed and self.stopped is None

    def finding(self, check: str) -> Finding | None:
        """The finding of one check."""
        return next((finding for finding in self.findings if finding.check == check), None)

    def skip(self, reason: str) -> None:
        self.skipped[reason] = self.skipped.get(reason, 0) + 1

    def raise_if_failed(self) -> Report:
        """The report itself, if all is well.

        Raises:
            NotConforming: with the report as its message.
        """
        if not self.ok:
            raise NotConforming(str(self))
        return self

    def as_dict(self) -> dict[str, Any]:
        """Plain data; ``checks`` and ``failed`` are totals."""
        return {
            "subject": self.subject,
            "device": self.device,
            "checks": sum(self.checks.values()),
            "failed": self.failed,
            "by_check": self.checks,
            "findings": [vars(finding) for finding in self.findings],
            "skipped": self.skipped,
            "stopped": self.stopped,
            "seconds": round(self.seconds, 2),
        }

    def __str__(self) -> str:
        total = sum(self.checks.values())
        lines = [f"{self.subject} on {self.device}: {total} checks, {self.failed} failed, {self.seconds:.1f} s"]
        failed = {finding.check: 1 + len(finding.also) for finding in self.findings}
        for check, count in self.checks.items():
            lines.append(f"  {check:16} {count:4} cases  {f'{failed[check]} FAILED' if check in failed else 'ok'}")
        lines.extend(f"  not run: {count} cases, {reason}" for reason, count in self.skipped.items())
        if self.stopped is not None:
            lines.append(f"  stopped early: {self.stopped}")
        if not total:
            lines.append("  nothing was checked")
        for finding in self.findings:
            lines += ["", f"{finding.check} ({finding.case}): {finding.problem}"]
            if finding.also:
                lines.append(f"also in {', '.join(finding.also[:8])}{' ...' if len(finding.also) > 8 else ''}")
            lines += ["smallest input that fails:", *(f"    {line}" for line in finding.snippet.splitlines())]
        return "\n".join(lines)


def one_line(error: BaseException) -> str:
    """An exception in one line, with the place it came from."""
    text = str(error).strip().splitlines() or [""]
    place = ""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is not None:
        place = f" ({trace.tb_frame.f_code.co_filename.rsplit('/', 1)[-1]}:{trace.tb_lineno})"
    return f"{type(error).__name__}: {text[0]}{place}"


def code(value: Any) -> str:
    """``value`` as Python code: containers of numbers, strings and dtypes."""
    if isinstance(value, (list, tuple)):
        inner = ", ".join(code(item) for item in value)
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    return repr(value)


def called(subject: Any) -> str:
    """What a snippet calls a function or class: its name, or ``subject`` where it has none that is code."""
    name = str(getattr(subject, "__name__", ""))
    return name if name.isidentifier() else "subject"
