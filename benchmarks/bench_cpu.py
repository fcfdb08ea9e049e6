"""Decoding one request at a time on a CPU: EAGLE, plain, and transformers' ``generate`` in turn, prompt by prompt.

    python benchmarks/bench_cpu.py --json benchmarks/results/cpu_decode.json

A shared machine's speed changes from minute to minute, so the systems take turns within seconds of each other: every prompt
goes through all of them, over and over until ``--seconds`` are used up, and each keeps its best time for each prompt. A
figure is the answers' tokens over the sum of those times, prefill included. Beside it stands the largest share of the CPUs
that other processes took during one of the timed answers.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench_decode import PROMPTS, cpu_name, cut, label, parse_config, transformers_model

from specops.models import load_target
from specops.models.eagle_checkpoint import load_head, shipped_head
from specops.ops import native
from specops.spec import Engine

Decode = Callable[[list[int]], list[int]]
WARM_TOKENS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="smollm2", help="a GGUF file, a model directory, or smollm2")
    add("--dtypes", default="float32,bfloat16")
    add("--configs", default="3/1", help="steps/topk[/nodes] of each EAGLE run")
    add("--tokens", type=int, default=128, help="most tokens of an answer")
    add("--num-prompts", type=int, default=4)
    add("--seconds", type=float, default=62.0, help="time of each dtype")
    add("--json", type=Path)
    args = parser.parse_args()
    rows = [row for dtype in args.dtypes.split(",") for row in measure(args, dtype)]
    header = {
        "device_name": cpu_name(),
        "date": time.strftime("%Y-%m-%d"),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": __import__("transformers").__version__,
        "compiled_kernels": native.library() is not None,
        **{name: getattr(args, name) for name in ("model", "tokens", "num_prompts")},
        "batch": 1,
    }
    if args.json is not None:
        args.json.write_text(json.dumps({**header, "rows": rows}, indent=1) + "\n", encoding="utf-8")


def measure(args: argparse.Namespace, dtype: str) -> list[dict[str, Any]]:
    """Rows of one dtype."""
    begun = time.perf_counter()
    data = json.loads(PROMPTS.read_text(encoding="utf-8"))
    prompts, stops = data["prompts"][: args.num_prompts], data["eos_token_ids"]
    target = load_target(args.model, dtype=getattr(torch, dtype))
    head = load_head(shipped_head("smollm2-135m"), target)
    peer = transformers_model(args.model, getattr(torch, dtype), "cpu")
    context = max(map(len, prompts)) + args.tokens

    def ours(config: Any) -> Decode:
        # Made anew for each turn: an engine gives the models their caches.
        engine = Engine(target, None if config is None else head, config, max_requests=1, max_context=context)
        engine.generate([prompts[0][:WARM_TOKENS]], max_new_tokens=WARM_TOKENS)
        return lambda prompt: engine.generate([prompt], max_new_tokens=args.tokens, stop_token_ids=stops)[0].tokens

    def theirs(prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt])
        options = {"do_sample": False, "max_new_tokens": args.tokens, "eos_token_id": stops, "pad_token_id": stops[0]}
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = peer.generate(ids, attention_mask=torch.ones_like(ids), **options)
        return cut(out[0, len(prompt) :].tolist(), stops)

    systems: dict[str, Callable[[], Decode]] = {"transformers generate": lambda: theirs, "plain": lambda: ours(None)}
    for config in map(parse_config, args.configs.split(",")):
        systems[f"eagle {label(config)}"] = lambda config=config: ours(config)
    best: dict[tuple[str, int], tuple[float, list[int], float]] = {}
    turns = 0
    # A first turn of everything, however long it takes.
    while turns == 0 or time.perf_counter() - begun < args.seconds:
        for index, prompt in enumerate(prompts):
            for name, make in systems.items():
                if turns and time.perf_counter() - begun > args.seconds:
                    continue
                decode = make()
                before, started = others(), time.perf_counter()
                ids = decode(prompt)
                seconds = time.perf_counter() - started
                share = (others() - before) / seconds / (os.cpu_count() or 1)
                if (name, index) not in best or seconds < best[name, index][0]:
                    best[name, index] = seconds, ids, share
        turns += 1
    rows = []
    for name in systems:
        runs = [best[name, index] for index in range(len(prompts))]
        row: dict[str, Any] = {
            "dtype": dtype,
            "system": name,
            "tokens_per_s": round(sum(len(ids) for _, ids, _ in runs) / sum(seconds for seconds, _, _ in runs), 1),
            "seconds_by_prompt": [round(seconds, 3) for seconds, _, _ in runs],
            "tokens_by_prompt": [len(ids) for _, ids, _ in runs],
            "same_answers_as_transformers": sum(
                ids == best["transformers generate", index][1] for index, (_, ids, _) in enumerate(runs)
            ),
            "same_answers_as_plain": sum(ids == best["plain", index][1] for index, (_, ids, _) in enumerate(runs)),
            "turns": turns,
            "most_cpu_of_others": round(max(share for _, _, share in runs), 3),
        }
        rows.append(row)
    speed = {row["system"]: row["tokens_per_s"] for row in rows}
    for row in rows:
        row["times_plain"] = round(row["tokens_per_s"] / speed["plain"], 2)
        row["times_transformers"] = round(row["tokens_per_s"] / speed["transformers generate"], 2)
        print(json.dumps(row), flush=True)
    return rows


def others() -> float:
    """CPU seconds that other processes have used so far; 0 where the system does not tell."""
    try:
        user, nice, system = map(int, Path("/proc/stat").read_text(encoding="utf-8").split()[1:4])
    except (OSError, ValueError):
        return 0.0
    return (user + nice + system) / os.sysconf("SC_CLK_TCK") - sum(os.times()[:2])


if __name__ == "__main__":
    main()
