"""What this machine can run: every backend with its limits, and the reason where it can't."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from specops.ops.backends import AUTO_ORDER, AttentionRequest, Backend, backends, compute_capability, device_kind


@dataclass(frozen=True)
class BackendInfo:
    """One backend on one device.

    Attributes:
        name: as passed to ``backend=``.
        family: ``"mha"`` or ``"mla"``.
        op: the torch op behind it.
        available: whether the device and the installed packages suffice.
        reason: why not; None when available.
        auto: whether ``backend="auto"`` may choose it on this device.
        source: whose kernel runs.
        capabilities: its limits; None where it has none.
    """

    name: str
    family: str
    op: str
    available: bool
    reason: str | None
    auto: bool
    source: str
    capabilities: dict[str, Any]


def inventory(device: torch.device | str | None = None) -> list[BackendInfo]:
    """Every registered backend on ``device``; on the first GPU, or the CPU where there is none, when not given."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    return [_info(backend, device) for backend in backends()]


def _info(backend: Backend, device: torch.device) -> BackendInfo:
    limits = backend.capabilities
    reasons = [*limits.device_reasons(_any_request(backend, device)), *limits.missing_packages()]
    return BackendInfo(
        name=backend.name,
        family=backend.family,
        op=f"specops::{backend.op_name}",
        available=not reasons,
        reason="; ".join(reasons) or None,
        auto=backend.name in AUTO_ORDER.get(device_kind(device), ()),
        source=backend.source,
        capabilities={name: _plain(value) for name, value in asdict(limits).items()},
    )


def _any_request(backend: Backend, device: torch.device) -> AttentionRequest:
    """A request of which only the device matters."""
    kind, capability = device_kind(device), compute_capability(device)
    half = torch.bfloat16
    return AttentionRequest(backend.family, kind, capability, half, half, 1, 1, 64, 64, 16, "uniform", 1)


def _plain(value: Any) -> Any:
    """``value`` as JSON can hold it."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, (tuple, list, frozenset)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(_plain(key)): _plain(item) for key, item in value.items()}
    return value
