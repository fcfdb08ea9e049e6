"""Decoder layers on a CPU as few calls of compiled kernels; one call for all layers of a model where that is possible.

    use_native_layers(model)            # done by pack_linears
    drop_native_layers(model)

At the few rows of a decode step a third of a layer's time is the cost of calling some thirty small operators. The kernels
of :mod:`specops.ops.native` do their work between the products, over the layer's own weights, where they lie. A layer by
itself is three calls: norm to cache write, attention by the op of the layer's backend, output projection to residual. A
model whose layers have one shape, and whose attention is the ``cpu`` backend's, is one.

Whatever the kernels do not serve (many rows, gradients, tracing, hooks on a part, other dtypes, a sum over ranks) runs as
the plain layer, call by call.
"""

from __future__ import annotations

import ctypes
from typing import Any, cast

import torch
from torch import Tensor, nn

from specops import ops
from specops.metadata import AttentionMetadata
from specops.models.eagle import Eagle3Layer
from specops.models.llama import MLP, Attention, CausalLM, DecoderLayer
from specops.models.packed_linear import NATIVE_ROWS, PackedLinear
from specops.models.projections import RMSNorm
from specops.models.rotary import Rope
from specops.ops import cpu, native
from specops.ops.attention_checks import mha_op


class NativeDecoderLayer(DecoderLayer):
    """A :class:`DecoderLayer` that runs on the compiled kernels where they serve the call."""

    binding: Binding

    def forward(self, hidden: Tensor, rope: Rope, meta: AttentionMetadata) -> Tensor:
        """As :meth:`DecoderLayer.forward`; the same within rounding."""
        if _serves(hidden):
            weights = self.binding.bind(self, hidden.dtype)
            out = None if weights is None else _run(weights, cast(Attention, self.attn), hidden, hidden, rope, meta)
            if out is not None:
                return out
        return super().forward(hidden, rope, meta)


class NativeEagle3Layer(Eagle3Layer):
    """An :class:`Eagle3Layer` likewise, behind the norms of its two inputs."""

    binding: Binding

    def forward(self, embedding: Tensor, hidden: Tensor, rope: Rope, meta: AttentionMetadata) -> Tensor:
        """As :meth:`Eagle3Layer.forward`; the same within rounding."""
        if _serves(hidden):
            weights = self.binding.bind(self, hidden.dtype)
            if weights is not None:
                normed = self.hidden_norm(hidden)
                read = torch.cat((self.embed_norm(embedding), normed), dim=-1)
                residual = normed if self.normed_residual else hidden
                out = _run(weights, self.attn, read, residual, rope, meta)
                if out is not None:
                    return out
        return super().forward(embedding, hidden, rope, meta)


