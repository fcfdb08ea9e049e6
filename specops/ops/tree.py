"""Draft trees as torch ops: build one from scored candidates, and verify it greedily.

A tree has ``n = num_draft_tokens`` nodes a request. Node 0 is the root, the last token the target chose; every other node
is a drafted token whose parent comes before it. A chain is the tree with ``topk = 1``. Everything is computed from tensors
on their device, without a host synchronisation, and ``n`` is independent of ``num_steps``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specops.ops import contracts


def build_tree(
    root_tokens: Tensor,
    candidate_tokens: Tensor,
    candidate_scores: Tensor,
    candidate_parents: Tensor,
    *,
    num_draft_tokens: int,
    num_steps: int,
    links: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Keep the ``num_draft_tokens - 1`` best candidates and lay them out as a tree (EAGLE-2, Li et al. 2024).

    A candidate's score is that of its whole path and so never above its parent's; candidates are listed level by level,
    and equal scores go to the earlier one, so a kept candidate's parent is kept too.

    Args:
        root_tokens: ``[B]`` int64, the last token the target chose.
        candidate_tokens: ``[B, C]`` int64, parents before children.
        candidate_scores: ``[B, C]`` float, sum of log-probabilities along the path.
        candidate_parents: ``[B, C]`` int64, index of the parent candidate, -1 for a child of the root.
        num_draft_tokens: nodes of the tree, root included; at most ``C + 1``.
        num_steps: levels below the root.
        links: whether the traversal links are wanted; without, they are ``[B, 0]``.

    Returns:
        tokens, parents, depths: ``[B, n]`` int64; the root's parent is -1 and its depth 0.
        tree_mask: ``[B * n, n]`` bool, each node sees itself and its ancestors.
        first_child, next_sibling: ``[B, n]`` int64 traversal links, -1 where there is none.

    Raises:
        ValueError: shapes that do not fit, or more nodes asked for than there are candidates.
    """
    if candidate_tokens.dim() != 2 or candidate_tokens.shape != candidate_scores.shape:
        raise ValueError(
            f"candidate_tokens and candidate_scores must both be [B, C], got {tuple(candidate_tokens.shape)} "
            f"and {tuple(candidate_scores.shape)}"
        )
    if candidate_parents.shape != candidate_tokens.shape or root_tokens.shape != candidate_tokens.shape[:1]:
        raise ValueError(
            f"candidate_parents must be {tuple(candidate_tokens.shape)} and root_tokens [{candidate_tokens.shape[0]}], "
            f"got {tuple(candidate_parents.shape)} and {tuple(root_tokens.shape)}"
        )
    for name, tensor in (
        ("root_tokens", root_tokens),
        ("candidate_tokens", candidate_tokens),
        ("candidate_parents", candidate_parents),
    ):
        if tensor.dtype != torch.int64:
            raise TypeError(f"{name} must be int64, got {tensor.dtype}")
    if not 1 <= num_draft_tokens <= candidate_tokens.shape[1] + 1:
        raise ValueError(
            f"num_draft_tokens is {num_draft_tokens}; with {candidate_tokens.shape[1]} candidates it is 1 to "
            f"{candidate_tokens.shape[1] + 1}"
        )
    if num_steps < 1:
        raise ValueError(f"num_steps must be >= 1, got {num_steps}")
    result: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor] = torch.ops.specops.build_tree(
        root_tokens, candidate_tokens, candidate_scores, candidate_parents, num_draft_tokens, num_steps, links
    )
    return result


