"""One prompt and what has been decoded of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specops.spec.sampling import SamplingParams
from specops.spec.text import TextStream


@dataclass(eq=False)
class Request:
    """One prompt and its answer.

    Attributes:
        prompt: token ids, at least one.
        max_new_tokens: most tokens to emit.
        stop_token_ids: a token that ends the answer; it is the answer's last.
        sampling: how tokens are chosen; its seed is set once the request is added.
        stream: makes the text and finds stop strings; None for a request of tokens alone.
        logprobs: for each token, its log-probability in the target's logits as they come, before penalty, temperature and
            filters; None if not asked for.
        tokens: ids emitted so far.
        margins: for each, the gap between the target's two best logits where it was chosen.
        accept_lens: tokens emitted by each round, before stopping cut them.
        finish_reason: ``"stop"``, ``"length"`` (max_new_tokens), ``"context"`` (end of the context), ``"cancelled"``, or
            None.
        stop_reason: the token id or the string that stopped it.
    """

    prompt: list[int]
    max_new_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stream: TextStream | None = None
    logprobs: list[float] | None = None
    tokens: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    accept_lens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def text(self) -> str:
        """The answer so far, without an end that may yet become a stop string; whole once finished.

        Raises:
            ValueError: the engine has no tokenizer.
        """
        if self.stream is None:
            raise ValueError("this request has no text: give the engine a tokenizer, or decode request.tokens")
        return self.stream.text if self.finished else self.stream.settled

    def emit(
        self,
        tokens: Sequence[int],
        margins: Sequence[float],
        max_context: int,
        logprobs: Sequence[float] | None = None,
    ) -> list[int]:
        """Append tokens until one ends the answer; what was appended."""
        taken = []
        for place, (token, margin) in enumerate(zip(tokens, margins, strict=True)):
            self.tokens.append(token)
            self.margins.append(margin)
            if self.logprobs is not None:
                assert logprobs is not None
                self.logprobs.append(logprobs[place])
            taken.append(token)
            stopped = self.stream.push(token) if self.stream is not None else None
            if token in self.stop_token_ids:
                self.finish_reason, self.stop_reason = "stop", token
            elif stopped is not None:
                self.finish_reason, self.stop_reason = "stop", stopped
            elif len(self.tokens) >= self.max_new_tokens:
                self.finish_reason = "length"
            elif len(self.prompt) + len(self.tokens) >= max_context:
                self.finish_reason = "context"
            if self.finished:
                if self.stream is not None:
                    self.stream.finish()
                break
        return taken
