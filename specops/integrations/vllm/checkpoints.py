"""SmolLM2 and specops' draft heads as folders that vLLM loads: ``config.json``, ``model.safetensors``, a tokenizer.

    python -m specops.integrations.vllm.checkpoints OUT     # writes OUT/smollm2-135m and OUT/smollm2-135m-eagle3

A folder is written under another name and then renamed, so one that exists is whole.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specops.models.checkpoint import Checkpoint
from specops.models.eagle import EagleHead
from specops.models.eagle_checkpoint import load_head, shipped_head
from specops.models.eagle_formats import head_pieces
from specops.models.loading import load_target, load_tokenizer, open_checkpoint

TARGET, HEAD = "smollm2-135m", "smollm2-135m-eagle3"


def write_target(source: Any, folder: str | Path, *, dtype: torch.dtype = torch.float32) -> Path:
    """A target model's folder; one that is there already is left as it is.

    Args:
        source: as :func:`specops.models.load_target` takes it; GGUF weights are dequantised. The tokenizer comes along, but
            for a transformers model object, which has none.
        folder: where to.
        dtype: of the weights.

    Raises:
        FileNotFoundError, ValueError, ImportError: as :func:`specops.models.load_target`.
    """
    path = Path(folder)
    if path.is_dir():
        return path
    checkpoint = open_checkpoint(source)
    if checkpoint.freq_factors is not None:
        raise ValueError(f"{checkpoint.where} scales its rotary frequencies, which this folder's config cannot say")
    weights = {name: tensor.to(dtype).contiguous() for name, tensor in checkpoint.tensors}
    # A model object has no tokenizer with it.
    tokenizer = None if hasattr(source, "state_dict") else load_tokenizer(source)
    return _write(path, _target_config(checkpoint, dtype), weights, tokenizer)


def write_head(head: EagleHead, folder: str | Path) -> Path:
    """An EAGLE-3 head's folder, in the form of published heads; one that is there already is left as it is.

    The embedding stays the target's. Rows of the target's LM head, where the head borrows them, are written out.

    Raises:
        ValueError: a head of another format, or with parts that vLLM's EAGLE-3 head for Llama layers lacks.
    """
    path = Path(folder)
    if path.is_dir():
        return path
    config, parameters = head.config, dict(head.named_parameters())
    strange = ("fc_bias", "attention_bias", "output_bias", "mlp_bias", "qk_norm", "layer_windows", "own_embedding")
    wrong = [name for name in strange if getattr(config, name)]
    if config.format != "eagle3" or config.rope.rope_type != "default":
        wrong.append(f"format {config.format} with {config.rope.rope_type} rope")
    if wrong:
        raise ValueError(f"vLLM's EAGLE-3 head for Llama layers cannot be this one: {', '.join(wrong)}")
    weights: dict[str, Tensor] = {}
    for name, piece in head_pieces(config, "published").items():
        parameter = parameters[piece.parameter].detach()
        end = None if piece.rows is None else piece.start + piece.rows
        part = parameter[piece.start] if piece.repeat else parameter[piece.start : end]
        weights[name] = part.contiguous()
    weights["lm_head.weight"] = head.lm_head_weight.detach().contiguous()
    if head.d2t is not None:
        weights["d2t"] = head.d2t
    fields = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope.theta},
        "hidden_act": config.hidden_act,
        "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids": list(config.aux_layers),
        "fc_norm": config.norm_inputs,
        "norm_before_fc": config.norm_joined,
        "norm_before_residual": config.normed_residual,
        "norm_output": config.carry_normed,
        "dtype": str(head.lm_head_weight.dtype).removeprefix("torch."),
    }
    return _write(path, fields, weights, None)


def write_smollm2(folder: str | Path, *, dtype: torch.dtype = torch.float32) -> tuple[Path, Path]:
    """Folders of SmolLM2-135M-Instruct and of the draft head that comes with specops, both inside ``folder``."""
    target = write_target("smollm2", Path(folder) / TARGET, dtype=dtype)
    path = Path(folder) / HEAD
    if not path.is_dir():
        write_head(load_head(shipped_head(TARGET), load_target("smollm2", dtype=dtype)), path)
    return target, path


def _target_config(checkpoint: Checkpoint, dtype: torch.dtype) -> dict[str, Any]:
    """The config as transformers writes it; a GGUF file names no architecture."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    given = {
        name: value
        for name, value in checkpoint.config.items()
        # No end token is a choice; any other None is a field that was not there.
        if name != "architectures" and (value is not None or name.endswith("_token_id"))
    }
    fields: dict[str, Any] = AutoConfig.for_model(**given).to_dict()
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[fields["model_type"]]
    return {**fields, "architectures": [architecture], "dtype": str(dtype).removeprefix("torch.")}


def _write(path: Path, config: dict[str, Any], weights: dict[str, Tensor], tokenizer: Any) -> Path:
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    draft.chmod(0o755)
    try:
        save_file(weights, draft / "model.safetensors", metadata={"format": "pt"})
        (draft / "model.safetensors").chmod(0o644)
        (draft / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        if tokenizer is not None:
            tokenizer.save_pretrained(draft)
        draft.rename(path)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return path


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python -m specops.integrations.vllm.checkpoints OUT")
    for written in write_smollm2(sys.argv[1]):
        print(written)
