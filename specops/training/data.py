"""Conversations on disk, and the draft vocabulary that their answers ask for.

A shard is one batch of the generator, a safetensors file written atomically: ``ids`` ``[N, L]`` (uint16 where the vocabulary
allows) and ``greedy`` ``[N, L]`` bool. Shard ``k`` is a function of the seed and ``k`` alone, so a run that was cut short
continues with the shards that are missing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from specops.training.generate import Generator

# Spreads the shards' seeds; held-out shards count down from the seed, so they never meet the training ones.
_SEED_STRIDE = 1_000_003


def write_shards(
    generator: Generator,
    directory: Path,
    *,
    count: int,
    seed: int,
    vocab_size: int,
    held_out: bool = False,
    seconds: float | None = None,
    prompts: Callable[[int], Sequence[Sequence[int]]] | None = None,
    log: Callable[[str], None] = print,
) -> int:
    """Write shards until there are ``count``, or until another one would not fit into ``seconds``.

    ``prompts`` gives the prompts of a shard, from the shard's seed (:meth:`Generator.conversations`).

    Returns:
        The number of shards of this kind now in ``directory``.
    """
    directory.mkdir(parents=True, exist_ok=True)
    kind, start, longest, written = ("held_out" if held_out else "train"), time.perf_counter(), 0.0, 0
    for number in range(count):
        path = directory / f"{kind}_{number:05d}.safetensors"
        if path.exists():
            continue
        elapsed = time.perf_counter() - start
        if seconds is not None and written and elapsed + longest > seconds:
            log(f"{kind}: time is up after {elapsed:.0f} s, {number} of {count} shards")
            return number
        begun = time.perf_counter()
        own_seed = seed + _SEED_STRIDE * (-number - 1 if held_out else number + 1)
        ids, greedy = generator.conversations(own_seed, prompts(own_seed) if prompts is not None else ())
        save_shard(path, ids, greedy, vocab_size)
        took = time.perf_counter() - begun
        # The first shard holds the compile time; do not plan with it.
        longest = max(longest, took) if written else 0.0
        written += 1
        share = greedy.float().mean().item()
        log(f"{kind} shard {number + 1}/{count}: {ids.numel() / took / 1e3:.1f}k tokens/s, {share:.0%} greedy, {took:.1f} s")
    return count


def save_shard(path: Path, ids: Tensor, greedy: Tensor, vocab_size: int) -> None:
    from safetensors.torch import save_file

    stored = ids.to(torch.uint16 if vocab_size <= 1 << 16 else torch.int32)
    partial = path.with_suffix(".partial")
    save_file({"ids": stored.cpu().contiguous(), "greedy": greedy.cpu().contiguous()}, partial)
    os.replace(partial, path)


def load_shards(directory: Path, kind: str = "train", limit: int | None = None) -> tuple[Tensor, Tensor]:
    """All rows of one kind: ids ``[N, L]`` int32 and greedy ``[N, L]`` bool, on the CPU.

    Raises:
        FileNotFoundError: there are none.
    """
    from safetensors.torch import load_file

    paths = sorted(directory.glob(f"{kind}_*.safetensors"))[:limit]
    if not paths:
        raise FileNotFoundError(f"no {kind} shards in {directory}; write them first (--stage data)")
    shards = [load_file(path) for path in paths]
    return torch.cat([s["ids"].to(torch.int32) for s in shards]), torch.cat([s["greedy"] for s in shards])


def draft_vocabulary(ids: Tensor, greedy: Tensor, vocab_size: int, size: int, always: tuple[int, ...] = ()) -> Tensor:
    """The ``size`` target ids that greedy answers use most, in rising order (FR-Spec, Zhao et al. 2025).

    Args:
        ids, greedy: ``[N, L]``, as :func:`load_shards` returns them.
        vocab_size: the target's.
        size: tokens to keep.
        always: ids that are kept whatever their count.

    Returns:
        ``[size]`` int64.
    """
    counts = torch.bincount(ids[greedy].long(), minlength=vocab_size)
    counts[list(always)] = counts.max() + 1
    # A stable sort, so that ties go to the lower id whatever the device.
    return counts.sort(descending=True, stable=True).indices[:size].sort().values


def d2t_of(kept: Tensor) -> Tensor:
    """Offsets of a draft vocabulary: target id = draft id + ``d2t[draft id]``."""
    return kept - torch.arange(kept.shape[0], device=kept.device)


def draft_ids_of(kept: Tensor, vocab_size: int) -> Tensor:
    """``[vocab_size]`` int64: the draft id of each target id, -1 where it has none."""
    inverse = torch.full((vocab_size,), -1, dtype=torch.int64, device=kept.device)
    inverse[kept] = torch.arange(kept.shape[0], device=kept.device)
    return inverse


def coverage(ids: Tensor, greedy: Tensor, kept: Tensor) -> float:
    """Share of the greedy tokens that the draft vocabulary holds."""
    return torch.isin(ids[greedy].long(), kept).float().mean().item()
