"""One draft-extend step under every way of running it: host time, latency, warm-up, graph memory.

    python benchmarks/bench_step.py --json step.json
    python benchmarks/bench_step.py --quick --json step.json        # 40 s

The draft has one layer over hidden 4096; every request has 4 rows and 512 keys. The ways:

* eager: the step as it is.
* inductor: the compiled step, without a graph.
* reduce-overhead, direct, direct view: the runner, staging and unpadding included; ``view`` hands over graph memory.
* raw graph: the direct runner's own graph replayed over static inputs; what no runner can go below.

``latency`` is a call that is waited for, ``host`` the time a call keeps the host busy (from calls nobody waits for), ``back
to back`` the time of a call when the next one is already queued, each a median. Ways that are compared with the raw graph
are timed in turn with it, call by call, so that a change of clocks meets all of them. ``before replay`` is the part of the
host's time that a call spends before its graph is launched (``reduce-overhead``: before torch's compiled code runs), which
is what it adds to the latency besides copies; ``parts`` are pieces of it, each called by itself and warm.

Warm-up is a runner of 20 buckets and more, the first thing that this process does, with empty compile caches
(:mod:`bench_starts` compares process starts). Graph memory is what the allocator has reserved more, device memory what the
driver has given out. The results are written after each row. Whatever fails, or does not fit into ``--seconds``, becomes a
row with a reason.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import importlib.metadata
import importlib.util
import json
import os
import statistics
import tempfile
import time
import timeit
from collections.abc import Callable, Sequence
from operator import getitem
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specops.batch import DraftExtendBatch
from specops.compile import DraftExtendRunner, DraftExtendStep
from specops.models.config import ModelConfig
from specops.models.eagle import EagleConfig, EagleHead

PAGE = 16
WIDTH = 4
# Twenty sizes up to 32.
BUCKETS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 32, 48, 64, 96, 128, 192, 256)


class Bench:
    """Rows, the clock, and the file they go to."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.begun = args, time.perf_counter()
        self.data: dict[str, Any] = {"environment": environment(args), "rows": [], "warm_up": []}

    def left(self) -> float:
        return float(self.args.seconds) - (time.perf_counter() - self.begun)

    def add(self, kind: str, row: dict[str, Any]) -> None:
        self.data.setdefault(kind, []).append(row)
        print(kind, json.dumps(row), flush=True)
        self.write()

    def write(self) -> None:
        self.data["took_s"] = round(time.perf_counter() - self.begun, 1)
        self.data["ratios"] = ratios(self.data["rows"])
        if self.args.json is not None:
            partial = self.args.json.with_suffix(".partial")
            partial.write_text(json.dumps(self.data, indent=1), encoding="utf-8")
            partial.replace(self.args.json)

    def require(self, seconds: float) -> None:
        """Raises TimeoutError if less time is left."""
        if self.left() < seconds:
            raise TimeoutError(f"{self.left():.0f} s of --seconds are left, and this takes up to {seconds:.0f}")

    @contextlib.contextmanager
    def guard(self, kind: str, row: dict[str, Any]) -> Any:
        """Turns what goes wrong inside into a row with a reason."""
        try:
            yield
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            words = str(error).strip().splitlines() or [""]
            self.add(kind, {**row, "reason": f"{type(error).__name__}: {words[0][:300]}"})
        finally:
            gc.collect()


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse(argv)
    bench = Bench(args)
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(cache_variables(Path(folder)))
        for vocab in args.vocab:
            with bench.guard("rows", {"vocab": vocab}):
                bench.require(10)
                measure(bench, vocab)
            if args.device == "cuda":
                torch.cuda.empty_cache()
    bench.write()
    print(table(bench.data["rows"]))
    print(json.dumps(bench.data["ratios"], indent=1))
    return bench.data


