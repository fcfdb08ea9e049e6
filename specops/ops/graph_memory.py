"""Memory that outlives a call and so may not come out of a CUDA graph's own pool.

Whatever an op keeps from one call to the next (workspaces, counters, tables of addresses) may first be asked for in the
warm-up run of a graph. Torch's graph trees then count a tensor too many in their pool, and a later graph may write over it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch

_Made = TypeVar("_Made")


def outside_graph_pools(make: Callable[[], _Made], device: torch.device) -> _Made:
    """``make()`` so that its tensors belong to no graph's memory pool, finished when this returns.

    Inductor's graph trees route the allocations of the calling thread into a pool that they later reuse, in warm-up runs
    too. A fresh thread with a stream of its own is outside of that. It goes on where the current stream will stand, so
    ``make`` may read what that one still has to write. Not for use while a capture is under way.
    """
    if device.type != "cuda":
        return make()
    current = torch.cuda.current_stream(device)
    made: list[_Made] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stream.wait_stream(current)
            with torch.cuda.device(device), torch.cuda.stream(stream), torch.no_grad():
                made.append(make())
            stream.synchronize()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="specops-allocate")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return made[0]
