"""What follows verification as Triton kernels: against plain loops, interpreted, or compiled where there is a GPU.

TRITON_INTERPRET=1 python -m pytest -q tests/ops/test_triton_round_end.py
"""

from __future__ import annotations

import os
import random

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import pytest
from torch import Tensor

from specops.ops import round_end, triton_round_end

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def ints(values: list[int] | list[list[int]], dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize("moves", [True, False])
@pytest.mark.parametrize("kernel", ["triton", "plain"])
@pytest.mark.parametrize(
    ("batch", "width", "depth", "size", "page_size", "dtype"),
    [
        (3, 16, 5, 40, 16, torch.float32),
        (1, 4, 4, 2500, 3, torch.bfloat16),
        (2, 3, 6, 8, 4, torch.float16),
        (2, 1, 2, 8, 4, torch.float32),
    ],
)
def test_paths_are_handed_on(
    kernel: str, batch: int, width: int, depth: int, size: int, page_size: int, dtype: torch.dtype, moves: bool
) -> None:
    rng = random.Random(width * depth)
    paths = []
    for _ in range(batch):
        length = rng.randrange(1, min(depth, width) + 1)
        paths.append([0, *sorted(rng.sample(range(1, width), length - 1))])
    index = [path + [-1] * (depth - len(path)) for path in paths]
    emitted = [[rng.randrange(1, 99) for _ in path] + [0] * (depth - len(path)) for path in paths]
    hidden = torch.randn(batch * width, size + 3).to(dtype)[:, :size].to(DEVICE)
    best = torch.randn(batch * width, 2, device=DEVICE)
    # The first request is padding: no keys, no pages.
    lens = [0, *(width + rng.randrange(1, 40) for _ in range(batch - 1))] if batch > 1 else [width + 7]
    columns = max(lens) // page_size + 1
    pages = [[rng.randrange(1, 90) if length else 0 for _ in range(columns)] for length in lens]
    # A wider tensor's columns, as a path's are.
    given = [torch.cat((part, part), dim=1)[:, :depth] for part in (ints(index), ints(emitted))]
    run = triton_round_end.hand_on if kernel == "triton" else round_end._hand_on
    found = run(*given, best, hidden, ints(lens, torch.int32), ints(pages, torch.int32), width, page_size, moves)
    tokens, states, margins, source, target = found
    assert (states.dtype, states.shape) == (dtype, (batch * width, size))
    slots: tuple[list[int], list[int]] = ([], [])
    for request, path in enumerate(paths):
        nodes = path + [0] * (width - len(path))
        assert tokens[request].tolist() == (emitted[request] + [0] * width)[:width]
        rows = [request * width + node for node in nodes]
        assert torch.equal(states[request * width :][:width], hidden[rows])
        assert torch.equal(margins[request], best[rows, 0] - best[rows, 1])
        prefix = lens[request] - width
        for step in range(depth):
            stays = step >= len(path) or path[step] == step or not lens[request]
            for out, place in zip(slots, (prefix + (path[step] if step < len(path) else 0), prefix + step), strict=True):
                page = 0 if stays else pages[request][place // page_size]
                out.append(page * page_size + place % page_size if page else -1)
    assert (source.tolist(), target.tolist()) == (slots if moves else ([], []))


@pytest.mark.parametrize("kernel", ["triton", "plain"])
@pytest.mark.parametrize("scores", [0, 1, 2])
@pytest.mark.parametrize(("width", "vocab", "size"), [(4, 50, 8), (6, 5000, 16), (1, 16, 2300)])
def test_a_round_is_committed(kernel: str, scores: int, width: int, vocab: int, size: int) -> None:
    spare = 5
    rows, before, lens = [3, spare, 0, spare], [7, 0, 2, 0], [min(2, width), 1, width, 1]
    state = [
        *(ints([9, 9, 2, 7, 9, 0], torch.int32), ints([0, 1, 2, 3, 4, 5])),
        *(torch.randn(6, columns, device=DEVICE) for columns in (vocab, size)),
    ]
    old = [tensor.clone() for tensor in state]
    tokens = ints([[10 * request + column for column in range(width)] for request in range(4)])
    logits, hidden = torch.randn(4, vocab + 1, device=DEVICE)[:, :vocab], torch.randn(4, size, device=DEVICE)
    given = [torch.randn(4, width, device=DEVICE) for _ in range(scores)]
    run = triton_round_end.commit_round if kernel == "triton" else round_end._commit_round
    counts = (ints(rows), ints(before, torch.int32), ints(lens, torch.int32))
    packed = run(*state, *counts, tokens, logits, hidden, given)
    assert (packed.dtype, packed.shape) == (torch.int32, (4, 1 + (1 + scores) * width))
    assert packed[:, 0].tolist() == lens
    assert packed[:, 1 : 1 + width].tolist() == tokens.tolist()
    bits = [score.view(torch.int32) for score in given]
    assert torch.equal(packed[:, 1 + width :], torch.cat(bits, dim=1) if bits else packed[:, :0])
    assert state[0].tolist() == [2 + width, 9, 2, 7 + min(2, width), 9, 0], "a padded request keeps no keys"
    assert state[1][[3, 0]].tolist() == [min(2, width) - 1, 20 + width - 1]
    for request in (0, 2):
        assert torch.equal(state[2][rows[request]], logits[request])
        assert torch.equal(state[3][rows[request]], hidden[request])
    for untouched in (1, 2, 4):
        assert all(torch.equal(new[untouched], was[untouched]) for new, was in zip(state, old, strict=True))


def test_empty_batches() -> None:
    state = [ints([1], torch.int32), ints([2]), torch.ones(1, 4, device=DEVICE), torch.ones(1, 3, device=DEVICE)]
    none = ints([], torch.int32)
    packed = triton_round_end.commit_round(
        *state, ints([]), none, none, ints([[]]).T.reshape(0, 2), state[2][:0], state[3][:0], []
    )
    assert packed.shape == (0, 3)
    parts = triton_round_end.hand_on(
        *(ints([[]]).reshape(0, 3), ints([[]]).reshape(0, 3), torch.ones(0, 2, device=DEVICE), state[3][:0]),
        *(none, none.reshape(0, 4), 2, 16, True),
    )
    assert [tuple(part.shape) for part in parts] == [(0, 2), (0, 3), (0, 2), (0,), (0,)]


def test_what_a_kernel_does_not_serve_is_told() -> None:
    whole = torch.zeros(4, 6)
    assert triton_round_end.can_commit([whole], [whole, whole])
    assert not triton_round_end.can_commit([whole[:, ::2]], [])
    assert not triton_round_end.can_commit([whole], [whole] * 3)
