"""Fused projections against float64, as plain torch and through Triton (interpreted, or compiled where there is a GPU).

TRITON_INTERPRET=1 python -m pytest -q tests/ops/test_linear.py
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import pytest
from torch import Tensor

from specops import ops
from specops.ops import linear as plain
from specops.ops import triton_linear
from specops.ops.triton_linear import Tile

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP8 = torch.float8_e4m3fn
# One rounding of the inputs' products and one of the result, both in the dtype's relative precision.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def random(*shape: int, dtype: torch.dtype, scale: float = 1.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(shape, generator=generator) * scale).to(dtype).to(DEVICE)


def exact_linear(
    x: Tensor,
    weight: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    offset: float,
    bias: Tensor | None,
    gate: str | None,
    residual: Tensor | None,
) -> Tensor:
    """The definition, in float64."""
    x = x.double()
    if norm_weight is not None:
        x = x / (x.square().mean(1, keepdim=True) + eps).sqrt() * (norm_weight.double() + offset)
    out = x @ weight.double().T
    if bias is not None:
        out = out + bias.double()
    if gate is not None:
        first, second = out.chunk(2, dim=1)
        if gate == "silu":
            first = first * torch.sigmoid(first)
        elif gate == "gelu":
            first = first * 0.5 * (1 + torch.erf(first / 2**0.5))
        else:
            first = first * 0.5 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (first + 0.044715 * first**3)))
        out = first * second
    return out if residual is None else out + residual.double()


def forms(name: str) -> list[Any]:
    """The plain form and the fused one, each by its own name."""
    fused = {"linear": triton_linear.rms_norm_linear, "project_qkv": triton_linear.project_qkv}[name]
    spelled = {"linear": plain._rms_norm_linear, "project_qkv": plain._project_qkv}[name]
    return [pytest.param(spelled, id="plain"), pytest.param(fused, id="triton")]


CASES = [
    # rows, K, N, dtype, norm, bias, gate, residual
    (1, 576, 40, torch.bfloat16, True, False, "silu", False),
    (4, 576, 960, torch.float32, True, False, None, False),
    (7, 1536, 24, torch.float16, False, True, None, True),
    (16, 96, 33, torch.float32, True, True, "gelu", True),
    (17, 144, 48, torch.float32, True, False, "gelu_pytorch_tanh", False),
    (33, 200, 70, torch.float32, True, True, "silu", True),
    (70, 64, 80, torch.float32, False, False, None, True),
    (65, 40, 12, torch.bfloat16, True, True, None, True),
    (130, 128, 96, torch.bfloat16, True, False, "silu", False),
    (260, 64, 200, torch.float16, True, True, "silu", True),
    (300, 1100, 40, torch.bfloat16, False, False, None, True),
]


@pytest.mark.parametrize("form", forms("linear"))
@pytest.mark.parametrize(("rows", "width", "columns", "dtype", "norm", "bias", "gate", "residual"), CASES)
def test_linear_is_its_definition(
    form: Callable[..., Tensor],
    rows: int,
    width: int,
    columns: int,
    dtype: torch.dtype,
    norm: bool,
    bias: bool,
    gate: str | None,
    residual: bool,
) -> None:
    wide = columns * (1 if gate is None else 2)
    # A view whose rows are apart, as a slice of a larger tensor is.
    x = random(rows, width + 8, dtype=dtype)[:, :width]
    weight = random(wide, width, dtype=dtype, scale=width**-0.5, seed=1)
    arguments = (
        random(width, dtype=dtype, seed=2) if norm else None,
        1e-5,
        1.0 if norm and bias else 0.0,
        random(wide, dtype=dtype, seed=3) if bias else None,
        gate,
        random(rows, columns, dtype=dtype, seed=4) if residual else None,
    )
    out, wanted = form(x, weight, *arguments), exact_linear(x, weight, *arguments)
    assert (out.shape, out.dtype, out.is_contiguous()) == ((rows, columns), dtype, True)
    error = (out.double() - wanted).abs().max().item() / wanted.abs().max().item()
    assert error < TOLERANCE[dtype]


QKV_CASES = [
    # rows, K, heads, kv heads, D, dtype, cache dtype, norm, bias
    (1, 576, 9, 3, 64, torch.bfloat16, torch.bfloat16, True, False),
    (4, 64, 4, 2, 16, torch.float32, torch.float32, True, True),
    (5, 48, 3, 1, 80, torch.float32, torch.float32, False, True),
    (20, 96, 2, 2, 32, torch.float32, FP8, True, False),
    (70, 32, 2, 1, 16, torch.float32, torch.float32, False, False),
]


@pytest.mark.parametrize("form", forms("project_qkv"))
@pytest.mark.parametrize(("rows", "width", "heads", "kv_heads", "dim", "dtype", "cache_dtype", "norm", "bias"), QKV_CASES)
def test_projection_rotates_and_stores(
    form: Callable[..., Tensor],
    rows: int,
    width: int,
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    norm: bool,
    bias: bool,
) -> None:
    total = (heads + 2 * kv_heads) * dim
    x = random(rows, width, dtype=dtype)
    weight = random(total, width, dtype=dtype, scale=width**-0.5, seed=1)
    norm_weight = random(width, dtype=dtype, seed=2) if norm else None
    bias_row = random(total, dtype=dtype, seed=3) if bias else None
    angles = random(rows, 1, dim // 2, dtype=torch.float32, scale=3.0, seed=4)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    slots = torch.randperm(100, generator=torch.Generator().manual_seed(5))[:rows].to(DEVICE)
    slots = torch.where(torch.arange(rows, device=DEVICE) % 3 == 2, -1, slots)
    scale = torch.tensor([0.25], device=DEVICE) if cache_dtype == FP8 else None
    # K and V side by side in one storage: strides that are not a dense cache's.
    pages = torch.zeros((25, 4, kv_heads, 2 * dim), dtype=cache_dtype, device=DEVICE)
    k_cache, v_cache = pages[..., :dim], pages[..., dim:]
    q = form(k_cache, v_cache, x, weight, cos, sin, slots, heads, norm_weight, 1e-5, 0.0, bias_row, scale, scale)

    wanted = exact_linear(x, weight, norm_weight, 1e-5, 0.0, bias_row, None, None).view(rows, -1, dim)
    first, second = wanted[:, : heads + kv_heads].chunk(2, dim=2)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=2)
    v = wanted[:, heads + kv_heads :]
    largest = wanted.abs().max().item()
    assert (q.shape, q.dtype, q.is_contiguous()) == ((rows, heads, dim), dtype, True)
    assert (q.double() - turned[:, :heads]).abs().max().item() / largest < TOLERANCE[dtype]
    # e4m3 keeps four bits of a number, and the steps below its least normal number are 2**-9.
    relative, absolute = (2**-4, 2**-9 * 0.25) if cache_dtype == FP8 else (0.0, TOLERANCE[dtype] * largest)
    touched = torch.zeros(100, dtype=torch.bool, device=DEVICE)
    for name, cache, rows_wanted in (("k", k_cache, turned[:, heads:]), ("v", v_cache, v)):
        held = cache.float().double().reshape(100, kv_heads, dim) * (1.0 if scale is None else 0.25)
        for row, slot in enumerate(slots.tolist()):
            if slot >= 0:
                touched[slot] = True
                size = rows_wanted[row].abs()
                near = (held[slot] - rows_wanted[row]).abs() <= relative * size + absolute
                if cache_dtype == FP8 and DEVICE == "cpu":
                    # The interpreter loses the carry of what rounds up to a power of two.
                    near |= size.frexp().mantissa > 0.96
                assert bool(near.all()), (name, row)
    assert not pages.float().reshape(100, -1)[~touched].any(), "a slot that no row names was written"


@pytest.mark.parametrize("form", forms("linear"))
def test_a_row_gives_the_same_bits_alone_and_beside_others(form: Callable[..., Tensor]) -> None:
    if form is plain._rms_norm_linear:
        pytest.skip("a library's product may take another order for another number of rows; only the fused form promises it")
    x, weight = random(9, 576, dtype=torch.bfloat16), random(48, 576, dtype=torch.bfloat16, scale=0.05)
    arguments = (random(576, dtype=torch.bfloat16), 1e-5, 0.0, None, "silu", None)
    together = form(x, weight, *arguments)
    for row in range(9):
        assert torch.equal(form(x[row : row + 1], weight, *arguments)[0], together[row])


def test_more_rows_take_larger_tiles_and_what_fits() -> None:
    sizes = [triton_linear.choose_tile(rows, 576, True, 1536) for rows in (32, 64, 128, 256, 512)]
    assert [size[:3] for size in sizes] == [(16, 16, 256), (64, 32, 64), (64, 32, 64), (128, 32, 64), (128, 64, 64)]
    # 100 KiB: four steps of 24 KiB, and the one that is being multiplied.
    assert triton_linear.choose_tile(128, 1536, True, 4096, 100 << 10).num_stages == 5


def test_tiles_of_every_size_agree() -> None:
    x, weight = random(3, 200, dtype=torch.float32), random(32, 200, dtype=torch.float32, scale=0.07)
    wanted = exact_linear(x, weight, None, 1e-5, 0.0, None, None, None)
    sizes = (
        Tile(16, 16, 64, 64, 0, 4, 2, True),
        Tile(16, 32, 64, 128, 64, 2, 2, True),
        Tile(16, 16, 32, 32, 256, 2, 3, True),
        Tile(16, 32, 64, num_warps=4),
        Tile(32, 16, 32, num_warps=2),
        Tile(32, 16, 64, 64, 128, 4, 4, True),
    )
    for tile in sizes:
        out = triton_linear.rms_norm_linear(x, weight, None, 1e-5, 0.0, None, None, None, tile)
        assert (out.double() - wanted).abs().max().item() < 3e-6


@pytest.mark.parametrize("optional", [(), ("norm_weight",), ("bias", "gate"), ("norm_weight", "bias", "gate", "residual")])
def test_opcheck_of_linear(optional: tuple[str, ...]) -> None:
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    choice = {
        "norm_weight": random(64, dtype=dtype),
        "bias": random(48, dtype=dtype),
        "gate": "silu",
        "residual": random(5, 24 if "gate" in optional else 48, dtype=dtype),
    }
    names = {name: choice[name] for name in optional}
    torch.library.opcheck(
        torch.ops.specops.rms_norm_linear, (random(5, 64, dtype=dtype), random(48, 64, dtype=dtype)), names
    )


@pytest.mark.parametrize("optional", [False, True])
def test_opcheck_of_project_qkv(optional: bool) -> None:
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    k_cache, v_cache = (torch.zeros((6, 4, 2, 16), dtype=dtype, device=DEVICE) for _ in range(2))
    cos, sin = (random(5, 1, 8, dtype=dtype, seed=seed) for seed in range(2))
    slots = torch.tensor([4, 9, -1, 11, 12], device=DEVICE)
    weight = random(8 * 16, 64, dtype=dtype)
    names: dict[str, Any] = {}
    if optional:
        scale = torch.ones(1, device=DEVICE)
        names = {"norm_weight": random(64, dtype=dtype), "bias": random(128, dtype=dtype)}
        names |= {"k_scale": scale, "v_scale": scale}
    arguments = (k_cache, v_cache, random(5, 64, dtype=dtype), weight, cos, sin, slots, 4)
    torch.library.opcheck(torch.ops.specops.project_qkv, arguments, names)


def test_wrong_calls_say_what_is_needed() -> None:
    x, weight = random(2, 8, dtype=torch.float32), random(6, 8, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"gate must be one of silu, gelu, gelu_pytorch_tanh, got 'relu'"):
        ops.rms_norm_linear(x, weight, gate="relu")
    with pytest.raises(ValueError, match=r"x must be \[T, K\] and weight \[N, K\], got \(2, 8\) and \(6, 7\)"):
        ops.rms_norm_linear(x, weight[:, :7])
    with pytest.raises(TypeError, match=r"x is torch.float32 and weight torch.float16; they must be equal"):
        ops.rms_norm_linear(x, weight.half())
    with pytest.raises(ValueError, match=r"norm_weight must be \[8\], got \(2, 8\)"):
        ops.rms_norm_linear(x, weight, norm_weight=x)
    with pytest.raises(ValueError, match=r"bias must be \[6\], got \(8,\)"):
        ops.rms_norm_linear(x, weight, bias=x[0])
    with pytest.raises(ValueError, match=r"even number of rows, got \(5, 8\)"):
        ops.rms_norm_linear(x, weight[:5], gate="silu")
    with pytest.raises(ValueError, match=r"residual must be \[2, 6\] torch.float32, got \(2, 8\) torch.float32"):
        ops.rms_norm_linear(x, weight, residual=x)
    cache = torch.zeros((2, 4, 1, 4), device=DEVICE)
    table = torch.zeros((2, 1, 2), device=DEVICE)
    slots = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match=r"2 q heads and 1 kv heads of 4 need 16 rows, got 6"):
        ops.project_qkv(cache, cache, x, weight, table, table, slots, num_heads=2)
    weight = random(16, 8, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"cos and sin must be \[2, 1, 2\]"):
        ops.project_qkv(cache, cache, x, weight, table[:1], table, slots, num_heads=2)
    with pytest.raises(ValueError, match=r"slots must be \[2\], got \(1,\)"):
        ops.project_qkv(cache, cache, x, weight, table, table, slots[:1], num_heads=2)
    with pytest.raises(ValueError, match=r"must both be \[P, S, Hkv, D\]"):
        ops.project_qkv(cache, cache[..., :2], x, weight, table, table, slots, num_heads=2)
