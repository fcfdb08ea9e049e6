"""Tokens per second of the whole decode loop: EAGLE, plain decoding, transformers, prompt lookup; same weights and prompts.

    python benchmarks/bench_decode.py --json decode.json --plot decode.png
    python benchmarks/bench_decode.py --model SmolLM2-135M-Instruct.Q4_1.gguf --batch 1,8,32 --dtypes bfloat16 --seconds 140

Greedy answers of at most ``--tokens`` tokens, ended where the model ends them. A figure is emitted tokens over wall time,
prefill included, the best of the repeats; compiling, capturing and a short warm-up stand apart. Batch 1 runs the prompts one
after another. Transformers gets a model built from the same dequantised weights.

Whatever fails, or does not fit into ``--seconds``, becomes a row with a reason, and rows are written as they come. Token
ids are compared with those of plain decoding and of transformers; where they differ, the row has the gap between the two
best logits at the first difference: below a dtype's rounding noise both tokens were equally likely.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import platform
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from specops.models import load_target
from specops.models.eagle_checkpoint import load_head, shipped_head
from specops.models.loading import open_checkpoint
from specops.ops import native
from specops.spec import Engine, SpecConfig
from specops.spec.prefill import Forwards

PROMPTS = Path(__file__).with_name("smollm2_prompts.json")
PEERS = ("eager", "static", "lookup")
CONFIGS = {"cpu": "3/1,5/1,4/4/16,5/8/24", "cuda": "4/4/16,5/8/24,3/1,5/1"}
WARM_TOKENS = 6
# Kept back at the end of --seconds, for whatever is running when the time is over.
RESERVE_SECONDS = 3.0


class OutOfTime(BaseException):
    """A measurement was cut off, or not begun. Not an Exception, so that no compiler takes it for a failure of its own."""


class Bench:
    """Rows, the clock, and the file they go to."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.begun = time.perf_counter()
        self.rows: list[dict[str, Any]] = []
        self.tokens: dict[tuple[str, str, int], list[list[int]]] = {}
        self.margins: dict[tuple[str, int], list[list[float]]] = {}
        self.header = environment(args)

    def left(self) -> float:
        return float(self.args.seconds) - (time.perf_counter() - self.begun) - RESERVE_SECONDS

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        print(line_of(row), flush=True)
        self.write()

    def write(self) -> None:
        if self.args.json is not None:
            data = {**self.header, "took_s": round(time.perf_counter() - self.begun, 1), "rows": self.rows}
            partial = self.args.json.with_suffix(".partial")
            partial.write_text(json.dumps({**data, "summary": summary(self.rows)}, indent=1), encoding="utf-8")
            partial.replace(self.args.json)

    @contextlib.contextmanager
    def guard(self, row: dict[str, Any], seconds: float | None = None) -> Iterator[None]:
        """Turns whatever goes wrong inside into a row with a reason; ends what takes longer than ``seconds``."""
        try:
            with time_limit(min(self.left(), seconds or self.left())):
                yield
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            words = str(error).strip().splitlines() or [""]
            self.add({**row, "reason": f"{type(error).__name__}: {words[0][:300]}"})
        finally:
            gc.collect()


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.warm_only:
        warm_only(args)
        return {}
    bench = Bench(args)
    prompts = json.loads(args.prompts.read_text(encoding="utf-8"))
    stops = tuple(prompts["eos_token_ids"])
    print(f"{bench.header['device_name']}, torch {torch.__version__}, {torch.get_num_threads()} threads", flush=True)
    for dtype in args.dtypes:
        base = {"dtype": dtype}
        if args.prewarm:
            with bench.guard({**base, "system": "prewarm"}):
                prewarm(bench, dtype)
        with bench.guard({**base, "system": "load"}):
            target = load_target(args.model, dtype=getattr(torch, dtype), device=args.device, backend=args.backend)
            head = load_head(args.head, target)
            head.set_backend(args.backend)
            # What the ratios need comes first, in case that time runs out.
            for config in (*((None,) if args.plain else ()), *args.configs[:1]):
                measure_ours(bench, base, target, head if config else None, config, prompts["prompts"], stops)
            if args.peers:
                measure_peers(bench, base, prompts["prompts"], stops)
            for config in args.configs[1:]:
                measure_ours(bench, base, target, head, config, prompts["prompts"], stops)
            if args.phases:
                for config in args.configs[:1]:
                    measure_phases(bench, base, target, head, config, prompts["prompts"], stops)
        identities(bench, dtype)
        bench.write()
    result = summary(bench.rows)
    print(json.dumps(result, indent=1))
    if args.plot is not None:
        with bench.guard({"system": "plot"}, 60):
            plot(bench.rows, args.plot, bench.header["device_name"])
    return {"rows": bench.rows, "summary": result}


