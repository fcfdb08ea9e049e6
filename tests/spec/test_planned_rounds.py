"""Rounds on a backend that plans on the host: every call planned, for every run, with its lengths. Runs without a GPU.

The toy backend reads lengths and pages from its plan alone, as FlashInfer's kernels do, so a round planned for other lengths
than its own gives other ids than transformers.

OMP_NUM_THREADS=1 pytest tests/spec/test_planned_rounds.py
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from specops.compile.diagnosis import graph_obstacles
from specops.compile.plans import planned_backend
from specops.compile.report import GraphLost
from specops.compile.step_runner import StepRunner
from specops.ops import planning, reference, register_backend
from specops.ops.backends import _BACKENDS
from specops.ops.capabilities import FEATURES
from specops.ops.planning import HostStep, Plan
from specops.spec import Engine, SamplingParams, SpecConfig
from specops.spec.plans import RoundPlan, round_calls
from tests.spec.toys import Shadow, greedy, small_llama, target_of, untrained_head

TOY = "toy_planned"
COUNT = 9
PROMPTS = [[1, 2, 3, 4, 5], [7] * 13, [9, 8]]
CONFIGS = {
    "plain": None,
    "chain": SpecConfig(3),
    "tree": SpecConfig(3, 2, 6),
    "small tree": SpecConfig(2, 2, 4),
    "one step": SpecConfig(1, 2, 3),
}
# Rows a request and keys behind the committed ones, of each different call of a round; by hand from the loop's description.
CALLS = {
    "plain": [(1, 1)],
    "chain": [(1, 1), (1, 2), (4, 4)],
    "tree": [(2, 2), (2, 4), (6, 6)],
    "small tree": [(2, 2), (4, 4)],
    "one step": [(3, 3)],
}


class Schedule:
    """A kernel of the toy: what it was scheduled for last."""

    step: HostStep

    def schedule(self, step: HostStep) -> None:
        self.step = step


class ToyPlan(Plan):
    """Counts its updates."""

    log: list[tuple[int, int, list[int]]]

    def update(self, page_table: Tensor, seq_lens: Tensor, layout: Any, **options: Any) -> None:
        super().update(page_table, seq_lens, layout, **options)
        assert self.step is not None
        ToyPlan.log.append((id(self), layout.max_query_len, self.step.seq_lens.tolist()))


def toy(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    *,
    layout: Any,
    plan: Tensor | None = None,
    **features: Any,
) -> Tensor:
    if plan is None:
        # Prefill alone plans on the spot.
        assert not layout.is_uniform or layout.max_query_len == 1
        return reference.mha(q, k_cache, v_cache, page_table, seq_lens, layout=layout, **features)
    found = planning.plan_of(plan, TOY, "mha", page_table, seq_lens, layout, q.shape[0], k_cache.shape[1])
    step = found.kernel((q.shape[1:], features.get("window")), lambda owner: Schedule()).step
    assert step.uniform_width == layout.max_query_len
    assert torch.equal(step.seq_lens, seq_lens), "planned for other lengths than the call's"
    counts = step.page_start.diff()
    table = torch.zeros_like(page_table)
    for request, count in enumerate(counts.tolist()):
        first = int(step.page_start[request])
        table[request, :count] = found.page_indices[first : first + count]
    return reference.mha(q, k_cache, v_cache, table, step.seq_lens, layout=layout, **features)


@pytest.fixture(scope="module", autouse=True)
def _registered() -> Iterator[None]:
    declared = {"device_types": ("cpu",), "features": FEATURES, "needs_plan": True, "plan": functools.partial(ToyPlan)}
    register_backend(TOY, **declared)(toy)
    yield
    _BACKENDS.pop(("mha", TOY))


@pytest.fixture(autouse=True)
def _traced_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled steps are traced, and no code is generated: no kernel is under test."""
    monkeypatch.setitem(StepRunner.__init__.__kwdefaults__, "compiler", "eager")
    ToyPlan.log = []