def make_draft(args: argparse.Namespace, vocab: int, num_requests: int) -> EagleHead:
    """A random one-layer head with its caches; it is timed, not judged."""
    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    heads = max(1, args.hidden // 128)
    dim = args.hidden // heads
    config = ModelConfig(vocab, args.hidden, args.intermediate, 1, heads, max(1, heads // 4), dim, 4096)
    with torch.device(args.device):
        embedding = nn.Embedding(vocab, args.hidden, dtype=dtype)
        lm_head = torch.randn((vocab, args.hidden), dtype=dtype) * args.hidden**-0.5
        head = EagleHead(EagleConfig.for_target(config), embedding, lm_head)
    head = head.to(device=args.device, dtype=dtype).eval().requires_grad_(False)
    head.allocate_caches(num_requests * pages_each(args) + 1, PAGE)
    head.set_backend(args.backend)
    return head


def make_batch(args: argparse.Namespace, num_requests: int) -> DraftExtendBatch:
    generator = torch.Generator().manual_seed(1)
    each = pages_each(args)
    table = torch.randperm(num_requests * each, generator=generator).view(num_requests, each).to(torch.int32) + 1
    hidden = torch.randn((num_requests, WIDTH, args.hidden), generator=generator).to(getattr(torch, args.dtype))
    batch = {
        "input_ids": torch.randint(min(args.vocab), (num_requests, WIDTH), generator=generator),
        "hidden_states": hidden,
        "seq_lens": torch.full((num_requests,), args.kv, dtype=torch.int32),
        "accept_lens": torch.randint(1, WIDTH + 1, (num_requests,), generator=generator).to(torch.int32),
        "page_table": table,
    }
    return DraftExtendBatch(**{name: tensor.to(args.device) for name, tensor in batch.items()})


def pages_each(args: argparse.Namespace) -> int:
    return -(-int(args.kv) // PAGE)


def measure(bench: Bench, vocab: int) -> None:
    """Warm-ups, which come upon empty caches for the first vocabulary, then all ways."""
    args = bench.args
    largest = max(args.batch)
    draft = make_draft(args, vocab, largest)
    batches = {size: make_batch(args, size) for size in args.batch}
    step = DraftExtendStep(draft, PAGE, WIDTH)

    def timed(size: int, ways: dict[str, Callable[[], Any]], more: Callable[[str], dict[str, Any]] = lambda way: {}) -> None:
        """A row for each way; what can be compared is timed in turn."""
        head = {"vocab": vocab, "batch": size}
        working: dict[str, Callable[[], Any]] = {}
        errors: dict[str, float] = {}
        with torch.no_grad():
            for way, call in ways.items():
                with bench.guard("rows", {**head, "way": way}):
                    bench.require(1)
                    # Batches share pages, so what is right is asked anew each time.
                    wanted = step(**batches[size].as_dict())
                    out = [tensor.clone() for tensor in call()]
                    apart = [float((a - b).float().norm() / b.float().norm()) for a, b in zip(out, wanted, strict=True)]
                    errors[way], working[way] = round(max(apart), 5), call
            for way, figures in times(working, args).items():
                row = {**head, "way": way, **figures, **more(way), "relative_error": errors[way]}
                bench.add("rows", row)

    runner: DraftExtendRunner | None = None
    sizes = (*(size for size in BUCKETS if size < largest), largest)
    common: dict[str, Any] = {"tokens_per_request": WIDTH, "max_requests": largest, "max_pages": pages_each(args)}
    with bench.guard("warm_up", {"vocab": vocab, "way": "direct"}):
        bench.require(15)
        runner = DraftExtendRunner(draft, draft.caches, mode="direct", buckets=sizes, **common)
        bench.add("warm_up", {"vocab": vocab, "way": "direct", **warm_up(runner)})
    overhead: DraftExtendRunner | None = None
    with bench.guard("warm_up", {"vocab": vocab, "way": "reduce-overhead"}):
        bench.require(15)
        overhead = DraftExtendRunner(draft, draft.caches, mode="reduce-overhead", buckets=args.batch, **common)
        bench.add("warm_up", {"vocab": vocab, "way": "reduce-overhead", **warm_up(overhead)})
    for size, batch in batches.items():
        timed(size, {"eager": lambda batch=batch: step(**batch.as_dict())})
    for size, batch in batches.items():
        ways: dict[str, Callable[[], Any]] = {}
        if runner is not None:
            inner = runner.runner
            views = inner._bucket_views(size)
            with torch.no_grad():
                inner._stage(views, batch.as_dict(), size, size)
            timed(size, {"inductor": lambda views=views, inner=inner: inner._call_compiled(views)})
            if size in inner._graphs:
                graph, outputs = inner._graphs[size]
                ways["raw graph"] = lambda graph=graph, outputs=outputs: (graph.replay(), outputs)[1]
            ways["direct"] = lambda batch=batch, runner=runner: runner(batch)
            ways["direct view"] = lambda batch=batch, runner=runner: as_views(runner, batch)
        if overhead is not None:
            ways["reduce-overhead"] = lambda batch=batch, overhead=overhead: overhead(batch)
        runners = {"direct": runner, "reduce-overhead": overhead}
        before = {
            way: lambda batch=batch, each=each: before_replay(each, batch, args)
            for way, each in runners.items()
            if each is not None
        }
        timed(size, ways, lambda way, before=before: before[way]() if way in before else {})


def as_views(runner: DraftExtendRunner, batch: DraftExtendBatch) -> Any:
    runner.runner.outputs = "view"
    out = runner(batch)
    runner.runner.outputs = "copy"
    return out


def before_replay(runner: DraftExtendRunner, batch: DraftExtendBatch, args: argparse.Namespace) -> dict[str, Any]:
    """Host time from a call to the launch of its graph, and by which means batches and outputs go."""
    ready = runner.runner._ready.get(batch.seq_lens.shape[0])
    if ready is None or ready.replay is None or ready.hand_over is None:
        return {}
    replay, begun, spans = ready.replay, 0.0, []

    def timed_replay() -> None:
        spans.append((time.perf_counter() - begun) * 1e6)
        replay()

    ready.replay = timed_replay
    for _ in range(args.calls):
        begun = time.perf_counter()
        runner(batch)
        if args.device == "cuda":
            torch.cuda.synchronize()
    ready.replay = replay
    prepared = (ready.stage.launch is not None) + (ready.hand_over.launch is not None)
    way = runner.runner._short.get(batch.seq_lens.shape[0])
    found: dict[str, Any] = {"before_replay_us": round(statistics.median(spans), 1), "prepared_launches": prepared}
    return {
        **found,
        "short_way": None if way is None else "C" if way.native else "Python",
        "parts": parts(runner, batch, way),
    }


def parts(runner: DraftExtendRunner, batch: DraftExtendBatch, way: Any) -> dict[str, float]:
    """What the pieces of the time before a replay take by themselves, called one after another."""
    statics = runner.runner._statics
    if way is None or statics is None:
        return {}
    fields = tuple(batch.as_dict().values())
    addresses = [field.data_ptr() for field in fields]
    stream = torch.cuda.current_stream().cuda_stream
    children, copies, holders, names, at, known, places = statics.lists()[1:]
    current = list(map(getitem, holders, names))
    calls: dict[str, Callable[[], Any]] = {
        "form": lambda: way.forms[0](*fields),
        "addresses": lambda: list(map(Tensor.data_ptr, fields)),
        "launch, from Python": lambda: way.ready.prepared.fire(addresses, stream),
        "memory, from Python": statics.in_place,
        "of it children": lambda: children == copies,
        "of it look-ups": lambda: list(map(getitem, holders, names)),
        "of it addresses": lambda: at(current, known, places),
        "nothing": lambda: None,
    }
    found = {}
    for name, call in calls.items():
        # Few enough that the launch queue never fills up.
        spans = timeit.repeat(call, number=50, repeat=5)
        torch.cuda.synchronize()
        found[name] = round(statistics.median(spans) * 2e4, 2)
    return found


def warm_up(runner: DraftExtendRunner) -> dict[str, Any]:
    """Time of the first bucket, which compiles, of those behind it and of a batch of one; memory of the graphs."""
    free = device_free(runner)
    report = runner.warm_up().as_dict()
    by_size = sorted(report["buckets"], key=lambda bucket: -bucket["num_requests"])
    first, others = by_size[0], by_size[1:]
    # A batch of one has attention kernels of its own; the rest are captures but for two kernels.
    captures = sum(bucket["seconds"] for bucket in others if bucket["num_requests"] > 1)
    alone = sum(bucket["seconds"] for bucket in others if bucket["num_requests"] == 1)
    return {
        "buckets": len(by_size),
        "total_s": round(report["compile_seconds"], 3),
        "first_bucket_s": round(first["seconds"], 3),
        "other_buckets_s": round(captures, 3),
        "batch_of_one_s": round(alone, 3),
        "compiled_graphs": report["compiled_graphs"],
        "captured": report["captured"],
        "not_captured": report["reason"],
        "graph_mib": round(sum(bucket["memory_bytes"] for bucket in by_size) / 2**20, 1),
        "device_mib": round((free - device_free(runner)) / 2**20, 1),
        "mib_by_bucket": {bucket["num_requests"]: round(bucket["memory_bytes"] / 2**20, 1) for bucket in by_size},
        "seconds_by_bucket": {bucket["num_requests"]: round(bucket["seconds"], 3) for bucket in by_size},
    }


def device_free(runner: DraftExtendRunner) -> int:
    """Bytes that the device has free when the allocator holds no more than it needs; 0 without CUDA."""
    if runner.runner.device.type != "cuda":
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0])


def times(ways: dict[str, Callable[[], Any]], args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Microseconds of a call of each way, timed in turn; see the module's docstring."""
    cuda = args.device == "cuda"

    def wait() -> None:
        if cuda:
            torch.cuda.synchronize()

    latencies: dict[str, list[float]] = {way: [] for way in ways}
    hosts: dict[str, list[float]] = {way: [] for way in ways}
    backs: dict[str, list[float]] = {way: [] for way in ways}
    for call in ways.values():
        for _ in range(3):
            call()
    wait()
    for _ in range(args.calls):
        for way, call in ways.items():
            # Once unwatched, so that each finds the caches as it left them.
            call()
            wait()
            begun = time.perf_counter()
            call()
            wait()
            latencies[way].append((time.perf_counter() - begun) * 1e6)
    for _ in range(7):
        for way, call in ways.items():
            wait()
            begun = time.perf_counter()
            # Few enough that the launch queue never fills up.
            for _ in range(20):
                call()
            hosts[way].append((time.perf_counter() - begun) * 5e4)
            wait()
            backs[way].append((time.perf_counter() - begun) * 5e4)
    return {
        way: {
            "latency_us": round(statistics.median(latencies[way]), 1),
            "host_us": round(statistics.median(hosts[way]), 1),
            "back_to_back_us": round(statistics.median(backs[way]), 1),
        }
        for way in ways
    }


def cache_variables(folder: Path) -> dict[str, str]:
    """Environment of a process that keeps compiled code in ``folder``; Triton keeps kernels beside inductor's code."""
    return {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TRITON_CACHE_DIR": str(folder / "triton")}


def ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each way over the raw graph, for each vocabulary and batch: by latency, and with the next call queued."""
    found = []
    for vocab, batch in dict.fromkeys((row["vocab"], row["batch"]) for row in rows if "latency_us" in row):
        mine = {
            row["way"]: row for row in rows if (row["vocab"], row.get("batch")) == (vocab, batch) and "latency_us" in row
        }
        raw = mine.get("raw graph")
        if raw is not None:
            entry: dict[str, Any] = {"vocab": vocab, "batch": batch, "raw_us": raw["latency_us"]}
            for figure in ("latency_us", "back_to_back_us"):
                entry[figure] = {way: round(row[figure] / raw[figure], 3) for way, row in mine.items()}
            found.append(entry)
    return found


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'vocab':>7} {'batch':>5}  {'way':16} {'latency us':>10} {'host us':>9} {'back to back':>12}"]
    for row in rows:
        head = f"{row['vocab']:7} {row.get('batch', '')!s:>5}  {row.get('way', ''):16}"
        if "reason" in row:
            lines.append(f"{head} {row['reason']}")
        else:
            lines.append(f"{head} {row['latency_us']:10.1f} {row['host_us']:9.1f} {row['back_to_back_us']:12.1f}")
    return "\n".join(lines)


def environment(args: argparse.Namespace) -> dict[str, Any]:
    cuda = args.device == "cuda"
    shape = {name: getattr(args, name) for name in ("hidden", "intermediate", "kv", "dtype", "backend")}
    card = torch.cuda.get_device_name() if cuda else "cpu"
    versions = {name: importlib.metadata.version(name) for name in ("torch", "triton") if importlib.util.find_spec(name)}
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {"device_name": card, "date": date, **versions, "rows_a_request": WIDTH, **shape}


def shape_options(parser: argparse.ArgumentParser) -> None:
    """Where a step runs and how large it is."""
    cuda = torch.cuda.is_available()
    add = parser.add_argument
    add("--device", default="cuda" if cuda else "cpu", choices=("cuda", "cpu"))
    add("--dtype", default="bfloat16" if cuda else "float32")
    add("--hidden", type=int, default=4096 if cuda else 256)
    add("--intermediate", type=int, default=11008 if cuda else 512)
    add("--kv", type=int, default=512, help="keys of every request")
    add("--backend", default="auto")
    add("--json", type=Path)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shape_options(parser)
    add = parser.add_argument
    add("--vocab", default="32000,128256" if cuda else "1024")
    add("--batch", default="1,8,32,256" if cuda else "1,2,4")
    add("--calls", type=int, default=60, help="calls a latency is the median of")
    add("--quick", action="store_true", help="vocabulary 32000, batches 1, 8 and 32; 40 s")
    add("--seconds", type=float, default=150.0)
    args = parser.parse_args(argv)
    if args.quick:
        args.vocab, args.seconds = args.vocab.split(",")[0], min(args.seconds, 100.0)
        args.batch = "1,8,32" if cuda else args.batch
    args.vocab = [int(part) for part in args.vocab.split(",")]
    args.batch = sorted({int(part) for part in args.batch.split(",")})
    return args


if __name__ == "__main__":
    main()
