"""Prefill: whole prompts through target and draft, packed, in chunks of bounded size.

Target and draft share page tables, so a token's place is the same in both. The draft reads pairs: at place ``i`` the
target's hidden state of token ``i`` with the embedding of token ``i + 1``; the last pair uses the token the target just
chose. Prompts that fit one chunk take one pass of each model (:meth:`Forwards.whole`). Of longer ones the draft runs its
last pair alone, once every chunk is through the target.

On a GPU the two forwards are compiled once for any number of rows (:class:`Forwards`). Whole greedy prefills are replays of
CUDA graphs there, over the same compiled forwards: :mod:`specops.spec.prefill_graphs`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor, nn

from specops.compile.compiled import CompiledStep
from specops.layout import QueryLayout
from specops.metadata import attention_metadata
from specops.spec.verify import choose_next, run_target

Choose = Callable[[Tensor, Tensor], tuple[Tensor, ...]]


@dataclass(frozen=True, eq=False)
class PrefillOutput:
    """State of ``B`` requests after their prompts.

    Attributes:
        next_tokens: ``[B]`` int64, the target's choice after each prompt.
        margins: ``[B]`` float32, gap between its two best logits.
        logprobs: ``[B]`` float32, the choices' log-probabilities, if ``choose`` gives them.
        next_token_logits: ``[B, V]``, the draft's logits after that token; None without a draft.
        hidden_states: ``[B, H]``, the draft's hidden state that gave them; None without a draft.
    """

    next_tokens: Tensor
    margins: Tensor
    logprobs: Tensor | None
    next_token_logits: Tensor | None
    hidden_states: Tensor | None


class TargetRows(nn.Module):
    """The target over packed rows; rows behind the last request are filler that writes nothing."""

    def __init__(self, target: nn.Module, page_size: int, max_query_len: int, aux_layers: tuple[int, ...]) -> None:
        super().__init__()
        self.target, self.page_size, self.max_query_len, self.aux_layers = target, page_size, max_query_len, aux_layers

    def forward(self, input_ids: Tensor, query_start: Tensor, seq_lens: Tensor, page_table: Tensor) -> tuple[Tensor, Tensor]:
        """``[T]`` ids to ``[T, H]`` hidden states for the LM head, and what the draft gets."""
        layout = QueryLayout.packed(query_start, self.max_query_len)
        meta = attention_metadata(page_table, seq_lens, layout, self.page_size, num_tokens=input_ids.shape[0])
        return run_target(self.target, input_ids, meta, self.aux_layers)


class DraftRows(nn.Module):
    """The draft over packed rows and the target's hidden states ``[T, H]``; fills its cache."""

    def __init__(self, draft: nn.Module, page_size: int, max_query_len: int) -> None:
        super().__init__()
        self.draft, self.page_size, self.max_query_len = draft, page_size, max_query_len

    def forward(
        self, input_ids: Tensor, hidden_states: Tensor, query_start: Tensor, seq_lens: Tensor, page_table: Tensor
    ) -> tuple[Tensor]:
        layout = QueryLayout.packed(query_start, self.max_query_len)
        meta = attention_metadata(page_table, seq_lens, layout, self.page_size, num_tokens=input_ids.shape[0])
        return (self.draft(input_ids, hidden_states, meta),)


