"""What an attention call must look like, and which op serves it: shapes, dtypes and devices, never values.

The values of ``seq_lens``, ``page_table`` and ``query_start`` are looked at in checked mode alone (:func:`checked`), since
looking costs a device synchronisation. Every refusal says what was given and what is needed.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from operator import index
from typing import Any

import torch
from torch import Tensor

from specops.layout import QueryLayout
from specops.ops.backends import FP8, AttentionRequest, Family, compute_capability, device_kind, resolve
from specops.ops.contracts import constant_when_compiled

_checked_mode = False


@contextlib.contextmanager
def checked(enabled: bool = True) -> Iterator[None]:
    """Within this context eager calls also check the *values* of their index tensors, at the cost of a device sync.

    Refused are a seq_len beyond the page table, page ids outside the cache, query offsets that do not match the query,
    and a request wider than ``max_query_len``. Compiled graphs are not affected.
    """
    global _checked_mode
    before, _checked_mode = _checked_mode, enabled
    try:
        yield
    finally:
        _checked_mode = before


def in_checked_mode() -> bool:
    return _checked_mode


def mha_op(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    layout: QueryLayout,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    tree_mask: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    backend: str,
) -> Callable[..., Tensor]:
    """The op that serves an MHA call, once all of the call is checked."""
    _need_dims("q", q, 3, "[T, Hq, D]")
    _need_dims("k_cache", k_cache, 4, "[P, S, Hkv, D]")
    _need_dims("v_cache", v_cache, 4, "[P, S, Hkv, Dv]")
    if k_cache.shape[:3] != v_cache.shape[:3]:
        raise ValueError(
            f"k_cache {tuple(k_cache.shape)} and v_cache {tuple(v_cache.shape)} must agree in pages, page size and KV heads"
        )
    if k_cache.dtype != v_cache.dtype:
        raise TypeError(f"k_cache is {k_cache.dtype} and v_cache {v_cache.dtype}; they must be equal")
    num_heads, num_kv_heads, head_dim = q.shape[1], k_cache.shape[2], q.shape[2]
    if k_cache.shape[3] != head_dim:
        raise ValueError(f"q has head dim {head_dim} and k_cache {k_cache.shape[3]}; they must be equal")
    if num_heads % num_kv_heads != 0:
        raise ValueError(f"{num_heads} query heads are not a multiple of {num_kv_heads} KV heads")
    _check_common((q,), (k_cache, v_cache), page_table, seq_lens, layout, window, softcap, sinks, tree_mask)
    _check_scale("k_scale", k_scale, k_cache)
    _check_scale("v_scale", v_scale, v_cache)
    features = _features(window, softcap, sinks, tree_mask, layout, k_cache.dtype)
    op_name = choose(
        backend,
        "mha",
        q.device,
        q.dtype,
        k_cache.dtype,
        index(num_heads),
        index(num_kv_heads),
        index(head_dim),
        index(v_cache.shape[3]),
        index(k_cache.shape[1]),
        layout.kind,
        index(layout.max_query_len),
        features,
    )
    if _checked_mode and not torch.compiler.is_compiling():
        check_values(q, k_cache, page_table, seq_lens, layout)
    op: Callable[..., Tensor] = getattr(torch.ops.specops, op_name).default
    return op


def mla_op(
    q_latent: Tensor,
    q_rope: Tensor,
    kv_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    layout: QueryLayout,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    tree_mask: Tensor | None,
    kv_scale: Tensor | None,
    backend: str,
) -> Callable[..., Tensor]:
    """The op that serves an MLA call, once all of the call is checked."""
    _need_dims("q_latent", q_latent, 3, "[T, H, Dc]")
    _need_dims("q_rope", q_rope, 3, "[T, H, Dr]")
    _need_dims("kv_cache", kv_cache, 3, "[P, S, Dc + Dr]")
    if q_latent.shape[:2] != q_rope.shape[:2] or q_latent.dtype != q_rope.dtype:
        raise ValueError(
            f"q_latent {tuple(q_latent.shape)} {q_latent.dtype} and q_rope {tuple(q_rope.shape)} {q_rope.dtype} "
            "must agree in rows, heads and dtype"
        )
    num_heads, latent_dim, head_dim = q_latent.shape[1], q_latent.shape[2], q_latent.shape[2] + q_rope.shape[2]
    if kv_cache.shape[2] != head_dim:
        raise ValueError(f"kv_cache holds {kv_cache.shape[2]} values a token; q_latent and q_rope need {head_dim}")
    _check_common((q_latent, q_rope), (kv_cache,), page_table, seq_lens, layout, window, softcap, sinks, tree_mask)
    _check_scale("kv_scale", kv_scale, kv_cache)
    features = _features(window, softcap, sinks, tree_mask, layout, kv_cache.dtype)
    op_name = choose(
        backend,
        "mla",
        q_latent.device,
        q_latent.dtype,
        kv_cache.dtype,
        index(num_heads),
        1,
        index(head_dim),
        index(latent_dim),
        index(kv_cache.shape[1]),
        layout.kind,
        index(layout.max_query_len),
        features,
    )
    if _checked_mode and not torch.compiler.is_compiling():
        check_values(q_latent, kv_cache, page_table, seq_lens, layout)
    op: Callable[..., Tensor] = getattr(torch.ops.specops, op_name).default
    return op


def last_visible(tree_mask: Tensor, window: int) -> Tensor:
    """``[T, W]`` bool: of each row of ``tree_mask`` the last ``window`` set bits.

    A window counts keys along a row's path, while a kernel compares places in the cache, where siblings stand between a
    node and its ancestors. With this mask the two agree: a row keeps all its bits, or has a window of bits and no prefix.
    """
    behind = tree_mask.flip(1).cumsum(1).flip(1)
    return tree_mask & (behind <= window)


@constant_when_compiled
def choose(backend: str, *call: Any) -> str:
    """Name of the op for one call: a dictionary look-up in eager mode, a constant to torch.compile.

    Sizes are passed through ``operator.index``, which makes a size that dynamo took for dynamic a constant.

    ``call`` holds the fields of :class:`AttentionRequest` in order, with the device in place of its two device fields.
    """
    return _choose(backend, *call)


@functools.lru_cache(maxsize=4096)
def _choose(backend: str, family: Family, device: torch.device, *rest: Any) -> str:
    return resolve(backend, AttentionRequest(family, device_kind(device), compute_capability(device), *rest)).op_name


def check_values(q: Tensor, cache: Tensor, page_table: Tensor, seq_lens: Tensor, layout: QueryLayout) -> None:
    """Refuse index tensors whose values are out of range. Synchronises the device.

    Raises:
        ValueError: naming the request and both numbers.
    """
    page_size, num_pages, capacity = cache.shape[1], cache.shape[0], page_table.shape[1] * cache.shape[1]
    lens = seq_lens.tolist()
    for request, seq_len in enumerate(lens):
        if seq_len < 0:
            raise ValueError(f"request {request} has seq_len {seq_len}; a padded request has 0")
        if seq_len > capacity:
            raise ValueError(
                f"request {request} has seq_len {seq_len}, but its page table holds {page_table.shape[1]} pages of "
                f"{page_size} = {capacity} tokens; widen the page table"
            )
        pages = page_table[request, : -(-seq_len // page_size)].tolist()
        bad = [page for page in pages if not 0 <= page < num_pages]
        if bad:
            raise ValueError(f"request {request} names page {bad[0]}, but the cache has pages 0 to {num_pages - 1}")
    if layout.query_start is not None:
        starts = layout.query_start.tolist()
        widths = [after - before for before, after in itertools.pairwise(starts)]
        if starts[0] != 0 or starts[-1] != q.shape[0] or min(widths, default=0) < 0:
            raise ValueError(f"query_start must rise from 0 to the {q.shape[0]} rows of q, got {starts}")
        if max(widths, default=0) > layout.max_query_len:
            raise ValueError(f"a request has {max(widths)} rows, above max_query_len {layout.max_query_len}")


def _features(
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    tree_mask: Tensor | None,
    layout: QueryLayout,
    kv_dtype: torch.dtype,
) -> tuple[str, ...]:
    features: tuple[str, ...] = ()
    if window is not None:
        features += ("window",)
    if softcap is not None:
        features += ("softcap",)
    if sinks is not None:
        features += ("sinks",)
    if tree_mask is not None:
        features += ("tree_mask",)
        if tree_mask.shape[1] != layout.max_query_len:
            features += ("wide_tree_mask",)
    if kv_dtype == FP8:
        features += ("fp8_kv",)
    return features


def _need_dims(name: str, tensor: Tensor, dims: int, shape: str) -> None:
    if tensor.dim() != dims:
        raise ValueError(f"{name} must be {shape}, got shape {tuple(tensor.shape)}")


def _check_scale(name: str, scale: Tensor | None, cache: Tensor) -> None:
    if scale is None:
        return
    if cache.dtype != FP8:
        raise ValueError(f"{name} belongs to a float8_e4m3fn cache; this one is {cache.dtype}")
    if scale.dtype != torch.float32 or scale.numel() != 1 or scale.device != cache.device:
        raise ValueError(
            f"{name} must be one float32 on {cache.device}, got {tuple(scale.shape)} {scale.dtype} on {scale.device}"
        )


def _check_common(
    queries: tuple[Tensor, ...],
    caches: tuple[Tensor, ...],
    page_table: Tensor,
    seq_lens: Tensor,
    layout: QueryLayout,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    tree_mask: Tensor | None,
) -> None:
    """Checks that both families share."""
    for name, tensor, dims, shape in (
        ("page_table", page_table, 2, "[B, max_pages]"),
        ("seq_lens", seq_lens, 1, "[B]"),
    ):
        _need_dims(name, tensor, dims, shape)
        if tensor.dtype != torch.int32:
            raise TypeError(f"{name} must be int32, got {tensor.dtype}; convert it once with .to(torch.int32)")
    q = queries[0]
    batch, num_tokens = page_table.shape[0], q.shape[0]
    if seq_lens.shape[0] != batch:
        raise ValueError(f"seq_lens has {seq_lens.shape[0]} requests and page_table {batch}; they must be equal")
    for name, other in (
        *(("a query", query) for query in queries),
        *(("a cache", cache) for cache in caches),
        ("page_table", page_table),
        ("seq_lens", seq_lens),
        ("query_start", layout.query_start),
        ("sinks", sinks),
        ("tree_mask", tree_mask),
    ):
        if other is not None and other.device != q.device:
            raise ValueError(f"{name} is on {other.device} and q on {q.device}; all tensors must be on one device")
    for tensor in (*queries, *caches):
        if tensor.stride(-1) != 1 and tensor.shape[-1] != 1:
            raise ValueError(f"the last dimension of q and caches must be contiguous, got strides {tensor.stride()}")
    if layout.query_start is None:
        if num_tokens != batch * layout.max_query_len:
            raise ValueError(
                f"q has {num_tokens} rows, but {batch} requests of {layout.max_query_len} rows need "
                f"{batch * layout.max_query_len}; for topk > 1 the width is num_draft_tokens, not num_steps + 1"
            )
    elif layout.query_start.shape[0] != batch + 1:
        raise ValueError(f"query_start has {layout.query_start.shape[0]} entries; {batch} requests need {batch + 1}")
    if tree_mask is not None:
        if layout.query_start is not None:
            raise ValueError("tree_mask needs a uniform layout")
        if tree_mask.dtype != torch.bool:
            raise TypeError(f"tree_mask must be bool, got {tree_mask.dtype}")
        if tree_mask.dim() != 2 or tree_mask.shape[0] != num_tokens or tree_mask.shape[1] < layout.max_query_len:
            raise ValueError(
                f"tree_mask must be [{num_tokens}, W] with W >= {layout.max_query_len}, got {tuple(tree_mask.shape)}"
            )
    if sinks is not None and (sinks.dtype != torch.float32 or sinks.shape != (q.shape[1],)):
        raise ValueError(f"sinks must be [{q.shape[1]}] float32, got {tuple(sinks.shape)} {sinks.dtype}")
    if window is not None and window < 1:
        raise ValueError(f"window counts the row's own key, so it is at least 1; got {window}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be above 0, got {softcap}; None means no cap")
