"""Draft heads on disk: ``load_head``, ``save_head``, and the heads that come with the package.

A head is a folder with ``config.json`` and ``model.safetensors``. Two kinds of config are read: this package's own (it has a
``format`` field and is :meth:`EagleConfig.to_dict`), and those of published EAGLE and EAGLE-3 heads, which are Llama
configs; what those leave unsaid is read from the names of their weights. Weights have the published names in both, so that
one table of pieces serves loading and saving.

Whatever does not fit raises one sentence that names it: a missing or unexpected weight, a wrong shape, a head made for
another target, a draft vocabulary without its map, a target model given as a head.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from specops.models.checkpoint import open_directory
from specops.models.config import rope_from_hf
from specops.models.eagle import EagleConfig, EagleHead
from specops.models.llama import CausalLM
from specops.models.weights import Piece, fill, layer_pieces

WEIGHTS = "model.safetensors"
_MAPS = ("d2t", "t2d")
AuxConvention = Literal["layers_run", "layer_index"]


def load_head(
    directory: str | os.PathLike[str],
    target: CausalLM,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    format: Literal["eagle", "eagle3"] | None = None,
    aux_convention: AuxConvention = "layers_run",
) -> EagleHead:
    """A draft head with a checkpoint's weights, in eval mode and without gradients.

    Args:
        directory: with ``config.json`` and ``*.safetensors``.
        target: the target it drafts for; its embedding and LM head are shared.
        dtype, device: of the head; the target's when not given.
        format: what the head is expected to be; None takes what is there.
        aux_convention: what the aux layer ids of a *published* EAGLE-3 config count: ``"layers_run"``, how many layers
            have run (id 2 is the input of layer 2), or ``"layer_index"``, the layer whose output it is.

    Raises:
        FileNotFoundError: there is no such folder or file.
        ValueError: the checkpoint is broken, incomplete, or not for this target; says what was found and what is needed.
    """
    path = Path(directory)
    checkpoint = open_directory(path)
    tensors = dict(checkpoint.tensors)
    where = str(path)
    _refuse_target(where, tensors)
    try:
        config = _config_of(checkpoint.config, tensors, target, aux_convention)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    _check_format(where, config, tensors, format)
    _check_fit(where, config, target)
    maps = {name: tensors.pop(name) for name in _MAPS if name in tensors}
    if config.reduced_vocab and "d2t" not in maps:
        raise ValueError(
            f"{where} lacks d2t: its draft vocabulary of {config.draft_vocab_size} tokens is smaller than the target's "
            f"{config.vocab_size}, and without the map draft ids mean nothing; give the file that holds it"
        )
    weight = target.embed_tokens.weight
    device = weight.device if device is None else torch.device(device)
    dtype = dtype or weight.dtype
    own = (config.draft_vocab_size, config.hidden_size)
    lm_head = torch.zeros(own) if config.own_lm_head else target.lm_head.weight.detach()
    try:
        head = EagleHead(config, target.embed_tokens, lm_head, d2t=maps.get("d2t"))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    _check_t2d(where, maps, config)
    head = head.to(device=device, dtype=dtype)
    fill(head, head_pieces(config), tensors.items(), where=where)
    return head.eval().requires_grad_(False)


def save_head(head: EagleHead, directory: str | os.PathLike[str], card: Mapping[str, Any] | None = None) -> None:
    """Write a head so that :func:`load_head` gives it back. A folder that is there is replaced as a whole.

    Args:
        head: what to write, in the dtype it has. The target's embedding and LM head are not written.
        directory: where to.
        card: facts about the head, for ``card.json`` and, as text, ``README.md``.
    """
    from safetensors.torch import save_file

    path = Path(directory)
    parameters = dict(head.named_parameters())
    tensors: dict[str, Tensor] = {}
    for name, piece in head_pieces(head.config).items():
        parameter = parameters[piece.parameter].detach()
        rows = parameter.shape[0] if piece.rows is None else piece.rows
        tensors[name] = parameter[piece.start : piece.start + rows].cpu().clone()
    if head.d2t is not None:
        tensors["d2t"] = head.d2t.cpu()
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    draft.chmod(0o755)
    save_file(tensors, draft / WEIGHTS)
    (draft / WEIGHTS).chmod(0o644)
    config = {"architectures": ["EagleHead"], **head.config.to_dict()}
    _write_text(draft / "config.json", json.dumps(config, indent=2))
    if card is not None:
        write_card(draft, head.config, card)
    old = path.with_name(f".{path.name}-old")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)
    draft.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def write_card(directory: Path, config: EagleConfig, card: Mapping[str, Any]) -> None:
    """``card.json`` and ``README.md`` of a head's folder, from what was measured."""
    _write_text(directory / "card.json", json.dumps(card, indent=2))
    lines = [
        f"# EAGLE draft head for {config.target or 'its target'}",
        "",
        f"Format `{config.format}`, {config.num_layers} decoder layer of width {config.hidden_size}, proposes "
        f"{config.draft_vocab_size} of the target's {config.vocab_size} tokens. It borrows the target's embedding and LM "
        "head. Load it with `specops.models.eagle_checkpoint.load_head`.",
        "",
        *_card_lines(card, level=2),
    ]
    _write_text(directory / "README.md", "\n".join(lines))


