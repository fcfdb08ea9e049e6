"""A compiled Triton kernel launched again and again with other addresses, in about a microsecond of the host's time.

Triton's own way from a call to a launch binds, specialises and looks up every argument: tens of microseconds for a kernel
with thirty of them, which stand before a graph of a few hundred. Here the arguments lie ready in memory as the driver wants
them (``cuLaunchKernel``, part of CUDA's stable interface); a launch writes the addresses that differ and calls the driver.

What is relied on is checked where a launch is prepared: the driver itself tells the sizes of the kernel's parameters, and a
kernel that is not as expected gets no prepared launch, so that the caller stays with Triton's. Hooks of Triton's profiler
don't see prepared launches.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch

# Parameters of a Triton kernel behind those of its signature: scratch memory, which these kernels don't have.
_MOST_HIDDEN = 6


class PreparedLaunch:
    """One launch, but for the addresses that change.

    Args:
        driver: the driver's library.
        function: the kernel's ``CUfunction``.
        grid: programs along x and y.
        num_threads, shared: threads of a program, and bytes of its shared memory.
        pointers: every pointer argument, in the kernel's order; a changing one is None and filled in by each call.
        numbers: integer arguments, which come behind the pointers.

    Attributes:
        fire: ``fire(addresses, stream) -> bool``: launches with the changing ``addresses``, in order, on a raw stream;
            whether the driver took it.
        changing: how many addresses change.
        shape: grid, block and bytes of shared memory, seven numbers.
    """

    def __init__(
        self,
        driver: Any,
        function: int,
        grid: tuple[int, int],
        num_threads: int,
        shared: int,
        pointers: Sequence[int | None],
        numbers: Sequence[int],
    ) -> None:
        changing = [place for place, pointer in enumerate(pointers) if pointer is None]
        # The changing ones lie side by side, so that one call writes them all.
        order = [*changing, *(place for place in range(len(pointers)) if place not in changing)]
        order += range(len(pointers), len(pointers) + len(numbers))
        count = len(order) + _MOST_HIDDEN
        # Eight bytes each; the kernel reads the lower four of a number. What is hidden stays null.
        self._values = (ctypes.c_uint64 * count)()
        self._params = (ctypes.c_void_p * count)()
        known = [*(pointer or 0 for pointer in pointers), *numbers]
        start = ctypes.addressof(self._values)
        for slot, place in enumerate(order):
            self._values[slot] = known[place]
            self._params[place] = start + 8 * slot
        for place in range(len(order), count):
            self._params[place] = start + 8 * place
        self.shape = (*grid, 1, num_threads, 1, 1, shared)
        head = (ctypes.c_void_p(function), *map(ctypes.c_uint, self.shape))
        self.function, self.changing, self._driver_launch = function, len(changing), driver.cuLaunchKernel
        self.fire = _fire(driver.cuLaunchKernel, head, self._values, self._params, len(changing))

    def in_c(self) -> tuple[int, int, int, int]:
        """Addresses for a launch from C: of the driver's function, the kernel, the arguments and the pointers to them.

        The changing arguments lie in front, eight bytes each.

        Raises:
            TypeError: the driver is no library.
        """
        launch = ctypes.cast(self._driver_launch, ctypes.c_void_p).value or 0
        return launch, self.function, ctypes.addressof(self._values), ctypes.addressof(self._params)


def _fire(
    launch: Callable[..., int], head: tuple[Any, ...], values: Any, params: Any, changing: int
) -> Callable[[Sequence[int], int], bool]:
    write = struct.Struct(f"={changing}Q").pack_into
    # The driver's arguments by stream. Looked up as a closure's locals, which costs less than attributes.
    arguments: dict[int, tuple[Any, ...]] = {}

    def fire(addresses: Sequence[int], stream: int) -> bool:
        given = arguments.get(stream)
        if given is None:
            given = arguments[stream] = (*head, ctypes.c_void_p(stream), params, None)
        write(values, 0, *addresses)
        return launch(*given) == 0

    return fire


def prepare(
    kernel: Any, grid: tuple[int, int], pointers: Sequence[int | None], numbers: Sequence[int]
) -> PreparedLaunch | None:
    """A prepared launch of a kernel that Triton has compiled and launched; None if it can't be.

    Args:
        kernel: what Triton's launch returned.
        grid, pointers, numbers: as for :class:`PreparedLaunch`; ``pointers`` and ``numbers`` are all of its arguments that
            are no constants, in order.
    """
    driver = _driver()
    if driver is None:
        return None
    try:
        function, metadata = kernel.function, kernel.metadata
        # More shared memory than that has to be asked for, which Triton does in ways of its own.
        plain = metadata.num_ctas == 1 and metadata.shared <= 48 * 1024
        plain = plain and not getattr(metadata, "launch_cooperative_grid", False)
        num_threads = 32 * metadata.num_warps
    except AttributeError:
        return None
    if not plain or not isinstance(function, int):
        return None
    if any(getattr(metadata, name, 0) for name in ("global_scratch_size", "profile_scratch_size")):
        return None
    wanted = [8] * len(pointers) + [4] * len(numbers)
    sizes = _parameter_sizes(driver, function, len(wanted) + _MOST_HIDDEN)
    if sizes[: len(wanted)] != wanted or len(sizes) == len(wanted) + _MOST_HIDDEN:
        return None
    return PreparedLaunch(driver, function, grid, num_threads, metadata.shared, pointers, numbers)


@functools.cache
def _driver() -> Any:
    """The driver's library, None where kernels are not NVIDIA's or the driver is too old to tell of parameters."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return None
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        driver.cuFuncGetParamInfo  # noqa: B018
    except (OSError, AttributeError):
        return None
    return driver


def _parameter_sizes(driver: Any, function: int, most: int) -> list[int]:
    """Bytes of each of the kernel's parameters, up to ``most`` of them."""
    sizes: list[int] = []
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    while len(sizes) < most:
        place = ctypes.c_size_t(len(sizes))
        if driver.cuFuncGetParamInfo(ctypes.c_void_p(function), place, ctypes.byref(offset), ctypes.byref(size)):
            break
        sizes.append(size.value)
    return sizes


def aligned(addresses: Sequence[int]) -> bool:
    """Whether all addresses are multiples of 16: what Triton compiles a kernel for if those of its first launch are."""
    return not functools.reduce(operator.or_, addresses) & 15


def device_functions() -> tuple[Callable[[], int], Callable[[int], int]]:
    """Torch's functions behind :func:`raw_stream`: the current device's index, and the raw stream of a device.

    Raises:
        AttributeError: a torch without CUDA.
    """
    return torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream


def raw_stream(device_index: int) -> int | None:
    """The current stream of a device, None if the device is not the current one: a launch would need a switch."""
    if torch._C._cuda_getDevice() != device_index:
        return None
    stream: int = torch._C._cuda_getCurrentRawStream(device_index)
    return stream
