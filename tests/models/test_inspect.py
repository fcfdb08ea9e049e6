"""What ``inspect_directory`` says about good and bad folders; that it says what loading would.

OMP_NUM_THREADS=1 pytest tests/models/test_inspect.py
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from safetensors.torch import load_file, save_file

from specops.cli import main
from specops.models.config import ModelConfig
from specops.models.eagle import EagleConfig, EagleHead
from specops.models.eagle_checkpoint import load_head, save_head
from specops.models.inspect import inspect_directory
from specops.models.llama import CausalLM

SPECULATORS = Path(__file__).parent / "data" / "speculators_plain"


def make_target(hidden: int = 16, vocab: int = 64, layers: int = 8) -> CausalLM:
    sizes = {"vocab_size": vocab, "hidden_size": hidden, "intermediate_size": 32, "num_layers": layers}
    config = ModelConfig(**sizes, num_heads=2, num_kv_heads=1, head_dim=8, max_position_embeddings=64)
    return CausalLM(config).requires_grad_(False)


def save_target(directory: Path, **changes: Any) -> Path:
    """A Llama folder of small random weights."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64}
    config = transformers.LlamaConfig(**{**sizes, **heads, **changes})
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def test_report_reads_as_prose() -> None:
    text = inspect_directory(SPECULATORS, make_target(hidden=32)).text().replace(str(SPECULATORS), "HEAD")
    assert_expected_inline(
        text,
        """\
HEAD: an eagle3 draft head in speculators format
  layers         1 of width 16, 2 heads (1 KV) of 8 dims
  reads          3 hidden states of the target, each 16 wide
  target layers  after 2, 4, 5 layers
  layer ids      [2, 4, 5] at the top of the config, read as layers_run
  vocabulary     proposes 16 of the target's 64 tokens
  embedding      its own
  LM head        its own
  norms          before the LM head
  carried state  before the final norm
  weights        4544 in float32, 0.0182 MB
It does not fit the given llama model:
  target hidden size 16, the target has 32""",
    )


@pytest.mark.parametrize(
    ("shape", "misfit"),
    [
        ({}, None),
        ({"hidden": 32}, "target hidden size 16, the target has 32"),
        ({"vocab": 96}, "vocabulary 64, the target has 96"),
        ({"layers": 4}, r"aux layer ids \[2, 4, 5\] do not fit a target of 4 layers"),
    ],
)
def test_fit_is_what_loading_finds(shape: dict[str, int], misfit: str | None) -> None:
    target = make_target(**shape)
    report = inspect_directory(SPECULATORS, target)
    assert report.problems == ()
    assert report.fits is (misfit is None)
    if misfit is None:
        load_head(SPECULATORS, target)
        return
    with pytest.raises(ValueError, match=misfit):
        load_head(SPECULATORS, target)
    assert len(report.misfits) == 1
    with pytest.raises(ValueError, match=re.escape(report.misfits[0])):
        load_head(SPECULATORS, target)


def test_without_a_target_nothing_is_said_about_fit() -> None:
    report = inspect_directory(SPECULATORS)
    assert report.fits is None
    assert report.ok
    assert "fit" not in report.text()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"d2t": None}, "lacks d2t"),
        ({"fc.weight": None}, "lacks fc.weight"),
        ({"norm.weight": None}, "lacks norm.weight"),
        ({"extra": torch.zeros(3)}, "unexpected extra"),
        ({"fc.weight": torch.zeros(16, 47)}, r"fc.weight has shape \[16, 47\], which cannot read 3 hidden states"),
    ],
)
def test_what_is_wrong_with_the_head_itself(tmp_path: Path, change: dict[str, Any], problem: str) -> None:
    head = tmp_path / "head"
    shutil.copytree(SPECULATORS, head)
    tensors = {**load_file(head / "model.safetensors"), **change}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, head / "model.safetensors")
    report = inspect_directory(head, make_target())
    assert report.kind == "draft head"
    assert report.fits is False
    with pytest.raises(ValueError, match=problem):
        load_head(head, make_target())
    assert problem.replace("\\", "") in report.problems[0]


