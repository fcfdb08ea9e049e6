# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Projections of a decoder layer at few rows, with what stands around them in the same launch.

A decode step multiplies a handful of rows by every weight of the model. Each product then takes about as long as a launch,
so the norm before it and the gate, rotation, cache write or residual behind it cost as much as the product unless they ride
along. A program here takes ``BLOCK_N`` weight rows and all of K:

* RMSNorm: ``x / rms(x) * g`` times ``w`` is ``(x * g) @ w`` divided by ``rms(x)``, whose sum of squares the program gathers
  from the same loads of x.
* Two sets of weight rows at a time: gate and up of an MLP, or the two halves of a head that rotary embedding pairs.
* The first ``HEAD`` columns of the weights are loaded *before* waiting for the launch that makes x: weights depend on
  nothing. On Hopper and later a kernel starts while the one before it ends (programmatic dependent launch), so the trip to
  memory overlaps with that.

The order of a row's sums depends on neither its place nor the number of rows within one tile size, so a row gives the same
bits alone and beside others.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specops.ops.capabilities import FP8
from specops.ops.triton_common import dense_rows, early_launch, next_power_of_2, product, tanh
from specops.ops.triton_store import saturated

# Above so many rows the products are large enough for a library's, see ``specops.ops.linear``.
MAX_ROWS = 1024


# Up to so many rows the columns of a product are dealt out to the warps, 16 rows a program.
FEW_ROWS = 32


class Tile(NamedTuple):
    """Sizes of a launch.

    Attributes:
        block_m, block_n, block_k: rows of x, rows of the weight (of each set), and columns of a step of the loop.
        head, tail: columns loaded before waiting for x, in two parts; a tail with ``split`` only.
        num_warps, num_stages: of the launch.
        split: deal the columns out to the warps.
    """

    block_m: int
    block_n: int
    block_k: int
    head: int
    tail: int = 0
    num_warps: int = 4
    num_stages: int = 4
    split: bool = False


