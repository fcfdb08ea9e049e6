"""Compile the Triton kernels for a GPU that need not be here, and report registers, spills and shared memory.

    python benchmarks/compile_triton.py                 # the sizes that choose_tiling picks for common shapes, for sm_90
    python benchmarks/compile_triton.py --arch 80 --only mha

:func:`compiled` runs a call of the ``triton`` backend on meta tensors with the launch replaced by compilation, so what is
compiled is exactly what that call would launch. :func:`compile_all` does so in several processes and fills Triton's disk
cache, which a later run on the real device then hits.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


@dataclass(frozen=True)
class Compiled:
    """What the compiler says of one kernel. ``product_groups``: runs of Hopper's matrix instructions, each with a wait;
    ``prefetches``: into the L2 cache; ``key``: Triton's own, of one compiled kernel."""

    kernel: str
    registers: int
    stack: int
    shared: int
    wgmma: int
    mma: int
    async_copies: int
    product_groups: int
    prefetches: int
    key: str


# Shared memory of a program, by compute capability.
SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}


# What this process compiles for.
_archs: list[int] = []


class _NoDriver:
    """Enough of a Triton driver to compile for ``target`` without a device."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def _compile_only(arch: int, kernels: list[Any]) -> Iterator[None]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    from specops.ops import triton_common

    if _archs and arch not in _archs:
        raise ValueError(f"this process has compiled for {_archs[0]}, which Triton keeps to; compile for {arch} in another")
    _archs.append(arch)
    run = JITFunction.run
    told: dict[str, Any] = {"num_sms": lambda device: 132, "launches_overlap": lambda device: arch >= 90}
    told["hopper_products"] = lambda device: arch == 90
    told["shared_memory"] = lambda device: SHARED_BYTES[arch]

    def warm(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        kernels.append(kernel)
        return kernel

    asked = {name: getattr(triton_common, name) for name in told}
    active = getattr(driver, "_active", None)
    driver.set_active(_NoDriver(GPUTarget("cuda", arch, 32)))
    JITFunction.run = warm
    modules = [module for name, module in sys.modules.items() if name.startswith("specops.ops.triton_")]
    for module in modules:
        for name in told.keys() & vars(module).keys():
            setattr(module, name, told[name])
    try:
        yield
    finally:
        JITFunction.run = run
        for module in modules:
            for name in told.keys() & vars(module).keys():
                setattr(module, name, asked[name])
        if active is not None:
            driver.set_active(active)
    assert triton is not None


def compiled(call: Callable[[], Any], arch: int = 90) -> list[Compiled]:
    """Compile what ``call`` launches and read the compiler's report."""
    kernels: list[Any] = []
    with _compile_only(arch, kernels):
        call()
    return [_report(kernel) for kernel in kernels]


def compile_all(calls: list[Callable[[], Any]], workers: int, arch: int = 90) -> list[list[Compiled] | str]:
    """Compile every call into the disk cache, each in one of ``workers`` processes. Call it before CUDA is in use.

    Returns:
        For each call its reports, or the error as a string.
    """
    context = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        return list(pool.map(_compile_quietly, [(call, arch) for call in calls]))


def _compile_quietly(job: tuple[Callable[[], Any], int]) -> list[Compiled] | str:
    torch.set_num_threads(1)
    # ptxas prints whole programs when one does not fit; the error that is returned says enough.
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    try:
        return compiled(*job)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"


