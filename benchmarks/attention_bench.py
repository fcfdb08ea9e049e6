"""The run that ``bench_mha.py`` and ``bench_mla.py`` share: measure, print a table, write JSON and a chart.

The kernels of all peers are built first, side by side. Then every row is measured with every peer in one process, each by
CUDA-graph replay over several KV sets, and compared with float64. FlexAttention, which compiles for every shape, comes last
and stops when the time is spent.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import peers as peer_kernels
import torch
from common import Inputs, Row
from torch import Tensor

# Peers measured after all others.
LATE = ("flex",)


def parse(description: str, rows: list[Row], peers: list[str], seconds: float) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rows", nargs="*", choices=[row.name for row in rows], metavar="ROW", help="all when not given")
    parser.add_argument("--peers", nargs="*", choices=peers, help="all when not given; none for our backend alone")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all results there")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="write a chart there, PNG")
    parser.add_argument("--seconds", type=float, default=seconds, help="start no late peer after this time")
    parser.add_argument("--backend", default="triton", help="our backend")
    return parser.parse_args()


def run(
    args: argparse.Namespace,
    rows: list[Row],
    peers: dict[str, Callable[[Inputs], list[Callable[[], Tensor]]]],
    ours: Callable[[Inputs, Tensor, str], Tensor],
    *,
    mla: bool,
    notes: Callable[[dict[str, Any]], list[str]] = lambda report: [],
) -> None:
    """Measure ``rows`` and print the table.

    Args:
        ours: our call on inputs and one page table, by backend name.
        notes: lines to print below the table, from the report.
    """
    began = time.monotonic()
    rows = [row for row in rows if not args.rows or row.name in args.rows]
    names = [name for name in peers if args.peers is None or name in args.peers]
    absent = peer_kernels.build(names, peers, rows[0], mla)
    print(f"kernels built in {time.monotonic() - began:.0f} s", flush=True)
    copy, read, rate = common.copy_bandwidth(), common.read_bandwidth(), common.matrix_rate()
    results: list[dict[str, Any]] = []
    for row in rows:
        results.append(_measure_row(row, [n for n in names if n not in LATE], peers, absent, ours, args.backend, mla))
        print(f"  {row.name} at {time.monotonic() - began:.0f} s", flush=True)
        torch.cuda.empty_cache()
    for row, result in zip(rows, results, strict=True):
        for name in (n for n in names if n in LATE):
            if time.monotonic() - began > args.seconds:
                result["peers"][name] = {"reason": "no time left"}
                continue
            inputs = common.make_inputs(row, mla=mla)
            result["peers"][name] = _measure(lambda i=inputs, n=name: peers[n](i), inputs, _reference(inputs, mla), mla)
            del inputs
            torch.cuda.empty_cache()
    for result in results:
        _summarise(result, copy, read, rate)
    report = {
        "environment": common.environment(),
        "copy_bandwidth": copy,
        "read_bandwidth": read,
        "matrix_rate": rate,
        "seconds": round(time.monotonic() - began, 1),
        "rows": results,
    }
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    if args.plot is not None:
        plot(report, args.plot)
    print("\n".join([*table(report, names, mla), *notes(report)]))


def _reference(inputs: Inputs, mla: bool) -> Tensor:
    dim = inputs.row.head_dim
    value_dim, scale = (peer_kernels.LATENT, peer_kernels.MLA_SCALE) if mla else (dim, dim**-0.5)
    return common.reference_rows(inputs, inputs.page_tables[0], value_dim, scale)


def _measure_row(
    row: Row,
    names: list[str],
    peers: dict[str, Callable[[Inputs], list[Callable[[], Tensor]]]],
    absent: dict[str, str],
    ours: Callable[[Inputs, Tensor, str], Tensor],
    backend: str,
    mla: bool,
) -> dict[str, Any]:
    inputs = common.make_inputs(row, mla=mla)
    reference = _reference(inputs, mla)

    def our_calls(backend: str = backend) -> list[Callable[[], Tensor]]:
        return [lambda table=table: ours(inputs, table, backend) for table in inputs.page_tables]

    result: dict[str, Any] = {
        "row": row.name,
        "sets": len(inputs.page_tables),
        "kv_bytes": inputs.kv_bytes,
        "operations": operations(row, mla),
        "ours": _measure(our_calls, inputs, reference, mla),
        "peers": {},
    }
    for name in names:
        if name in absent:
            result["peers"][name] = {"reason": absent[name]}
            continue
        result["peers"][name] = _measure(lambda n=name: peers[n](inputs), inputs, reference, mla)
        torch.cuda.empty_cache()
    # Once more at the end: the difference is the noise of the run.
    result["ours_again"] = _measure(our_calls, inputs, reference, mla)
    result["auto"] = _measure(lambda: our_calls("auto"), inputs, reference, mla)
    return result


def _measure(
    make_calls: Callable[[], list[Callable[[], Tensor]]], inputs: Inputs, reference: Tensor, mla: bool
) -> dict[str, Any]:
    try:
        peer_kernels.take_plan_us()
        calls = make_calls()
        plan_us = peer_kernels.take_plan_us()
        out = calls[0]()
        error = common.error_against(reference, out, inputs.row)
        planned = {} if plan_us is None else {"plan_us": plan_us}
        return {"us": common.graph_us(calls), "error": error, **planned}
    except peer_kernels.Skip as skip:
        return {"reason": str(skip)}
    except Exception as failure:
        return {"reason": f"{type(failure).__name__}: {str(failure)[:160]}"}


def operations(row: Row, mla: bool) -> int:
    """Floating-point operations of both products."""
    width = row.head_dim + (peer_kernels.LATENT if mla else row.head_dim)
    return 2 * row.query_len * row.num_heads * width * sum(row.read_lens)


def _summarise(result: dict[str, Any], copy: float, read: float, rate: float) -> None:
    us = result["ours"].get("us")
    times = {name: peer["us"] for name, peer in result["peers"].items() if "us" in peer and peer["error"] < 3e-2}
    best = min(times, key=lambda name: times[name], default=None)
    result["best_peer"] = best
    if us is None:
        return
    result["ratio"] = None if best is None else us / times[best]
    # What a step pays for a backend: its kernel, and its host plan where it makes one.
    steps = {name: us_ + result["peers"][name].get("plan_us", 0.0) for name, us_ in times.items()}
    if "us" in result["auto"]:
        result["auto_ratio"] = result["auto"]["us"] / min(us, result["ours_again"].get("us", us), *steps.values())
    result["of_copy_bandwidth"] = result["kv_bytes"] / us * 1e6 / copy
    result["of_read_bandwidth"] = result["kv_bytes"] / us * 1e6 / read
    result["of_matrix_rate"] = result["operations"] / us * 1e6 / rate


def table(report: dict[str, Any], names: list[str], mla: bool) -> list[str]:
    """The lines to print, the table last."""
    where = report["environment"]
    lines, reasons = [], {}
    versions = ", ".join(f"{name} {where[name]}" for name in ("torch", "triton", "flashinfer") if name in where)
    lines.append(f"{where['card']}, {where['date']}, {versions}; {report['seconds']} s")
    lines.append(
        f"copy {report['copy_bandwidth'] / 1e12:.2f} TB/s, read {report['read_bandwidth'] / 1e12:.2f} TB/s, "
        f"bf16 product {report['matrix_rate'] / 1e12:.0f} TFLOP/s"
    )
    for result in report["rows"]:
        for name, peer in result["peers"].items():
            if "reason" in peer:
                reasons.setdefault((name, peer["reason"]), []).append(result["row"])
        if "reason" in result["ours"]:
            reasons.setdefault(("ours", result["ours"]["reason"]), []).append(result["row"])
    lines += [f"no {name} ({', '.join(rows)}): {reason}" for (name, reason), rows in reasons.items()]
    lines.append("auto: over the best single backend, host plans included; plan us: " + _plans(report["rows"]))
    head = f"{'row':16} {'us':>8} {'again':>8} {'auto':>5} {'ratio':>6} {'to':5} {'copy':>5} {'read':>5} "
    lines.append(head + f"{'matrix ' if mla else ''}{'error':>8} " + " ".join(f"{name:>8}" for name in names))
    for result in report["rows"]:
        ours = result["ours"]
        if "us" not in ours:
            lines.append(f"{result['row']:16} failed")
            continue
        again, ratio = result["ours_again"].get("us", float("nan")), result["ratio"]
        line = f"{result['row']:16} {ours['us']:8.1f} {again:8.1f} {result.get('auto_ratio', float('nan')):5.2f} "
        line += f"{ratio if ratio is not None else float('nan'):6.3f} "
        line += f"{result['best_peer'] or '-':5} {result['of_copy_bandwidth']:5.2f} {result['of_read_bandwidth']:5.2f} "
        line += f"{result['of_matrix_rate']:6.2f} " if mla else ""
        line += f"{ours['error']:8.1e} "
        peers = [result["peers"].get(name, {}) for name in names]
        lines.append(line + " ".join(f"{peer['us']:8.1f}" if "us" in peer else f"{'-':>8}" for peer in peers))
    return lines


def _plans(rows: list[dict[str, Any]]) -> str:
    """The range of each peer's host plan."""
    times: dict[str, list[float]] = {}
    for result in rows:
        for name, peer in result["peers"].items():
            if "plan_us" in peer:
                times.setdefault(name, []).append(peer["plan_us"])
    return ", ".join(f"{name} {min(each):.0f} to {max(each):.0f}" for name, each in times.items()) or "none"


def plot(report: dict[str, Any], path: Path) -> None:
    """Bars of time over ours for every peer, one group a row; ours is the line at 1."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [result for result in report["rows"] if "us" in result["ours"]]
    names = list(dict.fromkeys(name for result in rows for name in result["peers"]))
    figure, axes = plt.subplots(figsize=(1.1 * len(rows) + 3, 4.5))
    width = 0.8 / max(len(names), 1)
    for index, name in enumerate(names):
        places, heights = [], []
        for place, result in enumerate(rows):
            peer = result["peers"].get(name, {})
            if "us" in peer:
                places.append(place - 0.4 + (index + 0.5) * width)
                heights.append(peer["us"] / result["ours"]["us"])
        axes.bar(places, heights, width, label=name)
    axes.axhline(1.0, color="black", linewidth=1)
    axes.set_yscale("log")
    axes.set_xticks(range(len(rows)), [f"{r['row']}\n{r['ours']['us']:.1f} us" for r in rows], rotation=45, ha="right")
    axes.set_ylabel("time over specops triton (1 = equal)")
    where = report["environment"]
    axes.set_title(f"{where['card']}, {where['date']}, torch {where['torch']}, triton {where['triton']}", fontsize=9)
    axes.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
