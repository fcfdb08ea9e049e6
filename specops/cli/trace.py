"""Draw one round: the tree that was drafted, its probabilities, and the path that was accepted."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from specops.cli import common


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_model_arguments(parser)
    parser.set_defaults(topk=4, num_draft_tokens=None)
    parser.add_argument("--prompt", default="Why is the sky blue?", help="a user turn (default: %(default)s)")
    parser.add_argument("--raw", action="store_true", help="use the prompt as it is, without the chat template")
    parser.add_argument("--round", type=int, default=1, help="which round of the answer, from 1 (default: %(default)s)")
    parser.add_argument("--out", default="specops-trace.html", help="an .html or .svg file (default: %(default)s)")
    common.add_sampling_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from specops import trace, trace_drawing

    path, shape = Path(args.out), common.config(args)
    if path.suffix.lower() not in (".html", ".svg"):
        raise ValueError(f"--out ends in .html or .svg; got {args.out!r}")
    if not path.resolve().parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent} for --out")
    say = common.progress_printer()
    models = common.load_models(args, say)
    found = trace.trace_round(
        models,
        models.encode(args.prompt, chat=not args.raw),
        round=args.round,
        config=shape,
        sampling=common.sampling(args),
        max_context=args.max_context,
        title=f"{args.model} with {args.draft}: {shape.num_steps} steps, topk {shape.topk}, {shape.width} nodes",
    )
    draw = trace_drawing.to_svg if path.suffix.lower() == ".svg" else trace_drawing.to_html
    path.write_text(draw(found), encoding="utf-8")
    say(f"the drawing is in {path}")
    if args.json:
        print(json.dumps(found.as_dict()))
        return 0
    common.print_table([("token", "draft", "target", "")] + [_row(node, index) for index, node in enumerate(found.nodes)])
    print(f"emitted {len(found.emitted)}: {' '.join(found.emitted)}")
    return 0


def _row(node: Any, index: int) -> tuple[str, ...]:
    share = ["" if value is None else f"{100 * value:.1f}%" for value in (node.draft_probability, node.target_probability)]
    return ("  " * node.depth + node.text, *share, "root" if not index else "accepted" if node.accepted else "")
