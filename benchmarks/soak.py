"""Soak: rounds of random batches on a tiny model, for as long as asked, with what must not drift measured all along.

Requests of random length join and leave an engine. Watched are pages (conserved), resident and device memory (bounded),
ids (a sample is compared with plain decoding), and logits and hidden states (finite).

    python benchmarks/soak.py --rounds 100000
    python benchmarks/soak.py --seconds 600 --device cuda --mode direct --json
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch

from specops.models.config import ModelConfig
from specops.models.eagle import EagleConfig, EagleHead
from specops.models.llama import CausalLM
from specops.spec import Engine, SpecConfig

VOCAB, CONTEXT = 64, 64
# Growth after warm-up that is put down to the allocators of Python and of the C library.
ALLOWED_MIB = 64


def main() -> int:
    args = parse()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    target = model(args)
    draft = target_as_draft(target) if args.draft == "shadow" else head(target)
    config = SpecConfig(args.num_steps, args.topk, args.num_draft_tokens)
    sizes: dict[str, Any] = {"max_context": CONTEXT, "page_size": args.page_size}
    engine = Engine(target, draft, config, max_requests=args.max_requests, mode=args.mode, **sizes)
    engine.warm_up()
    finished, started = [], time.monotonic()
    draw = random.Random(args.seed)
    figures: dict[str, Any] = {"rounds": 0, "requests": 0, "tokens": 0}
    memory = Memory(engine.device)
    told, after_warm_up = started, min(2000, args.rounds // 4)
    while figures["rounds"] < args.rounds and time.monotonic() - started < args.seconds:
        while draw.random() < 0.5 and len(engine._active) + len(engine._waiting) < args.max_requests + 2:
            prompt = [draw.randrange(VOCAB) for _ in range(draw.randint(1, 20))]
            stops = [draw.randrange(VOCAB)] if draw.random() < 0.3 else []
            engine.add(prompt, max_new_tokens=draw.randint(1, CONTEXT), stop_token_ids=stops)
        if draw.random() < 0.01 and engine._active:
            engine.cancel(draw.choice(list(engine._active.values())))
        done = engine.step()
        figures["rounds"] += 1
        figures["requests"] += len(done)
        figures["tokens"] += sum(len(request.tokens) for request in done)
        finished.extend(request for request in done if draw.random() < args.sample)
        engine.allocator.check()
        if figures["rounds"] % 256 == 0:
            finite(engine)
        if figures["rounds"] == after_warm_up:
            memory.mark()
        if time.monotonic() - told > 5:
            told = time.monotonic()
            print(f"  {figures['rounds']} rounds, {figures['requests']} requests", file=sys.stderr, flush=True)
    seconds = time.monotonic() - started
    finished = draw.sample(finished, min(len(finished), args.compare))
    for request in list(engine._active.values()) + list(engine._waiting):
        engine.cancel(request)
    figures |= {
        "seconds": round(seconds, 1),
        "rounds_per_s": round(figures["rounds"] / seconds, 1),
        "accepted_per_round": round(engine.stats.accepted_per_round, 3),
        "pages_lost": engine.allocator.num_pages - 1 - engine.allocator.num_free,
        "grown_mib": memory.grown(),
        "compared": len(finished),
        **compared(target, finished, sizes),
        "device": str(engine.device),
        "mode": engine.mode,
    }
    grown = max(figures["grown_mib"].values())
    figures["ok"] = not figures["pages_lost"] and not figures["drifted"] and grown < ALLOWED_MIB
    if args.json:
        print(json.dumps(figures))
    else:
        print("\n".join(f"{name:20} {value}" for name, value in figures.items()))
    return 0 if figures["ok"] else 1


class Memory:
    """Resident and device memory now, against those at the mark."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.mark()

    def now(self) -> dict[str, float]:
        pages = int(Path("/proc/self/statm").read_text().split()[1]) if Path("/proc/self/statm").exists() else 0
        now = {"resident": pages * resource.getpagesize() / 2**20}
        if self.device.type == "cuda":
            now["allocated"] = torch.cuda.memory_allocated(self.device) / 2**20
            now["reserved"] = torch.cuda.memory_reserved(self.device) / 2**20
        return now

    def mark(self) -> None:
        self.marked = self.now()

    def grown(self) -> dict[str, float]:
        return {name: round(value - self.marked[name], 2) for name, value in self.now().items()}


def finite(engine: Engine) -> None:
    """No NaN and no infinity in what the draft left for the live requests."""
    rows = torch.tensor(list(engine._active), device=engine.device, dtype=torch.int64)
    for name in ("next_token_logits", "hidden_states"):
        if not bool(getattr(engine.state, name)[rows].isfinite().all()):
            raise SystemExit(f"soak: {name} of a live request are not finite")


def compared(target: CausalLM, sample: list[Any], sizes: dict[str, Any]) -> dict[str, int]:
    """Sampled requests against plain decoding, one request at a time.

    A request that leaves the plain ids where the target's two best logits are equal but for rounding is a tie, no drift.
    """
    plain = Engine(target, max_requests=1, mode="eager", **sizes)
    tie = 1e-9 if next(target.parameters()).dtype == torch.float64 else 1e-3
    found = {"drifted": 0, "ties": 0}
    for request in sample:
        stops = request.stop_token_ids
        [again] = plain.generate([request.prompt], max_new_tokens=request.max_new_tokens, stop_token_ids=stops)
        if again.tokens != request.tokens:
            pairs = enumerate(zip(again.tokens, request.tokens, strict=False))
            first = next((place for place, (a, b) in pairs if a != b), None)
            found["ties" if first is not None and again.margins[first] < tie else "drifted"] += 1
    return found


def model(args: argparse.Namespace) -> CausalLM:
    """A random target in float64 on the CPU, so that ids can't differ by rounding, and float32 on a GPU."""
    target = CausalLM(ModelConfig(VOCAB, 32, 48, 1, 4, 2, 16, 128))
    for parameter in target.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.4)
    dtype = torch.float32 if args.device == "cuda" else torch.float64
    target = target.to(args.device, dtype).eval().requires_grad_(False)
    if args.backend is not None:
        target.set_backend(args.backend)
    return target


def head(target: CausalLM) -> EagleHead:
    """An untrained head: hardly ever right, so rounds are many and pages come and go."""
    made = EagleHead(EagleConfig.for_target(target.config), target.embed_tokens, target.lm_head.weight)
    weight = target.lm_head.weight
    return made.to(weight.device, weight.dtype).eval().requires_grad_(False)


def target_as_draft(target: CausalLM) -> Any:
    """The target itself as its draft, right most of the time."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.spec.toys import Shadow

    return Shadow(target)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100_000, help="most rounds (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=600, help="most seconds (default: %(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--mode", default="auto", choices=("auto", "direct", "reduce-overhead", "eager"))
    parser.add_argument("--backend", help="attention backend of the target (default: auto)")
    parser.add_argument("--draft", default="shadow", choices=("shadow", "head"))
    parser.add_argument("--max-requests", type=int, default=6)
    parser.add_argument("--page-size", type=int, default=4)
    parser.add_argument("--num-steps", type=int, default=3)
    parser.add_argument("--topk", type=int, default=2)
    parser.add_argument("--num-draft-tokens", type=int, default=6)
    parser.add_argument("--sample", type=float, default=0.02, help="share of requests compared with plain decoding")
    parser.add_argument("--compare", type=int, default=1000, help="most requests compared, after the rounds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    with torch.no_grad():
        sys.exit(main())