def shipped_head(name: str) -> Path:
    """Folder of a head that comes with the package, such as ``"smollm2-135m"``.

    Raises:
        FileNotFoundError: there is none of that name; lists those there are.
    """
    heads = Path(__file__).resolve().parent.parent / "heads"
    if not name or Path(name).name != name or not (heads / name / "config.json").is_file():
        there = sorted(path.parent.name for path in heads.glob("*/config.json"))
        raise FileNotFoundError(f"no head called {name!r} comes with specops; there are: {', '.join(there) or 'none'}")
    return heads / name


def head_pieces(config: EagleConfig) -> dict[str, Piece]:
    """Where each weight of a head's file goes."""
    pieces = {"fc.weight": Piece("fc.weight")}
    if config.fc_bias:
        pieces["fc.bias"] = Piece("fc.bias")
    layer = config.layer_config()
    if config.format == "eagle3":
        pieces.update(layer_pieces(layer, "midlayer.", "layers.0.", input_norm=False))
        pieces["midlayer.input_layernorm.weight"] = Piece("layers.0.embed_norm.weight")
        pieces["midlayer.hidden_norm.weight"] = Piece("layers.0.hidden_norm.weight")
        if config.norm_inputs:
            pieces["hidden_norm.weight"] = Piece("hidden_norm.weight")
    else:
        for index in range(config.num_layers):
            norm = index > 0 or config.input_norm
            pieces.update(layer_pieces(layer, f"layers.{index}.", f"layers.{index}.", input_norm=norm))
        if config.norm_inputs:
            pieces["embed_norm.weight"] = Piece("embed_norm.weight")
            pieces["hidden_norm.weight"] = Piece("hidden_norm.weight")
    if config.final_norm:
        pieces["norm.weight"] = Piece("norm.weight")
    if config.own_lm_head:
        pieces["lm_head.weight"] = Piece("lm_head_weight")
    if config.own_embedding:
        pieces["embed_tokens.weight"] = Piece("own_embedding.weight")
    return pieces


def _config_of(
    fields: Mapping[str, Any], tensors: Mapping[str, Tensor], target: CausalLM, aux_convention: AuxConvention
) -> EagleConfig:
    if "format" in fields:
        return EagleConfig.from_dict({name: value for name, value in fields.items() if name != "architectures"})
    needed = ("hidden_size", "intermediate_size", "num_attention_heads")
    missing = [name for name in needed if name not in fields]
    if missing:
        raise ValueError(f"config.json is no draft head's: it lacks format, or {', '.join(missing)}")
    heads, size = fields["num_attention_heads"], fields["hidden_size"]
    eagle3 = _looks_like_eagle3(tensors)
    aux = _aux_layers(fields, target.config.num_layers, aux_convention) if eagle3 else ()
    vocab_size = fields.get("vocab_size", target.config.vocab_size)
    draft_size = fields.get("draft_vocab_size")
    if draft_size is None:
        draft_size = tensors["d2t"].shape[0] if "d2t" in tensors else vocab_size
    config = EagleConfig(
        format="eagle3" if eagle3 else "eagle",
        hidden_size=size,
        intermediate_size=fields["intermediate_size"],
        num_heads=heads,
        num_kv_heads=fields.get("num_key_value_heads") or heads,
        head_dim=fields.get("head_dim") or size // heads,
        num_layers=fields.get("num_hidden_layers", 1),
        vocab_size=vocab_size,
        draft_vocab_size=draft_size,
        target_hidden_size=fields.get("target_hidden_size") or target.config.hidden_size,
        rms_norm_eps=fields.get("rms_norm_eps", 1e-6),
        rope=rope_from_hf({"max_position_embeddings": 2048, **fields}),
        max_position_embeddings=fields.get("max_position_embeddings", 2048),
        aux_layers=aux,
        hidden_act=fields.get("hidden_act", "silu"),
        attention_bias=any(name.endswith("q_proj.bias") for name in tensors),
    )
    return replace(
        config,
        norm_inputs="hidden_norm.weight" in tensors,
        input_norm="layers.0.input_layernorm.weight" in tensors,
        final_norm=eagle3 or "norm.weight" in tensors,
        fc_bias="fc.bias" in tensors,
        own_lm_head="lm_head.weight" in tensors,
        own_embedding="embed_tokens.weight" in tensors,
    )


