# ruff: noqa: PIE808, SIM102
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""The split kernel of MLA for Hopper with a role for each warpgroup, for pages of a multiple of 64 keys, in Gluon.

    out = softmax(mask(scale (q_latent latent^T + q_rope rope^T))) latent

Same tiles, schedule, partial results and merge as ``triton_hopper``, whose two warpgroups do everything together and so
leave the tensor cores idle during the softmax. Here three warpgroups work on different blocks at the same time:

* *scores*: holds the latent part of 64 queries in registers (128 a thread), so that little but keys is read from shared
  memory; computes the scores of a block, then the softmax, and leaves probabilities and the factor on older values in
  shared memory.
* *values*, twice: each holds 64 rows of half of the 512 values (128 registers a thread) and adds the product of
  probabilities and latents. The first of them also finds the units of work and starts the copies.

Shared memory is a ring of three slots of 72 KB: 64 keys of latent and rotary part, filled by the tensor memory
accelerator. The latent queries of a tile pass through a slot once, ahead of its blocks. The rotary part of a block is dead
after its scores, and the probabilities take its place, which are as large. A slot goes round like this::

    copy starts (values 0) -> filled -> scores, softmax (scores) -> probable -> product (values 0 and 1) -> empty

With HOLD the product with the values of a block waits for the scores of the next one, so that it runs beside that block's
softmax and not beside its scores, where it would only slow them down.

