"""Stand-ins for vendor entry points: float64 loops over exactly what the kernels are documented to read.

They take the real functions' arguments, read pages, lengths, bit masks and scales as the kernels do, and know nothing of
specops. Comparing a backend that runs on them with the oracle tests the arguments it passes.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def attend(q: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float, cap: float, sinks: Tensor | None) -> Tensor:
    """``[rows, Hq, Dv]`` float64; seen ``[rows, keys]`` bool."""
    rows, heads = q.shape[:2]
    out = torch.zeros((rows, heads, values.shape[2]), dtype=torch.float64)
    group = heads // keys.shape[1]
    for row in range(rows):
        if not seen[row].any():
            continue
        for head in range(heads):
            k, v = keys[seen[row], head // group].double(), values[seen[row], head // group].double()
            scores = scale * (k @ q[row, head].double())
            if cap > 0:
                scores = cap * torch.tanh(scores / cap)
            top = scores.max() if sinks is None else torch.maximum(scores.max(), sinks[head].double())
            weights = torch.exp(scores - top)
            total = weights.sum() + (0.0 if sinks is None else torch.exp(sinks[head].double() - top))
            out[row, head] = (weights / total) @ v
    return out


def gathered(cache: Tensor, pages: Tensor, count: int) -> Tensor:
    """``[count, H, D]`` float64 of an NHD cache."""
    place = torch.arange(count)
    page, offset = pages.long()[place // cache.shape[1]], place % cache.shape[1]
    if cache.dtype == torch.float8_e4m3fn:
        return cache.view(torch.uint8)[page, offset].view(cache.dtype).float().double()
    return cache[page, offset].double()


def unpacked(words: Tensor, width: int) -> Tensor:
    """``[rows, width]`` bool of XQA's ``[rows, words]`` uint16 mask, bit by bit."""
    out = torch.zeros((words.shape[0], width), dtype=torch.bool)
    for row, line in enumerate(words.view(torch.int16).tolist()):
        for column in range(width):
            out[row, column] = bool((line[column // 16] & 0xFFFF) >> (column % 16) & 1)
    return out


def number(value: Any) -> float:
    return float(value.item()) if isinstance(value, Tensor) else float(value)


def xqa_decode(
    query: Tensor,
    kv_cache: tuple[Tensor, Tensor],
    workspace_buffer: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    bmm1_scale: float | Tensor,
    bmm2_scale: float | Tensor,
    window_left: int,
    out: Tensor,
    sinks: Tensor | None,
    kv_layout: str,
    enable_pdl: bool | None,
    backend: str,
    q_len_per_req: int,
    mask: Tensor | None,
) -> Tensor:
    """``trtllm_batch_decode_with_kv_cache`` on XQA: with several rows no window, with one row no mask."""
    assert backend == "xqa"
    assert kv_layout == "NHD"
    assert workspace_buffer.dtype == torch.uint8
    assert query.is_contiguous()
    assert block_tables.is_contiguous()
    assert max_seq_len == block_tables.shape[1] * kv_cache[0].shape[1]
    assert q_len_per_req == 1 or window_left == -1
    for request, count in enumerate(seq_lens.tolist()):
        rows = slice(request * q_len_per_req, (request + 1) * q_len_per_req)
        if count == 0:
            out[rows] = 0
            continue
        assert count >= q_len_per_req
        seen = torch.ones((q_len_per_req, count), dtype=torch.bool)
        if q_len_per_req > 1:
            assert mask is not None
            assert mask.shape == (seq_lens.shape[0], q_len_per_req, 2 * math.ceil(q_len_per_req / 32))
            seen[:, count - q_len_per_req :] = unpacked(mask[request], q_len_per_req)
        if window_left >= 0:
            seen[:, : max(0, count - window_left - 1)] = False
        keys, values = (gathered(cache, block_tables[request], count) for cache in kv_cache)
        result = attend(query[rows], keys, values, seen, number(bmm1_scale), 0.0, sinks)
        out[rows] = (result * number(bmm2_scale)).to(out.dtype)
    return out


class PagedPrefillWrapper:
    """``BatchPrefillWithPagedKVCacheWrapper`` in CUDA graph mode, 0.6.13."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
    ) -> None:
        assert use_cuda_graph
        assert qo_indptr_buf is not None
        self.buffers = (qo_indptr_buf, paged_kv_indptr_buf, paged_kv_last_page_len_buf)
        self.indices, self.mask, self.mask_start = paged_kv_indices_buf, custom_mask_buf, mask_indptr_buf
        self.backend, self.has_sinks = backend, jit_args is not None
        self._max_total_num_rows: int | None = None
        self._plan_info: list[int] | None = None

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        seq_lens: Tensor | None = None,
        max_token_per_sequence: int | None = None,
    ) -> None:
        assert qo_indptr.device.type == "cpu"
        assert len(paged_kv_indices) == int(paged_kv_indptr[-1])
        assert self.indices is not None
        assert self.indices.data_ptr() != paged_kv_indices.data_ptr()
        self.indices[: len(paged_kv_indices)] = paged_kv_indices
        assert self._max_total_num_rows is not None
        assert int(qo_indptr[-1]) <= self._max_total_num_rows
        for buffer, value in zip(self.buffers, (qo_indptr, paged_kv_indptr, paged_kv_last_page_len), strict=True):
            assert buffer is not None
            buffer.copy_(value)
        pages = paged_kv_indptr.diff()
        lens = torch.where(pages > 0, (pages - 1) * page_size + paged_kv_last_page_len, 0)
        assert seq_lens is not None
        assert torch.equal(lens.int(), seq_lens)
        self.causal, self.scale, self.window, self.cap = causal, sm_scale, window_left, logits_soft_cap or 0.0
        self._qo_indptr_last = int(qo_indptr[-1])
        self._plan_info = [self._max_total_num_rows, num_qo_heads, num_kv_heads, head_dim_qk]

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *args: Any, out: Tensor) -> Tensor:
        assert q.shape[0] == self._qo_indptr_last
        assert self.scale is not None
        starts, page_start, last = (buffer.tolist() for buffer in self.buffers if buffer is not None)
        sinks, scale = (args[0], args[1]) if self.has_sinks else (None, self.scale)
        page_size = paged_kv_cache[0].shape[1]
        for request in range(len(starts) - 1):
            rows = slice(starts[request], starts[request + 1])
            count, num_pages = rows.stop - rows.start, page_start[request + 1] - page_start[request]
            kv_len = 0 if num_pages == 0 else (num_pages - 1) * page_size + last[request]
            seen = torch.ones((count, kv_len), dtype=torch.bool)
            for row in range(count):
                for key in range(kv_len):
                    if self.mask is not None:
                        assert self.mask_start is not None
                        bit = row * kv_len + key
                        byte = int(self.mask[int(self.mask_start[request]) + bit // 8])
                        seen[row, key] = bool(byte >> (bit % 8) & 1)
                    elif self.causal:
                        seen[row, key] = key <= kv_len - count + row
                    if self.window >= 0:
                        seen[row, key] &= key + count + self.window >= kv_len + row
            assert self.indices is not None
            pages = self.indices[page_start[request] : page_start[request + 1]]
            keys, values = (gathered(cache, pages, kv_len) for cache in paged_kv_cache)
            out[rows] = attend(q[rows], keys, values, seen, scale, self.cap, sinks).to(out.dtype)
            if self.backend == "fa3" and kv_len > 0:
                # As the kernel was seen to do, which looks at keys for whole requests only.
                out[rows][~seen.any(dim=1)] = 7.0
        return out


class PagedMlaWrapper:
    """``BatchMLAPagedAttentionWrapper`` in CUDA graph mode, 0.6.13."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: Tensor | None = None,
        kv_indptr: Tensor | None = None,
        kv_indices: Tensor | None = None,
        kv_len_arr: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        assert use_cuda_graph
        self.buffers, self.indices = (qo_indptr, kv_indptr, kv_len_arr), kv_indices
        self._plan_info = [0]

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_len_arr: Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        assert causal
        assert len(kv_indices) == int(kv_indptr[-1])
        assert self.indices is not None
        assert self.indices.data_ptr() != kv_indices.data_ptr()
        self.indices[: len(kv_indices)] = kv_indices
        for buffer, value in zip(self.buffers, (qo_indptr, kv_indptr, kv_len_arr), strict=True):
            assert buffer is not None
            buffer.copy_(value)
        self.scale = sm_scale

    def run(self, q_nope: Tensor, q_pe: Tensor, ckv_cache: Tensor, kpe_cache: Tensor, out: Tensor) -> Tensor:
        starts, page_start, lens = (buffer.tolist() for buffer in self.buffers if buffer is not None)
        cache = torch.cat((ckv_cache, kpe_cache), dim=2).unsqueeze(2)
        q = torch.cat((q_nope, q_pe), dim=2)
        for request, kv_len in enumerate(lens):
            rows = slice(starts[request], starts[request + 1])
            count = rows.stop - rows.start
            seen = torch.arange(kv_len)[None, :] <= (kv_len - count + torch.arange(count))[:, None]
            assert self.indices is not None
            keys = gathered(cache, self.indices[page_start[request] : page_start[request + 1]], kv_len)
            result = attend(q[rows], keys, keys[..., : ckv_cache.shape[2]], seen, self.scale, 0.0, None)
            out[rows] = result.to(out.dtype)
        return out
