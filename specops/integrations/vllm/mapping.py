"""vLLM's cache and batch as arguments of specops' ops, and what the ops cannot serve. Needs no vLLM.

vLLM's cache of a layer is ``[P, Hkv, S, D + Dv]``: pages, KV heads, tokens of a page, key and value side by side, under
whatever strides its layout has. Its page 0 is never handed out and its lengths count a request's new tokens, as here, so
views and numbers are all there is to map.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specops.layout import QueryLayout
from specops.ops.backends import AUTO_ORDER, UnsupportedAttention, get_backend, resolve
from specops.ops.capabilities import FP8, AttentionRequest

# vLLM's names of cache dtypes; None is the model's own. fp8 is e4m3 in vLLM too, stored as bytes.
CACHE_DTYPES: dict[str, torch.dtype | None] = {
    "auto": None,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8": FP8,
    "fp8_e4m3": FP8,
}
# Tokens a page that stand for any number: every backend with a limit on pages takes this one.
_ANY_PAGE = 64


def cache_views(kv_cache: Tensor, head_dim: int, cache_dtype: str = "auto") -> tuple[Tensor, Tensor]:
    """Keys ``[P, S, Hkv, D]`` and values ``[P, S, Hkv, Dv]`` of a vLLM cache; both are views.

    Args:
        kv_cache: ``[P, Hkv, S, D + Dv]``, any strides with a unit last one; bytes for an fp8 cache.
        head_dim: ``D``.
        cache_dtype: vLLM's name, one of ``CACHE_DTYPES``.

    Raises:
        ValueError: the cache is not four-dimensional, or its last dimension holds no value behind the key.
    """
    if kv_cache.dim() != 4 or kv_cache.shape[3] <= head_dim:
        raise ValueError(
            f"vLLM's cache must be [pages, KV heads, page size, more than {head_dim}], got {tuple(kv_cache.shape)}; "
            "this vLLM lays its cache out in another way"
        )
    if CACHE_DTYPES[cache_dtype] is FP8:
        kv_cache = kv_cache.view(FP8)
    pages = kv_cache.transpose(1, 2)
    return pages[..., :head_dim], pages[..., head_dim:]


def layout_of(num_requests: int, num_tokens: int, max_query_len: int, query_start: Tensor) -> QueryLayout:
    """The layout of a step, from numbers known on the host.

    Requests that are all as wide as the widest are uniform: decoding, the verification of a draft, and a batch padded for
    a CUDA graph, whose surplus requests have length 0 and see no key. No value of ``query_start`` is looked at, so the
    choice is the same at a graph's capture and at its replay.

    Args:
        num_requests: ``B``, padding included.
        num_tokens: ``T``, padding included.
        max_query_len: new tokens of the widest request, or an upper bound.
        query_start: ``[B + 1]`` int32 or more.
    """
    if num_tokens == num_requests * max_query_len:
        return QueryLayout.uniform(max_query_len)
    return QueryLayout.packed(query_start[: num_requests + 1], max_query_len)


def refusals(
    *,
    backend: str,
    device_type: str,
    compute_capability: tuple[int, int] | None,
    head_dim: int,
    q_dtype: torch.dtype,
    cache_dtype: str | None,
    page_size: int | None,
    max_query_len: int,
    num_heads: int = 1,
    num_kv_heads: int = 1,
    features: Sequence[str] = (),
) -> list[str]:
    """Why specops cannot be the attention of a model, in words; empty when it can.

    Args:
        backend: of specops, or ``"auto"``.
        device_type, compute_capability: as in :class:`specops.ops.backends.AttentionRequest`.
        head_dim: of keys and values.
        q_dtype: of queries.
        cache_dtype: vLLM's name; None is ``"auto"``.
        page_size: vLLM's block size; None where it is not chosen yet.
        max_query_len: the most new tokens of one request in one step.
        num_heads, num_kv_heads: heads of a layer, where they are known.
        features: of ``specops.ops.backends.FEATURES`` that the model needs.
    """
    reasons = []
    if head_dim < 1 or (page_size is not None and page_size < 1):
        reasons.append(f"head size {head_dim} and block size {page_size} (both are at least 1)")
    if cache_dtype is not None and cache_dtype not in CACHE_DTYPES:
        reasons.append(f"cache dtype {cache_dtype} (specops takes {', '.join(CACHE_DTYPES)})")
    if reasons:
        return reasons
    kv_dtype = CACHE_DTYPES[cache_dtype or "auto"] or q_dtype
    wanted = (*features, "fp8_kv") if kv_dtype is FP8 and "fp8_kv" not in features else tuple(features)
    for layout in ("uniform", "packed"):
        request = AttentionRequest(
            family="mha",
            device_type=device_type,
            compute_capability=compute_capability,
            q_dtype=q_dtype,
            kv_dtype=kv_dtype,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            value_dim=head_dim,
            page_size=page_size or _ANY_PAGE,
            layout=layout,
            max_query_len=max_query_len,
            features=wanted,
        )
        try:
            chosen = resolve(backend, request)
        except UnsupportedAttention as error:
            reasons.append(str(error))
            break
        if backend == "auto" and chosen.name == "reference":
            fastest = get_backend(AUTO_ORDER[device_type][0], "mha")
            reasons += fastest.capabilities.why_not(request)
            reasons.append("the backend 'reference' would serve it, slowly, if it is named")
            break
        if chosen.capabilities.needs_plan:
            reasons.append(f"specops backend {chosen.name} plans each step on the host, which this plug-in does not do")
            break
    return reasons


def graph_safe(backend: str, device_type: str) -> bool:
    """Whether steps of ``backend`` may be captured into a CUDA graph. What ``"auto"`` takes on a GPU always may."""
    if device_type == "cpu":
        return False
    return backend == "auto" or get_backend(backend, "mha").capabilities.graph_safe
