"""Tokens per second of vLLM engines: with specops as their attention, and with vLLM's own, side by side in one run.

    .venv-vllm/bin/python benchmarks/bench_vllm_plugin.py [--json FILE] [--compiled]       # after make vllm-venv

SmolLM2-135M, greedy, on a CPU. Engines run one after another in processes of their own, vLLM's before and after specops', so
that a machine that changes meanwhile shows. A figure is the best of three rounds, prompts included.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

MARK = "RESULT "
PROMPT = "The sea was calm that morning, and the boats went out one after another. "
ROUNDS, NEW = 3, 128


def measure(folder: str, attention: str, dtype: str, compiled: bool, batches: list[int], words: int) -> None:
    """In a process of its own: start an engine, time it, print one line."""
    from vllm import LLM, SamplingParams

    options: dict[str, Any] = {"attention_backend": "CUSTOM"} if attention == "specops" else {}
    llm = LLM(
        folder,
        dtype=dtype,
        max_model_len=1024,
        max_num_seqs=max(batches),
        enforce_eager=not compiled,
        enable_prefix_caching=False,
        worker_extension_cls="specops.integrations.vllm.worker.SpecopsWorker",
        **options,
    )
    prompts = [f"{index}. " + PROMPT * (words // 15) for index in range(max(batches))]
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    best = {}
    for batch in batches:
        seconds = []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            llm.generate(prompts[:batch], params, use_tqdm=False)
            seconds.append(time.perf_counter() - start)
        best[str(batch)] = round(batch * NEW / min(seconds), 1)
    (counts,) = llm.collective_rpc("specops_counts")
    print(MARK + json.dumps({"tokens_per_second": best, "counts": counts}), flush=True)


def run(arguments: argparse.Namespace, folder: Path, attention: str, dtype: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", attention, "--folder", str(folder), "--dtypes", dtype]
    command += ["--words", str(arguments.words), "--batches", *map(str, arguments.batches)]
    command += ["--compiled"] if arguments.compiled else []
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **variables()})
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if not lines:
        raise SystemExit(f"the {attention} engine failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(lines[0].removeprefix(MARK))
    ran = result["counts"]["stored"] > 0
    if ran != (attention == "specops"):
        raise SystemExit(f"the {attention} engine ran another attention: {result['counts']}")
    return result


def variables() -> dict[str, str]:
    """What vLLM's manual asks for on a CPU: threads bound to cores, and Intel's OpenMP where it is installed."""
    threads = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", f"0-{(os.cpu_count() or 1) - 1}")
    found = {"VLLM_CPU_OMP_THREADS_BIND": threads, "VLLM_CPU_NUM_OF_RESERVED_CPU": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    library = Path(sys.prefix) / "lib" / "libiomp5.so"
    return {**found, "LD_PRELOAD": str(library)} if library.is_file() else found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--compiled", action="store_true", help="vLLM's compiled code instead of eager mode")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--words", type=int, default=60, help="length of the prompts")
    parser.add_argument("--folder", type=Path, help="of SmolLM2, where it is written already")
    parser.add_argument("--one", choices=["specops", "vllm"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        options = (arguments.dtypes[0], arguments.compiled, arguments.batches, arguments.words)
        measure(str(arguments.folder), arguments.one, *options)
        return

    import torch
    import vllm

    import specops
    from specops.integrations.vllm.checkpoints import write_target

    folder = arguments.folder or Path("~/.cache").expanduser() / "specops" / "vllm" / "smollm2-135m"
    write_target("smollm2", folder)
    facts = {"vllm": vllm.__version__, "specops": specops.__version__, "torch": torch.__version__, "cores": os.cpu_count()}
    facts |= {"compiled": arguments.compiled, "new_tokens": NEW, "prompt_words": arguments.words}
    rows = []
    print(facts)
    print(f"{'dtype':10}{'batch':>6}{'vLLM':>10}{'specops':>10}{'vLLM again':>12}{'ratio':>8}")
    for dtype in arguments.dtypes:
        found = [run(arguments, folder, attention, dtype) for attention in ("vllm", "specops", "vllm")]
        for batch in map(str, arguments.batches):
            before, own, after = (result["tokens_per_second"][batch] for result in found)
            ratio = round(own / max(before, after), 3)
            rows.append({"dtype": dtype, "batch": int(batch), "vllm": [before, after], "specops": own, "ratio": ratio})
            print(f"{dtype:10}{batch:>6}{before:>10}{own:>10}{after:>12}{ratio:>8}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps({**facts, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
