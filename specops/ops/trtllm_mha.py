"""MHA on NVIDIA's TensorRT-LLM kernels, called through flashinfer-python.

Uniform layouts (target verify, draft-extend V2) take the *decode* kernel with ``q_len_per_req`` rows a request: XQA on
compute capability 9.0 and 12.x, TRT-LLM-gen on 10.x. Packed layouts (prefill, draft-extend V1) take TRT-LLM-gen's context
kernel on 10.x; there is none for separate K and V caches on the others. Lengths and pages stay on the device: no host plan,
no synchronisation, safe in a CUDA graph.

XQA reads a bit mask of the request's own rows. :func:`prepare` writes mask and lengths in one small launch; the op does it
itself, or takes the result as its ``plan`` argument, so that the layers of one forward share it. What the kernel itself
does not do right is kept from it:

* with several rows a request it cuts the window at 256-key tiles, so a window goes row by row (each row a request);
* with more than 32 rows of heads a request it takes the sink of a wrong head unless the group divides 32: row by row too;
* a request without keys divides 0 by 0 where the KV is split. A sink far below any score makes that 0 and changes no other
  row, so one is always given;
* it reads beyond the page table for a length that does, and masks nothing of a request with fewer keys than rows: lengths
  are clamped from both sides and the mask is shifted by as much. For a request shorter than its rows the kernel then reads
  keys behind its ``seq_len``, up to one a row, with weight 0; NaN there makes all of that request's rows NaN. Clearing the
  rows would cost every call a launch of its own, so XQA declares ``short_requests=False``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specops.layout import QueryLayout
from specops.ops import contracts, flashinfer_common
from specops.ops.backends import Backend, add_backend
from specops.ops.builtin import TRTLLM_GEN_MHA
from specops.ops.capabilities import FP8
from specops.ops.flashinfer_common import MEBIBYTE, Workspaces
from specops.ops.graph_memory import outside_graph_pools

# XQA: 8 MiB of semaphores, and scratch for 188 SMs times 16 blocks of 32 rows of 256 values in half precision.
XQA_WORKSPACES = Workspaces(64 * MEBIBYTE)
# The size TRT-LLM-gen's documentation asks for.
GEN_WORKSPACES = Workspaces(128 * MEBIBYTE)

# Heads times rows that XQA takes in one block.
XQA_BLOCK_ROWS = 32
# Below every score, yet above the -1e5 that XQA starts its running maximum at.
NO_SINK = -9.0e4


def mha(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    *,
    layout: QueryLayout,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    tree_mask: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    plan: Tensor | None = None,
    skip_softmax_threshold: float | None = None,
) -> Tensor:
    """Arguments and result as :func:`specops.ops.mha`.

    Args:
        plan: what :func:`prepare` returned for this forward, on XQA; without it the op prepares for itself.
        skip_softmax_threshold: let TRT-LLM-gen skip blocks whose scores are below this factor over the context length
            (arXiv 2512.12087); faster, and no longer exact. None, the default, is exact. See :func:`register_skip_softmax`.

    Raises:
        ImportError: flashinfer-python is missing.
        ValueError: caches whose strides the kernel can't take, or a threshold on XQA.
    """
    if q.shape[0] == 0:
        return q.new_empty(q.shape)
    if is_xqa(q.device):
        if skip_softmax_threshold is not None:
            raise ValueError("skip_softmax_threshold is served by TRT-LLM-gen on compute capability 10.x, not by XQA")
        arguments = xqa_arguments(
            q, k_cache, v_cache, page_table, seq_lens, layout, scale, window, sinks, tree_mask, k_scale, v_scale, plan
        )
        out: Tensor = _decode()(**arguments)
        return out.view(q.shape)
    if layout.is_uniform:
        arguments = gen_decode_arguments(
            q, k_cache, v_cache, page_table, seq_lens, layout, scale, window, sinks, k_scale, v_scale
        )
        call = _decode()
    else:
        arguments = gen_context_arguments(
            q, k_cache, v_cache, page_table, seq_lens, layout, scale, window, sinks, k_scale, v_scale
        )
        call = _context()
    if skip_softmax_threshold is not None:
        arguments["skip_softmax_threshold_scale_factor"] = skip_softmax_threshold
    call(**arguments)
    result: Tensor = arguments["out"]
    return result


def register_skip_softmax(name: str, threshold: float) -> None:
    """Register ``name`` as a further MHA backend: TRT-LLM-gen with a skip-softmax threshold.

    The threshold is a constant of the backend, so a graph dump shows which op skips. It is never chosen by ``auto``.

    Args:
        name: name of the backend; its op is ``specops::{name}_mha``.
        threshold: see :func:`mha`.
    """
    add_backend(
        Backend(
            name,
            "mha",
            TRTLLM_GEN_MHA,
            functools.partial(mha, skip_softmax_threshold=threshold),
            source=f"TensorRT-LLM through flashinfer-python, skip-softmax threshold {threshold}",
        )
    )


def xqa_arguments(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    layout: QueryLayout,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    tree_mask: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    plan: Tensor | None = None,
) -> dict[str, Any]:
    """Arguments of ``flashinfer.decode.trtllm_batch_decode_with_kv_cache`` for XQA; shapes as :func:`specops.ops.mha`.

    Raises:
        ValueError: strides that XQA can't address, a page table shorter than the rows, or a plan of another shape.
    """
    flashinfer_common.need_same_strides("trtllm", k_cache, v_cache)
    head_dim, width = q.shape[2], layout.tokens_per_request
    if any(stride % head_dim for stride in k_cache.stride()[:3]):
        raise ValueError(
            f"XQA counts cache strides in heads of {head_dim} values, and {k_cache.stride()} are not multiples of that"
        )
    group = q.shape[1] // k_cache.shape[2]
    wrong_sinks = sinks is not None and XQA_BLOCK_ROWS % group != 0 and width * group > XQA_BLOCK_ROWS
    mask: Tensor | None = None
    if width > 1 and (window is not None or wrong_sinks):
        page_table, seq_lens = flashinfer_common.rows_as_requests(page_table, seq_lens, width, k_cache.shape[1])
        width = 1
    else:
        prepared = prepare(seq_lens, page_table, layout, k_cache.shape[1], tree_mask) if plan is None else plan
        seq_lens, mask = _unpacked(prepared, page_table.shape[0], width)
    bmm1, bmm2 = fused_scales(scale, k_scale, v_scale)
    return {
        "query": q.contiguous(),
        "kv_cache": (k_cache, v_cache),
        "workspace_buffer": XQA_WORKSPACES.get(q.device),
        "block_tables": page_table.contiguous(),
        "seq_lens": seq_lens.contiguous(),
        "max_seq_len": page_table.shape[1] * k_cache.shape[1],
        "bmm1_scale": bmm1,
        "bmm2_scale": bmm2,
        "window_left": -1 if window is None else window - 1,
        # XQA's own Hopper fp8 kernel writes nothing for an empty request. With several rows the sinks keep it away, and
        # with it a mask that it takes to be causal.
        "out": _output(q, zeroed=width == 1 and k_cache.dtype == FP8),
        "sinks": _no_sinks(q.shape[1], q.device) if sinks is None else sinks.contiguous(),
        "kv_layout": "NHD",
        # The kernel of 0.6.13 reads scale tensors before it waits for the kernel that wrote them.
        "enable_pdl": False if isinstance(bmm1, Tensor) else None,
        "backend": "xqa",
        "q_len_per_req": width,
        "mask": mask,
    }


def gen_decode_arguments(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    layout: QueryLayout,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> dict[str, Any]:
    """Arguments of ``flashinfer.decode.trtllm_batch_decode_with_kv_cache`` for TRT-LLM-gen."""
    bmm1, bmm2 = fused_scales(scale, k_scale, v_scale)
    return {
        "query": q.contiguous(),
        "kv_cache": (k_cache, v_cache),
        "workspace_buffer": GEN_WORKSPACES.get(q.device),
        "block_tables": page_table.contiguous(),
        "seq_lens": seq_lens.contiguous(),
        "max_seq_len": page_table.shape[1] * k_cache.shape[1],
        "bmm1_scale": bmm1,
        "bmm2_scale": bmm2,
        "window_left": -1 if window is None else window - 1,
        "out": _output(q),
        "sinks": None if sinks is None else sinks.contiguous(),
        "kv_layout": "NHD",
        "backend": "trtllm-gen",
        "q_len_per_req": layout.tokens_per_request,
    }


def gen_context_arguments(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    layout: QueryLayout,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> dict[str, Any]:
    """Arguments of ``flashinfer.prefill.trtllm_batch_context_with_kv_cache``."""
    bmm1, bmm2 = fused_scales(scale, k_scale, v_scale)
    batch = page_table.shape[0]
    kv_start = torch.nn.functional.pad(seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
    return {
        "query": q.contiguous(),
        "kv_cache": (k_cache, v_cache),
        "workspace_buffer": GEN_WORKSPACES.get(q.device),
        "block_tables": page_table.contiguous(),
        "seq_lens": seq_lens.contiguous(),
        "max_q_len": layout.max_query_len,
        "max_kv_len": page_table.shape[1] * k_cache.shape[1],
        "bmm1_scale": bmm1,
        "bmm2_scale": bmm2,
        "batch_size": batch,
        "cum_seq_lens_q": layout.offsets(batch, q.device).contiguous(),
        "cum_seq_lens_kv": kv_start,
        "window_left": -1 if window is None else window - 1,
        # Rows behind the last request are nobody's: the kernel leaves them alone.
        "out": _output(q, zeroed=True),
        "sinks": None if sinks is None else sinks.contiguous(),
        "kv_layout": "NHD",
    }


def fused_scales(scale: float, k_scale: Tensor | None, v_scale: Tensor | None) -> tuple[float | Tensor, float | Tensor]:
    """Factors on ``q k`` and on ``p v``: floats, or one-element float32 tensors as soon as one scale is a tensor."""
    if k_scale is None and v_scale is None:
        return scale, 1.0
    given = k_scale if k_scale is not None else v_scale
    assert given is not None
    bmm1 = given.new_full((1,), scale) if k_scale is None else k_scale * scale
    bmm2 = given.new_ones((1,)) if v_scale is None else v_scale
    return bmm1, bmm2


def prepare(
    seq_lens: Tensor, page_table: Tensor, layout: QueryLayout, page_size: int, tree_mask: Tensor | None = None
) -> Tensor:
    """Lengths and bit mask as XQA reads them, for all layers of one forward; the ``plan`` argument of their ops.

    Everything happens on the device, within the compiled forward or the captured graph: there is nothing to update. Layers
    with a window don't use it.

    Args:
        seq_lens, page_table, layout, tree_mask: as the ops will get them.
        page_size: tokens per page.

    Returns:
        ``[B * (1 + q * ceil(q / 32))]`` int32: B lengths, then the words of each row's mask.

    Raises:
        ValueError: a page table that holds fewer tokens than a request has rows.
    """
    rows, capacity = layout.tokens_per_request, page_table.shape[1] * page_size
    if capacity < rows:
        raise ValueError(f"the page table holds {capacity} tokens, fewer than the {rows} rows of a request; widen it")
    prepared: Tensor = torch.ops.specops.trtllm_prepare(seq_lens, tree_mask, rows, capacity)
    return prepared


def _fake_prepare(seq_lens: Tensor, tree_mask: Tensor | None, rows: int, capacity: int) -> Tensor:
    """``[B * (1 + rows * ceil(rows / 32))]`` int32."""
    return seq_lens.new_empty(seq_lens.shape[0] * (1 + rows * _words(rows)), dtype=torch.int32)


def _prepare_cuda(seq_lens: Tensor, tree_mask: Tensor | None, rows: int, capacity: int) -> Tensor:
    from specops.ops import mask_kernels

    return mask_kernels.prepare_rows(seq_lens, tree_mask, rows, capacity)


def _prepare(seq_lens: Tensor, tree_mask: Tensor | None, rows: int, capacity: int) -> Tensor:
    """The same in plain torch."""
    batch, words, device = seq_lens.shape[0], _words(rows), seq_lens.device
    shown = torch.where(seq_lens > 0, seq_lens.clamp(max=capacity).clamp(min=rows), 0)
    key = torch.arange(32 * words, device=device)
    column = key - (seq_lens - shown)[:, None]
    if tree_mask is None:
        seen = column[:, None] <= torch.arange(rows, device=device)[:, None]
    else:
        index = column.clamp(0, rows - 1).long()[:, None].expand(-1, rows, -1)
        seen = tree_mask.view(batch, rows, rows).gather(2, index) | (column < 0)[:, None]
    seen = seen & (key < rows) & (column < rows)[:, None]
    bits = seen.view(batch, rows, words, 32).long() << torch.arange(32, device=device)
    # int32 wraps the last bit into the sign, which is the same bit pattern.
    return torch.cat((shown, bits.sum(-1).to(torch.int32).reshape(-1)))


def _unpacked(prepared: Tensor, batch: int, rows: int) -> tuple[Tensor, Tensor | None]:
    """``[B]`` int32 lengths and ``[B, q, words]`` uint16 mask; no mask for a single row."""
    expected = batch * (1 + rows * _words(rows))
    if prepared.shape != (expected,) or prepared.dtype != torch.int32:
        raise ValueError(
            f"trtllm's plan is the result of specops.ops.trtllm_mha.prepare for {batch} requests of {rows} rows, "
            f"[{expected}] int32; got {list(prepared.shape)} {prepared.dtype}"
        )
    lens, mask = prepared[:batch], prepared[batch:]
    return lens, mask.view(torch.uint16).view(batch, rows, -1) if rows > 1 else None


def _words(rows: int) -> int:
    return -(-rows // 32)


contracts.define(
    "trtllm_prepare",
    "(Tensor seq_lens, Tensor? tree_mask, SymInt rows, SymInt capacity) -> Tensor",
    _fake_prepare,
    {"CPU": _prepare, "CUDA": _prepare_cuda},
)


@functools.lru_cache(maxsize=64)
def is_xqa(device: torch.device) -> bool:
    """Whether the XQA kernel serves ``device``, and not TRT-LLM-gen."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 10


def _output(q: Tensor, zeroed: bool = False) -> Tensor:
    return torch.zeros_like(q, memory_format=torch.contiguous_format) if zeroed else q.new_empty(q.shape)


_sink_constants: dict[tuple[torch.device, int], Tensor] = {}


def _no_sinks(num_heads: int, device: torch.device) -> Tensor:
    """``[Hq]`` float32 of ``NO_SINK``, made once and never freed; inside the graph if a capture comes first."""
    found = _sink_constants.get((device, num_heads))
    if found is not None:
        return found

    def make() -> Tensor:
        return torch.full((num_heads,), NO_SINK, dtype=torch.float32, device=device)

    if flashinfer_common.is_capturing(device):
        return make()
    _sink_constants[device, num_heads] = outside_graph_pools(make, device)
    return _sink_constants[device, num_heads]


@functools.cache
def _decode() -> Callable[..., Any]:
    call: Callable[..., Any] = flashinfer_common.load("flashinfer.decode", "flashinfer").trtllm_batch_decode_with_kv_cache
    return call


@functools.cache
def _context() -> Callable[..., Any]:
    call: Callable[..., Any] = flashinfer_common.load("flashinfer.prefill", "flashinfer").trtllm_batch_context_with_kv_cache
    return call
