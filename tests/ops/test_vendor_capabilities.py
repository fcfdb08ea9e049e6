"""What the vendor backends say they take, and the sentence for each thing they do not. Pure data, runs anywhere.

OMP_NUM_THREADS=1 pytest tests/ops/test_vendor_capabilities.py
"""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

import expecttest
import pytest
import torch

from specops.ops.backends import AUTO_ORDER, FP8, AttentionRequest, Capabilities, UnsupportedAttention, get_backend, resolve

BF16 = torch.bfloat16
HOPPER = AttentionRequest("mha", "cuda", (9, 0), BF16, BF16, 32, 8, 128, 128, 64, "uniform", 6)
HOPPER_MLA = AttentionRequest("mla", "cuda", (9, 0), BF16, BF16, 128, 1, 576, 512, 64, "uniform", 4)
VENDORS = ("flashinfer", "tokenspeed_mla", "triton")


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of the vendor packages that are to count as installed, whatever is installed where the tests run."""
    there, find = set(VENDORS), importlib.util.find_spec

    def found(name: str, *rest: Any) -> Any:
        return (object() if name in there else None) if name in VENDORS else find(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", found)
    return there


def why_not(name: str, request: AttentionRequest, **changes: Any) -> str:
    asked = dataclasses.replace(request, **changes)
    return ", ".join(get_backend(name, asked.family).capabilities.why_not(asked)) or "it can"


class TestSentences(expecttest.TestCase):
    def check(self, name: str, request: AttentionRequest, changes: tuple[dict[str, Any], ...], expected: str) -> None:
        self.assertExpectedInline("\n".join(why_not(name, request, **change) for change in changes), expected, skip=1)

    def test_xqa(self) -> None:
        self.check(
            "trtllm",
            HOPPER,
            (
                {"page_size": 48},
                {"head_dim": 72, "value_dim": 72},
                {"head_dim": 192, "value_dim": 128},
                {"layout": "packed"},
                {"max_query_len": 33},
                {"device_type": "cpu", "compute_capability": None},
                {"device_type": "hip", "compute_capability": None},
                {"device_type": "musa", "compute_capability": None},
                {"compute_capability": (8, 0)},
                {"q_dtype": torch.float32, "kv_dtype": torch.float32},
                {"num_heads": 72},
                {"features": ("softcap",)},
                {"features": ("window", "tree_mask")},
                {"features": ("sinks", "fp8_kv"), "kv_dtype": FP8},
                {"features": ("tree_mask", "wide_tree_mask")},
            ),
            """\
page size 48 (it takes 16, 32, 64, 128)
head dim 72 (it takes 64, 128, 256)
head dim 192/128 (it takes 64, 128, 256)
packed layout (it takes uniform)
33 query rows per request (it takes up to 32)
device type cpu (it runs on cuda)
device type hip (it runs on cuda)
device type musa (it runs on cuda)
compute capability 8.0 (it runs on 9.0, 12.x, 10.0, 10.3)
query dtype float32 (it takes float16, bfloat16), cache dtype float32 (it takes float16, bfloat16, float8_e4m3fn)
9 query heads per KV head (it takes 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 32)
softcap (it has window, sinks, tree_mask, fp8_kv)
window and tree_mask in one call (it has each alone)
sinks and fp8_kv in one call (it has each alone)
wide_tree_mask (it has window, sinks, tree_mask, fp8_kv)""",
        )

    def test_trtllm_gen(self) -> None:
        self.check(
            "trtllm",
            HOPPER,
            (
                {"compute_capability": (10, 0), "features": ("tree_mask",)},
                {"compute_capability": (10, 3), "page_size": 128},
                {"compute_capability": (10, 0), "layout": "packed", "max_query_len": 900},
                {"compute_capability": (10, 0), "layout": "packed", "features": ("fp8_kv",), "kv_dtype": FP8},
                {"compute_capability": (10, 0), "max_query_len": 33},
                {"compute_capability": (11, 0)},
            ),
            """\
tree_mask (it has window, sinks, fp8_kv)
page size 128 (it takes 16, 32, 64)
it can
cache dtype float8_e4m3fn (it takes float16, bfloat16), fp8_kv (it has window, sinks)
33 query rows per request (it takes up to 32)
compute capability 11.0 (it runs on 9.0, 12.x, 10.0, 10.3)""",
        )

    def test_flashinfer(self) -> None:
        self.check(
            "flashinfer_fa3",
            HOPPER,
            (
                {"compute_capability": (8, 0)},
                {"features": ("tree_mask",)},
                {"features": ("sinks", "softcap")},
                {"features": ("fp8_kv",), "kv_dtype": FP8},
                {"head_dim": 80, "value_dim": 80},
                {"page_size": 48},
            ),
            """\
compute capability 8.0 (it runs on 9.0)
tree_mask (it has window, softcap, sinks)
sinks and softcap in one call (it has each alone)
cache dtype float8_e4m3fn (it takes float16, bfloat16), fp8_kv (it has window, softcap, sinks)
head dim 80 (it takes 64, 128, 256)
it can""",
        )
        self.check(
            "flashinfer_fa2",
            HOPPER,
            (
                {"compute_capability": (7, 5)},
                {"features": ("tree_mask", "wide_tree_mask", "window", "softcap", "fp8_kv"), "kv_dtype": FP8},
                {"features": ("sinks", "tree_mask")},
                {"layout": "packed", "page_size": 1},
            ),
            """\
