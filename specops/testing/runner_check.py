"""``check_runner``: everything a draft-extend runner owes, with a toy draft, NaN in all memory of nobody, and counters.

A runner is checked through a *factory*: a function that is given a draft, its caches and sizes, and returns the runner, a
callable from :class:`DraftExtendBatch` to next-token logits and hidden states. Most checks are sequences of batches; a
sequence that fails is reduced to the smallest one that still does.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specops.batch import DraftExtendBatch
from specops.compile import DraftExtendRunner
from specops.testing import poisons, toy_draft
from specops.testing.oracle import BOUNDS
from specops.testing.report import Finding, Report, called, code, one_line
from specops.testing.shrink import Batches, shrink, simpler_batches
from specops.testing.timed import Hung, run_within
from specops.testing.toy_draft import HIDDEN, MAX_PAGES, ToyDraft, expected_step, fill_history, make_batch

Factory = Callable[..., Any]
Progress = Callable[[str, int, int], None]

WIDTH, MAX_REQUESTS, BUCKETS = 6, 4, (1, 2, 4)
# Two layers of float32 rounding; a wrong row or key is off by a large part of the value.
TOLERANCE = 100 * BOUNDS[torch.float32]


@dataclass
class RunnerSubject:
    """The runner under test: how to make one, and where."""

    factory: Factory
    device: torch.device
    width: int = WIDTH
    made: list[Any] = field(default_factory=list)

    def make(self, draft: ToyDraft, **options: Any) -> Any:
        """A new runner for ``draft``, warmed up where it has a ``warm_up``."""
        sizes = {
            "tokens_per_request": self.width,
            "max_requests": MAX_REQUESTS,
            "buckets": BUCKETS,
            "max_pages": MAX_PAGES,
            "hidden_size": HIDDEN,
            **options,
        }
        runner = self.factory(draft, list(draft.caches), **sizes)
        warm_up = getattr(runner, "warm_up", None)
        if warm_up is not None:
            warm_up()
        return runner

    def draft(self, **options: Any) -> ToyDraft:
        return ToyDraft(device=self.device, **options)

    def batch(self, requests: Any, seed: int = 0, num_pages: int = 120) -> DraftExtendBatch:
        return make_batch(requests, self.width, device=self.device, seed=seed, num_pages=num_pages)


def step(draft: ToyDraft, runner: Any, batch: DraftExtendBatch, seed: int = 0) -> str | None:
    """One call judged in full: outputs, writes, and that nothing else changed."""
    fill_history(draft, batch, seed)
    expected = expected_step(draft, batch)
    before = [pages.clone() for pages in draft.pools()]
    given = {name: tensor.clone() for name, tensor in batch.as_dict().items()}
    try:
        out = runner(batch)
    except Exception as error:
        return f"the call raised {one_line(error)}"
    for name, tensor in batch.as_dict().items():
        if not torch.equal(tensor, given[name]):
            return f"the runner wrote to the batch's {name}"
    return _wrong_outputs(out, expected) or _wrong_pools(draft, before, expected)


def sequence(subject: RunnerSubject, batches: Batches, poisoned: bool = True) -> str | None:
    """Batches one after another through one runner, its static buffers poisoned in between where it shows them."""
    draft = subject.draft()
    runner = subject.make(draft)
    for number, requests in enumerate(batches):
        buffers = _buffers(runner)
        if poisoned and buffers is not None and number:
            poisons.poison_buffers(buffers, draft.pools()[0].shape[0] - 1)
        problem = step(draft, runner, subject.batch(requests, seed=number), number)
        if problem is not None:
            return f"batch {number + 1} of {len(batches)}, (seq_len, accept_len) {code(requests)}: {problem}"
    return None


def close(got: Tensor, expected: Tensor) -> bool:
    """Every vector within the tolerance; NaN never is."""
    error = (got.cpu().double() - expected).norm(dim=-1)
    return bool((error <= TOLERANCE * expected.norm(dim=-1).clamp(min=1e-9)).all())


def outputs(out: Any) -> tuple[Tensor, Tensor]:
    """Logits and hidden states of a runner's result.

    Raises:
        TypeError: if it is something else, or more than the two.
    """
    fields = getattr(out, "_fields", None)
    if fields is not None and fields != ("next_token_logits", "hidden_states"):
        raise TypeError(
            f"the result has fields {fields}; next_token_logits and hidden_states are all a draft-extend returns"
        )
    if not isinstance(out, (tuple, list)) or len(out) != 2 or not all(isinstance(item, Tensor) for item in out):
        raise TypeError("the result must be two tensors, next_token_logits and hidden_states")
    return out[0], out[1]


def _wrong_outputs(out: Any, expected: toy_draft.Expected) -> str | None:
    try:
        logits, hidden = outputs(out)
    except TypeError as error:
        return str(error)
    count = expected.logits.shape[0]
    for name, got, wanted in (("logits", logits, expected.logits), ("hidden states", hidden, expected.hidden)):
        if got.shape != wanted.shape:
            return f"{name} have shape {tuple(got.shape)}, {count} requests have {tuple(wanted.shape)}"
        if got.dtype != torch.float32:
            return f"{name} are {got.dtype}, the draft is torch.float32"
        if not close(got, wanted):
            wrong = [row for row in range(count) if not close(got[row], wanted[row])]
            seen = "NaN" if got[wrong[0]].isnan().any() else "other numbers"
            return f"{name} of request {wrong[0]} are {seen} than the oracle's; {len(wrong)} of {count} requests are wrong"
    return None


def _wrong_pools(draft: ToyDraft, before: list[Tensor], expected: toy_draft.Expected) -> str | None:
    for index, (old, new) in enumerate(zip(before, draft.pools(), strict=True)):
        name = f"{'kv'[index % 2].upper()} of layer {index // 2}"
        for slot, value in expected.writes[index].items():
            if not close(new[slot], value):
                return f"{name} at page {slot[0]}, offset {slot[1]} is not what an accepted row has there"
        same = (old == new) | (old.isnan() & new.isnan())
        changed = {tuple(slot) for slot in (~same.flatten(2).all(dim=2)).nonzero().tolist()}
        stray = sorted(changed - set(expected.writes[index]) - expected.may_change)
        if stray:
            return f"{name} was written at page {stray[0][0]}, offset {stray[0][1]}, which no row of the batch owns"
    return None


def in_eager_mode(runner: Any) -> bool:
    """Whether the runner says that it was asked to use no graph."""
    return any(getattr(holder, "mode", None) == "eager" for holder in (runner, getattr(runner, "runner", None)))


def _buffers(runner: Any) -> dict[str, Tensor] | None:
    """The runner's static input buffers, where it has any and shows them."""
    for holder in (runner, getattr(runner, "runner", None)):
        buffers = getattr(holder, "buffers", None)
        found = buffers() if callable(buffers) else None
        if isinstance(found, dict):
            return found
    return None


