# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""A level of drafting in two launches: see :mod:`specops.ops.beam`.

``top_kernel`` takes the likeliest tokens of chunks of the vocabulary. ``beam_kernel`` is one program a request: it joins the
chunks of each beam entry's row, adds up paths, writes the candidates where they belong, and ranks them for the next beam by
comparing all pairs of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from specops.ops.triton_common import early_launch, next_power_of_2
from specops.ops.triton_round import GONE, begin, chunk_size, joined, largest, number, ordered, top_parts

MAX_CHILDREN = 8


@triton.jit
def beam_kernel(
    part_values,
    part_tokens,
    sums,
    scores,
    beam,
    tree_mask,
    candidate_tokens,
    candidate_scores,
    candidate_parents,
    best_scores,
    best_tokens,
    best_candidates,
    best_parents,
    best_mask,
    stride_token,
    stride_score,
    stride_parent,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNKS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_W: tl.constexpr,
    EARLY: tl.constexpr,
):
    begin(EARLY)
    request = tl.program_id(0).to(tl.int64)
    entry, child = tl.arange(0, BLOCK_R)[:, None], tl.arange(0, BLOCK_K)[None, :]
    real = entry < ROWS
    order, label, total = joined(part_values, part_tokens, sums, request * ROWS + entry, real, K, BLOCK, CHUNKS, True)
    path = tl.full((BLOCK_R, BLOCK_K), float("-inf"), tl.float32)
    token = tl.zeros((BLOCK_R, BLOCK_K), tl.int32)
    for index in tl.static_range(K):
        top, at = largest(order, label, 1)
        order = tl.where(label == at, GONE, order)
        path = tl.where(child == index, number(top) - total, path)
        token = tl.where(child == index, at, token)
    here = real & (child < K)
    flat = entry * K + child
    above = tl.full((BLOCK_R, 1), -1, tl.int64)
    # Candidates of the levels before: K, then K * K of each.
    first = 0
    if WIDTH > 0:
        path += tl.load(scores + request * K + entry, mask=real, other=0.0)
        above = tl.load(beam + request * K + entry, mask=real, other=-1)
        first = K + (WIDTH // K - 1) * K * K
    tl.store(candidate_tokens + request * stride_token + first + flat, token.to(tl.int64), mask=here)
    tl.store(candidate_scores + request * stride_score + first + flat, path, mask=here)
    tl.store(candidate_parents + request * stride_parent + first + flat, above + tl.zeros_like(token), mask=here)
    there = tl.reshape(here, (BLOCK_R * BLOCK_K,))
    place = tl.reshape(flat, (BLOCK_R * BLOCK_K,))
    score = tl.reshape(path, (BLOCK_R * BLOCK_K,))
    name = tl.reshape(token, (BLOCK_R * BLOCK_K,))
    order = ordered(score)
    # By score, then by place.
    ahead = (order[None, :] > order[:, None]) | ((order[None, :] == order[:, None]) & (place[None, :] < place[:, None]))
    rank = tl.sum((ahead & there[None, :]).to(tl.int32), axis=1)
    chosen = there & (rank < K)
    out = request * K + rank
    parent = place // K
    tl.store(best_scores + out, score, mask=chosen)
    tl.store(best_tokens + out, name.to(tl.int64), mask=chosen)
    tl.store(best_candidates + out, (first + place).to(tl.int64), mask=chosen)
    tl.store(best_parents + out, parent.to(tl.int64), mask=chosen)
    column = tl.arange(0, BLOCK_W)[None, :]
    sees = column == WIDTH + rank[:, None]
    if WIDTH > 0:
        line = tree_mask + ((request * K + parent) * WIDTH)[:, None] + column
        sees = sees | tl.load(line, mask=chosen[:, None] & (column < WIDTH), other=0).to(tl.int1)
    tl.store(best_mask + (out * (WIDTH + K))[:, None] + column, sees, mask=chosen[:, None] & (column < WIDTH + K))


def can_expand(topk: int, candidates: Sequence[Tensor]) -> bool:
    """Whether :func:`expand_beam` serves this: all pairs of a level's candidates are compared, rows have no gaps."""
    return topk <= MAX_CHILDREN and all(tensor.stride(1) == 1 for tensor in candidates)


def expand_beam(
    candidate_tokens: Tensor,
    candidate_scores: Tensor,
    candidate_parents: Tensor,
    logits: Tensor,
    topk: int,
    rows: Tensor | None = None,
    scores: Tensor | None = None,
    beam: Tensor | None = None,
    tree_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As the op ``expand_beam``; see :func:`can_expand`."""
    batch, device = candidate_tokens.shape[0], candidate_tokens.device
    width = 0 if tree_mask is None else tree_mask.shape[1]
    tokens, candidates, parents = (torch.empty((batch, topk), dtype=torch.int64, device=device) for _ in range(3))
    best = torch.empty((batch, topk), dtype=torch.float32, device=device)
    mask = torch.empty((batch * topk, width + topk), dtype=torch.bool, device=device)
    if batch:
        number_of_rows, vocab = batch * (topk if width else 1), logits.shape[1]
        block = chunk_size(number_of_rows, vocab, topk)
        past = [None if tensor is None else tensor.contiguous() for tensor in (scores, beam, tree_mask)]
        block_r = next_power_of_2(topk) if width else 1
        beam_kernel[(batch,)](
            *top_parts(logits, topk, True, block, rows),
            *past,
            *(candidate_tokens, candidate_scores, candidate_parents),
            *(best, tokens, candidates, parents, mask),
            *(candidate_tokens.stride(0), candidate_scores.stride(0), candidate_parents.stride(0)),
            K=topk,
            WIDTH=width,
            CHUNKS=triton.cdiv(vocab, block),
            ROWS=topk if width else 1,
            BLOCK_R=block_r,
            BLOCK_K=next_power_of_2(topk),
            BLOCK=next_power_of_2(triton.cdiv(vocab, block) * topk),
            BLOCK_W=next_power_of_2(width + topk),
            num_warps=min(block_r, 8),
            **early_launch(device),
        )
    return best, tokens, candidates, parents, mask