compute capability 7.5 (it needs 8.0 or later)
it can
sinks and tree_mask in one call (it has each alone)
it can""",
        )

    def test_mla(self) -> None:
        self.check(
            "flashinfer_fa3",
            HOPPER_MLA,
            ({}, {"features": ("window",)}, {"head_dim": 320, "value_dim": 256}),
            """\
it can
window (it has no optional feature)
head dim 320/256 (it takes 576/512)""",
        )
        self.check(
            "trtllm",
            HOPPER_MLA,
            (
                {},
                {"compute_capability": (10, 0)},
                {"compute_capability": (10, 0), "layout": "packed"},
                {"compute_capability": (12, 0), "num_heads": 16},
                {"compute_capability": (12, 1)},
                {"compute_capability": (12, 0), "features": ("sinks",)},
            ),
            """\
compute capability 9.0 (it runs on 10.0, 10.3, 12.x)
it can
packed layout (it takes uniform)
16 query heads per KV head (it takes 128)
it can
sinks (it has no optional feature)""",
        )
        self.check(
            "tokenspeed",
            HOPPER_MLA,
            (
                {},
                {"compute_capability": (10, 3)},
                {"compute_capability": (10, 0), "q_dtype": torch.float16, "kv_dtype": torch.float16},
                {"compute_capability": (10, 0), "layout": "packed", "page_size": 48},
            ),
            """\
compute capability 9.0 (it runs on 10.0, 10.3, 10.7)
it can
query dtype float16 (it takes bfloat16), cache dtype float16 (it takes bfloat16)
page size 48 (it takes 16, 32, 64, 128), packed layout (it takes uniform)""",
        )

    def test_the_whole_message_names_who_could(self) -> None:
        with pytest.raises(UnsupportedAttention) as refused:
            resolve("trtllm", dataclasses.replace(HOPPER, page_size=48))
        limit, others = str(refused.value).split(". ")
        self.assertExpectedInline(limit, """trtllm_mha cannot serve this: page size 48 (it takes 16, 32, 64, 128)""")
        self.assertExpectedInline(others, """Backends that can: triton, reference, flashinfer_fa2, flashinfer_fa3.""")


def test_missing_packages_name_the_extra(installed: set[str]) -> None:
    installed.clear()
    said = "package flashinfer is not installed: pip install 'specops[flashinfer]'"
    for name in ("trtllm", "flashinfer_fa2", "flashinfer_fa3"):
        assert why_not(name, HOPPER) == said
    assert why_not("tokenspeed", HOPPER_MLA, compute_capability=(10, 0)) == (
        "package tokenspeed_mla is not installed: pip install 'specops[tokenspeed]'"
    )


def test_planned_backends_say_so_and_auto_leaves_them_alone() -> None:
    for name, family, planned in (
        ("trtllm", "mha", False),
        ("trtllm", "mla", False),
        ("tokenspeed", "mla", False),
        ("flashinfer_fa2", "mha", True),
        ("flashinfer_fa3", "mha", True),
        ("flashinfer_fa2", "mla", True),
        ("flashinfer_fa3", "mla", True),
    ):
        backend = get_backend(name, family)
        assert backend.capabilities.needs_plan == planned == (backend.plan is not None)
        assert backend.capabilities.graph_safe
        assert not planned or all(name not in order for order in AUTO_ORDER.values())


def test_xqa_alone_does_not_declare_requests_with_fewer_keys_than_rows() -> None:
    limits = get_backend("trtllm", "mha").capabilities
    for capability, serves in (((9, 0), False), ((12, 0), False), ((10, 0), True), ((8, 0), False)):
        assert limits.serves_short_requests(dataclasses.replace(HOPPER, compute_capability=capability)) == serves
    for name in ("reference", "triton", "flashinfer_fa2", "flashinfer_fa3"):
        assert get_backend(name, "mha").capabilities.serves_short_requests(HOPPER)
    assert limits.why_not(HOPPER) == []


def test_a_further_set_of_limits_serves_what_the_first_does_not() -> None:
    both = Capabilities(
        ("cuda",), head_dims=(64,), page_sizes=(16,), layouts=("uniform",), also=(Capabilities(("cpu",), head_dims=(32,)),)
    )
    asked = dataclasses.replace(HOPPER, device_type="cpu", compute_capability=None, head_dim=32, value_dim=32)
    assert both.why_not(asked) == []
    assert both.why_not(dataclasses.replace(asked, head_dim=64, value_dim=64)) == ["head dim 64 (it takes 32)"]
    assert both.why_not(dataclasses.replace(HOPPER, head_dim=64, value_dim=64, page_size=16)) == []


def test_inventory_sees_every_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    from specops.ops import inventory

    for capability, available in (((9, 0), True), ((10, 3), True), ((12, 0), True), ((8, 0), False)):
        monkeypatch.setattr(inventory, "compute_capability", lambda device, found=capability: found)
        (trtllm,) = (i for i in inventory.inventory("cuda") if (i.name, i.family) == ("trtllm", "mha"))
        assert trtllm.available == available
    shown = trtllm.capabilities
    assert (shown["short_requests"], shown["also"][0]["short_requests"]) == (False, True)
    assert trtllm.reason == "compute capability 8.0 (it runs on 9.0, 12.x, 10.0, 10.3)"
