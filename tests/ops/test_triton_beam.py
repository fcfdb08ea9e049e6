"""A level of drafting as two Triton kernels: against a beam search with lists, interpreted, or compiled on a GPU.

TRITON_INTERPRET=1 python -m pytest -q tests/ops/test_triton_beam.py
"""

from __future__ import annotations

import math
import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import pytest
from torch import Tensor

from specops import ops
from specops.ops import beam as plain
from specops.ops import triton_beam

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def logprobs(row: list[float]) -> list[float]:
    total = math.log(math.fsum(math.exp(number) for number in row))
    return [number - total for number in row]


def search(levels: list[Tensor], topk: int, request: int) -> tuple[list[tuple[int, float, int]], list[list[int]]]:
    """Candidates ``(token, score, parent)``, and the candidates of every level's beam, by the definition."""
    found: list[tuple[int, float, int]] = []
    beams: list[list[int]] = []
    for level, logits in enumerate(levels):
        first = len(found)
        for entry, parent in enumerate(beams[-1] if beams else [-1]):
            row = logprobs(logits[request * (topk if level else 1) + entry].tolist())
            best = sorted(range(len(row)), key=lambda token: (-row[token], token))[:topk]
            found += [(token, row[token] + (found[parent][1] if level else 0.0), parent) for token in best]
        beams.append(sorted(range(first, len(found)), key=lambda c: (-found[c][1], c))[:topk])
    return found, beams


def ancestry(found: list[tuple[int, float, int]], candidate: int) -> set[int]:
    line = set()
    while candidate >= 0:
        line.add(candidate)
        candidate = found[candidate][2]
    return line


@pytest.mark.parametrize(
    ("batch", "topk", "steps", "vocab", "dtype"),
    [
        (2, 1, 1, 40, torch.float32),
        (3, 1, 3, 300, torch.bfloat16),
        (2, 4, 4, 700, torch.float32),
        (1, 4, 3, 1100, torch.bfloat16),
        (2, 3, 3, 50, torch.float32),
        (1, 8, 2, 600, torch.float32),
        (1, 5, 2, 5, torch.float32),
        (0, 4, 3, 50, torch.float32),
    ],
)
@pytest.mark.parametrize("kernel", ["triton", "plain"])
def test_beams_are_those_of_a_search(kernel: str, batch: int, topk: int, steps: int, vocab: int, dtype: torch.dtype) -> None:
    expand = triton_beam.expand_beam if kernel == "triton" else plain._expand_beam
    torch.manual_seed(vocab + topk)
    # A state of more rows than requests. The plain form leaves the order of equals, which 16 bits make, to torch.
    spread = (torch.randn(batch * (topk * steps + 1) + 3, vocab) * 3).to(dtype if kernel == "triton" else torch.float32)
    state = spread[: batch + 3].to(DEVICE)
    rows = torch.arange(batch + 2, 2, -1, device=DEVICE)
    levels = [state[rows], *(spread[3 + batch * topk * k :][: batch * topk].to(DEVICE) for k in range(1, steps))]
    wide = plain.num_candidates(topk, steps)
    found = [
        torch.full((batch, wide + 2), -7, dtype=dtype, device=DEVICE)[:, :wide]
        for dtype in (torch.int64, torch.float32, torch.int64)
    ]
    past: tuple[Tensor | None, ...] = (None, None, None)
    wanted = [search(levels, topk, request) for request in range(batch)]
    before = [[-1] for _ in range(batch)]
    for level in range(steps):
        logits = levels[level] if level else state
        scores, tokens, candidates, parents, mask = expand(*found, logits, topk, None if level else rows, *past)
        assert [tensor.dtype for tensor in (scores, tokens, candidates, parents, mask)] == [
            *(torch.float32, torch.int64, torch.int64, torch.int64, torch.bool)
        ]
        assert mask.shape == (batch * topk, topk * (level + 1))
        mask = mask.reshape(batch, topk, topk * (level + 1))
        for request, (all_of_them, beams) in enumerate(wanted):
            chosen = beams[level]
            assert candidates[request].tolist() == chosen
            assert tokens[request].tolist() == [all_of_them[c][0] for c in chosen]
            assert scores[request].tolist() == pytest.approx([all_of_them[c][1] for c in chosen], abs=2e-4)
            above = [all_of_them[c][2] for c in chosen]
            assert parents[request].tolist() == [before[request].index(c) for c in above]
            columns = [c for one in beams[: level + 1] for c in one]
            for entry, candidate in enumerate(chosen):
                line = ancestry(all_of_them, candidate)
                assert mask[request, entry].tolist() == [c in line for c in columns]
            before[request] = chosen
        past = (scores, candidates, mask.flatten(0, 1))
    for request, (all_of_them, _) in enumerate(wanted):
        assert found[0][request].tolist() == [token for token, _, _ in all_of_them]
        assert found[1][request].tolist() == pytest.approx([score for _, score, _ in all_of_them], abs=2e-4)
        assert found[2][request].tolist() == [parent for _, _, parent in all_of_them]


def test_equal_paths_go_to_the_earlier_candidate() -> None:
    found = [torch.zeros((1, 6), dtype=dtype, device=DEVICE) for dtype in (torch.int64, torch.float32, torch.int64)]
    flat = torch.zeros(1, 8, device=DEVICE)
    first = triton_beam.expand_beam(*found, flat, 2)
    assert [first[place].tolist() for place in (1, 2)] == [[[0, 1]], [[0, 1]]]
    second = triton_beam.expand_beam(*found, flat.expand(2, 8), 2, None, first[0], first[2], first[4])
    assert [second[place].tolist() for place in (1, 2, 3)] == [[[0, 1]], [[2, 3]], [[0, 0]]]
    assert found[2].tolist() == [[-1, -1, 0, 0, 1, 1]]


def test_what_does_not_fit_is_refused() -> None:
    found = [torch.zeros((1, 6), dtype=dtype) for dtype in (torch.int64, torch.float32, torch.int64)]
    with pytest.raises(ValueError, match=r"logits must be \[R, V\] with V >= topk = 3 >= 1, got \(1, 2\)"):
        ops.expand_beam(*found, torch.zeros(1, 2), topk=3)


def test_candidates_are_written_without_copies_of_them() -> None:
    """Compiled, the levels write into the tensors themselves: functionalization must not leave clones behind."""
    torch._dynamo.reset()

    def levels(first: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        tokens = torch.empty((2, 10), dtype=torch.int64, device=first.device)
        found = tokens, torch.empty_like(tokens, dtype=torch.float32), torch.empty_like(tokens)
        best = torch.ops.specops.expand_beam(*found, first, 2)
        for _ in range(2):
            best = torch.ops.specops.expand_beam(*found, logits, 2, None, best[0], best[2], best[4])
        return found

    given = torch.randn(2, 30, device=DEVICE), torch.randn(4, 30, device=DEVICE)
    found, code = torch._inductor.utils.run_and_get_code(torch.compile(levels, fullgraph=True), *given)
    assert "_fused_" not in "".join(code)
    for compiled, eager in zip(found, levels(*given), strict=True):
        assert torch.equal(compiled, eager)
