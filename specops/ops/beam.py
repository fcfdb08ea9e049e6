"""One level of drafting: from logits to the candidates of a tree and the nodes that the next level expands.

Candidates of all levels lie side by side in three tensors ``[B, C]`` that the first level finds empty: ``topk`` of the first
level, then ``topk * topk`` of each further one, the children of a beam's entry together. A *beam* are the ``topk`` nodes of
a level that the next one expands: the best of its candidates by the log-probability of their whole path.

On a GPU a level is two launches, see :mod:`specops.ops.triton_beam`; elsewhere plain torch, which a CPU compiles into the
forward.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from specops.ops import contracts
from specops.ops.top_tokens import top_tokens


class Beam(NamedTuple):
    """The nodes that the next level expands, best first.

    Attributes:
        scores: ``[B, topk]`` float32, log-probabilities of their paths.
        tokens: ``[B, topk]`` int64, in the draft's vocabulary.
        candidates: ``[B, topk]`` int64, which candidates they are.
        parents: ``[B, topk]`` int64, which entry of the beam before each is a child of; 0 in the first level.
        tree_mask: ``[B * topk, W]`` bool, which nodes of all beams so far each sees: its ancestors and itself. ``W`` is
            ``topk`` for every level so far.
    """

    scores: Tensor
    tokens: Tensor
    candidates: Tensor
    parents: Tensor
    tree_mask: Tensor


def num_candidates(topk: int, num_steps: int) -> int:
    """Nodes drafted in ``num_steps`` levels, of which a tree keeps the best."""
    return topk + (num_steps - 1) * topk * topk


def expand_beam(
    candidate_tokens: Tensor,
    candidate_scores: Tensor,
    candidate_parents: Tensor,
    logits: Tensor,
    *,
    topk: int,
    rows: Tensor | None = None,
    beam: Beam | None = None,
) -> Beam:
    """Write a level's candidates and choose its beam.

    Args:
        candidate_tokens: ``[B, C]`` int64, written; tokens of the draft's vocabulary.
        candidate_scores: ``[B, C]`` float32, written; log-probabilities of paths.
        candidate_parents: ``[B, C]`` int64, written; -1 for a child of the root.
        logits: ``[B * topk, V]`` of the beam's nodes; in the first level ``[B, V]`` of the roots.
        topk: children of a node, and nodes of a beam.
        rows: ``[B]`` int64, in the first level: which rows of ``logits`` ``[R, V]`` are the roots'; in order when not given.
        beam: that of the level before; None in the first level.

    Raises:
        ValueError: logits that are no matrix, or fewer tokens than ``topk``.
    """
    if logits.dim() != 2 or not 1 <= topk <= logits.shape[1]:
        raise ValueError(f"logits must be [R, V] with V >= topk = {topk} >= 1, got {tuple(logits.shape)}")
    past = (None, None, None) if beam is None else (beam.scores, beam.candidates, beam.tree_mask)
    arguments = (candidate_tokens, candidate_scores, candidate_parents, logits, topk, rows, *past)
    if contracts.through_op(logits):
        return Beam(*torch.ops.specops.expand_beam(*arguments))
    return Beam(*_expand_beam(*arguments))


def _expand_beam(
    candidate_tokens: Tensor,
    candidate_scores: Tensor,
    candidate_parents: Tensor,
    logits: Tensor,
    topk: int,
    rows: Tensor | None = None,
    scores: Tensor | None = None,
    beam: Tensor | None = None,
    tree_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    batch, device = candidate_tokens.shape[0], candidate_tokens.device
    values, tokens = top_tokens(logits if rows is None else logits[rows], topk, logprobs=True)
    own = torch.eye(topk, dtype=torch.bool, device=device).repeat(batch, 1)
    if scores is None or beam is None or tree_mask is None:
        candidate_tokens[:, :topk], candidate_scores[:, :topk], candidate_parents[:, :topk] = tokens, values, -1
        order = torch.arange(topk, device=device).repeat(batch, 1)
        return values, tokens, order, torch.zeros_like(order), own
    level = tree_mask.shape[1] // topk
    first, end = num_candidates(topk, level), num_candidates(topk, level + 1)
    paths = (scores.reshape(-1, 1) + values).reshape(batch, topk * topk)
    children = tokens.reshape(batch, topk * topk)
    candidate_tokens[:, first:end], candidate_scores[:, first:end] = children, paths
    candidate_parents[:, first:end] = beam.repeat_interleave(topk, dim=1)
    best_scores, best = top_tokens(paths, topk)
    parents = best // topk
    above = (torch.arange(batch, device=device)[:, None] * topk + parents).reshape(-1)
    sees = torch.cat((tree_mask[above], own), dim=1)
    return best_scores, children.gather(1, best), first + best, parents, sees


def _can_expand(kernels: Any, *args: Any) -> bool:
    return bool(kernels.can_expand(args[4], args[:3]))


contracts.define(
    "expand_beam",
    contracts.EXPAND_BEAM_SCHEMA,
    contracts.fake_expand_beam,
    {
        "CompositeExplicitAutograd": _expand_beam,
        "CUDA": contracts.with_triton(_expand_beam, "triton_beam", "expand_beam", _can_expand),
    },
)
