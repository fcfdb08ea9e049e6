"""The Triton mask kernels against loops over bits, through Triton's interpreter without a GPU.

OMP_NUM_THREADS=1 pytest tests/ops/test_mask_kernels.py
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest
import torch

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"
tl = pytest.importorskip("triton.language", reason="the kernels are written in Triton")

from specops.ops import mask_kernels as kernels  # noqa: E402
from specops.testing.cases import random_tree_mask  # noqa: E402

DEVICE = "cuda" if GPU else "cpu"
# Triton is interpreted only if the variable was set when it was imported, which another test file may have done before.
runnable = pytest.mark.skipif(
    not GPU and type(tl.sum).__name__ != "InterpretedFunction", reason="run by test_in_a_fresh_process instead"
)


@pytest.mark.skipif(GPU or not runnable.args[0], reason="the kernels run in this process")
def test_in_a_fresh_process() -> None:
    root = pathlib.Path(__file__).parents[2]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, cwd=root, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout


@runnable
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("rows", [1, 6, 32, 33])
def test_prepared_rows(rows: int, tree: bool) -> None:
    """Lengths inside, below and behind a table of 96 tokens; bit j of a row is the key at ``shown - rows + j``."""
    lens = (90, 0, 3, 120)
    trees = random_tree_mask(len(lens), rows, rows, seed=2)
    on_device = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
    strided = trees.t().contiguous().t().to(DEVICE)
    prepared = kernels.prepare_rows(on_device, strided if tree else None, rows, 96).cpu()
    words = -(-rows // 32)
    mask = prepared[len(lens) :].view(len(lens), rows, words).tolist()
    for request, seq_len in enumerate(lens):
        shown = max(min(seq_len, 96), rows) if seq_len > 0 else 0
        assert int(prepared[request]) == shown
        for row in range(rows):
            bits = trees[request * rows + row].tolist() if tree else [column <= row for column in range(rows)]
            for bit in range(32 * words):
                column = shown - rows + bit - (seq_len - rows)
                sees = bit < rows and (column < 0 or (column < rows and bits[column]))
                assert bool((mask[request][row][bit // 32] & 0xFFFFFFFF) >> (bit % 32) & 1) == sees


@runnable
@pytest.mark.parametrize(
    ("seq_lens", "rows", "width", "window"),
    [
        ((9, 13, 0), 3, 3, None),
        ((9, 2, 30), 4, 4, 3),
        ((40, 5), 2, 6, 5),
        ((300, 1), 5, 5, 100),
        ((7,), 6, 6, 2),
        ((3, 1), 2, 6, 1),
    ],
)
def test_custom_mask(seq_lens: tuple[int, ...], rows: int, width: int, window: int | None) -> None:
    trees = random_tree_mask(len(seq_lens), rows, width, seed=1)
    stride = -(-rows * (max(seq_lens) + 20) // 8)
    out = torch.full((len(seq_lens), stride), 0xFF, dtype=torch.uint8, device=DEVICE)
    lens = torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE)
    kernels.fill_custom_mask(out, lens, trees.to(DEVICE), rows, window)
    packed = out.cpu()
    for request, seq_len in enumerate(seq_lens):
        for row in range(rows):
            prefix = seq_len - width
            bits = trees[request * rows + row].tolist()
            seen = [key for key in range(seq_len) if key < prefix or bits[key - prefix]]
            seen = seen if window is None else seen[-window:]
            for key in range(seq_len):
                flat = row * seq_len + key
                assert bool(packed[request, flat // 8] >> (flat % 8) & 1) == (key in seen), (request, row, key)
