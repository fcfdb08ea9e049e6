"""Heads on disk: round trips, published layouts, and a sentence for everything that does not fit.

OMP_NUM_THREADS=1 pytest tests/models/test_eagle_checkpoint.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specops import QueryLayout, attention_metadata
from specops.models.config import ModelConfig
from specops.models.eagle import EagleConfig, EagleHead
from specops.models.eagle_checkpoint import WEIGHTS, load_head, save_head, shipped_head
from specops.models.llama import CausalLM

VOCAB, DRAFT, H, INNER = 64, 16, 32, 48
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": H,
    "intermediate_size": INNER,
    "num_layers": 8,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
KEPT = torch.arange(1, VOCAB, 4)


@pytest.fixture
def target() -> CausalLM:
    torch.manual_seed(0)
    return CausalLM(ModelConfig(**SIZES)).requires_grad_(False)


def make_head(target: CausalLM, format: str = "eagle", **options: Any) -> EagleHead:
    config = EagleConfig.for_target(
        target.config,
        format=format,  # type: ignore[arg-type]
        draft_vocab_size=DRAFT,
        name="tiny target",
        **options,
    )
    lm_head = torch.randn(DRAFT, H) if config.own_lm_head else target.lm_head.weight
    head = EagleHead(config, target.embed_tokens, lm_head, d2t=KEPT - torch.arange(DRAFT))
    for parameter in head.parameters():
        parameter.data.normal_()
    return head.requires_grad_(False)


def answer(head: EagleHead) -> Tensor:
    """Logits of four rows."""
    head.allocate_caches(4, 4)
    head.set_backend("reference")
    meta = attention_metadata(
        torch.tensor([[1]], dtype=torch.int32), torch.tensor([4], dtype=torch.int32), QueryLayout.uniform(4), 4
    )
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(4, head.config.hidden_width, generator=generator)
    return head.compute_logits(head(torch.arange(4), hidden, meta))


def edit(directory: Path, config: dict[str, Any] | None = None, **weights: Tensor | None) -> None:
    """Change fields of config.json and weights of a saved head; None removes. ``__`` in a name stands for a dot."""
    fields = json.loads((directory / "config.json").read_text())
    fields.update(config or {})
    (directory / "config.json").write_text(json.dumps({k: v for k, v in fields.items() if v is not None}))
    tensors = load_file(directory / WEIGHTS)
    for key, tensor in weights.items():
        tensors.pop(key.replace("__", "."), None)
        if tensor is not None:
            tensors[key.replace("__", ".")] = tensor
    save_file(tensors, directory / WEIGHTS)


@pytest.mark.parametrize(
    ("format", "options"),
    [
        ("eagle", {}),
        ("eagle", {"norm_inputs": False, "input_norm": False, "final_norm": False, "fc_bias": True}),
        ("eagle", {"own_embedding": True, "attention_bias": True}),
        ("eagle3", {}),
        ("eagle3", {"norm_inputs": False}),
        ("eagle3", {"own_lm_head": True}),
    ],
)
def test_saved_head_comes_back_with_equal_logits(
    target: CausalLM, tmp_path: Path, format: str, options: dict[str, bool]
) -> None:
    head = make_head(target, format, **options)
    save_head(head, tmp_path / "head")
    again = load_head(tmp_path / "head", target)
    assert again.config == head.config
    assert not again.training
    torch.testing.assert_close(answer(again), answer(head), rtol=0, atol=0)


def test_head_takes_the_targets_dtype_or_the_one_asked_for(target: CausalLM, tmp_path: Path) -> None:
    save_head(make_head(target).to(torch.bfloat16), tmp_path / "head")
    assert load_file(tmp_path / "head" / WEIGHTS)["fc.weight"].dtype == torch.bfloat16
    assert load_head(tmp_path / "head", target).fc.weight.dtype == torch.float32
    head = load_head(tmp_path / "head", target, dtype=torch.bfloat16)
    assert head.fc.weight.dtype == head.lm_head_weight.dtype == torch.bfloat16
    assert head.d2t is not None
    assert head.d2t.dtype == torch.int64


def test_file_holds_nothing_of_the_target(target: CausalLM, tmp_path: Path) -> None:
    save_head(make_head(target), tmp_path / "head")
    names = set(load_file(tmp_path / "head" / WEIGHTS))
    assert "embed_tokens.weight" not in names
    assert "lm_head.weight" not in names


def test_saving_again_replaces_the_folder_and_leaves_no_scraps(target: CausalLM, tmp_path: Path) -> None:
    save_head(make_head(target), tmp_path / "head", card={"seed": 1})
    second = make_head(target)
    save_head(second, tmp_path / "head", card={"seed": 2, "measured": {"acceptance": [0.5, 0.25]}})
    assert [path.name for path in tmp_path.iterdir()] == ["head"]
    assert json.loads((tmp_path / "head" / "card.json").read_text())["seed"] == 2
    assert "- acceptance: 0.5 / 0.25" in (tmp_path / "head" / "README.md").read_text()
    torch.testing.assert_close(load_head(tmp_path / "head", target).fc.weight, second.fc.weight)


# A saved head, one thing wrong with it, and what the message must name.
BROKEN = [
    pytest.param({}, {"fc__weight": None}, "it lacks fc.weight", id="no fc"),
    pytest.param({}, {"norm__weight": None}, "lacks norm.weight", id="no norm"),
    pytest.param({}, {"layers__0__self_attn__k_proj__weight": None}, "lacks layers.0.self_attn.k_proj.weight", id="no k"),
    pytest.param({}, {"extra__weight": torch.zeros(2)}, "unexpected extra.weight", id="unexpected"),
    pytest.param({}, {"fc__weight": torch.zeros(H, H)}, r"fc.weight has shape \[32, 32\].*needs \[32, 64\]", id="shape"),
    pytest.param({}, {"d2t": None}, "lacks d2t: its draft vocabulary of 16 .* target's 64", id="no map"),
    pytest.param({}, {"d2t": torch.zeros(4, dtype=torch.int64)}, r"d2t must be \[16\], got \(4,\)", id="short map"),
    pytest.param({}, {"t2d": torch.ones(VOCAB, dtype=torch.bool)}, "t2d does not name", id="maps disagree"),
    pytest.param({"target_hidden_size": 128}, {}, "target hidden size 128, the target has 32", id="other target"),
    pytest.param({"vocab_size": 96}, {}, "vocabulary 96, the target has 64", id="other vocabulary"),
    pytest.param(
        {"format": "eagle3", "aux_layers": [2, 4, 5]}, {}, "an eagle head, while its config says eagle3", id="format"
    ),
    pytest.param({"format": "eagle9"}, {}, "format must be one of eagle, eagle3", id="unknown format"),
]


@pytest.mark.parametrize(("config", "weights", "message"), BROKEN)
def test_message_names_what_is_wrong(
    target: CausalLM, tmp_path: Path, config: dict[str, Any], weights: dict[str, Tensor | None], message: str
) -> None:
    save_head(make_head(target), tmp_path / "head")
    edit(tmp_path / "head", config, **weights)
    with pytest.raises(ValueError, match=message):
        load_head(tmp_path / "head", target)


@pytest.mark.parametrize(("holds", "asked"), [("eagle", "eagle3"), ("eagle3", "eagle")])
def test_other_format_than_asked_for_says_what_it_is(target: CausalLM, tmp_path: Path, holds: str, asked: str) -> None:
    save_head(make_head(target, holds), tmp_path / "head")
    with pytest.raises(ValueError, match=f"is an {holds} head, not an {asked} one"):
        load_head(tmp_path / "head", target, format=asked)  # type: ignore[arg-type]


def test_target_given_as_head_says_so(target: CausalLM, tmp_path: Path) -> None:
    tensors = {f"model.layers.{i}.mlp.up_proj.weight": torch.zeros(2, 2) for i in range(5)}
    save_file(tensors, tmp_path / WEIGHTS)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(ValueError, match="is a target model of 5 layers, not a draft head"):
        load_head(tmp_path, target)


def test_folder_that_is_not_there(target: CausalLM, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        load_head(tmp_path / "nowhere", target)


def published(directory: Path, layer: str, fc_width: int, more: dict[str, Tensor], **config: Any) -> dict[str, Tensor]:
    """A head as published repositories lay it out: a Llama config and the weights' usual names."""
    wide = 2 * H if layer == "midlayer." else H
    shapes = {
        "self_attn.q_proj": (32, wide),
        "self_attn.k_proj": (16, wide),
        "self_attn.v_proj": (16, wide),
        "self_attn.o_proj": (H, 32),
        "mlp.gate_proj": (INNER, H),
        "mlp.up_proj": (INNER, H),
        "mlp.down_proj": (H, INNER),
        "post_attention_layernorm": (H,),
    }
    tensors = {f"{layer}{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
    tensors = {**tensors, "fc.weight": torch.randn(H, fc_width), **more}
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": H,
        "intermediate_size": INNER,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,
        "rope_theta": 5000.0,
        **config,
    }
    save_file(tensors, directory / WEIGHTS)
    (directory / "config.json").write_text(json.dumps(fields))
    return tensors


