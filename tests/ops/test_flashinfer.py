"""FlashInfer fa2 and fa3: what the wrappers are planned with and run on, against the oracle. Runs without a GPU.

OMP_NUM_THREADS=1 pytest tests/ops/test_flashinfer.py
"""

from __future__ import annotations

import threading
import types
from typing import Any

import pytest
import torch
import vendor_fakes
from hypothesis import given, settings
from hypothesis import strategies as st

from specops import QueryLayout
from specops.ops import flashinfer, flashinfer_common, planning
from specops.ops.planning import make_plan
from specops.testing.cases import AttentionCase, make_mha_case, make_mla_case, random_tree_mask
from specops.testing.oracle import assert_close_to_oracle


@pytest.fixture(autouse=True)
def _fake_package(monkeypatch: pytest.MonkeyPatch) -> None:
    prefill = types.SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=vendor_fakes.PagedPrefillWrapper)
    mla = types.SimpleNamespace(BatchMLAPagedAttentionWrapper=vendor_fakes.PagedMlaWrapper)
    variants = types.SimpleNamespace(attention_sink_decl={"fa2": "fa2 source", "fa3": "fa3 source"})
    monkeypatch.setattr(flashinfer, "_prefill", lambda: prefill)
    monkeypatch.setattr(flashinfer, "_mla_module", lambda: mla)
    monkeypatch.setattr(flashinfer_common, "load", lambda module, extra: variants)
    monkeypatch.setattr(flashinfer, "WORKSPACE_BYTES", 1024)
    planning._inline.clear()


MHA_CASES: dict[str, dict[str, Any]] = {
    "one row": {"query_lens": 1},
    "verify": {"query_lens": 6, "seq_lens": (40, 6, 17)},
    "short and padded requests": {"query_lens": 4, "seq_lens": (9, 0, 2)},
    "packed": {"query_lens": (3, 1, 0, 5), "seq_lens": (9, 13, 4, 5)},
    "window": {"query_lens": 5, "seq_lens": (30, 5), "window": 3},
    "softcap and window": {"query_lens": 3, "softcap": 5.0, "window": 6},
    "sinks": {"query_lens": 3, "sinks": True},
    "sinks and window": {"query_lens": (3, 2), "sinks": True, "window": 4},
    "page size 1": {"query_lens": 3, "page_size": 1},
}
FA2_CASES: dict[str, dict[str, Any]] = {
    "tree": {"query_lens": 6, "tree_width": 6, "seq_lens": (6, 19, 0, 4)},
    "tree and window": {"query_lens": 6, "tree_width": 6, "seq_lens": (40, 6, 3), "window": 3},
    "tree and softcap": {"query_lens": 6, "tree_width": 6, "seq_lens": (40, 6), "softcap": 4.0},
    "wide tree": {"query_lens": 2, "tree_width": 7, "seq_lens": (20, 7, 5), "window": 4},
    "fp8": {"query_lens": 3, "fp8": True},
    "fp8 packed": {"query_lens": (3, 1), "fp8": True},
}


def check(call: Any, case: AttentionCase, plan: torch.Tensor | None = None) -> None:
    out = call(*case.args(), **case.kwargs(), **({} if plan is None else {"plan": plan}))
    assert out.is_contiguous()
    assert_close_to_oracle(out, case.oracle())


@pytest.mark.parametrize("name", [*MHA_CASES, *FA2_CASES])
def test_fa2_mha_without_a_plan(name: str) -> None:
    check(flashinfer.fa2_mha, make_mha_case(**{"dtype": torch.float16, **(MHA_CASES | FA2_CASES)[name]}))


@pytest.mark.parametrize("name", MHA_CASES)
def test_fa3_mha_without_a_plan(name: str) -> None:
    check(flashinfer.fa3_mha, make_mha_case(**{"dtype": torch.float16, **MHA_CASES[name]}))


