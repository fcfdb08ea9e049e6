"""A whole round as one step: draft, verify and draft-extend over state that lives on the device.

The state of every request is a row of :class:`RoundState`; a round takes row numbers and nothing else, so a replay stages a
few integers, copies no logits or hidden states, and returns one small tensor for the host to read. Padding uses a spare
row whose ``seq_len`` is always 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from specops.batch import Field, FieldTable
from specops.compile.draft_extend import DraftExtendStep
from specops.ops.places import take_requests
from specops.ops.round_end import commit_round
from specops.ops.round_end import pack as pack
from specops.spec.draft import DraftStep
from specops.spec.plans import RoundHandles
from specops.spec.verify import DecodeStep, VerifyStep


class RoundState(nn.Module):
    """Per-request state between rounds, as buffers with fixed addresses.

    Args:
        page_table: ``[R + 1, max_pages]`` int32, the device mirror of the page table; its last row stays 0.
        draft_vocab, hidden_size: widths of the draft's logits and hidden states; None for plain decoding.
        dtype: dtype of both.

    Attributes:
        seq_lens: ``[R + 1]`` int32, committed keys.
        root_tokens: ``[R + 1]`` int64, the last token the target chose; its key is not in the cache yet.
        next_token_logits, hidden_states: ``[R + 1, ...]``, what the last draft-extend left.
    """

    page_table: Tensor
    seq_lens: Tensor
    root_tokens: Tensor
    next_token_logits: Tensor
    hidden_states: Tensor

    def __init__(self, page_table: Tensor, draft_vocab: int | None, hidden_size: int | None, dtype: torch.dtype) -> None:
        super().__init__()
        rows, device = page_table.shape[0], page_table.device
        self.register_buffer("page_table", page_table, persistent=False)
        self.register_buffer("seq_lens", torch.zeros(rows, dtype=torch.int32, device=device), persistent=False)
        self.register_buffer("root_tokens", torch.zeros(rows, dtype=torch.int64, device=device), persistent=False)
        for name, width in (("next_token_logits", draft_vocab), ("hidden_states", hidden_size)):
            if width is not None:
                self.register_buffer(name, torch.zeros((rows, width), dtype=dtype, device=device), persistent=False)

    @property
    def spare_row(self) -> int:
        return self.seq_lens.shape[0] - 1

    def join(self, rows: Tensor, lens: Tensor, roots: Tensor, logits: Tensor | None, hidden: Tensor | None) -> None:
        """Write the state of requests after prefill."""
        self.seq_lens[rows] = lens
        self.root_tokens[rows] = roots
        if logits is not None and hidden is not None:
            self.next_token_logits[rows] = logits
            self.hidden_states[rows] = hidden

    def advance(self, rows: Tensor, committed: Tensor, accept_lens: Tensor, roots: Tensor) -> None:
        """Commit what a round accepted; the spare row stays empty."""
        self.seq_lens.index_put_((rows,), torch.where(committed > 0, committed + accept_lens, 0))
        self.root_tokens.index_put_((rows,), roots)


class RoundStep(nn.Module):
    """Draft, verify and draft-extend V2, back to back; sampling if ``verify`` has a sampler."""

    def __init__(self, draft: DraftStep, verify: VerifyStep, extend: DraftExtendStep, state: RoundState) -> None:
        super().__init__()
        self.draft, self.verify, self.extend, self.state = draft, verify, extend, state
        self.width = extend.tokens_per_request

    def forward(self, rows: Tensor, plan: RoundHandles | None = None) -> tuple[Tensor]:
        """
        Args:
            rows: ``[B]`` int64 rows of the state.
            plan: as of planned backends.

        Returns:
            ``[B, 1 + 2 n]`` int32 for the host, ``[B, 1 + 3 n]`` from a sampling step: see :func:`pack`.
        """
        state, width = self.state, self.width
        table, committed, lens, roots = take_requests(state.page_table, state.seq_lens, state.root_tokens, rows, grow=width)
        tokens, parents, depths, mask = self.draft(
            roots, state.next_token_logits, state.hidden_states[rows], committed, table, plan, rows
        )
        accept_lens, accept_tokens, hidden, *scores = self.verify(
            tokens, parents, depths, mask.reshape(-1, width, width), lens, table, rows, plan
        )
        handle = None if plan is None else plan.extend
        handed_on = hidden.reshape(-1, width, hidden.shape[1])
        logits, carried = self.extend(accept_tokens, handed_on, lens, accept_lens, table, handle)
        packed = commit_round(
            *(state.seq_lens, state.root_tokens, state.next_token_logits, state.hidden_states),
            rows=rows,
            committed=committed,
            accept_lens=accept_lens,
            accept_tokens=accept_tokens,
            logits=logits,
            hidden=carried,
            scores=scores,
        )
        return (packed,)


class DecodeRound(nn.Module):
    """One step of plain decoding over the same state."""

    def __init__(self, decode: DecodeStep, state: RoundState) -> None:
        super().__init__()
        self.decode, self.state = decode, state

    def forward(self, rows: Tensor, plan: RoundHandles | None = None) -> tuple[Tensor]:
        """As :class:`RoundStep`, with ``n = 1``."""
        state = self.state
        table, committed, lens, roots = take_requests(state.page_table, state.seq_lens, state.root_tokens, rows, grow=1)
        tokens, *scores = self.decode(roots[:, None], lens, table, rows, plan)
        ones = torch.ones_like(committed)
        state.advance(rows, committed, ones, tokens)
        return (pack(ones, tokens[:, None], *(score[:, None] for score in scores)),)


def round_fields(spare_row: int) -> FieldTable:
    """The one field of a round: rows, padded with the spare one."""
    return FieldTable((Field("rows", "request", (), torch.int64, pad=spare_row),), 1)


class RoundResult(NamedTuple):
    """What the host reads of a round: entries behind a request's length are filler. ``logprobs`` of sampling steps only."""

    lens: list[int]
    tokens: list[list[int]]
    margins: list[list[float]]
    logprobs: list[list[float]] | None

    def only(self, places: Sequence[int]) -> RoundResult:
        """The result of some of the requests."""
        lens, tokens, margins, logprobs = (None if part is None else [part[place] for place in places] for part in self)
        return RoundResult(lens, tokens, margins, logprobs)  # type: ignore[arg-type]


def unpack(packed: Tensor, width: int) -> RoundResult:
    """A packed result of ``width`` tokens a request, on the host."""
    host = packed.cpu()
    scores, ends = host.view(torch.float32), (1 + width, 1 + 2 * width)
    logprobs = scores[:, ends[1] :].tolist() if host.shape[1] > ends[1] else None
    return RoundResult(host[:, 0].tolist(), host[:, 1 : ends[0]].tolist(), scores[:, ends[0] : ends[1]].tolist(), logprobs)
