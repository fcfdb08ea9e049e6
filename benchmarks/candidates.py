"""Candidates worth a comparison, by row, and their measurement in processes of their own.

A candidate that faults takes its process with it; the next one then starts where the list went on. One JSON line is
printed for each row and candidate: microseconds by CUDA-graph replay over rotating KV sets, and the error against float64,
which is looked at first. ``tune_triton.py --set listed`` compiles all of them and then calls :func:`run`.
"""

from __future__ import annotations

import json
import os
import pickle
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

sys.path[:0] = [os.path.dirname(os.path.abspath(__file__)), os.path.dirname(os.path.dirname(os.path.abspath(__file__)))]

import torch  # noqa: E402
from common import MHA_ROWS, SMALL_ROWS, Row  # noqa: E402

from specops.ops.triton_common import Tiling, next_power_of_2  # noqa: E402
from specops.ops.triton_mha import choose_tiling  # noqa: E402

# ||out - ref|| / ||ref|| of an output vector; bf16 inputs give up to 5e-3.
GOOD_ERROR = 3e-2
# A candidate that says nothing for so long hangs.
PATIENCE_S = 20.0
# Exit code of a worker that has said why its CUDA context is lost.
BROKEN = 3

Job = tuple[Row, Tiling]


def mha_jobs() -> list[Job]:
    """Every row of the MHA table and the small ones, each with its candidates; features last."""
    rows = [*MHA_ROWS[:7], *SMALL_ROWS, *MHA_ROWS[7:]]
    return [(row, tiling) for row in rows for tiling in mha_candidates(row)]


