"""Tensor parallel on two GPUs: the ids of one GPU, with NCCL's collectives inside every CUDA graph.

Run alone: pytest -m gpu tests/gpu/test_parallel.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.parallel import ranks
from tests.parallel.test_parallel import results

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason=f"needs two GPUs, there are {torch.cuda.device_count()}"),
]


def check(cases: dict[str, Any]) -> list[str]:
    ran = [key for key, case in cases.items() if "whole" in case and not key.endswith("seedless")]
    for key in ran:
        for part in cases[key]["ranks"]:
            assert part["tokens"] == cases[key]["whole"]["tokens"], key
            assert part["accept_lens"] == cases[key]["whole"]["accept_lens"], key
    return ran


def test_two_gpus_give_the_ids_of_one() -> None:
    names = [name for name in ranks.MODELS if "deepseek" not in name]
    assert len(check(results("--device", "cuda", "--models", *names))) >= len(names)


@pytest.mark.parametrize("shape", ranks.ROUNDS)
@pytest.mark.parametrize("mode", ["direct", "reduce-overhead"])
def test_collectives_are_captured_and_graphs_give_the_ids_of_eager_code(mode: str, shape: str) -> None:
    cases = results("--device", "cuda", "--models", ranks.SMALL, "--modes", mode, "--shapes", shape)
    assert len(check(cases)) == 1
    for key, case in cases.items():
        assert [part["captured"] for part in case["ranks"]] == [True, True], key
        assert [part["warnings"] for part in case["ranks"]] == [[], []], key
