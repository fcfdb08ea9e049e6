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
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """
        Args:
            root_tokens: ``[B]`` int64, the last token the target chose.
            next_token_logits: ``[B, V]``, the draft's logits after the root.
            hidden_states: ``[B, H]``, the draft's hidden state that gave those logits.
            seq_lens: ``[B]`` int32, committed keys; 0 for padded requests.
            page_table: ``[B, max_pages]`` int32.
            plan: as of a planned backend.

        Returns:
            tokens, parents, depths: ``[B, n]`` int64; tree_mask ``[B * n, n]`` bool. See :func:`specops.ops.build_tree`.
        """
        scored = self.candidates(root_tokens, next_token_logits, hidden_states, seq_lens, page_table, plan)
        tree = ops.build_tree(root_tokens, *scored, num_draft_tokens=self.config.width, num_steps=self.config.num_steps)
        return tree[:4]

    def candidates(
        self,
        root_tokens: Tensor,
        next_token_logits: Tensor,
        hidden_states: Tensor,
        seq_lens: Tensor,
        page_table: Tensor,
        plan: RoundHandles | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Every drafted node, of which the tree keeps the best; arguments as for :meth:`forward`.

        Returns:
            tokens ``[B, C]`` int64, log-probabilities of the paths to them ``[B, C]`` float32, and parents ``[B, C]``
            int64, -1 for the root.
        """
        topk = self.config.topk
        batch, device = root_tokens.shape[0], root_tokens.device
        scores, tokens = self._best(next_token_logits, topk)
        all_tokens, all_scores = [tokens], [scores]
        all_parents = [torch.full_like(tokens, -1)]
        # Beam: the topk nodes of a level that are expanded. Entry k of beam_index names its candidate.
        beam_index = torch.arange(topk, device=device).expand(batch, topk)
        hidden = hidden_states[:, None].expand(-1, topk, -1)
        ancestors = torch.zeros((batch, topk, 0), dtype=torch.bool, device=device)
        own = torch.eye(topk, dtype=torch.bool, device=device).expand(batch, topk, topk)
        for level in range(1, self.config.num_steps):
            sees = torch.cat((ancestors, own), dim=2)
            handle = None if plan is None or plan.draft is None else plan.draft[level - 1]
            hidden = self._level(tokens, hidden, seq_lens, page_table, sees, level, handle)
            step_scores, children = self._best(self.draft.compute_logits(hidden), topk)  # type: ignore[operator]
            path_scores = (scores.reshape(-1, 1) + step_scores).reshape(batch, topk * topk)
            children = children.reshape(batch, topk * topk)
            first = topk + (level - 1) * topk * topk
            all_tokens.append(children)
            all_scores.append(path_scores)
            all_parents.append(beam_index.repeat_interleave(topk, dim=1))
            scores, best = ops.top_tokens(path_scores, topk)
            parent_beam = best // topk
            tokens = children.gather(1, best)
            beam_index = first + best
            hidden = hidden.reshape(batch, topk, -1)
            hidden = hidden.gather(1, parent_beam[:, :, None].expand(-1, -1, hidden.shape[2]))
            ancestors = sees.gather(1, parent_beam[:, :, None].expand(-1, -1, sees.shape[2]))
        return torch.cat(all_tokens, dim=1), torch.cat(all_scores, dim=1), torch.cat(all_parents, dim=1)

    def _best(self, logits: Tensor, topk: int) -> tuple[Tensor, Tensor]:
        """``[R, topk]`` log-probabilities and target ids of the likeliest tokens."""
        scores, draft_ids = ops.top_tokens(logits, topk, logprobs=True)
        return scores, self.draft.to_target_ids(draft_ids)  # type: ignore[operator]

    def _level(
        self,
        tokens: Tensor,
        hidden: Tensor,
        seq_lens: Tensor,
        page_table: Tensor,
        sees: Tensor,
        level: int,
        handle: Tensor | None,
    ) -> Tensor:
        """Hidden states ``[B * topk, H]`` of the nodes of one level."""
        topk = self.config.topk
        width = level * topk
        # A chain's mask is plain causality, which every backend has.
        mask, depth = (sees.reshape(-1, width), level - 1) if topk > 1 else (None, None)
        layout = QueryLayout.uniform(topk)
        meta = attention_metadata(
            page_table, seq_lens, layout, self.page_size, depths=depth, tree_mask=mask, plan=handle, grow=width
        )
        result: Tensor = self.draft(tokens.reshape(-1), hidden.reshape(tokens.numel(), -1), meta)
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