The accelerator copies whole pages, so rows behind a sequence's end are set to zero in shared memory before they are used.
Registers are the tightest resource: what a role needs only at the end of a unit stays in shared memory meanwhile.
"""

from __future__ import annotations

from typing import Any

import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from specops.ops.triton_common import EVEN_SLACK, request_scalars, row_blocks
from specops.ops.triton_kernels import UNSPECIALIZED_CALL

NEG_INF = gl.constexpr(float("-inf"))
# Rows of a tile, keys of a block, and the head dims; the layouts below are built on them.
BLOCK_M = gl.constexpr(64)
BLOCK_N = gl.constexpr(64)
D = gl.constexpr(512)
D2 = gl.constexpr(64)
HALF_D = gl.constexpr(256)
SLOTS = gl.constexpr(3)
# Columns of the latent queries that stay in shared memory: registers do not hold them all.
TAIL = gl.constexpr(64)
# Warps of one role. Registers a thread of the two roles beside the first; the first has what is left of 504.
NUM_WARPS = 4
SCORES_REGISTERS = gl.constexpr(184)
VALUES_REGISTERS = gl.constexpr(160)
# Requests up to which the schedule is read within one warp.
MOST_SCHEDULED = 128
# What the first role tells the others of a unit: places in shared memory.
TILE, SEQ_LEN, NUM_KEYS, START, ROWS, BEGIN, END, STEP, PART, CONTRIBUTORS, EDGE, MORE = (gl.constexpr(i) for i in range(12))
FACTS = gl.constexpr(16)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _next_slot(slot, phase):
    """The slot after ``slot`` and the parity of its use, which turns with every round."""
    turned = slot + 1 == SLOTS
    return gl.where(turned, 0, slot + 1), gl.where(turned, phase ^ 1, phase)


@gluon.jit
def _told(facts, place: gl.constexpr):
    """One of the numbers that :func:`_tell` left."""
    return gl.sum(facts.slice(place, 1, 0).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def _tell(facts, tile, seq_len, num_keys, start, rows, begin, end, step, part, contributors, edge, more):
    """Leave what the other roles need of a unit."""
    place = gl.arange(0, FACTS, gl.BlockedLayout([1], [32], [4], [0]))
    told = gl.where(place == TILE, tile, edge)
    told = gl.where(place == MORE, more, told)
    told = gl.where(place == SEQ_LEN, seq_len, told)
    told = gl.where(place == NUM_KEYS, num_keys, told)
    told = gl.where(place == START, start, told)
    told = gl.where(place == ROWS, rows, told)
    told = gl.where(place == BEGIN, begin, told)
    told = gl.where(place == END, end, told)
    told = gl.where(place == STEP, step, told)
    told = gl.where(place == PART, part, told)
    facts.store(gl.where(place == CONTRIBUTORS, contributors, told))


@gluon.jit
def _unit_at(
    position,
    seq_lens,
    query_start,
    num_requests,
    query_len,
    max_tiles,
    tree_width,
    table_keys,
    HEADS: gl.constexpr,
    BLOCK_B: gl.constexpr,
    PACKED: gl.constexpr,
    TREE: gl.constexpr,
    DIRECT: gl.constexpr,
    EVEN: gl.constexpr,
    MIN_BLOCKS: gl.constexpr,
):
    """The unit at place ``position`` of a program's stretch of the schedule.

    Returns:
        request, tile, seq_len, num_keys, start, rows; begin, end and step of its key blocks; its slot of the partial
        results and the number of programs that contribute, 0 behind the stretch; the places it takes; and 1 where another
        unit follows.
    """
    pid = gl.program_id(0)
    if DIRECT:
        units = num_requests * max_tiles
        splits = gl.num_programs(0) // units
        unit = pid % units
        begin = pid // units
        request = unit // max_tiles
        tile = unit % max_tiles
        seq_len, num_keys, start, rows = request_scalars(seq_lens, query_start, request, query_len, table_keys, PACKED)
        _begin, blocks, tiles = row_blocks(seq_len, num_keys, rows, 0, tree_width, HEADS, BLOCK_M, BLOCK_N, False, TREE)
        contributors = gl.where(tile < tiles, gl.minimum(blocks, splits), 0)
        contributors = gl.where(begin < contributors, contributors, 0)
        end = blocks
        step = splits
        part = pid
        count = position * 0 + 1
        more = position * 0
    else:
        # Every warp holds all requests, so that sums need no shared memory.
        LAYOUT: gl.constexpr = gl.BlockedLayout([(BLOCK_B + 31) // 32], [32], [4], [0])
        request_index = gl.arange(0, BLOCK_B, LAYOUT)
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
        costs = blocks_of * tiles_of
        upto = gl.associative_scan(costs, 0, _add)
        all_blocks = gl.sum(costs, 0)
        stretch = gl.maximum((all_blocks + gl.num_programs(0) - 1) // gl.num_programs(0), MIN_BLOCKS)
        place = pid * stretch + position
        stop = gl.minimum(pid * stretch + stretch, all_blocks)
        before = upto <= place
        # Behind the stretch the facts of some request are read and not used.
        request = gl.minimum(gl.sum(before.to(gl.int32), 0), num_requests - 1)
        if EVEN:
            # As triton_common.even_cut, for no more units than programs.
            units = num_requests * max_tiles
            longest = gl.max(costs, 0) // max_tiles
            parts = gl.minimum(gl.num_programs(0) // units, (longest + MIN_BLOCKS - 1) // MIN_BLOCKS)
            long = gl.maximum((longest + parts - 1) // parts, 1)
            even = long * EVEN_SLACK <= stretch * (EVEN_SLACK + 1)
            request = gl.where(even, pid % units // max_tiles, request)
        within = place - gl.sum(gl.where(before, costs, 0), 0)
        seq_len, num_keys, start, rows = request_scalars(seq_lens, query_start, request, query_len, table_keys, PACKED)
        _begin, blocks, tiles = row_blocks(seq_len, num_keys, rows, 0, tree_width, HEADS, BLOCK_M, BLOCK_N, False, TREE)
        tile = within // blocks
        begin = within - tile * blocks
        count = gl.minimum(blocks - begin, stop - place)
        end = begin + count
        step = position * 0 + 1
        unit_start = place - begin
        first_program = unit_start // stretch
        contributors = (unit_start + blocks - 1) // stretch - first_program + 1
        contributors = gl.where(place < stop, contributors, 0)
        part = 2 * pid + gl.where(pid == first_program, 1, 0)
        more = gl.where(place + count < stop, 1, 0)
        if EVEN:
            index = pid // units
            step = gl.where(even, (blocks + long - 1) // long, step)
            tile = gl.where(even, pid % max_tiles, tile)
            begin = gl.where(even, index, begin)
            end = gl.where(even, blocks, end)
            contributors = gl.where(even, gl.where(index < step, step, 0), contributors)
            part = gl.where(even, pid, part)
            more = gl.where(even, 0, more)
    # Keys that this tile's last row sees.
    high = num_keys
    if not TREE:
        last_row = gl.minimum((tile * BLOCK_M + BLOCK_M - 1) // HEADS, rows - 1)
        high = gl.maximum(gl.minimum(seq_len - rows + last_row + 1, num_keys), 0)
    end = gl.minimum(end, (high + BLOCK_N - 1) // BLOCK_N)
    return request, tile, seq_len, num_keys, start, rows, begin, end, step, part, contributors, count, more


@gluon.jit
def _copy_latent(page, first, kv_latent, latent, filled, slot):
    """Start copying the latent part of 64 keys, from key ``first`` of a page."""
    full = filled.index(slot)
    mbarrier.expect(full, kv_latent.block_type.nbytes)
    tma.async_copy_global_to_shared(kv_latent, [page, first, 0], full, latent.index(slot))


@gluon.jit
def _copy_rope(page, first, kv_rope, rope, rope_filled, side):
    """Start copying the rotary part of 64 keys."""
    full = rope_filled.index(side)
    mbarrier.expect(full, kv_rope.block_type.nbytes)
    tma.async_copy_global_to_shared(kv_rope, [page, first, D], full, rope.index(side))


@gluon.jit
def _clear_behind(keys, block, num_keys):
    """Zeros in the rows of a block that are behind the last key.

    What pages hold there may be NaN, which a probability of zero does not remove.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    if (block + 1) * BLOCK_N > num_keys:
        inside = block * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, LAYOUT)) < num_keys
        for part in gl.static_range(D // 64):
            columns = keys.slice(part * 64, 64, 1)
            kept = columns.load(LAYOUT)
            columns.store(gl.where(inside[:, None], kept, gl.zeros_like(kept)))
        hopper.fence_async_shared()
        tl.debug_barrier()


@gluon.jit
def _visible(block, bits, facts, tree_width, HEADS: gl.constexpr, TREE: gl.constexpr, LAYOUT: gl.constexpr):
    """Which keys of a block each row of the tile sees, bool ``[64, 64]``."""
    num_keys = _told(facts, NUM_KEYS)
    seq_len = _told(facts, SEQ_LEN)
    rows = _told(facts, ROWS)
    row = (_told(facts, TILE) * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(1, LAYOUT))) // HEADS
    valid = row < rows
    key = (block * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT)))[None, :]
    if TREE:
        last = gl.where(valid, gl.minimum(seq_len - tree_width, num_keys) - 1, -1)
        own = key - (seq_len - tree_width)
        place = gl.minimum(gl.maximum(own, 0), tree_width - 1)
        bit = ((bits[:, None] >> place) & 1) != 0
        return (key <= last[:, None]) | (bit & (own >= 0) & (key < num_keys) & valid[:, None])
    last = gl.where(valid, gl.minimum(seq_len - rows + row, num_keys - 1), -1)
    return key <= last[:, None]


