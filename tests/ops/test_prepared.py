"""Calls of the compiled kernels prepared for a layer: against the oracle and a loop, and what they decline.

OMP_NUM_THREADS=1 pytest tests/ops/test_prepared.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specops import QueryLayout
from specops.ops import native
from specops.ops.prepared import CacheReader, CacheWriter, Step, prepare_step
from specops.testing import make_mha_case
from specops.testing.cases import AttentionCase
from specops.testing.oracle import assert_close_to_oracle

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C compiler here, or SPECOPS_NATIVE=0")


DTYPES = native.DTYPES


def reader_of(case: AttentionCase) -> CacheReader:
    tensors, options = case.tensors, case.options
    features = (options.get("window"), options.get("softcap"), options.get("sinks"))
    return CacheReader(tensors["k_cache"], tensors["v_cache"], tensors["q"].shape[1], case.scale, *features)


def step_of(case: AttentionCase) -> Step:
    step = prepare_step(case.tensors["page_table"], case.tensors["seq_lens"], case.layout)
    assert step is not None
    return step


def output_of(case: AttentionCase, spare: int = 0) -> Tensor:
    q, v_cache = case.tensors["q"], case.tensors["v_cache"]
    return torch.full((q.shape[0] + spare, q.shape[1], v_cache.shape[3]), 7.0, dtype=q.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "arguments",
    [
        {"query_lens": 1},
        {"query_lens": 4, "window": 5, "softcap": 3.0, "sinks": True, "strided_q": True},
        {"query_lens": (1, 4), "hnd": True, "num_heads": 6},
        {"seq_lens": (90, 80), "query_lens": (70, 1), "shared_storage": "rows", "head_dim": 80},
    ],
    ids=["decode", "features", "packed", "prompt"],
)
def test_a_reader_fills_the_rows_it_is_told_and_no_more(arguments: dict[str, Any], dtype: torch.dtype) -> None:
    case = make_mha_case(**arguments, dtype=dtype)
    out = output_of(case, spare=3)
    rows = case.tensors["q"].shape[0]
    assert reader_of(case)(case.tensors["q"], out, step_of(case), rows)
    assert_close_to_oracle(out[:rows], case.oracle())
    assert bool((out[rows:] == 7).all())


def test_one_reader_serves_step_after_step() -> None:
    case = make_mha_case(seq_lens=(40, 33), query_lens=1, dtype=torch.float32)
    reader = reader_of(case)
    for lens, width in (([40, 33], 1), ([8, 33], 3), ([2, 1], 1), ([40, 20], 2)):
        case.layout = QueryLayout.uniform(width)
        case.tensors["seq_lens"] = torch.tensor(lens, dtype=torch.int32)
        case.tensors["q"] = torch.randn(2 * width, 8, 64)
        out = output_of(case)
        assert reader(case.tensors["q"], out, step_of(case), 2 * width)
        assert_close_to_oracle(out, case.oracle())


def test_a_step_holds_what_its_tensors_hold_when_it_runs() -> None:
    # vLLM fills the same buffers step after step; those that are contiguous are not copied.
    case = make_mha_case(seq_lens=(9, 13), query_lens=1)
    step, reader, out = step_of(case), reader_of(case), output_of(case)
    case.tensors["seq_lens"].copy_(torch.tensor([4, 12]))
    assert reader(case.tensors["q"], out, step, 2)
    assert_close_to_oracle(out, case.oracle())


def test_strided_tables_and_lengths_are_taken() -> None:
    case = make_mha_case(query_lens=(2, 3))
    lens, table = case.tensors["seq_lens"], case.tensors["page_table"]
    start = case.layout.query_start
    assert start is not None
    step = prepare_step(
        table.T.contiguous().T,
        torch.stack((lens, lens), dim=1)[:, 0],
        QueryLayout.packed(torch.stack((start, start), dim=1)[:, 0], 3),
    )
    out = output_of(case)
    assert step is not None
    assert reader_of(case)(case.tensors["q"], out, step, out.shape[0])
    assert_close_to_oracle(out, case.oracle())


def test_a_reader_declines_other_forms_and_touches_nothing() -> None:
    case = make_mha_case(query_lens=1, head_dim=16)
    q, out, step, reader = case.tensors["q"], output_of(case), step_of(case), reader_of(case)
    for given, filled in (
        (q.bfloat16(), out),
        (torch.cat((q, q), dim=2)[..., ::2], out),
        (q, out.bfloat16()),
        (q, torch.cat((out, out), dim=2)[..., :16]),
    ):
        before = filled.clone()
        assert not reader(given, filled, step, 2)
        assert torch.equal(filled, before)


def test_a_step_of_other_index_dtypes_is_declined() -> None:
    case = make_mha_case(query_lens=1)
    table, lens = case.tensors["page_table"], case.tensors["seq_lens"]
    assert prepare_step(table.long(), lens, case.layout) is None
    assert prepare_step(table, lens.long(), case.layout) is None
    with native.disabled():
        assert prepare_step(table, lens, case.layout) is None


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize("head_first", [False, True])
def test_a_writer_writes_the_live_rows_bit_for_bit(head_first: bool, dtype: torch.dtype, index_dtype: torch.dtype) -> None:
    def cache(dim: int) -> Tensor:
        return torch.zeros((5, 2, 4, dim) if head_first else (5, 4, 2, dim), dtype=dtype)

    k_cache, v_cache = (tensor.transpose(1, 2) if head_first else tensor for tensor in (cache(6), cache(3)))
    rows = (torch.arange(7 * 30) % 250).view(7, 30).to(dtype)
    # Of more rows than there are slots the first are written.
    k, v = rows[:, :12].view(7, 2, 6), rows[:, 12:18].view(7, 2, 3)
    slots = torch.tensor([5, 0, -1, 0, 19, 0, 8, 0, -3, 0], dtype=index_dtype)[::2]
    expected = torch.zeros(20, 2, 6, dtype=dtype), torch.zeros(20, 2, 3, dtype=dtype)
    for row, slot in ((0, 5), (2, 19), (3, 8)):
        expected[0][slot], expected[1][slot] = k[row], v[row]
    assert CacheWriter(k_cache, v_cache)(k, v, slots)
    assert torch.equal(k_cache.flatten(0, 1) if not head_first else k_cache.reshape(20, 2, 6), expected[0])
    assert torch.equal(v_cache.flatten(0, 1) if not head_first else v_cache.reshape(20, 2, 3), expected[1])


def test_many_rows_are_shared_among_threads() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        k_cache, v_cache = torch.zeros(2, 65, 8, 8, 64)
        k, v = torch.randn(2, 500, 8, 64)
        slots = torch.randperm(520)[:500]
        assert CacheWriter(k_cache, v_cache)(k, v, slots)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(k_cache.flatten(0, 1)[slots], k)
    assert torch.equal(v_cache.flatten(0, 1)[slots], v)
    assert int((k_cache.flatten(0, 1).abs().sum(dim=(1, 2)) > 0).sum()) == 500


def test_a_writer_declines_other_forms_and_touches_nothing() -> None:
    k_cache = torch.zeros(3, 4, 1, 8)
    writer, rows, slots = CacheWriter(k_cache, k_cache), torch.ones(2, 1, 8), torch.tensor([1, 2])
    wider = torch.ones(2, 1, 16)[..., ::2]
    for k, v, where in ((rows.bfloat16(), rows, slots), (rows, wider, slots), (rows, rows, slots.to(torch.int16))):
        assert not writer(k, v, where)
    assert not k_cache.any()


def test_a_slot_behind_the_cache_is_named_and_nothing_is_written() -> None:
    k_cache = torch.zeros(3, 4, 1, 8)
    rows = torch.ones(2, 1, 8)
    with pytest.raises(IndexError, match="slot 12 is behind a cache of 3 pages of 4 tokens"):
        CacheWriter(k_cache, k_cache)(rows, rows, torch.tensor([1, 12]))
    assert not k_cache.any()


def test_without_kernels_there_is_neither() -> None:
    cache = torch.zeros(3, 4, 1, 16)
    with native.disabled():
        with pytest.raises(native.NativeUnavailable, match=r"use ops\.store_kv"):
            CacheWriter(cache, cache)
        with pytest.raises(native.NativeUnavailable, match=r"use ops\.mha"):
            CacheReader(cache, cache, 1, 1.0)
