"""Tensors a captured graph holds by address: has one of them moved, and outputs held without owning them."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class StaticTensors:
    """Addresses of a module's parameters and buffers at capture.

    A graph reads those addresses for ever, so a module that was moved, cast, or given a new cache must be recorded again.
    In-place changes of values (``copy_``, ``load_state_dict``) keep the address and are seen by the graph.
    """

    def __init__(self, module: nn.Module) -> None:
        self._modules: list[tuple[str, dict[str, nn.Module | None], str, nn.Module]] = []
        self._tensors: list[tuple[str, dict[str, Tensor | None], str, int, torch.dtype]] = []
        for prefix, owner in module.named_modules():
            for name, child in owner._modules.items():
                if child is not None:
                    self._modules.append((_joined(prefix, name), owner._modules, name, child))
            for tensors in (owner._parameters, owner._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        entry = (_joined(prefix, name), tensors, name, tensor.data_ptr(), tensor.dtype)
                        self._tensors.append(entry)  # type: ignore[arg-type]

    def moved(self) -> str | None:
        """Name of a tensor that is no longer where it was, or of a module that was replaced; None if all are in place."""
        for label, modules, name, child in self._modules:
            if modules.get(name) is not child:
                return label
        for label, tensors, name, address, dtype in self._tensors:
            tensor = tensors.get(name)
            if tensor is None or tensor.data_ptr() != address or tensor.dtype != dtype:
                return label
        return None


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def weak_reference(tensor: Tensor) -> Tensor:
    """A tensor over the same CUDA memory that does not keep it allocated.

    For outputs of a captured graph: the memory stays reserved as long as the graph lives, while the pool may hand it to
    the next capture.
    """
    storage = torch._C._construct_storage_from_data_pointer(
        tensor.untyped_storage().data_ptr(), tensor.device, tensor.untyped_storage().nbytes()
    )
    metadata = {
        "nbytes": tensor.untyped_storage().nbytes(),
        "data_ptr": tensor.untyped_storage().data_ptr(),
        "size": tuple(tensor.shape),
        "stride": tensor.stride(),
        "dtype": tensor.dtype,
        "device": tensor.device,
        "storage_offset": tensor.storage_offset(),
    }
    weak: Tensor = torch._C._construct_CUDA_Tensor_From_Storage_And_Metadata(metadata, storage)
    return weak
