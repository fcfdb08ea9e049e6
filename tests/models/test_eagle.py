"""EAGLE heads: the paged forward against a plain one, shapes and maps, sharing, compilation.

OMP_NUM_THREADS=1 pytest tests/models/test_eagle.py
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from specops import QueryLayout, attention_metadata
from specops.models.config import ModelConfig
from specops.models.eagle import EagleConfig, EagleHead
from specops.models.llama import CausalLM

VOCAB, DRAFT = 64, 16
TARGET = ModelConfig(
    vocab_size=VOCAB,
    hidden_size=48,
    intermediate_size=96,
    num_layers=6,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=128,
)
KEPT = torch.tensor([1, 2, 5, 9, 11, 12, 13, 20, 22, 31, 33, 40, 47, 55, 60, 63])
D2T = KEPT - torch.arange(DRAFT)


def make_target(seed: int = 0) -> CausalLM:
    torch.manual_seed(seed)
    return CausalLM(TARGET).requires_grad_(False)


def make_head(target: CausalLM, format: str = "eagle", draft_vocab: int = DRAFT, **options: Any) -> EagleHead:
    config = EagleConfig.for_target(TARGET, format=format, draft_vocab_size=draft_vocab, **options)  # type: ignore[arg-type]
    head = EagleHead(config, target.embed_tokens, target.lm_head.weight, d2t=D2T if draft_vocab < VOCAB else None)
    for parameter in head.parameters():
        if parameter.dim() == 1 or parameter.shape == (3, 48):
            parameter.data.uniform_(0.5, 1.5)
    head.allocate_caches(num_pages=16, page_size=4)
    head.set_backend("reference")
    return head.requires_grad_(False)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def entered(head: EagleHead, hidden: Tensor) -> Tensor:
    """An eagle3 head's residual stream, float64, from the target's streams ``[L, 3 * 48]``."""
    h = hidden.double()
    if head.config.norm_inputs:
        weights = head.hidden_norm.weight.double()  # type: ignore[union-attr]
        parts = [rms(part, weights[n], head.config.rms_norm_eps) for n, part in enumerate(h.chunk(3, dim=1))]
        h = torch.cat(parts, dim=1)
    return h @ head.fc.weight.double().T


def plain_head(head: EagleHead, ids: Tensor, hidden: Tensor, first_position: int = 0) -> tuple[Tensor, Tensor]:
    """Carried states and logits of one sequence in float64, written from the papers' formulas.

    ids ``[L]``, hidden ``[L, width]``; all rows see all rows before them.
    """
    config, layer = head.config, head.layers[0].double()
    eps, attn, length = config.rms_norm_eps, layer.attn, ids.shape[0]
    e, h = head.embed_tokens.weight.double()[ids], hidden.double()
    fc = head.fc.weight.double()
    if config.format == "eagle3":
        x = entered(head, h) if h.shape[1] == config.hidden_width else h
        read = torch.cat((rms(e, layer.embed_norm.weight, eps), rms(x, layer.hidden_norm.weight, eps)), dim=1)
    else:
        if config.norm_inputs:
            e, h = rms(e, head.embed_norm.weight.double(), eps), rms(h, head.hidden_norm.weight.double(), eps)
        x = torch.cat((e, h), dim=1) @ fc.T
        read = rms(x, layer.input_norm.weight, eps) if config.input_norm else x
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    q, k, v = (read @ attn.qkv.weight.T).split((q_rows, kv_rows, kv_rows), dim=1)
    half = config.head_dim // 2
    angle = torch.tensor(
        [
            [(first_position + i) * config.rope.theta ** (-2 * p / config.head_dim) for p in range(half)]
            for i in range(length)
        ],
        dtype=torch.float64,
    )

    def turned(y: Tensor) -> Tensor:
        a, b = y[:, :half], y[:, half:]
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), dim=1)

    outs = []
    for number in range(config.num_heads):
        group = number // (config.num_heads // config.num_kv_heads)
        one = slice(number * config.head_dim, (number + 1) * config.head_dim)
        two = slice(group * config.head_dim, (group + 1) * config.head_dim)
        scores = turned(q[:, one]) @ turned(k[:, two]).T / math.sqrt(config.head_dim)
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
        outs.append(scores.softmax(-1) @ v[:, two])
    x = x + torch.cat(outs, dim=1) @ attn.o.weight.T
    gate, up = (rms(x, layer.mlp_norm.weight, eps) @ layer.mlp.gate_up.weight.T).chunk(2, dim=1)
    x = x + (gate * gate.sigmoid() * up) @ layer.mlp.down.weight.T
    normed = rms(x, head.norm.weight.double(), eps) if config.final_norm else x
    layer.float()
    return x, normed @ head.lm_head_weight.double().T


def paged(head: EagleHead, ids: Tensor, hidden: Tensor, seq_len: int) -> Tensor:
    """One request's rows, ending at ``seq_len``, on pages 5, 2, 9, 3."""
    page_table = torch.tensor([[5, 2, 9, 3]], dtype=torch.int32)
    seq_lens = torch.tensor([seq_len], dtype=torch.int32)
    meta = attention_metadata(page_table, seq_lens, QueryLayout.uniform(ids.shape[0]), 4)
    return head(ids, hidden, meta)