@pytest.fixture(scope="module")
def world() -> dict[str, Any]:
    judge = small_llama()
    target = target_of(judge)
    return {
        "target": target,
        "shadow": Shadow(target),
        "head": untrained_head(target),
        "expected": [greedy(judge, prompt, COUNT) for prompt in PROMPTS],
    }


def engine(world: dict[str, Any], shape: str, mode: str = "direct", draft: str = "shadow", **options: Any) -> Engine:
    """An engine on the toy."""
    for name in ("target", "head"):
        world[name].set_backend(TOY)
    world["shadow"].model.set_backend(TOY)
    options = {"max_requests": 2, "max_context": 64, "page_size": 4, "pack_weights": False, **options}
    config = CONFIGS[shape]
    return Engine(world["target"], None if config is None else world[draft], config, mode=mode, **options)


@pytest.mark.filterwarnings("ignore:toy_planned schedules")
@pytest.mark.parametrize(
    ("shape", "mode"),
    [
        *((shape, "eager") for shape in ("plain", "chain", "tree", "one step")),
        ("plain", "direct"),
        ("small tree", "reduce-overhead"),
    ],
)
def test_ids_equal_those_of_transformers(world: dict[str, Any], shape: str, mode: str) -> None:
    run = engine(world, shape, mode, strict=True)
    requests = run.generate(PROMPTS, max_new_tokens=COUNT)
    assert [r.tokens for r in requests] == world["expected"]
    if mode != "eager":
        (runner,) = run.runners.values()
        assert runner.explain().recompiles == []
        assert runner.explain().compiled_graphs <= 2


@pytest.mark.filterwarnings("ignore:toy_planned schedules")
@pytest.mark.parametrize(
    ("shape", "mode", "draft"),
    [("chain", "eager", "head"), ("one step", "eager", "shadow"), ("small tree", "direct", "shadow")],
)
def test_split_rounds_are_planned_step_by_step(world: dict[str, Any], shape: str, mode: str, draft: str) -> None:
    run = engine(world, shape, mode, draft, split=True)
    requests = run.generate(PROMPTS, max_new_tokens=COUNT)
    assert [r.tokens for r in requests] == world["expected"]
    planned = {rows for _, rows, _ in ToyPlan.log}
    assert planned == {rows for rows, _ in CALLS[shape]}


@pytest.mark.filterwarnings("ignore:toy_planned schedules")
@pytest.mark.parametrize("shape", ["plain", "small tree"])
def test_every_run_plans_each_call_once_with_committed_lengths_and_padding(world: dict[str, Any], shape: str) -> None:
    run = engine(world, shape, buckets=[1, 3], max_requests=3)
    run.warm_up()
    calls = CALLS[shape]
    assert [(rows, lens) for _, rows, lens in ToyPlan.log] == [(rows, [0] * size) for size in (3, 1) for rows, _ in calls], (
        "the warm-up plans its padded batch, largest bucket first"
    )
    first, second = run.add(PROMPTS[0], max_new_tokens=COUNT), run.add(PROMPTS[1], max_new_tokens=4)
    while run.has_work:
        ToyPlan.log.clear()
        active = [request for request in (first, second) if not request.finished]
        joining = [request for request in active if not request.tokens]
        # The last token of a request is not in the cache before the round that reads it.
        committed = [len(r.prompt) + (0 if r in joining else len(r.tokens) - 1) for r in active]
        run.step()
        if len(active) == 2:
            committed.append(-100)
        expected = [(rows, [max(0, lens + ahead) for lens in committed]) for rows, ahead in calls]
        assert [(rows, lens) for _, rows, lens in ToyPlan.log] == expected
    assert len(first.tokens) == COUNT


