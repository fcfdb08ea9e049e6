"""What a backend can serve, as data, and what one call asks of it; comparing the two gives reasons in words."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch

Family = Literal["mha", "mla"]
FEATURES = ("window", "softcap", "sinks", "tree_mask", "wide_tree_mask", "fp8_kv")
FP8 = torch.float8_e4m3fn
HALF = (torch.float16, torch.bfloat16)
FLOATS = (*HALF, torch.float32)


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
        short_requests: whether a request with fewer keys than rows is served as the contract says, its first rows seeing no
            key, whatever lies behind its last key. Where it is not, that request's rows may be NaN, and no other's. Lengths
            are data, so no call is refused for them. A request without keys is always served.
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
    short_requests: bool = True
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

    def serves_short_requests(self, request: AttentionRequest) -> bool:
        """Whether a set of limits that admits ``request`` also declares ``short_requests``."""
        sets = (self, *self.also)
        admit = [limits for limits in sets if not (limits._own_device_reasons(request) or limits._own_reasons(request))]
        return any(limits.short_requests for limits in admit)

    def device_reasons(self, request: AttentionRequest) -> list[str]:
        """Why the device alone rules every set of limits out; empty when one set admits it."""
        sets = (self, *self.also)
        reasons = [limits._own_device_reasons(request) for limits in sets]
        if not all(reasons):
            return []
        if not self.also or request.device_type not in self.device_types or request.compute_capability is None:
            return reasons[0]
        allowed = dict.fromkeys(pair for limits in sets for pair in limits.compute_capabilities or ())
        return [f"compute capability {_dotted(request.compute_capability)} (it runs on {join(map(_dotted, allowed))})"]

    def _own_reasons(self, request: AttentionRequest) -> list[str]:
        reasons = [*self._dtype_reasons(request), *self._shape_reasons(request)]
        if request.layout not in self.layouts:
            reasons.append(f"{request.layout} layout (it takes {join(self.layouts)})")
        missing = [feature for feature in request.features if feature not in self.features]
        if missing:
            reasons.append(f"{join(missing)} (it has {join(self.features) or 'no optional feature'})")
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
        return [f"package {join(absent)} is not installed{how}"]

    def _own_device_reasons(self, request: AttentionRequest) -> list[str]:
        if request.device_type in self.interpreted_on:
            if os.environ.get("TRITON_INTERPRET") == "1":
                return []
            return [f"device type {request.device_type} (only under Triton's interpreter, TRITON_INTERPRET=1)"]
        if request.device_type not in self.device_types:
            return [f"device type {request.device_type} (it runs on {join(self.device_types)})"]
        capability = request.compute_capability
        if capability is None or request.device_type != "cuda":
            return []
        if self.min_compute_capability is not None and capability < self.min_compute_capability:
            return [f"compute capability {_dotted(capability)} (it needs {_dotted(self.min_compute_capability)} or later)"]
        allowed = self.compute_capabilities
        if allowed is not None and not any(capability[0] == a and b in (-1, capability[1]) for a, b in allowed):
            return [f"compute capability {_dotted(capability)} (it runs on {join(map(_dotted, allowed))})"]
        return []

    def _dtype_reasons(self, request: AttentionRequest) -> list[str]:
        reasons = []
        if self.q_dtypes is not None and request.q_dtype not in self.q_dtypes:
            reasons.append(f"query dtype {_short(request.q_dtype)} (it takes {join(map(_short, self.q_dtypes))})")
        if self.kv_dtypes is not None and request.kv_dtype not in self.kv_dtypes:
            reasons.append(f"cache dtype {_short(request.kv_dtype)} (it takes {join(map(_short, self.kv_dtypes))})")
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
                reasons.append(f"head dim {asked} (it takes {join(_dims(*pair) for pair in pairs)})")
        if self.page_sizes is not None and request.page_size not in self.page_sizes:
            reasons.append(f"page size {request.page_size} (it takes {join(self.page_sizes)})")
        if self.max_query_len is not None and request.max_query_len > self.max_query_len:
            reasons.append(f"{request.max_query_len} query rows per request (it takes up to {self.max_query_len})")
        group = request.num_heads // max(request.num_kv_heads, 1)
        if self.group_sizes is not None and group not in self.group_sizes:
            reasons.append(f"{group} query heads per KV head (it takes {join(self.group_sizes)})")
        return reasons


def join(items: Iterable[object]) -> str:
    """A list in a sentence."""
    return ", ".join(str(item) for item in items)


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.x" if capability[1] < 0 else f"{capability[0]}.{capability[1]}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dims(head_dim: int, value_dim: int) -> str:
    return str(head_dim) if head_dim == value_dim else f"{head_dim}/{value_dim}"
