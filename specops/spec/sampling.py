"""Sampling: what a request asks for, the per-row tensors that hold it, and the target's distribution after it.

The order is that of transformers: repetition penalty, temperature, top-k, top-p, min-p. Parameters are rows of tensors,
so greedy and sampling requests share a batch and a graph. What costs most is finding where top-k and top-p cut: a step
ranks as many tokens as the batch's requests need (see :mod:`specops.spec.runners`), and none where none filters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specops.ops.sampling import draw
from specops.spec.random import uniforms


@dataclass(frozen=True)
class SamplingParams:
    """How one request chooses its tokens.

    Attributes:
        temperature: 0 takes the likeliest token (greedy).
        top_k: keep the ``top_k`` likeliest tokens; None keeps all. Ties with the last one kept stay too.
        top_p: keep the likeliest tokens that together reach this probability.
        min_p: keep tokens at least ``min_p`` times as likely as the likeliest.
        repetition_penalty: divides positive and multiplies negative logits of tokens that stand in the prompt or the
            answer (CTRL, Keskar et al. 2019). Acts on greedy requests too.
        seed: 0 to ``2**63 - 1``. The same seed gives the same answer, whatever else is in the batch. None draws one from
            torch's generator when the request is added.

    Raises:
        ValueError: a value out of range; says which range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature must be a number >= 0, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be >= 1, or None for all tokens, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be 0 to 1, got {self.min_p}")
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise ValueError(f"repetition_penalty must be a number above 0, got {self.repetition_penalty}")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be 0 to 2**63 - 1, got {self.seed}")

    @property
    def penalised(self) -> bool:
        return self.repetition_penalty != 1.0

    @property
    def filtered(self) -> bool:
        return self.temperature > 0 and (self.top_k is not None or self.top_p < 1.0 or self.min_p > 0)

    @property
    def greedy(self) -> bool:
        """Whether the choice is the plain argmax of the target's logits."""
        return self.temperature == 0 and not self.penalised


