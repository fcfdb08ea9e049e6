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
from typing import Any

import torch
from torch import Tensor, nn

from specops import ops
from specops.layout import QueryLayout

try:
    from transformers import AttentionInterface, AttentionMaskInterface

    from specops.integrations.transformers_cache import NAME, PAGED, PagedCache, PagedStates
    from specops.integrations.transformers_gguf import model_from_gguf as _model_from_gguf
except ImportError as error:
    raise ImportError(
        "specops.integrations.transformers needs transformers 5 or later: pip install 'specops[hf]'"
    ) from error

__all__ = ["PagedCache", "attention", "lengths", "model_from_gguf", "register"]

# Arguments that change what attention computes, which a model may hand on and the ops do not have.
_UNSUPPORTED = ("position_bias", "attention_bias", "block_mask", "indexer_mask", "cu_seq_lens_q", "cu_seqlens_q")


def register(name: str = NAME) -> None:
    """Make ``attn_implementation=name`` known to transformers. Calling it again changes nothing."""
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, lengths)


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
    if kv_offset == PAGED:
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
    """A transformers model with the weights of a GGUF file; see :mod:`specops.integrations.transformers_gguf`."""
    register()
    return _model_from_gguf(source, dtype=dtype, attn_implementation=attn_implementation)


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
