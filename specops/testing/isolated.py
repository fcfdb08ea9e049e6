"""A run of the kit in a process of its own, so that a kernel that kills its process is a finding too.

The child is forked before it touches a GPU and sends each report through a pipe, and the name of the case it is at. If it
dies, the parent knows where.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from specops.testing.report import Finding, Report, one_line

Job = tuple[str, Callable[[Callable[[str, int, int], None]], Report]]
Watch = Callable[[str, str, int, int], None]


def run_jobs(jobs: list[Job], watch: Watch | None, patience: float) -> list[Report]:
    """Run each job in a child process; a job whose process dies or falls silent gets a report that says so.

    Args:
        jobs: what is checked, and a function from a progress callback to its report.
        watch: called with (subject, check, done, total).
        patience: seconds without a sign of life after which a child is ended.
    """
    return [_run(name, job, watch, patience) for name, job in jobs]


def _run(
    name: str, job: Callable[[Callable[[str, int, int], None]], Report], watch: Watch | None, patience: float
) -> Report:
    if not hasattr(os, "fork") or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return job(lambda check, done, total: watch(name, check, done, total) if watch else None)
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(job, sender), daemon=True)
    child.start()
    sender.close()
    at, done = "the first case", 0
    try:
        while receiver.poll(patience):
            kind, *said = receiver.recv()
            if kind == "report":
                return _report(said[0])
            if kind == "error":
                raise ValueError(said[0])
            at, done, total = said
            if watch is not None:
                watch(name, at, done, total)
        problem = f"no sign of life for {patience:g} s"
    except EOFError:
        child.join(5)
        problem = f"the process died of {_cause(child.exitcode)}"
    finally:
        if child.is_alive():
            child.kill()
    return Report(
        name,
        "unknown",
        checks={at: done + 1},
        failed=1,
        findings=[Finding(at, f"{problem} after {done} cases", "the next case", f"# run again with only=({at!r},)")],
        stopped=problem,
    )


def _child(job: Callable[[Callable[[str, int, int], None]], Report], sender: Connection) -> None:
    try:
        report = job(lambda check, done, total: sender.send(("at", check, done, total)))
        sender.send(("report", {**vars(report), "findings": [vars(finding) for finding in report.findings]}))
    except ValueError as error:
        sender.send(("error", str(error)))
    except BaseException as error:
        sender.send(("error", one_line(error)))
    sender.close()
    # A thread that hangs must not keep the process.
    os._exit(0)


def _report(data: dict[str, Any]) -> Report:
    return Report(**{**data, "findings": [Finding(**finding) for finding in data["findings"]]})


def _cause(code: int | None) -> str:
    if code is not None and code < 0:
        return signal.Signals(-code).name
    return f"exit code {code}"
