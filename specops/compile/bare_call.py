"""Torch's own graphs of ``mode="reduce-overhead"``, without what ``torch.compile`` does before each.

``torch.compile`` binds arguments, sets up its frame hook, asks guards and fetches weights before it calls what its backend
made, all of which has one answer for a runner's static buffers. So the backend is a function of ours (a public means of
torch) around inductor's: :class:`LastCall` sees what is called, and a :class:`BareCall` calls that by itself.

Below that torch's trees of graphs look for the graph that fits, look at every input and make the outputs anew. While
nothing but a runner's own graphs has run on a tree's memory (:class:`TorchGraph`), the answers are those of the last time,
and the recorded graph is replayed as it is. Whenever something else has run, or torch has dropped its graphs, the trees are
asked again.
"""

from __future__ import annotations

import collections
import ctypes
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import Tensor, nn

from specops.compile.capture import bound_replay
from specops.compile.static_tensors import modules_of, weak_reference

_TREES = ("tree_manager_containers", "tree_manager_locks")
# Whether a thread has its trees.
_OWNERS = threading.local()
# Before this CUDA, profilers and graphs do not go together unless this is set, which torch's name of the mode does, too.
_CUPTI_FROM = (12, 6)
_CUPTI = {"DISABLE_CUPTI_LAZY_REINIT": "1", "TEARDOWN_CUPTI": "0"}


class LastCall:
    """The latest call of code that a backend made for ``torch.compile``, with what ``torch.compile`` passed to it.

    Attributes:
        watching: whether calls are kept; nothing is kept alive otherwise.
        seen: the code, its inputs (tensors and numbers) and its outputs; None if there was no call.
    """

    def __init__(self) -> None:
        self.watching = False
        self.seen: tuple[Callable[..., Sequence[Any]], tuple[Any, ...], Sequence[Any]] | None = None

    def backend(self, name: str) -> Callable[..., Callable[..., Sequence[Any]]]:
        """The backend ``name``, inductor's with graphs, as a function for ``torch.compile``."""
        make = torch._dynamo.lookup_backend(name)
        given: dict[str, Any] = {}
        if name == "inductor":
            # Sizes are those of static buffers; asserts on them would stand before every replay.
            patches = {**torch._inductor.list_mode_options("reduce-overhead"), "size_asserts": False}
            given = {"config_patches": patches}
            if torch.version.cuda is not None and tuple(map(int, torch.version.cuda.split(".")[:2])) < _CUPTI_FROM:
                os.environ.update(_CUPTI)

        def compile_graph(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Sequence[Any]]:
            code = make(graph, inputs, **given)  # type: ignore[arg-type]

            def call(*inputs: Any) -> Sequence[Any]:
                outputs: Sequence[Any] = code(*inputs)
                if self.watching:
                    self.seen = code, inputs, outputs
                return outputs

            return call

        # What torch's messages call it.
        compile_graph.__name__ = name
        return compile_graph

    def bare(self, module: nn.Module, views: Mapping[str, Tensor], results: Sequence[Tensor]) -> BareCall | None:
        """What repeats the call that was seen, which is forgotten; None if it can't be repeated.

        Args:
            module: whose parameters and buffers are inputs, as :class:`StaticTensors` watches them.
            views: what the step was called with; the rest of the inputs.
            results: what the step returned.
        """
        seen, self.seen = self.seen, None
        if seen is None:
            return None
        code, inputs, outputs = seen
        known: dict[int, tuple[Any, Any]] = {}
        for _, owner in modules_of(module):
            for holder in (owner._parameters, owner._buffers):
                known.update({id(tensor): (holder, name) for name, tensor in holder.items() if tensor is not None})
        known.update({id(view): (views, name) for name, view in views.items()})
        numbers = {place: given for place, given in enumerate(inputs) if type(given) is int}
        found = [
            (numbers, place) if place in numbers else known.get(id(given), (None, None))
            for place, given in enumerate(inputs)
        ]
        places = {id(output): place for place, output in enumerate(outputs)}
        order = [places.get(id(result), -1) for result in results]
        if any(holder is None for holder, _ in found) or -1 in order:
            return None
        return BareCall(code, [holder for holder, _ in found], [name for _, name in found], order)


