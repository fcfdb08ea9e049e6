"""First differences between runs, and the measured bound that excuses them.

Run alone: pytest tests/test_divergence.py
"""

from __future__ import annotations

import pytest
import torch

from specops.divergence import Divergence, first_divergence, rounding_noise
from specops.models.loading import load_target
from specops.spec import Request
from tests.spec.toys import small_llama


def run(tokens: list[int], margins: list[float]) -> Request:
    return Request([1], 9, tokens=tokens, margins=margins)


def test_the_first_difference_is_found_with_the_smaller_gap() -> None:
    same = run([4, 5, 6], [1.0, 1.0, 1.0])
    assert first_divergence([same, same], [same, same]) is None
    ours, plain = run([4, 5, 7], [1.0, 2.0, 0.25]), run([4, 5, 6], [1.0, 2.0, 0.5])
    assert first_divergence([same, ours], [same, plain]) == Divergence(1, 2, 0.25)
    assert first_divergence([run([4], [1.0])], [run([4, 5], [1.0, 0.75])]) == Divergence(0, 1, 0.75)


def test_noise_is_rounding_in_size() -> None:
    judge = small_llama()
    tokens = [(7 * i) % 64 for i in range(60)]
    ids = torch.tensor([tokens])
    exact = judge.double()(ids).logits[0]
    size = float(exact.abs().max())
    assert rounding_noise(load_target(judge.float()), tokens, 6, start=4) < 1e-5 * size
    rough = rounding_noise(load_target(judge.float(), dtype=torch.bfloat16), tokens, 6, start=4)
    assert 1e-4 * size < rough < 0.1 * size


def test_too_few_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="4 tokens from 1 on hold no block of 6"):
        rounding_noise(load_target(small_llama()), [1, 2, 3, 4], 6)
