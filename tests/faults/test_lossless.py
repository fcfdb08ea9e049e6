"""Greedy speculative decoding emits the ids of plain decoding: hundreds of random models, settings and schedules.

Models are float64, so that two logits are never equal but for rounding. Requests join while others run, are cancelled, and
stop by token, by length and by context.

OMP_NUM_THREADS=1 pytest tests/faults/test_lossless.py
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specops.models.config import ModelConfig
from specops.models.llama import CausalLM
from specops.spec import Engine, SpecConfig
from tests.spec.toys import Shadow

CONTEXT = 40
PROMPTS = ([1, 2, 3, 4, 5], [7] * 13, [9], [3, 1] * 8, [11, 12, 13, 14])


@functools.lru_cache(maxsize=64)
def world(seed: int, layers: int, window: int | None, noise: float) -> tuple[Any, Any, list[list[int]]]:
    """A random target, the same with noise as its draft, and the target's plain continuation of every prompt."""
    torch.manual_seed(seed)
    windows = tuple(window if layer % 2 == 0 else None for layer in range(layers))
    config = ModelConfig(24, 16, 24, layers, 4, 2, 8, CONTEXT, layer_windows=windows if window else ())
    target = CausalLM(config).double().eval().requires_grad_(False)
    for parameter in target.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.5)
    plain = Engine(target, max_requests=len(PROMPTS), max_context=CONTEXT, page_size=8)
    answers = [request.tokens for request in plain.generate(PROMPTS, max_new_tokens=CONTEXT)]
    return target, Shadow(target, noise), answers


def cut(answer: list[int], count: int, stops: set[int]) -> list[int]:
    """What of the plain continuation a request may emit."""
    taken = answer[:count]
    for place, token in enumerate(taken):
        if token in stops:
            return taken[: place + 1]
    return taken


@st.composite
def rounds(draw: st.DrawFn) -> SpecConfig:
    steps, topk = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    most = topk + (steps - 1) * topk * topk + 1
    nodes = None if topk == 1 else draw(st.integers(2, min(most, 12)))
    return SpecConfig(steps, topk, nodes, draft_extend=draw(st.sampled_from(("v2", "v2", "v1"))))


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "prompt": draw(st.integers(0, len(PROMPTS) - 1)),
        "count": draw(st.integers(1, 14) | st.just(CONTEXT)),
        "stop": draw(st.none() | st.integers(0, 8)),
        "joins": draw(st.integers(0, 4)),
        "cancelled": draw(st.none() | st.none() | st.none() | st.integers(1, 4)),
    }


@pytest.mark.slow
@settings(max_examples=250, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    model=st.tuples(
        st.integers(0, 5), st.integers(1, 2), st.sampled_from((None, 5)), st.sampled_from((0.0, 0.02, 0.1, 1.0))
    ),
    config=rounds(),
    page_size=st.sampled_from((1, 2, 3, 8, 64)),
    max_requests=st.integers(1, 4),
    split=st.booleans(),
    asked=st.lists(requests(), min_size=1, max_size=5),
)
def test_ids_are_those_of_plain_decoding(
    model: tuple[int, int, int | None, float],
    config: SpecConfig,
    page_size: int,
    max_requests: int,
    split: bool,
    asked: list[dict[str, Any]],
) -> None:
    target, draft, answers = world(*model)
    engine = Engine(target, draft, config, max_requests=max_requests, max_context=CONTEXT, page_size=page_size, split=split)
    running: dict[int, Any] = {}
    stops = [set() if a["stop"] is None else {answers[a["prompt"]][a["stop"]]} for a in asked]
    step = 0
    while engine.has_work or len(running) < len(asked):
        for index, ask in enumerate(asked):
            if ask["joins"] == step:
                running[index] = engine.add(PROMPTS[ask["prompt"]], max_new_tokens=ask["count"], stop_token_ids=stops[index])
            if index in running and ask["cancelled"] is not None and ask["joins"] + ask["cancelled"] == step:
                engine.cancel(running[index])
        engine.step()
        step += 1
    for index, ask in enumerate(asked):
        expected = cut(answers[ask["prompt"]], ask["count"], stops[index])
        got = running[index]
        if got.finish_reason == "cancelled":
            assert got.tokens == expected[: len(got.tokens)]
        else:
            assert got.tokens == expected
    engine.allocator.check()
    assert engine.allocator.num_free == engine.allocator.num_pages - 1