def test_published_eagle_layout_loads(target: CausalLM, tmp_path: Path) -> None:
    embedding = torch.randn(VOCAB, H)
    more = {"embed_tokens.weight": embedding, "fc.bias": torch.randn(H)}
    tensors = published(tmp_path, "layers.0.", 2 * H, more)
    head = load_head(tmp_path, target)
    config = head.config
    assert config.format == "eagle"
    assert not config.norm_inputs
    assert not config.input_norm
    assert not config.final_norm
    assert config.rope.theta == 5000.0
    torch.testing.assert_close(head.embed_tokens.weight, embedding)
    torch.testing.assert_close(head.fc.bias, tensors["fc.bias"])
    torch.testing.assert_close(head.layers[0].attn.qkv.weight[32:48], tensors["layers.0.self_attn.k_proj.weight"])
    assert head.compute_logits(torch.zeros(1, H)).shape == (1, VOCAB)


def eagle3_weights() -> dict[str, Tensor]:
    mask = torch.zeros(VOCAB, dtype=torch.bool)
    mask[KEPT] = True
    return {
        "midlayer.hidden_norm.weight": torch.randn(H),
        "midlayer.input_layernorm.weight": torch.randn(H),
        "norm.weight": torch.randn(H),
        "lm_head.weight": torch.randn(DRAFT, H),
        "d2t": KEPT - torch.arange(DRAFT),
        "t2d": mask,
    }


