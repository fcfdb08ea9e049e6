"""Llama-style target models (Llama, Mistral, Qwen 2 and 3, Gemma 2) over paged caches.

A forward takes token rows of any layout and their :class:`~specops.metadata.AttentionMetadata`; it reads and writes
nothing else but the layers' cache buffers, so it compiles with ``fullgraph=True`` and runs as a CUDA graph:

    model = load_target("path/to/checkpoint")
    model.allocate_caches(num_pages=1024, page_size=16)
    hidden = model(input_ids, meta)                         # [T, hidden]
    logits = model.compute_logits(hidden[rows])

The projections of q, k and v are one matrix, and so are those of gate and up. The blocks are also what draft heads are
made of. Loading weights is the job of :mod:`specops.models.loading`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from specops import ops
from specops.kv_cache import PagedKVCache
from specops.metadata import AttentionMetadata
from specops.models.attention_module import PagedAttention
from specops.models.config import ModelConfig
from specops.models.projections import RMSNorm as RMSNorm
from specops.models.projections import added, can_fuse, fused_linear, normed
from specops.models.rotary import Rope, Rotary, rotate
from specops.ops.linear import GATES

Reduce = Callable[[Tensor], Tensor]


class MLP(nn.Module):
    """Gated MLP; ``gate_up`` holds the gate's rows, then the up projection's.

    Attributes:
        gate: name of the gate's activation.
        reduce: sums the output over ranks where each holds a part of the rows (:mod:`specops.parallel`).
    """

    reduce: Reduce | None = None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = config.hidden_act
        self.gate_up = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.act = GATES[config.hidden_act]

    def forward(self, x: Tensor, norm: RMSNorm | None = None, residual: Tensor | None = None) -> Tensor:
        """``x`` ``[T, hidden_size]``, put through ``norm`` first, to the same; ``residual`` is added to it."""
        # A residual is added once, so not to the part of one rank.
        inner = residual if self.reduce is None else None
        if can_fuse(x, self.gate_up, self.down):
            out = fused_linear(fused_linear(x, self.gate_up, norm, gate=self.gate), self.down, residual=inner)
        else:
            gate, up = self.gate_up(normed(x, norm)).chunk(2, dim=-1)
            out = added(self.down(self.act(gate) * up), inner)
        return out if self.reduce is None else added(self.reduce(out), residual)


class Attention(PagedAttention):
    """:class:`PagedAttention` with projections, optional head norms, and rotary embedding.

    Args:
        config: shape and options.
        layer_index: picks the window from ``config.layer_windows``.
        input_size: width of the rows it reads; ``config.hidden_size`` when not given (EAGLE 3 heads read twice that).

    Attributes:
        qkv: one projection; rows of q, then k, then v.
        o: output projection.
        qk_norm: RMSNorm with one weight row per q and k head, or None.
        reduce: sums the output over ranks where each holds a part of the heads (:mod:`specops.parallel`).
        cache, window, backend, ...: as :class:`PagedAttention`.
    """

    reduce: Reduce | None = None

    def __init__(self, config: ModelConfig, layer_index: int = 0, *, input_size: int | None = None) -> None:
        super().__init__(
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            scale=config.attention_scale,
            window=config.layer_windows[layer_index],
            softcap=config.attention_softcap,
            sinks=config.attention_sinks,
        )
        heads = config.num_heads + 2 * config.num_kv_heads
        self.qkv = nn.Linear(input_size or config.hidden_size, heads * config.head_dim, bias=config.attention_bias)
        self.o = nn.Linear(config.num_heads * config.head_dim, config.hidden_size, bias=config.output_bias)
        norm_shape = (config.num_heads + config.num_kv_heads, config.head_dim)
        self.qk_norm = RMSNorm(norm_shape, config.rms_norm_eps, config.norm_offset) if config.qk_norm else None

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        rope: Rope,
        meta: AttentionMetadata,
        norm: RMSNorm | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """``x`` ``[T, input_size]``, put through ``norm`` first, to ``[T, hidden_size]``; ``residual`` is added to it.

        ``rope`` comes from :class:`Rotary`.
        """
        inner = residual if self.reduce is None else None
        if self.qk_norm is None and self.cache is not None and can_fuse(x, self.qkv, self.o):
            out = fused_linear(self._fused_attention(x, rope, meta, norm), self.o, residual=inner)
        else:
            out = added(self.o(self._attention(normed(x, norm), rope, meta)), inner)
        return out if self.reduce is None else added(self.reduce(out), residual)

    def _attention(self, x: Tensor, rope: Rope, meta: AttentionMetadata) -> Tensor:
        heads = self.qkv(x).view(x.shape[0], -1, self.head_dim)
        # q and k go through norm and rotation together: half the kernels.
        num_rotated = self.num_heads + self.num_kv_heads
        qk, v = heads[:, :num_rotated], heads[:, num_rotated:]
        if self.qk_norm is not None:
            qk = self.qk_norm(qk)
        qk = rotate(qk, rope)
        q, k = qk[:, : self.num_heads], qk[:, self.num_heads :]
        return self.attend(q, k, v, meta).flatten(1)

    def _fused_attention(self, x: Tensor, rope: Rope, meta: AttentionMetadata, norm: RMSNorm | None) -> Tensor:
        cache = self.ready_cache(meta)
        q = ops.project_qkv(
            cache.k,
            cache.v,
            x,
            self.qkv.weight,
            *rope,
            meta.slots,
            num_heads=self.num_heads,
            norm_weight=None if norm is None else norm.weight,
            norm_eps=0.0 if norm is None else norm.eps,
            norm_offset=0.0 if norm is None else norm.offset,
            bias=self.qkv.bias,
            k_scale=cache.k_scale,
            v_scale=cache.v_scale,
        )
        return self.read_cache(q, meta).flatten(1)


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP with residuals; Gemma's post-norms where the config has them."""

    attention_type: Callable[..., nn.Module] = Attention

    def __init__(self, config: ModelConfig, layer_index: int = 0) -> None:
        super().__init__()
        size, eps, offset = config.hidden_size, config.rms_norm_eps, config.norm_offset
        self.input_norm = RMSNorm(size, eps, offset)
        self.attn = self.attention_type(config, layer_index)
        self.post_attn_norm = RMSNorm(size, eps, offset) if config.post_norms else None
        self.mlp_norm = RMSNorm(size, eps, offset)
        self.mlp = MLP(config)
        self.post_mlp_norm = RMSNorm(size, eps, offset) if config.post_norms else None

    def forward(self, hidden: Tensor, rope: Rope, meta: AttentionMetadata) -> Tensor:
        """``hidden`` ``[T, hidden_size]`` to the same."""
        norm = self.input_norm if isinstance(self.input_norm, RMSNorm) else None
        if self.post_attn_norm is None:
            hidden = self.attn(hidden, rope, meta, norm, hidden)
        else:
            hidden = hidden + self.post_attn_norm(self.attn(hidden, rope, meta, norm))
        if self.post_mlp_norm is None:
            return cast(Tensor, self.mlp(hidden, self.mlp_norm, hidden))
        return cast(Tensor, hidden + self.post_mlp_norm(self.mlp(hidden, self.mlp_norm)))


