# ruff: noqa: RET505, RUF005
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, assignment"
"""What the Triton attention kernels of both families share: scheduling, masks, softmax, merging, and their host side.

Work is cut on the device. A *unit* is one tile of query rows of one KV head of one request; its cost is the number of key
blocks it may see. The costs of all units, read from ``seq_lens``, are laid end to end, and every program takes an equal
contiguous stretch of them. So the host fixes only the number of programs, from shapes, while the split follows the real
lengths: long requests are spread over many programs and short ones share one. A program that owns a whole unit writes the
output; else it writes a partial result (normalised output and base-2 log-sum-exp) that is merged, either by the last
program of the unit to arrive or by a second kernel. Where there are few requests the schedule is not worth its time: each
unit gets the same number of programs, and they take its blocks in turn.

A unit reads only keys in ``[0, num_keys)`` of its request, through masks that put zeros elsewhere, so NaN behind a
sequence's end and in pages of others never meets a number. ``num_keys`` is ``seq_len``, or what the page table has room for
(``table_keys``) where that is less: keys behind the table do not exist, while rows keep the positions that ``seq_len`` says.
"""

from __future__ import annotations

import functools
import os
import threading
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specops.ops.graph_memory import outside_graph_pools

LOG2E = 1.4426950408889634
NEG_INF = tl.constexpr(float("-inf"))
# The interpreter computes with NumPy, which has no bfloat16 products.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")

# Multiprocessors assumed where there is no GPU (the interpreter): small, so that tests split and merge.
INTERPRETED_SMS = 8
# Counters of one device: 4 bytes a unit of work. A captured call keeps its own slice, so that two graphs may replay at once.
ARENA_COUNTERS = 1 << 20
# Tree masks up to this width are packed into one integer a row and tested in registers.
PACKED_TREE_WIDTH = 64
# See :func:`even_cut`.
EVEN_SLACK = tl.constexpr(8)
# Requests the split kernel schedules, by the size of its prefix sum: few sizes, so few compiled kernels. More requests
# need no split.
SCHEDULE_SIZES = (32, 256, 8192)
MAX_SCHEDULED_REQUESTS = SCHEDULE_SIZES[-1]


@dataclass(frozen=True)
class Tiling:
    """Sizes of one launch.

    Attributes:
        block_m: query rows (times heads of a group) in a tile.
        block_n: keys in a block.
        num_warps, num_stages: as Triton names them.
        programs_per_sm: programs of the grid for each multiprocessor.
        swap: compute scores transposed, keys along the tensor cores' long side; for tiles of few rows.
        inline_merge: merge by the last program to arrive instead of by a second kernel.
        min_blocks: the fewest key blocks worth a program; fewer are not split off.
        max_registers: registers a thread, to fit more programs on a multiprocessor; None leaves it to the compiler.
        direct: give every unit the same number of programs, which take its blocks in turn, instead of the schedule.
        hopper: the kernel of ``triton_hopper``, whose block sizes and warps are fixed.
        roles: the kernel of ``triton_hopper_roles``, with fixed sizes too.
        hold: with roles, hold back the product with a block's values until the scores of the next block are done.
        rounded_partials: with roles, partial results in the dtype of the query instead of float32.
        wide_merge: where a second kernel merges, give a thread the same columns of all partial results, so that threads need
            not add up for one another.
        early: launch the split kernel while the kernel before it ends, where the device can; it waits for that one's end
            before it reads anything.
        prefetch: with early and units cut alike, key blocks of each program that are brought into the L2 cache before the
            wait.
        even: where cutting every unit into equally many parts, or giving every program equally many whole units, keeps
            programs about as busy as the schedule does, do that instead; decided on the device. For uniform layouts.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    swap: bool = False
    inline_merge: bool = True
    min_blocks: int = 1
    max_registers: int | None = None
    direct: bool = False
    hopper: bool = False
    roles: bool = False
    hold: bool = False
    rounded_partials: bool = False
    wide_merge: bool = False
    early: bool = False
    even: bool = False
    prefetch: int = 0


def next_power_of_2(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


def num_sms(device: torch.device) -> int:
    """Multiprocessors of ``device``; cached by torch."""
    if device.type != "cuda":
        return INTERPRETED_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may take on ``device``; Hopper's where there is no GPU."""
    if device.type != "cuda":
        return 227 << 10
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", 0) or properties.shared_memory_per_block)


