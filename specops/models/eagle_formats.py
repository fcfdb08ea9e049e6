"""How draft heads are published: what their ``config.json`` and the names of their weights mean.

Three kinds of folder are told apart by their config. This package's own has a ``format`` field and is
:meth:`EagleConfig.to_dict`. A *published* EAGLE or EAGLE-3 head has a Llama config, and what that leaves unsaid is read from
the names of the weights. A *speculators* head (package ``speculators``) nests its layer's config under
``transformer_layer_config``. All of them come out as one :class:`EagleConfig` and one table of pieces.

Nothing here reads a file, and only shapes and names of weights are looked at, so that
:mod:`specops.models.inspect` can use all of it without loading a head. Files are :mod:`specops.models.eagle_checkpoint`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from specops.models.config import ModelConfig, rope_from_hf
from specops.models.eagle_config import EagleConfig
from specops.models.weights import Piece, layer_pieces

AuxConvention = Literal["layers_run", "layer_index"]
Kind = Literal["specops", "published", "speculators"]
KIND_NAMES: dict[Kind, str] = {
    "specops": "specops' own format",
    "published": "published EAGLE format",
    "speculators": "speculators format",
}
# Weights of a training run that a speculators file may carry along; they are the target's.
_LEFT_OVER = ("verifier_lm_head.weight", "verifier_norm.weight")
_AUX_NAMES = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")

# What a layer's config may leave out, by model type.
_LAYER_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
    },
    "qwen3": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32768,
    },
}

# Options of published configs whose other value means a head that this package has no code for.
_REFUSED = {
    "use_aux_hidden_state": (False, "an eagle3 head that does not read the target's auxiliary hidden states"),
    "use_last_layernorm": (False, "an eagle3 head without a norm before its LM head"),
    "use_input_layernorm_in_first_layer": (False, "an eagle3 head whose first layer does not norm the embedding"),
    "use_mtp_layernorm": (True, "norms around the head as in DeepSeek's MTP module"),
}


@dataclass(frozen=True)
class AuxIds:
    """The target layers that a config names.

    Attributes:
        written: as the config has them; None where it names none and the usual ones are meant.
        layers: each as how many layers have run: 0 is the embedding.
        convention: how ``written`` was read.
        place: where it stands in the config, for messages.
    """

    written: tuple[int, ...] | None
    layers: tuple[int, ...]
    convention: AuxConvention
    place: str


def kind_of(fields: Mapping[str, Any]) -> Kind:
    """Which kind of head's config this is.

    Raises:
        ValueError: it is no head's config, or that of a speculators model other than EAGLE-3.
    """
    if "format" in fields:
        return "specops"
    if "speculators_model_type" in fields:
        model_type = fields["speculators_model_type"]
        if model_type != "eagle3":
            raise ValueError(f"this is a speculators model of type {model_type!r}; of those, eagle3 heads can be read")
        return "speculators"
    needed = ("hidden_size", "intermediate_size", "num_attention_heads")
    missing = [name for name in needed if name not in fields]
    if missing:
        raise ValueError(f"config.json is no draft head's: it lacks format, or {', '.join(missing)}")
    return "published"


def looks_like_eagle3(names: Mapping[str, Tensor]) -> bool:
    """Whether these are an EAGLE-3 head's weights: its first layer has a norm for the hidden state."""
    return any(name.startswith("midlayer.") for name in names) or "layers.0.hidden_norm.weight" in names


