"""What the backends around other packages' kernels share: late imports, workspaces, rows as requests.

**Workspaces.** A kernel that splits the KV needs scratch memory and semaphores. The semaphores must be zero at first use
and are zero again after every launch, so all layers of a model share one workspace, and so do graphs that are replayed one
after another. There is one per device and stream. A captured graph keeps the workspace of the stream it was captured on:
graphs that shall run *at the same time* must be captured on different streams (cuBLAS's workspaces in PyTorch follow the
same rule). Workspaces are never freed. They are made and zeroed by a helper thread, because allocations of the capturing
thread would land in the graph's private pool, which the graph reuses; and since nothing can be allocated while a capture is
under way, a zeroed spare is made at each eager call for the next new stream that captures.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from specops.ops.graph_memory import outside_graph_pools

MEBIBYTE = 1 << 20


def load(module: str, extra: str) -> Any:
    """Import a module of an optional package at first use.

    Raises:
        ImportError: if the package is missing; names the extra to install.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.split(".")[0]
        raise ImportError(
            f"this backend needs {package}, and importing it failed ({error}): pip install 'specops[{extra}]'"
        ) from error


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream of a CUDA device is being captured into a graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class Workspaces:
    """Zeroed workspaces of one size, one per device and stream; see the module's docstring.

    Args:
        num_bytes: size of each.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._by_stream: dict[tuple[int, int], Tensor] = {}
        self._spare: dict[int, Tensor] = {}

    def get(self, device: torch.device) -> Tensor:
        """``[num_bytes]`` uint8 workspace of the device's current stream.

        Raises:
            RuntimeError: if a new stream captures and no spare is left.
        """
        index, stream = _stream_key(device)
        found = self._by_stream.get((index, stream))
        if is_capturing(device):
            if found is None:
                found = self._spare.pop(index, None)
                if found is None:
                    raise RuntimeError(
                        "a CUDA graph is being captured on a stream that has no workspace yet, and memory can't be "
                        "allocated during a capture; run the op once outside of the capture first"
                    )
                self._by_stream[index, stream] = found
            return found
        if found is None:
            found = self._by_stream[index, stream] = self._make(device)
        if device.type == "cuda" and index not in self._spare:
            self._spare[index] = self._make(device)
        return found

    def _make(self, device: torch.device) -> Tensor:
        return outside_graph_pools(lambda: torch.zeros(self.num_bytes, dtype=torch.uint8, device=device), device)


def _stream_key(device: torch.device) -> tuple[int, int]:
    if device.type != "cuda":
        return -1, 0
    index = torch.cuda.current_device() if device.index is None else device.index
    return index, torch.cuda.current_stream(device).cuda_stream


def rows_as_requests(page_table: Tensor, seq_lens: Tensor, width: int, page_size: int) -> tuple[Tensor, Tensor]:
    """Page table and lengths that make each row of a causal uniform layout a request of its own.

    For kernels that serve one row per request exactly and several only without some feature. Each row reads the KV anew.

    Returns:
        ``[B * width, max_pages]`` int32 and ``[B * width]`` int32; a row before the sequence's start has length 0, one
        behind the page table the table's.
    """
    steps = torch.arange(1 - width, 1, dtype=torch.int32, device=seq_lens.device)
    lens = (seq_lens[:, None] + steps).clamp_(0, page_table.shape[1] * page_size).reshape(-1)
    return page_table.repeat_interleave(width, dim=0, output_size=page_table.shape[0] * width), lens


def need_same_strides(backend: str, k_cache: Tensor, v_cache: Tensor) -> None:
    """Refuse caches whose strides differ.

    Raises:
        ValueError: with both strides.
    """
    if k_cache.stride() != v_cache.stride():
        raise ValueError(
            f"{backend} needs k_cache and v_cache with equal strides, got {k_cache.stride()} and {v_cache.stride()}; "
            "allocate both alike, as PagedKVCache does"
        )
