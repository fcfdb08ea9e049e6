# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Fused writes into paged caches: K and V, or latent and rotary key, in one launch; and moves of cached entries.

``store_*``: one program a token and destination. It casts, or for an fp8 cache divides by the scale and saturates, and
writes nothing for a negative slot. ``move_*``: one program a head and chunk of columns holds that chunk of *all* moved
entries in registers between reading and writing, so overlapping ranges are safe without a second launch.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from specops.ops.capabilities import FP8
from specops.ops.graph_memory import outside_graph_pools
from specops.ops.triton_common import next_power_of_2

# Elements of one token that a program writes at a time, and elements that a moving program holds: 64 a thread.
STORE_ELEMENTS = 4096
MOVE_ELEMENTS = 8192
# More entries than this do not fit the registers of one program in chunks of 16 bytes; they go through a copy.
MAX_MOVED = 1024


@triton.jit
def store_kernel(
    a,
    b,
    a_cache,
    b_cache,
    slots,
    a_scale,
    b_scale,
    stride_at,
    stride_ah,
    stride_ad,
    stride_bt,
    stride_bh,
    stride_bd,
    stride_acp,
    stride_acs,
    stride_ach,
    stride_bcp,
    stride_bcs,
    stride_bch,
    stride_slots,
    HEADS: tl.constexpr,
    DA: tl.constexpr,
    DB: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_DA: tl.constexpr,
    BLOCK_DB: tl.constexpr,
    TO_FP8: tl.constexpr,
):
    """Write row ``program_id(0)`` of a (``program_id(1)`` 0) or of b into its slot."""
    token = tl.program_id(0)
    slot = tl.load(slots + token.to(tl.int64) * stride_slots).to(tl.int64)
    if slot >= 0:
        page = slot // PAGE_SIZE
        offset = slot % PAGE_SIZE
        # No name of one branch stands in the other: a and b may be of different dtypes.
        if tl.program_id(1) == 0:
            a_row = a + token.to(tl.int64) * stride_at
            a_target = a_cache + page * stride_acp + offset * stride_acs
            _store_row(a_row, a_target, a_scale, stride_ah, stride_ad, stride_ach, HEADS, DA, BLOCK_H, BLOCK_DA, TO_FP8)
        else:
            b_row = b + token.to(tl.int64) * stride_bt
            b_target = b_cache + page * stride_bcp + offset * stride_bcs
            _store_row(b_row, b_target, b_scale, stride_bh, stride_bd, stride_bch, HEADS, DB, BLOCK_H, BLOCK_DB, TO_FP8)


