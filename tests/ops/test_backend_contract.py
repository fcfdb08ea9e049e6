"""What every backend owes, checked on those that run here: the float64 oracle's values, poisoned memory, all dtypes.

OMP_NUM_THREADS=1 pytest tests/ops/test_backend_contract.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from case_strategies import mha_arguments, mla_arguments
from hypothesis import given, settings

from specops import QueryLayout, ops
from specops.testing import MHA_GRID, MLA_GRID, make_mha_case, make_mla_case

pytestmark = pytest.mark.parametrize("backend", ["reference", "cpu"])
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MHA_GRID)
def test_mha_is_the_oracles(backend: str, name: str, dtype: torch.dtype) -> None:
    make_mha_case(**MHA_GRID[name], dtype=dtype).check(backend)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MLA_GRID)
def test_mla_is_the_oracles(backend: str, name: str, dtype: torch.dtype) -> None:
    make_mla_case(**MLA_GRID[name], dtype=dtype).check(backend)


@settings(max_examples=150, deadline=None)
@given(mha_arguments())
def test_any_mix_of_mha_features(backend: str, arguments: dict[str, Any]) -> None:
    make_mha_case(**arguments).check(backend)


@settings(max_examples=80, deadline=None)
@given(mla_arguments())
def test_any_mix_of_mla_features(backend: str, arguments: dict[str, Any]) -> None:
    make_mla_case(**arguments).check(backend)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_result_is_fresh_contiguous_and_of_the_querys_dtype(backend: str, dtype: torch.dtype) -> None:
    case = make_mha_case(dtype=dtype, strided_q=True, hnd=True, query_lens=2)
    before = [tensor.clone() for tensor in case.args()]
    out = case.run(backend)
    assert out.dtype == dtype
    assert out.is_contiguous()
    assert out.untyped_storage().data_ptr() not in {tensor.untyped_storage().data_ptr() for tensor in case.args()}
    for tensor, old in zip(case.args(), before, strict=True):
        assert torch.equal(
            tensor.view(torch.uint8) if tensor.dim() > 2 else tensor, old.view(torch.uint8) if old.dim() > 2 else old
        )


def test_row_without_a_visible_key_is_exactly_zero(backend: str) -> None:
    case = make_mha_case(seq_lens=(0, 2, 9), query_lens=4)
    out = case.run(backend)
    assert torch.equal(out[:6], torch.zeros_like(out[:6])), (
        "request 0 has no key; of request 1, rows 0 and 1 stand before it"
    )
    assert out[6:].abs().amin(dim=(1, 2)).gt(0).all()


def test_rows_behind_the_last_packed_request_are_zero(backend: str) -> None:
    case = make_mha_case(query_lens=(2, 3))
    padded = torch.cat((case.tensors["q"], torch.full((3, 8, 64), float("nan"))))
    expected = case.run(backend)
    case.tensors["q"] = padded
    out = case.run(backend)
    assert torch.equal(out[:5], expected)
    assert torch.equal(out[5:], torch.zeros(3, 8, 64))


@pytest.mark.parametrize("num_rows", [1, 6])
def test_padded_requests_change_no_real_row(backend: str, num_rows: int) -> None:
    alone = make_mha_case(seq_lens=(5,), query_lens=num_rows, spare_pages=1)
    padded = make_mha_case(seq_lens=(5, 0, 0, 0), query_lens=num_rows, spare_pages=1)
    for name in ("k_cache", "v_cache"):
        padded.tensors[name] = alone.tensors[name]
    padded.tensors["q"] = torch.full_like(padded.tensors["q"], float("nan"))
    padded.tensors["q"][:num_rows] = alone.tensors["q"]
    padded.tensors["page_table"][0] = alone.tensors["page_table"][0]
    out = padded.run(backend)
    assert torch.equal(out[:num_rows], alone.run(backend))
    assert out.isfinite().all(), "a batch-wide amax must not see NaN in padded rows"


def test_a_node_does_not_see_its_sibling(backend: str) -> None:
    # Nodes 1 and 2 are children of the root; node 2's row must not change with node 1's key and value.
    case = make_mha_case(seq_lens=(9, 7, 12, 0), query_lens=3, tree_width=3)
    tree = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)
    case.options["tree_mask"] = tree.repeat(4, 1)
    before = case.run(backend)
    for request, seq_len in enumerate((9, 7, 12)):
        place = seq_len - 2
        page = case.tensors["page_table"][request, place // 4]
        case.tensors["k_cache"][page, place % 4] = 7.0
        case.tensors["v_cache"][page, place % 4] = 7.0
    after = case.run(backend)
    unchanged = torch.ones(12, dtype=torch.bool)
    unchanged[[1, 4, 7]] = False
    assert torch.equal(before[unchanged], after[unchanged])
    assert not torch.isclose(before[~unchanged], after[~unchanged]).any()


def test_a_uniform_layout_is_the_packed_one_with_equal_lengths(backend: str) -> None:
    uniform = make_mha_case(seq_lens=(9, 13), query_lens=6)
    packed = make_mha_case(seq_lens=(9, 13), query_lens=(6, 6))
    assert torch.equal(uniform.run(backend), packed.run(backend))


def test_bf16_is_closer_to_float64_than_its_own_rounding_allows(backend: str) -> None:
    # Accumulating in bf16 would be off by several percent over a thousand keys.
    case = make_mha_case(seq_lens=(1000, 1500), query_lens=4, page_size=16, dtype=torch.bfloat16)
    assert case.check(backend) < 2**-7


def test_page_table_columns_behind_the_live_pages_may_hold_anything(backend: str) -> None:
    case = make_mha_case(seq_lens=(3, 13), query_lens=2)
    expected = case.run(backend)
    case.tensors["page_table"][0, 1:] = 2**31 - 1
    case.tensors["page_table"][1, 4:] = -5
    assert torch.equal(case.run(backend), expected)


def test_the_torch_op_is_what_the_function_calls(backend: str) -> None:
    case = make_mha_case(query_lens=3)
    args, options = case.op_args()
    assert torch.equal(getattr(torch.ops.specops, f"{backend}_mha")(*args, **options), case.run(backend))


def test_scale_defaults_to_the_head_dims(backend: str) -> None:
    case = make_mha_case(head_dim=64)
    out = ops.mha(*case.args(), layout=QueryLayout.uniform(1), backend=backend)
    assert torch.equal(out, case.run(backend))


@pytest.mark.parametrize("query_lens", [3, (2, 4)], ids=["uniform", "packed"])
def test_index_tensors_may_be_views_of_larger_ones(backend: str, query_lens: int | tuple[int, ...]) -> None:
    case = make_mha_case(query_lens=query_lens)
    expected = case.run(backend)
    wide = torch.full((4, 40), 2**30, dtype=torch.int32)
    wide[:2, :6] = case.tensors["page_table"]
    case.tensors["page_table"] = wide[:2, :6]
    case.tensors["seq_lens"] = torch.stack((case.tensors["seq_lens"], torch.full((2,), -9, dtype=torch.int32)), dim=1)[:, 0]
    if not case.layout.is_uniform:
        starts = torch.stack((case.layout.query_start, torch.full((3,), -9, dtype=torch.int32)), dim=1)[:, 0]
        case.layout = QueryLayout.packed(starts, case.layout.max_query_len)
    assert torch.equal(case.run(backend), expected)
    case.tensors["page_table"] = wide[:2, :6].t().contiguous().t()
    assert torch.equal(case.run(backend), expected)


def test_tree_masks_may_be_views(backend: str) -> None:
    case = make_mha_case(query_lens=3, tree_width=5)
    expected = case.run(backend)
    case.options["tree_mask"] = case.options["tree_mask"].t().contiguous().t()
    assert torch.equal(case.run(backend), expected)
