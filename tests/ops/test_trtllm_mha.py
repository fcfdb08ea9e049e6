"""TensorRT-LLM MHA: the arguments XQA would get, its bit masks, and what is refused. Runs without a GPU.

OMP_NUM_THREADS=1 pytest tests/ops/test_trtllm_mha.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import vendor_fakes
from hypothesis import given, settings
from hypothesis import strategies as st

from specops import QueryLayout
from specops.ops import flashinfer_common, trtllm_mha
from specops.ops.backends import get_backend
from specops.testing.cases import AttentionCase, make_mha_case, random_tree_mask
from specops.testing.oracle import assert_close_to_oracle


@pytest.fixture(autouse=True)
def _no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trtllm_mha, "_decode", lambda: vendor_fakes.xqa_decode)


def run(case: AttentionCase) -> torch.Tensor:
    return trtllm_mha.mha(*case.args(), **case.kwargs())


CASES: dict[str, dict[str, Any]] = {
    "one row": {"query_lens": 1},
    "verify": {"query_lens": 6, "seq_lens": (40, 6, 17)},
    "padded and short requests": {"query_lens": 4, "seq_lens": (33, 0, 0, 3, 1)},
    "short requests under a tree": {"query_lens": 6, "tree_width": 6, "seq_lens": (5, 1, 0)},
    "lengths behind the page table": {"query_lens": 4, "seq_lens": (66, 70, 20), "table_columns": 4},
    "tree behind the page table": {"query_lens": 6, "tree_width": 6, "seq_lens": (66, 70, 20), "table_columns": 4},
    "thirty-two rows": {"query_lens": 32, "seq_lens": (40, 32)},
    "window, one row": {"window": 7},
    "window": {"query_lens": 5, "seq_lens": (30, 5, 8), "window": 3},
    "window, short requests": {"query_lens": 5, "seq_lens": (2, 0, 30), "window": 20},
    "sinks": {"query_lens": 4, "seq_lens": (20, 4), "sinks": True},
    "sinks, group of 3 in two blocks": {"query_lens": 11, "seq_lens": (20, 11), "sinks": True, "num_heads": 6},
    "window and sinks": {"query_lens": 4, "seq_lens": (20, 4), "sinks": True, "window": 5},
    "tree": {"query_lens": 6, "tree_width": 6, "seq_lens": (6, 19, 0)},
    "fp8": {"query_lens": 4, "seq_lens": (20, 4), "fp8": True},
    "hnd": {"query_lens": 4, "seq_lens": (20, 4), "hnd": True},
    "shared storage": {"query_lens": 4, "seq_lens": (20, 4), "shared_storage": "pages"},
    "strided q": {"query_lens": 4, "seq_lens": (20, 4), "strided_q": True},
}


@pytest.mark.parametrize("name", CASES)
def test_what_xqa_is_told_is_the_oracle(name: str) -> None:
    case = make_mha_case(**{"page_size": 16, "dtype": torch.float16, **CASES[name]})
    out = run(case)
    assert out.is_contiguous()
    assert_close_to_oracle(out, case.oracle())


def arguments(**options: Any) -> dict[str, Any]:
    case = make_mha_case(**{"page_size": 16, "dtype": torch.float16, "query_lens": 4, "seq_lens": (20, 9), **options})
    return trtllm_mha.xqa_arguments(*case.args(), **case.kwargs())


def test_layers_share_one_workspace_that_was_zeroed_once() -> None:
    first = arguments()["workspace_buffer"]
    assert not first.any()
    first[0] = 1
    second = arguments(seed=1)["workspace_buffer"]
    assert second.data_ptr() == first.data_ptr()
    assert second[0] == 1
    first[0] = 0


def test_scales_stay_tensors_and_are_never_read_on_the_host() -> None:
    given_scales = arguments(fp8=True, k_scale=0.25, v_scale=0.5)
    assert isinstance(given_scales["bmm1_scale"], torch.Tensor)
    assert isinstance(given_scales["bmm2_scale"], torch.Tensor)
    assert given_scales["bmm1_scale"].item() == pytest.approx(0.25 * 64**-0.5)
    assert given_scales["bmm2_scale"].item() == 0.5
    one, other = trtllm_mha.fused_scales(0.125, None, torch.tensor([0.5]))
    assert isinstance(one, torch.Tensor)
    assert (one.item(), isinstance(other, torch.Tensor)) == (0.125, True)
    one, other = trtllm_mha.fused_scales(0.125, torch.tensor([0.5]), None)
    assert isinstance(other, torch.Tensor)
    assert other.item() == 1.0


def test_a_sink_is_always_given_and_changes_nothing_where_there_is_none() -> None:
    """exp(sink - score) underflows to exactly 0 in float32 for any score above the kernel's -1e5 by a margin."""
    sinks = arguments()["sinks"]
    assert sinks.shape == (8,)
    assert torch.exp(sinks - torch.tensor(-1000.0)).eq(0).all()
    assert torch.isinf(torch.exp(sinks - torch.tensor(-1.0e5))).all()


