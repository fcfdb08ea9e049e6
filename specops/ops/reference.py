"""The reference backend: attention over a paged cache in readable PyTorch, on any device.

Every page that the page table can name is gathered, keys that a row does not see are masked, and softmax runs in float32
(float64 for float64 queries). No value is read on the host and no shape depends on data, so it can be captured into a
CUDA graph. Requests are taken in slices that bound the memory of the scores. It is not meant to be fast.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specops.layout import QueryLayout
from specops.ops.store_kv import as_bits

# Scores and gathered keys of one slice of requests stay near this many elements each (256 MiB in float32).
SLICE_ELEMENTS = 1 << 26


def mha(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    *,
    layout: QueryLayout,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    tree_mask: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    plan: Tensor | None = None,
) -> Tensor:
    """Arguments and result as :func:`specops.ops.mha`; ``plan`` is not needed."""
    batch, num_rows = page_table.shape[0], q.shape[0]
    num_heads, num_kv_heads, num_keys = q.shape[1], k_cache.shape[2], page_table.shape[1] * k_cache.shape[1]
    width = layout.max_query_len
    if num_rows == 0:
        return q.new_empty((0, num_heads, v_cache.shape[3]))
    query_lens = layout.query_lens(batch, q.device)
    starts = layout.offsets(batch, q.device)[:-1]
    row_of = (starts[:, None] + torch.arange(width, device=q.device)).clamp(max=num_rows - 1)
    visible = visible_keys(seq_lens, query_lens, width, num_keys, window, tree_mask)
    per_request = max(width * num_heads * num_keys, num_keys * num_kv_heads * q.shape[2])
    step = max(1, SLICE_ELEMENTS // max(per_request, 1))
    slices = []
    for first in range(0, batch, step):
        part = slice(first, first + step)
        keys = gather(k_cache, page_table[part], seq_lens[part], k_scale, accumulator(q.dtype))
        values = gather(v_cache, page_table[part], seq_lens[part], v_scale, accumulator(q.dtype))
        slices.append(_attend(q[row_of[part]], keys, values, visible[part], scale, softcap, sinks))
    dense = torch.cat(slices).to(q.dtype)
    if layout.is_uniform:
        return dense.reshape(num_rows, num_heads, v_cache.shape[3])
    request = layout.request_ids(num_rows, batch, q.device)
    place = torch.arange(num_rows, device=q.device) - starts[request]
    rows = dense[request, place.clamp(0, width - 1)]
    # Rows behind the last request belong to nobody and are zero.
    return torch.where((place < query_lens[request])[:, None, None], rows, 0)


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
) -> Tensor:
    """Arguments and result as :func:`specops.ops.mla`: one KV head whose key is the cache row, its value the latent."""
    cache = kv_cache.unsqueeze(2)
    return mha(
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
    )


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype that scores and sums are kept in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def visible_keys(
    seq_lens: Tensor, query_lens: Tensor, width: int, num_keys: int, window: int | None, tree_mask: Tensor | None
) -> Tensor:
    """``[B, width, num_keys]`` bool: which keys of its request a row sees.

    Args:
        seq_lens, query_lens: ``[B]`` int32.
        width: rows of the widest request; rows at or after a request's ``query_len`` see nothing.
        num_keys: keys the page table has room for.
        window: keys a row sees counting itself, or None.
        tree_mask: ``[B * width, W]`` bool or None.
    """
    key = torch.arange(num_keys, device=seq_lens.device)
    row = torch.arange(width, device=seq_lens.device)
    if tree_mask is None:
        position = seq_lens[:, None] - query_lens[:, None] + row
        seen = (key <= position[:, :, None]) & (row < query_lens[:, None])[:, :, None]
    else:
        tree_width = tree_mask.shape[1]
        bits = tree_mask.view(seq_lens.shape[0], width, tree_width)
        prefix = seq_lens - tree_width
        own = key - prefix[:, None]
        own_bits = bits.gather(2, own.clamp(0, tree_width - 1)[:, None, :].expand(-1, width, -1))
        seen = (own < 0)[:, None, :] | (own_bits & (own < tree_width)[:, None, :])
        position = prefix[:, None] + bits.sum(dim=2) - 1
    if window is not None:
        seen = seen & (key > position[:, :, None] - window)
    return seen


def gather(cache: Tensor, page_table: Tensor, seq_lens: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``[B, H, max_pages * S, D]`` in ``dtype``: every page of each request, zero at and after its seq_len."""
    batch, max_pages = page_table.shape
    page_size, num_heads, dim = cache.shape[1:]
    # Columns behind a request's live pages may hold any number.
    pages = page_table.clamp(0, cache.shape[0] - 1).long()
    rows = as_bits(cache)[pages].view(cache.dtype).to(dtype).reshape(batch, max_pages * page_size, num_heads, dim)
    if scale is not None:
        rows = rows * scale.to(dtype)
    live = torch.arange(max_pages * page_size, device=cache.device) < seq_lens[:, None]
    return torch.where(live[:, :, None, None], rows, 0).transpose(1, 2)


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, visible: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Softmax attention: q ``[B, C, Hq, D]``, keys ``[B, Hkv, K, D]``, visible ``[B, C, K]`` to ``[B, C, Hq, Dv]``."""
    batch, width, num_heads, head_dim = q.shape
    num_kv_heads = keys.shape[1]
    # Query heads of one KV head become rows of one matrix product.
    grouped = (
        q.view(batch, width, num_kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4).reshape(batch, num_kv_heads, -1, head_dim)
    )
    scores = (grouped.to(keys.dtype) @ keys.transpose(2, 3)) * scale
    scores = scores.view(batch, num_heads, width, -1)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible[:, None], float("-inf"))
    top = scores.amax(dim=3, keepdim=True)
    if sinks is not None:
        sink = sinks.to(keys.dtype)[:, None, None]
        top = torch.maximum(top, sink)
    # A row that sees nothing has no maximum; any finite number keeps its weights at zero.
    top = torch.where(top == float("-inf"), 0, top)
    weights = torch.exp(scores - top)
    total = weights.sum(dim=3, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sink - top)
    weights = torch.where(total > 0, weights / total, 0)
    out = weights.view(batch, num_kv_heads, -1, weights.shape[3]) @ values
    return out.view(batch, num_heads, width, -1).transpose(1, 2)