@pytest.mark.filterwarnings("ignore:toy_planned schedules")
def test_lengths_shrink_when_a_row_is_handed_to_a_shorter_request(world: dict[str, Any]) -> None:
    run = engine(world, "small tree", max_requests=1)
    lens = []
    for prompt, expected in zip(PROMPTS, world["expected"], strict=True):
        ToyPlan.log.clear()
        assert run.generate([prompt], max_new_tokens=COUNT)[0].tokens == expected
        lens.append([seq_lens[0] for _, rows, seq_lens in ToyPlan.log if rows == 4 and seq_lens[0]])
    assert lens[1][-1] > lens[2][0], "a plan that kept the longer request's lengths would have been found out"
    assert all(each == sorted(each) for each in lens)


@pytest.mark.filterwarnings("ignore:toy_planned schedules")
def test_sampling_and_greedy_rounds_share_their_plans(world: dict[str, Any]) -> None:
    run = engine(world, "chain", "eager", max_requests=2)
    sampling = [SamplingParams(temperature=0.8, seed=1), SamplingParams()]
    requests = run.generate(PROMPTS[:2], max_new_tokens=COUNT, sampling=sampling)
    assert requests[1].tokens == world["expected"][1]
    assert set(run.runners) == {"round", "round_sampled"}
    run.generate(PROMPTS[:2], max_new_tokens=4)
    assert len({plan for plan, _, lens in ToyPlan.log if len(lens) == 2}) == len(CALLS["chain"])


@pytest.mark.filterwarnings("ignore:toy_planned schedules")
def test_a_round_recorded_again_in_mid_flight_is_planned_again(world: dict[str, Any]) -> None:
    run = engine(world, "chain", max_requests=1)
    request = run.add(PROMPTS[0], max_new_tokens=COUNT)
    for _ in range(2):
        run.step()
    weight = next(iter(world["target"].parameters()))
    weight.data = weight.data.clone()
    with pytest.warns(GraphLost, match="recording again"):
        run.step()
    while not request.finished:
        run.step()
    assert request.tokens == world["expected"][0]


def test_a_round_with_one_planned_model_plans_that_one(world: dict[str, Any]) -> None:
    with pytest.warns(UserWarning, match="toy_planned schedules its kernels on the host"):
        run = engine(world, "tree")
    world["shadow"].model.set_backend("auto")
    calls = round_calls(world["target"], world["shadow"], CONFIGS["tree"])
    assert (calls.draft, calls.extend, [call.rows for call in calls.all]) == ((), None, [6])
    world["target"].set_backend("auto")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = Engine(world["target"], world["shadow"], CONFIGS["tree"], max_requests=1, max_context=64)
    assert run.rounds._plan is None
    world["shadow"].model.set_backend(TOY)
    calls = round_calls(world["target"], world["shadow"], CONFIGS["tree"])
    assert calls.verify is None
    assert [(call.rows, call.ahead) for call in calls.all] == CALLS["tree"]


@pytest.mark.filterwarnings("ignore:toy_planned schedules")
def test_what_keeps_a_planned_step_out_of_a_graph_is_looked_for_with_its_plan(world: dict[str, Any]) -> None:
    """A copy of a handle would name no plan, and the step would fail for that alone."""
    (runner,) = engine(world, "one step", "eager", max_requests=1).runners.values()
    fields = runner.table.allocate(1, torch.device("cpu"))
    assert graph_obstacles(runner.step, {**fields, **runner._planned(fields)}, torch.device("cpu")) == []


def test_a_plan_that_is_not_updated_is_found_out(world: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy notices what these tests are about."""
    with pytest.warns(UserWarning, match="schedules its kernels"):
        run = engine(world, "chain", max_requests=1)
    run.warm_up()
    run.add(PROMPTS[0])
    monkeypatch.setattr(RoundPlan, "update", lambda self, fields: None)
    with pytest.raises(AssertionError, match="planned for other lengths"):
        run.step()


def test_a_model_without_attention_layers_is_searched(world: dict[str, Any]) -> None:
    world["shadow"].model.set_backend(TOY)
    assert not hasattr(world["shadow"], "attention_layers")
    assert planned_backend(world["shadow"], "mha") == TOY
