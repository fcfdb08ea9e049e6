"""A step under ``torch.compile``: with a code object of its own, and without guards that a runner answers for."""

from __future__ import annotations

import collections
import ctypes
import sys
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

# Guards beside those on the step's arguments.
_KEPT = ("SHAPE_ENV", "GRAD_MODE")
_TREES = ("tree_manager_containers", "tree_manager_locks")


def compiled(step: nn.Module, backend: str, graphs: bool) -> Callable[..., tuple[Tensor, ...]]:
    """``step`` compiled in one piece.

    Args:
        step: takes its arguments by name.
        backend: of ``torch.compile``.
        graphs: inductor makes CUDA graphs of it, and only its arguments are guarded (:func:`argument_guards`).
    """
    options: dict[str, Any] = {}
    if graphs:
        options = {**torch._inductor.list_mode_options("reduce-overhead"), "guard_filter_fn": argument_guards}
    code: Callable[..., tuple[Tensor, ...]] = torch.compile(
        own_code(step), backend=backend, fullgraph=True, options=options or None
    )
    return code


def own_graph_trees() -> None:
    """Give the current thread trees of CUDA graphs, if it has none.

    torch keeps those of ``mode="reduce-overhead"`` per thread. Up to 2.11 only the thread that imported its compiler and
    those of autograd had them, and any other failed on an assertion without a word. It then records graphs of its own.
    """
    first = "torch._inductor.cudagraph_trees" not in sys.modules
    from torch._inductor import cudagraph_trees

    if first:
        # The import stores objects for this thread (_stash_obj_in_tls) with a reference less than are given up when the
        # thread ends, which ends the process.
        for name in filter(torch._C._is_key_in_tls, _TREES):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(torch._C._get_obj_in_tls(name)))
    local = cudagraph_trees.local
    if hasattr(local, _TREES[0]) or torch._C._is_key_in_tls(_TREES[0]):
        return
    # Attributes, which die with the thread; for the same reason not by torch's own storage.
    setattr(local, _TREES[0], {})
    setattr(local, _TREES[1], collections.defaultdict(threading.Lock))


def argument_guards(entries: Sequence[Any]) -> list[bool]:
    """Which of dynamo's guards to keep: those on the step's arguments, which tell a batch of one from others.

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
