"""What the attention benchmarks share: shapes, inputs, timing by CUDA-graph replay, errors in float64, and bandwidth.

A timed graph holds several calls over different KV sets, so that the L2 cache does not serve them; its time is divided
by the number of calls. Times are medians of at least 20 replays.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specops.layout import QueryLayout
from specops.ops import triton_common

# All KV sets of a measurement together hold at least this much: several times the L2 cache of an H200 (60 MB).
ROTATED_BYTES = 400e6
MAX_SETS = 24


@dataclass(frozen=True)
class Row:
    """One line of a benchmark table.

    Attributes:
        name: as printed.
        batch, query_len: requests and rows of each.
        kv: keys of each request, its own rows included; a tuple gives each request's own number.
        window, tree, sinks: features of the call.
        table_keys: keys that the page table has room for, where that is more than the longest request.
    """

    name: str
    batch: int
    query_len: int
    kv: int | tuple[int, ...]
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 64
    window: int | None = None
    tree: bool = False
    sinks: bool = False
    table_keys: int = 0

    @property
    def lens(self) -> list[int]:
        return [self.kv] * self.batch if isinstance(self.kv, int) else list(self.kv)

    @property
    def read_lens(self) -> list[int]:
        """Keys of each request that some row sees."""
        if self.window is None:
            return self.lens
        return [min(kv, self.window + self.query_len - 1) for kv in self.lens]


# The rows of the MHA table, then a window and its control, ragged lengths, features, and a call that is all overhead.
MHA_ROWS = [
    Row("1x4x4096", 1, 4, 4096),
    Row("1x4x32768", 1, 4, 32768),
    Row("8x4x4096", 8, 4, 4096),
    Row("32x4x4096", 32, 4, 4096),
    Row("64x8x4096", 64, 8, 4096),
    Row("128x4x2048", 128, 4, 2048),
    Row("128x8x8192", 128, 8, 8192),
    Row("window", 8, 4, 32768, window=1024),
    Row("window_control", 8, 4, 1024),
    Row("ragged", 32, 4, (32768, *[512] * 31)),
    Row("tree", 32, 4, 4096, tree=True),
    Row("sinks", 32, 4, 4096, sinks=True),
    Row("tiny", 1, 4, 64),
]
# Decode and verify of a small model (9 heads in 3, D=64) whose page table is as wide as its longest context.
SMALL_ROWS = [
    Row(f"small_{b}x{q}x{kv}", b, q, kv, num_heads=9, num_kv_heads=3, head_dim=64, page_size=16, table_keys=2048)
    for b, q, kv in ((1, 1, 256), (1, 4, 256), (1, 16, 256), (1, 4, 1024), (32, 4, 256))
]
MLA_ROWS = [
    Row(f"{heads}h_{batch}x4x4096", batch, 4, 4096, num_heads=heads, num_kv_heads=1, head_dim=576)
    for heads in (16, 128)
    for batch in (1, 8, 32, 128)
]


@dataclass
class Inputs:
    """Tensors of one row, with one page table a KV set."""

    row: Row
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    page_tables: list[Tensor]
    seq_lens: Tensor
    options: dict[str, Any]

    @property
    def layout(self) -> QueryLayout:
        return QueryLayout.uniform(self.row.query_len)

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV that must be read at least once."""
        each = self.k_cache.shape[2] * self.k_cache.shape[3] * self.k_cache.element_size()
        both = each if self.v_cache is self.k_cache else each + each * self.v_cache.shape[3] // self.k_cache.shape[3]
        return sum(self.row.read_lens) * both


