# ruff: noqa: PIE808, SIM102
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""The split kernel of MLA for Hopper, written in Gluon, where tensor cores, copies and softmax are placed by hand.

    out = softmax(mask(scale (q_latent latent^T + q_rope rope^T))) latent

Same schedule, partial results and merge as ``triton_kernels``; the plain Triton kernel stays for every other device, dtype
and feature. A tile is 64 rows (rows times heads), a block 64 keys, and two warpgroups share both: each takes half of the
keys in the first product and half of the 512 values in the second, so the accumulator takes 128 registers a thread.

Shared memory holds the queries (72 KB) and two blocks (144 KB). The compiler's own pipeline starts copying a block only when
the block before it is done with, since it has no third buffer. Here the copy of block i+1 starts as soon as the product with
the values of block i-1 has left its buffer, beside the scores of block i, and has until the scores of block i+1 to arrive::

    scores i | wait for values i-1 | copy i+1 ... | softmax i | values i (asynchronous) | scores i+1 ...
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from specops.ops.triton_common import request_scalars, row_blocks
from specops.ops.triton_kernels import UNSPECIALIZED_CALL

NEG_INF = gl.constexpr(float("-inf"))
# Rows of a tile and keys of a block; the shapes of the matrix instructions and the shared memory are built on them.
BLOCK_M = gl.constexpr(64)
BLOCK_N = gl.constexpr(64)
NUM_WARPS = 8


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _copy_block(
    block,
    page,
    pages,
    kv,
    latent,
    rope,
    num_keys,
    end,
    stride_kp,
    STRIDE_KS: gl.constexpr,
    D: gl.constexpr,
    D2: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    LATENT_COPY: gl.constexpr,
    ROPE_COPY: gl.constexpr,
):
    """Start copying key block ``block`` into ``latent`` ``[64, D]`` and ``rope`` ``[64, D2]``, zeros behind the keys."""
    n = gl.arange(0, BLOCK_N, gl.SliceLayout(1, LATENT_COPY))
    n2 = gl.arange(0, BLOCK_N, gl.SliceLayout(1, ROPE_COPY))
    d = gl.arange(0, D, gl.SliceLayout(0, LATENT_COPY))
    d2 = gl.arange(0, D2, gl.SliceLayout(0, ROPE_COPY))
    key = block * BLOCK_N + n
    key2 = block * BLOCK_N + n2
    inside = (key < num_keys) & (block < end)
    inside2 = (key2 < num_keys) & (block < end)
    if PAGE_SIZE % BLOCK_N == 0:
        base = kv + page.to(gl.int64) * stride_kp + (block * BLOCK_N % PAGE_SIZE) * STRIDE_KS
        row = n * STRIDE_KS
        row2 = n2 * STRIDE_KS
    else:
        base = kv
        page_of = gl.load(pages + key // PAGE_SIZE, mask=inside, other=0)
        page_of2 = gl.load(pages + key2 // PAGE_SIZE, mask=inside2, other=0)
        row = page_of.to(gl.int64) * stride_kp + key % PAGE_SIZE * STRIDE_KS
        row2 = page_of2.to(gl.int64) * stride_kp + key2 % PAGE_SIZE * STRIDE_KS
    async_copy.async_copy_global_to_shared(latent, base + (row[:, None] + d[None, :]), mask=inside[:, None])
    async_copy.async_copy_global_to_shared(rope, base + (row2[:, None] + (D + d2)[None, :]), mask=inside2[:, None])
    async_copy.commit_group()


@gluon.jit(do_not_specialize=UNSPECIALIZED_CALL)
def latent_split_kernel(
    q,
    q2,
    kv_cache,
    out,
    page_table,
    seq_lens,
    query_start,
    sinks,
    tree_mask,
    partial,
    partial_lse,
    num_requests,
    num_rows,
    query_len,
    max_tiles,
    window,
    tree_width,
    table_keys,
    score_scale,
    stride_qt,
    stride_qh,
    stride_q2t,
    stride_q2h,
    stride_kp,
    stride_pages,
    stride_mask,
    HEADS: gl.constexpr,
    STRIDE_KS: gl.constexpr,
    D: gl.constexpr,
    D2: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    BLOCK_B: gl.constexpr,
    PACKED: gl.constexpr,
    SINKS: gl.constexpr,
    TREE: gl.constexpr,
    MIN_BLOCKS: gl.constexpr,
    DIRECT: gl.constexpr,
    OVERLAP: gl.constexpr,
    EARLY: gl.constexpr,
):
    """As ``triton_kernels.split_kernel`` for one KV head whose value is the first D columns of its key."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    dtype: gl.constexpr = kv_cache.dtype.element_ty
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BLOCK_N // 2, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, D // 2, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    LATENT_COPY: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 2], [1, 0])
    ROPE_COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    LATENT_SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    ROPE_SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    REQUESTS: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])

    q_latent = gl.allocate_shared_memory(dtype, [BLOCK_M, D], LATENT_SHARED)
    q_rope = gl.allocate_shared_memory(dtype, [BLOCK_M, D2], ROPE_SHARED)
    latent = gl.allocate_shared_memory(dtype, [2, BLOCK_N, D], LATENT_SHARED)
    rope = gl.allocate_shared_memory(dtype, [2, BLOCK_N, D2], ROPE_SHARED)

    pid = gl.program_id(0)
    if PACKED:
        _zero_unowned_rows(out, query_start, num_requests, num_rows, pid, HEADS, D)
    if DIRECT:
        units = num_requests * max_tiles
        splits = gl.num_programs(0) // units
        position = pid * 0
        stop = position + 1
        all_costs = gl.full([BLOCK_B], 0, gl.int32, REQUESTS)
        upto = all_costs
        stretch = position + 1
    else:
        request_index = gl.arange(0, BLOCK_B, REQUESTS)
        live = request_index < num_requests
        lens = gl.maximum(gl.load(seq_lens + request_index, mask=live, other=0), 0)
        if PACKED:
            starts = gl.load(query_start + request_index, mask=live, other=0)
            rows_of = gl.load(query_start + request_index + 1, mask=live, other=0) - starts
        else:
            rows_of = gl.where(live, query_len, 0)
        _first, blocks_of, tiles_of = row_blocks(
            lens, gl.minimum(lens, table_keys), rows_of, 0, tree_width, HEADS, BLOCK_M, BLOCK_N, False, TREE
        )
        all_costs = blocks_of * tiles_of
        upto = gl.associative_scan(all_costs, 0, _add)
        all_blocks = gl.sum(all_costs, 0)
        stretch = gl.maximum((all_blocks + gl.num_programs(0) - 1) // gl.num_programs(0), MIN_BLOCKS)
        position = pid * stretch
        stop = gl.minimum(position + stretch, all_blocks)

    while position < stop:
        if DIRECT:
            unit = pid % units
            index = pid // units
            request = unit // max_tiles
            tile = unit % max_tiles
            seq_len, num_keys, start, rows = request_scalars(seq_lens, query_start, request, query_len, table_keys, PACKED)
            _begin, blocks, tiles = row_blocks(seq_len, num_keys, rows, 0, tree_width, HEADS, BLOCK_M, BLOCK_N, False, TREE)
            contributors = gl.where(tile < tiles, gl.minimum(blocks, splits), 0)
            begin = index
            end = gl.where(index < contributors, blocks, 0)
            step = splits
            slot = pid
            count = 1
        else:
            before = upto <= position
            request = gl.sum(before.to(gl.int32), 0)
            within = position - gl.sum(gl.where(before, all_costs, 0), 0)
            seq_len, num_keys, start, rows = request_scalars(seq_lens, query_start, request, query_len, table_keys, PACKED)
            _begin, blocks, tiles = row_blocks(seq_len, num_keys, rows, 0, tree_width, HEADS, BLOCK_M, BLOCK_N, False, TREE)
            tile = within // blocks
            begin = within - tile * blocks
            count = gl.minimum(blocks - begin, stop - position)
            end = begin + count
            step = 1
            unit_start = position - begin
            first_program = unit_start // stretch
            contributors = (unit_start + blocks - 1) // stretch - first_program + 1
            slot = 2 * pid + gl.where(pid == first_program, 1, 0)
            index = pid * 0
        # Keys that this tile's last row sees.
        high = num_keys
        if not TREE:
            last_row = gl.minimum((tile * BLOCK_M + BLOCK_M - 1) // HEADS, rows - 1)
            high = gl.maximum(gl.minimum(seq_len - rows + last_row + 1, num_keys), 0)
        end = gl.minimum(end, (high + BLOCK_N - 1) // BLOCK_N)
        if not DIRECT or index < contributors:
            _unit(
                q, q2, kv_cache, out, page_table + request.to(gl.int64) * stride_pages, sinks, tree_mask,
                partial, partial_lse, q_latent, q_rope, latent, rope,
                tile, seq_len, num_keys, start, rows, begin, end, step, slot, contributors, tree_width, score_scale,
                stride_qt, stride_qh, stride_q2t, stride_q2h, stride_kp, stride_mask,
                HEADS, STRIDE_KS, D, D2, PAGE_SIZE, SINKS, TREE, S_LAYOUT, O_LAYOUT, P_LAYOUT, LATENT_COPY, ROPE_COPY,
            )  # fmt: skip
        position += count


@gluon.jit
def _unit(
    q,
    q2,
    kv_cache,
    out,
    pages,
    sinks,
    tree_mask,
    partial,
    partial_lse,
    q_latent,
    q_rope,
    latent,
    rope,
    tile,
    seq_len,
    num_keys,
    start,
    rows,
    begin,
    end,
    step,
    slot,
    contributors,
    tree_width,
    score_scale,
    stride_qt,
    stride_qh,
    stride_q2t,
    stride_q2h,
    stride_kp,
    stride_mask,
    HEADS: gl.constexpr,
    STRIDE_KS: gl.constexpr,
    D: gl.constexpr,
    D2: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    SINKS: gl.constexpr,
    TREE: gl.constexpr,
    S_LAYOUT: gl.constexpr,
    O_LAYOUT: gl.constexpr,
    P_LAYOUT: gl.constexpr,
    LATENT_COPY: gl.constexpr,
    ROPE_COPY: gl.constexpr,
):
    """Every ``step``-th key block from ``begin`` to ``end`` of one tile, into the output or a slot of the partials."""
    ONE_PAGE: gl.constexpr = PAGE_SIZE % BLOCK_N == 0
    # Products of the tile before may still read the queries and blocks.
    tl.debug_barrier()
    m_copy = tile * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(1, LATENT_COPY))
    m_copy2 = tile * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(1, ROPE_COPY))
    d = gl.arange(0, D, gl.SliceLayout(0, LATENT_COPY))
    d2 = gl.arange(0, D2, gl.SliceLayout(0, ROPE_COPY))
    q_row = (start + m_copy // HEADS).to(gl.int64) * stride_qt + m_copy % HEADS * stride_qh
    q2_row = (start + m_copy2 // HEADS).to(gl.int64) * stride_q2t + m_copy2 % HEADS * stride_q2h
    async_copy.async_copy_global_to_shared(
        q_latent, q + (q_row[:, None] + d[None, :]), mask=(m_copy // HEADS < rows)[:, None]
    )
    async_copy.async_copy_global_to_shared(
        q_rope, q2 + (q2_row[:, None] + d2[None, :]), mask=(m_copy2 // HEADS < rows)[:, None]
    )
    page = begin * 0
    if ONE_PAGE:
        page = gl.load(pages + begin * BLOCK_N // PAGE_SIZE, mask=begin < end, other=0)
    _copy_block(
        begin, page, pages, kv_cache, latent.index(0), rope.index(0), num_keys, end, stride_kp, STRIDE_KS,
        D, D2, PAGE_SIZE, LATENT_COPY, ROPE_COPY,
    )  # fmt: skip
    if ONE_PAGE:
        page = gl.load(pages + (begin + step) * BLOCK_N // PAGE_SIZE, mask=begin + step < end, other=0)

    flat = tile * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(1, S_LAYOUT))
    row = flat // HEADS
    valid = row < rows
    n = gl.arange(0, BLOCK_N, gl.SliceLayout(0, S_LAYOUT))
    bits = row.to(gl.int64) * 0
    if TREE:
        last = gl.where(valid, gl.minimum(seq_len - tree_width, num_keys) - 1, -1)
        for column in range(0, tree_width):
            seen = gl.load(tree_mask + (start + row).to(gl.int64) * stride_mask + column, mask=valid, other=0)
            bits = bits | (seen.to(gl.int64) << column)
    else:
        last = gl.where(valid, gl.minimum(seq_len - rows + row, num_keys - 1), -1)

    top = gl.full([BLOCK_M], NEG_INF, gl.float32, gl.SliceLayout(1, S_LAYOUT))
    totals = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, S_LAYOUT)
    acc = gl.zeros([BLOCK_M, D], gl.float32, O_LAYOUT)
    no_scores = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, S_LAYOUT)
    buffer = begin * 0
    for block in range(begin, end, step):
        k = latent.index(buffer)
        k2 = rope.index(buffer)
        async_copy.wait_group(0)
        hopper.fence_async_shared()
        tl.debug_barrier()
        scores = hopper.warpgroup_mma(q_latent, k.permute((1, 0)), no_scores, use_acc=False, is_async=True)
        scores = hopper.warpgroup_mma(q_rope, k2.permute((1, 0)), scores, is_async=True)
        # The other buffer was read by the products of the block before, which are done.
        _copy_block(
            block + step, page, pages, kv_cache, latent.index(1 - buffer), rope.index(1 - buffer), num_keys, end,
            stride_kp, STRIDE_KS, D, D2, PAGE_SIZE, LATENT_COPY, ROPE_COPY,
        )  # fmt: skip
        if ONE_PAGE:
            ahead = block + 2 * step
            page = gl.load(pages + ahead * BLOCK_N // PAGE_SIZE, mask=ahead < end, other=0)
        s = hopper.warpgroup_mma_wait(0, deps=(scores,)) * score_scale
        key = (block * BLOCK_N + n)[None, :]
        visible = key <= last[:, None]
        if TREE:
            own = key - (seq_len - tree_width)
            place = gl.minimum(gl.maximum(own, 0), tree_width - 1)
            bit = ((bits[:, None] >> place) & 1) != 0
            visible = visible | (bit & (own >= 0) & (key < num_keys) & valid[:, None])
        s = gl.where(visible, s, NEG_INF)
        top_new = gl.maximum(top, gl.max(s, 1))
        base = gl.where(top_new == NEG_INF, 0.0, top_new)
        factor = gl.exp2(top - base)
        p = gl.exp2(s - base[:, None])
        totals = totals * factor[:, None] + p
        top = top_new
        acc = acc * gl.convert_layout(factor, gl.SliceLayout(1, O_LAYOUT))[:, None]
        p_operand = gl.convert_layout(p.to(q_latent.dtype), P_LAYOUT)
        acc = hopper.warpgroup_mma(p_operand, k, acc)
        buffer = 1 - buffer
    total = gl.sum(totals, 1)
    # No copy may be left in flight when the buffers serve the next tile.
    async_copy.wait_group(0)
    safe = gl.where(total == 0, 1.0, total)
    lse = gl.where(total == 0, NEG_INF, top + gl.log2(safe))
    share = 1 / safe
    if SINKS:
        if contributors == 1:
            sink = gl.load(sinks + flat % HEADS, mask=valid, other=0.0) * 1.4426950408889634
            share = gl.where(lse == NEG_INF, 0.0, share / (1 + gl.exp2(sink - lse)))
    values = acc * gl.convert_layout(share, gl.SliceLayout(1, O_LAYOUT))[:, None]
    m_out = gl.arange(0, BLOCK_M, gl.SliceLayout(1, O_LAYOUT))
    dv = gl.arange(0, D, gl.SliceLayout(0, O_LAYOUT))
    if contributors == 1:
        out_flat = tile * BLOCK_M + m_out
        # Rows and heads of a request follow one another in the output.
        at = out + (start.to(gl.int64) * HEADS + out_flat)[:, None] * D + dv[None, :]
        gl.store(at, values.to(out.dtype.element_ty), mask=(out_flat < rows * HEADS)[:, None])
    else:
        at_row = slot.to(gl.int64) * BLOCK_M
        gl.store(partial + (at_row + m_out)[:, None] * D + dv[None, :], values)
        gl.store(partial_lse + at_row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, S_LAYOUT)), lse)


@gluon.jit
def _zero_unowned_rows(out, query_start, num_requests, num_rows, pid, HEADS: gl.constexpr, D: gl.constexpr):
    """Rows of a packed layout behind the last request belong to nobody and are zero."""
    d = gl.arange(0, D, gl.BlockedLayout([2], [32], [8], [0]))
    zeros = gl.zeros([D], out.dtype.element_ty, gl.BlockedLayout([2], [32], [8], [0]))
    row = gl.load(query_start + num_requests) + pid
    while row < num_rows:
        for head in range(0, HEADS):
            gl.store(out + (row.to(gl.int64) * HEADS + head) * D + d, zeros)
        row += gl.num_programs(0)
