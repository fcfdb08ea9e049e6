"""The arguments we would pass are arguments that the vendor packages take, at two versions of flashinfer-python.

The signatures in ``data/vendor_signatures.json`` were recorded from the real packages by ``data/record_signatures.py``, so
these tests run everywhere; where a package is installed its own signature is bound too.

    OMP_NUM_THREADS=1 pytest tests/ops/test_signature_binding.py
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from specops.ops import flashinfer, planning, tokenspeed_mla, trtllm_mha, trtllm_mla
from specops.testing.cases import AttentionCase, make_mha_case, make_mla_case

DATA = pathlib.Path(__file__).parent / "data"
sys.path.insert(0, str(DATA))
import record_signatures  # noqa: E402

RECORDED: dict[str, dict[str, list[list[Any]]]] = json.loads((DATA / "vendor_signatures.json").read_text())
FLASHINFER = [version for version in RECORDED if version.startswith("flashinfer-python")]

DECODE = "flashinfer.decode:trtllm_batch_decode_with_kv_cache"
CONTEXT = "flashinfer.prefill:trtllm_batch_context_with_kv_cache"
PREFILL = "flashinfer.prefill:BatchPrefillWithPagedKVCacheWrapper"
MLA = "flashinfer.mla:BatchMLAPagedAttentionWrapper"
MLA_DECODE = "flashinfer.mla:trtllm_batch_decode_with_kv_cache_mla"
SINK_MODULE = "flashinfer.prefill:get_customize_batch_prefill_module"

Call = tuple[str, tuple[Any, ...], dict[str, Any]]


def mha(**options: Any) -> AttentionCase:
    return make_mha_case(**{"page_size": 16, "dtype": torch.bfloat16, "query_lens": 4, "seq_lens": (20, 9), **options})


def trtllm_calls() -> Iterator[Call]:
    for options in (
        {},
        {"query_lens": 1},
        {"window": 5},
        {"query_lens": 1, "window": 5},
        {"sinks": True},
        {"query_lens": 11, "seq_lens": (20, 11), "num_heads": 6, "sinks": True},
        {"tree_width": 4},
        {"fp8": True},
        {"query_lens": 1, "fp8": True},
    ):
        case = mha(**options)
        yield DECODE, (), trtllm_mha.xqa_arguments(*case.args(), **case.kwargs())
    for options in ({}, {"window": 5}, {"sinks": True}, {"fp8": True}):
        case = mha(**options)
        given = trtllm_mha.gen_decode_arguments(*case.args(), **case.kwargs())
        yield DECODE, (), given
        yield DECODE, (), given | {"skip_softmax_threshold_scale_factor": 1.0}
        packed = mha(**{**options, "query_lens": (3, 1)})
        given = trtllm_mha.gen_context_arguments(*packed.args(), **packed.kwargs())
        yield CONTEXT, (), given
        yield CONTEXT, (), given | {"skip_softmax_threshold_scale_factor": 1.0}
    for xqa in (True, False):
        for options in ({"query_lens": 1}, {"query_lens": 3}):
            mla_case = make_mla_case(latent_dim=512, rope_dim=64, page_size=32, dtype=torch.bfloat16, **options)
            yield MLA_DECODE, (), trtllm_mla.decode_arguments(*mla_case.args(), **mla_case.kwargs(), xqa=xqa)
    mla_case = make_mla_case(latent_dim=512, rope_dim=64, page_size=32, dtype=torch.bfloat16, sinks=True)
    yield MLA_DECODE, (), trtllm_mla.decode_arguments(*mla_case.args(), **mla_case.kwargs(), xqa=False)


def flashinfer_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Call]:
    monkeypatch.setattr(flashinfer, "WORKSPACE_BYTES", 1024)
    monkeypatch.setattr(flashinfer, "sink_variant", fake_sink_variant)
    case = mha()
    for backend in ("flashinfer_fa2", "flashinfer_fa3"):
        plan = planning.make_plan(backend, "mha", case.tensors["page_table"], case.layout, page_size=16)
        plan.update(case.tensors["page_table"], case.tensors["seq_lens"], case.layout)
        assert plan.step is not None
        for options in ({}, {"window": 5}, {"softcap": 4.0}, {"sinks": True}, {"masked": True}):
            key = flashinfer.MhaKey(torch.bfloat16, torch.bfloat16, 8, 2, 64, 0.125, **options)
            yield f"{PREFILL}.__init__", (None,), flashinfer.mha_wrapper_arguments(plan, key)
            yield f"{PREFILL}.plan", (None,), flashinfer.mha_plan_arguments(plan.step, key, plan.page_indices)
            sinks = (torch.zeros(8), 0.125) if key.sinks else ()
            caches = (case.tensors["k_cache"], case.tensors["v_cache"])
            yield f"{PREFILL}.run", (None, case.tensors["q"], caches, *sinks), {"out": case.tensors["q"]}
            if key.sinks:
                positional, named = fake_sink_variant("fa2", key)
                yield SINK_MODULE, ("fa2", *positional), named
        mla_case = make_mla_case(query_lens=2, dtype=torch.bfloat16)
        mla_plan = planning.make_plan(backend, "mla", mla_case.tensors["page_table"], mla_case.layout, page_size=4)
        mla_plan.update(mla_case.tensors["page_table"], mla_case.tensors["seq_lens"], mla_case.layout)
        assert mla_plan.step is not None
        mla_key = flashinfer.MlaKey(torch.bfloat16, torch.bfloat16, 4, 64, 16, 0.125)
        yield f"{MLA}.__init__", (None,), flashinfer.mla_wrapper_arguments(mla_plan)
        yield f"{MLA}.plan", (None,), flashinfer.mla_plan_arguments(mla_plan.step, mla_key, mla_plan.page_indices)
        yield f"{MLA}.run", (None,), dict.fromkeys(("q_nope", "q_pe", "ckv_cache", "kpe_cache", "out"))


def fake_sink_variant(variant: str, key: flashinfer.MhaKey) -> tuple[list[Any], dict[str, Any]]:
    dtypes = [key.q_dtype, key.kv_dtype, key.q_dtype, torch.int32]
    tail = [["sink"], ["float"], ["sm_scale"], ["double"], "AttentionSink", "source"]
    return ["name", *dtypes, key.head_dim, key.head_dim, *tail], {"use_sliding_window": key.window is not None}


def tokenspeed_calls() -> Iterator[Call]:
    for query_lens in (1, 4):
        case = make_mla_case(latent_dim=512, rope_dim=64, page_size=32, dtype=torch.bfloat16, query_lens=query_lens)
        given = tokenspeed_mla.decode_arguments(*case.args(), **case.kwargs())
        yield "tokenspeed_mla.mla_decode:tokenspeed_mla_decode", (), given


def recorded_signature(version: str, path: str) -> inspect.Signature:
    kinds = inspect.Parameter
    parameters = [
        inspect.Parameter(name, getattr(kinds, kind), default=None if has_default else kinds.empty)
        for name, kind, has_default in RECORDED[version][path]
    ]
    return inspect.Signature(parameters)


def bind_all(signature: Callable[[str], inspect.Signature], calls: Iterator[Call]) -> int:
    count = 0
    for path, positional, named in calls:
        signature(path).bind(*positional, **named)
        count += 1
    return count


@pytest.mark.parametrize("version", FLASHINFER)
def test_trtllm_arguments_bind(version: str) -> None:
    assert bind_all(lambda path: recorded_signature(version, path), trtllm_calls()) == 30


@pytest.mark.parametrize("version", FLASHINFER)
def test_flashinfer_arguments_bind(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bind_all(lambda path: recorded_signature(version, path), flashinfer_calls(monkeypatch)) == 38


def test_tokenspeed_arguments_bind() -> None:
    assert bind_all(lambda path: recorded_signature("tokenspeed-mla 2.0.4", path), tokenspeed_calls()) == 2


def test_a_renamed_argument_would_be_caught() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'page_table'"):
        recorded_signature(FLASHINFER[0], DECODE).bind_partial(page_table=None)
    with pytest.raises(TypeError, match="missing a required argument"):
        recorded_signature(FLASHINFER[0], DECODE).bind()


def test_records_hold_two_versions_and_every_entry_point() -> None:
    assert FLASHINFER == ["flashinfer-python 0.6.13", "flashinfer-python 0.7.4"]
    for version, paths in RECORDED.items():
        assert set(paths) == set(record_signatures.ENTRY_POINTS[version.split()[0]])


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="flashinfer-python is not installed here")
def test_arguments_bind_to_the_installed_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    def installed(path: str) -> inspect.Signature:
        return inspect.signature(record_signatures.entry_point(path))

    assert bind_all(installed, trtllm_calls()) == 30
    assert bind_all(installed, flashinfer_calls(monkeypatch)) == 38


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="flashinfer-python is not installed here")
def test_the_installed_flashinfer_has_its_recorded_signatures() -> None:
    import importlib.metadata

    version = f"flashinfer-python {importlib.metadata.version('flashinfer-python')}"
    if version not in RECORDED:
        pytest.skip(f"{version} was not recorded; the test above binds its own signatures")
    for path, parameters in RECORDED[version].items():
        assert record_signatures.record(inspect.signature(record_signatures.entry_point(path))) == parameters


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="flashinfer-python is not installed here")
@pytest.mark.parametrize("variant", ["fa2", "fa3"])
def test_the_installed_flashinfer_has_the_sink_variant(variant: str) -> None:
    key = flashinfer.MhaKey(torch.bfloat16, torch.bfloat16, 8, 2, 64, 0.125, sinks=True)
    positional, named = flashinfer.sink_variant(variant, key)
    inspect.signature(record_signatures.entry_point(SINK_MODULE)).bind(variant, *positional, **named)
    assert "struct AttentionSink" in positional[-1]


@pytest.mark.skipif(importlib.util.find_spec("tokenspeed_mla") is None, reason="tokenspeed-mla is not installed here")
def test_arguments_bind_to_the_installed_tokenspeed() -> None:
    path = "tokenspeed_mla.mla_decode:tokenspeed_mla_decode"
    RECORDED["installed"] = {path: record_signatures.from_source(path)}
    assert bind_all(lambda path: recorded_signature("installed", path), tokenspeed_calls()) == 2
