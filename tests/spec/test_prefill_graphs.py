"""Prefill by graphs, where a replay is the captured step run eagerly: everything around the graph is the real thing.

Graphs themselves are tested on a GPU, in tests/gpu/test_prefill_graphs.py.

    python -m pytest -q tests/spec/test_prefill_graphs.py
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from specops.compile.report import GraphLost, GraphLostError
from specops.layout import QueryLayout
from specops.metadata import attention_metadata
from specops.spec import Engine, SamplingParams, SpecConfig
from specops.spec.prefill_graphs import PrefillGraphs, PrefillStep, Recorded, row_buckets
from specops.spec.verify import run_target
from tests.spec.toys import Shadow, greedy, small_llama, target_of, untrained_head

COUNT = 8
EDGES = [15, 16, 17, 31, 32, 33, 1, 2]


class Replayed(PrefillGraphs):
    """Runs the step in place of replaying it; like a graph it reads and leaves the same memory each time."""

    captured: list[Any]

    def _record(self, bucket: Any) -> Recorded | str:
        views = self._views(bucket)
        output = self.step(*views)
        self.__dict__.setdefault("captured", []).append(bucket)

        def replay() -> None:
            with torch.no_grad():
                output.copy_(self.step(*views))

        return Recorded(replay, output)


@functools.cache
def world() -> tuple[Any, Any]:
    judge = small_llama()
    return judge, target_of(judge)


def prompt_of(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(0, 64, (length,), generator=generator).tolist()


def engine_of(draft: Any = None, graphs: type[PrefillGraphs] = Replayed, **options: Any) -> Engine:
    target = options.pop("target", None) or world()[1]
    config = None if draft is None else SpecConfig(3, 2, 6)
    strict = options.pop("strict", False)
    max_rows = options.pop("max_rows", 64)
    engine = Engine(target, draft, config, **{"max_requests": 3, "max_context": 100, "page_size": 4, **options})
    engine._prefill_graphs = graphs(
        PrefillStep(engine.target, engine.draft, engine.state, lambda: engine._forwards),
        torch.device("cpu"),
        max_requests=engine.max_requests,
        max_rows=max_rows,
        share_pool=engine._share_pool,
        strict=strict,
    )
    return engine


def replays(engine: Engine) -> dict[tuple[int, int], int]:
    return {(b.num_rows, b.num_requests): b.replays for b in engine.explain()["prefill"].buckets if b.replays}  # type: ignore


def poison(engine: Engine) -> None:
    """What a replay before could have left: integers that would be seen."""
    graphs = engine._prefill_graphs
    assert graphs is not None
    for buffer in (graphs._staged, graphs._host):
        buffer.fill_(1)


def test_buckets_are_multiples_of_16_up_to_the_limit() -> None:
    assert row_buckets(2048) == [16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048]
    assert row_buckets(1000) == [16, 32, 64, 128, 256, 384, 512, 768, 992]
    assert row_buckets(5) == [16]


@pytest.mark.parametrize("kind", ["none", "shadow", "eagle3"])
def test_ids_are_those_of_transformers_at_the_edges_of_buckets(kind: str) -> None:
    judge, target = world()
    draft = {
        "none": lambda: None,
        "shadow": lambda: Shadow(target),
        "eagle3": lambda: untrained_head(target, format="eagle3"),
    }
    engine = engine_of(draft[kind]())
    for length in EDGES:
        poison(engine)
        (request,) = engine.generate([prompt_of(length)], max_new_tokens=COUNT)
        assert request.tokens == greedy(judge, prompt_of(length), COUNT)
    assert replays(engine) == {(16, 1): 4, (32, 1): 3, (64, 1): 1}


def test_several_prompts_join_in_one_replay_and_fill_a_bucket_to_its_last_row() -> None:
    judge, target = world()
    engine = engine_of(Shadow(target))
    for lengths in ([16, 15, 33], [5, 1, 10], [9, 8], [31, 1, 1, 20, 12]):
        prompts = [prompt_of(length) for length in lengths]
        poison(engine)
        requests = engine.generate(prompts, max_new_tokens=COUNT)
        assert [request.tokens for request in requests] == [greedy(judge, prompt, COUNT) for prompt in prompts]
    assert replays(engine)[(64, 3)] >= 2
    assert replays(engine)[(16, 3)] >= 1


def test_the_first_round_is_launched_before_the_first_tokens_are_read() -> None:
    judge, target = world()
    engine = engine_of(Shadow(target), look_ahead=True)
    order: list[str] = []
    graphs, rounds = engine._prefill_graphs, engine.rounds
    assert graphs is not None
    for owner, name in ((graphs, "launch"), (graphs, "read"), (rounds, "launch"), (rounds, "read")):
        told, plain = f"{name} {'prefill' if owner is graphs else 'round'}", getattr(owner, name)
        setattr(owner, name, lambda *args, told=told, plain=plain: order.append(told) or plain(*args))
    (request,) = engine.generate([prompt_of(9)], max_new_tokens=COUNT)
    assert request.tokens == greedy(judge, prompt_of(9), COUNT)
    assert order[:5] == ["launch prefill", "launch round", "read prefill", "launch round", "read round"]
    # The token of prefill ends these; a stop token that nobody foresees makes the round one in vain.
    order.clear()
    first = greedy(judge, prompt_of(9), 1)
    assert engine.generate([prompt_of(9)], max_new_tokens=1)[0].tokens == first
    assert order == ["launch prefill", "read prefill"]
    assert engine.generate([prompt_of(9)], max_new_tokens=COUNT, stop_token_ids=first)[0].tokens == first
    assert engine.generate([prompt_of(7)], max_new_tokens=COUNT)[0].tokens == greedy(judge, prompt_of(7), COUNT)


@pytest.mark.parametrize("lengths", [(7, 1, 12), (7, 12), (5,)])
def test_f58_caches_and_state_are_those_of_one_token_after_the_other(lengths: tuple[int, ...]) -> None:
    """Target and draft run their tokens singly here; prefill must leave the same keys, values, logits and hidden states."""
    _, target = world()
    head = untrained_head(target, format="eagle3")
    engine = engine_of(head)
    prompts = [prompt_of(length) for length in lengths]
    for request in [engine.add(prompt, max_new_tokens=COUNT) for prompt in prompts]:
        assert request.tokens == []
    engine._admit(lambda request, tokens: None)
    found = [[pages.clone() for cache in model.caches for pages in (cache.k, cache.v)] for model in (target, head)]
    for model in (target, head):
        for cache in model.caches:
            cache.k.zero_(), cache.v.zero_()
    for row, prompt in enumerate(prompts):
        following = [*prompt[1:], engine._active[row].tokens[0]]
        table = engine.state.page_table[row : row + 1]
        for place, (token, partner) in enumerate(zip(prompt, following, strict=True)):
            lens = torch.tensor([place + 1], dtype=torch.int32)
            meta = attention_metadata(table, lens, QueryLayout.uniform(1), 4)
            with torch.no_grad():
                _, streams = run_target(target, torch.tensor([token]), meta, head.config.aux_layers)
                carried = head(torch.tensor([partner]), streams, meta)
        torch.testing.assert_close(engine.state.hidden_states[row], carried[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(
            engine.state.next_token_logits[row], head.compute_logits(carried)[0], rtol=1e-4, atol=1e-3
        )
        assert int(engine.state.seq_lens[row]) == len(prompt)
    for model, pages in zip((target, head), found, strict=True):
        expected = [pages for cache in model.caches for pages in (cache.k, cache.v)]
        assert any(bool(each.any()) for each in expected)
        for each, other in zip(pages, expected, strict=True):
            torch.testing.assert_close(each, other, rtol=1e-4, atol=1e-4)


def test_padding_writes_no_page_and_leaves_the_spare_row_empty_and_finite() -> None:
    _, target = world()
    head = untrained_head(target)
    engine = engine_of(head)
    caches = [pages for model in (target, head) for cache in model.caches for pages in (cache.k, cache.v)]
    for pages in caches:
        pages.fill_(7.0)
    assert engine._prefill_graphs is not None
    engine._prefill_graphs.warm_up()
    assert all(bool((pages == 7.0).all()) for pages in caches)
    assert engine.state.seq_lens.tolist() == [0, 0, 0, 0]
    engine.generate([prompt_of(3)] * 2, max_new_tokens=1)
    assert int(engine.state.seq_lens[3]) == 0
    assert bool(engine.state.next_token_logits.isfinite().all() and engine.state.hidden_states.isfinite().all())


def test_rows_behind_the_last_request_may_hold_nan() -> None:
    """A backend may leave anything in rows that belong to nobody; padded requests must not pass it on."""
    _, target = world()
    engine = engine_of(Shadow(target))
    run = engine._forwards.target

    def spoiled(rows: Any) -> tuple[Tensor, Tensor]:
        hidden, handed_on = run(rows)
        hidden[int(rows.query_start[-1]) :] = float("nan")
        return hidden, handed_on

    engine._forwards.target = spoiled  # type: ignore[method-assign]
    assert engine._prefill_graphs is not None
    engine._prefill_graphs.warm_up()
    assert bool(engine.state.next_token_logits.isfinite().all())
    assert int(engine.state.root_tokens.max()) < 64
    for recorded in engine._prefill_graphs._graphs.values():
        assert recorded is not None
        assert bool(recorded.output[:, 2].contiguous().view(torch.float32).isfinite().all())


def test_long_prompts_and_sampling_go_the_other_way() -> None:
    judge, target = world()
    engine = engine_of(Shadow(target))
    (long,) = engine.generate([prompt_of(65)], max_new_tokens=COUNT)
    assert long.tokens == greedy(judge, prompt_of(65), COUNT)
    engine.generate([prompt_of(5)], max_new_tokens=COUNT, sampling=SamplingParams(temperature=1.0, seed=1))
    engine.generate([prompt_of(5)], max_new_tokens=COUNT, logprobs=True)
    assert replays(engine) == {}
    engine.generate([prompt_of(64)], max_new_tokens=COUNT)
    assert replays(engine) == {(64, 1): 1}


def test_a_chunk_smaller_than_the_bucket_is_kept() -> None:
    judge, target = world()
    engine = engine_of(Shadow(target), prefill_tokens=20)
    (request,) = engine.generate([prompt_of(21)], max_new_tokens=COUNT)
    assert request.tokens == greedy(judge, prompt_of(21), COUNT)
    assert replays(engine) == {}


def test_warm_up_captures_each_small_bucket_once_and_says_so() -> None:
    engine = engine_of(max_rows=512, max_context=120, max_requests=2)
    told: list[tuple[int, int, str]] = []
    assert engine._prefill_graphs is not None
    engine._prefill_graphs.warm_up(lambda *args: told.append(args))
    assert told[0] == (1, 10, "prefill: 256 rows of 2 requests")
    assert told[-1] == (10, 10, "prefill: 16 rows of one request")
    engine.generate([prompt_of(20), prompt_of(30)], max_new_tokens=2)
    report = engine.explain()["prefill"]
    assert report.captured
    assert len(report.buckets) == 10
    assert "64         2  captured" in str(report)
    assert len(engine._prefill_graphs.captured) == 10  # type: ignore[attr-defined]


def test_f26_moved_weights_are_recorded_again() -> None:
    judge = small_llama(seed=3)
    target = target_of(judge)
    engine = engine_of(Shadow(target), target=target)
    engine.generate([prompt_of(9)], max_new_tokens=COUNT)
    target.norm.weight = torch.nn.Parameter(target.norm.weight.detach() * 1.5, requires_grad=False)
    judge.model.norm.weight.data.mul_(1.5)
    with pytest.warns(GraphLost, match="norm.weight has moved since capture; recording again"):
        (request,) = engine.generate([prompt_of(9)], max_new_tokens=COUNT)
    assert request.tokens == greedy(judge, prompt_of(9), COUNT)
    assert len(engine._prefill_graphs.captured) == 2  # type: ignore[union-attr]


class Refused(Replayed):
    def _record(self, bucket: Any) -> Recorded | str:
        return "capture failed: not today"


def test_a_bucket_without_a_graph_is_told_of_and_served_the_other_way() -> None:
    judge, target = world()
    engine = engine_of(Shadow(target), Refused)
    with pytest.warns(GraphLost, match="no CUDA graph for 16 rows of one request: capture failed: not today"):
        (request,) = engine.generate([prompt_of(9)], max_new_tokens=COUNT)
    assert request.tokens == greedy(judge, prompt_of(9), COUNT)
    assert engine.explain()["prefill"].reason == "capture failed: not today"
    strict = engine_of(Shadow(target), Refused, strict=True)
    with pytest.raises(GraphLostError, match="not today"):
        strict.generate([prompt_of(9)], max_new_tokens=COUNT)
