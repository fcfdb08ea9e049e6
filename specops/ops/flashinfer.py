"""MHA and MLA on FlashInfer's fa2 and fa3 kernels, planned on the host.

The kernels schedule their work from lengths that the host must know, so each op takes the handle of a
:class:`specops.ops.planning.Plan` (see there): ``Plan.update`` before each step, the same for eager, capture and replay.
Called without a handle an op plans on the spot, which synchronises the device, and refuses within a capture.

Every FlashInfer wrapper here is in its CUDA graph mode, also for eager calls: its buffers have fixed addresses and its
launch depends on the batch size alone. If an update would change a captured launch after all, it raises.

fa2 takes tree masks: the op writes FlashInfer's bit mask (rows times keys) from the tree and the lengths on the device, and
folds the window into it. fa3 has no masks. Sinks come from the package's attention-sink variant, which has neither soft-cap
nor masks. fp8 scales stay tensors: k_scale is multiplied into the query, v_scale into the output.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specops.layout import QueryLayout
from specops.ops import flashinfer_common, planning
from specops.ops.flashinfer_common import MEBIBYTE
from specops.ops.planning import HostStep, Plan

# What the MLA kernels and fa3 ask for at most, by their documentation.
WORKSPACE_BYTES = 128 * MEBIBYTE
# fa2 runs at most two blocks per SM, of at most 128 rows of query heads.
FA2_BLOCKS_PER_SM = 2
FA2_TILE_ROWS = 128
# Kernels may read a few bytes behind the end of a bit mask.
MASK_SLACK = 16


@dataclass(frozen=True)
class MhaKey:
    """What an MHA kernel is compiled and scheduled for, beside the plan's shape."""

    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    masked: bool = False


@dataclass(frozen=True)
class MlaKey:
    """As :class:`MhaKey`, for MLA."""

    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    num_heads: int
    latent_dim: int
    rope_dim: int
    scale: float


def fa2_mha(*args: Any, **kwargs: Any) -> Tensor:
    """:func:`specops.ops.mha` on fa2; ``plan`` is the handle of a plan, or left out for eager calls."""
    return _mha("flashinfer_fa2", *args, **kwargs)


def fa3_mha(*args: Any, **kwargs: Any) -> Tensor:
    """:func:`specops.ops.mha` on fa3; ``plan`` is the handle of a plan, or left out for eager calls."""
    return _mha("flashinfer_fa3", *args, **kwargs)


def fa2_mla(*args: Any, **kwargs: Any) -> Tensor:
    """:func:`specops.ops.mla` on fa2; ``plan`` is the handle of a plan, or left out for eager calls."""
    return _mla("flashinfer_fa2", *args, **kwargs)


def fa3_mla(*args: Any, **kwargs: Any) -> Tensor:
    """:func:`specops.ops.mla` on fa3; ``plan`` is the handle of a plan, or left out for eager calls."""
    return _mla("flashinfer_fa3", *args, **kwargs)


def _mha(
    backend: str,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    *,
    layout: QueryLayout,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    tree_mask: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    plan: Tensor | None = None,
) -> Tensor:
    if q.shape[0] == 0:
        return q.new_empty(q.shape)
    flashinfer_common.need_same_strides(backend, k_cache, v_cache)
    planned_for = planning.plan_of(plan, backend, "mha", page_table, seq_lens, layout, q.shape[0], k_cache.shape[1])
    masked = tree_mask is not None
    key = MhaKey(
        q.dtype,
        k_cache.dtype,
        q.shape[1],
        k_cache.shape[2],
        q.shape[2],
        scale,
        None if masked else window,
        softcap,
        sinks is not None,
        masked,
    )
    kernel: PlannedMha = planned_for.kernel(key, lambda owner: PlannedMha(owner, key))
    if tree_mask is not None:
        kernel.fill_mask(seq_lens, tree_mask, layout.tokens_per_request, window)
    if k_scale is not None:
        q = (q * k_scale).to(q.dtype)
    # Rows behind the last request are nobody's, and no kernel writes them.
    out = q.new_empty(q.shape) if layout.is_uniform else torch.zeros_like(q, memory_format=torch.contiguous_format)
    kernel.run(q, k_cache, v_cache, out, None if sinks is None else sinks.contiguous())
    return out if v_scale is None else out.mul_(v_scale)


