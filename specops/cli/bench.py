"""Tokens per second of plain and of EAGLE decoding over batch sizes."""

from __future__ import annotations

import argparse
import json
from typing import Any

from specops.cli import common


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_model_arguments(parser)
    parser.add_argument("--prompt", action="append", help="a user turn; may be given several times")
    parser.add_argument(
        "--batch-sizes", type=_sizes, default=(1, 2, 4, 8), metavar="N,N,...", help="prompts decoded together (1,2,4,8)"
    )
    parser.add_argument("--max-new-tokens", type=int, default=128, help="most tokens of an answer (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each; the median counts (default: %(default)s)")
    common.add_plot_argument(parser, "specops-bench.png")


def run(args: argparse.Namespace) -> int:
    from specops import bench, plotting
    from specops.demo import PROMPTS

    if args.plot:
        plotting.check_path(args.plot)
    say = common.progress_printer()
    figures = bench.run_bench(
        common.load_models(args, say),
        args.prompt or PROMPTS,
        batch_sizes=args.batch_sizes,
        config=common.config(args),
        max_new_tokens=args.max_new_tokens,
        max_context=args.max_context,
        mode=args.mode,
        repeats=args.repeats,
        phases=bool(args.plot),
        say=say,
    )
    if args.plot:
        say(f"charts are in {plotting.plot_figures(figures, args.plot)}")
    if args.json:
        print(json.dumps(figures))
        return 0
    print(f"{figures['device']}, {figures['dtype']}, mode {figures['mode']}, median of {figures['repeats']}")
    common.print_table(
        [("batch", "plain tokens/s", "EAGLE tokens/s", "speed-up", "accepted per round", "answers identical to plain")]
        + [_row(row) for row in figures["rows"]]
    )
    return 0


def _row(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        str(row["batch"]),
        f"{row['plain_tokens_per_s']:.1f}",
        f"{row['eagle_tokens_per_s']:.1f}",
        f"{row['speedup']:.2f}x",
        f"{row['accepted_per_round']:.2f}",
        f"{row['identical_answers']} of {row['batch']}",
    )


def _sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"whole numbers with commas between them, such as 1,4,16; got {text!r}") from None
    if min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"batch sizes are 1 or more; got {text!r}")
    return sizes
