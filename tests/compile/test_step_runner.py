"""What a call does before, at and behind a replay, counted; the graphs are pretended and run on the CPU.

Run alone: pytest tests/compile/test_step_runner.py
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from specops.batch import Field, FieldTable, draft_extend_fields
from specops.compile import GraphLost, GraphLostError, StepRunner
from specops.compile.compiled import CompiledStep, argument_guards, own_code, sizes_of_one
from specops.compile.draft_extend import _FIELDS
from specops.compile.report import compiled_graphs
from tests.compile.fakes import FakeGraph, capture

TABLE = FieldTable(
    (
        Field("ids", "token", (), torch.int64, 3),
        Field("lens", "request", (), torch.int32),
        Field("x", "token", (2,), torch.float32),
    ),
    2,
)


class Step(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("total", torch.zeros(1))

    def forward(self, ids: Tensor, lens: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        self.total += 1
        return x.flatten(0, 1) * self.weight + ids.reshape(-1, 1), ids.sum(1) + lens


def expected(batch: dict[str, Tensor], weight: Tensor) -> list[Tensor]:
    count = len(batch["lens"])
    return [batch["x"].reshape(2 * count, 2) * weight + batch["ids"].reshape(-1, 1), batch["ids"].sum(1) + batch["lens"]]


def batch_of(count: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "ids": torch.randint(9, (count, 2), generator=generator),
        "lens": torch.randint(9, (count,), generator=generator).to(torch.int32),
        "x": torch.randn(count, 2, 2, generator=generator),
    }


def runner_of(**options: Any) -> tuple[StepRunner, dict[int, FakeGraph]]:
    options = {"max_requests": 4, "buckets": [1, 2, 4], "mode": "direct", "compiler": "eager", **options}
    runner = StepRunner(Step(), TABLE, device="cpu", **options)
    runner.warm_up()
    return runner, capture(runner)


def test_every_call_replays_the_graph_of_its_bucket_once() -> None:
    runner, graphs = runner_of()
    for graph in graphs.values():
        graph.replays = 0
    for seed, count in enumerate([3, 1, 4, 2, 3, 3, 1]):
        batch = batch_of(count, seed)
        assert all(torch.equal(a, b) for a, b in zip(runner(batch), expected(batch, torch.ones(2)), strict=True))
    assert {size: graph.replays for size, graph in graphs.items()} == {1: 2, 2: 1, 4: 4}
    assert {b.num_requests: b.replays for b in runner.explain().buckets} == {1: 2, 2: 1, 4: 4}


def test_f15_a_smaller_batch_leaves_nothing_of_a_larger_one() -> None:
    runner, graphs = runner_of()
    runner(batch_of(4))
    runner(batch_of(3))
    views = graphs[4].views
    assert views["ids"][3].tolist() == [3, 3]
    assert views["lens"][3].item() == 0
    assert views["x"][3].tolist() == [[0, 0], [0, 0]]


def test_fields_may_come_in_any_order_and_flat() -> None:
    runner, _ = runner_of()
    batch = batch_of(3)
    flat = {"x": batch["x"].flatten(0, 1), "lens": batch["lens"], "ids": batch["ids"].reshape(-1)}
    for given in (batch, flat, dict(reversed(batch.items()))):
        assert torch.equal(runner(given)[0], expected(batch, torch.ones(2))[0])
    assert torch.equal(runner.run([batch[name] for name in TABLE.names])[1], expected(batch, torch.ones(2))[1])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": torch.zeros(3, 2, 3)}, ValueError, r"x must be \[B, 2, 2\]"),
        ({"x": torch.zeros(3, 2, 2, dtype=torch.float64)}, TypeError, "x must be torch.float32"),
        ({"lens": torch.zeros(2, dtype=torch.int32)}, ValueError, "disagree"),
        ({"lens": torch.zeros(3, dtype=torch.int32, device="meta")}, ValueError, "lens is on meta"),
        ({"more": torch.zeros(3)}, ValueError, r"unknown \['more'\]"),
        ({"lens": None, "other": torch.zeros(3)}, ValueError, r"lacks \['lens'\] and has unknown \['other'\]"),
    ],
)
def test_a_batch_of_another_form_is_refused_after_one_that_was_right(
    change: dict[str, Tensor | None], error: type[Exception], message: str
) -> None:
    runner, graphs = runner_of()
    runner(batch_of(3))
    done = graphs[4].replays
    wrong = {name: tensor for name, tensor in {**batch_of(3), **change}.items() if tensor is not None}
    for _ in range(2):
        with pytest.raises(error, match=message):
            runner(wrong)
    assert graphs[4].replays == done


@pytest.mark.parametrize("strict", [False, True])
def test_f26_no_graph_is_replayed_after_a_move(strict: bool) -> None:
    runner, graphs = runner_of(strict=strict)
    runner(batch_of(2))
    done = [graph.replays for graph in graphs.values()]
    runner.step.weight = nn.Parameter(torch.full((2,), 5.0), requires_grad=False)
    # The new record can't be a graph here.
    runner._uses_graphs = False
    batch = batch_of(2, 5)
    if strict:
        with pytest.raises(GraphLostError, match="weight has moved since capture"):
            runner(batch)
    else:
        with pytest.warns(GraphLost, match="weight has moved since capture; recording again"):
            out = runner(batch)
        assert torch.equal(out[0], expected(batch, torch.full((2,), 5.0))[0])
    assert [graph.replays for graph in graphs.values()] == done


def test_f28_outputs_are_fresh_and_views_are_not() -> None:
    runner, graphs = runner_of()
    first = runner(batch_of(2))
    kept = [output.clone() for output in first]
    runner(batch_of(2, 1))
    assert all(torch.equal(a, b) for a, b in zip(first, kept, strict=True))
    runner.outputs = "view"
    views = runner(batch_of(1, 2))
    assert [view.data_ptr() for view in views] == [output.data_ptr() for output in graphs[1].outputs]


def test_a_batch_vouched_for_is_not_staged_again() -> None:
    runner, graphs = runner_of()
    first, second = batch_of(2, 1), batch_of(2, 2)
    runner(first)
    assert torch.equal(runner(second, unchanged=True)[1], expected(first, torch.ones(2))[1]), "it was vouched for"
    graphs[2].views["ids"].fill_(99)
    runner(batch_of(1))
    assert torch.equal(runner(second, unchanged=True)[1], expected(second, torch.ones(2))[1]), "another stood in between"


def test_the_replay_comes_before_outputs_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows the launch runs beside the device; what precedes it does not."""
    runner, _ = runner_of()
    batch = batch_of(2)
    runner(batch)
    order: list[str] = []
    ready = runner._ready[2]
    for name in ("stage", "replay", "hand_over"):
        call = getattr(ready, name)
        monkeypatch.setattr(ready, name, lambda *args, name=name, call=call: (order.append(name), call(*args))[1])
    moved = runner._statics.moved
    monkeypatch.setattr(runner._statics, "moved", lambda: (order.append("moved"), moved())[1])
    runner(batch)
    assert order == ["stage", "moved", "replay", "hand_over"]


