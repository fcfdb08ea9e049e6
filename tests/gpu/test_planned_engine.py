"""The decode loop on FlashInfer fa2, whose kernels are planned on the host: both graph modes against eager and Triton.

One configuration of FlashInfer is compiled at first use (float16, head dim 64, no window).

    pytest tests/gpu/test_planned_engine.py
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from specops.spec import Engine, Request, SpecConfig
from tests.spec.toys import Shadow, small_llama, target_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="flashinfer-python is not installed here"),
    pytest.mark.filterwarnings("ignore:flashinfer_fa2 schedules"),
]
PROMPTS = [[1, 2, 3, 4, 5], [7] * 13, [9, 8], [3] * 70, [11, 12, 13]]
COUNT = 40
CONFIGS = {"plain": None, "chain": SpecConfig(3), "tree": SpecConfig(3, 2, 6), "one step": SpecConfig(1, 2, 3)}
# Two best logits nearer than this may change places with the order of a float16 sum; the models' logits go beyond 10.
TIE = 0.05


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    target = target_of(small_llama(**sizes)).to("cuda", torch.float16)
    return target, Shadow(target)


@pytest.fixture(scope="module")
def expected(models: tuple[Any, Any]) -> list[Request]:
    """Plain decoding, eager, on Triton: no plan, no draft, no graph."""
    return run(models, "auto", "eager", None)[1]


def run(models: tuple[Any, Any], backend: str, mode: Any, config: SpecConfig | None) -> tuple[Engine, list[Request]]:
    target, shadow = models
    target.set_backend(backend)
    shadow.model.set_backend(backend)
    engine = Engine(
        target,
        None if config is None else shadow,
        config,
        max_requests=3,
        max_context=128,
        page_size=16,
        buckets=[1, 3],
        mode=mode,
        strict=True,
    )
    engine.warm_up()
    return engine, engine.generate(PROMPTS, max_new_tokens=COUNT)


def assert_same_ids(requests: list[Request], others: list[Request]) -> None:
    """Equal, or parted at a tie; most must be equal to their end."""
    whole = 0
    for request, other in zip(requests, others, strict=True):
        differ = [place for place, pair in enumerate(zip(request.tokens, other.tokens, strict=True)) if pair[0] != pair[1]]
        whole += not differ
        assert not differ or min(request.margins[differ[0]], other.margins[differ[0]]) < TIE, (request.tokens, other.tokens)
    assert whole >= len(requests) - 1


@pytest.mark.parametrize("mode", ["eager", "direct", "reduce-overhead"])
@pytest.mark.parametrize("shape", CONFIGS)
def test_fa2_rounds_give_the_ids_of_eager_triton(
    models: tuple[Any, Any], expected: list[Request], shape: str, mode: str
) -> None:
    engine, requests = run(models, "flashinfer_fa2", mode, CONFIGS[shape])
    assert_same_ids(requests, expected)
    if mode != "eager":
        (report,) = engine.explain().values()
        assert report.captured, str(report)
        assert report.recompiles == []
        assert sum(bucket.replays for bucket in report.buckets) == engine.stats.steps
    if shape != "plain":
        assert engine.stats.accepted_per_round > 1.2
    engine.allocator.check()


@pytest.mark.parametrize("mode", ["direct", "reduce-overhead"])
def test_lengths_go_down_when_shorter_requests_follow(models: tuple[Any, Any], expected: list[Request], mode: str) -> None:
    engine, _ = run(models, "flashinfer_fa2", mode, CONFIGS["tree"])
    again = [engine.generate([prompt], max_new_tokens=COUNT)[0] for prompt in reversed(PROMPTS)]
    assert_same_ids(again[::-1], expected)
