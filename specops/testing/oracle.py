"""What attention over a paged cache *is*, in float64 and as plainly as the formula: the yardstick of every backend.

One loop over requests, one over rows. Only keys that a row sees are ever touched, so NaN anywhere else cannot matter
here. Speed does not matter either. Nothing of the kernels under test is used.

    s_j = scale * q . k_j,  capped to softcap * tanh(s_j / softcap)
    out = sum_j exp(s_j) v_j / (sum_j exp(s_j) + exp(sink)),  lse = log of that denominator,  j over the visible keys

Visible to row i of a request with c rows: keys 0 to seq_len - c + i; under a tree mask of width W all keys before
seq_len - W, and of the last W those whose bit is set. A window keeps the last ``window`` of the visible ones. Keys behind
the page table do not exist.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from specops.layout import QueryLayout

# Largest allowed ||out - ref|| / ||ref|| of one output vector. float32: rounding of a few thousand accumulated terms.
# Half precisions: rounding of the output and of the probabilities, which tensor cores take in the input's dtype.
BOUNDS: dict[torch.dtype | str, float] = {
    torch.float64: 1e-11,
    torch.float32: 1e-5,
    "tf32": 2e-3,
    torch.float16: 2e-3,
    torch.bfloat16: 1e-2,
}


def oracle_mha(
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
    return_lse: bool = False,
) -> Any:
    """:func:`specops.ops.mha` in float64 on the CPU; same arguments (``plan`` is accepted and unused).

    Returns:
        ``[T, Hq, Dv]`` float64 on the CPU; with ``return_lse`` also ``[T, Hq]`` float64, the natural log of the softmax's
        denominator: -inf for a row without a visible key, the sink's logit if there is one.
    """
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads, value_dim = k_cache.shape[2], v_cache.shape[3]
    scale = head_dim**-0.5 if scale is None else scale
    queries = q.cpu().double()
    sink = torch.full((num_heads,), -math.inf, dtype=torch.float64) if sinks is None else sinks.cpu().double()
    out = torch.zeros((num_rows, num_heads, value_dim), dtype=torch.float64)
    lse = sink.repeat(num_rows, 1)
    starts = _starts(layout, page_table.shape[0])
    capacity = page_table.shape[1] * k_cache.shape[1]
    for request, seq_len in enumerate(seq_lens.tolist()):
        first, last = starts[request], starts[request + 1]
        if seq_len == 0 or first == last:
            continue
        keys = _cached(k_cache, page_table[request], min(seq_len, capacity), k_scale)
        values = _cached(v_cache, page_table[request], min(seq_len, capacity), v_scale)
        for row in range(first, last):
            bits = None if tree_mask is None else tree_mask[row].tolist()
            seen = [key for key in _visible(seq_len, seq_len - last + row, bits, window) if key < capacity]
            if not seen:
                continue
            grouped = queries[row].reshape(num_kv_heads, -1, head_dim)
            scores = scale * torch.einsum("hgd,khd->hgk", grouped, keys[seen]).reshape(num_heads, -1)
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            lse[row] = torch.logaddexp(scores.logsumexp(dim=1), sink)
            weights = torch.exp(scores - lse[row][:, None]).reshape(num_kv_heads, -1, len(seen))
            out[row] = torch.einsum("hgk,khd->hgd", weights, values[seen]).reshape(num_heads, value_dim)
    return (out, lse) if return_lse else out


def oracle_mla(
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
    return_lse: bool = False,
) -> Any:
    """:func:`specops.ops.mla` in float64 on the CPU: one KV head whose key is the whole cache row, its value the latent."""
    cache = kv_cache.unsqueeze(2)
    call: tuple[Tensor, Tensor] = oracle_mha(
        torch.cat((q_latent, q_rope), dim=2),
        cache,
        cache[..., : q_latent.shape[2]],
        page_table,
        seq_lens,
        layout=layout,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
        tree_mask=tree_mask,
        k_scale=kv_scale,
        v_scale=kv_scale,
        return_lse=True,
    )
    return call if return_lse else call[0]


def assert_close_to_oracle(actual: Tensor, expected: Tensor, dtype: torch.dtype | str | None = None) -> float:
    """Assert ``||actual - expected|| / ||expected||`` of every vector along the last dimension; NaN never passes.

    A vector that the oracle says is zero must be exactly zero.

    Args:
        actual: ``[..., D]``, any device and dtype.
        expected: ``[..., D]`` float64 from the oracle.
        dtype: which of ``BOUNDS`` holds; the dtype of ``actual`` when not given, ``"tf32"`` for TF32 kernels.

    Returns:
        The largest relative error seen, 0.0 for an empty tensor.
    """
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, the oracle says {tuple(expected.shape)}"
    bound = BOUNDS[actual.dtype if dtype is None else dtype]
    got = actual.detach().cpu().double()
    if got.numel() == 0:
        return 0.0
    error, size = (got - expected).norm(dim=-1), expected.norm(dim=-1)
    good = (error <= bound * size) & error.isfinite()
    if not bool(good.all()):
        where = (~good).nonzero()
        shown = tuple(where[0].tolist())
        raise AssertionError(
            f"{len(where)} of {good.numel()} vectors are off by more than {bound:g}; the first, at {shown}, by "
            f"{error[shown].item():.3g} of {size[shown].item():.3g}: got {got[shown][:4].tolist()}..., "
            f"the oracle says {expected[shown][:4].tolist()}..."
        )
    return float((error / size.clamp(min=1e-300)).max())


def _starts(layout: QueryLayout, batch: int) -> list[int]:
    if layout.query_start is None:
        return [request * layout.max_query_len for request in range(batch + 1)]
    starts: list[int] = layout.query_start.tolist()
    return starts


def _visible(seq_len: int, position: int, bits: list[bool] | None, window: int | None) -> list[int]:
    """Keys one row sees, in order. ``position`` counts where there is no tree mask."""
    if bits is None:
        seen = list(range(position + 1))
    else:
        prefix = seq_len - len(bits)
        seen = list(range(prefix)) + [prefix + own for own, bit in enumerate(bits) if bit and prefix + own >= 0]
    return seen if window is None else seen[-window:]


def _cached(cache: Tensor, pages: Tensor, seq_len: int, scale: Tensor | None) -> Tensor:
    """``[seq_len, H, D]`` float64 on the CPU: the first ``seq_len`` entries of one request, dequantised."""
    page_size = cache.shape[1]
    place = torch.arange(seq_len, device=cache.device)
    page, offset = pages.long()[place // page_size], place % page_size
    if cache.dtype == torch.float8_e4m3fn:
        rows = cache.view(torch.uint8)[page, offset].view(cache.dtype).cpu().float().double()
    else:
        rows = cache[page, offset].cpu().double()
    return rows if scale is None else rows * scale.cpu().double()
