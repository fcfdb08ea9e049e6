"""The CPU backend: attention over a paged cache that does no work past a request's keys.

Short query blocks in float32 or bfloat16 are one call of a compiled kernel (:mod:`specops.ops.native`), which reads pages
where they lie. Everything else, and all of it on a machine without a C compiler, is vectorised PyTorch: a CPU kernel may
read values for free, so requests are taken one at a time, and of each only the pages that it owns and its window
reaches: as a view where their ids are consecutive, gathered otherwise. The query heads of one KV head become rows of one
matrix product, so K and V are never repeated. Scores and sums are float32, float64 for a float64 query.

Rows go in blocks small enough for their scores to stay in cache, and a block reads no key behind its last row. A few
half-precision rows go through ``scaled_dot_product_attention`` instead, which does not widen K and V first.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from specops.layout import QueryLayout
from specops.ops import native
from specops.ops.reference import accumulator, visible_keys
from specops.ops.store_kv import as_bits

# Scores of one block of rows. With 9 heads over 512 keys, blocks of 64 rows took half the time per row of 128 rows.
BLOCK_SCORES = 1 << 18
# Up to this many rows of a KV head, fused attention beats widening half-precision K and V to float32.
FUSED_ROWS = 8
# Query rows of a request up to which the compiled kernels give a row the result it has alone.
NATIVE_ROWS = 64


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
    if k_scale is None and is_native(q, k_cache, v_cache, layout, window, tree_mask, max_rows=None):
        return _native(q, k_cache, v_cache, page_table, seq_lens, layout, scale, window, softcap, sinks, tree_mask)
    if k_scale is not None:
        scale = scale * k_scale.item()
    out = _attention(q, k_cache, v_cache, page_table, seq_lens, layout, scale, window, softcap, sinks, tree_mask)
    return out if v_scale is None else out.mul_(v_scale)


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
    if kv_scale is not None:
        scale = scale * kv_scale.item()
    q, cache = torch.cat((q_latent, q_rope), dim=2), kv_cache.unsqueeze(2)
    values = cache[..., : q_latent.shape[2]]
    out = _attention(q, cache, values, page_table, seq_lens, layout, scale, window, softcap, sinks, tree_mask)
    return out if kv_scale is None else out.mul_(kv_scale)


def is_native(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    layout: QueryLayout,
    window: int | None,
    tree_mask: Tensor | None,
    max_rows: int | None = NATIVE_ROWS,
) -> bool:
    """Whether the compiled kernel takes a call. Its vectors are of 16 floats at most, so head dims are multiples of 16.

    Args:
        max_rows: query rows of a request at most, for a caller that needs each row's result to be that of the row alone;
            None takes any number.
    """
    dim, value_dim = q.shape[2], v_cache.shape[3]
    return (
        q.dtype in native.DTYPES
        and k_cache.dtype == q.dtype
        and (max_rows is None or layout.max_query_len <= max_rows)
        and dim % 16 == 0
        and value_dim % 16 == 0
        and max(dim, value_dim) <= native.MAX_DIM
        and q.shape[1] <= native.MAX_GROUP * k_cache.shape[2]
        and (window is None or tree_mask is None)
        and native.library() is not None
    )


def _native(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    layout: QueryLayout,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    tree_mask: Tensor | None,
) -> Tensor:
    """``[T, Hq, Dv]`` of a call that :func:`is_native` takes."""
    lib = native.library()
    assert lib is not None
    out = torch.empty((*q.shape[:2], v_cache.shape[3]), dtype=q.dtype, device="cpu")
    call, _kept = native_call(
        q, out, k_cache, v_cache, page_table, seq_lens, layout, scale, window, softcap, sinks, tree_mask
    )
    if lib.specops_attention(ctypes.byref(call), torch.get_num_threads()):
        raise MemoryError("no memory was left for the partial results of attention")
    return out


def native_call(
    q: Tensor,
    out: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    layout: QueryLayout,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    tree_mask: Tensor | None,
) -> tuple[native.Attention, list[Tensor]]:
    """The compiled kernel's view of a call, and the tensors that must live until it is over."""
    num_rows, num_heads, dim = q.shape
    page_size, num_kv_heads, value_dim = v_cache.shape[1:]
    # Small tensors, views as a rule where they are not contiguous already.
    page_table, seq_lens = page_table.contiguous(), seq_lens.contiguous()
    start, sinks, tree_mask = (
        None if tensor is None else tensor.contiguous() for tensor in (layout.query_start, sinks, tree_mask)
    )
    call = native.Attention(
        q.data_ptr(),
        out.data_ptr(),
        *q.stride()[:2],
        num_rows,
        page_table.data_ptr(),
        seq_lens.data_ptr(),
        None if start is None else start.data_ptr(),
        page_table.stride(0),
        page_table.shape[0],
        layout.max_query_len,
        page_table.shape[1],
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        None if sinks is None else sinks.data_ptr(),
        None if tree_mask is None else tree_mask.data_ptr(),
        *((0, 0) if tree_mask is None else (tree_mask.stride(0), tree_mask.shape[1])),
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        num_heads,
        num_kv_heads,
        dim,
        value_dim,
        page_size,
        window or 0,
        q.dtype == torch.bfloat16,
        scale,
        softcap or 0.0,
    )
    return call, [tensor for tensor in (page_table, seq_lens, start, sinks, tree_mask) if tensor is not None]


