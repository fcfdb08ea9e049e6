"""Causes of lost graphs are named: CPU tensors, unsupported ops, mutated inputs, and the argument behind a recompile.

Run alone: pytest tests/compile/test_diagnosis.py
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from specops.batch import Field, FieldTable
from specops.compile import GraphLost, GraphLostError, StepRunner
from specops.compile.diagnosis import graph_obstacles
from specops.compile.report import cut_graph, graph_partitions, recompile_cause

CPU, META = torch.device("cpu"), torch.device("meta")


@pytest.fixture(scope="module")
def unsafe_op() -> torch.library.Library:
    library = torch.library.Library("specops_test_diagnosis", "DEF")
    library.define("double(Tensor x) -> Tensor", tags=(torch.Tag.cudagraph_unsafe,))
    library.impl("double", lambda x: x * 2, "CompositeExplicitAutograd")
    return library


def test_an_unsafe_op_is_named(unsafe_op: torch.library.Library) -> None:
    def step(x: Tensor) -> Tensor:
        return torch.ops.specops_test_diagnosis.double(x) + 1

    assert graph_obstacles(step, {"x": torch.ones(3)}, CPU) == [
        "unsupported op specops_test_diagnosis.double (tagged cudagraph_unsafe)"
    ]


def test_a_mutated_input_is_named_and_the_callers_is_left_alone() -> None:
    def step(x: Tensor, y: Tensor) -> Tensor:
        y[:2].mul_(2)
        return x + y

    inputs = {"x": torch.ones(3), "y": torch.ones(3)}
    assert graph_obstacles(step, inputs, CPU) == ["mutated input y (by aten.mul_.Tensor)"]
    assert inputs["y"].tolist() == [1, 1, 1]


def test_a_mutated_buffer_is_no_obstacle() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            self.count.add_(x)
            return self.count * 2

    assert graph_obstacles(Counter(), {"x": torch.ones(3)}, CPU) == []


def test_a_cpu_tensor_on_another_device_is_named() -> None:
    def step(x: Tensor) -> Tensor:
        table = torch.arange(4, device="cpu")
        return x + table.to(x.device)

    causes = graph_obstacles(step, {"x": torch.ones(4, device="meta")}, META)
    assert causes[0] == "CPU tensor of shape [4] in aten.arange"
    assert graph_obstacles(step, {"x": torch.ones(4)}, CPU) == []


def test_a_step_that_fails_says_so() -> None:
    def step(x: Tensor) -> Tensor:
        raise RuntimeError("no such luck\nmore")

    assert graph_obstacles(step, {"x": torch.ones(1)}, CPU) == ["it fails eagerly, too: RuntimeError: no such luck"]


def test_reasons_carry_the_causes_and_the_step_is_watched_once(unsafe_op: torch.library.Library) -> None:
    """Graphs are pretended here, so that a reason is asked for; the watching is real."""
    runs = 0

    class Step(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor]:
            nonlocal runs
            runs += 1
            return (torch.ops.specops_test_diagnosis.double(x),)

    table = FieldTable((Field("x", "request", (2,), torch.float32),), 1)
    runner = StepRunner(Step(), table, device="cpu", max_requests=2, mode="direct", compiler="eager")
    views = runner.buffers()
    for _ in range(3):
        assert runner._explained("capture failed: some error", views) == (
            "capture failed: some error (unsupported op specops_test_diagnosis.double (tagged cudagraph_unsafe))"
        )
    assert runs == 1


def test_pieces_of_a_graph_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.utils import counters

    before = graph_partitions()
    assert cut_graph(before) is None
    counters["inductor"]["cudagraph_partitions"] += 1
    assert cut_graph(before) is None
    counters["inductor"]["cudagraph_partitions"] += 2
    assert cut_graph(before) == "the step was cut into 3 pieces, not all of which are graphs"
    counters["inductor"]["cudagraph_partitions"] -= 3


def test_the_argument_that_changed_is_named() -> None:
    class Step(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor]:
            return (x + y.sum(1, keepdim=True),)

    table = FieldTable((Field("x", "request", (2,), torch.float32), Field("y", "request", (3,), torch.float32)), 1)
    for strict in (False, True):
        runner = StepRunner(
            Step(), table, device="cpu", max_requests=2, buckets=[2], mode="direct", compiler="eager", strict=strict
        )
        runner.warm_up()
        # A buffer of another width, as a wrong table would give.
        runner._views[2]["y"] = torch.zeros(2, 5)
        batch = {"x": torch.zeros(2, 2), "y": torch.zeros(2, 3)}
        runner._stage = lambda *args: None
        if strict:
            with pytest.raises(GraphLostError, match=r"argument y changed: .*expected 3, actual 5"):
                runner(batch)
        else:
            with pytest.warns(GraphLost, match="recompiled for 2 requests after warm-up: argument y changed"):
                runner(batch)
        (cause,) = runner.explain().recompiles
        assert cause.startswith("argument y changed: ")


def test_words_without_an_argument_stay_as_they_are() -> None:
    assert recompile_cause("0/0: self.rows == 'last'", ("x", "rows")) == "0/0: self.rows == 'last'"
