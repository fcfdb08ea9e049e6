"""PagedAttention in a user's own layer, and attention with sinks against gpt-oss.

Run alone: pytest tests/models/test_attention_module.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from specops import PagedKVCache, QueryLayout, attention_metadata
from specops.models import ModelConfig, PagedAttention
from specops.models.config import rope_from_hf
from specops.models.llama import Attention
from specops.models.rotary import Rotary
from specops.models.weights import fill, layer_pieces
from specops.testing.oracle import assert_close_to_oracle, oracle_mha

PAGE = 4


def metadata(lens: list[int], width: int, *, mask: Tensor | None = None) -> Any:
    """Uniform rows at the end of requests that own pages 1 upwards, in reverse order."""
    pages = 1 + max(lens) // PAGE
    table = torch.arange(len(lens) * pages, 0, -1, dtype=torch.int32).view(len(lens), pages)
    return attention_metadata(table, torch.tensor(lens, dtype=torch.int32), QueryLayout.uniform(width), PAGE, tree_mask=mask)


@pytest.mark.parametrize(
    ("cache_options", "options"),
    [
        ({}, {}),
        ({}, {"window": 3, "softcap": 1.5, "sinks": True, "scale": 0.3}),
        ({"value_dim": 12}, {"value_dim": 12}),
        ({"dtype": torch.float8_e4m3fn, "k_scale": 0.25, "v_scale": 0.5}, {"sinks": True}),
    ],
)
def test_module_stores_then_attends_as_the_oracle_says(cache_options: Any, options: Any) -> None:
    lens, width, value_dim = [9, 4, 13], 2, options.get("value_dim", 8)
    cache = PagedKVCache(13, PAGE, 2, 8, **{"dtype": torch.float32, **cache_options})
    for pool in (cache.k, cache.v):
        pool.copy_(torch.randn(pool.shape))
    module = PagedAttention(6, 2, 8, cache, backend="reference", **options).requires_grad_(False)
    if module.sinks is not None:
        module.sinks.copy_(torch.randn(6))
    meta = metadata(lens, width)
    q, k, v = torch.randn(6, 6, 8), torch.randn(6, 2, 8), torch.randn(6, 2, value_dim)
    # Arithmetic: the last two places of each request get the new rows, in the cache's own dtype and scale.
    expected_k, expected_v = cache.k.clone(), cache.v.clone()
    for row in range(6):
        request, place = row // width, lens[row // width] - width + row % width
        page = int(meta.page_table[request, place // PAGE])
        for pool, rows, scale in ((expected_k, k, cache.k_scale), (expected_v, v, cache.v_scale)):
            pool[page, place % PAGE] = (rows[row] if scale is None else rows[row] / scale).to(pool.dtype)
    expected = oracle_mha(
        q,
        expected_k,
        expected_v,
        meta.page_table,
        meta.seq_lens,
        layout=meta.layout,
        scale=options.get("scale"),
        window=module.window,
        softcap=module.softcap,
        sinks=module.sinks,
        k_scale=cache.k_scale,
        v_scale=cache.v_scale,
    )
    out = module(q, k, v, meta)
    assert torch.equal(cache.k.float(), expected_k.float())
    assert torch.equal(cache.v.float(), expected_v.float())
    assert_close_to_oracle(out, expected)


def test_tree_mask_and_backend_reach_the_op() -> None:
    mask = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool).repeat(2, 1)
    cache = PagedKVCache(9, PAGE, 1, 8, dtype=torch.float32)
    module = PagedAttention(2, 1, 8, cache, backend="reference")
    meta = metadata([7, 5], 3, mask=mask)
    q, k, v = torch.randn(6, 2, 8), torch.randn(6, 1, 8), torch.randn(6, 1, 8)
    out = module(q, k, v, meta)
    call = (q, cache.k, cache.v, meta.page_table, meta.seq_lens)
    assert_close_to_oracle(out, oracle_mha(*call, layout=meta.layout, tree_mask=mask))
    module.backend = "no_such"
    with pytest.raises(ValueError, match="no mha backend is called 'no_such'"):
        module(q, k, v, meta)


def test_module_without_cache_says_what_to_do() -> None:
    module = PagedAttention(2, 1, 8)
    with pytest.raises(RuntimeError, match=r"no KV cache; call allocate_caches\(\) on its model, or set \.cache"):
        module(torch.zeros(2, 2, 8), torch.zeros(2, 1, 8), torch.zeros(2, 1, 8), metadata([2], 2))
    module.cache = PagedKVCache(3, PAGE, 1, 8, dtype=torch.float32)
    assert module(torch.zeros(2, 2, 8), torch.zeros(2, 1, 8), torch.zeros(2, 1, 8), metadata([2], 2)).shape == (2, 2, 8)


def test_users_own_layer_compiles_to_one_graph() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(16, 4 * 8)
            cache = PagedKVCache(9, PAGE, 1, 8, dtype=torch.float32)
            self.attend = PagedAttention(2, 1, 8, cache, backend="reference")

        def forward(self, x: Tensor, meta: Any) -> Tensor:
            q, k, v = self.project(x).view(-1, 4, 8).split((2, 1, 1), dim=1)
            return self.attend(q, k, v, meta).flatten(1)

    layer = Layer().requires_grad_(False)
    x, meta = torch.randn(4, 16), metadata([7, 5], 2)
    expected = layer(x, meta)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, meta), expected)


@pytest.mark.parametrize("layer_index", [0, 1])
def test_attention_with_sinks_equals_gpt_oss(layer_index: int) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.gpt_oss import modeling_gpt_oss

    hf = transformers.GptOssConfig(
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_hidden_layers=2,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "truncate": False,
        },
        max_position_embeddings=64,
    )
    hf._attn_implementation = "eager"
    peer = modeling_gpt_oss.GptOssAttention(hf, layer_index).eval().requires_grad_(False)
    for parameter in peer.parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.5)
    config = ModelConfig(
        vocab_size=1,
        hidden_size=32,
        intermediate_size=1,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        rope=rope_from_hf(hf.to_dict()),
        attention_bias=True,
        output_bias=True,
        attention_sinks=True,
        layer_windows=(5, None),
    )
    ours = Attention(config, layer_index).requires_grad_(False)
    pieces = layer_pieces(config, "", "")
    attention = {name: piece for name, piece in pieces.items() if piece.parameter.startswith("attn.")}
    holder = nn.Module()
    holder.attn = ours
    state = ((f"self_attn.{name}", tensor) for name, tensor in peer.state_dict().items())
    fill(holder, attention, state, where="the peer")
    ours.allocate_cache(9, PAGE, dtype=torch.float32, device="cpu")
    ours.backend = "reference"

    lengths = (13, 9)
    x = torch.randn(sum(lengths), 32)
    starts = torch.tensor([0, 13, 22], dtype=torch.int32)
    table = torch.tensor([[5, 1, 8, 3], [2, 7, 4, 0]], dtype=torch.int32)
    lens = torch.tensor(lengths, dtype=torch.int32)
    meta = attention_metadata(table, lens, QueryLayout.packed(starts, 13), PAGE, num_tokens=22)
    rotary = Rotary(config.rope, 8, 64)
    out = ours(x, rotary(meta.positions, x.dtype), meta)
    peer_rotary = modeling_gpt_oss.GptOssRotaryEmbedding(hf)
    for rows, mine in zip(x.split(lengths), out.split(lengths), strict=True):
        count = len(rows)
        distance = torch.arange(count)[:, None] - torch.arange(count)[None, :]
        hidden = (distance < 0) | (distance >= (config.layer_windows[layer_index] or count))
        mask = torch.zeros(1, 1, count, count).masked_fill(hidden, float("-inf"))
        theirs, _ = peer(rows[None], peer_rotary(rows[None], torch.arange(count)[None]), mask)
        torch.testing.assert_close(mine, theirs[0], rtol=1e-4, atol=1e-4)
