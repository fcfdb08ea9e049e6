"""Host plans: how a backend that must schedule on the host takes part in compiled forwards and CUDA graphs.

Some kernels need a schedule that the host computes from the sequence lengths. An op sees tensors only, so its ``plan``
argument is a *handle*: a one-element device tensor whose **address** names a :class:`Plan` on the host. Reading an address
costs no synchronisation, its value never matters, and every handle looks alike to ``torch.compile``, so none forces a
recompile. The handle is marked as a static input, so graph capture keeps its address.

The declared hook is :meth:`Plan.update`. Eager, capture and replay call it alike, before each step::

    plan = make_plan("flashinfer_fa2", "mha", page_table, layout, page_size=16)   # once per batch size
    plan.update(page_table, seq_lens, layout, seq_lens_cpu=lens)                  # before every step
    step(..., plan=plan.handle)                                                   # eager, compiled or replayed

A plan serves all layers of a model. Which kernels it must schedule (heads, window, soft-cap ...) it learns from the op's
first eager call, the warm-up that every capture has; the buffers that kernels read keep their addresses from then on.
``update`` copies the lengths to the host, which waits for the device; with ``seq_lens_cpu`` it does not wait, and the
planning overlaps the previous step.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from specops.layout import QueryLayout
from specops.ops import flashinfer_common
from specops.ops.backends import Family, get_backend, load_callable
from specops.ops.graph_memory import outside_graph_pools

# Plans of calls without a handle, kept for the next such call of the same shape.
KEPT_INLINE_PLANS = 4


@dataclass(frozen=True, eq=False)
class HostStep:
    """One step as planners see it: on the host, int32, pinned where there is a GPU.

    Attributes:
        query_start: ``[B + 1]`` row offset of each request.
        seq_lens: ``[B]`` keys of each request.
        page_start: ``[B + 1]`` offset of each request's pages in :attr:`Plan.page_indices`.
        last_page_lens: ``[B]`` keys on the last page, 0 for a request without keys.
        page_size: tokens per page.
        uniform_width: rows of every request of a uniform layout, None for a packed one.
    """

    query_start: Tensor
    seq_lens: Tensor
    page_start: Tensor
    last_page_lens: Tensor
    page_size: int
    uniform_width: int | None


class Planned(Protocol):
    """One kernel that a plan schedules."""

    def schedule(self, step: HostStep) -> None:
        """Compute the kernel's schedule for ``step`` and send it to the device, at the addresses of the last time."""


