"""The backend under test, the cases that fit what it declares, and one observed call.

What a backend declares is what is checked: a case whose page size, head dims, group size or dtype it does not take is
changed to the nearest it takes; a case that needs a feature or a layout it does not have, or a request with fewer keys than
rows, is left out, with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specops.ops.backends import FP8, AttentionRequest, Backend, Capabilities, compute_capability, device_kind
from specops.testing.cases import AttentionCase, make_mha_case, make_mla_case
from specops.testing.oracle import assert_close_to_oracle
from specops.testing.report import one_line

# Sizes that every case gives, so that they can be fitted and made smaller.
MHA_SIZES: dict[str, Any] = {
    "seq_lens": (9, 13),
    "query_lens": 1,
    "page_size": 4,
    "num_heads": 8,
    "num_kv_heads": 2,
    "head_dim": 64,
}
MLA_SIZES: dict[str, Any] = {
    "seq_lens": (9, 13),
    "query_lens": 1,
    "page_size": 4,
    "num_heads": 4,
    "latent_dim": 64,
    "rope_dim": 16,
}

# The argument of a case that asks for each feature.
FEATURE_ARGUMENTS = {
    "window": "window",
    "softcap": "softcap",
    "sinks": "sinks",
    "tree_mask": "tree_width",
    "fp8_kv": "fp8",
}
SHORT_REQUESTS = "requests with fewer keys than rows are not declared"


@dataclass(frozen=True)
class Subject:
    """A backend of one family on one device."""

    backend: Backend
    device: torch.device

    @property
    def family(self) -> str:
        return self.backend.family

    @property
    def name(self) -> str:
        return self.backend.name

    def make(self, arguments: Mapping[str, Any]) -> AttentionCase:
        """The case on the subject's device."""
        if self.family == "mha":
            return make_mha_case(**{"device": self.device, **arguments})
        return make_mla_case(**{"device": self.device, **arguments})

    def fit(self, arguments: Mapping[str, Any]) -> tuple[dict[str, Any] | None, list[str]]:
        """Arguments with all sizes, changed to what the backend takes; or None and the reasons why it can't take them."""
        whole = {**(MHA_SIZES if self.family == "mha" else MLA_SIZES), **arguments}
        capabilities, reasons, too_short = self.backend.capabilities, [""], False
        for limits in (capabilities, *capabilities.also):
            fitted = _fitted(limits, self.family, whole)
            request = _request(self.family, self.device, fitted)
            reasons = capabilities.why_not(request)
            if not reasons:
                if not _has_short_requests(fitted) or capabilities.serves_short_requests(request):
                    return fitted, []
                too_short = True
                continue
            declared = {feature for limits in (capabilities, *capabilities.also) for feature in limits.features}
            missing = [f"{feature} is not declared" for feature in request.features if feature not in declared]
            layouts = {layout for limits in (capabilities, *capabilities.also) for layout in limits.layouts}
            if request.layout not in layouts:
                missing.append(f"{request.layout} layout is not declared")
            reasons = missing or reasons
        return None, [SHORT_REQUESTS] if too_short else reasons

    def declared_lens(self, arguments: Mapping[str, Any]) -> tuple[int, ...]:
        """The ``seq_lens`` of a case; for a backend that does not declare short requests, at least a key a row."""
        if self.fit(arguments)[1] != [SHORT_REQUESTS]:
            return tuple(arguments["seq_lens"])
        lens = zip(arguments["seq_lens"], _rows(arguments), strict=True)
        return tuple(max(length, rows) if length else 0 for length, rows in lens)

    def within(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Random arguments without the features, the layout and the lengths that the backend does not declare."""
        capabilities, kept = self.backend.capabilities, dict(arguments)
        for feature, name in FEATURE_ARGUMENTS.items():
            if feature not in capabilities.features:
                kept.pop(name, None)
        if not isinstance(kept["query_lens"], int) and "packed" not in capabilities.layouts:
            kept["query_lens"] = max(1, *kept["query_lens"], 1)
        if isinstance(kept["query_lens"], int) and "uniform" not in capabilities.layouts:
            kept["query_lens"] = tuple(kept["query_lens"] for _ in kept["seq_lens"])
            kept.pop("tree_width", None)
        if "tree_width" in kept and "wide_tree_mask" not in capabilities.features:
            kept["tree_width"] = kept["query_lens"]
        kept["seq_lens"] = self.declared_lens(kept)
        return kept

    def bound(self, dtype: torch.dtype) -> torch.dtype | str:
        """Which error bound holds. GPUs may multiply float32 in TF32."""
        return "tf32" if dtype == torch.float32 and self.device.type == "cuda" else dtype

    def observe(self, case: AttentionCase) -> tuple[Tensor | None, str | None]:
        """Result of one call and what is wrong with the call itself, whatever its values are.

        Wrong are: an exception, a result of another type, shape, dtype, device or stride, one that shares memory with an
        argument, and an argument that was written to.
        """
        given = {**case.tensors, **{k: v for k, v in case.options.items() if isinstance(v, Tensor)}}
        if case.layout.query_start is not None:
            given["query_start"] = case.layout.query_start
        storages = {name: _storage_bytes(tensor) for name, tensor in given.items()}
        before = {name: memory.clone() for name, memory in storages.items()}
        try:
            out = case.run(self.name)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        except Exception as error:
            return None, f"the call raised {one_line(error)}"
        problem = _wrong_form(case, out)
        for name, memory in storages.items():
            if problem is None and not torch.equal(memory, before[name]):
                problem = f"the call wrote to its argument {name}"
            if problem is None and out.untyped_storage().data_ptr() == memory.data_ptr() and out.numel():
                problem = f"the result shares memory with the argument {name}"
        return out, problem

    def compare(self, out: Tensor, expected: Tensor) -> str | None:
        """How far ``out`` is from the oracle, in words; None where it is close enough."""
        try:
            assert_close_to_oracle(out, expected, self.bound(out.dtype))
        except AssertionError as error:
            return str(error)
        return None


def _wrong_form(case: AttentionCase, out: Any) -> str | None:
    if not isinstance(out, Tensor):
        return f"the call returned {type(out).__name__}, not a tensor"
    queries = case.args()[0]
    value_dim = case.tensors["v_cache"].shape[3] if case.family == "mha" else queries.shape[2]
    shape = (queries.shape[0], queries.shape[1], value_dim)
    for what, got, wanted in (
        ("shape", tuple(out.shape), shape),
        ("dtype", out.dtype, queries.dtype),
        ("device", out.device, queries.device),
        ("strides", out.stride(), torch.empty(shape, device="meta").stride()),
    ):
        if got != wanted and not (what == "strides" and out.numel() == 0):
            return f"the result has {what} {got}, wanted is {wanted}"
    return None


def _storage_bytes(tensor: Tensor) -> Tensor:
    """All memory behind a view, as bytes; writes beside the view are seen too."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())  # type: ignore[call-overload,no-any-return]


def _fitted(limits: Capabilities, family: str, arguments: dict[str, Any]) -> dict[str, Any]:
    fitted = dict(arguments)
    dtype = fitted.get("dtype", torch.float32)
    if limits.q_dtypes is not None and dtype not in limits.q_dtypes:
        # bfloat16 where it is taken: it is what most models run in.
        fitted["dtype"] = torch.bfloat16 if torch.bfloat16 in limits.q_dtypes else limits.q_dtypes[0]
    if limits.page_sizes is not None and fitted["page_size"] not in limits.page_sizes:
        fitted["page_size"] = _nearest(fitted["page_size"], limits.page_sizes)
    kv_heads = fitted.get("num_kv_heads", 1)
    if limits.group_sizes is not None and fitted["num_heads"] // kv_heads not in limits.group_sizes:
        fitted["num_heads"] = kv_heads * _nearest(fitted["num_heads"] // kv_heads, limits.group_sizes)
    if limits.head_dims is None:
        return fitted
    pairs = [dim if isinstance(dim, tuple) else (dim, dim) for dim in limits.head_dims]
    if family == "mla":
        if (fitted["latent_dim"] + fitted["rope_dim"], fitted["latent_dim"]) not in pairs:
            fitted["latent_dim"], fitted["rope_dim"] = pairs[0][1], pairs[0][0] - pairs[0][1]
    elif "value_dim" not in fitted and (fitted["head_dim"], fitted["head_dim"]) not in pairs:
        equal = [key for key, value in pairs if key == value]
        if equal:
            fitted["head_dim"] = _nearest(fitted["head_dim"], equal)
        else:
            fitted["head_dim"], fitted["value_dim"] = pairs[0]
    return fitted


def _rows(arguments: Mapping[str, Any]) -> tuple[int, ...]:
    """Rows of each request."""
    query_lens = arguments["query_lens"]
    return (query_lens,) * len(arguments["seq_lens"]) if isinstance(query_lens, int) else tuple(query_lens)


def _has_short_requests(arguments: Mapping[str, Any]) -> bool:
    """Whether a request has fewer keys than rows, and more than none."""
    lens = zip(arguments["seq_lens"], _rows(arguments), strict=True)
    return any(0 < length < rows for length, rows in lens)


def _nearest(wanted: int, allowed: Any) -> int:
    """The least allowed size that is not below ``wanted``, else the largest."""
    return int(min((size for size in allowed if size >= wanted), default=max(allowed)))


def _request(family: str, device: torch.device, fitted: Mapping[str, Any]) -> AttentionRequest:
    query_lens, dtype = fitted["query_lens"], fitted.get("dtype", torch.float32)
    uniform = isinstance(query_lens, int)
    widest = query_lens if uniform else max(1, *query_lens, 1) + fitted.get("slack", 0)
    features = [name for name in ("window", "softcap") if fitted.get(name) is not None]
    if fitted.get("sinks"):
        features.append("sinks")
    if fitted.get("tree_width") is not None:
        features.append("tree_mask")
        if fitted["tree_width"] != widest:
            features.append("wide_tree_mask")
    if fitted.get("fp8"):
        features.append("fp8_kv")
    if family == "mha":
        head_dim = fitted["head_dim"]
        value_dim = fitted.get("value_dim") or head_dim
    else:
        head_dim, value_dim = fitted["latent_dim"] + fitted["rope_dim"], fitted["latent_dim"]
    return AttentionRequest(
        "mha" if family == "mha" else "mla",
        device_kind(device),
        compute_capability(device),
        dtype,
        FP8 if fitted.get("fp8") else dtype,
        fitted["num_heads"],
        fitted.get("num_kv_heads", 1),
        head_dim,
        value_dim,
        fitted["page_size"],
        "uniform" if uniform else "packed",
        widest,
        tuple(features),
    )
