"""A runner for one compiled step: pad to a bucket, run or replay, unpad.

Data flow of a call: raw batch -> static buffers of the bucket (``FieldTable.copy_in``) -> compiled step, as a CUDA graph
where there is one -> outputs of the live requests. The step computes all of its metadata from its inputs, so capture and
replay have nothing else to agree on.

Modes, with equal results:

* ``"reduce-overhead"``: ``torch.compile(mode="reduce-overhead")``; torch keeps the graphs.
* ``"direct"``: the same compiled step, captured here into one CUDA graph a bucket, all in one memory pool. A replay
  skips torch's guards and tree bookkeeping.
* ``"eager"``: no compiler, no graph.

On a device without CUDA graphs the first two run the compiled step as it is. A runner names no backend and knows no model.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import time
import types
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from specops.batch import FieldTable, unpad
from specops.compile import report
from specops.compile.buckets import bucket_for, check_buckets, default_buckets
from specops.compile.cache import save_cache
from specops.compile.diagnosis import graph_obstacles
from specops.compile.plans import MakePlan, StepPlan
from specops.compile.static_tensors import StaticTensors, weak_reference

Mode = Literal["reduce-overhead", "direct", "eager"]
MODES: tuple[Mode, ...] = ("reduce-overhead", "direct", "eager")
# Forms of raw batches, one or two for each number of requests.
KEPT_FORMS = 1024
Progress = Callable[[int, int, str], None]


class StepRunner:
    """Runs ``step(**fields) -> tuple of tensors`` for any batch of 1 to ``max_requests`` requests.

    Args:
        step: module whose forward takes the fields of ``table`` by name and returns a tuple of tensors, each with a
            fixed number of rows per request. It must not synchronise with the host.
        table: the fields.
        device: where the step runs.
        max_requests: the largest bucket.
        buckets: batch sizes to capture; :func:`default_buckets` when not given.
        mode: ``"reduce-overhead"``, ``"direct"`` or ``"eager"``.
        strict: raise :class:`GraphLostError` where a graph is lost, instead of warning once.
        over_bucket: what a batch above the largest bucket does: ``"eager"`` (with one warning) or ``"error"``.
        outputs: ``"copy"`` hands over fresh tensors. ``"view"`` hands over graph memory that the next call of this
            runner, or of one sharing its pool, overwrites.
        pool: CUDA graph memory pool to share with other runners (direct mode).
        plan: makes the host plan of a batch size (:mod:`specops.compile.plans`), for steps whose backend needs one. The
            step then takes its handle as the argument ``plan``, and the plan is updated before every run.
        compiler: ``backend`` of ``torch.compile``; ``"eager"`` traces and guards only, to debug or test a step.
        name: how messages call the runner.

    Raises:
        ValueError: an unknown mode or option, or buckets that are not batch sizes.
    """

    def __init__(
        self,
        step: nn.Module,
        table: FieldTable,
        *,
        device: torch.device | str,
        max_requests: int,
        buckets: Iterable[int] | None = None,
        mode: Mode = "reduce-overhead",
        strict: bool = False,
        over_bucket: Literal["eager", "error"] = "eager",
        outputs: Literal["copy", "view"] = "copy",
        pool: Any = None,
        plan: MakePlan | None = None,
        compiler: str = "inductor",
        name: str | None = None,
    ) -> None:
        for label, value, known in (
            ("mode", mode, MODES),
            ("over_bucket", over_bucket, ("eager", "error")),
            ("outputs", outputs, ("copy", "view")),
        ):
            if value not in known:
                raise ValueError(f"{label} must be one of {', '.join(known)}, got {value!r}")
        self.step = step
        self.table = table
        self.device = _indexed(torch.device(device))
        self.mode: Mode = mode
        self._uses_graphs = self.device.type == "cuda" and mode != "eager"
        if buckets is None:
            # Without graphs the dynamic code serves every size as it is, so nothing needs padding.
            buckets = default_buckets(max_requests) if self._uses_graphs else range(1, max_requests + 1)
        self.buckets = check_buckets(buckets)
        self.over_bucket = over_bucket
        self.outputs = outputs
        self.pool = pool
        self.compiler = compiler
        self._make_plan = plan
        self._plans: dict[int, StepPlan] = {}
        self.name = name or type(self).__name__
        self._losses = report.Losses(self.name, strict)
        self._report = report.RunnerReport(self.name, mode, str(self.device), table.tokens_per_request)
        self._bucket_reports = {size: report.BucketReport(size) for size in self.buckets}
        self._report.buckets = list(self._bucket_reports.values())
        self._stage = _staging(table) if self._uses_graphs else table.copy_in
        self._compiled: Callable[..., tuple[Tensor, ...]] | None = None
        self._views: dict[int, dict[str, Tensor]] = {}
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, list[Tensor]]] = {}
        self._statics: StaticTensors | None = None
        self._obstacles: list[str] | None = None
        self._forms: dict[Any, int] = {}
        self._staged: tuple[int, int] | None = None
        self._warm = False

    @property
    def tokens_per_request(self) -> int:
        return self.table.tokens_per_request

    @property
    def max_requests(self) -> int:
        return self.buckets[-1]

    def buffers(self) -> dict[str, Tensor]:
        """The static input buffers of the largest bucket; smaller buckets are prefixes of them."""
        return self._bucket_views(self.max_requests)

    def warm_up(self, progress: Progress | None = None) -> report.RunnerReport:
        """Compile once and capture every bucket, largest first, on a padded batch that writes no page.

        Args:
            progress: called with (done, total, what) after each bucket.
        """
        if self._warm:
            return self.explain()
        graphs_before, started = report.compiled_graphs(), time.perf_counter()
        with torch.no_grad(), self._config():
            for done, size in enumerate(reversed(self.buckets), 1):
                self._warm_bucket(size)
                if progress is not None:
                    progress(done, len(self.buckets), f"{self.name}: {size} requests")
        self._report.compiled_graphs = report.compiled_graphs() - graphs_before
        self._report.compile_seconds = time.perf_counter() - started
        self._statics = StaticTensors(self.step)
        self._warm = True
        if self._report.compiled_graphs > 2:
            self._losses.tell(
                f"{self._report.compiled_graphs} graphs were compiled, 2 serve any batch: {report.last_recompile_reason()}"
            )
        lost = [f"{b.num_requests} requests: {b.reason}" for b in self._report.buckets if not b.captured]
        if self._uses_graphs and lost:
            self._losses.tell("no CUDA graph for " + "; ".join(lost))
        return self.explain()

    def __call__(self, batch: Mapping[str, Tensor], *, unchanged: bool = False) -> list[Tensor]:
        """Run the step on a raw batch of any size.

        Args:
            batch: a tensor for every field of the table, ``[B, ...]``; token fields may be flat.
            unchanged: the caller vouches that every value is that of the last call, which then needn't be staged again.

        Returns:
            The step's outputs for the ``B`` requests, without padding. Without requests, empty outputs.

        Raises:
            ValueError, TypeError: a field that does not fit the table, or a batch over the largest bucket with
                ``over_bucket="error"``.
            GraphLostError: in strict mode, where a graph is lost.
        """
        # A batch of a form that was checked before need not be checked again: it is the host's time before a replay.
        form = tuple([(name, tensor.shape, tensor.dtype, tensor.device) for name, tensor in batch.items()])
        known = self._forms.get(form)
        num_requests = self.table.check(batch, self.device) if known is None else known
        if known is None and len(self._forms) < KEPT_FORMS:
            self._forms[form] = num_requests
        with torch.no_grad():
            if num_requests == 0:
                return [output[:0] for output in self._eager(self._idle_batch())]
            bucket = bucket_for(num_requests, self.buckets)
            if self.mode == "eager":
                return list(self._eager(self.table.rows(batch, num_requests)))
            if bucket is None:
                return self._over(batch, num_requests)
            if not self._warm:
                self.warm_up()
            return self._replay(batch, num_requests, bucket, unchanged)

    def explain(self) -> report.RunnerReport:
        """Per bucket: captured or why not, time, graph memory, replays; and every recompile after warm-up."""
        return self._report

    def save_cache(self, path: str | os.PathLike[str]) -> int:
        """Compile what is not compiled yet, then :func:`specops.compile.save_cache`, which see."""
        if not self._warm:
            self.warm_up()
        return save_cache(path)

    def _replay(self, batch: Mapping[str, Tensor], num_requests: int, bucket: int, unchanged: bool) -> list[Tensor]:
        assert self._statics is not None
        moved = self._statics.moved()
        if moved is not None:
            self._re_record(moved)
        views = self._bucket_views(bucket)
        if not unchanged or self._staged != (bucket, num_requests):
            self._stage(views, batch, num_requests, bucket)
            self._staged = (bucket, num_requests)
        handle = self._planned(views)
        self._bucket_reports[bucket].replays += 1
        captured = self._graphs.get(bucket)
        if captured is not None:
            graph, outputs = captured
            graph.replay()
        else:
            outputs = self._run_compiled({**views, **handle}, bucket)
        live = unpad(outputs, num_requests, bucket)
        if self.outputs == "view" or not self._uses_graphs:
            return live
        return [output.clone() for output in live]

    def _run_compiled(self, views: Mapping[str, Tensor], bucket: int) -> list[Tensor]:
        before = report.compiled_graphs()
        if self._uses_graphs:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        with self._config():
            outputs = self._call_compiled(views)
        if report.compiled_graphs() != before and self._warm:
            cause = report.recompile_cause(report.last_recompile_reason(), tuple(views))
            self._report.recompiles.append(cause)
            self._losses.tell(f"recompiled for {bucket} requests after warm-up: {cause}")
        return outputs

    def _over(self, batch: Mapping[str, Tensor], num_requests: int) -> list[Tensor]:
        cause = (
            f"a batch of {num_requests} requests is above the largest bucket, {self.max_requests}; "
            "raise max_requests or split the batch"
        )
        if self.over_bucket == "error":
            raise ValueError(f"{self.name}: {cause}")
        self._losses.tell(f"{cause}. Running it eagerly")
        self._report.eager_calls += 1
        return list(self._eager(self.table.rows(batch, num_requests)))

    def _re_record(self, moved: str) -> None:
        """Weights or caches have new addresses: graphs that read the old ones must not be replayed."""
        self._losses.tell(f"{moved} has moved since capture; recording again")
        self._graphs.clear()
        self._plans.clear()
        self._compiled = None
        self._warm = False
        self.warm_up()

    def _warm_bucket(self, size: int) -> None:
        entry, views = self._bucket_reports[size], self._bucket_views(size)
        self._staged = None
        entry.captured, entry.reason = False, None
        for field in self.table.fields:
            views[field.name].fill_(field.pad)
        started = time.perf_counter()
        if self.mode == "eager":
            entry.reason = "eager mode"
        else:
            with report.skip_messages() as messages:
                skipped, reserved = report.skipped_graphs(), self._reserved_bytes()
                partitions = report.graph_partitions()
                entry.reason = self._record(size, views)
                if report.skipped_graphs() > skipped or (messages and not self._graphs.get(size)):
                    entry.reason = messages[-1] if messages else "inductor skipped the graph without a message"
                if entry.reason is None and self._uses_graphs and self.mode == "reduce-overhead":
                    entry.reason = report.cut_graph(partitions)
            if entry.reason is not None and self._uses_graphs:
                entry.reason = self._explained(entry.reason, views)
            entry.captured = self._uses_graphs and entry.reason is None
            entry.memory_bytes = max(0, self._reserved_bytes() - reserved)
        entry.seconds = time.perf_counter() - started

    def _explained(self, reason: str, views: Mapping[str, Tensor]) -> str:
        """The reason with what the step itself shows; the step is watched once, whatever the number of buckets."""
        if self._obstacles is None:
            self._obstacles = graph_obstacles(self.step, {**views, **self._planned(views)}, self.device)
        return f"{reason} ({', '.join(self._obstacles)})" if self._obstacles else reason

    def _record(self, size: int, views: Mapping[str, Tensor]) -> str | None:
        """Compile if needed and capture one bucket; the reason when there is no graph."""
        if not self._uses_graphs:
            self._call_compiled({**views, **self._planned(views)})
            return f"{self.device.type} has no CUDA graphs"
        if self.mode == "reduce-overhead":
            # torch warms up at the first call of a shape, records at the second and replays from then on.
            for _ in range(3):
                handle = self._planned(views)
                torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
                self._call_compiled({**views, **handle})
            return None
        stream = _capture_stream(self.device)
        handle = self._planned(views)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            self._call_compiled({**views, **handle})
        torch.cuda.current_stream(self.device).wait_stream(stream)
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        handle = self._planned(views)
        try:
            with torch.cuda.graph(graph, pool=self.pool, stream=stream):
                outputs = self._call_compiled({**views, **handle})
        except RuntimeError as error:
            return f"capture failed: {str(error).splitlines()[0]}"
        # Weak references: the next, smaller bucket may use this one's output memory, since replays never overlap.
        self._graphs[size] = (graph, [weak_reference(output) for output in outputs])
        return None

    def _call_compiled(self, views: Mapping[str, Tensor]) -> list[Tensor]:
        if self._compiled is None:
            mode = "reduce-overhead" if self._uses_graphs and self.mode == "reduce-overhead" else None
            self._compiled = torch.compile(own_code(self.step), backend=self.compiler, mode=mode, fullgraph=True)
        return list(self._compiled(**views))

    def _eager(self, rows: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        outputs: tuple[Tensor, ...] = self.step(**rows, **self._planned(rows))
        return outputs

    def _planned(self, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Update the plan of this batch size for a run over ``fields``; its handle as the step's argument.

        The one place where plans are updated: eager runs, warm-up, capture and replay all come through here.
        """
        if self._make_plan is None:
            return {}
        size = next(iter(fields.values())).shape[0]
        if size not in self._plans:
            self._plans[size] = self._make_plan(fields)
        plan = self._plans[size]
        plan.update(fields)
        return {"plan": plan.handle}

    def _idle_batch(self) -> dict[str, Tensor]:
        return self.table.allocate(1, self.device)

    def _bucket_views(self, size: int) -> dict[str, Tensor]:
        """Static buffers of one bucket: prefixes of the largest, so that every bucket has the same addresses."""
        if self.max_requests not in self._views:
            self._views[self.max_requests] = self._marked(self.table.allocate(self.max_requests, self.device))
        if size not in self._views:
            largest = self._views[self.max_requests]
            self._views[size] = self._marked({name: buffer[:size] for name, buffer in largest.items()})
        return self._views[size]

    def _marked(self, views: dict[str, Tensor]) -> dict[str, Tensor]:
        for view in views.values():
            if self._uses_graphs:
                torch._dynamo.mark_static_address(view, guard=False)
            # The batch alone is dynamic; left to dynamo, widths that differ between two runners would become so too.
            torch._dynamo.mark_static(view, list(range(1, view.dim())))
            if view.shape[0] > 1:
                torch._dynamo.mark_dynamic(view, 0)
        return views

    def _config(self) -> AbstractContextManager[Any]:
        """Torch settings of this runner, in force while it compiles and records only."""
        if self.mode != "reduce-overhead" or not self._uses_graphs:
            return nullcontext()
        # Many buckets are wanted here: one recording each is no accident to warn about.
        settings: AbstractContextManager[Any] = torch._inductor.config.patch(
            {"triton.cudagraph_dynamic_shape_warn_limit": None}
        )
        return settings

    def _reserved_bytes(self) -> int:
        return torch.cuda.memory_reserved(self.device) if self._uses_graphs else 0


def own_code(step: nn.Module) -> Callable[..., tuple[Tensor, ...]]:
    """A function that calls ``step``, with a code object of its own.

    Dynamo keeps compiled code, and counts recompiles against its limit, per code object. With a shared one, many runners
    in one process would run into that limit.
    """

    def call(**views: Tensor) -> tuple[Tensor, ...]:
        outputs: tuple[Tensor, ...] = step(**views)
        return outputs

    return types.FunctionType(call.__code__.replace(), call.__globals__, closure=call.__closure__)


def _staging(table: FieldTable) -> Callable[[Mapping[str, Tensor], Mapping[str, Tensor], int, int], None]:
    """One fused launch where Triton is installed and the table fits it, else a copy a field."""
    if importlib.util.find_spec("triton") is None:
        return table.copy_in
    from specops.compile.staging import FusedStaging

    try:
        return FusedStaging(table)
    except ValueError:
        return table.copy_in


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One side stream for all captures of a device: libraries keep a workspace of tens of MiB for every stream they see."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _indexed(device: torch.device) -> torch.device:
    """``cuda`` as ``cuda:N``, so that it compares equal to the device of a tensor."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
