"""The ``triton`` backend's MLA: one key of ``Dc + Dr`` for all heads, whose first ``Dc`` columns are the value too.

All heads of all rows of a request share tiles. A block of the cache is loaded once, as latent and rotary part, and the
latent part serves both products. The kernels are in ``triton_kernels``.
"""

from __future__ import annotations

import functools
import importlib.util

import torch
import triton
from torch import Tensor

from specops.layout import QueryLayout
from specops.ops.triton_common import (
    MAX_SCHEDULED_REQUESTS,
    PACKED_TREE_WIDTH,
    Tiling,
    hopper_products,
    next_power_of_2,
    num_sms,
    shared_memory,
)
from specops.ops.triton_launch import launch

# Rows times heads of a tile: the least that fills Hopper's matrix instructions, and all that registers hold of 512 values.
TILE_ROWS = 64
# The tile kernel takes over once there are this many whole tiles a multiprocessor.
TILES_PER_SM = 16
# One request, or this many units of a request's tile, get the same number of programs each. In between the schedule evens
# out unequal lengths for 3 to 8%; with many units it costs more. H200, 2026-11-29, 4 rows, 4096 keys, us with and without:
# 16 heads: 8 requests 34.5 / 33.6, 32 requests 86.6 / 81.1, 128 requests 291.9 / 189.1;
# 128 heads: 8 requests 142.6 / 111.8, 32 requests 405.5 / 359.7, 128 requests 1511 / 1397.
DIRECT_REQUESTS, DIRECT_UNITS = 1, 64
# More rows times heads make units of unequal lengths, which the schedule evens out.
DIRECT_ROWS = 1024
HOPPER_DIMS = (512, 64)
# Shared memory that a tile of 64 rows of 512 + 64 dims takes, with one step of 32 keys in flight.
LARGE_TILE_BYTES = 152 << 10
# Requests up to which the kernel of ``triton_hopper_roles`` finds its place in the schedule.
MOST_SCHEDULED = 128


