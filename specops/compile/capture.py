"""Capture of one CUDA graph among many.

``torch.cuda.graph`` waits for the device and gives all cached memory back before each capture, and the run that warms the
next one up has to get it again. Twenty captures in a row need that once, see :func:`captures`.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch


@contextlib.contextmanager
def captures(device: torch.device) -> Iterator[None]:
    """Around a series of captures: cached memory is given back before and after it."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    try:
        yield
    finally:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


@contextlib.contextmanager
def capturing(graph: torch.cuda.CUDAGraph, pool: Any, stream: torch.cuda.Stream) -> Iterator[None]:
    """Capture what is launched within into ``graph``; no garbage is collected meanwhile, which could free what the device
    may not be asked to free then.

    cuBLAS's workspace is dropped before, so that the graph gets one in its own pool: torch drops workspaces whenever it
    records a graph of its own, and a graph that used the common one would then write to memory that is another's. It is
    dropped after as well, which leaves that part of the pool to the next capture.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.stream(stream):
            torch._C._cuda_clearCublasWorkspaces()
            graph.capture_begin(pool)
            try:
                yield
            finally:
                graph.capture_end()
                torch._C._cuda_clearCublasWorkspaces()
    finally:
        if collects:
            gc.enable()


def bound_replay(graph: torch.cuda.CUDAGraph) -> Callable[[], None]:
    """``graph.replay`` without the Python around it, which would stand before every launch.

    That Python is for a debugging aid of torch, and stays if the aid is on, or if the graph is another kind of object.
    """
    if type(graph) is not torch.cuda.CUDAGraph or getattr(graph, "_tracker", None) is not None:
        return graph.replay
    replay: Callable[[], None] = super(torch.cuda.CUDAGraph, graph).replay
    return replay


@functools.cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One side stream for all captures of a device: libraries keep a workspace of tens of MiB for every stream they see."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
