"""Batch buckets: the sizes a step is captured at, and the one a batch is padded to."""

from __future__ import annotations

import bisect
from collections.abc import Iterable


def default_buckets(max_requests: int) -> tuple[int, ...]:
    """Every size up to 8, then four sizes an octave (10, 12, 14, 16, 20, ...), and ``max_requests`` itself.

    Padding waste: a batch of ``b`` requests runs in a bucket below ``1.25 * b``, so less than a fifth of the rows that
    run is padding. The list covers the widest batch in *tokens* too, since every request has the same width.

    Raises:
        ValueError: if ``max_requests`` is below 1.
    """
    if max_requests < 1:
        raise ValueError(f"max_requests must be >= 1, got {max_requests}")
    sizes = list(range(1, min(max_requests, 8) + 1))
    octave = 8
    while octave < max_requests:
        sizes.extend(octave + octave // 4 * quarter for quarter in range(1, 5))
        octave *= 2
    return (*(size for size in sizes if size < max_requests), max_requests)


def check_buckets(buckets: Iterable[int]) -> tuple[int, ...]:
    """Sorted and free of repeats.

    Raises:
        ValueError: if there is none, or one is below 1.
    """
    sizes = tuple(sorted(set(buckets)))
    if not sizes or sizes[0] < 1:
        raise ValueError(f"buckets must be batch sizes >= 1, got {list(sizes)}")
    return sizes


def bucket_for(num_requests: int, buckets: tuple[int, ...]) -> int | None:
    """The smallest bucket that holds the batch, None when the batch is larger than the largest."""
    index = bisect.bisect_left(buckets, num_requests)
    return buckets[index] if index < len(buckets) else None