@pytest.mark.parametrize(
    ("fields", "convention", "aux"),
    [
        ({}, "layers_run", (2, 4, 5)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}, "layers_run", (1, 3, 6)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}}, "layers_run", (1, 3, 6)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}}, "layer_index", (2, 4, 7)),
        ({"aux_hidden_state_layer_ids": [1, 3, 6]}, "layer_index", (2, 4, 7)),
        # Nobody says: ids at the top count layers that have run, nested ones name the layer.
        ({}, None, (2, 4, 5)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}, None, (1, 3, 6)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}}, None, (2, 4, 7)),
    ],
)
def test_published_eagle3_layout_loads(
    target: CausalLM, tmp_path: Path, fields: dict[str, Any], convention: Any, aux: tuple[int, ...]
) -> None:
    tensors = published(tmp_path, "midlayer.", 3 * H, eagle3_weights(), draft_vocab_size=DRAFT, **fields)
    head = load_head(tmp_path, target, aux_convention=convention)
    assert head.config.format == "eagle3"
    assert head.config.aux_layers == aux
    assert torch.equal(head.to_target_ids(torch.arange(DRAFT)), KEPT)
    torch.testing.assert_close(head.lm_head_weight, tensors["lm_head.weight"])
    torch.testing.assert_close(head.layers[0].embed_norm.weight, tensors["midlayer.input_layernorm.weight"])


def test_aux_layers_beyond_the_target_are_refused(target: CausalLM, tmp_path: Path) -> None:
    published(
        tmp_path, "midlayer.", 3 * H, eagle3_weights(), draft_vocab_size=DRAFT, eagle_aux_hidden_state_layer_ids=[2, 16, 29]
    )
    with pytest.raises(ValueError, match=r"aux layer ids \[2, 16, 29\] do not fit a target of 8 layers"):
        load_head(tmp_path, target)


def test_head_narrower_than_its_target(tmp_path: Path) -> None:
    """fc reads three of the target's states whatever the head's own width."""
    wide = CausalLM(ModelConfig(**{**SIZES, "hidden_size": 2 * H})).requires_grad_(False)
    embedding = torch.randn(VOCAB, H)
    weights = {**eagle3_weights(), "embed_tokens.weight": embedding}
    tensors = published(tmp_path, "midlayer.", 6 * H, weights, draft_vocab_size=DRAFT, target_hidden_size=2 * H)
    head = load_head(tmp_path, wide)
    assert (head.config.hidden_size, head.config.target_hidden_size, head.config.hidden_width) == (H, 2 * H, 6 * H)
    torch.testing.assert_close(head.fc.weight, tensors["fc.weight"])
    assert answer(head).shape == (4, DRAFT)


def test_narrow_head_without_an_embedding_of_its_own_is_refused(tmp_path: Path) -> None:
    wide = CausalLM(ModelConfig(**{**SIZES, "hidden_size": 2 * H}))
    published(tmp_path, "midlayer.", 6 * H, eagle3_weights(), draft_vocab_size=DRAFT)
    with pytest.raises(
        ValueError, match=r"hidden size \(it shares the target's embedding or LM head\) 32, the target has 64"
    ):
        load_head(tmp_path, wide)


def test_fc_of_another_targets_width_is_named(target: CausalLM, tmp_path: Path) -> None:
    published(tmp_path, "midlayer.", 6 * H, eagle3_weights(), draft_vocab_size=DRAFT)
    with pytest.raises(ValueError, match="target hidden size 64, the target has 32"):
        load_head(tmp_path, target)


