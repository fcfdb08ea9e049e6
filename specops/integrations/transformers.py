"""specops as an attention implementation of Hugging Face transformers, with a paged cache.

    from specops.integrations import transformers as specops_transformers

    specops_transformers.register()
    model.set_attn_implementation("specops")                # or attn_implementation="specops" when loading
    cache = specops_transformers.PagedCache(model.config, max_requests=4, max_tokens=1024)
    ids = model.generate(**inputs, past_key_values=cache)   # newer versions of transformers call it cache=

How data flows. transformers makes one mask a forward and hands it to every layer. The mask function registered here returns
no mask but the lengths: one int32 a request, the keys it has including the new tokens, padding left out. A layer's
:meth:`PagedLayer.update` returns the new keys and values together with the pages they belong in, and the attention function
stores them and attends through :func:`specops.ops.mha`. All of it is tensors handed on as arguments, so it compiles as one
graph and nothing is looked up in a global.

Padding must be on the left, as transformers pads for generation. Padding tokens take no page. Without a
:class:`PagedCache`, keys are packed into pages anew in each layer: right, but slow, which the first such decoding step says.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from specops import ops
from specops.layout import QueryLayout
from specops.metadata import AttentionMetadata, attention_metadata

try:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.cache_utils import Cache, CacheLayerMixin
except ImportError as error:
    raise ImportError(
        "specops.integrations.transformers needs transformers 5 or later: pip install 'specops[hf]'"
    ) from error

NAME = "specops"
# What a PagedCache gives as the offset of its first key: there are no dense keys to count.
_PAGED = -1
# Arguments that change what attention computes, which a model may hand on and the ops do not have.
_UNSUPPORTED = ("position_bias", "attention_bias", "block_mask", "indexer_mask", "cu_seq_lens_q", "cu_seqlens_q")


def register(name: str = NAME) -> None:
    """Make ``attn_implementation=name`` known to transformers. Calling it again changes nothing."""
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, lengths)


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
        return self.max_tokens, _PAGED

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


def lengths(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor:
    """The registered mask function: ``[B, 1, 1, 1]`` int32, keys of each request including the new tokens.

    Four dimensions, so that transformers hands it on as it is. Arguments are those of its mask functions.

    Raises:
        ValueError: the mask is not causal with padding on the left, the cache is full, or a static cache of transformers'.
    """
    if q_length > 1 and not torch.compiler.is_compiling():
        # Of a prompt alone: it costs a sync, and a decoding step's mask is made the same way.
        _refuse_masks(mask_function, local_size, not allow_is_causal_skip, device)
    if kv_offset == _PAGED:
        end = None if attention_mask is None else attention_mask.shape[-1]
        if end is None and not torch.compiler.is_compiling():
            end = int(q_offset) + q_length
        if end is not None and end > kv_length:
            raise ValueError(
                f"{end} tokens do not fit a PagedCache of max_tokens {kv_length} (padding counts); make it larger, or "
                "reset() it before other prompts"
            )
    else:
        # A static cache hands over memory that holds no keys yet, which lengths cannot tell from keys.
        dense = isinstance(q_offset, int) and kv_length + kv_offset == q_offset + q_length
        if not dense:
            raise ValueError(
                f'attn_implementation="{NAME}" reads a PagedCache or transformers\' dynamic cache, no static one'
            )
    if attention_mask is None:
        lens = torch.zeros(batch_size, dtype=torch.int32, device=device).add(q_offset + q_length)
    else:
        if q_length > 1 and not torch.compiler.is_compiling():
            _refuse_right_padding(attention_mask)
        lens = attention_mask.sum(dim=-1)
    return lens.to(torch.int32).view(batch_size, 1, 1, 1)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor | PagedStates,
    value: Tensor | PagedStates,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The registered attention function.

    Args:
        module: the layer's attention module.
        query: ``[B, Hq, L, D]``.
        key, value: of a :class:`PagedCache`; or ``[B, Hkv, K, D]``, all keys of a forward without one.
        attention_mask: what :func:`lengths` returned.
        scaling, sliding_window, softcap, s_aux: factor on the scores, keys a row sees, soft cap, sinks ``[Hq]``.

    Returns:
        ``[B, L, Hq, Dv]``, and None for the weights.

    Raises:
        ValueError: attention that is not causal, dropout, or arguments the ops do not have.
    """
    wrong = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    if kwargs.get("output_attentions"):
        wrong.append("output_attentions")
    if dropout:
        wrong.append(f"dropout {dropout}")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        wrong.append("attention that is not causal")
    if wrong:
        raise ValueError(f'attn_implementation="{NAME}" does not support {", ".join(wrong)}; use another one for this model')
    batch, _, num_new, _ = query.shape
    lens = _lengths_of(attention_mask, key, num_new)
    if isinstance(key, PagedStates) and isinstance(value, PagedStates):
        layer, k_pages, v_pages = key.layer, key.pages, value.pages
        meta = layer.metadata(lens, key.page_table, num_new)
        ops.store_kv(k_pages, v_pages, _rows(key.new), _rows(value.new), meta.slots)
        page_table, seq_lens, layout, backend = meta.page_table, meta.seq_lens, meta.layout, layer.backend
    else:
        assert isinstance(key, Tensor)
        assert isinstance(value, Tensor)
        seq_lens = lens.reshape(-1).clamp(max=key.shape[2])
        k_pages, v_pages, page_table = _packed(key, value, seq_lens, decoding=key.shape[2] > num_new)
        layout, backend = QueryLayout.uniform(num_new), "auto"
    mixed = ops.mha(
        _rows(query),
        k_pages,
        v_pages,
        page_table,
        seq_lens,
        layout=layout,
        scale=scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=None if s_aux is None else s_aux.float(),
        backend=backend,
    )
    if query.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        mixed = _NoGradient.apply(mixed, query)  # type: ignore[no-untyped-call]
    return mixed.view(batch, num_new, *mixed.shape[1:]), None


