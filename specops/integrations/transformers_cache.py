"""The paged cache of :mod:`specops.integrations.transformers`: what its layers hand to the attention function."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from specops.layout import QueryLayout
from specops.metadata import AttentionMetadata, attention_metadata

NAME = "specops"
# What a PagedCache gives as the offset of its first key: there are no dense keys to count.
PAGED = -1


class PagedStates(NamedTuple):
    """What :meth:`PagedLayer.update` returns as keys, and again as values.

    Attributes:
        new: ``[B, Hkv, L, D]`` the new tokens' keys (or values), not stored yet.
        pages: ``[P, S, Hkv, D]`` where they belong.
        page_table: ``[B, max_pages]`` int32.
        layer: the layer they come from.
    """

    new: Tensor
    pages: Tensor
    page_table: Tensor
    layer: PagedLayer

    @property
    def shape(self) -> torch.Size:
        """What other attention functions ask for first."""
        raise TypeError(
            f'keys of a PagedCache are in pages, which only attn_implementation="{NAME}" reads; '
            f'call model.set_attn_implementation("{NAME}"), or give another cache'
        )


class PagedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """Pages of one layer. The page table and the count of tokens seen belong to the whole cache."""

    is_compileable = True
    is_croppable = True
    is_sliding = False

    keys: Tensor
    values: Tensor

    def __init__(self, cache: PagedCache, counts: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.max_tokens, self.page_size, self.backend = cache.max_tokens, cache.page_size, cache.backend
        self.num_pages, self.page_table, self.seen, self.counts = cache.num_pages, cache.page_table, cache.seen, counts
        self.slots = cache.slots

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the pages in the dtype and on the device of the first keys."""
        for name, states in (("keys", key_states), ("values", value_states)):
            shape = (self.num_pages, self.page_size, states.shape[1], states.shape[3])
            setattr(self, name, torch.zeros(shape, dtype=states.dtype, device=states.device))
        self.device, self.dtype = key_states.device, key_states.dtype
        if self.page_table.device != key_states.device:
            raise ValueError(
                f"the cache was made for {self.page_table.device}, the model's keys are on {key_states.device}; give "
                "PagedCache the model's device"
            )
        if not torch.compiler.is_compiling():
            for tensor in (self.keys, self.values, self.page_table, self.seen):
                torch._dynamo.mark_static_address(tensor)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[PagedStates, PagedStates]:  # type: ignore[override]
        """Hand on the new tokens with their pages; :func:`attention` stores them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        batch = key_states.shape[0]
        if batch > self.page_table.shape[0]:
            raise ValueError(
                f"a batch of {batch} sequences came to a PagedCache for {self.page_table.shape[0]}; give it max_requests="
                f"{batch} (beams count as sequences)"
            )
        if self.counts:
            self.seen.add_(key_states.shape[2])
        table = self.page_table[:batch]
        return PagedStates(key_states, self.keys, table, self), PagedStates(value_states, self.values, table, self)

    def metadata(self, lens: Tensor, page_table: Tensor, num_new: int) -> AttentionMetadata:
        """Metadata of a forward of ``num_new`` tokens a request; outside of a compiled graph made once for all layers."""
        layout = QueryLayout.uniform(num_new)
        if torch.compiler.is_compiling():
            return attention_metadata(page_table, lens.reshape(-1), layout, self.page_size)
        if self.slots.lens is not lens or self.slots.meta is None:
            self.slots.lens = lens
            self.slots.meta = attention_metadata(page_table, lens.reshape(-1), layout, self.page_size)
        return self.slots.meta

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.max_tokens, PAGED

    def get_seq_length(self) -> Any:
        """Tokens seen, padding included; a tensor, as that of transformers' own static cache."""
        return self.seen if self.is_initialized else 0

    def get_max_length(self) -> int:
        return self.max_tokens

    def get_max_cache_shape(self) -> int:
        return self.max_tokens

    def reset(self) -> None:
        if self.counts:
            self.seen.zero_()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens: a negative number, as transformers calls it. Their slots are written again later."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes the number of tokens to remove as a negative number, got {tokens_to_remove}")
        if self.counts:
            self.seen.add_(tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row ``i`` continues row ``beam_idx[i]``: its pages are copied."""
        if not self.is_initialized:
            return
        rows = self.page_table[: beam_idx.shape[0]].long()
        source = rows[beam_idx.to(rows.device)]
        for pages in (self.keys, self.values):
            pages[rows] = pages[source]

    def offload(self) -> None:
        raise NotImplementedError("a PagedCache is not offloaded; give fewer max_tokens or requests")


class _Slots:
    """The last forward's metadata, for its other layers."""

    lens: Tensor | None = None
    meta: AttentionMetadata | None = None


class PagedCache(Cache):
    """A paged KV cache for transformers models, read by ``attn_implementation="specops"``.

    Args:
        config: the model's config.
        max_requests: most sequences of a batch; beams count.
        max_tokens: most tokens of one sequence, prompt, padding and answer together.
        page_size: tokens a page.
        device: where the model's attention runs.
        page_table: ``[max_requests, max_pages]`` int32 page ids of a pool of your own, page 0 being reserved; when not given
            every sequence owns the pages for ``max_tokens`` from the start.
        num_pages: pages of the pool; needed with ``page_table``.
        backend: attention backend by name, or ``"auto"``.

    Pages are allocated at the first forward, in the dtype of the model's keys. Their addresses and that of the table stay,
    so that CUDA graphs may hold them; ``reset()`` makes the cache ready for other prompts.

    Raises:
        ValueError: sizes below 1, a model whose layers are not all attention, a page table that does not fit.
    """

    def __init__(
        self,
        config: Any,
        max_requests: int,
        max_tokens: int,
        *,
        page_size: int = 16,
        device: torch.device | str = "cpu",
        page_table: Tensor | None = None,
        num_pages: int | None = None,
        backend: str = "auto",
    ) -> None:
        text = config.get_text_config(decoder=True)
        _refuse_layers(text)
        if min(max_requests, max_tokens, page_size) < 1:
            raise ValueError(
                f"max_requests, max_tokens and page_size must be at least 1, got {max_requests}, {max_tokens}, {page_size}"
            )
        columns = -(-max_tokens // page_size)
        if page_table is None:
            count = max_requests * columns
            page_table = torch.arange(1, count + 1, dtype=torch.int32, device=device).view(max_requests, columns)
            num_pages = count + 1
        if num_pages is None or page_table.dtype != torch.int32 or page_table.dim() != 2:
            raise ValueError(
                f"page_table must be [max_requests, max_pages] int32 and come with num_pages; got {page_table.dtype} "
                f"{list(page_table.shape)}, num_pages {num_pages}"
            )
        if page_table.shape[0] < max_requests or page_table.shape[1] < columns:
            raise ValueError(
                f"page_table {list(page_table.shape)} is too small for {max_requests} requests of {max_tokens} tokens, "
                f"which is {columns} pages of {page_size} each"
            )
        self.max_tokens, self.page_size, self.num_pages, self.backend = max_tokens, page_size, num_pages, backend
        self.page_table = page_table
        # A tensor, so that counting needs no recompilation.
        self.seen = torch.zeros((), dtype=torch.int64, device=page_table.device)
        self.slots = _Slots()
        super().__init__(layers=[PagedLayer(self, counts=index == 0) for index in range(text.num_hidden_layers)])


def _refuse_layers(config: Any) -> None:
    """Chunked, linear and cross attention need other masks or other caches."""
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if getattr(config, "attention_chunk_size", None) is not None:
        kinds.add("chunked_attention")
    if kinds:
        raise ValueError(f"this model has layers of {', '.join(sorted(kinds))}; full and sliding attention can be served")
