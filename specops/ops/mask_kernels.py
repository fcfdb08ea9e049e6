"""Triton kernels that turn lengths and tree masks into what other packages' kernels read, one launch each.

``prepare_rows`` writes XQA's lengths and its mask: one row of 32-bit words per query row. ``fill_custom_mask`` writes
FlashInfer's mask: one bit per pair of query row and key, rows of a request back to back without padding, the mask of
request ``b`` from byte ``b * stride`` on. Both read lengths and trees from the device, so they may run inside a CUDA graph.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_BYTES = 256


def prepare_rows(seq_lens: Tensor, tree_mask: Tensor | None, rows: int, capacity: int) -> Tensor:
    """What :func:`specops.ops.trtllm_mha.prepare` returns; arguments as there."""
    batch, seq_lens = seq_lens.shape[0], seq_lens.contiguous()
    words = -(-rows // 32)
    out = torch.empty(batch * (1 + rows * words), dtype=torch.int32, device=seq_lens.device)
    if batch > 0:
        strides = (0, 0) if tree_mask is None else tree_mask.stride()
        _prepare_rows[(batch, rows)](
            out,
            seq_lens,
            out if tree_mask is None else tree_mask.view(torch.uint8),
            batch,
            rows,
            capacity,
            *strides,
            HAS_TREE=tree_mask is not None,
            WORDS=words,
        )
    return out


def fill_custom_mask(out: Tensor, seq_lens: Tensor, tree_mask: Tensor, rows: int, window: int | None) -> None:
    """Write the visible keys of every row of a uniform layout.

    Args:
        out: ``[B, stride]`` uint8; a request's bits fill the first ``ceil(rows * seq_len / 8)`` bytes of its line.
        seq_lens: ``[B]`` int32.
        tree_mask: ``[B * rows, W]`` bool.
        rows: query rows of each request.
        window: as for :func:`specops.ops.mha`; counts from a row's depth in the tree.
    """
    batch, stride = out.shape
    seq_lens = seq_lens.contiguous()
    width = tree_mask.shape[1]
    if batch == 0 or stride == 0:
        return
    grid = (batch, triton.cdiv(stride, BLOCK_BYTES))
    _fill_custom_mask[grid](
        out,
        seq_lens,
        tree_mask.view(torch.uint8),
        stride,
        rows,
        width,
        tree_mask.stride(0),
        tree_mask.stride(1),
        0 if window is None else window,
        HAS_WINDOW=window is not None,
        WIDTH_BLOCK=triton.next_power_of_2(width),
        BLOCK=BLOCK_BYTES,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _prepare_rows(  # type: ignore[no-untyped-def]
    out, seq_lens, mask, batch, rows, capacity, stride_row, stride_column, HAS_TREE: tl.constexpr, WORDS: tl.constexpr
):
    """One program per request and row: the request's length as XQA shall see it, and the row's bits.

    XQA's block of ``rows`` keys ends at that length; its key ``j`` is the tree's column ``j - shift``, where ``shift`` is
    what the length lost to the page table's end (or, below zero, gained for a request shorter than its rows).
    """
    request, row = tl.program_id(0), tl.program_id(1)
    seq_len = tl.load(seq_lens + request)
    shown = tl.where(seq_len > 0, tl.maximum(tl.minimum(seq_len, capacity), rows), 0)
    if row == 0:
        tl.store(out + request, shown)
    shift = seq_len - shown
    bit = tl.arange(0, 32)
    for word in tl.static_range(WORDS):
        key = word * 32 + bit
        column = key - shift
        own = (key < rows) & (column >= 0) & (column < rows)
        if HAS_TREE:
            line = mask + (request * rows + row).to(tl.int64) * stride_row
            seen = tl.load(line + column * stride_column, mask=own, other=0).to(tl.int32) != 0
        else:
            seen = own & (column <= row)
        seen = seen | ((key < rows) & (column < 0))
        # Each bit occurs once, so the sum wraps into the sign exactly as an or would.
        tl.store(out + batch + (request * rows + row) * WORDS + word, tl.sum(seen.to(tl.int32) << bit))


@triton.jit  # type: ignore[untyped-decorator]
def _fill_custom_mask(  # type: ignore[no-untyped-def]
    out,
    seq_lens,
    mask,
    stride,
    rows,
    width,
    stride_row,
    stride_column,
    window,
    HAS_WINDOW: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per request and block of bytes; bit ``f`` of a request is row ``f // seq_len``, key ``f % seq_len``.

    A key before the last ``width`` is visible, one among them if its tree bit is set. A window of w keeps the w last of a
    row's visible keys: its own ancestors, and of the prefix the last ``w - ancestors``; among its ancestors the last w.
    """
    request = tl.program_id(0)
    seq_len = tl.load(seq_lens + request)
    first = tl.program_id(1) * BLOCK
    if first * 8 < rows * seq_len:
        byte = first + tl.arange(0, BLOCK)
        value = tl.zeros((BLOCK,), dtype=tl.int32)
        prefix = seq_len - width
        for bit in tl.static_range(8):
            flat = byte * 8 + bit
            row = flat // seq_len
            key = flat - row * seq_len
            inside = row < rows
            own = key - prefix
            line = mask + (request * rows + row).to(tl.int64) * stride_row
            tree = tl.load(line + own * stride_column, mask=inside & (own >= 0), other=0).to(tl.int32)
            seen = inside & ((own < 0) | (tree != 0))
            if HAS_WINDOW:
                # Visible keys at or behind this one: the prefix from here on, and the row's ancestors from here on.
                column = tl.arange(0, WIDTH_BLOCK)
                ancestors = tl.load(
                    line[:, None] + column[None, :] * stride_column,
                    mask=inside[:, None] & (column[None, :] < width) & (column[None, :] >= own[:, None]),
                    other=0,
                ).to(tl.int32)
                # Columns before the sequence's start are no keys.
                ancestors = tl.where(column[None, :] + prefix >= 0, ancestors, 0)
                behind = tl.sum(ancestors, axis=1) + tl.maximum(-own, 0)
                seen = seen & (behind <= window)
            value = value | (seen.to(tl.int32) << bit)
        tl.store(out + request.to(tl.int64) * stride + byte, value.to(tl.uint8), mask=byte < stride)
