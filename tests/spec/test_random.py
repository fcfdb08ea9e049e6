"""The counter-based generator against its published test vectors, and its numbers against the uniform distribution.

Run alone: pytest tests/spec/test_random.py
"""

from __future__ import annotations

import pytest
import torch

from specops.spec.random import threefry, uniforms

# Known answers of Threefry-2x32 with 20 rounds, from the authors' Random123 library (kat_vectors).
KNOWN = [
    ((0x00000000, 0x00000000), (0x00000000, 0x00000000), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
    ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
]


@pytest.mark.parametrize(("key", "counter", "expected"), KNOWN)
def test_threefry_gives_the_published_words(
    key: tuple[int, int], counter: tuple[int, int], expected: tuple[int, int]
) -> None:
    words = threefry(tuple(map(torch.tensor, key)), tuple(map(torch.tensor, counter)))
    assert tuple(int(word) for word in words) == expected


def test_numbers_are_uniform_over_positions_and_over_seeds() -> None:
    count = 1 << 16
    many, one = torch.arange(count), torch.tensor(7)
    for seeds, positions in ((one, many), (many, one)):
        numbers = uniforms(seeds, positions, torch.tensor(0))
        assert numbers.dtype == torch.float32
        assert 0 <= float(numbers.min()) <= float(numbers.max()) < 1
        # Deviation of a cell of 64 from its share: sqrt(1024) = 32; five of them in no cell.
        cells = (numbers * 64).long().bincount(minlength=64)
        assert (cells - count // 64).abs().max() < 160
        # Neighbours are unrelated: the correlation of 65,535 pairs deviates by 0.004.
        assert abs(float(torch.corrcoef(torch.stack((numbers[:-1], numbers[1:])))[0, 1])) < 0.02


def test_seeds_above_32_bits_positions_and_streams_all_matter() -> None:
    numbers = [
        float(uniforms(torch.tensor(seed), torch.tensor(position), torch.tensor(stream)))
        for seed, position, stream in ((1, 2, 3), (1 + 2**32, 2, 3), (1, 3, 3), (1, 2, 4), (2**63 - 1, 2, 3))
    ]
    assert len(set(numbers)) == len(numbers)
