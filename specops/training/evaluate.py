"""What a head is worth: accepted tokens a round, walked over held-out greedy answers.

With greedy verification a draft is right exactly where it equals the token that stands in the answer, and a wrong guess
changes nothing that follows. So one teacher-forced pass tells what every possible round would have accepted: for each
row and step, the *rank* the head gave to the token that came. Rank 0 is what a chain proposes; a tree proposes several.
Rounds are then walked from the start of each answer to its end, each starting where the last one stopped.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specops.models.eagle import EagleHead
from specops.training.dense import DenseTarget, UnrolledHead, full_precision_logits, prefill

Tree = frozenset[tuple[int, ...]]


@torch.no_grad()
def true_ranks(
    head: EagleHead, target: DenseTarget, ids: Tensor, draft_ids: Tensor, steps: int, chunk_tokens: int = 16384
) -> Tensor:
    """Ranks of the tokens that came.

    Args:
        ids: ``[N, L]`` int64 or int32.
        draft_ids: ``[vocab]`` int64, draft id of each target id or -1.
        steps: draft steps.

    Returns:
        ``[N, L, steps]`` int32 on the CPU: at row ``i``, step ``j``, how many draft tokens were likelier than token
        ``i + 2 + j``. ``draft_vocab_size`` where the draft has no such token or the row ends before it.
    """
    length, none = ids.shape[1], head.config.draft_vocab_size
    device = head.fc.weight.device
    chunk = max(1, chunk_tokens // length)
    parts = []
    for start in range(0, ids.shape[0], chunk):
        part = ids[start : start + chunk].to(device).long()
        _, state = prefill(target, part, head.config.aux_layers)
        tokens = torch.cat((part, part.new_zeros((part.shape[0], steps + 1))), dim=1)
        labels = torch.where(torch.arange(tokens.shape[1], device=device) < length, draft_ids[tokens], -1)
        chain, ranks = UnrolledHead(head), []
        for step in range(steps):
            state = chain.step(tokens[:, 1 + step : 1 + step + length], state)
            logits = _logits(head, state)
            label = labels[:, 2 + step : 2 + step + length]
            score = logits.gather(-1, label.clamp(min=0)[..., None])
            ranks.append(torch.where(label >= 0, (logits > score).sum(dim=-1), none).to(torch.int32).cpu())
        parts.append(torch.stack(ranks, dim=-1))
    return torch.cat(parts)


def _logits(head: EagleHead, state: Tensor) -> Tensor:
    """``[B, L, draft_vocab]`` float32: rounded logits would tie, and a tie is no rank."""
    normed = state if head.norm is None else head.norm(state)
    return full_precision_logits(normed.flatten(0, 1), head.lm_head_weight).view(*state.shape[:2], -1)


@dataclass(frozen=True)
class Walk:
    """Rounds over all answers.

    Attributes:
        rounds: how many; only whole ones, whose draft could have been accepted to the end.
        tokens: emitted in them, bonus tokens included.
    """

    rounds: int
    tokens: int

    @property
    def tokens_per_round(self) -> float:
        return self.tokens / max(1, self.rounds)


def answer_spans(greedy: Tensor) -> list[tuple[int, int, int]]:
    """(row, first, end) of every run of greedy tokens in ``[N, L]``, end excluded."""
    spans: list[tuple[int, int, int]] = []
    edges = torch.diff(greedy.cpu().to(torch.int8), dim=1, prepend=torch.zeros((greedy.shape[0], 1), dtype=torch.int8))
    for row in range(greedy.shape[0]):
        firsts = (edges[row] == 1).nonzero().flatten().tolist()
        ends = (edges[row] == -1).nonzero().flatten().tolist()
        ends += [greedy.shape[1]] * (len(firsts) - len(ends))
        spans.extend((row, first, end) for first, end in zip(firsts, ends, strict=True))
    return spans


def walk(ranks: Tensor, greedy: Tensor, tree: Tree, steps: int) -> Walk:
    """Speculative rounds with one static tree of rank paths.

    Args:
        ranks: ``[N, L, S]`` from :func:`true_ranks`, S >= steps.
        greedy: ``[N, L]`` bool.
        tree: rank paths, every prefix included; a chain of depth d is ``{(0,), (0, 0), ...}``.
        steps: its depth.
    """
    table, rounds, tokens = ranks.tolist(), 0, 0
    for row, first, end in answer_spans(greedy):
        # The first token comes from the prefill; it is the root of the first round.
        root = first
        while root + steps + 1 < end:
            path: tuple[int, ...] = ()
            for rank in table[row][root - 1][:steps]:
                if (*path, rank) not in tree:
                    break
                path = (*path, rank)
            rounds += 1
            tokens += len(path) + 1
            root += len(path) + 1
    return Walk(rounds, tokens)


def chain(depth: int) -> Tree:
    return frozenset((0,) * d for d in range(1, depth + 1))


def rank_shares(ranks: Tensor, greedy: Tensor, topk: int) -> list[list[float]]:
    """``[S][topk]``: how often the token that came had each rank, where all steps before were within ``topk``."""
    length, steps = ranks.shape[1], ranks.shape[2]
    counted = torch.zeros_like(greedy.cpu())
    counted[:, :-1] = greedy[:, 1:].cpu()
    shares = []
    for step in range(steps):
        labels = torch.zeros_like(counted)
        labels[:, : length - 2 - step] = greedy[:, 2 + step :].cpu()
        counted = counted & labels
        total = max(1, int(counted.sum()))
        rank = ranks[..., step]
        shares.append([int((counted & (rank == r)).sum()) / total for r in range(topk)])
        counted = counted & (rank < topk)
    return shares


def best_tree(shares: Sequence[Sequence[float]], nodes: int) -> Tree:
    """The static tree of ``nodes`` nodes (root excluded) with the most expected accepts, steps taken as independent."""
    heap: list[tuple[float, tuple[int, ...]]] = [(-shares[0][0], (0,))]
    chosen: set[tuple[int, ...]] = set()
    while heap and len(chosen) < nodes:
        value, path = heapq.heappop(heap)
        chosen.add(path)
        depth, rank = len(path), path[-1]
        if rank + 1 < len(shares[depth - 1]) and shares[depth - 1][rank] > 0:
            sibling = value / shares[depth - 1][rank] * shares[depth - 1][rank + 1]
            heapq.heappush(heap, (sibling, (*path[:-1], rank + 1)))
        if depth < len(shares):
            heapq.heappush(heap, (value * shares[depth][0], (*path, 0)))
    return frozenset(chosen)


def acceptance(ranks: Tensor, greedy: Tensor) -> list[float]:
    """Per step, the share of right first guesses among rows whose guesses before were all right."""
    shares = rank_shares(ranks, greedy, topk=1)
    return [step[0] for step in shares]


def report(ranks: Tensor, greedy: Tensor, tree_nodes: Sequence[int] = (15, 31, 59), topk: int = 8) -> dict[str, object]:
    """All figures of one set of answers, ready for a card.

    Trees are chosen on the even rows and walked on the odd ones, so that they are not fitted to what they are measured on.
    """
    steps = ranks.shape[2]
    figures: dict[str, object] = {
        "answers": len(answer_spans(greedy)),
        "greedy_tokens": int(greedy.sum()),
        "acceptance": [round(a, 4) for a in acceptance(ranks, greedy)],
    }
    for depth in sorted({3, 5} & set(range(1, steps + 1)) or {steps}):
        figures[f"chain_{depth}_tokens_per_round"] = round(walk(ranks, greedy, chain(depth), depth).tokens_per_round, 3)
    shares = rank_shares(ranks[::2], greedy[::2], topk)
    for nodes in tree_nodes:
        tree = best_tree(shares, nodes)
        depth = max(map(len, tree))
        figures[f"tree_{nodes + 1}_tokens_per_round"] = round(
            walk(ranks[1::2], greedy[1::2], tree, depth).tokens_per_round, 3
        )
    return figures
