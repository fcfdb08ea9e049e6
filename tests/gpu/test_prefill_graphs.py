"""Prefill as a replay of a CUDA graph: the ids of transformers, whatever a replay before has left.

pytest -m gpu tests/gpu/test_prefill_graphs.py
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from specops.compile.report import GraphLost, compiled_graphs
from specops.spec import Engine, SpecConfig
from specops.spec.prefill import prefill
from tests.spec.toys import Shadow, greedy, small_llama, target_of, untrained_head

pytestmark = pytest.mark.gpu
COUNT = 12
LENGTHS = (1, 15, 16, 17, 31, 33, 64, 65, 2, 128, 129, 256, 5)


@functools.cache
def judge() -> Any:
    return small_llama(max_position_embeddings=1024)


@functools.cache
def expected(length: int) -> list[int]:
    return greedy(judge(), prompt_of(length), COUNT)


def prompt_of(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(0, 64, (length,), generator=generator).tolist()


def engine_of(kind: str, mode: Any = "direct", **options: Any) -> Engine:
    target = target_of(judge()).to("cuda")
    draft: Any = None
    if kind != "none":
        draft = Shadow(target) if kind == "shadow" else untrained_head(target, format=kind).to("cuda")
    options: dict[str, Any] = {"max_requests": 4, "max_context": 600, "buckets": [1, 4], "prefill_tokens": 512, **options}
    engine = Engine(target, draft, None if draft is None else SpecConfig(3, 2, 6), mode=mode, **options)
    engine.warm_up()
    return engine


@pytest.fixture(scope="module")
def shadowed() -> Engine:
    """Compiled once for most tests. Not strict, since its weights move at last; losses raise by ``served``."""
    return engine_of("shadow")


def replays(engine: Engine) -> dict[tuple[int, int], int]:
    return {(b.num_rows, b.num_requests): b.replays for b in engine.explain()["prefill"].buckets if b.replays}  # type: ignore


def poison(engine: Engine) -> None:
    graphs = engine._prefill_graphs
    assert graphs is not None
    torch.cuda.synchronize()
    for buffer in (graphs._staged, graphs._host):
        buffer.fill_(1)
    for recorded in graphs._graphs.values():
        assert recorded is not None
        recorded.output.fill_(-1)
    torch.cuda.synchronize()


def served(engine: Engine, lengths: Sequence[int]) -> list[list[int]]:
    """Answers to prompts that are added at once; a lost graph is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", GraphLost)
        return [request.tokens for request in engine.generate([prompt_of(n) for n in lengths], max_new_tokens=COUNT)]


def check_edges(engine: Engine) -> None:
    compiled = compiled_graphs()
    for length in LENGTHS:
        poison(engine)
        assert served(engine, [length]) == [expected(length)], length
    assert compiled_graphs() == compiled
    assert replays(engine) == {(16, 1): 5, (32, 1): 2, (64, 1): 2, (128, 1): 2, (256, 1): 2}


def test_ids_are_those_of_transformers_at_the_edges_of_buckets(shadowed: Engine) -> None:
    check_edges(shadowed)


@pytest.mark.parametrize(("kind", "mode"), [("none", "direct"), ("eagle3", "reduce-overhead")])
def test_so_they_are_without_a_draft_and_beside_graphs_of_torch(kind: str, mode: str) -> None:
    check_edges(engine_of(kind, mode, strict=True))


def test_many_prompts_join_in_one_replay_and_a_large_bucket_is_captured_when_needed(shadowed: Engine) -> None:
    warm = len(shadowed.explain()["prefill"].buckets)
    for lengths in ((5, 1, 10), (16, 31, 9, 8), (33, 64), (200, 90, 60), (3, 3, 3, 3, 3, 3), (200, 90, 60)):
        poison(shadowed)
        assert served(shadowed, lengths) == [expected(length) for length in lengths], lengths
    report = shadowed.explain()["prefill"]
    assert report.captured, str(report)
    assert len(report.buckets) == warm + 1
    assert replays(shadowed)[384, 4] == 2


def test_a_prompt_of_several_chunks_takes_no_graph(shadowed: Engine) -> None:
    before = replays(shadowed)
    assert served(shadowed, [520]) == [expected(520)]
    assert replays(shadowed) == before


def test_requests_that_join_while_a_round_is_under_way_get_the_same_ids(shadowed: Engine) -> None:
    lengths, counts = (5, 40, 17, 3, 90, 16, 33, 2), (12, 3, 7, 11, 5, 12, 2, 9)
    requests = [shadowed.add(prompt_of(n), max_new_tokens=count) for n, count in zip(lengths, counts, strict=True)]
    while shadowed.has_work:
        shadowed.step()
    assert [r.tokens for r in requests] == [expected(n)[:count] for n, count in zip(lengths, counts, strict=True)]


def test_f26_moved_weights_are_recorded_again(shadowed: Engine) -> None:
    norm: Any = shadowed.target.norm
    norm.weight = torch.nn.Parameter(norm.weight.detach().clone(), requires_grad=False)
    with pytest.warns(GraphLost, match="moved since capture; recording again"):
        (request,) = shadowed.generate([prompt_of(33)], max_new_tokens=COUNT)
    assert request.tokens == expected(33)
    assert replays(shadowed) == {(64, 1): 1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_f58_warm_up_writes_nothing_and_a_replay_what_a_pass_without_graphs_writes(dtype: torch.dtype) -> None:
    target = target_of(small_llama(hidden_size=256, num_attention_heads=4, num_key_value_heads=2)).to("cuda", dtype)
    head = untrained_head(target, format="eagle3").to("cuda", dtype)
    # Without a round on its way before the prefill's result is read, which would be in the state already.
    options: dict[str, Any] = {"max_requests": 4, "max_context": 128, "look_ahead": False}
    engine = Engine(target, head, SpecConfig(3), mode="direct", strict=True, **options)
    caches = [pages for model in (target, head) for cache in model.caches for pages in (cache.k, cache.v)]
    for pages in caches:
        pages.fill_(7.0)
    engine.warm_up()
    assert all(bool((pages == 7.0).all()) for pages in caches)
    assert engine.state.seq_lens.tolist() == [0] * 5
    assert bool(engine.state.next_token_logits.isfinite().all())
    prompts = [prompt_of(length) for length in (7, 30, 1)]
    for prompt in prompts:
        engine.add(prompt, max_new_tokens=COUNT)
    engine._admit(lambda request, tokens: None)
    assert replays(engine) == {(64, 4): 1}
    found = [pages.clone() for pages in caches]
    for pages in caches:
        pages.fill_(7.0)
    out = prefill(target, head, prompts, engine.state.page_table[:3].clone(), engine.page_size, engine._forwards)
    assert engine.state.seq_lens.tolist() == [7, 30, 1, 0, 0]
    assert engine.state.root_tokens[:3].tolist() == out.next_tokens.tolist()
    rtol, atol = (1e-4, 1e-3) if dtype == torch.float32 else (0.03, 0.3)
    assert out.next_token_logits is not None
    assert out.hidden_states is not None
    torch.testing.assert_close(engine.state.next_token_logits[:3], out.next_token_logits, rtol=rtol, atol=atol)
    torch.testing.assert_close(engine.state.hidden_states[:3], out.hidden_states, rtol=rtol, atol=atol)
    for pages, other in zip(found, caches, strict=True):
        torch.testing.assert_close(pages, other, rtol=rtol, atol=atol)
