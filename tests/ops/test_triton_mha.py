"""The Triton MHA kernels against the float64 oracle, through Triton's interpreter or compiled where there is a GPU.

    TRITON_INTERPRET=1 python -m pytest -q tests/ops/test_triton_mha.py

Every case holds NaN in whatever the request does not own. Interpreted programs run one after another on eight assumed
multiprocessors, so units of work are split and merged here too.
"""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from dataclasses import replace

import pytest
import triton
from hypothesis import given, settings
from hypothesis import strategies as st
from triton import language as tl

from specops.ops import triton_launch
from specops.ops.triton_common import Tiling, even_cut
from specops.ops.triton_mha import choose_tiling, first_part, mha
from specops.testing import assert_close_to_oracle, make_mha_case

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def check(tiling: Tiling | None = None, split: bool | None = None, **case) -> float:
    made = make_mha_case(device=DEVICE, **case)
    return assert_close_to_oracle(mha(*made.args(), **made.kwargs(), tiling=tiling, split=split), made.oracle())


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(9, 3), (24, 4), (28, 4), (40, 8), (14, 2), (64, 4), (8, 8)])
def test_every_group_size(num_heads, num_kv_heads) -> None:
    check(num_heads=num_heads, num_kv_heads=num_kv_heads, query_lens=3, seq_lens=(37, 5), page_size=16)


@pytest.mark.parametrize(
    ("head_dim", "value_dim"),
    [(16, 16), (32, 32), (64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256), (24, 40)],
)
def test_every_head_dim(head_dim, value_dim) -> None:
    check(head_dim=head_dim, value_dim=value_dim, query_lens=2, seq_lens=(21, 6), num_heads=4)


