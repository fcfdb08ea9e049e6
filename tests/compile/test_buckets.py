"""Buckets and the field table.

Run alone: pytest tests/compile/test_buckets.py
"""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st

from specops.batch import Field, FieldTable, draft_extend_fields
from specops.compile.buckets import bucket_for, check_buckets, default_buckets
from specops.spec import SpecConfig
from specops.spec.draft import draft_fields
from specops.spec.verify import verify_fields


@given(st.integers(1, 3000))
def test_default_buckets_cover_every_batch_and_bound_the_waste(max_requests: int) -> None:
    buckets = default_buckets(max_requests)
    assert buckets == tuple(sorted(set(buckets)))
    assert buckets[-1] == max_requests
    for size in {1, max_requests, max(1, max_requests // 2), max(1, max_requests // 3), max(1, max_requests - 1)}:
        bucket = bucket_for(size, buckets)
        assert bucket is not None
        assert size <= bucket < max(1.25 * size, size + 1)


def test_a_batch_above_the_largest_bucket_has_none() -> None:
    assert bucket_for(5, (1, 2, 4)) is None
    assert [bucket_for(n, (1, 2, 4)) for n in range(1, 5)] == [1, 2, 4, 4]


def test_buckets_are_sorted_and_checked() -> None:
    assert check_buckets([4, 1, 2, 4]) == (1, 2, 4)
    for bad in ([], [0, 1], [-3]):
        with pytest.raises(ValueError, match="buckets must be batch sizes >= 1"):
            check_buckets(bad)
    with pytest.raises(ValueError, match="max_requests must be >= 1, got 0"):
        default_buckets(0)


def test_the_padded_tables() -> None:
    tables = (
        draft_extend_fields(6, 32, 16, torch.float32),
        verify_fields(SpecConfig(3, 2, 6), 16),
        draft_fields(64, 32, 16, torch.bfloat16),
    )
    assert_expected_inline(
        "\n\n".join(table.describe() for table in tables),
        """\
input_ids      [B, 6] int64 pad 0
hidden_states  [B, 6, 32] float32 pad 0
seq_lens       [B] int32 pad 0
accept_lens    [B] int32 pad 1
page_table     [B, 16] int32 pad 0

tokens         [B, 6] int64 pad 0
parents        [B, 6] int64 pad -1
depths         [B, 6] int64 pad 0
tree_mask      [B, 6, 6] bool pad 0
seq_lens       [B] int32 pad 0
page_table     [B, 16] int32 pad 0

root_tokens    [B] int64 pad 0
next_token_logits [B, 64] bfloat16 pad 0
hidden_states  [B, 32] bfloat16 pad 0
seq_lens       [B] int32 pad 0
page_table     [B, 16] int32 pad 0""",
    )


def test_copy_in_pads_whatever_stood_there() -> None:
    table = FieldTable((Field("ids", "token", (), torch.int64, 5), Field("lens", "request", (), torch.int32, -1)), 3)
    buffers = table.allocate(4, torch.device("cpu"))
    for buffer in buffers.values():
        buffer.fill_(99)
    batch = {"ids": torch.arange(6).reshape(2, 3), "lens": torch.tensor([7, 8], dtype=torch.int32)}
    table.copy_in(buffers, batch, 2, 4)
    assert buffers["ids"].tolist() == [[0, 1, 2], [3, 4, 5], [5, 5, 5], [5, 5, 5]]
    assert buffers["lens"].tolist() == [7, 8, -1, -1]


def test_a_name_may_stand_once() -> None:
    with pytest.raises(ValueError, match="a field is named twice"):
        FieldTable((Field("a", "request", (), torch.int32), Field("a", "token", (), torch.int32)), 1)
