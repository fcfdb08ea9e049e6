"""Calls of the compiled CPU kernels with all prepared that stays a layer's: for a caller that owns its layers.

    write, attend = CacheWriter(k_cache, v_cache), CacheReader(k_cache, v_cache, num_heads, scale)   # once a layer
    step = prepare_step(page_table, seq_lens, layout)                                                # once a step
    write(k, v, slots)                                                                               # in each layer
    attend(q, out, step)

The ops look at every argument in every call and return a fresh tensor, which is right for a model's code and takes longer
than the kernel for one short request. Here the arguments lie in a block of memory as ``native.c`` reads it; a call writes
the few words that are its own. What cannot be served is refused where the layer or the step is prepared: None is returned
there, and the caller keeps to the ops.
"""

from __future__ import annotations

import ctypes
import struct
from typing import NamedTuple

import torch
from torch import Tensor

from specops.layout import QueryLayout
from specops.ops import native

# The parts of the structures of native.py, in their order: pointers and integers of 8 bytes, and two doubles.
_CALL = struct.Struct("PPqqq")
_STEP = struct.Struct("PPPqqqq")
_LAYER = struct.Struct("PPPP15qdd")
_WRITE = struct.Struct("PPP7q")
_CACHE = struct.Struct("PP11q")


class Step(NamedTuple):
    """A step's part of an attention call, and the tensors that it points into."""

    words: bytes
    kept: tuple[Tensor, ...]


def prepare_step(page_table: Tensor, seq_lens: Tensor, layout: QueryLayout) -> Step | None:
    """``page_table [B, max_pages]``, ``seq_lens [B]``, both int32, and ``layout``, for every layer of a step.

    None where there are no kernels, or a tensor is not int32 on the CPU. Copies nothing that is contiguous already; of
    others the values of now are taken.
    """
    start = layout.query_start
    tensors = (page_table, seq_lens) if start is None else (page_table, seq_lens, start)
    if not all(tensor.is_cpu and tensor.dtype == torch.int32 for tensor in tensors) or native.library() is None:
        return None
    table = page_table if page_table.stride(1) == 1 else page_table.contiguous()
    lens, start = seq_lens.contiguous(), None if start is None else start.contiguous()
    words = _STEP.pack(
        table.data_ptr(),
        lens.data_ptr(),
        0 if start is None else start.data_ptr(),
        *(table.stride(0), table.shape[0], layout.max_query_len, table.shape[1]),
    )
    return Step(words, (table, lens) if start is None else (table, lens, start))


class CacheReader:
    """Attention over one layer's cache, without a tree, into a tensor that the caller owns.

    Args:
        k_cache, v_cache: as for :func:`specops.ops.mha`; must be ones that :func:`specops.ops.cpu.is_native` takes.
        num_heads: of a query.
        scale, window, softcap, sinks: as for :func:`specops.ops.mha`.
    """

    def __init__(
        self,
        k_cache: Tensor,
        v_cache: Tensor,
        num_heads: int,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        lib = native.library()
        if lib is None:
            raise native.NativeUnavailable("the native kernels are turned off or could not be compiled; use ops.mha")
        sinks = None if sinks is None else sinks.contiguous()
        self._kernel, self._kept, self._dtype = lib.specops_attention, (k_cache, v_cache, sinks), k_cache.dtype
        self._memory = ctypes.create_string_buffer(ctypes.sizeof(native.Attention))
        self._view = memoryview(self._memory).cast("B")
        self._address = ctypes.addressof(self._memory)
        _LAYER.pack_into(
            self._memory,
            _CALL.size + _STEP.size,
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            0 if sinks is None else sinks.data_ptr(),
            *(0, 0, 0),
            *k_cache.stride()[:3],
            *v_cache.stride()[:3],
            *(num_heads, k_cache.shape[2], k_cache.shape[3], v_cache.shape[3], k_cache.shape[1]),
            window or 0,
            k_cache.dtype == torch.bfloat16,
            scale,
            softcap or 0.0,
        )

    def __call__(self, q: Tensor, out: Tensor, step: Step, num_rows: int) -> bool:
        """Fill the first ``num_rows`` rows of ``out [T, Hq, Dv]``, which is contiguous, from those of ``q [T, Hq, D]``.

        False, and nothing done, where a tensor is of another dtype or form.
        """
        row, head, unit = q.stride()
        if unit != 1 or q.dtype != self._dtype or out.dtype != self._dtype or not out.is_contiguous():
            return False
        self._view[_CALL.size : _CALL.size + _STEP.size] = step.words
        _CALL.pack_into(self._memory, 0, q.data_ptr(), out.data_ptr(), row, head, num_rows)
        if self._kernel(self._address, torch.get_num_threads()):
            raise MemoryError("no memory was left for the partial results of attention")
        return True


class CacheWriter:
    """Writes of keys and values into one layer's cache, of any dtype, bit for bit.

    Args:
        k_cache, v_cache: as for :func:`specops.ops.store_kv`, on the CPU, with a unit last stride.
    """

    def __init__(self, k_cache: Tensor, v_cache: Tensor) -> None:
        lib = native.library()
        if lib is None:
            raise native.NativeUnavailable("the native kernels are turned off or could not be compiled; use ops.store_kv")
        self._kernel, self._kept = lib.specops_store, (k_cache, v_cache)
        self._dtypes, self._size = (k_cache.dtype, v_cache.dtype), (k_cache.element_size(), v_cache.element_size())
        self._memory = ctypes.create_string_buffer(ctypes.sizeof(native.Store))
        self._address = ctypes.addressof(self._memory)
        pages, page_size, heads, dim = k_cache.shape
        k_size, v_size = self._size
        _CACHE.pack_into(
            self._memory,
            _WRITE.size,
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            *(stride * k_size for stride in k_cache.stride()[:3]),
            *(stride * v_size for stride in v_cache.stride()[:3]),
            *(heads, dim * k_size, v_cache.shape[3] * v_size, page_size, pages),
        )

    def __call__(self, k: Tensor, v: Tensor, slots: Tensor) -> bool:
        """Write the first rows of ``k [T, Hkv, D]`` and ``v [T, Hkv, Dv]``, as many as there are ``slots``.

        False, and nothing done, where a tensor is of another dtype or form.

        Raises:
            IndexError: a slot behind the cache; nothing is written.
        """
        k_row, k_head, k_unit = k.stride()
        v_row, v_head, v_unit = v.stride()
        wide = slots.dtype is torch.int64
        if k_unit != 1 or v_unit != 1 or (k.dtype, v.dtype) != self._dtypes or not (wide or slots.dtype is torch.int32):
            return False
        k_size, v_size = self._size
        _WRITE.pack_into(
            self._memory,
            0,
            k.data_ptr(),
            v.data_ptr(),
            slots.data_ptr(),
            slots.stride(0),
            wide,
            slots.shape[0],
            k_row * k_size,
            k_head * k_size,
            v_row * v_size,
            v_head * v_size,
        )
        wrong = self._kernel(self._address, torch.get_num_threads())
        if wrong >= 0:
            pages, page_size = self._kept[0].shape[:2]
            raise IndexError(f"slot {int(slots[wrong])} is behind a cache of {pages} pages of {page_size} tokens")
        return True
