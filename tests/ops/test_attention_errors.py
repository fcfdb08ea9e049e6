"""Every refusal of mha() and mla(), word for word: what was given, what is needed, who could do it.

Accept a deliberate change of wording with EXPECTTEST_ACCEPT=1.

OMP_NUM_THREADS=1 pytest tests/ops/test_attention_errors.py
"""

from __future__ import annotations

import contextlib
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline

from specops import QueryLayout, ops
from specops.ops import AttentionRequest, UnsupportedAttention
from specops.ops.backends import FP8, Backend, Capabilities, add_backend, register_backend, resolve
from specops.ops.builtin import BUILTIN
from specops.testing import AttentionCase, make_mha_case, make_mla_case

INT64 = torch.int64


@pytest.fixture(autouse=True)
def _built_in_backends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages list backends; those that other tests register must not show, and Triton counts as not interpreted."""
    table = {(backend.family, backend.name): backend for backend in BUILTIN}
    monkeypatch.setattr(sys.modules["specops.ops.backends"], "_BACKENDS", table)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def error(call: Callable[..., Any], *args: Any, **options: Any) -> str:
    with pytest.raises((ValueError, TypeError)) as caught:
        call(*args, **options)
    return f"{caught.type.__name__}: {caught.value}"


def shown(messages: list[str]) -> str:
    """One message a line, long ones folded."""
    return "\n".join(textwrap.fill(message, 118, subsequent_indent="    ", break_on_hyphens=False) for message in messages)


def refusal(case: AttentionCase, backend: str = "auto", **changes: Any) -> str:
    """The error of a case with some tensors or options replaced.

    The call is made as it stands first, and the wrong one twice: no memory of earlier calls may let a wrong one pass.
    """
    with contextlib.suppress(ValueError):
        case.run()
    for name, value in changes.items():
        if name == "layout":
            case.layout = value
        elif name in case.tensors:
            case.tensors[name] = value
        else:
            case.options[name] = value
    first = error(case.run, backend)
    assert error(case.run, backend) == first
    return first


def mha(**options: Any) -> AttentionCase:
    return make_mha_case(num_heads=4, num_kv_heads=2, head_dim=8, **options)


def mla(**options: Any) -> AttentionCase:
    return make_mla_case(num_heads=2, latent_dim=8, rope_dim=4, **options)


def test_shapes_of_mha() -> None:
    messages = [
        refusal(mha(), q=torch.zeros(2, 32)),
        refusal(mha(), k_cache=torch.zeros(4, 2, 8)),
        refusal(mha(), v_cache=torch.zeros(4, 4, 8)),
        refusal(mha(), k_cache=torch.zeros(10, 8, 2, 8)),
        refusal(mha(), q=torch.zeros(2, 4, 16)),
        refusal(mha(), q=torch.zeros(2, 3, 8)),
        refusal(mha(), page_table=torch.zeros(2, dtype=torch.int32)),
        refusal(mha(), seq_lens=torch.zeros(2, 1, dtype=torch.int32)),
        refusal(mha(), seq_lens=torch.zeros(3, dtype=torch.int32)),
        refusal(mha(), q=torch.zeros(8, 4, 2).transpose(0, 2)),
    ]
    assert_expected_inline(
        shown(messages),
        """\
