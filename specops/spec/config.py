"""Shape of one EAGLE round: how deep and wide to draft, how many nodes to verify, and how long a context may be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

DEFAULT_CONTEXT = 2048


@dataclass(frozen=True)
class SpecConfig:
    """Settings of speculative decoding.

    Attributes:
        num_steps: levels of the draft tree. With 1 there is no multi-step drafting: the one level comes from the previous
            draft-extend.
        topk: branches per node; 1 drafts a chain.
        num_draft_tokens: nodes verified per request, root included. ``num_steps + 1`` for a chain; for ``topk > 1`` free
            of ``num_steps``, and by default all candidates up to 16.
        draft_extend: ``"v2"`` (uniform rows, static shapes) or ``"v1"`` (packed rows; never in a graph).
        acceptance: how a sampling request's tree is verified; both are lossless and accept equally many tokens.
            ``"coupled"`` draws the target's token at every node and follows those draws down the tree, so that a seed
            gives the same answer with any draft or none. ``"residual"`` tests the drafted tokens one after another
            (:func:`specops.ops.verify_sampling`).

    Raises:
        ValueError: a combination that makes no tree; says what would.
    """

    num_steps: int = 3
    topk: int = 1
    num_draft_tokens: int | None = None
    draft_extend: str = "v2"
    acceptance: str = "coupled"

    def __post_init__(self) -> None:
        if self.num_steps < 1 or self.topk < 1:
            raise ValueError(f"num_steps and topk must be >= 1, got {self.num_steps} and {self.topk}")
        if self.draft_extend not in ("v1", "v2"):
            raise ValueError(f"draft_extend must be 'v1' or 'v2', got {self.draft_extend!r}")
        if self.acceptance not in ("coupled", "residual"):
            raise ValueError(f"acceptance must be 'coupled' or 'residual', got {self.acceptance!r}")
        if self.num_draft_tokens is None:
            nodes = self.num_steps + 1 if self.topk == 1 else min(16, self.num_candidates + 1)
            object.__setattr__(self, "num_draft_tokens", nodes)
        if not 2 <= self.width <= self.num_candidates + 1:
            raise ValueError(
                f"num_draft_tokens is {self.width}; num_steps={self.num_steps} and topk={self.topk} give "
                f"{self.num_candidates} candidates, so it is 2 to {self.num_candidates + 1}"
            )
        if self.topk == 1 and self.width != self.num_steps + 1:
            raise ValueError(
                f"a chain (topk=1) of {self.num_steps} steps has {self.num_steps + 1} nodes, "
                f"got num_draft_tokens={self.width}"
            )

    @property
    def width(self) -> int:
        """``num_draft_tokens``: rows of every request in verify and draft-extend."""
        assert self.num_draft_tokens is not None
        return self.num_draft_tokens

    @property
    def num_candidates(self) -> int:
        """Drafted nodes a tree is chosen from: ``topk``, then ``topk`` children of ``topk`` nodes a level."""
        return self.topk + (self.num_steps - 1) * self.topk * self.topk

    @property
    def scratch_tokens(self) -> int:
        """Cache slots behind the committed prefix that one round may write, in either cache (F12)."""
        return max(self.width, (self.num_steps - 1) * self.topk)

    @property
    def max_accept_len(self) -> int:
        """Most tokens one round can emit, bonus included."""
        return min(self.num_steps + 1, self.width)


def context_length(target: Any, draft: Any, asked: int | None) -> int:
    """The context length both models can serve.

    Raises:
        ValueError: naming both numbers, when the request or the draft's limit does not fit.
    """
    limit = target.config.max_position_embeddings
    context = asked if asked is not None else min(limit, DEFAULT_CONTEXT)
    if context < 2:
        raise ValueError(f"max_context must be >= 2, got {context}")
    if context > limit:
        raise ValueError(f"max_context {context} is beyond the target's {limit} positions")
    if draft is None:
        return context
    if draft.config.target_hidden_size != target.config.hidden_size:
        raise ValueError(
            f"the draft was made for hidden states of {draft.config.target_hidden_size}, the target's have "
            f"{target.config.hidden_size}; use a head that was trained for this target"
        )
    if context > draft.config.max_position_embeddings:
        raise ValueError(
            f"max_context {context} is beyond the draft's {draft.config.max_position_embeddings} positions "
            f"(the target has {limit}); pass max_context={draft.config.max_position_embeddings} or less"
        )
    return context