def test_the_order_of_a_draft_extend_batchs_fields_is_the_tables() -> None:
    table = draft_extend_fields(2, 8, 4, torch.float32)
    named = type("Batch", (), {name: name for name in table.names})
    assert _FIELDS(named) == table.names


def test_argument_guards_tell_batches_apart_and_leave_the_rest() -> None:
    """A step compiled as torch does by itself; a changed module goes unseen, as it does by a captured graph."""
    step = Step()
    counts: list[tuple[int, int]] = []

    def keep(entries: Any) -> list[bool]:
        kept = argument_guards(entries)
        counts.append((len(kept), sum(kept)))
        return kept

    from torch._dynamo.utils import counters

    before = counters["stats"]["unique_graphs"]
    compiled = torch.compile(own_code(step), backend="eager", fullgraph=True, options={"guard_filter_fn": keep})
    for seed, count in enumerate([4, 1, 3, 2, 1, 4]):
        batch = batch_of(count, seed)
        views = {name: tensor.clone() for name, tensor in batch.items()}
        for view in views.values():
            if count > 1:
                torch._dynamo.mark_dynamic(view, 0)
        with torch.no_grad():
            out = compiled(**views)
        assert all(torch.equal(a, b) for a, b in zip(out, expected(batch, torch.ones(2)), strict=True))
    assert counters["stats"]["unique_graphs"] - before == 2
    assert all(3 <= kept <= 6 < given for given, kept in counts), counts