def make_inputs(row: Row, *, mla: bool = False, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Inputs:
    """Random inputs on the GPU; the pages of all sets lie in one shuffled pool."""
    generator = torch.Generator("cuda").manual_seed(seed)
    pages_of = [-(-kv // row.page_size) for kv in row.lens]
    bytes_of_set = sum(row.read_lens) * row.num_kv_heads * row.head_dim * (1 if mla else 2) * dtype.itemsize
    sets = int(min(max(-(-ROTATED_BYTES // bytes_of_set), 2), MAX_SETS))
    needed = sum(pages_of) * sets
    order = torch.randperm(needed, generator=generator, device="cuda").to(torch.int32) + 1
    tables, taken = [], 0
    for _ in range(sets):
        columns = max(*pages_of, -(-row.table_keys // row.page_size))
        table = torch.zeros((row.batch, columns), dtype=torch.int32, device="cuda")
        for request, count in enumerate(pages_of):
            table[request, :count] = order[taken : taken + count]
            taken += count
        tables.append(table)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=dtype)

    k_cache = randn(needed + 1, row.page_size, row.num_kv_heads, row.head_dim)
    v_cache = k_cache if mla else randn(needed + 1, row.page_size, row.num_kv_heads, row.head_dim)
    options: dict[str, Any] = {}
    if row.window is not None:
        options["window"] = row.window
    if row.sinks:
        options["sinks"] = torch.randn(row.num_heads, generator=generator, device="cuda")
    if row.tree:
        n = row.query_len
        mask = torch.eye(n, dtype=torch.bool, device="cuda")
        mask[:, 0] = True
        mask[n - 1, 1] = n > 2
        options["tree_mask"] = mask.repeat(row.batch, 1)
    q = randn(row.batch * row.query_len, row.num_heads, row.head_dim)
    seq_lens = torch.tensor(row.lens, dtype=torch.int32, device="cuda")
    return Inputs(row, q, k_cache, v_cache, tables, seq_lens, options)


def graph_us(calls: list[Callable[[], Any]], *, replays: int = 20, budget_ms: float = 40.0) -> float:
    """Median microseconds of one call: all calls in one CUDA graph, repeated until a replay is worth timing."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        stream.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for call in calls:
            call()
        end.record()
        end.synchronize()
        rough_us = max(start.elapsed_time(end) * 1e3 / len(calls), 5.0)
    torch.cuda.current_stream().wait_stream(stream)
    rounds = max(1, int(min(budget_ms * 1e3 / replays, 2000.0) / (rough_us * len(calls))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    graph.replay()
    times = []
    for _ in range(replays):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / (rounds * len(calls)))
    del graph
    triton_common.release_counters()
    return statistics.median(times)


def events_us(call: Callable[[], Any], *, repeats: int = 9, calls: int = 5) -> float:
    """Median microseconds of one call of ``calls`` in a row, timed by events without a graph: for calls of milliseconds."""
    call()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    for _ in range(repeats):
        start.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times)


def read_bandwidth() -> float:
    """Bytes a second of a sum over 4 GB, which writes nothing."""
    source = torch.randn(1 << 30, device="cuda")
    return source.numel() * 4 / events_us(lambda: source.sum()) * 1e6


def copy_bandwidth() -> float:
    """Bytes a second, read plus written, of a device-to-device copy of 4 GB, by the faster of a copy and a kernel.

    Not in a graph: a copy captured into one moved 2.7 TB/s on an H200 where the same copy outside moves 4.3.
    """
    source = torch.randn(1 << 30, device="cuda")
    target = torch.empty_like(source)
    us = min(events_us(lambda: target.copy_(source)), events_us(lambda: torch.mul(source, 1.0, out=target)))
    return 2 * source.numel() * 4 / us * 1e6


def matrix_rate() -> float:
    """Operations a second of an 8192^3 bf16 product of random matrices."""
    a = torch.randn((8192, 8192), device="cuda", dtype=torch.bfloat16)
    b = torch.randn((8192, 8192), device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(a)
    us = graph_us([lambda: torch.mm(a, b, out=out)])
    return 2 * 8192**3 / us * 1e6


def float64_rows(inputs: Inputs, table: Tensor, requests: list[int], value_dim: int, scale: float) -> Tensor:
    """``[len(requests) * query_len, Hq, Dv]`` float64 on the GPU, straight from the formula."""
    row, outs = inputs.row, []
    for request in requests:
        kv = row.lens[request]
        place = torch.arange(kv, device="cuda")
        page = table[request].long()[place // row.page_size]
        keys = inputs.k_cache[page, place % row.page_size].double()
        values = inputs.v_cache[page, place % row.page_size][..., :value_dim].double()
        first = request * row.query_len
        q = inputs.q[first : first + row.query_len].double()
        group = row.num_heads // row.num_kv_heads
        scores = torch.einsum("qhgd,khd->hgqk", q.unflatten(1, (-1, group)), keys) * scale
        position = kv - row.query_len + torch.arange(row.query_len, device="cuda")[:, None]
        seen = place <= position
        if "tree_mask" in inputs.options:
            own = place - (kv - row.query_len)
            mask = inputs.options["tree_mask"][first : first + row.query_len]
            seen = (own < 0) | mask[:, own.clamp(0, row.query_len - 1)]
        if row.window is not None:
            seen = seen & (place > position - row.window)
        scores = scores.masked_fill(~seen, float("-inf"))
        lse = scores.logsumexp(dim=-1, keepdim=True)
        if "sinks" in inputs.options:
            lse = torch.logaddexp(lse, inputs.options["sinks"].double().view(row.num_kv_heads, group, 1, 1))
        out = torch.einsum("hgqk,khd->qhgd", (scores - lse).exp(), values)
        outs.append(out.flatten(1, 2))
    return torch.cat(outs)


def reference_rows(inputs: Inputs, table: Tensor, value_dim: int, scale: float) -> Tensor:
    """The float64 output rows of the first and last request."""
    return float64_rows(inputs, table, checked_requests(inputs.row), value_dim, scale)


def checked_requests(row: Row) -> list[int]:
    return sorted({0, row.batch - 1})


def error_against(reference: Tensor, actual: Tensor, row: Row) -> float:
    """Largest ||out - ref|| / ||ref|| over output vectors of the first and last request; NaN stays NaN."""
    n = row.query_len
    got = torch.cat([actual[request * n : (request + 1) * n] for request in checked_requests(row)]).double()
    return float(((got - reference).norm(dim=-1) / reference.norm(dim=-1)).max())


def environment() -> dict[str, str]:
    """Date, card and versions, for a results file."""
    import triton

    found = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "triton": triton.__version__,
        "python": platform.python_version(),
    }
    try:
        import flashinfer

        found["flashinfer"] = flashinfer.__version__
    except ImportError:
        pass
    return found


def save_json(name: str, data: Any) -> Path:
    """Write ``data`` under $OUT, or here; returns the path."""
    path = Path(os.environ.get("OUT", ".")) / name
    path.write_text(json.dumps(data, indent=1, default=lambda item: asdict(item)))
    return path
