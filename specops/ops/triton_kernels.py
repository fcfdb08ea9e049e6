# ruff: noqa: RET505, SIM102, PIE808
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""The attention kernels of both families over a paged cache.

    out = softmax(mask(softcap(scale q K^T))) V,  softmax in base 2 with log2(e) folded into the scale

All query rows of a request that share a KV head (rows times heads of the group) form tiles of BLOCK_M, so K and V are
read once per KV head as long as one tile holds them. MLA is the case of one KV head whose value is the first part of its
key (SHARED_V): one load serves both products. A key dim that is no power of two is taken in two parts, D and D2.

* :func:`split_kernel`: the key blocks of all units are cut into equal stretches, one a program (see ``triton_common``).
  For decode, verify, draft-extend, and any batch whose tiles are too few to fill the GPU.
* :func:`merge_kernel`: merges what the stretches left, where the split kernel does not do it itself.
* :func:`tiles_kernel`: one program a tile of rows, over all keys it may see. For prefill.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specops.ops.triton_common import (
    NEG_INF,
    along_rows,
    block_pages,
    even_cut,
    merge_in_threads,
    merge_partials,
    merge_side_by_side,
    prefetch_block,
    product,
    request_costs,
    request_scalars,
    row_blocks,
    row_limits,
    scaled,
    score_product,
    sink_factor,
    softmax_step,
    tile_keys,
    visible,
)

# Numbers that change from batch to batch. Compiling for 1 or a multiple of 16 of each would mean many kernels a model.
UNSPECIALIZED_SCHEDULE = ["num_requests", "query_len", "max_tiles", "window", "tree_width", "table_keys"]
UNSPECIALIZED_MERGE = [*UNSPECIALIZED_SCHEDULE, "num_programs"]
UNSPECIALIZED_CALL = [*UNSPECIALIZED_SCHEDULE, "num_rows", "stride_pages", "stride_mask"]
UNSPECIALIZED_SPLIT = [*UNSPECIALIZED_CALL, "num_pages"]


@triton.jit
def load_tile(at, inside, column_inside, MASKED: tl.constexpr, PADDED: tl.constexpr):
    """A tile of the cache with zeros where a key is behind the sequence or a column behind the head dim."""
    if MASKED and PADDED:
        return tl.load(at, mask=inside & column_inside, other=0.0)
    elif MASKED:
        return tl.load(at, mask=inside, other=0.0)
    elif PADDED:
        return tl.load(at, mask=column_inside, other=0.0)
    else:
        return tl.load(at)