ValueError: q must be [T, Hq, D], got shape (2, 32)
ValueError: k_cache must be [P, S, Hkv, D], got shape (4, 2, 8)
ValueError: v_cache must be [P, S, Hkv, Dv], got shape (4, 4, 8)
ValueError: k_cache (10, 8, 2, 8) and v_cache (11, 4, 2, 8) must agree in pages, page size and KV heads
ValueError: q has head dim 16 and k_cache 8; they must be equal
ValueError: 3 query heads are not a multiple of 2 KV heads
ValueError: page_table must be [B, max_pages], got shape (2,)
ValueError: seq_lens must be [B], got shape (2, 1)
ValueError: seq_lens has 3 requests and page_table 2; they must be equal
ValueError: the last dimension of q and caches must be contiguous, got strides (1, 2, 8)""",
    )


def test_dtypes_of_mha() -> None:
    messages = [
        refusal(mha(), page_table=torch.zeros(2, 5, dtype=INT64)),
        refusal(mha(), seq_lens=torch.zeros(2, dtype=INT64)),
        refusal(mha(), v_cache=torch.zeros(mha().tensors["v_cache"].shape, dtype=torch.float16)),
        refusal(mha(), q=torch.zeros(2, 4, 8, dtype=torch.float16), backend="cpu"),
    ]
    assert_expected_inline(
        shown(messages),
        """\
TypeError: page_table must be int32, got torch.int64; convert it once with .to(torch.int32)
TypeError: seq_lens must be int32, got torch.int64; convert it once with .to(torch.int32)
TypeError: k_cache is torch.float32 and v_cache torch.float16; they must be equal
UnsupportedAttention: cpu_mha cannot serve this: cache dtype float32 with a float16 query (it takes equal ones).
    Backends that can: reference.""",
    )


def test_layouts() -> None:
    messages = [
        refusal(mha(query_lens=4), layout=QueryLayout.uniform(6)),
        refusal(mha(), layout=QueryLayout.packed(torch.tensor([0, 2], dtype=torch.int32), 2)),
        error(QueryLayout.uniform, 0),
        error(QueryLayout.packed, torch.tensor([0, 2]), 2),
    ]
    assert_expected_inline(
        shown(messages),
        """\
ValueError: q has 8 rows, but 2 requests of 6 rows need 12; for topk > 1 the width is num_draft_tokens, not num_steps
    + 1
ValueError: query_start has 2 entries; 2 requests need 3
ValueError: a uniform layout needs tokens_per_request >= 1, got 0; for topk > 1 it is num_draft_tokens, not num_steps
    + 1
TypeError: query_start must be int32, got torch.int64; convert it once with .to(torch.int32)""",
    )


def test_options() -> None:
    one = torch.ones(1)
    messages = [
        refusal(mha(query_lens=(1, 1)), tree_mask=torch.ones(2, 1, dtype=torch.bool)),
        refusal(mha(query_lens=3), tree_mask=torch.ones(6, 3)),
        refusal(mha(query_lens=3), tree_mask=torch.ones(6, 2, dtype=torch.bool)),
        refusal(mha(query_lens=3), tree_mask=torch.ones(2, 3, 3, dtype=torch.bool)),
        refusal(mha(), sinks=torch.zeros(2)),
        refusal(mha(), sinks=torch.zeros(4, dtype=torch.float64)),
        refusal(mha(), window=0),
        refusal(mha(), softcap=0.0),
        refusal(mha(), softcap=-3.0),
        refusal(mha(), k_scale=one),
        refusal(mha(fp8=True), k_scale=torch.ones(2)),
        refusal(mha(fp8=True), v_scale=one.half()),
        refusal(mla(), kv_scale=one),
        refusal(mla(fp8=True), kv_scale=torch.ones(2)),
    ]
    assert_expected_inline(
        shown(messages),
        """\
