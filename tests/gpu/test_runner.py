"""Runner and decode loop on a GPU: graphs are counted, not trusted; the three modes agree; nothing stale is read.

Run alone: pytest -m gpu tests/gpu/test_runner.py
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from specops.batch import DraftExtendBatch
from specops.compile import DraftExtendRunner, DraftExtendStep, GraphLost
from specops.compile.report import compiled_graphs, skipped_graphs
from specops.models.config import ModelConfig
from specops.models.eagle import EagleConfig, EagleHead
from specops.spec import Engine, SpecConfig
from tests.compile.toys import WIDTH, batch_of, fill, plain, runner_for, tiny_draft
from tests.spec.toys import Shadow, greedy, small_llama, target_of

pytestmark = pytest.mark.gpu
MODES = ["eager", "direct", "reduce-overhead"]
GRAPHS = ["direct", "reduce-overhead"]
PROMPTS = [[1, 2, 3, 4, 5], [7] * 13, [9, 8], [3] * 30, [11, 12, 13]]


def draft_on_gpu(num_pages: int = 400, **options: Any) -> Any:
    return tiny_draft(num_pages, device="cuda", **options)


def check(runner: DraftExtendRunner, draft: Any, lens: list[int], accept: list[int], seed: int = 0) -> None:
    batch = batch_of(lens, accept, device="cuda", seed=seed)
    fill(draft)
    expected = plain(draft, batch)
    fill(draft)
    out = runner(batch)
    torch.testing.assert_close(out.next_token_logits, expected[0], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(out.hidden_states, expected[1], rtol=1e-3, atol=1e-4)


def poison(runner: DraftExtendRunner) -> None:
    for name, buffer in runner.runner.buffers().items():
        buffer.fill_(float("nan") if buffer.is_floating_point() else {"page_table": 7, "seq_lens": 63}.get(name, 3))


@pytest.mark.parametrize("mode", GRAPHS)
def test_f23_f48_every_bucket_is_captured_from_one_compiled_graph(mode: str) -> None:
    draft = draft_on_gpu()
    runner = runner_for(draft, mode, max_requests=20, buckets=range(1, 21), strict=True)
    skipped, compiled = skipped_graphs(), compiled_graphs()
    with warnings.catch_warnings():
        warnings.simplefilter("error", GraphLost)
        report = runner.warm_up()
        for size in (2, 4, 1, 20, 3, 19, 5, 8):
            check(runner, draft, [10 + size] * size, [2] * size, seed=size)
    assert report.captured, str(report)
    assert skipped_graphs() == skipped
    assert compiled_graphs() - compiled == 1
    assert report.compiled_graphs == 1
    assert counters["inductor"]["cudagraph_skips"] == skipped


@pytest.mark.parametrize("mode", MODES)
def test_f15_f16_f25_lengths_go_down_then_up_over_poisoned_buffers(mode: str) -> None:
    draft = draft_on_gpu(layer_windows=(8,))
    runner = runner_for(draft, mode)
    runner.warm_up()
    for step, lens in enumerate([[63, 63, 63, 63], [30, 12, 41], [25, 50], [9], [7, 8], [33, 6, 60], [64, 10, 20, 31]]):
        poison(runner)
        check(runner, draft, lens, [1 + (step + i) % WIDTH for i in range(len(lens))], seed=step)


def test_f26_a_moved_cache_is_recorded_again() -> None:
    draft = draft_on_gpu()
    runner = runner_for(draft, "direct")
    check(runner, draft, [14, 20], [2, 5])
    draft.allocate_caches(500, 4)
    with pytest.warns(UserWarning, match="recording again"):
        check(runner, draft, [14, 20], [2, 5], seed=4)


def test_f27_two_runners_in_one_pool() -> None:
    draft, other = draft_on_gpu(), draft_on_gpu()
    first = runner_for(draft, "direct")
    first.warm_up()
    second = runner_for(other, "direct", rows="all", pool=first.runner.pool)
    second.warm_up()
    check(first, draft, [14, 20, 9], [1, 6, 3])
    second(batch_of([30, 40], [2, 2], device="cuda"))
    check(first, draft, [17, 6, 31], [4, 5, 2])


@pytest.mark.parametrize("mode", GRAPHS)
def test_f28_outputs_survive_later_replays(mode: str) -> None:
    draft = draft_on_gpu()
    runner = runner_for(draft, mode)
    fill(draft)
    first = runner(batch_of([14, 20], [1, 6], device="cuda"))
    kept = [tensor.clone() for tensor in first]
    runner(batch_of([15, 9], [2, 2], device="cuda", seed=5))
    runner(batch_of([15, 9, 8], [2, 2, 1], device="cuda", seed=6))
    assert all(torch.equal(a, b) for a, b in zip(first, kept, strict=True))


@pytest.mark.parametrize("mode", GRAPHS)
def test_f31_f33_an_idle_step_writes_nothing_and_nan_elsewhere_does_not_matter(mode: str) -> None:
    draft = draft_on_gpu(num_pages=100)
    runner = runner_for(draft, mode)
    fill(draft)
    before = [pages.clone() for cache in draft.caches for pages in (cache.k, cache.v)]
    runner.warm_up()
    for old, new in zip(before, [p for c in draft.caches for p in (c.k, c.v)], strict=True):
        assert torch.equal(old, new)
    batch = batch_of([13, 5], [3, 6], device="cuda")
    for cache in draft.caches:
        for pages in (cache.k, cache.v):
            pages.fill_(float("nan"))
            for request, seq_len in enumerate((13, 5)):
                for place in range(seq_len):
                    pages[int(batch.page_table[request, place // 4]), place % 4] = 0.25
    out = runner(batch)
    assert out.hidden_states.isfinite().all()


@pytest.mark.parametrize("mode", MODES)
def test_a_planned_backend_runs_in_every_mode_without_losing_a_graph(mode: str) -> None:
    pytest.importorskip("flashinfer", reason="fa2 is FlashInfer's")
    config = ModelConfig(64, 128, 96, 1, 8, 2, 64, 256)
    torch.manual_seed(3)
    embedding = torch.nn.Embedding(64, 128).to("cuda", torch.float16)
    lm_head = torch.randn(64, 128, device="cuda", dtype=torch.float16) * 0.1
    draft = EagleHead(EagleConfig.for_target(config), embedding, lm_head).to("cuda", torch.float16)
    draft = draft.eval().requires_grad_(False)
    draft.allocate_caches(200, 16)
    draft.set_backend("flashinfer_fa2")
    runner = DraftExtendRunner(
        draft, draft.caches, tokens_per_request=4, max_requests=4, max_pages=8, buckets=[1, 2, 4], mode=mode, strict=True
    )
    report = runner.warm_up()
    assert mode == "eager" or report.captured, str(report)
    generator = torch.Generator("cuda").manual_seed(0)
    for lens in ([100, 30, 7], [5], [64, 17], [128, 9, 33, 50], [12, 80, 4]):
        count = len(lens)
        table = (torch.randperm(199, generator=generator, device="cuda")[: count * 8] + 1).to(torch.int32).view(count, 8)
        batch = DraftExtendBatch(
            torch.randint(64, (count, 4), generator=generator, device="cuda"),
            torch.randn(count, 4, 128, generator=generator, device="cuda", dtype=torch.float16),
            torch.tensor(lens, dtype=torch.int32, device="cuda"),
            torch.randint(1, 5, (count,), generator=generator, device="cuda").to(torch.int32),
            table,
        )
        fill(draft)
        out = runner(batch)
        fill(draft)
        draft.set_backend("reference")
        with torch.no_grad():
            expected = DraftExtendStep(draft, 16, 4)(**batch.as_dict())
        draft.set_backend("flashinfer_fa2")
        torch.testing.assert_close(out.next_token_logits, expected[0], rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(out.hidden_states, expected[1], rtol=2e-2, atol=2e-2)


@pytest.fixture(scope="module")
def world() -> dict[str, Any]:
    judge = small_llama(hidden_size=128, num_attention_heads=8, num_key_value_heads=2)
    target = target_of(judge).to("cuda")
    return {"target": target, "shadow": Shadow(target), "expected": [greedy(judge, p, 25) for p in PROMPTS]}


@pytest.mark.parametrize(
    ("mode", "backend"), [("eager", "auto"), ("direct", "auto"), ("reduce-overhead", "auto"), ("direct", "reference")]
)
@pytest.mark.parametrize("config", [SpecConfig(3), SpecConfig(3, 2, 6), SpecConfig(1, 2, 3), None], ids=str)
def test_ids_equal_those_of_transformers_in_float32(
    world: dict[str, Any], mode: str, backend: str, config: SpecConfig | None
) -> None:
    target, shadow = world["target"], world["shadow"]
    target.set_backend(backend)
    shadow.model.set_backend(backend)
    engine = Engine(
        target, shadow if config else None, config, max_requests=3, max_context=64, page_size=16, mode=mode, strict=True
    )
    reports = engine.warm_up()
    requests = engine.generate(PROMPTS, max_new_tokens=25)
    assert [r.tokens for r in requests] == world["expected"]
    if mode != "eager":
        assert all(report.captured for report in reports.values()), [str(r) for r in reports.values()]
        assert {report.compiled_graphs for name, report in reports.items() if name != "prefill"} == {1}
    engine.allocator.check()
    assert engine.allocator.num_free == engine.allocator.num_pages - 1