@triton.jit
def fold_blocks(
    q,
    q2,
    m,
    total,
    acc,
    page,
    begin,
    end,
    step,
    k_head,
    v_head,
    pages,
    seq_len,
    num_keys,
    first,
    last,
    bits,
    valid,
    mask_row,
    tree_width,
    score_scale,
    cap,
    stride_kp,
    stride_ks,
    stride_vp,
    stride_vs,
    D: tl.constexpr,
    D2: tl.constexpr,
    DV: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_D2: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    SHARED_V: tl.constexpr,
    SWAP: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TREE: tl.constexpr,
    TREE_BITS: tl.constexpr,
    MASKED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Fold every ``step``-th key block from ``begin`` to ``end`` into the softmax state of one tile.

    Page ids are fetched one block ahead; ``page`` has those of block ``begin``. Without MASKED every key of every block is
    visible to every row.
    """
    ONE_PAGE: tl.constexpr = PAGE_SIZE % BLOCK_N == 0
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    d2 = tl.arange(0, max(BLOCK_D2, 1))
    dv = tl.arange(0, BLOCK_DV)
    for block in tl.range(begin, end, step, num_stages=STAGES):
        key = block * BLOCK_N + n
        if ONE_PAGE:
            k_page = k_head + page.to(tl.int64) * stride_kp
            v_page = v_head + page.to(tl.int64) * stride_vp
            offset = (block * BLOCK_N) % PAGE_SIZE + n
            k_at_row = k_page + offset[:, None] * stride_ks
            v_at = v_page + offset[:, None] * stride_vs + dv[None, :]
        else:
            offset = key % PAGE_SIZE
            k_at_row = k_head + (page.to(tl.int64) * stride_kp + offset * stride_ks)[:, None]
            v_at = v_head + (page.to(tl.int64) * stride_vp + offset * stride_vs)[:, None] + dv[None, :]
        page = block_pages(pages, block + step, block + step < end, num_keys, PAGE_SIZE, BLOCK_N)
        inside = (key < num_keys)[:, None]
        k_at = k_at_row + d[None, :]
        k = load_tile(k_at, inside, (d < D)[None, :], MASKED, BLOCK_D != D).to(q.dtype)
        if SHARED_V:
            v = k
        else:
            v = load_tile(v_at, inside, (dv < DV)[None, :], MASKED, BLOCK_DV != DV).to(q.dtype)
        if SWAP:
            scores = score_product(k, tl.trans(q), None, k_head.dtype.element_ty.primitive_bitwidth == 8)
        else:
            scores = score_product(q, tl.trans(k), None, k_head.dtype.element_ty.primitive_bitwidth == 8)
        if D2 > 0:
            k2_at = k_at_row + (D + d2)[None, :]
            k2 = load_tile(k2_at, inside, (d2 < D2)[None, :], MASKED, BLOCK_D2 != D2).to(q.dtype)
            if SWAP:
                scores = score_product(k2, tl.trans(q2), scores, k_head.dtype.element_ty.primitive_bitwidth == 8)
            else:
                scores = score_product(q2, tl.trans(k2), scores, k_head.dtype.element_ty.primitive_bitwidth == 8)
        scores = scaled(scores.to(tl.float32), score_scale, cap, SOFTCAP)
        if MASKED:
            seen = visible(
                key, first, last, bits, valid, mask_row, seq_len, num_keys, tree_width, SWAP, WINDOW, TREE, TREE_BITS
            )  # fmt: skip
            scores = tl.where(seen, scores, NEG_INF)
        p, m, total, factor = softmax_step(scores, m, total, SWAP)
        acc = acc * along_rows(factor, SWAP)
        if SWAP:
            acc = product(tl.trans(v), p.to(q.dtype), acc)
        else:
            acc = product(p.to(q.dtype), v, acc)
    return m, total, acc


@triton.jit
def tile_rows(
    q,
    q2,
    tree_mask,
    kv_head,
    tile,
    seq_len,
    num_keys,
    start,
    rows,
    window,
    tree_width,
    stride_qt,
    stride_qh,
    stride_q2t,
    stride_q2h,
    stride_mask,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D2: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_D2: tl.constexpr,
    BLOCK_W: tl.constexpr,
    WINDOW: tl.constexpr,
    TREE: tl.constexpr,
    TREE_BITS: tl.constexpr,
):
    """What a tile's rows are and see.

    Returns:
        ``[BLOCK_M]`` row of the request, head, and whether there is such a row; the queries, ``[BLOCK_M, BLOCK_D]`` and
        ``[BLOCK_M, BLOCK_D2]``; the limits of :func:`row_limits`; where a wide tree mask is read, ``[BLOCK_M]``; and the
        half-open range of keys that any of the rows sees.
    """
    d = tl.arange(0, BLOCK_D)
    flat = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row = flat // GROUP
    head = kv_head * GROUP + flat % GROUP
    valid = row < rows
    q_at = q + (start + row).to(tl.int64)[:, None] * stride_qt + head[:, None] * stride_qh + d[None, :]
    q_tile = tl.load(q_at, mask=valid[:, None] & (d < D)[None, :], other=0.0)
    q2_tile = q_tile
    if D2 > 0:
        d2 = tl.arange(0, BLOCK_D2)
        q2_at = q2 + (start + row).to(tl.int64)[:, None] * stride_q2t + head[:, None] * stride_q2h + d2[None, :]
        q2_tile = tl.load(q2_at, mask=valid[:, None] & (d2 < D2)[None, :], other=0.0)
    first, last, bits = row_limits(
        row, valid, start, seq_len, num_keys, rows, window, tree_mask, stride_mask, tree_width,
        BLOCK_M, BLOCK_W, WINDOW, TREE, TREE_BITS,
    )  # fmt: skip
    mask_row = row
    if TREE and TREE_BITS == 0:
        mask_row = tree_mask + (start + row).to(tl.int64) * stride_mask
    low, high = tile_keys(
        tile * BLOCK_M // GROUP, tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, rows - 1),
        seq_len, num_keys, rows, window, tree_width, WINDOW, TREE,
    )  # fmt: skip
    return row, head, valid, q_tile, q2_tile, first, last, bits, mask_row, low, high


@triton.jit(do_not_specialize=UNSPECIALIZED_SPLIT)
def split_kernel(
    q,
    q2,
    k_cache,
    v_cache,
    out,
    page_table,
    seq_lens,
    query_start,
    sinks,
    tree_mask,
    k_scale,
    v_scale,
    partial,
    partial_lse,
    counters,
    num_requests,
    num_rows,
    query_len,
    max_tiles,
    window,
    tree_width,
    table_keys,
    score_scale,
    cap,
    stride_qt,
    stride_qh,
    stride_q2t,
    stride_q2h,
    stride_kp,
    stride_ks,
    stride_kh,
    stride_vp,
    stride_vs,
    stride_vh,
    stride_pages,
    stride_mask,
    num_pages,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D2: tl.constexpr,
    DV: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_D2: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    SHARED_V: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_W: tl.constexpr,
    PACKED: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    TREE: tl.constexpr,
    TREE_BITS: tl.constexpr,
    SCALED_KV: tl.constexpr,
    SWAP: tl.constexpr,
    INLINE_MERGE: tl.constexpr,
    MERGE_ROWS: tl.constexpr,
    MIN_BLOCKS: tl.constexpr,
    DIRECT: tl.constexpr,
    EVEN: tl.constexpr,
    ONE_TILE: tl.constexpr,
    PREFETCH: tl.constexpr,
    OVERLAP: tl.constexpr,
    EARLY: tl.constexpr,
    STAGES: tl.constexpr,
):
    """An equal stretch of all units' key blocks a program, or with DIRECT an equal share of one unit's; see the module."""
    if ONE_TILE:
        max_tiles = 1
    if DIRECT or EVEN:
        # What a program begins with where units are cut alike, from shapes alone: its page ids need not wait for lengths.
        units = num_requests * HEADS * max_tiles
        index = tl.program_id(0) // units
        unit_id = tl.program_id(0) - index * units
        guessed = unit_id // (HEADS * max_tiles)
        pages = page_table + guessed.to(tl.int64) * stride_pages
    if PREFETCH > 0:
        # The first key blocks come from memory into the L2 cache while the kernel before ends. Lengths and page ids may be
        # about to change: that would cost time alone. They are read past the L1 cache, which would keep them.
        hint = tl.minimum(tl.load(seq_lens + guessed, cache_modifier=".cg"), table_keys)
        guessed_head = (unit_id // max_tiles % HEADS).to(tl.int64)
        k_head, v_head = k_cache + guessed_head * stride_kh, v_cache + guessed_head * stride_vh
        for turn in tl.static_range(PREFETCH):
            key = (index + turn * tl.maximum(tl.num_programs(0) // units, 1)) * BLOCK_N + tl.arange(0, BLOCK_N)
            held = tl.load(pages + key // PAGE_SIZE, mask=key < hint, other=0, cache_modifier=".cg")
            prefetch_block(k_head, key, held, key < hint, stride_kp, stride_ks, num_pages, D + D2, PAGE_SIZE)
            if not SHARED_V:
                prefetch_block(v_head, key, held, key < hint, stride_vp, stride_vs, num_pages, DV, PAGE_SIZE)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    if OVERLAP:
        # The next kernel may be put in place now; it waits for this one's end before it reads results. The merge kernel
        # reads lengths before, so this comes after the wait above.
        tl.extra.cuda.gdc_launch_dependents()
    pid = tl.program_id(0)
    if PACKED:
        _zero_unowned_rows(out, query_start, num_requests, num_rows, pid, HEADS * GROUP, DV, BLOCK_DV)
    v_factor = 1.0
    if SCALED_KV:
        score_scale = score_scale * tl.load(k_scale)
        v_factor = tl.load(v_scale)
    if DIRECT:
        splits = tl.num_programs(0) // units
        request = guessed
        kv_head = unit_id // max_tiles % HEADS
        tile = unit_id % max_tiles
        seq_len, num_keys, start, rows = request_scalars(seq_lens, query_start, request, query_len, table_keys, PACKED)
        first_block, blocks, tiles = row_blocks(
            seq_len, num_keys, rows, window, tree_width, GROUP, BLOCK_M, BLOCK_N, WINDOW, TREE
        )
        contributors = tl.minimum((blocks + MIN_BLOCKS - 1) // MIN_BLOCKS, splits)
        # Without a window the first block is in reach of the page table, if not of the sequence.
        page = block_pages(
            pages, first_block + index, (first_block + index) * BLOCK_N < table_keys, table_keys, PAGE_SIZE, BLOCK_N
        )
        if (tile < tiles) & (index < contributors):
            split_unit(
                q, q2, k_cache, v_cache, out, page_table, sinks, tree_mask, partial, partial_lse, counters,
                request, kv_head, tile, seq_len, num_keys, start, rows,
                page, first_block + index, first_block + blocks, contributors, pid, unit_id, units, 0, contributors,
                max_tiles, window, tree_width, score_scale, cap, v_factor,
                stride_qt, stride_qh, stride_q2t, stride_q2h,
                stride_kp, stride_ks, stride_kh, stride_vp, stride_vs, stride_vh, stride_pages, stride_mask,
                HEADS, GROUP, D, D2, DV, PAGE_SIZE, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_D2, BLOCK_DV, SHARED_V, BLOCK_W,
                WINDOW, SOFTCAP, SINKS, TREE, TREE_BITS, SWAP, INLINE_MERGE, MERGE_ROWS, DIRECT, STAGES,
            )  # fmt: skip
    else:
        cost = request_costs(
            seq_lens, query_start, num_requests, query_len, window, tree_width, table_keys,
            HEADS, GROUP, BLOCK_M, BLOCK_N, BLOCK_B, PACKED, WINDOW, TREE,
        )  # fmt: skip
        if EVEN:
            page_ahead = block_pages(pages, index, index * BLOCK_N < table_keys, table_keys, PAGE_SIZE, BLOCK_N)
            even, part, all_blocks = even_cut(cost, units, HEADS * max_tiles, tl.num_programs(0), MIN_BLOCKS)
            upto = cost
            if not even:
                upto = tl.cumsum(cost, 0)
        else:
            upto = tl.cumsum(cost, 0)
            all_blocks = tl.sum(cost, 0)
        stretch = tl.maximum((all_blocks + tl.num_programs(0) - 1) // tl.num_programs(0), MIN_BLOCKS)
        position = pid * stretch
        stop = tl.minimum(position + stretch, all_blocks)
        if EVEN:
            position = tl.where(even, unit_id, position)
            stop = tl.where(even, units, stop)
        while position < stop:
            # The request that this place of the schedule falls in, and the place in it; a place is a unit if even.
            if EVEN:
                if even:
                    request = position // (HEADS * max_tiles)
                    within = position - request * (HEADS * max_tiles)
                else:
                    request, within = place_of(position, upto, cost)
            else:
                request, within = place_of(position, upto, cost)
            seq_len, num_keys, start, rows = request_scalars(seq_lens, query_start, request, query_len, table_keys, PACKED)
            first_block, blocks, tiles = row_blocks(
                seq_len, num_keys, rows, window, tree_width, GROUP, BLOCK_M, BLOCK_N, WINDOW, TREE
            )
            unit = within // blocks
            skip = within - unit * blocks
            count = tl.minimum(blocks - skip, stop - position)
            begin = first_block + skip
            end = begin + count
            step = 1
            unit_start = position - skip
            first_program = unit_start // stretch
            slot = 2 * pid + tl.where(pid == first_program, 1, 0)
            first_slot = 2 * first_program
            slot_step = 2
            slot_extra = 1
            contributors = (unit_start + blocks - 1) // stretch - first_program + 1
            if EVEN:
                unit = tl.where(even, within, unit)
                step = tl.where(even, (blocks + part - 1) // part, 1)
                begin = tl.where(even, first_block + index, begin)
                end = tl.where(even, tl.where(index < step, first_block + blocks, 0), end)
                count = tl.where(even, tl.num_programs(0), count)
                slot = tl.where(even, pid, slot)
                first_slot = tl.where(even, position, first_slot)
                slot_step = tl.where(even, units, slot_step)
                slot_extra = tl.where(even, 0, slot_extra)
                contributors = tl.where(even, step, contributors)
            pages = page_table + request.to(tl.int64) * stride_pages
            if EVEN and not WINDOW:
                page = page_ahead
                if even:
                    # Of the unit after this one, to be there when it begins.
                    following = tl.minimum(position + tl.num_programs(0), units - 1) // (HEADS * max_tiles)
                    page_ahead = block_pages(
                        page_table + following.to(tl.int64) * stride_pages, index, index * BLOCK_N < table_keys,
                        table_keys, PAGE_SIZE, BLOCK_N,
                    )  # fmt: skip
                else:
                    page = block_pages(pages, begin, begin < end, num_keys, PAGE_SIZE, BLOCK_N)
            else:
                page = block_pages(pages, begin, begin < end, num_keys, PAGE_SIZE, BLOCK_N)
            kv_head = unit // tiles
            if ONE_TILE:
                kv_head = unit
            if begin < end:
                split_unit(
                    q, q2, k_cache, v_cache, out, page_table, sinks, tree_mask, partial, partial_lse, counters,
                    request, kv_head, unit - kv_head * tiles if not ONE_TILE else 0, seq_len, num_keys, start, rows,
                    page, begin, end, step,
                    slot, first_slot, slot_step, slot_extra, contributors,
                    max_tiles, window, tree_width, score_scale, cap, v_factor,
                    stride_qt, stride_qh, stride_q2t, stride_q2h,
                    stride_kp, stride_ks, stride_kh, stride_vp, stride_vs, stride_vh, stride_pages, stride_mask,
                    HEADS, GROUP, D, D2, DV, PAGE_SIZE, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_D2, BLOCK_DV, SHARED_V, BLOCK_W,
                    WINDOW, SOFTCAP, SINKS, TREE, TREE_BITS, SWAP, INLINE_MERGE, MERGE_ROWS, DIRECT, STAGES,
                )  # fmt: skip
            position += count


@triton.jit
def place_of(position, upto, cost):
    """The request that a place of the schedule falls in, and the place counted from the request's start."""
    before = upto <= position
    return tl.sum(before.to(tl.int32), 0), position - tl.sum(tl.where(before, cost, 0), 0)


@triton.jit
def split_unit(
    q,
    q2,
    k_cache,
    v_cache,
    out,
    page_table,
    sinks,
    tree_mask,
    partial,
    partial_lse,
    counters,
    request,
    kv_head,
    tile,
    seq_len,
    num_keys,
    start,
    rows,
    page,
    begin,
    end,
    step,
    slot,
    first_slot,
    slot_step,
    slot_extra,
    contributors,
    max_tiles,
    window,
    tree_width,
    score_scale,
    cap,
    v_factor,
    stride_qt,
    stride_qh,
    stride_q2t,
    stride_q2h,
    stride_kp,
    stride_ks,
    stride_kh,
    stride_vp,
    stride_vs,
    stride_vh,
    stride_pages,
    stride_mask,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D2: tl.constexpr,
    DV: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_D2: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    SHARED_V: tl.constexpr,
    BLOCK_W: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    TREE: tl.constexpr,
    TREE_BITS: tl.constexpr,
    SWAP: tl.constexpr,
    INLINE_MERGE: tl.constexpr,
    MERGE_ROWS: tl.constexpr,
    DIRECT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Every ``step``-th key block from ``begin`` to ``end`` of one unit: into the output when this program is the only
    contributor, else into slot ``slot`` of the partial results, and merged if this program is the last of them."""
    dv = tl.arange(0, BLOCK_DV)
    m_index = tl.arange(0, BLOCK_M)
    row, head, valid, q_tile, q2_tile, first, last, bits, mask_row, low, high = tile_rows(
        q, q2, tree_mask, kv_head, tile, seq_len, num_keys, start, rows, window, tree_width,
        stride_qt, stride_qh, stride_q2t, stride_q2h, stride_mask,
        GROUP, D, D2, BLOCK_M, BLOCK_D, BLOCK_D2, BLOCK_W, WINDOW, TREE, TREE_BITS,
    )  # fmt: skip
    if WINDOW:
        # Blocks that none of this tile's rows sees, in whole steps.
        begin += tl.maximum(low // BLOCK_N - begin + step - 1, 0) // step * step
        page = block_pages(
            page_table + request.to(tl.int64) * stride_pages, begin, begin < end, num_keys, PAGE_SIZE, BLOCK_N
        )
    end = tl.minimum(end, (high + BLOCK_N - 1) // BLOCK_N)

    m = tl.full((BLOCK_M,), NEG_INF, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if SWAP:
        acc = tl.zeros((BLOCK_DV, BLOCK_M), tl.float32)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    m, total, acc = fold_blocks(
        q_tile, q2_tile, m, total, acc, page, begin, end, step,
        k_cache + kv_head.to(tl.int64) * stride_kh, v_cache + kv_head.to(tl.int64) * stride_vh,
        page_table + request.to(tl.int64) * stride_pages,
        seq_len, num_keys, first, last, bits, valid, mask_row, tree_width, score_scale, cap,
        stride_kp, stride_ks, stride_vp, stride_vs,
        D, D2, DV, PAGE_SIZE, BLOCK_N, BLOCK_D, BLOCK_D2, BLOCK_DV, SHARED_V,
        SWAP, WINDOW, SOFTCAP, TREE, TREE_BITS, True, STAGES,
    )  # fmt: skip
    safe = tl.where(total == 0, 1.0, total)
    result = acc * along_rows(v_factor / safe, SWAP)
    if SWAP:
        result = tl.trans(result)
    lse = tl.where(total == 0, NEG_INF, m + tl.log2(safe))

    if contributors == 1:
        result = result * sink_factor(lse, sinks, head, valid, SINKS)[:, None]
        out_at = out + ((start + row).to(tl.int64)[:, None] * (HEADS * GROUP) + head[:, None]) * DV + dv[None, :]
        tl.store(out_at, result.to(out.dtype.element_ty), mask=valid[:, None] & (dv < DV)[None, :])
    else:
        at_row = slot.to(tl.int64) * BLOCK_M + m_index
        tl.store(partial + at_row[:, None] * BLOCK_DV + dv[None, :], result, mask=(dv < DV)[None, :])
        tl.store(partial_lse + at_row, lse)
        if INLINE_MERGE:
            # All warps' stores are done before one of them announces this contributor.
            tl.debug_barrier()
            counter = counters + (request * HEADS + kv_head) * max_tiles + tile
            arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
            if arrived == contributors - 1:
                tl.store(counter, 0)
                for part in range(0, BLOCK_M // MERGE_ROWS):
                    merge_rows(
                        out, sinks, partial, partial_lse, first_slot, slot_step, slot_extra, contributors,
                        start, rows, kv_head, tile,
                        part * MERGE_ROWS + tl.arange(0, MERGE_ROWS), dv,
                        HEADS, GROUP, DV, BLOCK_M, BLOCK_DV, SINKS, 4, False,
                    )  # fmt: skip


@triton.jit
def _zero_unowned_rows(
    out, query_start, num_requests, num_rows, pid, HEADS: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr
):
    """Rows of a packed layout behind the last request belong to nobody and are zero."""
    dv = tl.arange(0, BLOCK_DV)
    row = tl.load(query_start + num_requests) + pid
    while row < num_rows:
        for head in range(0, HEADS):
            at = out + (row.to(tl.int64) * HEADS + head) * DV + dv
            tl.store(at, tl.zeros((BLOCK_DV,), out.dtype.element_ty), mask=dv < DV)
        row += tl.num_programs(0)


@triton.jit
def merge_rows(
    out,
    sinks,
    partial,
    partial_lse,
    first_slot,
    slot_step,
    slot_extra,
    contributors,
    start,
    rows,
    kv_head,
    tile,
    m_index,
    column,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    SINKS: tl.constexpr,
    CHUNK: tl.constexpr,
    SIDE_BY_SIDE: tl.constexpr,
    IN_THREADS: tl.constexpr = False,
):
    """Merge rows ``m_index`` and value columns ``column`` of one unit and write them to the output."""
    flat = tile * BLOCK_M + m_index
    row = flat // GROUP
    head = kv_head * GROUP + flat % GROUP
    valid = row < rows
    if IN_THREADS:
        merged, lse = merge_in_threads(
            partial, partial_lse, first_slot, slot_step, slot_extra, contributors, m_index, column, column < DV,
            BLOCK_M, BLOCK_DV, CHUNK,
        )  # fmt: skip
    elif SIDE_BY_SIDE:
        merged, lse = merge_side_by_side(
            partial, partial_lse, first_slot, slot_step, slot_extra, contributors, m_index, column, column < DV,
            BLOCK_M, BLOCK_DV, CHUNK,
        )  # fmt: skip
    else:
        merged, lse = merge_partials(
            partial, partial_lse, first_slot, slot_step, slot_extra, contributors, m_index, column, column < DV,
            BLOCK_M, BLOCK_DV, CHUNK,
        )  # fmt: skip
    merged = merged * sink_factor(lse, sinks, head, valid, SINKS)[:, None]
    at = out + ((start + row).to(tl.int64)[:, None] * (HEADS * GROUP) + head[:, None]) * DV + column[None, :]
    tl.store(at, merged.to(out.dtype.element_ty), mask=valid[:, None] & (column < DV)[None, :])


@triton.jit(do_not_specialize=UNSPECIALIZED_MERGE)
def merge_kernel(
    out,
    seq_lens,
    query_start,
    sinks,
    partial,
    partial_lse,
    num_requests,
    query_len,
    max_tiles,
    window,
    tree_width,
    table_keys,
    num_programs,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_B: tl.constexpr,
    MERGE_ROWS: tl.constexpr,
    MERGE_COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    PACKED: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    TREE: tl.constexpr,
    MIN_BLOCKS: tl.constexpr,
    DIRECT: tl.constexpr,
    EVEN: tl.constexpr,
    OVERLAP: tl.constexpr,
    IN_THREADS: tl.constexpr,
):
    """Merge the partials of one unit, ``MERGE_ROWS`` rows by ``MERGE_COLUMNS`` value columns a program.

    There is nothing to do for a unit of one program.
    """
    if OVERLAP:
        # The next kernel may be put in place now; it waits for this one's end.
        tl.extra.cuda.gdc_launch_dependents()
    unit_id = tl.program_id(0)
    request = unit_id // (HEADS * max_tiles)
    kv_head = unit_id // max_tiles % HEADS
    tile = unit_id % max_tiles
    seq_len, num_keys, start, rows = request_scalars(seq_lens, query_start, request, query_len, table_keys, PACKED)
    _, blocks, tiles = row_blocks(seq_len, num_keys, rows, window, tree_width, GROUP, BLOCK_M, BLOCK_N, WINDOW, TREE)
    if DIRECT:
        slot_step = num_requests * HEADS * max_tiles
        first_slot = unit_id
        slot_extra = 0
        contributors = tl.minimum((blocks + MIN_BLOCKS - 1) // MIN_BLOCKS, num_programs // slot_step)
    else:
        cost = request_costs(
            seq_lens, query_start, num_requests, query_len, window, tree_width, table_keys,
            HEADS, GROUP, BLOCK_M, BLOCK_N, BLOCK_B, PACKED, WINDOW, TREE,
        )  # fmt: skip
        all_blocks = tl.sum(cost, 0)
        base = tl.sum(tl.where(tl.arange(0, BLOCK_B) < request, cost, 0), 0)
        stretch = tl.maximum((all_blocks + num_programs - 1) // num_programs, MIN_BLOCKS)
        unit_start = base + (kv_head * tiles + tile) * blocks
        first_program = unit_start // stretch
        contributors = (unit_start + blocks - 1) // stretch - first_program + 1
        first_slot = 2 * first_program
        slot_step = 2
        slot_extra = 1
        if EVEN:
            units = num_requests * HEADS * max_tiles
            even, part, _ = even_cut(cost, units, HEADS * max_tiles, num_programs, MIN_BLOCKS)
            contributors = tl.where(even, (blocks + part - 1) // part, contributors)
            first_slot = tl.where(even, unit_id, first_slot)
            slot_step = tl.where(even, units, slot_step)
            slot_extra = tl.where(even, 0, slot_extra)
    if OVERLAP:
        # Before any way out: what follows this kernel relies on the split kernel having ended too.
        tl.extra.cuda.gdc_wait()
    if (tile < tiles) & (contributors > 1):
        merge_rows(
            out, sinks, partial, partial_lse, first_slot, slot_step, slot_extra, contributors, start, rows, kv_head, tile,
            tl.program_id(1) * MERGE_ROWS + tl.arange(0, MERGE_ROWS),
            tl.program_id(2) * MERGE_COLUMNS + tl.arange(0, MERGE_COLUMNS),
            HEADS, GROUP, DV, BLOCK_M, BLOCK_DV, SINKS, CHUNK, True, IN_THREADS,
        )  # fmt: skip


@triton.jit(do_not_specialize=UNSPECIALIZED_CALL)
def tiles_kernel(
    q,
    q2,
    k_cache,
    v_cache,
    out,
    page_table,
    seq_lens,
    query_start,
    sinks,
    tree_mask,
    k_scale,
    v_scale,
    num_requests,
    num_rows,
    query_len,
    max_tiles,
    window,
    tree_width,
    table_keys,
    score_scale,
    cap,
    stride_qt,
    stride_qh,
    stride_q2t,
    stride_q2h,
    stride_kp,
    stride_ks,
    stride_kh,
    stride_vp,
    stride_vs,
    stride_vh,
    stride_pages,
    stride_mask,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D2: tl.constexpr,
    DV: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_D2: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    SHARED_V: tl.constexpr,
    BLOCK_W: tl.constexpr,
    PACKED: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    TREE: tl.constexpr,
    TREE_BITS: tl.constexpr,
    SCALED_KV: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One tile of query rows of one KV head of one request a program.

    The latest tiles see the most keys and start first. Blocks that all rows see in full skip the mask.
    """
    pid = tl.program_id(0)
    kv_head = tl.program_id(1)
    request = pid % num_requests
    tile = max_tiles - 1 - pid // num_requests
    seq_len, num_keys, start, rows = request_scalars(seq_lens, query_start, request, query_len, table_keys, PACKED)
    if PACKED:
        if kv_head == 0:
            _zero_unowned_rows(out, query_start, num_requests, num_rows, pid, HEADS * GROUP, DV, BLOCK_DV)
    if tile * BLOCK_M < rows * GROUP:
        v_factor = 1.0
        if SCALED_KV:
            score_scale = score_scale * tl.load(k_scale)
            v_factor = tl.load(v_scale)
        dv = tl.arange(0, BLOCK_DV)
        row, head, valid, q_tile, q2_tile, first, last, bits, mask_row, low, high = tile_rows(
            q, q2, tree_mask, kv_head, tile, seq_len, num_keys, start, rows, window, tree_width,
            stride_qt, stride_qh, stride_q2t, stride_q2h, stride_mask,
            GROUP, D, D2, BLOCK_M, BLOCK_D, BLOCK_D2, BLOCK_W, WINDOW, TREE, TREE_BITS,
        )  # fmt: skip
        begin = low // BLOCK_N
        end = (high + BLOCK_N - 1) // BLOCK_N
        if WINDOW:
            full_end = begin
        elif TREE:
            full_end = tl.maximum(tl.minimum(seq_len - tree_width, num_keys), 0) // BLOCK_N
        else:
            full_end = tl.maximum(tl.minimum(seq_len - rows + tile * BLOCK_M // GROUP + 1, num_keys), 0) // BLOCK_N
        m = tl.full((BLOCK_M,), NEG_INF, tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
        k_head = k_cache + kv_head.to(tl.int64) * stride_kh
        v_head = v_cache + kv_head.to(tl.int64) * stride_vh
        pages = page_table + request.to(tl.int64) * stride_pages
        if not WINDOW:
            page = block_pages(pages, begin, begin < full_end, num_keys, PAGE_SIZE, BLOCK_N)
            m, total, acc = fold_blocks(
                q_tile, q2_tile, m, total, acc, page, begin, full_end, 1, k_head, v_head, pages,
                seq_len, num_keys, first, last, bits, valid, mask_row, tree_width, score_scale, cap,
                stride_kp, stride_ks, stride_vp, stride_vs,
                D, D2, DV, PAGE_SIZE, BLOCK_N, BLOCK_D, BLOCK_D2, BLOCK_DV, SHARED_V,
                False, WINDOW, SOFTCAP, TREE, TREE_BITS, False, STAGES,
            )  # fmt: skip
        page = block_pages(pages, full_end, full_end < end, num_keys, PAGE_SIZE, BLOCK_N)
        m, total, acc = fold_blocks(
            q_tile, q2_tile, m, total, acc, page, full_end, end, 1, k_head, v_head, pages,
            seq_len, num_keys, first, last, bits, valid, mask_row, tree_width, score_scale, cap,
            stride_kp, stride_ks, stride_vp, stride_vs,
            D, D2, DV, PAGE_SIZE, BLOCK_N, BLOCK_D, BLOCK_D2, BLOCK_DV, SHARED_V,
            False, WINDOW, SOFTCAP, TREE, TREE_BITS, True, STAGES,
        )  # fmt: skip
        safe = tl.where(total == 0, 1.0, total)
        lse = tl.where(total == 0, NEG_INF, m + tl.log2(safe))
        result = acc * (v_factor / safe * sink_factor(lse, sinks, head, valid, SINKS))[:, None]
        at = out + ((start + row).to(tl.int64)[:, None] * (HEADS * GROUP) + head[:, None]) * DV + dv[None, :]
        tl.store(at, result.to(out.dtype.element_ty), mask=valid[:, None] & (dv < DV)[None, :])
