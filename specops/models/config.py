"""What a model is, as data: read from a Hugging Face config, refused by field and value where it can't be served.

``from_hf`` takes a transformers config object, or the dictionary of a ``config.json`` in its older form (``rope_theta`` and
``rope_scaling``) or its newer one (``rope_parameters``). It needs no transformers. Fields a file may leave out get the
defaults of their model type. Nothing is guessed: a value this package has no code for raises.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")

# What each model type's config.json may leave out.
_COMMON: dict[str, Any] = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 4096 * 32, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096, "head_dim": 128},
    "gemma2": {
        "max_position_embeddings": 8192,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
}
LATENT_TYPES = ("deepseek_v2", "deepseek_v3")
MODEL_TYPES = (*_DEFAULTS, *LATENT_TYPES)


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding, in the rotate-half convention of Hugging Face models.

    Attributes:
        theta: base of the frequencies.
        rope_type: one of ``ROPE_TYPES``. ``dynamic`` equals ``default`` up to ``max_position_embeddings``, which is as far
            as the tables go.
        factor: by how much the context was stretched (``linear``, ``llama3``, ``yarn``).
        original_max_position: context before stretching (``llama3``, ``yarn``).
        low_freq_factor, high_freq_factor: the band that ``llama3`` blends over.
        beta_fast, beta_slow, truncate: the band that ``yarn`` blends over, in rotations.
        attention_factor: factor on cos and sin (``yarn``); 1 elsewhere.
        freq_factors: divisors of the frequencies, as GGUF files store them; None for none.
    """

    theta: float = 10000.0
    rope_type: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    freq_factors: tuple[float, ...] | None = None


@dataclass(frozen=True)
class ModelConfig:
    """Shape and options of a decoder-only language model.

    Attributes:
        layer_windows: per layer, the keys a row sees counting itself; None sees all.
        attention_bias, output_bias, mlp_bias: biases of the q/k/v, the o, and the MLP projections.
        qk_norm: RMSNorm on each head of q and k before RoPE (Qwen3).
        attention_scale: factor on the scores; None for ``head_dim ** -0.5``.
        attention_softcap, logit_softcap: soft caps on scores and on logits; None for none.
        attention_sinks: one learned logit a head in the softmax's denominator (gpt-oss).
        norm_offset: added to every norm weight (1.0 for Gemma).
        post_norms: norms behind attention and MLP too (Gemma 2).
        embedding_scale: factor on the embeddings; None for none.
        eos_token_ids: tokens that end a sequence; empty if the checkpoint names none.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = RopeConfig()
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    layer_windows: tuple[int | None, ...] = ()
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    attention_sinks: bool = False
    norm_offset: float = 0.0
    post_norms: bool = False
    embedding_scale: float | None = None
    hidden_act: str = "silu"
    model_type: str = "llama"
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads != 0:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.hidden_act not in ACTIVATIONS:
            raise ValueError(f"hidden_act {self.hidden_act!r} is not supported; it can be {', '.join(ACTIVATIONS)}")
        if self.head_dim % 2 != 0:
            raise ValueError(f"head_dim {self.head_dim} is odd; RoPE rotates pairs")
        if not self.layer_windows:
            object.__setattr__(self, "layer_windows", (None,) * self.num_layers)
        if len(self.layer_windows) != self.num_layers:
            raise ValueError(f"layer_windows has {len(self.layer_windows)} entries for {self.num_layers} layers")

    @property
    def rotary_dim(self) -> int:
        """Rotated dims of a head."""
        return self.head_dim

    @classmethod
    def from_hf(cls, config: Any, generation_config: Any = None) -> ModelConfig:
        """Read a transformers config object or the dictionary of a ``config.json``.

        Args:
            config: with ``to_dict()``, or a mapping.
            generation_config: likewise; its token ids win over the config's.

        Raises:
            ValueError: a field is missing, or has a value this package can't serve; names both.
        """
        given = as_dict(config)
        model_type = given.get("model_type")
        if model_type not in MODEL_TYPES:
            raise ValueError(f"model_type {model_type!r} is not supported; it can be {', '.join(MODEL_TYPES)}")
        _refuse_variants(given)
        if model_type in LATENT_TYPES:
            from specops.models.deepseek import LatentConfig

            return LatentConfig.from_fields(given, as_dict(generation_config))
        fields = {**_COMMON, **_DEFAULTS[model_type], **{k: v for k, v in given.items() if v is not None}}
        # An explicit null means "no window" and "no cap", not the default.
        for name in ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping"):
            if name in given and given[name] is None:
                fields[name] = None
        num_layers, num_heads = _need(fields, "num_hidden_layers"), _need(fields, "num_attention_heads")
        hidden_size = _need(fields, "hidden_size")
        gemma = model_type == "gemma2"
        llama_bias = bool(fields.get("attention_bias", False)) and model_type != "mistral"
        return cls(
            vocab_size=_need(fields, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_need(fields, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=fields.get("num_key_value_heads") or num_heads,
            head_dim=fields.get("head_dim") or hidden_size // num_heads,
            max_position_embeddings=fields["max_position_embeddings"],
            rms_norm_eps=fields["rms_norm_eps"],
            rope=rope_from_hf(fields),
            tie_word_embeddings=fields["tie_word_embeddings"],
            attention_bias=llama_bias or model_type == "qwen2",
            output_bias=llama_bias and model_type != "qwen2",
            mlp_bias=bool(fields.get("mlp_bias", False)) and model_type == "llama",
            qk_norm=model_type == "qwen3",
            layer_windows=_layer_windows(model_type, fields, num_layers),
            attention_scale=fields["query_pre_attn_scalar"] ** -0.5 if gemma else None,
            attention_softcap=fields["attn_logit_softcapping"] if gemma else None,
            logit_softcap=fields["final_logit_softcapping"] if gemma else None,
            norm_offset=1.0 if gemma else 0.0,
            post_norms=gemma,
            embedding_scale=hidden_size**0.5 if gemma else None,
            hidden_act=fields["hidden_activation"] if gemma else fields["hidden_act"],
            model_type=model_type,
            **token_ids(given, as_dict(generation_config)),
        )


def as_dict(config: Any) -> dict[str, Any]:
    """A config object's or mapping's fields; empty for None."""
    if config is None:
        return {}
    return dict(config) if isinstance(config, Mapping) else dict(config.to_dict())


def token_ids(config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """eos, bos and pad ids as :class:`ModelConfig` fields; the generation config's win."""

    def first(name: str) -> Any:
        value = generation_config.get(name)
        return config.get(name) if value is None else value

    eos = first("eos_token_id")
    ids = () if eos is None else tuple(eos) if isinstance(eos, (list, tuple)) else (eos,)
    return {"eos_token_ids": ids, "bos_token_id": first("bos_token_id"), "pad_token_id": first("pad_token_id")}