def mha_candidates(row: Row) -> list[Tiling]:
    m = max(16, next_power_of_2(row.query_len * row.num_heads // row.num_kv_heads))
    even = Tiling(m, 64, 4, 3, 2, even=True, early=True, min_blocks=2)
    direct = Tiling(m, 64, 4, 3, 2, direct=True, early=True)
    if row in SMALL_ROWS:
        found = _small(row, m)
    elif row.batch == 1:
        base = replace(direct, inline_merge=False, wide_merge=row.head_dim > 64, prefetch=1)
        sizes = [(64, 4, 3, 2), (64, 4, 3, 3), (64, 4, 2, 3), (64, 4, 4, 2), (64, 4, 3, 1), (128, 4, 2, 2), (128, 8, 2, 2)]
        # A program for each 128 or 256 keys, with half and a quarter of the partial results, took 11.8 to 16.1 us.
        found = [*_sized(base, sizes), replace(base, early=False), replace(base, rounded_partials=True)]
        found += [replace(base, prefetch=0), replace(base, prefetch=2), replace(base, wide_merge=not base.wide_merge)]
        found += _sized(base, [(64, 4, 5, 2), (64, 4, 6, 2), (64, 4, 5, 1)])
    elif row.name in ("window", "window_control", "ragged", "tree", "sinks"):
        found = [even, replace(even, swap=True), replace(even, even=False)]
        found += _sized(replace(direct, min_blocks=4), [(64, 4, 3, 2), (64, 8, 3, 2), (64, 8, 3, 4)])
    else:
        # Without the schedule: what the even cut would take if it cost nothing to find out.
        found = [direct, even, *(replace(even, prefetch=blocks) for blocks in (1, 2))]
        found += [replace(even, early=False), replace(even, swap=True)]
        found += _sized(even, [(64, 4, 3, 4), (64, 4, 3, 8), (64, 4, 4, 2)])
        found += _sized(replace(even, max_registers=168), [(64, 4, 3, 2), (64, 4, 3, 3)]) if m == 16 else []
        found += _sized(even, [(32, 4, 6, 2), (32, 4, 4, 3)]) if m == 16 else []
    return list(dict.fromkeys([*found, chosen(row)]))


def _sized(base: Tiling, sizes: Any) -> list[Tiling]:
    return [replace(base, block_n=n, num_warps=w, num_stages=s, programs_per_sm=p) for n, w, s, p in sizes]


def _small(row: Row, m: int) -> list[Tiling]:
    """Short lengths under a wide page table: one launch without a merge, one with, or two."""
    wide = [(256, 4, 1, 2), (256, 8, 1, 2), (256, 8, 2, 2), (128, 4, 2, 2), (128, 8, 2, 2)]
    direct = Tiling(m, 64, 4, 3, 2, direct=True, early=True)
    if row.batch == 1:
        two = replace(direct, inline_merge=False)
        found = [two, replace(two, prefetch=2), replace(two, min_blocks=2), replace(two, early=False)]
        found += [replace(two, block_n=128), *_sized(direct, wide), *_sized(replace(direct, min_blocks=2), wide)]
        return [*found, replace(direct, min_blocks=4)]
    even = Tiling(m, 64, 4, 3, 2, even=True, early=True, min_blocks=4)
    found = [replace(direct, min_blocks=4), even, replace(even, prefetch=2), replace(even, early=False)]
    return [*found, *_sized(replace(even, min_blocks=1), wide), *_sized(replace(even, min_blocks=2), wide)]


def chosen(row: Row) -> Tiling:
    """What a call of ``row`` takes today."""
    rows, half = row.query_len * row.num_heads // row.num_kv_heads, torch.bfloat16
    return choose_tiling(
        rows,
        half,
        half,
        row.head_dim,
        row.head_dim,
        True,
        batch=row.batch,
        units_per_sm=row.batch * row.num_kv_heads / 132,
        room=max(row.table_keys, *row.lens),
    )


def run(jobs: list[Job], seconds: float, short: Callable[[Tiling], str]) -> list[dict[str, Any]]:
    """Measure ``jobs`` in turn and print a line for each; whatever faults or hangs is said and passed over.

    Returns:
        The lines as dicts, in order: ``row``, ``t`` and either ``us`` and ``err`` or ``failed``.
    """
    until, lines, first = time.monotonic() + seconds, [], 0
    with tempfile.NamedTemporaryFile(suffix=".jobs") as file:
        pickle.dump(jobs, file)
        file.flush()
        while first < len(jobs) and time.monotonic() < until:
            command = [sys.executable, os.path.abspath(__file__), file.name, str(first), str(until - time.monotonic())]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
                # The first answer takes starting CUDA and making the inputs.
                answered, patience = first, 3 * PATIENCE_S
                spoken = _lines(worker)
                while line := _next(spoken, patience):
                    said = json.loads(line)
                    said = {"row": jobs[answered][0].name, "t": short(jobs[answered][1]), **said}
                    print(json.dumps(said), flush=True)
                    lines.append(said)
                    answered, patience = answered + 1, PATIENCE_S
                worker.kill()
            if answered == len(jobs) or worker.returncode == 0:
                break
            if worker.returncode == BROKEN:
                first = answered
                continue
            said = {"row": jobs[answered][0].name, "t": short(jobs[answered][1]), "failed": f"exit {worker.returncode}"}
            print(json.dumps(said), flush=True)
            lines.append(said)
            first = answered + 1
    return lines


def _lines(worker: subprocess.Popen[str]) -> queue.Queue[str]:
    """What ``worker`` prints, line by line as it comes, then an empty line."""
    found: queue.Queue[str] = queue.Queue()

    def read() -> None:
        assert worker.stdout is not None
        for line in worker.stdout:
            found.put(line)
        found.put("")

    threading.Thread(target=read, daemon=True).start()
    return found


def _next(lines: queue.Queue[str], patience: float) -> str:
    """The next line; empty when there is none for too long."""
    try:
        return lines.get(timeout=patience)
    except queue.Empty:
        return ""


def measure(jobs: list[Job], first: int, seconds: float) -> None:
    """In the worker: one JSON line for each job from ``first`` on, without the names that the parent adds."""
    import common

    until = time.monotonic() + seconds
    inputs, reference = None, None
    for row, tiling in jobs[first:]:
        if time.monotonic() > until:
            return
        if inputs is None or reference is None or inputs.row != row:
            inputs, reference = None, None
            torch.cuda.empty_cache()
            inputs = common.make_inputs(row)
            reference = common.reference_rows(inputs, inputs.page_tables[0], row.head_dim, row.head_dim**-0.5)
        try:
            said = _measured(inputs, reference, tiling)
            torch.cuda.synchronize()
        except Exception as failure:
            print(json.dumps({"failed": f"{type(failure).__name__} {str(failure)[:120]}"}), flush=True)
            if "CUDA" in str(failure):
                os._exit(BROKEN)
        else:
            print(json.dumps(said), flush=True)


def _measured(inputs: Any, reference: Any, tiling: Tiling) -> dict[str, Any]:
    import common
    from tune_triton import real_call

    from specops.ops.triton_common import release_counters

    def call_on(table: Any) -> Callable[[], Any]:
        return lambda: real_call(inputs, table, tiling, False)

    calls = [call_on(table) for table in inputs.page_tables]
    errors = [common.error_against(reference, calls[0](), inputs.row)]
    # Once more from a replayed graph in which launches overlap.
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [call() for call in calls[:2] * 4]
    for _ in range(3):
        graph.replay()
    errors += [common.error_against(reference, out, inputs.row) for out in outs[::2]]
    del graph, outs
    release_counters()
    # NaN stays.
    error = max(errors) if all(one == one for one in errors) else float("nan")
    said: dict[str, Any] = {"err": float(f"{error:.1e}")}
    if not error < GOOD_ERROR:
        return {**said, "failed": "wrong"}
    return {"us": round(common.graph_us(calls), 2), **said}


if __name__ == "__main__":
    with open(sys.argv[1], "rb") as handle:
        measure(pickle.load(handle), int(sys.argv[2]), float(sys.argv[3]))
