"""Time to the first token: prompts join an empty engine and end with the token that prefill chooses.

Side by side in one process: as a replay of a CUDA graph, and by the same forwards launched from Python. What is timed is
``Engine.step``, from queued prompts to tokens on the host; the median of the repeats. Run it from the repository's root:

    python benchmarks/bench_prefill.py --device cuda --lengths 8,40,200,1000 --batch 1,8
    python benchmarks/bench_prefill.py --device cuda --forwards eager        # nothing is compiled: started in seconds
    python benchmarks/bench_prefill.py --dtype float32                       # on a CPU, which has no graphs
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from specops.models import load_target
from specops.models.eagle_checkpoint import load_head, shipped_head
from specops.spec import Engine, SpecConfig
from specops.spec.prefill import Forwards


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    args = parse(argv)
    engine = make_engine(args)
    begun = time.perf_counter()
    engine._forwards.warm_up(engine.pages.max_pages, engine.max_requests)
    graphs = engine._prefill_graphs
    if graphs is not None:
        graphs.warm_up()
    print(f"compiled and captured in {time.perf_counter() - begun:.1f} s", flush=True)
    rows = []
    for batch in args.batch:
        for length in args.lengths:
            row: dict[str, Any] = {"batch": batch, "tokens": length, "forwards": args.forwards}
            for name, used in (("graph", graphs), ("launched", None)):
                engine._prefill_graphs = used
                if name == "graph" and used is None:
                    continue
                times = [join(engine, batch, length, seed) for seed in range(args.repeats + 3)][3:]
                row[f"{name}_ms"] = round(statistics.median(times) * 1e3, 3)
                row[f"{name}_least_ms"] = round(min(times) * 1e3, 3)
            rows.append(row)
            print(row, flush=True)
    if graphs is not None:
        print(graphs.explain())
    if args.json is not None:
        args.json.write_text(json.dumps({"args": {k: str(v) for k, v in vars(args).items()}, "rows": rows}, indent=1))
    return rows


def join(engine: Engine, batch: int, length: int, seed: int) -> float:
    """Seconds from queued prompts to their first tokens."""
    generator = torch.Generator().manual_seed(seed)
    vocab: int = engine.target.config.vocab_size  # type: ignore[union-attr, assignment]
    for _ in range(batch):
        engine.add(torch.randint(0, vocab, (length,), generator=generator).tolist(), max_new_tokens=1)
    if engine.device.type == "cuda":
        torch.cuda.synchronize()
    begun = time.perf_counter()
    finished = engine.step()
    took = time.perf_counter() - begun
    assert len(finished) == batch
    return took


def make_engine(args: argparse.Namespace) -> Engine:
    target = load_target(args.model, dtype=getattr(torch, args.dtype), device=args.device)
    draft = None if args.head == "none" else load_head(args.head, target)
    most = max(args.lengths) + 16
    engine = Engine(
        target, draft, SpecConfig(4, 4, 16) if draft is not None else None, max_requests=max(args.batch), max_context=most
    )
    if args.forwards == "eager":
        aux_layers = () if draft is None else draft.config.aux_layers
        engine._forwards = Forwards(target, draft, engine.page_size, aux_layers=aux_layers)
    return engine


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="as for load_target")
    parser.add_argument("--head", default=str(shipped_head("smollm2-135m")), help="a draft head's folder, or none")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--forwards", choices=("auto", "eager"), default="auto", help="eager: not compiled")
    parser.add_argument("--lengths", type=numbers, default=[8, 40, 200, 1000], help="tokens of a prompt")
    parser.add_argument("--batch", type=numbers, default=[1, 8], help="prompts that join at once")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=Path)
    return parser.parse_args(argv)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    with torch.no_grad():
        main()