def _mla(
    backend: str,
    q_latent: Tensor,
    q_rope: Tensor,
    kv_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    *,
    layout: QueryLayout,
    scale: float,
    plan: Tensor | None = None,
) -> Tensor:
    num_rows, num_heads, latent_dim = q_latent.shape
    if num_rows == 0:
        return q_latent.new_empty(q_latent.shape)
    planned_for = planning.plan_of(plan, backend, "mla", page_table, seq_lens, layout, num_rows, kv_cache.shape[1])
    key = MlaKey(q_latent.dtype, kv_cache.dtype, num_heads, latent_dim, q_rope.shape[2], scale)
    kernel: PlannedMla = planned_for.kernel(key, lambda owner: PlannedMla(owner, key))
    # As in _mha.
    shape, full = q_latent.shape, layout.is_uniform
    out = q_latent.new_empty(shape) if full else torch.zeros_like(q_latent, memory_format=torch.contiguous_format)
    kernel.run(q_latent, q_rope, kv_cache[..., :latent_dim], kv_cache[..., latent_dim:], out)
    return out


class _PlannedWrapper:
    """A FlashInfer wrapper in graph mode, its buffers, and the launch it was captured with."""

    def __init__(self, wrapper: Any, device: torch.device) -> None:
        self.wrapper, self.device = wrapper, device
        self._staging: list[tuple[Tensor | None, torch.cuda.Event]] = []
        self._captured: list[int] | None = None

    def _stage(self) -> None:
        """Give the wrapper the older of two pinned staging buffers, once its last copy to the device is over.

        With a single one the host would have to wait for the previous step before it may write the next plan. A wrapper
        that hides its buffer gets that wait.
        """
        if not self._staging:
            if self.device.type != "cuda":
                return
            own = getattr(self.wrapper, "_pin_memory_int_workspace_buffer", None)
            spare = None if own is None else torch.empty_like(own, pin_memory=True)
            self._staging = [(own, torch.cuda.Event())]  # type: ignore[no-untyped-call]
            if spare is not None:
                self._staging.append((spare, torch.cuda.Event()))  # type: ignore[no-untyped-call]
        self._staging.reverse()
        buffer, copied = self._staging[0]
        copied.synchronize()
        if buffer is not None:
            self.wrapper._pin_memory_int_workspace_buffer = buffer

    def _staged(self) -> None:
        if self._staging:
            self._staging[0][1].record()
        if self._captured is not None and self._launch() != self._captured:
            raise RuntimeError(
                "FlashInfer planned another launch for these lengths than the one in the captured graph; capture again"
            )

    def _note_capture(self) -> None:
        if flashinfer_common.is_capturing(self.device):
            self._captured = self._launch()

    def _launch(self) -> list[int]:
        return [int(number) for number in getattr(self.wrapper, "_plan_info", None) or ()]


