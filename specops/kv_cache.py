"""Paged caches as modules, and the host-side book of who owns which page.

Data flow: an engine *reserves* pages for a request in a :class:`PageTable`, which takes them from a
:class:`PageAllocator`; the table's device tensor goes to the attention ops as ``page_table``; layers write into their
:class:`PagedKVCache` or :class:`PagedLatentCache` at slots computed inside the compiled forward.

Caches are buffers of modules, so torch.compile sees fixed addresses and no graph is skipped for mutating them. Page 0 is
reserved: padding points at it and nobody owns it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

FP8 = torch.float8_e4m3fn


class PagedKVCache(nn.Module):
    """K and V pages of one attention layer.

    Args:
        num_pages: pages of the pool, the reserved page 0 included.
        page_size: tokens per page.
        num_kv_heads: KV heads.
        head_dim: key dim ``D``.
        value_dim: value dim ``Dv``; ``head_dim`` when not given.
        dtype: dtype of the pages. float8_e4m3fn caches carry ``k_scale`` and ``v_scale``.
        device: where the pages live.
        k_scale, v_scale: scales of an fp8 cache; pages hold ``value / scale``.

    Attributes:
        k: ``[num_pages, page_size, num_kv_heads, head_dim]``.
        v: ``[num_pages, page_size, num_kv_heads, value_dim]``.
        k_scale, v_scale: one-element float32 buffers for an fp8 cache, else None.

    Raises:
        ValueError: a size below 1, fewer than 2 pages, or scales for a cache that is not fp8.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        k_scale: float | None = None,
        v_scale: float | None = None,
    ) -> None:
        super().__init__()
        value_dim = head_dim if value_dim is None else value_dim
        _check_sizes(num_pages, page_size=page_size, num_kv_heads=num_kv_heads, head_dim=head_dim, value_dim=value_dim)
        if dtype != FP8 and (k_scale is not None or v_scale is not None):
            raise ValueError(f"k_scale and v_scale belong to a float8_e4m3fn cache; this one is {dtype}")
        shape = (num_pages, page_size, num_kv_heads)
        self.register_buffer("k", torch.zeros((*shape, head_dim), dtype=dtype, device=device), persistent=False)
        self.register_buffer("v", torch.zeros((*shape, value_dim), dtype=dtype, device=device), persistent=False)
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
            value = None
            if dtype == FP8:
                value = torch.tensor([1.0 if scale is None else scale], dtype=torch.float32, device=device)
            self.register_buffer(name, value, persistent=False)

    @property
    def num_pages(self) -> int:
        return self.k.shape[0]

    @property
    def page_size(self) -> int:
        return self.k.shape[1]

    def extra_repr(self) -> str:
        return f"k={tuple(self.k.shape)}, v={tuple(self.v.shape)}, dtype={self.k.dtype}"


class PagedLatentCache(nn.Module):
    """Latent and rotary-key pages of one MLA layer.

    Args:
        num_pages, page_size, dtype, device: as for :class:`PagedKVCache`.
        latent_dim, rope_dim: ``Dc`` and ``Dr``; 512 and 64 for DeepSeek.
        kv_scale: scale of an fp8 cache.

    Attributes:
        kv: ``[num_pages, page_size, latent_dim + rope_dim]``.
        kv_scale: one-element float32 buffer for an fp8 cache, else None.
    """

    kv: Tensor
    kv_scale: Tensor | None

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        latent_dim: int = 512,
        rope_dim: int = 64,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        kv_scale: float | None = None,
    ) -> None:
        super().__init__()
        _check_sizes(num_pages, page_size=page_size, latent_dim=latent_dim, rope_dim=rope_dim)
        if dtype != FP8 and kv_scale is not None:
            raise ValueError(f"kv_scale belongs to a float8_e4m3fn cache; this one is {dtype}")
        pages = torch.zeros((num_pages, page_size, latent_dim + rope_dim), dtype=dtype, device=device)
        self.register_buffer("kv", pages, persistent=False)
        value = None
        if dtype == FP8:
            value = torch.tensor([1.0 if kv_scale is None else kv_scale], dtype=torch.float32, device=device)
        self.register_buffer("kv_scale", value, persistent=False)

    @property
    def num_pages(self) -> int:
        return self.kv.shape[0]

    @property
    def page_size(self) -> int:
        return self.kv.shape[1]

    def extra_repr(self) -> str:
        return f"kv={tuple(self.kv.shape)}, dtype={self.kv.dtype}"


class OutOfPages(RuntimeError):
    """The pool has too few free pages. Nothing was taken; the request that asked is as it was."""


