"""Positions and slots, computed from tensors: against a loop over requests in plain Python.

OMP_NUM_THREADS=1 pytest tests/test_metadata.py
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specops import AttentionMetadata, PagedAttention, PagedKVCache, QueryLayout, attention_metadata, ops
from specops.ops.places import slots_of


def table(rows: list[list[int]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32).reshape(len(rows), -1)


def lens(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def plain(pages: list[list[int]], seq_lens: list[int], query_lens: list[int], page_size: int) -> tuple[list[int], list[int]]:
    """Positions and slots of every row."""
    positions, slots = [], []
    for request, (seq_len, count) in enumerate(zip(seq_lens, query_lens, strict=True)):
        for row in range(count):
            place = seq_len - count + row
            positions.append(max(place, 0))
            column = place // page_size
            page = pages[request][column] if 0 <= column < len(pages[request]) else 0
            slots.append(page * page_size + place % page_size if page else -1)
    return positions, slots


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[list[int]], list[int], int]:
    batch, columns, page_size = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.sampled_from((1, 2, 4)))
    pages = [[draw(st.integers(0, 9)) for _ in range(columns)] for _ in range(batch)]
    return pages, [draw(st.integers(0, columns * page_size + 3)) for _ in range(batch)], page_size


@settings(max_examples=200, deadline=None)
@given(batches(), st.integers(1, 6))
def test_uniform_positions_and_slots(drawn: tuple[list[list[int]], list[int], int], width: int) -> None:
    pages, seq_lens, page_size = drawn
    meta = attention_metadata(table(pages), lens(seq_lens), QueryLayout.uniform(width), page_size)
    expected = plain(pages, seq_lens, [width] * len(pages), page_size)
    assert (meta.positions.tolist(), meta.slots.tolist()) == expected
    assert (meta.positions.dtype, meta.slots.dtype) == (torch.int64, torch.int64)


@settings(max_examples=200, deadline=None)
@given(batches(), st.data(), st.integers(0, 3))
def test_packed_positions_and_slots(drawn: tuple[list[list[int]], list[int], int], data: st.DataObject, behind: int) -> None:
    pages, seq_lens, page_size = drawn
    query_lens = [data.draw(st.integers(0, 5)) for _ in pages]
    starts = torch.tensor([0, *torch.tensor(query_lens).cumsum(0).tolist()], dtype=torch.int32)
    total = sum(query_lens)
    layout = QueryLayout.packed(starts, 5)
    meta = attention_metadata(table(pages), lens(seq_lens), layout, page_size, num_tokens=total + behind)
    positions, slots = plain(pages, seq_lens, query_lens, page_size)
    assert meta.positions.tolist() == positions + [0] * behind
    assert meta.slots.tolist() == slots + [-1] * behind, "rows behind the last request write nothing"


def test_two_requests_of_six_rows_at_topk_2() -> None:
    # seq_lens count the six rows: prefixes of 3 and 7 tokens.
    meta = attention_metadata(table([[1, 2, 3], [4, 5, 6]]), lens([9, 12]), QueryLayout.uniform(6), 4)
    assert meta.positions.tolist() == [3, 4, 5, 6, 7, 8, 6, 7, 8, 9, 10, 11]
    assert meta.slots.tolist() == [7, 8, 9, 10, 11, 12, 22, 23, 24, 25, 26, 27]


def test_padded_requests_write_nothing() -> None:
    meta = attention_metadata(table([[1, 2], [0, 0], [0, 0]]), lens([5, 0, 0]), QueryLayout.uniform(2), 4)
    assert meta.slots.tolist() == [7, 8, -1, -1, -1, -1]
    assert meta.positions.tolist() == [3, 4, 0, 0, 0, 0]


def test_rows_behind_the_page_table_write_nothing() -> None:
    meta = attention_metadata(table([[3]]), lens([6]), QueryLayout.uniform(4), 4)
    assert meta.slots.tolist() == [14, 15, -1, -1]


def test_tree_rows_keep_consecutive_slots_and_share_positions_by_depth() -> None:
    # A root, two children, and a child of each, for prefixes of 3 and 10 tokens.
    depths = torch.tensor([0, 1, 1, 2, 2]).repeat(2)
    mask = torch.ones(10, 5, dtype=torch.bool)
    meta = attention_metadata(
        table([[1, 2, 9, 9], [3, 4, 5, 6]]), lens([8, 15]), QueryLayout.uniform(5), 4, depths=depths, tree_mask=mask
    )
    assert meta.positions.tolist() == [3, 4, 4, 5, 5, 10, 11, 11, 12, 12]
    assert meta.slots.tolist() == [7, 8, 9, 10, 11, 22, 23, 24, 25, 26]


def test_one_depth_for_all_rows_and_rows_not_counted_yet() -> None:
    # Two nodes of the second level of a tree of four, drafted on prefixes of 6 tokens and of none.
    mask = torch.ones(4, 4, dtype=torch.bool)
    pages, layout = table([[1, 2, 3], [4, 5, 6]]), QueryLayout.uniform(2)
    meta = attention_metadata(pages, lens([6, 0]), layout, 4, depths=1, tree_mask=mask, grow=4)
    assert meta.seq_lens.tolist() == [10, 0]
    assert meta.positions.tolist() == [7, 7, 0, 0]
    assert meta.slots.tolist() == [12, 13, -1, -1]
    packed = QueryLayout.packed(torch.tensor([0, 2, 2], dtype=torch.int32), 2)
    meta = attention_metadata(pages, lens([6, 0]), packed, 4, num_tokens=2, grow=4)
    assert (meta.seq_lens.tolist(), meta.positions.tolist()) == ([10, 0], [8, 9])


def test_rows_of_a_wide_tree_stand_behind_the_whole_trees_prefix() -> None:
    # The last two nodes of a tree of four on a prefix of 6 tokens, at depth 1 and 2.
    meta = attention_metadata(
        table([[1, 2, 3]]),
        lens([10]),
        QueryLayout.uniform(2),
        4,
        depths=torch.tensor([1, 2]),
        tree_mask=torch.ones(2, 4, dtype=torch.bool),
    )
    assert meta.positions.tolist() == [7, 8]
    assert meta.slots.tolist() == [12, 13]


def test_depths_of_padded_requests_stay_inside_the_rotary_table() -> None:
    mask = torch.ones(6, 3, dtype=torch.bool)
    depths = torch.tensor([0, 1, 2] * 2)
    meta = attention_metadata(table([[1], [0]]), lens([3, 0]), QueryLayout.uniform(3), 4, depths=depths, tree_mask=mask)
    assert meta.positions.tolist() == [0, 1, 2, 0, 0, 0]
    assert meta.slots.tolist() == [4, 5, 6, -1, -1, -1]


def test_slots_of_places_anywhere() -> None:
    places, requests = torch.tensor([0, 5, 7, 8, -1]), torch.tensor([0, 0, 1, 1, 0])
    assert slots_of(places, requests, table([[2, 3], [4, 0]]), 4).tolist() == [8, 13, -1, -1, -1]


def test_what_is_missing_is_said() -> None:
    starts = torch.tensor([0, 2], dtype=torch.int32)
    with pytest.raises(ValueError, match="a packed layout needs num_tokens"):
        attention_metadata(table([[1]]), lens([2]), QueryLayout.packed(starts, 2), 4)
    with pytest.raises(ValueError, match="depths need the tree_mask"):
        attention_metadata(table([[1]]), lens([2]), QueryLayout.uniform(2), 4, depths=torch.tensor([0, 1]))


def test_nothing_of_the_first_call_is_frozen_into_the_compiled_graph() -> None:
    # Traced with seq_lens [1, 1], then called with [17, 5]: positions and attention must follow.
    torch._dynamo.reset()
    cache = torch.randn(11, 4, 1, 8)

    def step(q: torch.Tensor, page_table: torch.Tensor, seq_lens: torch.Tensor) -> tuple[AttentionMetadata, torch.Tensor]:
        layout = QueryLayout.uniform(3)
        meta = attention_metadata(page_table, seq_lens, layout, 4)
        return meta, ops.mha(q, cache, cache, page_table, seq_lens, layout=layout)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    page_table, q = table([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]), torch.randn(6, 1, 8)
    with torch.no_grad():
        for seq_lens in ([1, 1], [17, 5], [0, 20], [3, 3]):
            (meta, out), (want, expected) = (run(q, page_table, lens(seq_lens)) for run in (compiled, step))
            assert meta.positions.tolist() == want.positions.tolist() == plain([[1] * 5] * 2, seq_lens, [3, 3], 4)[0]
            assert meta.slots.tolist() == want.slots.tolist()
            torch.testing.assert_close(out, expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1


def test_f14_a_layer_refuses_metadata_made_for_another_page_size() -> None:
    cache = PagedKVCache(8, 4, 1, 8, dtype=torch.float32)
    layer = PagedAttention(1, 1, 8, cache=cache)
    rows = torch.randn(2, 1, 8)
    table, lens = torch.tensor([[1, 2]], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    layer(rows, rows, rows, attention_metadata(table, lens, QueryLayout.uniform(2), 4))
    with pytest.raises(ValueError, match="computed for pages of 8 tokens and the cache has pages of 4"):
        layer(rows, rows, rows, attention_metadata(table, lens, QueryLayout.uniform(2), 8))