def measure_ours(
    bench: Bench,
    base: dict[str, Any],
    target: Any,
    head: Any,
    config: SpecConfig | None,
    prompts: list[list[int]],
    stops: Sequence[int],
) -> None:
    """One engine for all batch sizes: the compiled code is shared, so it costs one warm-up."""
    args = bench.args
    name = "plain" if config is None else f"eagle {label(config)}"
    row = {**base, "system": name}
    engine: Engine | None = None
    warm: float | None = None
    with turn(args.turns, shared=True), bench.guard(row, args.max_compile):
        # A warm-up that is begun too late would only be thrown away.
        needed = 1.2 * bench.header.get("last_warm_up_s", 0.0)
        if bench.left() < needed:
            raise OutOfTime(f"{bench.left():.0f} s are left, and the last warm-up took {needed / 1.2:.0f} s")
        begun = time.perf_counter()
        engine = make_engine(args, target, head, config, prompts)
        prepare(engine, args)
        warm = bench.header["last_warm_up_s"] = round(time.perf_counter() - begun, 2)
    if engine is None or warm is None:
        return
    reports = [report.as_dict() for report in engine.explain().values()]
    compiled = {key: reports[0][key] for key in ("mode", "captured", "reason", "compiled_graphs")} if reports else {}
    compiled["graph_mib"] = round(sum(b["memory_bytes"] for report in reports for b in report["buckets"]) / 2**20, 1)
    for batch in args.batch:
        with turn(args.turns), bench.guard({**row, "batch": batch}):
            groups = grouped(prompts, batch, args.num_prompts)
            engine.generate(groups[0], max_new_tokens=WARM_TOKENS, stop_token_ids=stops)
            runs = [run_ours(engine, groups, args.tokens, stops) for _ in range(args.repeats)]
            best = max(runs, key=lambda run: float(run["tokens_per_s"]))
            bench.tokens[base["dtype"], name, batch] = best.pop("ids")
            margins = best.pop("margins")
            if config is None:
                bench.margins[base["dtype"], batch] = margins
            extra: dict[str, Any] = {"all_tokens_per_s": [run["tokens_per_s"] for run in runs], "warm_up_s": warm}
            if engine.device.type == "cuda" and engine.mode == "direct":
                extra["host_us_a_round"] = round(host_us(engine, batch), 1)
            bench.add({**row, "batch": batch, **best, **extra, "runner": compiled})


def prepare(engine: Engine, args: argparse.Namespace) -> None:
    """Compile and capture; with ``--prefill eager`` the prompts' forwards stay as they are, which halves the compiling."""
    if args.prefill == "eager":
        engine._forwards = Forwards(
            engine.target,
            engine.draft,
            engine.page_size,
            aux_layers=engine.draft.config.aux_layers if engine.draft is not None else (),
        )
    engine.warm_up()
    synchronize(engine.device)


