# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""What follows verification in a round, as Triton kernels: see :mod:`specops.ops.round_end`.

* ``hand_kernel``: one program a row of draft-extend copies the hidden state of its node; the first of a request also finds
  the slots between which the path's K/V moves.
* ``commit_kernel``: one program a request and stretch of the vocabulary copies logits and hidden states; the first also
  writes the rest of the state and the host's tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from specops.ops.triton_common import dense_rows, early_launch, next_power_of_2
from specops.ops.triton_round import begin

# Elements that a program copies at a time.
COPIED = 2048


@triton.jit
def slot_at(page_table, place, columns, moving, PAGE: tl.constexpr):
    """Slot of places of one request, -1 where nothing moves or may be written."""
    column = place // PAGE
    inside = moving & (place >= 0) & (column < columns)
    page = tl.load(page_table + column, mask=inside, other=0).to(tl.int64)
    return tl.where(page > 0, page * PAGE + place % PAGE, -1)


@triton.jit(do_not_specialize=["columns"])
def hand_kernel(
    accept_index,
    accept_tokens,
    best,
    hidden,
    seq_lens,
    page_table,
    tokens,
    states,
    margins,
    source_slots,
    target_slots,
    stride_index,
    stride_token,
    stride_best,
    stride_hidden,
    stride_table,
    columns,
    D: tl.constexpr,
    N: tl.constexpr,
    H: tl.constexpr,
    PAGE: tl.constexpr,
    MOVES: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EARLY: tl.constexpr,
):
    begin(EARLY)
    request, row = tl.program_id(0).to(tl.int64), tl.program_id(1)
    out = request * N + row
    on_path = row < D
    node = tl.maximum(tl.load(accept_index + request * stride_index + row, mask=on_path, other=0), 0)
    source = request * N + node
    for start in tl.static_range(0, H, BLOCK):
        column = start + tl.arange(0, BLOCK)
        state = tl.load(hidden + source * stride_hidden + column, mask=column < H)
        tl.store(states + out * H + column, state, mask=column < H)
    tl.store(tokens + out, tl.load(accept_tokens + request * stride_token + row, mask=on_path, other=0))
    tl.store(margins + out, tl.load(best + source * stride_best) - tl.load(best + source * stride_best + 1))
    if MOVES:
        step = tl.arange(0, BLOCK_D)
        # The request's first program does it.
        there = (step < D) & (row == 0)
        index = tl.load(accept_index + request * stride_index + step, mask=there, other=-1).to(tl.int32)
        moving = (index >= 0) & (index != step)
        prefix = tl.load(seq_lens + request).to(tl.int32) - N
        line = page_table + request * stride_table
        place = request * D + step
        tl.store(source_slots + place, slot_at(line, prefix + index, columns, moving, PAGE), mask=there)
        tl.store(target_slots + place, slot_at(line, prefix + step, columns, moving, PAGE), mask=there)


@triton.jit
def commit_kernel(
    seq_lens,
    root_tokens,
    next_token_logits,
    hidden_states,
    rows,
    committed,
    accept_lens,
    accept_tokens,
    logits,
    hidden,
    scores,
    more_scores,
    packed,
    stride_logits,
    stride_hidden,
    V: tl.constexpr,
    H: tl.constexpr,
    N: tl.constexpr,
    SCORES: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EARLY: tl.constexpr,
):
    begin(EARLY)
    request, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows + request)
    column = chunk * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + request * stride_logits + column, mask=column < V)
    tl.store(next_token_logits + row * V + column, x, mask=column < V)
    x = tl.load(hidden + request * stride_hidden + column, mask=column < H)
    tl.store(hidden_states + row * H + column, x, mask=column < H)
    if chunk == 0:
        length = tl.load(accept_lens + request)
        before = tl.load(committed + request)
        tl.store(seq_lens + row, tl.where(before > 0, before + length, 0))
        tl.store(root_tokens + row, tl.load(accept_tokens + request * N + length - 1))
        line = packed + request * (1 + (1 + SCORES) * N)
        tl.store(line, length)
        own = tl.arange(0, BLOCK_N)
        there = own < N
        token = tl.load(accept_tokens + request * N + own, mask=there, other=0)
        tl.store(line + 1 + own, token.to(tl.int32), mask=there)
        if SCORES > 0:
            score = tl.load(scores + request * N + own, mask=there, other=0.0).to(tl.float32)
            tl.store(line + 1 + N + own, score.to(tl.int32, bitcast=True), mask=there)
        if SCORES > 1:
            score = tl.load(more_scores + request * N + own, mask=there, other=0.0).to(tl.float32)
            tl.store(line + 1 + 2 * N + own, score.to(tl.int32, bitcast=True), mask=there)


