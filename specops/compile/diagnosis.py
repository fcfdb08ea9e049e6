"""Why a step makes no CUDA graph, told by running it once eagerly and watching its ops.

torch names what it skipped for, if at all, in words of its compiler. The three usual causes are properties of the step that
show when it runs: a tensor on the CPU, an op tagged ``cudagraph_unsafe``, and an input that the step writes to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# The tag is younger than the oldest torch that is supported.
_UNSAFE = getattr(torch.Tag, "cudagraph_unsafe", None)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, device: torch.device, inputs: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.storages = {tensor.untyped_storage().data_ptr(): name for name, tensor in inputs.items()}
        self.causes: dict[str, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func).removesuffix(".default")
        if _UNSAFE is not None and _UNSAFE in getattr(func, "tags", ()):
            self.causes[f"unsupported op {name} (tagged cudagraph_unsafe)"] = None
        result = func(*args, **kwargs)
        for tensor in tree_leaves((args, kwargs, result)):
            # A number that became a tensor of no dims is read at capture and harmless.
            if isinstance(tensor, Tensor) and tensor.device.type == "cpu" != self.device.type and tensor.dim() > 0:
                self.causes[f"CPU tensor of shape {list(tensor.shape)} in {name}"] = None
        for argument, value in zip(func._schema.arguments, args, strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and isinstance(value, Tensor) and value.numel():
                field = self.storages.get(value.untyped_storage().data_ptr())
                if field is not None:
                    self.causes[f"mutated input {field} (by {name})"] = None
        return result


def graph_obstacles(step: Callable[..., Any], inputs: Mapping[str, Any], device: torch.device) -> list[str]:
    """What in ``step(**inputs)`` keeps it out of a CUDA graph; empty if nothing shows.

    Args:
        step: run once, on copies of ``inputs``; what it does to its own buffers happens.
        inputs: its arguments. The handles of a host plan (``plan``) are passed as they are: a copy would name no plan.
        device: where it is meant to run.
    """
    handles = {name: value for name, value in inputs.items() if name == "plan"}
    copies = {name: tensor.clone() for name, tensor in inputs.items() if name not in handles}
    watch = _Watch(device, copies)
    try:
        with torch.no_grad(), watch:
            step(**copies, **handles)
    except Exception as error:
        watch.causes[
            f"it fails eagerly, too: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        ] = None
    return list(watch.causes)
