"""The ``specops`` command: ``demo``, ``generate`` and ``backends``, each with ``--json`` beside its human output."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import Any


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 on success, 2 for bad input, told in one line on standard error."""
    args = _parser().parse_args(argv)
    try:
        result: int = args.run(args)
    except (ValueError, TypeError, OSError, ImportError) as error:
        print(f"specops: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("specops: interrupted", file=sys.stderr)
        return 130
    return result


def demo(args: argparse.Namespace) -> int:
    """A real model answers by EAGLE decoding and by plain decoding, side by side."""
    from specops import demo as demos

    models = demos.load_models(
        args.model, args.draft, device=args.device, dtype=args.dtype, backend=args.backend, say=_say(args)
    )
    figures = demos.run_demo(
        models,
        args.prompt or demos.PROMPTS,
        config=_config(args),
        max_new_tokens=args.max_new_tokens,
        max_requests=args.max_requests,
        mode=args.mode,
        say=_say(args),
        on_text=None if args.json else _write,
    )
    if args.json:
        print(json.dumps(figures))
    else:
        print("\n")
        _table(_demo_rows(figures))
    return 0


def generate(args: argparse.Namespace) -> int:
    """Answer prompts and print the text."""
    from specops import demo as demos
    from specops.spec import Engine

    draft = None if args.plain else args.draft
    models = demos.load_models(args.model, draft, device=args.device, dtype=args.dtype, backend=args.backend, say=_say(args))
    prompts = args.prompt or [sys.stdin.read()]
    ids = [list(models.tokenizer(text)["input_ids"]) if args.raw else models.chat(text) for text in prompts]
    engine = Engine(models.target, models.head, _config(args), max_requests=args.max_requests, mode=args.mode)
    engine.warm_up(lambda done, total, what: _say(args)(f"{what} ({done}/{total})"))
    started = time.perf_counter()
    requests = engine.generate(ids, max_new_tokens=args.max_new_tokens, stop_token_ids=models.target.config.eos_token_ids)
    seconds = time.perf_counter() - started
    texts = [models.tokenizer.decode(request.tokens, skip_special_tokens=True) for request in requests]
    if args.json:
        answers = [
            {"prompt": prompt, "text": text, "tokens": request.tokens, "finish_reason": request.finish_reason}
            for prompt, text, request in zip(prompts, texts, requests, strict=True)
        ]
        tokens = sum(len(request.tokens) for request in requests)
        accepted = round(engine.stats.accepted_per_round, 3)
        print(json.dumps({"answers": answers, "tokens_per_s": round(tokens / seconds, 2), "accepted_per_round": accepted}))
    else:
        print("\n\n".join(texts))
    return 0


def backends(args: argparse.Namespace) -> int:
    """What this machine can run, and the reason where it can't."""
    from dataclasses import asdict

    from specops.ops.inventory import inventory

    found = inventory(args.device)
    if args.json:
        print(json.dumps([asdict(info) for info in found]))
        return 0
    _table(
        [("backend", "family", "available", "auto", "kernels", "why not")]
        + [(info.name, info.family, _yes(info.available), _yes(info.auto), info.source, info.reason or "") for info in found]
    )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="specops", description="Attention backends for speculative decoding as torch ops.")
    commands = parser.add_subparsers(required=True, metavar="command")
    decoding = argparse.ArgumentParser(add_help=False)
    decoding.add_argument("--model", default="smollm2", help="Hugging Face directory, GGUF file, or smollm2 (default)")
    decoding.add_argument(
        "--draft",
        default="smollm2-135m",
        help="directory of a draft head, or one that comes with specops (default: %(default)s)",
    )
    decoding.add_argument("--prompt", action="append", help="a user turn; may be given several times")
    decoding.add_argument("--max-new-tokens", type=int, default=128, help="most tokens of an answer (default: %(default)s)")
    decoding.add_argument("--max-requests", type=int, default=1, help="prompts decoded together (default: %(default)s)")
    decoding.add_argument("--num-steps", type=int, default=None, help="levels of the draft tree (default: 3)")
    decoding.add_argument("--topk", type=int, default=1, help="branches per node; 1 drafts a chain (default: %(default)s)")
    decoding.add_argument("--num-draft-tokens", type=int, default=None, help="nodes verified per request, root included")
    decoding.add_argument("--device", default=None, help="cuda or cpu (default: a GPU where there is one)")
    decoding.add_argument("--dtype", default=None, help="float32 or bfloat16 (default: float32 on CPU, bfloat16 on GPU)")
    decoding.add_argument("--backend", default="auto", help="attention backend (default: %(default)s); see specops backends")
    decoding.add_argument(
        "--mode",
        default="auto",
        choices=("auto", "direct", "reduce-overhead", "eager"),
        help="how steps run (default: %(default)s)",
    )
    for name, run, parents in (("demo", demo, [decoding]), ("generate", generate, [decoding]), ("backends", backends, [])):
        command = commands.add_parser(name, help=run.__doc__, description=run.__doc__, parents=parents)
        command.add_argument("--json", action="store_true", help="print one line of JSON instead of text")
        command.set_defaults(run=run)
        if run is generate:
            command.add_argument("--plain", action="store_true", help="decode without a draft head")
            command.add_argument("--raw", action="store_true", help="use the prompt as it is, without the chat template")
        if run is backends:
            command.add_argument("--device", default=None, help="cuda or cpu (default: a GPU where there is one)")
    return parser


def _config(args: argparse.Namespace) -> Any:
    from specops.spec import SpecConfig

    return SpecConfig(args.num_steps or 3, args.topk, args.num_draft_tokens)


def _say(args: argparse.Namespace) -> Any:
    """Progress goes to standard error, so that standard output stays the answer alone."""
    started = time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - started:6.1f} s] {text}", file=sys.stderr, flush=True)

    return say


def _write(text: str) -> None:
    print(text, end="", flush=True)


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _demo_rows(figures: dict[str, Any]) -> list[tuple[str, ...]]:
    divergence = figures["first_divergence"]
    same = "identical"
    if divergence is not None:
        same = (
            f"first differs in prompt {divergence['prompt'] + 1} at token {divergence['position'] + 1}, "
            f"gap between the two best logits {divergence['top2_gap']:.4g}"
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


def _table(rows: list[tuple[str, ...]]) -> None:
    """Rows in aligned columns; the last column is free."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)) + "  " + row[-1])


if __name__ == "__main__":
    sys.exit(main())