def words(prepared: torch.Tensor, batch: int, rows: int) -> list[list[list[int]]]:
    """Unsigned 32-bit words of each row's mask."""
    mask = prepared[batch:].view(batch, rows, -1)
    return [[[word & 0xFFFFFFFF for word in row] for row in request] for request in mask.tolist()]


@given(
    lens=st.lists(st.integers(0, 90), min_size=1, max_size=4),
    rows=st.integers(1, 40),
    columns=st.integers(3, 5),
    tree=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(deadline=None, max_examples=60)
def test_prepared_mask_equals_a_loop_over_bits(lens: list[int], rows: int, columns: int, tree: bool, seed: int) -> None:
    """Bit j of a row says whether it sees the key at ``shown - rows + j``, shown being the length that XQA is told."""
    trees = random_tree_mask(len(lens), rows, rows, seed)
    table, layout = torch.zeros((len(lens), columns), dtype=torch.int32), QueryLayout.uniform(rows)
    prepared = trtllm_mha.prepare(torch.tensor(lens, dtype=torch.int32), table, layout, 16, trees if tree else None)
    masks = words(prepared, len(lens), rows)
    for request, seq_len in enumerate(lens):
        shown = max(min(seq_len, 16 * columns), rows) if seq_len > 0 else 0
        assert int(prepared[request]) == shown
        for row in range(rows):
            bits = trees[request * rows + row].tolist() if tree else [column <= row for column in range(rows)]
            for bit in range(32 * len(masks[request][row])):
                column = shown - rows + bit - (seq_len - rows)
                sees = bit < rows and (column < 0 or (column < rows and bits[column]))
                assert bool(masks[request][row][bit // 32] >> (bit % 32) & 1) == sees


def test_causal_words() -> None:
    lens, table = torch.tensor([50], dtype=torch.int32), torch.zeros((1, 8), dtype=torch.int32)
    prepared = trtllm_mha.prepare(lens, table, QueryLayout.uniform(34), 16)
    (mask,) = words(prepared, 1, 34)
    assert prepared.shape == (1 + 34 * 2,)
    assert mask[0] == [0b1, 0]
    assert mask[31] == [0xFFFFFFFF, 0]
    assert mask[33] == [0xFFFFFFFF, 0b11]


def test_layers_may_share_what_was_prepared() -> None:
    case = make_mha_case(page_size=16, dtype=torch.float16, query_lens=4, seq_lens=(20, 9), tree_width=4)
    tensors, mask = case.tensors, case.options["tree_mask"]
    prepared = trtllm_mha.prepare(tensors["seq_lens"], tensors["page_table"], case.layout, 16, mask)
    assert_close_to_oracle(trtllm_mha.mha(*case.args(), **case.kwargs(), plan=prepared), case.oracle())
    given_mask = trtllm_mha.xqa_arguments(*case.args(), **case.kwargs(), plan=prepared)["mask"]
    assert given_mask.untyped_storage().data_ptr() == prepared.untyped_storage().data_ptr()
    with pytest.raises(ValueError, match=r"prepare for 2 requests of 4 rows, \[10\] int32; got \[9\]"):
        trtllm_mha.mha(*case.args(), **case.kwargs(), plan=prepared[1:])


def test_a_page_table_shorter_than_the_rows_is_refused() -> None:
    lens, table = torch.tensor([50], dtype=torch.int32), torch.zeros((1, 1), dtype=torch.int32)
    with pytest.raises(ValueError, match="holds 16 tokens, fewer than the 20 rows"):
        trtllm_mha.prepare(lens, table, QueryLayout.uniform(20), 16)


@pytest.mark.parametrize("tree", [False, True])
def test_prepare_is_a_torch_op(tree: bool) -> None:
    lens = torch.tensor([20, 0, 3], dtype=torch.int32)
    mask = random_tree_mask(3, 4, 4, 0) if tree else None
    torch.library.opcheck(torch.ops.specops.trtllm_prepare.default, (lens, mask, 4, 64))


def test_caches_with_different_strides_are_refused() -> None:
    case = make_mha_case(page_size=16, dtype=torch.float16, shared_storage="rows", value_dim=64)
    case.tensors["v_cache"] = case.tensors["v_cache"].contiguous()
    with pytest.raises(ValueError, match=r"equal strides, got \(.*\) and \(.*\); allocate both alike"):
        run(case)


def test_strides_that_are_no_multiple_of_the_head_are_refused() -> None:
    case = make_mha_case(page_size=16, dtype=torch.float16)
    for name in ("k_cache", "v_cache"):
        cache = case.tensors[name]
        wide = torch.zeros((*cache.shape[:3], 72), dtype=cache.dtype)
        case.tensors[name] = wide[..., :64]
    with pytest.raises(ValueError, match="XQA counts cache strides in heads of 64 values"):
        run(case)


def test_threshold_is_refused_on_xqa_and_passed_to_trtllm_gen(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_mha_case(page_size=16, dtype=torch.float16)
    with pytest.raises(ValueError, match="by TRT-LLM-gen"):
        trtllm_mha.mha(*case.args(), **case.kwargs(), skip_softmax_threshold=1.0)
    seen: dict[str, Any] = {}
    monkeypatch.setattr(trtllm_mha, "is_xqa", lambda device: False)
    monkeypatch.setattr(trtllm_mha, "_decode", lambda: lambda **given: seen.update(given))
    trtllm_mha.mha(*case.args(), **case.kwargs())
    assert "skip_softmax_threshold_scale_factor" not in seen
    trtllm_mha.mha(*case.args(), **case.kwargs(), skip_softmax_threshold=1.0)
    assert seen["skip_softmax_threshold_scale_factor"] == 1.0
    assert seen["backend"] == "trtllm-gen"


def test_skip_softmax_is_a_backend_of_its_own_that_auto_never_takes() -> None:
    trtllm_mha.register_skip_softmax("trtllm_skip_for_test", 500.0)
    backend = get_backend("trtllm_skip_for_test", "mha")
    assert "threshold 500.0" in backend.source
    assert torch.ops.specops.trtllm_skip_for_test_mha is not None


def test_packed_layout_goes_to_the_context_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_mha_case(page_size=16, dtype=torch.float16, query_lens=(3, 1), seq_lens=(9, 13), window=5)
    seen: dict[str, Any] = {}
    monkeypatch.setattr(trtllm_mha, "is_xqa", lambda device: False)
    monkeypatch.setattr(trtllm_mha, "_context", lambda: lambda **given: seen.update(given))
    trtllm_mha.mha(*case.args(), **case.kwargs())
    assert seen["cum_seq_lens_q"].tolist() == [0, 3, 4]
    assert seen["cum_seq_lens_kv"].tolist() == [0, 9, 22]
    assert (seen["max_q_len"], seen["batch_size"], seen["window_left"]) == (3, 2, 4)


def test_empty_batch_calls_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trtllm_mha, "_decode", lambda: pytest.fail("called"))
    q = torch.zeros((0, 8, 64), dtype=torch.float16)
    cache = torch.zeros((2, 16, 2, 64), dtype=torch.float16)
    table, lens = torch.zeros((0, 1), dtype=torch.int32), torch.zeros((0,), dtype=torch.int32)
    out = trtllm_mha.mha(q, cache, cache, table, lens, layout=QueryLayout.uniform(4), scale=1.0)
    assert out.shape == (0, 8, 64)


def test_missing_package_names_the_extra() -> None:
    with pytest.raises(ImportError, match=r"pip install 'specops\[flashinfer\]'"):
        flashinfer_common.load("flashinfer_is_not_here.decode", "flashinfer")
