"""A real model answers by EAGLE decoding and by plain decoding, side by side."""

from __future__ import annotations

import argparse
import json
from typing import Any

from specops.cli import common


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_model_arguments(parser)
    parser.add_argument("--prompt", action="append", help="a user turn; may be given several times")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="most tokens of an answer (default: %(default)s)")
    parser.add_argument("--max-requests", type=int, default=1, help="prompts decoded together (default: %(default)s)")
    common.add_plot_argument(parser, "specops-demo.png")


def run(args: argparse.Namespace) -> int:
    from specops import demo, plotting

    if args.plot:
        plotting.check_path(args.plot)
    say = common.progress_printer()
    models = common.load_models(args, say)
    figures = demo.run_demo(
        models,
        args.prompt or demo.PROMPTS,
        config=common.config(args),
        max_new_tokens=args.max_new_tokens,
        max_requests=args.max_requests,
        max_context=args.max_context,
        mode=args.mode,
        phases=bool(args.plot),
        say=say,
        on_text=None if args.json else common.write,
    )
    if args.plot:
        say(f"charts are in {plotting.plot_figures(figures, args.plot)}")
    if args.json:
        print(json.dumps(figures))
    else:
        print("\n")
        common.print_table(_rows(figures))
    return 0


def _rows(figures: dict[str, Any]) -> list[tuple[str, ...]]:
    divergence = figures["first_divergence"]
    same = "identical"
    if divergence is not None:
        gap, bound = divergence["top2_gap"], divergence["noise_bound"]
        known = [("gap of the two best logits", gap), ("rounding bound", bound)]
        same = (
            f"first differs in prompt {divergence['prompt'] + 1} at token {divergence['position'] + 1}: "
            + ", ".join(f"{label} {'unknown' if value is None else f'{value:.4g}'}" for label, value in known)
            + (", A FAULT" if divergence["fault"] else ", a tie")
        )
    graphs = [
        (f"graph of {name}", "captured" if graph["captured"] else f"none: {graph['reason']}")
        for name, graph in figures["graphs"].items()
    ]
    shape = f"{figures['num_steps']} steps, topk {figures['topk']}, {figures['num_draft_tokens']} nodes"
    return [
        ("EAGLE decoding", shape),
        ("device, dtype", f"{figures['device']}, {figures['dtype']}, mode {figures['mode']}"),
        ("tokens", str(figures["tokens"])),
        ("rounds", str(figures["rounds"])),
        ("accepted per round", f"{figures['accepted_per_round']:.2f}"),
        ("tokens/s", f"{figures['tokens_per_s']:.1f}"),
        ("plain decoding tokens/s", f"{figures['plain_tokens_per_s']:.1f}"),
        ("speed-up", f"{figures['speedup']:.2f}x"),
        ("compared with plain decoding", same),
        *graphs,
    ]
