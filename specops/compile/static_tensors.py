"""Tensors a captured graph holds by address: has one of them moved, and outputs held without owning them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from operator import getitem
from typing import Any

import torch
from torch import Tensor, nn

_ADDRESS = Tensor.data_ptr


class StaticTensors:
    """Addresses of a module's parameters and buffers at capture, those of modules that it borrows included.

    A graph reads those addresses for ever, so a module that was moved, cast, or given a new cache must be recorded again.
    In-place changes of values (``copy_``, ``load_state_dict``) keep the address and are seen by the graph.

    :meth:`moved` stands before every replay, while the device waits for the host. It leaves nothing out, since a graph must
    not write into memory that has gone to somebody else, and runs no loop in Python:

    * every child module is the one of capture: the dicts that hold them are compared with copies of themselves;
    * every name holds a tensor at the address of capture: ``map`` looks them up, and one call compares;
    * no storage of capture has been freed, so that an address can't be an old one with something new at it (another
      dtype or shape). A weak reference to each storage tells when it goes.

    No tensor is kept alive, so that a pool can be freed before its successor is made.

    Attributes:
        in_place: ``in_place() -> bool``: :meth:`moved` without the name, in one call.
    """

    def __init__(self, module: nn.Module) -> None:
        children: list[tuple[str, dict[str, Any]]] = []
        places: list[tuple[str, dict[str, Any], str]] = []
        owners = modules_of(module)
        for prefix, owner in owners:
            if owner._modules:
                children.append((prefix, owner._modules))
            for holder in (owner._parameters, owner._buffers):
                places.extend((prefix, holder, name) for name, tensor in holder.items() if tensor is not None)
        self._prefixes, self._children = [prefix for prefix, _ in children], [holder for _, holder in children]
        self._copies = [dict(holder) for holder in self._children]
        self._labels = [_joined(prefix, name) for prefix, _, name in places]
        self._holders, self._names = [holder for _, holder, _ in places], [name for *_, name in places]
        tensors = self._current()
        self._addresses = list(map(_ADDRESS, tensors))
        self._places = list(range(len(tensors)))
        self._at = _address_check(tensors, self._addresses, self._places)
        self._freed: list[Any] = []
        self._storages = [weakref.ref(tensor.untyped_storage(), self._freed.append) for tensor in tensors]
        self._forms = list(map(_form, tensors))
        if self._freed:
            # A torch that makes the Python side of a storage anew each time it is asked for: dtypes and shapes must tell.
            self._freed, self._storages, at = [], [], self._at
            self._at = lambda current, *known: at(current, *known) and list(map(_form, current)) == self._forms
        # A module that is borrowed is no child of anything: that it was let go of is all that can be seen.
        own = set(map(id, module.modules()))
        borrowed = [(prefix, owner) for prefix, owner in owners if id(owner) not in own]
        self._borrowed = [(prefix, weakref.ref(owner, self._freed.append)) for prefix, owner in borrowed]
        self.in_place = self._check()

    def moved(self) -> str | None:
        """Name of what is no longer where it was or was replaced; None if all is in place."""
        return None if self.in_place() else self._name_of_moved()

    def lists(self) -> tuple[Any, ...]:
        """What :meth:`moved` looks at, for those who look themselves.

        ``freed, children, copies, holders, names, at, addresses, places``: all is in place if nothing was freed, the
        children equal their copies, and ``at(tensors, addresses, places)`` holds for the tensors by those names in those
        holders. A name that is gone raises KeyError, something without memory TypeError or RuntimeError. Keep this object as
        well: ``freed`` hears of nothing without it.
        """
        return (
            *(self._freed, self._children, self._copies, self._holders, self._names),
            *(self._at, self._addresses, self._places),
        )

    def _check(self) -> Callable[[], bool]:
        # Locals of a closure: looked up faster than attributes.
        freed, children, copies, holders, names, at, addresses, places = self.lists()

        def in_place() -> bool:
            try:
                return not freed and children == copies and at(list(map(getitem, holders, names)), addresses, places)
            except (KeyError, TypeError, RuntimeError):
                # A name is gone, or holds no tensor with memory.
                return False

        return in_place

    def _current(self) -> list[Tensor]:
        return list(map(getitem, self._holders, self._names))

    def _name_of_moved(self) -> str:
        for prefix, now, then in zip(self._prefixes, self._children, self._copies, strict=True):
            for name in {**then, **now}:
                if now.get(name) is not then.get(name):
                    return _joined(prefix, name)
        known = zip(self._labels, self._holders, self._names, self._addresses, self._forms, strict=True)
        for label, holder, name, address, form in known:
            tensor = holder.get(name)
            if tensor is None or tensor.data_ptr() != address or _form(tensor) != form:
                return label
        gone = [label for label, storage in zip(self._labels, self._storages, strict=False) if storage() is None]
        return (gone or [prefix for prefix, owner in self._borrowed if owner() is None])[0]


def modules_of(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The module, its children and theirs, with names; and modules that one of them keeps in a tuple or list.

    Such are borrowed: a head's embedding is its target's and no child of it, while its graph reads it all the same.
    """
    found: dict[int, tuple[str, nn.Module]] = {}
    waiting = [("", module)]
    while waiting:
        start, root = waiting.pop()
        for name, owner in root.named_modules():
            prefix = _joined(start, name) if name else start
            if id(owner) in found:
                continue
            found[id(owner)] = (prefix, owner)
            for attribute, value in vars(owner).items():
                if isinstance(value, (tuple, list)):
                    borrowed = [item for item in value if isinstance(item, nn.Module)]
                    waiting.extend((_joined(prefix, attribute), item) for item in borrowed)
    return list(found.values())


def _form(tensor: Tensor) -> tuple[torch.dtype, torch.Size]:
    return tensor.dtype, tensor.shape


# Whether those of ``tensors`` at ``places`` are at ``addresses``.
_AddressCheck = Callable[[list[Tensor], list[int], list[int]], bool]


def _address_check(tensors: list[Tensor], addresses: list[int], places: list[int]) -> _AddressCheck:
    """torch's own check of addresses, which CUDA builds have, else ``map``."""
    check: _AddressCheck | None = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)
    if check is not None and tensors:
        # It is private to torch, so it must first show that it takes these arguments and sees a difference.
        try:
            if check(tensors, addresses, places) and not check(tensors, [*addresses[:-1], addresses[-1] + 1], places):
                return check
        except (TypeError, RuntimeError):
            pass
    return lambda tensors, addresses, places: list(map(_ADDRESS, tensors)) == addresses


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
