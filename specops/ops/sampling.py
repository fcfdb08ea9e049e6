"""Lossless verification of a draft tree by sampling: the tokens that come out are distributed as the target's own.

At each node of the accepted path the children are tried in order (SpecInfer, Miao et al. 2023; EAGLE, Li et al. 2024).
With the target's distribution p and the draft's q at that node, a child x is accepted with probability min(1, p(x) / q(x));
when it is rejected, p becomes norm(max(p - q, 0)) and q is renormalised without x. If no child is left, the bonus token is
drawn from p. Children that were picked and not drawn, as the best k of q, count as drawn from a q that is sure of them:
child x is accepted with probability p(x) and otherwise leaves p, which is renormalised.

Random numbers are arguments. Nothing is read on the host, and no shape depends on data.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specops.ops import contracts


def verify_sampling(
    tokens: Tensor,
    parents: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor | None,
    accept_uniforms: Tensor,
    bonus_uniforms: Tensor,
    *,
    num_steps: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sample a path down the tree so that the emitted tokens follow the target's distribution exactly.

    Args:
        tokens, parents: ``[B, n]`` int64, as :func:`specops.ops.build_tree` returns them.
        target_probs: ``[B, n, V]`` float32, the target's distribution after each node; temperature 0 is a one-hot row.
        draft_probs: ``[B, n, V]`` float32, the distribution from which the children of each node were drawn one after
            another without replacement, in the order of their nodes; or None for children that were picked without
            chance, such as the best k. The tree then may hold any tokens, and the result is lossless still.
        accept_uniforms: ``[B, n]`` float32 in [0, 1), one for each node's own test.
        bonus_uniforms: ``[B]`` float32 in [0, 1).
        num_steps: levels below the root.

    Returns:
        accept_lens, accept_index, accept_tokens: as for :func:`specops.ops.verify_greedy`.

    Raises:
        ValueError, TypeError: shapes or dtypes that do not fit.
    """
    if tokens.dim() != 2 or not tokens.shape == parents.shape == accept_uniforms.shape:
        raise ValueError(
            "tokens, parents and accept_uniforms must all be [B, n], got "
            f"{tuple(tokens.shape)}, {tuple(parents.shape)} and {tuple(accept_uniforms.shape)}"
        )
    if target_probs.dim() != 3 or target_probs.shape[:2] != tokens.shape:
        raise ValueError(f"target_probs must be [{tokens.shape[0]}, {tokens.shape[1]}, V], got {tuple(target_probs.shape)}")
    if draft_probs is not None and draft_probs.shape != target_probs.shape:
        raise ValueError(
            f"draft_probs {tuple(draft_probs.shape)} and target_probs {tuple(target_probs.shape)} must agree; map a "
            "reduced draft vocabulary to the target's first"
        )
    if bonus_uniforms.shape != tokens.shape[:1]:
        raise ValueError(f"bonus_uniforms must be [{tokens.shape[0]}], got {tuple(bonus_uniforms.shape)}")
    for name, tensor, dtype in (
        ("tokens", tokens, torch.int64),
        ("parents", parents, torch.int64),
        ("target_probs", target_probs, torch.float32),
        ("draft_probs", draft_probs, torch.float32),
        ("accept_uniforms", accept_uniforms, torch.float32),
        ("bonus_uniforms", bonus_uniforms, torch.float32),
    ):
        if tensor is not None and tensor.dtype != dtype:
            raise TypeError(f"{name} must be {dtype}, got {tensor.dtype}")
    if num_steps < 1:
        raise ValueError(f"num_steps must be >= 1, got {num_steps}")
    result: tuple[Tensor, Tensor, Tensor] = torch.ops.specops.verify_sampling(
        tokens, parents, target_probs, draft_probs, accept_uniforms, bonus_uniforms, num_steps
    )
    return result


def _verify_sampling(
    tokens: Tensor,
    parents: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor | None,
    accept_uniforms: Tensor,
    bonus_uniforms: Tensor,
    num_steps: int,
) -> tuple[Tensor, Tensor, Tensor]:
    if draft_probs is None:
        accepted, rest = _walk_picked(tokens, parents, target_probs, accept_uniforms, num_steps)
    else:
        accepted, rest = _walk_drawn(tokens, parents, target_probs, draft_probs, accept_uniforms)
    bonus = draw(rest, bonus_uniforms)
    accept_lens, accept_index = _path(accepted, num_steps)
    # Each accepted node is emitted by its parent's place, the bonus token by the last one's.
    after = torch.cat((accept_index[:, 1:], torch.full_like(accept_index[:, :1], -1)), dim=1)
    emitted = torch.where(after >= 0, tokens.gather(1, after.clamp(min=0)), 0)
    return accept_lens, accept_index, emitted.scatter(1, accept_lens.long()[:, None] - 1, bonus[:, None])