def _looks_like_eagle3(tensors: Mapping[str, Tensor]) -> bool:
    return any(name.startswith("midlayer.") for name in tensors)


def _aux_layers(fields: Mapping[str, Any], num_layers: int, convention: AuxConvention) -> tuple[int, ...]:
    """Ids of a published config, nested under ``eagle_config`` or flat, as how many layers have run."""
    nested = fields.get("eagle_config") or {}
    names = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")
    found = [place[name] for place in (nested, fields) for name in names if place.get(name)]
    if not found:
        return (2, num_layers // 2, num_layers - 3)
    ids = tuple(int(index) + (convention == "layer_index") for index in found[0])
    if min(ids) < 0 or max(ids) > num_layers:
        raise ValueError(f"aux layer ids {list(found[0])} do not fit a target of {num_layers} layers ({convention})")
    return ids


def _refuse_target(where: str, tensors: Mapping[str, Tensor]) -> None:
    layers = {name.split(".")[2] for name in tensors if name.startswith("model.layers.")}
    if layers:
        raise ValueError(f"{where} is a target model of {len(layers)} layers, not a draft head; load it with load_target")
    if "fc.weight" not in tensors:
        raise ValueError(f"{where} is no draft head: it lacks fc.weight, which every EAGLE head has")


def _check_format(where: str, config: EagleConfig, tensors: Mapping[str, Tensor], expected: str | None) -> None:
    holds = "eagle3" if _looks_like_eagle3(tensors) else "eagle"
    if config.format != holds:
        raise ValueError(f"{where} holds the weights of an {holds} head, while its config says {config.format}")
    if expected is not None and expected != holds:
        raise ValueError(f"{where} is an {holds} head, not an {expected} one; load it as {holds}")


def _check_fit(where: str, config: EagleConfig, target: CausalLM) -> None:
    other = target.config
    sizes = [("vocabulary", config.vocab_size, other.vocab_size)]
    sizes.append(("target hidden size", config.target_hidden_size, other.hidden_size))
    if not (config.own_embedding and config.own_lm_head):
        sizes.append(("hidden size (it shares the target's embedding or LM head)", config.hidden_size, other.hidden_size))
    wrong = [f"{what} {ours}, the target has {theirs}" for what, ours, theirs in sizes if ours != theirs]
    if config.aux_layers and max(config.aux_layers) > other.num_layers:
        wrong.append(f"aux layers {list(config.aux_layers)}, the target has {other.num_layers} layers")
    if wrong:
        name = f" (made for {config.target})" if config.target else ""
        raise ValueError(f"{where}{name} does not fit this target: {'; '.join(wrong)}")


def _check_t2d(where: str, maps: Mapping[str, Tensor], config: EagleConfig) -> None:
    """A ``t2d`` mask says the same as ``d2t``; one that does not is a sign of mixed-up files."""
    if "t2d" not in maps or "d2t" not in maps:
        return
    ids = maps["d2t"].long() + torch.arange(config.draft_vocab_size)
    mask = torch.zeros(config.vocab_size, dtype=torch.bool)
    mask[ids] = True
    if maps["t2d"].shape != mask.shape or not torch.equal(maps["t2d"].bool(), mask):
        raise ValueError(f"{where}: t2d does not name the tokens that d2t maps to; the two maps are of different heads")


def _card_lines(card: Mapping[str, Any], level: int) -> list[str]:
    lines = []
    for name, value in card.items():
        label = name.replace("_", " ")
        if isinstance(value, Mapping):
            lines += ["", f"{'#' * level} {label[:1].upper()}{label[1:]}", "", *_card_lines(value, level + 1)]
        else:
            shown = " / ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
            lines.append(f"- {label}: {shown}")
    return lines


def _write_text(path: Path, text: str) -> None:
    path.write_text(text.rstrip() + "\n", encoding="utf-8")
