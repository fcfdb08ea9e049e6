"""EAGLE-3 heads of the ``speculators`` package: its own module's logits over several draft steps are the yardstick.

OMP_NUM_THREADS=1 pytest tests/models/test_speculators.py

The committed heads were written, and their logits computed, by speculators 0.9.0 (``speculators_fixture.py``). Where that
package is installed, fresh heads are compared too.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import speculators_fixture as written
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specops import QueryLayout, attention_metadata
from specops.models.config import ModelConfig
from specops.models.eagle import EagleHead
from specops.models.eagle_checkpoint import load_head, save_head
from specops.models.llama import CausalLM

PAGES = torch.tensor([[5, 2, 7, 3]], dtype=torch.int32)


@pytest.fixture
def target() -> CausalLM:
    torch.manual_seed(7)
    sizes = {"vocab_size": written.VOCAB, "hidden_size": written.HIDDEN, "intermediate_size": 32, "num_layers": 8}
    config = ModelConfig(**sizes, num_heads=2, num_kv_heads=1, head_dim=8, max_position_embeddings=64)
    return CausalLM(config).requires_grad_(False)


def rows(head: EagleHead, ids: Tensor, hidden: Tensor, seq_len: int) -> Tensor:
    seq_lens = torch.tensor([seq_len], dtype=torch.int32)
    meta = attention_metadata(PAGES, seq_lens, QueryLayout.uniform(ids.shape[0]), 4)
    return head(ids, hidden, meta)


def assert_same_logits(head: EagleHead, answers: dict[str, Tensor], steps: int) -> None:
    """Every row is drafted from: a prefix of true hidden states, then steps on the head's own carried state."""
    ids, hidden, wanted = answers["input_ids"], answers["hidden_states"], answers["logits"]
    head.set_backend("reference")
    for last in range(written.ROWS):
        head.allocate_caches(8, 4)
        state = rows(head, ids[: last + 1], hidden[: last + 1], last + 1)[-1:]
        for step in range(steps):
            if step and last + step < written.ROWS:
                state = rows(head, ids[last + step : last + step + 1], state, last + 1 + step)
            elif step:
                break
            torch.testing.assert_close(head.compute_logits(state)[0], wanted[step, last], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("name", written.HEADS)
def test_committed_head_gives_the_packages_logits(target: CausalLM, name: str) -> None:
    head = load_head(written.DATA / f"speculators_{name}", target, format="eagle3")
    answers = load_file(written.DATA / f"speculators_{name}.safetensors")
    assert answers["logits"].std() > 0.1
    assert_same_logits(head, answers, written.COMPARABLE_STEPS.get(name, written.STEPS))


@pytest.mark.parametrize("name", written.HEADS)
def test_fresh_head_gives_the_packages_logits(target: CausalLM, tmp_path: Path, name: str) -> None:
    pytest.importorskip("speculators", reason="needs the speculators package, 0.9 or later, to compute the yardstick")
    answers = written.write_head(name, tmp_path / "head", seed=3)
    assert_same_logits(load_head(tmp_path / "head", target), answers, written.COMPARABLE_STEPS.get(name, written.STEPS))


def test_config_is_read_as_written(target: CausalLM) -> None:
    plain, residual, carried, window = (
        load_head(written.DATA / f"speculators_{name}", target).config for name in ("plain", "residual", "carried", "window")
    )
    assert plain.aux_layers == (2, 4, 5)
    assert plain.rope.theta == 500.0
    assert (plain.vocab_size, plain.draft_vocab_size, plain.rms_norm_eps) == (64, 16, 1e-5)
    assert (plain.own_embedding, plain.own_lm_head, plain.norm_inputs, plain.norm_joined) == (True, True, False, False)
    assert (residual.norm_joined, residual.normed_residual, residual.output_bias) == (True, True, True)
    assert not residual.reduced_vocab
    assert (carried.norm_inputs, carried.carry_normed, carried.qk_norm, carried.num_layers) == (True, True, True, 2)
    assert window.layer_windows == (3,)


@pytest.mark.parametrize("name", written.HEADS)
def test_saved_again_in_the_own_format_it_answers_alike(target: CausalLM, tmp_path: Path, name: str) -> None:
    save_head(load_head(written.DATA / f"speculators_{name}", target), tmp_path / "head")
    answers = load_file(written.DATA / f"speculators_{name}.safetensors")
    assert_same_logits(load_head(tmp_path / "head", target), answers, 1)


def test_draft_ids_map_by_the_files_offsets(target: CausalLM) -> None:
    head = load_head(written.DATA / "speculators_plain", target)
    assert torch.equal(head.to_target_ids(torch.arange(written.DRAFT)), written.kept_tokens(written.DRAFT))


def changed(tmp_path: Path, name: str, fields: dict[str, Any], **weights: Tensor | None) -> Path:
    """A copy of a committed head with config fields and weights changed; ``__`` stands for a dot, None removes."""
    directory = tmp_path / "head"
    shutil.copytree(written.DATA / f"speculators_{name}", directory)
    config = {**json.loads((directory / "config.json").read_text()), **fields}
    (directory / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    tensors = load_file(directory / "model.safetensors")
    for key, tensor in weights.items():
        tensors.pop(key.replace("__", "."), None)
        if tensor is not None:
            tensors[key.replace("__", ".")] = tensor
    save_file(tensors, directory / "model.safetensors")
    return directory


def test_what_a_training_run_left_over_is_passed_by(target: CausalLM, tmp_path: Path) -> None:
    left = {"verifier_lm_head__weight": torch.zeros(16, 16), "verifier_norm__weight": torch.zeros(16)}
    head = load_head(changed(tmp_path, "plain", {}, **left), target)
    assert_same_logits(head, load_file(written.DATA / "speculators_plain.safetensors"), 1)


def test_missing_embedding_is_shared_with_the_target(target: CausalLM, tmp_path: Path) -> None:
    head = load_head(changed(tmp_path, "plain", {}, embed_tokens__weight=None), target)
    assert head.embed_tokens is target.embed_tokens


WRONG = [
    pytest.param("plain", {"speculators_model_type": "dflash"}, {}, "a speculators model of type 'dflash'", id="other type"),
    pytest.param("plain", {}, {"lm_head__weight": None}, "lacks lm_head.weight", id="no lm head"),
    pytest.param("plain", {}, {"d2t": None}, "lacks d2t", id="no map"),
    pytest.param("carried", {}, {"fc_norm__1__weight": None}, "lacks fc_norm.1.weight", id="no fc norm"),
    pytest.param(
        "carried",
        {},
        {"layers__1__self_attn__q_norm__weight": None},
        r"lacks layers.1.self_attn.q_norm.weight",
        id="no q norm",
    ),
    pytest.param("residual", {}, {"input_norm__weight": None}, "lacks input_norm.weight", id="no joined norm"),
    pytest.param(
        "residual", {}, {"layers__0__self_attn__o_proj__bias": None}, "lacks layers.0.self_attn.o_proj.bias", id="no bias"
    ),
    pytest.param("plain", {"norm_before_fc": True}, {}, "lacks input_norm.weight", id="norm in the config alone"),
    pytest.param("plain", {"target_hidden_size": 128}, {}, "target hidden size 128, the target has 16", id="target"),
    pytest.param(
        "plain", {"eagle_aux_hidden_state_layer_ids": [2, 16, 29]}, {}, "do not fit a target of 8 layers", id="aux layers"
    ),
    pytest.param("plain", {"transformer_layer_config": {"model_type": "laguna"}}, {}, "model_type 'laguna'", id="layers"),
    pytest.param(
        "plain", {"speculators_model_type": None, "transformer_layer_config": None}, {}, "lacks format", id="no config"
    ),
]


@pytest.mark.parametrize(("name", "fields", "weights", "message"), WRONG)
def test_message_names_what_is_wrong(
    target: CausalLM, tmp_path: Path, name: str, fields: dict[str, Any], weights: dict[str, Tensor | None], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load_head(changed(tmp_path, name, fields, **weights), target)
