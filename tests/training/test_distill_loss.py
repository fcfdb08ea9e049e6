"""The fused loss kernel against the formula in float64, value and gradient.

pytest tests/training/test_distill_loss.py
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specops.training.distill_loss import distill_loss, launch_distill

pytest.importorskip("triton", reason="the kernel needs Triton")


def oracle(z: Tensor, p: Tensor, label: Tensor, weight: Tensor, hard_weight: float) -> tuple[Tensor, Tensor]:
    """Loss and its gradient in ``z``, row by row in float64."""
    wide = z.double().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for row in range(z.shape[0]):
        if weight[row] == 0:
            continue
        log_q = torch.log_softmax(wide[row], dim=0)
        loss = -(1 - hard_weight) * (p[row].double() * log_q).sum()
        if label[row] >= 0:
            loss = loss - hard_weight * log_q[label[row]]
        total = total + weight[row].double() * loss
    (grad,) = torch.autograd.grad(total, wide)
    return total.detach(), grad


def inputs(rows: int, vocab: int, dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(rows * vocab)
    z = (4 * torch.randn(rows, vocab, generator=generator)).to(dtype)
    p = (0.9 * torch.softmax(3 * torch.randn(rows, vocab, generator=generator), dim=-1)).to(dtype)
    label = torch.randint(-1, vocab, (rows,), generator=generator)
    label[0], label[1] = -1, z[1].argmax()
    weight = torch.rand(rows, generator=generator)
    weight[2] = 0.0
    # What a row of weight 0 holds must not matter.
    z[2], p[2] = float("nan"), float("nan")
    return tuple(each.to(device) for each in (z, p, label, weight))


@pytest.mark.parametrize("vocab", [16, 37, 64])
def test_kernel_gives_the_float64_loss_and_gradient(vocab: int) -> None:
    check_kernel(6, vocab, torch.float32, "cpu", 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [500, 8192])
def test_kernel_gives_the_float64_loss_and_gradient_on_a_gpu(vocab: int, dtype: torch.dtype) -> None:
    check_kernel(64, vocab, dtype, "cuda", 1e-5 if dtype is torch.float32 else 8e-3)


def check_kernel(rows: int, vocab: int, dtype: torch.dtype, device: str, tolerance: float) -> None:
    z, p, label, weight = inputs(rows, vocab, dtype, device)
    losses, right = torch.full((rows,), float("nan"), device=device), torch.ones(rows, dtype=torch.bool, device=device)
    grad = torch.full_like(z, float("nan"))
    launch_distill(z, p, label, weight, losses, right, grad, 0.3)
    loss, wanted = oracle(z.cpu(), p.cpu(), label.cpu(), weight.cpu(), 0.3)
    assert losses.sum().item() == pytest.approx(loss.item(), rel=1e-4)
    assert (grad.cpu().double() - wanted).abs().max() <= tolerance * wanted.abs().max()
    assert right.tolist() == [row != 2 and int(z[row].float().argmax()) == int(label[row]) for row in range(rows)]
    assert right[1]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_loss_and_its_gradient_reach_the_logits(device: str) -> None:
    z, p, label, weight = inputs(6, 37, torch.float32, device)
    z.requires_grad_()
    loss, _ = distill_loss(z, p, label, weight, 0.3)
    torch.autograd.backward(2 * loss)
    value, wanted = oracle(z.detach().cpu(), p.cpu(), label.cpu(), weight.cpu(), 0.3)
    assert loss.item() == pytest.approx(value.item(), rel=1e-5)
    assert z.grad is not None
    assert (z.grad.cpu().double() - 2 * wanted).abs().max() <= 1e-5
