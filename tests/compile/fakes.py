"""A CUDA driver and CUDA graphs that run on the CPU, so that what surrounds them can be tested and counted."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from specops.compile import StepRunner


def kernel(**changes: Any) -> SimpleNamespace:
    """What Triton returns from a launch, as far as it is read."""
    plain = {"num_ctas": 1, "shared": 0, "num_warps": 4, "global_scratch_size": 0, "profile_scratch_size": 0}
    return SimpleNamespace(function=77, metadata=SimpleNamespace(**{**plain, **changes}))


class FakeDriver:
    """``cuLaunchKernel`` and ``cuFuncGetParamInfo`` of the staging kernel.

    Args:
        row_bytes, pads: of the copy, byte-sized pads; the fake copies and pads as the kernel does.
        sizes: bytes of the kernel's parameters.

    Attributes:
        launches: grid, threads, stream and parameters of every launch.
        error: what a launch answers; nothing is copied unless 0.
        shared: bytes of shared memory that the last launch asked for.
    """

    def __init__(
        self, row_bytes: Sequence[int] = (), pads: Sequence[bytes] = (), sizes: Sequence[int] = (8,) * 16 + (4, 4, 8, 8)
    ) -> None:
        self.row_bytes, self.pads, self.sizes = row_bytes, pads, sizes
        self.launches: list[tuple[tuple[int, int], int, int, list[int]]] = []
        self.error = self.shared = 0

    def cuLaunchKernel(self, function: Any, *rest: Any) -> int:
        grid, threads, stream, params = rest[:3], rest[3:6], rest[7], rest[8]
        assert function.value == 77
        assert (grid[2].value, threads[1].value, threads[2].value, rest[9]) == (1, 1, 1, None)
        self.shared = rest[6].value
        values = []
        for size, address in zip(self.sizes, params, strict=False):
            kind = ctypes.c_uint64 if size == 8 else ctypes.c_int32
            values.append(ctypes.cast(address, ctypes.POINTER(kind)).contents.value)
        self.launches.append(((grid[0].value, grid[1].value), threads[0].value, stream.value or 0, values))
        if self.error:
            return self.error
        rows, bucket = values[16:18]
        for field, (size, pad) in enumerate(zip(self.row_bytes, self.pads, strict=True)):
            source, target = values[2 * field : 2 * field + 2]
            ctypes.memmove(target, source, rows * size)
            padding = pad * ((bucket - rows) * size // len(pad))
            ctypes.memmove(target + rows * size, padding, len(padding))
        return 0

    def cuFuncGetParamInfo(self, function: Any, place: Any, offset: Any, size: Any) -> int:
        if place.value >= len(self.sizes):
            return 1
        ctypes.cast(size, ctypes.POINTER(ctypes.c_size_t)).contents.value = self.sizes[place.value]
        return 0


def as_library(driver: FakeDriver) -> SimpleNamespace:
    """The fake behind a C function, as a driver's library has it."""
    unsigned, pointer, pointers = ctypes.c_uint, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)

    def launch(function: int, *rest: Any) -> int:
        return driver.cuLaunchKernel(pointer(function), *map(unsigned, rest[:7]), pointer(rest[7]), rest[8], rest[9] or None)

    kind = ctypes.CFUNCTYPE(ctypes.c_int, pointer, *[unsigned] * 7, pointer, pointers, pointer)
    return SimpleNamespace(cuLaunchKernel=kind(launch), cuFuncGetParamInfo=driver.cuFuncGetParamInfo)


class FakeGraph:
    """A captured graph: a replay runs the step on the bucket's static buffers and writes to fixed outputs."""

    def __init__(self, step: Callable[..., Sequence[Tensor]], views: dict[str, Tensor]) -> None:
        self.step, self.views = step, views
        self.outputs = [output.clone() for output in step(**views)]
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        for output, value in zip(self.outputs, self.step(**self.views), strict=True):
            output.copy_(value)


def capture(runner: StepRunner) -> dict[int, FakeGraph]:
    """Give a warm runner on the CPU a graph for every bucket."""
    graphs = {size: FakeGraph(runner.step, runner._bucket_views(size)) for size in runner.buckets}
    runner._graphs = {size: (graph, graph.outputs) for size, graph in graphs.items()}  # type: ignore[misc]
    runner._uses_graphs = True
    return graphs


class CallCounter:
    """Counts calls of Python functions while it is entered.

    Attributes:
        count: all of them.
        inside: those of the pretended driver's last launch, which is Python itself.
    """

    def __init__(self, driver: FakeDriver) -> None:
        self.count = self.inside = 0
        launched = driver.cuLaunchKernel

        def launch_kernel(*args: Any) -> int:
            before = self.count
            error = launched(*args)
            self.inside = self.count - before + 2
            return error

        driver.cuLaunchKernel = launch_kernel  # type: ignore[method-assign]

    def __enter__(self) -> CallCounter:
        def profile(frame: object, event: str, arg: object) -> None:
            self.count += event == "call"

        sys.setprofile(profile)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)
