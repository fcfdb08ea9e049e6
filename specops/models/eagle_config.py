"""What a draft head is, as data. The head itself, and what the formats mean, is :mod:`specops.models.eagle`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from specops.models.config import ModelConfig, RopeConfig

FORMATS = ("eagle", "eagle3")


@dataclass(frozen=True)
class EagleConfig:
    """Shape and options of a draft head.

    Attributes:
        format: ``"eagle"`` or ``"eagle3"``.
        vocab_size: the target's vocabulary.
        draft_vocab_size: tokens the head can propose; below ``vocab_size`` it needs a ``d2t`` map.
        target_hidden_size: width of one hidden state of the target.
        aux_layers: format ``eagle3``: the target's residual streams it reads, each named by how many layers have run.
        norm_inputs: RMSNorm on what ``fc`` reads: for ``eagle`` the embedding and the hidden state, for ``eagle3`` each
            of the target's streams, whose scales differ a hundredfold (most published heads lack it).
        norm_joined: format ``eagle3``: one RMSNorm over all streams side by side instead.
        input_norm: format ``eagle``: the first layer's norm before attention (published heads lack it).
        final_norm: RMSNorm before the LM head; the carried state is the one before it.
        carry_normed: the carried state is the one after the final norm.
        normed_residual: format ``eagle3``: the first layer's residual is the normalised hidden state.
        fc_bias, attention_bias, output_bias, mlp_bias: biases of ``fc``, of the q/k/v and the o projection, and of the MLP.
        qk_norm: RMSNorm on each head of q and k (heads with Qwen3 layers).
        layer_windows: per layer, the keys a row sees counting itself; empty or None for all.
        own_lm_head, own_embedding: the head's file holds its own LM head, or embedding.
        target: name of the target it was trained for.

    Raises:
        ValueError: an unknown format, or sizes that contradict each other.
    """

    format: Literal["eagle", "eagle3"]
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    max_position_embeddings: int
    num_layers: int = 1
    rms_norm_eps: float = 1e-5
    rope: RopeConfig = field(default_factory=RopeConfig)
    aux_layers: tuple[int, ...] = ()
    norm_inputs: bool = True
    norm_joined: bool = False
    input_norm: bool = True
    final_norm: bool = True
    carry_normed: bool = False
    normed_residual: bool = False
    fc_bias: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    layer_windows: tuple[int | None, ...] = ()
    own_lm_head: bool = False
    own_embedding: bool = False
    hidden_act: str = "silu"
    target: str = ""

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {self.format!r}")
        if not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise ValueError(f"draft_vocab_size must be 1 to vocab_size {self.vocab_size}, got {self.draft_vocab_size}")
        if self.num_layers < 1:
            raise ValueError(f"a draft head has at least one layer, got num_layers {self.num_layers}")
        if self.format == "eagle3" and (not self.aux_layers or not self.final_norm):
            raise ValueError(
                "an eagle3 head has a final norm and at least one aux layer; "
                f"got final_norm {self.final_norm}, aux_layers {self.aux_layers}"
            )
        if self.format == "eagle" and self.aux_layers:
            raise ValueError(
                f"an eagle head reads the target's last hidden state; aux_layers {self.aux_layers} must be empty"
            )
        if self.format == "eagle" and (self.norm_joined or self.normed_residual):
            raise ValueError("norm_joined and normed_residual are options of eagle3 heads; this is an eagle head")
        if self.norm_joined and self.norm_inputs:
            raise ValueError("norm_joined and norm_inputs exclude each other: one norm over all streams, or one for each")
        if self.carry_normed and not self.final_norm:
            raise ValueError("carry_normed needs final_norm: it carries what that norm returns")

    @classmethod
    def for_target(
        cls,
        target: ModelConfig,
        *,
        format: Literal["eagle", "eagle3"] = "eagle",
        draft_vocab_size: int | None = None,
        name: str = "",
        **options: Any,
    ) -> EagleConfig:
        """A head of the target's own layer shape. ``options`` override any field."""
        third = target.num_layers // 2
        aux = (min(2, third), third, max(target.num_layers - 3, third)) if format == "eagle3" else ()
        fields: dict[str, Any] = {
            "format": format,
            "hidden_size": target.hidden_size,
            "intermediate_size": target.intermediate_size,
            "num_heads": target.num_heads,
            "num_kv_heads": target.num_kv_heads,
            "head_dim": target.head_dim,
            "vocab_size": target.vocab_size,
            "draft_vocab_size": draft_vocab_size or target.vocab_size,
            "target_hidden_size": target.hidden_size,
            "max_position_embeddings": target.max_position_embeddings,
            "rms_norm_eps": target.rms_norm_eps,
            "rope": target.rope,
            "aux_layers": aux,
            "hidden_act": target.hidden_act,
            "target": name,
        }
        return cls(**{**fields, **options})

    @property
    def hidden_width(self) -> int:
        """Width of the target's hidden states as the head takes them: all aux layers side by side for ``eagle3``."""
        return self.target_hidden_size * max(1, len(self.aux_layers))

    @property
    def reduced_vocab(self) -> bool:
        return self.draft_vocab_size < self.vocab_size

    def layer_config(self) -> ModelConfig:
        """The decoder layers of the head as the model blocks take them."""
        return ModelConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=self.max_position_embeddings,
            rms_norm_eps=self.rms_norm_eps,
            rope=self.rope,
            attention_bias=self.attention_bias,
            output_bias=self.output_bias,
            mlp_bias=self.mlp_bias,
            qk_norm=self.qk_norm,
            layer_windows=self.layer_windows,
            hidden_act=self.hidden_act,
        )

    def to_dict(self) -> dict[str, Any]:
        """As ``config.json`` holds it; defaults included."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> EagleConfig:
        """The inverse of :meth:`to_dict`.

        Raises:
            ValueError: a field is unknown or missing; names it.
        """
        known = {item.name: item for item in dataclasses.fields(cls)}
        unknown = sorted(set(fields) - set(known))
        absent = dataclasses.MISSING
        needed = [name for name, item in known.items() if item.default is absent and item.default_factory is absent]
        missing = [name for name in needed if name not in fields]
        if unknown or missing:
            raise ValueError(f"this is no config of a draft head: unknown fields {unknown}, missing fields {missing}")
        values = dict(fields)
        if "rope" in values:
            rope = dict(values["rope"])
            if rope.get("freq_factors") is not None:
                rope["freq_factors"] = tuple(rope["freq_factors"])
            values["rope"] = RopeConfig(**rope)
        for name in ("aux_layers", "layer_windows"):
            values[name] = tuple(values.get(name, ()))
        return cls(**values)