class Plan:
    """Schedules of one batch size; made by :func:`make_plan`.

    Attributes:
        handle: ``[1]`` int32, the op's ``plan`` argument.
        num_requests, num_rows, max_pages, page_size, device: what the plan was made for. ``num_rows`` is exact for a
            uniform layout and an upper bound for a packed one.
        stream: id of the stream that was current then; plans of one stream may share scratch memory.
        page_indices: ``[num_requests * max_pages]`` int32 on the device, pages of all requests back to back.
    """

    def __init__(
        self,
        backend: str,
        family: Family,
        *,
        num_requests: int,
        num_rows: int,
        max_pages: int,
        page_size: int,
        device: torch.device,
    ) -> None:
        self.backend, self.family = backend, family
        self.num_requests, self.num_rows = num_requests, num_rows
        self.max_pages, self.page_size, self.device = max_pages, page_size, device
        self.stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        self.step: HostStep | None = None
        # An update schedules every known kernel, or each only when it is asked for.
        self.lazy = False
        self._planned: dict[Hashable, Planned] = {}
        self._current: set[Hashable] = set()

        def buffers() -> tuple[Tensor, Tensor, Tensor]:
            return (
                torch.zeros(1, dtype=torch.int32, device=device),
                # One more, where surplus columns of the page table are written to.
                torch.zeros(num_requests * max_pages + 1, dtype=torch.int32, device=device),
                torch.arange(max_pages, dtype=torch.int64, device=device),
            )

        self.handle, self._indices, self._columns = outside_graph_pools(buffers, device)
        torch._dynamo.mark_static_address(self.handle)
        self.page_indices = self._indices[:-1]
        _register(self)

    def update(
        self,
        page_table: Tensor,
        seq_lens: Tensor,
        layout: QueryLayout,
        *,
        seq_lens_cpu: Tensor | None = None,
        query_start_cpu: Tensor | None = None,
    ) -> None:
        """Plan the next step. Call it before each step, whether that runs eagerly, is captured or is replayed.

        Args:
            page_table: ``[B, max_pages]`` int32; may have fewer columns than the plan.
            seq_lens: ``[B]`` int32, as the op will get them.
            layout: as the op will get it.
            seq_lens_cpu: the same lengths on the host; without them they are copied, which waits for the device.
            query_start_cpu: the same for a packed layout's offsets.

        Raises:
            ValueError: more requests, rows or pages than the plan was made for.
            RuntimeError: within a capture, or if a captured kernel would need another launch than the captured one.
        """
        if flashinfer_common.is_capturing(self.device):
            raise RuntimeError("Plan.update runs on the host; call it before the capture and before each replay, not within")
        self._check(page_table, layout)
        lens = _on_host(seq_lens if seq_lens_cpu is None else seq_lens_cpu)
        if layout.query_start is None:
            starts = torch.arange(self.num_requests + 1, dtype=torch.int32) * layout.max_query_len
        else:
            starts = _on_host(layout.query_start if query_start_cpu is None else query_start_cpu)
        pages = (lens + (self.page_size - 1)) // self.page_size
        most = int(pages.max())
        if most > page_table.shape[1]:
            raise ValueError(f"a request has {most} pages, and the page table {page_table.shape[1]} columns")
        page_start = torch.nn.functional.pad(pages.cumsum(0, dtype=torch.int32), (1, 0))
        self._fill_indices(page_table, page_start)
        self.step = HostStep(
            self._pinned(starts),
            self._pinned(lens),
            self._pinned(page_start),
            self._pinned(lens - (pages - 1).clamp(min=0) * self.page_size),
            self.page_size,
            None if layout.query_start is not None else layout.max_query_len,
        )
        self._current.clear()
        if not self.lazy:
            for key in self._planned:
                self._schedule(key)

    def kernel(self, key: Hashable, make: Callable[[Plan], Planned]) -> Any:
        """The planned kernel of ``key``; made and scheduled for the current step when it is asked for first.

        Raises:
            RuntimeError: if the plan was never updated, or the kernel is new within a capture.
        """
        if key in self._current:
            return self._planned[key]
        if self.step is None:
            raise RuntimeError("the plan was never updated: call plan.update(page_table, seq_lens, layout) before each step")
        if flashinfer_common.is_capturing(self.device):
            raise RuntimeError(
                "this kernel has not run with this plan yet, and it can't be planned within a capture; "
                "run the step once eagerly before capturing it"
            )
        if key not in self._planned:
            self._planned[key] = outside_graph_pools(lambda: make(self), self.device)
        # The kernel's package keeps tensors of a schedule too.
        outside_graph_pools(lambda: self._schedule(key), self.device)
        return self._planned[key]

    def serves(self, page_table: Tensor, num_rows: int, page_size: int) -> None:
        """Check that an op's call is what the plan was made for.

        Raises:
            ValueError: with both numbers.
        """
        asked = (page_table.shape[0], page_size)
        made = (self.num_requests, self.page_size)
        if asked != made or num_rows > self.num_rows:
            raise ValueError(
                f"the plan was made for {self.num_requests} requests, {self.num_rows} rows and pages of {self.page_size}; "
                f"the call has {asked[0]} requests, {num_rows} rows and pages of {page_size}. Make one plan per batch size"
            )

    def _schedule(self, key: Hashable) -> None:
        assert self.step is not None
        self._planned[key].schedule(self.step)
        self._current.add(key)

    def _check(self, page_table: Tensor, layout: QueryLayout) -> None:
        if page_table.shape[0] != self.num_requests or page_table.shape[1] > self.max_pages:
            raise ValueError(
                f"the plan was made for a page table [{self.num_requests}, {self.max_pages}], "
                f"got {list(page_table.shape)}; make one plan per batch size"
            )
        if layout.is_uniform and layout.max_query_len * self.num_requests > self.num_rows:
            raise ValueError(
                f"the plan was made for {self.num_rows} rows, "
                f"and {self.num_requests} requests have {layout.max_query_len} each"
            )

    def _fill_indices(self, page_table: Tensor, page_start: Tensor) -> None:
        """Write the live columns of ``page_table`` back to back, without a synchronisation."""
        columns = self._columns[: page_table.shape[1]]
        starts = self._pinned(page_start).to(self.device, non_blocking=True).long()
        place = starts[:-1, None] + columns
        place = torch.where(place < starts[1:, None], place, self._indices.shape[0] - 1)
        self._indices.scatter_(0, place.reshape(-1), page_table.reshape(-1))

    def _pinned(self, host: Tensor) -> Tensor:
        return host.pin_memory() if self.device.type == "cuda" else host