def choose_tiling(
    rows: int,
    dtype: torch.dtype,
    latent_dim: int,
    split: bool,
    *,
    batch: int = 1,
    hopper: bool = False,
    roles: bool = False,
    programs: int = 132,
    shared_bytes: int = 227 << 10,
) -> Tiling:
    """Sizes of a launch.

    Args:
        rows: query rows of the widest request, times heads.
        dtype: of the query.
        latent_dim: ``Dc``.
        split: for the split kernel, else for the tile kernel.
        batch: requests.
        hopper: whether the kernel of ``triton_hopper`` serves the call.
        roles: whether the kernel of ``triton_hopper_roles`` serves it too.
        programs: multiprocessors of the device.
        shared_bytes: shared memory of a program.
    """
    if dtype == torch.float32:
        return Tiling(16, 16, 8 if latent_dim > 128 else 4, 1, 1)
    units = batch * -(-rows // TILE_ROWS)
    direct = split and rows <= DIRECT_ROWS and (batch <= DIRECT_REQUESTS or units >= DIRECT_UNITS)
    # A single unit has too few blocks to fill the pipeline: 13.2 us in plain tiles of 16 rows, 14.5 with roles.
    if roles and split and units > 1 and (rows <= DIRECT_ROWS or batch <= MOST_SCHEDULED):
        return _with_roles(rows, batch, programs // units)
    if hopper and split and units > 1:
        return Tiling(TILE_ROWS, 64, 8, 2, 1, inline_merge=False, direct=direct, hopper=True)
    block_m = min(max(next_power_of_2(rows), 16), TILE_ROWS)
    if latent_dim <= 128:
        return Tiling(block_m, 64, 4, 3, 2)
    # H200, 2026-11-29, 512 + 64, 16 heads, 4 rows, 4096 keys, us: one request 26.1 in tiles of 16 rows, 121 of 64;
    # 32 requests 103.8 in tiles of 64 by 32 keys, 109 of 32. The second kernel was the faster merge throughout.
    if (batch <= 8 and rows <= 512) or shared_bytes < LARGE_TILE_BYTES:
        return Tiling(16, 64, 4, 2, 1, inline_merge=False, direct=direct)
    return Tiling(block_m, 32, 8 if block_m == TILE_ROWS else 4, 3, 1, inline_merge=False)


def _with_roles(rows: int, batch: int, splits: int) -> Tiling:
    """Sizes of the kernel of ``triton_hopper_roles``.

    H200, 2026-11-29, 4 rows, 4096 keys, us. Where units are split, the second kernel was most of what FlashInfer's fa3 was
    faster by: with threads that own columns (``wide_merge``) and rounded partial results, 8 and 32 requests of 16 heads went
    from 30.4 and 64.6 to 21.7 and 53.0, 1 and 8 of 128 heads from 25.1 and 63.3 to 16.8 and 61.3. The even cut costs some of
    that, 23.1 and 56.4 and 64.6, and is worth it where lengths differ: one request of 32768 keys among 31 of 512 takes 48.8,
    240 with equally many programs each; among 7, with 128 heads, 108 and 382. Holding values back pays where tiles share
    keys, so that products and not copies take the time: 32 requests of 128 heads 235.9, 262.1 without; 128 of 16 heads
    161.1, 158.6 without.

    Args:
        rows: as for :func:`choose_tiling`.
        batch: requests.
        splits: programs for each unit.
    """
    shared_keys = rows > TILE_ROWS
    merged = splits >= 2
    even = merged and batch > 1 and rows <= DIRECT_ROWS
    return Tiling(
        TILE_ROWS,
        64,
        4,
        2,
        1,
        inline_merge=False,
        direct=rows <= DIRECT_ROWS and not even,
        roles=True,
        hold=shared_keys,
        early=merged or not shared_keys,
        rounded_partials=merged and rows <= DIRECT_ROWS,
        wide_merge=merged,
        even=even,
    )


@functools.cache
def has_gluon() -> bool:
    """Whether this Triton has Gluon, in which the Hopper kernel is written."""
    return importlib.util.find_spec("triton.experimental.gluon") is not None


def hopper_serves(
    q_latent: Tensor,
    q_rope: Tensor,
    kv_cache: Tensor,
    tree_mask: Tensor | None,
    *others: object,
) -> bool:
    """Whether the kernel of ``triton_hopper`` takes a call: its dims, half precision, 16-byte rows, causal or tree masks.

    Args:
        others: arguments it has no use for, all of which must be None.
    """
    if any(other is not None for other in others) or (q_latent.shape[2], q_rope.shape[2]) != HOPPER_DIMS:
        return False
    if q_latent.dtype not in (torch.float16, torch.bfloat16) or kv_cache.dtype != q_latent.dtype:
        return False
    if tree_mask is not None and tree_mask.shape[1] > PACKED_TREE_WIDTH:
        return False
    strides = (*q_latent.stride()[:2], *q_rope.stride()[:2], *kv_cache.stride()[:2])
    aligned = all(tensor.data_ptr() % 16 == 0 for tensor in (q_latent, q_rope, kv_cache))
    return aligned and not any(stride % 8 for stride in strides) and hopper_products(q_latent.device) and has_gluon()


def roles_serve(q_latent: Tensor, q_rope: Tensor, kv_cache: Tensor, scale: float) -> bool:
    """Whether the kernel of ``triton_hopper_roles`` takes a call that :func:`hopper_serves` accepts: whole blocks in pages,
    queries whose rows and heads are one stride apart, and a scale above zero."""
    flat = all(q.stride(0) == q.shape[1] * q.stride(1) for q in (q_latent, q_rope))
    return flat and kv_cache.shape[1] % 64 == 0 and scale > 0


def mla(
    q_latent: Tensor,
    q_rope: Tensor,
    kv_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    *,
    layout: QueryLayout,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    tree_mask: Tensor | None = None,
    kv_scale: Tensor | None = None,
    plan: Tensor | None = None,
    tiling: Tiling | None = None,
    split: bool | None = None,
) -> Tensor:
    """Arguments and result as :func:`specops.ops.mla`; ``plan`` is not needed.

    Args:
        tiling, split: as for :func:`specops.ops.triton_mha.mha`.
    """
    batch, num_heads, latent_dim = page_table.shape[0], q_latent.shape[1], q_latent.shape[2]
    rows = layout.max_query_len * num_heads
    if split is None:
        whole_tiles = batch * triton.cdiv(rows, TILE_ROWS)
        many = whole_tiles >= TILES_PER_SM * num_sms(q_latent.device) and rows > 16 * TILE_ROWS
        split = not many and batch <= MAX_SCHEDULED_REQUESTS
    if tiling is None:
        hopper = hopper_serves(q_latent, q_rope, kv_cache, tree_mask, window, softcap, kv_scale)
        tiling = choose_tiling(
            rows,
            q_latent.dtype,
            latent_dim,
            split,
            batch=batch,
            hopper=hopper,
            roles=hopper and roles_serve(q_latent, q_rope, kv_cache, scale),
            programs=num_sms(q_latent.device),
            shared_bytes=shared_memory(q_latent.device),
        )
    cache = kv_cache.unsqueeze(2)
    return launch(
        q_latent,
        q_rope,
        cache,
        cache[..., :latent_dim],
        page_table,
        seq_lens,
        layout=layout,
        scale=scale,
        shared_v=True,
        split=split,
        tiling=tiling,
        window=window,
        softcap=softcap,
        sinks=sinks,
        tree_mask=tree_mask,
        k_scale=kv_scale,
        v_scale=kv_scale,
    )
