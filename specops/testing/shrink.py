"""Reducing an input that fails to the smallest one that still does.

An input is a dictionary of keyword arguments, or a sequence of batches for runners. Simpler inputs are tried, largest steps
first; whenever one still fails, the search goes on from there. It ends when nothing simpler fails, or the budget is spent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

Input = TypeVar("Input")
Arguments = dict[str, Any]
Batches = tuple[tuple[tuple[int, int], ...], ...]

# Left out one by one; the case then has the feature no more.
OPTIONAL = (
    "tree_width",
    "window",
    "softcap",
    "sinks",
    "fp8",
    "strided_q",
    "hnd",
    "shared_storage",
    "padded_rows",
    "table_columns",
    "slack",
    "gain",
    "scale",
    "value_dim",
    "dtype",
    "seed",
    "spare_columns",
)


def shrink(
    failing: Input,
    simpler: Callable[[Input], Iterator[Input]],
    still_fails: Callable[[Input], bool],
    seconds: float = 10.0,
) -> Input:
    """The smallest input found that still fails, ``failing`` itself at worst."""
    deadline = time.monotonic() + seconds
    progress = True
    while progress:
        progress = False
        for candidate in simpler(failing):
            if time.monotonic() > deadline:
                return failing
            if still_fails(candidate):
                failing, progress = candidate, True
                break
    return failing


def simpler_arguments(arguments: Arguments) -> Iterator[Arguments]:
    """Arguments of :func:`make_mha_case` or :func:`make_mla_case` that ask for less; every size must be given."""
    seq_lens, query_lens = tuple(arguments["seq_lens"]), arguments["query_lens"]
    packed = not isinstance(query_lens, int)
    for kept in _fewer(len(seq_lens)):
        changed = {**arguments, "seq_lens": tuple(seq_lens[i] for i in kept)}
        if packed:
            changed["query_lens"] = tuple(query_lens[i] for i in kept)
        yield changed
    for name in OPTIONAL:
        if name in arguments:
            yield {key: value for key, value in arguments.items() if key != name}
    if packed:
        yield {**arguments, "query_lens": max(1, *query_lens, 1)}
        for index, length in enumerate(query_lens):
            for less in _less(length):
                yield {**arguments, "query_lens": _replaced(query_lens, index, less)}
    else:
        for less in _less(query_lens, 1):
            yield {**arguments, "query_lens": less}
    if "tree_width" in arguments:
        for less in _less(arguments["tree_width"], query_lens):
            yield {**arguments, "tree_width": less}
    for index, length in enumerate(seq_lens):
        for less in _less(length):
            yield {**arguments, "seq_lens": _replaced(seq_lens, index, less)}
    yield from _smaller_heads(arguments)
    for name, sizes in (
        ("head_dim", (8, 16, 32, 64)),
        ("latent_dim", (16, 32, 64)),
        ("rope_dim", (8, 16)),
        ("page_size", (1, 4)),
    ):
        for size in sizes:
            if size < arguments.get(name, 0):
                yield {**arguments, name: size}
    if "window" in arguments:
        for less in _less(arguments["window"], 1):
            yield {**arguments, "window": less}


def simpler_batches(batches: Batches) -> Iterator[Batches]:
    """Shorter sequences of smaller batches of ``(seq_len, accept_len)`` pairs."""
    for kept in _fewer(len(batches)):
        yield tuple(batches[i] for i in kept)
    for index, batch in enumerate(batches):
        for kept in _fewer(len(batch)):
            yield _replaced(batches, index, tuple(batch[i] for i in kept))
        for place, (seq_len, accept_len) in enumerate(batch):
            for less in _less(seq_len, 6):
                yield _replaced(batches, index, _replaced(batch, place, (less, accept_len)))
            for less in _less(accept_len, 1):
                yield _replaced(batches, index, _replaced(batch, place, (seq_len, less)))


def _smaller_heads(arguments: Arguments) -> Iterator[Arguments]:
    heads, kv_heads = arguments["num_heads"], arguments.get("num_kv_heads")
    if kv_heads is None:
        for less in _less(heads, 1):
            yield {**arguments, "num_heads": less}
        return
    group = heads // kv_heads
    for fewer in _less(kv_heads, 1):
        yield {**arguments, "num_heads": fewer * group, "num_kv_heads": fewer}
    for smaller in _less(group, 1):
        yield {**arguments, "num_heads": kv_heads * smaller}


def _fewer(count: int) -> Iterator[list[int]]:
    """Index lists with entries left out: each half, then each single entry."""
    if count > 3:
        yield list(range(count // 2))
        yield list(range(count // 2, count))
    if count > 1:
        for left_out in range(count):
            yield [i for i in range(count) if i != left_out]


def _less(value: int, least: int = 0) -> list[int]:
    return [less for less in dict.fromkeys((least, value // 2, value - 1)) if least <= less < value]


def _replaced(items: Any, index: int, value: Any) -> Any:
    return (*items[:index], value, *items[index + 1 :])
