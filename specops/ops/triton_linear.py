# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Projections of a decoder layer, with what stands around them in the same launch.

A decode step multiplies a handful of rows by every weight of the model. Each product then takes about as long as a launch,
so the norm before it and the gate, rotation, cache write or residual behind it cost as much as the product unless they ride
along. A program here takes ``BLOCK_N`` weight rows and all of K:

* RMSNorm at few rows: ``x / rms(x) * g`` times ``w`` is ``(x * g) @ w`` divided by ``rms(x)``, whose sum of squares the
  program gathers from the same loads of x. At more rows that work keeps x out of the copies that feed the matrix units, and
  is done anew by every program of a row: a launch of its own is shorter.
* Two sets of weight rows at a time: gate and up of an MLP, or the two halves of a head that rotary embedding pairs.
* Weights are fetched *before* waiting for the launch that makes x, since they depend on nothing: the first ``HEAD`` columns
  into registers at few rows, all into the L2 cache at more. On Hopper and later a kernel starts while the one before it ends
  (programmatic dependent launch), so the trip to memory overlaps with that.

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
from specops.ops.triton_common import (
    dense_rows,
    early_launch,
    next_power_of_2,
    prefetch,
    product,
    shared_memory,
    tanh,
)
from specops.ops.triton_store import saturated

# Above so many rows the products are large enough for a library's, see ``specops.ops.linear``.
MAX_ROWS = 1024


# Up to so many rows the columns of a product are dealt out to the warps, 16 rows a program, and a norm is part of it.
FEW_ROWS = 32
# Elements that a program of the norm kernel takes: whole rows, so that each is read once.
NORM_ELEMENTS = 4096
# Programs that a product of many rows is worth cutting into, and one whose rows are long or fit one tile.
FEWEST_PROGRAMS, FEWEST_PROGRAMS_OF_LONG = 60, 36
# Elements of a cache line.
LINE = tl.constexpr(64)


class Tile(NamedTuple):
    """Sizes of a launch.

    Attributes:
        block_m, block_n, block_k: rows of x, rows of the weight (of each set), and columns of a step of the loop.
        head, tail: with ``split``, columns loaded before waiting for x, in two parts.
        num_warps, num_stages: of the launch.
        split: deal the columns out to the warps.
    """

    block_m: int
    block_n: int
    block_k: int
    head: int = 0
    tail: int = 0
    num_warps: int = 4
    num_stages: int = 4
    split: bool = False


