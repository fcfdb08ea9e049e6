"""Where two greedy runs part, and whether rounding explains it.

A many-row matrix product rounds differently from a one-row one, so in bf16 or fp16 speculative decoding can choose the other
of two tokens that are almost equally likely. The bound for "almost" is measured, not assumed: :func:`rounding_noise` runs
the target over the same tokens one row at a time and several rows at a time, and takes the largest difference between the
two sets of logits. Both candidates' logits may move by that much, so a gap above twice the noise is a fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from specops.layout import QueryLayout
from specops.metadata import attention_metadata
from specops.spec.request import Request


@dataclass(frozen=True)
class Divergence:
    """The first token at which two runs differ.

    Attributes:
        prompt: index of the request.
        position: index of the token in its answer.
        top2_gap: gap between the target's two best logits there, the smaller of the two runs'; None past an answer's end.
    """

    prompt: int
    position: int
    top2_gap: float | None


def first_divergence(ours: Sequence[Request], plain: Sequence[Request]) -> Divergence | None:
    """Where two runs over the same prompts first emit different tokens; None if nowhere."""
    for index, (a, b) in enumerate(zip(ours, plain, strict=True)):
        if a.tokens == b.tokens:
            continue
        shared = min(len(a.tokens), len(b.tokens))
        position = next((i for i in range(shared) if a.tokens[i] != b.tokens[i]), shared)
        gaps = [run.margins[position] for run in (a, b) if position < len(run.margins)]
        return Divergence(index, position, min(gaps) if gaps else None)
    return None


@torch.no_grad()
def rounding_noise(target: nn.Module, tokens: Sequence[int], rows: int, *, start: int = 1, page_size: int = 16) -> float:
    """Largest difference between logits computed one row and ``rows`` rows at a time, over the same tokens.

    Gives the target new caches: an engine that still runs on it would have to record its graphs again.

    Args:
        target: a target model.
        tokens: ids of a prompt and its answer.
        rows: rows of a verify step, ``num_draft_tokens``.
        start: tokens before this index are history; at least 1.
        page_size: tokens per page.
    """
    model: Any = target
    length = start + (len(tokens) - start) // rows * rows
    if length == start:
        raise ValueError(f"{len(tokens)} tokens from {start} on hold no block of {rows}")
    device = next(target.parameters()).device
    pages = -(-length // page_size)
    model.allocate_caches(pages + 1, page_size)
    table = torch.arange(1, pages + 1, dtype=torch.int32, device=device)[None]
    ids = torch.tensor(tokens[:length], dtype=torch.int64, device=device)

    def logits(first: int, width: int) -> Tensor:
        lens = torch.tensor([first + width], dtype=torch.int32, device=device)
        meta = attention_metadata(table, lens, QueryLayout.uniform(width), page_size)
        result: Tensor = model.compute_logits(model(ids[first : first + width], meta))
        return result.float()

    logits(0, start)
    single = torch.cat([logits(place, 1) for place in range(start, length)])
    blocks = torch.cat([logits(place, rows) for place in range(start, length, rows)])
    return float((single - blocks).abs().max())
