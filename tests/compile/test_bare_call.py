"""torch's own graphs called without torch.compile: what is called, what is kept alive, what happens when it can't be.

Graphs are pretended, the compiler only traces. Run alone: pytest tests/compile/test_bare_call.py
"""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton", reason="the staging kernel is a Triton kernel")

from specops.batch import Field, FieldTable
from specops.compile import GraphLost, StepRunner, launch, ready, step_runner
from specops.compile.bare_call import TorchGraph, torch_graph
from specops.compile.ready import HandOverLeft
from specops.compile.staging import FusedCopy, FusedStaging
from tests.compile.fakes import CallCounter, FakeDriver, as_library, kernel


class Step(nn.Module):
    """Results in another order than they are computed in, one of them twice; borrows a weight, counts its runs."""

    def __init__(self, layers: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers)).requires_grad_(False)
        self.register_buffer("runs", torch.zeros(1))
        self._shared = (nn.Linear(4, 4).requires_grad_(False),)

    def forward(self, **views: Tensor) -> tuple[Tensor, ...]:
        x: Any = sum(views.values())
        self.runs.add_(1)
        for layer in self.layers:
            x = layer(x)
        y = self._shared[0](x)
        return y, x, y


def table_of(num_fields: int) -> FieldTable:
    return FieldTable(tuple(Field(f"f{i}", "request", (4,), torch.float32) for i in range(num_fields)), 1)


def warm_runner(
    patch: pytest.MonkeyPatch, step: nn.Module | None = None, num_fields: int = 2, **options: Any
) -> tuple[StepRunner, FakeDriver]:
    table = table_of(num_fields)
    options = {"max_requests": 4, "buckets": [1, 2, 4], "compiler": "eager", **options}
    runner = StepRunner(step or Step(), table, device="cpu", mode="reduce-overhead", **options)
    runner._uses_graphs = True
    driver = FakeDriver([16] * num_fields, [b"\0"] * num_fields)
    for module in (launch, ready):
        patch.setattr(module, "raw_stream", lambda index: 5)
    patch.setattr(launch, "_driver", lambda: as_library(driver))
    # Functions without Python, as torch's are.
    patch.setattr(launch, "device_functions", lambda: ((-1).__index__, [5].__getitem__))
    patch.setattr(runner, "_reserved_bytes", lambda: 0)
    patch.setattr(runner, "_prime", lambda: None)
    runner._stage = table.copy_in
    runner.warm_up()
    runner._staged = None
    fused = FusedStaging(table)
    fused.copy._kernel = kernel()
    runner._stage = fused
    return runner, driver


class Trees:
    """Torch's trees of graphs: they know what ran last, and graphs leave their results in memory of their own."""

    def __init__(self, patch: pytest.MonkeyPatch, step: Step) -> None:
        self.current_node: Any = None
        self.replayed: list[int] = []
        self.step, self.runner = step, None
        self.wrong: int | None = None
        record = StepRunner._record_by_torch

        def recording(runner: StepRunner, *arguments: Any) -> None:
            self.runner = runner
            record(runner, *arguments)

        patch.setattr(StepRunner, "_record_by_torch", recording)
        patch.setattr(step_runner, "torch_graph", self.graph_of)

    def graph_of(self, outputs: Sequence[Tensor]) -> TorchGraph:
        size, memory, self.current_node = outputs[0].shape[0], [output.clone() for output in outputs], object()

        def replay() -> None:
            assert self.runner is not None
            self.replayed.append(size)
            with torch.no_grad():
                results = self.step(**self.runner._bucket_views(size))
                for part, result in list(zip(memory, results, strict=True))[size == self.wrong :]:
                    part.copy_(result)

        return TorchGraph(replay, memory, self, self.current_node)

    def watch(self, runner: StepRunner) -> None:
        """A call of the compiled code makes its graph the current one."""
        self.replayed.clear()
        for bare in runner._bare.values():
            assert bare.recorded is not None
            code, node = bare.code, bare.recorded.node

            def call(*inputs: Any, code: Any = code, node: Any = node) -> Sequence[Any]:
                self.current_node = node
                outputs: Sequence[Any] = code(*inputs)
                return outputs

            bare.code = call


