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
# Tokens of a page table up to which a unit has one program, or several where its keys are many; their tiles of rows are the
# smallest that leave at most so many programs a multiprocessor. See :func:`choose_tiling`.
SHORT_KEYS, SHORT_WIDTH, SHORT_PROGRAMS_PER_SM = 2048, 64, 2
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
        room: tokens that the page table has room for.
    """
    width = max(head_dim, next_power_of_2(value_dim))
    if dtype == torch.float32:
        # float32 products run on the ordinary units and hold their operands in registers.
        return Tiling(16, 32 if width <= 64 else 16, 4, 2, 2)
    if not split:
        return Tiling(PREFILL_ROWS, 64 if width <= 128 else 32, 8, 3, 1)
    block_m = min(max(next_power_of_2(rows), 16), MAX_SPLIT_ROWS)
    if width > 128:
        return Tiling(block_m, 32, 4, 3, 2, early=True, even=True)
    if room <= SHORT_KEYS and width <= SHORT_WIDTH:
        # H200, 2026-11-29, us of one of 30 layers with 9 heads in 3, D=64, 189 keys and room for 192 / for 2048, here and by
        # the sizes below: 1 x 4 rows 5.3 and 5.3 / 5.3 and 6.0; 8 x 4 6.3 and 13.2 / 6.4 and 8.0; 32 x 1 6.4 and 13.7 / 6.6
        # and 9.0; 32 x 4 7.4 and 14.3 / 7.5 and 8.8. With tiles of 64 rows in place of 16, 1 x 16 rows take 10.3.
        block_m = 16
        while block_m < MAX_SPLIT_ROWS and units_per_sm * triton.cdiv(rows, block_m) > SHORT_PROGRAMS_PER_SM:
            block_m *= 2
        return Tiling(block_m, 128, 8, 2, 2, min_blocks=2, direct=True, early=True)
    if batch <= DIRECT_REQUESTS and rows <= MAX_SPLIT_ROWS:
        # H200, 2026-11-29, us, merged by the second kernel and by the last program: 4 rows of 4096 keys 10.25 and 13.4;
        # 9 heads in 3, D=64, 256 keys: 4 rows 4.2 and 4.9, or 4.7 for one program a head; 16 rows 5.1 and 5.6. With three
        # blocks in flight 12.0 in a later run, with four 10.2.
        return Tiling(block_m, 64, 4, 4, 2, inline_merge=False, direct=True, early=True)
    least = max(PROGRAM_BYTES // (64 * (head_dim + value_dim) * kv_dtype.itemsize), 1)
    programs = MANY_UNITS_PROGRAMS_PER_SM if units_per_sm >= MANY_UNITS_PER_SM else PROGRAMS_PER_SM
    return Tiling(block_m, 64, 4, 3, programs, min_blocks=least, early=True, even=True)


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
