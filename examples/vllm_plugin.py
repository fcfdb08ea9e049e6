"""vLLM with specops as its attention: SmolLM2-135M, plain or with the draft head that comes with specops.

    make vllm-venv                                            # an environment with vLLM for CPUs
    .venv-vllm/bin/python examples/vllm_plugin.py             # --draft for EAGLE-3 decoding, or a model folder of yours

The first run writes SmolLM2 and the head as folders that vLLM loads, under ~/.cache/specops/vllm.
"""

import argparse
import os
from pathlib import Path
from typing import Any

# For a machine of a few cores; vLLM's own values are those of a server.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{min(os.cpu_count() or 1, 8) - 1}")
os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

PROMPTS = ["The capital of France is", "def add(a, b):\n    return", "Once upon a time", "Water boils at"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Text by vLLM with specops as its attention.")
    parser.add_argument("model", nargs="?", help="a Hugging Face folder or name; SmolLM2-135M when not given")
    parser.add_argument("--draft", action="store_true", help="decode with the EAGLE-3 head of specops (SmolLM2 only)")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    arguments = parser.parse_args()
    if arguments.draft and arguments.model:
        parser.error("--draft has a head for SmolLM2 alone")

    from vllm import LLM, SamplingParams

    from specops.integrations.vllm.checkpoints import write_smollm2

    options: dict[str, Any] = {}
    model = arguments.model
    if model is None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "specops" / "vllm"
        target, head = write_smollm2(cache)
        model = str(target)
        if arguments.draft:
            # The draft's attention is chosen apart from the target's.
            options["speculative_config"] = {
                "method": "eagle3",
                "model": str(head),
                "num_speculative_tokens": 3,
                "attention_backend": "CUSTOM",
            }
    llm = LLM(
        model,
        attention_backend="CUSTOM",  # specops; without this line vLLM's own
        dtype="float32",
        max_model_len=512,
        max_num_seqs=len(PROMPTS),
        enforce_eager=True,
        worker_extension_cls="specops.integrations.vllm.worker.SpecopsWorker",
        **options,
    )
    params = SamplingParams(temperature=0, max_tokens=arguments.max_new_tokens)
    for answer in llm.generate(PROMPTS, params, use_tqdm=False):
        print(repr(answer.prompt + answer.outputs[0].text))
    for counts in llm.collective_rpc("specops_counts"):
        print(f"calls of specops in vLLM's worker: {counts}")


# vLLM starts its workers as new processes, which import this file.
if __name__ == "__main__":
    main()
