"""Train an EAGLE draft head for a target, from nothing but the target.

The target writes conversations with itself, a head is fitted on its hidden states, and the head is measured on held-out
answers. Three stages, one folder; each can run in a process of its own, and each continues where it stopped:

    python examples/05_train_eagle_head.py --work /tmp/eagle --stage data  --seconds 120
    python examples/05_train_eagle_head.py --work /tmp/eagle --stage train --seconds 300
    python examples/05_train_eagle_head.py --work /tmp/eagle --stage eval  --head heads/smollm2-135m

On one H200 that is SmolLM2-135M's head in about ten minutes. ``--tiny`` makes every stage small enough for a CPU.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from specops.models import load_target, load_tokenizer
from specops.models.eagle import EagleConfig, EagleHead
from specops.models.eagle_checkpoint import load_head, save_head
from specops.training import data, evaluate
from specops.training.bank import fill_bank, initialize, rows_that_fit
from specops.training.chat import chat_prompt, chat_script
from specops.training.dense import DenseTarget
from specops.training.generate import Generator
from specops.training.questions import questions
from specops.training.train import Trainer, TrainSettings

# Held-out prompts, written by hand and never shown to the head in training.
PROMPTS = (
    "What is gravity?",
    "Explain photosynthesis to a ten year old.",
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "How do I make a simple vegetable soup?",
    "Write a Python function that checks whether a string is a palindrome.",
    "What are the main causes of the First World War?",
    "Give me five tips for sleeping better.",
    "Translate 'Good morning, how are you?' into French.",
    "What is the difference between a virus and a bacterium?",
    "Write a polite email asking my landlord to repair the heating.",
    "Who was Marie Curie?",
    "Explain how a bicycle stays upright.",
    "If a train travels 60 miles in 1.5 hours, what is its average speed?",
    "Write a poem about autumn leaves.",
    "What is machine learning?",
    "List the planets of the solar system in order.",
    "How can I learn to play the guitar?",
    "Summarize the plot of Romeo and Juliet.",
    "What should I pack for a weekend hike in the mountains?",
    "Why is the sky blue?",
    "Write a SQL query that returns the ten most recent orders.",
    "Describe the water cycle.",
    "What are the benefits of regular exercise?",
    "How does a refrigerator work?",
    "Give me three names for a small bakery.",
    "Explain the concept of supply and demand.",
    "Write a dialogue between a cat and a dog who share a house.",
    "What is the capital of Australia, and why is it not Sydney?",
    "How do vaccines work?",
    "Plan a one day visit to Rome.",
    "What does the word 'serendipity' mean? Use it in a sentence.",
    "Write a function in JavaScript that sorts an array of numbers.",
    "Compare renting and buying a home.",
    "Tell me a joke about computers.",
    "How many sides does a hexagon have?",
    "Explain recursion with an example.",
    "What is climate change and what can one person do about it?",
    "Rewrite this sentence more formally: I can't come because I'm sick.",
    "Create a weekly study plan for a student with two exams.",
    "What happens when you mix baking soda and vinegar?",
)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = parse(argv)
    torch.set_float32_matmul_precision("high")
    args.work.mkdir(parents=True, exist_ok=True)
    begun = time.perf_counter()
    model = load_target(args.target, dtype=getattr(torch, args.dtype), device=args.device)
    tokenizer = load_tokenizer(args.target)
    print(f"target {args.target_name}: {sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters, "
          f"{args.dtype} on {args.device}, loaded in {time.perf_counter() - begun:.1f} s", flush=True)  # fmt: skip
    figures: dict[str, Any] = {}
    if args.stage in ("data", "all"):
        write_data(args, model, tokenizer)
    if args.stage in ("train", "all"):
        train(args, model)
    if args.stage in ("eval", "all"):
        figures = measure(args, model, tokenizer)
    return figures


def write_data(args: argparse.Namespace, model: Any, tokenizer: Any) -> None:
    gpu = torch.device(args.device).type == "cuda"
    target, common = DenseTarget.of(model), {"length": args.length, "compile": gpu and args.compile, "graphs": gpu}
    generator = Generator(target, chat_script(tokenizer), batch=args.batch, temperature=args.temperature, **common)
    asked = round(args.batch * args.asked)

    def prompts(seed: int) -> list[list[int]]:
        drawn = (chat_prompt(tokenizer, question) for question in questions(asked + asked // 4, seed))
        # A row is to hold more of an answer than of its question.
        return [prompt for prompt in drawn if len(prompt) <= args.length // 2][:asked]

    options: dict[str, Any] = {"seed": args.seed, "vocab_size": model.config.vocab_size, "prompts": prompts, "log": log}
    shards = args.work / "data"
    data.write_shards(generator, shards, count=args.held_out_shards, held_out=True, **options)
    data.write_shards(generator, shards, count=args.shards, seconds=args.seconds, **options)
    del generator
    # The hand-written prompts: answered once, kept as a shard of their own.
    path = shards / "prompts_00000.safetensors"
    if not path.exists():
        prompts = [chat_prompt(tokenizer, prompt) for prompt in PROMPTS[: args.prompts]]
        answering = Generator(target, chat_script(tokenizer), batch=len(prompts), length=args.length)
        data.save_shard(path, *answering.answers(prompts), model.config.vocab_size)
    ids, greedy = data.load_shards(shards)
    log(f"{ids.shape[0]} conversations of {ids.shape[1]} tokens, {int(greedy.sum()) / 1e6:.2f}M of "
        f"{ids.numel() / 1e6:.2f}M tokens are greedy answers")  # fmt: skip


def train(args: argparse.Namespace, model: Any) -> None:
    device, shards = torch.device(args.device), args.work / "data"
    gpu = device.type == "cuda"
    target = DenseTarget.of(model)
    ids, greedy = data.load_shards(shards, limit=args.train_shards)
    size = min(args.draft_vocab, model.config.vocab_size)
    always = model.config.eos_token_ids
    kept = data.draft_vocabulary(ids, greedy, model.config.vocab_size, size, always).to(device)
    held_out = data.load_shards(shards, "held_out")
    covered = data.coverage(*held_out, kept.cpu())
    log(f"draft vocabulary: {size} of {model.config.vocab_size} tokens, {covered:.2%} of held-out answer tokens")
    head = new_head(args, model, kept)
    fitting = rows_that_fit(target, ids.shape[1], head.config.aux_layers)
    if fitting is not None and fitting < ids.shape[0]:
        log(f"the device holds the hidden states of {fitting} conversations; {ids.shape[0] - fitting} are left out")
        ids, greedy = ids[:fitting], greedy[:fitting]
    begun = time.perf_counter()
    bank = fill_bank(target, ids, greedy, head.config.aux_layers, compile=gpu and args.compile)
    if gpu:
        torch.cuda.synchronize()
    took = time.perf_counter() - begun
    log(f"hidden states of {ids.numel() / 1e6:.1f}M tokens in {took:.1f} s ({ids.numel() / took / 1e3:.0f}k tokens/s)")
    if args.init:
        copy_weights(load_head(args.init, model), head)
        log(f"starting from {args.init}")
    else:
        initialize(head, bank, args.seed)
    settings = TrainSettings(
        steps=args.steps,
        seconds=args.seconds,
        batch_tokens=args.batch_tokens,
        unroll=args.unroll,
        learning_rate=args.lr,
        warmup=args.warmup,
        hard_weight=args.hard_weight,
        hidden_weight=args.hidden_weight,
        decay=args.decay,
        seed=args.seed,
    )
    draft_ids = data.draft_ids_of(kept, model.config.vocab_size)
    trainer = Trainer(
        head,
        bank,
        draft_ids,
        head.lm_head_weight.to(target.lm_head.dtype),
        settings,
        autocast=gpu or args.dtype == "bfloat16",
        log=log,
    )
    checkpoint = args.work / "checkpoint.pt"
    if trainer.resume(checkpoint):
        log(f"continuing at step {trainer.step}, {trainer.seconds_used:.0f} s used")
    trainer.run(checkpoint, log_every=args.log_every)
    trained = {
        "steps": trainer.step,
        "seconds": round(trainer.seconds_used),
        "tokens_seen": trainer.step * trainer.batch * ids.shape[1],
        "epochs": round(trainer.step / trainer.steps_per_epoch, 2),
        "parameters": sum(p.numel() for p in head.parameters()),
        "device": torch.cuda.get_device_name() if gpu else "CPU",
        "batch_tokens": args.batch_tokens,
        "unrolled_steps": args.unroll,
        "learning_rate": args.lr,
        "hard_weight": args.hard_weight,
        "hidden_weight": args.hidden_weight,
        "seed": args.seed,
    }
    if args.init:
        trained["started_from"] = f"a head trained on {tokens_seen_by(args.init)} tokens"
    corpus = {
        "source": f"written by {args.target_name} itself: answers greedy, to composed questions in {args.asked:.0%} of the "
        f"conversations, else to user turns sampled at temperature {args.temperature}",
        "conversations": ids.shape[0],
        "tokens_each": ids.shape[1],
        "greedy_tokens": int(greedy.sum()),
        "draft_vocabulary": size,
        "draft_vocabulary_coverage": round(covered, 4),
    }
    save_head(head.to(torch.bfloat16), args.work / "head", card={"training": trained, "data": corpus})
    log(f"wrote {args.work / 'head'}")


def measure(args: argparse.Namespace, model: Any, tokenizer: Any) -> dict[str, Any]:
    folder = args.work / "head"
    head = load_head(folder, model)
    card = json.loads((folder / "card.json").read_text(encoding="utf-8"))
    target = DenseTarget.of(model)
    kept = head.to_target_ids(torch.arange(head.config.draft_vocab_size, device=args.device))
    draft_ids = data.draft_ids_of(kept, model.config.vocab_size)
    figures: dict[str, Any] = {}
    for name, kind in (("held_out_conversations", "held_out"), ("hand_written_prompts", "prompts")):
        ids, greedy = data.load_shards(args.work / "data", kind)
        ids, greedy = ids[: args.eval_rows], greedy[: args.eval_rows]
        begun = time.perf_counter()
        ranks = evaluate.true_ranks(head, target, ids, draft_ids, args.eval_steps)
        figures[name] = evaluate.report(ranks, greedy)
        log(f"{name} ({time.perf_counter() - begun:.1f} s): {json.dumps(figures[name])}")
    card["measured"] = {
        **figures,
        "note": "teacher-forced over greedy answers; trees are static, chosen on one half of the answers and measured on "
        "the other",
    }
    destination = args.head or folder
    save_head(head.to(torch.bfloat16), destination, card=card)
    size = sum(path.stat().st_size for path in destination.iterdir())
    log(f"wrote {destination}, {size / 1e6:.2f} MB")
    return figures


def new_head(args: argparse.Namespace, model: Any, kept: torch.Tensor) -> EagleHead:
    options: dict[str, Any] = {"intermediate_size": args.intermediate} if args.intermediate else {}
    if args.aux_layers:
        options["aux_layers"] = tuple(args.aux_layers)
    format = args.format
    if args.init:
        given = load_head(args.init, model).config
        format = given.format
        options = {
            "intermediate_size": given.intermediate_size,
            **({"aux_layers": given.aux_layers} if given.aux_layers else {}),
        }
    config = EagleConfig.for_target(
        model.config, format=format, draft_vocab_size=kept.shape[0], name=args.target_name, **options
    )
    d2t = data.d2t_of(kept) if config.reduced_vocab else None
    head = EagleHead(config, model.embed_tokens, model.lm_head.weight, d2t=d2t)
    return head.to(args.device)


def tokens_seen_by(folder: Path) -> str:
    """From a head's card; heads of other sources have none."""
    card = folder / "card.json"
    training = json.loads(card.read_text(encoding="utf-8")).get("training", {}) if card.exists() else {}
    return str(training.get("tokens_seen", "an unknown number of"))


