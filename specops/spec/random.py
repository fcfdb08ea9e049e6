"""Random numbers that depend on a seed and a counter alone, computed from tensors inside the graph.

Threefry-2x32 with 20 rounds (Salmon et al. 2011): additions, rotations and exclusive ors, no state. A token's number is a
function of its request's seed and its position, so neither the batch, the bucket nor the shape of the draft tree changes
what a request draws. Words are kept in int64, where nothing overflows.
"""

from __future__ import annotations

from torch import Tensor

_WORD = 0xFFFFFFFF
_PARITY = 0x1BD11BDA
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def threefry(key: tuple[Tensor, Tensor], counter: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Two 32-bit words for a key and a counter of two words each; int64 tensors of shapes that broadcast."""
    keys = (key[0], key[1], _PARITY ^ key[0] ^ key[1])
    x, y = (counter[0] + keys[0]) & _WORD, (counter[1] + keys[1]) & _WORD
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x = (x + y) & _WORD
            y = (((y << rotation) & _WORD) | (y >> (32 - rotation))) ^ x
        x = (x + keys[(group + 1) % 3]) & _WORD
        y = (y + keys[(group + 2) % 3] + group + 1) & _WORD
    return x, y


def uniforms(seeds: Tensor, positions: Tensor, streams: Tensor) -> Tensor:
    """Float32 numbers in [0, 1), 24 bits each; shapes broadcast.

    Args:
        seeds: int64, not negative.
        positions, streams: int64, 0 to 2**32 - 1; one number for each pair.
    """
    first, _ = threefry((seeds & _WORD, seeds >> 32), (positions & _WORD, streams & _WORD))
    return (first >> 8).float() * 2.0**-24
