"""Filling a module's parameters from a checkpoint's tensors, name by name, with nothing left over on either side.

A :class:`Piece` says where a checkpoint tensor goes: a parameter, and the rows of it for tensors that share one matrix
(q, k and v; gate and up). A table of pieces covers every row of every parameter, which :func:`fill` checks, so that a
model either has all its weights from the checkpoint or does not load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specops.models.config import ModelConfig

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Piece:
    """Where one checkpoint tensor goes.

    Attributes:
        parameter: name of the module's parameter.
        start, rows: the rows it fills; None for all of them.
        repeat: whether a tensor without the row dimension fills every row alike.
        reorder: applied to the tensor before it is placed; keeps its shape.
    """

    parameter: str
    start: int = 0
    rows: int | None = None
    repeat: bool = False
    reorder: Callable[[Tensor], Tensor] | None = None


def layer_pieces(config: ModelConfig, source: str, target: str, *, input_norm: bool = True) -> dict[str, Piece]:
    """Pieces of one decoder layer.

    Args:
        config: the layer's config.
        source: prefix of the layer in the checkpoint, such as ``"model.layers.3."``.
        target: prefix of the :class:`~specops.models.llama.DecoderLayer` in the module, such as ``"layers.3."``.
        input_norm: False for a layer without a norm before attention, as the first layer of an EAGLE head.
    """
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attn = "self_attn."
    pieces: dict[str, Piece] = {}
    for kind, present in (("weight", True), ("bias", config.attention_bias)):
        if present:
            qkv = f"{target}attn.qkv.{kind}"
            pieces[f"{source}{attn}q_proj.{kind}"] = Piece(qkv, 0, q_rows)
            pieces[f"{source}{attn}k_proj.{kind}"] = Piece(qkv, q_rows, kv_rows)
            pieces[f"{source}{attn}v_proj.{kind}"] = Piece(qkv, q_rows + kv_rows, kv_rows)
    for kind, present in (("weight", True), ("bias", config.output_bias)):
        if present:
            pieces[f"{source}{attn}o_proj.{kind}"] = Piece(f"{target}attn.o.{kind}")
    if config.qk_norm:
        norm = f"{target}attn.qk_norm.weight"
        pieces[f"{source}{attn}q_norm.weight"] = Piece(norm, 0, config.num_heads, repeat=True)
        pieces[f"{source}{attn}k_norm.weight"] = Piece(norm, config.num_heads, config.num_kv_heads, repeat=True)
    if config.attention_sinks:
        pieces[f"{source}{attn}sinks"] = Piece(f"{target}attn.sinks")
    return {**pieces, **mlp_pieces(config, source, target), **norm_pieces(config, source, target, input_norm=input_norm)}


def mlp_pieces(config: ModelConfig, source: str, target: str) -> dict[str, Piece]:
    """Pieces of one layer's gated MLP; arguments as for :func:`layer_pieces`."""
    pieces, inner = {}, config.intermediate_size
    for kind in ("weight", "bias") if config.mlp_bias else ("weight",):
        pieces[f"{source}mlp.gate_proj.{kind}"] = Piece(f"{target}mlp.gate_up.{kind}", 0, inner)
        pieces[f"{source}mlp.up_proj.{kind}"] = Piece(f"{target}mlp.gate_up.{kind}", inner, inner)
        pieces[f"{source}mlp.down_proj.{kind}"] = Piece(f"{target}mlp.down.{kind}")
    return pieces


def norm_pieces(config: ModelConfig, source: str, target: str, *, input_norm: bool = True) -> dict[str, Piece]:
    """Pieces of one layer's norms; arguments as for :func:`layer_pieces`."""
    pieces = {}
    if input_norm:
        pieces[f"{source}input_layernorm.weight"] = Piece(f"{target}input_norm.weight")
    if config.post_norms:
        pieces[f"{source}post_attention_layernorm.weight"] = Piece(f"{target}post_attn_norm.weight")
        pieces[f"{source}pre_feedforward_layernorm.weight"] = Piece(f"{target}mlp_norm.weight")
        pieces[f"{source}post_feedforward_layernorm.weight"] = Piece(f"{target}post_mlp_norm.weight")
    else:
        pieces[f"{source}post_attention_layernorm.weight"] = Piece(f"{target}mlp_norm.weight")
    return pieces