def prewarm(bench: Bench, dtype: str) -> None:
    """Fill the compile cache: a process for each engine, all at once, since one compile keeps one core busy."""
    args = bench.args
    common = [sys.executable, __file__, "--warm-only", "--model", str(args.model), "--head", str(args.head)]
    common += ["--device", args.device, "--dtypes", dtype, "--batch", ",".join(map(str, args.batch)), "--mode", args.mode]
    common += ["--tokens", str(args.tokens), "--prefill", args.prefill, "--prompts", str(args.prompts), "--no-prewarm"]
    common += ["--buckets", ",".join(map(str, args.buckets or ())), "--backend", args.backend]
    begun = time.perf_counter()
    children = [
        subprocess.Popen([*common, "--configs", config], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for config in ("", *map(label, args.configs))
    ]
    try:
        for child in children:
            limit = max(1.0, min(2 * args.max_compile, bench.left() / 2) - (time.perf_counter() - begun))
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.communicate(timeout=limit)
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
                child.communicate()
    failed = sum(child.returncode != 0 for child in children)
    took = round(time.perf_counter() - begun, 1)
    bench.header[f"prewarm_{dtype}"] = {"seconds": took, "processes": len(children), "failed": failed}
    print(f"{dtype:9} {len(children)} processes filled the compile cache in {took} s, {failed} did not end well", flush=True)


def warm_only(args: argparse.Namespace) -> None:
    prompts = json.loads(args.prompts.read_text(encoding="utf-8"))["prompts"]
    target = load_target(args.model, dtype=getattr(torch, args.dtypes[0]), device=args.device, backend=args.backend)
    head = load_head(args.head, target)
    head.set_backend(args.backend)
    for config in args.configs or [None]:
        prepare(make_engine(args, target, head if config else None, config, prompts), args)


def make_engine(
    args: argparse.Namespace, target: Any, head: Any, config: SpecConfig | None, prompts: list[list[int]]
) -> Engine:
    return Engine(
        target,
        head,
        config,
        max_requests=max(args.batch),
        max_context=max(map(len, prompts)) + args.tokens,
        buckets=args.buckets,
        mode=args.mode,
        **args.engine_options,
    )


def run_ours(engine: Engine, groups: list[list[list[int]]], tokens: int, stops: Sequence[int]) -> dict[str, Any]:
    engine.stats.__init__()  # type: ignore[misc]
    synchronize(engine.device)
    begun = time.perf_counter()
    requests = [
        request for group in groups for request in engine.generate(group, max_new_tokens=tokens, stop_token_ids=stops)
    ]
    synchronize(engine.device)
    seconds = time.perf_counter() - begun
    count = sum(len(request.tokens) for request in requests)
    decoding = seconds - engine.stats.seconds.get("prefill", 0.0)
    return {
        "tokens": count,
        "seconds": round(seconds, 4),
        "tokens_per_s": round(count / seconds, 2),
        # A prefill ends with one token of each answer.
        "tokens_per_s_without_prefill": round((count - len(requests)) / decoding, 2),
        "accepted_a_round": round(engine.stats.accepted_per_round, 3),
        "steps": engine.stats.steps,
        "phases_s": {name: round(value, 4) for name, value in engine.stats.seconds.items()},
        "ids": [request.tokens for request in requests],
        "margins": [request.margins for request in requests],
    }


def host_us(engine: Engine, batch: int, calls: int = 50) -> float:
    """Host time of launching one round, microseconds: rounds of empty requests, whose results nobody waits for."""
    runner = next(iter(engine.runners.values()))
    rows = torch.full((batch,), engine.state.spare_row, dtype=torch.int64, device=engine.device)
    runner({"rows": rows})
    synchronize(engine.device)
    begun = time.perf_counter()
    for _ in range(calls):
        runner({"rows": rows})
    took = time.perf_counter() - begun
    synchronize(engine.device)
    return took / calls * 1e6


def measure_phases(
    bench: Bench,
    base: dict[str, Any],
    target: Any,
    head: Any,
    config: SpecConfig,
    prompts: list[list[int]],
    stops: Sequence[int],
) -> None:
    """The first configuration with its phases apart, each waited for; slower than a round in one piece."""
    args, batch = bench.args, bench.args.batch[0]
    row = {**base, "system": f"eagle {label(config)}, phases apart", "batch": batch}
    with bench.guard(row, args.max_compile + 60):
        context = max(map(len, prompts)) + args.tokens
        engine = Engine(
            target,
            head,
            config,
            max_requests=batch,
            max_context=context,
            buckets=[batch],
            mode=args.mode,
            split=True,
            **args.engine_options,
        )
        prepare(engine, args)
        groups = grouped(prompts, batch, args.num_prompts)
        engine.generate(groups[0], max_new_tokens=WARM_TOKENS, stop_token_ids=stops)
        run = run_ours(engine, groups, args.tokens, stops)
        shown = {key: value for key, value in run.items() if key not in ("ids", "margins")}
        rounds = max(1, engine.stats.steps)
        shown["us_a_round"] = {name: round(value / rounds * 1e6) for name, value in engine.stats.seconds.items()}
        bench.add({**row, **shown})


def measure_peers(bench: Bench, base: dict[str, Any], prompts: list[list[int]], stops: Sequence[int]) -> None:
    args = bench.args
    model: Any = None
    with bench.guard({**base, "system": "transformers: load"}, 60):
        model = transformers_model(args.model, getattr(torch, base["dtype"]), args.device)
    if model is None:
        return
    cuda = torch.device(args.device).type == "cuda"
    for peer in args.peers:
        for batch in args.batch:
            row = {**base, "system": f"transformers {peer}", "batch": batch}
            if peer == "static" and not cuda:
                continue  # generate compiles for accelerators only.
            if peer == "static" and batch not in args.static_batch:
                continue
            if peer == "lookup" and batch != 1:
                continue  # transformers assists one sequence at a time.
            limit = args.max_compile + args.peer_seconds if peer == "static" else args.peer_seconds + 20
            with bench.guard(row, limit):
                bench.add({**row, **run_peer(bench, model, peer, base["dtype"], batch, prompts, stops)})


def run_peer(
    bench: Bench, model: Any, peer: str, dtype: str, batch: int, prompts: list[list[int]], stops: Sequence[int]
) -> dict[str, Any]:
    args = bench.args
    groups = grouped(prompts, batch, args.num_prompts)
    options: dict[str, Any] = {"do_sample": False, "eos_token_id": list(stops), "pad_token_id": stops[0]}
    if peer == "static":
        options["cache_implementation"] = "static"
    if peer == "lookup":
        options["prompt_lookup_num_tokens"] = 5

    def generate(group: list[list[int]], tokens: int) -> list[list[int]]:
        # A static cache is compiled for its width, so all groups get that of the longest prompt.
        width = max(len(prompt) for among in (groups if peer == "static" else [group]) for prompt in among)
        ids = torch.tensor([[stops[0]] * (width - len(p)) + p for p in group], device=model.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in group], device=model.device)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = model.generate(ids, attention_mask=mask, max_new_tokens=tokens, **options)
        return [cut(row, stops) for row in out[:, width:].tolist()]

    begun = time.perf_counter()
    with turn(args.turns, shared=True):
        # And its width is that of the whole answer, so only the full length compiles what is timed.
        generate(groups[0], args.tokens if peer == "static" else WARM_TOKENS)
        if peer == "static":
            generate(groups[0], args.tokens)
        synchronize(model.device)
    warm = time.perf_counter() - begun
    with turn(args.turns):
        return timed_peer(bench, model, peer, dtype, batch, groups, generate, warm)