def _attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    layout: QueryLayout,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    tree_mask: Tensor | None,
) -> Tensor:
    """``[T, Hq, Dv]``, a loop over requests."""
    num_rows, num_heads, head_dim = q.shape
    page_size, num_kv_heads, value_dim = v_cache.shape[1:]
    out = q.new_empty((num_rows, num_heads, value_dim))
    flat_keys, flat_values = _flat(k_cache), _flat(v_cache)
    lens = seq_lens.tolist()
    width = layout.max_query_len
    starts = range(0, num_rows + 1, width) if layout.query_start is None else layout.query_start.tolist()
    capacity = page_table.shape[1] * page_size
    widened = q.to(accumulator(q.dtype)) * scale
    # A lone row of a request sees all keys in its reach.
    plain = softcap is None and sinks is None and tree_mask is None
    narrow = widened.dtype != q.dtype and k_cache.dtype == q.dtype and value_dim == head_dim
    fused = narrow and num_heads <= FUSED_ROWS * num_kv_heads
    for request, seq_len in enumerate(lens):
        first, last = starts[request], starts[request + 1]
        if first == last:
            continue
        reach = seq_len if window is None else _reach(last - first, window, tree_mask)
        begin, end = max(0, seq_len - reach), min(seq_len, capacity)
        if begin >= end:
            out[first:last].zero_()
            continue
        head = begin // page_size
        pages = page_table[request, head : -(-end // page_size)]
        ids = pages.tolist()
        # Slots of the keys: counted from page 0 where they are read in place, else from the first page gathered.
        in_place = ids == list(range(ids[0], ids[0] + len(ids))) and flat_keys is not None and flat_values is not None
        origin = (ids[0] - head if in_place else -head) * page_size
        slots = slice(origin + begin, origin + end)
        keys = _cached(k_cache, flat_keys if in_place else None, pages, slots)
        values = _cached(v_cache, flat_values if in_place else None, pages, slots)
        if plain and fused and last - first == 1:
            row = q[first].view(1, num_kv_heads, -1, head_dim)
            result = scaled_dot_product_attention(row, keys[None], values[None], scale=scale)
            out[first] = result.view(num_heads, value_dim)
            continue
        keys, values = keys.to(widened.dtype), values.to(widened.dtype)
        if plain and last - first == 1:
            row = widened[first].view(num_kv_heads, -1, head_dim)
            weights = torch.softmax(torch.bmm(row, keys.transpose(1, 2)), -1)
            out[first] = torch.bmm(weights, values).view(num_heads, value_dim)
            continue
        step = max(1, BLOCK_SCORES // (num_heads * (end - begin)))
        for start in range(first, last, step):
            rows = slice(start, min(start + step, last))
            if tree_mask is None:
                position = seq_len - last + start - begin
                num_keys = max(0, min(end - begin, position + rows.stop - start))
                hidden, blind = _hidden(rows.stop - start, position, num_keys, window)
            else:
                num_keys = end - begin
                hidden, blind = _hidden_by_tree(tree_mask[rows], seq_len, begin, num_keys, window)
            if num_keys == 0:
                out[rows].zero_()
                continue
            out[rows] = _block(widened[rows], keys[:, :num_keys], values[:, :num_keys], hidden, blind, softcap, sinks)
    if starts[len(lens)] < num_rows:
        # Rows behind the last request belong to nobody.
        out[starts[len(lens)] :].zero_()
    return out


def _reach(num_rows: int, window: int, tree_mask: Tensor | None) -> int:
    """How many of a request's last keys its rows can see through a window."""
    if tree_mask is None:
        return num_rows - 1 + window
    return tree_mask.shape[1] + window


def _flat(cache: Tensor) -> Tensor | None:
    """``[H, P * S, D]`` view of a cache whose pages lie behind one another, as they do unless it is HND."""
    if cache.stride(0) != cache.shape[1] * cache.stride(1):
        return None
    return cache.flatten(0, 1).transpose(0, 1)


def _cached(cache: Tensor, flat: Tensor | None, pages: Tensor, slots: slice) -> Tensor:
    """``[H, K, D]`` in the cache's dtype: ``slots`` of ``flat`` if that is given, else of ``pages`` gathered in order."""
    if flat is None:
        gathered = as_bits(cache).index_select(0, pages).view(cache.dtype)
        flat = gathered.flatten(0, 1).transpose(0, 1)
    return flat[:, slots]


def _block(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    hidden: Tensor | None,
    blind: Tensor | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """``[R, Hq, Dv]``: softmax attention of some rows of one request.

    Args:
        q: ``[R, Hq, D]``, scale included.
        keys, values: ``[Hkv, K, D]`` and ``[Hkv, K, Dv]``.
        hidden: ``[R, M]`` bool, which of the last ``M`` keys a row does not see, or None.
        blind: ``[R]`` bool, rows that see no key at all, or None if there are none.
    """
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads, num_keys = keys.shape[:2]
    grouped = q.view(num_rows, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3).reshape(num_kv_heads, -1, head_dim)
    scores = torch.bmm(grouped, keys.transpose(1, 2))
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    if hidden is not None:
        by_row = scores.view(num_heads, num_rows, num_keys)
        by_row[:, :, num_keys - hidden.shape[1] :].masked_fill_(hidden, float("-inf"))
    if sinks is None:
        weights = torch.softmax(scores, -1)
    else:
        sink = sinks.to(q.dtype).view(num_kv_heads, -1, 1).repeat_interleave(num_rows, 1)
        top = torch.maximum(scores.amax(dim=2, keepdim=True), sink)
        weights = torch.exp(scores - top)
        weights = weights / (weights.sum(dim=2, keepdim=True) + torch.exp(sink - top))
    result = torch.bmm(weights, values).view(num_heads, num_rows, -1).transpose(0, 1)
    # The softmax of a blind row is 0 / 0.
    return result if blind is None else result.masked_fill(blind[:, None, None], 0)


@functools.lru_cache(maxsize=64)
def _hidden(num_rows: int, position: int, num_keys: int, window: int | None) -> tuple[Tensor | None, Tensor | None]:
    """``hidden`` and ``blind`` of :func:`_block` for rows at ``position``, ``position + 1``, ... of a plain layout.

    Positions count from the first key of the block. A function of numbers alone, so the layers of a step share it.
    """
    last = position + num_rows - 1
    complete = position >= 0 and num_keys == last + 1
    windowed = window is not None and window <= last
    num_columns = num_rows if complete and not windowed else num_keys
    key = torch.arange(num_keys - num_columns, num_keys, device="cpu")
    place = torch.arange(position, last + 1, device="cpu")[:, None]
    hidden = key > place
    if window is not None and windowed:
        hidden |= key <= place - window
    return _unless_needless(hidden, complete)


def _hidden_by_tree(
    bits: Tensor, seq_len: int, begin: int, num_keys: int, window: int | None
) -> tuple[Tensor | None, Tensor | None]:
    """As :func:`_hidden`, for rows whose visible keys ``bits [R, W]`` tells, over keys ``begin`` to ``begin + num_keys``."""
    num_rows, width = bits.shape
    if begin == 0 and width < seq_len == num_keys and (window is None or window >= seq_len):
        return ~bits, None
    lens = torch.tensor([seq_len], device="cpu")
    seen = visible_keys(lens, lens, num_rows, begin + num_keys, window, bits)[0, :, begin:]
    return _unless_needless(~seen, False)


def _unless_needless(hidden: Tensor, never_blind: bool) -> tuple[Tensor | None, Tensor | None]:
    """None in place of masks without a set bit."""
    blind = None if never_blind else hidden.all(dim=1)
    return hidden if hidden.any() else None, blind if blind is not None and blind.any() else None
