# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""The small steps of a decoding round, one launch each: likeliest tokens, the draft tree, greedy verification.

As torch calls each of them is a dozen launches and more, which together took as long as ten layers of a small model. A tree
has at most a few dozen candidates, so one program a request holds it in registers and compares all pairs.

* ``top_kernel``: one program, most often one warp, a row and chunk of the vocabulary takes the chunk's ``k`` largest, one
  maximum after another; ``join_kernel`` takes those of the chunks. A short vocabulary is one chunk and one launch.
* ``tree_kernel``: candidates are ranked by score, then by place; the kept ones' nodes are numbered in order.
* ``verify_kernel``: the target's choices are followed down the tree.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specops.ops.triton_common import dense_rows, early_launch, next_power_of_2

# The most entries asked for.
MAX_TOP = 16
# Vocabulary entries of a program: few spread a row over the GPU, and one warp for them meets no barrier. Programs beyond
# ``MAX_PROGRAMS`` and parts of a row beyond ``MAX_PARTS`` cost more than that wins.
WARP_ENTRIES = 1024
CHUNKS = (256, 1024, 4096, 16384)
MAX_PROGRAMS = 4096
MAX_PARTS = 512
# Candidates of a tree: comparisons of all pairs are held in registers.
MAX_CANDIDATES = 128
FAR = tl.constexpr(2**31 - 1)
# Below every number, which :func:`ordered` gives: an entry that is not there, or is taken.
GONE = tl.constexpr(-(2**31))


@triton.jit
def begin(EARLY: tl.constexpr):
    """Let the next launch start, and wait for the one before: nothing may be read earlier."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def ordered(x):
    """int32 in the order of the float32 ``x``, -0.0 being 0.0 and not-a-number as low as -inf.

    A GPU's warp finds the largest integer with one instruction, the largest float with ten.
    """
    bits = tl.where(x == x, tl.where(x == 0.0, 0.0, x), float("-inf")).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def number(order):
    """The float32 that :func:`ordered` made ``order`` of; not-a-number for ``GONE``."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def largest(order, label, AXIS: tl.constexpr):
    """The largest entry along an axis and the least label among equals."""
    top = tl.max(order, axis=AXIS, keep_dims=AXIS > 0)
    return top, tl.min(tl.where(order == top, label, FAR), axis=AXIS, keep_dims=AXIS > 0)


@triton.jit
def finite(x):
    """``x``, or 0 for -inf: relative to that, a chunk of -inf alone sums up to 0."""
    return tl.where(x == float("-inf"), 0.0, x)


@triton.jit
def top_kernel(
    logits,
    rows,
    values,
    tokens,
    sums,
    stride,
    V: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    LOGPROBS: tl.constexpr,
    EARLY: tl.constexpr,
):
    begin(EARLY)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    label = chunk * BLOCK + tl.arange(0, BLOCK)
    there = label < V
    source = row
    if rows is not None:
        source = tl.load(rows + row).to(tl.int64)
    x = tl.load(logits + source * stride + label, mask=there, other=float("-inf")).to(tl.float32)
    order = tl.where(there, ordered(x), GONE)
    place = (row * CHUNKS + chunk) * K
    subtract = 0.0
    for index in tl.static_range(K):
        top, at = largest(order, label, 0)
        order = tl.where(label == at, GONE, order)
        top = number(top)
        if LOGPROBS and index == 0:
            total = tl.sum(tl.exp(x - (top if sums is None else finite(top))), axis=0)
            if sums is None:
                subtract = top + tl.log(total)
            else:
                tl.store(sums + row * CHUNKS + chunk, total)
        tl.store(values + place + index, top - subtract)
        tl.store(tokens + place + index, at.to(tokens.dtype.element_ty))


