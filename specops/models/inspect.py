"""What a folder holds and whether it fits a target, in words, without loading it.

    report = inspect_directory("path/to/head", target="path/to/model")
    print(report.text())
    report.fits                                             # True, False, or None where no target was given

Draft heads go through the very checks of :func:`~specops.models.eagle_checkpoint.load_head`, with every weight on the meta
device: what passes here loads. Only headers of safetensors files are read, and the vocabulary maps.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specops.models.checkpoint import read_json, weight_files
from specops.models.config import ModelConfig
from specops.models.deepseek import DeepseekLM, LatentConfig, latent_pieces
from specops.models.eagle_checkpoint import build_head
from specops.models.eagle_config import EagleConfig
from specops.models.eagle_files import read_head_files, safetensors_shapes
from specops.models.eagle_formats import KIND_NAMES, aux_ids, canonical_weights, kind_of, read_config
from specops.models.llama import CausalLM
from specops.models.loading import SMOLLM2, open_checkpoint
from specops.models.weights import fill, model_pieces


@dataclass(frozen=True)
class Inspection:
    """What was found.

    Attributes:
        path: the folder or file.
        kind: ``"draft head"``, ``"target model"`` or ``"unknown"``.
        summary: one sentence.
        facts: name and value of what is worth knowing, in order.
        problems: why it cannot be loaded, whatever the target; empty if nothing is wrong.
        target: what it was compared with; None for nothing.
        misfits: why it does not fit that target.
    """

    path: str
    kind: str
    summary: str
    facts: dict[str, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    target: str | None = None
    misfits: tuple[str, ...] = ()

    @property
    def fits(self) -> bool | None:
        """Whether it loads as a draft head for the target; None without a target."""
        if self.target is None:
            return None
        return not (self.problems or self.misfits)

    @property
    def ok(self) -> bool:
        """Nothing is wrong with it, and it fits the target if one was given."""
        return not (self.problems or self.misfits)

    def text(self) -> str:
        """The report as people read it."""
        width = max((len(name) for name in self.facts), default=0)
        lines = [f"{self.path}: {self.summary}", *(f"  {name:{width}}  {value}" for name, value in self.facts.items())]
        lines += [f"problem: {problem}" for problem in self.problems]
        if self.target is not None and self.fits:
            lines.append(f"It fits {self.target}.")
        elif self.target is not None:
            lines.append(f"It does not fit {self.target}" + (":" if self.misfits else "."))
            lines += [f"  {misfit}" for misfit in self.misfits]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "path": self.path,
            "kind": self.kind,
            "summary": self.summary,
            "facts": self.facts,
            "problems": list(self.problems),
            "target": self.target,
            "misfits": list(self.misfits),
            "fits": self.fits,
        }


def inspect_directory(path: str | os.PathLike[str], target: Any = None) -> Inspection:
    """Look at a folder with a draft head or a target model, or at a ``.gguf`` file.

    Args:
        path: what to look at; ``"smollm2"`` for that model.
        target: a target's folder, ``.gguf`` file, ``"smollm2"``, or a loaded :class:`~specops.models.CausalLM`; None to
            compare with nothing.

    Raises:
        FileNotFoundError: there is no such path, or no such target.
        ValueError, ImportError: the *target* cannot be read. What is wrong with ``path`` itself goes into the report.
    """
    place = Path(path).expanduser()
    name = str(path)
    if not place.exists() and name != SMOLLM2:
        raise FileNotFoundError(f"there is no {place}; give a folder with config.json and weights, or a .gguf file")
    model, target_name = (None, None) if target is None else _target_shape(target)
    try:
        if name == SMOLLM2 or place.is_file():
            return _as_target(name, ModelConfig.from_hf(open_checkpoint(path).config), None, target_name)
        fields = read_json(place / "config.json", "a model's folder holds it beside the weights")
        if _is_head(fields, place):
            return _as_head(place, model, target_name)
        return _as_target(str(place), ModelConfig.from_hf(fields), place, target_name)
    except (ValueError, OSError, ImportError) as error:
        # _as_head and _as_target report what they can tell; this is a folder of which nothing can be told.
        return Inspection(name, "unknown", "cannot be told", problems=(_bare(error, name),), target=target_name)


def _is_head(fields: Mapping[str, Any], path: Path) -> bool:
    if "format" in fields or "speculators_model_type" in fields:
        return True
    if any("eagle" in str(name).lower() for name in fields.get("architectures") or ()):
        return True
    # EAGLE 1 heads have a plain Llama config: only their weights tell them from a model.
    try:
        _, tensors = read_head_files(path, shapes_only=True)
    except (ValueError, OSError):
        return False
    return "fc.weight" in canonical_weights(tensors)


def _as_head(path: Path, model: CausalLM | None, target_name: str | None) -> Inspection:
    fields = read_json(path / "config.json")
    summary, facts = "a draft head that cannot be read", {}
    try:
        kind = kind_of(fields)
        summary = f"a draft head in {KIND_NAMES[kind]}"
        fields, tensors = read_head_files(path, shapes_only=True)
        plain = canonical_weights(tensors)
        if "fc.weight" not in plain:
            raise ValueError("it lacks fc.weight, which every EAGLE head has")
        config = read_config(fields, plain, None)
        summary = f"an {config.format} draft head in {KIND_NAMES[kind]}"
        facts = _head_facts(config, fields, plain, kind)
        # A stand-in that fits by its sizes shows what is wrong with the head itself.
        build_head(str(path), fields, tensors, _stand_in(config))
    except (ValueError, OSError, ImportError) as error:
        return Inspection(str(path), "draft head", summary, facts, (_bare(error, str(path)),), target_name)
    misfits: tuple[str, ...] = ()
    if model is not None:
        try:
            build_head(str(path), fields, tensors, model)
        except ValueError as error:
            misfits = tuple(_bare(error, str(path)).removeprefix("the head does not fit this target: ").split("; "))
    return Inspection(str(path), "draft head", summary, facts, (), target_name, misfits)


def _head_facts(config: EagleConfig, fields: Mapping[str, Any], tensors: Mapping[str, Tensor], kind: str) -> dict[str, str]:
    shape = f"{config.num_layers} of width {config.hidden_size}, {config.num_heads} heads ({config.num_kv_heads} KV)"
    facts = {"layers": f"{shape} of {config.head_dim} dims"}
    if config.format == "eagle3":
        facts["reads"] = f"{len(config.aux_layers)} hidden states of the target, each {config.target_hidden_size} wide"
        facts.update(_aux_facts(config, fields, kind))
    else:
        facts["reads"] = f"the target's last hidden state, {config.target_hidden_size} wide"
    if config.reduced_vocab:
        facts["vocabulary"] = f"proposes {config.draft_vocab_size} of the target's {config.vocab_size} tokens"
    else:
        facts["vocabulary"] = f"all {config.vocab_size} tokens"
    facts["embedding"] = "its own" if config.own_embedding else "the target's"
    facts["LM head"] = "its own" if config.own_lm_head else "the target's"
    norms = [
        words
        for words, present in (
            ("each input of fc", config.norm_inputs),
            ("all inputs of fc together", config.norm_joined),
            ("before the LM head", config.final_norm),
        )
        if present
    ]
    facts["norms"] = ", ".join(norms) or "none around the layers"
    facts["carried state"] = "after the final norm" if config.carry_normed else "before the final norm"
    facts["weights"] = _weight_words(tensors)
    if config.target:
        facts["made for"] = config.target
    return facts


def _aux_facts(config: EagleConfig, fields: Mapping[str, Any], kind: str) -> dict[str, str]:
    after = f"after {_listed(config.aux_layers)} layers"
    if kind == "specops":
        return {"target layers": after}
    ids = aux_ids(fields, None)
    if ids.written is None:
        return {"target layers": "not named; the usual ones are meant: after 2 layers, half of them, all but 3"}
    return {"target layers": after, "layer ids": f"{list(ids.written)} {ids.place} of the config, read as {ids.convention}"}


def _as_target(name: str, config: ModelConfig, path: Path | None, target_name: str | None) -> Inspection:
    facts = {
        "model type": config.model_type,
        "layers": f"{config.num_layers} of width {config.hidden_size}, {config.num_heads} heads "
        f"({config.num_kv_heads} KV) of {config.head_dim} dims",
        "vocabulary": f"{config.vocab_size} tokens" + (", LM head tied to the embedding" * config.tie_word_embeddings),
        "context": f"{config.max_position_embeddings} tokens",
    }
    windows = sorted({window for window in config.layer_windows if window is not None})
    if windows:
        count = sum(window is not None for window in config.layer_windows)
        facts["windows"] = f"{_listed(windows)} keys, in {count} of {config.num_layers} layers"
    problems: tuple[str, ...] = ()
    if path is not None:
        try:
            tensors = safetensors_shapes(weight_files(path))
            facts["weights"] = _weight_words(dict(tensors))
            model = _meta_model(config)
            pieces = latent_pieces(config) if isinstance(config, LatentConfig) else model_pieces(config)
            # A tied LM head's copy is compared by value when the model is loaded; shapes cannot tell.
            kept = [(key, tensor) for key, tensor in tensors if key != "lm_head.weight" or not config.tie_word_embeddings]
            fill(model, pieces, kept, where=str(path))
        except (ValueError, OSError, ImportError) as error:
            problems = (_bare(error, str(path)),)
    misfits = ("it is a target model, not a draft head",) if target_name is not None else ()
    words = "a target model" if path is not None else "a target model in a GGUF file"
    return Inspection(name, "target model", words, facts, problems, target_name, misfits)


def _target_shape(target: Any) -> tuple[CausalLM, str]:
    """A target without values, and its name."""
    if isinstance(target, CausalLM):
        return _meta_model(target.config), f"the given {target.config.model_type} model"
    checkpoint = open_checkpoint(target)
    try:
        config = ModelConfig.from_hf(checkpoint.config, checkpoint.generation_config)
    except ValueError as error:
        raise ValueError(f"the target {checkpoint.where}: {error}") from None
    return _meta_model(config), str(target)


def _meta_model(config: ModelConfig) -> CausalLM:
    with torch.device("meta"):
        return DeepseekLM(config) if isinstance(config, LatentConfig) else CausalLM(config)


def _stand_in(config: EagleConfig) -> CausalLM:
    """A target of the sizes the head asks for."""
    width = config.target_hidden_size
    if not (config.own_embedding and config.own_lm_head) and config.hidden_size != width:
        raise ValueError(
            f"its layers are {config.hidden_size} wide and the target's {width}, so it needs an embedding and an LM head of "
            "its own; give the file that holds them"
        )
    layers = max(config.aux_layers, default=1)
    sizes: dict[str, Any] = {"vocab_size": config.vocab_size, "hidden_size": width, "intermediate_size": 1}
    heads: dict[str, Any] = {"num_layers": layers, "num_heads": 1, "num_kv_heads": 1, "head_dim": 2}
    return _meta_model(ModelConfig(**sizes, **heads, max_position_embeddings=1))


def _weight_words(tensors: Mapping[str, Tensor]) -> str:
    """Number and dtype of the weights, and what they take."""
    weights = [tensor for tensor in tensors.values() if tensor.is_floating_point()]
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in weights})
    count = sum(tensor.numel() for tensor in weights)
    size = sum(tensor.numel() * tensor.element_size() for tensor in weights)
    shown = f"{count / 1e6:.1f} million" if count >= 1e6 else f"{count}"
    return f"{shown} in {', '.join(dtypes) or 'no dtype'}, {size / 1e6:.3g} MB"


def _listed(values: Any) -> str:
    return ", ".join(map(str, values))


def _bare(error: Exception, where: str) -> str:
    """The message without the path in front of it, which the report has already."""
    return str(error).removeprefix(f"{where}: ").removeprefix(f"{where} ")
