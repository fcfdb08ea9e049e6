"""What warming a draft-extend runner up takes in a process of its own: one bucket or all, with empty caches, from caches on
disk, and from a saved file.

    python benchmarks/bench_starts.py --json starts.json

Processes run one after the other: one bucket with empty caches, all buckets with empty caches, all with the caches that
those filled, and all with what those saved to a file, in an empty folder. ``warm_up_s`` is ``total_s`` and ``first_use_s``,
which any first use of a compiler and of cuBLAS takes. ``triton_kernels`` counts the kernels that were compiled and those
found on disk. The draft is that of ``bench_step.py``. What fails, or does not fit into ``--seconds``, becomes a row with a
reason.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from bench_step import BUCKETS, WIDTH, Bench, cache_variables, make_draft, pages_each, shape_options, warm_up

from specops.compile import DraftExtendRunner, load_cache
from specops.models.eagle import EagleHead

CHILD_SECONDS = 100
# As it was before torch put the path of its own ptxas into it, whose version is part of the keys of Triton's cache.
ENVIRONMENT = dict(os.environ)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse(argv)
    if args.child:
        print(json.dumps(process_start(args)))
        return {}
    bench = Bench(args)
    with tempfile.TemporaryDirectory() as folder:
        measure_starts(bench, Path(folder))
    bench.write()
    print(json.dumps({name: figure for name, figure in bench.data.items() if "over" in name}, indent=1))
    return bench.data


def measure_starts(bench: Bench, folder: Path) -> None:
    """Processes with empty caches and one bucket or all, with the caches of all, and with those in a file."""
    saved, all_caches = folder / "cache.bin", cache_variables(folder / "all")
    for name, (variables, options) in {
        "one bucket": (cache_variables(folder / "one"), ["--one-bucket"]),
        "cold": (all_caches, ["--save-cache", str(saved)]),
        "second start": (all_caches, []),
        "saved cache": (cache_variables(folder / "other"), ["--load-cache", str(saved)]),
    }.items():
        # One after the other: two at once would slow each other down.
        with bench.guard("process_start", {"way": name}):
            bench.require(20)
            begun = time.perf_counter()
            figures = finish(start(bench.args, variables, options), min(CHILD_SECONDS, bench.left()))
            bench.add("process_start", {"way": name, **figures, "process_s": round(time.perf_counter() - begun, 2)})
    starts = {row["way"]: row for row in bench.data["process_start"] if "warm_up_s" in row}
    if "cold" not in starts:
        return
    cold = starts["cold"]
    if "one bucket" in starts:
        one = starts["one bucket"]["total_s"]
        bench.data["all_buckets_over_one"] = round(cold["total_s"] / one, 3)
        # Whose attention splits its keys further, by kernels of its own.
        bench.data["all_buckets_over_one_without_a_batch_of_one"] = round(
            (cold["total_s"] - cold["batch_of_one_s"]) / one, 3
        )
    for name in ("second start", "saved cache"):
        if name in starts:
            label = f"{name} over cold".replace(" ", "_")
            bench.data[label] = round(starts[name]["warm_up_s"] / cold["warm_up_s"], 3)
            bench.data[f"{label}_first_uses_apart"] = round(starts[name]["total_s"] / cold["total_s"], 3)
    bench.write()


def start(args: argparse.Namespace, variables: dict[str, str], options: list[str]) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--child", "--device", args.device, "--dtype", args.dtype]
    command += ["--hidden", str(args.hidden), "--intermediate", str(args.intermediate), "--kv", str(args.kv)]
    command += ["--vocab", str(args.vocab), "--max-requests", str(args.max_requests), "--backend", args.backend, *options]
    return subprocess.Popen(
        command, env={**ENVIRONMENT, **variables}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen[str], seconds: float) -> dict[str, Any]:
    try:
        output, errors = process.communicate(timeout=max(1.0, seconds))
    except BaseException:
        process.kill()
        process.communicate()
        raise
    if process.returncode != 0:
        raise RuntimeError((errors.strip().splitlines() or ["no message"])[-1])
    figures: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    return figures


def process_start(args: argparse.Namespace) -> dict[str, Any]:
    """In a process of its own: the time from a ready draft to a warm runner."""
    largest = args.max_requests
    draft = make_draft(args, args.vocab, largest)
    sizes = (largest,) if args.one_bucket else (*(size for size in BUCKETS if size < largest), largest)
    begun = time.perf_counter()
    loaded = load_cache(args.load_cache) if args.load_cache else None
    spans = {"load_cache": round(time.perf_counter() - begun, 3), **first_uses(draft)}
    shape = {"tokens_per_request": WIDTH, "max_requests": largest, "max_pages": pages_each(args)}
    runner = DraftExtendRunner(draft, draft.caches, mode="direct", buckets=sizes, **shape)
    with kernels_compiled() as kernels:
        figures = warm_up(runner)
    warm_up_s = round(time.perf_counter() - begun, 3)
    found = {"warm_up_s": warm_up_s, "first_use_s": spans, "triton_kernels": kernels, **figures}
    if args.save_cache:
        found["saved_mib"] = round(runner.save_cache(args.save_cache) / 2**20, 2)
    return found if loaded is None else {**found, "loaded": loaded}


def first_uses(draft: EagleHead) -> dict[str, float]:
    """Seconds that any first use of the compiler and of cuBLAS in a process takes."""
    spans = {}
    begun = time.perf_counter()
    importlib.import_module("torch._inductor.compile_fx")
    spans["imports"] = round(time.perf_counter() - begun, 3)
    begun = time.perf_counter()
    product = draft.lm_head_weight @ draft.lm_head_weight[:1].t()
    if product.is_cuda:
        torch.cuda.synchronize()
    spans["first product"] = round(time.perf_counter() - begun, 3)
    return spans


@contextlib.contextmanager
def kernels_compiled() -> Iterator[dict[str, int]]:
    """Counts the Triton kernels of this process that are ``compiled`` and those ``found`` in its cache on disk meanwhile."""
    counts = {"compiled": 0, "found": 0}
    try:
        from triton import knobs
    except ImportError:
        yield counts
        return

    def told(*, cache_hit: bool, **about: Any) -> None:
        counts["found" if cache_hit else "compiled"] += 1

    knobs.compilation.listener = told
    try:
        yield counts
    finally:
        knobs.compilation.listener = None


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shape_options(parser)
    add = parser.add_argument
    add("--vocab", type=int, default=32000 if cuda else 1024)
    add("--max-requests", type=int, default=256 if cuda else 4, help="the largest bucket")
    add("--seconds", type=float, default=200.0)
    add("--child", action="store_true", help=argparse.SUPPRESS)
    add("--one-bucket", action="store_true", help=argparse.SUPPRESS)
    add("--load-cache", help=argparse.SUPPRESS)
    add("--save-cache", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
