"""Verify: the target runs the tree's ``n`` nodes a request at once, and its own choices decide which path is accepted.

The K/V of the accepted path is then moved to consecutive slots, and the rows that draft-extend needs are laid out. All of
it is one step without host synchronisation. Plain decoding is the same with a tree of one node.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from specops import ops
from specops.batch import Field, FieldTable
from specops.layout import QueryLayout
from specops.metadata import AttentionMetadata, attention_metadata, slots_of
from specops.spec.config import SpecConfig


class VerifyStep(nn.Module):
    """Greedy tree verification by the target.

    With ``aux_layers`` the hidden states handed on are those residual streams side by side (EAGLE-3).
    """

    def __init__(self, target: nn.Module, page_size: int, config: SpecConfig, aux_layers: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.aux_layers = aux_layers
        self.target = target
        self.page_size = page_size
        self.config = config

    def forward(
        self, tokens: Tensor, parents: Tensor, depths: Tensor, tree_mask: Tensor, seq_lens: Tensor, page_table: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """
        Args:
            tokens, parents, depths: ``[B, n]`` int64.
            tree_mask: ``[B, n, n]`` bool.
            seq_lens: ``[B]`` int32, keys including the ``n`` nodes; 0 for padded requests.
            page_table: ``[B, max_pages]`` int32.

        Returns:
            accept_lens: ``[B]`` int32, tokens emitted, 1 to ``num_steps + 1``.
            accept_tokens: ``[B, n]`` int64, the emitted tokens, then filler: the input of draft-extend.
            hidden_states: ``[B * n, H]``, the target's hidden states at the accepted nodes, then filler.
            margins: ``[B, n]`` float32, gap between the target's two best logits where each token was chosen.
        """
        batch, width = tokens.shape
        chain = self.config.topk == 1
        meta = attention_metadata(
            page_table,
            seq_lens,
            QueryLayout.uniform(width),
            self.page_size,
            # A chain's mask is plain causality, which every backend has.
            depths=None if chain else depths.reshape(-1),
            tree_mask=None if chain else tree_mask.reshape(-1, width),
        )
        hidden, handed_on = run_target(self.target, tokens.reshape(-1), meta, self.aux_layers)
        best = self.target.compute_logits(hidden).topk(2, dim=1)  # type: ignore[operator]
        target_tokens = best.indices[:, 0].reshape(batch, width)
        accept_lens, accept_index, accept_tokens = ops.verify_greedy(
            tokens, parents, depths, target_tokens, num_steps=self.config.num_steps
        )
        rows = _fit(accept_index.clamp(min=0), width)
        if not chain:
            self._compact(accept_index, seq_lens, page_table, width)
        handed_on = handed_on.reshape(batch, width, -1)
        handed_on = handed_on.gather(1, rows[:, :, None].expand(-1, -1, handed_on.shape[2]))
        gaps = (best.values[:, 0] - best.values[:, 1]).float().reshape(batch, width)
        return accept_lens, _fit(accept_tokens, width), handed_on.flatten(0, 1), gaps.gather(1, rows)

    def _compact(self, accept_index: Tensor, seq_lens: Tensor, page_table: Tensor, width: int) -> None:
        """Move the accepted nodes' K/V to the slots right behind the prefix, in every layer."""
        batch, depth = accept_index.shape
        prefix = (seq_lens.long() - width)[:, None]
        place = torch.arange(depth, device=accept_index.device).expand(batch, depth)
        moving = (accept_index >= 0) & (accept_index != place)
        request = torch.arange(batch, device=accept_index.device)[:, None].expand(batch, depth).reshape(-1)
        source = torch.where(moving, prefix + accept_index, -1).reshape(-1)
        target = torch.where(moving, prefix + place, -1).reshape(-1)
        source_slots = slots_of(source, request, page_table, self.page_size)
        target_slots = slots_of(target, request, page_table, self.page_size)
        for cache in self.target.caches:  # type: ignore[union-attr]
            move_cache(cache, source_slots, target_slots)


class DecodeStep(nn.Module):
    """One step of plain decoding: each request's last token in, the target's choice out."""

    def __init__(self, target: nn.Module, page_size: int) -> None:
        super().__init__()
        self.target = target
        self.page_size = page_size

    def forward(self, tokens: Tensor, seq_lens: Tensor, page_table: Tensor) -> tuple[Tensor, Tensor]:
        """
        Args:
            tokens: ``[B, 1]`` int64.
            seq_lens: ``[B]`` int32, keys including this token.
            page_table: ``[B, max_pages]`` int32.

        Returns:
            ``[B]`` int64 next tokens and ``[B]`` float32 gaps between the two best logits.
        """
        meta = attention_metadata(page_table, seq_lens, QueryLayout.uniform(1), self.page_size)
        hidden = self.target(tokens.reshape(-1), meta)
        best = self.target.compute_logits(hidden).topk(2, dim=1)  # type: ignore[operator]
        return best.indices[:, 0], (best.values[:, 0] - best.values[:, 1]).float()


def run_target(
    target: nn.Module, input_ids: Tensor, meta: AttentionMetadata, aux_layers: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """``[T, H]`` hidden states for the LM head, and what the draft gets: the same, or the aux layers' streams."""
    if not aux_layers:
        hidden: Tensor = target(input_ids, meta)
        return hidden, hidden
    hidden, aux = target(input_ids, meta, aux_layers=aux_layers)
    return hidden, aux


def move_cache(cache: Any, source_slots: Tensor, target_slots: Tensor) -> None:
    """``move_kv`` or ``move_latent``, as the cache needs."""
    if hasattr(cache, "kv"):
        ops.move_latent(cache.kv, source_slots, target_slots)
    else:
        ops.move_kv(cache.k, cache.v, source_slots, target_slots)


def verify_fields(config: SpecConfig, max_pages: int) -> FieldTable:
    """Field table of :class:`VerifyStep`. A padded request accepts nothing below its root."""
    return FieldTable(
        (
            Field("tokens", "token", (), torch.int64),
            Field("parents", "token", (), torch.int64, pad=-1),
            Field("depths", "token", (), torch.int64),
            Field("tree_mask", "token", (config.width,), torch.bool),
            Field("seq_lens", "request", (), torch.int32),
            Field("page_table", "request", (max_pages,), torch.int32),
        ),
        config.width,
    )


def _fit(rows: Tensor, width: int) -> Tensor:
    """``[B, width]``: columns behind the path are zero; a path is never longer than ``width``."""
    return nn.functional.pad(rows, (0, width - rows.shape[1])) if rows.shape[1] < width else rows[:, :width]
