"""What became of a runner's graphs, and the loud ways of saying so.

Losing a graph is never silent: :class:`GraphLost` is warned once per cause, or raised in strict mode.
"""

from __future__ import annotations

import contextlib
import logging
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch._dynamo.utils import counters, get_compilation_metrics


class GraphLost(UserWarning):
    """A step ran without the graph it was asked to run in; the message says why."""


class GraphLostError(RuntimeError):
    """As :class:`GraphLost`, in strict mode."""


@dataclass
class BucketReport:
    """One bucket of a runner.

    Attributes:
        num_requests: size of the bucket.
        captured: whether a CUDA graph replays it.
        reason: why not, when not captured.
        seconds: compile and capture time.
        memory_bytes: device memory its capture added to the graph pool.
        replays: calls served so far.
    """

    num_requests: int
    captured: bool = False
    reason: str | None = "not warmed up"
    seconds: float = 0.0
    memory_bytes: int = 0
    replays: int = 0


@dataclass
class RunnerReport:
    """Everything :meth:`StepRunner.explain` knows. ``str()`` gives a table, :meth:`as_dict` plain data."""

    name: str
    mode: str
    device: str
    tokens_per_request: int
    compiled_graphs: int = 0
    compile_seconds: float = 0.0
    recompiles: list[str] = field(default_factory=list)
    eager_calls: int = 0
    buckets: list[BucketReport] = field(default_factory=list)

    @property
    def captured(self) -> bool:
        """Whether every bucket replays a CUDA graph."""
        return bool(self.buckets) and all(bucket.captured for bucket in self.buckets)

    @property
    def reason(self) -> str | None:
        """Why some bucket was not captured, None when all were."""
        reasons = list(dict.fromkeys(b.reason for b in self.buckets if not b.captured and b.reason))
        return "; ".join(reasons) or None

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "captured": self.captured, "reason": self.reason}

    def __str__(self) -> str:
        graphs = "1 compiled graph" if self.compiled_graphs == 1 else f"{self.compiled_graphs} compiled graphs"
        head = (
            f"{self.name}: mode {self.mode} on {self.device}, {self.tokens_per_request} rows a request, "
            f"{graphs} in {self.compile_seconds:.1f} s"
        )
        lines = [head, "  requests  graph     seconds  memory MiB  replays  reason"]
        for b in self.buckets:
            state = "captured" if b.captured else "none"
            figures = f"{b.seconds:7.2f}  {b.memory_bytes / 2**20:10.1f}  {b.replays:7}"
            lines.append(f"  {b.num_requests:8}  {state:8}  {figures}  {b.reason or ''}".rstrip())
        lines.extend(f"  recompiled: {cause}" for cause in self.recompiles)
        if self.eager_calls:
            lines.append(f"  {self.eager_calls} calls ran eagerly")
        return "\n".join(lines)


class Losses:
    """Tells of lost graphs: each cause once, as a warning, or raised when ``strict``."""

    def __init__(self, name: str, strict: bool) -> None:
        self.name = name
        self.strict = strict
        self._told: set[str] = set()

    def tell(self, cause: str) -> None:
        message = f"{self.name}: {cause}"
        if self.strict:
            raise GraphLostError(message)
        if cause not in self._told:
            self._told.add(cause)
            warnings.warn(message, GraphLost, stacklevel=4)


def compiled_graphs() -> int:
    """How many graphs dynamo has compiled in this process."""
    return int(counters["stats"]["unique_graphs"])


def skipped_graphs() -> int:
    """How many CUDA graphs inductor has skipped in this process."""
    return int(counters["inductor"]["cudagraph_skips"])


def graph_partitions() -> int:
    """How many pieces for CUDA graphs inductor has made in this process."""
    return int(counters["inductor"]["cudagraph_partitions"])


def cut_graph(before: int) -> str | None:
    """What to say when the code compiled since then is not one piece; None if it is."""
    pieces = graph_partitions() - before
    return f"the step was cut into {pieces} pieces, not all of which are graphs" if pieces > 1 else None


def recompile_cause(reason: str, arguments: Sequence[str]) -> str:
    """Dynamo's words with the step's argument that changed in front, where they name one."""
    changed = [name for name in arguments if re.search(rf"\[['\"]{re.escape(name)}['\"]\]", reason)]
    return f"argument {' and '.join(changed)} changed: {reason}" if changed else reason


def last_recompile_reason() -> str:
    """Dynamo's words for the latest recompile."""
    for metrics in reversed(get_compilation_metrics()):
        if metrics.recompile_reason:
            return str(metrics.recompile_reason).strip()
    return "dynamo gave no reason"


@contextlib.contextmanager
def skip_messages() -> Iterator[list[str]]:
    """Collects inductor's messages about skipped CUDA graphs while the context is open."""
    messages: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = record.getMessage()
            if "skipping cudagraphs" in text.lower() or "cudagraph" in text.lower():
                messages.append(text.splitlines()[0])

    collector = Collector(logging.WARNING)
    loggers = [
        logging.getLogger(f"torch._inductor.{module}.__cudagraphs")
        for module in ("cudagraph_utils", "compile_fx", "output_code", "cudagraph_trees")
    ]
    for logger in loggers:
        logger.addHandler(collector)
    try:
        yield messages
    finally:
        for logger in loggers:
            logger.removeHandler(collector)
