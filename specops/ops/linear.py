"""Projections with what stands around them: norm before, gate, residual or rotation and cache write behind.

At the few rows of a decode step a product takes about as long as a launch, so on a GPU these ops do in one launch what a
decoder layer otherwise does in three to five (:mod:`specops.ops.triton_linear`). Anywhere else, and at many rows, they are
the plain torch calls below, which are also what to read for their meaning. Nothing about them is speculative; they are here
because a round's time at batch 1 is the number of its launches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specops.ops import contracts
from specops.ops.store_kv import check_slots

GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def rms_norm_linear(
    x: Tensor,
    weight: Tensor,
    *,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_offset: float = 0.0,
    bias: Tensor | None = None,
    gate: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """``norm(x) @ weight.T + bias``, gated, plus a residual.

    Args:
        x: ``[T, K]``.
        weight: ``[N, K]``; with a gate ``[2 * N, K]``, the gate's rows, then the up projection's. The fused launch begins to
            read it while the launch before still runs, so that one must not be what writes it.
        norm_weight: ``[K]``; x is normed to ``x / rms(x) * (norm_weight + norm_offset)``. No norm when not given.
        norm_eps: added to the mean square.
        bias: ``[N]``, or ``[2 * N]`` with a gate.
        gate: ``"silu"``, ``"gelu"`` or ``"gelu_pytorch_tanh"``: the result is ``gate(first half) * second half``.
        residual: ``[T, N]``, added last.

    Returns:
        ``[T, N]`` in x's dtype.

    Raises:
        ValueError, TypeError: shapes, dtypes or a gate that do not fit; says what was given and what is needed.
    """
    if gate is not None and gate not in GATES:
        raise ValueError(f"gate must be one of {', '.join(GATES)}, got {gate!r}")
    _check_product(x, weight, norm_weight, bias)
    if gate is not None and weight.shape[0] % 2:
        raise ValueError(f"with a gate, weight must have an even number of rows, got {tuple(weight.shape)}")
    num_columns = weight.shape[0] // (1 if gate is None else 2)
    if residual is not None and (residual.shape != (x.shape[0], num_columns) or residual.dtype != x.dtype):
        raise ValueError(
            f"residual must be [{x.shape[0]}, {num_columns}] {x.dtype}, got {tuple(residual.shape)} {residual.dtype}"
        )
    result: Tensor = torch.ops.specops.rms_norm_linear(x, weight, norm_weight, norm_eps, norm_offset, bias, gate, residual)
    return result


def project_qkv(
    k_cache: Tensor,
    v_cache: Tensor,
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    *,
    num_heads: int,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_offset: float = 0.0,
    bias: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Norm, project to q, k and v, rotate q and k, write k and v into the cache, return q.

    Args:
        k_cache, v_cache: ``[P, S, Hkv, D]``, any strides with a unit last one; mutated.
        x: ``[T, K]``.
        weight: ``[(num_heads + 2 * Hkv) * D, K]``: rows of q, then k, then v; read early, as in :func:`rms_norm_linear`.
        cos, sin: ``[T, 1, D / 2]``; element ``i`` of a head pairs with ``i + D / 2`` (RoFormer, rotate-half form).
        slots: ``[T]`` int32 or int64, ``page * S + offset``; a negative slot writes nothing.
        num_heads: query heads.
        norm_weight, norm_eps, norm_offset: as for :func:`rms_norm_linear`.
        bias: ``[(num_heads + 2 * Hkv) * D]``.
        k_scale, v_scale: one-element float32 tensors for an fp8 cache, as for :func:`specops.ops.store_kv`.

    Returns:
        q, rotated: ``[T, num_heads, D]`` in x's dtype.

    Raises:
        ValueError, TypeError: shapes or dtypes that do not fit.
    """
    if k_cache.dim() != 4 or v_cache.shape != k_cache.shape:
        raise ValueError(
            f"k_cache and v_cache must both be [P, S, Hkv, D], got {tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
        )
    num_kv_heads, dim = k_cache.shape[2:]
    _check_product(x, weight, norm_weight, bias)
    rows = (num_heads + 2 * num_kv_heads) * dim
    if weight.shape[0] != rows:
        raise ValueError(f"{num_heads} q heads and {num_kv_heads} kv heads of {dim} need {rows} rows, got {weight.shape[0]}")
    if dim % 2 or cos.shape != (x.shape[0], 1, dim // 2) or sin.shape != cos.shape:
        raise ValueError(f"cos and sin must be [{x.shape[0]}, 1, {dim // 2}], got {tuple(cos.shape)} and {tuple(sin.shape)}")
    check_slots(slots, x.shape[0])
    result: Tensor = torch.ops.specops.project_qkv(
        k_cache, v_cache, x, weight, cos, sin, slots, num_heads, norm_weight, norm_eps, norm_offset, bias, k_scale, v_scale
    )
    return result


def _check_product(x: Tensor, weight: Tensor, norm_weight: Tensor | None, bias: Tensor | None) -> None:
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"x must be [T, K] and weight [N, K], got {tuple(x.shape)} and {tuple(weight.shape)}")
    if x.dtype != weight.dtype:
        raise TypeError(f"x is {x.dtype} and weight {weight.dtype}; they must be equal")
    if norm_weight is not None and norm_weight.shape != (x.shape[1],):
        raise ValueError(f"norm_weight must be [{x.shape[1]}], got {tuple(norm_weight.shape)}")
    if bias is not None and bias.shape != (weight.shape[0],):
        raise ValueError(f"bias must be [{weight.shape[0]}], got {tuple(bias.shape)}")


