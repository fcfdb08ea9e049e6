"""Every step of decoding is one graph for any number of requests, of the ops it is made of on a GPU.

Inductor compiles for the CPU here. Run alone: OMP_NUM_THREADS=1 pytest tests/spec/test_one_graph.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specops.compile.report import compiled_graphs
from specops.ops import contracts
from specops.ops.top_tokens import column, top_tokens
from specops.spec import Engine, SamplingParams, SpecConfig
from specops.spec.prefill import Forwards
from specops.spec.runners import variant_for
from tests.spec.toys import greedy, small_llama, target_of, untrained_head

PROMPTS = [[1, 2, 3, 4, 5], [9, 8]]
SAMPLING = {"greedy": SamplingParams(), "filtered": SamplingParams(0.8, top_k=9, top_p=0.9, seed=1)}


@pytest.fixture(autouse=True)
def ops_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contracts, "through_op", lambda tensor: True)


@pytest.fixture(scope="module")
def world() -> dict[str, Any]:
    judge = small_llama(num_hidden_layers=1)
    target = target_of(judge)
    return {"judge": judge, "target": target, "head": untrained_head(target, format="eagle3")}


@pytest.mark.parametrize(
    ("config", "sampling"),
    [(None, "greedy"), (SpecConfig(2), "greedy"), (SpecConfig(2, 2, 4), "greedy"), (SpecConfig(2, 2, 4), "filtered")],
)
def test_rounds(world: dict[str, Any], config: SpecConfig | None, sampling: str) -> None:
    options = {"max_requests": 2, "max_context": 64, "page_size": 16}
    head = None if config is None else world["head"]
    engine = Engine(world["target"], head, config, mode="direct", buckets=[1, 2], **options)
    report = engine.rounds.build(variant_for(SAMPLING[sampling], False)).warm_up()
    assert report.compiled_graphs == 1
    for prompts in (PROMPTS, PROMPTS[:1]):
        requests = engine.generate(prompts, max_new_tokens=5, sampling=SAMPLING[sampling])
        if sampling == "greedy":
            assert [request.tokens for request in requests] == [greedy(world["judge"], prompt, 5) for prompt in prompts]
    assert (report.compiled_graphs, report.recompiles) == (1, [])


def test_prefill(world: dict[str, Any]) -> None:
    target, head = world["target"], world["head"]
    engine = Engine(target, head, SpecConfig(2), max_requests=2, max_context=64, page_size=16)
    engine._forwards = Forwards(target, head, 16, aux_layers=head.config.aux_layers, compiled=True)
    before = compiled_graphs()
    engine._forwards.warm_up(engine.pages.max_pages, 2)
    for prompts in (PROMPTS, PROMPTS[:1]):
        requests = engine.generate(prompts, max_new_tokens=5)
        assert [request.tokens for request in requests] == [greedy(world["judge"], prompt, 5) for prompt in prompts]
    assert compiled_graphs() - before == 2, "target and draft"


@pytest.mark.parametrize("shape", [(6,), (2, 3), (1, 6)])
def test_a_column_is_what_an_index_gives(shape: tuple[int, ...]) -> None:
    values, tokens = top_tokens(torch.randn(6, 20), 2)
    for ranked in (values, tokens):
        for rank in (0, 1):
            assert torch.equal(column(ranked, rank, *shape), ranked[:, rank].reshape(shape))