def test_fa3_is_planned_with_the_rows_before_a_sequence_apart() -> None:
    """Four rows each and 9, 2 and 0 keys in pages of 4: two rows of the second and all of the third request see none."""
    case = make_mha_case(query_lens=4, seq_lens=(9, 2, 0), dtype=torch.float16)
    table, lens = case.tensors["page_table"], case.tensors["seq_lens"]
    plan = make_plan("flashinfer_fa3", "mha", table, case.layout, page_size=4)
    plan.update(table, lens, case.layout)
    assert plan.step is not None
    step = flashinfer.hidden_rows_apart(plan.step)
    assert step.query_start.tolist() == [0, 0, 4, 6, 8, 12, 12]
    assert step.seq_lens.tolist() == [0, 9, 0, 2, 0, 0]
    assert step.page_start.tolist() == [0, 0, 3, 3, 4, 4, 4]
    assert step.last_page_lens.tolist() == [0, 1, 0, 2, 0, 0]
    assert step.uniform_width is None
    assert flashinfer.hidden_rows_apart(plan.step) is step, "once for all kernels of a step"
    plan.update(table, lens + 1, case.layout)
    assert flashinfer.hidden_rows_apart(plan.step).seq_lens.tolist() == [0, 10, 0, 3, 0, 1]


@pytest.mark.parametrize("query_lens", [1, 4, (3, 1)])
@pytest.mark.parametrize("call", [flashinfer.fa2_mla, flashinfer.fa3_mla])
def test_mla_without_a_plan(call: Any, query_lens: Any) -> None:
    check(call, make_mla_case(dtype=torch.float16, query_lens=query_lens))