class _NoGradient(torch.autograd.Function):
    """Tells whoever asks for gradients that there are none, instead of leaving attention out of them."""

    @staticmethod
    def forward(ctx: Any, mixed: Tensor, query: Tensor) -> Tensor:
        return mixed.view_as(mixed)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(f'attn_implementation="{NAME}" is for inference and has no gradients; train with another one')


def model_from_gguf(source: Any, *, dtype: torch.dtype = torch.float32, attn_implementation: str = NAME) -> Any:
    """A transformers model with the weights of a GGUF file, dequantised; transformers' own reader needs accelerate for it.

    Args:
        source: a ``.gguf`` file, or ``"smollm2"``.
        dtype: of the weights.
        attn_implementation: of the model.

    Returns:
        An ``AutoModelForCausalLM`` in eval mode.

    Raises:
        FileNotFoundError, ValueError, ImportError: as :func:`specops.models.load_target`.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    from specops.models.loading import open_checkpoint

    checkpoint = open_checkpoint(source)
    if checkpoint.freq_factors is not None:
        raise ValueError(f"{checkpoint.where} scales its rotary frequencies, which a transformers config cannot say")
    register()
    fields = {name: value for name, value in checkpoint.config.items() if name != "architectures" and value is not None}
    config = AutoConfig.for_model(**fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, attn_implementation=attn_implementation
        )
    weights = {name: tensor.to(dtype) for name, tensor in checkpoint.tensors}
    result = model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    left = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if left or result.unexpected_keys:
        raise ValueError(f"{checkpoint.where}: missing {left}, unexpected {result.unexpected_keys}")
    # Tables of the rotary embedding are no weights; they come from the config.
    for name, module in list(model.named_modules()):
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            model.set_submodule(name, type(module)(config))
    model.generation_config = GenerationConfig.from_model_config(config)
    return model.eval().requires_grad_(False)


def _rows(states: Tensor) -> Tensor:
    """``[B, H, L, D]`` as ``[B * L, H, D]``."""
    return states.transpose(1, 2).flatten(0, 1)


def _lengths_of(mask: Tensor | None, key: Tensor | PagedStates, num_new: int) -> Tensor:
    """``[B, 1, 1, 1]`` int32; all keys where there is no mask."""
    if mask is None:
        if isinstance(key, PagedStates):
            raise ValueError("no lengths came with the keys of a PagedCache: the model makes no mask through transformers")
        return torch.full((key.shape[0], 1, 1, 1), key.shape[2], dtype=torch.int32, device=key.device)
    if mask.dtype != torch.int32 or tuple(mask.shape[1:]) != (1, 1, 1):
        raise ValueError(
            f'attn_implementation="{NAME}" takes a two-dimensional attention_mask of padding, got {mask.dtype} '
            f"{list(mask.shape)}; masks of your own are for other implementations"
        )
    return mask


def _packed(key: Tensor, value: Tensor, lens: Tensor, *, decoding: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Dense keys and values as pages, padding on the left taken out. Page 0 stays unused."""
    if decoding and not torch.compiler.is_compiling():
        warnings.warn(
            f'attn_implementation="{NAME}" copies all keys into pages at every step, since it was given no PagedCache; '
            "pass one (specops.integrations.transformers.PagedCache)",
            stacklevel=2,
        )
    size = 16
    batch, _, length, _ = key.shape
    columns = -(-length // size)
    first = (length - lens).long()[:, None]
    index = (torch.arange(columns * size, device=key.device) + first).clamp(max=length - 1)
    pages = []
    for states in (key, value):
        rows = states.transpose(1, 2)
        packed = rows.gather(1, index[:, :, None, None].expand(-1, -1, *rows.shape[2:]))
        packed = packed.view(batch * columns, size, *rows.shape[2:])
        pages.append(torch.cat((packed.new_zeros(1, *packed.shape[1:]), packed)))
    table = torch.arange(1, batch * columns + 1, dtype=torch.int32, device=key.device).view(batch, columns)
    return pages[0], pages[1], table


def _refuse_layers(config: Any) -> None:
    """Chunked, linear and cross attention need other masks or other caches."""
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if getattr(config, "attention_chunk_size", None) is not None:
        kinds.add("chunked_attention")
    if kinds:
        raise ValueError(f"this model has layers of {', '.join(sorted(kinds))}; full and sliding attention can be served")


def _refuse_masks(
    mask_function: Callable[..., Any] | None, window: int | None, changed: bool, device: torch.device | str
) -> None:
    """The mask must be the causal one, or that of a sliding window: asked at the places where others differ."""
    seen = True
    if mask_function is not None and not changed:
        row = 8 if window is None else 2 * window
        first = 0 if window is None else row - window + 1
        places = torch.tensor([row + 1, row, first, first - 1], device=device)
        rows, nought = torch.full_like(places, row), torch.zeros_like(places)
        sees = mask_function(nought, nought, rows, places)[: 3 if window is None else 4].tolist()
        seen = sees == [False, True, True, False][: len(sees)]
    if changed or not seen:
        raise ValueError(
            f'attn_implementation="{NAME}" serves causal attention and sliding windows; this model or call asks for another '
            "mask (packed sequences, chunks, images, both directions)"
        )


def _refuse_right_padding(mask: Tensor) -> None:
    if mask.shape[-1] > 1 and bool((mask[:, 1:].to(torch.int8) < mask[:, :-1].to(torch.int8)).any()):
        raise ValueError(
            f'attn_implementation="{NAME}" takes padding on the left, and this attention_mask has zeros behind ones; '
            'set tokenizer.padding_side = "left"'
        )
