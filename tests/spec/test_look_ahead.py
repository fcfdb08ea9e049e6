"""Rounds launched before the one before is read: the same answers, whoever joins, ends or is cancelled meanwhile.

python -m pytest -q tests/spec/test_look_ahead.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specops.spec import Engine, SamplingParams, SpecConfig
from specops.spec.request import Request
from tests.spec.test_engine import COUNT, PROMPTS, assert_no_page_lost
from tests.spec.toys import Shadow, greedy, small_llama, target_of

CONFIGS = {"plain": None, "chain": SpecConfig(3), "tree": SpecConfig(3, 4, 13)}


@pytest.fixture(scope="module")
def world() -> dict[str, Any]:
    judge = small_llama()
    target = target_of(judge)
    expected = [greedy(judge, prompt, COUNT) for prompt in PROMPTS]
    return {"judge": judge, "target": target, "shadow": Shadow(target), "expected": expected}


def engine(world: dict[str, Any], shape: str, look_ahead: bool = True, **options: Any) -> Engine:
    options = {"max_requests": 3, "max_context": 64, "page_size": 4, **options}
    draft = None if shape == "plain" else world["shadow"]
    return Engine(world["target"], draft, CONFIGS[shape], look_ahead=look_ahead, **options)


@pytest.mark.parametrize("shape", CONFIGS)
def test_ids_are_those_of_transformers_while_requests_join_and_leave(world: dict[str, Any], shape: str) -> None:
    run = engine(world, shape)
    order: list[str] = []
    launch, read = run.rounds.launch, run.rounds.read
    run.rounds.launch = lambda *args: order.append("launch") or launch(*args)  # type: ignore[method-assign]
    run.rounds.read = lambda pending: order.append("read") or read(pending)  # type: ignore[method-assign]
    requests = run.generate(PROMPTS, max_new_tokens=COUNT)
    assert [request.tokens for request in requests] == world["expected"]
    assert order[:4] == ["launch", "launch", "read", "launch"]
    assert order.count("read") == run.stats.steps
    assert_no_page_lost(run)


@pytest.mark.parametrize("shape", CONFIGS)
def test_no_round_is_launched_when_all_end_with_the_one_under_way(world: dict[str, Any], shape: str) -> None:
    run = engine(world, shape)
    launched: list[int] = []
    launch = run.rounds.launch
    run.rounds.launch = lambda *args: launched.append(1) or launch(*args)  # type: ignore[method-assign]
    # The first token comes from prefill, the second from the only round.
    assert run.generate(PROMPTS[:1], max_new_tokens=2)[0].tokens == world["expected"][0][:2]
    assert len(launched) == 1


def test_no_round_is_launched_when_the_one_under_way_likely_ends_all(world: dict[str, Any]) -> None:
    """After rounds of four tokens, the end of six tokens is in reach of the round under way: one more would be in vain."""
    run = engine(world, "chain")
    run.stats.rounds, run.stats.emitted = 10, 40
    launched: list[int] = []
    launch = run.rounds.launch
    run.rounds.launch = lambda *args: launched.append(1) or launch(*args)  # type: ignore[method-assign]
    assert run.generate(PROMPTS[:1], max_new_tokens=6)[0].tokens == world["expected"][0][:6]
    assert len(launched) == run.stats.steps == 4


@pytest.mark.parametrize("place", range(6))
def test_a_stop_token_ends_the_answer_and_the_next_request_gets_the_row(world: dict[str, Any], place: int) -> None:
    run = engine(world, "chain", max_requests=1, num_pages=20)
    stop = world["expected"][0][place]
    first = world["expected"][0][: world["expected"][0].index(stop) + 1]
    requests = [run.add(PROMPTS[0], max_new_tokens=COUNT, stop_token_ids=[stop])]
    requests += [run.add(prompt, max_new_tokens=COUNT) for prompt in PROMPTS[1:3]]
    while run.has_work:
        run.step()
    assert [request.tokens for request in requests] == [first, *world["expected"][1:3]]
    assert_no_page_lost(run)


@pytest.mark.parametrize("shape", CONFIGS)
def test_the_end_of_the_context_comes_at_the_right_token(world: dict[str, Any], shape: str) -> None:
    run = engine(world, shape, max_context=16)
    requests = run.generate(PROMPTS[:3], max_new_tokens=COUNT)
    wanted = [tokens[: 16 - len(prompt)] for tokens, prompt in zip(world["expected"], PROMPTS[:3], strict=False)]
    assert [request.tokens for request in requests] == wanted
    assert {request.finish_reason for request in requests} == {"context"}
    assert_no_page_lost(run)


def test_a_cancelled_request_gets_nothing_of_the_round_under_way(world: dict[str, Any]) -> None:
    run = engine(world, "chain")
    first, second, third = (run.add(prompt, max_new_tokens=COUNT) for prompt in PROMPTS[:3])
    run.step()
    before = list(second.tokens)
    run.cancel(second)
    # Takes the cancelled request's row and pages while a round with the old one is under way.
    fourth = run.add(PROMPTS[3], max_new_tokens=COUNT)
    while run.has_work:
        run.step()
    assert second.tokens == before
    wanted = [world["expected"][place] for place in (0, 2, 3)]
    assert [request.tokens for request in (first, third, fourth)] == wanted
    assert_no_page_lost(run)


def test_a_callback_may_cancel_another_request_of_the_batch(world: dict[str, Any]) -> None:
    run = engine(world, "chain")
    requests = [run.add(prompt, max_new_tokens=COUNT) for prompt in PROMPTS[:2]]

    def cancel_the_second(request: Request, tokens: list[int]) -> None:
        if request is requests[0] and not requests[1].finished:
            run.cancel(requests[1])

    while run.has_work:
        run.step(cancel_the_second)
    assert requests[0].tokens == world["expected"][0]
    assert requests[1].finish_reason == "cancelled"
    assert_no_page_lost(run)


def test_all_are_cancelled_then_another_joins(world: dict[str, Any]) -> None:
    run = engine(world, "tree")
    early = run.add(PROMPTS[0], max_new_tokens=COUNT)
    run.step()
    run.cancel(early)
    assert run.generate([PROMPTS[1]], max_new_tokens=COUNT)[0].tokens == world["expected"][1]
    assert_no_page_lost(run)


def test_sampled_answers_and_scores_do_not_depend_on_it(world: dict[str, Any]) -> None:
    sampling = [
        SamplingParams(temperature=0.8, seed=3),
        SamplingParams(temperature=1.1, top_k=7, repetition_penalty=1.3, seed=4),
        SamplingParams(),
    ]
    answers = []
    for look_ahead in (False, True):
        run = engine(world, "chain", look_ahead)
        requests = run.generate(PROMPTS[:3], sampling=sampling, max_new_tokens=COUNT, logprobs=True)
        answers.append([(request.tokens, request.margins, request.logprobs) for request in requests])
    assert answers[0] == answers[1]


def test_split_rounds_do_not_look_ahead(world: dict[str, Any]) -> None:
    assert engine(world, "chain").look_ahead
    assert not engine(world, "chain", split=True).look_ahead
    assert not Engine(world["target"], max_context=64).look_ahead, "a CPU has nothing to overlap"


@pytest.mark.gpu
def test_a_gpu_looks_ahead_and_gives_the_same_ids() -> None:
    judge = small_llama()
    target = target_of(judge).to("cuda")
    run = Engine(target, Shadow(target), SpecConfig(3, 4, 13), max_requests=3, max_context=64, page_size=4, strict=True)
    assert run.look_ahead
    requests = run.generate(PROMPTS, max_new_tokens=COUNT)
    assert [request.tokens for request in requests] == [greedy(judge, prompt, COUNT) for prompt in PROMPTS]
    torch.cuda.synchronize()
    assert_no_page_lost(run)


@pytest.mark.gpu
def test_nothing_waits_for_the_device_when_a_request_ends() -> None:
    """Rows and page tables of the next batch go over while a round runs; the only wait is for a round's result."""
    target = target_of(small_llama()).to("cuda")
    run = Engine(target, Shadow(target), SpecConfig(1), max_requests=3, max_context=64, page_size=4, strict=True)
    run.warm_up()
    counts = (20, 6, 11)
    for _ in range(2):
        requests = [run.add(prompt, max_new_tokens=count) for prompt, count in zip(PROMPTS[:3], counts, strict=True)]
        run.step()
        while run.has_work:
            torch.cuda.set_sync_debug_mode("error")
            try:
                run.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        assert [len(request.tokens) for request in requests] == list(counts)
    assert_no_page_lost(run)