def _walk_picked(
    tokens: Tensor, parents: Tensor, target_probs: Tensor, uniforms: Tensor, num_steps: int
) -> tuple[Tensor, Tensor]:
    """``[B, n]`` bool nodes of the path and ``[B, V]`` what the bonus token is drawn from, for picked children.

    Whether a node is accepted once it is its turn depends on its earlier siblings alone, so all nodes are tested at once.
    """
    batch, num_nodes = tokens.shape
    index = torch.arange(num_nodes, device=tokens.device)
    parent = parents.clamp(min=0)
    request = torch.arange(batch, device=tokens.device)
    prob = target_probs[request[:, None], parent, tokens]
    earlier = (parents[:, :, None] == parents[:, None, :]) & (index[None, :] < index[:, None])
    # A sibling's token has left the distribution when it is named again.
    again = (earlier & (tokens[:, :, None] == tokens[:, None, :])).any(dim=2)
    prob = torch.where(again, 0, prob)
    left = 1 - (prob[:, None, :] * earlier).sum(dim=2)
    passes = (uniforms * left < prob) & (parents >= 0)
    first = passes & ~(earlier & passes[:, None, :]).any(dim=2)
    accepted = (index == 0).expand(batch, -1)
    for _ in range(min(num_steps, num_nodes - 1)):
        accepted = (index == 0) | (first & accepted.gather(1, parent))
    last = torch.where(accepted, index, 0).amax(dim=1)
    whole = target_probs[request, last]
    # Every child of the last node was rejected and leaves the distribution; other nodes write back their token's value.
    values = torch.where(parents == last[:, None], 0, whole.gather(1, tokens))
    rest = whole.scatter_reduce(1, tokens, values, "amin")
    # Rounding aside, something is left: a last child that holds all of the rest is accepted for certain.
    return accepted, torch.where(rest.sum(dim=1, keepdim=True) > 0, rest, whole)


def _walk_drawn(
    tokens: Tensor, parents: Tensor, target_probs: Tensor, draft_probs: Tensor, uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    """As :func:`_walk_picked`, for children drawn from ``draft_probs`` without replacement.

    Children come after their parent and after the siblings before them, so one pass over the nodes is the whole walk.
    """
    batch, num_nodes = tokens.shape
    node = torch.zeros(batch, dtype=torch.int64, device=tokens.device)
    p, q = target_probs[:, 0], draft_probs[:, 0]
    accepted = [torch.ones(batch, dtype=torch.bool, device=tokens.device)]
    for child in range(1, num_nodes):
        token = tokens[:, child, None]
        tried = parents[:, child] == node
        accept = tried & (uniforms[:, child] * q.gather(1, token).squeeze(1) < p.gather(1, token).squeeze(1))
        reject = tried & ~accept
        accepted.append(accept)
        node = torch.where(accept, child, node)
        without = q.scatter(1, token, 0)
        p = torch.where(reject[:, None], _normalised((p - q).clamp(min=0), p), p)
        q = torch.where(reject[:, None], _normalised(without, without), q)
        p = torch.where(accept[:, None], target_probs[:, child], p)
        q = torch.where(accept[:, None], draft_probs[:, child], q)
    return torch.stack(accepted, dim=1), p


def _normalised(weights: Tensor, otherwise: Tensor) -> Tensor:
    """``[B, V]`` weights that sum to one, or ``otherwise`` where rounding has left nothing of them."""
    total = weights.sum(dim=1, keepdim=True)
    return torch.where(total > 0, weights / total, otherwise)


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """``[B]`` int64: one token of each row of ``weights [B, V]``, which need not sum to one; never one of weight 0."""
    heights = weights.cumsum(dim=1)
    above = (heights > uniforms[:, None] * heights[:, -1:]) & (weights > 0)
    # Rounding can leave no token above the last height.
    return torch.where(above.any(dim=1), above.to(torch.uint8).argmax(dim=1), weights.argmax(dim=1))


def _path(accepted: Tensor, num_steps: int) -> tuple[Tensor, Tensor]:
    """Lengths and ``[B, num_steps + 1]`` node indices, -1 behind the end; nodes of a path stand in order."""
    batch, num_nodes = accepted.shape
    place = torch.where(accepted, accepted.cumsum(dim=1) - 1, num_steps + 1).clamp(max=num_steps + 1)
    path = torch.full((batch, num_steps + 2), -1, dtype=torch.int64, device=accepted.device)
    index = torch.arange(num_nodes, device=accepted.device).expand(batch, -1)
    path = path.scatter(1, place, index)[:, : num_steps + 1].contiguous()
    return (path >= 0).sum(dim=1, dtype=torch.int32), path


contracts.define(
    "verify_sampling",
    contracts.VERIFY_SAMPLING_SCHEMA,
    contracts.fake_verify_sampling,
    {"CompositeExplicitAutograd": _verify_sampling},
)
