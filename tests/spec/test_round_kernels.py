"""Whole rounds through the ops and kernels that a GPU takes, on this machine: interpreted, or compiled where there is a GPU.

TRITON_INTERPRET=1 python -m pytest -q tests/spec/test_round_kernels.py
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import pytest
from torch._inductor.utils import run_and_get_code
from torch.library import Library

from specops.ops import contracts, triton_beam, triton_places, triton_round, triton_round_end
from specops.spec import Engine, SamplingParams, SpecConfig
from specops.spec.round import RoundStep
from tests.spec.toys import Shadow, greedy, small_llama, target_of, untrained_head

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPTS = [[3, 14, 15, 9, 26, 5], [35, 8], [9, 7, 9, 3, 2, 3, 8, 4, 6]]
COUNT = 8
SHAPES = {"one step": SpecConfig(1), "chain": SpecConfig(3), "tree": SpecConfig(3, 4, 12), "wide": SpecConfig(2, 3, 10)}
KERNELS = {
    "row_places": triton_places.row_places,
    "take_requests": triton_places.take_requests,
    "expand_beam": triton_beam.expand_beam,
    "top_tokens": triton_round.top_tokens,
    "build_tree": triton_round.build_tree,
    "verify_greedy": triton_round.verify_greedy,
    "hand_on": triton_round_end.hand_on,
    "commit_round": triton_round_end.commit_round,
}


@pytest.fixture(scope="module")
def world() -> dict[str, Any]:
    judge = small_llama()
    target = target_of(judge).to(DEVICE)
    heads = {"shadow": Shadow(target), "reduced": untrained_head(target, draft_vocab_size=64, format="eagle3").to(DEVICE)}
    return {"target": target, "expected": [greedy(judge, prompt, COUNT) for prompt in PROMPTS], **heads}


@pytest.fixture
def ops_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contracts, "through_op", lambda tensor: True)


@pytest.fixture
def calls(ops_of_a_gpu: None) -> Iterator[set[str]]:
    """Names of the kernels that ran, in place of what the ops run on a CPU."""
    ran: set[str] = set()

    def told(name: str) -> Any:
        def kernel(*arguments: Any) -> Any:
            ran.add(name)
            with torch.no_grad():
                return KERNELS[name](*arguments)

        return kernel

    # Kept until the end of the test: with it go its kernels.
    library = Library("specops", "IMPL")
    for name in KERNELS:
        library.impl(name, told(name), "CUDA" if DEVICE == "cuda" else "CPU", allow_override=True)
    yield ran
    library._destroy()


@pytest.mark.parametrize(("draft", "shape"), [*(("shadow", shape) for shape in SHAPES), ("reduced", "tree")])
def test_rounds_of_kernels_give_the_ids_of_transformers(
    world: dict[str, Any], calls: set[str], draft: str, shape: str
) -> None:
    engine = Engine(world["target"], world[draft], SHAPES[shape], max_requests=3, max_context=64, page_size=4, mode="eager")
    requests = engine.generate(PROMPTS, max_new_tokens=COUNT)
    assert [request.tokens for request in requests] == world["expected"]
    if draft == "shadow":
        assert engine.stats.accepted_per_round > 1.1
    assert calls == set(KERNELS)


def test_sampled_rounds_of_kernels_are_those_of_torch(world: dict[str, Any], calls: set[str]) -> None:
    """Seeds and logits alone decide what a sampled request says."""
    sampling = [SamplingParams(temperature=0.8, seed=seed) for seed in range(3)]

    def run() -> Any:
        options = {"max_requests": 3, "max_context": 64, "page_size": 4, "mode": "eager"}
        engine = Engine(world["target"], world["shadow"], SHAPES["tree"], **options)
        requests = [
            engine.add(p, max_new_tokens=COUNT, sampling=s, logprobs=True) for p, s in zip(PROMPTS, sampling, strict=True)
        ]
        while not all(request.finished for request in requests):
            engine.step()
        return [request.tokens for request in requests], [request.logprobs for request in requests]

    tokens, logprobs = run()
    assert {"hand_on", "commit_round"} <= calls
    with pytest.MonkeyPatch.context() as torch_alone:
        torch_alone.setattr(contracts, "through_op", lambda tensor: False)
        expected, wanted = run()
    assert tokens == expected
    for found, right in zip(logprobs, wanted, strict=True):
        assert len(found) == COUNT
        assert found == pytest.approx(right, abs=1e-4)


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_a_compiled_round_copies_nothing_for_its_ops(world: dict[str, Any], ops_of_a_gpu: None, shape: str) -> None:
    """One request: beside ops there is what the models compute, and the read of the hidden states where a round starts."""
    torch._dynamo.reset()
    engine = Engine(world["target"], world["reduced"], SHAPES[shape], max_requests=1, max_context=64, mode="eager")
    step = engine.rounds.build("greedy").step
    assert isinstance(step, RoundStep)
    rows = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    with torch.no_grad():
        _, parts = run_and_get_code(torch.compile(step, fullgraph=True, dynamic=False), rows)
    code = "\n".join(parts)
    assert {"row_places", "expand_beam", "hand_on", "commit_round"} <= {
        line.split("torch.ops.specops.")[1].split(".")[0] for line in code.splitlines() if "torch.ops.specops." in line
    }
    # A GPU's kernels have names that are cut short.
    if DEVICE == "cuda":
        return
    called = code[code.index("def call") :]
    fused = [line for line in called.splitlines() if "_fused_" in line and "(" in line and not line.lstrip().startswith("#")]
    models = ("mean", "embedding", "silu", "cat_hand_on", "index_select")
    others = [line for line in fused if not any(kind in line for kind in models)]
    assert len(others) <= 1
    assert all("_fused_index_0" in line for line in others)
