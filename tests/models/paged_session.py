"""A small paged engine for tests: ragged prefill, then uniform blocks, with or without a tree, over shuffled pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from specops import QueryLayout, attention_metadata

# Node 0 is the root; siblings, a grandchild and a second branch, listed parents first.
TREE = (-1, 0, 0, 1, 1, 2)


class PagedSession:
    """Requests of one model over pages in shuffled order, with NaN in every page nobody owns and behind every sequence.

    ``forward`` stands for the model's own, so that a compiled one can be driven through the same steps.
    """

    def __init__(
        self, model: Any, batch: int, *, page_size: int = 4, max_tokens: int = 48, forward: Callable[..., Any] | None = None
    ) -> None:
        self.model, self.page_size = model, page_size
        self.forward = model if forward is None else forward
        device = next(model.parameters()).device
        pages = -(-max_tokens // page_size)
        for cache in model.allocate_caches(batch * pages + 1, page_size):
            for pool in cache.buffers():
                pool.fill_(float("nan"))
        order = torch.randperm(batch * pages, generator=torch.Generator().manual_seed(1)) + 1
        self.page_table = order.to(torch.int32).view(batch, pages).to(device)
        self.lens = torch.zeros(batch, dtype=torch.int32, device=device)

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
        """Logits ``[len, vocab]`` of each prompt, all run as one packed batch."""
        device = self.lens.device
        lens = torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int32)
        starts = torch.cat((torch.zeros(1, dtype=torch.int32), lens.cumsum(0, dtype=torch.int32)))
        self.lens = lens.to(device)
        layout = QueryLayout.packed(starts.to(device), int(lens.max()))
        rows = int(lens.sum())
        meta = attention_metadata(self.page_table, self.lens, layout, self.page_size, num_tokens=rows)
        ids = torch.tensor([token for prompt in prompts for token in prompt], device=device)
        logits = self.model.compute_logits(self.forward(ids, meta))
        return list(logits.split(lens.tolist()))

    @torch.inference_mode()
    def step(self, tokens: Tensor, parents: Sequence[int] | None = None, *, keep: bool = False) -> Tensor:
        """Logits ``[B, n, vocab]`` of ``n`` new tokens a request, ``tokens`` ``[B, n]``; ``parents`` makes them a tree."""
        device = self.lens.device
        batch, width = tokens.shape
        seq_lens = self.lens + width
        mask = depths = None
        if parents is not None:
            mask = torch.tensor([[j in path_to(parents, i) for j in range(width)] for i in range(width)], device=device)
            depths = torch.tensor([len(path_to(parents, i)) - 1 for i in range(width)], device=device).repeat(batch)
            mask = mask.repeat(batch, 1)
        layout = QueryLayout.uniform(width)
        meta = attention_metadata(self.page_table, seq_lens, layout, self.page_size, depths=depths, tree_mask=mask)
        logits = self.model.compute_logits(self.forward(tokens.reshape(-1).to(device), meta))
        if keep:
            self.lens = seq_lens
        return logits.view(batch, width, -1)


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """Nodes from the root to ``node``."""
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def peer_logits(peer: Any, tokens: Sequence[int]) -> Tensor:
    """``[len, vocab]`` logits of a transformers model on one whole sequence, without a cache."""
    with torch.inference_mode():
        logits: Tensor = peer(torch.tensor([list(tokens)], device=peer.device), use_cache=False).logits[0]
    return logits


def assert_same_logits(ours: Tensor, theirs: Tensor, tolerance: float = 1e-4) -> None:
    """Equal within float32 rounding, and the same greedy choice."""
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=tolerance, atol=tolerance)
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


def check_against_peer(model: Any, peer: Any, *, tolerance: float = 1e-4, forward: Callable[..., Any] | None = None) -> None:
    """Prefill, decode, six-row blocks and trees of ``model`` against whole-sequence runs of the transformers ``peer``."""
    vocab = peer.config.vocab_size
    draw = torch.Generator().manual_seed(2)

    def tokens(*shape: int) -> Tensor:
        return torch.randint(vocab, shape, generator=draw)

    prompts = [tokens(length).tolist() for length in (3, 17, 8)]
    session = PagedSession(model, len(prompts), forward=forward)
    for prompt, logits in zip(prompts, session.prefill(prompts), strict=True):
        assert_same_logits(logits, peer_logits(peer, prompt), tolerance)
    history = prompts
    for width in (1, 1, 6):
        block = tokens(len(history), width)
        logits = session.step(block, keep=True)
        history = [seen + new for seen, new in zip(history, block.tolist(), strict=True)]
        for row, seen in zip(logits, history, strict=True):
            assert_same_logits(row, peer_logits(peer, seen)[-width:], tolerance)
    # Two trees over the same slots: the second must not see what the first, rejected one left there.
    for _ in range(2):
        block = tokens(len(history), len(TREE))
        logits = session.step(block, TREE)
        for row, seen, new in zip(logits, history, block.tolist(), strict=True):
            for node in range(len(TREE)):
                path = [new[i] for i in path_to(TREE, node)]
                assert_same_logits(row[node], peer_logits(peer, seen + path)[-1], tolerance)
