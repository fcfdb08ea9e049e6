"""The demo: a real model answers chat prompts by EAGLE decoding, then the same by plain decoding, side by side.

Both runs use the same weights, backend, runner mode and prompts, in one process. Compiling and capturing happen before the
clocks start and are reported on their own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from specops.api import Models, load_models
from specops.bench import device_name, histogram, phase_seconds
from specops.divergence import first_divergence, rounding_noise
from specops.ops import native
from specops.spec import Engine, EngineStats, Request, SpecConfig
from specops.spec.text import TextStream

__all__ = ["PROMPTS", "Models", "load_models", "run_demo"]

PROMPTS = (
    "Explain in a few sentences why the sky is blue.",
    "Write a short story about a robot who learns to paint.",
    "What are three tips for learning a new language?",
    "Describe how a bicycle works to a ten-year-old.",
)
Say = Callable[[str], None]
OnText = Callable[[str], None]


def divergence_report(
    target: Any, ids: Sequence[Sequence[int]], ours: Sequence[Request], plain: Sequence[Request], rows: int
) -> dict[str, Any] | None:
    """Where two runs first emit different tokens, and whether rounding explains it; None if nowhere.

    ``noise_bound`` is twice the largest difference between the target's logits computed one row and ``rows`` rows at a
    time over the plain answer; a gap within it is a tie that fell the other way, one above it is a ``fault``.
    """
    found = first_divergence(ours, plain)
    if found is None:
        return None
    bound = None
    tokens = [*ids[found.prompt], *plain[found.prompt].tokens]
    if len(tokens) >= len(ids[found.prompt]) + rows:
        bound = 2 * rounding_noise(target, tokens, rows, start=len(ids[found.prompt]))
    fault = bound is None or found.top2_gap is None or found.top2_gap > bound
    return {**asdict(found), "noise_bound": bound, "fault": fault}


def run_demo(
    models: Models,
    prompts: Sequence[str] = PROMPTS,
    *,
    config: SpecConfig | None = None,
    max_new_tokens: int = 128,
    max_requests: int = 1,
    max_context: int | None = None,
    mode: str = "auto",
    phases: bool = False,
    say: Say = lambda text: None,
    on_text: OnText | None = None,
) -> dict[str, Any]:
    """Answer ``prompts`` by EAGLE decoding and by plain decoding, and compare.

    Args:
        models: from :func:`load_models`, with a head.
        prompts: user turns.
        config: shape of a round.
        max_new_tokens: most tokens an answer has.
        max_requests: prompts decoded together.
        max_context: most tokens of a request.
        mode: runner mode.
        phases: run once more with the phases of a round apart, for ``seconds_by_phase``.
        say: told about progress.
        on_text: gets the first prompt's answer as it grows.

    Returns:
        The figures, as ``specops demo --json`` prints them.
    """
    ids = [models.chat(prompt) for prompt in prompts]
    longest = max(map(len, ids)) + max_new_tokens
    limit = min(models.target.config.max_position_embeddings, models.head.config.max_position_embeddings)
    context = min(longest, limit) if max_context is None else max_context
    common: dict[str, Any] = {"max_requests": max_requests, "max_context": context, "mode": mode}
    stops = models.target.config.eos_token_ids
    runs: dict[str, tuple[list[Request], float, Engine]] = {}
    warm_seconds: dict[str, float] = {}
    first_token: float | None = None
    if next(models.target.parameters()).device.type == "cpu" and mode in ("auto", "eager") and native.must_compile():
        say("compiling the CPU kernels, once on this machine")
        native.library()
    for name, head in (("eagle", models.head), ("plain", None)):
        engine = Engine(models.target, head, config, **common)
        say(f"{name}: preparing the {', '.join(engine.runners)} steps ({engine.mode})")
        started = time.perf_counter()
        engine.warm_up(lambda done, total, what: say(f"  {what} ({done}/{total})"))
        # One short answer first: lazy kernel compilation and memory growth are not decoding speed.
        engine.generate(ids[:1], max_new_tokens=4)
        warm_seconds[name] = time.perf_counter() - started
        engine.stats = EngineStats()
        say(f"{name}: decoding {len(ids)} prompts")
        stream = _Stream(models.tokenizer, on_text if name == "eagle" else None)
        started = time.perf_counter()

        def hear(request: Request, tokens: list[int], stream: _Stream = stream, started: float = started) -> None:
            nonlocal first_token
            if first_token is None:
                first_token = time.perf_counter() - started
            stream.add(request, tokens)

        requests = engine.generate(ids, max_new_tokens=max_new_tokens, stop_token_ids=stops, on_tokens=hear)
        if engine.device.type == "cuda":
            torch.cuda.synchronize(engine.device)
        runs[name] = (requests, time.perf_counter() - started, engine)
        stream.end()
    (ours, seconds, engine), (plain, plain_seconds, plain_engine) = runs["eagle"], runs["plain"]
    tokens, plain_tokens = sum(len(r.tokens) for r in ours), sum(len(r.tokens) for r in plain)
    divergence = divergence_report(models.target, ids, ours, plain, engine.config.width)
    seconds_by_phase = {name: round(value, 3) for name, value in engine.stats.seconds.items()}
    if phases:
        say("running once more with the phases of a round apart")
        seconds_by_phase = phase_seconds(models, ids, config, max_new_tokens, **common)
    reports = {**engine.explain(), "plain_decode": plain_engine.explain()["decode"]}
    return {
        "tokens": tokens,
        "rounds": engine.stats.rounds,
        "accepted_per_round": round(engine.stats.accepted_per_round, 3),
        "tokens_per_s": round(tokens / seconds, 2),
        "plain_tokens_per_s": round(plain_tokens / plain_seconds, 2),
        "speedup": round((tokens / seconds) / (plain_tokens / plain_seconds), 3),
        "identical_to_plain": divergence is None,
        "first_divergence": divergence,
        "dtype": str(engine.dtype).removeprefix("torch."),
        "device": device_name(engine.device),
        "mode": engine.mode,
        "num_steps": engine.config.num_steps,
        "topk": engine.config.topk,
        "num_draft_tokens": engine.config.num_draft_tokens,
        "max_requests": max_requests,
        "first_token_s": round(first_token or 0.0, 3),
        "warm_up_s": {name: round(value, 2) for name, value in warm_seconds.items()},
        "seconds_by_phase": seconds_by_phase,
        "accept_lens": histogram(length for request in ours for length in request.accept_lens),
        "graphs": {
            name: {"mode": report.mode, "captured": report.captured, "reason": report.reason}
            for name, report in reports.items()
        },
        "texts": [models.tokenizer.decode(r.tokens, skip_special_tokens=True) for r in ours],
    }


class _Stream:
    """Shows the first request's text as it comes."""

    def __init__(self, tokenizer: Any, on_text: OnText | None) -> None:
        self.on_text = on_text
        self.text = TextStream(lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=True)))
        self.first: Request | None = None
        self.shown = 0

    def add(self, request: Request, tokens: list[int]) -> None:
        self.first = self.first or request
        if self.on_text is None or request is not self.first:
            return
        for token in tokens:
            self.text.push(token)
        self._show()

    def end(self) -> None:
        if self.on_text is not None:
            self.text.finish()
            self._show()

    def _show(self) -> None:
        assert self.on_text is not None
        self.on_text(self.text.text[self.shown :])
        self.shown = len(self.text.text)
