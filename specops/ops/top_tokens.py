"""The likeliest tokens of each row of logits: what drafting, greedy verification and margins read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specops.ops import contracts, native


def top_tokens(logits: Tensor, k: int, *, logprobs: bool = False) -> tuple[Tensor, Tensor]:
    """The ``k`` largest logits of each row, largest first.

    Args:
        logits: ``[R, V]``, any float dtype.
        k: how many, 1 to V.
        logprobs: give log-probabilities, ``logits - logsumexp(logits)`` in float32, in place of logits.

    Returns:
        ``[R, k]`` float32 values and ``[R, k]`` int64 tokens. Among equal logits the least token comes first on a GPU and
        in the compiled kernel of a CPU; elsewhere the order is that of ``torch.topk``.

    Raises:
        ValueError: logits that are no matrix, or ``k`` outside 1 to V.
    """
    if logits.dim() != 2:
        raise ValueError(f"logits must be [R, V], got {tuple(logits.shape)}")
    if not 1 <= k <= logits.shape[1]:
        raise ValueError(f"k must be 1 to {logits.shape[1]}, the number of tokens, got {k}")
    result: tuple[Tensor, Tensor] = torch.ops.specops.top_tokens(logits, k, logprobs)
    return result


def column(ranked: Tensor, rank: int, *shape: int) -> Tensor:
    """``ranked[:, rank]`` of what :func:`top_tokens` has returned, as ``shape``; a view.

    Of an index on an op's output inductor asks whether there is one row, and one request would be compiled apart.
    """
    strides = [ranked.shape[1]]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return ranked.as_strided(shape, strides, rank)


def _top_tokens(logits: Tensor, k: int, logprobs: bool = False) -> tuple[Tensor, Tensor]:
    values, tokens = logits.topk(k, dim=1)
    values = values.float()
    if logprobs:
        values = values - logits.float().logsumexp(dim=1, keepdim=True)
    return values, tokens


def _top_tokens_cpu(logits: Tensor, k: int, logprobs: bool = False) -> tuple[Tensor, Tensor]:
    return native.top_tokens(logits, k, logprobs) or _top_tokens(logits, k, logprobs)


def _can_rank(kernels: Any, logits: Tensor, k: int, *others: Any) -> bool:
    return bool(kernels.can_rank(k))


contracts.define(
    "top_tokens",
    contracts.TOP_TOKENS_SCHEMA,
    contracts.fake_top_tokens,
    {
        "CompositeExplicitAutograd": _top_tokens,
        "CPU": _top_tokens_cpu,
        "CUDA": contracts.with_triton(_top_tokens, "triton_round", "top_tokens", _can_rank),
    },
)