class PageAllocator:
    """Hands out page ids 1 to ``num_pages - 1``; page 0 is reserved for padding.

    Args:
        num_pages: pages of the pool, page 0 included.
        page_size: tokens per page, equal to that of the caches that share these ids.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        _check_sizes(num_pages, page_size=page_size)
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, 0, -1))
        self._owned = bytearray(num_pages)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` pages.

        Raises:
            OutOfPages: with both numbers, before anything is taken.
        """
        if count > len(self._free):
            raise OutOfPages(
                f"{count} pages of {self.page_size} tokens asked for, {len(self._free)} of {self.num_pages - 1} free; "
                "let a request finish, or make the cache larger"
            )
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._owned[page] = 1
        return taken

    def free(self, pages: list[int]) -> None:
        """Give pages back.

        Raises:
            ValueError: for a page that is not handed out (freed twice, reserved or out of range); none is freed then.
        """
        bad = [page for page in pages if not 0 < page < self.num_pages or not self._owned[page]]
        if bad or len(set(pages)) != len(pages):
            raise ValueError(f"pages {bad or pages} are not handed out, or named twice; nothing was freed")
        for page in pages:
            self._owned[page] = 0
        self._free.extend(reversed(pages))

    def check(self) -> None:
        """Conservation: every page but page 0 is either free or owned, once.

        Raises:
            RuntimeError: if the book does not add up.
        """
        free = set(self._free)
        if len(free) != len(self._free) or 0 in free or any(self._owned[page] for page in free):
            raise RuntimeError("the free list names a page twice, page 0, or an owned page")
        if len(free) + sum(self._owned) != self.num_pages - 1:
            raise RuntimeError(f"{len(free)} free and {sum(self._owned)} owned pages do not make {self.num_pages - 1}")


class PageTable:
    """Rows of page ids, one row a live request, mirrored in one device tensor.

    Args:
        allocator: where pages come from.
        max_requests: rows.
        max_tokens: tokens one request may ever hold, drafting headroom included.
        device: where the mirror lives.
    """

    def __init__(
        self, allocator: PageAllocator, max_requests: int, max_tokens: int, device: torch.device | str = "cpu"
    ) -> None:
        self.allocator = allocator
        self.max_pages = allocator.pages_for(max_tokens)
        self._pages: dict[int, list[int]] = {}
        self._host = torch.zeros((max_requests, self.max_pages), dtype=torch.int32)
        self._device = self._host.to(device, copy=True)
        self._changed: set[int] = set()

    def reserve(self, row: int, num_tokens: int) -> None:
        """Make sure row ``row`` has pages for its first ``num_tokens`` tokens.

        Raises:
            OutOfPages: the pool is too small now; the row keeps what it had.
            ValueError: the row can never hold that many.
        """
        pages = self._pages.get(row, [])
        needed = self.allocator.pages_for(num_tokens)
        if needed > self.max_pages:
            raise ValueError(
                f"{num_tokens} tokens need {needed} pages, a row holds {self.max_pages} of {self.allocator.page_size} tokens"
            )
        if needed <= len(pages):
            return
        new = self.allocator.allocate(needed - len(pages))
        self._host[row, len(pages) : needed] = torch.tensor(new, dtype=torch.int32)
        self._pages[row] = pages + new
        self._changed.add(row)

    def release(self, row: int) -> None:
        """Give the row's pages back and point it at page 0."""
        self.allocator.free(self._pages.pop(row, []))
        self._host[row] = 0
        self._changed.add(row)

    def num_pages(self, row: int) -> int:
        return len(self._pages.get(row, []))

    def tensor(self) -> Tensor:
        """``[max_requests, max_pages]`` int32 on the device, current; always the same storage.

        What has changed is copied in stream order, and nobody waits for it: the host may change rows again at once.
        """
        if self._changed:
            if self._device.device.type == "cpu" or len(self._changed) > 8:
                self._device.copy_(sendable(self._host, self._device.device), non_blocking=True)
            else:
                rows = sorted(self._changed)
                for row, pages in zip(rows, sendable(self._host[rows], self._device.device), strict=True):
                    self._device[row].copy_(pages, non_blocking=True)
            self._changed.clear()
        return self._device


def sendable(values: Tensor | Sequence[int], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Numbers on the host in a copy from which ``device`` can fetch them while the host goes on; the caller's own copy may
    change meanwhile. Pinned memory for a GPU, which its allocator does not hand out again before the fetch is done."""
    tensor = values if isinstance(values, Tensor) else torch.tensor(values, dtype=dtype)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def _check_sizes(num_pages: int, **sizes: int) -> None:
    if num_pages < 2:
        raise ValueError(f"a pool needs at least 2 pages, since page 0 is reserved; got {num_pages}")
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be >= 1, got {size}")
