"""Which sizes serve which shape best: sweeps block sizes, warps, stages, programs and merge styles of the Triton kernels.

    python benchmarks/tune_triton.py --seconds 150            # on the GPU host; a JSON file goes to $OUT
    python benchmarks/tune_triton.py --set splits             # ways of splitting and merging instead of block sizes
    python benchmarks/tune_triton.py --set listed --seconds 100 # the candidates of candidates.py, one line each
    python benchmarks/tune_triton.py --family mla --rows 16h_1x4x4096
    python benchmarks/tune_triton.py --compile-only           # anywhere: what the candidates need of registers and memory

All candidates are compiled first, in several processes and before CUDA starts, so that most of the time is measuring.
Every measured output is compared with float64. Results go into ``choose_tiling`` of the two backends by hand.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

import torch

sys.path[:0] = [os.path.dirname(os.path.abspath(__file__)), os.path.dirname(os.path.dirname(os.path.abspath(__file__)))]

import candidates  # noqa: E402
import common  # noqa: E402
from common import MHA_ROWS, MLA_ROWS, Inputs, Row  # noqa: E402
from compile_triton import Compiled, MhaCall, MlaCall, compile_all  # noqa: E402

from specops.ops.triton_common import Tiling, next_power_of_2  # noqa: E402

REGISTERS, SHARED_BYTES, WARPS = 65536, 228 * 1024, 64
MLA_SCALE = 192**-0.5
# ||out - ref|| / ||ref|| of an output vector; bf16 inputs give up to 5e-3.
GOOD_ERROR = 3e-2


@dataclass
class Result:
    row: str
    tiling: Tiling
    us: float
    error: float


def mha_candidates(row: Row) -> list[Tiling]:
    m = max(16, next_power_of_2(row.query_len * row.num_heads // row.num_kv_heads))
    plain = [(32, 1, 3), (32, 1, 4), (32, 2, 3), (32, 2, 4), (32, 4, 4), (32, 4, 6)]
    plain += [(64, 2, 3), (64, 4, 2), (64, 4, 3), (64, 4, 4), (64, 8, 3), (128, 4, 2), (128, 4, 3), (128, 8, 2), (128, 8, 3)]
    swapped = [(64, 4, 2), (64, 4, 3), (64, 4, 4), (128, 4, 2), (128, 4, 3), (128, 8, 3)]
    found = [Tiling(m, n, w, s, 0) for n, w, s in plain]
    found += [Tiling(m, n, w, s, 0, swap=True) for n, w, s in swapped]
    found += [Tiling(m, 64, 4, 3, 0, max_registers=168), Tiling(m, 64, 4, 2, 0, max_registers=128)]
    found += [Tiling(m, 64, 4, 3, 0, swap=True, max_registers=128)]
    if row.name in ("window", "window_control", "ragged", "tree", "sinks", "tiny"):
        return [found[i] for i in (3, 8, 9, 12, 16, 17)]
    return found


def mla_candidates(row: Row) -> list[Tiling]:
    sizes = [(64, 64, 8, 2), (64, 32, 8, 2), (64, 32, 8, 3), (64, 64, 8, 1), (64, 128, 8, 1), (64, 64, 4, 2), (64, 32, 4, 3)]
    sizes += [(32, 64, 4, 2), (32, 32, 4, 3), (32, 32, 4, 2), (16, 64, 4, 2), (16, 32, 4, 3)]
    found = [Tiling(m, n, w, s, 0) for m, n, w, s in sizes]
    return [*found, Tiling(64, 64, 8, 2, 0, swap=True), Tiling(32, 64, 4, 2, 0, swap=True)]


def mha_splits(row: Row) -> list[Tiling]:
    """Ways of splitting and merging at sizes that did well."""
    m = max(16, next_power_of_2(row.query_len * row.num_heads // row.num_kv_heads))
    found = []
    sizes = [(64, 4, 3, True), (64, 4, 3, False), (64, 4, 4, True), (64, 8, 3, False), (32, 4, 4, False), (128, 8, 2, False)]
    for n, w, s, swap in sizes:
        for programs in (1, 2, 4):
            found.append(Tiling(m, n, w, s, programs, swap=swap, inline_merge=False, direct=True))
        found.append(Tiling(m, n, w, s, 1, swap=swap, inline_merge=False))
    for programs in (1, 2):
        found.append(Tiling(m, 64, 4, 3, programs, swap=True, direct=True))
        found.append(Tiling(m, 64, 4, 2, programs, swap=True, inline_merge=False, direct=True))
    found += [Tiling(m, 64, 4, 3, programs, swap=True) for programs in (1, 2, 8)]
    return with_early(found, 4)


def with_early(found: list[Tiling], every: int) -> list[Tiling]:
    """Some of the candidates once more, launched early."""
    return found + [replace(tiling, early=True) for tiling in found[::every]]


def mla_splits(row: Row) -> list[Tiling]:
    found = [
        Tiling(64, 64, 8, 2, 1, inline_merge=False, hopper=True, direct=direct, min_blocks=least)
        for direct in (True, False)
        for least in (1, 2, 4)
    ]
    for n, w, s, programs in [(64, 4, 2, 1), (64, 4, 2, 2), (32, 4, 3, 2), (32, 4, 2, 2)]:
        found.append(Tiling(16, n, w, s, programs, inline_merge=False, direct=True))
        found.append(Tiling(32, n, w, s, programs, inline_merge=False, direct=True))
    for n, s in [(64, 2), (32, 3)]:
        found += [Tiling(64, n, 8, s, 1, inline_merge=False, direct=direct) for direct in (False, True)]
    return with_early(found, 3)


def candidates_of(row: Row, mla: bool, splits: bool) -> list[Tiling]:
    if splits:
        return mla_splits(row) if mla else mha_splits(row)
    return mla_candidates(row) if mla else mha_candidates(row)


def meta_call(row: Row, tiling: Tiling, mla: bool) -> MhaCall | MlaCall:
    """The call that a measurement of ``row`` makes, on meta tensors. The number of programs is not compiled in."""
    tiling = replace(tiling, programs_per_sm=1)
    columns = -(-max(*row.lens, row.table_keys) // row.page_size)
    if mla:
        return MlaCall(row.batch, row.query_len, row.num_heads, page_size=row.page_size, max_pages=columns, tiling=tiling)
    return MhaCall(
        row.batch,
        row.query_len,
        row.num_heads,
        row.num_kv_heads,
        row.head_dim,
        page_size=row.page_size,
        max_pages=columns,
        window=row.window,
        sinks=row.sinks,
        tree_width=row.query_len if row.tree else None,
        tiling=tiling,
        split=True,
    )


def real_call(inputs: Inputs, table: torch.Tensor, tiling: Tiling, mla: bool) -> torch.Tensor:
    from specops.ops import triton_mha, triton_mla

    if mla:
        return triton_mla.mla(
            inputs.q[..., :512],
            inputs.q[..., 512:],
            inputs.k_cache[:, :, 0],
            table,
            inputs.seq_lens,
            layout=inputs.layout,
            scale=MLA_SCALE,
            tiling=tiling,
            split=True,
        )
    return triton_mha.mha(
        inputs.q,
        inputs.k_cache,
        inputs.v_cache,
        table,
        inputs.seq_lens,
        layout=inputs.layout,
        scale=inputs.row.head_dim**-0.5,
        tiling=tiling,
        split=True,
        **inputs.options,
    )


def resident(report: Compiled, warps: int) -> int:
    """Programs that fit a multiprocessor at once."""
    registers = -(-report.registers // 8) * 8 * 32 * warps
    return max(1, min(REGISTERS // registers, SHARED_BYTES // (report.shared + 1024), WARPS // warps))


class Sweep:
    """Measurements of one row until its share of the time is spent."""

    def __init__(self, row: Row, mla: bool, deadline: float) -> None:
        self.row, self.mla, self.deadline = row, mla, deadline
        self.inputs = common.make_inputs(row, mla=mla)
        dim, scale = (512, MLA_SCALE) if mla else (row.head_dim, row.head_dim**-0.5)
        self.reference = common.reference_rows(self.inputs, self.inputs.page_tables[0], dim, scale)
        self.results: list[Result] = []

    def measure(self, tiling: Tiling, replays: int = 7, budget_ms: float = 8.0) -> Result | None:
        if time.monotonic() > self.deadline:
            return None
        inputs, tables = self.inputs, self.inputs.page_tables
        try:
            out = real_call(inputs, tables[0], tiling, self.mla)
            error = common.error_against(self.reference, out, self.row)
            calls = [lambda table=table: real_call(inputs, table, tiling, self.mla) for table in tables]
            us = common.graph_us(calls, replays=replays, budget_ms=budget_ms)
        except Exception as failure:
            print(f"  {self.row.name} {short(tiling)}: {type(failure).__name__} {str(failure)[:120]}", flush=True)
            torch.cuda.synchronize()
            return None
        result = Result(self.row.name, tiling, us, error)
        self.results.append(result)
        return result

    def run(self, candidates: list[tuple[Tiling, int]]) -> None:
        sweep_until = time.monotonic() + 0.75 * (self.deadline - time.monotonic())
        for tiling, fit in candidates:
            if time.monotonic() > sweep_until:
                break
            given = {tiling.programs_per_sm} if tiling.programs_per_sm else set()
            for programs in sorted(given or ({1, 2, fit, 2 * fit} if self.row.batch <= 8 else {fit, 2 * fit, 4 * fit})):
                self.measure(replace(tiling, programs_per_sm=programs))
        for best in [] if candidates[0][0].programs_per_sm else self.best(3):
            self.measure(replace(best.tiling, inline_merge=False))
            if self.row.batch <= 8:
                self.measure(replace(best.tiling, min_blocks=2))
        for best in self.best(2):
            self.measure(replace(best.tiling, early=True))
        confirmed = [self.measure(best.tiling, 20, 40.0) for best in self.best(4)]
        for again in confirmed:
            if again is not None:
                self.results = [r for r in self.results if r is again or r.tiling != again.tiling]

    def best(self, count: int) -> list[Result]:
        good = [result for result in self.results if result.error < GOOD_ERROR]
        return sorted(good, key=lambda result: result.us)[:count]


def short(tiling: Tiling) -> str:
    text = f"m{tiling.block_m} n{tiling.block_n} w{tiling.num_warps} s{tiling.num_stages} p{tiling.programs_per_sm}"
    text += (
        " hopper" * tiling.hopper
        + " early" * tiling.early
        + " direct" * tiling.direct
        + " even" * tiling.even
        + f" prefetch {tiling.prefetch}" * (tiling.prefetch > 0)
        + " swap" * tiling.swap
        + " merge2" * (not tiling.inline_merge)
        + " wide" * tiling.wide_merge
        + " rounded" * tiling.rounded_partials
    )
    text += f" min{tiling.min_blocks}" * (tiling.min_blocks > 1)
    return text + (f" r{tiling.max_registers}" if tiling.max_registers else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=150, help="time for compiling and measuring together")
    parser.add_argument("--family", choices=["mha", "mla"])
    parser.add_argument("--rows", nargs="*", help="names of rows; all when not given")
    parser.add_argument("--set", choices=["sizes", "splits", "listed"], default="sizes", help="which candidates")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--compile-only", action="store_true")
    args = parser.parse_args()
    began = time.monotonic()
    rows = [(row, False) for row in MHA_ROWS if args.family != "mla"] + [
        (row, True) for row in MLA_ROWS if args.family != "mha"
    ]
    rows = [(row, mla) for row, mla in rows if not args.rows or row.name in args.rows]

    if args.set == "listed":
        listed(args, began)
        return
    jobs: dict[Any, Any] = {}
    for row, mla in rows:
        for tiling in candidates_of(row, mla, args.set == "splits"):
            jobs[(row.name, tiling)] = meta_call(row, tiling, mla)
    distinct = list(dict.fromkeys(specialised(call) for call in jobs.values()))
    reports = dict(zip(distinct, compile_all(distinct, args.workers), strict=True))
    print(f"compiled {len(distinct)} calls in {time.monotonic() - began:.0f} s", flush=True)
    if args.compile_only:
        for call, report in reports.items():
            print(short(call.tiling), type(call).__name__, f"b{call.batch} q{call.query_len}", report)
        return

    bandwidth = common.copy_bandwidth()
    read = common.read_bandwidth()
    rate = common.matrix_rate()
    print(f"copy {bandwidth / 1e12:.2f}, read {read / 1e12:.2f} TB/s, bf16 product {rate / 1e12:.0f} TFLOP/s", flush=True)
    everything: list[Result] = []
    lines = []
    for index, (row, mla) in enumerate(rows):
        left = args.seconds - (time.monotonic() - began)
        sweep = Sweep(row, mla, time.monotonic() + max(left / (len(rows) - index), 1.0))
        candidates = []
        for tiling in candidates_of(row, mla, args.set == "splits"):
            report = reports[specialised(jobs[(row.name, tiling)])]
            if isinstance(report, str):
                continue
            candidates.append((tiling, resident(report[0], tiling.num_warps)))
        sweep.run(candidates)
        everything += sweep.results
        floor = sweep.inputs.kv_bytes / read * 1e6
        wrong = sum(not result.error < GOOD_ERROR for result in sweep.results)
        lines.append(f"{row.name}: floor {floor:.1f} us, {len(sweep.results)} measured, {wrong} wrong")
        lines += [f"   {r.us:8.1f} us  err {r.error:.1e}  {short(r.tiling)}" for r in sweep.best(4)]
        families: dict[Any, Result] = {}
        for r in sweep.best(len(sweep.results)):
            families.setdefault(
                (r.tiling.hopper, r.tiling.direct, r.tiling.swap, r.tiling.block_n, r.tiling.inline_merge), r
            )
        lines += ["   also: " + "; ".join(f"{r.us:.1f} {short(r.tiling)}" for r in list(families.values())[1:6])]
        # After every row: a kernel that faults takes the process with it.
        found = {"environment": common.environment(), "copy": bandwidth, "read": read, "results": everything}
        path = common.save_json(f"tune_triton_{args.set}.json", found)
        print(f"  {row.name} done at {time.monotonic() - began:.0f} s", flush=True)
        del sweep
        torch.cuda.empty_cache()
    failed = [f"{short(call.tiling)}: {report}" for call, report in reports.items() if isinstance(report, str)]
    print("\n".join(sorted(set(failed))[:12]))
    print("\n".join(lines))
    print(f"{path}  {time.monotonic() - began:.0f} s")


def listed(args: argparse.Namespace, began: float) -> None:
    """Compile the candidates of ``candidates.py`` and measure them in processes of their own."""
    jobs = [job for job in candidates.mha_jobs() if not args.rows or job[0].name in args.rows]
    # A merge kernel is compiled for the number of programs, the split kernels are not.
    calls = {
        (row, tiling): call if tiling.inline_merge else replace(call, tiling=tiling)
        for row, tiling in jobs
        for call in [meta_call(row, tiling, False)]
    }
    distinct = list(dict.fromkeys(specialised(calls[job], exact=not job[1].inline_merge) for job in jobs))
    reports = dict(zip(distinct, compile_all(distinct, args.workers), strict=True))
    print(f"compiled {len(distinct)} calls for {len(jobs)} in {time.monotonic() - began:.0f} s", flush=True)
    for call, report in reports.items():
        if args.compile_only or isinstance(report, str):
            what = report if isinstance(report, str) else [(r.registers, r.stack, r.shared) for r in report]
            print(short(call.tiling), f"b{call.batch} q{call.query_len} d{call.head_dim}", what, flush=True)
    if args.compile_only:
        return
    jobs = [job for job in jobs if not isinstance(reports[specialised(calls[job], exact=not job[1].inline_merge)], str)]
    lines = candidates.run(jobs, args.seconds - (time.monotonic() - began), short)
    path = common.save_json("tune_triton_listed.json", lines)
    today = {job[0].name: short(candidates.chosen(job[0])) for job in jobs}
    for name in dict.fromkeys(line["row"] for line in lines):
        timed = sorted((line for line in lines if line["row"] == name and "us" in line), key=lambda line: line["us"])
        taken = next((line["us"] for line in timed if line["t"] == today[name]), None)
        best = "; ".join(f"{line['us']:.1f} {line['t']}" for line in timed[:3])
        print(f"{name}: today {taken} {today[name]}; best {best}")
    print(f"{path}  {time.monotonic() - began:.0f} s")


def specialised(call: Any, *, exact: bool = False) -> Any:
    """``call`` with the sizes that no kernel is compiled for brought to one value, to compile each kernel once.

    Args:
        exact: leave it as it is.
    """
    if exact:
        return call
    batch = next(
        size for size in (1, 8, 32, 1024, 8192) if size >= min(call.batch, 32) and size >= (call.batch > 128) * 1024
    )
    return replace(call, batch=batch, max_pages=64)


if __name__ == "__main__":
    main()
