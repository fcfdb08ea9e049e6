"""Named argument sets for :func:`make_mha_case` and :func:`make_mla_case`: every feature alone, and those that interact.

Sizes are small, so a backend can run the whole grid in seconds. Names are test ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# What both families share: layouts, lengths, pages, masks.
SHARED_GRID: dict[str, dict[str, Any]] = {
    "one-row": {},
    "verify-block": {"query_lens": 6, "seq_lens": (9, 13, 40)},
    "packed": {"query_lens": (1, 6, 3), "seq_lens": (9, 13, 5)},
    "packed-with-slack": {"query_lens": (2, 5), "slack": 3},
    "packed-empty-request": {"query_lens": (0, 3, 0), "seq_lens": (4, 7, 0)},
    "prefill": {"query_lens": (33, 17), "seq_lens": (33, 20)},
    "last-partial-page": {"query_lens": 2, "seq_lens": (3, 4, 5, 7, 8)},
    "last-page-of-64": {"page_size": 64, "seq_lens": (64, 65, 127, 128)},
    "shorter-than-a-page": {"page_size": 16, "query_lens": 3, "seq_lens": (5, 9)},
    "page-of-one": {"page_size": 1, "query_lens": 2, "seq_lens": (3, 6)},
    "uneven-lengths": {"seq_lens": (32, 64, 96, 48), "query_lens": 4},
    "padded-requests": {"seq_lens": (5, 0, 0, 0), "query_lens": 3},
    "all-padded": {"seq_lens": (0, 0), "query_lens": 3},
    "fewer-keys-than-rows": {"seq_lens": (2, 9, 1), "query_lens": 4},
    "no-request": {"seq_lens": (), "query_lens": 3},
    "table-too-short": {"seq_lens": (9, 21), "query_lens": 3, "table_columns": 4},
    "sharp": {"query_lens": 3, "gain": 8.0},
    "window": {"window": 4, "query_lens": 3, "seq_lens": (9, 13, 2)},
    "window-of-one": {"window": 1, "query_lens": 3},
    "window-wider-than-keys": {"window": 64, "query_lens": 3},
    "window-skips-pages": {"window": 8, "query_lens": 2, "seq_lens": (61, 33)},
    "softcap": {"softcap": 3.0, "query_lens": 2},
    "sinks": {"sinks": True, "query_lens": 2},
    "sinks-without-keys": {"sinks": True, "seq_lens": (0, 2), "query_lens": 4},
    "tree": {"tree_width": 6, "query_lens": 6, "seq_lens": (9, 13, 40)},
    "tree-is-all-keys": {"tree_width": 6, "query_lens": 6, "seq_lens": (6, 7)},
    "tree-padded": {"tree_width": 6, "query_lens": 6, "seq_lens": (9, 0, 0, 13)},
    "tree-single-row": {"tree_width": 5, "query_lens": 1, "seq_lens": (9, 13)},
    "wide-tree": {"tree_width": 11, "query_lens": 2, "seq_lens": (13, 21)},
    "tree-of-64": {"tree_width": 64, "query_lens": 64, "seq_lens": (70, 64)},
    "tree-and-window": {"tree_width": 6, "query_lens": 6, "seq_lens": (9, 13), "window": 7},
    "tree-deeper-than-window": {"tree_width": 8, "query_lens": 8, "seq_lens": (9, 13), "window": 2, "seed": 3},
    "wide-tree-and-window": {"tree_width": 9, "query_lens": 3, "seq_lens": (12, 33), "window": 5},
    "sinks-window-softcap": {"sinks": True, "window": 5, "softcap": 4.0, "query_lens": (3, 2), "seq_lens": (9, 13)},
    "everything": {
        "sinks": True,
        "window": 6,
        "softcap": 4.0,
        "tree_width": 7,
        "query_lens": 4,
        "seq_lens": (9, 13, 0),
        "fp8": True,
        "strided_q": True,
    },
    "fp8": {"fp8": True, "query_lens": 3},
    "fp8-packed-prefill": {"fp8": True, "query_lens": (9, 3)},
    "strided-q": {"strided_q": True, "query_lens": (1, 4)},
}

# Every MHA case by name: the arguments of ``make_mha_case``.
MHA_GRID: dict[str, dict[str, Any]] = {
    **SHARED_GRID,
    **{
        f"heads-{heads}-{kv_heads}": {"num_heads": heads, "num_kv_heads": kv_heads, "query_lens": 3}
        for heads, kv_heads in ((9, 3), (24, 4), (28, 4), (40, 8), (14, 2), (64, 4), (8, 8))
    },
    **{f"dim-{dim}": {"head_dim": dim, "query_lens": 2} for dim in (32, 80, 96, 128, 192, 256)},
    "dim-192-128": {"head_dim": 192, "value_dim": 128, "query_lens": 2},
    "dim-192-128-packed": {"head_dim": 192, "value_dim": 128, "query_lens": (2, 5)},
    "hnd": {"hnd": True, "query_lens": 3},
    "hnd-fp8": {"hnd": True, "fp8": True, "query_lens": 3},
    "rows-hold-k-and-v": {"shared_storage": "rows", "query_lens": 3},
    "rows-hold-k-and-v-hnd": {"shared_storage": "rows", "hnd": True, "query_lens": 3},
    "pages-hold-k-and-v": {"shared_storage": "pages", "query_lens": 3},
    "pages-hold-k-and-v-fp8": {"shared_storage": "pages", "fp8": True, "query_lens": 3},
}

# Every MLA case by name: the arguments of ``make_mla_case``.
MLA_GRID: dict[str, dict[str, Any]] = {
    **SHARED_GRID,
    "heads-1": {"num_heads": 1, "query_lens": 2},
    "deepseek-16": {"num_heads": 16, "latent_dim": 512, "rope_dim": 64, "query_lens": 2},
    "deepseek-128": {"num_heads": 128, "latent_dim": 512, "rope_dim": 64},
    "slice-of-wider-rows": {"padded_rows": True, "query_lens": 2},
    "slice-of-wider-rows-fp8": {"padded_rows": True, "fp8": True, "query_lens": 2},
}


def grid(family: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and arguments of every case of ``"mha"`` or ``"mla"``."""
    yield from (MHA_GRID if family == "mha" else MLA_GRID).items()
