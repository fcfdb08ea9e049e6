"""vLLM's cache and batches as arguments of the ops, and what is refused, without vLLM. Real classes: ``make test-vllm``.

OMP_NUM_THREADS=1 pytest tests/integrations/test_vllm_mapping.py
"""

from __future__ import annotations

import enum
import logging
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specops import ops
from specops.integrations import vllm as plugin
from specops.integrations.vllm import mapping
from specops.integrations.vllm.worker import COUNTS, SpecopsWorker
from specops.ops.backends import get_backend
from specops.testing.oracle import assert_close_to_oracle, oracle_mha

PAGES, HEADS, SIZE, DIM, VALUE_DIM = 7, 2, 16, 32, 48
# Physical order of [pages, heads, tokens, content] in vLLM's layouts, seen from one layer.
ORDERS = {"heads first": (0, 1, 2, 3), "tokens first": (0, 2, 1, 3), "heads outermost": (1, 0, 2, 3)}


def vllm_cache(order: str, dtype: torch.dtype = torch.float32, value_dim: int = DIM) -> Tensor:
    """A layer's cache ``[P, Hkv, S, D + Dv]`` as vLLM hands it over, NaN wherever nothing was written."""
    sizes = (PAGES, HEADS, SIZE, DIM + value_dim)
    physical = ORDERS[order]
    flat = torch.full([sizes[axis] for axis in physical], float("nan"), dtype=dtype)
    return flat.permute([physical.index(axis) for axis in range(4)])


