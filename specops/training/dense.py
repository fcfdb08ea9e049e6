"""Forwards without pages, for training: whole sequences at once, gradients, and a decode step over dense caches.

They use the weights of the paged modules and equal their forwards; a test holds them to that. The unrolled draft head
(:class:`UnrolledHead`) is what EAGLE-3 calls training-time test: step ``j`` at row ``i`` runs at rotary position
``i + j`` on the head's own carried state, and sees the keys of step 0 up to row ``i`` plus those its own chain left in
steps 1 to ``j``. In a real draft the chain's keys stand in the cache behind the true ones, which is the same set.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from specops.layout import QueryLayout
from specops.models.config import ModelConfig
from specops.models.eagle import EagleHead
from specops.models.llama import Attention, CausalLM
from specops.models.rotary import Rope, rotate
from specops.ops import mha


class DenseLayer(NamedTuple):
    """Weights of one decoder layer of the target. A tuple, so that one compiled function serves all layers."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True)
class DenseTarget:
    """Weights of a frozen target, by reference, in the form the dense forwards take."""

    embed: Tensor
    layers: tuple[DenseLayer, ...]
    norm: Tensor
    lm_head: Tensor
    cos: Tensor
    sin: Tensor
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float

    @classmethod
    def of(cls, model: CausalLM) -> DenseTarget:
        """The weights of ``model``.

        Raises:
            ValueError: the model has something these forwards lack (windows, soft caps, head norms, ...); names it.
        """
        config = model.config
        _refuse_unsupported(config)
        dtype = model.embed_tokens.weight.dtype
        layers = tuple(_weights_of(layer) for layer in model.layers)
        return cls(
            embed=model.embed_tokens.weight.detach(),
            layers=layers,
            norm=model.norm.weight.detach(),
            lm_head=model.lm_head.weight.detach(),
            cos=model.rotary.cos.to(dtype),
            sin=model.rotary.sin.to(dtype),
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            eps=config.rms_norm_eps,
        )


def _weights_of(layer: Any) -> DenseLayer:
    attn, mlp = layer.attn, layer.mlp

    def bias(linear: Any) -> Tensor | None:
        return None if linear.bias is None else linear.bias.detach()

    return DenseLayer(
        input_norm=layer.input_norm.weight.detach(),
        qkv=attn.qkv.weight.detach(),
        qkv_bias=bias(attn.qkv),
        out=attn.o.weight.detach(),
        out_bias=bias(attn.o),
        mlp_norm=layer.mlp_norm.weight.detach(),
        gate_up=mlp.gate_up.weight.detach(),
        down=mlp.down.weight.detach(),
    )


def _refuse_unsupported(config: ModelConfig) -> None:
    found = [
        name
        for name, present in (
            ("a sliding window", any(window is not None for window in config.layer_windows)),
            ("a soft cap", config.attention_softcap is not None or config.logit_softcap is not None),
            ("attention sinks", config.attention_sinks),
            ("head norms", config.qk_norm),
            ("norm offsets or post-norms", config.norm_offset != 0 or config.post_norms),
            ("scaled embeddings or scores", config.embedding_scale is not None or config.attention_scale is not None),
            ("MLP biases", config.mlp_bias),
            (f"activation {config.hidden_act}", config.hidden_act != "silu"),
        )
        if present
    ]
    if found:
        raise ValueError(f"training takes plain Llama-style targets; this one has {', '.join(found)}")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def full_precision_logits(hidden: Tensor, lm_head: Tensor) -> Tensor:
    """``[R, V]`` float32. bf16 logits near 20 step by 1/8, so many maxima would tie."""
    if hidden.is_cuda and hidden.dtype != torch.float32:
        return torch.mm(hidden, lm_head.t(), out_dtype=torch.float32)
    return F.linear(hidden, lm_head).float()


