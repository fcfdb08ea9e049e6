"""The ``triton`` backend's MLA: one key of ``Dc + Dr`` for all heads, whose first ``Dc`` columns are the value too.

All heads of all rows of a request share tiles. A block of the cache is loaded once, as latent and rotary part, and the
latent part serves both products. The kernels are in ``triton_kernels``.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from specops.layout import QueryLayout
from specops.ops.triton_common import MAX_SCHEDULED_REQUESTS, Tiling, next_power_of_2, num_sms
from specops.ops.triton_launch import launch

# Rows times heads of a tile: the least that fills Hopper's matrix instructions, and all that registers hold of 512 values.
TILE_ROWS = 64
# The tile kernel takes over once there are this many whole tiles a multiprocessor.
TILES_PER_SM = 16


def choose_tiling(rows: int, dtype: torch.dtype, latent_dim: int, split: bool) -> Tiling:
    """Sizes of a launch.

    Args:
        rows: query rows of the widest request, times heads.
        dtype: of the query.
        latent_dim: ``Dc``.
        split: for the split kernel, else for the tile kernel.
    """
    if dtype == torch.float32:
        return Tiling(16, 16, 8 if latent_dim > 128 else 4, 1, 1)
    block_m = min(max(next_power_of_2(rows), 16), TILE_ROWS)
    if latent_dim <= 128:
        return Tiling(block_m, 64, 4, 3, 2)
    return Tiling(block_m, 64, 8 if block_m == TILE_ROWS else 4, 2, 1)


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
    tiling: Tiling | None = None,
    split: bool | None = None,
) -> Tensor:
    """Arguments and result as :func:`specops.ops.mla`; ``plan`` is not needed.

    Args:
        tiling, split: as for :func:`specops.ops.triton_mha.mha`.
    """
    batch, num_heads, latent_dim = page_table.shape[0], q_latent.shape[1], q_latent.shape[2]
    rows = layout.max_query_len * num_heads
    if split is None:
        whole_tiles = batch * triton.cdiv(rows, TILE_ROWS)
        many = whole_tiles >= TILES_PER_SM * num_sms(q_latent.device) and rows > 16 * TILE_ROWS
        split = not many and batch <= MAX_SCHEDULED_REQUESTS
    if tiling is None:
        tiling = choose_tiling(rows, q_latent.dtype, latent_dim, split)
    cache = kv_cache.unsqueeze(2)
    return launch(
        q_latent,
        q_rope,
        cache,
        cache[..., :latent_dim],
        page_table,
        seq_lens,
        layout=layout,
        scale=scale,
        shared_v=True,
        split=split,
        tiling=tiling,
        window=window,
        softcap=softcap,
        sinks=sinks,
        tree_mask=tree_mask,
        k_scale=kv_scale,
        v_scale=kv_scale,
    )
