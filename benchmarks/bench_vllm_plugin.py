"""Tokens per second of vLLM engines: with specops as their attention, and with vLLM's own, taking turns.

    .venv-vllm/bin/python benchmarks/bench_vllm_plugin.py [--json FILE] [--compiled] [--threads N]    # after make vllm-venv

SmolLM2-135M, greedy, on a CPU. Both engines of a dtype are up, each in processes of its own, and generate in turn, so that a
machine that changes meanwhile changes for both. Printed are the best of the rounds: tokens a second, and processor
milliseconds a step of an engine's processes, prompts included. Where other work shares the machine, processor time with one
thread says more than the clock; threads that wait for each other spin.
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
WORDS = 15


def serve(folder: str, attention: str, dtype: str, compiled: bool, most: int, words: int) -> None:
    """In a process of its own: start an engine, then generate as often as a line on stdin asks for it."""
    from vllm import LLM, SamplingParams

    options: dict[str, Any] = {"attention_backend": "CUSTOM"} if attention == "specops" else {}
    llm = LLM(
        folder,
        dtype=dtype,
        max_model_len=1024,
        max_num_seqs=most,
        enforce_eager=not compiled,
        enable_prefix_caching=False,
        worker_extension_cls="specops.integrations.vllm.worker.SpecopsWorker",
        **options,
    )
    prompts = [f"{index}. " + PROMPT * (words // WORDS) for index in range(most)]
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    answer(llm.collective_rpc("specops_counts")[0])
    for line in sys.stdin:
        batch, new = map(int, line.split())
        start = time.perf_counter()
        llm.generate(prompts[:batch], SamplingParams(temperature=0, max_tokens=new, ignore_eos=True), use_tqdm=False)
        answer({"seconds": time.perf_counter() - start})


def answer(result: dict[str, Any]) -> None:
    print(MARK + json.dumps(result), flush=True)


class Engine:
    """An engine in a process of its own, up once this is made."""

    def __init__(self, arguments: argparse.Namespace, folder: Path, attention: str, dtype: str) -> None:
        command = [sys.executable, __file__, "--one", attention, "--folder", str(folder), "--dtypes", dtype]
        command += ["--words", str(arguments.words), "--batches", *map(str, arguments.batches)]
        command += ["--compiled"] if arguments.compiled else []
        environment = {**os.environ, **variables(arguments.threads)}
        self.attention = attention
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        counts = self.read()
        if (counts["stored"] > 0) != (attention == "specops"):
            raise SystemExit(f"the {attention} engine ran another attention: {counts}")

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        said = []
        for line in self.process.stdout:
            if line.startswith(MARK):
                result: dict[str, Any] = json.loads(line.removeprefix(MARK))
                return result
            said.append(line)
        raise SystemExit(f"the {self.attention} engine failed:\n{''.join(said)[-4000:]}")

    def run(self, batch: int, new: int) -> tuple[float, float]:
        """Seconds by the clock, and seconds of processors, of ``new`` tokens of each of ``batch`` prompts."""
        assert self.process.stdin is not None
        before = processor_seconds(self.process.pid)
        self.process.stdin.write(f"{batch} {new}\n")
        self.process.stdin.flush()
        seconds = self.read()["seconds"]
        return seconds, processor_seconds(self.process.pid) - before

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)


def processor_seconds(pid: int) -> float:
    """Of a process and those that it started, as Linux counts them."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    own = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    children = [child for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]
    return own + sum(processor_seconds(int(child)) for child in children)


def variables(threads: int) -> dict[str, str]:
    """What vLLM's manual asks for on a CPU: threads bound to cores, and Intel's OpenMP where it is installed."""
    found = {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, range(threads))),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    library = Path(sys.prefix) / "lib" / "libiomp5.so"
    return {**found, "LD_PRELOAD": str(library)} if library.is_file() else found


def compare(arguments: argparse.Namespace, folder: Path, dtype: str) -> list[dict[str, Any]]:
    engines = {attention: Engine(arguments, folder, attention, dtype) for attention in ("vllm", "specops")}
    rows = []
    for batch in arguments.batches:
        found: dict[str, list[tuple[float, float]]] = {attention: [] for attention in engines}
        for turn in range(arguments.rounds):
            for attention in sorted(engines, reverse=turn % 2 == 0):
                found[attention].append(engines[attention].run(batch, arguments.new))
        row: dict[str, Any] = {"dtype": dtype, "batch": batch}
        for attention, results in found.items():
            row[f"{attention}_tokens_per_second"] = round(batch * arguments.new / min(clock for clock, _ in results), 1)
            row[f"{attention}_processor_ms"] = round(min(spent for _, spent in results) / arguments.new * 1e3, 2)
        rows.append(row)
        cells = [row[f"{attention}_{what}"] for what in ("tokens_per_second", "processor_ms") for attention in engines]
        print(f"{dtype:10}{batch:>6}" + "".join(f"{cell:>12}" for cell in cells), flush=True)
    for engine in engines.values():
        engine.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--compiled", action="store_true", help="vLLM's compiled code instead of eager mode")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--words", type=int, default=60, help="length of the prompts")
    parser.add_argument("--new", type=int, default=48, help="new tokens of each prompt")
    parser.add_argument("--rounds", type=int, default=4, help="turns of each engine")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--folder", type=Path, help="of SmolLM2, where it is written already")
    parser.add_argument("--one", choices=["specops", "vllm"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        options = (arguments.dtypes[0], arguments.compiled, max(arguments.batches), arguments.words)
        serve(str(arguments.folder), arguments.one, *options)
        return

    import torch
    import vllm

    import specops
    from specops.integrations.vllm.checkpoints import write_target

    folder = arguments.folder or Path("~/.cache").expanduser() / "specops" / "vllm" / "smollm2-135m"
    write_target("smollm2", folder)
    facts = {"vllm": vllm.__version__, "specops": specops.__version__, "torch": torch.__version__}
    facts |= {name: getattr(arguments, name) for name in ("threads", "compiled", "new", "words", "rounds")}
    print(facts)
    print(f"{'':16}{'tokens/s':>24}{'processor ms a step':>24}")
    print(f"{'dtype':10}{'batch':>6}" + f"{'vLLM':>12}{'specops':>12}" * 2)
    rows = [row for dtype in arguments.dtypes for row in compare(arguments, folder, dtype)]
    if arguments.json:
        arguments.json.write_text(json.dumps({**facts, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