@pytest.mark.parametrize("page_size", [1, 3, 4, 16, 32, 48, 64, 128])
def test_every_page_size(page_size) -> None:
    check(page_size=page_size, query_lens=2, seq_lens=(130, page_size, page_size + 1, max(page_size - 1, 2)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("split", [True, False])
def test_every_dtype(dtype, split) -> None:
    check(dtype=dtype, query_lens=5, seq_lens=(70, 13), page_size=16, split=split)


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize(
    "features",
    [
        {"window": 1},
        {"window": 7},
        {"window": 1000},
        {"softcap": 3.0, "gain": 8.0},
        {"sinks": True},
        {"window": 5, "softcap": 5.0, "sinks": True},
        {"fp8": True, "dtype": torch.float16},
        {"strided_q": True},
        {"hnd": True},
        {"shared_storage": "rows"},
        {"shared_storage": "pages"},
        {"gain": 60.0},
    ],
)
def test_features_in_both_layouts(features, split) -> None:
    check(query_lens=4, seq_lens=(75, 33, 0, 4), split=split, **features)
    check(query_lens=[1, 6, 0, 3], seq_lens=(75, 33, 20, 3), slack=2, split=split, **features)


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize(
    "tree",
    [
        {"tree_width": 6},
        {"tree_width": 6, "sinks": True, "softcap": 4.0},
        {"tree_width": 6, "window": 9},
        {"tree_width": 33},
        {"tree_width": 64},
        {"tree_width": 70},
        {"tree_width": 70, "window": 80},
    ],
)
def test_tree_masks_narrow_and_wide(tree, split) -> None:
    check(query_lens=6, seq_lens=(90, 71, 0), split=split, **tree)


def test_a_padded_request_and_rows_without_keys_are_zero() -> None:
    case = make_mha_case(query_lens=4, seq_lens=(0, 9, 2), device=DEVICE, sinks=True)
    out = mha(*case.args(), **case.kwargs())
    assert not out[:4].any()
    assert not out[8:10].any()
    assert bool(out[10:].isfinite().all())


def test_rows_behind_the_last_request_are_zero() -> None:
    case = make_mha_case(query_lens=[2, 3], seq_lens=(9, 12), device=DEVICE)
    q = torch.cat((case.tensors["q"], torch.full((3, 8, 64), float("nan"), device=DEVICE)))
    for split in (True, False):
        out = mha(q, *case.args()[1:], **case.kwargs(), split=split)
        assert not out[5:].any()
        assert_close_to_oracle(out[:5], case.oracle())


@pytest.mark.parametrize("inline_merge", [True, False])
@pytest.mark.parametrize("swap", [True, False])
@pytest.mark.parametrize(("direct", "programs_per_sm"), [(True, 5), (False, 1), (False, 3)])
def test_ragged_lengths_are_cut_anywhere_and_merged(inline_merge, swap, programs_per_sm, direct) -> None:
    """One long request among short ones; the oracle doesn't know where the stretches end."""
    base = choose_tiling(8, torch.float16, torch.float16, 64, 64, True)
    sizes = {"block_n": 16, "inline_merge": inline_merge, "swap": swap, "programs_per_sm": programs_per_sm}
    tiling = replace(base, **sizes, direct=direct)
    check(tiling, True, dtype=torch.float16, query_lens=2, seq_lens=(200, 3, 17, 40, 1), page_size=16, sinks=True)
    check(tiling, True, dtype=torch.float16, query_lens=[9, 1, 30], seq_lens=(60, 3, 40), page_size=8)


def test_a_small_page_table_takes_small_tiles_and_a_program_for_every_256_keys() -> None:
    half = (torch.float16, torch.float16)
    d64 = {"head_dim": 64, "value_dim": 64, "split": True}
    for rows, units_per_sm, room, sizes in (
        (12, 0.1, 192, (16, 256, 1)),
        (48, 0.1, 192, (16, 256, 1)),
        (48, 0.7, 2048, (32, 256, 1)),
        (48, 2.5, 256, (64, 128, 2)),
        (12, 2.5, 256, (16, 256, 1)),
    ):
        short = choose_tiling(rows, *half, **d64, units_per_sm=units_per_sm, room=room)
        assert short.direct
        assert (short.block_m, short.block_n, short.min_blocks) == sizes
    assert choose_tiling(16, *half, 128, 128, True, room=256).min_blocks * 64 == 256
    # One request of more keys, and enough units to fill the GPU, are cut as ever.
    assert choose_tiling(12, *half, **d64, batch=1, room=257).block_n == 64
    assert [choose_tiling(48, *half, **d64, batch=1, units_per_sm=0.1, room=room).block_m for room in (257, 2049)] == [
        16,
        64,
    ]
    assert choose_tiling(12, *half, **d64, units_per_sm=2.5, room=257).even
    assert choose_tiling(12, *half, **d64, room=2049).even


@pytest.mark.parametrize("features", [{}, {"window": 150, "sinks": True}, {"tree_width": 6}, {"fp8": True}])
@pytest.mark.parametrize("seq_lens", [(130, 7, 0), (600, 256, 257, 20)])
def test_few_keys_in_one_program_and_more_in_several(features, seq_lens) -> None:
    check(dtype=torch.float16, query_lens=6, seq_lens=seq_lens, num_heads=6, num_kv_heads=2, page_size=16, **features)
    if "tree_width" not in features:
        check(dtype=torch.float16, query_lens=[6, 20, 1, 3][: len(seq_lens)], seq_lens=seq_lens, slack=2, **features)


@pytest.mark.parametrize("inline_merge", [True, False])
@pytest.mark.parametrize("features", [{"window": 20}, {"tree_width": 6, "window": 31}, {"page_size": 3}, {"page_size": 64}])
def test_blocks_taken_in_turn(features, inline_merge) -> None:
    tiling = Tiling(16, 16, 4, 2, 4, direct=True, inline_merge=inline_merge)
    check(tiling, True, query_lens=6, seq_lens=(200, 7, 0), num_heads=8, num_kv_heads=2, sinks=True, **features)


@pytest.mark.parametrize("inline_merge", [True, False])
@pytest.mark.parametrize("seq_lens", [(64, 64, 64), (64, 50, 33), (200, 3, 17, 40, 1), (0, 64, 0)])
def test_units_cut_alike_or_by_the_schedule(seq_lens, inline_merge) -> None:
    """More units than programs, more programs than units, and lengths that only the schedule can even out."""
    for programs, least in ((1, 1), (5, 2)):
        tiling = Tiling(16, 16, 4, 2, programs, even=True, min_blocks=least, inline_merge=inline_merge)
        case = {"query_lens": 2, "page_size": 16, "num_heads": 8, "num_kv_heads": 2, "sinks": True, "dtype": torch.float16}
        check(tiling, True, seq_lens=seq_lens, **case)


@triton.jit
def even_cut_kernel(costs, out, units, units_of_request, programs, REQUESTS: tl.constexpr, LEAST: tl.constexpr):
    even, part, _ = even_cut(tl.load(costs + tl.arange(0, REQUESTS)), units, units_of_request, programs, LEAST)
    tl.store(out, even.to(tl.int32))
    tl.store(out + 1, part)


@pytest.mark.parametrize(
    ("blocks", "heads", "programs", "least", "even", "part"),
    [
        ([64] * 32, 8, 264, 1, True, 64),  # a unit a program, 63 blocks by the schedule
        ([64] * 8, 8, 264, 1, True, 16),  # four parts a unit
        ([32] * 128, 8, 264, 1, True, 32),  # four units a program
        ([4] * 32, 3, 264, 4, True, 4),  # too short to cut
        ([9] * 16, 8, 264, 1, True, 5),  # two parts of 5 and 4
        ([64] * 64, 8, 396, 1, False, 64),  # two rounds of 64 where the schedule takes 83
        ([512, *[8] * 31], 8, 264, 1, False, 512),
        ([64, 1] * 16, 8, 264, 1, False, 64),
    ],
)
def test_units_are_cut_alike_where_that_costs_no_more_than_an_eighth(blocks, heads, programs, least, even, part) -> None:
    costs = torch.tensor(blocks, dtype=torch.int32, device=DEVICE) * heads
    out = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    even_cut_kernel[(1,)](costs, out, len(blocks) * heads, heads, programs, REQUESTS=len(blocks), LEAST=least)
    assert out.tolist() == [int(even), part]


SMALL_MODEL = {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64, "page_size": 16, "table_columns": 128}


@pytest.mark.parametrize("query_len", [1, 16])
def test_one_short_request_under_a_wide_page_table(query_len) -> None:
    for length in (256, 17):
        check(seq_lens=[length], query_lens=query_len, dtype=torch.float16, **SMALL_MODEL)


@pytest.mark.parametrize(
    ("batch", "tiling"),
    [(1, Tiling(16, 128, 4, 2, 2, direct=True, min_blocks=2)), (5, None), (5, Tiling(16, 256, 4, 1, 2, even=True))],
)
def test_a_call_that_its_programs_merge_is_one_launch(batch, tiling, monkeypatch) -> None:
    monkeypatch.setattr(triton_launch, "merge_kernel", None)
    for length in (256, 17, 700):
        check(tiling, True, seq_lens=[length] * batch, query_lens=4, dtype=torch.float16, **SMALL_MODEL)


def test_more_row_tiles_than_one() -> None:
    check(query_lens=[40, 3], seq_lens=(90, 44), num_heads=12, split=True)
    check(query_lens=[40, 3], seq_lens=(90, 44), num_heads=12, split=False)
    check(query_lens=20, seq_lens=(90, 44), num_heads=12, window=11, split=True)


def test_prefill_from_an_empty_cache() -> None:
    check(query_lens=[33, 50], seq_lens=(33, 50), split=True)
    check(query_lens=[33, 50], seq_lens=(33, 50), split=False, window=9)


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
        {"window": 7},
        {"window": 30, "sinks": True},
        {"tree_width": 6},
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
    made = make_mha_case(seq_lens=(9, 0, 13), query_lens=3, device=DEVICE)
    out = mha(*made.args(), **made.kwargs(), split=split)
    made.tensors["seq_lens"][1] = -7
    assert torch.equal(mha(*made.args(), **made.kwargs(), split=split), out)
    assert not out[3:6].any()


def test_the_op_under_its_public_name() -> None:
    make_mha_case(query_lens=3, seq_lens=(19, 6), sinks=True, device=DEVICE).check("triton")


def test_index_tensors_may_be_views() -> None:
    case = make_mha_case(query_lens=2, seq_lens=(30, 11), device=DEVICE)
    table, lens = case.tensors["page_table"], case.tensors["seq_lens"]
    case.tensors["page_table"] = table.t().contiguous().t()
    case.tensors["seq_lens"] = torch.stack((lens, lens * 0), 1)[:, 0]
    case.check("triton")


def test_empty_batches() -> None:
    case = make_mha_case(device=DEVICE)
    q, k, v, table, lens = case.args()
    out = mha(q[:0], k, v, table[:0], lens[:0], layout=case.layout, scale=1.0)
    assert out.shape == (0, 8, 64)


@pytest.mark.parametrize(("head_dim", "first"), [(16, 16), (24, 24), (64, 64), (80, 64), (96, 64), (192, 128), (256, 256)])
def test_key_dims_are_taken_in_powers_of_two(head_dim, first) -> None:
    assert first_part(head_dim) == first


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    data=st.data(),
    page_size=st.sampled_from([1, 2, 5, 16]),
    group=st.integers(1, 7),
    batch=st.integers(1, 4),
    uniform=st.booleans(),
    window=st.sampled_from([None, 1, 6, 40]),
    programs_per_sm=st.integers(1, 3),
)
def test_any_shape_and_page_layout(data, page_size, group, batch, uniform, window, programs_per_sm) -> None:
    rows = (
        data.draw(st.integers(1, 5)) if uniform else data.draw(st.lists(st.integers(0, 9), min_size=batch, max_size=batch))
    )
    lens = data.draw(st.lists(st.integers(0, 90), min_size=batch, max_size=batch))
    check(
        Tiling(16, 16, 4, 2, programs_per_sm),
        True,
        query_lens=rows,
        seq_lens=lens,
        page_size=page_size,
        num_heads=2 * group,
        head_dim=32,
        window=window,
        seed=data.draw(st.integers(0, 1000)),
    )
