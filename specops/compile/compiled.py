"""A step under ``torch.compile``: once for any number of requests, with a code object of its own, and without guards that a
runner answers for.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from specops.compile.bare_call import LastCall

# Guards beside those on the step's arguments.
_KEPT = ("SHAPE_ENV", "GRAD_MODE")
# What :func:`sizes_of_one` found and has not put back yet.
_SETTING, _BEFORE = threading.Lock(), list[bool]()


class CompiledStep:
    """``step`` compiled in one piece: once for any number of requests where torch can do that, else for one apart.

    Args:
        step: takes its arguments by name.
        backend: of ``torch.compile``.
        last_call: makes ``mode="reduce-overhead"`` of it: inductor makes CUDA graphs, only the step's arguments are guarded
            (:func:`argument_guards`), and calls of the code are seen here.
        counted_by: the argument that has a row a request, whose first size is marked as dynamic where it is not one; the
            first argument when not given.
    """

    def __init__(
        self, step: nn.Module, backend: Any = "inductor", last_call: LastCall | None = None, *, counted_by: str | None = None
    ) -> None:
        self._step, self._counted_by = step, counted_by
        self._backend = backend
        self._options: dict[str, Any] = {}
        if last_call is not None:
            self._backend, self._options = last_call.backend(backend), {"guard_filter_fn": argument_guards}
        self._met_several = False
        self._code = self._new_code(for_one_too(self._backend))

    def __call__(self, **arguments: Tensor) -> tuple[Tensor, ...]:
        counted = arguments[self._counted_by or next(iter(arguments))]
        if counted.shape[0] > 1 and not self._met_several:
            self._met_several = True
            try:
                with sizes_of_one():
                    return self._code(**arguments)
            except torch._dynamo.exc.TorchDynamoException:
                # Not every op can be compiled so: inductor of torch 2.11, for one, cannot slice the batch without an end.
                self._code = self._new_code(self._backend)
        return self._code(**arguments)

    def _new_code(self, backend: Any) -> Callable[..., tuple[Tensor, ...]]:
        code: Callable[..., tuple[Tensor, ...]] = torch.compile(
            own_code(self._step), backend=backend, fullgraph=True, options=self._options or None
        )
        return code


@contextmanager
def sizes_of_one() -> Iterator[None]:
    """Torch settings under which code that is traced for several requests serves a single one, too.

    As it is, torch takes a dynamic size for two or more, and compiles again for one. Here nothing is made of a size being
    one or not, as for sizes that are unknown while code is traced (*backed size-oblivious* shapes). A step that asks by
    itself whether there is one request still gets code for either answer.
    """
    config: Any = torch.fx.experimental._config
    with _SETTING:
        _BEFORE.append(config.backed_size_oblivious)
        config.backed_size_oblivious = True
    try:
        yield
    finally:
        with _SETTING:
            # Some releases of torch keep settings for all threads: the last one out puts back what the first one found.
            before = max(_BEFORE)
            _BEFORE.remove(before)
            config.backed_size_oblivious = before


def for_one_too(backend: Any) -> Any:
    """``backend``, refusing graphs that mean another thing under :func:`sizes_of_one`: a dynamic dimension is squeezed.

    A ``squeeze`` takes the batch's dimension away for a single request and does nothing for several; no code does both.
    """
    config: Any = torch.fx.experimental._config

    def compile_graph(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        make: Any = torch._dynamo.lookup_backend(backend) if isinstance(backend, str) else backend
        if config.backed_size_oblivious and any(_may_squeeze(node) for node in graph.graph.nodes):
            raise RuntimeError("a squeeze of a dynamic dimension has another meaning for one request")
        return make(graph, inputs)

    # What torch's messages call it.
    compile_graph.__name__ = backend if isinstance(backend, str) else getattr(backend, "__name__", "backend")
    return compile_graph


def _may_squeeze(node: torch.fx.Node) -> bool:
    """Whether ``node`` takes dimensions away that are one for a single request alone."""
    if getattr(node.target, "__name__", node.target) not in ("squeeze", "squeeze_"):
        return False
    squeezed, *rest = node.args
    shape = squeezed.meta["example_value"].shape  # type: ignore[union-attr]
    dims: Any = node.kwargs.get("dim", rest[0] if rest else range(len(shape)))
    return any(isinstance(shape[dim], torch.SymInt) for dim in ([dims] if isinstance(dims, int) else dims))


def argument_guards(entries: Sequence[Any]) -> list[bool]:
    """Which of dynamo's guards to keep: those on the step's arguments, which tell batches apart.

    Most of several hundred guards ask whether a module has changed. They would be asked before every replay, cost more
    than everything else before it, and notice no more than what a captured graph has to do without: a runner itself asks
    whether weights or caches have moved, and a step must not be changed after warm-up.
    """
    on_arguments = [entry.guard_type == "TENSOR_MATCH" and "views" in entry.name for entry in entries]
    if not any(on_arguments):
        return [True] * len(entries)
    return [kept or entry.guard_type in _KEPT for kept, entry in zip(on_arguments, entries, strict=True)]


def own_code(step: nn.Module) -> Callable[..., tuple[Tensor, ...]]:
    """A function that calls ``step``, with a code object of its own.

    Dynamo keeps compiled code, and counts recompiles against its limit, per code object. With a shared one, many runners
    in one process would run into that limit.
    """

    def call(**views: Tensor) -> tuple[Tensor, ...]:
        outputs: tuple[Tensor, ...] = step(**views)
        return outputs

    return types.FunctionType(call.__code__.replace(), call.__globals__, closure=call.__closure__)
