"""Cross-entropy against the target's distribution and its choice, with the gradient made in the same pass.

A batch has as many logits as rows times draft vocabulary, gigabytes in float32, and torch's own operations pass over them
some twenty times, forth and back. The kernel reads logits and probabilities once and writes the gradient. The formula is
:func:`distill_loss_reference`, which runs where there is no Triton; a test holds one to the other.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from specops.ops.contracts import has_triton


def distill_loss(z: Tensor, p: Tensor, label: Tensor, weight: Tensor, hard_weight: float) -> tuple[Tensor, Tensor]:
    """``sum_r weight_r ((1 - h) soft_r + h hard_r)`` over rows, and which rows guess right.

    ``soft = -sum_v p(v) log q(v)`` with ``q = softmax(z)``, where ``p`` need not add up to one;
    ``hard = -log q(label)``, nothing where the label is -1.

    Args:
        z: ``[R, V]`` logits.
        p: ``[R, V]`` probabilities of the target.
        label: ``[R]`` int64, -1 where the draft has no such token.
        weight: ``[R]`` float32; a row of weight 0 is not looked at.
        hard_weight: ``h``.

    Returns:
        loss: float32 scalar; its gradient reaches ``z`` alone.
        right: ``[R]`` bool, whether the largest logit is the label's; False for rows of weight 0.
    """
    if z.is_cuda and has_triton():
        loss, right = _Fused.apply(z, p, label, weight, hard_weight)  # type: ignore[no-untyped-call]
        return loss, right
    return distill_loss_reference(z, p, label, weight, hard_weight)


def distill_loss_reference(z: Tensor, p: Tensor, label: Tensor, weight: Tensor, hard_weight: float) -> tuple[Tensor, Tensor]:
    """:func:`distill_loss` as the formula says."""
    counted = weight != 0
    # So that whatever such a row holds reaches neither the loss nor a gradient.
    wide, p = (torch.where(counted[:, None], each.float(), 0.0) for each in (z, p))
    log_sum = wide.logsumexp(dim=-1)
    soft = p.sum(dim=-1) * log_sum - (p * wide).sum(dim=-1)
    hard = (log_sum - wide.gather(-1, label.clamp(min=0)[:, None]).squeeze(-1)) * (label >= 0)
    each = (1 - hard_weight) * soft + hard_weight * hard
    with torch.no_grad():
        right = (wide.argmax(dim=-1) == label) & counted
    return (each * weight).sum(), right


class _Fused(torch.autograd.Function):
    """Loss and gradient by one launch in the forward; the backward scales what is there."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, p: Tensor, label: Tensor, weight: Tensor, hard_weight: float) -> tuple[Tensor, Tensor]:
        z, p = z.contiguous(), p.contiguous()
        rows = z.shape[0]
        losses = torch.empty(rows, dtype=torch.float32, device=z.device)
        right = torch.empty(rows, dtype=torch.bool, device=z.device)
        grad = torch.empty_like(z)
        launch_distill(z, p, label.contiguous(), weight.contiguous(), losses, right, grad, hard_weight)
        ctx.save_for_backward(grad)
        ctx.mark_non_differentiable(right)
        return losses.sum(), right

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        return grad * grads[0], None, None, None, None


def launch_distill(
    z: Tensor, p: Tensor, label: Tensor, weight: Tensor, losses: Tensor, right: Tensor, grad: Tensor, hard_weight: float
) -> None:
    """One program a row, which stays in registers: a vocabulary of 8192 is 64 values a thread."""
    rows, vocab = z.shape
    block = 1 << (vocab - 1).bit_length()
    _kernel()[(rows,)](
        z, p, label, weight, losses, right, grad, vocab, hard_weight, BLOCK=block, num_warps=8 if block >= 4096 else 4
    )


@functools.cache
def _kernel() -> Any:
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def _distill(  # type: ignore[no-untyped-def]
        z_ptr, p_ptr, label_ptr, weight_ptr, loss_ptr, right_ptr, grad_ptr, vocab, hard_weight, BLOCK: tl.constexpr
    ):  # fmt: skip
        """Row by row: ``loss = weight ((1 - h) (mass lse - p.z) + h (lse - z[label]))`` with ``mass = sum p``, and
        ``grad = weight ((1 - h) (mass q - p) + h (q - onehot))``, each of the terms with h only where there is a label."""
        row = tl.program_id(0).to(tl.int64)
        at = tl.arange(0, BLOCK)
        inside = at < vocab
        weight = tl.load(weight_ptr + row)
        base = row * vocab
        if weight == 0.0:
            tl.store(loss_ptr + row, 0.0)
            tl.store(right_ptr + row, False)
            tl.store(grad_ptr + base + at, tl.zeros((BLOCK,), grad_ptr.dtype.element_ty), mask=inside)
        else:
            z = tl.load(z_ptr + base + at, mask=inside, other=float("-inf")).to(tl.float32)
            p = tl.load(p_ptr + base + at, mask=inside, other=0.0).to(tl.float32)
            label = tl.load(label_ptr + row)
            top = tl.max(z, axis=0)
            shifted = tl.exp(z - top)
            total = tl.sum(shifted, axis=0)
            log_sum = top + tl.log(total)
            known = (label >= 0).to(tl.float32)
            is_label = (at == label) & inside
            chosen = tl.sum(tl.where(is_label, z, 0.0), axis=0)
            mass = tl.sum(p, axis=0)
            soft = mass * log_sum - tl.sum(tl.where(inside, p * z, 0.0), axis=0)
            hard = (log_sum - chosen) * known
            tl.store(loss_ptr + row, weight * ((1 - hard_weight) * soft + hard_weight * hard))
            # The first of equal maxima, as argmax takes it.
            best = tl.min(tl.where((z == top) & inside, at, BLOCK), axis=0)
            tl.store(right_ptr + row, best == label)
            q = shifted / total
            slope = (1 - hard_weight) * (mass * q - p) + hard_weight * known * (q - is_label.to(tl.float32))
            tl.store(grad_ptr + base + at, (weight * slope).to(grad_ptr.dtype.element_ty), mask=inside)

    return _distill
