"""A vendor op inside a captured graph against the package's own call inside one: what the op itself costs.

    python benchmarks/bench_vendor_calls.py

Each line holds two CUDA-graph replay times of the same kernel on the same inputs, the op's and the bare call's, in
microseconds, their ratio, and the launches of eight calls each. XQA appears twice: preparing its mask in each call, and once
for all layers.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from specops import QueryLayout, ops
from specops.ops import flashinfer, planning, trtllm_mha

BF16 = torch.bfloat16
ROWS = ((1, 4, 4096), (8, 4, 4096), (32, 4, 4096), (64, 8, 4096), (128, 4, 2048))
PAGE = 64
REPEATS = 60


def captured(call: Callable[[], Any], calls_per_graph: int = 8) -> torch.cuda.CUDAGraph:
    """A graph of several calls; the L2 cache is as the calls leave it."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls_per_graph):
            call()
    return graph


def launches(graph: torch.cuda.CUDAGraph) -> int:
    """What a replay has the device run: kernels, copies and fills."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        graph.replay()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in trace.events())


def row(name: str, batch: int, width: int, keys: int, op: Callable[[], Any], bare: Callable[[], Any]) -> None:
    """Replays of the two take turns, in an order that changes, so that both meet the same clocks and the same neighbours."""
    graphs, times = (captured(op), captured(bare)), ([], [])
    for turn in range(2 * REPEATS):
        for which in (0, 1) if turn % 2 else (1, 0):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graphs[which].replay()
            end.record()
            end.synchronize()
            times[which].append(1000 * start.elapsed_time(end) / 8)
    ours, theirs = (statistics.median(part) for part in times)
    counts = "{} and {} launches".format(*map(launches, graphs))
    sizes = f"B={batch:<4} q={width:<3} kv={keys:<6}"
    print(f"{name:24} {sizes} op {ours:8.2f}  bare {theirs:8.2f}  {ours / theirs:.3f}  {counts}", flush=True)


def paging(batch: int, width: int, keys: int) -> tuple[torch.Tensor, torch.Tensor, QueryLayout, int]:
    columns = -(-keys // PAGE)
    num_pages = 1 + batch * columns
    table = (1 + torch.randperm(num_pages - 1, device="cuda")).to(torch.int32).view(batch, columns)
    lens = torch.full((batch,), keys, dtype=torch.int32, device="cuda")
    return table, lens, QueryLayout.uniform(width), num_pages


def mha_rows(batch: int, width: int, keys: int) -> None:
    table, lens, layout, num_pages = paging(batch, width, keys)
    q = torch.randn((batch * width, 32, 128), dtype=BF16, device="cuda")
    k, v = (torch.randn((num_pages, PAGE, 8, 128), dtype=BF16, device="cuda") for _ in range(2))
    scale = 128**-0.5

    def run(backend: str, plan: torch.Tensor | None = None) -> torch.Tensor:
        return ops.mha(q, k, v, table, lens, layout=layout, backend=backend, plan=plan)

    prepared = trtllm_mha.prepare(lens, table, layout, PAGE)
    run("trtllm")
    given = trtllm_mha.xqa_arguments(q, k, v, table, lens, layout, scale, plan=prepared)

    def bare_xqa() -> None:
        # The workspace belongs to the stream, the rest is what the op passes.
        trtllm_mha._decode()(
            **{**given, "workspace_buffer": trtllm_mha.XQA_WORKSPACES.get(q.device), "out": q.new_empty(q.shape)}
        )

    row("trtllm_mha", batch, width, keys, lambda: run("trtllm"), bare_xqa)
    row("trtllm_mha, prepared", batch, width, keys, lambda: run("trtllm", prepared), bare_xqa)
    for backend in ("flashinfer_fa2", "flashinfer_fa3"):
        plan = planning.make_plan(backend, "mha", table, layout, page_size=PAGE)
        plan.update(table, lens, layout)
        run(backend, plan.handle)
        (kernel,) = plan._planned.values()
        assert isinstance(kernel, flashinfer.PlannedMha)

        def bare(wrapper: Any = kernel.wrapper) -> None:
            wrapper.run(q, (k, v), out=q.new_empty(q.shape))

        row(f"{backend}_mha", batch, width, keys, lambda b=backend, p=plan: run(b, p.handle), bare)


def mla_rows(batch: int, width: int, keys: int) -> None:
    table, lens, layout, num_pages = paging(batch, width, keys)
    latent = torch.randn((batch * width, 16, 512), dtype=BF16, device="cuda")
    rope = torch.randn((batch * width, 16, 64), dtype=BF16, device="cuda")
    cache = torch.randn((num_pages, PAGE, 576), dtype=BF16, device="cuda")
    for backend in ("flashinfer_fa2", "flashinfer_fa3"):
        plan = planning.make_plan(backend, "mla", table, layout, page_size=PAGE)
        plan.update(table, lens, layout)

        def run(backend: str = backend, plan: planning.Plan = plan) -> torch.Tensor:
            return ops.mla(
                latent, rope, cache, table, lens, layout=layout, scale=192**-0.5, backend=backend, plan=plan.handle
            )

        run()
        (kernel,) = plan._planned.values()
        assert isinstance(kernel, flashinfer.PlannedMla)

        def bare(wrapper: Any = kernel.wrapper) -> None:
            wrapper.run(latent, rope, cache[..., :512], cache[..., 512:], out=latent.new_empty(latent.shape))

        row(f"{backend}_mla", batch, width, keys, run, bare)


def main() -> None:
    print(torch.cuda.get_device_name(), torch.__version__)
    for batch, width, keys in ROWS:
        mha_rows(batch, width, keys)
    for batch, width, keys in ROWS[:3]:
        mla_rows(batch, width, keys)


if __name__ == "__main__":
    with torch.no_grad():
        main()
