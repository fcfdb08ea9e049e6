"""Host plans in a runner: one declared hook, called before every run, be it eager, a warm-up, captured or replayed.

A backend that schedules on the host (FlashInfer fa2 and fa3) reads its schedule through a *handle*, a tensor argument of
the step. A runner makes one plan a bucket and calls its ``update`` with the batch as the step will see it, padding
included, right before the step runs; capture and replay have nothing else to agree on. Only backends with ``needs_plan``
pay for it: ``update`` copies the lengths to the host, which waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from specops.kv_cache import PagedLatentCache
from specops.layout import QueryLayout
from specops.ops.backends import Family, get_backend
from specops.ops.planning import Plan, make_plan


class StepPlan(Protocol):
    """The plan of one batch size.

    Attributes:
        handle: the step's argument ``plan``: a tensor, or several in a tuple; the same ones for as long as the plan lives.
    """

    handle: Any

    def update(self, fields: Mapping[str, Tensor]) -> None:
        """Schedule a run over ``fields``, padded as the step gets them."""


# Called with the fields of one batch size, when that is first seen.
MakePlan = Callable[[Mapping[str, Tensor]], StepPlan]


class AttentionPlan:
    """A backend's plan for steps with the fields ``page_table`` and ``seq_lens`` and one uniform layout."""

    def __init__(self, plan: Plan, layout: QueryLayout) -> None:
        self.plan, self.layout = plan, layout
        self.handle = plan.handle

    def update(self, fields: Mapping[str, Tensor]) -> None:
        self.plan.update(fields["page_table"], fields["seq_lens"], self.layout)


def attention_plan(backend: str, family: Any, layout: QueryLayout, page_size: int) -> MakePlan:
    """What makes the plans of a planned backend.

    Args:
        backend: such as ``"flashinfer_fa2"``.
        family: ``"mha"`` or ``"mla"``.
        layout: the step's uniform layout.
        page_size: tokens per page.

    Raises:
        ValueError: the backend takes no plan.
    """
    if get_backend(backend, family).plan is None:
        raise ValueError(f"{backend} takes no plan; its op reads everything from tensors")

    def make(fields: Mapping[str, Tensor]) -> StepPlan:
        return AttentionPlan(make_plan(backend, family, fields["page_table"], layout, page_size=page_size), layout)

    return make


def planned_backend(model: nn.Module, family: Family) -> str | None:
    """The planned backend that the model's attention layers name, None if they name none.

    The layers are those of ``model.attention_layers()``, or else all submodules with a ``backend`` by name.

    Raises:
        ValueError: they name several: one step has one plan.
    """
    list_layers = getattr(model, "attention_layers", None)
    layers = list_layers() if callable(list_layers) else model.modules()
    names = {name for name in (getattr(layer, "backend", None) for layer in layers) if isinstance(name, str)} - {"auto"}
    planned = sorted(name for name in names if get_backend(name, family).plan is not None)
    if len(planned) > 1:
        raise ValueError(f"a step has one plan, and its layers name the planned backends {', '.join(planned)}")
    return planned[0] if planned else None


def family_of(model: nn.Module) -> Family:
    """``"mla"`` for a model whose caches hold latents, else ``"mha"``."""
    caches = list(getattr(model, "caches", None) or ())
    return "mla" if caches and isinstance(caches[0], PagedLatentCache) else "mha"
