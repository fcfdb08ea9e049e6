"""A round of decoding on one device and cut for several: milliseconds, side by side in one run, random weights.

    torchrun --standalone --nproc-per-node 2 benchmarks/bench_parallel.py --json benchmarks/results/parallel.json
    torchrun --standalone --nproc-per-node 2 benchmarks/bench_parallel.py --device cpu --shape tiny --dtype float32

Every rank first decodes with the whole model on its own device, then with its part. ``ms`` is the time of a round after
warm-up, prefill left out: of plain decoding, of a chain of 3, and of a tree of 16 nodes, with an EAGLE-3 head of the
target's layer shape. A random head is hardly ever right, so tokens a second would say nothing. ``agree``: all ranks have
the same ids. ``equal``: those are the whole model's (in 16 bits random weights leave many ties, which may fall either way).
"""

from __future__ import annotations

import argparse
import gc
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from specops.models.config import ModelConfig
from specops.models.eagle import EagleConfig, EagleHead
from specops.models.llama import CausalLM
from specops.parallel import shard, torchrun_mesh
from specops.spec import Engine, SpecConfig

SHAPES: dict[str, dict[str, int]] = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_layers": 32, "num_heads": 32, "num_kv_heads": 8},
    "32b": {"hidden_size": 5120, "intermediate_size": 25600, "num_layers": 64, "num_heads": 64, "num_kv_heads": 8},
    "tiny": {"hidden_size": 256, "intermediate_size": 512, "num_layers": 2, "num_heads": 8, "num_kv_heads": 2},
}
ROUNDS = {"plain": None, "chain 3": SpecConfig(3), "tree 4/4/16": SpecConfig(4, 4, 16)}


@torch.no_grad()
def models(shape: str, dtype: torch.dtype, device: str, layers: int | None) -> tuple[CausalLM, EagleHead]:
    sizes = {**SHAPES[shape], **({} if layers is None else {"num_layers": layers})}
    tiny = shape == "tiny"
    config = ModelConfig(
        **sizes, vocab_size=512 if tiny else 128256, head_dim=32 if tiny else 128, max_position_embeddings=4096
    )
    with torch.device("meta"):
        target = CausalLM(config).to(dtype)
    target.materialize(device)
    head_config = EagleConfig.for_target(config, format="eagle3", draft_vocab_size=config.vocab_size)
    head = EagleHead(head_config, target.embed_tokens, target.lm_head.weight.to(device)).to(device, dtype)
    torch.manual_seed(0)
    for model in (target, head):
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.02)
            else:
                parameter.fill_(1.0)
    # The head took its LM head before the target had weights.
    head.lm_head_weight = target.lm_head.weight.detach().clone()
    return target.eval().requires_grad_(False), head.eval().requires_grad_(False)


def measure(target: Any, head: Any, args: argparse.Namespace, requests: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in args.rounds:
        config = ROUNDS[name]
        engine = Engine(
            target,
            None if config is None else head,
            config,
            max_requests=requests,
            max_context=args.context,
            mode=args.mode,
            buckets=[requests],
        )
        engine.warm_up()
        prompts = [[(7 * row + place) % 500 + 1 for place in range(64)] for row in range(requests)]
        engine.generate(prompts, max_new_tokens=8)
        engine.stats.seconds.clear()
        steps = engine.stats.steps
        tokens = [request.tokens for request in engine.generate(prompts, max_new_tokens=args.tokens)]
        phase = "decode" if config is None else "round"
        found[name] = {
            "ms": round(engine.stats.seconds[phase] / (engine.stats.steps - steps) * 1e3, 3),
            "captured": all(report.captured for report in engine.explain().values()),
            "warm_up_s": round(sum(report.compile_seconds for report in engine.explain().values()), 1),
            "tokens": tokens,
        }
        del engine
        gc.collect()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", nargs="+", choices=ROUNDS, default=list(ROUNDS))
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--mode", default="auto")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    mesh = torchrun_mesh(args.device)
    target, head = models(args.shape, getattr(torch, args.dtype), args.device, args.layers)
    runs = {"whole": {requests: measure(target, head, args, requests) for requests in args.requests}}
    shard(target, head, mesh=mesh)
    gc.collect()
    runs["cut"] = {requests: measure(target, head, args, requests) for requests in args.requests}
    everyone: list[Any] = [None] * mesh.size()
    dist.all_gather_object(everyone, runs)
    rows = []
    for requests in args.requests:
        for name in args.rounds:
            whole, cut = ([rank[kind][requests][name] for rank in everyone] for kind in ("whole", "cut"))
            rows.append(
                {
                    "requests": requests,
                    "round": name,
                    "ms_whole": min(rank["ms"] for rank in whole),
                    "ms_cut": max(rank["ms"] for rank in cut),
                    "captured": all(rank["captured"] for rank in (*whole, *cut)),
                    "agree": all(rank["tokens"] == cut[0]["tokens"] for rank in cut),
                    "equal": cut[0]["tokens"] == whole[0]["tokens"],
                    "warm_up_s": cut[0]["warm_up_s"],
                }
            )
    if mesh.get_rank() == 0:
        device = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
        head_line = {"device": device, "ranks": mesh.size(), "torch": torch.__version__, "shape": args.shape}
        text = json.dumps({**head_line, "dtype": args.dtype, "rows": rows}, indent=1)
        print(text)
        if args.json is not None:
            args.json.write_text(text + "\n")
    dist.barrier()


if __name__ == "__main__":
    main()