def fitting_stages(stages: int, stage_bytes: int, other_bytes: int, device: torch.device) -> int:
    """The most steps of a loop, up to ``stages``, that shared memory has room for; two if there were more, since one alone
    takes as much memory as two.

    Args:
        stages: steps under way; the last of them is in registers or needs no buffer yet.
        stage_bytes: what one step loads.
        other_bytes: what the kernel keeps there beside.
    """
    room = (shared_memory(device) - other_bytes) // stage_bytes
    return min(stages, max(room + 1, 2))


@functools.cache
def launches_overlap(device: torch.device) -> bool:
    """Whether a dependent launch may start before the one it waits for has ended: NVIDIA 9.0 and later."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def early_launch(device: torch.device) -> dict[str, Any]:
    """Options of a kernel that starts while the one before it ends, where that is possible; it waits if ``EARLY``."""
    early = launches_overlap(device)
    return {"EARLY": early, **({"launch_pdl": True} if early else {})}


def dense_rows(tensor: Tensor) -> Tensor:
    """``tensor`` ``[R, C]`` with a unit last stride."""
    return tensor if tensor.stride(1) == 1 else tensor.contiguous()


def hopper_products(device: torch.device) -> bool:
    """Whether ``device`` has Hopper's matrix instructions, which no later generation has."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) == (9, 0)


