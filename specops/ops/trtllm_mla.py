"""MLA on NVIDIA's TensorRT-LLM kernels, called through flashinfer-python; uniform layouts.

Compute capability 10.x runs TRT-LLM-gen, which takes the rows of a request as its second dimension: the widest and the
total number of rows are constants of the layout. 12.x runs XQA's MLA kernel, which takes one row of 128 heads, so there
every row becomes a request of its own. No host plan, no synchronisation. Neither card was at hand: the arguments are bound
against the package's signature in the tests, the kernels were not run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specops.layout import QueryLayout
from specops.ops import flashinfer_common
from specops.ops.trtllm_mha import GEN_WORKSPACES, is_xqa

# The kernels take the dims that the query had before absorption only to name the model; DeepSeek's is 128.
QK_NOPE_HEAD_DIM = 128
# The kernels read page tables in units of 128 tokens.
TABLE_TOKENS = 128


def mla(
    q_latent: Tensor,
    q_rope: Tensor,
    kv_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    *,
    layout: QueryLayout,
    scale: float,
    sinks: Tensor | None = None,
    plan: Tensor | None = None,
) -> Tensor:
    """Arguments and result as :func:`specops.ops.mla`; ``plan`` is not needed.

    Raises:
        ImportError: flashinfer-python is missing.
    """
    if q_latent.shape[0] == 0:
        return q_latent.new_empty(q_latent.shape)
    arguments = decode_arguments(
        q_latent, q_rope, kv_cache, page_table, seq_lens, layout, scale, sinks, xqa=is_xqa(q_latent.device)
    )
    out: Tensor = _decode()(**arguments)
    return out.view(q_latent.shape)


def decode_arguments(
    q_latent: Tensor,
    q_rope: Tensor,
    kv_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    layout: QueryLayout,
    scale: float,
    sinks: Tensor | None = None,
    *,
    xqa: bool,
) -> dict[str, Any]:
    """Arguments of ``flashinfer.mla.trtllm_batch_decode_with_kv_cache_mla``; shapes as :func:`specops.ops.mla`.

    Args:
        xqa: for the XQA kernel, else for TRT-LLM-gen.
    """
    width, latent_dim = layout.tokens_per_request, q_latent.shape[2]
    page_size = kv_cache.shape[1]
    if xqa and width > 1:
        page_table, seq_lens = flashinfer_common.rows_as_requests(page_table, seq_lens, width, page_size)
        width = 1
    query = torch.cat((q_latent, q_rope), dim=2)
    query = query.view(-1, width, *query.shape[1:])
    missing = -page_table.shape[1] % max(TABLE_TOKENS // page_size, 1)
    if missing:
        page_table = torch.nn.functional.pad(page_table, (0, missing))
    arguments = {
        "query": query,
        "kv_cache": kv_cache,
        "workspace_buffer": GEN_WORKSPACES.get(q_latent.device),
        "qk_nope_head_dim": QK_NOPE_HEAD_DIM,
        "kv_lora_rank": latent_dim,
        "qk_rope_head_dim": q_rope.shape[2],
        "block_tables": page_table.contiguous(),
        "seq_lens": seq_lens.contiguous(),
        "max_seq_len": page_table.shape[1] * page_size,
        "bmm1_scale": scale,
        "bmm2_scale": 1.0,
        "backend": "xqa" if xqa else "trtllm-gen",
    }
    if sinks is not None:
        arguments["sinks"] = [sinks.contiguous()]
    return arguments


@functools.cache
def _decode() -> Callable[..., Any]:
    call: Callable[..., Any] = flashinfer_common.load("flashinfer.mla", "flashinfer").trtllm_batch_decode_with_kv_cache_mla
    return call
