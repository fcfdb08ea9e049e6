"""Where weights come from: one :class:`Checkpoint` out of a transformers model, a Hugging Face directory, or a GGUF file.

All three speak Hugging Face's config fields and tensor names, so that what follows needs one table. Tensors are read one
by one while they are consumed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from specops.models.config import as_dict
from specops.models.gguf import GGUFFile

INDEX = "model.safetensors.index.json"

# GGUF metadata under the architecture's name, as Hugging Face config fields.
_GGUF_FIELDS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.freq_base": "rope_theta",
}
_GGUF_NEEDED = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "max_position_embeddings")
_GGUF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GGUF_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma2")


@dataclass(frozen=True)
class Checkpoint:
    """A model's config and weights.

    Attributes:
        where: what it was read from, for messages.
        config: fields of a Hugging Face ``config.json``.
        tensors: name and tensor under Hugging Face's names; can be consumed once.
        generation_config: fields of ``generation_config.json``.
        freq_factors: divisors of the rotary frequencies, which GGUF files hold for Llama 3.1's scaling.
    """

    where: str
    config: dict[str, Any]
    tensors: Iterator[tuple[str, Tensor]]
    generation_config: dict[str, Any] = field(default_factory=dict)
    freq_factors: tuple[float, ...] | None = None


def open_transformers(model: Any) -> Checkpoint:
    """The config and state of a transformers model object."""
    generation = as_dict(getattr(model, "generation_config", None))
    config = {**as_dict(model.config), "architectures": [type(model).__name__]}
    return Checkpoint(f"the given {type(model).__name__}", config, iter(model.state_dict().items()), generation)


def open_directory(path: Path) -> Checkpoint:
    """A directory with ``config.json`` and one or several ``*.safetensors``.

    Raises:
        FileNotFoundError: no config, no safetensors, or a shard its index names is missing.
        ValueError: a file that is not JSON or is cut off (raised when it is read).
    """
    config = read_json(path / "config.json", "a model directory holds config.json and *.safetensors")
    generation_path = path / "generation_config.json"
    generation = read_json(generation_path) if generation_path.is_file() else {}
    return Checkpoint(str(path), config, _safetensors(weight_files(path)), generation)


def open_gguf(path: Path) -> Checkpoint:
    """A GGUF file of one of the architectures llama, qwen2, qwen3, gemma2.

    Raises:
        FileNotFoundError, ValueError: see :class:`~specops.models.gguf.GGUFFile`; an unsupported architecture.
    """
    file = GGUFFile(path)
    architecture = file.metadata.get("general.architecture")
    if architecture not in _GGUF_ARCHITECTURES:
        raise ValueError(
            f"{path} holds a {architecture!r} model; GGUF models can be {', '.join(_GGUF_ARCHITECTURES)}. "
            "Give the model's Hugging Face directory instead"
        )
    factors = file.tensors.pop("rope_freqs.weight", None)
    config = _gguf_config(file, architecture)
    return Checkpoint(
        str(path),
        config,
        _gguf_tensors(file, architecture, config),
        freq_factors=None if factors is None else tuple(file.tensor(factors).tolist()),
    )


def read_json(path: Path, hint: str = "") -> dict[str, Any]:
    """The object in a JSON file; ``hint`` ends the message of the FileNotFoundError. ValueError if it is none."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path}; {hint}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); copy or download it again") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a JSON {type(content).__name__}, not an object; copy or download it again")
    return content


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a folder; FileNotFoundError if there are none, or a shard of the index is missing."""
    if (path / INDEX).is_file():
        shards = read_json(path / INDEX).get("weight_map", {})
        files = [path / name for name in sorted(set(shards.values()))]
        absent = [file.name for file in files if not file.is_file()]
        if absent:
            raise FileNotFoundError(f"{path} lacks {', '.join(absent)}, which {INDEX} names; copy or download it")
        return files
    files = sorted(path.glob("*.safetensors"))
    if not files:
        other = sorted(path.glob("*.bin")) + sorted(path.glob("*.pt"))
        found = f"only {other[0].name}" if other else "no weights"
        raise FileNotFoundError(f"{path} holds {found}; *.safetensors are needed: save the model with save_pretrained()")
    return files


def _safetensors(files: list[Path]) -> Iterator[tuple[str, Tensor]]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise ImportError("reading *.safetensors needs the safetensors package: pip install 'specops[hf]'") from None
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping, keys() is its only iterator
                    yield name, file.get_tensor(name)
        except SafetensorError as error:
            size = path.stat().st_size
            raise ValueError(f"{path} ({size} bytes) is broken or cut off ({error}); copy or download it again") from None


def _gguf_config(file: GGUFFile, architecture: str) -> dict[str, Any]:
    """The file's metadata as the fields of a ``config.json``."""
    meta = file.metadata
    config: dict[str, Any] = {"model_type": architecture, "architectures": ["ForCausalLM"]}
    for key, name in _GGUF_FIELDS.items():
        if f"{architecture}.{key}" in meta:
            config[name] = meta[f"{architecture}.{key}"]
    absent = [f"{architecture}.{key}" for key, name in _GGUF_FIELDS.items() if name in _GGUF_NEEDED and name not in config]
    if absent:
        raise ValueError(f"{file.path} lacks the metadata {', '.join(absent)}; convert the model again")
    blocks = {name.split(".")[1] for name in file.tensors if name.startswith("blk.")}
    if len(blocks) != config["num_hidden_layers"]:
        raise ValueError(
            f"{file.path} holds weights of {len(blocks)} layers and says it has {config['num_hidden_layers']}; "
            "copy or download it again"
        )
    for name in ("eos", "bos", "padding"):
        config[f"{name.replace('padding', 'pad')}_token_id"] = meta.get(f"tokenizer.ggml.{name}_token_id")
    embedding = file.tensors.get("token_embd.weight")
    config["vocab_size"] = meta.get(f"{architecture}.vocab_size", 1) if embedding is None else embedding.shape[0]
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    config["head_dim"] = head_dim
    config["partial_rotary_factor"] = meta.get(f"{architecture}.rope.dimension_count", head_dim) / head_dim
    scaling = meta.get(f"{architecture}.rope.scaling.type", "none")
    if scaling != "none":
        config["rope_scaling"] = {
            "rope_type": scaling,
            "factor": meta.get(f"{architecture}.rope.scaling.factor"),
            "original_max_position_embeddings": meta.get(f"{architecture}.rope.scaling.original_context_length"),
        }
    # Gemma 2's files leave the score scale to the reader: the 27B model's is that of hidden size over heads.
    if architecture == "gemma2" and config["num_hidden_layers"] == 46:
        config["query_pre_attn_scalar"] = config["hidden_size"] // config["num_attention_heads"]
    return config