def _report(kernel: Any) -> Compiled:
    import triton

    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
        code = subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout
    numbers = {name: int(value) for name, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", usage)}
    ptx = kernel.asm["ptx"]
    return Compiled(
        kernel.metadata.name,
        numbers["REG"],
        numbers["STACK"],
        kernel.metadata.shared,
        ptx.count("wgmma.mma_async"),
        len(re.findall(r"\bmma\.sync", ptx)),
        ptx.count("cp.async"),
        code.count("WARPGROUP.ARRIVE"),
        ptx.count("prefetch.global.L2"),
        kernel.hash,
    )


@dataclass(frozen=True)
class MhaCall:
    """A ``triton`` MHA call on meta tensors; picklable, so that worker processes can make it."""

    batch: int = 1
    query_len: int = 4
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    value_dim: int | None = None
    page_size: int = 64
    max_pages: int = 64
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype | None = None
    packed: bool = False
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    tree_width: int | None = None
    split: bool | None = None
    tiling: Any = None

    def __call__(self) -> None:
        from specops.layout import QueryLayout
        from specops.ops.triton_mha import mha

        on = {"device": "meta"}
        dim_v = self.value_dim or self.head_dim
        kv = self.kv_dtype or self.dtype
        pages = (self.batch * self.max_pages + 1, self.page_size, self.num_kv_heads)
        rows = self.batch * self.query_len
        layout = QueryLayout.uniform(self.query_len)
        if self.packed:
            layout = QueryLayout.packed(torch.empty(self.batch + 1, dtype=torch.int32, **on), self.query_len)
        fp8 = kv == torch.float8_e4m3fn
        mha(
            torch.empty((rows, self.num_heads, self.head_dim), dtype=self.dtype, **on),
            torch.empty((*pages, self.head_dim), dtype=kv, **on),
            torch.empty((*pages, dim_v), dtype=kv, **on),
            torch.empty((self.batch, self.max_pages), dtype=torch.int32, **on),
            torch.empty(self.batch, dtype=torch.int32, **on),
            layout=layout,
            scale=0.1,
            window=self.window,
            softcap=self.softcap,
            sinks=torch.empty(self.num_heads, **on) if self.sinks else None,
            tree_mask=None if self.tree_width is None else torch.empty((rows, self.tree_width), dtype=torch.bool, **on),
            k_scale=torch.empty(1, **on) if fp8 else None,
            v_scale=torch.empty(1, **on) if fp8 else None,
            split=self.split,
            tiling=self.tiling,
        )


@dataclass(frozen=True)
class MlaCall:
    """A ``triton`` MLA call on meta tensors."""

    batch: int = 1
    query_len: int = 4
    num_heads: int = 16
    latent_dim: int = 512
    rope_dim: int = 64
    page_size: int = 64
    max_pages: int = 64
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype | None = None
    packed: bool = False
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    tree_width: int | None = None
    split: bool | None = None
    tiling: Any = None

    def __call__(self) -> None:
        from specops.layout import QueryLayout
        from specops.ops.triton_mla import mla

        on = {"device": "meta"}
        kv = self.kv_dtype or self.dtype
        rows = self.batch * self.query_len
        layout = QueryLayout.uniform(self.query_len)
        if self.packed:
            layout = QueryLayout.packed(torch.empty(self.batch + 1, dtype=torch.int32, **on), self.query_len)
        fp8 = kv == torch.float8_e4m3fn
        width = self.latent_dim + self.rope_dim
        mla(
            torch.empty((rows, self.num_heads, self.latent_dim), dtype=self.dtype, **on),
            torch.empty((rows, self.num_heads, self.rope_dim), dtype=self.dtype, **on),
            torch.empty((self.batch * self.max_pages + 1, self.page_size, width), dtype=kv, **on),
            torch.empty((self.batch, self.max_pages), dtype=torch.int32, **on),
            torch.empty(self.batch, dtype=torch.int32, **on),
            layout=layout,
            scale=0.1,
            window=self.window,
            softcap=self.softcap,
            sinks=torch.empty(self.num_heads, **on) if self.sinks else None,
            tree_mask=None if self.tree_width is None else torch.empty((rows, self.tree_width), dtype=torch.bool, **on),
            kv_scale=torch.empty(1, **on) if fp8 else None,
            split=self.split,
            tiling=self.tiling,
        )


@dataclass(frozen=True)
class StoreCall:
    """A write into a paged cache on meta tensors."""

    dtype: torch.dtype = torch.bfloat16
    value_dtype: torch.dtype = torch.bfloat16
    cache_dtype: torch.dtype = torch.bfloat16

    def __call__(self) -> None:
        from specops.ops.triton_store import store_kv

        on = {"device": "meta"}
        k_cache, v_cache = (torch.empty((9, 16, 2, 64), dtype=self.cache_dtype, **on) for _ in range(2))
        k, v = (torch.empty((4, 2, 64), dtype=dtype, **on) for dtype in (self.dtype, self.value_dtype))
        store_kv(k_cache, v_cache, k, v, torch.empty(4, dtype=torch.int64, **on))


@dataclass(frozen=True)
class ProjectCall:
    """Norm, projection, rotation and cache write on meta tensors: 9 heads in 3 of 64."""

    rows: int = 4
    dtype: torch.dtype = torch.bfloat16
    cache_dtype: torch.dtype = torch.bfloat16
    norm_dtype: torch.dtype = torch.bfloat16

    def __call__(self) -> None:
        from specops.ops.triton_linear import project_qkv

        def empty(*shape: int, dtype: torch.dtype = self.dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        cache = empty(9, 16, 3, 64, dtype=self.cache_dtype)
        angles = empty(self.rows, 1, 32, dtype=torch.float32)
        scale = empty(1, dtype=torch.float32) if self.cache_dtype == FP8 else None
        slots, weight = empty(self.rows, dtype=torch.int64), empty(960, 576)
        norm = {"norm_weight": empty(576, dtype=self.norm_dtype), "k_scale": scale, "v_scale": scale}
        project_qkv(cache, cache.clone(), empty(self.rows, 576), weight, angles, angles.clone(), slots, 9, **norm)


FP8 = torch.float8_e4m3fn
COMMON: dict[str, list[Any]] = {
    "mha": [
        MhaCall(),
        MhaCall(query_len=8, batch=64),
        MhaCall(page_size=16, max_pages=256),
        MhaCall(head_dim=64),
        MhaCall(head_dim=80),
        MhaCall(head_dim=192, value_dim=128),
        MhaCall(head_dim=256),
        MhaCall(tree_width=4, sinks=True),
        MhaCall(tree_width=100),
        MhaCall(window=1024, softcap=30.0),
        MhaCall(kv_dtype=FP8),
        MhaCall(dtype=torch.float32),
        MhaCall(batch=8, query_len=600, packed=True),
        MhaCall(batch=8, query_len=2048, packed=True, split=False),
        MhaCall(batch=8, query_len=2048, dtype=torch.float32, split=False),
    ],
    "mla": [
        MlaCall(),
        MlaCall(num_heads=128, batch=8),
        MlaCall(kv_dtype=FP8),
        MlaCall(packed=True, window=1024),
        MlaCall(tree_width=4, sinks=True),
        MlaCall(dtype=torch.float32),
        MlaCall(batch=4, query_len=2048, split=False),
    ],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", type=int, default=90, help="compute capability without the dot")
    parser.add_argument("--only", choices=sorted(COMMON))
    args = parser.parse_args()
    print(f"{'kernel':10} {'regs':>5} {'stack':>6} {'shared':>7} {'wgmma':>6} {'mma':>5} {'cp.async':>8}  call")
    for family, calls in COMMON.items():
        if args.only not in (None, family):
            continue
        for call in calls:
            for r in compiled(call, args.arch):
                given = re.sub(r"tiling=None|\w+=None|\w+=False", "", repr(call))
                print(
                    f"{r.kernel:10} {r.registers:5} {r.stack:6} {r.shared:7} {r.wgmma:6} {r.mma:5} {r.async_copies:8}  "
                    + re.sub(r"(, )+", ", ", given),
                    flush=True,
                )


if __name__ == "__main__":
    main()