@torch.no_grad()
def prefill(
    target: DenseTarget, ids: Tensor, aux_layers: tuple[int, ...] = (), run_layer: Callable[..., Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Hidden states of whole sequences.

    Args:
        ids: ``[B, L]`` int64.
        aux_layers: residual streams wanted as features, named by how many layers have run; empty for the final one.
        run_layer: :func:`prefill_layer`, compiled; as it is when not given.

    Returns:
        hidden: ``[B, L, H]`` after the final norm.
        features: what a draft head reads: ``hidden`` itself, or the aux streams side by side.
    """
    run_layer = run_layer or prefill_layer
    x = target.embed[ids]
    cos, sin = target.cos[: ids.shape[1], None, :], target.sin[: ids.shape[1], None, :]
    streams = {0: x}
    for number, layer in enumerate(target.layers):
        x = run_layer(x, layer, cos, sin, target.num_heads, target.num_kv_heads, target.eps)
        if number + 1 in aux_layers:
            streams[number + 1] = x
    hidden = rms_norm(x, target.norm, target.eps)
    if not aux_layers:
        return hidden, hidden
    return hidden, torch.cat([streams[index] for index in aux_layers], dim=-1)


def prefill_layer(
    x: Tensor, layer: DenseLayer, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int, eps: float
) -> Tensor:
    """One layer over ``x`` ``[B, L, H]``; cos and sin ``[L, 1, D / 2]``."""
    heads = F.linear(rms_norm(x, layer.input_norm, eps), layer.qkv, layer.qkv_bias)
    heads = heads.view(*heads.shape[:-1], num_heads + 2 * num_kv_heads, -1)
    qk, v = torch.split(heads, [num_heads + num_kv_heads, num_kv_heads], dim=-2)
    q, k = torch.split(rotate(qk, (cos, sin)), [num_heads, num_kv_heads], dim=-2)
    mixed = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=num_heads != num_kv_heads
    )
    x = x + F.linear(mixed.transpose(1, 2).flatten(2), layer.out, layer.out_bias)
    return x + _mlp(layer, x, eps)


def _mlp(layer: DenseLayer, x: Tensor, eps: float) -> Tensor:
    gate, up = F.linear(rms_norm(x, layer.mlp_norm, eps), layer.gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, layer.down)


def decode_layer(
    x: Tensor,
    layer: DenseLayer,
    keys: Tensor,
    values: Tensor,
    cos: Tensor,
    sin: Tensor,
    index: Tensor,
    prefix: int,
    num_heads: int,
    eps: float,
    attend: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """One layer, one new token a row, every row at the same position.

    Args:
        x: ``[B, H]``.
        keys, values: ``[B, Hkv, S, D]``; the new ones are written at ``index``.
        cos, sin: ``[1, D / 2]`` of that position.
        index: ``[1]`` int64.
        prefix: keys to read, more than ``index``; a constant of the compiled code.
        attend: :func:`attend_matmul`, :func:`attend_fused` or :func:`attend_paged`.
    """
    batch, num_kv_heads, head_dim = x.shape[0], keys.shape[1], keys.shape[3]
    heads = F.linear(rms_norm(x, layer.input_norm, eps), layer.qkv, layer.qkv_bias).view(batch, -1, head_dim)
    qk, v = torch.split(heads, [num_heads + num_kv_heads, num_kv_heads], dim=1)
    q, k = torch.split(rotate(qk, (cos, sin)), [num_heads, num_kv_heads], dim=1)
    keys[:, :, index] = k.unsqueeze(2)
    values[:, :, index] = v.unsqueeze(2)
    # The query heads of one KV head are rows of one small matrix, so that its keys are read once.
    grouped = q.reshape(batch, num_kv_heads, -1, head_dim)
    seen = torch.arange(prefix, device=x.device) <= index
    mixed = attend(grouped, keys[:, :, :prefix], values[:, :, :prefix], seen).reshape(batch, -1)
    x = x + F.linear(mixed, layer.out, layer.out_bias)
    return x + _mlp(layer, x, eps)


def attend_matmul(q: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
    """q ``[B, Hkv, G, D]``, keys and values ``[B, Hkv, P, D]``, seen ``[P]`` bool; returns q's shape."""
    scores = (q @ keys.transpose(2, 3)).float() * q.shape[3] ** -0.5
    weights: Tensor = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1).to(q.dtype)
    return weights @ values


def attend_fused(q: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
    """The same in one kernel where torch has one."""
    mask = seen.expand(q.shape[0], q.shape[1], q.shape[2], -1)
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)


def attend_paged(q: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
    """The same by the backend that decodes: each row's keys are one page of a cache."""
    batch = q.shape[0]
    page_table = torch.arange(batch, device=q.device, dtype=torch.int32)[:, None]
    seq_lens = seen.sum(dtype=torch.int32).expand(batch).contiguous()
    flat = q.reshape(batch, -1, q.shape[3])
    layout, caches = QueryLayout.uniform(1), (keys.transpose(1, 2), values.transpose(1, 2))
    return mha(flat, *caches, page_table, seq_lens, layout=layout).view_as(q)


class UnrolledHead:
    """The draft head over ``[B, L]`` rows, step after step, remembering the keys each step left.

    Args:
        head: the head; gradients reach its parameters.
        first_position: rotary position of row 0.

    Raises:
        ValueError: a head of a format read from elsewhere that these forwards lack; names what.
    """

    def __init__(self, head: EagleHead, first_position: int = 0) -> None:
        config = head.config
        lacking = [name for name in ("normed_residual", "carry_normed", "qk_norm", "layer_windows") if getattr(config, name)]
        if config.format == "eagle3" and config.num_layers > 1:
            lacking.append(f"{config.num_layers} layers in an eagle3 head")
        if lacking:
            raise ValueError(f"training does not take heads with {', '.join(lacking)}")
        self.head = head
        self.first_position = first_position
        self._past: list[list[tuple[Tensor, Tensor]]] = [[] for _ in head.layers]

    def step(self, input_ids: Tensor, hidden_states: Tensor) -> Tensor:
        """Carried hidden states of the next step.

        Args:
            input_ids: ``[B, L]`` int64; in step ``j`` row ``i`` holds token ``i + 1 + j``.
            hidden_states: ``[B, L, width]``; the target's in step 0, then what this returned.

        Returns:
            ``[B, L, hidden_size]``.
        """
        head, step = self.head, len(self._past[0])
        embedding, hidden = head.inputs(input_ids, hidden_states)
        positions = torch.arange(input_ids.shape[1], device=hidden.device) + (self.first_position + step)
        rope = head.rotary(positions, hidden.dtype)
        for module, past in zip(head.layers, self._past, strict=True):
            layer = cast(Any, module)
            read = layer.input_norm(hidden) if embedding is None else layer.attention_input(embedding, hidden)
            hidden = hidden + self._attend(layer.attn, read, rope, past)
            hidden = hidden + layer.mlp(layer.mlp_norm(hidden))
        return hidden

    def _attend(self, attn: Attention, read: Tensor, rope: Rope, past: list[tuple[Tensor, Tensor]]) -> Tensor:
        batch, length = read.shape[:2]
        heads, kv_heads = attn.num_heads, attn.num_kv_heads
        q, k, v = torch.split(attn.qkv(read).view(batch, length, -1, attn.head_dim), [heads, kv_heads, kv_heads], dim=2)
        # [B, Hkv, G, L, D]: the query heads of one KV head side by side.
        q = rotate(q, rope).view(batch, length, kv_heads, -1, attn.head_dim).permute(0, 2, 3, 1, 4)
        k, v = rotate(k, rope).transpose(1, 2), v.transpose(1, 2)
        past.append((k, v))
        first_keys, first_values = past[0]
        scores = (q.flatten(2, 3) @ first_keys.transpose(2, 3)).view(batch, kv_heads, -1, length, length)
        later = torch.ones((length, length), dtype=torch.bool, device=q.device).triu(1)
        scores = scores.float().masked_fill(later, float("-inf")) * attn.scale
        own = [(q * keys[:, :, None]).sum(dim=-1, keepdim=True).float() * attn.scale for keys, _ in past[1:]]
        # One softmax over both kinds of keys without joining them: a joined matrix would have to be cut again.
        with torch.no_grad():
            top = scores.amax(dim=-1, keepdim=True)
            for score in own:
                top = torch.maximum(top, score)
        weights = (scores - top).exp()
        total = weights.sum(dim=-1, keepdim=True)
        mixed = (weights.to(v.dtype).flatten(2, 3) @ first_values).view_as(q).float()
        for score, (_, values) in zip(own, past[1:], strict=True):
            weight = (score - top).exp()
            total = total + weight
            mixed = mixed + weight * values[:, :, None]
        mixed = (mixed / total).to(v.dtype)
        return cast(Tensor, attn.o(mixed.permute(0, 3, 1, 2, 4).reshape(batch, length, -1)))
