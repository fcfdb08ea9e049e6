"""What several commands share: arguments of a decoding run, progress on standard error, tables."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

SAMPLING_OPTIONS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
Say = Callable[[str], None]


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Which models, where, and the shape of a round."""
    parser.add_argument("--model", default="smollm2", help="Hugging Face directory, GGUF file, or smollm2 (default)")
    parser.add_argument(
        "--draft",
        default="smollm2-135m",
        help="directory of a draft head, or one that comes with specops (default: %(default)s)",
    )
    parser.add_argument(
        "--num-steps", type=int, default=None, help="levels of the draft tree (default: 3 on a CPU, 4 on a GPU)"
    )
    parser.add_argument(
        "--topk", type=int, default=None, help="branches per node; 1 drafts a chain (default: 1 on a CPU, 4 on a GPU)"
    )
    parser.add_argument("--num-draft-tokens", type=int, default=None, help="nodes verified per request, root included")
    parser.add_argument("--device", default=None, help="cuda or cpu (default: a GPU where there is one)")
    parser.add_argument("--dtype", default=None, help="float32 or bfloat16 (default: float32 on CPU, bfloat16 on GPU)")
    parser.add_argument("--backend", default="auto", help="attention backend (default: %(default)s); see specops backends")
    parser.add_argument(
        "--mode",
        default="auto",
        choices=("auto", "direct", "reduce-overhead", "eager"),
        help="how steps run (default: %(default)s)",
    )
    parser.add_argument("--max-context", type=int, default=None, help="most tokens of a request, prompt included")


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """The fields of SamplingParams."""
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    parser.add_argument("--top-k", type=int, default=None, help="keep the k likeliest tokens")
    parser.add_argument("--top-p", type=float, default=1.0, help="keep the likeliest tokens up to this probability")
    parser.add_argument("--min-p", type=float, default=0.0, help="keep tokens this likely relative to the likeliest")
    parser.add_argument("--repetition-penalty", type=float, default=1.0, help="above 1 makes repetition less likely")
    parser.add_argument("--seed", type=int, default=None, help="prompt i, or line i, samples with seed + i")


def sampling(args: argparse.Namespace, options: Mapping[str, Any] | None = None) -> Any:
    """Sampling parameters as asked for; ``options`` go before the arguments."""
    from specops.spec import SamplingParams

    return SamplingParams(**{name: (options or {}).get(name, getattr(args, name)) for name in SAMPLING_OPTIONS})


def add_plot_argument(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--plot", nargs="?", const=default, metavar="FILE", help=f"write charts (to {default}; png, svg, pdf)"
    )


def config(args: argparse.Namespace) -> Any:
    """The round's shape as asked for; else the one that measured fastest: a chain on a CPU, a tree on a GPU.

    A GPU verifies 16 nodes in the time of a few (H200, torch 2.11, 2026-11-29, SmolLM2-135M, bf16, batch 1: 937 tokens/s
    as a chain of 3, 1096 as this tree); a CPU pays for every row.
    """
    import torch

    from specops.spec import SpecConfig

    if args.num_steps is None and args.topk is None and args.num_draft_tokens is None:
        gpu = torch.cuda.is_available() if args.device is None else torch.device(args.device).type == "cuda"
        return SpecConfig(4, 4, 16) if gpu else SpecConfig(3)
    return SpecConfig(
        3 if args.num_steps is None else args.num_steps, 1 if args.topk is None else args.topk, args.num_draft_tokens
    )


def load_models(args: argparse.Namespace, say: Say, *, plain: bool = False) -> Any:
    """Target, tokenizer and, unless ``plain``, the draft head that the arguments name; cut for torchrun's processes."""
    from specops import demo
    from specops.parallel import torchrun_mesh

    draft = None if plain else args.draft
    options = {"device": args.device, "dtype": args.dtype, "backend": args.backend, "say": say}
    mesh = torchrun_mesh(args.device) if world_size() > 1 else None
    return demo.load_models(args.model, draft, mesh=mesh, **options)


def progress_printer() -> Say:
    """Progress goes to standard error, so that standard output stays the answer alone; the first rank alone tells it."""
    started = time.perf_counter()

    def say(text: str) -> None:
        if is_first_rank():
            print(f"[{time.perf_counter() - started:6.1f} s] {text}", file=sys.stderr, flush=True)

    return say


def world_size() -> int:
    """How many processes torchrun has started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first_rank() -> bool:
    """Whether this process prints: under torchrun the first one alone does."""
    return os.environ.get("RANK", "0") == "0"


class Progress:
    """A state told now and then on standard error: every fifth of a second over itself on a terminal, else every 10 s.

    Args:
        say: takes the lines where there is no terminal.
    """

    def __init__(self, say: Say) -> None:
        self._say = say
        self._terminal = sys.stderr.isatty()
        self._next = time.perf_counter()

    def __call__(self, state: Callable[[], str], *, last: bool = False) -> None:
        now = time.perf_counter()
        if now < self._next and not last:
            return
        self._next = now + (0.2 if self._terminal else 10.0)
        if self._terminal:
            print(f"\r\x1b[K{state()}", end="\n" if last else "", file=sys.stderr, flush=True)
        else:
            self._say(state())


def write(text: str, end: str = "") -> None:
    """Text on standard output; the first rank alone writes."""
    if is_first_rank():
        print(text, end=end, flush=True)


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Rows in aligned columns; the last column is free."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)) + "  " + row[-1])
