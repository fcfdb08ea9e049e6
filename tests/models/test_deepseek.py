"""DeepSeek targets against transformers on the same random weights. Run alone: pytest tests/models/test_deepseek.py"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from paged_session import check_against_peer
from torch._dynamo.testing import CompileCounter

from specops.models import load_target
from specops.models.deepseek import DeepseekLM

transformers = pytest.importorskip("transformers")

SHAPE = {
    "vocab_size": 89,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "first_k_dense_replace": 2,
    "kv_lora_rank": 16,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "v2": ("DeepseekV2", {}),
    "v2_plain_query": ("DeepseekV2", {"q_lora_rank": None, "mlp_bias": True}),
    "v2_yarn": ("DeepseekV2", {"rope_parameters": YARN}),
    "v3": ("DeepseekV3", {}),
    "v3_yarn_bias": ("DeepseekV3", {"rope_parameters": YARN, "attention_bias": True}),
    "v3_plain_rope": ("DeepseekV3", {"rope_interleave": False, "q_lora_rank": None}),
}


def make_peer(name: str, **more: Any) -> Any:
    """A dense transformers model whose every parameter is random."""
    architecture, options = FAMILIES[name]
    config = getattr(transformers, f"{architecture}Config")(**{**SHAPE, **options, **more})
    peer = getattr(transformers, f"{architecture}ForCausalLM")._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (parameter.dim() == 1))
    return peer


@pytest.mark.parametrize("name", FAMILIES)
def test_prefill_decode_blocks_and_trees_equal_transformers(name: str) -> None:
    peer = make_peer(name)
    model = load_target(peer, backend="reference")
    assert isinstance(model, DeepseekLM)
    check_against_peer(model, peer)


def test_fast_cpu_backend_gives_the_same_logits() -> None:
    peer = make_peer("v3_yarn_bias")
    check_against_peer(load_target(peer), peer)


def test_saved_directory_loads_to_the_same_model(tmp_path: Path) -> None:
    peer = make_peer("v3_yarn_bias")
    peer.save_pretrained(tmp_path)
    model = load_target(tmp_path)
    assert model.config == load_target(peer).config
    check_against_peer(model, peer)


def test_forward_compiles_to_one_graph_without_breaks() -> None:
    peer = make_peer("v2")
    model = load_target(peer, backend="reference")
    torch._dynamo.reset()
    counter = CompileCounter()
    check_against_peer(model, peer, forward=torch.compile(model, fullgraph=True, backend=counter, dynamic=True))
    # One a layout: packed, and uniform rows with and without a tree.
    assert counter.frame_count <= 4
    torch._dynamo.reset()


def test_cache_holds_one_latent_and_one_rotary_key_a_token() -> None:
    model = load_target(make_peer("v2"))
    caches = model.allocate_caches(6, 4)
    assert [tuple(cache.kv.shape) for cache in caches] == [(6, 4, 24)] * 2


def test_mixture_of_experts_is_refused_by_its_fields(tmp_path: Path) -> None:
    make_peer("v3").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "first_k_dense_replace": 1}))
    with pytest.raises(ValueError, match=r"first_k_dense_replace 1 of 2 layers: .* 256 experts, which are not supported"):
        load_target(tmp_path)


def test_wrong_latent_rank_names_the_tensor(tmp_path: Path) -> None:
    make_peer("v2").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "kv_lora_rank": 12}))
    with pytest.raises(ValueError, match=r"kv_a_\w+\.weight has shape \[.*\], its config needs \[.*\]"):
        load_target(tmp_path)