def make_plan(
    backend: str,
    family: Family,
    page_table: Tensor,
    layout: QueryLayout,
    *,
    page_size: int,
    num_rows: int | None = None,
) -> Plan:
    """A plan for steps of this shape.

    Args:
        backend: a backend with ``needs_plan``, such as ``"flashinfer_fa2"``.
        family: ``"mha"`` or ``"mla"``.
        page_table: ``[B, max_pages]`` on the device the steps run on; only its shape is read.
        layout: the steps' layout.
        page_size: tokens per page.
        num_rows: most query rows of a step; needed for a packed layout.

    Raises:
        ValueError: the backend takes no plan, or num_rows is missing.
    """
    found = get_backend(backend, family)
    if found.plan is None:
        raise ValueError(f"{found.op_name} takes no plan; its op reads everything from tensors")
    if num_rows is None:
        if not layout.is_uniform:
            raise ValueError("a plan for a packed layout needs num_rows, the most query rows of a step")
        num_rows = page_table.shape[0] * layout.tokens_per_request
    hook = load_callable(found.plan)
    plan: Plan = hook(
        backend,
        family,
        num_requests=page_table.shape[0],
        num_rows=num_rows,
        max_pages=page_table.shape[1],
        page_size=page_size,
        device=page_table.device,
    )
    return plan


_plans: weakref.WeakValueDictionary[int, Plan] = weakref.WeakValueDictionary()
_inline: OrderedDict[Hashable, Plan] = OrderedDict()


def _register(plan: Plan) -> None:
    _plans[plan.handle.data_ptr()] = plan


def plan_of(
    handle: Tensor | None,
    backend: str,
    family: Family,
    page_table: Tensor,
    seq_lens: Tensor,
    layout: QueryLayout,
    num_rows: int,
    page_size: int,
) -> Plan:
    """The plan that ``handle`` names; without a handle one planned on the spot, which synchronises the device.

    Raises:
        ValueError: the handle names no live plan, or one of another backend or shape.
        RuntimeError: no handle within a capture.
    """
    if handle is None:
        return _plan_inline(backend, family, page_table, seq_lens, layout, num_rows, page_size)
    plan = _plans.get(handle.data_ptr())
    if plan is None:
        raise ValueError(
            "the plan argument names no live plan. It must be plan.handle itself, since a copy has another address, "
            "and the plan must be kept alive as long as its handle is used"
        )
    if (plan.backend, plan.family) != (backend, family):
        raise ValueError(f"{backend}_{family} was given a plan of {plan.backend}_{plan.family}")
    plan.serves(page_table, num_rows, page_size)
    return plan


def _plan_inline(
    backend: str,
    family: Family,
    page_table: Tensor,
    seq_lens: Tensor,
    layout: QueryLayout,
    num_rows: int,
    page_size: int,
) -> Plan:
    device = page_table.device
    if flashinfer_common.is_capturing(device):
        raise RuntimeError(
            f"{backend}_{family} plans on the host, which a CUDA graph can't capture; make a plan before "
            "(specops.ops.planning.make_plan), update it before each step, and pass plan=plan.handle"
        )
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    key = (backend, family, device, stream, tuple(page_table.shape), num_rows, page_size)
    plan = _inline.pop(key, None)
    if plan is None:
        plan = make_plan(backend, family, page_table, layout, page_size=page_size, num_rows=num_rows)
        plan.lazy = True
    _inline[key] = plan
    while len(_inline) > KEPT_INLINE_PLANS:
        _inline.popitem(last=False)
    plan.update(page_table, seq_lens, layout)
    return plan


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.to("cpu", torch.int32).contiguous()
