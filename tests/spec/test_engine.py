"""The decode loop against transformers' greedy ids: every shape of round, batches that change, and every way to end.

Run alone: pytest tests/spec/test_engine.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specops.kv_cache import OutOfPages
from specops.layout import QueryLayout
from specops.metadata import attention_metadata
from specops.spec import Engine, SpecConfig
from tests.spec.toys import Shadow, greedy, small_llama, target_of, untrained_head

PROMPTS = [[1, 2, 3, 4, 5], [7] * 13, [9, 8], [3] * 30, [11, 12, 13]]
COUNT = 21
SHAPES = {
    "chain of 3": SpecConfig(3),
    "one step": SpecConfig(1),
    "one step, two branches": SpecConfig(1, 2, 3),
    "tree of 6, 3 steps": SpecConfig(3, 2, 6),
    "tree narrower than its depth": SpecConfig(4, 2, 3),
    "tree of 16, topk 4": SpecConfig(4, 4, 16),
    "chain, packed extend": SpecConfig(2, draft_extend="v1"),
    "tree, packed extend": SpecConfig(3, 2, 6, draft_extend="v1"),
}


@pytest.fixture(scope="module")
def world() -> dict[str, Any]:
    judge = small_llama()
    target = target_of(judge)
    return {
        "judge": judge,
        "target": target,
        "shadow": Shadow(target),
        "untrained": untrained_head(target),
        "reduced": untrained_head(target, draft_vocab_size=64, format="eagle3"),
        "expected": [greedy(judge, prompt, COUNT) for prompt in PROMPTS],
    }


def engine(world: dict[str, Any], draft: str | None, config: SpecConfig | None = None, **options: Any) -> Engine:
    options = {"max_requests": 3, "max_context": 64, "page_size": 4, **options}
    return Engine(world["target"], world[draft] if draft else None, config, **options)


def assert_no_page_lost(run: Engine) -> None:
    run.allocator.check()
    assert run.allocator.num_free == run.allocator.num_pages - 1


def test_plain_decoding_gives_the_ids_of_transformers(world: dict[str, Any]) -> None:
    run = engine(world, None)
    assert [r.tokens for r in run.generate(PROMPTS, max_new_tokens=COUNT)] == world["expected"]
    assert_no_page_lost(run)


@pytest.mark.parametrize("draft", ["shadow", "untrained", "reduced"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("split", [False, True], ids=["one graph", "split"])
def test_speculative_ids_equal_those_of_transformers(world: dict[str, Any], draft: str, shape: str, split: bool) -> None:
    config = SHAPES[shape]
    run = engine(world, draft, config, split=split)
    requests = run.generate(PROMPTS, max_new_tokens=COUNT)
    assert set(run.runners) >= ({"draft", "verify"} if split or config.draft_extend == "v1" else {"round"})
    assert [r.tokens for r in requests] == world["expected"]
    assert all(1 <= n <= SHAPES[shape].max_accept_len for r in requests for n in r.accept_lens)
    if draft == "shadow":
        assert run.stats.accepted_per_round > 1.3
    assert_no_page_lost(run)


@pytest.mark.parametrize("page_size", [1, 2, 16, 64])
def test_ids_do_not_depend_on_the_page_size(world: dict[str, Any], page_size: int) -> None:
    run = engine(world, "shadow", SpecConfig(3, 4, 8), page_size=page_size)
    assert [r.tokens for r in run.generate(PROMPTS, max_new_tokens=COUNT)] == world["expected"]


@pytest.mark.parametrize("chunk", [1, 4, 7])
def test_prefill_in_chunks_changes_nothing(world: dict[str, Any], chunk: int) -> None:
    whole, parts = engine(world, "shadow"), engine(world, "shadow", prefill_tokens=chunk)
    expected = whole.generate(PROMPTS, max_new_tokens=COUNT)
    requests = parts.generate(PROMPTS, max_new_tokens=COUNT)
    assert [r.tokens for r in requests] == world["expected"]
    assert [r.accept_lens for r in requests] == [r.accept_lens for r in expected]


def test_f06_the_same_prompt_twice_accepts_what_it_accepts_alone(world: dict[str, Any]) -> None:
    config = SpecConfig(3, 4, 9)
    alone = engine(world, "shadow", config, max_requests=1).generate([PROMPTS[1]], max_new_tokens=COUNT)[0]
    both = engine(world, "shadow", config, max_requests=2).generate([PROMPTS[1]] * 2, max_new_tokens=COUNT)
    assert [r.accept_lens for r in both] == [alone.accept_lens] * 2
    assert max(alone.accept_lens) > 1


def test_f07_a_batch_as_large_as_all_its_draft_slots(world: dict[str, Any]) -> None:
    run = engine(world, "shadow", SpecConfig(3), max_requests=6)
    prompts = [*PROMPTS, [5, 6]]
    expected = [*world["expected"], greedy(world["judge"], [5, 6], COUNT)]
    assert [r.tokens for r in run.generate(prompts, max_new_tokens=COUNT)] == expected


@pytest.mark.parametrize("config", [SpecConfig(3), SpecConfig(3, 4, 13), None], ids=["chain", "tree", "plain"])
def test_f34_a_request_ends_at_the_context_with_the_right_ids(world: dict[str, Any], config: SpecConfig | None) -> None:
    for context in range(14, 19):
        run = engine(world, "shadow" if config else None, config, max_context=context)
        requests = run.generate(PROMPTS[:3], max_new_tokens=100)
        for request, prompt in zip(requests, PROMPTS, strict=False):
            assert request.tokens == greedy(world["judge"], prompt, context - len(prompt))
            assert request.finish_reason == "context"
        assert_no_page_lost(run)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 7])
def test_f62_exactly_as_many_tokens_as_asked_for(world: dict[str, Any], count: int) -> None:
    requests = engine(world, "shadow", SpecConfig(3, 4, 9)).generate(PROMPTS, max_new_tokens=count)
    assert [r.tokens for r in requests] == [ids[:count] for ids in world["expected"]]
    assert {r.finish_reason for r in requests} == {"length"}


@pytest.mark.parametrize("place", range(8))
def test_a_stop_token_ends_the_answer_in_every_place_of_a_round(world: dict[str, Any], place: int) -> None:
    ids = world["expected"][1]
    stop = ids[place]
    request = engine(world, "shadow", SpecConfig(3)).generate([PROMPTS[1]], max_new_tokens=COUNT, stop_token_ids=[stop])[0]
    assert request.tokens == ids[: ids.index(stop) + 1]
    assert request.finish_reason == "stop"


def test_f30_nothing_to_do_then_a_request_joins_then_another(world: dict[str, Any]) -> None:
    run = engine(world, "shadow", SpecConfig(3, 2, 6))
    assert run.step() == []
    first = run.add(PROMPTS[0], max_new_tokens=6)
    while not first.finished:
        run.step()
    assert run.step() == []
    assert not run.has_work
    second = run.add(PROMPTS[1], max_new_tokens=COUNT)
    run.step()
    third = run.add(PROMPTS[2], max_new_tokens=COUNT)
    while run.has_work:
        run.step()
    assert [first.tokens, second.tokens, third.tokens] == [
        world["expected"][0][:6],
        world["expected"][1],
        world["expected"][2],
    ]
    assert_no_page_lost(run)


def test_requests_wait_for_pages_and_none_is_lost(world: dict[str, Any]) -> None:
    run = engine(world, "shadow", SpecConfig(3), num_pages=20)
    assert [r.tokens for r in run.generate(PROMPTS, max_new_tokens=COUNT)] == world["expected"]
    assert_no_page_lost(run)


def test_a_cancelled_request_frees_its_pages_and_disturbs_nobody(world: dict[str, Any]) -> None:
    run = engine(world, "shadow", SpecConfig(3))
    requests = [run.add(prompt, max_new_tokens=COUNT) for prompt in PROMPTS[:4]]
    run.step()
    run.cancel(requests[1])
    run.cancel(requests[3])
    while run.has_work:
        run.step()
    assert [requests[i].tokens for i in (0, 2)] == [world["expected"][i] for i in (0, 2)]
    assert requests[1].finish_reason == requests[3].finish_reason == "cancelled"
    assert_no_page_lost(run)


@pytest.mark.parametrize("config", [SpecConfig(3), SpecConfig(3, 4, 13)], ids=["chain", "tree"])
def test_f58_caches_hold_what_a_fresh_pass_over_the_answer_gives(world: dict[str, Any], config: SpecConfig) -> None:
    run = engine(world, "shadow", config, max_requests=1)
    request = run.add(PROMPTS[0], max_new_tokens=40)
    for _ in range(7):
        run.step()
    committed = int(run.state.seq_lens[0])
    tokens = request.prompt + request.tokens
    assert max(request.accept_lens) > 1
    pages = run.pages.tensor()[0, : -(-committed // 4)].long()
    held = [
        [rows[pages].flatten(0, 1)[:committed].clone() for rows in (cache.k, cache.v)]
        for cache in (*run.target.caches, *run.draft.caches)
    ]
    table = run.pages.tensor()[:1]
    lens = torch.tensor([committed], dtype=torch.int32)
    meta = attention_metadata(table, lens, QueryLayout.uniform(committed), 4)
    hidden = run.target(torch.tensor(tokens[:committed]), meta)
    run.draft(torch.tensor(tokens[1 : committed + 1]), hidden, meta)
    for (k, v), cache in zip(held, (*run.target.caches, *run.draft.caches), strict=True):
        torch.testing.assert_close(k, cache.k[pages].flatten(0, 1)[:committed], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(v, cache.v[pages].flatten(0, 1)[:committed], rtol=1e-4, atol=1e-4)


def test_packed_and_uniform_extend_leave_the_same_state(world: dict[str, Any]) -> None:
    runs = [engine(world, "shadow", SpecConfig(3, 2, 6, draft_extend=kind)) for kind in ("v1", "v2")]
    for run in runs:
        for prompt in PROMPTS[:3]:
            run.add(prompt, max_new_tokens=40)
    for _ in range(5):
        for run in runs:
            run.step()
        packed, uniform = (run.state for run in runs)
        torch.testing.assert_close(packed.next_token_logits[:3], uniform.next_token_logits[:3], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(packed.hidden_states[:3], uniform.hidden_states[:3], rtol=1e-4, atol=1e-4)
        assert torch.equal(packed.seq_lens, uniform.seq_lens)


@pytest.mark.parametrize("kind", ["Mistral", "Qwen3", "Qwen2"])
def test_other_targets_windows_and_norms(kind: str) -> None:
    options: dict[str, Any] = {"sliding_window": 7} if kind == "Mistral" else {}
    judge = small_llama(kind=kind, **options)
    target = target_of(judge)
    run = Engine(target, Shadow(target), SpecConfig(3, 4, 9), max_requests=3, max_context=64, page_size=4)
    assert [r.tokens for r in run.generate(PROMPTS, max_new_tokens=COUNT)] == [greedy(judge, p, COUNT) for p in PROMPTS]
    assert run.stats.accepted_per_round > 1.2


def test_stats_of_a_split_round_add_up(world: dict[str, Any]) -> None:
    run = engine(world, "shadow", SpecConfig(3), split=True)
    requests = run.generate(PROMPTS, max_new_tokens=COUNT)
    assert run.stats.rounds == sum(len(r.accept_lens) for r in requests)
    assert run.stats.emitted == sum(sum(r.accept_lens) for r in requests)
    assert set(run.stats.seconds) == {"prefill", "draft", "verify", "draft_extend", "read_back"}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda e: e.add([]), "the prompt is empty"),
        (lambda e: e.add([1], max_new_tokens=0), "max_new_tokens must be >= 1, got 0"),
        (lambda e: e.add([1] * 64), "the prompt has 64 tokens and the context 64"),
        (lambda e: e.add([1, 64]), "prompt token 64 is outside the vocabulary of 64"),
    ],
)
def test_bad_requests_are_refused_and_not_queued(world: dict[str, Any], call: Any, message: str) -> None:
    run = engine(world, "shadow")
    with pytest.raises(ValueError, match=message):
        call(run)
    assert not run.has_work


def test_bad_engines_are_refused_with_both_numbers(world: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="max_context 999 is beyond the target's 128 positions"):
        engine(world, None, max_context=999)
    short = untrained_head(world["target"], max_position_embeddings=32)
    with pytest.raises(ValueError, match="max_context 64 is beyond the draft's 32 positions"):
        Engine(world["target"], short, max_context=64)
    other = untrained_head(world["target"], target_hidden_size=48)
    with pytest.raises(ValueError, match=r"made for hidden states of 48, the target's have 64"):
        Engine(world["target"], other)
    run = engine(world, None, num_pages=4)
    with pytest.raises(ValueError, match="may need 6 pages and the pool has 3"):
        run.add([1, 2], max_new_tokens=20)
    with pytest.raises(OutOfPages):
        run.allocator.allocate(4)