class Sampler(nn.Module):
    """Sampling parameters of every row of a :class:`~specops.spec.round.RoundState`, as buffers with fixed addresses.

    Args:
        num_rows: rows of the state, the spare one included; rows start out greedy.
        vocab_size: the target's ``V``.

    Attributes:
        numbers: ``[R, 4]`` float32: temperature, top_p, min_p, repetition penalty.
        integers: ``[R, 2]`` int64: top_k (``V`` for all), seed.
        seen: ``[R, V]`` bool, tokens of the prompt and the answer; kept for rows with a penalty.
    """

    numbers: Tensor
    integers: Tensor
    seen: Tensor

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self._greedy = self._values(SamplingParams(), device)
        numbers, integers = self._greedy
        self.register_buffer("numbers", numbers.repeat(num_rows, 1), persistent=False)
        self.register_buffer("integers", integers.repeat(num_rows, 1), persistent=False)
        self.register_buffer("seen", torch.zeros((num_rows, vocab_size), dtype=torch.bool, device=device), persistent=False)

    def join(self, row: int, params: SamplingParams, prompt: Sequence[int]) -> None:
        """Set a row to a request's parameters before its prefill."""
        device = self.numbers.device
        self.numbers[row], self.integers[row] = self._values(params, device)
        if params.penalised:
            self.seen[row] = False
            self.seen[row, torch.tensor(list(prompt), device=device)] = True

    def leave(self, row: int) -> None:
        """Make a row greedy again."""
        self.numbers[row], self.integers[row] = self._greedy

    def mark(self, rows: Tensor, tokens: Tensor) -> None:
        """Note ``tokens`` ``[B, k]`` as part of the answers of ``rows`` ``[B]``."""
        self.seen.index_put_((rows[:, None].expand_as(tokens), tokens), torch.ones_like(tokens, dtype=torch.bool))

    def weights(
        self,
        logits: Tensor,
        likeliest: Tensor,
        rows: Tensor,
        *,
        ranks: int | None,
        tokens: Tensor | None = None,
        sees: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The distributions to sample from.

        Args:
            logits: ``[B, n, V]``, the target's, in any float dtype.
            likeliest: ``[B, n]`` int64, their argmax as the greedy step takes it.
            rows: ``[B]`` int64.
            ranks: how many of the likeliest tokens are ranked: ``V``, or at least the largest ``top_k`` if every row with a
                ``top_p`` has one. None if no row has a penalty or a filter; neither is computed then.
            tokens, sees: ``[B, n]`` int64 and ``[B, n, n]`` bool, the tree's nodes and which of them stand at or above
                each. They count as part of the answer for the penalty.

        Returns:
            ``[B, n, V]`` float32 weights, which need not sum to one, and ``likeliest`` after the penalty.
        """
        temperature, top_p, min_p, penalty = self.numbers[rows][:, :, None, None].unbind(1)
        logits = logits.float()
        if ranks is not None:
            logits = _penalised(logits, penalty, self.seen[rows], tokens, sees)
            # Rows without a penalty keep the choice of the greedy step, whose ties fall in the logits' own dtype.
            likeliest = torch.where(penalty[:, :, 0] == 1, likeliest, logits.argmax(dim=2))
        # Shifted first, so that a tiny temperature gives -inf and not inf - inf.
        shifted = (logits - logits.amax(dim=2, keepdim=True)) / temperature.clamp(min=1e-30)
        weights = shifted.softmax(dim=2)
        if ranks is not None:
            weights = _filtered(weights, self.integers[rows][:, 0], top_p, min_p, ranks)
        return weights, likeliest

    def choose(self, weights: Tensor, likeliest: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        """Draw a token from each distribution, by its request's seed and its own position.

        Args:
            weights, likeliest: as :meth:`weights` returns them.
            rows: ``[B]`` int64.
            positions: ``[B, n]`` int64, where each chosen token will stand.

        Returns:
            ``[B, n]`` int64. Rows of temperature 0 get ``likeliest``.
        """
        numbers = uniforms(self.integers[rows][:, 1:], positions, torch.zeros_like(positions))
        drawn = draw(weights.flatten(0, 1), numbers.flatten()).view_as(positions)
        return torch.where(self.numbers[rows][:, :1] > 0, drawn, likeliest)

    def probabilities(self, weights: Tensor, likeliest: Tensor, rows: Tensor) -> Tensor:
        """``[B, n, V]`` float32 rows that sum to one; one-hot at temperature 0."""
        sampled = weights / weights.sum(dim=2, keepdim=True)
        certain = torch.zeros_like(weights).scatter(2, likeliest[:, :, None], 1.0)
        return torch.where(self.numbers[rows][:, :1, None] > 0, sampled, certain)

    def tree_uniforms(self, rows: Tensor, committed: Tensor, num_nodes: int) -> tuple[Tensor, Tensor]:
        """``[B, n]`` numbers for the nodes' tests and ``[B]`` for the bonus token; a round's own by its root's position."""
        streams = torch.arange(num_nodes + 1, device=rows.device)[None, :] + 1
        numbers = uniforms(self.integers[rows][:, 1:], committed.long()[:, None], streams)
        return numbers[:, 1:].contiguous(), numbers[:, 0].contiguous()

    def _values(self, params: SamplingParams, device: torch.device) -> tuple[Tensor, Tensor]:
        numbers = [params.temperature, params.top_p, params.min_p, params.repetition_penalty]
        top_k = self.vocab_size if params.top_k is None else min(params.top_k, self.vocab_size)
        integers = torch.tensor([top_k, params.seed or 0], dtype=torch.int64, device=device)
        return torch.tensor(numbers, dtype=torch.float32, device=device), integers


def _penalised(logits: Tensor, penalty: Tensor, seen: Tensor, tokens: Tensor | None, sees: Tensor | None) -> Tensor:
    """Logits after the repetition penalty: of tokens in ``seen`` ``[B, V]``, and of a node's own ancestors and itself."""
    lowered = torch.where(logits > 0, logits / penalty, logits * penalty)
    result = torch.where(seen[:, None], lowered, logits)
    if tokens is None or sees is None:
        return result
    # Two nodes may hold one token, so that both columns must agree before they are written.
    same = tokens[:, :, None] == tokens[:, None, :]
    above = (sees[:, :, :, None] & same[:, None]).any(dim=2)
    columns = tokens[:, None, :].expand(-1, logits.shape[1], -1)
    values = torch.where(above, lowered.gather(2, columns), result.gather(2, columns))
    return result.scatter(2, columns, values)


def _filtered(weights: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, ranks: int) -> Tensor:
    """Weights below the strictest of three thresholds become zero; the likeliest token always stays."""
    if ranks < weights.shape[2]:
        ranked = weights.topk(ranks, dim=2).values
    else:
        ranked = weights.sort(dim=2, descending=True).values
    place = top_k[:, None, None].expand(-1, ranked.shape[1], 1)
    least_k = torch.where(place > ranks, 0, ranked.gather(2, place.clamp(max=ranks) - 1))
    kept = torch.where(ranked >= least_k, ranked, 0)
    before = kept.cumsum(dim=2) - kept
    needed = (before < top_p * kept.sum(dim=2, keepdim=True)) & (kept > 0)
    least_p = torch.where(needed, kept, torch.inf).amin(dim=2, keepdim=True)
    # Exactly all of them at top_p = 1, where rounding, or a short list, could drop the tail.
    least_p = torch.where(top_p >= 1, 0, least_p)
    least = torch.maximum(torch.maximum(least_k, least_p), min_p * ranked[:, :, :1])
    return torch.where(weights >= least, weights, 0)
