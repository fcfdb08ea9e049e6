"""Writing K/V into a paged cache, and moving what a verify step accepted: ops that mutate and return nothing.

``slot = page * page_size + offset``; a negative slot is skipped, so padded and surplus rows write no page.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specops.ops import contracts, native
from specops.ops.capabilities import FP8
from specops.ops.prepared import CacheWriter

FP8_MAX = torch.finfo(FP8).max


def store_kv(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Write one key and value per token into the cache, in place.

    Args:
        k_cache: ``[P, S, Hkv, D]``, any strides with a unit last one; mutated.
        v_cache: ``[P, S, Hkv, Dv]``, as k_cache; may be a view of the same storage.
        k: ``[T, Hkv, D]``, any strides.
        v: ``[T, Hkv, Dv]``, any strides.
        slots: ``[T]`` int32 or int64, ``page * S + offset``; a negative slot writes nothing.
        k_scale, v_scale: one-element float32 tensors for an fp8 cache, which then holds ``clamp(value / scale)``.

    Raises:
        ValueError, TypeError: shapes or dtypes that do not fit; says what was given and what is needed.
    """
    if k_cache.dim() != 4 or v_cache.dim() != 4 or k_cache.shape[:3] != v_cache.shape[:3]:
        raise ValueError(
            "k_cache must be [P, S, Hkv, D] and v_cache [P, S, Hkv, Dv], "
            f"got {tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
        )
    for name, rows, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if rows.dim() != 3 or rows.shape[1:] != cache.shape[2:]:
            raise ValueError(f"{name} must be [T, {cache.shape[2]}, {cache.shape[3]}], got {tuple(rows.shape)}")
    if k.shape[0] != v.shape[0]:
        raise ValueError(f"k has {k.shape[0]} rows and v {v.shape[0]}; they must be equal")
    check_slots(slots, k.shape[0])
    torch.ops.specops.store_kv(k_cache, v_cache, k, v, slots, k_scale, v_scale)


def store_latent(kv_cache: Tensor, latent: Tensor, rope: Tensor, slots: Tensor, *, kv_scale: Tensor | None = None) -> None:
    """Write one latent and rotary key per token into an MLA cache, in place.

    Args:
        kv_cache: ``[P, S, Dc + Dr]``; mutated.
        latent: ``[T, Dc]``, any strides.
        rope: ``[T, Dr]``, any strides.
        slots: ``[T]`` int32 or int64; a negative slot writes nothing.
        kv_scale: one-element float32 tensor for an fp8 cache.

    Raises:
        ValueError, TypeError: shapes or dtypes that do not fit.
    """
    if kv_cache.dim() != 3 or latent.dim() != 2 or rope.dim() != 2:
        raise ValueError(
            "kv_cache must be [P, S, Dc + Dr], latent [T, Dc] and rope [T, Dr], "
            f"got {tuple(kv_cache.shape)}, {tuple(latent.shape)} and {tuple(rope.shape)}"
        )
    if latent.shape[1] + rope.shape[1] != kv_cache.shape[2] or latent.shape[0] != rope.shape[0]:
        raise ValueError(
            f"latent {tuple(latent.shape)} and rope {tuple(rope.shape)} do not fill kv_cache {tuple(kv_cache.shape)}"
        )
    check_slots(slots, latent.shape[0])
    torch.ops.specops.store_latent(kv_cache, latent, rope, slots, kv_scale)


def move_kv(k_cache: Tensor, v_cache: Tensor, source_slots: Tensor, target_slots: Tensor) -> None:
    """Copy cached keys and values from slot to slot, all reads before any write, so ranges may overlap.

    Args:
        k_cache, v_cache: as for :func:`store_kv`; mutated.
        source_slots, target_slots: ``[N]`` int32 or int64. A pair with a negative member is skipped.
    """
    check_slots(source_slots, target_slots.shape[0])
    check_slots(target_slots, source_slots.shape[0])
    torch.ops.specops.move_kv(k_cache, v_cache, source_slots, target_slots)


def move_latent(kv_cache: Tensor, source_slots: Tensor, target_slots: Tensor) -> None:
    """As :func:`move_kv`, for an MLA cache ``[P, S, Dc + Dr]``."""
    check_slots(source_slots, target_slots.shape[0])
    check_slots(target_slots, source_slots.shape[0])
    torch.ops.specops.move_latent(kv_cache, source_slots, target_slots)


def move_kv_layers(
    k_caches: Sequence[Tensor], v_caches: Sequence[Tensor], source_slots: Tensor, target_slots: Tensor
) -> None:
    """:func:`move_kv` of the same slots in the caches of all layers: one launch on a GPU.

    Args:
        k_caches, v_caches: one of each a layer, as for :func:`move_kv`; mutated.
        source_slots, target_slots: as for :func:`move_kv`.

    Raises:
        ValueError, TypeError: another number of K than of V caches, or slots that do not fit.
    """
    if len(k_caches) != len(v_caches):
        raise ValueError(f"there must be a V cache for each K cache, got {len(k_caches)} and {len(v_caches)}")
    check_slots(source_slots, target_slots.shape[0])
    check_slots(target_slots, source_slots.shape[0])
    torch.ops.specops.move_kv_layers(list(k_caches), list(v_caches), source_slots, target_slots)


def check_slots(slots: Tensor, num_tokens: int) -> None:
    if slots.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"slots must be int32 or int64, got {slots.dtype}")
    if slots.dim() != 1 or slots.shape[0] != num_tokens:
        raise ValueError(f"slots must be [{num_tokens}], got {tuple(slots.shape)}")


