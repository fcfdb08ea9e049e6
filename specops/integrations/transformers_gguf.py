"""A transformers model out of a GGUF file, without the package accelerate that transformers' own reader needs."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from specops.models.loading import open_checkpoint


def model_from_gguf(source: Any, *, dtype: torch.dtype = torch.float32, attn_implementation: str) -> Any:
    """A transformers model with the weights of a GGUF file, dequantised; transformers' own reader needs accelerate for it.

    Args:
        source: a ``.gguf`` file, or ``"smollm2"``.
        dtype: of the weights.
        attn_implementation: of the model.

    Returns:
        An ``AutoModelForCausalLM`` in eval mode.

    Raises:
        FileNotFoundError, ValueError, ImportError: as :func:`specops.models.load_target`.
    """
    checkpoint = open_checkpoint(source)
    if checkpoint.freq_factors is not None:
        raise ValueError(f"{checkpoint.where} scales its rotary frequencies, which a transformers config cannot say")
    fields = {name: value for name, value in checkpoint.config.items() if name != "architectures" and value is not None}
    config = AutoConfig.for_model(**fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, attn_implementation=attn_implementation
        )
    weights = {name: tensor.to(dtype) for name, tensor in checkpoint.tensors}
    result = model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    left = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if left or result.unexpected_keys:
        raise ValueError(f"{checkpoint.where}: missing {left}, unexpected {result.unexpected_keys}")
    # Tables of the rotary embedding are no weights; they come from the config.
    for name, module in list(model.named_modules()):
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            model.set_submodule(name, type(module)(config))
    model.generation_config = GenerationConfig.from_model_config(config)
    return model.eval().requires_grad_(False)
