"""Where a layer's products take their neighbours along: norm before, gate or residual behind, in one launch on a GPU.

Layers hand the norm and the residual to the module that multiplies, and both forms below mean the same. The fused one is
``specops.ops.rms_norm_linear`` and ``project_qkv``: at the few rows of a decode step on a GPU it is a third of the launches.
The plain one is everything else: CPUs, float32, wide layers, training, layers of a kind of their own.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from specops import ops
from specops.ops.contracts import has_triton

FUSED_DTYPES = (torch.float16, torch.bfloat16)
# Elements of a weight above which a product outweighs the launches around it. On an H200 a decode step of SmolLM2 (at most
# 1.8M) went from 1199 to 470 us; a step with one layer of hidden 4096 from 236 to 257 us at 4 rows, from 271 to 483 at 128.
FUSED_WEIGHT = 4 * 2**20
# Looked up here, since the compiler traces what can_fuse does.
HAS_TRITON = has_triton()


class RMSNorm(nn.Module):
    """``x / rms(x) * (weight + offset)`` over the last dim, in float32 inside.

    Args:
        shape: shape of ``weight``; its last entry is the normalised dim.
        eps: added to the mean square.
        offset: 1.0 for Gemma, whose checkpoints store ``weight - 1``.
    """

    def __init__(self, shape: int | tuple[int, ...], eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.eps, self.offset = eps, offset
        self.weight = nn.Parameter(torch.full((shape,) if isinstance(shape, int) else shape, 1.0 - offset))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if self.offset:
            return (normed * (self.weight.float() + self.offset)).to(x.dtype)
        return normed.to(x.dtype) * self.weight


def on_nvidia(x: Tensor) -> bool:
    """Whether ``x`` is on an NVIDIA GPU."""
    return x.is_cuda and torch.version.hip is None


def can_fuse(x: Tensor, *linears: nn.Module) -> bool:
    """Whether the fused form is for ``x``: ``[T, K]`` in 16 bits on an NVIDIA GPU, plain small layers, no gradients."""
    if not on_nvidia(x) or x.dtype not in FUSED_DTYPES or x.dim() != 2 or torch.is_grad_enabled():
        return False
    plain = all(
        type(linear) is nn.Linear and linear.weight.dtype == x.dtype and linear.weight.numel() <= FUSED_WEIGHT
        for linear in linears
    )
    return plain and HAS_TRITON


def fused_linear(
    x: Tensor, linear: nn.Linear, norm: RMSNorm | None = None, *, gate: str | None = None, residual: Tensor | None = None
) -> Tensor:
    """``linear`` as :func:`specops.ops.rms_norm_linear`; ``x`` ``[T, K]``. :func:`can_fuse` must hold."""
    return ops.rms_norm_linear(
        x,
        linear.weight,
        norm_weight=None if norm is None else norm.weight,
        norm_eps=0.0 if norm is None else norm.eps,
        norm_offset=0.0 if norm is None else norm.offset,
        bias=linear.bias,
        gate=gate,
        residual=residual,
    )


def normed(x: Tensor, norm: RMSNorm | None) -> Tensor:
    """``norm(x)``, or ``x`` without one."""
    return x if norm is None else cast(Tensor, norm(x))


def added(x: Tensor, residual: Tensor | None) -> Tensor:
    """``residual + x``, or ``x`` without one."""
    return x if residual is None else residual + x
