"""The Triton MLA kernels against the float64 oracle, through Triton's interpreter or compiled where there is a GPU.

TRITON_INTERPRET=1 python -m pytest -q tests/ops/test_triton_mla.py
"""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import pytest

from specops.ops.triton_common import Tiling
from specops.ops.triton_mla import mla
from specops.testing import assert_close_to_oracle, make_mla_case

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def check(tiling: Tiling | None = None, split: bool | None = None, **case) -> float:
    made = make_mla_case(device=DEVICE, **case)
    return assert_close_to_oracle(mla(*made.args(), **made.kwargs(), tiling=tiling, split=split), made.oracle())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num_heads", [16, 128])
def test_deepseek_dims(num_heads, dtype) -> None:
    check(num_heads=num_heads, latent_dim=512, rope_dim=64, dtype=dtype, query_lens=2, seq_lens=(70, 9), page_size=64)


@pytest.mark.parametrize(("latent_dim", "rope_dim"), [(64, 16), (128, 64), (96, 32), (256, 8)])
def test_other_dims(latent_dim, rope_dim) -> None:
    check(latent_dim=latent_dim, rope_dim=rope_dim, query_lens=3, seq_lens=(40, 5))


@pytest.mark.parametrize("num_heads", [1, 3, 16, 40])
def test_head_counts(num_heads) -> None:
    check(num_heads=num_heads, query_lens=3, seq_lens=(40, 5))


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize(
    "features",
    [
        {"window": 1},
        {"window": 7, "softcap": 5.0, "sinks": True},
        {"fp8": True, "dtype": torch.float16},
        {"strided_q": True, "padded_rows": True},
        {"page_size": 1},
        {"page_size": 48},
        {"page_size": 64},
    ],
)
def test_features_in_both_layouts(features, split) -> None:
    check(query_lens=4, seq_lens=(75, 33, 0, 4), split=split, **features)
    check(query_lens=[1, 6, 0, 3], seq_lens=(75, 33, 20, 3), slack=2, split=split, **features)


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("tree", [{"tree_width": 6}, {"tree_width": 40, "window": 60}, {"tree_width": 70, "sinks": True}])
def test_tree_masks(tree, split) -> None:
    check(query_lens=6, seq_lens=(90, 71, 0), split=split, **tree)


@pytest.mark.parametrize("inline_merge", [True, False])
@pytest.mark.parametrize("swap", [True, False])
@pytest.mark.parametrize("direct", [True, False])
def test_ragged_lengths_are_cut_anywhere_and_merged(inline_merge, swap, direct) -> None:
    tiling = Tiling(16, 16, 4, 2, 5, swap=swap, inline_merge=inline_merge, direct=direct)
    check(tiling, True, dtype=torch.float16, query_lens=2, seq_lens=(200, 3, 17, 40, 1), page_size=16, num_heads=16)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("programs_per_sm", [1, 5])
def test_parts_merged_within_threads(direct, programs_per_sm) -> None:
    """With few and with more parts than are loaded at once."""
    tiling = Tiling(16, 16, 4, 2, programs_per_sm, inline_merge=False, direct=direct, wide_merge=True)
    check(tiling, True, dtype=torch.float16, query_lens=2, seq_lens=(700, 3), page_size=16, num_heads=8, sinks=True)
    check(tiling, True, query_lens=[2, 1], seq_lens=(333, 0), page_size=16, num_heads=8, latent_dim=96)


# The table ends inside the first and second request's keys; the second fills it behind the first one's end, so a read past
# the first row of the table would meet another's keys.
SHORT_TABLE = {"query_lens": 4, "seq_lens": (45, 60, 7), "page_size": 4, "table_columns": 7}


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize(
    "features",
    [
        {},
        {"query_lens": [2, 40, 1]},
        {"page_size": 16, "table_columns": 2},
        {"page_size": 32, "table_columns": 1},
        {"window": 30, "sinks": True},
        {"tree_width": 30},
        {"tree_width": 70, "seq_lens": (75, 90, 0)},
        {"tree_width": 30, "window": 33},
    ],
)
def test_keys_behind_the_page_table_do_not_exist(features, split) -> None:
    """F34: rows keep the positions that the length says, and nothing behind a row of the table is read."""
    case = {**SHORT_TABLE, **features}
    check(split=split, **case)
    if split:
        check(Tiling(16, 16, 4, 2, 5, direct=True, inline_merge=False), True, **case)


@pytest.mark.parametrize("split", [True, False])
def test_a_negative_length_is_no_keys(split) -> None:
    made = make_mla_case(seq_lens=(9, 0, 13), query_lens=3, device=DEVICE)
    out = mla(*made.args(), **made.kwargs(), split=split)
    made.tensors["seq_lens"][1] = -7
    assert torch.equal(mla(*made.args(), **made.kwargs(), split=split), out)
    assert not out[3:6].any()


def test_the_op_under_its_public_name() -> None:
    make_mla_case(query_lens=3, seq_lens=(19, 6), device=DEVICE).check("triton")
