"""Candidates of the MLA kernels on Hopper: checks each against float64, then times them on the rows of ``bench_mla.py``.

    python benchmarks/tune_mla.py --seconds 100
    python benchmarks/tune_mla.py --rows 128h_128x4x4096 --no-check
    python benchmarks/tune_mla.py --set merge --rows 16h_8x4x4096 16h_32x4x4096 128h_1x4x4096 128h_8x4x4096 --no-check

All kernels are compiled first, in several processes. Everything that touches the GPU runs in a process of its own: a
candidate that faults or hangs is named and passed over. One JSON line is printed for each check and measurement, and the
fastest of each row last, beside FlashInfer's fa3 where it is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

sys.path[:0] = [os.path.dirname(os.path.abspath(__file__)), os.path.dirname(os.path.dirname(os.path.abspath(__file__)))]

from common import MLA_ROWS, Row  # noqa: E402

from specops.ops.triton_common import Tiling  # noqa: E402

GOOD_ERROR = 1e-2
# A candidate that says nothing for so long hangs; the first answer of a process takes starting CUDA as well.
PATIENCE_S, START_S = 20.0, 45.0
# Which candidates are compared.
chosen_set = "all"
# Exit code of a worker that has said why its CUDA context is lost.
BROKEN = 3

HOPPER = Tiling(64, 64, 8, 2, 1, inline_merge=False, hopper=True)
ROLES = Tiling(64, 64, 4, 2, 1, inline_merge=False, roles=True)
# One long request among short ones, for which every program having the same share of each is the wrong cut.
RAGGED = [
    Row("16h_ragged", 32, 4, (32768, *[512] * 31), num_heads=16, num_kv_heads=1, head_dim=576),
    Row("128h_ragged", 8, 4, (32768, *[512] * 7), num_heads=128, num_kv_heads=1, head_dim=576),
]
ROWS = [*MLA_ROWS, *RAGGED]
CHECKS: list[dict[str, Any]] = [
    {"num_heads": 16, "query_lens": 4},
    {"num_heads": 128, "query_lens": 5},
    {"num_heads": 16, "query_lens": 2, "page_size": 128, "sinks": True},
    {"num_heads": 24, "query_lens": [1, 6, 0, 3, 30], "slack": 2},
    {"num_heads": 16, "query_lens": 6, "tree_width": 6},
    {"num_heads": 16, "query_lens": 6, "tree_width": 40, "sinks": True},
    {"num_heads": 16, "query_lens": 4, "table_columns": 5},
]


def candidates(row: Row) -> dict[str, Tiling | None]:
    """Names and tilings; None is what ``choose_tiling`` picks."""
    return _merging(row) if chosen_set == "merge" else _all(row)


def _merging(row: Row) -> dict[str, Tiling | None]:
    """Ways to leave partial results and to merge them."""
    found: dict[str, Tiling | None] = {"default": None}
    name, base = (
        ("hold", replace(ROLES, direct=True, hold=True)) if row.num_heads > 16 else ("free", replace(ROLES, direct=True))
    )
    for early in (False, True):
        for rounded in (False, True):
            for wide in (False, True):
                if early or wide:
                    words = [name, *["early"] * early, *["rounded"] * rounded, *["wide"] * wide]
                    tiling = replace(base, early=early, rounded_partials=rounded, wide_merge=wide)
                    found["/".join(words)] = tiling
    if row.batch > 1:
        even = replace(base, direct=False, even=True, early=True, wide_merge=True)
        found |= {"even/early/wide": even, "even/early/rounded/wide": replace(even, rounded_partials=True)}
    return found


def _all(row: Row) -> dict[str, Tiling | None]:
    units = row.batch * -(-row.query_len * row.num_heads // 64)
    found: dict[str, Tiling | None] = {"default": None}
    for name, tiling in (("free", ROLES), ("hold", replace(ROLES, hold=True))):
        direct = replace(tiling, direct=True)
        if units == 1:
            found |= {f"{name}/direct/min{least}": replace(direct, min_blocks=least) for least in (1, 2, 4)}
            continue
        found[f"{name}/direct"] = direct
        if units < 132:
            found[f"{name}/direct/rounded"] = replace(direct, rounded_partials=True)
            found[f"{name}/schedule"] = tiling
    if 1 < units < 132:
        found["free/direct/early"] = replace(ROLES, direct=True, early=True)
        found["free/direct/early/rounded"] = replace(ROLES, direct=True, early=True, rounded_partials=True)
        found["free/schedule/early"] = replace(ROLES, early=True)
    if units > 1:
        found["old/direct"] = replace(HOPPER, direct=True)
    return found


def checked(index: int) -> dict[str, Tiling]:
    """Every second case takes every second pairing, which halves what must be compiled."""
    return {
        f"{'hold' if hold else 'free'}/{'direct' if direct else 'schedule'}": replace(ROLES, hold=hold, direct=direct)
        for hold in (False, True)
        for direct in (False, True)
        if (hold + direct + index) % 2 == 0
    }


def jobs(rows: list[Row], check: bool) -> list[tuple[str, str]]:
    found = [(f"check{i}", name) for i in range(len(CHECKS)) for name in checked(i)] if check else []
    return found + [(row.name, name) for row in rows for name in [*candidates(row), "fa3"]]


def compile_ahead(rows: list[Row], check: bool, workers: int) -> list[str]:
    """Compile what will run; returns what went wrong."""
    from compile_triton import MlaCall, compile_all

    calls = {}
    for index, case in enumerate(CHECKS if check else []):
        packed = isinstance(case["query_lens"], list)
        rows_of = max(case["query_lens"]) if packed else case["query_lens"]
        options = {key: value for key, value in case.items() if key in ("page_size", "sinks", "tree_width")}
        for name, tiling in checked(index).items():
            calls[MlaCall(5, rows_of, case["num_heads"], packed=packed, tiling=tiling, **options)] = name
    for row in rows:
        for name, tiling in candidates(row).items():
            if tiling is not None and tiling.roles:
                size = next(size for size in (1, 8, 32, 1024) if size >= min(row.batch, 32))
                tiling = replace(tiling, min_blocks=1 if tiling.direct else tiling.min_blocks)
                call = MlaCall(size, row.query_len, row.num_heads, page_size=64, max_pages=64, tiling=tiling)
                calls[call] = name
    # What differs in the batch or the merge alone has the same first kernel, which is compiled once.
    kinds = {replace(call, batch=0, tiling=replace(call.tiling, wide_merge=False)): call for call in calls}
    first = list(kinds.values())
    rest = [call for call in calls if call not in first]
    results = [*zip(first, compile_all(first, workers), strict=True), *zip(rest, compile_all(rest, workers), strict=True)]
    failed = []
    for call, result in results:
        name = calls[call]
        if isinstance(result, str):
            failed.append(f"{name} b{call.batch} h{call.num_heads}: {result}")
        elif result[0].stack or result[0].product_groups > 12:
            failed.append(f"{name} b{call.batch} h{call.num_heads}: {result[0]}")
    return failed


def parent(args: argparse.Namespace) -> None:
    began = time.monotonic()
    rows = [row for row in ROWS if not args.rows or row.name in args.rows]
    print("\n".join(compile_ahead(rows, args.check, args.workers)))
    print(f"compiled in {time.monotonic() - began:.0f} s", flush=True)
    todo, first, lines = jobs(rows, args.check), 0, []
    while first < len(todo) and time.monotonic() - began < args.seconds:
        left = str(args.seconds - (time.monotonic() - began))
        command = [sys.executable, os.path.abspath(__file__), "--worker", str(first), "--seconds", left]
        command += [] if args.check else ["--no-check"]
        command += ["--rows", *args.rows] if args.rows else []
        command += ["--set", args.set]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as worker:
            patience = START_S
            while line := _line(worker, patience):
                said = json.loads(line)
                first, patience = said.pop("next"), PATIENCE_S
                lines.append(said)
                print(json.dumps(said), flush=True)
            ended = _exit_code(worker)
        if ended == 0:
            break
        if ended != BROKEN and first < len(todo):
            row, name = todo[first]
            lines.append({"row": row, "t": name, "failed": "hangs" if ended is None else f"exit {ended}"})
            print(json.dumps(lines[-1]), flush=True)
            first += 1
    for row in rows:
        timed = sorted((x for x in lines if x["row"] == row.name and "us" in x), key=lambda x: x["us"])
        peer = next((x["us"] for x in timed if x["t"] == "fa3"), None)
        ours = [x for x in timed if x["t"] != "fa3"]
        print(
            f"{row.name:17} fa3 {peer}: "
            + "; ".join(f"{x['us']:.1f} {x['t']}" + (f" ({x['us'] / peer:.2f})" if peer else "") for x in ours[:6])
        )
    if "OUT" in os.environ:
        with open(os.path.join(os.environ["OUT"], "tune_mla.json"), "w") as file:
            json.dump(lines, file, indent=0)
    print(f"{time.monotonic() - began:.0f} s")


def _line(worker: subprocess.Popen[str], patience: float) -> str:
    assert worker.stdout is not None
    ready, _, _ = select.select([worker.stdout], [], [], patience)
    return worker.stdout.readline() if ready else ""


def _exit_code(worker: subprocess.Popen[str]) -> int | None:
    """How ``worker`` ended; None for one that does not, which is killed."""
    try:
        return worker.wait(1.0)
    except subprocess.TimeoutExpired:
        worker.kill()
        return None


def work(args: argparse.Namespace) -> None:
    """In the worker: measure jobs from ``--worker`` on, one line each."""
    until = time.monotonic() + args.seconds
    rows = [row for row in ROWS if not args.rows or row.name in args.rows]
    state: dict[str, Any] = {}
    for index, (where, name) in enumerate(jobs(rows, args.check)):
        if index < args.worker:
            continue
        if time.monotonic() > until:
            return
        try:
            if where.startswith("check"):
                said = _check(CHECKS[int(where[5:])], checked(int(where[5:]))[name])
            else:
                said = _time(next(row for row in rows if row.name == where), name, state)
        except Exception as failure:
            said = {"failed": f"{type(failure).__name__} {str(failure)[:300]}"}
            print(json.dumps({"row": where, "t": name, **said, "next": index + 1}), flush=True)
            if "CUDA" in str(failure):
                os._exit(BROKEN)
        else:
            print(json.dumps({"row": where, "t": name, **said, "next": index + 1}), flush=True)


def _check(case: dict[str, Any], tiling: Tiling) -> dict[str, Any]:
    import torch

    from specops.ops.triton_mla import mla
    from specops.testing import assert_close_to_oracle, make_mla_case

    on = {"latent_dim": 512, "rope_dim": 64, "page_size": 64, "dtype": torch.bfloat16, "device": "cuda", **case}
    made = make_mla_case(seq_lens=(2100, 64, 40, 65, 333), **on)
    out = mla(*made.args(), **made.kwargs(), tiling=tiling, split=True)
    return {"err": float(f"{assert_close_to_oracle(out, made.oracle()):.1e}")}


def _time(row: Row, name: str, state: dict[str, Any]) -> dict[str, Any]:
    import common
    import torch
    from peers import MLA_PEERS, MLA_SCALE

    from specops.ops.triton_mla import mla

    if state.get("row") != row:
        state.clear()
        torch.cuda.empty_cache()
        inputs = common.make_inputs(row, mla=True)
        reference = common.reference_rows(inputs, inputs.page_tables[0], 512, MLA_SCALE)
        state.update(row=row, inputs=inputs, reference=reference)
    inputs = state["inputs"]
    if name == "fa3":
        calls = MLA_PEERS["fa3"](inputs)
    else:
        split = None if candidates(row)[name] is None else True
        given = (inputs.q[..., :512], inputs.q[..., 512:], inputs.k_cache[:, :, 0])

        def call_on(table: torch.Tensor) -> Callable[[], torch.Tensor]:
            options: dict[str, Any] = {"layout": inputs.layout, "scale": MLA_SCALE, "split": split}
            return lambda: mla(*given, table, inputs.seq_lens, **options, tiling=candidates(row)[name])

        calls = [call_on(table) for table in inputs.page_tables]
    out = calls[0]()
    error = common.error_against(state["reference"], out, row)
    said: dict[str, Any] = {"err": float(f"{error:.1e}")}
    if not error < GOOD_ERROR:
        return {**said, "failed": "wrong"}
    return {"us": round(common.graph_us(calls), 2), **said}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=100)
    parser.add_argument("--rows", nargs="*", help="names of rows; all when not given")
    parser.add_argument("--set", choices=["all", "merge"], default="all", help="which candidates")
    parser.add_argument("--no-check", dest="check", action="store_false", help="leave out the checks of ragged cases")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--worker", type=int, default=-1, help=argparse.SUPPRESS)
    given = parser.parse_args()
    chosen_set = given.set
    if given.worker < 0:
        parent(given)
    else:
        work(given)
