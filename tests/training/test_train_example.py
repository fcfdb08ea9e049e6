"""The training example, all stages, as a user runs it: a model folder in, a head with its card out.

OMP_NUM_THREADS=1 pytest tests/training/test_train_example.py
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from specops.models import load_target
from specops.models.eagle_checkpoint import load_head
from specops.training.chat import chat_prompt, chat_script

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "05_train_eagle_head.py"
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 258 byte tokens with a chat template."""
    folder = tmp_path_factory.mktemp("model")
    vocabulary = {"<|end|>": 0, "<|start|>": 1}
    for piece in sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[piece] = len(vocabulary)
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|end|>", additional_special_tokens=["<|start|>"]
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=0,
        initializer_range=0.3,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def example() -> Any:
    spec = importlib.util.spec_from_file_location("train_eagle_head", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_scripts_are_the_templates_own_pieces(model_folder: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder)
    script = chat_script(tokenizer, openers=("What", "Hi"))
    end = script.end_of_turn
    assert end == 0
    assert tokenizer.decode(script.opening) == "<|start|>user\n"
    assert tokenizer.decode([end, *script.to_answer]) == "<|end|>\n<|start|>assistant\n"
    assert tokenizer.decode([end, *script.to_user]) == "<|end|>\n<|start|>user\n"
    assert script.banned == (1,)
    assert [tokenizer.decode(opener) for opener in script.openers] == ["What", "Hi", ""]
    assert [*script.opening, *tokenizer.encode("Hi"), end, *script.to_answer] == chat_prompt(tokenizer, "Hi")


def test_template_whose_turns_end_with_no_special_token_is_refused(model_folder: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    with pytest.raises(ValueError, match="turns of this template do not end with one special token"):
        chat_script(tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        chat_script(tokenizer)


@pytest.mark.parametrize("format", ["eagle", "eagle3"])
def test_stages_one_by_one(model_folder: Path, tmp_path: Path, format: str, capsys: pytest.CaptureFixture[str]) -> None:
    work, head = tmp_path / "work", tmp_path / "head"
    common = ["--tiny", "--device", "cpu", "--target", str(model_folder), "--work", str(work), "--target-name", "Tiny"]
    common += ["--format", format, "--draft-vocab", "64", "--length", "128", "--batch", "16", "--prompts", "3"]
    for stage in ("data", "train", "eval"):
        figures = example().main([*common, "--stage", stage, "--head", str(head)])
    printed = capsys.readouterr().out
    assert "tokens/s" in printed
    assert "of held-out answer tokens" in printed
    for kind in ("held_out_conversations", "hand_written_prompts"):
        assert len(figures[kind]["acceptance"]) == 6
        assert figures[kind]["chain_3_tokens_per_round"] >= 1
    card = json.loads((head / "card.json").read_text())
    assert card["measured"]["held_out_conversations"] == figures["held_out_conversations"]
    assert card["training"]["steps"] == 50
    assert card["data"]["draft_vocabulary"] == 64
    readme = (head / "README.md").read_text()
    assert "EAGLE draft head for Tiny" in readme
    assert "## Measured" in readme
    loaded = load_head(head, load_target(str(model_folder)))
    assert loaded.config.format == format
    assert loaded.config.draft_vocab_size == 64
    # On from that head, which came without its card.
    (head / "card.json").unlink()
    further = [*common, "--work", str(tmp_path / "further"), "--steps", "1", "--lr", "0", "--init", str(head)]
    for stage in ("data", "train"):
        example().main([*further, "--stage", stage])
    again = load_head(tmp_path / "further" / "head", load_target(str(model_folder)))
    assert again.config.format == format
    for (name, one), (_, other) in zip(loaded.named_parameters(), again.named_parameters(), strict=True):
        torch.testing.assert_close(one, other, msg=name)
    card = json.loads((tmp_path / "further" / "head" / "card.json").read_text())
    assert card["training"]["started_from"] == "a head trained on an unknown number of tokens"