class PlannedMha(_PlannedWrapper):
    """One MHA kernel of a plan."""

    def __init__(self, plan: Plan, key: MhaKey) -> None:
        wrapper_type = _prefill().BatchPrefillWithPagedKVCacheWrapper
        arguments = mha_wrapper_arguments(plan, key)
        if "max_total_num_rows" in inspect.signature(wrapper_type).parameters:
            arguments["max_total_num_rows"] = plan.num_rows
        super().__init__(wrapper_type(**arguments), plan.device)
        # Else the wrapper takes the rows of the first step for the most there will ever be.
        self.wrapper._max_total_num_rows = plan.num_rows
        # The package keeps these from a number of heads' first run on, which may happen in a graph's own memory.
        slopes = getattr(_prefill(), "_get_cache_alibi_slopes_buf", None)
        if slopes is not None:
            slopes(key.num_heads, plan.device)
        self.key, self.num_requests, self.indices = key, plan.num_requests, plan.page_indices
        self._apart = plan.backend == "flashinfer_fa3"
        self.mask: Tensor | None = arguments.get("custom_mask_buf")
        self._takes_width = "uniform_q_len" in inspect.signature(wrapper_type.plan).parameters

    def schedule(self, step: HostStep) -> None:
        if self._apart:
            step = hidden_rows_apart(step)
        self._stage()
        arguments = mha_plan_arguments(step, self.key, self.indices)
        if self._takes_width and step.uniform_width is not None:
            arguments["uniform_q_len"] = step.uniform_width
        self.wrapper.plan(**arguments)
        self._staged()

    def fill_mask(self, seq_lens: Tensor, tree_mask: Tensor, rows: int, window: int | None) -> None:
        """Write the bit mask of this call, on the device."""
        assert self.mask is not None
        lines = self.mask[:-MASK_SLACK].view(self.num_requests, -1)
        if self.device.type == "cuda":
            from specops.ops import mask_kernels

            mask_kernels.fill_custom_mask(lines, seq_lens, tree_mask, rows, window)
        else:
            lines.copy_(custom_mask(seq_lens, tree_mask, rows, window, lines.shape[1]))

    def run(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, sinks: Tensor | None) -> None:
        """Launch the kernel into ``out``."""
        self._note_capture()
        # A packed step may have rows behind its last request; the wrapper compares with the rows it planned.
        if hasattr(self.wrapper, "_qo_indptr_last"):
            self.wrapper._qo_indptr_last = q.shape[0]
        extra = () if sinks is None else (sinks, self.key.scale)
        self.wrapper.run(q, (k_cache, v_cache), *extra, out=out)


class PlannedMla(_PlannedWrapper):
    """One MLA kernel of a plan."""

    def __init__(self, plan: Plan, key: MlaKey) -> None:
        super().__init__(_mla_module().BatchMLAPagedAttentionWrapper(**mla_wrapper_arguments(plan)), plan.device)
        self.key, self.indices = key, plan.page_indices

    def schedule(self, step: HostStep) -> None:
        self._stage()
        self.wrapper.plan(**mla_plan_arguments(step, self.key, self.indices))
        self._staged()

    def run(self, q_latent: Tensor, q_rope: Tensor, latent: Tensor, rope: Tensor, out: Tensor) -> None:
        """Launch the kernel into ``out``."""
        self._note_capture()
        self.wrapper.run(q_nope=q_latent, q_pe=q_rope, ckv_cache=latent, kpe_cache=rope, out=out)


