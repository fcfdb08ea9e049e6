"""Kernels that a step compiles at its first run, compiled for all buckets before anything else, several at a time.

An op with a kernel of its own may take another variant of it at other batch sizes, and each takes a second or two, one after
the other, if captures come upon them. Which op that is, is not known here. So the step is run eagerly on a padded batch of
each bucket, in a few threads: compilers leave the interpreter to others for most of their time.

What makes that safe: nothing else happens meanwhile, above all no tracing and no capture, both of which mind what other
threads do. The largest bucket runs first and alone, which settles whatever a module makes at its first run. All threads
launch on one stream, so that ops whose workspaces belong to a stream find it as they know it. A padded batch writes no page.
"""

from __future__ import annotations

import collections
import contextlib
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from specops.compile.capture import capture_stream

# More would wait for the interpreter. Where cores are few, two that compile the same kernel cost more than is won.
MOST_THREADS = 4
CORES_PER_THREAD = 2


def run_ahead(
    step: Callable[..., Any], batch_of: Callable[[int], Mapping[str, Tensor]], sizes: Sequence[int], device: torch.device
) -> list[str]:
    """Run ``step(**batch_of(size))`` for all sizes, the largest one first; returns when all are done.

    Args:
        batch_of: makes a padded batch on ``device``; called in threads.

    Returns:
        What failed, a sentence each. A failure ends nothing but its own run; none is run beside others if the first fails.
    """
    failed: list[str] = []
    first, *others = spread(sizes)
    current = torch.cuda.current_stream(device) if device.type == "cuda" else None
    waiting = collections.deque([first])

    def work() -> None:
        with _behind(current, device), torch.no_grad():
            while True:
                try:
                    size = waiting.popleft()
                except IndexError:
                    return
                try:
                    step(**batch_of(size))
                except Exception as error:
                    failed.append(f"{size} requests: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")

    def guarded() -> None:
        try:
            work()
        except Exception as error:
            failed.append(f"{type(error).__name__}: {error}")

    guarded()
    if failed or not others:
        return failed
    waiting.extend(others)
    count = max(1, min(MOST_THREADS, len(others), (os.cpu_count() or 1) // CORES_PER_THREAD))
    threads = [threading.Thread(target=guarded, name=f"specops-ahead-{index}") for index in range(count)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    finally:
        # Where the wait was interrupted, the threads end with what they are at.
        waiting.clear()
        for thread in threads:
            thread.join()
    if device.type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
    return failed


def spread(sizes: Sequence[int]) -> list[int]:
    """The largest, the smallest, then always the one that is by its ratio farthest from all before it.

    Neighbours mostly share their kernels. In this order those at work at the same time mostly don't.
    """
    left = sorted(set(sizes), reverse=True)
    found = [left.pop(0)]

    def distance(size: int) -> float:
        return round(min(abs(math.log(size / other)) for other in found), 6)

    while left:
        found.append(max(left, key=distance))
        left.remove(found[-1])
    return found


@contextlib.contextmanager
def _behind(current: torch.cuda.Stream | None, device: torch.device) -> Iterator[None]:
    """Launch on the common stream, behind what ``current`` has; done with it at the end."""
    if current is None:
        yield
        return
    stream = capture_stream(device)
    with torch.cuda.device(device), torch.cuda.stream(stream):
        stream.wait_stream(current)
        try:
            yield
        finally:
            stream.synchronize()