ValueError: tree_mask needs a uniform layout
TypeError: tree_mask must be bool, got torch.float32
ValueError: tree_mask must be [6, W] with W >= 3, got (6, 2)
ValueError: tree_mask must be [6, W] with W >= 3, got (2, 3, 3)
ValueError: sinks must be [4] float32, got (2,) torch.float32
ValueError: sinks must be [4] float32, got (4,) torch.float64
ValueError: window counts the row's own key, so it is at least 1; got 0
ValueError: softcap must be above 0, got 0.0; None means no cap
ValueError: softcap must be above 0, got -3.0; None means no cap
ValueError: k_scale belongs to a float8_e4m3fn cache; this one is torch.float32
ValueError: k_scale must be one float32 on cpu, got (2,) torch.float32 on cpu
ValueError: v_scale must be one float32 on cpu, got (1,) torch.float16 on cpu
ValueError: kv_scale belongs to a float8_e4m3fn cache; this one is torch.float32
ValueError: kv_scale must be one float32 on cpu, got (2,) torch.float32 on cpu""",
    )


def test_shapes_and_dtypes_of_mla() -> None:
    messages = [
        refusal(mla(), q_latent=torch.zeros(2, 16)),
        refusal(mla(), q_rope=torch.zeros(2, 8)),
        refusal(mla(), kv_cache=torch.zeros(9, 4, 1, 12)),
        refusal(mla(), q_rope=torch.zeros(2, 3, 4)),
        refusal(mla(), q_rope=torch.zeros(2, 2, 4, dtype=torch.float16)),
        refusal(mla(), kv_cache=torch.zeros(9, 4, 16)),
        refusal(mla(), page_table=torch.zeros(2, 5, dtype=INT64)),
        refusal(mla(), q_rope=torch.zeros(4, 2, 2).transpose(0, 2)),
    ]
    assert_expected_inline(
        shown(messages),
        """\
ValueError: q_latent must be [T, H, Dc], got shape (2, 16)
ValueError: q_rope must be [T, H, Dr], got shape (2, 8)
ValueError: kv_cache must be [P, S, Dc + Dr], got shape (9, 4, 1, 12)
ValueError: q_latent (2, 2, 8) torch.float32 and q_rope (2, 3, 4) torch.float32 must agree in rows, heads and dtype
ValueError: q_latent (2, 2, 8) torch.float32 and q_rope (2, 2, 4) torch.float16 must agree in rows, heads and dtype
ValueError: kv_cache holds 16 values a token; q_latent and q_rope need 12
TypeError: page_table must be int32, got torch.int64; convert it once with .to(torch.int32)
ValueError: the last dimension of q and caches must be contiguous, got strides (1, 2, 4)""",
    )


def test_devices() -> None:
    meta = torch.device("meta")
    messages = [
        refusal(mha(), page_table=mha().tensors["page_table"].to(meta)),
        refusal(mha(), k_cache=mha().tensors["k_cache"].to(meta)),
        refusal(mha(sinks=True), sinks=torch.zeros(4, device=meta)),
        refusal(mha(fp8=True), k_scale=torch.ones(1, device=meta)),
        refusal(mla(), q_rope=torch.zeros(2, 2, 4, device=meta)),
    ]
    assert_expected_inline(
        shown(messages),
        """\
ValueError: page_table is on meta and q on cpu; all tensors must be on one device
ValueError: a cache is on meta and q on cpu; all tensors must be on one device
ValueError: sinks is on meta and q on cpu; all tensors must be on one device
ValueError: k_scale must be one float32 on cpu, got (1,) torch.float32 on meta
ValueError: a query is on meta and q on cpu; all tensors must be on one device""",
    )


def test_checked_mode_names_the_request_and_both_numbers() -> None:
    def checked(case: AttentionCase, **changes: Any) -> str:
        with ops.checked():
            message = refusal(case, **changes)
        return message

    starts = torch.tensor([0, 1, 3], dtype=torch.int32)
    messages = [
        checked(mha(seq_lens=(9, 13), table_columns=3)),
        checked(mha(), page_table=torch.full((2, 5), 99, dtype=torch.int32)),
        checked(mha(), page_table=torch.full((2, 5), -1, dtype=torch.int32)),
        checked(mha(), seq_lens=torch.tensor([3, -1], dtype=torch.int32)),
        checked(mha(query_lens=(1, 2)), layout=QueryLayout.packed(starts, 1)),
        checked(mha(query_lens=(1, 2)), layout=QueryLayout.packed(starts + 1, 2)),
        checked(mha(query_lens=(1, 2)), layout=QueryLayout.packed(starts.flip(0), 2)),
        checked(mla(seq_lens=(9, 13), table_columns=3)),
    ]
    assert_expected_inline(
        shown(messages),
        """\
