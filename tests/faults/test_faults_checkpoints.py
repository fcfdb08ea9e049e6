"""Kinds of fault at the level of the loader: draft vocabularies, missing weights, formats, hidden states; named by id.

OMP_NUM_THREADS=1 pytest -k faults tests/faults/test_faults_checkpoints.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specops import QueryLayout, attention_metadata
from specops.models.config import ModelConfig
from specops.models.eagle import EagleConfig, EagleHead
from specops.models.eagle_checkpoint import WEIGHTS, load_head, save_head
from specops.models.llama import CausalLM

VOCAB, DRAFT, HIDDEN = 64, 16, 32
KEPT = torch.arange(2, VOCAB, 4)


@pytest.fixture
def target() -> CausalLM:
    return CausalLM(ModelConfig(VOCAB, HIDDEN, 48, 8, 4, 2, 8, 64)).requires_grad_(False)


def head_for(target: CausalLM, format: str = "eagle", draft_vocab: int = DRAFT, **options: Any) -> EagleHead:
    config = EagleConfig.for_target(target.config, format=format, draft_vocab_size=draft_vocab, **options)  # type: ignore
    d2t = KEPT - torch.arange(DRAFT) if draft_vocab < VOCAB else None
    head = EagleHead(config, target.embed_tokens, target.lm_head.weight, d2t=d2t)
    for parameter in head.parameters():
        parameter.data.normal_()
    return head.requires_grad_(False)


def change(folder: Path, weights: dict[str, torch.Tensor | None], **fields: Any) -> None:
    config = {**json.loads((folder / "config.json").read_text()), **fields}
    (folder / "config.json").write_text(json.dumps(config))
    tensors: dict[str, Any] = {**load_file(folder / WEIGHTS), **weights}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / WEIGHTS)


def test_f51_d2t_holds_offsets(target: CausalLM, tmp_path: Path) -> None:
    save_head(head_for(target), tmp_path / "head")
    head = load_head(tmp_path / "head", target)
    assert head.to_target_ids(torch.tensor([0, 1, 15])).tolist() == [2, 6, 62]
    hidden = torch.randn(3, HIDDEN)
    normed = hidden / (hidden.square().mean(1, keepdim=True) + head.config.rms_norm_eps).sqrt() * head.norm.weight
    torch.testing.assert_close(head.compute_logits(hidden), normed @ target.lm_head.weight[KEPT].T, rtol=1e-4, atol=1e-5)


def test_f52_a_reduced_vocabulary_needs_d2t_and_a_full_one_does_not(target: CausalLM, tmp_path: Path) -> None:
    save_head(head_for(target), tmp_path / "head")
    change(tmp_path / "head", {"d2t": None})
    with pytest.raises(ValueError, match="lacks d2t: its draft vocabulary of 16"):
        load_head(tmp_path / "head", target)
    save_head(head_for(target, draft_vocab=VOCAB), tmp_path / "full")
    ids = torch.arange(5)
    assert torch.equal(load_head(tmp_path / "full", target).to_target_ids(ids), ids)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"fc.weight": None}, "lacks fc.weight"),
        ({"layers.0.self_attn.q_proj.weight": None}, "lacks layers.0.self_attn.q_proj.weight"),
        ({"layers.0.mlp.down_proj.weight": None}, "lacks layers.0.mlp.down_proj.weight"),
        ({"layers.1.stray.weight": torch.zeros(2)}, "layers.1.stray.weight"),
    ],
)
def test_f53_missing_and_unexpected_weights_are_named(
    target: CausalLM, tmp_path: Path, weights: dict[str, Any], message: str
) -> None:
    save_head(head_for(target), tmp_path / "head")
    change(tmp_path / "head", weights)
    with pytest.raises(ValueError, match=message):
        load_head(tmp_path / "head", target)


def test_f53_a_head_with_its_own_lm_head_or_embedding_needs_them(target: CausalLM, tmp_path: Path) -> None:
    for option, name in (("own_lm_head", "lm_head.weight"), ("own_embedding", "embed_tokens.weight")):
        config = EagleConfig.for_target(target.config, **{option: True})
        head = EagleHead(config, target.embed_tokens, torch.randn(VOCAB, HIDDEN))
        save_head(head, tmp_path / name)
        load_head(tmp_path / name, target)
        change(tmp_path / name, {name: None})
        with pytest.raises(ValueError, match=f"lacks {name}"):
            load_head(tmp_path / name, target)


def test_f53_nothing_stays_at_random_init(target: CausalLM, tmp_path: Path) -> None:
    head = head_for(target)
    save_head(head, tmp_path / "head")
    loaded = load_head(tmp_path / "head", target).state_dict()
    assert {name for name, value in head.state_dict().items() if not torch.equal(value, loaded[name])} == set()


@pytest.mark.parametrize(
    ("fields", "convention", "aux"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}, "layers_run", (1, 3, 6)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}, "layer_index", (2, 4, 7)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}}, "layers_run", (1, 3, 6)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}}, "layer_index", (2, 4, 7)),
    ],
)
def test_f54_aux_layer_ids_flat_or_nested_under_either_convention(
    target: CausalLM, tmp_path: Path, fields: dict[str, Any], convention: Any, aux: tuple[int, ...]
) -> None:
    published_eagle3(tmp_path, **fields)
    assert load_head(tmp_path, target, aux_convention=convention).config.aux_layers == aux


def published_eagle3(folder: Path, **fields: Any) -> None:
    """An EAGLE-3 head in the usual layout: a Llama config and weights under ``midlayer.``."""
    shapes = {
        "midlayer.self_attn.q_proj": (32, 2 * HIDDEN),
        "midlayer.self_attn.k_proj": (16, 2 * HIDDEN),
        "midlayer.self_attn.v_proj": (16, 2 * HIDDEN),
        "midlayer.self_attn.o_proj": (HIDDEN, 32),
        "midlayer.mlp.gate_proj": (48, HIDDEN),
        "midlayer.mlp.up_proj": (48, HIDDEN),
        "midlayer.mlp.down_proj": (HIDDEN, 48),
        "midlayer.post_attention_layernorm": (HIDDEN,),
        "midlayer.hidden_norm": (HIDDEN,),
        "midlayer.input_layernorm": (HIDDEN,),
        "norm": (HIDDEN,),
        "lm_head": (DRAFT, HIDDEN),
        "fc": (HIDDEN, 3 * HIDDEN),
    }
    tensors = {f"{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
    mask = torch.zeros(VOCAB, dtype=torch.bool)
    mask[KEPT] = True
    save_file({**tensors, "d2t": KEPT - torch.arange(DRAFT), "t2d": mask}, folder / WEIGHTS)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": VOCAB,
        "draft_vocab_size": DRAFT,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,
        **fields,
    }
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(("holds", "asked"), [("eagle", "eagle3"), ("eagle3", "eagle")])
def test_f55_one_format_loaded_as_the_other_says_what_it_is(
    target: CausalLM, tmp_path: Path, holds: str, asked: Any
) -> None:
    save_head(head_for(target, holds), tmp_path / "head")
    with pytest.raises(ValueError, match=f"is an {holds} head, not an {asked} one"):
        load_head(tmp_path / "head", target, format=asked)


def test_f55_a_target_given_as_a_draft_says_what_it_is(target: CausalLM, tmp_path: Path) -> None:
    save_file({f"model.layers.{i}.mlp.up_proj.weight": torch.zeros(2, 2) for i in range(5)}, tmp_path / WEIGHTS)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(ValueError, match="is a target model of 5 layers, not a draft head"):
        load_head(tmp_path, target)


def test_f56_fc_of_eagle3_reads_three_hidden_states_of_the_target() -> None:
    wide = ModelConfig(VOCAB, 128, 96, 8, 8, 2, 16, 64)
    target = CausalLM(wide)
    sizes = {"hidden_size": 64, "num_heads": 4, "own_embedding": True, "own_lm_head": True}
    config = EagleConfig.for_target(wide, format="eagle3", **sizes)
    head = EagleHead(config, torch.nn.Embedding(VOCAB, 64), torch.randn(VOCAB, 64))
    assert head.fc.weight.shape == (64, 3 * 128)
    assert config.hidden_width == 3 * 128
    head.allocate_caches(4, 4)
    table, lens = torch.tensor([[1]], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    meta = attention_metadata(table, lens, QueryLayout.uniform(3), 4)
    ids = torch.arange(3)
    assert target.embed_tokens(ids).shape == (3, 128)
    assert head(ids, torch.randn(3, 384), meta).shape == (3, 64)


@pytest.mark.parametrize("carry_normed", [False, True])
def test_f57_the_state_handed_on_is_the_one_the_format_names(target: CausalLM, carry_normed: bool) -> None:
    head = head_for(target, "eagle3", draft_vocab=VOCAB, carry_normed=carry_normed)
    head.allocate_caches(4, 4)
    table, lens = torch.tensor([[1]], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    meta = attention_metadata(table, lens, QueryLayout.uniform(3), 4)
    carried = head(torch.arange(3), torch.randn(3, 3 * HIDDEN), meta)
    logits = head.compute_logits(carried)
    normed = carried
    if not carry_normed:
        scale = (carried.square().mean(1, keepdim=True) + head.config.rms_norm_eps).sqrt()
        normed = carried / scale * head.norm.weight
    torch.testing.assert_close(logits, normed @ target.lm_head.weight.T, rtol=1e-4, atol=1e-4)
