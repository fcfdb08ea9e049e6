"""GGUF files: block formats and names against the gguf package, and broken files.

Run alone: pytest tests/models/test_gguf.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from paged_session import check_against_peer
from test_llama import LLAMA3_ROPE, SHAPE, make_peer

from specops.models import load_target
from specops.models.gguf import GGUFFile

gguf = pytest.importorskip("gguf")
KINDS = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "Q5_1", "Q4_K", "Q6_K")


def permuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp's row order of q and k: the two elements of a rotated pair side by side."""
    half = weight.shape[0] // heads // 2
    return weight.view(heads, 2, half, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def write_model(path: Path, peer: Any, architecture: str) -> None:
    """The peer's weights as an unquantised GGUF file, in llama.cpp's conventions."""
    config = peer.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_eos_token_id(7)
    writer.add_array("tokenizer.ggml.tokens", [f"token{i}" for i in range(2000)])
    writer.add_array("tokenizer.ggml.scores", [0.5] * 2000)
    if architecture == "gemma2":
        writer.add_sliding_window(config.sliding_window)
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, architecture.upper()), config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in peer.state_dict().items():
        stem, _, kind = name.rpartition(".")
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if architecture == "llama" and stem.rpartition(".")[2] in heads:
            tensor = permuted(tensor, heads[stem.rpartition(".")[2]])
        if architecture == "gemma2" and stem.endswith("norm"):
            tensor = tensor + 1
        writer.add_tensor(f"{names.get_name(stem)}.{kind}", tensor.contiguous().numpy())
    if config.rope_parameters["rope_type"] == "llama3":
        rotary = peer.model.rotary_emb
        plain = 1.0 / (LLAMA3_ROPE["rope_theta"] ** (torch.arange(0, config.head_dim, 2) / config.head_dim))
        writer.add_tensor("rope_freqs.weight", (plain / rotary.inv_freq).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("llama", "llama"),
        ("llama_llama3_rope", "llama"),
        ("llama_wide_head", "llama"),
        ("qwen2", "qwen2"),
        ("qwen3", "qwen3"),
        ("gemma2", "gemma2"),
    ],
)
def test_gguf_models_equal_transformers(name: str, architecture: str, tmp_path: Path) -> None:
    # GGUF has no field for the activation or for Gemma's score scale, so the peer takes what the format implies.
    options = {"query_pre_attn_scalar": 256} if architecture == "gemma2" else {"hidden_act": "silu"}
    peer = make_peer(name, **options)
    write_model(tmp_path / "model.gguf", peer, architecture)
    model = load_target(tmp_path / "model.gguf", backend="reference")
    assert model.config.eos_token_ids == (7,)
    check_against_peer(model, peer)


def test_block_formats_equal_the_gguf_package(tmp_path: Path) -> None:
    path = tmp_path / "tensors.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    draw = np.random.default_rng(0)
    expected = {}
    for kind in KINDS:
        ggml = gguf.GGMLQuantizationType[kind]
        if kind.endswith("_K"):
            # The package can't quantise to these; any bytes are a valid block if its scales are finite.
            values, size = gguf.GGML_QUANT_SIZES[ggml]
            raw = draw.integers(0, 64, (3, 512 // values * size), dtype=np.uint8)
        else:
            raw = gguf.quantize(draw.standard_normal((3, 512)).astype(np.float32), ggml)
        expected[kind] = torch.from_numpy(gguf.dequantize(raw, ggml).copy())
        writer.add_tensor(kind, raw, raw_dtype=ggml)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    loaded = dict(GGUFFile(path).load())
    assert set(loaded) == set(KINDS)
    for kind in KINDS:
        assert loaded[kind].dtype == torch.float32
        assert torch.equal(loaded[kind], expected[kind]), kind


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    write_model(path, make_peer("llama"), "llama")
    return path


def test_truncated_file_is_refused_at_any_length(small: Path, tmp_path: Path) -> None:
    content = small.read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in (0, 10, 24, 100, 5000, len(content) // 2, len(content) - 64):
        cut.write_bytes(content[:length])
        with pytest.raises(ValueError, match=rf"cut\.gguf is cut off: its {length} bytes end before .*; copy or download"):
            load_target(cut)


def test_what_is_no_gguf_is_refused(small: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(b"PK\x03\x04" + bytes(60))
    with pytest.raises(ValueError, match="is not a GGUF file: it starts with"):
        load_target(other)
    content = bytearray(small.read_bytes())
    content[4] = 1
    other.write_bytes(content)
    with pytest.raises(ValueError, match="is GGUF version 1; versions 2 and 3 can be read"):
        load_target(other)


def test_wrong_architecture_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "mamba")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match=r"holds a 'mamba' model; GGUF models can be llama, qwen2, qwen3, gemma2\. Give"):
        load_target(path)


def test_missing_and_unknown_tensors_are_named(small: Path) -> None:
    content = small.read_bytes()
    # Renaming in place keeps every length: a tensor nobody knows appears, and one that is needed is gone.
    small.write_bytes(content.replace(b"blk.1.ffn_gate.weight", b"blk.1.ffn_rate.weight"))
    with pytest.raises(
        ValueError, match=r"lacks model\.layers\.1\.mlp\.gate_proj\.weight and has unexpected blk\.1\.ffn_rate\.weight"
    ):
        load_target(small)


def test_common_formats_need_no_gguf_package(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    load_target(small)
    path = small.with_name("k_quant.gguf")
    monkeypatch.undo()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("token_embd.weight", np.zeros((4, 210), dtype=np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q6_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r"token_embd\.weight has ggml type 14, which needs the gguf package"):
        load_target(path)


def test_metadata_that_a_model_needs_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), dtype=np.float32))
    writer.add_block_count(2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match=r"lacks the metadata llama\.context_length, llama\.embedding_length"):
        load_target(path)


def test_vocabulary_is_not_read_with_the_weights(small: Path) -> None:
    metadata = GGUFFile(small).metadata
    assert "tokenizer.ggml.tokens" not in metadata
    assert metadata["llama.embedding_length"] == SHAPE["hidden_size"]