def mha_wrapper_arguments(plan: Plan, key: MhaKey) -> dict[str, Any]:
    """Arguments of ``BatchPrefillWithPagedKVCacheWrapper``: fixed buffers, and the sink variant if asked for."""
    device, batch = plan.device, plan.num_requests
    variant = plan.backend.removeprefix("flashinfer_")
    planned = 2 * batch if variant == "fa3" else batch

    def int32(count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int32, device=device)

    arguments: dict[str, Any] = {
        "float_workspace_buffer": _workspace(fa2_workspace_bytes(plan, key) if variant == "fa2" else WORKSPACE_BYTES, plan),
        "kv_layout": "NHD",
        "use_cuda_graph": True,
        "qo_indptr_buf": int32(planned + 1),
        "paged_kv_indptr_buf": int32(planned + 1),
        "paged_kv_indices_buf": int32(batch * plan.max_pages),
        "paged_kv_last_page_len_buf": int32(planned),
        "backend": variant,
    }
    if key.masked:
        rows = plan.num_rows // batch
        stride = -(-rows * plan.max_pages * plan.page_size // 8)
        arguments["custom_mask_buf"] = torch.zeros(batch * stride + MASK_SLACK, dtype=torch.uint8, device=device)
        arguments["mask_indptr_buf"] = torch.arange(batch + 1, dtype=torch.int32, device=device) * stride
    if key.sinks:
        arguments["jit_args"], arguments["jit_kwargs"] = sink_variant(variant, key)
    return arguments


@functools.lru_cache(maxsize=1)
def hidden_rows_apart(step: HostStep) -> HostStep:
    """Each request as two, for fa3: the rows before its sequence's start, which see no key, then the others. Worked out once
    for all kernels of a step.

    fa3 leaves something other than zeros in a row that sees no key if other rows of its request do (H200, 0.6.13), and
    zeros in all rows of a request without keys. Done in the plan it costs the device nothing: most first parts are empty.
    """
    starts, lens, page_start = step.query_start, step.seq_lens, step.page_start
    hidden = (starts.diff() - lens).clamp(min=0)

    def in_turn(first: Tensor, second: Tensor) -> Tensor:
        return torch.stack((first, second), dim=1).flatten()

    none = torch.zeros_like(lens)
    parts = {
        "query_start": torch.cat((in_turn(starts[:-1], starts[:-1] + hidden), starts[-1:])),
        "seq_lens": in_turn(none, lens),
        "page_start": torch.cat((in_turn(page_start[:-1], page_start[:-1]), page_start[-1:])),
        "last_page_lens": in_turn(none, step.last_page_lens),
    }
    if lens.is_pinned():
        parts = {name: part.pin_memory() for name, part in parts.items()}
    return HostStep(**parts, page_size=step.page_size, uniform_width=None)


def mha_plan_arguments(step: HostStep, key: MhaKey, indices: Tensor) -> dict[str, Any]:
    """Arguments of ``BatchPrefillWithPagedKVCacheWrapper.plan``.

    Args:
        step, key: what to plan.
        indices: the plan's ``page_indices``; the wrapper copies the live ones into its own buffer.
    """
    width = step.uniform_width
    return {
        "qo_indptr": step.query_start,
        "paged_kv_indptr": step.page_start,
        "paged_kv_indices": indices[: int(step.page_start[-1])],
        "paged_kv_last_page_len": step.last_page_lens,
        "num_qo_heads": key.num_heads,
        "num_kv_heads": key.num_kv_heads,
        "head_dim_qk": key.head_dim,
        "page_size": step.page_size,
        "causal": not key.masked,
        "sm_scale": key.scale,
        "window_left": -1 if key.window is None else key.window - 1,
        "logits_soft_cap": key.softcap,
        "q_data_type": key.q_dtype,
        "kv_data_type": key.kv_dtype,
        "seq_lens": step.seq_lens,
        "max_token_per_sequence": int(step.query_start.diff().max()) if width is None else width,
    }


def mla_wrapper_arguments(plan: Plan) -> dict[str, Any]:
    """Arguments of ``BatchMLAPagedAttentionWrapper``."""
    device, batch = plan.device, plan.num_requests

    def int32(count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int32, device=device)

    return {
        "float_workspace_buffer": _workspace(WORKSPACE_BYTES, plan),
        "use_cuda_graph": True,
        "qo_indptr": int32(batch + 1),
        "kv_indptr": int32(batch + 1),
        "kv_indices": int32(batch * plan.max_pages),
        "kv_len_arr": int32(batch),
        "backend": plan.backend.removeprefix("flashinfer_"),
    }


def mla_plan_arguments(step: HostStep, key: MlaKey, indices: Tensor) -> dict[str, Any]:
    """Arguments of ``BatchMLAPagedAttentionWrapper.plan``."""
    return {
        "qo_indptr": step.query_start,
        "kv_indptr": step.page_start,
        "kv_indices": indices[: int(step.page_start[-1])],
        "kv_len_arr": step.seq_lens,
        "num_heads": key.num_heads,
        "head_dim_ckv": key.latent_dim,
        "head_dim_kpe": key.rope_dim,
        "page_size": step.page_size,
        "causal": True,
        "sm_scale": key.scale,
        "q_data_type": key.q_dtype,
        "kv_data_type": key.kv_dtype,
    }


def sink_variant(variant: str, key: MhaKey) -> tuple[list[Any], dict[str, Any]]:
    """``jit_args`` and ``jit_kwargs`` of the package's attention-sink kernel.

    The package's own sink wrapper names the compiled kernel without its head dim, so two head dims would share one; here
    the name holds all that differs.
    """
    source = flashinfer_common.load("flashinfer.jit.attention.variants", "flashinfer").attention_sink_decl[variant]
    short = {dtype: str(dtype).removeprefix("torch.") for dtype in (key.q_dtype, key.kv_dtype)}
    windowed = key.window is not None
    name = f"specops_sink_{variant}_{short[key.q_dtype]}_{short[key.kv_dtype]}_{key.head_dim}{'_window' if windowed else ''}"
    arguments = [
        name,
        key.q_dtype,
        key.kv_dtype,
        key.q_dtype,
        torch.int32,
        key.head_dim,
        key.head_dim,
        ["sink"],
        ["float"],
        ["sm_scale"],
        ["double"],
        "AttentionSink",
        source,
    ]
    return arguments, {"use_sliding_window": windowed}


def custom_mask(seq_lens: Tensor, tree_mask: Tensor, rows: int, window: int | None, stride: int) -> Tensor:
    """FlashInfer's bit mask in plain torch: what ``mask_kernels.fill_custom_mask`` writes, for tests and CPUs.

    Returns:
        ``[B, stride]`` uint8; bit ``row * seq_len + key`` of line ``b`` says whether the row sees the key.
    """
    batch, width = seq_lens.shape[0], tree_mask.shape[1]
    lens = seq_lens.long()[:, None, None]
    flat = torch.arange(8 * stride, device=seq_lens.device).view(1, stride, 8).expand(batch, -1, -1)
    row, key = flat // lens.clamp(min=1), flat % lens.clamp(min=1)
    inside = flat < rows * lens
    own = key - (lens - width)
    trees = tree_mask.view(batch, rows, width)
    trees = trees & (torch.arange(width, device=seq_lens.device) + lens - width >= 0)
    request = torch.arange(batch, device=seq_lens.device)[:, None, None]
    row = row.clamp(max=rows - 1)
    seen = inside & ((own < 0) | trees[request, row, own.clamp(0, width - 1)])
    if window is not None:
        from_here = trees.flip(-1).cumsum(-1).flip(-1)
        behind = from_here[request, row, own.clamp(0, width - 1)] + (-own).clamp(min=0)
        seen = seen & (behind <= window)
    weights = 1 << torch.arange(8, device=seq_lens.device)
    return (seen * weights).sum(-1).to(torch.uint8)


def fa2_workspace_bytes(plan: Plan, key: MhaKey) -> int:
    """Room for the partial sums of fa2's split KV in graph mode, plus an eighth for alignment and other versions.

    In graph mode fa2 assumes that one request may have all rows but one of every other request.
    """
    sms = torch.cuda.get_device_properties(plan.device).multi_processor_count if plan.device.type == "cuda" else 1
    group = key.num_heads // key.num_kv_heads
    widest = (plan.num_rows - plan.num_requests + 1) * group
    if widest > FA2_TILE_ROWS // 2 and key.head_dim < 256:
        tile_rows = FA2_TILE_ROWS
    else:
        tile_rows = 64 if widest > 16 else 16
    tiles = -(-plan.num_rows * group // tile_rows) + plan.num_requests
    blocks = max(FA2_BLOCKS_PER_SM * sms // key.num_kv_heads, tiles)
    needed = key.num_heads * blocks * tile_rows * (key.head_dim + 1) * 4
    return max(WORKSPACE_BYTES, needed + needed // 8)


_workspaces: dict[tuple[torch.device, int], Tensor] = {}


def _workspace(num_bytes: int, plan: Plan) -> Tensor:
    """Scratch of at least ``num_bytes``, shared by the plans made on one stream; a larger one replaces it for later plans.

    It holds partial sums within one launch only. Steps that run at the same time on two streams need plans that were
    made on two streams.
    """
    key = (plan.device, plan.stream)
    found = _workspaces.get(key)
    if found is None or found.numel() < num_bytes:
        found = _workspaces[key] = torch.empty(num_bytes, dtype=torch.uint8, device=plan.device)
    return found


def plan(backend: str, family: Any, **shape: Any) -> Plan:
    """The host plan hook of the FlashInfer backends, see :func:`specops.ops.planning.make_plan`."""
    return Plan(backend, family, **shape)


@functools.cache
def _prefill() -> Any:
    return flashinfer_common.load("flashinfer.prefill", "flashinfer")


@functools.cache
def _mla_module() -> Any:
    return flashinfer_common.load("flashinfer.mla", "flashinfer")
