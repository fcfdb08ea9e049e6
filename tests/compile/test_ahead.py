"""Eager runs before anything is compiled: which, in what order, beside what; and where there are none.

Run alone: pytest tests/compile/test_ahead.py
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from specops.batch import Field, FieldTable
from specops.compile import StepRunner, ahead, step_runner
from specops.compile.ahead import MOST_THREADS, run_ahead, spread

CPU = torch.device("cpu")
TABLE = FieldTable((Field("lens", "request", (), torch.int32),), 1)


def batch_of(size: int) -> dict[str, Tensor]:
    return TABLE.allocate(size, CPU)


@pytest.mark.parametrize("sizes", [[5], [1, 2], [3, 2, 1], list(range(1, 27)), [1, 2, 4, 8, 16, 32, 64, 128, 256]])
def test_every_size_comes_once_the_ends_first(sizes: list[int]) -> None:
    order = spread(sizes)
    assert sorted(order) == sorted(sizes)
    assert order[0] == max(sizes)
    assert order[: len(sizes)][1:2] == ([min(sizes)] if len(sizes) > 1 else [])


def test_neighbours_are_apart() -> None:
    assert spread([1, 2, 4, 8, 16, 32, 64, 128, 256]) == [256, 1, 16, 64, 4, 128, 32, 8, 2]


def test_the_largest_runs_first_and_alone_and_the_others_in_threads() -> None:
    runs: list[tuple[int, bool, int]] = []

    def step(lens: Tensor) -> None:
        here = threading.current_thread()
        others = sum(thread.name.startswith("specops-ahead") for thread in threading.enumerate())
        assert not torch.is_grad_enabled()
        assert int(lens.sum()) == 0, "padding"
        runs.append((len(lens), here is threading.main_thread(), others))

    assert run_ahead(step, batch_of, range(1, 10), CPU) == []
    assert sorted(size for size, *_ in runs) == list(range(1, 10))
    assert runs[0] == (9, True, 0)
    assert not any(main for _, main, _ in runs[1:])
    assert all(1 <= others <= MOST_THREADS for *_, others in runs[1:])
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("specops-ahead")]


def test_several_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead.os, "cpu_count", lambda: 16)
    together = threading.Barrier(MOST_THREADS)

    def step(lens: Tensor) -> None:
        if len(lens) < 9:
            # Broken, and so an error, unless as many come here.
            together.wait(timeout=20)

    assert run_ahead(step, batch_of, range(1, 10), CPU) == []


def test_a_failure_is_told_and_ends_nothing_else() -> None:
    ran: list[int] = []

    def step(lens: Tensor) -> None:
        ran.append(len(lens))
        if len(lens) == 2:
            raise RuntimeError("no kernel for two\nof them")

    assert run_ahead(step, batch_of, [1, 2, 3, 4, 5], CPU) == ["2 requests: RuntimeError: no kernel for two"]
    assert sorted(ran) == [1, 2, 3, 4, 5]


def test_nothing_runs_beside_others_if_the_first_run_fails() -> None:
    ran: list[int] = []

    def step(lens: Tensor) -> None:
        ran.append(len(lens))
        raise ValueError

    assert run_ahead(step, batch_of, [1, 2, 3], CPU) == ["3 requests: ValueError: "]
    assert ran == [3]


def test_no_thread_is_left_behind_by_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()
    ran: list[int] = []

    def step(lens: Tensor) -> None:
        ran.append(len(lens))
        if len(lens) < 9:
            begun.set()
            assert go_on.wait(20)

    join, interrupted = threading.Thread.join, []

    def interrupt(thread: threading.Thread, timeout: float | None = None) -> None:
        if not interrupted:
            interrupted.append(1)
            assert begun.wait(20)
            raise KeyboardInterrupt
        go_on.set()
        join(thread, timeout)

    monkeypatch.setattr(ahead.os, "cpu_count", lambda: 1)
    monkeypatch.setattr(threading.Thread, "join", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_ahead(step, batch_of, range(1, 10), CPU)
    assert ran == [9, 1], "what was under way has ended, and nothing new has begun"


class Step(nn.Module):
    def forward(self, lens: Tensor, plan: Tensor | None = None) -> tuple[Tensor]:
        return (lens + 1,)


class Plan:
    handle = torch.zeros(1)

    def update(self, fields: Any) -> None: ...


def order_of(monkeypatch: pytest.MonkeyPatch, graphs: bool = True, **options: Any) -> tuple[list[Any], StepRunner]:
    """What a warm-up does, in order; graphs are pretended."""
    order: list[Any] = []

    def run(step: nn.Module, make: Any, sizes: Any, device: torch.device) -> list[str]:
        assert step is runner.step
        assert make(3)["lens"].shape == (3,)
        order.append(("ahead", tuple(sizes)))
        return ["4 requests: ValueError: why not"]

    monkeypatch.setattr(step_runner, "run_ahead", run)
    options = {"max_requests": 4, "buckets": [1, 2, 4], "mode": "direct", "compiler": "eager", **options}
    runner = StepRunner(Step(), TABLE, device="cpu", **options)
    if graphs:
        runner._uses_graphs = True
        monkeypatch.setattr(runner, "_record", lambda size, views: order.append(size))
        monkeypatch.setattr(runner, "_reserved_bytes", lambda: 0)
        monkeypatch.setattr(runner, "_prime", lambda: None)
    runner.warm_up()
    return order, runner


@pytest.mark.parametrize("mode", ["direct", "reduce-overhead"])
def test_a_warm_up_runs_ahead_of_compiling_and_says_what_failed(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    order, runner = order_of(monkeypatch, mode=mode)
    assert order == [("ahead", (1, 2, 4)), 4, 2, 1]
    said = "an eager run ahead of compiling failed, 4 requests: ValueError: why not"
    assert runner.explain().notes == [said]
    assert said in str(runner.explain())
    assert 0 < runner.explain().ahead_seconds <= runner.explain().compile_seconds


@pytest.mark.parametrize("why", ["turned off", "one bucket", "a plan", "no graphs", "eager", "several processes"])
def test_nothing_runs_ahead(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {
        "turned off": {"ahead": False},
        "one bucket": {"buckets": [4]},
        "a plan": {"plan": lambda fields: Plan()},
        "eager": {"mode": "eager", "graphs": False},
        "no graphs": {"graphs": False},
    }.get(why, {})
    if why == "several processes":
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    order, runner = order_of(monkeypatch, **options)
    assert not [entry for entry in order if isinstance(entry, tuple)]
    assert (runner.explain().notes, runner.explain().ahead_seconds) == ([], 0.0)