class CausalLM(nn.Module):
    """A decoder-only language model whose attention runs through specops' ops.

    Args:
        config: what to build. Weights are freshly initialised; :func:`specops.models.load_target` loads a checkpoint.

    Attributes:
        embed_tokens, layers, norm, lm_head: the model's parts. A tied ``lm_head`` shares the embedding's weight.
        rotary: cos and sin tables.
        gather: joins the logits of ranks that hold a part of the vocabulary each (:mod:`specops.parallel`).
    """

    layer_type: Callable[..., nn.Module] = DecoderLayer
    gather: Reduce | None = None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(self.layer_type(config, index) for index in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.norm_offset)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.rotary = Rotary(config.rope, config.rotary_dim, config.max_position_embeddings)

    def materialize(self, device: torch.device | str) -> None:
        """Give a model made on the meta device memory on ``device``: tables filled, weights not, ties kept."""
        self.to_empty(device=device)
        self.rotary.materialize(torch.device(device))
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def allocate_caches(self, num_pages: int, page_size: int, dtype: torch.dtype | None = None) -> list[PagedKVCache]:
        """Give every layer a cache of ``num_pages`` pages (page 0 reserved) on the model's device.

        Args:
            num_pages, page_size: size of the pool; page ids are shared by all layers.
            dtype: dtype of the pages; the model's when not given.

        Returns:
            The caches, one a layer. They are buffers, so their addresses stay until this is called again.
        """
        weight = self.embed_tokens.weight
        return [
            layer.allocate_cache(num_pages, page_size, dtype=dtype or weight.dtype, device=weight.device)
            for layer in self.attention_layers()
        ]

    @property
    def caches(self) -> list[PagedKVCache]:
        """The layers' caches; empty before :meth:`allocate_caches`."""
        return [layer.cache for layer in self.attention_layers() if layer.cache is not None]

    def set_backend(self, name: str) -> None:
        """Attention backend of all layers, by name; ``"auto"`` for the fastest capable one."""
        for layer in self.attention_layers():
            layer.backend = name

    def attention_layers(self) -> list[Attention]:
        """The layers' attention modules, in order."""
        return [cast(Attention, layer.attn) for layer in self.layers]

    def forward(
        self, input_ids: Tensor, meta: AttentionMetadata, aux_layers: tuple[int, ...] = ()
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Hidden states of ``T`` token rows; their K/V go into the caches at ``meta.slots``.

        Args:
            input_ids: ``[T]`` int64.
            meta: metadata of this forward.
            aux_layers: residual streams to return too, each named by how many layers have run: 0 is the embedding,
                ``num_layers`` the last layer's output before the final norm.

        Returns:
            ``[T, hidden]`` after the final norm, as :meth:`compute_logits` reads it. With ``aux_layers`` a pair of that
            and ``[T, len(aux_layers) * hidden]``, in the order asked for.
        """
        hidden = self.embed_tokens(input_ids)
        if self.config.embedding_scale is not None:
            # Gemma multiplies by a scale of the model's own dtype.
            hidden = hidden * hidden.new_full((), self.config.embedding_scale)
        rope = self.rotary(meta.positions, hidden.dtype)
        hidden, streams = self.run_layers(hidden, rope, meta, aux_layers)
        hidden = self.norm(hidden)
        if not aux_layers:
            return cast(Tensor, hidden)
        return hidden, torch.cat([streams[index] for index in aux_layers], dim=-1)

    def run_layers(
        self, hidden: Tensor, rope: Rope, meta: AttentionMetadata, aux_layers: tuple[int, ...] = ()
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """The last layer's output, and the residual streams that :meth:`forward` is asked for."""
        streams = {0: hidden} if 0 in aux_layers else {}
        for index, layer in enumerate(self.layers, start=1):
            hidden = layer(hidden, rope, meta)
            if index in aux_layers:
                streams[index] = hidden
        return hidden, streams

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """``[R, vocab]`` logits of ``hidden`` ``[R, hidden]``, in its dtype."""
        logits = self.lm_head(hidden)
        if self.gather is not None:
            logits = self.gather(logits)
        cap = self.config.logit_softcap
        if cap is not None:
            logits = (torch.tanh(logits.float() / cap) * cap).to(hidden.dtype)
        return cast(Tensor, logits)
