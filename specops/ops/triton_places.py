# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Where rows stand, as Triton kernels: see :mod:`specops.ops.places`.

* ``places_kernel``: one program a request and stretch of its rows computes their places, positions and slots.
* ``take_kernel``: one program a request copies its line of the page table, its length and its token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specops.ops.triton_common import dense_rows, early_launch, next_power_of_2
from specops.ops.triton_round import begin

# Rows of one program, and columns of the page table that a program copies at a time.
MAX_ROWS = 128
COLUMNS = 1024


@triton.jit(do_not_specialize=["columns", "width", "grow", "behind"])
def places_kernel(
    page_table,
    seq_lens,
    depths,
    lens,
    positions,
    slots,
    stride_table,
    stride_len,
    stride_depth,
    columns,
    width,
    grow,
    behind,
    PAGE: tl.constexpr,
    BY_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    begin(EARLY)
    request = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = row < width
    length = tl.load(seq_lens + request * stride_len).to(tl.int32)
    if grow != 0:
        length = tl.where(length > 0, length + grow, 0)
    if tl.program_id(1) == 0:
        tl.store(lens + request, length.to(lens.dtype.element_ty))
    place = length - width + row
    column = place // PAGE
    inside = there & (place >= 0) & (column < columns)
    page = tl.load(page_table + request * stride_table + column, mask=inside, other=0).to(tl.int64)
    slot = tl.where(page > 0, page * PAGE + place % PAGE, -1)
    position = place.to(tl.int64)
    if not BY_ROW:
        position = (length - behind + tl.zeros_like(place)).to(tl.int64)
        if depths is not None:
            position += tl.load(depths + (request * width + row) * stride_depth, mask=there, other=0)
    out = request * width + row
    tl.store(positions + out, tl.maximum(position, 0), mask=there)
    tl.store(slots + out, slot, mask=there)


@triton.jit(do_not_specialize=["columns", "grow"])
def take_kernel(
    page_table,
    seq_lens,
    root_tokens,
    rows,
    table,
    lens,
    grown,
    roots,
    stride_table,
    columns,
    grow,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    begin(EARLY)
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + request)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        page = tl.load(page_table + row * stride_table + column, mask=column < columns)
        tl.store(table + request * columns + column, page, mask=column < columns)
    length = tl.load(seq_lens + row)
    tl.store(lens + request, length)
    tl.store(grown + request, tl.where(length > 0, length + grow, 0).to(grown.dtype.element_ty))
    tl.store(roots + request, tl.load(root_tokens + row))


def row_places(
    page_table: Tensor,
    seq_lens: Tensor,
    width: int,
    page_size: int,
    grow: int = 0,
    behind: int | None = None,
    depths: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`specops.ops.places.row_places`."""
    batch, columns = page_table.shape
    lens = torch.empty((batch,), dtype=seq_lens.dtype, device=page_table.device)
    positions, slots = (torch.empty((batch * width,), dtype=torch.int64, device=page_table.device) for _ in range(2))
    if batch and width:
        page_table = dense_rows(page_table)
        block = min(max(next_power_of_2(width), 16), MAX_ROWS)
        places_kernel[(batch, triton.cdiv(width, block))](
            *(page_table, seq_lens, depths, lens, positions, slots),
            *(page_table.stride(0), seq_lens.stride(0), 0 if depths is None else depths.stride(0)),
            *(columns, width, grow, behind or 0),
            PAGE=page_size,
            BY_ROW=behind is None,
            BLOCK=block,
            num_warps=1 if block <= 32 else 4,
            **early_launch(page_table.device),
        )
    return lens, positions, slots


def take_requests(
    page_table: Tensor, seq_lens: Tensor, root_tokens: Tensor, rows: Tensor, grow: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As :func:`specops.ops.places.take_requests`."""
    batch, columns = rows.shape[0], page_table.shape[1]
    table = page_table.new_empty((batch, columns))
    lens, grown, roots = seq_lens.new_empty((batch,)), seq_lens.new_empty((batch,)), root_tokens.new_empty((batch,))
    if batch:
        page_table = dense_rows(page_table)
        block = min(max(next_power_of_2(columns), 32), COLUMNS)
        take_kernel[(batch,)](
            *(page_table, seq_lens.contiguous(), root_tokens.contiguous(), rows.contiguous()),
            *(table, lens, grown, roots, page_table.stride(0), columns, grow),
            BLOCK=block,
            num_warps=1 if block <= 128 else 4,
            **early_launch(page_table.device),
        )
    return table, lens, grown, roots