@contextlib.contextmanager
def turn(path: Path | None, shared: bool = False) -> Iterator[None]:
    """Processes that name the same file warm up together (``shared``), and are timed alone once none warms up."""
    if path is None:
        yield
        return
    import fcntl

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        yield


def timed_peer(
    bench: Bench,
    model: Any,
    peer: str,
    dtype: str,
    batch: int,
    groups: list[list[list[int]]],
    generate: Callable[[list[list[int]], int], list[list[int]]],
    warm: float,
) -> dict[str, Any]:
    args = bench.args
    best: dict[str, Any] = {}
    for _ in range(args.repeats):
        answers: list[list[int]] = []
        synchronize(model.device)
        begun = time.perf_counter()
        for group in groups:
            answers += generate(group, args.tokens)
            if time.perf_counter() - begun > args.peer_seconds:
                break
        synchronize(model.device)
        seconds = time.perf_counter() - begun
        count = sum(map(len, answers))
        if not best or count / seconds > best["tokens_per_s"]:
            best = {"tokens": count, "seconds": round(seconds, 4), "tokens_per_s": round(count / seconds, 2)}
        known = bench.tokens.get((dtype, f"transformers {peer}", batch), [])
        bench.tokens[dtype, f"transformers {peer}", batch] = max(known, answers, key=len)
        if seconds > args.peer_seconds / 2:
            break
    return {**best, "prompts": len(answers), "warm_up_s": round(warm, 2)}