@triton.jit
def joined(
    values,
    tokens,
    sums,
    row,
    there,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    LOGPROBS: tl.constexpr,
):
    """Order, labels and logarithm of the sum of exponentials of rows ``row`` ``[R, 1]``, out of what chunks found.

    A label that a chunk names twice goes with its first, larger entry.
    """
    entry = tl.arange(0, BLOCK)[None, :]
    alive = (entry < CHUNKS * K) & there
    x = tl.load(values + row * (CHUNKS * K) + entry, mask=alive, other=float("-inf"))
    label = tl.load(tokens + row * (CHUNKS * K) + entry, mask=alive, other=FAR)
    order = tl.where(label == FAR, GONE, ordered(x))
    total = tl.zeros_like(row).to(tl.float32)
    if LOGPROBS:
        # A chunk's sum is relative to its largest, which is its first entry.
        first = alive & (entry % K == 0)
        part = tl.load(sums + row * CHUNKS + entry // K, mask=first, other=0.0)
        top = number(tl.max(order, axis=1, keep_dims=True))
        total = top + tl.log(tl.sum(tl.where(first, part * tl.exp(x - top), 0.0), axis=1, keep_dims=True))
    return order, label, total


@triton.jit
def join_kernel(
    part_values,
    part_tokens,
    sums,
    values,
    tokens,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    LOGPROBS: tl.constexpr,
    EARLY: tl.constexpr,
):
    begin(EARLY)
    row = tl.program_id(0).to(tl.int64) + tl.zeros((1, 1), tl.int64)
    order, label, total = joined(part_values, part_tokens, sums, row, row >= 0, K, BLOCK, CHUNKS, LOGPROBS)
    for index in tl.static_range(K):
        top, at = largest(order, label, 1)
        order = tl.where(label == at, GONE, order)
        tl.store(values + row * K + index, number(top) - total)
        tl.store(tokens + row * K + index, at.to(tl.int64))


@triton.jit
def tree_kernel(
    roots,
    candidate_tokens,
    candidate_scores,
    candidate_parents,
    tokens,
    parents,
    depths,
    tree_mask,
    first_child,
    next_sibling,
    stride_root,
    stride_token,
    stride_score,
    stride_parent,
    C: tl.constexpr,
    N: tl.constexpr,
    STEPS: tl.constexpr,
    LINKS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EARLY: tl.constexpr,
):
    begin(EARLY)
    request = tl.program_id(0).to(tl.int64)
    own = tl.arange(0, BLOCK_C)
    there = own < C
    score = tl.load(candidate_scores + request * stride_score + own, mask=there, other=float("-inf")).to(tl.float32)
    above = tl.load(candidate_parents + request * stride_parent + own, mask=there, other=-1).to(tl.int32)
    token = tl.load(candidate_tokens + request * stride_token + own, mask=there, other=0)
    # Rank by score, then by place: a parent comes before its child, which has at most its score.
    ahead = (score[None, :] > score[:, None]) | ((score[None, :] == score[:, None]) & (own[None, :] < own[:, None]))
    rank = tl.sum((ahead & there[None, :]).to(tl.int32), axis=1)
    kept = there & (rank < N - 1)
    node = tl.cumsum(kept.to(tl.int32), axis=0)
    parent = tl.where(above < 0, 0, tl.gather(node, tl.maximum(above, 0), axis=0))
    place = request * N
    tl.store(tokens + place + node, token, mask=kept)
    tl.store(parents + place + node, parent.to(tl.int64), mask=kept)
    column = tl.arange(0, BLOCK_N)
    sees = (column[None, :] == 0) | (column[None, :] == node[:, None])
    depth = tl.full((BLOCK_C,), 1, tl.int32)
    up, over = above, parent
    for _ in tl.static_range(STEPS - 1):
        # A child of the root sees node 0 once more.
        sees = sees | (column[None, :] == over[:, None])
        depth += (up >= 0).to(tl.int32)
        at = tl.maximum(up, 0)
        over = tl.where(up >= 0, tl.gather(parent, at, axis=0), 0)
        up = tl.where(up >= 0, tl.gather(above, at, axis=0), -1)
    tl.store(depths + place + node, depth.to(tl.int64), mask=kept)
    rows = tree_mask + ((place + node) * N)[:, None] + column[None, :]
    tl.store(rows, sees, mask=kept[:, None] & (column < N)[None, :])
    if LINKS:
        sibling = kept[None, :] & (parent[None, :] == parent[:, None]) & (node[None, :] > node[:, None])
        after = tl.min(tl.where(sibling, node[None, :], FAR), axis=1)
        tl.store(next_sibling + place + node, tl.where(after == FAR, -1, after).to(tl.int64), mask=kept)
        child = tl.min(tl.where(kept[None, :] & (parent[None, :] == column[:, None]), node[None, :], FAR), axis=1)
        tl.store(first_child + place + column, tl.where(child == FAR, -1, child).to(tl.int64), mask=column < N)
    # The root.
    tl.store(tokens + place, tl.load(roots + request * stride_root))
    tl.store(parents + place, tl.full((), -1, tl.int64))
    tl.store(depths + place, tl.full((), 0, tl.int64))
    if LINKS:
        tl.store(next_sibling + place, tl.full((), -1, tl.int64))
    tl.store(tree_mask + place * N + column, column == 0, mask=column < N)


@triton.jit
def verify_kernel(
    tokens,
    parents,
    target_tokens,
    accept_lens,
    accept_index,
    accept_tokens,
    stride_token,
    stride_parent,
    stride_target,
    column_target,
    N: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EARLY: tl.constexpr,
):
    begin(EARLY)
    request = tl.program_id(0).to(tl.int64)
    own = tl.arange(0, BLOCK_N)
    there = own < N
    token = tl.load(tokens + request * stride_token + own, mask=there, other=-1)
    parent = tl.load(parents + request * stride_parent + own, mask=there, other=-1).to(tl.int32)
    target = tl.load(target_tokens + request * stride_target + own * column_target, mask=there, other=-1)
    place = request * (STEPS + 1)
    node = tl.full((), 0, tl.int32)
    length = tl.full((), 1, tl.int32)
    wanted = tl.sum(tl.where(own == 0, target, 0), axis=0)
    tl.store(accept_index + place, tl.full((), 0, tl.int64))
    tl.store(accept_tokens + place, wanted)
    for step in tl.static_range(STEPS):
        matches = there & (parent == node) & (token == wanted) & (length == step + 1)
        found = tl.min(tl.where(matches, own, FAR), axis=0)
        goes_on = found != FAR
        node = tl.where(goes_on, found, -1)
        length += goes_on.to(tl.int32)
        wanted = tl.sum(tl.where(own == node, target, 0), axis=0)
        tl.store(accept_index + place + step + 1, node.to(tl.int64))
        tl.store(accept_tokens + place + step + 1, wanted)
    tl.store(accept_lens + request, length)


def chunk_size(rows: int, vocab: int, k: int) -> int:
    """Vocabulary entries of one program: the least size whose programs and parts of a row are not too many."""
    for size in CHUNKS:
        chunks = triton.cdiv(vocab, size)
        if chunks * rows <= MAX_PROGRAMS and chunks * k <= MAX_PARTS:
            return size
    return CHUNKS[-1]


def top_parts(
    logits: Tensor, k: int, logprobs: bool, block: int, rows: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The ``k`` largest of every chunk of ``block`` entries.

    Returns:
        ``[R, chunks * k]`` float32 values and int32 tokens, and with ``logprobs`` ``[R, chunks]`` float32, the sum of
        exponentials of a chunk relative to its largest. A chunk of fewer entries names one of them again, with NaN.
    """
    number_of_rows = logits.shape[0] if rows is None else rows.shape[0]
    chunks, device = triton.cdiv(logits.shape[1], block), logits.device
    values = torch.empty((number_of_rows, chunks * k), dtype=torch.float32, device=device)
    tokens = torch.empty((number_of_rows, chunks * k), dtype=torch.int32, device=device)
    sums = torch.empty((number_of_rows, chunks), dtype=torch.float32, device=device) if logprobs else None
    _launch_top(logits, rows, values, tokens, sums, k, logprobs, block, chunks)
    return values, tokens, sums


def _launch_top(
    logits: Tensor,
    rows: Tensor | None,
    values: Tensor,
    tokens: Tensor,
    sums: Tensor | None,
    k: int,
    logprobs: bool,
    block: int,
    chunks: int,
) -> None:
    logits = dense_rows(logits)
    top_kernel[(values.shape[0], chunks)](
        *(logits, rows, values, tokens, sums, logits.stride(0)),
        V=logits.shape[1],
        K=k,
        BLOCK=block,
        CHUNKS=chunks,
        LOGPROBS=logprobs,
        num_warps=1 if block <= WARP_ENTRIES else min(block // 512, 16),
        **early_launch(logits.device),
    )


def top_tokens(logits: Tensor, k: int, logprobs: bool = False) -> tuple[Tensor, Tensor]:
    """As :func:`specops.ops.top_tokens`; see :func:`can_rank`."""
    rows, vocab = logits.shape
    values = torch.empty((rows, k), dtype=torch.float32, device=logits.device)
    tokens = torch.empty((rows, k), dtype=torch.int64, device=logits.device)
    if rows == 0:
        return values, tokens
    if vocab <= WARP_ENTRIES:
        _launch_top(logits, None, values, tokens, None, k, logprobs, max(next_power_of_2(vocab), 32), 1)
        return values, tokens
    block = chunk_size(rows, vocab, k)
    parts = top_parts(logits, k, logprobs, block)
    width = next_power_of_2(parts[0].shape[1])
    join_kernel[(rows,)](
        *(*parts, values, tokens),
        K=k,
        BLOCK=width,
        CHUNKS=triton.cdiv(vocab, block),
        LOGPROBS=logprobs,
        num_warps=max(min(width // WARP_ENTRIES, 8), 1),
        **early_launch(logits.device),
    )
    return values, tokens


def can_rank(k: int) -> bool:
    """Whether :func:`top_tokens` takes as many."""
    return k <= MAX_TOP


def build_tree(
    root_tokens: Tensor,
    candidate_tokens: Tensor,
    candidate_scores: Tensor,
    candidate_parents: Tensor,
    num_draft_tokens: int,
    num_steps: int,
    links: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As :func:`specops.ops.build_tree`, for at most ``MAX_CANDIDATES`` candidates."""
    batch, candidates = candidate_tokens.shape
    device = root_tokens.device
    tokens, parents, depths, first_child, next_sibling = (
        torch.empty((batch, width), dtype=torch.int64, device=device)
        for width in (*[num_draft_tokens] * 3, *[num_draft_tokens if links else 0] * 2)
    )
    mask = torch.empty((batch * num_draft_tokens, num_draft_tokens), dtype=torch.bool, device=device)
    if batch:
        block = max(next_power_of_2(candidates), 16)
        given = [dense_rows(tensor) for tensor in (candidate_tokens, candidate_scores, candidate_parents)]
        tree_kernel[(batch,)](
            root_tokens,
            *given,
            *(tokens, parents, depths, mask, first_child, next_sibling),
            root_tokens.stride(0),
            *(tensor.stride(0) for tensor in given),
            C=candidates,
            N=num_draft_tokens,
            STEPS=num_steps,
            LINKS=links,
            BLOCK_C=block,
            BLOCK_N=max(next_power_of_2(num_draft_tokens), 16),
            num_warps=4 if block <= 64 else 8,
            **early_launch(device),
        )
    return tokens, parents, depths, mask, first_child, next_sibling


def verify_greedy(
    tokens: Tensor, parents: Tensor, depths: Tensor, target_tokens: Tensor, num_steps: int
) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`specops.ops.verify_greedy`."""
    batch, nodes = tokens.shape
    lens = torch.empty((batch,), dtype=torch.int32, device=tokens.device)
    index, emitted = (torch.empty((batch, num_steps + 1), dtype=torch.int64, device=tokens.device) for _ in range(2))
    if batch:
        tokens, parents = dense_rows(tokens), dense_rows(parents)
        verify_kernel[(batch,)](
            *(tokens, parents, target_tokens, lens, index, emitted),
            *(tokens.stride(0), parents.stride(0), *target_tokens.stride()),
            N=nodes,
            STEPS=num_steps,
            BLOCK_N=max(next_power_of_2(nodes), 16),
            num_warps=1,
            **early_launch(tokens.device),
        )
    return lens, index, emitted
