"""A generation request and what became of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(eq=False)
class Request:
    """One prompt and its answer.

    Attributes:
        prompt: token ids, at least one.
        max_new_tokens: most tokens to emit.
        stop_token_ids: a token that ends the answer; it is the answer's last.
        tokens: ids emitted so far.
        margins: for each, the gap between the target's two best logits where it was chosen.
        accept_lens: tokens emitted by each round, before stopping cut them.
        finish_reason: ``"stop"``, ``"length"`` (max_new_tokens), ``"context"`` (end of the context), or None.
    """

    prompt: list[int]
    max_new_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    tokens: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    accept_lens: list[int] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def emit(self, tokens: Sequence[int], margins: Sequence[float], max_context: int) -> list[int]:
        """Append tokens until one ends the answer; what was appended."""
        taken = []
        for token, margin in zip(tokens, margins, strict=True):
            self.tokens.append(token)
            self.margins.append(margin)
            taken.append(token)
            if token in self.stop_token_ids:
                self.finish_reason = "stop"
            elif len(self.tokens) >= self.max_new_tokens:
                self.finish_reason = "length"
            elif len(self.prompt) + len(self.tokens) >= max_context:
                self.finish_reason = "context"
            if self.finished:
                break
        return taken
