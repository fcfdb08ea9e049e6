"""A draft model small enough to check a runner with, batches for it, and what a draft-extend of it must give, in float64.

The expected values come from loops over requests, rows and layers that know neither pages nor buckets nor padding: K and V
of the history are read from the pool, those of the new rows are computed, and attention is the oracle's formula.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specops import ops
from specops.batch import DraftExtendBatch
from specops.kv_cache import PagedKVCache
from specops.metadata import AttentionMetadata

VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, MAX_PAGES = 61, 32, 4, 2, 16, 4, 24
MAX_POSITIONS = MAX_PAGES * PAGE_SIZE


class ToyDraft(nn.Module):
    """Embedding and target hidden state, positions, and one attention layer per window.

    Attributes:
        caches: one :class:`PagedKVCache` a layer.
        eager_calls: forwards that ran as Python code; a compiled or replayed forward does not count.
        layouts: kind and width of every layout a forward was traced or run with.
    """

    def __init__(
        self,
        *,
        num_pages: int = 120,
        windows: Sequence[int | None] = (None, 8),
        backend: str = "auto",
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(seed)

        def weight(*shape: int) -> nn.Parameter:
            data = torch.randn(shape, generator=rng) * shape[-1] ** -0.5
            return nn.Parameter(data.to(device, dtype), requires_grad=False)

        self.windows, self.backend = tuple(windows), backend
        self.embedding = nn.Parameter(torch.randn((VOCAB, HIDDEN), generator=rng).to(device, dtype), requires_grad=False)
        self.positions = nn.Parameter(
            torch.randn((MAX_POSITIONS, HIDDEN), generator=rng).to(device, dtype), requires_grad=False
        )
        self.mix = weight(HIDDEN, 2 * HIDDEN)
        self.qkv = nn.ParameterList(weight((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN) for _ in self.windows)
        self.out = nn.ParameterList(weight(HIDDEN, HEADS * HEAD_DIM) for _ in self.windows)
        self.lm_head = weight(VOCAB, HIDDEN)
        self.caches = nn.ModuleList()
        self.eager_calls = 0
        self.layouts: set[tuple[str, int]] = set()
        self.allocate(num_pages)

    def allocate(self, num_pages: int) -> None:
        """New caches at new addresses."""
        old = self.embedding
        self.caches = nn.ModuleList(
            PagedKVCache(num_pages, PAGE_SIZE, KV_HEADS, HEAD_DIM, dtype=old.dtype, device=old.device) for _ in self.windows
        )

    def forward(self, input_ids: Tensor, hidden_states: Tensor, meta: AttentionMetadata) -> Tensor:
        """``[T]`` ids and ``[T, H]`` hidden states to ``[T, H]``."""
        if not torch.compiler.is_compiling():
            self.eager_calls += 1
            self.layouts.add((meta.layout.kind, int(meta.layout.max_query_len)))
        x = torch.cat((self.embedding[input_ids], hidden_states), dim=1) @ self.mix.T + self.positions[meta.positions]
        for qkv, out, cache, window in zip(self.qkv, self.out, self.caches, self.windows, strict=True):
            heads = (x @ qkv.T).unflatten(1, (-1, HEAD_DIM))
            q, k, v = heads.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
            assert isinstance(cache, PagedKVCache)
            ops.store_kv(cache.k, cache.v, k, v, meta.slots)
            attended = ops.mha(
                q,
                cache.k,
                cache.v,
                meta.page_table,
                meta.seq_lens,
                layout=meta.layout,
                window=window,
                tree_mask=meta.tree_mask,
                backend=self.backend,
            )
            x = x + attended.flatten(1) @ out.T
        return x

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.lm_head.T

    def pools(self) -> list[Tensor]:
        """K and V pages of every layer."""
        return [pages for cache in self.caches for pages in (cache.k, cache.v)]  # type: ignore[misc]


@dataclass
class Expected:
    """What a draft-extend must give.

    Attributes:
        logits, hidden: ``[B, V]`` and ``[B, H]`` float64, of each request's last accepted row.
        writes: for each pool, slot ``(page, offset)`` to ``[Hkv, D]`` float64, for every accepted row.
        may_change: slots of filler rows, whose content nobody reads.
    """

    logits: Tensor
    hidden: Tensor
    writes: list[dict[tuple[int, int], Tensor]]
    may_change: set[tuple[int, int]]


def make_batch(
    requests: Sequence[tuple[int, int]],
    tokens_per_request: int,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    num_pages: int = 120,
) -> DraftExtendBatch:
    """Random rows for ``(seq_len, accept_len)`` pairs; pages are in shuffled order, page 0 is nobody's."""
    rng, draw = torch.Generator().manual_seed(seed), random.Random(seed)
    count = len(requests)
    free = list(range(1, num_pages))
    draw.shuffle(free)
    table = torch.zeros((count, MAX_PAGES), dtype=torch.int32)
    for row, (seq_len, _) in enumerate(requests):
        for column in range(-(-seq_len // PAGE_SIZE)):
            table[row, column] = free.pop()
    return DraftExtendBatch(
        torch.randint(VOCAB, (count, tokens_per_request), generator=rng).to(device),
        torch.randn((count, tokens_per_request, HIDDEN), generator=rng).to(device, dtype),
        torch.tensor([seq_len for seq_len, _ in requests], dtype=torch.int32, device=device),
        torch.tensor([accept_len for _, accept_len in requests], dtype=torch.int32, device=device),
        table.to(device),
    )


def fill_history(draft: ToyDraft, batch: DraftExtendBatch, seed: int = 0) -> None:
    """Random K and V for the committed keys of the batch's requests; NaN in every other slot, page 0 included."""
    rng = torch.Generator().manual_seed(seed + 1)
    width = batch.input_ids.shape[1]
    lens, table = batch.seq_lens.tolist(), batch.page_table.tolist()
    for pages in draft.pools():
        filled = torch.full(pages.shape, math.nan)
        for seq_len, row in zip(lens, table, strict=True):
            for place in range(max(0, seq_len - width)):
                filled[row[place // PAGE_SIZE], place % PAGE_SIZE] = torch.randn(pages.shape[2:], generator=rng)
        pages.copy_(filled)


def expected_step(draft: ToyDraft, batch: DraftExtendBatch) -> Expected:
    """The float64 result of one draft-extend over the pools as they are."""
    width = batch.input_ids.shape[1]
    double = {name: parameter.cpu().double() for name, parameter in draft.named_parameters()}
    pools = [pages.cpu().double() for pages in draft.pools()]
    writes: list[dict[tuple[int, int], Tensor]] = [{} for _ in pools]
    may_change: set[tuple[int, int]] = set()
    logits, hidden = [], []
    for request, (seq_len, accept_len) in enumerate(zip(batch.seq_lens.tolist(), batch.accept_lens.tolist(), strict=True)):
        row = batch.page_table[request].tolist()
        places = range(seq_len - width, seq_len)
        slots = [(row[place // PAGE_SIZE], place % PAGE_SIZE) for place in range(seq_len)]
        may_change.update(slots[place] for place in places[accept_len:])
        ids = batch.input_ids[request, :accept_len].cpu()
        x = torch.cat((double["embedding"][ids], batch.hidden_states[request, :accept_len].cpu().double()), dim=1)
        x = x @ double["mix"].T + double["positions"][list(places[:accept_len])]
        for layer, window in enumerate(draft.windows):
            heads = (x @ double[f"qkv.{layer}"].T).reshape(accept_len, -1, HEAD_DIM)
            q, k, v = torch.split(heads, [HEADS, KV_HEADS, KV_HEADS], dim=1)
            history = [
                [pool[slot] for slot in slots[: seq_len - width]] for pool in (pools[2 * layer], pools[2 * layer + 1])
            ]
            keys, values = (torch.stack((*old, *new)) for old, new in zip(history, (k, v), strict=True))
            for pool, new in ((2 * layer, k), (2 * layer + 1, v)):
                writes[pool].update(zip((slots[place] for place in places[:accept_len]), new, strict=True))
            x = x + _attention(q, keys, values, window).flatten(1) @ double[f"out.{layer}"].T
        hidden.append(x[-1])
        logits.append(x[-1] @ double["lm_head"].T)
    return Expected(torch.stack(logits), torch.stack(hidden), writes, may_change)


def _attention(q: Tensor, keys: Tensor, values: Tensor, window: int | None) -> Tensor:
    """Causal attention of the last rows of one sequence: ``[C, Hq, D]``, ``[K, Hkv, D]``."""
    rows = []
    for index in range(q.shape[0]):
        seen = slice(0, keys.shape[0] - q.shape[0] + index + 1)
        if window is not None:
            seen = slice(max(0, seen.stop - window), seen.stop)
        grouped = q[index].reshape(keys.shape[1], -1, q.shape[2])
        scores = torch.einsum("hgd,khd->hgk", grouped, keys[seen]) * q.shape[2] ** -0.5
        rows.append(torch.einsum("hgk,khd->hgd", scores.softmax(dim=2), values[seen]).flatten(0, 1))
    return torch.stack(rows)