def choose_tile(num_rows: int, width: int, paired: bool) -> Tile:
    """Tile for ``num_rows`` rows and ``width`` columns of x.

    Few rows: narrow tiles, so that all multiprocessors load weights, and up to 1536 columns under way before x is there.
    Many rows: tiles that read each weight less often. Both from sweeps of ``benchmarks/tune_linear.py`` on an H200.
    """
    whole = 1 << (width.bit_length() - 1)
    if num_rows <= FEW_ROWS:
        # Each of the warps needs at least 16 columns.
        warps = min(4, whole // 16)
        head = min(whole, 1024 if width <= 2048 and not paired else 512)
        rest = width - head
        tail = max(next_power_of_2(rest), 16 * warps) if 0 < rest <= 512 else 0
        return Tile(16, 16, 256, head, tail, warps, split=True)
    long = width > 1024
    if num_rows <= 64:
        return Tile(32, 16, 128 if long or paired else 64, min(whole, 128 if long else 64), num_warps=8 if paired else 4)
    return Tile(64, 32, 128 if long else 64, min(whole, 128 if long else 64), num_warps=8 if paired else 4)


@triton.jit
def products_of_many(
    x,
    norm_weight,
    weight,
    row,
    valid_row,
    n,
    valid_n,
    stride_x,
    stride_w,
    norm_eps,
    norm_offset,
    K: tl.constexpr,
    NORM: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Rows ``row`` of x, normed if NORM, times weight rows ``n``: ``[rows, columns]`` float32."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    k = tl.arange(0, HEAD)
    w_rows = weight + n.to(tl.int64)[:, None] * stride_w
    x_rows = x + row.to(tl.int64)[:, None] * stride_x
    w_head = tl.load(w_rows + k[None, :], mask=valid_n[:, None], other=0.0)
    if NORM:
        gain = tl.load(norm_weight + k).to(tl.float32) + norm_offset
    if EARLY:
        tl.extra.cuda.gdc_wait()
    values = tl.load(x_rows + k[None, :], mask=valid_row[:, None], other=0.0)
    squares = tl.zeros((row.shape[0],), tl.float32)
    if NORM:
        wide = values.to(tl.float32)
        squares += tl.sum(wide * wide, axis=1)
        values = (wide * gain[None, :]).to(x.dtype.element_ty)
    acc = product(values, tl.trans(w_head), tl.zeros((row.shape[0], n.shape[0]), tl.float32))
    step = tl.arange(0, BLOCK_K)
    for start in tl.range(HEAD, K, BLOCK_K, num_stages=STAGES):
        column = start + step
        inside = column < K
        part = tl.load(x_rows + column[None, :], mask=valid_row[:, None] & inside[None, :], other=0.0)
        w_part = tl.load(w_rows + column[None, :], mask=valid_n[:, None] & inside[None, :], other=0.0)
        if NORM:
            wide_part = part.to(tl.float32)
            squares += tl.sum(wide_part * wide_part, axis=1)
            gain_part = tl.load(norm_weight + column, mask=inside, other=0.0).to(tl.float32) + norm_offset
            part = (wide_part * gain_part[None, :]).to(x.dtype.element_ty)
        acc = product(part, tl.trans(w_part), acc)
    if NORM:
        acc *= tl.rsqrt(squares / K + norm_eps)[:, None]
    return acc


@triton.jit
def products_of_few(
    x,
    norm_weight,
    weight,
    row,
    valid_row,
    n,
    valid_n,
    stride_x,
    stride_w,
    norm_eps,
    norm_offset,
    K: tl.constexpr,
    NORM: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """As :func:`products_of_many`, with the columns of a step dealt out to SPLIT groups: a batched product gives each warp
    its own columns, where one product of 16 rows would have every warp hold all of them."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    part = tl.arange(0, SPLIT)[:, None, None]
    k = part * (HEAD // SPLIT) + tl.arange(0, HEAD // SPLIT)[None, None, :]
    w_rows = weight + n.to(tl.int64)[None, :, None] * stride_w
    x_rows = x + row.to(tl.int64)[None, :, None] * stride_x
    valid_w, valid_x = valid_n[None, :, None], valid_row[None, :, None]
    w_head = tl.load(w_rows + k, mask=valid_w, other=0.0)
    if NORM:
        gain = tl.load(norm_weight + k).to(tl.float32) + norm_offset
    if TAIL:
        k_tail = HEAD + part * (TAIL // SPLIT) + tl.arange(0, TAIL // SPLIT)[None, None, :]
        in_tail = k_tail < K
        w_tail = tl.load(w_rows + k_tail, mask=valid_w & in_tail, other=0.0)
        if NORM:
            gain_tail = tl.load(norm_weight + k_tail, mask=in_tail, other=0.0).to(tl.float32) + norm_offset
    if EARLY:
        tl.extra.cuda.gdc_wait()
    values = tl.load(x_rows + k, mask=valid_x, other=0.0)
    if TAIL:
        tail_values = tl.load(x_rows + k_tail, mask=valid_x & in_tail, other=0.0)
    squares = tl.zeros((SPLIT, row.shape[0]), tl.float32)
    if NORM:
        wide = values.to(tl.float32)
        squares += tl.sum(wide * wide, axis=2)
        values = (wide * gain).to(x.dtype.element_ty)
        if TAIL:
            wide_tail = tail_values.to(tl.float32)
            squares += tl.sum(wide_tail * wide_tail, axis=2)
            tail_values = (wide_tail * gain_tail).to(x.dtype.element_ty)
    nothing = tl.zeros((SPLIT, row.shape[0], n.shape[0]), tl.float32)
    acc = product(values, tl.permute(w_head, (0, 2, 1)), nothing)
    if TAIL:
        acc = product(tail_values, tl.permute(w_tail, (0, 2, 1)), acc)
    for start in tl.range(HEAD + TAIL, K, BLOCK_K, num_stages=STAGES):
        column = start + part * (BLOCK_K // SPLIT) + tl.arange(0, BLOCK_K // SPLIT)[None, None, :]
        inside = column < K
        value = tl.load(x_rows + column, mask=valid_x & inside, other=0.0)
        w_part = tl.load(w_rows + column, mask=valid_w & inside, other=0.0)
        if NORM:
            wide_part = value.to(tl.float32)
            squares += tl.sum(wide_part * wide_part, axis=2)
            gain_part = tl.load(norm_weight + column, mask=inside, other=0.0).to(tl.float32) + norm_offset
            value = (wide_part * gain_part).to(x.dtype.element_ty)
        acc = product(value, tl.permute(w_part, (0, 2, 1)), acc)
    total = tl.sum(acc, axis=0)
    if NORM:
        total *= tl.rsqrt(tl.sum(squares, axis=0) / K + norm_eps)[:, None]
    return total


@triton.jit
def products(
    x,
    norm_weight,
    weight,
    row,
    valid_row,
    n,
    valid_n,
    stride_x,
    stride_w,
    norm_eps,
    norm_offset,
    K: tl.constexpr,
    NORM: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    if SPLIT == 1:
        acc = products_of_many(
            x,
            norm_weight,
            weight,
            row,
            valid_row,
            n,
            valid_n,
            stride_x,
            stride_w,
            norm_eps,
            norm_offset,
            K,
            NORM,
            HEAD,
            BLOCK_K,
            STAGES,
            EARLY,
        )
    else:
        acc = products_of_few(
            x,
            norm_weight,
            weight,
            row,
            valid_row,
            n,
            valid_n,
            stride_x,
            stride_w,
            norm_eps,
            norm_offset,
            K,
            NORM,
            HEAD,
            TAIL,
            BLOCK_K,
            SPLIT,
            STAGES,
            EARLY,
        )
    return acc


@triton.jit
def paired_rows(start, size, apart, BLOCK_N: tl.constexpr):
    """Weight rows of ``BLOCK_N`` outputs of two sets: from ``start`` on, then the same ``apart`` further."""
    index = tl.arange(0, 2 * BLOCK_N)
    within = start + index % BLOCK_N
    return within + index // BLOCK_N * apart, within < size


@triton.jit
def halves(acc, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The two ``[BLOCK_M, BLOCK_N]`` tiles of a product with :func:`paired_rows`."""
    return tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N)), (0, 2, 1)))