def choose_tile(
    num_rows: int, width: int, paired: bool, columns: int, shared_bytes: int = 227 << 10, largest: int = 64
) -> Tile:
    """Tile for a product of ``num_rows`` rows.

    Few rows: narrow tiles, so that all multiprocessors load weights, and up to 1536 columns under way before x is there.
    Many rows: the largest tile that still gives enough programs, with as many steps under way as fit. Both from sweeps of
    ``benchmarks/tune_linear.py`` on an H200; 128 rows of SmolLM2's shapes took 4.7 (q, k, v), 2.5, 4.7 (gate and up) and
    4.0 us, 256 rows 4.9, 3.0, 5.9 and 4.9, where cuBLAS's products alone took 3.3, 3.1, 4.1, 4.9 and 3.6, 3.2, 4.2, 5.0.

    Args:
        num_rows, width: rows and columns of x.
        paired: two sets of weight rows.
        columns: of the result.
        shared_bytes: shared memory of a program, for 16-bit numbers.
        largest: most weight rows (of each set) that a program may take.
    """
    if num_rows <= FEW_ROWS:
        whole = 1 << (width.bit_length() - 1)
        # Each of the warps needs at least 16 columns.
        warps = min(4, whole // 16)
        head = min(whole, 1024 if width <= 2048 and not paired else 512)
        rest = width - head
        tail = max(next_power_of_2(rest), 16 * warps) if 0 < rest <= 512 else 0
        return Tile(16, 16, 256, head, tail, warps, split=True)
    block_m = 128 if paired and num_rows >= 256 and largest >= 64 else 64
    least = FEWEST_PROGRAMS if num_rows > 64 and width <= 1024 else FEWEST_PROGRAMS_OF_LONG
    tiles_of_rows = triton.cdiv(num_rows, block_m)
    block_n = next((n for n in (64, 32) if n <= largest and triton.cdiv(columns, n) * tiles_of_rows >= least), 16)
    stage = 2 * 64 * (block_m + block_n * (2 if paired else 1))
    wanted = 8 if block_m == 64 and (width > 1024 or (paired and block_n > 16)) else 4
    return Tile(block_m, block_n, 64, num_warps=block_m // 16, num_stages=max(min(wanted, shared_bytes // stage + 1), 2))


@triton.jit
def products_of_many(
    x,
    weight,
    row,
    n,
    stride_x,
    stride_w,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Rows ``row`` of x times weight rows ``n``, ``[rows, columns]`` float32; all of them exist."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    w_rows = weight + n.to(tl.int64)[:, None] * stride_w
    x_rows = x + row.to(tl.int64)[:, None] * stride_x
    if EARLY:
        # The weights come from memory into the L2 cache meanwhile.
        lines: tl.constexpr = (K + LINE - 1) // LINE
        line = tl.minimum(tl.arange(0, triton.next_power_of_2(lines)), lines - 1)
        prefetch(w_rows + (line * LINE)[None, :])
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros((row.shape[0], n.shape[0]), tl.float32)
    step = tl.arange(0, BLOCK_K)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        column = start + step
        if K % BLOCK_K == 0:
            part = tl.load(x_rows + column[None, :])
            w_part = tl.load(w_rows + column[None, :])
        else:
            inside = (column < K)[None, :]
            part = tl.load(x_rows + column[None, :], mask=inside, other=0.0)
            w_part = tl.load(w_rows + column[None, :], mask=inside, other=0.0)
        acc = product(part, tl.trans(w_part), acc)
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
    """As :func:`products_of_many`, of rows normed if NORM, with the columns of a step dealt out to SPLIT groups: a batched
    product gives each warp its own columns, where one product of 16 rows would have every warp hold all of them."""
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
    num_rows,
    n,
    valid_n,
    last_n,
    stride_x,
    stride_w,
    norm_eps,
    norm_offset,
    K: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    if SPLIT == 1:
        # Rows and columns that do not exist repeat one that does: no masks, and nobody stores them.
        row, n = tl.minimum(row, num_rows - 1), tl.where(valid_n, n, last_n)
        acc = products_of_many(x, weight, row, n, stride_x, stride_w, K, BLOCK_K, STAGES, EARLY)
    else:
        acc = products_of_few(
            x,
            norm_weight,
            weight,
            row,
            row < num_rows,
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
    return acc


@triton.jit(do_not_specialize=["num_rows"])
def norm_kernel(
    x,
    weight,
    out,
    num_rows,
    stride_x,
    norm_eps,
    norm_offset,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    """RMSNorm of ``BLOCK_M`` rows."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    inside = (row < num_rows)[:, None] & (k < K)[None, :]
    gain = tl.load(weight + k, mask=k < K, other=0.0).to(tl.float32) + norm_offset
    if EARLY:
        tl.extra.cuda.gdc_wait()
    wide = tl.load(x + row[:, None] * stride_x + k[None, :], mask=inside, other=0.0).to(tl.float32)
    wide *= tl.rsqrt(tl.sum(wide * wide, axis=1) / K + norm_eps)[:, None]
    tl.store(out + row[:, None] * K + k[None, :], (wide * gain[None, :]).to(out.dtype.element_ty), mask=inside)


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
        num_rows,
        n,
        valid_n,
        N - 1,
        stride_x,
        stride_w,
        norm_eps,
        norm_offset,
        K,
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
        num_rows,
        n,
        valid_n,
        head * (2 * HALF),
        stride_x,
        stride_w,
        norm_eps,
        norm_offset,
        K,
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


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """``x / rms(x) * (weight + offset)`` of rows ``[T, K]``, computed in float32."""
    num_rows, width = x.shape
    out = x.new_empty(x.shape)
    block_k = next_power_of_2(width)
    block_m = max(NORM_ELEMENTS // block_k, 1)
    norm_kernel[(triton.cdiv(num_rows, block_m),)](
        x,
        weight,
        out,
        num_rows,
        x.stride(0),
        eps,
        offset,
        K=width,
        BLOCK_M=block_m,
        BLOCK_K=block_k,
        num_warps=4 if block_k <= 4096 else 8,
        **early_launch(x.device),
    )
    return out


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
    tile = tile or choose_tile(num_rows, width, gate is not None, num_columns, _shared_bytes(x))
    x, residual = dense_rows(x), None if residual is None else dense_rows(residual)
    if norm_weight is not None and not tile.split:
        x, norm_weight = rms_norm(x, norm_weight, norm_eps, norm_offset), None
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
    pairs, heads = dim // 2, num_heads + 2 * num_kv_heads
    tile = tile or choose_tile(num_rows, width, True, heads * pairs, _shared_bytes(x), next_power_of_2(pairs))
    x, cos, sin = dense_rows(x), dense_rows(cos.flatten(1)), dense_rows(sin.flatten(1))
    if norm_weight is not None and not tile.split:
        x, norm_weight = rms_norm(x, norm_weight, norm_eps, norm_offset), None
    blocks = triton.cdiv(pairs, tile.block_n)
    qkv_kernel[(heads * blocks, triton.cdiv(num_rows, tile.block_m))](
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
        HALF=pairs,
        K=width,
        PAGE_SIZE=page_size,
        TO_FP8=k_cache.dtype == FP8,
        BLOCKS=blocks,
        **_launch(tile, x.device),
    )
    return q


def _shared_bytes(x: Tensor) -> int:
    """Shared memory of a program, in bytes as 16-bit numbers count."""
    return shared_memory(x.device) * 2 // x.itemsize


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