def transformers_model(source: str, dtype: torch.dtype, device: str) -> Any:
    """transformers' own class over the weights that our loader reads, so that both decode the same numbers."""
    import transformers

    checkpoint = open_checkpoint(source)
    fields = {name: value for name, value in checkpoint.config.items() if name not in ("architectures", "model_type")}
    config = transformers.AutoConfig.for_model(checkpoint.config["model_type"], **fields)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    state = dict(checkpoint.tensors)
    missing, unexpected = model.load_state_dict(state, strict=False)
    missing = [name for name in missing if name != "lm_head.weight" or not config.tie_word_embeddings]
    if missing or unexpected:
        raise ValueError(f"weights differ in name: missing {missing[:3]}, unexpected {unexpected[:3]}")
    model.tie_weights()
    return model.to(device=device, dtype=dtype).eval()


def identities(bench: Bench, dtype: str) -> None:
    """Fill in, for every row of ``dtype``, whether its ids are those of plain decoding and of transformers."""
    for row in bench.rows:
        if row["dtype"] != dtype or "tokens_per_s" not in row:
            continue
        ids = bench.tokens.get((dtype, row["system"], row["batch"]))
        for other, key in (("plain", "plain"), ("transformers eager", "transformers")):
            reference = bench.tokens.get((dtype, other, row["batch"]))
            if ids is None or reference is None or row["system"] == other:
                continue
            found = divergence(ids, reference, bench.margins.get((dtype, row["batch"])))
            row[f"identical_to_{key}"] = found is None
            if found is not None:
                row[f"first_divergence_from_{key}"] = found
            row[f"same_answers_as_{key}"] = sum(a == b for a, b in zip(ids, reference, strict=False))
            row["compared_answers"] = min(len(ids), len(reference))


def divergence(
    ids: Sequence[Sequence[int]], reference: Sequence[Sequence[int]], margins: Sequence[Sequence[float]] | None
) -> dict[str, Any] | None:
    """The first place where two runs differ, with plain decoding's gap between its two best logits there."""
    for index, (a, b) in enumerate(zip(ids, reference, strict=False)):
        if list(a) == list(b):
            continue
        shared = min(len(a), len(b))
        place = next((i for i in range(shared) if a[i] != b[i]), shared)
        known = margins is not None and index < len(margins) and place < len(margins[index])
        gap = round(float(margins[index][place]), 6) if known and margins is not None else None
        return {"prompt": index, "position": place, "top2_gap": gap}
    return None


