"""MHA on NVIDIA's TensorRT-LLM kernels, called through flashinfer-python.

Uniform layouts (target verify, draft-extend V2) take the *decode* kernel with ``q_len_per_req`` rows a request: XQA on
compute capability 9.0 and 12.x, TRT-LLM-gen on 10.x. Packed layouts (prefill, draft-extend V1) take TRT-LLM-gen's context
kernel on 10.x; there is none for separate K and V caches on the others. Lengths and pages stay on the device: no host plan,
no synchronisation, safe in a CUDA graph.

XQA reads a bit mask of the request's own rows: causal, built once per width, or the tree mask, packed in each call. What the
kernel itself does not do right is kept from it:

* with several rows a request it cuts the window at 256-key tiles, so a window goes row by row (each row a request);
* with more than 32 rows of heads a request it takes the sink of a wrong head unless the group divides 32: row by row too;
* a request without keys divides 0 by 0 where the KV is split. A sink far below any score makes that 0 and changes no other
  row, so one is always given;
* a request with fewer keys than rows is not masked at all. Such a request does not occur in decoding (its rows are among
  its keys); in checked mode it is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specops.layout import QueryLayout
from specops.ops import attention, flashinfer_common
from specops.ops.backends import FP8, TRTLLM_GEN_MHA, Backend, add_backend
from specops.ops.flashinfer_common import MEBIBYTE, Workspaces

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
        plan: not needed.
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
        if attention._checked_mode and not flashinfer_common.is_capturing(q.device):
            refuse_short_requests(seq_lens, layout.tokens_per_request)
        arguments = xqa_arguments(
            q, k_cache, v_cache, page_table, seq_lens, layout, scale, window, sinks, tree_mask, k_scale, v_scale
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
) -> dict[str, Any]:
    """Arguments of ``flashinfer.decode.trtllm_batch_decode_with_kv_cache`` for XQA; shapes as :func:`specops.ops.mha`.

    Raises:
        ValueError: strides that XQA can't address.
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
        page_table, seq_lens = flashinfer_common.rows_as_requests(page_table, seq_lens, width)
        width = 1
    elif tree_mask is not None:
        mask = _packed_tree(tree_mask).view(page_table.shape[0], width, -1)
    elif width > 1:
        mask = flashinfer_common.causal_mask(page_table.shape[0], width, q.device)
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
        "sinks": _no_sinks(q.shape[1], q.device) if sinks is None else sinks,
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
        "sinks": sinks,
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
        "sinks": sinks,
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


def refuse_short_requests(seq_lens: Tensor, width: int) -> None:
    """Refuse requests that have keys, but fewer than rows. Synchronises the device.

    Raises:
        ValueError: naming the request and both numbers.
    """
    for request, seq_len in enumerate(seq_lens.tolist()):
        if 0 < seq_len < width:
            raise ValueError(
                f"request {request} has {seq_len} keys for {width} rows; XQA masks nothing then. "
                "A uniform request's rows are among its keys, so seq_len is at least the width, or 0 for padding"
            )


@functools.lru_cache(maxsize=64)
def is_xqa(device: torch.device) -> bool:
    """Whether the XQA kernel serves ``device``, and not TRT-LLM-gen."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 10


def _packed_tree(tree_mask: Tensor) -> Tensor:
    if tree_mask.device.type != "cuda":
        return flashinfer_common.pack_mask(tree_mask)
    from specops.ops import mask_kernels

    return mask_kernels.pack_rows(tree_mask)


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
    _sink_constants[device, num_heads] = flashinfer_common.outside_graph_pools(make, device)
    return _sink_constants[device, num_heads]


@functools.cache
def _decode() -> Callable[..., Any]:
    call: Callable[..., Any] = flashinfer_common.load("flashinfer.decode", "flashinfer").trtllm_batch_decode_with_kv_cache
    return call


@functools.cache
def _context() -> Callable[..., Any]:
    call: Callable[..., Any] = flashinfer_common.load("flashinfer.prefill", "flashinfer").trtllm_batch_context_with_kv_cache
    return call
