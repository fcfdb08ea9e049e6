"""Answer prompts and print the text."""

from __future__ import annotations

import argparse
import json
import sys
import time

from specops.cli import common


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_model_arguments(parser)
    parser.add_argument("--prompt", action="append", help="a user turn; may be given several times")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="most tokens of an answer (default: %(default)s)")
    parser.add_argument("--max-requests", type=int, default=1, help="prompts decoded together (default: %(default)s)")
    parser.add_argument("--plain", action="store_true", help="decode without a draft head")
    parser.add_argument("--raw", action="store_true", help="use the prompt as it is, without the chat template")


def run(args: argparse.Namespace) -> int:
    from specops.spec import Engine

    say = common.progress_printer()
    models = common.load_models(args, say, plain=args.plain)
    prompts = args.prompt or [sys.stdin.read()]
    ids = [list(models.tokenizer(text)["input_ids"]) if args.raw else models.chat(text) for text in prompts]
    engine = Engine(models.target, models.head, common.config(args), max_requests=args.max_requests, mode=args.mode)
    engine.warm_up(lambda done, total, what: say(f"{what} ({done}/{total})"))
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
