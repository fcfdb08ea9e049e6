"""Positions, slots and the state of requests as Triton kernels: against plain loops, interpreted, or compiled on a GPU.

TRITON_INTERPRET=1 python -m pytest -q tests/ops/test_triton_places.py
"""

from __future__ import annotations

import os
import random

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import pytest
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from specops import QueryLayout, attention_metadata, ops
from specops.ops import places, triton_places

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def ints(values: list[int] | list[list[int]], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize("grow", [0, 6])
@pytest.mark.parametrize("by_depth", ["row", "one depth", "depths"])
@pytest.mark.parametrize(
    ("batch", "columns", "page_size", "width"), [(1, 4, 16, 16), (3, 5, 3, 1), (4, 9, 64, 130), (2, 1, 1, 6)]
)
def test_rows_stand_where_the_layout_says(
    batch: int, columns: int, page_size: int, width: int, by_depth: str, grow: int
) -> None:
    rng = random.Random(columns * width)
    pages = [[rng.randrange(4) * rng.randrange(9) for _ in range(columns)] for _ in range(batch)]
    lens = [0, *(rng.randrange(columns * page_size + 4) for _ in range(batch - 1))] if batch > 1 else [7]
    by_row = [rng.randrange(5) for _ in range(batch * width)]
    depths = ints(by_row, torch.int64) if by_depth == "depths" else None
    behind = None if by_depth == "row" else width + 2
    given = (ints(pages), ints(lens), width, page_size, grow, behind, depths)
    found = triton_places.row_places(*given)
    positions, slots = [], []
    for request in range(batch):
        length = lens[request] + grow if lens[request] else 0
        for row in range(width):
            place = length - width + row
            page = pages[request][place // page_size] if 0 <= place < columns * page_size else 0
            slots.append(page * page_size + place % page_size if page else -1)
            depth = by_row[request * width + row] if by_depth == "depths" else 0
            positions.append(max(place if by_depth == "row" else length - width - 2 + depth, 0))
    assert [tensor.dtype for tensor in found] == [torch.int32, torch.int64, torch.int64]
    assert found[0].tolist() == [length + grow if length else 0 for length in lens]
    assert (found[1].tolist(), found[2].tolist()) == (positions, slots)
    for plain, fused in zip(places._row_places(*given), found, strict=True):
        assert torch.equal(plain, fused)


def test_views_and_empty_batches() -> None:
    table = ints([[1, 9, 2, 9], [3, 9, 0, 9]])[:, ::2]
    lens = ints([[5, 9], [6, 9]])[:, 0]
    depths = ints([[0, 9], [1, 9], [1, 9], [0, 9]], torch.int64)[:, 0]
    found = triton_places.row_places(table, lens, 2, 4, 0, 2, depths)
    assert [tensor.tolist() for tensor in found] == [[5, 6], [3, 4, 5, 4], [7, 8, -1, -1]]
    found = triton_places.row_places(table[:0], lens[:0], 2, 4)
    assert [tuple(tensor.shape) for tensor in found] == [(0,), (0,), (0,)]


@pytest.mark.parametrize("columns", [1, 7, 1500])
def test_the_state_of_requests_is_read_by_row(columns: int) -> None:
    table = torch.arange(6 * columns * 2, dtype=torch.int32, device=DEVICE).reshape(6, -1)[:, :columns]
    lens, roots = ints([0, 4, 5, 6, 7, 0]), ints([9, 8, 7, 6, 5, 4], torch.int64)
    for rows in ([3], [5, 1, 1, 0], []):
        index = ints(rows, torch.int64)
        given = (table, lens, roots, index, 3)
        found = triton_places.take_requests(*given)
        assert [tensor.tolist() for tensor in found] == [
            [table[row].tolist() for row in rows],
            [lens[row].item() for row in rows],
            [[0, 7, 8, 9, 10, 0][row] for row in rows],
            [roots[row].item() for row in rows],
        ]
        for plain, fused in zip(places._take_requests(*given), found, strict=True):
            assert torch.equal(plain, fused)
            assert (plain.dtype, plain.stride()) == (fused.dtype, fused.stride())


@pytest.mark.parametrize("by_op", [True, False])
def test_layers_share_what_comes_out_of_an_op(by_op: bool) -> None:
    """One request: inductor computes a length anew for every layer that reads it, unless it comes out of an op."""
    torch._dynamo.reset()
    cache = torch.randn(3, 4, 1, 8, device=DEVICE)

    def layers(q: Tensor, table: Tensor, lens: Tensor) -> Tensor:
        lens = torch.ops.specops.row_places(table, lens, 2, 4, 2)[0] if by_op else places.grown(lens, 2)
        for _ in range(4):
            q = ops.mha(q, cache, cache, table, lens, layout=QueryLayout.uniform(2), backend="reference")
        return q

    q, table, lens = torch.randn(2, 1, 8, device=DEVICE), ints([[1, 2]]), ints([3])
    _, code = run_and_get_code(torch.compile(layers, fullgraph=True, dynamic=False), q, table, lens)
    assert ("_fused_" in "".join(code)) is not by_op


def test_metadata_of_a_gpu_is_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    real = torch.ops.specops.row_places

    def told(*arguments: object) -> object:
        calls.append("row_places")
        return real(*arguments)

    monkeypatch.setattr(torch.ops.specops, "row_places", told)
    with torch._subclasses.fake_tensor.FakeTensorMode():
        table = torch.empty((2, 3), dtype=torch.int32, device="cuda")
        lens = torch.empty((2,), dtype=torch.int32, device="cuda")
        mask = torch.empty((8, 4), dtype=torch.bool, device="cuda")
        meta = attention_metadata(table, lens, QueryLayout.uniform(4), 16, depths=1, tree_mask=mask, grow=4)
    assert calls == ["row_places"]
    assert [(tuple(t.shape), t.dtype) for t in (meta.positions, meta.slots, meta.seq_lens)] == [
        ((8,), torch.int64),
        ((8,), torch.int64),
        ((2,), torch.int32),
    ]