def whole_pieces(config: ModelConfig) -> dict[str, Piece]:
    """Pieces of a model outside its layers."""
    pieces = {
        "model.embed_tokens.weight": Piece("embed_tokens.weight"),
        "model.norm.weight": Piece("norm.weight"),
    }
    if not config.tie_word_embeddings:
        pieces["lm_head.weight"] = Piece("lm_head.weight")
    return pieces


def model_pieces(config: ModelConfig) -> dict[str, Piece]:
    """Pieces of a whole :class:`~specops.models.llama.CausalLM`."""
    pieces = whole_pieces(config)
    for index in range(config.num_layers):
        pieces.update(layer_pieces(config, f"model.layers.{index}.", f"layers.{index}."))
    return pieces


@torch.no_grad()
def fill(
    module: nn.Module,
    pieces: Mapping[str, Piece],
    tensors: Iterable[tuple[str, Tensor]],
    *,
    where: str,
    tied: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> None:
    """Copy every tensor to its place in ``module``, in the parameter's dtype and on its device.

    Args:
        module: what to fill.
        pieces: where each checkpoint tensor goes; together they must cover all parameters.
        tensors: name and tensor, in any order.
        where: what the tensors come from, for messages.
        tied: checkpoint tensors that may be there as copies, and the parameter they must equal.
        progress: called with the number of tensors done and to do.

    Raises:
        ValueError: a tensor is missing, unexpected, given twice, or has the wrong shape; names it. The module is then
            not usable.
    """
    parameters = dict(module.named_parameters())
    _check_cover(parameters, pieces)
    missing, copies, unexpected = set(pieces), dict(tied or {}), []
    waiting: list[tuple[str, Tensor]] = []
    for name, tensor in tensors:
        if name in copies:
            waiting.append((name, tensor))
        elif name in missing:
            _place(name, tensor, parameters[pieces[name].parameter], pieces[name], where)
            missing.remove(name)
            if progress is not None:
                progress(len(pieces) - len(missing), len(pieces))
        elif not name.endswith("rotary_emb.inv_freq"):
            unexpected.append(name)
    if missing or unexpected:
        found = [f"lacks {_names(missing)}"] if missing else []
        found += [f"has unexpected {_names(unexpected)}"] if unexpected else []
        raise ValueError(
            f"{where} {' and '.join(found)}; its weights do not belong to this config, so give the files that do"
        )
    for name, tensor in waiting:
        parameter = parameters[copies[name]]
        if tensor.shape != parameter.shape or not torch.equal(tensor.to(parameter), parameter):
            raise ValueError(
                f"{where} holds a {name} of its own, while its config ties it to the embedding; "
                "set tie_word_embeddings to false in the config"
            )


def _place(name: str, tensor: Tensor, parameter: Tensor, piece: Piece, where: str) -> None:
    rows = parameter.shape[0] if piece.rows is None else piece.rows
    target = parameter[piece.start : piece.start + rows]
    wanted = target.shape[1:] if piece.repeat else target.shape
    if tensor.shape != wanted:
        raise ValueError(
            f"{where}: {name} has shape {list(tensor.shape)}, its config needs {list(wanted)}; give weights and config "
            "of one model"
        )
    target.copy_(tensor if piece.reorder is None else piece.reorder(tensor))


def _check_cover(parameters: Mapping[str, Tensor], pieces: Mapping[str, Piece]) -> None:
    rows = dict.fromkeys(parameters, 0)
    for piece in pieces.values():
        rows[piece.parameter] += parameters[piece.parameter].shape[0] if piece.rows is None else piece.rows
    uncovered = [name for name, count in rows.items() if count != parameters[name].shape[0]]
    if uncovered:
        raise ValueError(f"no checkpoint tensor is named for {_names(uncovered)}; the table of pieces is incomplete")


def _names(names: Iterable[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")
