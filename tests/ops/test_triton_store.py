"""Fused store and move kernels against plain indexing, through Triton's interpreter or compiled where there is a GPU.

TRITON_INTERPRET=1 python -m pytest -q tests/ops/test_triton_store.py
"""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import pytest
from torch import Tensor

from specops.ops import triton_store

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP8 = torch.float8_e4m3fn


def bits(tensor: Tensor) -> Tensor:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return tensor.view(kinds[tensor.element_size()])


def rows_for(shape: tuple[int, ...], dtype: torch.dtype, cache_dtype: torch.dtype, scale: float | None) -> Tensor:
    """Random rows, some beyond fp8's range. Where the interpreter runs, which rounds ties otherwise, numbers the cache
    holds exactly."""
    rows = torch.randn(shape, device=DEVICE) * 300
    if DEVICE == "cuda":
        return rows.to(dtype)
    exact = rows.clamp(-448, 448).to(cache_dtype).float() * (scale or 1.0)
    return torch.where(rows.abs() > 448, rows * 1e3, exact).to(dtype) if cache_dtype == FP8 else exact.to(dtype)


def expected_store(cache: Tensor, rows: Tensor, slots: Tensor, scale: float | None) -> Tensor:
    """A copy of the cache, written row by row on the CPU."""
    wanted, rows = cache.cpu().clone(), rows.cpu()
    for row, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        value = rows[row]
        if cache.dtype == FP8:
            value = (value.float() / (scale or 1.0)).clamp(-448, 448)
        bits(wanted)[slot // cache.shape[1], slot % cache.shape[1]] = bits(value.to(cache.dtype))
    return wanted


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("dtype", "cache_dtype", "scales"),
    [
        (torch.float32, torch.float32, (None, None)),
        (torch.float16, torch.float16, (None, None)),
        (torch.bfloat16, torch.bfloat16, (None, None)),
        (torch.float32, FP8, (0.25, 0.5)),
        (torch.float32, FP8, (None, None)),
    ],
)
def test_store_writes_live_slots_and_nothing_else(slot_dtype, dtype, cache_dtype, scales) -> None:
    heads, dim, value_dim = 3, 80, 48
    k_cache = torch.full((4, 5, heads, dim), float("nan"), device=DEVICE).to(cache_dtype)
    v_cache = torch.full((4, heads, 5, value_dim), float("nan"), device=DEVICE).to(cache_dtype).transpose(1, 2)
    keys = rows_for((6, heads * dim), dtype, cache_dtype, scales[0])
    values = rows_for((6, heads * value_dim + 7), dtype, cache_dtype, scales[1])
    fused = torch.cat((keys, values), dim=1)
    k = fused[:, : heads * dim].view(6, heads, dim)
    v = fused[:, heads * dim : heads * (dim + value_dim)].view(6, heads, value_dim)
    slots = torch.tensor([7, -1, 19, 0, -5, 11], dtype=slot_dtype, device=DEVICE)
    given = [None if scale is None else torch.tensor([scale], device=DEVICE) for scale in scales]
    wanted_k = expected_store(k_cache, k, slots, scales[0])
    wanted_v = expected_store(v_cache, v, slots, scales[1])
    triton_store.store_kv(k_cache, v_cache, k, v, slots, *given)
    assert torch.equal(bits(k_cache.cpu()), bits(wanted_k))
    assert torch.equal(bits(v_cache.cpu().contiguous()), bits(wanted_v.contiguous()))


def test_store_takes_any_strides_of_the_rows() -> None:
    k_cache = torch.zeros((3, 4, 2, 16), device=DEVICE)
    v_cache = torch.zeros((3, 4, 2, 16), device=DEVICE)
    k = torch.randn(16, 2, 10, device=DEVICE).permute(2, 1, 0)[::2]
    v = torch.randn(5, 16, 2, device=DEVICE).transpose(1, 2)
    slots = torch.tensor([4, -1, -1, 6, -1, -1, 8, -1, -1, 11, -1, -1, 5, -1, -1], device=DEVICE)[::3]
    triton_store.store_kv(k_cache, v_cache, k, v, slots)
    assert torch.equal(k_cache.cpu(), expected_store(torch.zeros(3, 4, 2, 16), k, slots, None))
    assert torch.equal(v_cache.cpu(), expected_store(torch.zeros(3, 4, 2, 16), v, slots, None))


@pytest.mark.gpu
def test_stored_nan_stays_nan_in_fp8() -> None:
    cache = torch.zeros((2, 1, 1, 16), device=DEVICE).to(FP8)
    rows = torch.full((1, 1, 16), float("nan"), device=DEVICE)
    triton_store.store_kv(cache, cache.clone(), rows, rows, torch.tensor([1], device=DEVICE), None, None)
    assert bool(cache.float()[1].isnan().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8])
def test_store_latent_writes_both_parts(dtype) -> None:
    cache = torch.full((3, 4, 80), float("nan"), device=DEVICE).to(dtype)
    row_dtype = torch.float32 if dtype == FP8 else dtype
    latent, rope = rows_for((3, 64), row_dtype, dtype, 0.25), rows_for((3, 16), row_dtype, dtype, 0.25)
    slots = torch.tensor([5, -1, 8], dtype=torch.int32, device=DEVICE)
    scale = torch.tensor([0.25], device=DEVICE) if dtype == FP8 else None
    wanted = expected_store(cache, torch.cat((latent, rope), 1), slots, 0.25)
    triton_store.store_latent(cache, latent, rope, slots, scale)
    assert torch.equal(bits(cache.cpu()), bits(wanted))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, FP8])
def test_moves_read_before_they_write(dtype) -> None:
    """Overlapping ranges: every target gets the old content of its source."""
    k_cache = torch.randn(4, 8, 3, 80, device=DEVICE).to(dtype)
    v_cache = torch.randn(4, 3, 8, 32, device=DEVICE).to(dtype).transpose(1, 2)
    source = torch.tensor([9, 10, 12, 15, -1, 3, 20], device=DEVICE)
    target = torch.tensor([8, 9, 10, 11, 12, -1, 21], dtype=torch.int32, device=DEVICE)
    wanted = []
    for cache in (k_cache, v_cache):
        old, new = bits(cache).cpu(), bits(cache).cpu().clone()
        for a, b in zip(source.tolist(), target.tolist(), strict=True):
            if a >= 0 and b >= 0:
                new[b // 8, b % 8] = old[a // 8, a % 8]
        wanted.append(new)
    triton_store.move_kv(k_cache, v_cache, source, target)
    assert torch.equal(bits(k_cache).cpu(), wanted[0])
    assert torch.equal(bits(v_cache).cpu(), wanted[1])


def test_moves_of_latent_entries() -> None:
    cache = torch.randn(4, 4, 80, device=DEVICE)
    wanted = cache.cpu().clone()
    wanted[1, 0], wanted[1, 1] = cache[1, 1].cpu(), cache[2, 3].cpu()
    source, target = torch.tensor([5, 11], device=DEVICE), torch.tensor([4, 5], device=DEVICE)
    triton_store.move_latent(cache, source, target)
    assert torch.equal(cache.cpu(), wanted)


def test_nothing_to_store_or_move_is_no_launch() -> None:
    cache, none = torch.zeros((2, 2, 1, 16), device=DEVICE), torch.zeros(0, dtype=torch.int64, device=DEVICE)
    rows = torch.zeros((0, 1, 16), device=DEVICE)
    triton_store.store_kv(cache, cache.clone(), rows, rows, none)
    triton_store.move_kv(cache, cache.clone(), none, none)
    assert not cache.any()
