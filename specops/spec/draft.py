"""Draft: from the last draft-extend's logits and hidden state to a tree of ``n`` nodes, as one step.

Level 1 comes from the logits the previous draft-extend left. Every further level runs the draft model over the ``topk``
best nodes of the level before. Their K/V goes to scratch slots behind the committed prefix, and a mask lets each node see
the prefix, its ancestors and itself; the next draft-extend overwrites those slots. With ``num_steps = 1`` the draft model
does not run here at all.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specops import ops
from specops.batch import Field, FieldTable
from specops.layout import QueryLayout
from specops.metadata import attention_metadata
from specops.ops.beam import Beam, num_candidates
from specops.spec.config import SpecConfig
from specops.spec.plans import RoundHandles


class DraftStep(nn.Module):
    """Drafts one tree a request (EAGLE-2, Li et al. 2024). No host synchronisation; all shapes static but the batch."""

    def __init__(self, draft: nn.Module, page_size: int, config: SpecConfig) -> None:
        super().__init__()
        self.draft = draft
        self.page_size = page_size
        self.config = config

    def forward(
        self,
        root_tokens: Tensor,
        next_token_logits: Tensor,
        hidden_states: Tensor,
        seq_lens: Tensor,
        page_table: Tensor,
        plan: RoundHandles | None = None,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """
        Args:
            root_tokens: ``[B]`` int64, the last token the target chose.
            next_token_logits: ``[B, V]``, the draft's logits after the root.
            hidden_states: ``[B, H]``, the draft's hidden state that gave those logits.
            seq_lens: ``[B]`` int32, committed keys; 0 for padded requests.
            page_table: ``[B, max_pages]`` int32.
            plan: as of a planned backend.
            rows: ``[B]`` int64, which rows of ``next_token_logits`` are the requests'; in order when not given.

        Returns:
            tokens, parents, depths: ``[B, n]`` int64; tree_mask ``[B * n, n]`` bool. See :func:`specops.ops.build_tree`.
        """
        scored = self.candidates(root_tokens, next_token_logits, hidden_states, seq_lens, page_table, plan, rows)
        width, num_steps = self.config.width, self.config.num_steps
        tree = ops.build_tree(root_tokens, *scored, num_draft_tokens=width, num_steps=num_steps, links=False)
        return tree[:4]

    def candidates(
        self,
        root_tokens: Tensor,
        next_token_logits: Tensor,
        hidden_states: Tensor,
        seq_lens: Tensor,
        page_table: Tensor,
        plan: RoundHandles | None = None,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Every drafted node, of which the tree keeps the best; arguments as for :meth:`forward`.

        Returns:
            tokens ``[B, C]`` int64, log-probabilities of the paths to them ``[B, C]`` float32, and parents ``[B, C]``
            int64, -1 for the root.
        """
        topk, batch = self.config.topk, root_tokens.shape[0]
        found = root_tokens.new_empty((batch, num_candidates(topk, self.config.num_steps)))
        scores, parents = torch.empty_like(found, dtype=torch.float32), torch.empty_like(found)
        beam = ops.expand_beam(found, scores, parents, next_token_logits, topk=topk, rows=rows)
        hidden = hidden_states[:, None].expand(-1, topk, -1)
        for level in range(1, self.config.num_steps):
            handle = None if plan is None or plan.draft is None else plan.draft[level - 1]
            states = self._level(beam, hidden, seq_lens, page_table, level, handle)
            logits = self.draft.compute_logits(states)  # type: ignore[operator]
            beam = ops.expand_beam(found, scores, parents, logits, topk=topk, beam=beam)
            states = states.reshape(batch, topk, -1)
            hidden = states.gather(1, beam.parents[:, :, None].expand(-1, -1, states.shape[2]))
        return self.draft.to_target_ids(found), scores, parents  # type: ignore[operator]

    def _level(
        self, beam: Beam, hidden: Tensor, seq_lens: Tensor, page_table: Tensor, level: int, handle: Tensor | None
    ) -> Tensor:
        """Hidden states ``[B * topk, H]`` of the beam's nodes, those of their parents being ``hidden``."""
        topk = self.config.topk
        width = level * topk
        # A chain's mask is plain causality, which every backend has.
        mask, depth = (beam.tree_mask, level - 1) if topk > 1 else (None, None)
        layout = QueryLayout.uniform(topk)
        meta = attention_metadata(
            page_table, seq_lens, layout, self.page_size, depths=depth, tree_mask=mask, plan=handle, grow=width
        )
        tokens = self.draft.to_target_ids(beam.tokens.reshape(-1))  # type: ignore[operator]
        result: Tensor = self.draft(tokens, hidden.reshape(tokens.shape[0], -1), meta)
        return result


def draft_fields(draft_vocab: int, hidden_size: int, max_pages: int, dtype: torch.dtype) -> FieldTable:
    """Field table of :class:`DraftStep`; every field has one entry a request."""
    return FieldTable(
        (
            Field("root_tokens", "request", (), torch.int64),
            Field("next_token_logits", "request", (draft_vocab,), dtype),
            Field("hidden_states", "request", (hidden_size,), dtype),
            Field("seq_lens", "request", (), torch.int32),
            Field("page_table", "request", (max_pages,), torch.int32),
        ),
        1,
    )
