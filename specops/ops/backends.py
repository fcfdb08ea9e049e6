"""The registry of backends: which can serve a call, the order of ``auto``, and the torch op that each one becomes.

A call is described by an :class:`AttentionRequest` and a backend by its :class:`Capabilities`, both of ``capabilities.py``.
``auto`` takes the first capable backend of its family in ``AUTO_ORDER``. Nothing here asks for a type, and nothing here
imports a kernel: a backend's kernel is named by its import path and loaded at its first call, so optional packages are
needed only by who uses them.

The built-in backends are the table in ``builtin.py``, added when ``specops.ops`` is imported. A backend from outside joins
through :func:`register_backend` and is a torch op like the built-in ones.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specops.layout import QueryLayout
from specops.ops import contracts
from specops.ops.capabilities import FEATURES, FP8, AttentionRequest, Capabilities, Family, join

__all__ = [
    "AUTO_ORDER",
    "FEATURES",
    "FP8",
    "AttentionRequest",
    "Backend",
    "Capabilities",
    "Family",
    "UnsupportedAttention",
    "add_backend",
    "backends",
    "capable_backends",
    "compute_capability",
    "device_kind",
    "get_backend",
    "load_callable",
    "register_backend",
    "resolve",
]

# torch calls an AMD device "cuda" too; capability tables tell them apart.
_DISPATCH_KEYS = {"cpu": "CPU", "cuda": "CUDA", "hip": "CUDA", "musa": "PrivateUse1"}


@dataclass(frozen=True)
class Backend:
    """One attention backend: its name, what it can do, and where its kernel is.

    Attributes:
        name: as users ask for it; the op is ``specops::{name}_{family}``.
        kernel: a callable, or ``"module:function"`` that is imported at the first call. Called as
            ``kernel(q, k_cache, v_cache, page_table, seq_lens, *, layout, scale, **given_features)`` for MHA and
            ``kernel(q_latent, q_rope, kv_cache, page_table, seq_lens, *, layout, scale, **given_features)`` for MLA.
        plan: the host plan hook of a backend with ``needs_plan``, in the same two forms: called as
            :func:`specops.ops.planning.make_plan` does, it returns a :class:`specops.ops.planning.Plan`.
        source: one line saying whose kernel runs.
    """

    name: str
    family: Family
    capabilities: Capabilities
    kernel: str | Callable[..., Tensor]
    plan: str | Callable[..., Any] | None = None
    source: str = ""

    @property
    def op_name(self) -> str:
        return f"{self.name}_{self.family}"


class UnsupportedAttention(ValueError):
    """No backend, or not the one asked for, can serve a call. The message names limit, request and who could."""


_BACKENDS: dict[tuple[Family, str], Backend] = {}

# Fastest first, per device type. A backend that is not named here is never chosen by auto; ask for it by name.
_GPU_ORDER = ("triton", "trtllm", "tokenspeed", "reference")
AUTO_ORDER: dict[str, tuple[str, ...]] = {
    "cpu": ("cpu", "reference"),
    "cuda": _GPU_ORDER,
    "hip": _GPU_ORDER,
    "musa": _GPU_ORDER,
}


def backends(family: Family | None = None) -> list[Backend]:
    """All registered backends, those of one family if given, in order of registration."""
    return [backend for backend in _BACKENDS.values() if family in (None, backend.family)]


def get_backend(name: str, family: Family) -> Backend:
    """The backend ``name`` of ``family``.

    Raises:
        UnsupportedAttention: if there is none; the message lists those there are.
    """
    found = _BACKENDS.get((family, name))
    if found is None:
        raise UnsupportedAttention(
            f"no {family} backend is called {name!r}; there are {join(b.name for b in backends(family))}"
        )
    return found


def capable_backends(request: AttentionRequest) -> list[str]:
    """Names of the backends that can serve ``request``, in auto order, then those auto never takes."""
    order = AUTO_ORDER.get(request.device_type, ())
    able = [b.name for b in backends(request.family) if not b.capabilities.why_not(request)]
    return sorted(able, key=lambda name: order.index(name) if name in order else len(order))


def resolve(name: str, request: AttentionRequest) -> Backend:
    """The backend that serves ``request``: ``name`` itself, or the first capable one for ``"auto"``.

    Raises:
        UnsupportedAttention: with the limit that was hit, what was asked, and which backends would do it.
    """
    if name == "auto":
        able = [candidate for candidate in capable_backends(request) if candidate in AUTO_ORDER.get(request.device_type, ())]
        if able:
            return get_backend(able[0], request.family)
        why = "; ".join(f"{b.op_name}: {', '.join(b.capabilities.why_not(request))}" for b in backends(request.family))
        raise UnsupportedAttention(f"no {request.family} backend can serve this. {why}")
    backend = get_backend(name, request.family)
    reasons = backend.capabilities.why_not(request)
    if reasons:
        able = capable_backends(request)
        others = f"Backends that can: {join(able)}." if able else "No other backend can."
        raise UnsupportedAttention(f"{backend.op_name} cannot serve this: {', '.join(reasons)}. {others}")
    return backend


def register_backend(
    name: str,
    *,
    family: Family = "mha",
    device_types: Iterable[str] = ("cuda",),
    layouts: Iterable[str] = ("uniform", "packed"),
    features: Iterable[str] = (),
    source: str = "user",
    plan: Callable[..., Any] | None = None,
    **limits: Any,
) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Decorator that makes a function an attention backend and a torch op, ``specops::{name}_{family}``.

    Args:
        name: a Python identifier, not taken yet in this family.
        family: ``"mha"`` or ``"mla"``; decides the call the function gets (see :class:`Backend`).
        device_types, layouts, features, **limits: fields of :class:`Capabilities`.
        source: one line saying whose kernel runs.
        plan: host plan hook, when ``needs_plan=True``.

    Returns:
        The function, unchanged. It must return a fresh ``[T, Hq, Dv]`` tensor in the query's dtype and must not
        mutate its arguments; ``specops.testing.check_backend(name)`` tests that.

    Raises:
        ValueError: if the name is no identifier or is taken, or a limit has an unknown name or value.
    """
    capabilities = _checked_capabilities(tuple(device_types), tuple(layouts), tuple(features), limits)

    def decorate(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
        add_backend(Backend(name, family, capabilities, kernel, plan, source))
        return kernel

    return decorate


def add_backend(backend: Backend) -> Backend:
    """Define the op of ``backend``: schema, fake and kernel. Used by the built-in table and by register_backend."""
    key = (backend.family, backend.name)
    if backend.family not in ("mha", "mla"):
        raise ValueError(f"family must be 'mha' or 'mla', got {backend.family!r}")
    if not backend.name.isidentifier() or backend.name == "auto":
        raise ValueError(f"a backend's name must be a Python identifier and not 'auto', got {backend.name!r}")
    if key in _BACKENDS:
        raise ValueError(f"a {backend.family} backend called {backend.name!r} is registered already")
    mha = backend.family == "mha"
    tags: tuple[torch.Tag, ...] = (torch.Tag.pt2_compliant_tag,)
    if not backend.capabilities.graph_safe:
        tags = (*tags, torch.Tag.cudagraph_unsafe)
    schema = contracts.MHA_SCHEMA if mha else contracts.MLA_SCHEMA
    contracts.LIBRARY.define(backend.op_name + schema, tags=tags)
    run = _mha_entry(backend) if mha else _mla_entry(backend)
    for dispatch_key in sorted({_DISPATCH_KEYS[kind] for kind in backend.capabilities.all_device_types}):
        contracts.LIBRARY.impl(backend.op_name, contracts.without_autograd(run), dispatch_key)
    torch.library.register_fake(
        f"{contracts.NAMESPACE}::{backend.op_name}",
        contracts.fake_mha if mha else contracts.fake_mla,
        lib=contracts.LIBRARY,
    )
    _BACKENDS[key] = backend
    return backend


def load_callable(path: str | Callable[..., Any]) -> Callable[..., Any]:
    """The callable at ``"module:function"``; a callable is returned as it is."""
    if not isinstance(path, str):
        return path
    module, function = path.split(":")
    loaded: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return loaded


def _mha_entry(backend: Backend) -> Callable[..., Tensor]:
    """The op's kernel in schema order; loads the backend's function at the first call, passes given features only."""
    kernel: Callable[..., Tensor] | None = None

    def run(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        page_table: Tensor,
        seq_lens: Tensor,
        query_start: Tensor | None,
        max_query_len: int,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        tree_mask: Tensor | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        plan: Tensor | None = None,
    ) -> Tensor:
        nonlocal kernel
        if kernel is None:
            kernel = load_callable(backend.kernel)
        given: dict[str, Any] = {}
        if window is not None:
            given["window"] = window
        if softcap is not None:
            given["softcap"] = softcap
        if sinks is not None:
            given["sinks"] = sinks
        if tree_mask is not None:
            given["tree_mask"] = tree_mask
        if k_scale is not None:
            given["k_scale"] = k_scale
        if v_scale is not None:
            given["v_scale"] = v_scale
        if plan is not None:
            given["plan"] = plan
        layout = QueryLayout(max_query_len, query_start)
        return kernel(q, k_cache, v_cache, page_table, seq_lens, layout=layout, scale=scale, **given)

    return run


def _mla_entry(backend: Backend) -> Callable[..., Tensor]:
    """As :func:`_mha_entry`, for the MLA schema."""
    kernel: Callable[..., Tensor] | None = None

    def run(
        q_latent: Tensor,
        q_rope: Tensor,
        kv_cache: Tensor,
        page_table: Tensor,
        seq_lens: Tensor,
        query_start: Tensor | None,
        max_query_len: int,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        tree_mask: Tensor | None = None,
        kv_scale: Tensor | None = None,
        plan: Tensor | None = None,
    ) -> Tensor:
        nonlocal kernel
        if kernel is None:
            kernel = load_callable(backend.kernel)
        options = (
            ("window", window),
            ("softcap", softcap),
            ("sinks", sinks),
            ("tree_mask", tree_mask),
            ("kv_scale", kv_scale),
            ("plan", plan),
        )
        given = {name: value for name, value in options if value is not None}
        layout = QueryLayout(max_query_len, query_start)
        return kernel(q_latent, q_rope, kv_cache, page_table, seq_lens, layout=layout, scale=scale, **given)

    return run


def device_kind(device: torch.device) -> str:
    """``cpu``, ``cuda``, ``hip`` or ``musa``: torch's device type with AMD told apart from NVIDIA."""
    if device.type == "cuda" and torch.version.hip is not None:
        return "hip"
    return device.type


def compute_capability(device: torch.device) -> tuple[int, int] | None:
    """CUDA compute capability of ``device``; None for anything that is not an NVIDIA GPU."""
    if device_kind(device) != "cuda":
        return None
    return torch.cuda.get_device_capability(device)


def _checked_capabilities(
    device_types: tuple[str, ...], layouts: tuple[str, ...], features: tuple[str, ...], limits: dict[str, Any]
) -> Capabilities:
    for label, values, known in (
        ("device type", device_types, tuple(_DISPATCH_KEYS)),
        ("layout", layouts, ("uniform", "packed")),
        ("feature", features, FEATURES),
    ):
        unknown = [value for value in values if value not in known]
        if unknown:
            raise ValueError(f"unknown {label} {join(unknown)}; known are {join(known)}")
    names = set(Capabilities.__dataclass_fields__) - {"device_types", "layouts", "features"}
    unknown = sorted(set(limits) - names)
    if unknown:
        raise ValueError(f"unknown limit {join(unknown)}; known are {join(sorted(names))}")
    limits = {name: tuple(value) if isinstance(value, list) else value for name, value in limits.items()}
    return Capabilities(device_types=device_types, layouts=layouts, features=features, **limits)
