"""What the backends around other packages' kernels share: late imports, workspaces, masks in bits, rows as requests.

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
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

MEBIBYTE = 1 << 20
# Requests that one cached mask serves; a larger batch gets a larger mask.
MASK_REQUESTS = 4096

_Made = TypeVar("_Made")


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


def outside_graph_pools(make: Callable[[], _Made], device: torch.device) -> _Made:
    """``make()`` so that its tensors belong to no graph's memory pool, finished when this returns.

    Inductor's graph trees route the allocations of the calling thread into a pool that they later reuse, in warm-up runs
    too. A fresh thread with a stream of its own is outside of that. Not for use while a capture is under way.
    """
    if device.type != "cuda":
        return make()
    made: list[_Made] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
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


def words_per_row(width: int) -> int:
    """32-bit words that hold one mask row of ``width`` bits."""
    return -(-width // 32)


def pack_mask(mask: Tensor) -> Tensor:
    """Bits of a boolean mask, lowest bit first, rows padded to 32 bits.

    Args:
        mask: ``[..., W]`` bool.

    Returns:
        ``[..., 2 * ceil(W / 32)]`` uint16, contiguous.
    """
    width = mask.shape[-1]
    halves = 2 * words_per_row(width)
    padded = torch.nn.functional.pad(mask, (0, 16 * halves - width)).reshape(*mask.shape[:-1], halves, 16)
    weights = 1 << torch.arange(16, dtype=torch.int32, device=mask.device)
    # int16 wraps the sixteenth bit into the sign, which is the same bit pattern.
    words: Tensor = (padded * weights).sum(-1, dtype=torch.int32).to(torch.int16)
    return words.view(torch.uint16)


_causal_masks: dict[tuple[torch.device, int], Tensor] = {}


def causal_mask(batch: int, width: int, device: torch.device) -> Tensor:
    """Packed mask of ``batch`` causal row blocks, built once per width and device.

    Returns:
        ``[batch, width, 2 * ceil(width / 32)]`` uint16, contiguous. During a capture for which none was built before, the
        mask is computed inside the graph.
    """
    cached = _causal_masks.get((device, width))
    if cached is not None and cached.shape[0] >= batch:
        return cached[:batch]

    def make() -> Tensor:
        requests = batch if is_capturing(device) else max(batch, MASK_REQUESTS)
        rows = pack_mask(torch.ones((width, width), dtype=torch.bool, device=device).tril())
        return rows.view(torch.int16).expand(requests, -1, -1).contiguous().view(torch.uint16)

    if is_capturing(device):
        return make()
    if cached is not None:
        _outgrown.append(cached)
    _causal_masks[device, width] = outside_graph_pools(make, device)
    return _causal_masks[device, width][:batch]


# Graphs captured earlier read from these.
_outgrown: list[Tensor] = []


def rows_as_requests(page_table: Tensor, seq_lens: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Page table and lengths that make each row of a causal uniform layout a request of its own.

    For kernels that serve one row per request exactly and several only without some feature. Each row reads the KV anew.

    Returns:
        ``[B * width, max_pages]`` int32 and ``[B * width]`` int32; a row before the sequence's start has length 0.
    """
    steps = torch.arange(1 - width, 1, dtype=torch.int32, device=seq_lens.device)
    lens = (seq_lens[:, None] + steps).clamp_(min=0).reshape(-1)
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
