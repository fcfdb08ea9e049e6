"""Runs the Python source of a warp-specialised Gluon kernel on the CPU, one thread a role, with PyTorch tensors for values.

What is emulated is what the roles say to each other: shared memory, memory barriers with their phases, copies that land
late, matrix products that read their operands until they are waited for. Only one thread runs at a time, and at every
barrier and copy a seeded generator picks who goes on, so each seed is another interleaving. A copy's target is NaN while it
is in flight, operands that change under a running product and roles that wait for each other are errors. Not emulated:
layouts, registers, and races between the warps of one role.
"""

from __future__ import annotations

import random
import threading
import types
from typing import Any

import torch
from torch import Tensor


class _Stop(BaseException):
    """Ends the threads of a program in which one has failed."""


class Scheduler:
    """Threads of one program, of which one runs at a time, and the copies in flight."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.changed = threading.Condition()
        self.waits: dict[int, Any] = {}
        self.running: int | None = None
        self.in_flight: list[Any] = []
        self.failure: BaseException | None = None
        self.copy_weight = self.random.choice([0.3, 1.0, 5.0])
        self.weights: dict[int, float] = {}

    def run(self, roles: list[Any]) -> None:
        threads = []
        for index, role in enumerate(roles):
            self.waits[index] = None
            self.weights[index] = self.random.choice([1.0, 1.0, 5.0, 20.0])
            threads.append(threading.Thread(target=self._body, args=(index, role)))
        for thread in threads:
            thread.start()
        with self.changed:
            self._pick()
        for thread in threads:
            thread.join()
        if self.failure is not None:
            raise self.failure
        assert not self.in_flight, "copies in flight at the end"

    def _body(self, index: int, role: Any) -> None:
        _here.index = index
        try:
            with self.changed:
                self._await_turn(index)
            role()
        except _Stop:
            pass
        except BaseException as failure:
            self.failure = self.failure or failure
        with self.changed:
            del self.waits[index]
            self._pick()

    def _await_turn(self, index: int) -> None:
        while self.running != index:
            if self.failure is not None:
                raise _Stop
            self.changed.wait()

    def step(self, wait: Any = None) -> None:
        """Let others go on; return when chosen again and ``wait`` is true."""
        if not hasattr(_here, "index") or _here.index not in self.waits:
            return
        with self.changed:
            self.waits[_here.index] = wait
            self._pick()
            self._await_turn(_here.index)
            self.waits[_here.index] = None

    def _pick(self) -> None:
        while True:
            able: list[Any] = [i for i, wait in self.waits.items() if wait is None or wait()]
            choices = able + (["copy"] if self.in_flight else [])
            if not self.waits or self.failure is not None:
                self.running = None
                break
            if not choices:
                self.failure = AssertionError("every role waits")
                self.running = None
                break
            weights = [self.copy_weight if choice == "copy" else self.weights[choice] for choice in choices]
            chosen = self.random.choices(choices, weights)[0]
            if chosen != "copy":
                self.running = chosen
                break
            self.in_flight.pop(self.random.randrange(len(self.in_flight)))()
        self.changed.notify_all()


_here = threading.local()
_state: dict[str, Any] = {}


class Barrier:
    def __init__(self) -> None:
        self.count = self.left = self.bytes = self.phase = 0

    def arrive(self, count: int) -> None:
        assert self.left >= count, "more arrivals than the barrier counts"
        self.left -= count
        self._turn()

    def land(self, count: int) -> None:
        self.bytes -= count
        self._turn()

    def _turn(self) -> None:
        if self.left == 0 and self.bytes == 0:
            self.phase += 1
            self.left = self.count


class Shared:
    """A view of shared memory."""

    def __init__(self, data: Any) -> None:
        self.data = data

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    def index(self, index: Any) -> Any:
        if isinstance(self.data, list):
            return self.data[int(index)]
        return Shared(self.data[int(index)])

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.data.narrow(dim, start, length))

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.data.permute(order))

    def reshape(self, shape: list[int]) -> Shared:
        return Shared(self.data.view([int(size) for size in shape]))

    def load(self, layout: Any = None) -> Tensor:
        return self.data.clone()

    def store(self, value: Tensor) -> None:
        assert self.data.shape == value.shape, (self.data.shape, value.shape)
        self.data.copy_(value)


class Pointer:
    def __init__(self, data: Tensor, offset: Any = 0) -> None:
        self.flat = (
            data if data.ndim == 1 else torch.as_strided(data, (data.untyped_storage().nbytes() // data.itemsize,), (1,), 0)
        )
        self.offset = offset if data.ndim == 1 else data.storage_offset() + offset
        self.dtype = types.SimpleNamespace(element_ty=data.dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.flat, self.offset + offset)

    def at(self, mask: Any) -> tuple[Tensor, Tensor]:
        where = torch.as_tensor(self.offset).long()
        inside = torch.ones((), dtype=torch.bool) if mask is None else torch.as_tensor(mask)
        where, inside = torch.broadcast_tensors(where, inside)
        reached = where[inside]
        assert ((reached >= 0) & (reached < self.flat.shape[0])).all(), "access outside the tensor"
        return torch.where(inside, where, 0), inside


class Descriptor:
    def __init__(self, given: Any) -> None:
        base = given.base
        self.data = torch.as_strided(base, given.shape, given.strides, base.storage_offset())
        self.block = [int(size) for size in given.block_shape]
        self.dtype, self.layout = base.dtype, given.layout
        nbytes = base.itemsize
        for size in self.block:
            nbytes *= size
        self.block_type = types.SimpleNamespace(nbytes=nbytes)

    def box(self, corner: list[Any]) -> Tensor:
        out = torch.zeros(self.block, dtype=self.dtype)
        source, target = [], []
        for first, size, limit in zip(map(int, corner), self.block, self.data.shape, strict=True):
            low, high = max(first, 0), min(first + size, limit)
            if low >= high:
                return out
            source.append(slice(low, high))
            target.append(slice(low - first, high - first))
        out[tuple(target)] = self.data[tuple(source)]
        return out


class Product:
    """A chain of matrix products under way; their operands in shared memory must stay as they are."""

    def __init__(self, value: Tensor, reads: list[Any]) -> None:
        self.value, self.reads = value, reads


def _matmul(a: Any, b: Any, acc: Any, use_acc: bool = True, is_async: bool = False) -> Any:
    reads = list(acc.reads) if isinstance(acc, Product) else []
    value = acc.value if isinstance(acc, Product) else acc
    operands = []
    for operand in (a, b):
        if isinstance(operand, Shared):
            reads.append((operand, operand.load()))
            operand = operand.load()
        operands.append(operand.float())
    product = operands[0] @ operands[1]
    assert product.shape == value.shape
    done = Product(value + product if use_acc else product, reads)
    return done if is_async else _matmul_wait(0, (done,))


def _matmul_wait(outstanding: int = 0, deps: Any = ()) -> Tensor:
    _state["scheduler"].step()
    for operand, was in deps[0].reads:
        assert torch.equal(operand.data.nan_to_num(7.0), was.nan_to_num(7.0)), "an operand changed under a product"
    return deps[0].value


def _wait(barrier: Barrier, phase: Any) -> None:
    parity = int(phase)
    _state["scheduler"].step(lambda: (barrier.phase & 1) != parity)


def _arrive(barrier: Barrier, count: int = 1) -> None:
    barrier.arrive(count)
    _state["scheduler"].step()


def _expect(barrier: Barrier, nbytes: int) -> None:
    barrier.bytes += nbytes
    barrier.arrive(1)


def _copy(descriptor: Descriptor, corner: list[Any], barrier: Barrier, target: Shared) -> None:
    box = descriptor.box(corner)
    target.data.fill_(float("nan"))

    def land() -> None:
        target.data.copy_(box)
        barrier.land(descriptor.block_type.nbytes)

    _state["scheduler"].in_flight.append(land)
    _state["scheduler"].step()


class _MBarrierLayout:
    pass


def _allocate(dtype: torch.dtype, shape: list[int], layout: Any) -> Shared:
    if isinstance(layout, _MBarrierLayout):
        return Shared([Barrier() for _ in range(shape[0])])
    data = torch.empty([int(size) for size in shape], dtype=dtype)
    return Shared(data.fill_(float("nan") if dtype.is_floating_point else 99))


def _load(pointer: Pointer, mask: Any = None, other: Any = 0, cache_modifier: str = "") -> Tensor:
    where, inside = pointer.at(mask)
    return torch.where(inside, pointer.flat[where], torch.as_tensor(other, dtype=pointer.flat.dtype))


def _store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    where, inside = pointer.at(mask)
    value = torch.as_tensor(value).broadcast_to(where.shape)
    pointer.flat[where[inside]] = value[inside].to(pointer.flat.dtype)


def _specialize(roles: list[Any], warps: list[int], registers: list[int]) -> None:
    scheduler = Scheduler(_state["random"].randrange(1 << 30))
    _state["scheduler"] = scheduler
    scheduler.run([lambda role=role, args=args: role(*args) for role, args in roles])


def _init(barrier: Barrier, count: int) -> None:
    barrier.count = barrier.left = count


def _scalar(value: Any) -> Tensor:
    return torch.as_tensor(value)


def _layout(*given: Any) -> Any:
    return given


_LANGUAGE = types.SimpleNamespace(
    constexpr=int,
    int32=torch.int32,
    int64=torch.int64,
    float32=torch.float32,
    NVMMADistributedLayout=_layout,
    DotOperandLayout=_layout,
    SliceLayout=_layout,
    BlockedLayout=_layout,
    NVMMASharedLayout=_layout,
    SwizzledSharedLayout=_layout,
    allocate_shared_memory=_allocate,
    warp_specialize=_specialize,
    program_id=lambda axis: torch.tensor(_state["pid"], dtype=torch.int32),
    num_programs=lambda axis: torch.tensor(_state["programs"], dtype=torch.int32),
    arange=lambda start, end, layout=None: torch.arange(start, end, dtype=torch.int32),
    full=lambda shape, value, dtype, layout=None: torch.full([int(size) for size in shape], value, dtype=dtype),
    zeros=lambda shape, dtype, layout=None: torch.zeros([int(size) for size in shape], dtype=dtype),
    zeros_like=torch.zeros_like,
    where=lambda condition, x, y: torch.where(_scalar(condition), x, y),
    maximum=lambda x, y: torch.maximum(*torch.broadcast_tensors(_scalar(x), _scalar(y))),
    minimum=lambda x, y: torch.minimum(*torch.broadcast_tensors(_scalar(x), _scalar(y))),
    max=lambda x, axis: x.amax(axis),
    sum=lambda x, axis: x.sum(axis).to(x.dtype),
    exp2=torch.exp2,
    log2=torch.log2,
    associative_scan=lambda x, axis, combine: x.cumsum(axis).to(x.dtype),
    static_range=range,
    load=_load,
    store=_store,
    debug_barrier=lambda: None,
    extra=types.SimpleNamespace(
        cuda=types.SimpleNamespace(gdc_wait=lambda: None, gdc_launch_dependents=lambda: None),
    ),
)
_HOPPER = types.SimpleNamespace(warpgroup_mma=_matmul, warpgroup_mma_wait=_matmul_wait, fence_async_shared=lambda: None)
_BARRIERS = types.SimpleNamespace(init=_init, wait=_wait, arrive=_arrive, expect=_expect, MBarrierLayout=_MBarrierLayout)
_TMA = types.SimpleNamespace(async_copy_global_to_shared=_copy)


def _python(function: Any, names: dict[str, Any]) -> Any:
    raw = function.fn
    return types.FunctionType(raw.__code__, names, raw.__name__, raw.__defaults__, raw.__closure__)


def emulated(module: Any, kernel: str, seed: int) -> Any:
    """Stand-in for ``kernel`` of ``module``: launched as ``kernel[grid](...)``, its programs run one after another."""
    names: dict[str, Any] = {
        "gl": _LANGUAGE,
        "tl": _LANGUAGE,
        "hopper": _HOPPER,
        "mbarrier": _BARRIERS,
        "tma": _TMA,
        "range": range,
    }
    for name, value in vars(module).items():
        if hasattr(value, "fn"):
            names[name] = _python(value, names)
        elif type(value).__name__ == "constexpr":
            names[name] = value.value
    parameters = module.__dict__[kernel].fn.__code__.co_varnames[: module.__dict__[kernel].fn.__code__.co_argcount]

    def argument(value: Any) -> Any:
        if isinstance(value, Tensor):
            return Pointer(value)
        if hasattr(value, "block_shape"):
            return Descriptor(value)
        return torch.tensor(value, dtype=torch.int32) if type(value) is int else value

    class Launch:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def launch(*args: Any, **constants: Any) -> None:
                given = dict(zip(parameters, map(argument, args), strict=False))
                given |= {name: value for name, value in constants.items() if name in parameters}
                _state["random"] = random.Random(seed)
                _state["programs"] = grid[0]
                for pid in range(grid[0]):
                    _state["pid"] = pid
                    names[kernel](**given)

            return launch

    return Launch()
