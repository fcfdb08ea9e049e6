"""Which backend can serve which attention call: capabilities as data, reasons in words, and the order of ``auto``.

A call is described by an :class:`AttentionRequest`. Each :class:`Backend` declares :class:`Capabilities`; comparing the
two gives a list of reasons, empty when the backend can serve. ``auto`` takes the first capable backend of its family in
``AUTO_ORDER``. Nothing here asks for a type, and nothing here imports a kernel: a backend's kernel is named by its import
path and loaded at its first call, so optional packages are needed only by who uses them.

A backend from outside joins through :func:`register_backend` and is a torch op like the built-in ones.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from specops.layout import QueryLayout
from specops.ops import contracts

Family = Literal["mha", "mla"]
FEATURES = ("window", "softcap", "sinks", "tree_mask", "wide_tree_mask", "fp8_kv")
FP8 = torch.float8_e4m3fn
HALF = (torch.float16, torch.bfloat16)
FLOATS = (*HALF, torch.float32)

# torch calls an AMD device "cuda" too; capability tables tell them apart.
_DISPATCH_KEYS = {"cpu": "CPU", "cuda": "CUDA", "hip": "CUDA", "musa": "PrivateUse1"}


@dataclass(frozen=True)
class AttentionRequest:
    """What one attention call asks of a backend. All constants of a compiled graph; no tensor, no data."""

    family: Family
    device_type: str
    compute_capability: tuple[int, int] | None
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    page_size: int
    layout: str
    max_query_len: int
    features: tuple[str, ...] = ()


@dataclass(frozen=True)
class Capabilities:
    """What a backend takes. None means that the backend sets no limit there.

    Attributes:
        device_types: of ``cpu``, ``cuda``, ``hip`` (AMD), ``musa``.
        compute_capabilities: CUDA compute capabilities, such as ``((9, 0),)``; a minor of -1 stands for any.
        min_compute_capability: the lowest CUDA compute capability.
        q_dtypes, kv_dtypes: dtypes of query and cache. A cache that is not fp8 must have the query's dtype unless
            ``mixed_dtypes`` is set.
        fp8_min_compute_capability: the lowest CUDA compute capability that serves fp8 caches, where it is not the lowest
            of all.
        head_dims: allowed ``(key dim, value dim)`` pairs, or single numbers for equal dims. For MLA the pair is
            ``(latent + rotary, latent)``.
        page_sizes: allowed page sizes.
        layouts: of ``uniform``, ``packed``.
        max_query_len: the widest request.
        group_sizes: allowed query heads per KV head.
        features: of ``FEATURES``. ``tree_mask`` masks the request's own rows; ``wide_tree_mask`` also takes masks wider
            than the row block (multi-step drafting).
        not_together: sets of features that are served one by one but not in one call.
        interpreted_on: device types served through Triton's interpreter alone, that is with ``TRITON_INTERPRET=1``.
        graph_safe: whether the op may be captured into a CUDA graph.
        needs_plan: whether the op needs its host plan hook called before each step.
        packages: importable names the kernel needs.
        extra: the pip extra that brings them.
        also: further sets of limits, for a backend whose kernels differ by device generation or layout. A call is
            served if one set admits it; reasons come from the set that fits the device and the layout best.
    """

    device_types: tuple[str, ...]
    compute_capabilities: tuple[tuple[int, int], ...] | None = None
    min_compute_capability: tuple[int, int] | None = None
    q_dtypes: tuple[torch.dtype, ...] | None = None
    kv_dtypes: tuple[torch.dtype, ...] | None = None
    fp8_min_compute_capability: tuple[int, int] | None = None
    mixed_dtypes: bool = False
    head_dims: tuple[int | tuple[int, int], ...] | None = None
    page_sizes: tuple[int, ...] | None = None
    layouts: tuple[str, ...] = ("uniform", "packed")
    max_query_len: int | None = None
    group_sizes: tuple[int, ...] | None = None
    features: tuple[str, ...] = ()
    not_together: tuple[tuple[str, ...], ...] = ()
    interpreted_on: tuple[str, ...] = ()
    graph_safe: bool = True
    needs_plan: bool = False
    packages: tuple[str, ...] = ()
    extra: str | None = None
    also: tuple[Capabilities, ...] = ()

    def why_not(self, request: AttentionRequest) -> list[str]:
        """Reasons, in words, why a backend with these capabilities can't serve ``request``; empty when it can."""
        device_reasons = self.device_reasons(request)
        if device_reasons:
            return device_reasons + self.missing_packages()
        on_device = [limits for limits in (self, *self.also) if not limits._own_device_reasons(request)]
        found = [limits._own_reasons(request) for limits in on_device]
        in_layout = [reasons for limits, reasons in zip(on_device, found, strict=True) if request.layout in limits.layouts]
        return min(in_layout or found, key=len)

    def device_reasons(self, request: AttentionRequest) -> list[str]:
        """Why the device alone rules every set of limits out; empty when one set admits it."""
        sets = (self, *self.also)
        reasons = [limits._own_device_reasons(request) for limits in sets]
        if not all(reasons):
            return []
        if not self.also or request.device_type not in self.device_types or request.compute_capability is None:
            return reasons[0]
        allowed = dict.fromkeys(pair for limits in sets for pair in limits.compute_capabilities or ())
        return [f"compute capability {_dotted(request.compute_capability)} (it runs on {_join(map(_dotted, allowed))})"]

    def _own_reasons(self, request: AttentionRequest) -> list[str]:
        reasons = [*self._dtype_reasons(request), *self._shape_reasons(request)]
        if request.layout not in self.layouts:
            reasons.append(f"{request.layout} layout (it takes {_join(self.layouts)})")
        missing = [feature for feature in request.features if feature not in self.features]
        if missing:
            reasons.append(f"{_join(missing)} (it has {_join(self.features) or 'no optional feature'})")
        for together in self.not_together:
            if all(feature in request.features for feature in together):
                reasons.append(f"{' and '.join(together)} in one call (it has each alone)")
        reasons.extend(self.missing_packages())
        return reasons

    @property
    def all_device_types(self) -> tuple[str, ...]:
        return (*self.device_types, *self.interpreted_on)

    def missing_packages(self) -> list[str]:
        absent = [name for name in self.packages if importlib.util.find_spec(name) is None]
        if not absent:
            return []
        how = f": pip install 'specops[{self.extra}]'" if self.extra else ""
        return [f"package {_join(absent)} is not installed{how}"]

    def _own_device_reasons(self, request: AttentionRequest) -> list[str]:
        if request.device_type in self.interpreted_on:
            if os.environ.get("TRITON_INTERPRET") == "1":
                return []
            return [f"device type {request.device_type} (only under Triton's interpreter, TRITON_INTERPRET=1)"]
        if request.device_type not in self.device_types:
            return [f"device type {request.device_type} (it runs on {_join(self.device_types)})"]
        capability = request.compute_capability
        if capability is None or request.device_type != "cuda":
            return []
        if self.min_compute_capability is not None and capability < self.min_compute_capability:
            return [f"compute capability {_dotted(capability)} (it needs {_dotted(self.min_compute_capability)} or later)"]
        allowed = self.compute_capabilities
        if allowed is not None and not any(capability[0] == a and b in (-1, capability[1]) for a, b in allowed):
            return [f"compute capability {_dotted(capability)} (it runs on {_join(map(_dotted, allowed))})"]
        return []

    def _dtype_reasons(self, request: AttentionRequest) -> list[str]:
        reasons = []
        if self.q_dtypes is not None and request.q_dtype not in self.q_dtypes:
            reasons.append(f"query dtype {_short(request.q_dtype)} (it takes {_join(map(_short, self.q_dtypes))})")
        if self.kv_dtypes is not None and request.kv_dtype not in self.kv_dtypes:
            reasons.append(f"cache dtype {_short(request.kv_dtype)} (it takes {_join(map(_short, self.kv_dtypes))})")
        elif request.kv_dtype not in (FP8, request.q_dtype) and not self.mixed_dtypes:
            reasons.append(
                f"cache dtype {_short(request.kv_dtype)} with a {_short(request.q_dtype)} query (it takes equal ones)"
            )
        capability, lowest = request.compute_capability, self.fp8_min_compute_capability
        if request.kv_dtype == FP8 and capability is not None and lowest is not None and capability < lowest:
            reasons.append(f"an fp8 cache on compute capability {_dotted(capability)} (it needs {_dotted(lowest)} or later)")
        return reasons

    def _shape_reasons(self, request: AttentionRequest) -> list[str]:
        reasons = []
        if self.head_dims is not None:
            pairs = [dim if isinstance(dim, tuple) else (dim, dim) for dim in self.head_dims]
            if (request.head_dim, request.value_dim) not in pairs:
                asked = _dims(request.head_dim, request.value_dim)
                reasons.append(f"head dim {asked} (it takes {_join(_dims(*pair) for pair in pairs)})")
        if self.page_sizes is not None and request.page_size not in self.page_sizes:
            reasons.append(f"page size {request.page_size} (it takes {_join(self.page_sizes)})")
        if self.max_query_len is not None and request.max_query_len > self.max_query_len:
            reasons.append(f"{request.max_query_len} query rows per request (it takes up to {self.max_query_len})")
        group = request.num_heads // max(request.num_kv_heads, 1)
        if self.group_sizes is not None and group not in self.group_sizes:
            reasons.append(f"{group} query heads per KV head (it takes {_join(self.group_sizes)})")
        return reasons


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
            f"no {family} backend is called {name!r}; there are {_join(b.name for b in backends(family))}"
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
        others = f"Backends that can: {_join(able)}." if able else "No other backend can."
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
            raise ValueError(f"unknown {label} {_join(unknown)}; known are {_join(known)}")
    names = set(Capabilities.__dataclass_fields__) - {"device_types", "layouts", "features"}
    unknown = sorted(set(limits) - names)
    if unknown:
        raise ValueError(f"unknown limit {_join(unknown)}; known are {_join(sorted(names))}")
    limits = {name: tuple(value) if isinstance(value, list) else value for name, value in limits.items()}
    return Capabilities(device_types=device_types, layouts=layouts, features=features, **limits)


