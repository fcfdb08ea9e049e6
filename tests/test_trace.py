"""A recorded round against the round itself and transformers' probabilities; drawings that are well formed and load nothing.

Run alone: pytest tests/test_trace.py
"""

from __future__ import annotations

import xml.etree.ElementTree
from dataclasses import replace
from typing import Any

import pytest
import torch

from specops.api import Models
from specops.spec import Engine, SamplingParams, SpecConfig
from specops.trace import RoundTrace, trace_round
from specops.trace_drawing import to_html, to_svg
from tests.spec.toys import Shadow, small_llama, target_of

PROMPT = [1, 2, 3, 4, 5]
SAMPLED = SamplingParams(0.3, top_k=30, seed=3)


class Numbers:
    """A tokenizer whose text is hostile to HTML."""

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(f"<{token}&" for token in tokens)


@pytest.fixture(scope="module")
def world() -> dict[str, Any]:
    judge = small_llama()
    target = target_of(judge)
    return {"judge": judge, "models": Models(target, Numbers(), Shadow(target))}


def path_to(trace: RoundTrace, node: int) -> list[int]:
    """Tokens from the root's first child down to a node."""
    path: list[int] = []
    while node > 0:
        path.insert(0, trace.nodes[node].token)
        node = trace.nodes[node].parent
    return path


@pytest.mark.parametrize("sampling", [None, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("config", [SpecConfig(3), SpecConfig(3, 3, 12), SpecConfig(1, 2, 3)], ids=["chain", "tree", "one"])
def test_the_recorded_rounds_are_the_rounds_of_decoding(
    world: dict[str, Any], config: SpecConfig, sampling: SamplingParams | None
) -> None:
    models = world["models"]
    engine = Engine(models.target, models.head, config, max_requests=1, max_context=64)
    request = engine.generate([PROMPT], max_new_tokens=30, sampling=sampling)[0]
    tokens, accepted = list(PROMPT) + request.tokens[:1], []
    for number, length in enumerate(request.accept_lens[:5], 1):
        trace = trace_round(models, PROMPT, round=number, config=config, sampling=sampling, max_context=64)
        assert trace.before == models.tokenizer.decode(tokens)
        assert trace.nodes[0].token == tokens[-1]
        assert len(trace.nodes) == config.width
        assert list(trace.emitted_tokens) == request.tokens[len(tokens) - len(PROMPT) :][:length]
        last = max(index for index, node in enumerate(trace.nodes) if node.accepted)
        assert path_to(trace, last) == list(trace.emitted_tokens[:-1])
        accepted.append(length)
        tokens += trace.emitted_tokens
    assert max(accepted) > 1


def test_probabilities_are_those_of_transformers(world: dict[str, Any]) -> None:
    models, judge = world["models"], world["judge"]
    trace = trace_round(models, PROMPT, round=2, config=SpecConfig(3, 3, 12), max_context=64)
    tokens = [int(part.rstrip("&")) for part in trace.before.split("<")[1:]]
    for index, node in enumerate(trace.nodes):
        after = judge(torch.tensor([tokens + path_to(trace, index)])).logits[0, -1].softmax(0)
        assert node.best_probability == pytest.approx(float(after.max()), abs=1e-4)
        if index:
            before = judge(torch.tensor([tokens + path_to(trace, node.parent)])).logits[0, -1].softmax(0)
            assert node.target_probability == pytest.approx(float(before[node.token]), abs=1e-4)
            assert 0 < (node.draft_probability or 0) <= 1


def test_draft_probabilities_of_siblings_are_a_part_of_one(world: dict[str, Any]) -> None:
    # Twice the vocabulary's size in siblings is impossible, so all children of the root together are the whole.
    judge = small_llama(vocab_size=4, hidden_size=16, intermediate_size=16, num_attention_heads=2, num_key_value_heads=1)
    target = target_of(judge)
    models = Models(target, Numbers(), Shadow(target))
    trace = trace_round(models, [1, 2], config=SpecConfig(1, 4, 5), max_context=32)
    assert sum(node.draft_probability or 0 for node in trace.nodes[1:]) == pytest.approx(1, abs=1e-4)
    assert sum(node.target_probability or 0 for node in trace.nodes[1:]) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("config", [SpecConfig(3), SpecConfig(3, 3, 12)], ids=["chain", "tree"])
def test_the_drawing_is_well_formed_holds_every_node_and_loads_nothing(world: dict[str, Any], config: SpecConfig) -> None:
    trace = trace_round(world["models"], PROMPT, round=3, config=config, max_context=64, title="<script>")
    svg = to_svg(trace)
    root = xml.etree.ElementTree.fromstring(svg)
    boxes = list(root.iter("{http://www.w3.org/2000/svg}rect"))
    accepted = sum(node.accepted for node in trace.nodes)
    kinds = [box.attrib["class"].split()[1] for box in boxes]
    assert kinds.count("accepted") == accepted == len(trace.emitted)
    assert kinds.count("rejected") == config.width - accepted
    assert kinds.count("bonus") == 1
    corners = [(float(box.attrib["x"]), float(box.attrib["y"])) for box in boxes]
    assert len(set(corners)) == len(corners), "no box hides another"
    assert all(x + 148 <= float(root.attrib["width"]) and y + 44 <= float(root.attrib["height"]) for x, y in corners)
    page = to_html(trace)
    assert svg in page
    assert "<script" not in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")


def test_what_can_not_be_traced_is_said(world: dict[str, Any]) -> None:
    models = world["models"]
    with pytest.raises(ValueError, match="there is no draft head"):
        trace_round(replace(models, head=None), PROMPT)
    with pytest.raises(ValueError, match="rounds count from 1, got 0"):
        trace_round(models, PROMPT, round=0)
    with pytest.raises(ValueError, match=r"the answer ends in round \d+; there is no round 40"):
        trace_round(models, PROMPT, round=40, max_context=16)
