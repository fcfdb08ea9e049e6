"""``mha()`` and ``mla()``: check the call, choose a backend, call its torch op.

Both work in eager mode and under ``torch.compile(fullgraph=True)``: the checks read shapes, dtypes and devices only, and
the choice of a backend is a constant of the graph. The values of ``seq_lens``, ``page_table`` and ``query_start`` are
looked at in checked mode alone (:func:`checked`), since looking costs a device synchronisation.
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
from specops.ops.backends import (
    FP8,
    AttentionRequest,
    Family,
    compute_capability,
    device_kind,
    resolve,
)

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


def mha(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    *,
    layout: QueryLayout,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    tree_mask: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    plan: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Multi-head attention of short query blocks over a paged KV cache.

    Row ``i`` of a request with ``c`` rows stands at position ``seq_len - c + i`` and sees the keys at or before it. A row
    that sees no key returns zeros. Memory the request does not own, and anything at or after its ``seq_len``, may hold
    NaN and does not matter. The request's own keys must be in the cache already (:func:`specops.ops.store_kv`). Where a
    ``seq_len`` reaches past the page table, the keys behind the table do not exist; checked mode refuses that.

    Args:
        q: ``[T, Hq, D]`` float, any strides with a unit last one.
        k_cache: ``[P, S, Hkv, D]``, the query's dtype or float8_e4m3fn; any strides with a unit last one. An HND cache
            is passed as a transposed view.
        v_cache: ``[P, S, Hkv, Dv]``, as k_cache.
        page_table: ``[B, max_pages]`` int32, page ids of each request in order.
        seq_lens: ``[B]`` int32, keys of each request *including* its own query rows.
        layout: how the ``T`` rows belong to the ``B`` requests.
        scale: factor on the scores, ``D ** -0.5`` when not given.
        window: keys a row sees counting itself, as ``sliding_window`` of Hugging Face models; None sees all.
        softcap: scores become ``softcap * tanh(score / softcap)``.
        sinks: ``[Hq]`` float32, one logit a head that joins the softmax's denominator and carries no value.
        tree_mask: ``[T, W]`` bool, uniform layout only: which of the request's last ``W`` keys a row sees; the keys
            before them are always visible. Usually ``W = tokens_per_request``, the row's own block; multi-step
            drafting uses wider masks. Under a mask a row's position, for the window, is
            ``seq_len - W + (visible of the W) - 1``, its depth in the tree: a row sees the last ``window`` of the keys
            that are visible to it, whatever siblings stand between them.
        k_scale, v_scale: one-element float32 tensors; an fp8 cache holds value / scale.
        plan: handle of a planned backend (see the backend's ``plan`` hook).
        backend: a backend's name, or ``"auto"`` for the fastest capable one.

    Returns:
        ``[T, Hq, Dv]`` in the query's dtype, contiguous, freshly allocated.

    Raises:
        ValueError, TypeError: a shape, dtype or device that does not fit; says what was given and what is needed.
        UnsupportedAttention: the backend can't serve the call; says the limit and who could.
    """
    key = op = None
    if not (_checked_mode or torch.compiler.is_compiling()):
        key = (
            backend,
            layout.max_query_len,
            window,
            softcap is None,
            *(q.shape, q.dtype, q.device, q.stride()),
            *(k_cache.shape, k_cache.dtype, k_cache.device, k_cache.stride()),
            *(v_cache.shape, v_cache.dtype, v_cache.device, v_cache.stride()),
            *(page_table.shape, page_table.dtype, page_table.device),
            *(seq_lens.shape, seq_lens.dtype, seq_lens.device),
            *map(_facts, (layout.query_start, sinks, tree_mask, k_scale, v_scale)),
        )
        op = _recall(key)
    if op is None:
        op = _checked_mha(
            q, k_cache, v_cache, page_table, seq_lens, layout, window, softcap, sinks, tree_mask, k_scale, v_scale, backend
        )
        _remember(key, op)
    if window is not None and tree_mask is not None and window < tree_mask.shape[1]:
        tree_mask = last_visible(tree_mask, window)
    return op(
        q,
        k_cache,
        v_cache,
        page_table,
        seq_lens,
        layout.query_start,
        layout.max_query_len,
        q.shape[2] ** -0.5 if scale is None else scale,
        window,
        softcap,
        sinks,
        tree_mask,
        k_scale,
        v_scale,
        plan,
    )


