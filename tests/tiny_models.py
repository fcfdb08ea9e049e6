"""A model directory, a head directory and a tokenizer, small enough for tests of whole commands."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specops.models import load_target
from specops.models.eagle_checkpoint import save_head
from tests.spec.toys import greedy, small_llama, untrained_head

WORDS = [f"w{index}" for index in range(63)]


@dataclass
class TinyModels:
    """Directories of a random Llama with 64 words and of an EAGLE head for it, and transformers' own model."""

    model: str
    draft: str
    judge: Any
    tokenizer: Any

    @property
    def arguments(self) -> list[str]:
        """What a command needs to use them."""
        return ["--model", self.model, "--draft", self.draft, "--device", "cpu", "--mode", "eager"]

    def answer(self, prompt: str, count: int) -> str:
        """transformers' greedy answer as text."""
        ids = greedy(self.judge, self.tokenizer(prompt)["input_ids"], count)
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


def save_tiny_models(folder: Path) -> TinyModels:
    """Write both directories below ``folder``."""
    import tokenizers
    import transformers

    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: index for index, word in enumerate([*WORDS, "[UNK]"])}, unk_token="[UNK]")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")
    judge = small_llama()
    judge.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    save_head(untrained_head(load_target(judge)), folder / "head")
    return TinyModels(str(folder / "model"), str(folder / "head"), judge, tokenizer)