@torch.no_grad()
def copy_weights(source: EagleHead, head: EagleHead) -> None:
    """Start from another head's weights; its draft vocabulary may differ, since that only picks rows of the LM head."""
    given = dict(source.named_parameters())
    for name, weight in head.named_parameters():
        if name not in given or given[name].shape != weight.shape:
            raise SystemExit(f"--init: its weight {name} does not fit the head to be trained")
        weight.copy_(given[name])


def log(line: str) -> None:
    print(line, flush=True)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--stage", choices=("data", "train", "eval", "all"), default="all")
    add("--work", type=Path, required=True, help="folder for data, checkpoint and head")
    add("--head", type=Path, help="where eval writes the finished head with its card; the work folder's own if not given")
    add("--target", default="smollm2", help="what load_target takes: a folder, a .gguf file, or smollm2")
    add("--target-name", help="as the card calls it; the last part of --target if not given")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--dtype", choices=("bfloat16", "float32"), help="of the target; bfloat16 on a GPU, float32 on a CPU")
    add("--seconds", type=float, help="time limit of the data stage, and of training")
    add("--seed", type=int, default=0)
    add("--tiny", action="store_true", help="small defaults everywhere, for a CPU")
    add("--no-compile", dest="compile", action="store_false", help="run without torch.compile on a GPU")
    group = parser.add_argument_group("data").add_argument
    group("--batch", type=int, help="conversations written together, one shard")
    group("--length", type=int, help="tokens of a conversation")
    group("--shards", type=int, help="shards to write at most")
    group("--held-out-shards", type=int, default=1)
    group("--prompts", type=int, default=len(PROMPTS), help="hand-written prompts to answer")
    group("--asked", type=float, default=0.5, help="share of conversations that begin with a composed question")
    group("--temperature", type=float, default=1.0, help="of the user turns")
    group = parser.add_argument_group("training").add_argument
    group("--format", choices=("eagle", "eagle3"), default="eagle")
    group("--aux-layers", type=int, nargs="+", help="eagle3: residual streams to read, by how many layers have run")
    group("--intermediate", type=int, help="inner width of the head's MLP; the target's if not given")
    group("--draft-vocab", type=int, default=8192)
    group("--init", type=Path, help="a head of the same shape to start from, instead of random weights")
    group("--train-shards", type=int, help="shards to train on; all if not given")
    group("--steps", type=int, help="optimiser steps at most")
    group("--batch-tokens", type=int)
    group("--unroll", type=int, default=4)
    group("--lr", type=float, default=1e-3)
    group("--warmup", type=int)
    group("--decay", type=float, default=0.9, help="weight of each unrolled step relative to the one before")
    group("--hard-weight", type=float, default=0.3)
    group("--hidden-weight", type=float, default=0.1)
    group("--log-every", type=int)
    group = parser.add_argument_group("evaluation").add_argument
    group("--eval-rows", type=int)
    group("--eval-steps", type=int, default=6)
    args = parser.parse_args(argv)
    full = {"batch": 2048, "length": 384, "shards": 40, "steps": 100_000, "batch_tokens": 32768, "warmup": 200}
    full.update(log_every=200, eval_rows=1024)
    tiny = {"batch": 8, "length": 96, "shards": 2, "steps": 50, "batch_tokens": 384, "warmup": 5}
    tiny.update(log_every=10, eval_rows=16)
    for name, value in (tiny if args.tiny else full).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.dtype = args.dtype or ("bfloat16" if torch.device(args.device).type == "cuda" else "float32")
    args.target_name = args.target_name or (
        "SmolLM2-135M-Instruct" if args.target == "smollm2" else Path(args.target).stem.split(".")[0]
    )
    return args


if __name__ == "__main__":
    main()