class NativeCausalLM(CausalLM):
    """A :class:`CausalLM` whose layers run in one call where the kernels serve it."""

    stack: Stack

    def run_layers(
        self, hidden: Tensor, rope: Rope, meta: AttentionMetadata, aux_layers: tuple[int, ...] = ()
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """As :meth:`CausalLM.run_layers`."""
        if _serves(hidden):
            streams = self.stack.run(list(self.layers), hidden, rope, meta)
            if streams is not None:
                return streams[-1], {index: streams[index] for index in aux_layers}
        return super().run_layers(hidden, rope, meta, aux_layers)


class Binding:
    """The weights of one layer as the kernels read them: addresses, renewed when a weight has another one."""

    def __init__(self) -> None:
        self._addresses: tuple[int, ...] | None = None
        self._layer: native.Layer | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Nothing: a copy of the layer has weights at addresses of its own."""
        return {"_addresses": None, "_layer": None}

    def bind(self, layer: nn.Module, dtype: torch.dtype) -> native.Layer | None:
        """The weights of ``layer`` in ``dtype``; None where the layer is not one that the kernels know."""
        parts = cast(dict[str, Any], layer._modules)
        attn, mlp, input_norm, mlp_norm = parts["attn"], parts["mlp"], parts.get("input_norm"), parts["mlp_norm"]
        inner, outer = attn._modules, mlp._modules
        qkv, o, qk_norm, gate_up, down = inner["qkv"], inner["o"], inner.get("qk_norm"), outer["gate_up"], outer["down"]
        if attn.reduce is not None or mlp.reduce is not None:
            return None
        for module in (attn, mlp, mlp_norm, qkv, o, gate_up, down):
            if module._forward_hooks or module._forward_pre_hooks:
                return None
        found = (
            None if input_norm is None else input_norm._parameters.get("weight"),
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
        bound = self._layer
        return bound if bound is not None and bound.half == (dtype == torch.bfloat16) else None


class Stack:
    """The layers of one model as the kernels read them."""

    def __init__(self) -> None:
        self._known: tuple[Any, ...] | None = None
        self._blocks: Any = None

    def __getstate__(self) -> dict[str, Any]:
        """Nothing, as for :class:`Binding`."""
        return {"_known": None, "_blocks": None}

    def run(self, layers: list[nn.Module], hidden: Tensor, rope: Rope, meta: AttentionMetadata) -> Tensor | None:
        """All layers over ``hidden`` ``[T, hidden_size]``: ``[len(layers) + 1, T, hidden_size]``, the first ``hidden``.

        None where the layers, the cache or the metadata are of another kind than the kernels serve in one call.
        """
        lib = native.library()
        bound = [_bound(layer, hidden.dtype) for layer in layers]
        if lib is None or not bound or any(weights is None for weights in bound):
            return None
        attentions = [cast(Attention, layer.attn) for layer in layers]
        known = tuple([_facts(w, attn) for w, attn in zip(bound, attentions, strict=True)])
        if known != self._known:
            self._known, self._blocks = known, _blocks(cast(Any, bound), attentions)
        if self._blocks is None:
            return None
        first, weights = attentions[0], cast(native.Layer, bound[0])
        cache, slots = first.cache, meta.slots
        assert cache is not None
        if not _fits(weights, first, hidden, rope, meta):
            return None
        num_rows = hidden.shape[0]
        q = torch.empty((2, num_rows, first.num_heads, first.head_dim), dtype=hidden.dtype, device="cpu")
        if not cpu.is_native(q[0], cache.k, cache.v, meta.layout, None, None):
            return None
        for attn in {(attn.window, attn.softcap, attn.sinks is None, attn.backend): attn for attn in attentions}.values():
            if attn.window is not None and meta.tree_mask is not None:
                return None
            sinks = None if attn.sinks is None else attn.sinks
            if sinks is not None and sinks.dtype != torch.float32:
                return None
            # Checks the call as ops.mha does, and says whose op serves it.
            op = mha_op(
                *(q[0], cache.k, cache.v, meta.page_table, meta.seq_lens, meta.layout, attn.window, attn.softcap, sinks),
                *(meta.tree_mask, None, None, attn.backend),
            )
            if op is not torch.ops.specops.cpu_mha.default:
                return None
        meta.check_page_size(cache.page_size)
        streams = torch.empty((len(layers) + 1, *hidden.shape), dtype=hidden.dtype, device="cpu")
        streams[0] = hidden
        call, _kept = cpu.native_call(
            *(q[0], q[1], cache.k, cache.v, meta.page_table, meta.seq_lens, meta.layout, first.scale, None, None, None),
            meta.tree_mask,
        )
        cos, sin, slots = rope[0].contiguous(), rope[1].contiguous(), slots.contiguous()
        work = torch.empty(num_rows * _work(weights), dtype=torch.float32, device="cpu")
        if lib.specops_stack(
            self._blocks,
            len(layers),
            streams.data_ptr(),
            ctypes.byref(call),
            cos.data_ptr(),
            sin.data_ptr(),
            slots.data_ptr(),
            work.data_ptr(),
            torch.get_num_threads(),
        ):
            raise MemoryError("no memory was left for the partial results of attention")
        return streams


def use_native_layers(model: nn.Module) -> int:
    """Let every decoder layer of ``model`` that can be run on the kernels; how many do now.

    Modules stay the same objects with the same parameters; their class alone changes.
    """
    for module in model.modules():
        if type(module) in (DecoderLayer, Eagle3Layer) and _known(module):
            module.__class__ = NativeDecoderLayer if type(module) is DecoderLayer else NativeEagle3Layer
            object.__setattr__(module, "binding", Binding())
        elif type(module) is CausalLM:
            module.__class__ = NativeCausalLM
            object.__setattr__(module, "stack", Stack())
    return sum(isinstance(module, NativeDecoderLayer | NativeEagle3Layer) for module in model.modules())


def drop_native_layers(model: nn.Module) -> None:
    """Undo :func:`use_native_layers`."""
    for module in model.modules():
        if isinstance(module, NativeDecoderLayer | NativeEagle3Layer):
            object.__delattr__(module, "binding")
            module.__class__ = DecoderLayer if isinstance(module, NativeDecoderLayer) else Eagle3Layer  # type: ignore[assignment]
        elif isinstance(module, NativeCausalLM):
            object.__delattr__(module, "stack")
            module.__class__ = CausalLM  # type: ignore[assignment]


def _serves(hidden: Tensor) -> bool:
    if torch.compiler.is_compiling():
        # Asked first: the number of rows, once compared, would be guarded.
        return False
    return hidden.shape[0] <= NATIVE_ROWS and not torch.is_grad_enabled() and native.usable(hidden)


def _fits(weights: native.Layer, attn: Attention, hidden: Tensor, rope: Rope, meta: AttentionMetadata) -> bool:
    """Whether rows, cache and metadata are what the kernels read."""
    cache, slots, rows = attn.cache, meta.slots, hidden.shape[0]
    return (
        cache is not None
        and cache.k.dtype == cache.v.dtype == hidden.dtype
        and cache.k.shape[2:] == cache.v.shape[2:] == (attn.num_kv_heads, attn.head_dim)
        and cache.k.stride(3) == cache.v.stride(3) == 1
        and slots.dtype == torch.int64
        and slots.shape == (rows,)
        and all(table.dtype == hidden.dtype and table.numel() == rows * weights.dim // 2 for table in rope)
    )


def _run(
    weights: native.Layer, attn: Attention, x: Tensor, residual: Tensor, rope: Rope, meta: AttentionMetadata
) -> Tensor | None:
    """One layer over ``x`` ``[T, input]`` and ``residual`` ``[T, hidden_size]``; None where :func:`_fits` does not hold."""
    lib, cache, num_rows = native.library(), attn.cache, x.shape[0]
    if lib is None or cache is None or not _fits(weights, attn, x, rope, meta) or x.shape[1] != weights.input:
        return None
    meta.check_page_size(cache.page_size)
    x, residual, cos, sin, slots = (tensor.contiguous() for tensor in (x, residual, *rope, meta.slots))
    threads = torch.get_num_threads()
    work = torch.empty(num_rows * _work(weights), dtype=torch.float32, device="cpu")
    q = torch.empty((num_rows, attn.num_heads, attn.head_dim), dtype=x.dtype, device="cpu")
    lib.specops_layer_in(
        ctypes.byref(weights),
        x.data_ptr(),
        num_rows,
        cos.data_ptr(),
        sin.data_ptr(),
        slots.data_ptr(),
        q.data_ptr(),
        cache.k.data_ptr(),
        cache.v.data_ptr(),
        (ctypes.c_int64 * 6)(*cache.k.stride()[:3], *cache.v.stride()[:3]),
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
    out = torch.empty_like(residual)
    lib.specops_layer_out(
        ctypes.byref(weights),
        attended.data_ptr(),
        residual.data_ptr(),
        out.data_ptr(),
        num_rows,
        work.data_ptr(),
        threads,
    )
    return out


def _work(weights: native.Layer) -> int:
    """Floats of scratch memory that a row takes."""
    width: int = weights.heads * weights.dim
    before: int = weights.input + width + 2 * weights.kv_heads * weights.dim
    behind: int = width + 2 * weights.hidden + 3 * weights.inner
    return max(before, behind)


def _bound(layer: nn.Module, dtype: torch.dtype) -> native.Layer | None:
    if type(layer) is not NativeDecoderLayer or layer._forward_hooks or layer._forward_pre_hooks:
        return None
    return layer.binding.bind(layer, dtype)


def _facts(weights: Any, attn: Attention) -> tuple[Any, ...]:
    """All that a layer's entry in the stack is made of."""
    cache = attn.cache
    memory = None
    if cache is not None:
        k, v = cache.k, cache.v
        memory = (k.data_ptr(), v.data_ptr(), k.shape, k.stride(), v.stride(), k.dtype)
    sinks = None if attn.sinks is None else attn.sinks.data_ptr()
    return ctypes.addressof(weights), memory, sinks, attn.window, attn.scale, attn.softcap


def _blocks(bound: list[native.Layer], attentions: list[Attention]) -> Any:
    """The kernels' view of a stack; None if its layers differ in shape or cache."""
    shapes = {(w.input, w.hidden, w.heads, w.kv_heads, w.dim, w.inner, w.half) for w in bound}
    caches = [attn.cache for attn in attentions]
    if any(cache is None or cache.k_scale is not None for cache in caches) or len(shapes) > 1:
        return None
    if len({(cache.k.shape, cache.k.stride(), cache.v.stride(), cache.k.dtype) for cache in caches if cache}) > 1:
        return None
    return (native.Block * len(bound))(
        *(
            native.Block(
                ctypes.addressof(weights),
                attn.cache.k.data_ptr(),  # type: ignore[union-attr]
                attn.cache.v.data_ptr(),  # type: ignore[union-attr]
                None if attn.sinks is None else attn.sinks.data_ptr(),
                attn.window or 0,
                attn.scale,
                attn.softcap or 0.0,
            )
            for weights, attn in zip(bound, attentions, strict=True)
        )
    )


def _known(layer: Any) -> bool:
    """Whether the layer's parts are those that the kernels stand for."""
    attn, mlp = layer.attn, layer.mlp
    if type(attn) is not Attention or type(mlp) is not MLP or mlp.gate != "silu":
        return False
    if getattr(layer, "post_attn_norm", None) is not None or getattr(layer, "post_mlp_norm", None) is not None:
        return False
    if attn.head_dim % 2 or attn.head_dim > native.MAX_DIM or attn.value_dim != attn.head_dim:
        return False
    norms = (layer.mlp_norm, getattr(layer, "input_norm", None), attn.qk_norm)
    return all(type(linear) in (nn.Linear, PackedLinear) for linear in (attn.qkv, attn.o, mlp.gate_up, mlp.down)) and all(
        norm is None or type(norm) in (RMSNorm, nn.Identity) for norm in norms
    )


def _described(layer: Any, found: tuple[Tensor | None, ...], dtype: torch.dtype) -> native.Layer | None:
    """The kernels' view of a layer whose tensors were just found; None if some are of a kind that they don't read."""
    tensors = [tensor for tensor in found if tensor is not None]
    if dtype not in native.DTYPES or not _known(layer):
        return None
    if any(tensor.dtype != dtype or not tensor.is_contiguous() or not tensor.is_cpu for tensor in tensors):
        return None
    norms = [layer.mlp_norm, getattr(layer, "input_norm", None), layer.attn.qk_norm]
    scales = {(norm.eps, norm.offset) for norm in norms if isinstance(norm, RMSNorm)}
    if len(scales) > 1:
        return None
    eps, offset = scales.pop()
    return native.Layer(
        *(None if tensor is None else tensor.data_ptr() for tensor in found),
        layer.attn.qkv.in_features,
        layer.mlp.down.out_features,
        layer.attn.num_heads,
        layer.attn.num_kv_heads,
        layer.attn.head_dim,
        layer.mlp.down.in_features,
        dtype == torch.bfloat16,
        eps,
        offset,
    )


def _linear(module: Any) -> tuple[Tensor, Tensor | None]:
    parameters = module._parameters
    return parameters["weight"], parameters.get("bias")
