# mypy: disable-error-code="no-untyped-call"
"""Host side of the Triton attention kernels: from the arguments of a call to grid, constants and workspace.

Both families come here as one form: queries in one or two parts along the key dim, a K cache, and a V cache that is the
K cache itself for MLA. Only shapes, strides and dtypes are read, so a launch may be captured and replayed with other
lengths.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from specops.layout import QueryLayout
from specops.ops.triton_common import (
    LOG2E,
    PACKED_TREE_WIDTH,
    SCHEDULE_SIZES,
    Tiling,
    fitting_stages,
    launches_overlap,
    merge_counters,
    next_power_of_2,
    num_sms,
)
from specops.ops.triton_kernels import merge_kernel, split_kernel, tiles_kernel

# Value columns that a program of the merge kernel takes, the elements of partials it loads at once, and the programs a
# multiprocessor above which each takes more rows.
MERGE_COLUMNS = 128
MERGE_LOADED = 8192
MERGE_PROGRAMS_PER_SM = 8
# The same with a wide merge, whose programs have 128 threads: 64 registers of partial results each.
WIDE_MERGE_COLUMNS, WIDE_MERGE_PARTS, WIDE_MERGE_BYTES = 512, 16, 32768
# With more parts of short rows, as a single request has them: all at once, and programs of one warp, so many of them.
# H200, 2026-11-30, 4 rows of 4096 keys, us by value columns and warps: 64, 1 10.2; 32, 1 10.5; 64, 2 10.4; 128, 1 11.5.
SHORT_MERGE_COLUMNS, SHORT_MERGE_PARTS = 64, 32
# Elements of a partial that the last program of a unit merges at a time: several of them are in registers at once.
MERGE_ELEMENTS = 4096


def launch(
    q: Tensor,
    q2: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    *,
    layout: QueryLayout,
    scale: float,
    shared_v: bool,
    split: bool,
    tiling: Tiling,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    tree_mask: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> Tensor:
    """Run one attention call.

    Args:
        q: ``[T, Hq, D]``, or its first D columns when q2 holds the rest.
        q2: ``[T, Hq, D2]`` or None.
        k_cache: ``[P, S, Hkv, D + D2]``.
        v_cache: ``[P, S, Hkv, Dv]``; a view of k_cache's first columns with shared_v.
        split: the split kernel, else the tile kernel.
        tiling: sizes of the launch.

    Returns:
        ``[T, Hq, Dv]`` in q's dtype.
    """
    num_rows, num_heads, dim = q.shape
    _, page_size, num_kv_heads, value_dim = v_cache.shape
    batch, max_pages = page_table.shape
    query_len, group = layout.max_query_len, num_heads // num_kv_heads
    out = q.new_empty((num_rows, num_heads, value_dim))
    if num_rows == 0:
        return out
    if batch == 0 or max_pages == 0:
        return out.zero_()
    if page_table.stride(1) != 1:
        page_table = page_table.contiguous()
    if tree_mask is not None and tree_mask.stride(1) != 1:
        tree_mask = tree_mask.contiguous()
    seq_lens, sinks, query_start = seq_lens.contiguous(), _dense(sinks), _dense(layout.query_start)
    dim2 = 0 if q2 is None else q2.shape[2]
    tree_width = 0 if tree_mask is None else tree_mask.shape[1]
    # Lengths are int32, and a number beyond that would be compiled for.
    table_keys = min(max_pages * page_size, 2**31 - 1)
    max_tiles = triton.cdiv(query_len * group, tiling.block_m)
    scaled_kv = k_scale is not None or v_scale is not None
    if scaled_kv:
        k_scale = _one(q.device) if k_scale is None else k_scale
        v_scale = _one(q.device) if v_scale is None else v_scale
    numbers = (
        batch,
        num_rows,
        query_len,
        max_tiles,
        window or 0,
        tree_width,
        table_keys,
        scale * LOG2E if softcap is None else scale / softcap,
        1.0 if softcap is None else softcap * LOG2E,
        q.stride(0),
        q.stride(1),
        0 if q2 is None else q2.stride(0),
        0 if q2 is None else q2.stride(1),
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        page_table.stride(0),
        0 if tree_mask is None else tree_mask.stride(0),
    )
    tensors = (q, q2, k_cache, v_cache, out, page_table, seq_lens, query_start, sinks, tree_mask, k_scale, v_scale)
    block_dv = max(next_power_of_2(value_dim), 16)
    block_d, block_d2 = max(next_power_of_2(dim), 16), 0 if q2 is None else max(next_power_of_2(dim2), 16)
    loaded = block_d + block_d2 + (0 if shared_v else block_dv)
    # Beside keys and values: the queries, and a tile of output or probabilities on its way to another layout.
    stages = fitting_stages(
        tiling.num_stages,
        tiling.block_n * loaded * k_cache.itemsize,
        tiling.block_m * (block_d + block_d2 + block_dv) * q.itemsize,
        q.device,
    )
    # What the schedule depends on, so that the merge kernel finds what the split kernel left.
    schedule: dict[str, Any] = {
        "HEADS": num_kv_heads,
        "GROUP": group,
        "DV": value_dim,
        "BLOCK_M": tiling.block_m,
        "BLOCK_N": tiling.block_n,
        "BLOCK_DV": block_dv,
        "PACKED": query_start is not None,
        "WINDOW": window is not None,
        "SINKS": sinks is not None,
        "TREE": tree_mask is not None,
    }
    constants: dict[str, Any] = {
        **schedule,
        "D": dim,
        "D2": dim2,
        "PAGE_SIZE": page_size,
        "BLOCK_D": block_d,
        "BLOCK_D2": block_d2,
        "SHARED_V": shared_v,
        "BLOCK_W": max(next_power_of_2(tree_width), 2),
        "SOFTCAP": softcap is not None,
        "TREE_BITS": tree_bits(tree_width),
        "SCALED_KV": scaled_kv,
        "STAGES": stages,
        "num_warps": tiling.num_warps,
        "num_stages": stages,
    }
    if tiling.max_registers is not None:
        constants["maxnreg"] = tiling.max_registers
    if not split:
        tiles_kernel[(max_tiles * batch, num_kv_heads)](*tensors, *numbers, **constants)
        return out
    units = batch * num_kv_heads * max_tiles
    most_blocks = units * triton.cdiv(max_pages * page_size, tiling.block_n)
    programs = max(1, min(num_sms(q.device) * tiling.programs_per_sm, most_blocks // tiling.min_blocks))
    if tiling.direct:
        parts = max(programs // units, 1)
        if tiling.wide_merge and not (tiling.hopper or tiling.roles):
            # No more parts than take the blocks of a full page table in as many turns: a wide merge loads all at once.
            blocks = triton.cdiv(max_pages * page_size, tiling.block_n)
            parts = triton.cdiv(blocks, triton.cdiv(blocks, parts))
        programs = parts * units
    slots = programs if tiling.direct else 2 * programs
    partial_dtype = q.dtype if tiling.rounded_partials else torch.float32
    partial = torch.empty((slots, tiling.block_m, block_dv), dtype=partial_dtype, device=q.device)
    partial_lse = torch.empty((slots, tiling.block_m), dtype=torch.float32, device=q.device)
    # Where every unit has one program there is nothing to merge.
    merges = not (tiling.direct and programs == units)
    inline_merge = tiling.inline_merge and merges
    # Without counters any such pointer: one that is left out would be another form of call, and Triton 3.6 compiles what
    # launches each form with the C compiler.
    counters = merge_counters(q.device, units) if inline_merge else seq_lens
    overlap = launches_overlap(q.device)
    early = tiling.early and overlap
    launched_early = {"launch_pdl": True} if early else {}
    shared = {
        # The schedule's prefix sum; one size, so one compiled kernel, where there is no schedule.
        "BLOCK_B": next(size for size in SCHEDULE_SIZES if tiling.direct or size >= min(batch, SCHEDULE_SIZES[-1])),
        "MIN_BLOCKS": 1 if tiling.direct and (tiling.hopper or tiling.roles) else tiling.min_blocks,
        "DIRECT": tiling.direct,
        "OVERLAP": overlap,
    }
    even = tiling.even and not tiling.direct and query_start is None and not (tiling.roles and units > programs)
    if tiling.roles:
        from specops.ops.triton_hopper_roles import launch_roles

        assert q2 is not None
        launch_roles(
            programs,
            (q, q2, k_cache),
            (out, page_table, seq_lens, query_start, sinks, tree_mask, partial, partial_lse),
            (*numbers[:4], *numbers[5:8], *numbers[-2:]),
            {name: constants[name] for name in ("PAGE_SIZE", "PACKED", "SINKS", "TREE")} | shared | {"EVEN": even},
            heads=group,
            hold=tiling.hold,
            early=early,
        )
    elif tiling.hopper:
        from specops.ops.triton_hopper import NUM_WARPS, latent_split_kernel

        latent_split_kernel[(programs,)](
            *(q, q2, k_cache, out, page_table, seq_lens, query_start, sinks, tree_mask, partial, partial_lse),
            *(*numbers[:8], *numbers[9:14], *numbers[-2:]),
            **{name: constants[name] for name in ("D", "D2", "PAGE_SIZE", "PACKED", "SINKS", "TREE")},
            **shared,
            HEADS=group,
            STRIDE_KS=k_cache.stride(1),
            EARLY=early,
            num_warps=NUM_WARPS,
            **launched_early,
        )
    else:
        split_kernel[(programs,)](
            *tensors,
            partial,
            partial_lse,
            counters,
            *numbers,
            k_cache.shape[0],
            **constants,
            **shared,
            SWAP=tiling.swap,
            INLINE_MERGE=inline_merge,
            MERGE_ROWS=min(tiling.block_m, max(MERGE_ELEMENTS // block_dv, 1)),
            EVEN=even,
            ONE_TILE=max_tiles == 1,
            PREFETCH=tiling.prefetch if early and (even or tiling.direct) and window is None else 0,
            EARLY=early,
            **launched_early,
        )
    if merges and not inline_merge:
        most = programs // units if tiling.direct else 2 + programs // units
        columns, rows, chunk, warps = _merge_sizes(units, block_dv, most, partial.itemsize, tiling, num_sms(q.device))
        merge_kernel[(units, tiling.block_m // rows, block_dv // columns)](
            out,
            seq_lens,
            query_start,
            sinks,
            partial,
            partial_lse,
            batch,
            query_len,
            max_tiles,
            window or 0,
            tree_width,
            table_keys,
            programs,
            **schedule,
            **shared,
            EVEN=even,
            MERGE_ROWS=rows,
            MERGE_COLUMNS=columns,
            CHUNK=chunk,
            IN_THREADS=tiling.wide_merge,
            num_warps=warps,
            **({"launch_pdl": True} if overlap else {}),
        )
    return out


def _merge_sizes(units: int, block_dv: int, most: int, itemsize: int, tiling: Tiling, sms: int) -> tuple[int, int, int, int]:
    """Value columns and rows of a program of the merge kernel, the partial results that it loads at once, and its warps.

    Args:
        most: partial results of a unit, at most.
        itemsize: bytes of one of their numbers.
    """
    if tiling.wide_merge and most > WIDE_MERGE_PARTS and block_dv < WIDE_MERGE_COLUMNS:
        return min(block_dv, SHORT_MERGE_COLUMNS), 1, SHORT_MERGE_PARTS, 1
    if tiling.wide_merge:
        chunk = min(max(next_power_of_2(most), 2), WIDE_MERGE_PARTS)
        columns = min(block_dv, WIDE_MERGE_COLUMNS)
        rows = max(WIDE_MERGE_BYTES // (itemsize * chunk * columns), 1)
        return columns, min(rows, 8, tiling.block_m), chunk, 4
    columns = min(block_dv, MERGE_COLUMNS)
    programs = units * tiling.block_m * (block_dv // columns)
    # With a program on every multiprocessor the kernel behind can't be put in place early: 16 rows of a step of SmolLM2 took
    # 729 us, with a third as many programs 633 (H200).
    few = tiling.direct and programs > sms
    rows = next_power_of_2(triton.cdiv(programs, sms // 2 if few else sms * MERGE_PROGRAMS_PER_SM))
    rows = min(rows, 8, tiling.block_m)
    return columns, rows, min(max(next_power_of_2(most), 2), MERGE_LOADED // (rows * columns)), 4


def tree_bits(tree_width: int) -> int:
    """Bits of the integer that holds a row of a tree mask: 32, 64, or 0 for a mask that is read from memory."""
    if tree_width > PACKED_TREE_WIDTH:
        return 0
    return 32 if tree_width <= 32 else 64


def _dense(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _one(device: torch.device) -> Tensor:
    return torch.ones(1, dtype=torch.float32, device=device)