@pytest.mark.parametrize("indexed", [False, True])
def test_pickled_weights_load_as_safetensors_do(target: CausalLM, tmp_path: Path, indexed: bool) -> None:
    tensors = published(tmp_path, "midlayer.", 3 * H, eagle3_weights(), draft_vocab_size=DRAFT)
    wanted = answer(load_head(tmp_path, target))
    (tmp_path / WEIGHTS).unlink()
    if indexed:
        names = list(tensors)
        shards = {"a.bin": names[:5], "b.bin": names[5:]}
        for file, kept in shards.items():
            torch.save({name: tensors[name] for name in kept}, tmp_path / file)
        weight_map = {name: file for file, kept in shards.items() for name in kept}
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    else:
        torch.save(tensors, tmp_path / "pytorch_model.bin")
    torch.testing.assert_close(answer(load_head(tmp_path, target)), wanted, rtol=0, atol=0)
    if indexed:
        (tmp_path / "b.bin").unlink()
        with pytest.raises(FileNotFoundError, match=r"lacks b.bin, which pytorch_model.bin.index.json names"):
            load_head(tmp_path, target)


class Planted:
    """Runs when it is unpickled by a careless reader."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("planted"),)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"fc.weight": Planted()}, "holds more than tensors and is not loaded"),
        ({"state_dict": {"fc.weight": torch.zeros(2)}}, "holds state_dict beside or instead of tensors"),
        ([torch.zeros(2)], "holds a list, not weights by name"),
        (b"PK no such thing", "is broken or cut off"),
    ],
)
def test_pickles_are_read_with_care(
    target: CausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: Any, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    published(tmp_path, "midlayer.", 3 * H, eagle3_weights(), draft_vocab_size=DRAFT)
    (tmp_path / WEIGHTS).unlink()
    if isinstance(content, bytes):
        (tmp_path / "pytorch_model.bin").write_bytes(content)
    else:
        torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=message):
        load_head(tmp_path, target)
    assert not (tmp_path / "planted").exists()


def test_weights_under_a_models_prefix(target: CausalLM, tmp_path: Path) -> None:
    tensors = published(tmp_path, "midlayer.", 3 * H, eagle3_weights(), draft_vocab_size=DRAFT)
    wanted = answer(load_head(tmp_path, target))
    kept = ("lm_head.weight", "d2t", "t2d")
    save_file({name if name in kept else f"model.{name}": one for name, one in tensors.items()}, tmp_path / WEIGHTS)
    torch.testing.assert_close(answer(load_head(tmp_path, target)), wanted, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("fields", "more", "message"),
    [
        ({"architectures": ["LlamaForCausalLMEagle3"]}, None, "weights of an eagle head, while its config says eagle3"),
        ({"norm_before_fc": True}, {}, "lacks input_norm.weight"),
        ({"fc_norm": True, "norm_before_fc": True}, {}, "norm_joined and norm_inputs exclude each other"),
        ({"eagle_config": {"use_last_layernorm": False}}, {}, "use_last_layernorm False .* not supported"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, {}, "use_aux_hidden_state False .* not supported"),
        ({"parallel_draft_step": 4}, {}, "parallel_draft_step 4"),
        ({"attention_bias": True}, {}, r"lacks midlayer.self_attn.\w_proj.bias"),
    ],
)
def test_published_config_is_believed(
    target: CausalLM, tmp_path: Path, fields: dict[str, Any], more: dict[str, Tensor] | None, message: str
) -> None:
    if more is None:
        published(tmp_path, "layers.0.", 2 * H, {}, **fields)
    else:
        published(tmp_path, "midlayer.", 3 * H, {**eagle3_weights(), **more}, draft_vocab_size=DRAFT, **fields)
    with pytest.raises(ValueError, match=message):
        load_head(tmp_path, target)


@pytest.mark.parametrize(
    "name", ["lm_head.weight", "norm.weight", "midlayer.hidden_norm.weight", "midlayer.mlp.up_proj.weight"]
)
def test_published_eagle3_weight_that_is_missing_is_named(target: CausalLM, tmp_path: Path, name: str) -> None:
    tensors = published(tmp_path, "midlayer.", 3 * H, eagle3_weights(), draft_vocab_size=DRAFT)
    del tensors[name]
    save_file(tensors, tmp_path / WEIGHTS)
    with pytest.raises(ValueError, match=f"lacks {name}"):
        load_head(tmp_path, target)


@pytest.mark.parametrize("name", ["no-such-head", "", "../models"])
def test_shipped_head_lists_what_there_is(name: str) -> None:
    with pytest.raises(FileNotFoundError, match=r"comes with specops; there are: "):
        shipped_head(name)
