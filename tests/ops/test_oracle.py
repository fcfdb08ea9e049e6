"""The yardstick itself: arithmetic by hand, torch's own attention in float64, and an assertion that can fail.

OMP_NUM_THREADS=1 pytest tests/ops/test_oracle.py
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from specops import QueryLayout
from specops.testing import assert_close_to_oracle, make_mha_case, make_mla_case, oracle_mha


def one_request(scores: list[float], values: list[float], **options: Any) -> tuple[float, float]:
    """Output and lse of one row whose scores and values are the given numbers."""
    count = len(scores)
    out, lse = oracle_mha(
        torch.ones(1, 1, 1),
        torch.tensor(scores).view(1, count, 1, 1),
        torch.tensor(values).view(1, count, 1, 1),
        torch.zeros(1, 1, dtype=torch.int32),
        torch.tensor([count], dtype=torch.int32),
        layout=QueryLayout.uniform(1),
        scale=1.0,
        return_lse=True,
        **options,
    )
    return out.item(), lse.item()


def test_one_key_gives_its_value() -> None:
    assert one_request([3.0], [7.0]) == (7.0, 3.0)


def test_weights_are_a_softmax() -> None:
    # exp(0) : exp(log 3) = 1 : 3
    out, lse = one_request([0.0, math.log(3)], [1.0, 5.0])
    assert out == pytest.approx((1 + 15) / 4)
    assert lse == pytest.approx(math.log(4))


def test_a_window_keeps_the_last_keys() -> None:
    out, _ = one_request([0.0, 0.0, 0.0], [100.0, 1.0, 3.0], window=2)
    assert out == pytest.approx(2.0)


def test_softcap_bounds_scores() -> None:
    _, lse = one_request([1e6], [1.0], softcap=2.0)
    assert lse == pytest.approx(2.0)


def test_a_sink_takes_weight_and_gives_no_value() -> None:
    # exp(0) beside a sink of exp(log 3)
    out, lse = one_request([0.0], [8.0], sinks=torch.tensor([math.log(3)]))
    assert out == pytest.approx(2.0)
    assert lse == pytest.approx(math.log(4))


def test_without_a_key_lse_is_minus_infinity_and_with_a_sink_finite() -> None:
    out, lse = make_mha_case(seq_lens=(0, 1), query_lens=2).oracle_with_lse()
    assert torch.equal(out[:3], torch.zeros_like(out[:3]))
    assert torch.equal(lse[:3], torch.full_like(lse[:3], -math.inf))
    assert lse[3].isfinite().all()
    case = make_mha_case(seq_lens=(0, 1), query_lens=2, sinks=True)
    out, lse = case.oracle_with_lse()
    assert torch.equal(out[:3], torch.zeros_like(out[:3]))
    assert torch.equal(lse[:3], case.options["sinks"].double().expand(3, -1))


def test_fp8_scales_multiply() -> None:
    case = make_mha_case(fp8=True, k_scale=0.25, v_scale=0.5)
    wide = make_mha_case()
    for name, scale in (("k_cache", 0.25), ("v_cache", 0.5)):
        wide.tensors[name] = case.tensors[name].float() * scale
    assert torch.equal(case.oracle(), wide.oracle())


def dense(case: Any, visible: Tensor, request: int, first: int, rows: int, seq_len: int) -> Tensor:
    """torch's attention in float64 over one request's gathered keys."""
    pages, page_size = case.tensors["page_table"][request].long(), case.tensors["k_cache"].shape[1]
    place = torch.arange(seq_len)
    keys, values = (
        case.tensors[name][pages[place // page_size], place % page_size].double().transpose(0, 1)
        for name in ("k_cache", "v_cache")
    )
    q = case.tensors["q"][first : first + rows].double().transpose(0, 1)
    out = scaled_dot_product_attention(q, keys, values, attn_mask=visible, scale=case.scale, enable_gqa=True)
    return out.transpose(0, 1)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 7), st.integers(0, 30), st.none() | st.integers(1, 12), st.integers(0, 99))
def test_causal_attention_is_torchs(rows: int, prefix: int, window: int | None, seed: int) -> None:
    seq_len = prefix + rows
    case = make_mha_case(seq_lens=(4, seq_len), query_lens=(4, rows), window=window, seed=seed)
    key, place = torch.arange(seq_len), torch.arange(prefix, seq_len)[:, None]
    visible = (key <= place) & (key > place - (window or seq_len))
    torch.testing.assert_close(case.oracle()[4:], dense(case, visible, 1, 4, rows, seq_len), rtol=1e-12, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.integers(0, 30), st.integers(0, 99))
def test_a_tree_row_sees_prefix_and_ancestors(width: int, prefix: int, seed: int) -> None:
    case = make_mha_case(seq_lens=(prefix + width,), query_lens=width, tree_width=width, seed=seed)
    own = case.options["tree_mask"]
    visible = torch.cat((torch.ones(width, prefix, dtype=torch.bool), own), dim=1)
    torch.testing.assert_close(case.oracle(), dense(case, visible, 0, 0, width, prefix + width), rtol=1e-12, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 9), st.integers(1, 12), st.integers(1, 8), st.integers(0, 99))
def test_a_windowed_tree_row_is_the_last_row_of_its_path_decoded_alone(
    width: int, prefix: int, window: int, seed: int
) -> None:
    case = make_mha_case(seq_lens=(prefix + width,), query_lens=width, tree_width=width, window=window, seed=seed)
    out, own = case.oracle(), case.options["tree_mask"]
    pages = case.tensors["page_table"][0].long()
    for row in range(width):
        path = [*range(prefix), *(prefix + node for node in range(width) if own[row, node])]
        cache = {
            name: torch.stack([case.tensors[name][pages[key // 4], key % 4] for key in path])[None]
            for name in ("k_cache", "v_cache")
        }
        alone = oracle_mha(
            case.tensors["q"][row : row + 1],
            cache["k_cache"],
            cache["v_cache"],
            torch.zeros(1, 1, dtype=torch.int32),
            torch.tensor([len(path)], dtype=torch.int32),
            layout=QueryLayout.uniform(1),
            scale=case.scale,
            window=window,
        )
        torch.testing.assert_close(out[row : row + 1], alone, rtol=1e-12, atol=1e-12)


def test_mla_is_attention_with_one_key_head() -> None:
    case = make_mla_case(seq_lens=(9,), query_lens=1, latent_dim=8, rope_dim=4)
    pages = case.tensors["page_table"][0].long()
    rows = case.tensors["kv_cache"][pages].flatten(0, 1)[:9].double()
    q = torch.cat((case.tensors["q_latent"], case.tensors["q_rope"]), dim=2)[0].double()
    expected = torch.softmax(q @ rows.T * case.scale, dim=1) @ rows[:, :8]
    torch.testing.assert_close(case.oracle()[0], expected, rtol=1e-12, atol=1e-12)


def test_unowned_memory_is_poisoned_and_never_read() -> None:
    case = make_mha_case(seq_lens=(3, 13), query_lens=2, fp8=True)
    assert (
        case.tensors["k_cache"].float().isnan().any(dim=3).any(dim=2).sum()
        == case.tensors["k_cache"][..., 0, 0].numel() - 16
    )
    assert case.oracle().isfinite().all()


@pytest.mark.parametrize("seq_lens", [(1, 3), (13,), (32, 64, 96, 48)])
def test_pages_of_a_case_are_distinct_shuffled_and_never_page_0(seq_lens: tuple[int, ...]) -> None:
    case = make_mha_case(seq_lens=seq_lens)
    live = [case.tensors["page_table"][b, : -(-n // 4)].tolist() for b, n in enumerate(seq_lens)]
    flat = [page for pages in live for page in pages]
    assert len(set(flat)) == len(flat)
    assert 0 not in flat
    if max(seq_lens) > 12:
        assert any(pages != sorted(pages) for pages in live)


@pytest.mark.parametrize(
    ("dtype", "relative"), [(torch.float32, 1e-4), (torch.float16, 1e-2), (torch.bfloat16, 3e-2), ("tf32", 1e-2)], ids=str
)
def test_assertion_refuses_an_error_above_its_bound(dtype: torch.dtype | str, relative: float) -> None:
    expected = torch.randn(3, 2, 8, dtype=torch.float64)
    assert assert_close_to_oracle(expected, expected, dtype) == 0.0
    off = expected.clone()
    off[1, 1] *= 1 + relative
    with pytest.raises(AssertionError, match=r"1 of 6 vectors are off by more than .*at \(1, 1\)"):
        assert_close_to_oracle(off, expected, dtype)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_assertion_refuses_nan_and_infinity(bad: float) -> None:
    expected = torch.ones(2, 1, 4, dtype=torch.float64)
    actual = expected.clone()
    actual[1, 0, 2] = bad
    with pytest.raises(AssertionError, match="1 of 2 vectors"):
        assert_close_to_oracle(actual, expected, torch.bfloat16)
    with pytest.raises(AssertionError, match="1 of 2 vectors"):
        assert_close_to_oracle(expected, actual, torch.bfloat16)


def test_assertion_refuses_a_nonzero_row_where_the_oracle_has_zero() -> None:
    expected = torch.zeros(1, 1, 4, dtype=torch.float64)
    with pytest.raises(AssertionError, match="1 of 1 vectors"):
        assert_close_to_oracle(expected + 1e-30, expected, torch.bfloat16)


def test_assertion_refuses_another_shape() -> None:
    with pytest.raises(AssertionError, match="shape"):
        assert_close_to_oracle(torch.zeros(2, 1, 4), torch.zeros(1, 1, 4, dtype=torch.float64))
