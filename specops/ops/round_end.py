"""What follows verification in a round: rows handed on to draft-extend, and the requests' state written back.

On a GPU each is one launch (:mod:`specops.ops.triton_round_end`) in place of the three or four that inductor makes of it.
Hidden states are gathered there and not inside the norm that reads them, which inductor would give to a handful of programs.
Elsewhere it is plain torch, which a CPU compiles into the round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specops.ops import contracts
from specops.ops.places import slots_of


def hand_on(
    accept_index: Tensor,
    accept_tokens: Tensor,
    best: Tensor,
    hidden: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    *,
    width: int,
    page_size: int,
    moves: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The accepted path of each request, one row a node, with filler behind; and where its K/V has to move.

    Args:
        accept_index: ``[B, d]`` int64 nodes of the path, -1 behind its end, as :func:`specops.ops.verify_greedy` returns it.
        accept_tokens: ``[B, d]`` int64 emitted tokens, 0 behind their end.
        best: ``[B * n, 2]`` float32, the two largest logits after each node.
        hidden: ``[B * n, H]``, hidden states of the nodes.
        seq_lens: ``[B]`` int32, keys including the nodes.
        page_table: ``[B, max_pages]`` int32.
        width: ``n``, nodes of a request.
        page_size: tokens per page.
        moves: whether slots are wanted; a chain's path stands where it should.

    Returns:
        tokens: ``[B, n]`` int64, the emitted ones, then 0.
        hidden: ``[B * n, H]``, those of the path, then those of the root.
        margins: ``[B, n]`` float32, gaps between the two logits at the same nodes.
        source_slots, target_slots: ``[B * d]`` int64, from where to where the path's K/V goes; -1 for what stays. Empty if
            not asked for.
    """
    arguments = (accept_index, accept_tokens, best, hidden, seq_lens, page_table, width, page_size, moves)
    if contracts.through_op(hidden):
        result: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] = torch.ops.specops.hand_on(*arguments)
        return result
    return _hand_on(*arguments)


def fit(path: Tensor, width: int) -> Tensor:
    """``path`` ``[B, d]`` as ``[B, width]``: columns behind it are zero; a path is never longer than ``width``."""
    return torch.nn.functional.pad(path, (0, width - path.shape[1])) if path.shape[1] < width else path[:, :width]


def _hand_on(
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
    batch = accept_index.shape[0]
    places = fit(accept_index.clamp(min=0), width)
    states = hidden.reshape(batch, width, hidden.shape[1]).gather(1, places[:, :, None].expand(-1, -1, hidden.shape[1]))
    margins = (best[:, 0] - best[:, 1]).reshape(batch, width).gather(1, places)
    slots = _moving_slots(accept_index, seq_lens, page_table, page_size, width) if moves else (places.new_empty(0),) * 2
    return fit(accept_tokens, width), states.flatten(0, 1), margins, *slots


def _moving_slots(
    accept_index: Tensor, seq_lens: Tensor, page_table: Tensor, page_size: int, width: int
) -> tuple[Tensor, Tensor]:
    batch, depth = accept_index.shape
    prefix = (seq_lens.long() - width)[:, None]
    place = torch.arange(depth, device=accept_index.device).expand(batch, depth)
    moving = (accept_index >= 0) & (accept_index != place)
    request = torch.arange(batch, device=accept_index.device)[:, None].expand(batch, depth).reshape(-1)
    source = torch.where(moving, prefix + accept_index, -1).reshape(-1)
    target = torch.where(moving, prefix + place, -1).reshape(-1)
    return slots_of(source, request, page_table, page_size), slots_of(target, request, page_table, page_size)


def commit_round(
    seq_lens: Tensor,
    root_tokens: Tensor,
    next_token_logits: Tensor,
    hidden_states: Tensor,
    *,
    rows: Tensor,
    committed: Tensor,
    accept_lens: Tensor,
    accept_tokens: Tensor,
    logits: Tensor,
    hidden: Tensor,
    scores: Sequence[Tensor],
) -> Tensor:
    """Write what a round left into the requests' rows of the state, and what the host reads into one tensor.

    Args:
        seq_lens, root_tokens, next_token_logits, hidden_states: ``[R]`` int32, ``[R]`` int64, ``[R, V]`` and ``[R, H]``,
            written at ``rows``: keys committed now, the last token emitted, and the rows of ``logits`` and ``hidden``.
        rows: ``[B]`` int64. Several padded requests may name one row.
        committed: ``[B]`` int32, keys so far; a request without any is padding and keeps none.
        accept_lens: ``[B]`` int32 tokens emitted, at least 1.
        accept_tokens: ``[B, n]`` int64.
        logits, hidden: ``[B, V]`` and ``[B, H]``.
        scores: at most two, ``[B, n]`` float32 each.

    Returns:
        As :func:`pack`.
    """
    arguments = (seq_lens, root_tokens, next_token_logits, hidden_states, rows, committed, accept_lens, accept_tokens)
    if contracts.through_op(logits):
        packed: Tensor = torch.ops.specops.commit_round(*arguments, logits, hidden, list(scores))
        return packed
    return _commit_round(*arguments, logits, hidden, scores)


def pack(accept_lens: Tensor, tokens: Tensor, *scores: Tensor) -> Tensor:
    """``[B, 1 + (1 + s) n]`` int32: length, tokens, and the bits of ``s`` float32 scores ``[B, n]`` each: margins, then
    log-probabilities if there are any. One copy to the host instead of three or four."""
    bits = [score.float().view(torch.int32) for score in scores]
    return torch.cat((accept_lens[:, None], tokens.to(torch.int32), *bits), dim=1)


def _commit_round(
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
    next_token_logits.index_put_((rows,), logits)
    hidden_states.index_put_((rows,), hidden)
    seq_lens.index_put_((rows,), torch.where(committed > 0, committed + accept_lens, 0))
    root_tokens.index_put_((rows,), accept_tokens.gather(1, accept_lens.long()[:, None] - 1)[:, 0])
    return pack(accept_lens, accept_tokens, *scores)


def _own_hand_on(*arguments: Tensor | int | bool) -> tuple[Tensor, ...]:
    # An op's results share memory neither with its arguments nor among themselves.
    return tuple(part.clone(memory_format=torch.contiguous_format) for part in _hand_on(*arguments))  # type: ignore[arg-type]


def _can_commit(kernels: Any, *args: Any) -> bool:
    return bool(kernels.can_commit(args[:4], args[-1]))


for _name, _schema, _fake, _kernel, _serves in (
    ("hand_on", contracts.HAND_ON_SCHEMA, contracts.fake_hand_on, _own_hand_on, None),
    ("commit_round", contracts.COMMIT_ROUND_SCHEMA, contracts.fake_commit_round, _commit_round, _can_commit),
):
    _cuda_kernel = contracts.with_triton(_kernel, "triton_round_end", _name, _serves)
    contracts.define(_name, _schema, _fake, {"CompositeExplicitAutograd": _kernel, "CUDA": _cuda_kernel})
