# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""The small steps of a decoding round, one launch each: likeliest tokens, the draft tree, greedy verification.

As torch calls each of them is a dozen launches and more, which together took as long as ten layers of a small model. A tree
has at most a few dozen candidates, so one program a request holds it in registers, and gathers are sums over comparisons
of all pairs.

* ``top_kernel``: one program a row and chunk of the vocabulary takes the chunk's ``k`` largest, one maximum after another;
  ``join_kernel`` takes those of the chunks. A short vocabulary is one chunk and one launch.
* ``tree_kernel``: candidates are ranked by score, then by place; the kept ones' nodes are numbered in order.
* ``verify_kernel``: the target's choices are followed down the tree.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specops.ops.triton_common import dense_rows, early_launch, next_power_of_2

# Vocabulary entries of one program, entries up to which there is one program a row, and the most entries asked for.
CHUNK = 4096
ONE_CHUNK = 8192
MAX_TOP = 16
# Candidates of a tree: comparisons of all pairs are held in registers.
MAX_CANDIDATES = 128
FAR = tl.constexpr(2**31 - 1)


@triton.jit
def begin(EARLY: tl.constexpr):
    """Let the next launch start, and wait for the one before: nothing may be read earlier."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def largest(x, label, alive, last):
    """The largest of the entries that are alive, the least label among equals, and who is alive without it."""
    top = tl.max(tl.where(alive, x, float("-inf")), axis=0)
    at = tl.min(tl.where(alive & (x == top), label, FAR), axis=0)
    # Not-a-number equals nothing; what is found then stays a token.
    at = tl.minimum(at, last)
    return top, at, alive & (label != at)


@triton.jit
def top_kernel(
    logits,
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
    alive = label < V
    x = tl.load(logits + row * stride + label, mask=alive, other=float("-inf")).to(tl.float32)
    place = (row * CHUNKS + chunk) * K
    subtract = 0.0
    if LOGPROBS:
        top = tl.max(x, axis=0)
        total = tl.sum(tl.exp(x - top), axis=0)
        if CHUNKS == 1:
            subtract = top + tl.log(total)
        else:
            tl.store(sums + row * CHUNKS + chunk, total)
    for index in tl.static_range(K):
        top, at, alive = largest(x, label, alive, V - 1)
        tl.store(values + place + index, top - subtract)
        tl.store(tokens + place + index, at.to(tokens.dtype.element_ty))


@triton.jit
def join_kernel(
    part_values,
    part_tokens,
    sums,
    values,
    tokens,
    V: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    LOGPROBS: tl.constexpr,
    EARLY: tl.constexpr,
):
    begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    entry = tl.arange(0, BLOCK)
    alive = entry < CHUNKS * K
    x = tl.load(part_values + row * CHUNKS * K + entry, mask=alive, other=float("-inf"))
    label = tl.load(part_tokens + row * CHUNKS * K + entry, mask=alive, other=FAR)
    subtract = 0.0
    if LOGPROBS:
        # A chunk's sum is relative to its largest, which is its first entry.
        first = alive & (entry % K == 0)
        total = tl.load(sums + row * CHUNKS + entry // K, mask=first, other=0.0)
        top = tl.max(x, axis=0)
        subtract = top + tl.log(tl.sum(tl.where(first, total * tl.exp(x - top), 0.0), axis=0))
    for index in tl.static_range(K):
        top, at, alive = largest(x, label, alive, V - 1)
        tl.store(values + row * K + index, top - subtract)
        tl.store(tokens + row * K + index, at.to(tl.int64))


@triton.jit
def at_index(x, index, own):
    """``x[index]`` of vectors, by comparing all pairs; ``own`` is ``arange``."""
    return tl.sum(tl.where(index[:, None] == own[None, :], x[None, :], 0), axis=1)


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
    node = tl.sum((kept[None, :] & (own[None, :] <= own[:, None])).to(tl.int32), axis=1)
    parent = tl.where(above < 0, 0, at_index(node, above, own))
    place = request * N
    tl.store(tokens + place + node, token, mask=kept)
    tl.store(parents + place + node, parent.to(tl.int64), mask=kept)
    column = tl.arange(0, BLOCK_N)
    sees = (column[None, :] == 0) | (column[None, :] == node[:, None])
    depth = tl.full((BLOCK_C,), 1, tl.int32)
    up = above
    for _ in tl.static_range(STEPS - 1):
        found = up >= 0
        sees = sees | (found[:, None] & (column[None, :] == at_index(node, up, own)[:, None]))
        depth += found.to(tl.int32)
        up = tl.where(found, at_index(above, up, own), -1)
    tl.store(depths + place + node, depth.to(tl.int64), mask=kept)
    rows = tree_mask + ((place + node) * N)[:, None] + column[None, :]
    tl.store(rows, sees, mask=kept[:, None] & (column < N)[None, :])
    sibling = kept[None, :] & (parent[None, :] == parent[:, None]) & (node[None, :] > node[:, None])
    after = tl.min(tl.where(sibling, node[None, :], FAR), axis=1)
    tl.store(next_sibling + place + node, tl.where(after == FAR, -1, after).to(tl.int64), mask=kept)
    child = tl.min(tl.where(kept[None, :] & (parent[None, :] == column[:, None]), node[None, :], FAR), axis=1)
    tl.store(first_child + place + column, tl.where(child == FAR, -1, child).to(tl.int64), mask=column < N)
    # The root.
    tl.store(tokens + place, tl.load(roots + request * stride_root))
    tl.store(parents + place, tl.full((), -1, tl.int64))
    tl.store(depths + place, tl.full((), 0, tl.int64))
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
    target = tl.load(target_tokens + request * stride_target + own, mask=there, other=-1)
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


def top_tokens(logits: Tensor, k: int, logprobs: bool) -> tuple[Tensor, Tensor]:
    """As :func:`specops.ops.top_tokens`; see :func:`can_rank`."""
    rows, vocab = logits.shape
    values = torch.empty((rows, k), dtype=torch.float32, device=logits.device)
    tokens = torch.empty((rows, k), dtype=torch.int64, device=logits.device)
    if rows == 0:
        return values, tokens
    logits = dense_rows(logits)
    block = next_power_of_2(vocab) if vocab <= ONE_CHUNK else CHUNK
    chunks = triton.cdiv(vocab, block)
    shared: dict[str, Any] = {"V": vocab, "K": k, "CHUNKS": chunks, "LOGPROBS": logprobs, **early_launch(logits.device)}
    warps = max(min(block // 512, 8), 1)
    if chunks == 1:
        top_kernel[(rows, 1)](logits, values, tokens, None, logits.stride(0), BLOCK=block, num_warps=warps, **shared)
        return values, tokens
    part_values = torch.empty((rows, chunks, k), dtype=torch.float32, device=logits.device)
    part_tokens = torch.empty((rows, chunks, k), dtype=torch.int32, device=logits.device)
    sums = torch.empty((rows, chunks), dtype=torch.float32, device=logits.device)
    top_kernel[(rows, chunks)](
        logits, part_values, part_tokens, sums, logits.stride(0), BLOCK=block, num_warps=warps, **shared
    )
    joined = next_power_of_2(chunks * k)
    join_kernel[(rows,)](part_values, part_tokens, sums, values, tokens, BLOCK=max(joined, 32), num_warps=1, **shared)
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As :func:`specops.ops.build_tree`, for at most ``MAX_CANDIDATES`` candidates."""
    batch, candidates = candidate_tokens.shape
    device = root_tokens.device
    tokens, parents, depths, first_child, next_sibling = (
        torch.empty((batch, num_draft_tokens), dtype=torch.int64, device=device) for _ in range(5)
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
        tokens, parents, target_tokens = dense_rows(tokens), dense_rows(parents), dense_rows(target_tokens)
        verify_kernel[(batch,)](
            *(tokens, parents, target_tokens, lens, index, emitted),
            *(tokens.stride(0), parents.stride(0), target_tokens.stride(0)),
            N=nodes,
            STEPS=num_steps,
            BLOCK_N=max(next_power_of_2(nodes), 16),
            num_warps=1,
            **early_launch(tokens.device),
        )
    return lens, index, emitted
