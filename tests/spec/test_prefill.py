"""Prefill compiled for any number of rows: the ids of eager prefill, by one graph a model.

Here dynamo traces and guards but generates no code; decoding on a GPU uses inductor's.
Run alone: pytest tests/spec/test_prefill.py
"""

from __future__ import annotations

import pytest
import torch

from specops.compile.report import compiled_graphs
from specops.spec import Engine, SpecConfig
from specops.spec.prefill import Forwards
from tests.spec.toys import greedy, small_llama, target_of, untrained_head

PROMPTS = [[1, 2, 3, 4, 5], [7] * 13, [9, 8], [3] * 30, [11, 12, 13], [5]]


def test_compiled_prefill_gives_the_ids_of_transformers_from_one_graph_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = small_llama()
    target = target_of(judge)
    head = untrained_head(target, format="eagle3")
    engine = Engine(target, head, SpecConfig(3, 2, 6), max_requests=3, max_context=64, page_size=4)
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda step, **options: real(step, **{**options, "backend": "eager"}))
    before = compiled_graphs()
    engine._forwards = Forwards(target, head, 4, chunk_tokens=40, aux_layers=head.config.aux_layers, compiled=True)
    engine._forwards.warm_up(engine.pages.max_pages, 3)
    assert compiled_graphs() - before == 2
    requests = engine.generate(PROMPTS, max_new_tokens=15)
    assert compiled_graphs() - before == 2
    assert [r.tokens for r in requests] == [greedy(judge, prompt, 15) for prompt in PROMPTS]


def test_rounds_behind_a_runner_follow_every_change_of_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = small_llama()
    target = target_of(judge)
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda step, **options: real(step, **{**options, "backend": "eager"}))
    head = untrained_head(target)
    engine = Engine(target, head, SpecConfig(2), max_requests=2, max_context=64, page_size=4, mode="direct")
    counts = [4, 9, 6, 11, 5, 7]
    requests = [engine.add(prompt, max_new_tokens=count) for prompt, count in zip(PROMPTS, counts, strict=True)]
    while engine.has_work:
        engine.step()
    assert [r.tokens for r in requests] == [greedy(judge, p, n) for p, n in zip(PROMPTS, counts, strict=True)]