@triton.jit
def saturated(values, scale):
    """float32 values as an fp8 cache holds them, but for the rounding."""
    if scale is not None:
        values = tl.div_rn(values, tl.zeros(values.shape, tl.float32) + tl.load(scale))
    # 448 is the largest e4m3 number; NaN stays NaN.
    return tl.clamp(values, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _store_row(
    source,
    target,
    scale,
    stride_h,
    stride_d,
    stride_th,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TO_FP8: tl.constexpr,
):
    d = tl.arange(0, BLOCK_D)
    for first in range(0, HEADS, BLOCK_H):
        head = first + tl.arange(0, BLOCK_H)
        mask = (head < HEADS)[:, None] & (d < D)[None, :]
        values = tl.load(source + head[:, None] * stride_h + d[None, :] * stride_d, mask=mask, other=0.0)
        if TO_FP8:
            values = saturated(values.to(tl.float32), scale)
        where = target + head.to(tl.int64)[:, None] * stride_th + d[None, :]
        tl.store(where, values.to(target.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_moved"])
def move_kernel(
    a_cache,
    b_cache,
    source_slots,
    target_slots,
    num_moved,
    stride_ap,
    stride_as,
    stride_ah,
    stride_bp,
    stride_bs,
    stride_bh,
    stride_source,
    stride_target,
    DA: tl.constexpr,
    DB: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Move chunk ``program_id(0)`` of head ``program_id(1)`` of all entries, in a (``program_id(2)`` 0) or b."""
    n = tl.arange(0, BLOCK_N)
    live = n < num_moved
    source = tl.load(source_slots + n * stride_source, mask=live, other=-1).to(tl.int64)
    target = tl.load(target_slots + n * stride_target, mask=live, other=-1).to(tl.int64)
    live = (source >= 0) & (target >= 0)
    column = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    head = tl.program_id(1).to(tl.int64)
    if tl.program_id(2) == 0:
        _move_chunk(a_cache + head * stride_ah, source, target, live, column, stride_ap, stride_as, DA, PAGE_SIZE)
    else:
        _move_chunk(b_cache + head * stride_bh, source, target, live, column, stride_bp, stride_bs, DB, PAGE_SIZE)


@triton.jit
def _move_chunk(cache, source, target, live, column, stride_p, stride_s, D: tl.constexpr, PAGE_SIZE: tl.constexpr):
    mask = live[:, None] & (column < D)[None, :]
    read = cache + (source // PAGE_SIZE * stride_p + source % PAGE_SIZE * stride_s)[:, None] + column[None, :]
    values = tl.load(read, mask=mask, other=0)
    # Every warp has read before one writes.
    tl.debug_barrier()
    write = cache + (target // PAGE_SIZE * stride_p + target % PAGE_SIZE * stride_s)[:, None] + column[None, :]
    tl.store(write, values, mask=mask)


@triton.jit(do_not_specialize=["num_moved"])
def move_layers_kernel(
    addresses,
    like,
    source_slots,
    target_slots,
    num_moved,
    stride_p,
    stride_s,
    stride_h,
    stride_source,
    stride_target,
    D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """:func:`move_kernel` in the cache at entry ``program_id(2)`` of ``addresses``; ``like`` is one, for its dtype."""
    n = tl.arange(0, BLOCK_N)
    live = n < num_moved
    source = tl.load(source_slots + n * stride_source, mask=live, other=-1).to(tl.int64)
    target = tl.load(target_slots + n * stride_target, mask=live, other=-1).to(tl.int64)
    live = (source >= 0) & (target >= 0)
    column = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    cache = tl.load(addresses + tl.program_id(2)).to(like.dtype) + tl.program_id(1).to(tl.int64) * stride_h
    _move_chunk(cache, source, target, live, column, stride_p, stride_s, D, PAGE_SIZE)


def store_kv(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Arguments as :func:`specops.ops.store_kv`."""
    num_tokens, heads, dim = k.shape
    if num_tokens == 0:
        return
    value_dim = v.shape[2]
    block_da, block_db = next_power_of_2(dim), next_power_of_2(value_dim)
    to_fp8 = k_cache.dtype == FP8
    store_kernel[(num_tokens, 2)](
        k,
        v,
        k_cache,
        v_cache,
        slots,
        k_scale if to_fp8 else None,
        v_scale if to_fp8 else None,
        *k.stride(),
        *v.stride(),
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        slots.stride(0),
        HEADS=heads,
        DA=dim,
        DB=value_dim,
        PAGE_SIZE=k_cache.shape[1],
        BLOCK_H=min(next_power_of_2(heads), max(1, STORE_ELEMENTS // max(block_da, block_db))),
        BLOCK_DA=block_da,
        BLOCK_DB=block_db,
        TO_FP8=to_fp8,
    )


def store_latent(kv_cache: Tensor, latent: Tensor, rope: Tensor, slots: Tensor, kv_scale: Tensor | None = None) -> None:
    """Arguments as :func:`specops.ops.store_latent`."""
    cache = kv_cache.unsqueeze(2)
    split = latent.shape[1]
    store_kv(cache[..., :split], cache[..., split:], latent.unsqueeze(1), rope.unsqueeze(1), slots, kv_scale, kv_scale)


def move_kv(k_cache: Tensor, v_cache: Tensor, source_slots: Tensor, target_slots: Tensor) -> None:
    """Arguments as :func:`specops.ops.move_kv`; at most ``MAX_MOVED`` entries, see :func:`can_move`."""
    _move(k_cache, v_cache, source_slots, target_slots)


def move_latent(kv_cache: Tensor, source_slots: Tensor, target_slots: Tensor) -> None:
    """Arguments as :func:`specops.ops.move_latent`."""
    _move(kv_cache.unsqueeze(2), None, source_slots, target_slots)


def move_kv_layers(k_caches: list[Tensor], v_caches: list[Tensor], source_slots: Tensor, target_slots: Tensor) -> None:
    """Arguments as :func:`specops.ops.move_kv_layers`; caches of one form go in one launch."""
    caches = [*k_caches, *v_caches]
    num_moved = source_slots.shape[0]
    if num_moved == 0 or not caches:
        return
    first = caches[0]
    if any((c.shape, c.stride(), c.dtype) != (first.shape, first.stride(), first.dtype) for c in caches):
        for k_cache, v_cache in zip(k_caches, v_caches, strict=True):
            move_kv(k_cache, v_cache, source_slots, target_slots)
        return
    like = first.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[first.element_size()])
    dim = first.shape[3]
    block_n = max(next_power_of_2(num_moved), 2)
    block_c = min(next_power_of_2(dim), max(MOVE_ELEMENTS // block_n, 8))
    move_layers_kernel[(triton.cdiv(dim, block_c), first.shape[2], len(caches))](
        _addresses(tuple([cache.data_ptr() for cache in caches]), first.device),
        like,
        source_slots,
        target_slots,
        num_moved,
        *like.stride()[:3],
        source_slots.stride(0),
        target_slots.stride(0),
        D=dim,
        PAGE_SIZE=first.shape[1],
        BLOCK_N=block_n,
        BLOCK_C=block_c,
    )


@functools.cache
def _addresses(pointers: tuple[int, ...], device: torch.device) -> Tensor:
    """The pointers on the device. Never freed, since a graph may have been captured with it: a few bytes a model.

    A capture can't copy from the host; every step runs once before it is captured, which is when this is made, and that run
    may be one in the graph's own pool.
    """
    return outside_graph_pools(lambda: torch.tensor(pointers, dtype=torch.int64).to(device), device)


def can_move(source_slots: Tensor) -> bool:
    """Whether the moving kernel takes as many entries."""
    return source_slots.shape[0] <= MAX_MOVED


def _move(a_cache: Tensor, b_cache: Tensor | None, source_slots: Tensor, target_slots: Tensor) -> None:
    num_moved = source_slots.shape[0]
    if num_moved == 0:
        return
    if num_moved > MAX_MOVED:
        raise ValueError(f"{num_moved} entries to move at once; one program holds up to {MAX_MOVED}")
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a_cache.element_size()]
    a_bits = a_cache.view(bits)
    b_bits = a_bits if b_cache is None else b_cache.view(bits)
    dim, value_dim = a_bits.shape[3], 0 if b_cache is None else b_bits.shape[3]
    block_n = max(next_power_of_2(num_moved), 2)
    block_c = min(next_power_of_2(max(dim, value_dim)), max(MOVE_ELEMENTS // block_n, 8))
    grid = (triton.cdiv(max(dim, value_dim), block_c), a_cache.shape[2], 1 if b_cache is None else 2)
    move_kernel[grid](
        a_bits,
        b_bits,
        source_slots,
        target_slots,
        num_moved,
        *a_bits.stride()[:3],
        *b_bits.stride()[:3],
        source_slots.stride(0),
        target_slots.stride(0),
        DA=dim,
        DB=value_dim,
        PAGE_SIZE=a_cache.shape[1],
        BLOCK_N=block_n,
        BLOCK_C=block_c,
    )