def _normed(x: Tensor, weight: Tensor | None, eps: float, offset: float) -> Tensor:
    if weight is None:
        return x
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * (weight.float() + offset)).to(x.dtype)


def _rms_norm_linear(
    x: Tensor,
    weight: Tensor,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_offset: float = 0.0,
    bias: Tensor | None = None,
    gate: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    out = F.linear(_normed(x, norm_weight, norm_eps, norm_offset), weight, bias)
    if gate is not None:
        first, second = out.chunk(2, dim=1)
        out = GATES[gate](first) * second
    return out if residual is None else out + residual


def _project_qkv(
    k_cache: Tensor,
    v_cache: Tensor,
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    num_heads: int,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_offset: float = 0.0,
    bias: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    num_kv_heads, dim = k_cache.shape[2:]
    heads = F.linear(_normed(x, norm_weight, norm_eps, norm_offset), weight, bias).view(x.shape[0], -1, dim)
    rotated, v = heads[:, : num_heads + num_kv_heads].float(), heads[:, num_heads + num_kv_heads :]
    first, second = rotated.chunk(2, dim=2)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=2).to(x.dtype)
    torch.ops.specops.store_kv(k_cache, v_cache, rotated[:, num_heads:], v, slots, k_scale, v_scale)
    return rotated[:, :num_heads].contiguous()


def _few_rows(place: int, kernels: Any, *args: Any) -> bool:
    """Whether x, the argument at ``place``, has no more rows than the fused kernels are for."""
    return bool(args[place].shape[0] <= kernels.MAX_ROWS)


for _name, _schema, _fake, _plain, _rows_argument in (
    ("rms_norm_linear", contracts.RMS_NORM_LINEAR_SCHEMA, contracts.fake_rms_norm_linear, _rms_norm_linear, 0),
    ("project_qkv", contracts.PROJECT_QKV_SCHEMA, contracts.fake_project_qkv, _project_qkv, 2),
):
    _cuda_kernel = contracts.with_triton(_plain, "triton_linear", _name, functools.partial(_few_rows, _rows_argument))
    contracts.define(_name, _schema, _fake, {"CompositeExplicitAutograd": _plain, "CUDA": _cuda_kernel})