def quantized(rows: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """``rows`` as the cache holds them: divided by ``scale`` and saturated for fp8, else cast."""
    if dtype != FP8:
        return rows.to(dtype)
    scaled = rows.float() if scale is None else rows.float() / scale
    return scaled.clamp(-FP8_MAX, FP8_MAX).to(dtype)


def _write(cache: Tensor, rows: Tensor, slots: Tensor, scale: Tensor | None) -> None:
    """Skips negative slots without a data-dependent shape: their rows repeat the first live row, to the same slot."""
    if rows.shape[0] == 0:
        return
    page_size = cache.shape[1]
    live = slots >= 0
    first = live.to(torch.uint8).argmax()
    source = torch.where(live, torch.arange(slots.shape[0], device=slots.device), first)
    target = slots[source].clamp(min=0).long()
    page, offset = target // page_size, target % page_size
    values = quantized(rows[source], cache.dtype, scale)
    # Without a live row every entry writes back what slot 0 holds.
    values = torch.where(live.any(), as_bits(values), as_bits(cache[page, offset]))
    as_bits(cache)[page, offset] = values


def as_bits(tensor: Tensor) -> Tensor:
    """fp8 tensors as bytes, since indexing and where() lack fp8 kernels on some devices; others unchanged."""
    return tensor.view(torch.uint8) if tensor.dtype == FP8 else tensor


def _write_cpu(cache: Tensor, rows: Tensor, slots: Tensor, scale: Tensor | None) -> None:
    """Slots are non-negative here; a CPU kernel may drop rows, see :func:`_live`."""
    values, cache = as_bits(quantized(rows, cache.dtype, scale)), as_bits(cache)
    page_size = cache.shape[1]
    if cache.stride(0) == page_size * cache.stride(1):
        cache.flatten(0, 1).index_copy_(0, slots, values)
    else:
        cache[slots // page_size, slots % page_size] = values


def _live(slots: Tensor, *rows: Tensor) -> tuple[Tensor, ...]:
    """int64 slots and rows without the entries whose slot is negative."""
    slots = slots.long()
    if slots.numel() == 0 or slots.min() >= 0:
        return (slots, *rows)
    keep = (slots >= 0).nonzero().squeeze(1)
    return tuple(tensor[keep] for tensor in (slots, *rows))


def _move(cache: Tensor, source_slots: Tensor, target_slots: Tensor) -> None:
    bits = as_bits(cache)
    source = source_slots.clamp(min=0).long()
    rows = bits[source // cache.shape[1], source % cache.shape[1]]
    target = torch.where(source_slots < 0, -1, target_slots)
    if cache.device.type == "cpu":
        target, rows = _live(target, rows)
        _write_cpu(bits, rows, target, None)
    else:
        _write(bits, rows, target, None)


def _store_kv(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    _write(k_cache, k, slots, k_scale)
    _write(v_cache, v, slots, v_scale)


def _as_cached(rows: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """Rows to be written as they are: of the cache's dtype, fp8 as bytes, with a unit last stride."""
    if rows.dtype != dtype or dtype == FP8:
        rows = as_bits(quantized(rows, dtype, scale))
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _store_kv_cpu(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    if k.shape[0] and k_cache.stride(3) == v_cache.stride(3) == 1 and native.library() is not None:
        write = CacheWriter(as_bits(k_cache), as_bits(v_cache))
        if write(_as_cached(k, k_cache.dtype, k_scale), _as_cached(v, v_cache.dtype, v_scale), slots):
            return
    slots, k, v = _live(slots, k, v)
    _write_cpu(k_cache, k, slots, k_scale)
    _write_cpu(v_cache, v, slots, v_scale)


def _store_latent(kv_cache: Tensor, latent: Tensor, rope: Tensor, slots: Tensor, kv_scale: Tensor | None = None) -> None:
    _write(kv_cache, torch.cat((latent, rope), dim=1), slots, kv_scale)


def _store_latent_cpu(kv_cache: Tensor, latent: Tensor, rope: Tensor, slots: Tensor, kv_scale: Tensor | None = None) -> None:
    slots, latent, rope = _live(slots, latent, rope)
    _write_cpu(kv_cache, torch.cat((latent, rope), dim=1), slots, kv_scale)


def _move_kv(k_cache: Tensor, v_cache: Tensor, source_slots: Tensor, target_slots: Tensor) -> None:
    _move(k_cache, source_slots, target_slots)
    _move(v_cache, source_slots, target_slots)


def _move_kv_layers(k_caches: list[Tensor], v_caches: list[Tensor], source_slots: Tensor, target_slots: Tensor) -> None:
    for cache in (*k_caches, *v_caches):
        _move(cache, source_slots, target_slots)


def _can_move(kernels: Any, *args: Any) -> bool:
    return bool(kernels.can_move(args[-1]))


for _name, _schema, _fake, _kernel, _cpu_kernel in (
    ("store_kv", contracts.STORE_KV_SCHEMA, contracts.fake_store_kv, _store_kv, _store_kv_cpu),
    ("store_latent", contracts.STORE_LATENT_SCHEMA, contracts.fake_store_latent, _store_latent, _store_latent_cpu),
    ("move_kv", contracts.MOVE_KV_SCHEMA, contracts.fake_move_kv, _move_kv, _move_kv),
    (
        "move_kv_layers",
        contracts.MOVE_KV_LAYERS_SCHEMA,
        contracts.fake_move_kv_layers,
        _move_kv_layers,
        _move_kv_layers,
    ),
    ("move_latent", contracts.MOVE_LATENT_SCHEMA, contracts.fake_move_latent, _move, _move),
):
    _cuda_kernel = contracts.with_triton(_kernel, "triton_store", _name, _can_move if _name.startswith("move") else None)
    contracts.define(_name, _schema, _fake, {"CompositeExplicitAutograd": _kernel, "CPU": _cpu_kernel, "CUDA": _cuda_kernel})
