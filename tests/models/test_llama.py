"""Target models against transformers on the same random weights. Run alone: pytest tests/models/test_llama.py"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from paged_session import PagedSession, assert_same_logits, check_against_peer, peer_logits

from specops.models import load_target

transformers = pytest.importorskip("transformers")

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 16}
# name: architecture, options
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama_llama3_rope": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama_yarn": ("Llama", {"rope_parameters": YARN_ROPE}),
    "llama_linear_rope": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "llama_dynamic_rope": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
    "llama_biases_tied": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama_wide_head": ("Llama", {"head_dim": 16, "hidden_act": "gelu"}),
    "mistral_window": ("Mistral", {"sliding_window": 7}),
    "mistral_no_window": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2_window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "gemma2": ("Gemma2", {"sliding_window": 6, "query_pre_attn_scalar": 12, "attn_logit_softcapping": 2.0}),
}


def make_peer(name: str, **more: Any) -> Any:
    """A transformers model whose every parameter is random, norms and biases too."""
    architecture, options = FAMILIES[name]
    config = getattr(transformers, f"{architecture}Config")(**{**SHAPE, **options, **more})
    peer = getattr(transformers, f"{architecture}ForCausalLM")._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.dim() > 1 else 0.5))
            if parameter.dim() == 1:
                parameter.add_(1.0)
    return peer


@pytest.mark.parametrize("name", FAMILIES)
def test_prefill_decode_blocks_and_trees_equal_transformers(name: str) -> None:
    peer = make_peer(name)
    check_against_peer(load_target(peer, backend="reference"), peer)


def test_fast_cpu_backend_gives_the_same_logits() -> None:
    peer = make_peer("mistral_window")
    check_against_peer(load_target(peer, backend="auto"), peer)


def test_aux_layers_are_the_residual_streams_of_transformers() -> None:
    peer = make_peer("llama")
    model = load_target(peer, backend="reference")
    tokens = torch.randint(SHAPE["vocab_size"], (9,)).tolist()
    seen = {}

    def forward(ids: Any, meta: Any) -> Any:
        hidden, seen["aux"] = model(ids, meta, aux_layers=(2, 0, 3))
        return hidden

    PagedSession(model, 1, forward=forward).prefill([tokens])
    # transformers' last entry is normed, so the stream behind layer 3 is caught at the norm's input.
    inputs: list[Any] = []
    handle = peer.model.norm.register_forward_pre_hook(lambda _, args: inputs.append(args[0][0]))
    with torch.inference_mode():
        streams = peer(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    handle.remove()
    expected = torch.cat((streams[2][0], streams[0][0], inputs[0]), dim=-1)
    torch.testing.assert_close(seen["aux"], expected, rtol=1e-4, atol=1e-4)


def test_bfloat16_stays_near_transformers_float32() -> None:
    peer = make_peer("qwen3")
    model = load_target(peer, dtype=torch.bfloat16, backend="reference")
    tokens = torch.randint(SHAPE["vocab_size"], (12,)).tolist()
    (logits,) = PagedSession(model, 1).prefill([tokens])
    expected = peer_logits(peer, tokens)
    assert logits.dtype == torch.bfloat16
    assert model.rotary.cos.dtype == torch.float32
    assert (logits.float() - expected).norm() < 0.05 * expected.norm()


def test_windows_and_caches_are_per_layer() -> None:
    model = load_target(make_peer("gemma2"))
    assert [layer.attn.window for layer in model.layers] == [6, None, 6]
    assert model.caches == []
    caches = model.allocate_caches(5, 4)
    assert model.caches == caches
    assert {tuple(cache.k.shape) for cache in caches} == {(5, 4, 2, 8)}
    assert len({cache.k.data_ptr() for cache in caches}) == 3


def test_position_behind_the_tables_is_clamped_not_read() -> None:
    model = load_target(make_peer("llama"))
    cos, _ = model.rotary(torch.tensor([63, 64, 10**9]), torch.float32)
    assert torch.equal(cos[0], cos[1])
    assert torch.equal(cos[0], cos[2])


def test_forward_without_caches_says_what_to_do() -> None:
    model = load_target(make_peer("llama"), backend="reference")
    session = PagedSession(model, 1)
    for layer in model.layers:
        layer.attn.cache = None
    with pytest.raises(RuntimeError, match=r"no KV cache; call allocate_caches\(\)"):
        session.prefill([[1, 2]])


def test_padded_rows_write_no_page_and_disturb_no_row() -> None:
    peer = make_peer("llama")
    model = load_target(peer, backend="reference")
    session = PagedSession(model, 2)
    prompts = [[5, 6, 7], [8, 9]]
    session.prefill(prompts)
    before = [cache.k.clone() for cache in model.caches]
    live = int(session.lens[0])
    # The second request becomes padding: no keys, pages pointing at page 0.
    session.page_table[1] = 0
    session.lens = torch.tensor([live, -1], dtype=torch.int32)
    logits = session.step(torch.tensor([[3], [0]]))
    assert_same_logits(logits[0], peer_logits(peer, [*prompts[0], 3])[-1:])
    for cache, old in zip(model.caches, before, strict=True):
        changed = (cache.k != old) & ~(cache.k.isnan() & old.isnan())
        assert int(changed.flatten(2).any(-1).sum()) == 1