class BareCall:
    """Compiled code called again, without ``torch.compile``. Keeps no weight and no cache alive.

    Whoever calls it answers for all inputs being as they were, in grad mode off.

    Args:
        code: takes its inputs by place.
        holders, names: where each input is found.
        order: which of its outputs are the step's.

    Attributes:
        recorded: the graph that torch runs for it, if that is known.
    """

    def __init__(self, code: Callable[..., Sequence[Any]], holders: list[Any], names: list[Any], order: list[int]) -> None:
        self.code, self.holders, self.names, self.order = code, holders, names, order
        self.recorded: TorchGraph | None = None

    def __call__(self) -> list[Tensor]:
        outputs = self.code(*map(getitem, self.holders, self.names))
        return [outputs[place] for place in self.order]


@dataclass(eq=False)
class TorchGraph:
    """A graph in torch's trees of graphs.

    Attributes:
        replay: runs it.
        outputs: what it leaves, over its memory, which they do not keep.
        manager, node: of the trees: whose latest node it was.
    """

    replay: Callable[[], None]
    outputs: list[Tensor]
    manager: Any
    node: Any

    def is_current(self, others: Set[Any] = frozenset()) -> bool:
        """Whether this graph, or one with a node of ``others``, last ran on the trees' memory, as far as torch knows.

        Else something may be alive there that a replay would overwrite without a word.
        """
        current = self.manager.current_node
        return current is self.node or current in others

    def leaves(self, expected: Sequence[Tensor]) -> bool:
        """Whether a replay writes ``expected``, to the bit, over outputs that have other values before.

        False too for outputs of eight-bit floats, which have no comparison.
        """
        if any(tensor.is_floating_point() and tensor.itemsize == 1 for tensor in expected):
            return False
        expected = [tensor.clone(memory_format=torch.contiguous_format) for tensor in expected]
        for output, wanted in zip(self.outputs, expected, strict=True):
            output.copy_(wanted == 0)
        self.replay()
        found = [output.contiguous() for output in self.outputs]
        return all(torch.equal(*(each.view(torch.uint8) for each in pair)) for pair in zip(found, expected, strict=True))


def torch_graph(outputs: Sequence[Tensor]) -> TorchGraph | None:
    """The graph that torch's trees have just replayed to make ``outputs``.

    None if there is none that could be replayed by itself: it has run behind another one, it copies inputs, or torch, to
    which all of this is private, is not as it is known.
    """
    if not all(output.is_cuda for output in outputs):
        return None
    try:
        from torch._inductor.cudagraph_trees import CUDAGraphNode, ExecutionState, get_manager

        manager = get_manager(outputs[0].get_device(), create_if_none_exists=False)
        node = None if manager is None else manager.current_node
        if manager is None or not isinstance(node, CUDAGraphNode) or manager.path_state is not ExecutionState.EXECUTION:
            return None
        left = [tensor for tensor in node.cached_tensor_outputs if tensor is not None]
        known = all(any(output is tensor for tensor in left) for output in outputs)
        # A number among the inputs, such as a dynamic size, chose the graph.
        copies = any(isinstance(node.reconstructed_inputs[place], Tensor) for place in node.non_static_input_idx)
        if not known or copies or node.parent is not None or node.graph is None:
            return None
        return TorchGraph(bound_replay(node.graph), [weak_reference(output) for output in outputs], manager, node)
    except (ImportError, AttributeError, IndexError, TypeError):
        return None


def own_graph_trees() -> None:
    """Give the current thread trees of CUDA graphs, if it has none.

    torch keeps those of ``mode="reduce-overhead"`` per thread. Up to 2.11 only the thread that imported its compiler and
    those of autograd had them, and any other failed on an assertion without a word. It then records graphs of its own.
    """
    if getattr(_OWNERS, "done", False):
        return
    first = "torch._inductor.cudagraph_trees" not in sys.modules
    from torch._inductor import cudagraph_trees

    if first:
        # The import stores objects for this thread (_stash_obj_in_tls) with a reference less than are given up when the
        # thread ends, which ends the process.
        for name in filter(torch._C._is_key_in_tls, _TREES):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(torch._C._get_obj_in_tls(name)))
    _OWNERS.done = True
    local = cudagraph_trees.local
    if hasattr(local, _TREES[0]) or torch._C._is_key_in_tls(_TREES[0]):
        return
    # Attributes, which die with the thread; for the same reason not by torch's own storage.
    setattr(local, _TREES[0], {})
    setattr(local, _TREES[1], collections.defaultdict(threading.Lock))