def step(lens: list[int], widths: list[int], pad_requests: int = 0, pad_tokens: int = 0) -> dict[str, Any]:
    """A step's numbers and buffers as vLLM makes them; padded requests have length 0 and page 0."""
    starts = [0]
    for width in widths + [0] * pad_requests:
        starts.append(starts[-1] + width)
    table = torch.tensor([[3, 1], [6, 2], [5, 4]], dtype=torch.int32)[: len(lens)]
    slots = [
        int(table[request, place // SIZE]) * SIZE + place % SIZE
        for request, (length, width) in enumerate(zip(lens, widths, strict=True))
        for place in range(length - width, length)
    ]
    return {
        "query_start": torch.tensor(starts, dtype=torch.int32),
        "seq_lens": torch.tensor(lens + [0] * pad_requests, dtype=torch.int32),
        "block_table": torch.cat((table, table.new_zeros(pad_requests, 2))),
        "slots": torch.tensor(slots + [-1] * pad_tokens, dtype=torch.int64),
        "num_requests": len(lens) + pad_requests,
        "num_tokens": len(slots) + pad_tokens,
        "max_query_len": max(widths),
    }


def written(cache: Tensor, lens: list[int], table: Tensor) -> None:
    """Random keys and values at the places the requests own, written through vLLM's own indexing."""
    for request, length in enumerate(lens):
        for place in range(length):
            cache[int(table[request, place // SIZE]), :, place % SIZE] = torch.randn(cache.shape[1], cache.shape[3])


@pytest.mark.parametrize("order", ORDERS)
def test_views_are_the_cache_itself(order: str) -> None:
    cache = vllm_cache(order, value_dim=VALUE_DIM)
    keys, values = mapping.cache_views(cache, DIM)
    assert keys.shape == (PAGES, SIZE, HEADS, DIM)
    assert values.shape == (PAGES, SIZE, HEADS, VALUE_DIM)
    for view in (keys, values):
        assert view.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr()
        assert view.stride(3) == 1
    cache[5, 1, 3] = torch.arange(DIM + VALUE_DIM)
    torch.testing.assert_close(keys[5, 3, 1], torch.arange(DIM).float())
    torch.testing.assert_close(values[5, 3, 1], torch.arange(DIM, DIM + VALUE_DIM).float())


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("widths", [[1, 1, 1], [4, 4, 4], [9, 1, 4]], ids=["decode", "verify", "mixed"])
@pytest.mark.parametrize("options", [{}, {"window": 5}, {"softcap": 3.0}, {"sinks": torch.tensor([0.5, -1, 2, 0])}])
def test_a_step_equals_the_oracle(order: str, widths: list[int], options: dict[str, Any]) -> None:
    lens = [20, 13, 31]
    cache, batch = vllm_cache(order), step(lens, widths)
    written(cache, [length - width for length, width in zip(lens, widths, strict=True)], batch["block_table"])
    new = torch.randn(2, batch["num_tokens"], HEADS, DIM)
    keys, values = mapping.cache_views(cache, DIM)
    ops.store_kv(keys, values, new[0], new[1], batch["slots"])
    # The new tokens lie where vLLM's own indexing of the cache finds them.
    for row, slot in enumerate(batch["slots"].tolist()):
        torch.testing.assert_close(cache[slot // SIZE, :, slot % SIZE], torch.cat((new[0, row], new[1, row]), dim=-1))
    layout = mapping.layout_of(batch["num_requests"], batch["num_tokens"], batch["max_query_len"], batch["query_start"])
    assert layout.kind == ("uniform" if len(set(widths)) == 1 else "packed")
    q = torch.randn(batch["num_tokens"], 4, DIM)
    arguments = (q, keys, values, batch["block_table"], batch["seq_lens"])
    out = ops.mha(*arguments, layout=layout, **options)
    assert_close_to_oracle(out, oracle_mha(*arguments, layout=layout, **options))


@pytest.mark.parametrize("width", [1, 3])
def test_padded_requests_give_zeros_and_change_no_real_row(width: int) -> None:
    lens, widths = [20, 13], [width, width]
    cache = vllm_cache("tokens first")
    plain, padded = step(lens, widths), step(lens, widths, pad_requests=2, pad_tokens=2 * width)
    written(cache, lens, plain["block_table"])
    before = cache.clone()
    keys, values = mapping.cache_views(cache, DIM)
    nan = torch.full((padded["num_tokens"], HEADS, DIM), float("nan"))
    slots = torch.where(torch.arange(padded["num_tokens"]) < 2 * width, -1, padded["slots"])
    ops.store_kv(keys, values, nan, nan, slots)
    assert torch.equal(cache.nan_to_num(), before.nan_to_num())
    q = torch.randn(padded["num_tokens"], 4, DIM)
    results = []
    for batch in (plain, padded):
        layout = mapping.layout_of(batch["num_requests"], batch["num_tokens"], batch["max_query_len"], batch["query_start"])
        assert layout.kind == "uniform"
        rows = q[: batch["num_tokens"]]
        results.append(ops.mha(rows, keys, values, batch["block_table"], batch["seq_lens"], layout=layout))
    assert torch.equal(results[1][: 2 * width], results[0])
    assert not results[1][2 * width :].any()


def test_the_layout_is_a_function_of_numbers_alone() -> None:
    start = torch.tensor([0, 4, 8, 12], dtype=torch.int32)
    assert mapping.layout_of(3, 12, 4, start).tokens_per_request == 4
    start.fill_(-1)
    assert mapping.layout_of(3, 12, 4, start).tokens_per_request == 4
    packed = mapping.layout_of(2, 9, 8, torch.tensor([0, 1, 9, 9], dtype=torch.int32))
    assert packed.max_query_len == 8
    assert packed.query_start is not None
    assert packed.query_start.tolist() == [0, 1, 9]


def test_an_fp8_cache_of_bytes_is_viewed_and_scaled() -> None:
    lens = [9, 16]
    cache = torch.zeros(PAGES, HEADS, SIZE, 2 * DIM, dtype=torch.uint8)
    batch = step(lens, lens)
    keys, values = mapping.cache_views(cache, DIM, "fp8")
    assert keys.dtype == torch.float8_e4m3fn
    new = torch.randn(2, batch["num_tokens"], HEADS, DIM)
    scales = {"k_scale": torch.tensor(0.25), "v_scale": torch.tensor(0.5)}
    ops.store_kv(keys, values, new[0], new[1], batch["slots"], **scales)
    slot = int(batch["slots"][3])
    stored = cache[slot // SIZE, :, slot % SIZE].view(torch.float8_e4m3fn).float()
    torch.testing.assert_close(stored[:, :DIM] * 0.25, new[0, 3], rtol=0.07, atol=1e-3)
    torch.testing.assert_close(stored[:, DIM:] * 0.5, new[1, 3], rtol=0.07, atol=1e-3)
    layout = mapping.layout_of(2, batch["num_tokens"], 16, batch["query_start"])
    q = torch.randn(batch["num_tokens"], 4, DIM)
    arguments = (q, keys, values, batch["block_table"], batch["seq_lens"])
    assert_close_to_oracle(ops.mha(*arguments, layout=layout, **scales), oracle_mha(*arguments, layout=layout, **scales))


@pytest.mark.parametrize("shape", [(2, 7, 16, 2, 32), (7, 2, 16, 32), (7, 16, 64)])
def test_a_cache_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"vLLM's cache must be \[pages, KV heads, page size, more than 32\], got"):
        mapping.cache_views(torch.zeros(shape), DIM)


def asked(**options: Any) -> list[str]:
    """Refusals of a model that is served, but for ``options``."""
    fields: dict[str, Any] = {
        "backend": "auto",
        "device_type": "cuda",
        "compute_capability": (9, 0),
        "head_dim": 128,
        "q_dtype": torch.bfloat16,
        "cache_dtype": "auto",
        "page_size": 16,
        "max_query_len": 8192,
    }
    return mapping.refusals(**{**fields, **options})


def test_what_the_ops_serve_is_not_refused() -> None:
    assert asked() == []
    assert asked(page_size=None, cache_dtype=None) == []
    assert asked(features=("window", "softcap", "sinks"), cache_dtype="fp8") == []
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        assert asked(q_dtype=dtype, device_type="cpu", compute_capability=None, page_size=128) == []


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"head_dim": 0}, "head size 0 and block size 16 (both are at least 1)"),
        ({"cache_dtype": "fp8_e5m2"}, "cache dtype fp8_e5m2 (specops takes auto, float16, bfloat16, fp8, fp8_e4m3)"),
        ({"cache_dtype": "nvfp4"}, "cache dtype nvfp4 (specops takes"),
        ({"cache_dtype": "float16"}, "cache dtype float16 with a bfloat16 query (it takes equal ones)"),
        ({"backend": "trtllm", "head_dim": 80}, "head dim 80 (it takes 64, 128, 256)"),
        ({"backend": "trtllm", "page_size": 48}, "page size 48 (it takes 16, 32, 64, 128)"),
        ({"backend": "trtllm"}, "8192 query rows per request (it takes up to 32)"),
        ({"backend": "flashinfer_fa2", "head_dim": 80}, "head dim 80 (it takes 64, 128, 256)"),
        ({"backend": "triton", "compute_capability": (7, 5)}, "compute capability 7.5 (it needs 8.0 or later)"),
        ({"compute_capability": (7, 5)}, "compute capability 7.5 (it needs 8.0 or later)"),
        ({"backend": "cpu"}, "device type cuda (it runs on cpu)"),
        ({"backend": "nobody"}, "no mha backend is called 'nobody'"),
    ],
)
def test_a_refusal_says_what_was_asked_and_what_is_possible(options: dict[str, Any], sentence: str) -> None:
    assert sentence in asked(**options)[0]


def test_the_slow_backend_is_taken_by_name_alone() -> None:
    old = {"compute_capability": (7, 5)}
    assert asked(**old)[-1] == "the backend 'reference' would serve it, slowly, if it is named"
    assert asked(**old, backend="reference") == []


def test_a_planned_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # As if the package it needs were there.
    backend = get_backend("flashinfer_fa2", "mha")
    monkeypatch.setattr(type(backend.capabilities), "missing_packages", lambda self: [])
    reasons = asked(backend="flashinfer_fa2")
    assert reasons == ["specops backend flashinfer_fa2 plans each step on the host, which this plug-in does not do"]


def test_graphs_are_promised_on_gpus_alone() -> None:
    assert mapping.graph_safe("auto", "cuda")
    assert mapping.graph_safe("triton", "cuda")
    assert not mapping.graph_safe("auto", "cpu")


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1", "0.32.0rc1+cpu"])
def test_tested_versions_warn_of_nothing(version: str) -> None:
    assert plugin.version_warning(version) is None


@pytest.mark.parametrize("version", ["0.31.2", "0.33.0", "1.0", "0.33.0.dev5+gabc"])
def test_other_versions_are_named_beside_the_tested_ones(version: str) -> None:
    warning = plugin.version_warning(version)
    assert warning is not None
    assert "0.32.0 up to, not including, 0.33.0" in warning
    assert f"this is vLLM {version}," in warning


class Registry:
    """A stand-in for vLLM's registry of attention backends, with what :func:`register` uses of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.overrides: dict[Any, str] = {}
        outer = self

        class AttentionBackendEnum(enum.Enum):
            CPU_ATTN = "vllm.cpu.Attention"
            CPU_MLA = "vllm.cpu.MLA"
            FLASH_ATTN = "vllm.flash.Attention"
            CUSTOM = None

            def is_overridden(self) -> bool:
                return self in outer.overrides

            def get_path(self) -> str:
                return outer.overrides.get(self, self.value)

        self.enum = AttentionBackendEnum
        module = types.ModuleType("vllm.v1.attention.backends.registry")
        module.AttentionBackendEnum = AttentionBackendEnum  # type: ignore[attr-defined]
        module.register_backend = self.overrides.__setitem__  # type: ignore[attr-defined]
        name = ""
        for part in module.__name__.split("."):
            name = f"{name}.{part}".lstrip(".")
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        sys.modules["vllm"].__version__ = "0.1.2"  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)

    def named(self) -> dict[str, str]:
        return {member.name: path for member, path in self.overrides.items()}


def test_register_names_custom_and_the_cpu_switches_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry(monkeypatch)
    expected = {
        "CUSTOM": "specops.integrations.vllm.backend.SpecopsBackend",
        "CPU_ATTN": "specops.integrations.vllm.cpu.CPU_ATTN",
        "CPU_MLA": "specops.integrations.vllm.cpu.CPU_MLA",
    }
    for _ in range(2):
        plugin.register()
        assert registry.named() == expected


def test_another_plugins_custom_backend_stays(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    registry = Registry(monkeypatch)
    registry.overrides[registry.enum.CUSTOM] = "other.Backend"
    with caplog.at_level(logging.WARNING, "vllm.specops"):
        plugin.register()
    assert registry.named() == {"CUSTOM": "other.Backend"}
    assert "vLLM's CUSTOM attention backend is other.Backend already" in caplog.text


def test_a_vllm_without_a_registry_is_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    Registry(monkeypatch)
    monkeypatch.delitem(sys.modules, "vllm.v1.attention.backends.registry")
    with caplog.at_level(logging.WARNING, "vllm.specops"):
        plugin.register()
    assert "not registered with vLLM 0.1.2 (tested: 0.32.0 up to" in caplog.text


def test_importing_the_plugin_imports_nothing_of_vllm() -> None:
    script = (
        "import sys, specops.integrations.vllm.mapping, specops.integrations.vllm.worker;"
        "print([name for name in sys.modules if name.split('.')[0] in ('vllm', 'transformers', 'triton')])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_entry_point_names_the_register_function() -> None:
    text = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    assert '[project.entry-points."vllm.general_plugins"]\nspecops = "specops.integrations.vllm:register"\n' in text


def test_counts_are_a_copy() -> None:
    counts = SpecopsWorker().specops_counts()
    assert counts == COUNTS
    assert counts is not COUNTS
