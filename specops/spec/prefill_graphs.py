"""Prefill of short prompts as one replay of a CUDA graph.

A forward over some dozens of rows is a few hundred small kernels, which the device runs in the time that the host takes to
launch a few of them. Here everything between the prompts and the first tokens is captured: both models, the greedy choice,
and the write into the rounds' state. A join is one copy of integers to the device, one replay, and one small copy back:

    lens | rows | ids   ->   target, choice, draft (Forwards.whole)   ->   RoundState.join, first tokens and margins

There is a graph for each bucket of packed rows and requests, over the compiled forwards that serve every other prefill, so
a bucket costs a capture and no compile. The small ones are captured by ``warm_up``, the others when first needed. What no
graph serves goes the other way: chunked prompts, sampling, planned backends, other devices.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from specops.compile import report
from specops.compile.capture import capture_stream, captures, capturing
from specops.compile.plans import family_of, planned_backend
from specops.compile.static_tensors import StaticTensors, weak_reference
from specops.compile.step_runner import Progress
from specops.spec.prefill import Forwards, Rows
from specops.spec.round import RoundResult, RoundState, pack, unpack
from specops.spec.verify import choose_next

# Rows of the largest bucket that warm_up captures.
WARM_ROWS = 256


class Bucket(NamedTuple):
    """Padded sizes of one graph: packed rows and requests."""

    num_rows: int
    num_requests: int

    def __str__(self) -> str:
        return f"{self.num_rows} rows of {'one request' if self.num_requests == 1 else f'{self.num_requests} requests'}"


@dataclass
class PrefillBucketReport(report.BucketReport):
    """A :class:`specops.compile.report.BucketReport` with the number of packed rows."""

    num_rows: int = 0


@dataclass
class PrefillReport(report.RunnerReport):
    """A :class:`specops.compile.report.RunnerReport` of buckets by rows; lists those captured so far."""

    buckets: list[PrefillBucketReport] = field(default_factory=list)  # type: ignore[assignment]

    def __str__(self) -> str:
        head = f"{self.name}: CUDA graphs on {self.device}, captured in {self.compile_seconds:.1f} s"
        lines = [head, "  rows  requests  graph     seconds  memory MiB  replays  reason"]
        for b in self.buckets:
            state = "captured" if b.captured else "none"
            figures = f"{b.seconds:7.2f}  {b.memory_bytes / 2**20:10.1f}  {b.replays:7}"
            lines.append(f"  {b.num_rows:4}  {b.num_requests:8}  {state:8}  {figures}  {b.reason or ''}".rstrip())
        return "\n".join(lines)


class PrefillStep(nn.Module):
    """Whole prompts through both models and into the rounds' state, by the greedy choice.

    Args:
        target, draft: the models.
        state: of the rounds; page tables are read from it.
        forwards: gives the models' forwards over packed rows.
    """

    def __init__(
        self, target: nn.Module, draft: nn.Module | None, state: RoundState, forwards: Callable[[], Forwards]
    ) -> None:
        super().__init__()
        self.target, self.draft, self.state, self.forwards = target, draft, state, forwards

    def forward(self, lens: Tensor, rows: Tensor, input_ids: Tensor) -> Tensor:
        """
        Args:
            lens: ``[R]`` int32 tokens of each prompt, 0 for padded requests.
            rows: ``[R]`` int32 rows of the state, the spare one for padded requests.
            input_ids: ``[T]`` int32, the prompts one behind the other, then filler.

        Returns:
            ``[R, 3]`` int32 for the host, as :func:`specops.spec.round.pack` has it.
        """
        # Fresh tensors: views of the staging buffer have other alignments and bases than the compiled code was made for.
        rows, lens = rows.long(), lens.clone()
        starts = nn.functional.pad(lens.cumsum(0, dtype=torch.int32), (1, 0))
        packed = Rows(input_ids.long(), starts, lens, self.state.page_table[rows])
        out = self.forwards().whole(packed, choose_next)
        self.state.join(rows, lens, out.next_tokens, out.next_token_logits, out.hidden_states)
        return pack(torch.ones_like(lens), out.next_tokens[:, None], out.margins[:, None])


class Recorded(NamedTuple):
    """A captured graph: how to run it, and what it leaves."""

    replay: Callable[[], None]
    output: Tensor


class Prefilled(NamedTuple):
    """A replay under way: what it is read from, once ``copied`` has happened."""

    packed: Tensor
    copied: torch.cuda.Event | None


class PrefillGraphs:
    """Graphs of a :class:`PrefillStep`, one a bucket.

    Args:
        step: what is captured.
        device: a CUDA device.
        max_requests: most requests that join at once.
        max_rows: most rows of one replay.
        share_pool: told the memory pool that the graphs use; returns the pool to use, if there is one to share.
        mode: for the report.
        strict: raise where a graph is lost, instead of warning once.
    """

    def __init__(
        self,
        step: PrefillStep,
        device: torch.device,
        *,
        max_requests: int,
        max_rows: int,
        share_pool: Callable[[Any], Any],
        mode: str = "direct",
        strict: bool = False,
    ) -> None:
        self.step, self.device = step, device
        self.row_buckets, self.request_buckets = row_buckets(max_rows), sorted({1, max_requests})
        self._share_pool = share_pool
        self._pool: Any = None
        size = self.row_buckets[-1] + 2 * max_requests
        self._host = torch.empty(size, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._staged = torch.zeros(size, dtype=torch.int32, device=device)
        # Length, token and margin of each request.
        self._results = torch.empty((max_requests, 3), dtype=torch.int32, pin_memory=device.type == "cuda")
        self._copied = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._graphs: dict[Bucket, Recorded | None] = {}
        self._entries: dict[Bucket, PrefillBucketReport] = {}
        self._statics: StaticTensors | None = None
        self._losses = report.Losses("prefill", strict)
        self._report = PrefillReport("prefill", mode, str(device), 0)

    def bucket_for(self, num_rows: int, num_requests: int) -> Bucket | None:
        """The least bucket that holds so many rows and requests; None if none does."""
        if not 0 < num_requests <= self.request_buckets[-1] or num_rows > self.row_buckets[-1]:
            return None
        return Bucket(
            next(size for size in self.row_buckets if size >= num_rows),
            next(size for size in self.request_buckets if size >= num_requests),
        )

    def launch(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> Prefilled | None:
        """Start the prefill of the requests in ``rows`` of the state, which afterwards hold them; None if no graph can.

        The pages of ``prompts`` must be reserved, and the device's page table current. What this returns is to be read
        before the next launch: the integers on their way to the device, and the graph's memory, are used again.
        """
        num_rows = sum(map(len, prompts))
        bucket = self.bucket_for(num_rows, len(rows))
        if bucket is None or num_rows > self.step.forwards().chunk_tokens:
            return None
        moved = None if self._statics is None else self._statics.moved()
        if moved is not None:
            self._losses.tell(f"{moved} has moved since capture; recording again")
            self._forget()
        if bucket not in self._graphs:
            self._capture(bucket)
        recorded = self._graphs[bucket]
        if recorded is None:
            return None
        self._entries[bucket].replays += 1
        self._stage(bucket, rows, prompts)
        recorded.replay()
        packed = self._results[: len(rows)]
        packed.copy_(recorded.output[: len(rows)], non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self.device))
        return Prefilled(packed, self._copied)

    def read(self, prefilled: Prefilled) -> RoundResult:
        """Wait for a prefill; its first tokens."""
        if prefilled.copied is not None:
            prefilled.copied.synchronize()
        return unpack(prefilled.packed, 1)

    def warm_up(self, progress: Progress | None = None) -> PrefillReport:
        """Capture the buckets up to ``WARM_ROWS`` rows, largest first; ``progress`` as for ``StepRunner.warm_up``."""
        sizes = [size for size in reversed(self.row_buckets) if size <= WARM_ROWS] or self.row_buckets[:1]
        buckets = [Bucket(rows, requests) for rows in sizes for requests in reversed(self.request_buckets)]
        for done, bucket in enumerate(buckets, 1):
            if bucket not in self._graphs:
                self._capture(bucket)
            if progress is not None:
                progress(done, len(buckets), f"prefill: {bucket}")
        return self._report

    def explain(self) -> PrefillReport:
        """Per bucket met so far: captured or why not, time, graph memory, replays."""
        return self._report

    def _stage(self, bucket: Bucket, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        """Bring a batch, padded to its bucket, to where the graph reads it."""
        missing, spare = bucket.num_requests - len(rows), self.step.state.spare_row
        numbers = [*map(len, prompts), *[0] * missing, *rows, *[spare] * missing]
        for prompt in prompts:
            numbers += prompt
        size = bucket.num_rows + 2 * bucket.num_requests
        numbers += [0] * (size - len(numbers))
        host = self._host[:size]
        host.copy_(torch.tensor(numbers, dtype=torch.int32))
        self._staged[:size].copy_(host, non_blocking=True)

    def _views(self, bucket: Bucket) -> tuple[Tensor, Tensor, Tensor]:
        """The step's arguments in the staging buffer."""
        first, second = bucket.num_requests, 2 * bucket.num_requests
        return self._staged[:first], self._staged[first:second], self._staged[second : second + bucket.num_rows]

    def _capture(self, bucket: Bucket) -> None:
        entry = PrefillBucketReport(bucket.num_requests, num_rows=bucket.num_rows)
        self._entries[bucket] = entry
        self._report.buckets.append(entry)
        before, started = report.compiled_graphs(), time.perf_counter()
        # Padding alone, which writes no page.
        self._stage(bucket, (), ())
        with torch.no_grad(), captures(self.device):
            reserved = self._reserved_bytes()
            recorded = self._record(bucket)
        if self._statics is None:
            self._statics = StaticTensors(self.step)
        self._graphs[bucket] = None if isinstance(recorded, str) else recorded
        entry.captured, entry.reason = not isinstance(recorded, str), recorded if isinstance(recorded, str) else None
        entry.memory_bytes = max(0, self._reserved_bytes() - reserved)
        entry.seconds = time.perf_counter() - started
        self._report.compile_seconds += entry.seconds
        self._report.compiled_graphs += report.compiled_graphs() - before
        if entry.reason is not None:
            self._losses.tell(f"no CUDA graph for {bucket}: {entry.reason}")

    def _record(self, bucket: Bucket) -> Recorded | str:
        """Capture one bucket; the reason when there is no graph."""
        views, stream = self._views(bucket), capture_stream(self.device)
        current = torch.cuda.current_stream(self.device)
        stream.wait_stream(current)
        # Compiles what isn't yet, kernels included: that can't be done during a capture.
        with torch.cuda.stream(stream):
            self.step(*views)
        current.wait_stream(stream)
        if self._pool is None:
            self._pool = self._share_pool(torch.cuda.graph_pool_handle())
        graph = torch.cuda.CUDAGraph()
        try:
            with capturing(graph, self._pool, stream):
                output = self.step(*views)
        except RuntimeError as error:
            return f"capture failed: {str(error).splitlines()[0]}"
        # A weak reference: other captures may use this memory, since what a replay leaves is read before the next.
        return Recorded(graph.replay, weak_reference(output))

    def _forget(self) -> None:
        """Graphs that read and write old addresses must not be replayed."""
        self._graphs.clear()
        self._entries.clear()
        self._report.buckets.clear()
        self._statics = None

    def _reserved_bytes(self) -> int:
        return torch.cuda.memory_reserved(self.device) if self.device.type == "cuda" else 0


def row_buckets(max_rows: int) -> list[int]:
    """Powers of two from 16 on; above ``WARM_ROWS`` also halfway between, since there every row costs time.

    All are multiples of 16, which kernels are specialised on; so the largest may be a little below ``max_rows``.
    """
    max_rows = max(max_rows // 16 * 16, 16)
    sizes = [16]
    while sizes[-1] < max_rows:
        size = sizes[-1]
        power = size & (size - 1) == 0
        sizes.append((size * 3 // 2 if power else size * 4 // 3) if size >= WARM_ROWS else 2 * size)
    return [size for size in sizes if size < max_rows] + [max_rows]


def plans_on_host(models: Iterable[nn.Module | None]) -> bool:
    """Whether a model's layers name a backend that schedules on the host, which no graph of prefill can have."""
    return any(planned_backend(model, family_of(model)) is not None for model in models if model is not None)