def mla(
    q_latent: Tensor,
    q_rope: Tensor,
    kv_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    *,
    layout: QueryLayout,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    tree_mask: Tensor | None = None,
    kv_scale: Tensor | None = None,
    plan: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Multi-head latent attention (DeepSeek V2, 2024) in its absorbed form, over a paged latent cache.

    All heads share one key, ``concat(latent, rope)``, and one value, the latent part. Visibility is that of :func:`mha`.

    Args:
        q_latent: ``[T, H, Dc]`` float, the query after absorption of the key up-projection; Dc = 512 for DeepSeek.
        q_rope: ``[T, H, Dr]``, its rotary part; Dr = 64 for DeepSeek.
        kv_cache: ``[P, S, Dc + Dr]``, the query's dtype or float8_e4m3fn.
        scale: factor on the scores. There is no default: it comes from the dims *before* absorption.
        kv_scale: one-element float32 tensor; an fp8 cache holds value / scale.
        page_table, seq_lens, layout, window, softcap, sinks, tree_mask, plan, backend: as for :func:`mha`.

    Returns:
        ``[T, H, Dc]`` in the query's dtype, contiguous, freshly allocated.

    Raises:
        ValueError, TypeError, UnsupportedAttention: as :func:`mha`.
    """
    key = op = None
    if not (_checked_mode or torch.compiler.is_compiling()):
        key = (
            backend,
            layout.max_query_len,
            window,
            softcap is None,
            *(q_latent.shape, q_latent.dtype, q_latent.device, q_latent.stride()),
            *(q_rope.shape, q_rope.dtype, q_rope.device, q_rope.stride()),
            *(kv_cache.shape, kv_cache.dtype, kv_cache.device, kv_cache.stride()),
            *(page_table.shape, page_table.dtype, page_table.device),
            *(seq_lens.shape, seq_lens.dtype, seq_lens.device),
            *map(_facts, (layout.query_start, sinks, tree_mask, kv_scale)),
        )
        op = _recall(key)
    if op is None:
        op = _checked_mla(
            q_latent, q_rope, kv_cache, page_table, seq_lens, layout, window, softcap, sinks, tree_mask, kv_scale, backend
        )
        _remember(key, op)
    if window is not None and tree_mask is not None and window < tree_mask.shape[1]:
        tree_mask = last_visible(tree_mask, window)
    return op(
        q_latent,
        q_rope,
        kv_cache,
        page_table,
        seq_lens,
        layout.query_start,
        layout.max_query_len,
        scale,
        window,
        softcap,
        sinks,
        tree_mask,
        kv_scale,
        plan,
    )


# What a call looked like, to the op that serves it. A call that looks like an earlier one needs no second check: the key
# holds all that the checks and the choice of a backend read. It saves 4 us of 12 a call.
_KNOWN: dict[Any, Callable[..., Tensor]] = {}


def _facts(tensor: Tensor | None) -> tuple[Any, ...] | None:
    return None if tensor is None else (tensor.shape, tensor.dtype, tensor.device)


def _recall(key: tuple[Any, ...]) -> Callable[..., Tensor] | None:
    try:
        return _KNOWN.get(key)
    except TypeError:
        # Symbolic sizes, under tracing, cannot be hashed.
        return None


def _remember(key: tuple[Any, ...] | None, op: Callable[..., Tensor]) -> None:
    if key is None:
        return
    if len(_KNOWN) >= 4096:
        _KNOWN.clear()
    with contextlib.suppress(TypeError):
        _KNOWN[key] = op


def _checked_mha(
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
    _check_common(q, (k_cache, v_cache), page_table, seq_lens, layout, tree_mask, sinks, window)
    if k_cache.dtype != FP8 and (k_scale is not None or v_scale is not None):
        raise ValueError(f"k_scale and v_scale belong to a float8_e4m3fn cache; this one is {k_cache.dtype}")
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


def _checked_mla(
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
    _check_common(q_latent, (kv_cache,), page_table, seq_lens, layout, tree_mask, sinks, window)
    if kv_cache.dtype != FP8 and kv_scale is not None:
        raise ValueError(f"kv_scale belongs to a float8_e4m3fn cache; this one is {kv_cache.dtype}")
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


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
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
        if seq_len > capacity:
            raise ValueError(
                f"request {request} has seq_len {seq_len}, but its page table holds {page_table.shape[1]} pages of "
                f"{page_size} = {capacity} tokens; widen the page table"
            )
        pages = page_table[request, : -(-max(seq_len, 0) // page_size)].tolist()
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


def _check_common(
    q: Tensor,
    caches: tuple[Tensor, ...],
    page_table: Tensor,
    seq_lens: Tensor,
    layout: QueryLayout,
    tree_mask: Tensor | None,
    sinks: Tensor | None,
    window: int | None,
) -> None:
    """Checks that both families share. Reads no values."""
    for name, tensor, dims, shape in (
        ("page_table", page_table, 2, "[B, max_pages]"),
        ("seq_lens", seq_lens, 1, "[B]"),
    ):
        _need_dims(name, tensor, dims, shape)
        if tensor.dtype != torch.int32:
            raise TypeError(f"{name} must be int32, got {tensor.dtype}; convert it once with .to(torch.int32)")
    batch, num_tokens = page_table.shape[0], q.shape[0]
    if seq_lens.shape[0] != batch:
        raise ValueError(f"seq_lens has {seq_lens.shape[0]} requests and page_table {batch}; they must be equal")
    others: tuple[Tensor | None, ...] = (*caches, page_table, seq_lens, layout.query_start, tree_mask, sinks)
    for other in others:
        if other is not None and other.device != q.device:
            raise ValueError(f"all tensors must be on q's device {q.device}; one is on {other.device}")
    for tensor in (q, *caches):
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