@gluon.jit
def _scores_role(
    sinks, tree_mask, partial_lse, latent, rope, q_rope_tile, q_tail, factors, shares, facts,
    filled, rope_filled, probable, ready, empty, shared, unit, taken,
    tree_width, score_scale, stride_mask,
    HEADS: gl.constexpr, SINKS: gl.constexpr, TREE: gl.constexpr, DIRECT: gl.constexpr, HOLD: gl.constexpr,
):  # fmt: skip
    """Scores, softmax, and the log-sum-exp of each unit."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    IN_ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    Q_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, S_LAYOUT, 2)
    dtype: gl.constexpr = latent.dtype
    q_rope = q_rope_tile.reshape([BLOCK_M, D2])
    slot = tree_width * 0
    phase = tree_width * 0
    side = tree_width * 0
    side_phase = tree_width * 0
    turn = tree_width * 0
    more = tree_width * 0 + 1
    while more > 0:
        mbarrier.wait(unit.index(0), turn)
        if _told(facts, CONTRIBUTORS) > 0:
            block = _told(facts, BEGIN)
            end = _told(facts, END)
            # From this block on some row of the tile does not see all keys.
            edge = _told(facts, EDGE)
            bits = gl.zeros([BLOCK_M], gl.int64, IN_ROWS)
            if TREE:
                row = (_told(facts, TILE) * BLOCK_M + gl.arange(0, BLOCK_M, IN_ROWS)) // HEADS
                mask_at = tree_mask + (_told(facts, START) + row).to(gl.int64) * stride_mask
                for column in range(0, tree_width):
                    seen = gl.load(mask_at + column, mask=row < _told(facts, ROWS), other=0)
                    bits = bits | (seen.to(gl.int64) << column)
            top = gl.full([BLOCK_M], NEG_INF, gl.float32, IN_ROWS)
            total = gl.zeros([BLOCK_M], gl.float32, IN_ROWS)
            no_scores = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, S_LAYOUT)

            mbarrier.wait(filled.index(slot), phase)
            q = latent.index(slot).reshape([BLOCK_M, D])
            q_0 = q.slice(0, 256, 1).load(Q_LAYOUT)
            q_1 = q.slice(256, 128, 1).load(Q_LAYOUT)
            q_2 = q.slice(384, 64, 1).load(Q_LAYOUT)
            q_tail.store(q.slice(D - TAIL, TAIL, 1).load(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])))
            hopper.fence_async_shared()
            tl.debug_barrier()
            mbarrier.arrive(empty.index(slot), count=2)
            # Nobody waits for this, nor for the queries' slot to be ready; every use of a slot must turn all its barriers.
            mbarrier.arrive(probable.index(slot), count=1)
            before = slot
            slot, phase = _next_slot(slot, phase)
            while block < end:
                k = latent.index(slot).reshape([BLOCK_N, D])
                k2 = rope.index(side).reshape([BLOCK_N, D2])
                mbarrier.wait(filled.index(slot), phase)
                if block >= edge:
                    _clear_behind(k, block, _told(facts, NUM_KEYS))
                k_0 = k.slice(0, 256, 1).permute((1, 0))
                k_1 = k.slice(256, 128, 1).permute((1, 0))
                k_2 = k.slice(384, 64, 1).permute((1, 0))
                k_tail = k.slice(D - TAIL, TAIL, 1).permute((1, 0))
                scores = hopper.warpgroup_mma(q_0, k_0, no_scores, use_acc=False, is_async=True)
                scores = hopper.warpgroup_mma(q_1, k_1, scores, is_async=True)
                scores = hopper.warpgroup_mma(q_2, k_2, scores, is_async=True)
                scores = hopper.warpgroup_mma(q_tail, k_tail, scores, is_async=True)
                mbarrier.wait(rope_filled.index(side), side_phase)
                scores = hopper.warpgroup_mma(q_rope, k2.permute((1, 0)), scores, is_async=True)
                s = hopper.warpgroup_mma_wait(0, deps=(scores,))
                if HOLD:
                    mbarrier.arrive(ready.index(before), count=1)
                    before = slot
                if block >= edge:
                    s = gl.where(_visible(block, bits, facts, tree_width, HEADS, TREE, S_LAYOUT), s, NEG_INF)
                # The scale is positive.
                top_new = gl.maximum(top, gl.max(s, 1) * score_scale)
                base = gl.where(top_new == NEG_INF, 0.0, top_new)
                factor = gl.exp2(top - base)
                p = gl.exp2(s * score_scale - base[:, None])
                # Every warp is done with the scores, in whose keys' place the probabilities go.
                tl.debug_barrier()
                factors.index(slot).store(factor)
                k2.store(p.to(dtype))
                hopper.fence_async_shared()
                tl.debug_barrier()
                mbarrier.arrive(probable.index(slot), count=1)
                total = total * factor + gl.sum(p, 1)
                top = top_new
                slot, phase = _next_slot(slot, phase)
                side_phase = side_phase ^ side
                side = side ^ 1
                block += _told(facts, STEP)
            if HOLD:
                mbarrier.arrive(ready.index(before), count=1)
            safe = gl.where(total == 0, 1.0, total)
            lse = gl.where(total == 0, NEG_INF, top + gl.log2(safe))
            share = 1 / safe
            m = gl.arange(0, BLOCK_M, IN_ROWS)
            if SINKS:
                if _told(facts, CONTRIBUTORS) == 1:
                    flat = _told(facts, TILE) * BLOCK_M + m
                    valid = flat < _told(facts, ROWS) * HEADS
                    sink = gl.load(sinks + flat % HEADS, mask=valid, other=0.0) * 1.4426950408889634
                    share = gl.where(lse == NEG_INF, 0.0, share / (1 + gl.exp2(sink - lse)))
            shares.store(share)
            tl.debug_barrier()
            mbarrier.arrive(shared.index(0), count=1)
            if _told(facts, CONTRIBUTORS) > 1:
                gl.store(partial_lse + _told(facts, PART).to(gl.int64) * BLOCK_M + m, lse)
        if DIRECT:
            more = more * 0
        else:
            more = _told(facts, MORE)
            tl.debug_barrier()
            mbarrier.arrive(taken.index(0), count=1)
        turn = turn ^ 1


@gluon.jit
def _write_values(
    acc, out, partial, stage, any_blocks, shares, facts, HALF: gl.constexpr, HEADS: gl.constexpr, STAGED: gl.constexpr,
    O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """The output of one half of the values of a unit, or its partial result.

    Products leave two values beside one another in a thread. Of 16 bits, that is 16 bytes a row for an instruction, half of
    what the L2 cache takes whole, so with STAGED they pass through shared memory and leave in whole rows: through ``stage``,
    a slot of which nobody else reads this half and which no copy fills. Where this is the only unit that is the next slot,
    else that of the last block, told to be empty afterwards. With float32 partial results the schedule does not do it: the
    registers for it are missing.
    """
    values = acc * shares.load(gl.SliceLayout(1, O_LAYOUT))[:, None]
    ROWS_OUT: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    if _told(facts, CONTRIBUTORS) == 1:
        if STAGED:
            _write_output(_through(values, stage, any_blocks, HALF, ROWS_OUT), out, facts, HALF, HEADS, ROWS_OUT)
        else:
            _write_output(values, out, facts, HALF, HEADS, O_LAYOUT)
    elif STAGED and partial.dtype.element_ty == out.dtype.element_ty:
        _write_partial(_through(values, stage, any_blocks, HALF, ROWS_OUT), partial, facts, HALF, ROWS_OUT)
    else:
        _write_partial(values, partial, facts, HALF, O_LAYOUT)


@gluon.jit
def _through(values, stage, any_blocks, HALF: gl.constexpr, LAYOUT: gl.constexpr):
    """Half of the values of a tile in another layout, by way of that half of a slot; zeros where there is no such slot."""
    half = stage.reshape([BLOCK_N, D]).slice(HALF * HALF_D, HALF_D, 1)
    # Every warp is done with the products that read it.
    tl.debug_barrier()
    if any_blocks:
        half.store(values.to(stage.dtype))
    tl.debug_barrier()
    through = half.load(LAYOUT)
    return gl.where(any_blocks, through, gl.zeros_like(through))


@gluon.jit
def _write_output(values, out, facts, HALF: gl.constexpr, HEADS: gl.constexpr, LAYOUT: gl.constexpr):
    """Half of the values of a tile into the output, where the rows and heads of a request follow one another."""
    row = _told(facts, TILE) * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(1, LAYOUT))
    dv = HALF * HALF_D + gl.arange(0, HALF_D, gl.SliceLayout(0, LAYOUT))
    at = out + (_told(facts, START).to(gl.int64) * HEADS + row)[:, None] * D + dv[None, :]
    gl.store(at, values.to(out.dtype.element_ty), mask=(row < _told(facts, ROWS) * HEADS)[:, None])


@gluon.jit
def _write_partial(values, partial, facts, HALF: gl.constexpr, LAYOUT: gl.constexpr):
    """Half of the values of a tile into this program's slot of the partial results."""
    row = gl.arange(0, BLOCK_M, gl.SliceLayout(1, LAYOUT))
    dv = HALF * HALF_D + gl.arange(0, HALF_D, gl.SliceLayout(0, LAYOUT))
    at = partial + (_told(facts, PART).to(gl.int64) * BLOCK_M + row)[:, None] * D + dv[None, :]
    gl.store(at, values.to(partial.dtype.element_ty))