def check_runner(
    runner: str | Factory = "direct",
    *,
    device: torch.device | str | None = None,
    compiler: str | None = None,
    time_limit: float = 120.0,
    only: Iterable[str] | None = None,
    first_only: bool = False,
    shrink_seconds: float = 20.0,
    progress: Progress | None = None,
) -> Report:
    """Check a draft-extend runner against its contract (docs/conformance.md).

    Args:
        runner: a mode of :class:`DraftExtendRunner`, or a factory: ``factory(draft, caches, *, tokens_per_request,
            max_requests, buckets, max_pages, hidden_size)`` returns a callable that takes a :class:`DraftExtendBatch`.
        device: where; a GPU where there is one by default.
        compiler: for a mode, ``backend`` of torch.compile: ``"inductor"`` on a GPU; elsewhere ``"eager"`` by default, which
            traces and guards without generating code.
        time_limit: seconds one check may take, compilation included.
        only: names of the checks to run.
        first_only: stop at the first failure.
        shrink_seconds: how long a failure may be made smaller.
        progress: called with (check, done, total).

    Raises:
        ValueError: an unknown check.
    """
    from specops.testing.runner_checks import CHECKS, SEQUENCES

    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    subject = RunnerSubject(_factory(runner, where, compiler), where)
    origin = repr(runner) if isinstance(runner, str) else called(runner)
    report = Report(f"runner {origin}", str(where))
    names = [*SEQUENCES, *CHECKS]
    wanted = names if only is None else list(only)
    if set(wanted) - set(names):
        raise ValueError(f"unknown checks {sorted(set(wanted) - set(names))}; there are {', '.join(names)}")
    started = time.monotonic()
    for done, name in enumerate(wanted, 1):
        report.checks[name] = 1
        batches = SEQUENCES.get(name)
        if batches is not None:
            problem, fatal = _judge(lambda b=batches: sequence(subject, b), time_limit)  # type: ignore[misc]
        else:
            problem, fatal = _judge(lambda n=name: CHECKS[n](subject), time_limit)  # type: ignore[misc]
        if problem is not None:
            report.failed += 1
            report.stopped = problem if fatal else None
            snippet = f'from specops.testing import check_runner\ncheck_runner({origin}, only=("{name}",)).raise_if_failed()'
            if batches is not None:
                if shrink_seconds and not fatal:
                    batches, problem = _smallest(subject, batches, problem, time_limit, shrink_seconds)
                snippet = f"from specops.testing import replay_runner\nreplay_runner({origin}, {code(batches)})"
            report.findings.append(Finding(name, problem, "toy draft", snippet))
        if progress is not None:
            progress(name, done, len(wanted))
        if report.stopped is not None or (first_only and report.failed):
            break
    report.seconds = time.monotonic() - started
    return report


def replay_runner(runner: str | Factory, batches: Batches, *, device: torch.device | str | None = None) -> None:
    """Run one sequence of batches of ``(seq_len, accept_len)`` pairs again.

    Raises:
        AssertionError: the problem, if there is one still.
    """
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    problem = sequence(RunnerSubject(_factory(runner, where, None), where), batches)
    if problem is not None:
        raise AssertionError(problem)


def _factory(runner: str | Factory, device: torch.device, compiler: str | None) -> Factory:
    if not isinstance(runner, str):
        return runner
    options = {"mode": runner, "compiler": compiler or ("inductor" if device.type == "cuda" else "eager")}
    return lambda draft, caches, **sizes: DraftExtendRunner(draft, caches, **{**options, **sizes})


def _smallest(subject: RunnerSubject, batches: Batches, problem: str, limit: float, seconds: float) -> tuple[Batches, str]:
    found = {"problem": problem}

    def fails(candidate: Batches) -> bool:
        said, _ = _judge(lambda: sequence(subject, candidate), limit)
        if said is not None:
            found["problem"] = said
        return said is not None

    smallest = shrink(batches, simpler_batches, fails, seconds)
    return smallest, found["problem"]


def _judge(call: Callable[[], str | None], limit: float) -> tuple[str | None, bool]:
    def quietly() -> str | None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return call()

    try:
        return run_within(limit, quietly), False
    except Hung as hung:
        return f"the runner hangs: {hung}", True
    except Exception as error:
        return one_line(error), "CUDA error" in str(error)
    finally:
        torch._dynamo.reset()
