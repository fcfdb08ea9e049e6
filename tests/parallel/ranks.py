"""What a rank of the tensor parallel tests does: decode with its part of small random models, and print what came out.

    torchrun --standalone --nproc-per-node 2 tests/parallel/ranks.py --device cpu
    torchrun --standalone --nproc-per-node 2 tests/parallel/ranks.py --device cuda

The first rank prints one JSON object, in which every case holds what each rank found. ``whole`` are the ids of the same
models uncut, decoded in one process; :mod:`tests.parallel.test_parallel` compares them with transformers' too.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from specops.parallel import group_of, shard, torchrun_mesh
from specops.spec import Engine, SamplingParams, SpecConfig
from tests.spec.toys import Shadow, small_llama, target_of, untrained_head

PROMPTS = [[1, 2, 3, 4, 5], [7] * 13, [9, 8]]
COUNT = 9
ROUNDS = {"plain": None, "chain": SpecConfig(3), "tree": SpecConfig(3, 2, 6)}
SMALL = "llama, one layer"
LATENT = {
    "num_key_value_heads": 8,
    "first_k_dense_replace": 2,
    "kv_lora_rank": 16,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
# Every kind of weight that is cut: biases, head norms, a key/value head for all ranks, sizes that two do not divide.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, biases": {"attention_bias": True, "mlp_bias": True, "vocab_size": 67, "intermediate_size": 90},
    "llama, one kv head": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "qwen 3": {"kind": "Qwen3", "head_dim": 16},
    "deepseek v3": {"kind": "DeepseekV3", **LATENT},
    "deepseek v2, plain query": {"kind": "DeepseekV2", **LATENT, "q_lora_rank": None, "vocab_size": 67},
    SMALL: {"num_hidden_layers": 1},
}


def models(name: str, device: str) -> dict[str, Any]:
    """A target, a draft that is right most of the time, and heads that hardly ever are."""
    judge = small_llama(**MODELS[name])
    for parameter in judge.parameters():
        if parameter.dim() == 1:
            parameter.data.add_(torch.randn_like(parameter) * 0.1)
    target = target_of(judge)
    found = {"judge": judge, "target": target, "shadow": Shadow(target)}
    if "deepseek" not in name:
        found["head"] = untrained_head(target)
        found["reduced"] = untrained_head(target, draft_vocab_size=target.config.vocab_size, format="eagle3")
    return {key: model if key == "judge" else model.to(device) for key, model in found.items()}


def decode(world: dict[str, Any], draft: str | None, shape: str, mode: str, **options: Any) -> dict[str, Any]:
    engine = Engine(
        world["target"],
        world[draft] if draft else None,
        ROUNDS[shape],
        max_requests=3,
        max_context=64,
        page_size=16,
        mode=mode,
        # One size compiles once.
        buckets=None if mode == "eager" else [3],
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        requests = engine.generate(PROMPTS, max_new_tokens=COUNT, **options)
    return {
        "tokens": [request.tokens for request in requests],
        "accept_lens": [request.accept_lens for request in requests],
        "captured": all(report.captured for report in engine.explain().values()),
        "seeds": [request.sampling.seed for request in requests],
        "kv_heads": [cache.k.shape[2] for cache in engine.target.caches if hasattr(cache, "k")],
        "warnings": [str(w.message) for w in caught if "GraphLost" in w.category.__name__],
    }


def run(device: str, modes: list[str], only: list[str], shapes: list[str]) -> dict[str, Any]:
    mesh = torchrun_mesh(device)
    cases: dict[str, Any] = {}
    for name in only or MODELS:
        torch.manual_seed(0)
        whole = models(name, device)
        del whole["judge"]
        cut = copy.deepcopy(whole)
        # The head has the target's embedding outside its modules: deepcopy has made one of its own.
        for model in (cut[key] for key in ("head", "reduced") if key in cut):
            model._shared = (cut["target"].embed_tokens,)
        shard(*cut.values(), mesh=mesh)
        drafts = [key for key in whole if key != "target"]
        for mode in modes:
            for draft, shape in pairs_for(name, drafts, mode, device):
                if shape not in shapes:
                    continue
                case, begun = f"{name}/{draft}/{shape}/{mode}", time.perf_counter()
                ours = decode(cut, draft, shape, mode)
                cases[case] = {"whole": decode(whole, draft, shape, "eager"), "ranks": ours}
                print(f"rank {mesh.get_rank()}: {case}, {time.perf_counter() - begun:.1f} s", file=sys.stderr, flush=True)
        if name == "llama" and "eager" in modes:
            for label, params in (("seeded", SamplingParams(0.8, top_k=9, seed=5)), ("seedless", SamplingParams(1.0))):
                # The ranks' own generators disagree, and must not matter.
                torch.manual_seed(100 + mesh.get_rank())
                one = decode(whole, "shadow", "tree", "eager", sampling=params)
                ours = decode(cut, "shadow", "tree", "eager", sampling=params)
                cases[f"{name}/shadow/tree/{label}"] = {"whole": one, "ranks": ours}
            cases["group"] = {"ranks": vars(group_of(cut["target"]))}
            cases["group"]["ranks"]["again"] = refusal(cut["target"], mesh)
    return cases


def pairs_for(name: str, drafts: list[str], mode: str, device: str) -> list[tuple[str | None, str]]:
    """All drafts and shapes for the first model and one for the others; compiled, few, and on a CPU but one."""
    if mode != "eager":
        return [(None, "plain"), *((("shadow", "chain"), (drafts[-1], "tree")) if device == "cuda" else ())]
    if name != "llama":
        return [(drafts[-1], "tree")]
    return [(None, "plain"), *((draft, shape) for draft in drafts for shape in ("chain", "tree"))]


def refusal(model: Any, mesh: Any) -> str:
    try:
        shard(model, mesh=mesh)
    except ValueError as error:
        return str(error)
    return ""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--modes", default="eager")
    parser.add_argument("--models", nargs="*", default=[])
    parser.add_argument("--shapes", nargs="*", default=list(ROUNDS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    cases = run(args.device, args.modes.split(","), args.models, args.shapes)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, {key: case["ranks"] for key, case in cases.items()})
    for key, case in cases.items():
        case["ranks"] = [rank[key] for rank in found]
    if dist.get_rank() == 0:
        print(json.dumps(cases))
    dist.barrier()
    if args.device == "cpu":
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
