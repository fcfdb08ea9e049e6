"""Tile sizes of the fused projections: every candidate at the shapes of a decode step, beside cuBLAS's product alone.

    python benchmarks/tune_linear.py --json OUT

A CUDA graph holds one launch a layer over 30 sets of weights, so nothing comes out of the L2 cache that would not in a
model, and launches overlap as they do there. Candidates are compiled in parallel processes first. One line per
shape: the best tiles, the one that the op takes today, and the library's product, all in us a launch.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.compile_triton import compile_all
from specops.ops.triton_linear import Tile, project_qkv, rms_norm_linear

LAYERS = 30
# Name: columns of x, rows of the weight, gated.
SHAPES = {
    "smol_qkv": (576, 960, False),
    "smol_o": (576, 576, False),
    "smol_gate_up": (576, 1536, True),
    "smol_down": (1536, 576, False),
    "8b_qkv": (4096, 6144, False),
    "8b_gate_up": (4096, 14336, True),
    "8b_down": (14336, 4096, False),
}


def candidates(shape: str, rows: int) -> list[Tile]:
    width, _, paired = SHAPES[shape]
    # A head's two halves are rotated together.
    paired = paired or shape == "smol_qkv"
    whole = 1 << (width.bit_length() - 1)
    found: list[Tile] = []
    for block_m, block_n, head, tail, warps in itertools.product(
        (16,) if rows <= 16 else (16, 32) if rows <= 32 else (32, 64) if rows <= 64 else (),
        (16, 32),
        (128, 256, 512, 1024),
        (0, 64, 512),
        (2, 4, 8),
    ):
        rest = width - head - tail
        if head > whole or rest < 0 or (tail and rest) or min(head, tail or head) < 16 * warps:
            continue
        if block_n * (head + tail) * (2 if paired else 1) > 512 * 32 * warps or block_m * head > 16384:
            continue
        block_k = max(rest & -rest, 16 * warps) if rest else 16 * warps
        found.append(Tile(block_m, block_n, min(block_k, 256), head, tail, warps, 4, True))
    if rows > 16:
        for block_m, block_n, block_k, warps, stages in itertools.product(
            (32, 64) if rows <= 64 else (32, 64, 128), (16, 32, 64), (64, 128), (4, 8), (3, 4, 8)
        ):
            in_flight = 2 * stages * block_k * (block_m + block_n * (2 if paired else 1))
            small = block_m * block_n * (2 if paired else 1) < 8192
            if in_flight <= 200 << 10 and not (warps == 8 and small) and (stages == 3) == (block_k == 128):
                found.append(Tile(block_m, block_n, block_k, 0, 0, warps, stages))
    return found


def inputs(shape: str, rows: int, layers: int, device: str = "cuda") -> dict[str, Any]:
    width, columns, gated = SHAPES[shape]
    wide = columns * (2 if gated else 1)

    def make(*size: int) -> torch.Tensor:
        return torch.randn(size, device=device, dtype=torch.bfloat16) * 0.05

    if shape == "smol_qkv":
        cache = torch.zeros(rows // 16 + 2, 16, 3, 64, device=device, dtype=torch.bfloat16)
        turn = torch.randn(rows, 1, 32, device=device, dtype=torch.bfloat16)
        qkv = (cache, cache.clone(), turn, turn.clone(), torch.arange(16, rows + 16, device=device))
    else:
        qkv = None
    return {
        "qkv": qkv,
        "x": make(rows, width),
        "weights": [make(wide, width) for _ in range(layers)],
        "norm": None if "down" in shape or shape.endswith("_o") else make(width),
        "gate": "silu" if gated else None,
        "residual": make(rows, columns) if "down" in shape or shape.endswith("_o") else None,
    }


def call(given: dict[str, Any], weight: torch.Tensor, tile: Tile | None) -> torch.Tensor:
    if given["qkv"] is not None:
        k, v, cos, sin, slots = given["qkv"]
        return project_qkv(k, v, given["x"], weight, cos, sin, slots, 9, given["norm"], 1e-5, tile=tile)
    return rms_norm_linear(given["x"], weight, given["norm"], 1e-5, 0.0, None, given["gate"], given["residual"], tile)


def per_launch(run: Any, weights: list[torch.Tensor]) -> float:
    """us a launch, the median of 9 replays."""
    run(weights[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            run(weight)
    times = []
    for _ in range(9):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(weights))
    return sorted(times)[len(times) // 2]


def compile_one(shape: str, rows: int, tile: Tile | None) -> None:
    """On the meta device, as :func:`benchmarks.compile_triton.compiled` wants it."""
    call(inputs(shape, rows, 1, "meta"), inputs(shape, rows, 1, "meta")["weights"][0], tile)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="smol_qkv,smol_o,smol_gate_up,smol_down")
    parser.add_argument("--rows", default="1,4,16,64")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    shapes, rows = args.shapes.split(","), [int(part) for part in args.rows.split(",")]
    # One kernel serves every number of rows that shares its tile.
    work = {(shape, tile): count for shape in shapes for count in rows for tile in candidates(shape, count)}
    calls = [functools.partial(compile_one, shape, count, tile) for (shape, tile), count in work.items()]
    calls += [functools.partial(compile_one, shape, count, None) for shape, count in itertools.product(shapes, rows)]
    compile_all(calls, args.workers)
    results = [measured(shape, count) for shape, count in itertools.product(shapes, rows)]
    if args.json:
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        args.json.write_text(json.dumps({**about, "rows": results}, indent=1))


def measured(shape: str, count: int) -> dict[str, Any]:
    """One line: the five fastest tiles, all checked against the numbers of the one that the op takes."""
    given = inputs(shape, count, LAYERS if shape.startswith("smol") else 4)
    weights = given["weights"]
    exact, today = (
        call(given, weights[0], None).double(),
        round(per_launch(functools.partial(call, given, tile=None), weights), 2),
    )
    timed = []
    for tile in candidates(shape, count):
        try:
            out = call(given, weights[0], tile).double()
            if (out - exact).abs().max() > 0.02 * exact.abs().max():
                print("WRONG", shape, count, tuple(tile))
                continue
            timed.append((per_launch(functools.partial(call, given, tile=tile), weights), tile))
        except Exception as error:
            print("FAILED", shape, count, tuple(tile), type(error).__name__)
    library = per_launch(functools.partial(F.linear, given["x"]), weights)
    row: dict[str, Any] = {"shape": shape, "rows": count, "library_product": round(library, 2)}
    row["today"] = today
    row["best"] = [[round(time, 2), *tile] for time, tile in sorted(timed, key=lambda pair: pair[0])[:5]]
    print(json.dumps(row), flush=True)
    return row


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