def batch_of(count: int, seed: int = 0, num_fields: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(count, 4, generator=generator) for _ in range(num_fields)]


@pytest.mark.parametrize("grad", [False, True])
def test_calls_behind_warm_up_are_calls_of_the_code_alone(grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step()
    runner, driver = warm_runner(monkeypatch, step)
    assert runner.explain().captured
    monkeypatch.setattr(runner, "_compiled", None)
    monkeypatch.setattr(runner, "_run_compiled", None)
    with torch.set_grad_enabled(grad):
        for seed, count in enumerate([3, 3, 1, 4, 2, 3, 1]):
            batch = batch_of(count, seed)
            runs = int(step.runs)
            out = runner.run(batch)
            assert int(step.runs) == runs + 1
            hidden = step.layers[0](batch[0] + batch[1])
            wanted = [step._shared[0](hidden), hidden, step._shared[0](hidden)]
            torch.testing.assert_close(out, wanted)
            assert not any(tensor.requires_grad for tensor in out)
    assert {b.num_requests: b.replays for b in runner.explain().buckets} == {1: 2, 2: 1, 4: 4}
    assert len(driver.launches) == 7
    assert runner.explain().recompiles == []


@pytest.mark.parametrize("outputs", ["copy", "view"])
def test_a_recorded_graph_is_replayed_while_nothing_else_has_run(outputs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step()
    trees = Trees(monkeypatch, step)
    runner, _ = warm_runner(monkeypatch, step, outputs=outputs)
    trees.watch(runner)
    expected: list[int] = []

    def check(count: int, by_graph: bool, seed: int) -> None:
        batch = batch_of(count, seed)
        out = runner.run(batch)
        hidden = step.layers[0](batch[0] + batch[1])
        torch.testing.assert_close(out, [step._shared[0](hidden), hidden, step._shared[0](hidden)])
        expected.extend([runner._ready[count].bucket] * by_graph)
        assert trees.replayed == expected
        memory = {tensor.data_ptr() for tensor in runner._bare[runner._ready[count].bucket].recorded.outputs}  # type: ignore
        assert bool(memory & {tensor.data_ptr() for tensor in out}) == (by_graph and outputs == "view")

    # The smallest bucket was warmed up last. Graphs of other buckets may only be what ran last where outputs are copied.
    check(1, True, 0)
    check(3, outputs == "copy", 1)
    check(4, outputs == "copy" or runner._ready[3].bucket == 4, 2)
    check(4, True, 3)
    # Somebody else's graph has run, and its results may be alive.
    trees.current_node = object()
    check(4, False, 4)
    check(3, True, 5)
    # Torch has dropped its graphs.
    trees.current_node = None
    check(2, False, 6)


def test_a_graph_that_leaves_something_else_is_not_replayed_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step()
    trees = Trees(monkeypatch, step)
    # One of its outputs is not where it is looked for.
    trees.wrong = 2
    runner, _ = warm_runner(monkeypatch, step)
    assert {size: bare.recorded is not None for size, bare in runner._bare.items()} == {1: True, 2: False, 4: True}
    trees.replayed.clear()
    batch = batch_of(2)
    hidden = step.layers[0](batch[0] + batch[1])
    torch.testing.assert_close(runner.run(batch), [step._shared[0](hidden), hidden, step._shared[0](hidden)])
    assert trees.replayed == []


def test_what_a_replay_leaves_is_compared_to_the_bit() -> None:
    left = [
        torch.tensor([1.0, float("nan"), 0.0, -0.0]),
        torch.tensor([[True, False]]),
        torch.tensor([3, 0], dtype=torch.int32),
        torch.randn(4, 3, dtype=torch.bfloat16).t(),
    ]

    def leaves(written: slice, *more: Tensor) -> bool:
        expected = [*(tensor.clone() for tensor in left), *more]
        memory = [tensor.clone() for tensor in expected]

        def replay() -> None:
            for part, tensor in list(zip(memory, expected, strict=True))[written]:
                part.copy_(tensor)

        return TorchGraph(replay, memory, None, None).leaves(expected)

    assert leaves(slice(None))
    for place in range(len(left)):
        assert not leaves(slice(place)), "outputs from here on are not written"
    assert not leaves(slice(None), torch.zeros(2).to(torch.float8_e4m3fn))


def test_only_a_cuda_graph_of_torch_is_one() -> None:
    assert torch_graph([torch.zeros(2)]) is None
    assert torch_graph([]) is None


def test_each_call_marks_a_new_step(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.cudagraph_trees import MarkStepBox

    runner, _ = warm_runner(monkeypatch)
    before = MarkStepBox.mark_step_counter
    for _ in range(3):
        runner.run(batch_of(2))
    assert MarkStepBox.mark_step_counter == before - 3


def test_python_functions_before_the_code_are_few_whatever_the_number_of_fields_and_weights() -> None:
    def calls(num_fields: int, layers: int) -> int:
        with pytest.MonkeyPatch.context() as patch:
            runner, driver = warm_runner(patch, Step(layers), num_fields)
            batch = batch_of(2, num_fields=num_fields)
            runner.run(batch)
            assert runner._short[2].native, "it needs a C compiler and Python's headers"
            bare, code = runner._bare[2], runner._bare[2].code
            counted = CallCounter(driver)
            counts: list[int] = []

            def replayed(*inputs: Any) -> Sequence[Any]:
                counts.append(counted.count)
                return code(*inputs)

            bare.code = replayed
            with torch.no_grad(), counted:
                runner.run(batch)
            return counts[0] - counted.inside

    few = calls(2, 1)
    assert calls(8, 40) == few
    # run; the check of addresses, which CUDA builds have in C; replay, trees, both of mark_step_begin, the call, the code.
    assert few <= 9


def test_nothing_is_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step()
    runner, _ = warm_runner(monkeypatch, step)
    out = runner.run(batch_of(3))
    held = [weakref.ref(tensor) for tensor in (step.layers[0].weight, *out)]
    graph_outputs = runner._ready[3].hand_over
    assert isinstance(graph_outputs, HandOverLeft)
    assert graph_outputs.left == ()
    assert runner._last_call.seen is None
    del out
    step.layers[0].weight = nn.Parameter(torch.ones(4, 4), requires_grad=False)
    gc.collect()
    assert [reference() for reference in held] == [None] * len(held)


@pytest.mark.parametrize("what", ["own", "borrowed", "borrowed module"])
def test_f26_a_weight_that_moves_is_recorded_again(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step()
    runner, _ = warm_runner(monkeypatch, step)
    for _ in range(2):
        runner.run(batch_of(2))
    if what == "own":
        step.layers[0].weight.data = step.layers[0].weight.data.clone()
    elif what == "borrowed":
        step._shared[0].weight.data = step._shared[0].weight.data.clone()
    else:
        step._shared = (nn.Linear(4, 4).requires_grad_(False),)
        gc.collect()
    # As at the warm-up before: Triton can't launch here.
    runner._stage = runner.table.copy_in
    with pytest.warns(GraphLost, match=r"(weight|_shared) has moved since capture; recording again"):
        out = runner.run(batch_of(2))
    x = step.layers[0](sum(batch_of(2)))
    torch.testing.assert_close(out, [step._shared[0](x), x, step._shared[0](x)])


def test_when_torch_has_reset_its_graphs_it_compiles_again_and_that_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step()
    runner, _ = warm_runner(monkeypatch, step)
    expected = runner.run(batch_of(2))

    def gone(*inputs: Any) -> Any:
        raise AssertionError("Running CUDAGraph after shutdown")

    torch._dynamo.reset()
    runner._bare[2].code = gone
    with pytest.warns(GraphLost, match="recompiled for 2 requests after warm-up"):
        torch.testing.assert_close(runner.run(batch_of(2)), expected)
    torch.testing.assert_close(runner.run(batch_of(2)), expected)
    assert len(runner.explain().recompiles) == 1


def test_a_bucket_without_a_graph_goes_through_torch_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    from specops.compile import report

    skipped = iter(range(100))
    monkeypatch.setattr(report, "skipped_graphs", lambda: next(skipped))
    with pytest.warns(GraphLost, match="no CUDA graph for"):
        runner, _ = warm_runner(monkeypatch)
    assert [runner.run(batch_of(3))[0].shape for _ in range(3)] == [(3, 4)] * 3
    assert not runner._short


class Odd(Step):
    """Reads a tensor that is no parameter, no buffer and no argument."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.ones(4)

    def forward(self, **views: Tensor) -> tuple[Tensor, ...]:
        return (super().forward(**views)[0] + self.bias,)


def test_an_input_that_has_no_name_leaves_calls_to_torch_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Odd()
    runner, _ = warm_runner(monkeypatch, step)
    assert not runner._bare
    for seed in range(3):
        batch = batch_of(3, seed)
        torch.testing.assert_close(runner.run(batch), [step._shared[0](step.layers[0](batch[0] + batch[1])) + 1])


def test_outputs_that_torch_leaves_are_copied_by_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver([16, 8], [b"\0"] * 2)
    monkeypatch.setattr(launch, "_driver", lambda: as_library(driver))
    monkeypatch.setattr(ready, "raw_stream", lambda index: 5)
    copy = FusedCopy([16, 8])
    copy._kernel = kernel()
    hand_over = HandOverLeft(3, 4, copy)
    for seed in range(3):
        if seed != 1:
            graph = [torch.randn(4, 4), torch.randn(4, 2)]
        hand_over.left = [tensor[:] for tensor in graph]
        out = hand_over(False)
        assert all(torch.equal(got, tensor[:3]) for got, tensor in zip(out, graph, strict=True))
        assert not {tensor.data_ptr() for tensor in out} & {tensor.data_ptr() for tensor in graph}
    assert len(driver.launches) == 3
    hand_over.left = graph
    assert [view.data_ptr() for view in hand_over(True)] == [tensor.data_ptr() for tensor in graph]


TREES = """
    import ctypes, gc, sys, threading
    import torch
    from specops.compile.bare_call import own_graph_trees

    names = ("tree_manager_containers", "tree_manager_locks")
    # torch 2.11 stashes without a reference of its own, later ones take one. They do as 2.11 here.
    stash, probe = torch._C._stash_obj_in_tls, object()
    before = sys.getrefcount(probe)
    stash("a probe", probe)
    takes = sys.getrefcount(probe) > before
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(probe))

    def stash_as_before(name, item):
        stash(name, item)
        if takes:
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(item))

    torch._C._stash_obj_in_tls = stash_as_before
    held = []

    def work():
        assert "torch._inductor.cudagraph_trees" not in sys.modules
        own_graph_trees()
        held.extend(torch._C._get_obj_in_tls(name) for name in names)
        own_graph_trees()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    del thread
    gc.collect()
    # The list, and getrefcount's own argument: less means that the end of the thread gave up what it did not hold.
    counts = [sys.getrefcount(held[index]) for index in range(len(names))]
    assert all(count >= 2 for count in counts), counts
    print(counts, [type(item).__name__ for item in held])
    from torch._inductor import cudagraph_trees
    own_graph_trees()
    assert cudagraph_trees.get_obj(cudagraph_trees.local, names[0]) == {}
    assert type(held[0]) is dict
    held.clear()
    gc.collect()
    print("alive")
"""


def test_a_thread_that_ends_takes_no_reference_with_it_that_is_not_its_own() -> None:
    """torch stashes what belongs to the thread that imports its trees of graphs, without a reference of its own."""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(TREES)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("alive\n")