class _Arena:
    """Zeroed int32 counters of one device, cut into slices that are never given back."""

    def __init__(self, device: torch.device) -> None:
        self.memory: Tensor = _allocate_apart(device, ARENA_COUNTERS)
        self.used = 0

    def take(self, count: int) -> Tensor | None:
        # Whole cache lines: no two slices share one, and every slice is aligned as the compiled kernel assumes.
        count = -(-count // 32) * 32
        if self.used + count > self.memory.shape[0]:
            return None
        self.used += count
        return self.memory[self.used - count : self.used]


_arenas: dict[torch.device, _Arena] = {}
_stream_counters: dict[tuple[torch.device, int], Tensor] = {}
_counter_lock = threading.Lock()


def merge_counters(device: torch.device, count: int) -> Tensor:
    """``[>= count]`` int32 zeros; the kernel that uses them leaves zeros behind.

    Launches on one stream run one after another and share a slice. A call under capture gets a slice of its own, since
    its graph may be replayed beside anything. Without an arena (first call under capture, or used up) the zeros are part
    of the graph.
    """
    if device.type != "cuda":
        return torch.zeros(count, dtype=torch.int32, device=device)
    with _counter_lock:
        if torch.cuda.is_current_stream_capturing():
            arena = _arenas.get(device)
            taken = None if arena is None else arena.take(count)
            return torch.zeros(count, dtype=torch.int32, device=device) if taken is None else taken
        if device not in _arenas:
            _arenas[device] = _Arena(device)
        key = (device, torch.cuda.current_stream(device).cuda_stream)
        held = _stream_counters.get(key)
        if held is None or held.shape[0] < count:
            size = next_power_of_2(max(count, 1024))
            held = _arenas[device].take(size) if size <= ARENA_COUNTERS // 64 else None
            if held is None:
                held = _allocate_apart(device, size)
            _stream_counters[key] = held
        return held


def release_counters() -> None:
    """Forget all counters, for programs that capture endlessly many graphs. No graph with a call in it may be alive."""
    with _counter_lock:
        _arenas.clear()
        _stream_counters.clear()


def _allocate_apart(device: torch.device, count: int) -> Tensor:
    """Zeros that belong to no memory pool of the caller."""
    return outside_graph_pools(lambda: torch.zeros(count, dtype=torch.int32, device=device), device)


@triton.jit
def row_blocks(
    seq_len,
    num_keys,
    rows,
    window,
    tree_width,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    TREE: tl.constexpr,
):
    """First key block, number of key blocks (at least 1) and number of row tiles of requests; scalars or vectors."""
    tiles = (rows * GROUP + BLOCK_M - 1) // BLOCK_M
    end = (num_keys + BLOCK_N - 1) // BLOCK_N
    begin = seq_len * 0
    if WINDOW:
        # The lowest position: the first row, or under a tree mask a row that sees none of the tree.
        if TREE:
            position = seq_len - tree_width - 1
        else:
            position = seq_len - rows
        begin = tl.minimum(tl.maximum(position - window + 1, 0) // BLOCK_N, end)
    return begin, tl.maximum(end - begin, 1), tiles


@triton.jit
def request_costs(
    seq_lens,
    query_start,
    num_requests,
    query_len,
    window,
    tree_width,
    table_keys,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
    PACKED: tl.constexpr,
    WINDOW: tl.constexpr,
    TREE: tl.constexpr,
):
    """``[BLOCK_B]`` int32: key blocks of all units of each request, 0 for one without rows."""
    request = tl.arange(0, BLOCK_B)
    live = request < num_requests
    seq_len = tl.maximum(tl.load(seq_lens + request, mask=live, other=0), 0)
    if PACKED:
        start = tl.load(query_start + request, mask=live, other=0)
        rows = tl.load(query_start + request + 1, mask=live, other=0) - start
    else:
        rows = tl.where(live, query_len, 0)
    num_keys = tl.minimum(seq_len, table_keys)
    _, blocks, tiles = row_blocks(seq_len, num_keys, rows, window, tree_width, GROUP, BLOCK_M, BLOCK_N, WINDOW, TREE)
    return blocks * tiles * HEADS


@triton.jit
def _sum_and_max(sum_a, max_a, sum_b, max_b):
    return sum_a + sum_b, tl.maximum(max_a, max_b)


@triton.jit
def even_cut(cost, units, units_of_request, num_programs, MIN_BLOCKS: tl.constexpr):
    """How to cut units alike: whether to, how many blocks make a part, and the blocks of all units.

    Program ``p`` takes part ``p // units`` of unit ``p % units``, or the units ``p``, ``p + num_programs`` and so on where
    there are more units than programs. Worth it where the longest unit keeps no program busy for more than
    ``1 / EVEN_SLACK`` above the schedule's stretch: no unit then begins or ends inside a program, and most need no merge.

    Args:
        cost: :func:`request_costs`, of a uniform layout.
    """
    # Once across the warps instead of twice.
    all_blocks, most = tl.reduce((cost, cost), 0, _sum_and_max)
    longest = most // units_of_request
    stretch = tl.maximum((all_blocks + num_programs - 1) // num_programs, MIN_BLOCKS)
    parts = tl.minimum(tl.maximum(num_programs // units, 1), (longest + MIN_BLOCKS - 1) // MIN_BLOCKS)
    part = tl.maximum((longest + parts - 1) // parts, 1)
    rounds = (units + num_programs - 1) // num_programs
    return part * rounds * EVEN_SLACK <= stretch * (EVEN_SLACK + 1), part, all_blocks


@triton.jit
def prefetch(address):
    """Have what ``address`` points to brought into the L2 cache: a hint, allowed before what wrote it has ended."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def prefetch_if(address, wanted):
    """As :func:`prefetch`, where ``wanted``."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }", "=r,l,r",
        [address, wanted.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def prefetch_block(cache, key, page, wanted, stride_page, stride_key, num_pages, D: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """Have the rows of some keys, ``key`` and ``page`` ``[N]``, brought into the L2 cache, line by line.

    Page ids may be of the step before, so none is taken that the cache does not have.
    """
    LINE: tl.constexpr = 1024 // cache.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = (D + LINE - 1) // LINE
    column = tl.minimum(tl.arange(0, triton.next_power_of_2(LINES)) * LINE, D - 1)
    page = tl.minimum(tl.maximum(page, 0), num_pages - 1).to(tl.int64)
    at = cache + (page * stride_page + (key % PAGE_SIZE) * stride_key)[:, None] + column[None, :]
    prefetch_if(at, wanted[:, None])


@triton.jit
def block_pages(pages, block, wanted, num_keys, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Page ids of a key block if ``wanted``: one where it lies inside a page, else one for each key before ``num_keys``."""
    if PAGE_SIZE % BLOCK_N == 0:
        return tl.load(pages + block * BLOCK_N // PAGE_SIZE, mask=wanted, other=0)
    else:
        key = block * BLOCK_N + tl.arange(0, BLOCK_N)
        return tl.load(pages + key // PAGE_SIZE, mask=wanted & (key < num_keys), other=0)


@triton.jit
def request_scalars(seq_lens, query_start, request, query_len, table_keys, PACKED: tl.constexpr):
    """seq_len, number of keys, first row and number of rows of one request; no keys for a negative length."""
    seq_len = tl.maximum(tl.load(seq_lens + request), 0)
    if PACKED:
        start = tl.load(query_start + request)
        rows = tl.load(query_start + request + 1) - start
    else:
        start = request * query_len
        rows = query_len + seq_len * 0
    return seq_len, tl.minimum(seq_len, table_keys), start, rows


@triton.jit
def row_limits(
    row,
    valid,
    start,
    seq_len,
    num_keys,
    rows,
    window,
    tree_mask,
    stride_mask,
    tree_width,
    BLOCK_M: tl.constexpr,
    BLOCK_W: tl.constexpr,
    WINDOW: tl.constexpr,
    TREE: tl.constexpr,
    TREE_BITS: tl.constexpr,
):
    """First key, last always-visible key, and packed tree bits of each row of a tile, ``[BLOCK_M]`` each.

    Without a tree mask the bits are unused. Rows that are not valid see nothing.
    """
    bits = row * 0
    if TREE:
        prefix = seq_len - tree_width
        column = tl.arange(0, BLOCK_W)
        where = tree_mask + (start + row).to(tl.int64)[:, None] * stride_mask + column[None, :]
        seen = tl.load(where, mask=valid[:, None] & (column < tree_width)[None, :], other=0).to(tl.int32)
        last = tl.where(valid, tl.minimum(prefix, num_keys) - 1, -1)
        position = prefix - 1 + tl.sum(seen, 1)
        if TREE_BITS == 32:
            bits = tl.sum(seen << column[None, :], 1)
        if TREE_BITS == 64:
            bits = tl.sum(seen.to(tl.int64) << column[None, :].to(tl.int64), 1)
    else:
        position = seq_len - rows + row
        last = tl.where(valid, tl.minimum(position, num_keys - 1), -1)
    first = row * 0
    if WINDOW:
        first = position - window + 1
    return first, last, bits


@triton.jit
def along_rows(x, SWAP: tl.constexpr):
    """A vector over rows as a tile of one column, or of one row where scores are transposed."""
    if SWAP:
        return x[None, :]
    else:
        return x[:, None]


@triton.jit
def along_keys(x, SWAP: tl.constexpr):
    if SWAP:
        return x[:, None]
    else:
        return x[None, :]


@triton.jit
def visible(
    key,
    first,
    last,
    bits,
    valid,
    mask_row,
    seq_len,
    num_keys,
    tree_width,
    SWAP: tl.constexpr,
    WINDOW: tl.constexpr,
    TREE: tl.constexpr,
    TREE_BITS: tl.constexpr,
):
    """Which keys of a block each row of a tile sees: a tile of scores in shape, bool."""
    keys = along_keys(key, SWAP)
    seen = keys <= along_rows(last, SWAP)
    if TREE:
        own = keys - (seq_len - tree_width)
        rows = along_rows(valid, SWAP)
        if TREE_BITS > 0:
            place = tl.minimum(tl.maximum(own, 0), tree_width - 1)
            bit = ((along_rows(bits, SWAP) >> place) & 1) != 0
            seen = seen | (bit & (own >= 0) & (keys < num_keys) & rows)
        else:
            inside = (own >= 0) & (keys < num_keys) & rows
            seen = seen | (tl.load(along_rows(mask_row, SWAP) + own, mask=inside, other=0) != 0)
    if WINDOW:
        seen = seen & (keys >= along_rows(first, SWAP))
    return seen


@triton.jit
def tile_keys(first_row, last_row, seq_len, num_keys, rows, window, tree_width, WINDOW: tl.constexpr, TREE: tl.constexpr):
    """Half-open range of keys that rows ``first_row`` to ``last_row`` of a request may see."""
    low = seq_len * 0
    if TREE:
        high = num_keys
        if WINDOW:
            low = tl.minimum(tl.maximum(seq_len - tree_width - window, 0), high)
    else:
        high = tl.maximum(tl.minimum(seq_len - rows + last_row + 1, num_keys), 0)
        if WINDOW:
            low = tl.minimum(tl.maximum(seq_len - rows + first_row - window + 1, 0), high)
    return low, high


@triton.jit
def score_product(a, b, acc, FP8: tl.constexpr):
    """``acc + a @ b`` for scores. An error of a score is a relative error of its key's weight, so those of float32, which
    may be large, are accumulated in float64: a chain of float32 sums was off by 1e-5 at scores of 100. Not so over an fp8
    cache, whose numbers the compiler can't take to the layouts of float64 products."""
    if a.dtype == tl.float32 and not INTERPRETED and not FP8:
        return tl.dot(a.to(tl.float64), b.to(tl.float64), acc, out_dtype=tl.float64)
    else:
        return product(a, b, acc)


@triton.jit
def product(a, b, acc):
    """``acc + a @ b`` with float32 accumulation; float32 operands are multiplied in full precision."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def tanh(x):
    """tanh in float32 with a relative error near rounding: a series where 1 - 2/(e^2x + 1) would cancel."""
    x2 = x * x
    series = x * (1 + x2 * (-0.3333333333 + x2 * (0.1333333333 + x2 * (-0.0539682540 + x2 * 0.0218694885))))
    return tl.where(tl.abs(x) < 0.25, series, 1 - 2 / (tl.exp2(x * 2.8853900817779268) + 1))


@triton.jit
def scaled(scores, score_scale, cap, SOFTCAP: tl.constexpr):
    """Scores in base 2. ``score_scale`` holds scale * log2(e), or scale / softcap with ``cap`` = softcap * log2(e)."""
    scores = scores * score_scale
    if SOFTCAP:
        scores = tanh(scores) * cap
    return scores


@triton.jit
def softmax_step(scores, m, total, SWAP: tl.constexpr):
    """Probabilities of a block against the running maximum; returns them, the new state and the factor on the old."""
    AXIS: tl.constexpr = 0 if SWAP else 1
    m_new = tl.maximum(m, tl.max(scores, AXIS))
    # A row that has seen nothing has maximum -inf; -inf - -inf must not happen.
    base = tl.where(m_new == NEG_INF, 0.0, m_new)
    factor = tl.exp2(m - base)
    p = tl.exp2(scores - along_rows(base, SWAP))
    return p, m_new, total * factor + tl.sum(p, AXIS), factor


@triton.jit
def sink_factor(lse, sinks, head, valid, SINKS: tl.constexpr):
    """Share of the softmax's denominator that is not the sink's: ``[rows]``."""
    factor = tl.full(lse.shape, 1.0, tl.float32)
    if SINKS:
        sink = tl.load(sinks + head, mask=valid, other=0.0) * 1.4426950408889634
        factor = tl.where(lse == NEG_INF, 0.0, 1 / (1 + tl.exp2(sink - lse)))
    return factor


@triton.jit
def slot_of(index, first_slot, slot_step, slot_extra):
    """Where contributor ``index`` of a unit left its partial result.

    Under the schedule a program has two slots: an odd one for the unit that its stretch ends in, which only the first
    contributor of a unit uses (``slot_extra`` is 1), and an even one for the unit that its stretch begins in. Else a program
    has one, and ``slot_extra`` is 0.
    """
    return first_slot + index * slot_step + tl.where(index == 0, slot_extra, 0)


@triton.jit
def merge_side_by_side(
    partial,
    partial_lse,
    first_slot,
    slot_step,
    slot_extra,
    contributors,
    row,
    column,
    column_valid,
    BLOCK_M: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """As :func:`merge_partials`, with ``CHUNK`` contributors loaded at once: for many contributors and few rows."""
    top = tl.full(row.shape, NEG_INF, tl.float32)
    total = row.to(tl.float32) * 0
    out = row.to(tl.float32)[:, None] * 0 + column.to(tl.float32)[None, :] * 0
    lanes = tl.arange(0, CHUNK)
    for begin in range(0, contributors, CHUNK):
        index = begin + lanes
        here = index < contributors
        slot = slot_of(index, first_slot, slot_step, slot_extra).to(tl.int64)
        at_row = slot[:, None] * BLOCK_M + row[None, :]
        lse = tl.load(partial_lse + at_row, mask=here[:, None], other=NEG_INF, cache_modifier=".cg")
        where = partial + at_row[:, :, None] * BLOCK_DV + column[None, None, :]
        part = tl.load(where, mask=here[:, None, None] & column_valid[None, None, :], other=0.0, cache_modifier=".cg")
        top_new = tl.maximum(top, tl.max(lse, 0))
        base = tl.where(top_new == NEG_INF, 0.0, top_new)
        weight = tl.exp2(lse - base[None, :])
        factor = tl.exp2(top - base)
        total = total * factor + tl.sum(weight, 0)
        out = out * factor[:, None] + tl.sum(weight[:, :, None] * part, 0)
        top = top_new
    safe = tl.where(total == 0, 1.0, total)
    return out / safe[:, None], tl.where(total == 0, NEG_INF, top + tl.log2(safe))


@triton.jit
def merge_in_threads(
    partial,
    partial_lse,
    first_slot,
    slot_step,
    slot_extra,
    contributors,
    row,
    column,
    column_valid,
    BLOCK_M: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """As :func:`merge_partials`, with ``CHUNK`` contributors loaded at once and all of them by the thread that adds them up:
    no sums across threads, and so no barriers behind the loads."""
    top = tl.full(row.shape, NEG_INF, tl.float32)
    total = row.to(tl.float32) * 0
    out = row.to(tl.float32)[:, None] * 0 + column.to(tl.float32)[None, :] * 0
    for begin in range(0, contributors, CHUNK):
        lses = ()
        parts = ()
        for step in tl.static_range(CHUNK):
            slot = slot_of(begin + step, first_slot, slot_step, slot_extra)
            here = begin + step < contributors
            at = partial_lse + slot.to(tl.int64) * BLOCK_M + row
            lses = lses + (tl.load(at, mask=here & (row >= 0), other=NEG_INF, cache_modifier=".cg"),)
            where = partial + (slot.to(tl.int64) * BLOCK_M + row)[:, None] * BLOCK_DV + column[None, :]
            inside = here & column_valid[None, :] & (row >= 0)[:, None]
            parts = parts + (tl.load(where, mask=inside, other=0.0, cache_modifier=".cg"),)
        top_new = top
        for step in tl.static_range(CHUNK):
            top_new = tl.maximum(top_new, lses[step])
        base = tl.where(top_new == NEG_INF, 0.0, top_new)
        factor = tl.exp2(top - base)
        total = total * factor
        out = out * factor[:, None]
        for step in tl.static_range(CHUNK):
            weight = tl.exp2(lses[step] - base)
            total += weight
            out += weight[:, None] * parts[step].to(tl.float32)
        top = top_new
    safe = tl.where(total == 0, 1.0, total)
    return out / safe[:, None], tl.where(total == 0, NEG_INF, top + tl.log2(safe))


@triton.jit
def merge_partials(
    partial,
    partial_lse,
    first_slot,
    slot_step,
    slot_extra,
    contributors,
    row,
    column,
    column_valid,
    BLOCK_M: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Weighted sum of the partial results of one unit, a few contributors at a time: for few contributors and many rows.

    Args:
        first_slot, slot_step, slot_extra: see :func:`slot_of`.
        row: ``[R]`` rows of the tile.
        column: ``[C]`` value columns.

    Returns:
        ``[R, C]`` normalised output and ``[R]`` base-2 log-sum-exp.
    """
    top = tl.full(row.shape, NEG_INF, tl.float32)
    lanes = tl.arange(0, 16)
    for begin in range(0, contributors, 16):
        index = begin + lanes
        slot = slot_of(index, first_slot, slot_step, slot_extra)
        where = partial_lse + slot.to(tl.int64)[:, None] * BLOCK_M + row[None, :]
        lse = tl.load(where, mask=(index < contributors)[:, None], other=NEG_INF, cache_modifier=".cg")
        top = tl.maximum(top, tl.max(lse, 0))
    base = tl.where(top == NEG_INF, 0.0, top)
    total = row.to(tl.float32) * 0
    out = row.to(tl.float32)[:, None] * 0 + column.to(tl.float32)[None, :] * 0
    for begin in range(0, contributors, CHUNK):
        for step in tl.static_range(CHUNK):
            index = begin + step
            slot = slot_of(index, first_slot, slot_step, slot_extra)
            here = index < contributors
            at = partial_lse + slot.to(tl.int64) * BLOCK_M + row
            lse = tl.load(at, mask=here & (row >= 0), other=NEG_INF, cache_modifier=".cg")
            where = partial + (slot.to(tl.int64) * BLOCK_M + row)[:, None] * BLOCK_DV + column[None, :]
            part = tl.load(where, mask=here & column_valid[None, :] & (row >= 0)[:, None], other=0.0, cache_modifier=".cg")
            weight = tl.exp2(lse - base)
            total += weight
            out += weight[:, None] * part
    safe = tl.where(total == 0, 1.0, total)
    return out / safe[:, None], tl.where(total == 0, NEG_INF, base + tl.log2(safe))
