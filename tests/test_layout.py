"""The one place where a stride is computed: offsets, owners and widths of uniform and packed layouts.

OMP_NUM_THREADS=1 pytest tests/test_layout.py
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specops import QueryLayout

CPU = torch.device("cpu")


def packed(lens: list[int], slack: int = 0) -> QueryLayout:
    starts = [0]
    for length in lens:
        starts.append(starts[-1] + length)
    return QueryLayout.packed(torch.tensor(starts, dtype=torch.int32), max([1, *lens]) + slack)


def test_offsets_step_by_num_draft_tokens_not_by_num_steps() -> None:
    # topk 2, 3 steps, 6 draft tokens: num_steps + 1 is 4 and must not appear.
    layout = QueryLayout.uniform(6)
    assert layout.offsets(2, CPU).tolist() == [0, 6, 12]
    assert layout.offsets(1, CPU).tolist() == [0, 6]
    assert layout.offsets(2, CPU).dtype == torch.int32


def test_the_width_that_sizes_a_grid_is_the_width_of_the_offsets() -> None:
    layout = QueryLayout.uniform(6)
    assert layout.max_query_len == layout.tokens_per_request == int(layout.query_lens(3, CPU)[1]) == 6


@given(st.lists(st.integers(0, 5), max_size=6), st.integers(0, 3))
def test_every_packed_row_belongs_to_the_request_whose_range_holds_it(lens: list[int], behind: int) -> None:
    layout = packed(lens)
    total = sum(lens)
    expected = [request for request, length in enumerate(lens) for _ in range(length)]
    if lens:
        owners = layout.request_ids(total + behind, len(lens), CPU)
        assert owners.tolist() == expected + [len(lens) - 1] * behind
        assert owners.dtype == torch.int64
    assert layout.query_lens(len(lens), CPU).tolist() == lens


@given(st.integers(1, 7), st.integers(0, 5))
def test_uniform_rows_belong_to_blocks_of_equal_width(width: int, batch: int) -> None:
    layout = QueryLayout.uniform(width)
    same = packed([width] * batch)
    assert layout.offsets(batch, CPU).tolist() == same.offsets(batch, CPU).tolist()
    assert layout.query_lens(batch, CPU).tolist() == [width] * batch
    assert layout.request_ids(batch * width, batch, CPU).tolist() == [row // width for row in range(batch * width)]


def test_kinds_are_told_apart() -> None:
    uniform, ragged = QueryLayout.uniform(2), packed([1, 3], slack=2)
    assert (uniform.kind, uniform.is_uniform) == ("uniform", True)
    assert (ragged.kind, ragged.is_uniform) == ("packed", False)
    assert ragged.max_query_len == 5
    with pytest.raises(ValueError, match="a packed layout has no tokens_per_request"):
        _ = ragged.tokens_per_request


@pytest.mark.parametrize("width", [0, -1])
def test_a_width_below_one_is_refused_and_says_what_it_should_be(width: int) -> None:
    with pytest.raises(ValueError, match=rf"tokens_per_request >= 1, got {width}; for topk > 1 it is num_draft_tokens"):
        QueryLayout.uniform(width)


def test_packed_refuses_what_no_kernel_could_read() -> None:
    starts = torch.tensor([0, 2])
    with pytest.raises(TypeError, match=r"query_start must be int32, got torch.int64; convert it once"):
        QueryLayout.packed(starts, 2)
    with pytest.raises(ValueError, match=r"\[B \+ 1\], got 2 dimensions"):
        QueryLayout.packed(starts[None].int(), 2)
    with pytest.raises(ValueError, match="max_query_len must be >= 1, got 0"):
        QueryLayout.packed(starts.int(), 0)


def test_layouts_pass_through_one_compiled_graph() -> None:
    torch._dynamo.reset()

    def owners(rows: torch.Tensor, layout: QueryLayout, batch: int) -> torch.Tensor:
        return layout.request_ids(rows.shape[0], batch, rows.device) + rows

    compiled = torch.compile(owners, fullgraph=True, backend="aot_eager")
    rows = torch.zeros(6, dtype=torch.int64)
    assert compiled(rows, QueryLayout.uniform(3), 2).tolist() == [0, 0, 0, 1, 1, 1]
    assert compiled(rows, packed([1, 5]), 2).tolist() == [0, 1, 1, 1, 1, 1]
