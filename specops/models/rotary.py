"""Rotary position embedding as tables: frequencies from the config, one gather per forward, one rotation per layer.

The convention is rotate-half, that of Hugging Face models: element ``i`` pairs with element ``i + D/2``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from specops.models.config import RopeConfig

Rope = tuple[Tensor, Tensor]


def inverse_frequencies(rope: RopeConfig, dim: int) -> Tensor:
    """``[dim / 2]`` float32 angle per position of each pair.

    Sources: RoFormer (Su et al. 2021); linear scaling (Chen et al. 2023); YaRN (Peng et al. 2023); Llama 3.1's blend.
    """
    exponent = torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim
    frequencies = 1.0 / (rope.theta**exponent)
    if rope.freq_factors is not None:
        frequencies = frequencies / torch.tensor(rope.freq_factors, dtype=torch.float32, device="cpu")
    if rope.rope_type == "linear":
        return frequencies / rope.factor
    if rope.rope_type == "llama3":
        # Rotations within the original context: few means a long wave, which is stretched; many means it is kept.
        turns = rope.original_max_position * frequencies / (2 * math.pi)
        keep = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
        return keep * frequencies + (1 - keep) * frequencies / rope.factor
    if rope.rope_type == "yarn":
        low, high = (_yarn_pair(rope, dim, turns) for turns in (rope.beta_fast, rope.beta_slow))
        if rope.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        pairs = torch.arange(dim // 2, dtype=torch.float32, device="cpu")
        stretch = ((pairs - low) / max(high - low, 0.001)).clamp(0, 1)
        return stretch * frequencies / rope.factor + (1 - stretch) * frequencies
    return frequencies


class Rotary(nn.Module):
    """cos and sin tables for positions ``0`` to ``max_positions - 1``.

    Args:
        rope: frequencies and scaling.
        dim: rotated dims of a head, even.
        max_positions: rows of the tables. A position outside is clamped: only rows that nobody reads have one.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, rope: RopeConfig, dim: int, max_positions: int) -> None:
        super().__init__()
        self.rope, self.dim, self.max_positions = rope, dim, max_positions
        for name, table in zip(("cos", "sin"), self._tables(), strict=True):
            self.register_buffer(name, table, persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Rope:
        """cos and sin, ``[T, 1, dim / 2]`` in ``dtype``, of ``positions`` ``[T]`` int64."""
        rows = positions.clamp(0, self.max_positions - 1)
        cos, sin = self.cos.index_select(0, rows), self.sin.index_select(0, rows)
        return cos.unsqueeze(1).to(dtype), sin.unsqueeze(1).to(dtype)

    def materialize(self, device: torch.device) -> None:
        """Fill the tables on ``device``, after the module was made on the meta device."""
        self.cos, self.sin = (table.to(device) for table in self._tables())

    def _tables(self) -> Rope:
        positions = torch.arange(self.max_positions, dtype=torch.float32, device="cpu")
        angles = positions[:, None] * inverse_frequencies(self.rope, self.dim)[None, :]
        factor = self.rope.attention_factor
        device = torch.get_default_device()
        return (angles.cos() * factor).to(device), (angles.sin() * factor).to(device)


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """``x`` ``[T, H, D]`` with its pairs rotated by ``rope``."""
    cos, sin = rope
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _yarn_pair(rope: RopeConfig, dim: int, turns: float) -> float:
    """The pair, as a real number, that turns ``turns`` times within the original context."""
    return dim * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