@triton.jit
def activation(x, GATE: tl.constexpr):
    if GATE == "silu":
        return x / (1.0 + tl.exp(-x))
    if GATE == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


@triton.jit(do_not_specialize=["num_rows"])
def linear_kernel(
    x,
    norm_weight,
    weight,
    bias,
    residual,
    out,
    num_rows,
    stride_x,
    stride_w,
    stride_r,
    norm_eps,
    norm_offset,
    N: tl.constexpr,
    K: tl.constexpr,
    GATE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """``act(norm(x) @ gate.T + bias) * (norm(x) @ up.T + bias)``, or one product, plus the residual."""
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    valid_column, valid_row = column < N, row < num_rows
    if GATE is None:
        n, valid_n = column, valid_column
    else:
        n, valid_n = paired_rows(tl.program_id(0) * BLOCK_N, N, N, BLOCK_N)
    acc = products(
        x,
        norm_weight,
        weight,
        row,
        valid_row,
        n,
        valid_n,
        stride_x,
        stride_w,
        norm_eps,
        norm_offset,
        K,
        norm_weight is not None,
        HEAD,
        TAIL,
        BLOCK_K,
        SPLIT,
        STAGES,
        EARLY,
    )
    if bias is not None:
        acc += tl.load(bias + n, mask=valid_n, other=0.0).to(tl.float32)[None, :]
    if GATE is not None:
        gate, up = halves(acc, BLOCK_M, BLOCK_N)
        acc = activation(gate, GATE) * up
    valid = valid_row[:, None] & valid_column[None, :]
    token = row.to(tl.int64)
    if residual is not None:
        acc += tl.load(residual + token[:, None] * stride_r + column[None, :], mask=valid, other=0.0).to(tl.float32)
    tl.store(out + token[:, None] * N + column[None, :], acc.to(out.dtype.element_ty), mask=valid)


@triton.jit(do_not_specialize=["num_rows"])
def qkv_kernel(
    x,
    norm_weight,
    weight,
    bias,
    cos,
    sin,
    slots,
    q,
    k_cache,
    v_cache,
    k_scale,
    v_scale,
    num_rows,
    stride_x,
    stride_w,
    stride_cos,
    stride_sin,
    stride_slots,
    stride_kp,
    stride_ks,
    stride_kh,
    stride_vp,
    stride_vs,
    stride_vh,
    norm_eps,
    norm_offset,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    K: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TO_FP8: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """``BLOCK_N`` rotary pairs of one head: q to its output, k and v into the cache, a negative slot skipped."""
    head = tl.program_id(0) // BLOCKS
    pair = (tl.program_id(0) % BLOCKS) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    valid_pair, valid_row = pair < HALF, row < num_rows
    n, valid_n = paired_rows((tl.program_id(0) % BLOCKS) * BLOCK_N, HALF, HALF, BLOCK_N)
    n += head * (2 * HALF)
    acc = products(
        x,
        norm_weight,
        weight,
        row,
        valid_row,
        n,
        valid_n,
        stride_x,
        stride_w,
        norm_eps,
        norm_offset,
        K,
        norm_weight is not None,
        HEAD,
        TAIL,
        BLOCK_K,
        SPLIT,
        STAGES,
        EARLY,
    )
    if bias is not None:
        acc += tl.load(bias + n, mask=valid_n, other=0.0).to(tl.float32)[None, :]
    first, second = halves(acc, BLOCK_M, BLOCK_N)
    valid = valid_row[:, None] & valid_pair[None, :]
    token = row.to(tl.int64)
    if head < HEADS + KV_HEADS:
        c = tl.load(cos + token[:, None] * stride_cos + pair[None, :], mask=valid, other=0.0).to(tl.float32)
        s = tl.load(sin + token[:, None] * stride_sin + pair[None, :], mask=valid, other=0.0).to(tl.float32)
        # Rounded as the projection's output would be, so that both paths rotate the same numbers.
        first = first.to(x.dtype.element_ty).to(tl.float32)
        second = second.to(x.dtype.element_ty).to(tl.float32)
        turned = first * c - second * s
        second = second * c + first * s
        first = turned
    if head < HEADS:
        q_at = q + (token[:, None] * HEADS + head) * (2 * HALF) + pair[None, :]
        tl.store(q_at, first.to(q.dtype.element_ty), mask=valid)
        tl.store(q_at + HALF, second.to(q.dtype.element_ty), mask=valid)
    else:
        slot = tl.load(slots + token * stride_slots, mask=valid_row, other=-1).to(tl.int64)
        page, offset = slot // PAGE_SIZE, slot % PAGE_SIZE
        valid = valid & (slot >= 0)[:, None]
        first = first.to(x.dtype.element_ty).to(tl.float32)
        second = second.to(x.dtype.element_ty).to(tl.float32)
        if head < HEADS + KV_HEADS:
            if TO_FP8:
                first, second = saturated(first, k_scale), saturated(second, k_scale)
            place = page * stride_kp + offset * stride_ks + (head - HEADS) * stride_kh
            k_at = k_cache + place[:, None] + pair[None, :]
            tl.store(k_at, first.to(k_cache.dtype.element_ty), mask=valid)
            tl.store(k_at + HALF, second.to(k_cache.dtype.element_ty), mask=valid)
        else:
            if TO_FP8:
                first, second = saturated(first, v_scale), saturated(second, v_scale)
            place = page * stride_vp + offset * stride_vs + (head - HEADS - KV_HEADS) * stride_vh
            v_at = v_cache + place[:, None] + pair[None, :]
            tl.store(v_at, first.to(v_cache.dtype.element_ty), mask=valid)
            tl.store(v_at + HALF, second.to(v_cache.dtype.element_ty), mask=valid)


def rms_norm_linear(
    x: Tensor,
    weight: Tensor,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_offset: float = 0.0,
    bias: Tensor | None = None,
    gate: str | None = None,
    residual: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """As :func:`specops.ops.rms_norm_linear`; ``tile`` overrides the choice of sizes."""
    num_rows, width = x.shape
    num_columns = weight.shape[0] // (1 if gate is None else 2)
    out = x.new_empty((num_rows, num_columns))
    if num_rows == 0:
        return out
    tile = tile or choose_tile(num_rows, width, gate is not None)
    x, residual = dense_rows(x), None if residual is None else dense_rows(residual)
    linear_kernel[(triton.cdiv(num_columns, tile.block_n), triton.cdiv(num_rows, tile.block_m))](
        x,
        norm_weight,
        weight,
        bias,
        residual,
        out,
        num_rows,
        x.stride(0),
        weight.stride(0),
        0 if residual is None else residual.stride(0),
        norm_eps,
        norm_offset,
        N=num_columns,
        K=width,
        GATE=gate,
        **_launch(tile, x.device),
    )
    return out


def project_qkv(
    k_cache: Tensor,
    v_cache: Tensor,
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    num_heads: int,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_offset: float = 0.0,
    bias: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """As :func:`specops.ops.project_qkv`; ``tile`` overrides the choice of sizes."""
    num_rows, width = x.shape
    _, page_size, num_kv_heads, dim = k_cache.shape
    q = x.new_empty((num_rows, num_heads, dim))
    if num_rows == 0:
        return q
    tile = tile or choose_tile(num_rows, width, True)
    x, cos, sin = dense_rows(x), dense_rows(cos.flatten(1)), dense_rows(sin.flatten(1))
    blocks = triton.cdiv(dim // 2, tile.block_n)
    qkv_kernel[((num_heads + 2 * num_kv_heads) * blocks, triton.cdiv(num_rows, tile.block_m))](
        x,
        norm_weight,
        weight,
        bias,
        cos,
        sin,
        slots,
        q,
        k_cache,
        v_cache,
        k_scale,
        v_scale,
        num_rows,
        x.stride(0),
        weight.stride(0),
        cos.stride(0),
        sin.stride(0),
        slots.stride(0),
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        norm_eps,
        norm_offset,
        HEADS=num_heads,
        KV_HEADS=num_kv_heads,
        HALF=dim // 2,
        K=width,
        PAGE_SIZE=page_size,
        TO_FP8=k_cache.dtype == FP8,
        BLOCKS=blocks,
        **_launch(tile, x.device),
    )
    return q


def _launch(tile: Tile, device: torch.device) -> dict[str, Any]:
    return {
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "HEAD": tile.head,
        "TAIL": tile.tail,
        "SPLIT": tile.num_warps if tile.split else 1,
        "STAGES": tile.num_stages,
        "num_warps": tile.num_warps,
        **early_launch(device),
    }
