"""Folders written for vLLM are read back, by transformers and by the reader of published heads.

OMP_NUM_THREADS=1 pytest tests/integrations/test_vllm_checkpoints.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from specops.integrations.vllm.checkpoints import write_head, write_target  # noqa: E402
from specops.models.eagle import EagleConfig, EagleHead  # noqa: E402
from specops.models.eagle_checkpoint import load_head  # noqa: E402
from tests.spec.toys import greedy, small_llama, target_of  # noqa: E402

PROMPT = [3, 1, 4, 1, 5]


def eagle3_head(target: Any, **options: Any) -> EagleHead:
    """A random head with a draft vocabulary of 16 that skips ids, and norms that are not ones."""
    config = EagleConfig.for_target(target.config, format="eagle3", draft_vocab_size=16, **options)
    d2t = torch.arange(16) * 2 + 1
    head = EagleHead(config, target.embed_tokens, target.lm_head.weight, d2t=d2t)
    for parameter in head.parameters():
        parameter.data.uniform_(0.5, 1.5)
    return head.eval().requires_grad_(False)


def test_a_target_is_what_transformers_reads_back(tmp_path: Path) -> None:
    model = small_llama()
    folder = write_target(model, tmp_path / "target")
    again = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    assert type(again) is type(model)
    assert greedy(again, PROMPT, 12) == greedy(model, PROMPT, 12)


def test_a_target_in_another_dtype(tmp_path: Path) -> None:
    folder = write_target(small_llama(), tmp_path / "half", dtype=torch.bfloat16)
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    again = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    assert again.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "options", [{}, {"norm_inputs": False}, {"norm_inputs": False, "norm_joined": True}, {"num_layers": 2}]
)
def test_a_head_is_read_back_with_every_weight(tmp_path: Path, options: dict[str, Any]) -> None:
    target = target_of(small_llama(num_hidden_layers=4))
    head = eagle3_head(target, **options)
    folder = write_head(head, tmp_path / "head")
    again = load_head(folder, target, format="eagle3")
    assert again.config.aux_layers == head.config.aux_layers
    kept = dict(again.named_parameters())
    for name, parameter in head.named_parameters():
        assert torch.equal(kept[name], parameter), name
    assert head.d2t is not None
    assert again.d2t is not None
    assert torch.equal(again.d2t, head.d2t)
    # Rows of the target's LM head are written, so that the file stands alone.
    rows = target.lm_head.weight[torch.arange(16) * 3 + 1]
    assert torch.equal(again.lm_head_weight, rows)


def test_a_folder_that_is_there_stays(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    assert write_target("no such source", tmp_path / "there") == tmp_path / "there"
    assert list((tmp_path / "there").iterdir()) == []


@pytest.mark.parametrize(
    ("options", "named"),
    [({"format": "eagle"}, "format eagle with default rope"), ({"format": "eagle3", "qk_norm": True}, "qk_norm")],
)
def test_a_head_that_vllm_has_no_class_for_is_refused(tmp_path: Path, options: dict[str, Any], named: str) -> None:
    target = target_of(small_llama(num_hidden_layers=4))
    config = EagleConfig.for_target(target.config, **options)
    head = EagleHead(config, target.embed_tokens, target.lm_head.weight)
    with pytest.raises(ValueError, match=f"cannot be this one: {named}"):
        write_head(head, tmp_path / "head")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import safetensors.torch

    def full(*args: Any, **options: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(OSError, match="no space"):
        write_target(small_llama(), tmp_path / "target")
    assert list(tmp_path.iterdir()) == []