ValueError: request 1 has seq_len 13, but its page table holds 3 pages of 4 = 12 tokens; widen the page table
ValueError: request 0 names page 99, but the cache has pages 0 to 10
ValueError: request 0 names page -1, but the cache has pages 0 to 10
ValueError: request 1 has seq_len -1; a padded request has 0
ValueError: a request has 2 rows, above max_query_len 1
ValueError: query_start must rise from 0 to the 3 rows of q, got [1, 2, 4]
ValueError: query_start must rise from 0 to the 3 rows of q, got [3, 1, 0]
ValueError: request 1 has seq_len 13, but its page table holds 3 pages of 4 = 12 tokens; widen the page table""",
    )
    mha(seq_lens=(9, 13), table_columns=3).check()


def test_checked_mode_can_be_nested_and_ends() -> None:
    case = mha(seq_lens=(9, 13), table_columns=3)
    with ops.checked():
        with ops.checked(False):
            case.run()
        with pytest.raises(ValueError, match="widen the page table"):
            case.run()
    case.run()


def test_backends_that_cannot() -> None:
    @register_backend(
        "narrow",
        head_dims=(64, 128),
        page_sizes=(16, 32),
        layouts=("uniform",),
        device_types=("cpu",),
        group_sizes=(4,),
        max_query_len=2,
    )
    def narrow(*args: Any, **options: Any) -> torch.Tensor:
        raise AssertionError("it must not be called")

    add_backend(
        Backend("absent", "mha", Capabilities(("cpu",), packages=("no_such_package",), extra="flashinfer"), "nowhere:f")
    )
    fits = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "page_size": 16}
    messages = [
        refusal(make_mha_case(**{**fits, "page_size": 48}), "narrow"),
        refusal(make_mha_case(**{**fits, "head_dim": 80, "query_lens": 3}), "narrow"),
        refusal(make_mha_case(**fits, value_dim=32), "narrow"),
        refusal(make_mha_case(**fits, query_lens=(1, 2)), "narrow"),
        refusal(make_mha_case(**{**fits, "num_heads": 6}), "narrow"),
        refusal(make_mha_case(**fits, window=3, sinks=True), "narrow"),
        refusal(make_mha_case(**fits), "absent"),
        refusal(make_mha_case(**fits), "missing"),
        refusal(make_mha_case(**fits), "triton"),
        refusal(mla(), "narrow"),
    ]
    assert_expected_inline(
        shown(messages),
        """\
UnsupportedAttention: narrow_mha cannot serve this: page size 48 (it takes 16, 32). Backends that can: cpu, reference.
UnsupportedAttention: narrow_mha cannot serve this: head dim 80 (it takes 64, 128), 3 query rows per request (it takes
    up to 2). Backends that can: cpu, reference.
UnsupportedAttention: narrow_mha cannot serve this: head dim 64/32 (it takes 64, 128). Backends that can: cpu,
    reference.
UnsupportedAttention: narrow_mha cannot serve this: packed layout (it takes uniform). Backends that can: cpu,
    reference.
UnsupportedAttention: narrow_mha cannot serve this: 3 query heads per KV head (it takes 4). Backends that can: cpu,
    reference.
UnsupportedAttention: narrow_mha cannot serve this: window, sinks (it has no optional feature). Backends that can:
    cpu, reference.
UnsupportedAttention: absent_mha cannot serve this: package no_such_package is not installed: pip install
    'specops[flashinfer]'. Backends that can: cpu, reference, narrow.
UnsupportedAttention: no mha backend is called 'missing'; there are reference, cpu, triton, trtllm, flashinfer_fa2,
    flashinfer_fa3, narrow, absent
