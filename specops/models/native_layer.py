"""A decoder layer as three calls on a CPU: norm to cache write, attention, output projection to residual.

    use_native_layers(model)            # done by pack_linears
    drop_native_layers(model)

At the few rows of a decode step a third of a layer's time is the cost of calling some thirty small operators. The kernels
of :mod:`specops.ops.native` do their work between the products, over the layer's own weights, where they lie. Attention
stays the op of the layer's backend. Whatever the kernels do not serve (many rows, gradients, tracing, hooks on a submodule,
other dtypes, a sum over ranks) runs as the plain layer, call by call.
"""

from __future__ import annotations

import ctypes
from typing import Any, cast

import torch
from torch import Tensor, nn

from specops import ops
from specops.metadata import AttentionMetadata
from specops.models.llama import MLP, Attention, DecoderLayer, RMSNorm  # type: ignore[attr-defined]
from specops.models.packed_linear import NATIVE_ROWS, PackedLinear
from specops.models.rotary import Rope
from specops.ops import native


class NativeDecoderLayer(DecoderLayer):
    """A :class:`DecoderLayer` that runs on the compiled kernels where they serve the call."""

    binding: Binding

    def forward(self, hidden: Tensor, rope: Rope, meta: AttentionMetadata) -> Tensor:
        """As :meth:`DecoderLayer.forward`; the same within rounding."""
        if hidden.shape[0] <= NATIVE_ROWS and not torch.is_grad_enabled() and native.usable(hidden):
            weights = self.binding.bind(self, hidden.dtype)
            if weights is not None:
                out = _run(weights, cast(Attention, self.attn), hidden, rope, meta)
                if out is not None:
                    return out
        return super().forward(hidden, rope, meta)