def _join(items: Iterable[object]) -> str:
    return ", ".join(str(item) for item in items)


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.x" if capability[1] < 0 else f"{capability[0]}.{capability[1]}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dims(head_dim: int, value_dim: int) -> str:
    return str(head_dim) if head_dim == value_dim else f"{head_dim}/{value_dim}"


EVERY_DEVICE = ("cpu", "cuda", "hip", "musa")
EVERY_FEATURE = FEATURES

XQA_MHA = Capabilities(
    ("cuda",),
    compute_capabilities=((9, 0), (12, -1)),
    q_dtypes=HALF,
    kv_dtypes=(*HALF, FP8),
    head_dims=(64, 128, 256),
    page_sizes=(16, 32, 64, 128),
    layouts=("uniform",),
    max_query_len=32,
    group_sizes=(1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 32),
    features=("window", "sinks", "tree_mask", "fp8_kv"),
    not_together=(("window", "tree_mask"), ("window", "fp8_kv"), ("tree_mask", "sinks"), ("sinks", "fp8_kv")),
    packages=("flashinfer",),
    extra="flashinfer",
)
TRTLLM_GEN_MHA = Capabilities(
    ("cuda",),
    compute_capabilities=((10, 0), (10, 3)),
    q_dtypes=HALF,
    kv_dtypes=(*HALF, FP8),
    head_dims=(64, 128, 256),
    page_sizes=(16, 32, 64),
    layouts=("uniform",),
    max_query_len=32,
    features=("window", "sinks", "fp8_kv"),
    packages=("flashinfer",),
    extra="flashinfer",
    also=(
        Capabilities(
            ("cuda",),
            compute_capabilities=((10, 0), (10, 3)),
            q_dtypes=HALF,
            kv_dtypes=HALF,
            head_dims=(64, 128, 256),
            page_sizes=(16, 32, 64),
            layouts=("packed",),
            features=("window", "sinks"),
            packages=("flashinfer",),
            extra="flashinfer",
        ),
    ),
)
BUILTIN = (
    Backend(
        "reference",
        "mha",
        Capabilities(EVERY_DEVICE, features=EVERY_FEATURE, mixed_dtypes=True),
        "specops.ops.reference:mha",
        source="readable PyTorch, float32 accumulation",
    ),
    Backend(
        "reference",
        "mla",
        Capabilities(EVERY_DEVICE, features=EVERY_FEATURE, mixed_dtypes=True),
        "specops.ops.reference:mla",
        source="readable PyTorch, float32 accumulation",
    ),
    Backend(
        "cpu",
        "mha",
        Capabilities(("cpu",), features=EVERY_FEATURE),
        "specops.ops.cpu:mha",
        source="vectorised PyTorch for CPUs",
    ),
    Backend(
        "cpu",
        "mla",
        Capabilities(("cpu",), features=EVERY_FEATURE),
        "specops.ops.cpu:mla",
        source="vectorised PyTorch for CPUs",
    ),
    Backend(
        "triton",
        "mha",
        Capabilities(
            ("cuda", "hip"),
            interpreted_on=("cpu",),
            min_compute_capability=(8, 0),
            q_dtypes=FLOATS,
            kv_dtypes=(*FLOATS, FP8),
            fp8_min_compute_capability=(8, 9),
            features=EVERY_FEATURE,
            packages=("triton",),
            extra="triton",
        ),
        "specops.ops.triton_mha:mha",
        source="specops Triton kernels",
    ),
    Backend(
        "triton",
        "mla",
        Capabilities(
            ("cuda", "hip"),
            interpreted_on=("cpu",),
            min_compute_capability=(8, 0),
            q_dtypes=FLOATS,
            kv_dtypes=(*FLOATS, FP8),
            fp8_min_compute_capability=(8, 9),
            features=EVERY_FEATURE,
            packages=("triton",),
            extra="triton",
        ),
        "specops.ops.triton_mla:mla",
        source="specops Triton kernels",
    ),
    Backend(
        "trtllm",
        "mha",
        replace(XQA_MHA, also=(TRTLLM_GEN_MHA, *TRTLLM_GEN_MHA.also)),
        "specops.ops.trtllm_mha:mha",
        source="TensorRT-LLM through flashinfer-python: XQA on 9.0 and 12.x, TRT-LLM-gen on 10.x",
    ),
    Backend(
        "trtllm",
        "mla",
        Capabilities(
            ("cuda",),
            compute_capabilities=((10, 0), (10, 3)),
            q_dtypes=(torch.bfloat16,),
            kv_dtypes=(torch.bfloat16,),
            head_dims=((576, 512), (320, 256)),
            page_sizes=(32, 64),
            layouts=("uniform",),
            max_query_len=32,
            features=("sinks",),
            packages=("flashinfer",),
            extra="flashinfer",
            also=(
                Capabilities(
                    ("cuda",),
                    compute_capabilities=((12, -1),),
                    q_dtypes=(torch.bfloat16,),
                    kv_dtypes=(torch.bfloat16,),
                    head_dims=((576, 512),),
                    page_sizes=(16, 32, 64, 128),
                    layouts=("uniform",),
                    max_query_len=32,
                    group_sizes=(128,),
                    packages=("flashinfer",),
                    extra="flashinfer",
                ),
            ),
        ),
        "specops.ops.trtllm_mla:mla",
        source="TensorRT-LLM through flashinfer-python: TRT-LLM-gen on 10.x, XQA on 12.x",
    ),
    Backend(
        "flashinfer_fa2",
        "mha",
        Capabilities(
            ("cuda",),
            min_compute_capability=(8, 0),
            q_dtypes=HALF,
            kv_dtypes=(*HALF, FP8),
            head_dims=(64, 128, 256),
            features=EVERY_FEATURE,
            not_together=(("sinks", "softcap"), ("sinks", "tree_mask")),
            needs_plan=True,
            packages=("flashinfer",),
            extra="flashinfer",
        ),
        "specops.ops.flashinfer:fa2_mha",
        plan="specops.ops.flashinfer:plan",
        source="FlashInfer's FA2 paged prefill, planned on the host",
    ),
    Backend(
        "flashinfer_fa3",
        "mha",
        Capabilities(
            ("cuda",),
            compute_capabilities=((9, 0),),
            q_dtypes=HALF,
            kv_dtypes=HALF,
            head_dims=(64, 128, 256),
            features=("window", "softcap", "sinks"),
            not_together=(("sinks", "softcap"),),
            needs_plan=True,
            packages=("flashinfer",),
            extra="flashinfer",
        ),
        "specops.ops.flashinfer:fa3_mha",
        plan="specops.ops.flashinfer:plan",
        source="FlashInfer's FA3 paged prefill, planned on the host",
    ),
    Backend(
        "flashinfer_fa2",
        "mla",
        Capabilities(
            ("cuda",),
            min_compute_capability=(8, 0),
            q_dtypes=HALF,
            kv_dtypes=HALF,
            head_dims=((576, 512),),
            needs_plan=True,
            packages=("flashinfer",),
            extra="flashinfer",
        ),
        "specops.ops.flashinfer:fa2_mla",
        plan="specops.ops.flashinfer:plan",
        source="FlashInfer's FA2 MLA, planned on the host",
    ),
    Backend(
        "flashinfer_fa3",
        "mla",
        Capabilities(
            ("cuda",),
            compute_capabilities=((9, 0),),
            q_dtypes=HALF,
            kv_dtypes=HALF,
            head_dims=((576, 512),),
            needs_plan=True,
            packages=("flashinfer",),
            extra="flashinfer",
        ),
        "specops.ops.flashinfer:fa3_mla",
        plan="specops.ops.flashinfer:plan",
        source="FlashInfer's FA3 MLA, planned on the host",
    ),
    Backend(
        "tokenspeed",
        "mla",
        Capabilities(
            ("cuda",),
            compute_capabilities=((10, 0), (10, 3), (10, 7)),
            q_dtypes=(torch.bfloat16,),
            kv_dtypes=(torch.bfloat16,),
            head_dims=((576, 512),),
            page_sizes=(16, 32, 64, 128),
            layouts=("uniform",),
            max_query_len=32,
            group_sizes=(8, 16, 32, 64, 128),
            packages=("tokenspeed_mla",),
            extra="tokenspeed",
        ),
        "specops.ops.tokenspeed_mla:mla",
        source="TokenSpeed MLA decode (CuTe DSL)",
    ),
)

for _backend in BUILTIN:
    add_backend(_backend)
