"""MLA on TokenSpeed's decode kernel (PyPI ``tokenspeed-mla``); uniform layouts, bf16, compute capability 10.x.

Each row's visible length is passed to the kernel (``local_visible_lens``), so rows before the sequence's start and padded
requests are zero, as the package documents. The package shares no workspace between launches, it only needs room for its
partial sums. Its sliding window keeps a request's whole row block visible, which is not the window of
:func:`specops.ops.mla`, so it is not offered. No such card was at hand: the arguments are bound against the package's
signature in the tests, the kernel was not run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specops.layout import QueryLayout
from specops.ops import flashinfer_common
from specops.ops.flashinfer_common import MEBIBYTE, Workspaces

# Partial sums of at most two splits per SM, 128 rows of 513 floats each, on up to 250 SMs.
WORKSPACES = Workspaces(128 * MEBIBYTE)


def mla(
    q_latent: Tensor,
    q_rope: Tensor,
    kv_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    *,
    layout: QueryLayout,
    scale: float,
    plan: Tensor | None = None,
) -> Tensor:
    """Arguments and result as :func:`specops.ops.mla`; ``plan`` is not needed.

    Raises:
        ImportError: tokenspeed-mla is missing.
    """
    if q_latent.shape[0] == 0:
        return q_latent.new_empty(q_latent.shape)
    arguments = decode_arguments(q_latent, q_rope, kv_cache, page_table, seq_lens, layout, scale)
    _decode()(**arguments)
    out: Tensor = arguments["out"]
    return out.view(q_latent.shape)


def decode_arguments(
    q_latent: Tensor,
    q_rope: Tensor,
    kv_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    layout: QueryLayout,
    scale: float,
) -> dict[str, Any]:
    """Arguments of ``tokenspeed_mla.tokenspeed_mla_decode``; shapes as :func:`specops.ops.mla`."""
    width, latent_dim = layout.tokens_per_request, q_latent.shape[2]
    steps = torch.arange(1 - width, 1, dtype=torch.int32, device=seq_lens.device)
    query = torch.cat((q_latent, q_rope), dim=2)
    query = query.view(-1, width, *query.shape[1:])
    return {
        "query": query,
        "kv_cache": kv_cache,
        "workspace_buffer": WORKSPACES.get(q_latent.device).view(torch.int8),
        "kv_lora_rank": latent_dim,
        "qk_rope_head_dim": q_rope.shape[2],
        "block_tables": page_table.contiguous(),
        "seq_lens": seq_lens.contiguous(),
        "max_seq_len": page_table.shape[1] * kv_cache.shape[1],
        "softmax_scale": scale,
        "out": query.new_empty((*query.shape[:3], latent_dim)),
        "local_visible_lens": (seq_lens[:, None] + steps).clamp_(min=0),
    }


@functools.cache
def _decode() -> Callable[..., Any]:
    call: Callable[..., Any] = flashinfer_common.load("tokenspeed_mla", "tokenspeed").tokenspeed_mla_decode
    return call