def hand_on(
    accept_index: Tensor,
    accept_tokens: Tensor,
    best: Tensor,
    hidden: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    width: int,
    page_size: int,
    moves: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As :func:`specops.ops.round_end.hand_on`."""
    (batch, depth), size, device = accept_index.shape, hidden.shape[1], hidden.device
    tokens = torch.empty((batch, width), dtype=accept_tokens.dtype, device=device)
    states = torch.empty((batch * width, size), dtype=hidden.dtype, device=device)
    margins = torch.empty((batch, width), dtype=best.dtype, device=device)
    slots = [torch.empty((batch * depth if moves else 0,), dtype=accept_index.dtype, device=device) for _ in range(2)]
    if batch:
        given = [dense_rows(tensor) for tensor in (accept_index, accept_tokens, best, hidden)]
        page_table = dense_rows(page_table)
        block = min(next_power_of_2(size), COPIED)
        hand_kernel[(batch, width)](
            *(*given, seq_lens.contiguous(), page_table),
            *(tokens, states, margins, *slots),
            *(*(tensor.stride(0) for tensor in given), page_table.stride(0), page_table.shape[1]),
            D=depth,
            N=width,
            H=size,
            PAGE=page_size,
            MOVES=moves,
            BLOCK=block,
            BLOCK_D=next_power_of_2(depth),
            num_warps=max(min(block // 256, 8), 1),
            **early_launch(device),
        )
    return tokens, states, margins, slots[0], slots[1]


def can_commit(state: Sequence[Tensor], scores: Sequence[Tensor]) -> bool:
    """Whether :func:`commit_round` serves this: state without gaps, and at most two scores."""
    return len(scores) <= 2 and all(tensor.is_contiguous() for tensor in state)


def commit_round(
    seq_lens: Tensor,
    root_tokens: Tensor,
    next_token_logits: Tensor,
    hidden_states: Tensor,
    rows: Tensor,
    committed: Tensor,
    accept_lens: Tensor,
    accept_tokens: Tensor,
    logits: Tensor,
    hidden: Tensor,
    scores: Sequence[Tensor],
) -> Tensor:
    """As :func:`specops.ops.round_end.commit_round`; see :func:`can_commit`."""
    batch, width = accept_tokens.shape
    packed = torch.empty((batch, 1 + (1 + len(scores)) * width), dtype=torch.int32, device=logits.device)
    if batch:
        logits, hidden = dense_rows(logits), dense_rows(hidden)
        longest = max(logits.shape[1], hidden.shape[1])
        given = [tensor.contiguous() for tensor in (rows, committed, accept_lens, accept_tokens)]
        both = [*(score.contiguous() for score in scores), None, None][:2]
        commit_kernel[(batch, triton.cdiv(longest, COPIED))](
            *(seq_lens, root_tokens, next_token_logits, hidden_states),
            *(*given, logits, hidden, *both, packed, logits.stride(0), hidden.stride(0)),
            V=logits.shape[1],
            H=hidden.shape[1],
            N=width,
            SCORES=len(scores),
            BLOCK=COPIED,
            BLOCK_N=next_power_of_2(width),
            num_warps=8,
            **early_launch(logits.device),
        )
    return packed