def _gguf_tensors(file: GGUFFile, architecture: str, config: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    gemma = architecture == "gemma2"
    layer_names = {**_GGUF_LAYER, **_GGUF_POST_NORMS} if gemma else _GGUF_LAYER
    heads = {"q_proj": config["num_attention_heads"]}
    heads["k_proj"] = config.get("num_key_value_heads", heads["q_proj"])
    for name, tensor in file.load():
        stem, _, kind = name.rpartition(".")
        if stem.startswith("blk."):
            _, index, part = stem.split(".", 2)
            # An unknown part keeps its own name, so that the error about it names the file's tensor.
            stem = f"model.layers.{index}.{layer_names[part]}" if part in layer_names else stem
        else:
            stem = _GGUF_WHOLE.get(stem, stem)
        projection = stem.rpartition(".")[2]
        if architecture == "llama" and projection in heads:
            tensor = _unpermuted(tensor, heads[projection])
        if gemma and kind == "weight" and tensor.dim() == 1:
            tensor = tensor - 1.0
        yield f"{stem}.{kind}", tensor


def _unpermuted(tensor: Tensor, num_heads: int) -> Tensor:
    """Rows of each head from GGUF's interleaved pairs back to rotate-half order."""
    if tensor.shape[0] % (2 * num_heads) != 0:
        return tensor  # Weights and config disagree; the shape check says so with the tensor's name.
    half = tensor.shape[0] // num_heads // 2
    return tensor.view(num_heads, half, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
