"""ModelConfig from what a config.json leaves out or spells the old way, against transformers' own defaults.

Run alone: pytest tests/models/test_config.py
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from specops.models import ModelConfig
from specops.models.config import ACTIVATIONS, ROPE_TYPES, RopeConfig
from specops.models.rotary import Rotary, inverse_frequencies

SIZES = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
}
DENSE_DEEPSEEK = {"first_k_dense_replace": 40}
MINIMAL = {
    "Llama": {},
    "Mistral": {},
    "Qwen2": {},
    "Qwen3": {},
    "Gemma2": {},
    "DeepseekV2": DENSE_DEEPSEEK,
    "DeepseekV3": DENSE_DEEPSEEK,
}


@pytest.mark.parametrize("name", MINIMAL)
def test_left_out_fields_get_the_defaults_of_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    fields = {**SIZES, **MINIMAL[name]}
    hf = getattr(transformers, f"{name}Config")(**fields)
    ours = ModelConfig.from_hf({"model_type": hf.model_type, **fields})
    full = ModelConfig.from_hf(hf)
    token_ids = {"eos_token_ids": (), "bos_token_id": None, "pad_token_id": None}
    assert ours == dataclasses.replace(full, **token_ids)


@pytest.mark.parametrize("name", ["Qwen2", "Qwen3", "Gemma2", "Mistral"])
def test_windows_without_layer_types_are_those_of_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    fields = {**SIZES, "sliding_window": 9, "use_sliding_window": True, "max_window_layers": 7}
    if name in ("Gemma2", "Mistral"):
        fields = {**SIZES, "sliding_window": 9}
    hf = getattr(transformers, f"{name}Config")(**fields)
    ours = ModelConfig.from_hf({"model_type": hf.model_type, **fields})
    kinds = getattr(hf, "layer_types", None) or ["sliding_attention"] * 40
    assert ours.layer_windows == tuple(9 if kind == "sliding_attention" else None for kind in kinds)
    assert 9 in ours.layer_windows


def test_null_window_and_caps_mean_none() -> None:
    fields = {**SIZES, "model_type": "gemma2", "attn_logit_softcapping": None, "final_logit_softcapping": None}
    config = ModelConfig.from_hf({**fields, "sliding_window": None})
    assert (config.attention_softcap, config.logit_softcap, set(config.layer_windows)) == (None, None, {None})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
        ({"hidden_act": "tanh"}, f"hidden_act 'tanh' is not supported; it can be {', '.join(ACTIVATIONS)}"),
        ({"head_dim": 9}, "head_dim 9 is odd"),
        ({"layer_windows": (4,)}, "layer_windows has 1 entries for 2 layers"),
    ],
)
def test_impossible_shapes_are_refused(changes: dict[str, Any], message: str) -> None:
    good = {
        "vocab_size": 10,
        "hidden_size": 32,
        "intermediate_size": 8,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 16,
    }
    ModelConfig(**good)
    with pytest.raises(ValueError, match=message):
        ModelConfig(**{**good, **changes})


@pytest.mark.parametrize("rope_type", ROPE_TYPES)
def test_rotary_tables_equal_those_of_transformers(rope_type: str) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = {"rope_type": rope_type, "rope_theta": 7000.0}
    if rope_type != "default":
        parameters["factor"] = 4.0
    if rope_type in ("llama3", "yarn"):
        parameters["original_max_position_embeddings"] = 32
    if rope_type == "llama3":
        parameters |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "head_dim": 32, "max_position_embeddings": 128}
    hf = transformers.LlamaConfig(rope_parameters=parameters, num_key_value_heads=2, **sizes)
    config = ModelConfig.from_hf(hf)
    rotary = Rotary(config.rope, config.rotary_dim, config.max_position_embeddings)
    positions = torch.tensor([0, 1, 17, 31, 32, 90, 127])
    cos, sin = rotary(positions, torch.float32)
    expected_cos, expected_sin = LlamaRotaryEmbedding(hf)(torch.zeros(1), positions[None])
    torch.testing.assert_close(cos[:, 0], expected_cos[0, :, :16], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sin[:, 0], expected_sin[0, :, :16], rtol=1e-5, atol=1e-5)


def test_frequency_factors_divide() -> None:
    plain = inverse_frequencies(RopeConfig(theta=100.0), 4)
    torch.testing.assert_close(plain, torch.tensor([1.0, 0.1]))
    divided = inverse_frequencies(RopeConfig(theta=100.0, freq_factors=(1.0, 8.0)), 4)
    torch.testing.assert_close(divided, torch.tensor([1.0, 0.0125]))
