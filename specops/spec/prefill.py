"""Prefill: whole prompts through target and draft, packed, in chunks of bounded size.

Target and draft share page tables, so a token's place is the same in both. The draft reads pairs: at place ``i`` the
target's hidden state of token ``i`` with the embedding of token ``i + 1``; the last pair uses the token the target just
chose. Runs without graphs: the number of rows changes every time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specops.layout import QueryLayout
from specops.metadata import AttentionMetadata, attention_metadata
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


@torch.no_grad()
def prefill(
    target: nn.Module,
    draft: nn.Module | None,
    prompts: Sequence[Sequence[int]],
    page_table: Tensor,
    page_size: int,
    chunk_tokens: int = 2048,
    aux_layers: tuple[int, ...] = (),
    choose: Choose = choose_next,
) -> PrefillOutput:
    """Run prompts through the target and, shifted by one, through the draft.

    Args:
        target: a model with ``forward(input_ids, meta)`` and ``compute_logits``.
        draft: a draft model, or None.
        prompts: ``B`` token id lists, none empty.
        page_table: ``[B, max_pages]`` int32 with pages for every prompt reserved.
        page_size: tokens per page.
        chunk_tokens: most rows of one forward; bounds activation memory, not the prompt's length.
        aux_layers: the target's residual streams the draft reads, if not its last hidden state.
        choose: called with the target's logits after the prompts ``[B, V]`` and their lengths ``[B]`` int32; returns
            tokens, margins and, perhaps, log-probabilities. The argmax when not given.
    """
    device = page_table.device
    last: dict[int, tuple[Tensor, Tensor]] = {}
    done = [0] * len(prompts)
    while any(start < len(prompt) for start, prompt in zip(done, prompts, strict=True)):
        part = _next_chunk(prompts, done, chunk_tokens)
        meta, ids = _packed(prompts, part, page_table, page_size, device)
        hidden, handed_on = run_target(target, ids, meta, aux_layers)
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
            _draft_rows(draft, [prompt[1:] for prompt in prompts], ready_part, rows, page_table, page_size)
    order = range(len(prompts))
    lens = torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int32, device=device)
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
    tokens: Sequence[Sequence[int]],
    part: dict[int, tuple[int, int]],
    page_table: Tensor,
    page_size: int,
    device: torch.device,
) -> tuple[AttentionMetadata, Tensor]:
    """Metadata and ids of the rows ``part`` names."""
    widths = [end - start for start, end in part.values()]
    starts = torch.tensor([0, *widths], dtype=torch.int32).cumsum(0).to(torch.int32).to(device)
    ends = torch.tensor([end for _, end in part.values()], dtype=torch.int32, device=device)
    ids = [token for request, (start, end) in part.items() for token in tokens[request][start:end]]
    table = page_table[torch.tensor(list(part), device=device)]
    meta = attention_metadata(table, ends, QueryLayout.packed(starts, max(widths)), page_size, num_tokens=len(ids))
    return meta, torch.tensor(ids, dtype=torch.int64, device=device)


def _draft_rows(
    draft: nn.Module,
    shifted: Sequence[Sequence[int]],
    part: dict[int, tuple[int, int]],
    rows: dict[int, Tensor],
    page_table: Tensor,
    page_size: int,
) -> None:
    """Fill the draft's cache for the places of ``part``; nothing to return, since no row of it is a prompt's last."""
    part = {request: places for request, places in part.items() if places[1] > places[0]}
    if part:
        meta, ids = _packed(shifted, part, page_table, page_size, page_table.device)
        draft(ids, torch.cat([rows[request] for request in part]), meta)
