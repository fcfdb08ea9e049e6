"""Tokens per second of plain and of EAGLE decoding over batch sizes, with the same weights, prompts and runner mode.

Compiling and capturing happen before the clocks start. Answers end where the model ends them, so that acceptance is that
of real text; the figure is emitted tokens over wall time, prefill included, and the median of the repeats.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from specops.api import Models
from specops.spec import Engine, EngineStats, Request, SpecConfig

Say = Callable[[str], None]


def run_bench(
    models: Models,
    prompts: Sequence[str],
    *,
    batch_sizes: Sequence[int] = (1, 2, 4, 8),
    config: SpecConfig | None = None,
    max_new_tokens: int = 128,
    max_context: int | None = None,
    mode: str = "auto",
    repeats: int = 3,
    phases: bool = False,
    say: Say = lambda text: None,
) -> dict[str, Any]:
    """Measure both ways of decoding at every batch size.

    Args:
        models: from :func:`specops.load_models`, with a head.
        prompts: user turns; a batch takes them in turn, from the first again when there are too few.
        batch_sizes: prompts decoded together.
        config: shape of a round.
        max_new_tokens, max_context, mode: as for :class:`specops.Engine`.
        repeats: runs of each batch; the median counts.
        phases: also run the smallest batch with its phases apart.
        say: told about progress.

    Returns:
        The figures, as ``specops bench --json`` prints them.

    Raises:
        ValueError: no head, no prompts, or a batch size or number of repeats below 1.
    """
    if models.head is None:
        raise ValueError("a bench compares decoding with and without a draft head, and there is none; give --draft")
    if not prompts or not batch_sizes or min(batch_sizes) < 1 or repeats < 1:
        raise ValueError("a bench needs prompts, batch sizes of 1 or more, and 1 repeat or more")
    sizes = sorted(set(batch_sizes))
    ids = [models.encode(prompts[index % len(prompts)]) for index in range(sizes[-1])]
    rows: list[dict[str, Any]] = [{"batch": size} for size in sizes]
    common: dict[str, Any] = {"max_requests": sizes[-1], "max_context": max_context, "mode": mode}
    counts: Counter[int] = Counter()
    answers: dict[str, list[list[Request]]] = {}
    for name, head in (("plain", None), ("eagle", models.head)):
        # One engine at a time: it gives the models their caches.
        engine = Engine(models.target, head, config, **common)
        say(f"{name}: preparing ({engine.mode})")
        engine.warm_up()
        engine.generate(ids, max_new_tokens=4)
        answers[name] = []
        for row in rows:
            runs = [_timed(engine, models, ids[: row["batch"]], max_new_tokens) for _ in range(repeats)]
            seconds = statistics.median(seconds for _, seconds in runs)
            requests = runs[0][0]
            answers[name].append(requests)
            row[f"{name}_tokens_per_s"] = round(sum(len(request.tokens) for request in requests) / seconds, 2)
            if head is not None:
                lens = [length for request in requests for length in request.accept_lens]
                counts.update(lens)
                row["accepted_per_round"] = round(sum(lens) / max(1, len(lens)), 3)
            say(f"{name}: batch {row['batch']}: {row[f'{name}_tokens_per_s']} tokens/s")
    for row, plain, eagle in zip(rows, answers["plain"], answers["eagle"], strict=True):
        row["speedup"] = round(row["eagle_tokens_per_s"] / max(row["plain_tokens_per_s"], 1e-9), 3)
        row["identical_answers"] = sum(a.tokens == b.tokens for a, b in zip(plain, eagle, strict=True))
    figures: dict[str, Any] = {
        "device": device_name(engine.device),
        "dtype": str(engine.dtype).removeprefix("torch."),
        "mode": engine.mode,
        "num_steps": engine.config.num_steps,
        "topk": engine.config.topk,
        "num_draft_tokens": engine.config.num_draft_tokens,
        "max_new_tokens": max_new_tokens,
        "repeats": repeats,
        "rows": rows,
        "accept_lens": histogram(counts),
    }
    if phases:
        say(f"phases of a round at batch {sizes[0]}")
        figures["seconds_by_phase"] = phase_seconds(models, ids[: sizes[0]], config, max_new_tokens, **common)
    return figures


def phase_seconds(
    models: Models, ids: Sequence[Sequence[int]], config: SpecConfig | None, max_new_tokens: int, **options: Any
) -> dict[str, float]:
    """Seconds of prefill, draft, verify, draft-extend and reading back, of one run with a runner for each."""
    engine = Engine(models.target, models.head, config, split=True, **options)
    engine.warm_up()
    engine.generate(ids, max_new_tokens=4)
    engine.stats = EngineStats()
    _timed(engine, models, ids, max_new_tokens)
    return {name: round(seconds, 4) for name, seconds in engine.stats.seconds.items()}


def histogram(lens: Iterable[int]) -> dict[str, int]:
    """How often a round emitted how many tokens; keys are text, as in JSON."""
    counts = Counter(lens) if not isinstance(lens, Counter) else lens
    return {str(length): counts[length] for length in sorted(counts)}


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def _timed(engine: Engine, models: Models, ids: Sequence[Sequence[int]], max_new_tokens: int) -> tuple[list[Request], float]:
    stops = models.target.config.eos_token_ids
    started = time.perf_counter()
    requests = engine.generate(ids, max_new_tokens=max_new_tokens, stop_token_ids=stops)
    if engine.device.type == "cuda":
        torch.cuda.synchronize(engine.device)
    return requests, time.perf_counter() - started