def canonical_weights(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights without a ``model.`` before every name, and without what a training run left over."""
    prefix = "model." if "model.fc.weight" in tensors else ""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name not in _LEFT_OVER}


def read_config(
    fields: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    target: ModelConfig | None,
    aux_convention: AuxConvention | None = None,
) -> EagleConfig:
    """The config of a head of any kind.

    Args:
        fields: of its ``config.json``.
        tensors: its weights, as :func:`canonical_weights` gives them; only names and shapes are read.
        target: config of the target; without one, sizes it would give are read from the weights.
        aux_convention: see :func:`aux_ids`.

    Raises:
        ValueError: a field is missing, or says something this package has no code for.
    """
    kind = kind_of(fields)
    if kind == "specops":
        return EagleConfig.from_dict({name: value for name, value in fields.items() if name != "architectures"})
    layer = _layer_fields(fields) if kind == "speculators" else dict(fields)
    options = {**(fields.get("eagle_config") or {}), **fields}
    eagle3 = looks_like_eagle3(tensors)
    _refuse_options(options, eagle3)
    size, heads = layer["hidden_size"], layer["num_attention_heads"]
    num_layers = layer.get("num_hidden_layers") or 1
    aux = aux_ids(fields, target.num_layers if target else None, aux_convention).layers if eagle3 else ()
    vocab_size = layer.get("vocab_size") or (target.vocab_size if target else tensors["embed_tokens.weight"].shape[0])
    draft_size = fields.get("draft_vocab_size")
    if draft_size is None:
        draft_size = tensors["d2t"].shape[0] if "d2t" in tensors else vocab_size
    qwen3 = kind == "speculators" and layer["model_type"] == "qwen3"
    return EagleConfig(
        format="eagle3" if eagle3 else "eagle",
        hidden_size=size,
        intermediate_size=layer["intermediate_size"],
        num_heads=heads,
        num_kv_heads=layer.get("num_key_value_heads") or heads,
        head_dim=layer.get("head_dim") or size // heads,
        num_layers=num_layers,
        vocab_size=vocab_size,
        draft_vocab_size=draft_size,
        target_hidden_size=fields.get("target_hidden_size") or _fc_hidden_size(tensors, size, aux),
        rms_norm_eps=layer.get("rms_norm_eps", 1e-6),
        rope=rope_from_hf({"max_position_embeddings": 2048, **layer}),
        max_position_embeddings=layer.get("max_position_embeddings", 2048),
        aux_layers=aux,
        hidden_act=layer.get("hidden_act", "silu"),
        norm_inputs=bool(options.get("fc_norm", "fc_norm.0.weight" in tensors)) if eagle3 else False,
        norm_joined=eagle3 and bool(options.get("norm_before_fc", "input_norm.weight" in tensors)),
        input_norm="layers.0.input_layernorm.weight" in tensors,
        final_norm=eagle3 or "norm.weight" in tensors,
        carry_normed=bool(options.get("norm_output", False)),
        normed_residual=bool(options.get("norm_before_residual", False)),
        fc_bias="fc.bias" in tensors,
        attention_bias=bool(layer.get("attention_bias")) or _has(tensors, "q_proj.bias"),
        output_bias=(kind == "speculators" and bool(layer.get("attention_bias"))) or _has(tensors, "o_proj.bias"),
        mlp_bias=bool(layer.get("mlp_bias")) or _has(tensors, "up_proj.bias"),
        qk_norm=qwen3 or _has(tensors, "q_norm.weight"),
        layer_windows=_windows(layer, num_layers) if kind == "speculators" else (),
        own_lm_head="lm_head.weight" in tensors,
        own_embedding="embed_tokens.weight" in tensors,
        target=_verifier(fields) if kind == "speculators" else "",
    )


def aux_ids(fields: Mapping[str, Any], target_layers: int | None, convention: AuxConvention | None = None) -> AuxIds:
    """Which of the target's residual streams an EAGLE-3 head reads, from a published config.

    Ids stand under ``eagle_config`` or at the top. Two ways of counting are in use: ``layers_run``, how many layers have
    run (id 2 is the input of layer 2; vLLM and speculators), and ``layer_index``, the layer whose output it is (SGLang and
    what is trained for it). Nothing in a file says which. Without ``convention``, ids under ``eagle_config`` are read as
    ``layer_index`` and ids at the top as ``layers_run``, which is how the programs that write them read them.

    Args:
        fields: of ``config.json``.
        target_layers: layers of the target; None leaves the ids unchecked.
        convention: overrides the rule above.

    Raises:
        ValueError: ids that the target does not have.
    """
    nested = fields.get("eagle_config") or {}
    for place, where, usual in ((nested, "under eagle_config", "layer_index"), (fields, "at the top", "layers_run")):
        for name in _AUX_NAMES:
            if place.get(name):
                written = tuple(int(index) for index in place[name])
                chosen: AuxConvention = convention or usual  # type: ignore[assignment]
                layers = tuple(index + (chosen == "layer_index") for index in written)
                if min(layers) < 0 or (target_layers is not None and max(layers) > target_layers):
                    raise ValueError(
                        f"aux layer ids {list(written)} do not fit a target of {target_layers} layers ({chosen})"
                    )
                return AuxIds(written, layers, chosen, where)
    count = 32 if target_layers is None else target_layers
    return AuxIds(None, (2, count // 2, count - 3), "layers_run", "nowhere")


def head_pieces(config: EagleConfig, kind: Kind = "specops", names: Mapping[str, Tensor] | None = None) -> dict[str, Piece]:
    """Where each weight of a head's file goes.

    Args:
        config: of the head.
        kind: whose names the file uses.
        names: the file's weights, to tell how its first layer is called; the kind's usual way when not given.
    """
    pieces = {"fc.weight": Piece("fc.weight")}
    if config.fc_bias:
        pieces["fc.bias"] = Piece("fc.bias")
    layer = config.layer_config()
    own = kind == "specops"
    for index in range(config.num_layers):
        source = target = f"layers.{index}."
        if index == 0 and config.format == "eagle3":
            source = "layers.0." if "layers.0.hidden_norm.weight" in (names or {}) else "midlayer."
            pieces.update(layer_pieces(layer, source, target, input_norm=False))
            pieces[f"{source}input_layernorm.weight"] = Piece("layers.0.embed_norm.weight")
            pieces[f"{source}hidden_norm.weight"] = Piece("layers.0.hidden_norm.weight")
        else:
            pieces.update(layer_pieces(layer, source, target, input_norm=index > 0 or config.input_norm))
    if config.norm_inputs and config.format == "eagle":
        pieces["embed_norm.weight"] = Piece("embed_norm.weight")
    if config.norm_inputs and config.format == "eagle3" and not own:
        for index in range(len(config.aux_layers)):
            pieces[f"fc_norm.{index}.weight"] = Piece("hidden_norm.weight", index, 1, repeat=True)
    elif config.norm_inputs or config.norm_joined:
        pieces["hidden_norm.weight" if own else "input_norm.weight"] = Piece("hidden_norm.weight")
    if config.final_norm:
        pieces["norm.weight"] = Piece("norm.weight")
    if config.own_lm_head:
        pieces["lm_head.weight"] = Piece("lm_head_weight")
    if config.own_embedding:
        pieces["embed_tokens.weight"] = Piece("own_embedding.weight")
    return pieces


def _layer_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A speculators config's ``transformer_layer_config`` with its model type's defaults."""
    given = dict(fields.get("transformer_layer_config") or {})
    model_type = given.setdefault("model_type", "qwen3")
    if model_type not in _LAYER_DEFAULTS:
        raise ValueError(
            f"transformer_layer_config has model_type {model_type!r}; eagle3 heads with layers of "
            f"{', '.join(_LAYER_DEFAULTS)} can be read"
        )
    return {**_LAYER_DEFAULTS[model_type], **{name: value for name, value in given.items() if value is not None}}


def _windows(layer: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """Windows of the layers that ``layer_types`` calls sliding; a window without layer types is unused."""
    types = layer.get("layer_types") or []
    if "sliding_attention" not in types:
        return ()
    if len(types) != num_layers or layer.get("sliding_window") is None:
        raise ValueError(f"layer_types {types} needs an entry for each of {num_layers} layers, and sliding_window a value")
    return tuple(layer["sliding_window"] if kind == "sliding_attention" else None for kind in types)


def _fc_hidden_size(tensors: Mapping[str, Tensor], hidden_size: int, aux: tuple[int, ...]) -> int:
    """Width of one of the target's hidden states, from how wide ``fc`` reads."""
    shape = tensors["fc.weight"].shape
    width = shape[1] if len(shape) == 2 else 0
    size = width // len(aux) if aux else width - hidden_size
    if size < 1 or (aux and width % len(aux)):
        reads = f"{len(aux)} hidden states side by side" if aux else f"an embedding of {hidden_size} and a hidden state"
        raise ValueError(f"fc.weight has shape {list(shape)}, which cannot read {reads}")
    return size


def _refuse_options(options: Mapping[str, Any], eagle3: bool) -> None:
    found = [f"{name} {value} ({what})" for name, (value, what) in _REFUSED.items() if options.get(name) is value and eagle3]
    if (options.get("parallel_draft_step") or 1) > 1:
        found.append(f"parallel_draft_step {options['parallel_draft_step']} (several tokens drafted at once)")
    if found:
        raise ValueError(f"the config asks for {'; '.join(found)}, which is not supported")


def _verifier(fields: Mapping[str, Any]) -> str:
    verifier = (fields.get("speculators_config") or {}).get("verifier") or {}
    return str(verifier.get("name_or_path") or "")


def _has(tensors: Mapping[str, Tensor], ending: str) -> bool:
    return any(name.endswith(ending) for name in tensors)