def verify_greedy(
    tokens: Tensor, parents: Tensor, depths: Tensor, target_tokens: Tensor, *, num_steps: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Follow the target's choices down the tree.

    Args:
        tokens, parents, depths: ``[B, n]`` int64, as :func:`build_tree` returns them.
        target_tokens: ``[B, n]`` int64, the target's choice after each node.
        num_steps: levels below the root.

    Returns:
        accept_lens: ``[B]`` int32, nodes of the accepted path, root included; as many tokens are emitted, the last of
            them the target's own (bonus) token. Between 1 and ``num_steps + 1``.
        accept_index: ``[B, num_steps + 1]`` int64, node indices of the path, root first; -1 behind its end.
        accept_tokens: ``[B, num_steps + 1]`` int64, the emitted tokens; 0 behind their end.

    Raises:
        ValueError, TypeError: shapes or dtypes that do not fit.
    """
    if tokens.dim() != 2 or not tokens.shape == parents.shape == depths.shape == target_tokens.shape:
        raise ValueError(
            "tokens, parents, depths and target_tokens must all be [B, n], got "
            f"{tuple(tokens.shape)}, {tuple(parents.shape)}, {tuple(depths.shape)} and {tuple(target_tokens.shape)}"
        )
    for name, tensor in (("tokens", tokens), ("parents", parents), ("depths", depths), ("target_tokens", target_tokens)):
        if tensor.dtype != torch.int64:
            raise TypeError(f"{name} must be int64, got {tensor.dtype}")
    if num_steps < 1:
        raise ValueError(f"num_steps must be >= 1, got {num_steps}")
    result: tuple[Tensor, Tensor, Tensor] = torch.ops.specops.verify_greedy(
        tokens, parents, depths, target_tokens, num_steps
    )
    return result


def _build_tree(
    root_tokens: Tensor,
    candidate_tokens: Tensor,
    candidate_scores: Tensor,
    candidate_parents: Tensor,
    num_draft_tokens: int,
    num_steps: int,
    links: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    batch, device = root_tokens.shape[0], root_tokens.device
    kept_count = num_draft_tokens - 1
    # A stable sort, not topk: on equal scores the parent, which is listed first, must win over its child.
    ranked = candidate_scores.sort(dim=1, descending=True, stable=True).indices
    kept = ranked[:, :kept_count].sort(dim=1).values.contiguous()
    kept_parents = candidate_parents.gather(1, kept)
    node_of_parent = torch.searchsorted(kept, kept_parents) + 1
    root = torch.full((batch, 1), -1, dtype=torch.int64, device=device)
    parents = torch.cat((root, torch.where(kept_parents < 0, 0, node_of_parent)), dim=1)
    tokens = torch.cat((root_tokens[:, None], candidate_tokens.gather(1, kept)), dim=1)
    sees = torch.eye(num_draft_tokens, dtype=torch.bool, device=device).repeat(batch, 1, 1)
    eye = sees
    up = parents.clamp(min=0)[:, :, None].expand(-1, -1, num_draft_tokens)
    for _ in range(min(num_steps, kept_count)):
        sees = eye | sees.gather(1, up)
    depths = sees.sum(dim=2) - 1
    first_child, next_sibling = _links(parents) if links else (parents.new_empty((batch, 0)), parents.new_empty((batch, 0)))
    return tokens, parents, depths, sees.reshape(batch * num_draft_tokens, num_draft_tokens), first_child, next_sibling


def _links(parents: Tensor) -> tuple[Tensor, Tensor]:
    """First child and next sibling of each node, -1 for none: the least index among the candidates."""
    num_nodes = parents.shape[1]
    index = torch.arange(num_nodes, device=parents.device)
    is_child = parents[:, None, :] == index[None, :, None]
    is_sibling = (parents[:, None, :] == parents[:, :, None]) & (index[None, None, :] > index[None, :, None])

    def least(found: Tensor) -> Tensor:
        least_index = torch.where(found, index, num_nodes).amin(dim=2)
        return torch.where(least_index == num_nodes, -1, least_index)

    return least(is_child), least(is_sibling)


def _verify_greedy(
    tokens: Tensor, parents: Tensor, depths: Tensor, target_tokens: Tensor, num_steps: int
) -> tuple[Tensor, Tensor, Tensor]:
    batch, device = tokens.shape[0], tokens.device
    node = torch.zeros((batch, 1), dtype=torch.int64, device=device)
    alive = torch.ones((batch, 1), dtype=torch.bool, device=device)
    path = [node]
    for _ in range(num_steps):
        wanted = target_tokens.gather(1, node)
        matches = (parents == node) & (tokens == wanted) & alive
        alive = matches.any(dim=1, keepdim=True)
        node = matches.to(torch.uint8).argmax(dim=1, keepdim=True)
        path.append(torch.where(alive, node, -1))
    accept_index = torch.cat(path, dim=1)
    accepted = accept_index >= 0
    accept_lens = accepted.sum(dim=1, dtype=torch.int32)
    emitted = target_tokens.gather(1, accept_index.clamp(min=0))
    return accept_lens, accept_index, torch.where(accepted, emitted, 0)


def _few_candidates(kernels: Any, root_tokens: Tensor, candidate_tokens: Tensor, *others: Any) -> bool:
    return bool(candidate_tokens.shape[1] <= kernels.MAX_CANDIDATES)


for _name, _schema, _fake, _kernel, _serves in (
    ("build_tree", contracts.BUILD_TREE_SCHEMA, contracts.fake_build_tree, _build_tree, _few_candidates),
    ("verify_greedy", contracts.VERIFY_GREEDY_SCHEMA, contracts.fake_verify_greedy, _verify_greedy, None),
):
    _cuda_kernel = contracts.with_triton(_kernel, "triton_round", _name, _serves)
    contracts.define(_name, _schema, _fake, {"CompositeExplicitAutograd": _kernel, "CUDA": _cuda_kernel})