class Forwards:
    """Prefill's two forwards.

    Args:
        target, draft: the models; caches allocated.
        page_size: tokens per page.
        chunk_tokens: most rows of one forward; bounds activation memory, not the prompt's length.
        aux_layers: the target's residual streams the draft reads, if not its last hidden state.
        compiled: compile both, for any number of rows and of requests.
    """

    # Row counts are padded to a multiple of this, so that kernels specialised on divisibility are compiled once.
    ROWS = 16

    def __init__(
        self,
        target: nn.Module,
        draft: nn.Module | None,
        page_size: int,
        *,
        chunk_tokens: int = 2048,
        aux_layers: tuple[int, ...] = (),
        compiled: bool = False,
    ) -> None:
        self._models = target, draft
        chunk_tokens = -(-chunk_tokens // self.ROWS) * self.ROWS if compiled else chunk_tokens
        self.chunk_tokens, self.compiled = chunk_tokens, compiled
        steps: list[nn.Module] = [TargetRows(target, page_size, chunk_tokens, aux_layers)]
        if draft is not None:
            steps.append(DraftRows(draft, page_size, chunk_tokens))
        self._steps = [CompiledStep(step, counted_by="seq_lens") if compiled else step for step in steps]
        self._device = next(target.parameters()).device

    def target(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """``[T, H]`` hidden states for the LM head, and what the draft gets."""
        hidden, handed_on = self._steps[0](**self._marked(rows))
        return hidden, handed_on

    def draft(self, rows: Rows, hidden_states: Tensor) -> Tensor:
        """``[T, H]`` hidden states of the draft."""
        missing = rows.input_ids.shape[0] - hidden_states.shape[0]
        if missing:
            hidden_states = nn.functional.pad(hidden_states, (0, 0, 0, missing))
        if self.compiled:
            torch._dynamo.mark_dynamic(hidden_states, 0)
        (carried,) = self._steps[1](hidden_states=hidden_states, **self._marked(rows))
        return carried

    def whole(self, rows: Rows, choose: Choose) -> PrefillOutput:
        """Whole prompts, one pass of each model, without a word to the host.

        Args:
            rows: of all ``B`` requests from their first token on. Rows behind the last request write nothing; neither do
                requests without rows, whose part of the output is finite and means nothing.
            choose: as for :func:`prefill`.
        """
        target, draft = self._models
        num_rows = rows.input_ids.shape[0]
        hidden, handed_on = self.target(rows)
        # Numbers are filled in, never wrapped into tensors: those would come from the host, which no graph allows.
        idle = rows.query_start.diff() == 0
        last = (rows.query_start[1:].long() - 1).clamp(min=0)
        # What is in a filler row, NaN perhaps, must not reach the state of padded requests.
        chosen_from = hidden[last].masked_fill(idle[:, None], 0)
        next_tokens, margins, *rest = choose(target.compute_logits(chosen_from), rows.seq_lens)  # type: ignore[operator]
        logprobs = rest[0] if rest else None
        if draft is None:
            return PrefillOutput(next_tokens, margins, logprobs, None, None)
        # One place more than rows: it takes the tokens of requests without any.
        following = nn.functional.pad(rows.input_ids[1:], (0, 2))
        following.index_put_((last.masked_fill(idle, num_rows),), next_tokens)
        carried = self.draft(replace(rows, input_ids=following[:num_rows].clone()), handed_on)
        carried = carried[last].masked_fill(idle[:, None], 0)
        return PrefillOutput(next_tokens, margins, logprobs, draft.compute_logits(carried), carried)  # type: ignore[operator]

    @torch.no_grad()
    def warm_up(self, max_pages: int, max_requests: int) -> None:
        """Compile for several requests, if there may be, and for one by the same code; on rows that write no page."""
        if not self.compiled:
            return
        for requests in range(min(max_requests, 2), 0, -1):
            ends = torch.zeros(requests, dtype=torch.int32, device=self._device)
            starts = torch.arange(requests + 1, dtype=torch.int32, device=self._device)
            table = torch.zeros((requests, max_pages), dtype=torch.int32, device=self._device)
            ids = torch.zeros(2 * self.ROWS, dtype=torch.int64, device=self._device)
            self.whole(Rows(ids, starts, ends, table), choose_next)

    def _marked(self, rows: Rows) -> dict[str, Tensor]:
        if self.compiled:
            torch._dynamo.mark_dynamic(rows.input_ids, 0)
            torch._dynamo.mark_static(rows.page_table, 1)
            if rows.seq_lens.shape[0] > 1:
                for tensor in (rows.query_start, rows.seq_lens, rows.page_table):
                    torch._dynamo.mark_dynamic(tensor, 0)
        return {
            "input_ids": rows.input_ids,
            "query_start": rows.query_start,
            "seq_lens": rows.seq_lens,
            "page_table": rows.page_table,
        }


@dataclass(frozen=True, eq=False)
class Rows:
    """Packed rows of one forward, as tensors."""

    input_ids: Tensor
    query_start: Tensor
    seq_lens: Tensor
    page_table: Tensor


@torch.no_grad()
def prefill(
    target: nn.Module,
    draft: nn.Module | None,
    prompts: Sequence[Sequence[int]],
    page_table: Tensor,
    page_size: int,
    forwards: Forwards,
    choose: Choose = choose_next,
) -> PrefillOutput:
    """Run prompts through the target and, shifted by one, through the draft.

    Args:
        target: a model with ``forward(input_ids, meta)`` and ``compute_logits``.
        draft: a draft model, or None.
        prompts: ``B`` token id lists, none empty.
        page_table: ``[B, max_pages]`` int32 with pages for every prompt reserved.
        page_size: tokens per page.
        forwards: of the same models.
        choose: called with the target's logits after the prompts ``[B, V]`` and their lengths ``[B]`` int32; returns
            tokens, margins and, perhaps, log-probabilities. The argmax when not given.
    """
    lengths = [len(prompt) for prompt in prompts]
    if sum(lengths) <= forwards.chunk_tokens:
        part = {request: (0, length) for request, length in enumerate(lengths)}
        return forwards.whole(_packed(prompts, part, page_table, forwards), choose)
    device = page_table.device
    last: dict[int, tuple[Tensor, Tensor]] = {}
    done = [0] * len(prompts)
    while any(start < len(prompt) for start, prompt in zip(done, prompts, strict=True)):
        part = _next_chunk(prompts, done, forwards.chunk_tokens)
        hidden, handed_on = forwards.target(_packed(prompts, part, page_table, forwards))
        offset = 0
        ready_part: dict[int, tuple[int, int]] = {}
        rows: dict[int, Tensor] = {}
        for request, (start, end) in part.items():
            # A row's partner is the next token, which for a prompt's last row is not chosen yet: that row waits.
            ready = min(end, len(prompts[request]) - 1)
            ready_part[request] = (start, ready)
            rows[request] = handed_on[offset : offset + ready - start]
            offset += end - start
            done[request] = end
            last[request] = (hidden[offset - 1], handed_on[offset - 1])
        if draft is not None:
            _draft_rows([prompt[1:] for prompt in prompts], ready_part, rows, page_table, forwards)
    order = range(len(prompts))
    lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    logits = target.compute_logits(torch.stack([last[request][0] for request in order]))  # type: ignore[operator]
    next_tokens, margins, *rest = choose(logits, lens)
    logprobs = rest[0] if rest else None
    if draft is None:
        return PrefillOutput(next_tokens, margins, logprobs, None, None)
    meta = attention_metadata(page_table, lens, QueryLayout.uniform(1), page_size)
    hidden = draft(next_tokens, torch.stack([last[request][1] for request in order]), meta)
    return PrefillOutput(next_tokens, margins, logprobs, draft.compute_logits(hidden), hidden)  # type: ignore[operator]


def _next_chunk(prompts: Sequence[Sequence[int]], done: Sequence[int], limit: int) -> dict[int, tuple[int, int]]:
    """Places each request runs next, at most ``limit`` rows in all."""
    part: dict[int, tuple[int, int]] = {}
    room = limit
    for request, (prompt, start) in enumerate(zip(prompts, done, strict=True)):
        end = min(len(prompt), start + room)
        if end > start:
            part[request] = (start, end)
            room -= end - start
    return part


def _packed(
    tokens: Sequence[Sequence[int]], part: dict[int, tuple[int, int]], page_table: Tensor, forwards: Forwards
) -> Rows:
    """The rows that ``part`` names, padded for compiled forwards."""
    device = page_table.device
    ids = [token for request, (start, end) in part.items() for token in tokens[request][start:end]]
    if forwards.compiled:
        ids += [0] * (-len(ids) % forwards.ROWS)
    starts = [0, *accumulate(end - start for start, end in part.values())]
    ends = [end for _, end in part.values()]
    # One copy to the device for all of them.
    numbers = torch.tensor([*starts, *ends, *part, *ids], dtype=torch.int32, device=device)
    split: tuple[Tensor, ...] = torch.split(numbers, [len(starts), len(ends), len(ends), len(ids)])  # type: ignore[no-untyped-call]
    return Rows(split[3].long(), split[0].clone(), split[1].clone(), page_table[split[2].long()])


def _draft_rows(
    shifted: Sequence[Sequence[int]],
    part: dict[int, tuple[int, int]],
    rows: dict[int, Tensor],
    page_table: Tensor,
    forwards: Forwards,
) -> None:
    """Fill the draft's cache for the places of ``part``; nothing to return, since no row of it is a prompt's last."""
    part = {request: places for request, places in part.items() if places[1] > places[0]}
    if part:
        hidden = torch.cat([rows[request] for request in part])
        forwards.draft(_packed(shifted, part, page_table, forwards), hidden)