class AsksForOne(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (x * 2 if x.shape[0] == 1 else x * 3,)


def test_one_graph_serves_every_batch_size() -> None:
    before = compiled_graphs()
    runner = StepRunner(Step(), TABLE, device="cpu", max_requests=4, buckets=[1, 2, 4], mode="direct", compiler="eager")
    assert runner.warm_up().compiled_graphs == 1
    for count in (1, 4, 3, 1, 2):
        batch = batch_of(count, count)
        assert all(torch.equal(a, b) for a, b in zip(runner(batch), expected(batch, torch.ones(2)), strict=True))
    assert compiled_graphs() - before == 1
    assert runner.explain().recompiles == []
    assert ", 1 compiled graph in " in str(runner.explain())


def test_a_step_that_asks_whether_there_is_one_request_is_told() -> None:
    table = FieldTable((Field("x", "request", (), torch.float32),), 1)
    runner = StepRunner(
        AsksForOne(), table, device="cpu", max_requests=4, buckets=[1, 2, 4], mode="direct", compiler="eager"
    )
    assert runner.warm_up().compiled_graphs == 2
    for count, factor in ((1, 2), (3, 3), (1, 2)):
        assert runner({"x": torch.ones(count)})[0].tolist() == [factor] * count


def test_what_cannot_be_compiled_for_any_size_is_compiled_for_one_apart() -> None:
    attempts = []

    def picky(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        attempts.append(torch.fx.experimental._config.backed_size_oblivious)
        if attempts[-1]:
            raise RuntimeError("slices of such a size are beyond me")
        return graph

    step = CompiledStep(Step(), picky)
    for count in (4, 1, 3):
        batch = batch_of(count)
        for tensor in batch.values():
            if count > 1:
                torch._dynamo.mark_dynamic(tensor, 0)
        found = step(**batch)
        assert all(torch.equal(a, b) for a, b in zip(found, expected(batch, torch.ones(2)), strict=True))
    assert attempts == [True, False, False]


def test_requests_are_counted_by_the_argument_that_is_named() -> None:
    seen = []

    def backend(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        seen.append(torch.fx.experimental._config.backed_size_oblivious)
        return graph

    class Rows(nn.Module):
        def forward(self, x: Tensor, lens: Tensor) -> tuple[Tensor]:
            return (x * 2 + lens.sum(),)

    step = CompiledStep(Rows(), backend, counted_by="lens")
    for count in (1, 2):
        step(x=torch.ones(5), lens=torch.ones(count))
    assert seen == [False, True]


@pytest.mark.parametrize(
    ("squeezes", "graphs"),
    [
        (lambda x: x.squeeze(0), 2),
        (lambda x: torch.squeeze(x, dim=-2), 2),
        (lambda x: x.squeeze((0, 1)), 2),
        (lambda x: x.clone().squeeze_(0), 2),
        (torch.squeeze, 2),
        (lambda x: x[None].squeeze(0), 1),
        (lambda x: x[:, :1].squeeze(1), 1),
    ],
)
def test_a_squeeze_that_means_another_thing_for_one_request_is_compiled_apart(squeezes: Any, graphs: int) -> None:
    class Squeezes(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor]:
            return (squeezes(x).sum(0),)

    before, code = compiled_graphs(), CompiledStep(Squeezes(), "eager")
    for count in (3, 1, 2):
        x = torch.randn(count, 6, generator=torch.Generator().manual_seed(count))
        torch._dynamo.mark_static(x, 1)
        if count > 1:
            torch._dynamo.mark_dynamic(x, 0)
        assert torch.equal(code(x=x)[0], squeezes(x.clone()).sum(0))
    assert compiled_graphs() - before == graphs


def test_a_squeeze_that_is_met_later_is_compiled_as_torch_does_by_itself() -> None:
    class Squeezes(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor]:
            return ((x.squeeze(0) if x.shape[0] < 3 else x * 2).sum(0),)

    code = CompiledStep(Squeezes(), "eager")
    for count in (4, 2, 1, 3):
        x = torch.randn(count, 6, generator=torch.Generator().manual_seed(count))
        assert torch.equal(code(x=x)[0], Squeezes()(x)[0])


def test_a_step_that_cannot_be_compiled_says_why() -> None:
    class Breaks(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor]:
            torch._dynamo.graph_break()
            return (x,)

    with pytest.raises(torch._dynamo.exc.Unsupported, match="graph_break"):
        CompiledStep(Breaks(), "eager")(x=torch.ones(2))
    assert torch.fx.experimental._config.backed_size_oblivious is False


@pytest.mark.parametrize("shared", [False, True])
def test_threads_that_compile_at_once_leave_torchs_settings_as_they_were(
    shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shared:
        # Settings of some releases are those of all threads.
        monkeypatch.setattr(torch.fx.experimental, "_config", SimpleNamespace(backed_size_oblivious=False))
    config: Any = torch.fx.experimental._config
    inside, out = threading.Event(), threading.Event()

    def stays_longer() -> None:
        with sizes_of_one():
            inside.set()
            assert out.wait(60)
            seen.append(config.backed_size_oblivious)
        seen.append(config.backed_size_oblivious)

    seen: list[bool] = []
    other = threading.Thread(target=stays_longer)
    with sizes_of_one():
        other.start()
        assert inside.wait(60)
    out.set()
    other.join()
    assert seen == [True, False]
    assert config.backed_size_oblivious is False


def test_guards_stay_where_those_of_arguments_are_not_found() -> None:
    class Entry:
        guard_type, name = "TENSOR_MATCH", "L['other']"

    assert argument_guards([Entry(), Entry()]) == [True, True]
