"""The draft-extend runner: padding, shrinking batches, stale buffers, lost graphs; judged request by request, unpadded.

Here the compiled modes trace and guard but do not generate code; tests/gpu runs the same with inductor and CUDA graphs.
Run alone: pytest tests/compile/test_draft_extend.py
"""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

from specops.batch import DraftExtendBatch
from specops.compile import GraphLost, GraphLostError
from tests.compile.toys import HIDDEN, MAX_PAGES, PAGE, VOCAB, WIDTH, batch_of, fill, plain, runner_for, tiny_draft

MODES = ["eager", "direct", "reduce-overhead"]
COMPILED = ["direct", "reduce-overhead"]


def check(runner, draft, batch: DraftExtendBatch) -> None:
    fill(draft)
    expected = plain(draft, batch)
    fill(draft)
    out = runner(batch)
    torch.testing.assert_close(out.next_token_logits, expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(out.hidden_states, expected[1], rtol=1e-4, atol=1e-5)


def poison(runner) -> None:
    """Whatever stood in the static buffers must not matter."""
    for name, buffer in runner.runner.buffers().items():
        buffer.fill_(float("nan") if buffer.is_floating_point() else {"page_table": 7, "seq_lens": 63}.get(name, 3))


@pytest.mark.parametrize("mode", MODES)
def test_f03_every_accepted_length_gives_what_packing_gives(mode: str) -> None:
    draft = tiny_draft()
    check(runner_for(draft, mode), draft, batch_of([14, 20, 9], [1, 6, 3]))


@pytest.mark.parametrize("mode", MODES)
def test_f15_f16_batches_shrink_and_grow_over_poisoned_buffers(mode: str) -> None:
    draft = tiny_draft(layer_windows=(8,))
    runner = runner_for(draft, mode)
    runner.warm_up()
    for step, lens in enumerate([[63, 63, 63, 63], [30, 12, 41], [25, 50], [9], [7, 8], [33, 6, 60], [64, 10, 20, 31]]):
        poison(runner)
        check(runner, draft, batch_of(lens, [1 + (step + i) % WIDTH for i in range(len(lens))], seed=step))


@pytest.mark.parametrize("mode", MODES)
def test_f23_every_size_is_served_without_a_recompile_or_a_warning(mode: str) -> None:
    draft = tiny_draft(num_pages=200)
    runner = runner_for(draft, mode, max_requests=10, buckets=range(1, 11))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = runner.warm_up()
        for size in (2, 4, 1, 10, 3, 9, 5, 6, 7, 8):
            check(runner, draft, batch_of([10 + size] * size, [2] * size, seed=size))
    assert report.compiled_graphs == (mode != "eager")
    assert report.recompiles == []
    assert report.eager_calls == 0


@pytest.mark.parametrize("mode", COMPILED)
def test_f17_f18_f31_padding_writes_no_page_and_reads_none(mode: str) -> None:
    draft = tiny_draft(num_pages=5)
    runner = runner_for(draft, mode, max_pages=3)
    runner.warm_up()
    fill(draft)
    batch = batch_of([9], [3])
    table = torch.tensor([[3, 1, 4]], dtype=torch.int32)
    batch = DraftExtendBatch(batch.input_ids, batch.hidden_states, batch.seq_lens, batch.accept_lens, table)
    before = [pages.clone() for cache in draft.caches for pages in (cache.k, cache.v)]
    runner.runner.buckets = (4,)
    runner(batch)
    own = {(3, 3), (1, 0), (1, 1), (1, 2), (1, 3), (4, 0)}
    for old, new in zip(before, [p for c in draft.caches for p in (c.k, c.v)], strict=True):
        changed = {tuple(at) for at in (old != new).flatten(2).any(2).nonzero().tolist()}
        assert changed == own


@pytest.mark.parametrize("mode", MODES)
def test_f31_an_idle_step_leaves_the_pool_as_it_was(mode: str) -> None:
    draft = tiny_draft()
    runner = runner_for(draft, mode)
    fill(draft)
    before = [pages.clone() for cache in draft.caches for pages in (cache.k, cache.v)]
    runner.warm_up()
    empty = batch_of([], [])
    out = runner(empty)
    assert out.next_token_logits.shape == (0, VOCAB)
    assert out.hidden_states.shape == (0, HIDDEN)
    for old, new in zip(before, [p for c in draft.caches for p in (c.k, c.v)], strict=True):
        assert torch.equal(old, new)


@pytest.mark.parametrize("mode", COMPILED)
def test_f19_padded_rows_are_finite_whatever_the_pool_holds(mode: str) -> None:
    draft = tiny_draft()
    runner = runner_for(draft, mode, rows="all")
    for cache in draft.caches:
        cache.k.fill_(float("nan"))
        cache.v.fill_(float("nan"))
    captured: list[Tensor] = []
    compute = draft.compute_logits
    draft.compute_logits = lambda hidden: captured.append(hidden) or compute(hidden)
    step = runner.runner.step
    rows = runner.runner.table.allocate(4, torch.device("cpu"))
    rows["seq_lens"][0], rows["page_table"][0, :3] = 9, torch.tensor([3, 1, 4])
    with torch.no_grad():
        step(**rows)
    assert captured[0][WIDTH:].isfinite().all()


@pytest.mark.parametrize("mode", MODES)
def test_f21_all_rows_of_live_requests_come_back(mode: str) -> None:
    draft = tiny_draft()
    runner = runner_for(draft, mode, rows="all", buckets=[4])
    fill(draft)
    batch = batch_of([20, 30, 11], [6, 6, 6])
    expected = []
    for upto in range(1, WIDTH + 1):
        fill(draft)
        part = DraftExtendBatch(
            batch.input_ids, batch.hidden_states, batch.seq_lens, torch.full((3,), upto, dtype=torch.int32), batch.page_table
        )
        expected.append(plain(draft, part)[1])
    fill(draft)
    out = runner(batch)
    assert out.hidden_states.shape == (3 * WIDTH, HIDDEN)
    torch.testing.assert_close(out.hidden_states.view(3, WIDTH, -1), torch.stack(expected, 1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", COMPILED)
def test_f24_a_batch_over_the_largest_bucket_runs_eagerly_and_says_so_once(mode: str) -> None:
    draft = tiny_draft(num_pages=120)
    runner = runner_for(draft, mode)
    batch = batch_of([12, 20, 30, 9, 15], [1, 2, 3, 4, 5])
    with pytest.warns(GraphLost, match="a batch of 5 requests is above the largest bucket, 4"):
        check(runner, draft, batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(runner, draft, batch)
    assert runner.explain().eager_calls == 2


def test_f24_over_bucket_may_be_an_error_and_strict_raises() -> None:
    draft = tiny_draft()
    batch = batch_of([12, 20, 30], [1, 2, 3])
    with pytest.raises(ValueError, match="a batch of 3 requests is above the largest bucket, 2; raise max_requests"):
        runner_for(draft, "direct", buckets=[1, 2], over_bucket="error")(batch)
    with pytest.raises(GraphLostError, match="above the largest bucket"):
        runner_for(draft, "direct", buckets=[1, 2], strict=True)(batch)


@pytest.mark.parametrize("mode", COMPILED)
@pytest.mark.parametrize("what", ["cache", "weight", "dtype"])
def test_f26_moved_memory_is_recorded_again_and_told(mode: str, what: str) -> None:
    draft = tiny_draft()
    runner = runner_for(draft, mode)
    check(runner, draft, batch_of([14, 20], [2, 5]))
    if what == "cache":
        draft.allocate_caches(90, PAGE)
    elif what == "weight":
        draft.fc.weight.data = draft.fc.weight.data.clone() * 2
    else:
        draft.fc.weight = torch.nn.Parameter(draft.fc.weight.double().float().clone() * 3, requires_grad=False)
    with pytest.warns(GraphLost, match="has moved since capture; recording again"):
        check(runner, draft, batch_of([14, 20], [2, 5], seed=4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(runner, draft, batch_of([15, 21], [2, 5], seed=5))


@pytest.mark.parametrize("mode", COMPILED)
def test_weights_changed_in_place_are_seen(mode: str) -> None:
    draft = tiny_draft()
    runner = runner_for(draft, mode)
    check(runner, draft, batch_of([14, 20], [2, 5]))
    draft.fc.weight.mul_(-0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(runner, draft, batch_of([14, 20], [2, 5]))


def test_a_step_that_recompiles_after_warm_up_is_named() -> None:
    draft = tiny_draft()
    runner = runner_for(draft, "direct")
    check(runner, draft, batch_of([14, 20], [2, 5]))
    draft.fc.new_attribute = 1
    runner.runner.step.rows = "all"
    with pytest.warns(GraphLost, match=r"recompiled for 2 requests after warm-up: .*rows"):
        runner(batch_of([14, 20], [2, 5]))
    assert len(runner.explain().recompiles) == 1


def test_f27_two_runners_do_not_disturb_each_other() -> None:
    draft, other = tiny_draft(), tiny_draft()
    first, second = runner_for(draft, "direct"), runner_for(other, "direct", rows="all")
    first.warm_up()
    second.warm_up()
    check(first, draft, batch_of([14, 20, 9], [1, 6, 3]))
    second(batch_of([30, 40], [2, 2]))
    check(first, draft, batch_of([17, 6, 31], [4, 5, 2]))


@pytest.mark.parametrize("mode", MODES)
def test_f28_outputs_survive_later_calls(mode: str) -> None:
    draft = tiny_draft()
    runner = runner_for(draft, mode)
    fill(draft)
    first = runner(batch_of([14, 20], [1, 6]))
    kept = [tensor.clone() for tensor in first]
    runner(batch_of([15, 9], [2, 2], seed=5))
    runner(batch_of([15, 9, 8], [2, 2, 1], seed=6))
    assert all(torch.equal(a, b) for a, b in zip(first, kept, strict=True))


def test_f04_a_width_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="tokens_per_request must be >= 1, got 0; it is the number of rows every request"):
        runner_for(tiny_draft(), "eager", tokens_per_request=0)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"input_ids": torch.zeros(2, 4, dtype=torch.int64)}, ValueError, r"input_ids must be \[B, 6\].*got \(2, 4\)"),
        (
            {"input_ids": torch.zeros(2, WIDTH, dtype=torch.int32)},
            TypeError,
            "input_ids must be torch.int64, got torch.int32",
        ),
        ({"hidden_states": torch.zeros(2, WIDTH, 8)}, ValueError, r"hidden_states must be \[B, 6, 32\]"),
        ({"page_table": torch.zeros(2, MAX_PAGES, dtype=torch.int64)}, TypeError, "page_table must be torch.int32"),
        ({"seq_lens": torch.zeros(3, dtype=torch.int32)}, ValueError, "disagree about the number of requests"),
        (
            {"seq_lens": torch.zeros(2, dtype=torch.int32, device="meta")},
            ValueError,
            "seq_lens is on meta, the step runs on cpu",
        ),
    ],
)
def test_wrong_batches_are_refused(change: dict[str, Tensor], error: type[Exception], message: str) -> None:
    good = batch_of([14, 20], [2, 5])
    with pytest.raises(error, match=message):
        runner_for(tiny_draft(), "eager")(DraftExtendBatch(**{**good.as_dict(), **change}))


def test_unknown_options_are_refused() -> None:
    draft = tiny_draft()
    with pytest.raises(ValueError, match="mode must be one of reduce-overhead, direct, eager, got 'fast'"):
        runner_for(draft, "fast")
    with pytest.raises(ValueError, match="rows must be 'last' or 'all', got 'some'"):
        runner_for(draft, "eager", rows="some")
    with pytest.raises(ValueError, match=r"buckets must be batch sizes >= 1, got \[0, 2\]"):
        runner_for(draft, "eager", buckets=[0, 2])


def test_inductor_on_the_cpu_gives_the_same_and_says_why_there_is_no_graph() -> None:
    draft = tiny_draft()
    runner = runner_for(draft, "reduce-overhead", compiler="inductor", buckets=[2, 4])
    check(runner, draft, batch_of([14, 20, 9], [1, 6, 3]))
    report = runner.explain()
    assert not report.captured
    assert report.reason == "cpu has no CUDA graphs"
    assert report.compiled_graphs == 1
    assert "none" in str(report)


def test_a_batch_vouched_for_is_staged_once_and_again_when_another_stood_in_the_buffers() -> None:
    draft = tiny_draft()
    runner = runner_for(draft, "direct")
    step = runner.runner
    first, second = batch_of([14, 20], [2, 5]), batch_of([9, 31], [6, 1], seed=5)

    def matches(batch: DraftExtendBatch, given: DraftExtendBatch, unchanged: bool) -> None:
        fill(draft)
        expected = plain(draft, batch)[0]
        fill(draft)
        torch.testing.assert_close(step(given.as_dict(), unchanged=unchanged)[0], expected, rtol=1e-4, atol=1e-5)

    matches(first, first, unchanged=False)
    matches(first, second, unchanged=True)
    matches(second, second, unchanged=False)
    third = batch_of([9, 31, 12], [6, 1, 2], seed=6)
    matches(third, third, unchanged=True)
    matches(first, first, unchanged=True)
    draft.allocate_caches(90, PAGE)
    with pytest.warns(GraphLost, match="recording again"):
        matches(first, first, unchanged=True)