def test_one_plan_serves_layers_with_and_without_a_window_over_growing_and_shrinking_lengths() -> None:
    """Lengths go down and up; the page table keeps its width; the wrapper's buffers keep their addresses."""
    plan: planning.Plan | None = None
    addresses = set()
    for seq_lens in ((40, 33), (4, 4), (64, 0), (17, 49)):
        cases = [
            make_mha_case(
                seq_lens=seq_lens,
                query_lens=4,
                dtype=torch.float16,
                spare_columns=20 - -(-max(seq_lens) // 4),
                window=window,
            )
            for window in (None, 5)
        ]
        table, lens = cases[0].tensors["page_table"], cases[0].tensors["seq_lens"]
        if plan is None:
            plan = make_plan("flashinfer_fa2", "mha", table, cases[0].layout, page_size=4)
        plan.update(table, lens, cases[0].layout)
        for case in cases:
            check(flashinfer.fa2_mha, case, plan.handle)
        for planned in plan._planned.values():
            assert isinstance(planned, flashinfer.PlannedMha)
            addresses.add(tuple(buffer.data_ptr() for buffer in planned.wrapper.buffers))
    assert len(addresses) == 2


def test_lengths_given_on_the_host_are_not_copied_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_mha_case(query_lens=(3, 1), dtype=torch.float16)
    table, lens, layout = case.tensors["page_table"], case.tensors["seq_lens"], case.layout
    plan = make_plan("flashinfer_fa3", "mha", table, layout, page_size=4, num_rows=4)
    asked = []
    on_host = planning._on_host
    monkeypatch.setattr(planning, "_on_host", lambda tensor: asked.append(tensor) or on_host(tensor))
    host_lens, host_starts = lens.clone(), torch.tensor([0, 3, 4], dtype=torch.int32)
    plan.update(table, lens, layout, seq_lens_cpu=host_lens, query_start_cpu=host_starts)
    assert [id(tensor) for tensor in asked] == [id(host_lens), id(host_starts)]
    check(flashinfer.fa3_mha, case, plan.handle)


def test_packed_rows_behind_the_last_request_are_zero() -> None:
    case = make_mha_case(query_lens=(3, 1), dtype=torch.float16)
    table, lens = case.tensors["page_table"], case.tensors["seq_lens"]
    plan = make_plan("flashinfer_fa2", "mha", table, case.layout, page_size=4, num_rows=6)
    plan.update(table, lens, case.layout)
    q = torch.cat((case.tensors["q"], torch.full((2, 8, 64), 3.0, dtype=torch.float16)))
    out = flashinfer.fa2_mha(q, *case.args()[1:], **case.kwargs(), plan=plan.handle)
    assert_close_to_oracle(out[:4], case.oracle())
    assert not out[4:].any()


def test_a_copy_of_the_handle_is_refused() -> None:
    case = make_mha_case(dtype=torch.float16)
    plan = make_plan("flashinfer_fa2", "mha", case.tensors["page_table"], case.layout, page_size=4)
    with pytest.raises(ValueError, match=r"must be plan\.handle itself, since a copy has another address"):
        flashinfer.fa2_mha(*case.args(), **case.kwargs(), plan=plan.handle.clone())


def test_a_dead_plan_is_refused() -> None:
    case = make_mha_case(dtype=torch.float16)
    handle = make_plan("flashinfer_fa2", "mha", case.tensors["page_table"], case.layout, page_size=4).handle
    with pytest.raises(ValueError, match="names no live plan"):
        flashinfer.fa2_mha(*case.args(), **case.kwargs(), plan=handle)


def test_a_plan_of_another_backend_or_shape_is_refused() -> None:
    case, wider = make_mha_case(dtype=torch.float16), make_mha_case(dtype=torch.float16, seq_lens=(9, 13, 5))
    plan = make_plan("flashinfer_fa3", "mha", case.tensors["page_table"], case.layout, page_size=4)
    with pytest.raises(ValueError, match="flashinfer_fa2_mha was given a plan of flashinfer_fa3_mha"):
        flashinfer.fa2_mha(*case.args(), **case.kwargs(), plan=plan.handle)
    with pytest.raises(ValueError, match="made for 2 requests, 2 rows and pages of 4; the call has 3 requests, 3 rows"):
        flashinfer.fa3_mha(*wider.args(), **wider.kwargs(), plan=plan.handle)
    with pytest.raises(ValueError, match=r"made for a page table \[2, 6\], got \[3, 6\]"):
        plan.update(wider.tensors["page_table"], wider.tensors["seq_lens"], wider.layout)
    with pytest.raises(ValueError, match="made for 2 rows, and 2 requests have 4 each"):
        plan.update(case.tensors["page_table"], case.tensors["seq_lens"], QueryLayout.uniform(4))


def test_a_length_beyond_the_page_table_is_refused() -> None:
    case = make_mha_case(dtype=torch.float16)
    plan = make_plan("flashinfer_fa2", "mha", case.tensors["page_table"], case.layout, page_size=4)
    with pytest.raises(ValueError, match="a request has 25 pages, and the page table 6 columns"):
        plan.update(case.tensors["page_table"], torch.tensor([100, 1], dtype=torch.int32), case.layout)


def test_a_plan_that_was_never_updated_is_refused() -> None:
    case = make_mha_case(dtype=torch.float16)
    plan = make_plan("flashinfer_fa2", "mha", case.tensors["page_table"], case.layout, page_size=4)
    with pytest.raises(RuntimeError, match=r"never updated: call plan\.update"):
        flashinfer.fa2_mha(*case.args(), **case.kwargs(), plan=plan.handle)


def test_what_a_capture_can_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_mha_case(dtype=torch.float16)
    table, lens = case.tensors["page_table"], case.tensors["seq_lens"]
    plan = make_plan("flashinfer_fa2", "mha", table, case.layout, page_size=4)
    plan.update(table, lens, case.layout)
    monkeypatch.setattr(flashinfer_common, "is_capturing", lambda device: True)
    with pytest.raises(RuntimeError, match="plans on the host, which a CUDA graph can't capture; make a plan before"):
        flashinfer.fa2_mha(*case.args(), **case.kwargs())
    with pytest.raises(RuntimeError, match="run the step once eagerly before capturing it"):
        flashinfer.fa2_mha(*case.args(), **case.kwargs(), plan=plan.handle)
    with pytest.raises(RuntimeError, match="not within"):
        plan.update(table, lens, case.layout)


def test_another_launch_than_the_captured_one_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_mha_case(dtype=torch.float16)
    table, lens = case.tensors["page_table"], case.tensors["seq_lens"]
    plan = make_plan("flashinfer_fa2", "mha", table, case.layout, page_size=4)
    plan.update(table, lens, case.layout)
    check(flashinfer.fa2_mha, case, plan.handle)
    with monkeypatch.context() as capture:
        capture.setattr(flashinfer_common, "is_capturing", lambda device: True)
        check(flashinfer.fa2_mha, case, plan.handle)
    plan.update(table, lens, case.layout)
    planned = next(iter(plan._planned.values()))
    assert isinstance(planned, flashinfer.PlannedMha)
    planned.wrapper._max_total_num_rows = 1000
    with pytest.raises(RuntimeError, match="planned another launch"):
        plan.update(table, lens, case.layout)


def test_backends_without_a_hook_take_no_plan() -> None:
    table = torch.zeros((2, 6), dtype=torch.int32)
    with pytest.raises(ValueError, match="trtllm_mha takes no plan"):
        make_plan("trtllm", "mha", table, QueryLayout.uniform(2), page_size=16)
    packed = QueryLayout.packed(torch.tensor([0, 1, 2], dtype=torch.int32), 2)
    with pytest.raises(ValueError, match="needs num_rows"):
        make_plan("flashinfer_fa2", "mha", table, packed, page_size=16)


def test_handles_look_alike_and_are_static_inputs() -> None:
    table = torch.zeros((2, 6), dtype=torch.int32)
    plans = [make_plan("flashinfer_fa2", "mha", table, QueryLayout.uniform(n), page_size=16) for n in (1, 2)]
    first, second = (plan.handle for plan in plans)
    assert (first.shape, first.dtype, first.stride()) == (second.shape, second.dtype, second.stride())
    assert first.data_ptr() != second.data_ptr()
    assert first._dynamo_static_input_type == "unguarded"


def test_without_a_plan_only_the_kernel_of_the_call_is_scheduled(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduled = []
    schedule = flashinfer.PlannedMha.schedule
    monkeypatch.setattr(
        flashinfer.PlannedMha, "schedule", lambda self, step: scheduled.append(self.key.window) or schedule(self, step)
    )
    for window in (None, 3, None):
        check(flashinfer.fa2_mha, make_mha_case(dtype=torch.float16, window=window))
    assert scheduled == [None, 3, None]


def test_inline_plans_are_bounded() -> None:
    for batch in range(1, planning.KEPT_INLINE_PLANS + 4):
        check(flashinfer.fa3_mha, make_mha_case(dtype=torch.float16, seq_lens=[5] * batch))
    assert len(planning._inline) == planning.KEPT_INLINE_PLANS


@given(
    lens=st.lists(st.integers(0, 24), min_size=1, max_size=4),
    rows=st.integers(1, 4),
    extra=st.integers(0, 3),
    window=st.one_of(st.none(), st.integers(1, 12)),
    seed=st.integers(0, 999),
)
@settings(deadline=None, max_examples=60)
def test_custom_mask_equals_a_loop_over_pairs(lens: list[int], rows: int, extra: int, window: int | None, seed: int) -> None:
    width = rows + extra
    trees = random_tree_mask(len(lens), rows, width, seed)
    stride = -(-rows * 24 // 8)
    packed = flashinfer.custom_mask(torch.tensor(lens, dtype=torch.int32), trees, rows, window, stride)
    assert packed.shape == (len(lens), stride)
    for request, seq_len in enumerate(lens):
        for row in range(rows):
            prefix = seq_len - width
            bits = trees[request * rows + row].tolist()
            seen = [key for key in range(seq_len) if key < prefix or bits[key - prefix]]
            seen = seen if window is None else seen[-window:]
            for key in range(seq_len):
                flat = row * seq_len + key
                assert bool(packed[request, flat // 8] >> (flat % 8) & 1) == (key in seen)


def test_sink_kernels_of_two_head_dims_have_two_names() -> None:
    def key(head_dim: int, window: int | None) -> flashinfer.MhaKey:
        return flashinfer.MhaKey(torch.float16, torch.float16, 8, 2, head_dim, 1.0, window, sinks=True)

    names = {flashinfer.sink_variant("fa2", key(dim, window))[0][0] for dim in (64, 128) for window in (None, 4)}
    assert len(names) == 4


def test_caches_with_different_strides_are_refused() -> None:
    case = make_mha_case(dtype=torch.float16, shared_storage="rows", value_dim=64)
    case.tensors["v_cache"] = case.tensors["v_cache"].contiguous()
    with pytest.raises(ValueError, match="flashinfer_fa2 needs k_cache and v_cache with equal strides"):
        flashinfer.fa2_mha(*case.args(), **case.kwargs())


def test_what_the_package_keeps_from_a_first_run_on_is_made_with_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first run inside a graph would leave it in the graph's memory, where torch counts every tensor."""
    made: list[tuple[int, str]] = []
    prefill = types.SimpleNamespace(
        BatchPrefillWithPagedKVCacheWrapper=vendor_fakes.PagedPrefillWrapper,
        _get_cache_alibi_slopes_buf=lambda heads, device: made.append((heads, threading.current_thread().name)),
    )
    monkeypatch.setattr(flashinfer, "_prefill", lambda: prefill)
    case = make_mha_case(seq_lens=(9, 13), query_lens=3, num_heads=8)
    check(flashinfer.fa2_mha, case)
    assert [heads for heads, _ in made] == [8]
