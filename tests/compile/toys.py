"""A tiny draft model and batches for the runner's tests."""

from __future__ import annotations

from typing import Any

import torch

from specops.batch import DraftExtendBatch
from specops.compile import DraftExtendRunner
from specops.models.config import ModelConfig
from specops.models.eagle import EagleConfig, EagleHead

HIDDEN, VOCAB, PAGE, MAX_PAGES, WIDTH = 32, 64, 4, 16, 6


def tiny_draft(num_pages: int = 80, device: str = "cpu", dtype: torch.dtype = torch.float32, **options: Any) -> EagleHead:
    """An EAGLE head with 8 query and 2 KV heads and caches of ``num_pages`` pages of 4."""
    torch.manual_seed(3)
    config = ModelConfig(VOCAB, HIDDEN, 48, 1, 8, 2, 16, 256, **options)
    # The head shares these with its target and doesn't move them, so they are made where they are used.
    embedding = torch.nn.Embedding(VOCAB, HIDDEN).to(device, dtype)
    lm_head = torch.nn.Linear(HIDDEN, VOCAB, bias=False).to(device, dtype)
    head = EagleHead(EagleConfig.for_target(config), embedding, lm_head.weight)
    head = head.to(device, dtype).eval().requires_grad_(False)
    head.allocate_caches(num_pages, PAGE)
    return head


def batch_of(
    seq_lens: list[int], accept_lens: list[int], device: str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0
) -> DraftExtendBatch:
    """Random rows for requests of the given lengths; pages are handed out in shuffled order, page 0 to nobody."""
    generator = torch.Generator().manual_seed(seed)
    count = len(seq_lens)
    order = torch.randperm(count * MAX_PAGES, generator=generator) + 1
    table = torch.zeros(count, MAX_PAGES, dtype=torch.int32)
    for request, seq_len in enumerate(seq_lens):
        used = -(-seq_len // PAGE)
        table[request, :used] = order[request * MAX_PAGES : request * MAX_PAGES + used]
    return DraftExtendBatch(
        torch.randint(VOCAB, (count, WIDTH), generator=generator).to(device),
        torch.randn(count, WIDTH, HIDDEN, generator=generator).to(device, dtype),
        torch.tensor(seq_lens, dtype=torch.int32, device=device),
        torch.tensor(accept_lens, dtype=torch.int32, device=device),
        table.to(device),
    )


def runner_for(draft: EagleHead, mode: str, **options: Any) -> DraftExtendRunner:
    options = {"max_requests": 4, "buckets": [1, 2, 4], "tokens_per_request": WIDTH, "max_pages": MAX_PAGES, **options}
    if draft.embed_tokens.weight.device.type == "cpu":
        options.setdefault("compiler", "eager")
    return DraftExtendRunner(draft, draft.caches, mode=mode, **options)


def fill(draft: EagleHead, seed: int = 9) -> None:
    """Random history in every page but the reserved one."""
    generator = torch.Generator().manual_seed(seed)
    for cache in draft.caches:
        for pages in (cache.k, cache.v):
            pages[1:] = torch.randn(pages[1:].shape, generator=generator).to(pages)
            pages[0] = 0


def plain(draft: EagleHead, batch: DraftExtendBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """One request at a time, only its accepted rows, packed: no padding, no filler, no bucket."""
    from specops.compile import draft_extend_packed

    logits, hidden = [], []
    for request, count in enumerate(batch.accept_lens.tolist()):
        out = draft_extend_packed(
            draft,
            PAGE,
            batch.input_ids[request, :count],
            batch.hidden_states[request, :count],
            batch.seq_lens[request : request + 1] - WIDTH + count,
            batch.accept_lens[request : request + 1],
            batch.page_table[request : request + 1],
            max_accept_len=count,
        )
        logits.append(out.next_token_logits)
        hidden.append(out.hidden_states)
    return torch.cat(logits), torch.cat(hidden)
