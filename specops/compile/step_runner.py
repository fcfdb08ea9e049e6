"""A runner for one compiled step: pad to a bucket, run or replay, unpad.

Data flow of a call: raw batch -> static buffers of the bucket -> compiled step, as a CUDA graph where there is one ->
outputs of the live requests (:mod:`specops.compile.ready`). The step computes all of its metadata from its inputs, so
capture and replay have nothing else to agree on.

Modes, with equal results:

* ``"reduce-overhead"``: ``torch.compile(mode="reduce-overhead")``; torch keeps the graphs. After warm-up its
  code is called by itself, without guards.
* ``"direct"``: the same compiled step, captured here into one CUDA graph a bucket, all in one memory pool. A replay
  skips torch's guards and tree bookkeeping.
* ``"eager"``: no compiler, no graph.

On a device without CUDA graphs the first two run the compiled step as it is. A runner names no backend and knows no model.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import itemgetter
from typing import Any, Literal

import torch
from torch import Tensor, nn

from specops.batch import FieldTable, unpad
from specops.compile import report
from specops.compile.bare_call import BareCall, LastCall, own_graph_trees, torch_graph
from specops.compile.buckets import bucket_for, check_buckets, default_buckets
from specops.compile.cache import save_cache
from specops.compile.capture import bound_replay, capture_stream, captures, capturing
from specops.compile.compiled import CompiledStep
from specops.compile.diagnosis import graph_obstacles
from specops.compile.plans import MakePlan, StepPlan
from specops.compile.ready import CopyIn, HandOver, HandOverLeft, Ready, Staging, copy_of_outputs
from specops.compile.short_way import DEVICE, DTYPE, SHAPE, ShortWay, native_way
from specops.compile.static_tensors import StaticTensors, weak_reference
from specops.ops.contracts import has_triton

Mode = Literal["reduce-overhead", "direct", "eager"]
MODES: tuple[Mode, ...] = ("reduce-overhead", "direct", "eager")
# Forms of raw batches, one or two for each number of requests.
KEPT_FORMS = 1024
Progress = Callable[[int, int, str], None]
_DEVICE_INDEX = Tensor.get_device


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
        self._pick: Callable[[Mapping[str, Tensor]], Sequence[Tensor]]
        # Of one name, itemgetter gives the item and not a tuple.
        names = table.names
        self._pick = itemgetter(*names) if len(names) > 1 else lambda batch: (batch[names[0]],)
        self._compiled: CompiledStep | None = None
        self._views: dict[int, dict[str, Tensor]] = {}
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, list[Tensor]]] = {}
        # What calls torch's own graphs, by bucket.
        self._last_call, self._bare = LastCall(), dict[int, BareCall]()
        self._statics: StaticTensors | None = None
        self._obstacles: list[str] | None = None
        self._forms: dict[Any, int] = {}
        # Tensors outside of CUDA have the index -1, and no other accelerator lives beside CUDA.
        self._device_of: Callable[[Tensor], Any] = _DEVICE_INDEX if self.device.type == "cuda" else DEVICE
        self._ready: dict[int, Ready] = {}
        # By the length of the field that tells most of a batch: one of requests, which is not sometimes flat.
        self._short: dict[int, ShortWay] = {}
        self._lead = next((i for i, field in enumerate(table.fields) if field.extent == "request"), 0)
        self._copy_outputs: Any = None
        self._staged: int | None = None
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
        direct = self._uses_graphs and self.mode == "direct"
        with torch.no_grad(), self._config(), captures(self.device) if direct else nullcontext():
            for done, size in enumerate(reversed(self.buckets), 1):
                self._warm_bucket(size)
                if progress is not None:
                    progress(done, len(self.buckets), f"{self.name}: {size} requests")
            self._prime()
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
        try:
            fields = self._pick(batch) if len(batch) == len(self.table.fields) else None
        except KeyError:
            fields = None
        if fields is None:
            self.table.check(batch, self.device)
            raise AssertionError("a batch of other fields than the table's passed its check")
        return self.run(fields, unchanged=unchanged)

    def run(self, fields: Sequence[Tensor], *, unchanged: bool = False) -> list[Tensor]:
        """:meth:`__call__` for fields in the table's order.

        What stands before the replay is the host's time that a step waits for; it is kept to a few microseconds.
        """
        try:
            short = self._short.get(fields[self._lead].shape[0])
        except (IndexError, AttributeError):
            short = None
        if short is not None:
            ready = short.ready
            if short.go(fields, unchanged and self._staged == ready.num_requests):
                self._staged = ready.num_requests
                ready.entry.replays += 1
                return ready.hand_over(self.outputs == "view")  # type: ignore[misc]
        return self._run_long(fields, unchanged)

    def _run_long(self, fields: Sequence[Tensor], unchanged: bool) -> list[Tensor]:
        """:meth:`run` by the way that every batch can go; shows the next of its form the short one, if it can go that."""
        # A batch of a form that was checked before need not be checked again.
        form = (*map(SHAPE, fields), *map(DTYPE, fields), *map(self._device_of, fields))
        num_requests = self._forms.get(form)
        if num_requests is None:
            num_requests = self.table.check(self._named(fields), self.device)
            if len(self._forms) < KEPT_FORMS:
                self._forms[form] = num_requests
        ready = self._ready.get(num_requests)
        if ready is None:
            served = self._make_ready(fields, num_requests)
            if not isinstance(served, Ready):
                return served
            ready = served
        if not unchanged or self._staged != num_requests:
            ready.stage(fields)
            self._staged = num_requests
        assert self._statics is not None
        moved = self._statics.moved()
        if moved is not None:
            self._re_record(moved)
            return self._run_long(fields, False)
        handle = self._planned(ready.views) if self._make_plan is not None else {}
        ready.entry.replays += 1
        if ready.replay is not None and ready.hand_over is not None:
            ready.replay()
            if ready.prepared is not None:
                self._shorten(fields, ready)
            return ready.hand_over(self.outputs == "view")
        with torch.no_grad():
            outputs = unpad(self._run_compiled({**ready.views, **handle}, ready.bucket), num_requests, ready.bucket)
            return outputs if self.outputs == "view" or not self._uses_graphs else [output.clone() for output in outputs]

    def explain(self) -> report.RunnerReport:
        """Per bucket: captured or why not, time, graph memory, replays; and every recompile after warm-up."""
        return self._report

    def save_cache(self, path: str | os.PathLike[str]) -> int:
        """Compile what is not compiled yet, then :func:`specops.compile.save_cache`, which see."""
        if not self._warm:
            self.warm_up()
        return save_cache(path)

    def _named(self, fields: Sequence[Tensor]) -> dict[str, Tensor]:
        return dict(zip(self.table.names, fields, strict=True))

    def _make_ready(self, fields: Sequence[Tensor], num_requests: int) -> Ready | list[Tensor]:
        """What runs ``num_requests`` requests from now on; or their outputs, if no bucket is to serve them."""
        with torch.no_grad():
            if num_requests == 0:
                return [output[:0] for output in self._eager(self._idle_batch())]
            bucket = bucket_for(num_requests, self.buckets)
            if self.mode == "eager":
                return list(self._eager(self.table.rows(self._named(fields), num_requests)))
            if bucket is None:
                return self._over(self._named(fields), num_requests)
            if not self._warm:
                self.warm_up()
            views, stage = self._bucket_views(bucket), self._stage
            launch = stage.prepare(views, num_requests, bucket) if hasattr(stage, "prepare") else None
            staging = Staging(self.table.names, views, num_requests, bucket, stage, launch)
            ready = Ready(num_requests, bucket, views, self._bucket_reports[bucket], staging)
            captured = self._graphs.get(bucket)
            if captured is not None:
                graph, outputs = captured
                ready.replay = bound_replay(graph)
                ready.hand_over = HandOver(outputs, num_requests, bucket, self._copy_outputs)
                ready.prepared = launch if self._make_plan is None else None
            elif bucket in self._bare and self._bucket_reports[bucket].captured:
                left = HandOverLeft(num_requests, bucket, self._copy_outputs)
                ready.replay, ready.hand_over, ready.prepared = self._bare_replay(ready, left), left, launch
            self._ready[num_requests] = ready
            return ready

    def _shorten(self, fields: Sequence[Tensor], ready: Ready) -> None:
        """The next batch of this form goes the short way."""
        rows = fields[self._lead].shape[0]
        if rows not in self._short and len(self._short) < KEPT_FORMS:
            assert self._statics is not None
            self._short[rows] = ShortWay(ready, self._statics, fields[0].get_device())
        if rows in self._short and self._short[rows].ready is ready:
            self._short[rows].learn(fields)

    def _bare_replay(self, ready: Ready, left: HandOverLeft) -> Callable[[], None]:
        """What replays torch's own graph: as it is, or by a new step and a call of the compiled code, nothing else."""
        bare = self._bare[ready.bucket]
        mark, grad, recorded = torch.compiler.cudagraph_mark_step_begin, torch.is_grad_enabled, bare.recorded
        # Outputs that were copied may be overwritten, also those of another batch size.
        others: set[Any] = set()
        if recorded is not None:
            left.recorded = HandOver(recorded.outputs, ready.num_requests, ready.bucket, self._copy_outputs)
            if self.outputs == "copy":
                others |= {other.recorded.node for other in self._bare.values() if other.recorded is not None}

        def replay() -> None:
            nonlocal recorded
            if recorded is not None and recorded.is_current(others):
                left.left = ()
                recorded.replay()
                return
            own_graph_trees()
            mark()  # type: ignore[no-untyped-call]
            try:
                if grad():
                    with torch.no_grad():
                        left.left = bare()
                else:
                    left.left = bare()
            except AssertionError:
                # Its graphs are no more (torch._dynamo.reset). torch.compile compiles again, which is told.
                ready.replay, recorded = anew, None
                others.clear()
                anew()

        def anew() -> None:
            with torch.no_grad():
                left.left = self._run_compiled(ready.views, ready.bucket)

        return replay

    def _run_compiled(self, views: Mapping[str, Tensor], bucket: int) -> list[Tensor]:
        before = report.compiled_graphs()
        if self._uses_graphs:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
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
        self._bare.clear()
        self._ready.clear()
        self._short.clear()
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
            self._record_by_torch(size, views)
            return None
        stream = capture_stream(self.device)
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
            with capturing(graph, self.pool, stream):
                outputs = self._call_compiled({**views, **handle})
        except RuntimeError as error:
            return f"capture failed: {str(error).splitlines()[0]}"
        # Weak references: the next, smaller bucket may use this one's output memory, since replays never overlap.
        self._graphs[size] = (graph, [weak_reference(output) for output in outputs])
        return None

    def _record_by_torch(self, size: int, views: Mapping[str, Tensor]) -> None:
        """Have torch record; it warms up at the first call of a shape, records at the second and replays from then on."""
        outputs: list[Tensor] = []
        try:
            for self._last_call.watching in (False, False, True):
                outputs.clear()
                handle = self._planned(views)
                torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
                outputs += self._call_compiled({**views, **handle})
        finally:
            self._last_call.watching = False
        bare = self._last_call.bare(self.step, views, outputs)
        if bare is not None:
            # It has been replayed: the first call warms up, the second records.
            recorded = torch_graph(outputs)
            with torch.no_grad():
                bare.recorded = recorded if recorded is not None and recorded.leaves(outputs) else None
            self._bare[size] = bare
        if size == self.max_requests and hasattr(self._stage, "prepare"):
            self._copy_outputs = copy_of_outputs(outputs, size)

    def _prime(self) -> None:
        """Compile what stages batches and hands outputs over, so that no call has to."""
        self._staged = None
        if not self._uses_graphs:
            return
        self._stage(self._bucket_views(self.max_requests), self._idle_batch(), 1, 1)
        if hasattr(self._stage, "prepare"):
            captured = self._graphs.get(self.max_requests)
            if captured is not None:
                self._copy_outputs = copy_of_outputs(captured[1], self.max_requests)
            native_way()

    def _call_compiled(self, views: Mapping[str, Tensor]) -> list[Tensor]:
        graphs = self._uses_graphs and self.mode == "reduce-overhead"
        if graphs:
            own_graph_trees()
        if self._compiled is None:
            self._compiled = CompiledStep(self.step, self.compiler, self._last_call if graphs else None)
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


def _staging(table: FieldTable) -> CopyIn:
    """One fused launch where Triton is installed and the table fits it, else a copy a field."""
    if not has_triton():
        return table.copy_in
    from specops.compile.staging import FusedStaging

    try:
        return FusedStaging(table)
    except ValueError:
        return table.copy_in


def _indexed(device: torch.device) -> torch.device:
    """``cuda`` as ``cuda:N``, so that it compares equal to the device of a tensor."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
