"""``mha()`` and ``mla()``: check the call, choose a backend, call its torch op.

Both work in eager mode and under ``torch.compile(fullgraph=True)``. The checks and the choice are in
:mod:`specops.ops.attention_checks`; they read shapes, dtypes and devices only, and the chosen op is a constant of a
compiled graph. An eager call that looks like an earlier one is neither checked nor chosen for again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specops.layout import QueryLayout
from specops.ops.attention_checks import in_checked_mode, last_visible, mha_op, mla_op

# What a call looked like, to the op that serves it. A call that looks like an earlier one needs no second check: the key
# holds all that the checks and the choice of a backend read. It saves 4 us of 12 a call.
_KNOWN: dict[Any, Callable[..., Tensor]] = {}


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
    if not (torch.compiler.is_compiling() or in_checked_mode()):
        key = (
            backend,
            layout.max_query_len,
            window,
            softcap,
            *(q.shape, q.dtype, q.device, q.stride()),
            *(k_cache.shape, k_cache.dtype, k_cache.device, k_cache.stride()),
            *(v_cache.shape, v_cache.dtype, v_cache.device, v_cache.stride()),
            *(page_table.shape, page_table.dtype, page_table.device),
            *(seq_lens.shape, seq_lens.dtype, seq_lens.device),
            *map(_facts, (layout.query_start, sinks, tree_mask, k_scale, v_scale)),
        )
        op = _recall(key)
    if op is None:
        op = mha_op(
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
    if not (torch.compiler.is_compiling() or in_checked_mode()):
        key = (
            backend,
            layout.max_query_len,
            window,
            softcap,
            *(q_latent.shape, q_latent.dtype, q_latent.device, q_latent.stride()),
            *(q_rope.shape, q_rope.dtype, q_rope.device, q_rope.stride()),
            *(kv_cache.shape, kv_cache.dtype, kv_cache.device, kv_cache.stride()),
            *(page_table.shape, page_table.dtype, page_table.device),
            *(seq_lens.shape, seq_lens.dtype, seq_lens.device),
            *map(_facts, (layout.query_start, sinks, tree_mask, kv_scale)),
        )
        op = _recall(key)
    if op is None:
        op = mla_op(
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
