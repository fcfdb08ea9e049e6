"""DeepSeek V2 and V3 targets: multi-head latent attention in its absorbed form over a paged latent cache.

A token's keys and values of all heads are up-projections of one latent vector; the cache holds that latent and one rotary
key. The key up-projection is absorbed into the query, the value up-projection is applied to attention's output, so
attention itself runs on latents (DeepSeek V2, 2024, section 2.1). Everything else is :mod:`specops.models.llama`.

Layers with a mixture of experts are not supported: the config is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from specops import ops
from specops.kv_cache import PagedLatentCache
from specops.metadata import AttentionMetadata
from specops.models.config import ModelConfig, rope_from_hf, token_ids, yarn_mscale
from specops.models.llama import CausalLM, DecoderLayer, Reduce
from specops.models.projections import RMSNorm, added, normed
from specops.models.rotary import Rope, rotate
from specops.models.weights import Piece, mlp_pieces, norm_pieces, whole_pieces

# transformers builds the norms inside attention with this, whatever rms_norm_eps is.
_LATENT_NORM_EPS = 1e-6

_DEFAULTS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"max_position_embeddings": 2048, "first_k_dense_replace": 0, "n_routed_experts": 64},
    "deepseek_v3": {"max_position_embeddings": 4096, "first_k_dense_replace": 3, "n_routed_experts": 256},
}
_COMMON = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_interleave": True,
}


@dataclass(frozen=True)
class LatentConfig(ModelConfig):
    """A :class:`ModelConfig` with latent attention; ``head_dim`` is ``nope_dim + rope_dim``.

    Attributes:
        latent_dim, rope_dim: ``Dc`` and ``Dr``, what the cache holds a token.
        nope_dim, value_dim: unrotated key dims and value dims of a head, before absorption.
        query_rank: width of the query's own bottleneck; None for a plain query projection.
        rope_interleaved: whether the checkpoint's rotary dims come in adjacent pairs.
    """

    latent_dim: int = 512
    rope_dim: int = 64
    nope_dim: int = 128
    value_dim: int = 128
    query_rank: int | None = None
    rope_interleaved: bool = True

    @property
    def rotary_dim(self) -> int:
        return self.rope_dim

    @classmethod
    def from_fields(cls, given: Mapping[str, Any], generation: Mapping[str, Any]) -> LatentConfig:
        """Read the fields of a ``config.json`` of model type deepseek_v2 or deepseek_v3.

        Raises:
            ValueError: a field is missing, or has a value that is not supported; names both.
        """
        fields = {**_COMMON, **_DEFAULTS[given["model_type"]], **{k: v for k, v in given.items() if v is not None}}
        absent = [name for name in ("vocab_size", "hidden_size", "intermediate_size") if name not in fields]
        absent += [name for name in ("num_hidden_layers", "num_attention_heads") if name not in fields]
        if absent:
            raise ValueError(f"the model's config lacks {', '.join(absent)}")
        num_layers, dense = fields["num_hidden_layers"], fields["first_k_dense_replace"]
        if fields["n_routed_experts"] and dense < num_layers:
            raise ValueError(
                f"first_k_dense_replace {dense} of {num_layers} layers: the others are mixtures of "
                f"{fields['n_routed_experts']} experts, which are not supported; only dense DeepSeek models can be served"
            )
        nope_dim, rope_dim = fields["qk_nope_head_dim"], fields["qk_rope_head_dim"]
        rope = rope_from_hf(fields)
        scale: float = (nope_dim + rope_dim) ** -0.5
        scaling = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
        if rope.rope_type != "default" and scaling.get("mscale_all_dim"):
            scale *= yarn_mscale(rope.factor, scaling["mscale_all_dim"]) ** 2
        return cls(
            vocab_size=fields["vocab_size"],
            hidden_size=fields["hidden_size"],
            intermediate_size=fields["intermediate_size"],
            num_layers=num_layers,
            num_heads=fields["num_attention_heads"],
            num_kv_heads=fields["num_attention_heads"],
            head_dim=nope_dim + rope_dim,
            max_position_embeddings=fields["max_position_embeddings"],
            rms_norm_eps=fields["rms_norm_eps"],
            rope=rope,
            tie_word_embeddings=fields["tie_word_embeddings"],
            attention_bias=fields["attention_bias"],
            output_bias=fields["attention_bias"],
            mlp_bias=fields["mlp_bias"] and given["model_type"] == "deepseek_v2",
            attention_scale=scale,
            hidden_act=fields["hidden_act"],
            model_type=given["model_type"],
            latent_dim=fields["kv_lora_rank"],
            rope_dim=rope_dim,
            nope_dim=nope_dim,
            value_dim=fields["v_head_dim"],
            # Explicit null means a plain query projection; an absent field means the default rank.
            query_rank=None if "q_lora_rank" in given and given["q_lora_rank"] is None else fields["q_lora_rank"],
            rope_interleaved=given["model_type"] == "deepseek_v2" or fields["rope_interleave"],
            **token_ids(given, generation),
        )


class LatentAttention(nn.Module):
    """Absorbed multi-head latent attention with its projections.

    Args:
        config: shape and options.
        layer_index: picks the window from ``config.layer_windows``.

    Attributes:
        down: one projection of the input; rows of the query (or of its bottleneck), then the latent, then the rotary key.
        query_up: from the query's bottleneck to its heads, or None.
        kv_up: ``[H * (nope_dim + value_dim), latent_dim]``, per head the key's then the value's up-projection.
        cache: the layer's :class:`~specops.kv_cache.PagedLatentCache`, or None.
        reduce: sums the output over ranks where each holds a part of the heads (:mod:`specops.parallel`).
    """

    cache: PagedLatentCache | None
    reduce: Reduce | None = None

    def __init__(self, config: LatentConfig, layer_index: int = 0) -> None:
        super().__init__()
        self.num_heads, self.nope_dim, self.rope_dim = config.num_heads, config.nope_dim, config.rope_dim
        self.latent_dim, self.value_dim, self.query_rank = config.latent_dim, config.value_dim, config.query_rank
        self.scale = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
        self.window, self.backend = config.layer_windows[layer_index], "auto"
        query_rows = config.num_heads * config.head_dim
        self.first_rows = query_rows if config.query_rank is None else config.query_rank
        down_rows = self.first_rows + config.latent_dim + config.rope_dim
        # Without a bottleneck the checkpoint has no bias on the query's rows; zeros stand for it.
        self.down = nn.Linear(config.hidden_size, down_rows, bias=config.attention_bias)
        self.query_norm = None if config.query_rank is None else RMSNorm(config.query_rank, _LATENT_NORM_EPS)
        self.query_up = None if config.query_rank is None else nn.Linear(config.query_rank, query_rows, bias=False)
        self.latent_norm = RMSNorm(config.latent_dim, _LATENT_NORM_EPS)
        kv_rows = config.num_heads * (config.nope_dim + config.value_dim)
        self.kv_up = nn.Parameter(torch.randn(kv_rows, config.latent_dim) / math.sqrt(config.latent_dim))
        self.o = nn.Linear(config.num_heads * config.value_dim, config.hidden_size, bias=config.output_bias)
        self.cache = None

    def allocate_cache(
        self, num_pages: int, page_size: int, *, dtype: torch.dtype, device: torch.device | str
    ) -> PagedLatentCache:
        """Give this layer a cache of its own and return it. Arguments as for :class:`specops.PagedLatentCache`."""
        self.cache = PagedLatentCache(num_pages, page_size, self.latent_dim, self.rope_dim, dtype=dtype, device=device)
        return self.cache

    def forward(
        self,
        x: Tensor,
        rope: Rope,
        meta: AttentionMetadata,
        norm: RMSNorm | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """``x`` ``[T, hidden_size]``, put through ``norm`` first, to the same; ``residual`` is added to it.

        Raises:
            RuntimeError: if the layer has no cache yet.
        """
        cache = self.cache
        if cache is None:
            raise RuntimeError("this attention layer has no KV cache; call allocate_caches() on its model, or set .cache")
        query, latent, key_rope = self.down(normed(x, norm)).split((self.first_rows, self.latent_dim, self.rope_dim), dim=-1)
        if self.query_norm is not None and self.query_up is not None:
            query = self.query_up(self.query_norm(query))
        query = query.view(x.shape[0], self.num_heads, self.nope_dim + self.rope_dim)
        key_rope = rotate(key_rope.unsqueeze(1), rope).squeeze(1)
        meta.check_page_size(cache.page_size)
        ops.store_latent(cache.kv, self.latent_norm(latent), key_rope, meta.slots, kv_scale=cache.kv_scale)
        kv_up = self.kv_up.view(self.num_heads, self.nope_dim + self.value_dim, self.latent_dim)
        key_up, value_up = kv_up[:, : self.nope_dim], kv_up[:, self.nope_dim :]
        mixed = ops.mla(
            torch.bmm(query[..., : self.nope_dim].transpose(0, 1), key_up).transpose(0, 1),
            rotate(query[..., self.nope_dim :], rope),
            cache.kv,
            meta.page_table,
            meta.seq_lens,
            layout=meta.layout,
            scale=self.scale,
            window=self.window,
            tree_mask=meta.tree_mask,
            kv_scale=cache.kv_scale,
            plan=meta.plan,
            backend=self.backend,
        )
        values = torch.bmm(mixed.transpose(0, 1), value_up.transpose(1, 2)).transpose(0, 1)
        out = self.o(values.flatten(1))
        return added(out if self.reduce is None else self.reduce(out), residual)


class DeepseekDecoderLayer(DecoderLayer):
    """A decoder layer with latent attention."""

    attention_type = LatentAttention


class DeepseekLM(CausalLM):
    """A dense DeepSeek V2 or V3 model; used as :class:`~specops.models.llama.CausalLM` is.

    Its caches are :class:`~specops.kv_cache.PagedLatentCache` modules, and its backends those of the MLA family.
    """

    layer_type = DeepseekDecoderLayer


def latent_pieces(config: LatentConfig) -> dict[str, Piece]:
    """Where each checkpoint tensor of a :class:`DeepseekLM` goes.

    Rotary dims stored as adjacent pairs are brought to rotate-half order here, in the rows of the projections that make
    them: scores do not change when query and key are permuted alike.
    """
    pieces = whole_pieces(config)
    for index in range(config.num_layers):
        source, target = f"model.layers.{index}.", f"layers.{index}."
        pieces.update(norm_pieces(config, source, target))
        pieces.update(mlp_pieces(config, source, target))
        pieces.update(_attention_pieces(config, f"{source}self_attn.", f"{target}attn."))
    return pieces


def _attention_pieces(config: LatentConfig, source: str, target: str) -> dict[str, Piece]:
    query_rows, stored = config.num_heads * config.head_dim, config.latent_dim + config.rope_dim
    by_head = _rope_halves(config, config.head_dim) if config.rope_interleaved else None
    whole = _rope_halves(config, stored) if config.rope_interleaved else None
    first_rows = query_rows if config.query_rank is None else config.query_rank
    pieces = {
        f"{source}kv_a_proj_with_mqa.weight": Piece(f"{target}down.weight", first_rows, stored, reorder=whole),
        f"{source}kv_a_layernorm.weight": Piece(f"{target}latent_norm.weight"),
        f"{source}kv_b_proj.weight": Piece(f"{target}kv_up"),
        f"{source}o_proj.weight": Piece(f"{target}o.weight"),
    }
    if config.query_rank is None:
        pieces[f"{source}q_proj.weight"] = Piece(f"{target}down.weight", 0, query_rows, reorder=by_head)
    else:
        pieces[f"{source}q_a_proj.weight"] = Piece(f"{target}down.weight", 0, first_rows)
        pieces[f"{source}q_a_layernorm.weight"] = Piece(f"{target}query_norm.weight")
        pieces[f"{source}q_b_proj.weight"] = Piece(f"{target}query_up.weight", reorder=by_head)
    if config.attention_bias:
        pieces[f"{source}kv_a_proj_with_mqa.bias"] = Piece(f"{target}down.bias", first_rows, stored, reorder=whole)
        pieces[f"{source}o_proj.bias"] = Piece(f"{target}o.bias")
        if config.query_rank is not None:
            pieces[f"{source}q_a_proj.bias"] = Piece(f"{target}down.bias", 0, first_rows)
    return pieces


def _rope_halves(config: LatentConfig, block: int) -> Callable[[Tensor], Tensor]:
    """Rows in blocks of ``block``, whose last ``rope_dim`` go from adjacent pairs to first halves, then second halves."""

    def reorder(rows: Tensor) -> Tensor:
        blocks = rows.view(-1, block, *rows.shape[1:])
        plain, pairs = blocks[:, : -config.rope_dim], blocks[:, -config.rope_dim :]
        return torch.cat((plain, pairs[:, 0::2], pairs[:, 1::2]), dim=1).reshape(rows.shape)

    return reorder
