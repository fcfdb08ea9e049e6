"""Host plans of a round: which attention calls it makes, and the lengths each of them will see.

A planned backend (FlashInfer fa2 and fa3) schedules on the host, from the lengths its kernels will see. Everything else of a
round lives on the device, and what the round will accept is known to nobody before it has run. Yet no call of a round needs
that: with ``c`` committed keys, level ``l`` of drafting sees ``c + l * topk`` keys, and verify and draft-extend see
``c + n``, whatever is accepted. So a round plans all of its calls at once, before it starts, from the committed lengths.

Those are read from the state that the round itself will read: one copy of ``[B]`` integers to the host, before every run, be
it eager, a warm-up, captured or replayed. That is a host synchronisation a round. The loop has one anyway, where it reads
what the last round emitted, so the device is idle by then and the copy waits for nothing; but the schedules are computed
while the device waits. Backends without a plan, which ``backend="auto"`` keeps to, pay none of this.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from specops.compile.plans import MakePlan, StepPlan, family_of, planned_backend
from specops.layout import QueryLayout
from specops.ops.backends import Family
from specops.ops.planning import Plan, make_plan
from specops.spec.config import SpecConfig

# Page tables ``[B, max_pages]`` and committed lengths ``[B]`` of a run, both int32 on the device, from its fields.
ReadState = Callable[[Mapping[str, Tensor]], tuple[Tensor, Tensor]]


class RoundHandles(NamedTuple):
    """The argument ``plan`` of a round and of its steps; None where a model's backend needs no plan.

    Attributes:
        draft: one handle for each level that runs the draft model, the second of the tree first.
        verify: of the target over the tree, or over the one row of plain decoding.
        extend: of draft-extend.
    """

    draft: tuple[Tensor, ...] | None = None
    verify: Tensor | None = None
    extend: Tensor | None = None


@dataclass(frozen=True)
class PlannedCall:
    """Calls of one model that share a schedule: ``rows`` rows a request, ``ahead`` keys behind the committed ones."""

    backend: str
    family: Family
    rows: int
    ahead: int


@dataclass(frozen=True)
class RoundCalls:
    """The planned calls of a round, in the places of :class:`RoundHandles`."""

    draft: tuple[PlannedCall, ...] = ()
    verify: PlannedCall | None = None
    extend: PlannedCall | None = None

    @property
    def all(self) -> tuple[PlannedCall, ...]:
        """Each different call once."""
        return tuple(dict.fromkeys(call for call in (*self.draft, self.verify, self.extend) if call is not None))

    def drafting(self) -> RoundCalls:
        """Those of the draft's levels alone."""
        return RoundCalls(draft=self.draft)

    def verifying(self) -> RoundCalls:
        """That of the target alone."""
        return RoundCalls(verify=self.verify)


def round_calls(target: nn.Module, draft: nn.Module | None, config: SpecConfig) -> RoundCalls:
    """What the planned backends that the models' layers name must schedule in a round.

    Raises:
        ValueError: a model names two planned backends.
    """
    backend = planned_backend(target, family_of(target))
    width = config.width if draft is not None else 1
    verify = None if backend is None else PlannedCall(backend, family_of(target), width, width)
    backend = None if draft is None else planned_backend(draft, family_of(draft))
    if backend is None or draft is None:
        return RoundCalls(verify=verify)
    family, topk = family_of(draft), config.topk
    levels = tuple(PlannedCall(backend, family, topk, level * topk) for level in range(1, config.num_steps))
    return RoundCalls(levels, verify, PlannedCall(backend, family, width, width))


class RoundPlan:
    """The plans of a round for one batch size (a :class:`specops.compile.plans.StepPlan`).

    Attributes:
        handle: the step's argument ``plan``.
        plans: one for each different call.
    """

    def __init__(self, calls: RoundCalls, read: ReadState, page_table: Tensor, page_size: int) -> None:
        self.read = read
        self.plans: dict[PlannedCall, Plan] = {
            call: make_plan(call.backend, call.family, page_table, QueryLayout.uniform(call.rows), page_size=page_size)
            for call in calls.all
        }
        self.handle = RoundHandles(
            tuple(self.plans[call].handle for call in calls.draft) or None,
            None if calls.verify is None else self.plans[calls.verify].handle,
            None if calls.extend is None else self.plans[calls.extend].handle,
        )

    def update(self, fields: Mapping[str, Tensor]) -> None:
        """Schedule every call of a run over ``fields``, padded as the step gets them."""
        table, committed = self.read(fields)
        host = committed.to("cpu", torch.int32)
        for call, plan in self.plans.items():
            lens = torch.where(host > 0, host + call.ahead, 0)
            plan.update(table, lens, QueryLayout.uniform(call.rows), seq_lens_cpu=lens)


def round_plans(calls: RoundCalls, read: ReadState, page_size: int) -> MakePlan | None:
    """What makes the plans of a runner; None where there is nothing to plan.

    One plan a batch size serves every runner that this is given to: they never run at the same time, and each updates it
    before it runs.
    """
    if not calls.all:
        return None
    made: dict[tuple[int, ...], RoundPlan] = {}

    def make(fields: Mapping[str, Tensor]) -> StepPlan:
        table, _ = read(fields)
        shape = tuple(table.shape)
        if shape not in made:
            made[shape] = RoundPlan(calls, read, table, page_size)
        return made[shape]

    return make


def tell_of_host_plans(calls: Iterable[PlannedCall]) -> None:
    """Say once a place what a planned backend costs the loop."""
    backends = sorted({call.backend for call in calls})
    if backends:
        warnings.warn(
            f"{' and '.join(backends)} schedules its kernels on the host: before every round the host reads the lengths and "
            f"computes {len(set(calls))} schedules while the device waits. backend='auto' needs no such plan",
            stacklevel=4,
        )
