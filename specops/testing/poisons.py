"""Memory that must not matter, filled with what does most harm when it does.

Nothing a request does not own may be read into a result: pages of nobody, page 0, slots behind the last key of a page,
columns of the page table behind the live pages, query rows of padded requests.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specops.testing.cases import AttentionCase

# NaN survives a multiplication by zero, inf a subtraction, and a large number a mask that only adds a little.
FILLS: dict[str, float] = {"nan": float("nan"), "inf": float("inf"), "huge": 3e38}
# Page ids that no pool has.
SENTINELS: dict[str, int] = {"minus one": -1, "largest": 2**31 - 1}


def owned_slots(page_table: Tensor, seq_lens: Tensor, num_pages: int, page_size: int) -> Tensor:
    """``[P, S]`` bool on the CPU: slots that hold a key of some request."""
    owned = torch.zeros((num_pages, page_size), dtype=torch.bool)
    for pages, seq_len in zip(page_table.tolist(), seq_lens.tolist(), strict=True):
        for place in range(min(seq_len, len(pages) * page_size)):
            owned[pages[place // page_size], place % page_size] = True
    return owned


def poison_caches(case: AttentionCase, fill: float) -> None:
    """Fill every slot that no request owns, in place."""
    caches = [tensor for name, tensor in case.tensors.items() if name.endswith("cache")]
    num_pages, page_size = caches[0].shape[:2]
    owned = owned_slots(case.tensors["page_table"], case.tensors["seq_lens"], num_pages, page_size)
    for cache in caches:
        poison_pages(cache, owned, fill)


def poison_pages(cache: Tensor, owned: Tensor, fill: float) -> None:
    """Fill the slots of ``cache [P, S, ...]`` outside ``owned [P, S]``, in place."""
    keep = owned.to(cache.device).reshape(*owned.shape, *[1] * (cache.dim() - 2))
    limit = torch.finfo(cache.dtype).max
    value = fill if fill != fill or abs(fill) == float("inf") else min(fill, limit)
    cache.copy_(torch.where(keep, cache.float(), value).to(cache.dtype))


def poison_table(case: AttentionCase, page: int) -> None:
    """Name ``page`` in every column of the page table behind a request's live pages, in place."""
    table, seq_lens = case.tensors["page_table"], case.tensors["seq_lens"]
    page_size = next(tensor for name, tensor in case.tensors.items() if name.endswith("cache")).shape[1]
    used = (seq_lens + (page_size - 1)) // page_size
    behind = torch.arange(table.shape[1], device=table.device) >= used[:, None]
    table[behind] = page


def poison_padded_queries(case: AttentionCase) -> None:
    """NaN in the query rows of requests without keys, in place; uniform layouts only."""
    if not case.layout.is_uniform:
        return
    padded = (case.tensors["seq_lens"] == 0).repeat_interleave(case.layout.tokens_per_request)
    for name in ("q", "q_latent", "q_rope"):
        if name in case.tensors:
            case.tensors[name][padded] = float("nan")


def poison_buffers(buffers: dict[str, Tensor], page: int) -> None:
    """Fill a runner's static input buffers with what a request of a few keys on ``page`` might have left, and NaN."""
    for name, buffer in buffers.items():
        if buffer.is_floating_point():
            buffer.fill_(float("nan"))
        elif buffer.dtype == torch.bool:
            buffer.fill_(True)
        else:
            buffer.fill_({"page_table": page, "seq_lens": 9}.get(name, 3))
