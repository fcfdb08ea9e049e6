"""SGLang's pool and batch as arguments of specops' ops. Needs no SGLang.

SGLang keeps a table of tokens: ``req_to_token[r, p]`` is the slot of request ``r``'s token ``p`` in the pool, and a page is
``page_size`` slots that follow one another, as here. Page 0 is its sink for padding, too. Lengths are counted in two ways:
of a draft step and of a target's verification they leave the new tokens out, elsewhere they count them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specops.layout import QueryLayout


def pages_of(buffer: Tensor, page_size: int, num_heads: int, dim: int) -> Tensor:
    """A pool's keys or values ``[P, S, Hkv, D]``, a view.

    Args:
        buffer: ``[slots, Hkv, D]`` or ``[slots, Hkv * D]`` with slots a multiple of ``page_size``, any slot stride; or
            pages already, heads before tokens: ``[P, Hkv, S, D]``.
        page_size, num_heads, dim: ``S``, ``Hkv``, ``D``.

    Raises:
        ValueError: a buffer of another shape.
    """
    if buffer.dim() == 4 and buffer.shape[1:] == (num_heads, page_size, dim):
        return buffer.transpose(1, 2)
    if buffer.dim() in (2, 3) and buffer.shape[1:].numel() == num_heads * dim and buffer.shape[0] % page_size == 0:
        return buffer.view(buffer.shape[0] // page_size, page_size, num_heads, dim)
    raise ValueError(
        f"SGLang's pool must be [slots, {num_heads}, {dim}] of whole pages of {page_size}, or "
        f"[pages, {num_heads}, {page_size}, {dim}]; got {list(buffer.shape)}"
    )


def page_table(req_to_token: Tensor, rows: Tensor, page_size: int, max_tokens: int) -> Tensor:
    """``[B, max_pages]`` int32: the pages of each request, in order. Entries behind its length are stale.

    Args:
        req_to_token: ``[R, W]`` int32, slot of each token.
        rows: ``[B]`` integer rows of it.
        page_size: slots of a page.
        max_tokens: longest request; columns behind it are left out.
    """
    first = req_to_token[:, : min(max_tokens, req_to_token.shape[1]) : page_size][rows]
    return (first if page_size == 1 else first // page_size).to(torch.int32)


def tree_mask(custom_mask: Tensor, num_requests: int, width: int) -> Tensor:
    """``[B * n, n]`` bool of SGLang's mask in its ``QLEN_ONLY`` form: ``n * n`` flat entries a request, own tokens alone."""
    return custom_mask[: num_requests * width * width].view(num_requests * width, width).bool()


def packed_layout(extend_lens: Tensor, host_lens: Sequence[int] | None) -> tuple[QueryLayout, int | None]:
    """Layout of a prefill, and its number of rows where the host knows it.

    Args:
        extend_lens: ``[B]`` integer, new tokens of each request.
        host_lens: the same on the host; without it the device is asked, which waits for it.
    """
    starts = torch.nn.functional.pad(extend_lens.cumsum(0, dtype=torch.int32), (1, 0))
    widest = int(extend_lens.max()) if host_lens is None else max(host_lens)
    return QueryLayout.packed(starts, max(1, widest)), None if host_lens is None else sum(host_lens)
