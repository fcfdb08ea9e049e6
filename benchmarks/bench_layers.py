"""What the layers of a small target take as one CUDA graph, kernel by kernel: no compiler, no checkpoint, seconds to run.

    python benchmarks/bench_layers.py                       # batch x rows a request x keys [x room], us a step
    python benchmarks/bench_layers.py --shapes 1x16x192 --kernels

The model has SmolLM2-135M's shape and random weights. ``alone`` is one replay with the device idle before, ``in a row``
replays one behind the other, as a decode loop has them. A kernel's time is from the end of the one before it to its own:
kernels that start early overlap, so the time they ran says little.
"""

from __future__ import annotations

import argparse
import collections
import json
import sys
from pathlib import Path
from typing import Any

import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from specops.layout import QueryLayout
from specops.metadata import attention_metadata
from specops.models.config import ModelConfig
from specops.models.llama import CausalLM

SMOLLM2 = ModelConfig(49152, 576, 1536, 30, 9, 3, 64, 8192)
SHAPES = "1x1x192,1x4x192,1x16x192,8x4x192,8x16x192,32x1x192,32x4x192,32x8x192,32x16x192,1x64x64"
PAGE_SIZE = 16


def model(device: str = "cuda") -> CausalLM:
    """The target; its caches come with each shape."""
    torch.manual_seed(0)
    with torch.device(device):
        target = CausalLM(SMOLLM2).to(torch.bfloat16).eval()
    target.set_backend("triton")
    return target


def capture(target: CausalLM, batch: int, rows: int, keys: int, room: int = 0, tree: bool = False) -> torch.cuda.CUDAGraph:
    """A graph of one forward of ``rows`` rows a request, the last of ``keys`` keys; page tables have ``room`` for more."""
    device = target.embed_tokens.weight.device
    pages = -(-max(keys, room) // PAGE_SIZE)
    target.allocate_caches(batch * pages + 1, PAGE_SIZE)
    table = torch.arange(1, batch * pages + 1, dtype=torch.int32, device=device).view(batch, pages)
    lens = torch.full((batch,), keys, dtype=torch.int32, device=device)
    ids = torch.randint(0, SMOLLM2.vocab_size, (batch * rows,), device=device)
    mask = torch.tril(torch.ones(rows, rows, dtype=torch.bool, device=device)).repeat(batch, 1) if tree else None
    depths = torch.arange(rows, device=device).repeat(batch) if tree else None

    def forward() -> Any:
        layout = QueryLayout.uniform(rows)
        return target(ids, attention_metadata(table, lens, layout, PAGE_SIZE, depths=depths, tree_mask=mask))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        forward()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward()
    return graph


def timed(graph: torch.cuda.CUDAGraph, replays: int = 40) -> tuple[float, float]:
    """us of a replay alone (the median), and of one of many in a row."""

    def events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
        return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    for _ in range(5):
        graph.replay()
    alone = []
    for _ in range(replays):
        start, end = events()
        torch.cuda.synchronize()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        alone.append(start.elapsed_time(end) * 1e3)
    start, end = events()
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return sorted(alone)[replays // 2], start.elapsed_time(end) * 1e3 / replays


def kernels(graph: torch.cuda.CUDAGraph, replays: int = 8) -> list[tuple[str, int, float]]:
    """Name, launches and us of the kernels of a replay, from each one's predecessor's end to its own."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        for _ in range(replays):
            graph.replay()
        torch.cuda.synchronize()
    events = [event for event in trace.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda event: event.time_range.start)
    took: collections.Counter[str] = collections.Counter()
    count: collections.Counter[str] = collections.Counter()
    last = events[0].time_range.start
    each = len(events) // replays
    for index, event in enumerate(events):
        # What lies between two replays is nobody's.
        if index % each:
            took[event.name] += max(event.time_range.end - last, 0)
            count[event.name] += 1
        last = max(last, event.time_range.end)
    return [(name, round(count[name] / replays), took[name] / replays) for name in took]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shapes", default=SHAPES, help="batch x rows a request x keys, or x room in the page table, comma-separated"
    )
    parser.add_argument("--kernels", action="store_true", help="list the kernels of each shape")
    parser.add_argument("--tree", action="store_true", help="rows are a tree's nodes, behind a mask")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    target, results = model(), []
    for shape in args.shapes.split(","):
        graph = capture(target, *map(int, shape.split("x")), tree=args.tree)
        alone, in_a_row = timed(graph)
        row: dict[str, Any] = {"shape": shape, "alone_us": round(alone, 1), "in_a_row_us": round(in_a_row, 1)}
        print(f"{shape:>12}  alone {alone:8.1f} us  in a row {in_a_row:8.1f} us", flush=True)
        if args.kernels:
            row["kernels"] = sorted(kernels(graph), key=lambda kernel: -kernel[2])
            for name, count, took in row["kernels"][:12]:
                print(f"{'':>12}  {took:8.1f} us  {count:3} x {took / max(count, 1):6.2f}  {name[:80]}", flush=True)
        results.append(row)
    if args.json:
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        args.json.write_text(json.dumps({**about, "rows": results}, indent=1))


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