def grouped(prompts: list[list[int]], batch: int, least: int) -> list[list[list[int]]]:
    """Whole batches that hold at least ``least`` prompts together; prompts repeat when there are too few."""
    count = -(-least // batch)
    return [[prompts[(group * batch + i) % len(prompts)] for i in range(batch)] for group in range(count)]


def cut(tokens: list[int], stops: Sequence[int]) -> list[int]:
    """An answer up to its stop token, which it keeps; behind it stands padding."""
    return next((tokens[: place + 1] for place, token in enumerate(tokens) if token in stops), tokens)


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each dtype and batch: the best configuration and what it gains."""
    found = []
    done = [row for row in rows if "tokens_per_s" in row and "phases apart" not in row["system"]]
    for dtype, batch in dict.fromkeys((row["dtype"], row["batch"]) for row in done):
        speed = {row["system"]: row["tokens_per_s"] for row in done if (row["dtype"], row["batch"]) == (dtype, batch)}
        eagle = {name: value for name, value in speed.items() if name.startswith("eagle")}
        if not eagle:
            continue
        best = max(eagle, key=lambda name: eagle[name])
        entry: dict[str, Any] = {"dtype": dtype, "batch": batch, "best": best, "tokens_per_s": eagle[best]}
        for name, value in speed.items():
            if not name.startswith("eagle") and value:
                entry[f"times_{name.replace(' ', '_')}"] = round(eagle[best] / value, 2)
        found.append(entry)
    return found


def plot(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    """Bars of tokens per second, one group a batch size, one panel a dtype."""
    from matplotlib.figure import Figure

    done = [row for row in rows if "tokens_per_s" in row and "phases apart" not in row["system"]]
    dtypes = list(dict.fromkeys(row["dtype"] for row in done))
    if not dtypes:
        raise ValueError("there is no row to draw")
    figure = Figure(figsize=(6.5 * len(dtypes), 4), layout="constrained")
    for axes, dtype in zip(figure.subplots(1, len(dtypes), squeeze=False)[0], dtypes, strict=True):
        mine = [row for row in done if row["dtype"] == dtype]
        systems, batches = (list(dict.fromkeys(row[key] for row in mine)) for key in ("system", "batch"))
        width = 0.8 / len(systems)
        for index, system in enumerate(systems):
            at = {row["batch"]: row["tokens_per_s"] for row in mine if row["system"] == system}
            places = [batches.index(batch) + index * width for batch in at]
            bars = axes.bar(places, list(at.values()), width, label=system)
            axes.bar_label(bars, fmt="%.0f", fontsize=6, rotation=90, padding=2)
        axes.set_xticks([place + 0.4 - width / 2 for place in range(len(batches))], [f"B={batch}" for batch in batches])
        if len(batches) > 1:
            axes.set_yscale("log")
        axes.set_ylabel("tokens / s")
        axes.set_title(f"{dtype}, {title}", fontsize=9)
        axes.margins(y=0.15)
        axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def line_of(row: dict[str, Any]) -> str:
    head = f"{row.get('dtype', ''):9} {row['system']:28} B={row.get('batch', '-')!s:3}"
    if "reason" in row:
        return f"{head} -- {row['reason']}"
    accepted = f"  {row['accepted_a_round']:.2f} a round" if "accepted_a_round" in row else ""
    host = f"  host {row['host_us_a_round']:.0f} us" if "host_us_a_round" in row else ""
    return f"{head} {row['tokens_per_s']:9.1f} tokens/s{accepted}{host}  warm-up {row.get('warm_up_s', 0):.1f} s"


def label(config: SpecConfig) -> str:
    return f"{config.num_steps}/{config.topk}" + (f"/{config.width}" if config.topk > 1 else "")


def parse_config(text: str) -> SpecConfig:
    """``steps/topk`` or ``steps/topk/nodes``."""
    return SpecConfig(*(int(part) for part in text.split("/")))


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises :class:`OutOfTime` inside when the time is over, again and again; a call into C++ ends first."""

    def ring(signum: int, frame: Any) -> None:
        raise OutOfTime(f"cut off after {seconds:.0f} s" if seconds > 0 else "the time of --seconds is used up")

    before: Callable[..., Any] | int | None = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.01), 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def environment(args: argparse.Namespace) -> dict[str, Any]:
    cuda = torch.device(args.device).type == "cuda"
    found: dict[str, Any] = {
        "device_name": torch.cuda.get_device_name() if cuda else cpu_name(),
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        **({} if cuda else {"compiled_kernels": native.library() is not None}),
        "threads": torch.get_num_threads(),
        "model": Path(str(args.model)).stem,
        "tokens": args.tokens,
        "prompts": args.num_prompts,
    }
    for package in ("triton", "transformers"):
        with contextlib.suppress(Exception):
            found[package] = __import__("importlib.metadata").metadata.version(package)
    return found


def cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "CPU"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="smollm2", help="a GGUF file, a model directory, or smollm2")
    add("--head", default=None, help="folder of the draft head; the shipped one for SmolLM2 if not given")
    add("--prompts", type=Path, default=PROMPTS, help="JSON with token ids; see smollm2_prompts.json")
    add("--device", default="cuda" if cuda else "cpu")
    add("--dtypes", default="bfloat16,float32" if cuda else "float32,bfloat16")
    add("--batch", default="1,8,32" if cuda else "1,8", help="batch sizes")
    add("--configs", default=CONFIGS["cuda" if cuda else "cpu"], help="steps/topk[/nodes] of each EAGLE run")
    add("--mode", default="auto", help="runner mode")
    add("--buckets", default="", help="batch sizes to capture; the runner's own list if not given")
    add("--backend", default="auto", help="attention backend")
    add("--tokens", type=int, default=128, help="most tokens of an answer")
    add("--num-prompts", type=int, default=4, help="prompts of each figure, at least one batch")
    add("--repeats", type=int, default=2)
    add("--peers", default=",".join(PEERS), help=f"of {', '.join(PEERS)}; empty for none")
    add("--static-batch", default="1", help="batch sizes for the static cache, each of which compiles anew")
    add("--peer-seconds", type=float, default=8.0 if cuda else 40.0, help="most time of one peer's figure")
    add("--phases", action=argparse.BooleanOptionalAction, default=not cuda, help="also one run with phases apart")
    add("--pack", action=argparse.BooleanOptionalAction, default=True, help="CPU: weights laid out for few rows")
    add("--seconds", type=float, default=145.0 if cuda else 900.0, help="time of the whole run")
    add("--max-compile", type=float, default=75.0, help="most time of one warm-up")
    add("--prefill", choices=("auto", "eager"), default="auto", help="eager: prompts' forwards are not compiled")
    add("--prewarm", action=argparse.BooleanOptionalAction, default=cuda, help="compile in parallel processes first")
    add("--warm-only", action="store_true", help=argparse.SUPPRESS)
    add("--plain", action=argparse.BooleanOptionalAction, default=True, help="plain decoding, which ratios need")
    add("--turns", type=Path, help="file by which processes that run side by side take turns in what is timed")
    add("--threads", type=int, default=0)
    add("--json", type=Path)
    add("--plot", type=Path)
    args = parser.parse_args(argv)
    args.batch = sorted({int(part) for part in args.batch.split(",")})
    args.buckets = [int(part) for part in args.buckets.split(",") if part] or None
    args.static_batch = {int(part) for part in args.static_batch.split(",") if part}
    args.dtypes = args.dtypes.split(",")
    args.configs = [parse_config(part) for part in args.configs.split(",") if part]
    args.peers = [part for part in args.peers.split(",") if part]
    unknown = set(args.peers) - set(PEERS)
    if unknown:
        parser.error(f"unknown peer {', '.join(sorted(unknown))}; there are {', '.join(PEERS)}")
    args.head = args.head or shipped_head("smollm2-135m")
    args.engine_options = {"pack_weights": args.pack} if not args.pack else {}
    return args


if __name__ == "__main__":
    main()
