"""``PagedAttention``: store the new keys and values in the layer's cache, then attend. The plain layer for any model.

    attention = PagedAttention(num_heads=32, num_kv_heads=8, head_dim=128, cache=cache)
    out = attention(q, k, v, meta)                          # [T, 32, 128]

The Llama-style layers of this package are this module with projections around it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specops import ops
from specops.kv_cache import PagedKVCache
from specops.metadata import AttentionMetadata


class PagedAttention(nn.Module):
    """Attention over a paged KV cache, projections and rotary embedding left to the caller.

    Args:
        num_heads, num_kv_heads, head_dim: shape of the query and of the cache.
        cache: pages of this layer; may be set later (``module.cache = ...``).
        value_dim: value dim; ``head_dim`` when not given.
        scale: factor on the scores, ``head_dim ** -0.5`` when not given.
        window: keys a row sees counting itself; None sees all.
        softcap: soft cap on the scores.
        sinks: whether a learned logit per head joins the softmax's denominator; parameter ``sinks`` ``[num_heads]``.
        backend: attention backend by name, or ``"auto"``.
    """

    cache: PagedKVCache | None
    sinks: nn.Parameter | None

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        cache: PagedKVCache | None = None,
        *,
        value_dim: int | None = None,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.value_dim = value_dim or head_dim
        self.scale = head_dim**-0.5 if scale is None else scale
        self.window, self.softcap, self.backend = window, softcap, backend
        self.sinks = nn.Parameter(torch.zeros(num_heads, dtype=torch.float32)) if sinks else None
        self.cache = cache

    def allocate_cache(
        self, num_pages: int, page_size: int, *, dtype: torch.dtype, device: torch.device | str
    ) -> PagedKVCache:
        """Give this layer a cache of its own and return it. Arguments as for :class:`specops.PagedKVCache`."""
        self.cache = PagedKVCache(
            num_pages, page_size, self.num_kv_heads, self.head_dim, self.value_dim, dtype=dtype, device=device
        )
        return self.cache

    def forward(self, q: Tensor, k: Tensor, v: Tensor, meta: AttentionMetadata) -> Tensor:
        """Store ``k`` and ``v`` at ``meta.slots``, then attend.

        Args:
            q: ``[T, num_heads, head_dim]``, rotated.
            k: ``[T, num_kv_heads, head_dim]``, rotated.
            v: ``[T, num_kv_heads, value_dim]``.
            meta: metadata of this forward.

        Returns:
            ``[T, num_heads, value_dim]`` in q's dtype.

        Raises:
            RuntimeError: if the layer has no cache yet.
            ValueError: if the metadata was made for another page size.
        """
        return self.attend(q, k, v, meta)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, meta: AttentionMetadata) -> Tensor:
        """What :meth:`forward` does, under a name that subclasses with projections can call."""
        cache = self.ready_cache(meta)
        ops.store_kv(cache.k, cache.v, k, v, meta.slots, k_scale=cache.k_scale, v_scale=cache.v_scale)
        return self.read_cache(q, meta)

    def ready_cache(self, meta: AttentionMetadata) -> PagedKVCache:
        """The cache, which must be there and have the page size that ``meta`` was made for."""
        if self.cache is None:
            raise RuntimeError("this attention layer has no KV cache; call allocate_caches() on its model, or set .cache")
        meta.check_page_size(self.cache.page_size)
        return self.cache

    def read_cache(self, q: Tensor, meta: AttentionMetadata) -> Tensor:
        """Attend to what the cache holds, keys and values of ``q``'s own rows included: ``[T, num_heads, value_dim]``."""
        cache = self.cache
        assert cache is not None
        return ops.mha(
            q,
            cache.k,
            cache.v,
            meta.page_table,
            meta.seq_lens,
            layout=meta.layout,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
            sinks=None if self.sinks is None else self.sinks.float(),
            tree_mask=meta.tree_mask,
            k_scale=cache.k_scale,
            v_scale=cache.v_scale,
            plan=meta.plan,
            backend=self.backend,
        )

    def extra_repr(self) -> str:
        return f"heads={self.num_heads}/{self.num_kv_heads}, head_dim={self.head_dim}, window={self.window}"
