"""Verify: the target runs the tree's ``n`` nodes a request at once, and its own choices decide which path is accepted.

The K/V of the accepted path is then moved to consecutive slots, and the rows that draft-extend needs are laid out. All of
it is one step without host synchronisation. Plain decoding is the same with a tree of one node. Without a sampler the
choices are the target's argmax and nothing is computed for sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from specops import ops
from specops.batch import Field, FieldTable
from specops.layout import QueryLayout
from specops.metadata import AttentionMetadata, attention_metadata
from specops.ops.round_end import fit, hand_on
from specops.ops.top_tokens import column
from specops.spec.config import SpecConfig
from specops.spec.plans import RoundHandles
from specops.spec.sampling import Sampler


class VerifyStep(nn.Module):
    """Tree verification by the target, greedy or by sampling.

    With ``aux_layers`` the hidden states handed on are those residual streams side by side (EAGLE-3). A ``sampler`` makes
    it the sampling step; ``ranks`` is how many tokens that ranks to filter them, None for neither penalties nor filters.
    """

    def __init__(
        self,
        target: nn.Module,
        page_size: int,
        config: SpecConfig,
        aux_layers: tuple[int, ...] = (),
        sampler: Sampler | None = None,
        ranks: int | None = None,
    ) -> None:
        super().__init__()
        self.aux_layers = aux_layers
        self.target = target
        self.page_size = page_size
        self.config = config
        self.sampler = sampler
        self.ranks = ranks

    def forward(
        self,
        tokens: Tensor,
        parents: Tensor,
        depths: Tensor,
        tree_mask: Tensor,
        seq_lens: Tensor,
        page_table: Tensor,
        rows: Tensor | None = None,
        plan: RoundHandles | None = None,
    ) -> tuple[Tensor, ...]:
        """
        Args:
            tokens, parents, depths: ``[B, n]`` int64.
            tree_mask: ``[B, n, n]`` bool.
            seq_lens: ``[B]`` int32, keys including the ``n`` nodes; 0 for padded requests.
            page_table: ``[B, max_pages]`` int32.
            rows: ``[B]`` int64, the requests' rows in the sampler; None without one.
            plan: as of a planned backend.

        Returns:
            accept_lens: ``[B]`` int32, tokens emitted, 1 to ``num_steps + 1``.
            accept_tokens: ``[B, n]`` int64, the emitted tokens, then filler: the input of draft-extend.
            hidden_states: ``[B * n, H]``, the target's hidden states at the accepted nodes, then filler.
            margins: ``[B, n]`` float32, gap between the target's two best logits where each token was chosen.
            logprobs: ``[B, n]`` float32, each token's log-probability in the target's logits. With a sampler only.
        """
        batch, width = tokens.shape
        chain = self.config.topk == 1
        hidden, handed_on = self.run_tree(tokens, depths, tree_mask, seq_lens, page_table, plan)
        logits = self.target.compute_logits(hidden)  # type: ignore[operator]
        best, likeliest_two = ops.top_tokens(logits, 2)
        likeliest = column(likeliest_two, 0, batch, width)
        if self.sampler is None or rows is None:
            accepted = ops.verify_greedy(tokens, parents, depths, likeliest, num_steps=self.config.num_steps)
        else:
            accepted = self._sample(
                logits.view(batch, width, -1), likeliest, tokens, parents, depths, tree_mask, seq_lens, rows
            )
        accept_lens, accept_index, accept_tokens = accepted
        emitted, handed_on, margins, *slots = hand_on(
            accept_index,
            accept_tokens,
            best,
            handed_on,
            seq_lens,
            page_table,
            width=width,
            page_size=self.page_size,
            moves=not chain,
        )
        if not chain:
            # The accepted nodes' K/V goes to the slots right behind the prefix, in every layer.
            move_caches(self.target.caches, *slots)  # type: ignore[arg-type]
        result = (accept_lens, emitted, handed_on, margins)
        if self.sampler is None or rows is None:
            return result
        if self.ranks is not None:
            real = torch.arange(width, device=tokens.device) < accept_lens[:, None]
            self.sampler.mark(rows, torch.where(real, emitted, emitted[:, :1]))
        places = fit(accept_index.clamp(min=0), width)
        return (*result, _logprobs(logits.view(batch, width, -1), places, emitted))

    def run_tree(
        self,
        tokens: Tensor,
        depths: Tensor,
        tree_mask: Tensor,
        seq_lens: Tensor,
        page_table: Tensor,
        plan: RoundHandles | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Both results of :func:`run_target` over the nodes, ``[B * n, H]``; arguments as for :meth:`forward`."""
        width, chain = tokens.shape[1], self.config.topk == 1
        meta = attention_metadata(
            page_table,
            seq_lens,
            QueryLayout.uniform(width),
            self.page_size,
            # A chain's mask is plain causality, which every backend has.
            depths=None if chain else depths.reshape(-1),
            tree_mask=None if chain else tree_mask.reshape(-1, width),
            plan=None if plan is None else plan.verify,
        )
        return run_target(self.target, tokens.reshape(-1), meta, self.aux_layers)

    def _sample(
        self,
        logits: Tensor,
        likeliest: Tensor,
        tokens: Tensor,
        parents: Tensor,
        depths: Tensor,
        tree_mask: Tensor,
        seq_lens: Tensor,
        rows: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As :func:`specops.ops.verify_greedy`, by the rows' sampling parameters."""
        assert self.sampler is not None
        width, num_steps = tokens.shape[1], self.config.num_steps
        committed = seq_lens.long() - width
        weights, likeliest = self.sampler.weights(logits, likeliest, rows, ranks=self.ranks, tokens=tokens, sees=tree_mask)
        if self.config.acceptance == "coupled":
            # Padded requests stand at negative positions; theirs are masked to words and never read.
            chosen = self.sampler.choose(weights, likeliest, rows, committed[:, None] + depths + 1)
            return ops.verify_greedy(tokens, parents, depths, chosen, num_steps=num_steps)
        probabilities = self.sampler.probabilities(weights, likeliest, rows)
        tests, bonus = self.sampler.tree_uniforms(rows, committed, width)
        return ops.verify_sampling(tokens, parents, probabilities, None, tests, bonus, num_steps=num_steps)


class DecodeStep(nn.Module):
    """One step of plain decoding: each request's last token in, the target's choice out."""

    def __init__(self, target: nn.Module, page_size: int, sampler: Sampler | None = None, ranks: int | None = None) -> None:
        super().__init__()
        self.target = target
        self.page_size = page_size
        self.sampler = sampler
        self.ranks = ranks

    def forward(
        self,
        tokens: Tensor,
        seq_lens: Tensor,
        page_table: Tensor,
        rows: Tensor | None = None,
        plan: RoundHandles | None = None,
    ) -> tuple[Tensor, ...]:
        """
        Args:
            tokens: ``[B, 1]`` int64.
            seq_lens: ``[B]`` int32, keys including this token.
            page_table: ``[B, max_pages]`` int32.
            rows, plan: as for :class:`VerifyStep`.

        Returns:
            ``[B]`` int64 next tokens, ``[B]`` float32 gaps between the two best logits, and with a sampler ``[B]``
            float32 log-probabilities.
        """
        handle = None if plan is None else plan.verify
        meta = attention_metadata(page_table, seq_lens, QueryLayout.uniform(1), self.page_size, plan=handle)
        hidden = self.target(tokens.reshape(-1), meta)
        logits = self.target.compute_logits(hidden)  # type: ignore[operator]
        return choose_next(logits, seq_lens, self.sampler, rows, self.ranks)


def choose_next(
    logits: Tensor, seq_lens: Tensor, sampler: Sampler | None = None, rows: Tensor | None = None, ranks: int | None = None
) -> tuple[Tensor, ...]:
    """The token after each request's last one: greedy, or by its row of the sampler.

    Args:
        logits: ``[B, V]``.
        seq_lens: ``[B]`` int32, tokens so far, which is the place of the new one.
        sampler, rows, ranks: as for :class:`VerifyStep`.

    Returns:
        ``[B]`` int64 tokens, ``[B]`` float32 gaps, and with a sampler ``[B]`` float32 log-probabilities.
    """
    best, likeliest_two = ops.top_tokens(logits, 2)
    batch = logits.shape[0]
    # Of a view with gaps between its elements, as a column is, inductor would ask the same when it is reshaped.
    tokens = column(likeliest_two, 0, batch).clone()
    gaps = column(best, 0, batch) - column(best, 1, batch)
    if sampler is None or rows is None:
        return tokens, gaps
    logits = logits[:, None]
    weights, likeliest = sampler.weights(logits, tokens[:, None], rows, ranks=ranks)
    chosen = sampler.choose(weights, likeliest, rows, seq_lens.long()[:, None])
    if ranks is not None:
        sampler.mark(rows, chosen)
    return chosen[:, 0], gaps, _logprobs(logits, torch.zeros_like(chosen), chosen)[:, 0]


def run_target(
    target: nn.Module, input_ids: Tensor, meta: AttentionMetadata, aux_layers: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """``[T, H]`` hidden states for the LM head, and what the draft gets: the same, or the aux layers' streams."""
    if not aux_layers:
        hidden: Tensor = target(input_ids, meta)
        return hidden, hidden
    hidden, aux = target(input_ids, meta, aux_layers=aux_layers)
    return hidden, aux


def move_caches(caches: Sequence[Any], source_slots: Tensor, target_slots: Tensor) -> None:
    """``move_kv_layers`` of caches of keys and values, ``move_latent`` of latent ones."""
    both = [cache for cache in caches if not hasattr(cache, "kv")]
    if both:
        ops.move_kv_layers([cache.k for cache in both], [cache.v for cache in both], source_slots, target_slots)
    for cache in caches:
        if hasattr(cache, "kv"):
            ops.move_latent(cache.kv, source_slots, target_slots)


def verify_fields(config: SpecConfig, max_pages: int, spare_row: int | None = None) -> FieldTable:
    """Field table of :class:`VerifyStep`. A padded request accepts nothing below its root.

    With a ``spare_row``, the table of the sampling step, whose padding has that row.
    """
    rows = () if spare_row is None else (Field("rows", "request", (), torch.int64, pad=spare_row),)
    return FieldTable(
        (
            Field("tokens", "token", (), torch.int64),
            Field("parents", "token", (), torch.int64, pad=-1),
            Field("depths", "token", (), torch.int64),
            Field("tree_mask", "token", (config.width,), torch.bool),
            Field("seq_lens", "request", (), torch.int32),
            Field("page_table", "request", (max_pages,), torch.int32),
            *rows,
        ),
        config.width,
    )


def _logprobs(logits: Tensor, places: Tensor, tokens: Tensor) -> Tensor:
    """``[B, k]`` float32 log-probabilities of ``tokens`` ``[B, k]`` at rows ``places`` of ``logits`` ``[B, n, V]``."""
    vocab = logits.shape[2]
    totals = logits.float().logsumexp(dim=2).gather(1, places)
    return logits.flatten(1).gather(1, places * vocab + tokens).float() - totals
