"""Draft heads on disk: ``load_head``, ``save_head``, and the heads that come with the package.

A head is a folder with ``config.json`` and weights: ``*.safetensors``, or the ``.bin`` files of older heads. Which kinds of
config are read is :mod:`specops.models.eagle_formats`; saved is this package's own.

Whatever does not fit raises one sentence that names it: a missing or unexpected weight, a wrong shape, a head made for
another target, a draft vocabulary without its map, a target model given as a head. Nothing stays at its initial value.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from specops.models.eagle import EagleConfig, EagleHead
from specops.models.eagle_files import MAPS, read_head_files
from specops.models.eagle_formats import (
    AuxConvention,
    canonical_weights,
    head_pieces,
    kind_of,
    looks_like_eagle3,
    read_config,
)
from specops.models.llama import CausalLM
from specops.models.weights import fill

WEIGHTS = "model.safetensors"


def load_head(
    directory: str | os.PathLike[str],
    target: CausalLM,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    format: Literal["eagle", "eagle3"] | None = None,
    aux_convention: AuxConvention | None = None,
) -> EagleHead:
    """A draft head with a checkpoint's weights, in eval mode and without gradients.

    Args:
        directory: with ``config.json`` and the weights; a published EAGLE 1, 2 or 3 head, a speculators EAGLE-3 head, or
            what :func:`save_head` wrote.
        target: the target it drafts for; its embedding and LM head are shared where the head has none of its own.
        dtype, device: of the head; the target's when not given.
        format: what the head is expected to be; None takes what is there.
        aux_convention: what the aux layer ids of an EAGLE-3 config count: ``"layers_run"``, how many layers have run (id 2
            is the input of layer 2), or ``"layer_index"``, the layer whose output it is. None goes by where the ids stand,
            see :func:`specops.models.eagle_formats.aux_ids`. This package's own configs say it without doubt.

    Raises:
        FileNotFoundError: there is no such folder or file.
        ValueError: the checkpoint is broken, incomplete, or not for this target; says what was found and what is needed.
    """
    path = Path(directory).expanduser()
    fields, tensors = read_head_files(path)
    return build_head(
        str(path), fields, tensors, target, dtype=dtype, device=device, format=format, aux_convention=aux_convention
    )


def build_head(
    where: str,
    fields: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    target: CausalLM,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    format: Literal["eagle", "eagle3"] | None = None,
    aux_convention: AuxConvention | None = None,
) -> EagleHead:
    """:func:`load_head` behind the files. With a target and weights on the meta device it only checks that all fits.

    Args:
        where: what the weights come from, for messages.
        fields: of ``config.json``.
        tensors: weights by name; the maps ``d2t`` and ``t2d`` with their values.
    """
    tensors = canonical_weights(tensors)
    _refuse_target(where, tensors)
    try:
        config = read_config(fields, tensors, target.config, aux_convention)
        _check_format(fields, config, tensors, format)
        _check_fit(config, target)
        _check_lm_head(fields, config)
        maps = {name: tensors.pop(name) for name in MAPS if name in tensors}
        _check_maps(maps, config)
        weight = target.embed_tokens.weight
        device = weight.device if device is None else torch.device(device)
        own = torch.zeros(config.draft_vocab_size, config.hidden_size, device=device) if config.own_lm_head else None
        with torch.device(device):
            head = EagleHead(
                config,
                target.embed_tokens,
                target.lm_head.weight.detach() if own is None else own,
                d2t=maps.get("d2t"),
            )
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    head = head.to(device=device, dtype=dtype or weight.dtype)
    fill(head, head_pieces(config, kind_of(fields), tensors), tensors.items(), where=where)
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
        part = parameter[piece.start] if piece.repeat else parameter[piece.start : piece.start + rows]
        tensors[name] = part.cpu().clone()
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


def _refuse_target(where: str, tensors: Mapping[str, Tensor]) -> None:
    layers = {name.split(".")[2] for name in tensors if name.startswith("model.layers.")}
    if layers:
        raise ValueError(f"{where} is a target model of {len(layers)} layers, not a draft head; load it with load_target")
    if "fc.weight" not in tensors:
        raise ValueError(f"{where} is no draft head: it lacks fc.weight, which every EAGLE head has")


def _check_format(
    fields: Mapping[str, Any], config: EagleConfig, tensors: Mapping[str, Tensor], expected: str | None
) -> None:
    holds = "eagle3" if looks_like_eagle3(tensors) else "eagle"
    named = " ".join(map(str, fields.get("architectures") or ())).lower()
    says = "eagle3" if "eagle3" in named or fields.get("speculators_model_type") == "eagle3" else config.format
    if says != holds:
        raise ValueError(f"it holds the weights of an {holds} head, while its config says {says}")
    if expected is not None and expected != holds:
        raise ValueError(f"it is an {holds} head, not an {expected} one; load it as {holds}")


def _check_fit(config: EagleConfig, target: CausalLM) -> None:
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
        raise ValueError(f"the head{name} does not fit this target: {'; '.join(wrong)}")


def _check_lm_head(fields: Mapping[str, Any], config: EagleConfig) -> None:
    """Other programs' EAGLE-3 heads with a draft vocabulary are trained with an LM head for it."""
    if kind_of(fields) != "specops" and config.format == "eagle3" and config.reduced_vocab and not config.own_lm_head:
        raise ValueError(
            f"it lacks lm_head.weight, which a head with a draft vocabulary of {config.draft_vocab_size} tokens has; "
            "give the file that holds it"
        )


def _check_maps(maps: Mapping[str, Tensor], config: EagleConfig) -> None:
    """A reduced vocabulary has its ``d2t``; a ``t2d`` mask says the same, or the files are mixed up."""
    if config.reduced_vocab and "d2t" not in maps:
        raise ValueError(
            f"it lacks d2t: its draft vocabulary of {config.draft_vocab_size} tokens is smaller than the target's "
            f"{config.vocab_size}, and without the map draft ids mean nothing; give the file that holds it"
        )
    if "t2d" not in maps or "d2t" not in maps or maps["d2t"].shape != (config.draft_vocab_size,):
        return
    ids = maps["d2t"].long() + torch.arange(config.draft_vocab_size)
    inside = ids[(ids >= 0) & (ids < config.vocab_size)]
    mask = torch.zeros(config.vocab_size, dtype=torch.bool)
    mask[inside] = True
    if inside.numel() == ids.numel() and (maps["t2d"].shape != mask.shape or not torch.equal(maps["t2d"].bool(), mask)):
        raise ValueError("t2d does not name the tokens that d2t maps to; the two maps are of different heads")


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