VARIANTS = [
    pytest.param("eagle", {}, id="eagle"),
    pytest.param("eagle", {"norm_inputs": False, "input_norm": False, "final_norm": False}, id="eagle-published"),
    pytest.param("eagle3", {}, id="eagle3"),
    pytest.param("eagle3", {"norm_inputs": False}, id="eagle3-published"),
]


@pytest.mark.parametrize(("format", "options"), VARIANTS)
def test_paged_forward_equals_the_formula(format: str, options: dict[str, bool]) -> None:
    head = make_head(make_target(), format, **options)
    ids, hidden = torch.randint(VOCAB, (11,)), torch.randn(11, head.config.hidden_width)
    carried = paged(head, ids, hidden, 11)
    wanted, logits = plain_head(head, ids, hidden)
    torch.testing.assert_close(carried.double(), wanted, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(head.compute_logits(carried).double(), logits, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(("format", "options"), VARIANTS)
def test_drafting_carries_the_state_before_the_norm(format: str, options: dict[str, bool]) -> None:
    """Three draft steps behind a prefix. The formula runs on prefix and carried states as one sequence."""
    head = make_head(make_target(), format, **options)
    ids, hidden = torch.randint(VOCAB, (9,)), torch.randn(6, head.config.hidden_width)
    state = paged(head, ids[:6], hidden, 6)[-1:]
    # Rows of the formula: the prefix as it enters the layer, then one row a step.
    rows = hidden.double()
    if format == "eagle3":
        rows = entered(head, rows)
    for step in range(3):
        rows = torch.cat((rows, state.double()))
        state = paged(head, ids[6 + step : 7 + step], state, 7 + step)
        wanted, _ = plain_head(head, ids[: 7 + step], rows)
        torch.testing.assert_close(state.double(), wanted[-1:], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(("format", "options"), VARIANTS)
@pytest.mark.parametrize("accepted", [1, 2, 4])
def test_cache_after_draft_extend_equals_a_fresh_pass(format: str, options: dict[str, bool], accepted: int) -> None:
    """Draft steps leave K/V of guessed states behind; the extend over four rows, some of them filler, replaces it."""
    head = make_head(make_target(), format, **options)
    ids, hidden = torch.randint(VOCAB, (9,)), torch.randn(9, head.config.hidden_width)
    state = paged(head, ids[:5], hidden[:5], 5)[-1:]
    for step in range(3):
        state = paged(head, torch.randint(VOCAB, (1,)), state, 6 + step)
    rows, streams = ids[5:].clone(), hidden[5:].clone()
    rows[accepted:], streams[accepted:] = 0, 0.0
    extended = paged(head, rows, streams, 9)[:accepted]
    slots = torch.tensor([5, 2, 9, 3])[torch.arange(5 + accepted) // 4] * 4 + torch.arange(5 + accepted) % 4
    seen = [cache.k.flatten(0, 1)[slots].clone() for cache in head.caches]
    values = [cache.v.flatten(0, 1)[slots].clone() for cache in head.caches]
    head.allocate_caches(num_pages=16, page_size=4)
    fresh = paged(head, ids[: 5 + accepted], hidden[: 5 + accepted], 5 + accepted)
    torch.testing.assert_close(extended, fresh[5:], atol=1e-5, rtol=1e-5)
    for cache, keys, others in zip(head.caches, seen, values, strict=True):
        torch.testing.assert_close(keys, cache.k.flatten(0, 1)[slots], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(others, cache.v.flatten(0, 1)[slots], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "eagle3", "norm_joined": True}, "norm_joined and norm_inputs exclude each other"),
        ({"normed_residual": True}, "options of eagle3 heads"),
        ({"carry_normed": True, "final_norm": False}, "carry_normed needs final_norm"),
        ({"num_layers": 0}, "at least one layer"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EagleConfig.for_target(TARGET, **options)


def test_reduced_vocabulary_maps_by_offsets() -> None:
    target = make_target()
    head = make_head(target)
    draft_ids = torch.arange(DRAFT).flip(0).view(4, 4)
    assert torch.equal(head.to_target_ids(draft_ids), KEPT.flip(0).view(4, 4))
    hidden = torch.randn(3, 48)
    everything = make_head(target, draft_vocab=VOCAB)
    everything.norm.load_state_dict(head.norm.state_dict())  # type: ignore[union-attr]
    torch.testing.assert_close(head.compute_logits(hidden), everything.compute_logits(hidden)[:, KEPT])


def test_full_vocabulary_needs_no_map_and_launches_nothing() -> None:
    head = make_head(make_target(), draft_vocab=VOCAB)
    ids = torch.arange(5)
    assert head.d2t is None
    assert head.to_target_ids(ids) is ids
    assert head.lm_head_weight.data_ptr() != 0


def test_full_vocabulary_shares_the_targets_lm_head() -> None:
    target = make_target()
    assert make_head(target, draft_vocab=VOCAB).lm_head_weight.data_ptr() == target.lm_head.weight.data_ptr()


def test_head_neither_stores_nor_moves_what_it_borrows() -> None:
    target = make_target()
    head = make_head(target)
    assert not [name for name in head.state_dict() if "embed_tokens" in name or "lm_head" in name]
    head.to(torch.bfloat16)
    assert target.embed_tokens.weight.dtype == torch.float32
    assert target.lm_head.weight.dtype == torch.float32
    ids, hidden = torch.randint(VOCAB, (3,)), torch.randn(3, 48)
    head.allocate_caches(16, 4)
    assert paged(head, ids, hidden, 3).dtype == torch.bfloat16


def test_reduced_vocabulary_without_map_is_refused() -> None:
    target = make_target()
    config = EagleConfig.for_target(TARGET, draft_vocab_size=DRAFT)
    with pytest.raises(ValueError, match="16 is smaller than the target's 64; without d2t"):
        EagleHead(config, target.embed_tokens, target.lm_head.weight)


@pytest.mark.parametrize(
    ("d2t", "message"),
    [
        (torch.zeros(15, dtype=torch.int64), r"d2t must be \[16\], got \(15,\)"),
        (torch.full((DRAFT,), 60), "distinct target ids below 64; it maps to 60 .. 75"),
        (-torch.arange(DRAFT), "it maps to 0 .. 0, 1 of them distinct"),
    ],
)
def test_map_that_leads_astray_is_refused(d2t: Tensor, message: str) -> None:
    target = make_target()
    config = EagleConfig.for_target(TARGET, draft_vocab_size=DRAFT)
    with pytest.raises(ValueError, match=message):
        EagleHead(config, target.embed_tokens, target.lm_head.weight, d2t=d2t)


def test_lm_head_of_another_size_is_refused() -> None:
    target = make_target()
    config = EagleConfig.for_target(TARGET, draft_vocab_size=DRAFT)
    with pytest.raises(ValueError, match=r"LM head must be \[64, 48\].*got \[64, 32\]"):
        EagleHead(config, target.embed_tokens, torch.zeros(64, 32), d2t=D2T)


def test_fc_of_an_eagle3_head_reads_all_aux_layers() -> None:
    config = EagleConfig.for_target(TARGET, format="eagle3")
    assert len(config.aux_layers) == 3
    assert config.hidden_width == 3 * 48
    assert make_head(make_target(), "eagle3").fc.weight.shape == (48, 144)


@pytest.mark.parametrize("format", ["eagle", "eagle3"])
def test_config_survives_json(format: str) -> None:
    import json

    config = EagleConfig.for_target(TARGET, format=format, draft_vocab_size=DRAFT, name="T")  # type: ignore[arg-type]
    assert EagleConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_config_names_what_it_does_not_know() -> None:
    fields = EagleConfig.for_target(TARGET).to_dict()
    del fields["num_heads"]
    with pytest.raises(ValueError, match=r"unknown fields \['depth'\], missing fields \['num_heads'\]"):
        EagleConfig.from_dict({**fields, "depth": 3})


@pytest.mark.parametrize("format", ["eagle", "eagle3"])
def test_forward_traces_whole_with_changing_batch(format: str) -> None:
    head = make_head(make_target(), format)
    compiled = torch.compile(head, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch in (2, 3, 5):
        page_table = torch.arange(1, 2 * batch + 1, dtype=torch.int32).view(batch, 2)
        meta = attention_metadata(page_table, torch.full((batch,), 3, dtype=torch.int32), QueryLayout.uniform(2), 4)
        ids, hidden = torch.randint(VOCAB, (2 * batch,)), torch.randn(2 * batch, head.config.hidden_width)
        with torch.no_grad():
            torch.testing.assert_close(compiled(ids, hidden, meta), head(ids, hidden, meta))
