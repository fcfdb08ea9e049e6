"""The ``triton`` backend's MHA: which kernel and which sizes serve a call. The kernels are in ``triton_kernels``.

All query rows of a request that share a KV head go into one tile, so K and V are read once per KV head. Nothing is tuned
or read back at run time, so a launch may be captured into a CUDA graph.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from specops.layout import QueryLayout
from specops.ops.triton_common import MAX_SCHEDULED_REQUESTS, Tiling, next_power_of_2, num_sms
from specops.ops.triton_launch import launch

# Rows (times group) of the largest tile of the split kernel, and of a prefill tile.
MAX_SPLIT_ROWS = 64
PREFILL_ROWS = 128
# The tile kernel takes over once there are this many whole tiles a multiprocessor.
TILES_PER_SM = 4
# Up to this many requests each unit gets the same number of programs: the schedule takes longer than it can save.
DIRECT_REQUESTS = 1
# H200, 2026-11-29, bf16, 32 heads in 8, D=128, page 64, us by programs a multiprocessor (1 / 2 / 3 / 4 / 8):
#   8x4x4096 41.4 / 40.3 / 49.7;  32x4x4096 137.5 / 128.1 / 154.5;  128x4x2048 290.5 / 257.1 / 296.2 / 253.7 / 253.3;
#   tiles of 32 rows: 64x8x4096 350.0 / 254.3 / - / 253.1 / 278.4;  128x8x8192 1350 / 983.1 / - / 973.4 / 986.9.
# Two fit at once. With more units than that, further programs take turns, and a unit begins while others are under way.
PROGRAMS_PER_SM = 2
MANY_UNITS_PER_SM, MANY_UNITS_PROGRAMS_PER_SM = 3.5, 4
# Tokens that a page table has room for up to which every 256 keys of a unit get a program, and up to which that is one.
SHORT_KEYS, ONE_PROGRAM_KEYS = 2048, 256
# The first of these for head dims above 64: 8 requests of 1024 keys in pages of 64 take 17.5 us so, 16.5 by the even cut.
SHORT_KEYS_OF_WIDE = 512
# Keys and values worth a program of their own: fewer are read in the time that another partial result takes to merge.
PROGRAM_BYTES = 64 << 10


def choose_tiling(
    rows: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    head_dim: int,
    value_dim: int,
    split: bool,
    *,
    batch: int = 2,
    units_per_sm: float = 1.0,
    room: int = 1 << 30,
) -> Tiling:
    """Sizes of a launch.

    Args:
        rows: query rows of the widest request, times heads of a group.
        dtype, kv_dtype: of the query and the cache.
        head_dim, value_dim: key and value dims.
        split: for the split kernel, else for the tile kernel.
        batch: requests.
        units_per_sm: requests times KV heads, for each multiprocessor.
        room: tokens that the page table has room for; so few keys are worth less machinery.
    """
    width = max(head_dim, next_power_of_2(value_dim))
    if dtype == torch.float32:
        # float32 products run on the ordinary units and hold their operands in registers.
        return Tiling(16, 32 if width <= 64 else 16, 4, 2, 2)
    if not split:
        return Tiling(PREFILL_ROWS, 64 if width <= 128 else 32, 8, 3, 1)
    block_m = min(max(next_power_of_2(rows), 16), MAX_SPLIT_ROWS)
    one_program = batch <= DIRECT_REQUESTS or units_per_sm > 2
    # With more units than multiprocessors hold at once, most programs are not there yet when the kernel before ends.
    prefetch = 1 if units_per_sm <= 2 else 0
    if width > 128:
        return Tiling(block_m, 32, 4, 3, 2, early=True, even=True, prefetch=prefetch)
    # Few keys are quickly read again: 16 rows of one request, three heads a group, take 5.3 us as three tiles of 16 rows and
    # 9.3 as one of 64 (H200, 2026-11-29, in a model of 9 heads in 3, D=64, 189 keys).
    small = 16
    while small < block_m and units_per_sm * triton.cdiv(rows, small) > 2:
        small *= 2
    if room <= (ONE_PROGRAM_KEYS if one_program else SHORT_KEYS if width <= 64 else SHORT_KEYS_OF_WIDE):
        # H200, 2026-11-29, us of one layer, by these sizes and by those below, keys / room:
        #   9 heads in 3, D=64, 4 rows: 1 x 189/256 4.2 and 4.0, and no second kernel; 8 x 189/256 4.3 and 6.1 (with room for
        #   192, in a model, 5.7 and 13.3); 8 x 1900/2048 10.9 and 12.5; 32 x 189/256 5.5 and 7.1, x 1900/2048 24.6 and 26.2.
        #   32 heads in 8, D=128, 4 rows: 8 x 189/256 6.6 and 9.2; 8 x 500/512 11.0 and 12.4; 32 x 189/256 10.9 and 12.2.
        if width > 64:
            # With 4 warps 1 x 4 rows of 189 keys take 5.6 in place of 5.8, 32 x 4 rows 12.3 in place of 10.7.
            # Merged by the second kernel 4 / 8 / 16 requests of 500 keys take 9.3 / 10.0 / 14.3, by the last program 10.2 /
            # 10.9 / 14.6 (H200, 2026-11-30).
            second = {"inline_merge": False, "wide_merge": True}
            return Tiling(small, 64, 8, 3, 2, min_blocks=4, direct=True, early=True, prefetch=prefetch, **second)
        if small > 32:
            return Tiling(small, 128, 8, 2, 2, min_blocks=2, direct=True, early=True, prefetch=prefetch)
        return Tiling(small, 256, 8, 1, 2, direct=True, early=True, prefetch=prefetch)
    if batch <= DIRECT_REQUESTS and rows <= MAX_SPLIT_ROWS:
        # H200, 2026-11-29, us, merged by the second kernel and by the last program: 4 rows of 4096 keys 10.25 and 13.4;
        # 9 heads in 3, D=64, 256 keys: 4 rows 4.2 and 4.9, or 4.7 for one program a head; 16 rows 5.1 and 5.6. 4 rows of
        # 4096 keys, the first ones early, with a wide merge: 9.9 with three blocks in flight, 10.1 with four (2026-11-30).
        block_m = small if room <= SHORT_KEYS else block_m
        stages, wide = (3, True) if width > 64 else (4, False)
        return Tiling(
            block_m, 64, 4, stages, 2, inline_merge=False, direct=True, early=True, prefetch=prefetch, wide_merge=wide
        )
    least = max(PROGRAM_BYTES // (64 * (head_dim + value_dim) * kv_dtype.itemsize), 1)
    programs = MANY_UNITS_PROGRAMS_PER_SM if units_per_sm >= MANY_UNITS_PER_SM else PROGRAMS_PER_SM
    return Tiling(block_m, 64, 4, 3, programs, min_blocks=least, early=True, even=True, prefetch=prefetch)


def mha(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    *,
    layout: QueryLayout,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    tree_mask: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    plan: Tensor | None = None,
    tiling: Tiling | None = None,
    split: bool | None = None,
) -> Tensor:
    """Arguments and result as :func:`specops.ops.mha`; ``plan`` is not needed.

    Args:
        tiling: sizes to use in place of :func:`choose_tiling`'s, for measurements.
        split: which kernel to use, for measurements; None decides by the number of tiles.
    """
    batch, num_kv_heads, head_dim = page_table.shape[0], k_cache.shape[2], q.shape[2]
    rows = layout.max_query_len * (q.shape[1] // num_kv_heads)
    if split is None:
        whole_tiles = batch * num_kv_heads * triton.cdiv(rows, PREFILL_ROWS)
        many = rows > MAX_SPLIT_ROWS and whole_tiles >= TILES_PER_SM * num_sms(q.device)
        split = not many and batch <= MAX_SCHEDULED_REQUESTS
    if tiling is None:
        tiling = choose_tiling(
            rows,
            q.dtype,
            k_cache.dtype,
            head_dim,
            v_cache.shape[3],
            split,
            batch=batch,
            units_per_sm=batch * num_kv_heads / num_sms(q.device),
            room=page_table.shape[1] * k_cache.shape[1],
        )
    first = first_part(head_dim)
    return launch(
        q[..., :first],
        q[..., first:] if first < head_dim else None,
        k_cache,
        v_cache,
        page_table,
        seq_lens,
        layout=layout,
        scale=scale,
        shared_v=False,
        split=split,
        tiling=tiling,
        window=window,
        softcap=softcap,
        sinks=sinks,
        tree_mask=tree_mask,
        k_scale=k_scale,
        v_scale=v_scale,
    )


def first_part(head_dim: int) -> int:
    """Columns of the first of the two parts that a key dim is taken in; all of them for a power of two or a small dim."""
    whole = next_power_of_2(head_dim)
    return head_dim if whole == head_dim or head_dim <= 32 else whole // 2