def rope_from_hf(fields: Mapping[str, Any]) -> RopeConfig:
    """The rotary embedding of ``rope_parameters`` (newer) or ``rope_theta`` with ``rope_scaling`` (older).

    Raises:
        ValueError: an unsupported type, or a parameter that its type needs is missing.
    """
    rope = dict(fields.get("rope_parameters") or fields.get("rope_scaling") or {})
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in ROPE_TYPES:
        raise ValueError(
            f"rope_type {rope_type!r} is not supported; it can be {', '.join(ROPE_TYPES)}; give a checkpoint with one"
        )
    partial = rope.get("partial_rotary_factor", fields.get("partial_rotary_factor") or 1.0)
    if partial != 1.0:
        raise ValueError(f"partial_rotary_factor {partial} is not supported; it must be 1.0")

    def need(name: str) -> Any:
        if rope.get(name) is None:
            raise ValueError(f"rope_type {rope_type!r} needs {name} in rope_parameters (or rope_scaling), which has none")
        return rope[name]

    options: dict[str, Any] = {"theta": float(rope.get("rope_theta", fields.get("rope_theta", 10000.0)))}
    if rope_type in ("linear", "llama3"):
        options["factor"] = float(need("factor"))
    if rope_type == "llama3":
        options.update(
            original_max_position=need("original_max_position_embeddings"),
            low_freq_factor=float(need("low_freq_factor")),
            high_freq_factor=float(need("high_freq_factor")),
        )
    if rope_type == "yarn":
        original = rope.get("original_max_position_embeddings") or fields["max_position_embeddings"]
        factor = float(rope.get("factor") or fields["max_position_embeddings"] / original)
        options.update(
            factor=factor,
            original_max_position=original,
            beta_fast=float(rope.get("beta_fast") or 32),
            beta_slow=float(rope.get("beta_slow") or 1),
            truncate=rope.get("truncate", True),
            attention_factor=_yarn_attention_factor(rope, factor),
        )
    return RopeConfig(rope_type=rope_type, **options)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Temperature of YaRN (Peng et al. 2023, section 3.4): ``0.1 * mscale * ln(factor) + 1``, 1 without stretching."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn_attention_factor(rope: Mapping[str, Any], factor: float) -> float:
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return yarn_mscale(factor, rope["mscale"]) / yarn_mscale(factor, rope["mscale_all_dim"])
    return yarn_mscale(factor)


def _layer_windows(model_type: str, fields: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    window = fields.get("sliding_window")
    if window is None or model_type == "llama":
        return (None,) * num_layers
    types = fields.get("layer_types")
    if model_type == "mistral":
        return (window,) * num_layers
    if model_type in ("qwen2", "qwen3"):
        if not fields.get("use_sliding_window", False):
            return (None,) * num_layers
        first = fields.get("max_window_layers", 28)
        types = types or ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    types = types or ["sliding_attention" if i % 2 == 0 else "full_attention" for i in range(num_layers)]
    unknown = sorted(set(types) - {"sliding_attention", "full_attention"})
    if unknown or len(types) != num_layers:
        raise ValueError(
            f"layer_types must name sliding_attention or full_attention for each of {num_layers} layers, got {types}"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _refuse_variants(given: Mapping[str, Any]) -> None:
    if given.get("quantization_config"):
        method = as_dict(given["quantization_config"]).get("quant_method", "unknown")
        raise ValueError(f"quantization_config ({method}) is not supported; give the checkpoint with unquantised weights")
    for name in given.get("architectures") or ():
        if "eagle" in name.lower():
            raise ValueError(f"architecture {name} is a draft head, not a target model; load it as the draft of its target")
        if not name.endswith("ForCausalLM"):
            raise ValueError(f"architecture {name} has no language-model head; a target must be a ...ForCausalLM checkpoint")


def _need(fields: Mapping[str, Any], name: str) -> int:
    if name not in fields:
        raise ValueError(f"the model's config lacks {name}")
    return int(fields[name])