@gluon.jit
def _first_values_role(
    q_latent, q_rope, kv_latent, kv_rope, out, page_table, partial, latent, rope, q_rope_tile, factors, shares, facts,
    filled, rope_filled, probable, ready, empty, shared, unit, taken,
    seq_lens, query_start, num_requests, query_len, max_tiles, tree_width, table_keys, stride_pages,
    HEADS: gl.constexpr, PAGE_SIZE: gl.constexpr, PACKED: gl.constexpr, TREE: gl.constexpr, DIRECT: gl.constexpr,
    EVEN: gl.constexpr, HOLD: gl.constexpr, BLOCK_B: gl.constexpr, MIN_BLOCKS: gl.constexpr,
):  # fmt: skip
    """Finds the units, copies queries and keys, and owns the first half of the values."""
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    # A unit's last slot is empty only when the unit has been written; see :func:`_write_values`.
    LATE: gl.constexpr = not DIRECT and partial.dtype.element_ty == out.dtype.element_ty
    position = num_requests * 0
    slot = num_requests * 0
    phase = num_requests * 0
    side = num_requests * 0
    turn = num_requests * 0
    more = num_requests * 0 + 1
    while more > 0:
        request, tile, seq_len, num_keys, start, rows, begin, end, step, part, contributors, count, more = _unit_at(
            position, seq_lens, query_start, num_requests, query_len, max_tiles, tree_width, table_keys,
            HEADS, BLOCK_B, PACKED, TREE, DIRECT, EVEN, MIN_BLOCKS,
        )  # fmt: skip
        position += count
        # Page ids of the first blocks, fetched beside the length where that does not tell which blocks they are.
        pages = page_table + request.to(gl.int64) * stride_pages
        second = begin + step
        third = second + step
        page_0 = gl.load(pages + begin * BLOCK_N // PAGE_SIZE, mask=begin * BLOCK_N < table_keys, other=0)
        page_1 = gl.load(pages + second * BLOCK_N // PAGE_SIZE, mask=second * BLOCK_N < table_keys, other=0)
        page = gl.load(pages + third * BLOCK_N // PAGE_SIZE, mask=third * BLOCK_N < table_keys, other=0)
        query_slot = slot
        if contributors > 0:
            mbarrier.wait(empty.index(slot), phase ^ 1)
            full = filled.index(slot)
            mbarrier.expect(full, q_latent.block_type.nbytes + q_rope.block_type.nbytes)
            first = start * HEADS + tile * BLOCK_M
            tma.async_copy_global_to_shared(q_latent, [0, first, 0], full, latent.index(slot))
            tma.async_copy_global_to_shared(q_rope, [0, first, 0], full, q_rope_tile)
            slot, phase = _next_slot(slot, phase)
            if begin < end:
                mbarrier.wait(empty.index(slot), phase ^ 1)
                _copy_latent(page_0, begin * BLOCK_N % PAGE_SIZE, kv_latent, latent, filled, slot)
                _copy_rope(page_0, begin * BLOCK_N % PAGE_SIZE, kv_rope, rope, rope_filled, side)
            if second < end:
                next_slot, next_phase = _next_slot(slot, phase)
                mbarrier.wait(empty.index(next_slot), next_phase ^ 1)
                _copy_latent(page_1, second * BLOCK_N % PAGE_SIZE, kv_latent, latent, filled, next_slot)
                _copy_rope(page_1, second * BLOCK_N % PAGE_SIZE, kv_rope, rope, rope_filled, side ^ 1)
        if not DIRECT:
            mbarrier.wait(taken.index(0), turn ^ 1)
        # Keys that all rows of the tile see, in whole blocks.
        seen_by_all = seq_len - tree_width
        if not TREE:
            seen_by_all = seq_len - rows + tile * BLOCK_M // HEADS + 1
        edge = gl.maximum(gl.minimum(seen_by_all, num_keys), 0) // BLOCK_N
        _tell(facts, tile, seq_len, num_keys, start, rows, begin, end, step, part, contributors, edge, more)
        tl.debug_barrier()
        mbarrier.arrive(unit.index(0), count=1)
        if contributors > 0:
            if third < end:
                # The third block takes the queries' place.
                empty_phase = gl.where(query_slot == SLOTS - 1, phase ^ 1, phase)
                mbarrier.wait(empty.index(query_slot), empty_phase)
                _copy_latent(page, third * BLOCK_N % PAGE_SIZE, kv_latent, latent, filled, query_slot)
            acc = gl.zeros([BLOCK_M, HALF_D], gl.float32, O_LAYOUT)
            for block in range(begin, end, step):
                v = latent.index(slot).reshape([BLOCK_N, D]).slice(0, HALF_D, 1)
                p = rope.index(side).reshape([BLOCK_M, BLOCK_N])
                mbarrier.wait(probable.index(slot), phase)
                acc = acc * factors.index(slot).load(gl.SliceLayout(1, O_LAYOUT))[:, None]
                if HOLD:
                    mbarrier.wait(ready.index(slot), phase)
                acc = hopper.warpgroup_mma(p, v, acc, is_async=True)
                rope_block = block + (SLOTS - 1) * step
                rope_page = page
                latent_block = block + SLOTS * step
                page = gl.load(pages + latent_block * BLOCK_N // PAGE_SIZE, mask=latent_block < end, other=0)
                acc = hopper.warpgroup_mma_wait(0, deps=(acc,))
                if not LATE or block + step < end:
                    mbarrier.arrive(empty.index(slot), count=1)
                if rope_block < end:
                    mbarrier.wait(empty.index(slot), phase)
                    _copy_rope(rope_page, rope_block * BLOCK_N % PAGE_SIZE, kv_rope, rope, rope_filled, side)
                    if latent_block < end:
                        _copy_latent(page, latent_block * BLOCK_N % PAGE_SIZE, kv_latent, latent, filled, slot)
                slot, phase = _next_slot(slot, phase)
                side = side ^ 1
            mbarrier.wait(shared.index(0), turn)
            if LATE:
                last = gl.where(slot == 0, SLOTS, slot) - 1
                any_blocks = _told(facts, BEGIN) < _told(facts, END)
                _write_values(acc, out, partial, latent.index(last), any_blocks, shares, facts, 0, HEADS, True, O_LAYOUT)
                if any_blocks:
                    tl.debug_barrier()
                    mbarrier.arrive(empty.index(last), count=1)
            else:
                _write_values(acc, out, partial, latent.index(slot), True, shares, facts, 0, HEADS, DIRECT, O_LAYOUT)
        if not DIRECT:
            more = _told(facts, MORE)
        turn = turn ^ 1


@gluon.jit
def _second_values_role(
    out, partial, latent, rope, factors, shares, facts, probable, ready, empty, shared, unit, taken, nothing,
    HEADS: gl.constexpr, DIRECT: gl.constexpr, HOLD: gl.constexpr,
):  # fmt: skip
    """Owns the second half of the values."""
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    # A unit's last slot is empty only when the unit has been written; see :func:`_write_values`.
    LATE: gl.constexpr = not DIRECT and partial.dtype.element_ty == out.dtype.element_ty
    slot = nothing
    phase = nothing
    side = nothing
    turn = nothing
    more = nothing + 1
    while more > 0:
        mbarrier.wait(unit.index(0), turn)
        contributors = _told(facts, CONTRIBUTORS)
        if contributors > 0:
            begin = _told(facts, BEGIN)
            end = _told(facts, END)
            step = _told(facts, STEP)
            slot, phase = _next_slot(slot, phase)
            acc = gl.zeros([BLOCK_M, HALF_D], gl.float32, O_LAYOUT)
            for block in range(begin, end, step):
                v = latent.index(slot).reshape([BLOCK_N, D]).slice(HALF_D, HALF_D, 1)
                p = rope.index(side).reshape([BLOCK_M, BLOCK_N])
                mbarrier.wait(probable.index(slot), phase)
                acc = acc * factors.index(slot).load(gl.SliceLayout(1, O_LAYOUT))[:, None]
                if HOLD:
                    mbarrier.wait(ready.index(slot), phase)
                acc = hopper.warpgroup_mma(p, v, acc, is_async=True)
                acc = hopper.warpgroup_mma_wait(0, deps=(acc,))
                if not LATE or block + step < end:
                    mbarrier.arrive(empty.index(slot), count=1)
                slot, phase = _next_slot(slot, phase)
                side = side ^ 1
            mbarrier.wait(shared.index(0), turn)
            if LATE:
                last = gl.where(slot == 0, SLOTS, slot) - 1
                any_blocks = _told(facts, BEGIN) < _told(facts, END)
                _write_values(acc, out, partial, latent.index(last), any_blocks, shares, facts, 1, HEADS, True, O_LAYOUT)
                if any_blocks:
                    tl.debug_barrier()
                    mbarrier.arrive(empty.index(last), count=1)
            else:
                _write_values(acc, out, partial, latent.index(slot), True, shares, facts, 1, HEADS, DIRECT, O_LAYOUT)
        if DIRECT:
            more = more * 0
        else:
            more = _told(facts, MORE)
            tl.debug_barrier()
            mbarrier.arrive(taken.index(0), count=1)
        turn = turn ^ 1


@gluon.jit(do_not_specialize=UNSPECIALIZED_CALL)
def latent_roles_kernel(
    q_latent,
    q_rope,
    kv_latent,
    kv_rope,
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
    tree_width,
    table_keys,
    score_scale,
    stride_pages,
    stride_mask,
    HEADS: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    BLOCK_B: gl.constexpr,
    PACKED: gl.constexpr,
    SINKS: gl.constexpr,
    TREE: gl.constexpr,
    MIN_BLOCKS: gl.constexpr,
    DIRECT: gl.constexpr,
    EVEN: gl.constexpr,
    HOLD: gl.constexpr,
    OVERLAP: gl.constexpr,
    EARLY: gl.constexpr,
):
    """As ``triton_hopper.latent_split_kernel``; queries and cache come as descriptors of the tensor memory accelerator."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    dtype: gl.constexpr = kv_latent.dtype
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    latent = gl.allocate_shared_memory(dtype, [SLOTS, 1, BLOCK_N, D], kv_latent.layout)
    rope = gl.allocate_shared_memory(dtype, [2, 1, BLOCK_N, D2], kv_rope.layout)
    q_rope_tile = gl.allocate_shared_memory(dtype, [1, BLOCK_M, D2], q_rope.layout)
    q_tail = gl.allocate_shared_memory(dtype, [BLOCK_M, TAIL], gl.NVMMASharedLayout(128, 16, 2))
    factors = gl.allocate_shared_memory(gl.float32, [SLOTS, BLOCK_M], PLAIN)
    shares = gl.allocate_shared_memory(gl.float32, [BLOCK_M], PLAIN)
    facts = gl.allocate_shared_memory(gl.int32, [FACTS], PLAIN)
    filled = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    rope_filled = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    probable = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    shared = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    unit = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(filled.index(slot), count=1)
        mbarrier.init(probable.index(slot), count=1)
        mbarrier.init(ready.index(slot), count=1)
        # Both roles of the values.
        mbarrier.init(empty.index(slot), count=2)
    mbarrier.init(rope_filled.index(0), count=1)
    mbarrier.init(rope_filled.index(1), count=1)
    mbarrier.init(shared.index(0), count=1)
    mbarrier.init(unit.index(0), count=1)
    # The two roles beside the first.
    mbarrier.init(taken.index(0), count=2)
    if PACKED:
        _zero_unowned_rows(out, query_start, num_requests, num_rows, gl.program_id(0), HEADS)
    gl.warp_specialize(
        [
            (
                _first_values_role,
                (
                    q_latent, q_rope, kv_latent, kv_rope, out, page_table, partial, latent, rope, q_rope_tile, factors,
                    shares, facts, filled, rope_filled, probable, ready, empty, shared, unit, taken,
                    seq_lens, query_start, num_requests, query_len, max_tiles, tree_width, table_keys, stride_pages,
                    HEADS, PAGE_SIZE, PACKED, TREE, DIRECT, EVEN, HOLD, BLOCK_B, MIN_BLOCKS,
                ),
            ),
            (
                _scores_role,
                (
                    sinks, tree_mask, partial_lse, latent, rope, q_rope_tile, q_tail, factors, shares, facts,
                    filled, rope_filled, probable, ready, empty, shared, unit, taken,
                    tree_width, score_scale, stride_mask, HEADS, SINKS, TREE, DIRECT, HOLD,
                ),
            ),
            (
                _second_values_role,
                (
                    out, partial, latent, rope, factors, shares, facts, probable, ready, empty, shared, unit, taken,
                    tree_width * 0, HEADS, DIRECT, HOLD,
                ),
            ),
        ],
        [4, 4],
        [SCORES_REGISTERS, VALUES_REGISTERS],
    )  # fmt: skip


@gluon.jit
def _zero_unowned_rows(out, query_start, num_requests, num_rows, pid, HEADS: gl.constexpr):
    """Rows of a packed layout behind the last request belong to nobody and are zero."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    d = gl.arange(0, D, LAYOUT)
    zeros = gl.zeros([D], out.dtype.element_ty, LAYOUT)
    row = gl.load(query_start + num_requests) + pid
    while row < num_rows:
        for head in range(0, HEADS):
            gl.store(out + (row.to(gl.int64) * HEADS + head) * D + d, zeros)
        row += gl.num_programs(0)


def launch_roles(
    programs: int,
    read: tuple[Tensor, Tensor, Tensor],
    tensors: tuple[Tensor | None, ...],
    numbers: tuple[float, ...],
    constants: dict[str, Any],
    *,
    heads: int,
    hold: bool,
    early: bool,
) -> None:
    """Launch the kernel.

    Args:
        read: latent queries ``[T, Hq, 512]``, rotary queries ``[T, Hq, 64]``, whose rows and heads are one stride apart, and
            cache ``[P, S, 1, 576]``.
        tensors, numbers: arguments of the kernel behind the descriptors.
        constants: of the kernel, but for those below.
    """
    q, q2, cache = read
    pages, page_size = cache.shape[:2]
    # Few compiled kernels: one for every number of requests.
    constants = {**constants, "BLOCK_B": 2 if constants["DIRECT"] else MOST_SCHEDULED}
    of_keys = ([pages, page_size, cache.shape[3]], [cache.stride(0), cache.stride(1), 1])
    rows = q.shape[0] * heads
    shared = gl.NVMMASharedLayout(128, 16, 3)
    latent, rope = D.value, D2.value
    latent_roles_kernel[(programs,)](
        TensorDescriptor(q, [1, rows, latent], [rows * q.stride(1), q.stride(1), 1], [1, BLOCK_M.value, latent], shared),
        TensorDescriptor(q2, [1, rows, rope], [rows * q2.stride(1), q2.stride(1), 1], [1, BLOCK_M.value, rope], shared),
        TensorDescriptor(cache, *of_keys, [1, BLOCK_N.value, latent], shared),
        TensorDescriptor(cache, *of_keys, [1, BLOCK_N.value, rope], shared),
        *tensors,
        *numbers,
        **constants,
        HEADS=heads,
        HOLD=hold,
        EARLY=early,
        num_warps=NUM_WARPS,
        **({"launch_pdl": True} if early else {}),
    )