UnsupportedAttention: triton_mha cannot serve this: device type cpu (only under Triton's interpreter,
    TRITON_INTERPRET=1). Backends that can: cpu, reference, narrow.
UnsupportedAttention: no mla backend is called 'narrow'; there are reference, cpu, triton, trtllm, flashinfer_fa2,
    flashinfer_fa3, tokenspeed""",
    )


def request(**changes: Any) -> AttentionRequest:
    base: dict[str, Any] = {
        "family": "mha",
        "device_type": "cuda",
        "compute_capability": (9, 0),
        "q_dtype": torch.bfloat16,
        "kv_dtype": torch.bfloat16,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "value_dim": 128,
        "page_size": 64,
        "layout": "uniform",
        "max_query_len": 4,
    }
    return AttentionRequest(**{**base, **changes})


def test_gpu_limits_read_well_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Capabilities, "missing_packages", lambda self: [])
    messages = [
        error(resolve, "cpu", request()),
        error(resolve, "triton", request(compute_capability=(7, 5))),
        error(resolve, "triton", request(q_dtype=torch.float64, kv_dtype=torch.float64)),
        error(resolve, "triton", request(kv_dtype=torch.float32)),
        error(resolve, "trtllm", request(page_size=48)),
        error(resolve, "trtllm", request(compute_capability=(8, 0))),
        error(resolve, "trtllm", request(device_type="hip", compute_capability=None)),
        error(resolve, "auto", request(device_type="vulkan", compute_capability=None)),
        error(resolve, "auto", request(family="mla", device_type="vulkan", compute_capability=None, kv_dtype=FP8)),
    ]
    assert_expected_inline(
        shown(messages),
        """\
UnsupportedAttention: cpu_mha cannot serve this: device type cuda (it runs on cpu). Backends that can: triton, trtllm,
    reference, flashinfer_fa2, flashinfer_fa3.
UnsupportedAttention: triton_mha cannot serve this: compute capability 7.5 (it needs 8.0 or later). Backends that can:
    reference.
UnsupportedAttention: triton_mha cannot serve this: query dtype float64 (it takes float16, bfloat16, float32), cache
    dtype float64 (it takes float16, bfloat16, float32, float8_e4m3fn). Backends that can: reference.
UnsupportedAttention: triton_mha cannot serve this: cache dtype float32 with a bfloat16 query (it takes equal ones).
    Backends that can: reference.
UnsupportedAttention: trtllm_mha cannot serve this: page size 48 (it takes 16, 32, 64, 128). Backends that can:
    triton, reference, flashinfer_fa2, flashinfer_fa3.
UnsupportedAttention: trtllm_mha cannot serve this: compute capability 8.0 (it runs on 9.0, 12.x, 10.0, 10.3).
    Backends that can: triton, reference, flashinfer_fa2.
UnsupportedAttention: trtllm_mha cannot serve this: device type hip (it runs on cuda). Backends that can: triton,
    reference.
UnsupportedAttention: no mha backend can serve this. reference_mha: device type vulkan (it runs on cpu, cuda, hip,
    musa); cpu_mha: device type vulkan (it runs on cpu); triton_mha: device type vulkan (it runs on cuda, hip);
    trtllm_mha: device type vulkan (it runs on cuda); flashinfer_fa2_mha: device type vulkan (it runs on cuda);
    flashinfer_fa3_mha: device type vulkan (it runs on cuda)
UnsupportedAttention: no mla backend can serve this. reference_mla: device type vulkan (it runs on cpu, cuda, hip,
    musa); cpu_mla: device type vulkan (it runs on cpu); triton_mla: device type vulkan (it runs on cuda, hip);
    trtllm_mla: device type vulkan (it runs on cuda); flashinfer_fa2_mla: device type vulkan (it runs on cuda);
    flashinfer_fa3_mla: device type vulkan (it runs on cuda); tokenspeed_mla: device type vulkan (it runs on cuda)""",
    )
    assert issubclass(UnsupportedAttention, ValueError)
