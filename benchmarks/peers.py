"""Other kernels on the inputs of a benchmark row: FlashInfer fa2 and fa3, TRT-LLM decode (XQA), FlexAttention, SDPA.

A peer is a function from :class:`common.Inputs` to one call for each KV set, ready for a CUDA graph: plans, masks and dense
copies are made before, so that only kernels are timed. It raises :class:`Skip` with the reason where it can't serve a row.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from common import Inputs, Row, make_inputs
from torch import Tensor

Call = Callable[[], Tensor]
MLA_SCALE = 192**-0.5
LATENT = 512
FLASHINFER_WORKSPACE = 256 << 20
# Host time of the plans made since it was last taken, in us.
_plan_times: list[float] = []


class Skip(Exception):
    """Why a peer has no number in a row."""


def take_plan_us() -> float | None:
    """The shortest host time of a plan since the last call; None if none was made. A step with such a backend pays it."""
    best = min(_plan_times, default=None)
    _plan_times.clear()
    return best


def _planned(plan: Callable[..., Any], *given: Any, **options: Any) -> None:
    torch.cuda.synchronize()
    began = time.perf_counter()
    plan(*given, **options)
    _plan_times.append(1e6 * (time.perf_counter() - began))


def flashinfer_mha(inputs: Inputs, *, backend: str) -> list[Call]:
    """``BatchPrefillWithPagedKVCacheWrapper``, planned once a KV set outside the graph."""
    row = inputs.row
    if row.tree or row.sinks or row.head_dim != 128:
        raise Skip("tree masks, sinks and other head dims are other builds of the kernel, half a minute each")
    prefill = _flashinfer("flashinfer.prefill")
    calls: list[Call] = []
    for table in inputs.page_tables:
        wrapper = prefill.BatchPrefillWithPagedKVCacheWrapper(_workspace(), "NHD", backend=backend)
        start, pages, indices, last = _page_lists(row, table)
        _planned(
            wrapper.plan,
            start,
            pages,
            indices,
            last,
            row.num_heads,
            row.num_kv_heads,
            row.head_dim,
            row.page_size,
            causal=True,
            window_left=-1 if row.window is None else row.window - 1,
            q_data_type=inputs.q.dtype,
            kv_data_type=inputs.q.dtype,
        )
        calls.append(functools.partial(wrapper.run, inputs.q, (inputs.k_cache, inputs.v_cache)))
    return calls


def flashinfer_mla(inputs: Inputs, *, backend: str) -> list[Call]:
    """``BatchMLAPagedAttentionWrapper``, planned once a KV set outside the graph."""
    row = inputs.row
    mla = _flashinfer("flashinfer.mla")
    q_latent, q_rope = (part.contiguous() for part in (inputs.q[..., :LATENT], inputs.q[..., LATENT:]))
    cache = inputs.k_cache[:, :, 0]
    calls: list[Call] = []
    for table in inputs.page_tables:
        wrapper = mla.BatchMLAPagedAttentionWrapper(_workspace(), backend=backend)
        start, pages, indices, _ = _page_lists(row, table)
        lens = torch.tensor(row.lens, dtype=torch.int32, device="cuda")
        kinds = (inputs.q.dtype, inputs.q.dtype)
        rope_dim = row.head_dim - LATENT
        sizes = (row.num_heads, LATENT, rope_dim, row.page_size)
        _planned(wrapper.plan, start, pages, indices, lens, *sizes, True, MLA_SCALE, *kinds)
        calls.append(functools.partial(wrapper.run, q_latent, q_rope, cache[..., :LATENT], cache[..., LATENT:]))
    return calls


def xqa(inputs: Inputs) -> list[Call]:
    """``trtllm_batch_decode_with_kv_cache`` with mask and lengths prepared outside the graph."""
    from specops.ops import trtllm_mha

    _flashinfer("flashinfer.decode")
    if torch.cuda.get_device_capability()[0] == 10:
        raise Skip("XQA is the decode kernel of 9.0 and 12.x")
    if inputs.row.head_dim != 128:
        raise Skip("other head dims are other builds of the kernel, half a minute each")
    row, layout, options = inputs.row, inputs.layout, inputs.options
    calls: list[Call] = []
    for table in inputs.page_tables:
        plan = trtllm_mha.prepare(inputs.seq_lens, table, layout, row.page_size, options.get("tree_mask"))
        given = trtllm_mha.xqa_arguments(
            inputs.q,
            inputs.k_cache,
            inputs.v_cache,
            table,
            inputs.seq_lens,
            layout,
            row.head_dim**-0.5,
            options.get("window"),
            options.get("sinks"),
            options.get("tree_mask"),
            plan=None if row.window else plan,
        )

        def call(given: dict[str, Any] = given) -> Tensor:
            # Workspaces belong to a stream.
            own = {"workspace_buffer": trtllm_mha.XQA_WORKSPACES.get(inputs.q.device), "out": torch.empty_like(inputs.q)}
            return trtllm_mha._decode()(**{**given, **own}).view(inputs.q.shape)

        calls.append(call)
    return calls


def sdpa(inputs: Inputs) -> list[Call]:
    """``scaled_dot_product_attention`` on dense K and V with a causal mask."""
    row = inputs.row
    mask = _dense_mask(inputs)
    q = _dense_q(inputs)

    def call(k: Tensor, v: Tensor) -> Tensor:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return out.transpose(1, 2).reshape(row.batch * row.query_len, row.num_heads, -1)

    return [functools.partial(call, *dense) for dense in _dense_sets(inputs)]


def flex(inputs: Inputs) -> list[Call]:
    """FlexAttention on dense K and V, compiled for the shape."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    row = inputs.row
    _dense_only(row)
    kv = row.lens[0]

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return j <= i + (kv - row.query_len)

    block_mask = create_block_mask(seen, None, None, row.query_len, kv, device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    q = _dense_q(inputs)

    def call(k: Tensor, v: Tensor) -> Tensor:
        out = compiled(q, k, v, block_mask=block_mask, enable_gqa=True)
        return out.transpose(1, 2).reshape(row.batch * row.query_len, row.num_heads, -1)

    return [functools.partial(call, *dense) for dense in _dense_sets(inputs)]


MHA_PEERS: dict[str, Callable[[Inputs], list[Call]]] = {
    "fa2": functools.partial(flashinfer_mha, backend="fa2"),
    "fa3": functools.partial(flashinfer_mha, backend="fa3"),
    "xqa": xqa,
    "sdpa": sdpa,
    "flex": flex,
}
MLA_PEERS: dict[str, Callable[[Inputs], list[Call]]] = {
    "fa2": functools.partial(flashinfer_mla, backend="fa2"),
    "fa3": functools.partial(flashinfer_mla, backend="fa3"),
}
# Peers that build a kernel with nvcc at first use, half a minute each.
BUILT = ("fa2", "fa3", "xqa")


def build(names: list[str], peers: dict[str, Callable[[Inputs], list[Call]]], row: Row, mla: bool) -> dict[str, str]:
    """Build the kernels of the named peers side by side on a small call; returns why some of them can't be had."""
    inputs = make_inputs(row, mla=mla)
    inputs.page_tables = inputs.page_tables[:1]

    def first_call(name: str) -> str | None:
        try:
            for call in peers[name](inputs):
                call()
            torch.cuda.synchronize()
        except Exception as error:
            return f"{type(error).__name__}: {str(error)[:160]}"
        return None

    wanted = [name for name in names if name in BUILT]
    # Imported one after the other: the package's modules import each other, and threads that start at different ends
    # wait for each other's import locks.
    for module in ("flashinfer.prefill", "flashinfer.decode", "flashinfer.mla") if wanted else ():
        with contextlib.suppress(Skip):
            _flashinfer(module)
    with concurrent.futures.ThreadPoolExecutor(max(len(wanted), 1)) as pool:
        return {name: why for name, why in zip(wanted, pool.map(first_call, wanted), strict=True) if why is not None}


def _flashinfer(name: str) -> Any:
    from specops.ops import flashinfer_common

    try:
        return flashinfer_common.load(name, "flashinfer")
    except ImportError as error:
        raise Skip(str(error)) from error


@functools.cache
def _workspace() -> Tensor:
    return torch.zeros(FLASHINFER_WORKSPACE, dtype=torch.uint8, device="cuda")


def _page_lists(row: Row, table: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Row offsets, page offsets, page ids and tokens on the last page, int32."""
    counts = [-(-kv // row.page_size) for kv in row.lens]
    start = torch.arange(row.batch + 1, dtype=torch.int32, device="cuda") * row.query_len
    pages = torch.tensor([0, *counts], device="cuda").cumsum(0).to(torch.int32)
    indices = torch.cat([table[request, :count] for request, count in enumerate(counts)])
    last = torch.tensor([(kv - 1) % row.page_size + 1 for kv in row.lens], dtype=torch.int32, device="cuda")
    return start, pages, indices, last


def _dense_only(row: Row) -> None:
    if isinstance(row.kv, tuple):
        raise Skip("dense K and V have one length")
    if row.window or row.tree or row.sinks:
        raise Skip("measured on plain causal rows")


def _dense_q(inputs: Inputs) -> Tensor:
    row = inputs.row
    return inputs.q.view(row.batch, row.query_len, row.num_heads, -1).transpose(1, 2).contiguous()


def _dense_mask(inputs: Inputs) -> Tensor:
    row = inputs.row
    _dense_only(row)
    place = torch.arange(row.lens[0], device="cuda")
    return place <= row.lens[0] - row.query_len + torch.arange(row.query_len, device="cuda")[:, None]


def _dense_sets(inputs: Inputs) -> list[tuple[Tensor, Tensor]]:
    """``[B, Hkv, kv, D]`` copies of each KV set."""

    def dense(cache: Tensor, table: Tensor) -> Tensor:
        return cache[table.long()].flatten(1, 2)[:, : inputs.row.lens[0]].transpose(1, 2).contiguous()

    return [(dense(inputs.k_cache, table), dense(inputs.v_cache, table)) for table in inputs.page_tables]