def test_cut_off_weights_are_a_problem_not_a_crash(tmp_path: Path) -> None:
    head = tmp_path / "head"
    shutil.copytree(SPECULATORS, head)
    whole = (head / "model.safetensors").read_bytes()
    (head / "model.safetensors").write_bytes(whole[:-100])
    assert "is broken or cut off" in inspect_directory(head).text()


def test_own_head_names_its_target_and_layers(tmp_path: Path) -> None:
    target = make_target()
    config = EagleConfig.for_target(target.config, format="eagle3", name="tiny")
    save_head(EagleHead(config, target.embed_tokens, target.lm_head.weight), tmp_path / "head")
    report = inspect_directory(tmp_path / "head", target)
    assert report.summary == "an eagle3 draft head in specops' own format"
    assert report.facts["target layers"] == "after 2, 4, 5 layers"
    assert report.facts["made for"] == "tiny"
    assert report.fits


def test_eagle_1_head_is_told_from_a_model_by_its_weights(tmp_path: Path) -> None:
    target = make_target()
    options = {"norm_inputs": False, "input_norm": False, "final_norm": False}
    head = EagleHead(EagleConfig.for_target(target.config, **options), target.embed_tokens, target.lm_head.weight)
    save_head(head, tmp_path / "head")
    fields = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 16, "intermediate_size": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "num_hidden_layers": 1, "vocab_size": 64}
    (tmp_path / "head" / "config.json").write_text(json.dumps({**fields, **heads}))
    report = inspect_directory(tmp_path / "head", target)
    assert report.summary == "an eagle draft head in published EAGLE format"
    assert report.facts["norms"] == "none around the layers"
    assert report.fits


def test_head_with_unknown_target_layers_says_what_is_meant(tmp_path: Path) -> None:
    head = tmp_path / "head"
    shutil.copytree(SPECULATORS, head)
    fields = json.loads((head / "config.json").read_text())
    del fields["eagle_aux_hidden_state_layer_ids"]
    (head / "config.json").write_text(json.dumps(fields))
    report = inspect_directory(head, make_target())
    assert report.facts["target layers"] == "not named; the usual ones are meant: after 2 layers, half of them, all but 3"
    assert report.fits


def test_target_model_is_described_and_checked(tmp_path: Path) -> None:
    report = inspect_directory(save_target(tmp_path / "model"))
    assert (report.kind, report.ok) == ("target model", True)
    assert report.facts["layers"] == "8 of width 16, 2 heads (1 KV) of 8 dims"
    assert report.facts["context"] == "64 tokens"
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    del tensors["model.layers.3.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    assert inspect_directory(tmp_path / "model").problems[0].startswith("lacks model.layers.3.mlp.up_proj.weight")


def test_target_given_as_head_does_not_fit(tmp_path: Path) -> None:
    report = inspect_directory(save_target(tmp_path / "model"), make_target())
    assert report.misfits == ("it is a target model, not a draft head",)


def test_folder_that_holds_neither(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    report = inspect_directory(tmp_path)
    assert (report.kind, report.ok) == ("unknown", False)
    assert "model_type 'bert' is not supported" in report.problems[0]
    with pytest.raises(FileNotFoundError, match="there is no"):
        inspect_directory(tmp_path / "nowhere")


def test_no_weight_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the maps' values are: everything else stays on the meta device."""
    from specops.models import inspect as module

    seen = []
    original = module.read_head_files

    def recording(*args: Any, **options: Any) -> Any:
        result = original(*args, **options)
        seen.append(result[1])
        return result

    monkeypatch.setattr(module, "read_head_files", recording)
    inspect_directory(SPECULATORS, make_target())
    (tensors,) = seen
    assert {name for name, tensor in tensors.items() if tensor.device.type != "meta"} == {"d2t", "t2d"}


def test_command_prints_words_or_json_and_its_code_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(save_target(tmp_path / "model"))
    other = str(save_target(tmp_path / "other", vocab_size=96))
    assert main(["inspect", str(SPECULATORS), "--target", model]) == 0
    assert "It fits" in capsys.readouterr().out
    assert main(["inspect", str(SPECULATORS), "--target", other, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["fits"], report["kind"]) == (False, "draft head")
    assert report["misfits"] == ["vocabulary 64, the target has 96"]
    assert main(["inspect", str(tmp_path / "nowhere")]) == 2
    assert "there is no" in capsys.readouterr().err