class Binding:
    """The weights of one layer as the kernels read them: addresses, renewed when a weight has another one."""

    def __init__(self) -> None:
        self._addresses: tuple[int, ...] | None = None
        self._layer: native.Layer | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Nothing: a copy of the layer has weights at addresses of its own."""
        return {"_addresses": None, "_layer": None}

    def bind(self, layer: DecoderLayer, dtype: torch.dtype) -> native.Layer | None:
        """The weights of ``layer`` in ``dtype``; None where the layer is not one that the kernels know."""
        parts = layer._modules
        attn, mlp, input_norm, mlp_norm = (cast(Any, parts[name]) for name in ("attn", "mlp", "input_norm", "mlp_norm"))
        inner = attn._modules
        qkv, o, qk_norm = cast(Any, inner["qkv"]), cast(Any, inner["o"]), cast(Any, inner.get("qk_norm"))
        gate_up, down = (cast(Any, mlp._modules[name]) for name in ("gate_up", "down"))
        if attn.reduce is not None or mlp.reduce is not None:
            return None
        for module in (attn, mlp, input_norm, mlp_norm, qkv, o, gate_up, down):
            if module._forward_hooks or module._forward_pre_hooks:
                return None
        found = (
            input_norm._parameters.get("weight"),
            *_linear(qkv),
            None if qk_norm is None else qk_norm._parameters["weight"],
            *_linear(o),
            mlp_norm._parameters["weight"],
            *_linear(gate_up),
            *_linear(down),
        )
        addresses = tuple([0 if tensor is None else tensor.data_ptr() for tensor in found])
        if addresses != self._addresses:
            self._addresses, self._layer = addresses, _described(layer, found, dtype)
        layer_of = self._layer
        return layer_of if layer_of is not None and layer_of.half == (dtype == torch.bfloat16) else None


def use_native_layers(model: nn.Module) -> int:
    """Let every :class:`DecoderLayer` of ``model`` that can be run on the kernels; how many do now.

    Layers stay the same objects with the same parameters; their class alone changes.
    """
    for module in model.modules():
        if type(module) is DecoderLayer and _known(module):
            module.__class__ = NativeDecoderLayer
            object.__setattr__(module, "binding", Binding())
    return sum(isinstance(module, NativeDecoderLayer) for module in model.modules())


def drop_native_layers(model: nn.Module) -> None:
    """Undo :func:`use_native_layers`."""
    for module in model.modules():
        if isinstance(module, NativeDecoderLayer):
            object.__delattr__(module, "binding")
            module.__class__ = DecoderLayer  # type: ignore[assignment]


def _run(weights: native.Layer, attn: Attention, hidden: Tensor, rope: Rope, meta: AttentionMetadata) -> Tensor | None:
    """One layer over ``hidden`` ``[T, hidden_size]``; None where the rows, the cache or the metadata are of another kind."""
    lib, cache, slots = native.library(), attn.cache, meta.slots
    cos, sin = rope
    num_rows = hidden.shape[0]
    if lib is None or cache is None or cache.k.dtype != hidden.dtype or slots.dtype != torch.int64:
        return None
    if cos.dtype != hidden.dtype or cos.numel() != num_rows * attn.head_dim // 2 or slots.shape[0] != num_rows:
        return None
    meta.check_page_size(cache.page_size)
    hidden, cos, sin, slots = hidden.contiguous(), cos.contiguous(), sin.contiguous(), slots.contiguous()
    width, threads = weights.heads * weights.dim, torch.get_num_threads()
    before = weights.input + width + 2 * weights.kv_heads * weights.dim
    behind = width + 2 * weights.hidden + 3 * weights.inner
    work = torch.empty(num_rows * max(before, behind), dtype=torch.float32, device="cpu")
    q = torch.empty((num_rows, attn.num_heads, attn.head_dim), dtype=hidden.dtype, device="cpu")
    strides = (ctypes.c_int64 * 6)(*cache.k.stride()[:3], *cache.v.stride()[:3])
    lib.specops_layer_in(
        ctypes.byref(weights),
        hidden.data_ptr(),
        num_rows,
        cos.data_ptr(),
        sin.data_ptr(),
        slots.data_ptr(),
        q.data_ptr(),
        cache.k.data_ptr(),
        cache.v.data_ptr(),
        strides,
        cache.page_size,
        work.data_ptr(),
        threads,
    )
    attended = ops.mha(
        q,
        cache.k,
        cache.v,
        meta.page_table,
        meta.seq_lens,
        layout=meta.layout,
        scale=attn.scale,
        window=attn.window,
        softcap=attn.softcap,
        sinks=None if attn.sinks is None else attn.sinks.float(),
        tree_mask=meta.tree_mask,
        plan=meta.plan,
        backend=attn.backend,
    )
    out = torch.empty_like(hidden)
    lib.specops_layer_out(
        ctypes.byref(weights),
        attended.data_ptr(),
        hidden.data_ptr(),
        out.data_ptr(),
        num_rows,
        work.data_ptr(),
        threads,
    )
    return out


def _known(layer: DecoderLayer) -> bool:
    """Whether the layer's parts are those that the kernels stand for."""
    attn, mlp = layer.attn, layer.mlp
    if type(attn) is not Attention or type(mlp) is not MLP or mlp.act is not torch.nn.functional.silu:
        return False
    if layer.post_attn_norm is not None or layer.post_mlp_norm is not None or attn.head_dim % 2:
        return False
    if attn.head_dim > native.MAX_DIM or attn.value_dim != attn.head_dim:
        return False
    linears = (attn.qkv, attn.o, mlp.gate_up, mlp.down)
    norms = (layer.mlp_norm, layer.input_norm, attn.qk_norm)
    return all(type(linear) in (nn.Linear, PackedLinear) for linear in linears) and all(
        isinstance(norm, RMSNorm | nn.Identity | None) for norm in norms
    )


def _described(layer: DecoderLayer, found: tuple[Tensor | None, ...], dtype: torch.dtype) -> native.Layer | None:
    """The kernels' view of a layer whose tensors were just found; None if some are of a kind that they don't read."""
    tensors = [tensor for tensor in found if tensor is not None]
    if dtype not in native.DTYPES or not _known(layer):
        return None
    if any(tensor.dtype != dtype or not tensor.is_contiguous() or not tensor.is_cpu for tensor in tensors):
        return None
    attn = cast(Attention, layer.attn)
    norms = [norm for norm in (layer.input_norm, layer.mlp_norm, attn.qk_norm) if isinstance(norm, RMSNorm)]
    if any((norm.eps, norm.offset) != (norms[0].eps, norms[0].offset) for norm in norms):
        return None
    return native.Layer(
        *(None if tensor is None else tensor.data_ptr() for tensor in found),
        attn.qkv.in_features,
        layer.mlp.down.out_features,
        attn.num_heads,
        attn.num_kv_heads,
        attn.head_dim,
        layer.mlp.down.in_features,
        dtype == torch.bfloat16,
        norms[0].eps,
        norms[0].offset,
    )


def _linear(module: Any) -> tuple[Tensor, Tensor | None]:
    parameters = module._parameters
    return parameters["weight"], parameters.get("bias")
