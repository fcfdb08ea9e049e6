"""vLLM's own classes with ours in their places, no engine started.

make test-vllm, or in its environment: pytest tests_vllm/test_classes.py
"""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.v1.attention.backend import AttentionCGSupport, AttentionImpl, AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import get_attn_backend
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheLayout

import specops.integrations.vllm as plugin
from specops.integrations.vllm import backend as ours
from specops.integrations.vllm.worker import COUNTS
from specops.ops import native
from specops.testing.oracle import assert_close_to_oracle, oracle_mha

from .conftest import engine_config

HEADS, KV_HEADS, DIM, SIZE, PAGES = 4, 2, 32, 128, 6


def common(lens: list[int], widths: list[int], causal: bool = True) -> CommonAttentionMetadata:
    starts = torch.tensor([0, *widths]).cumsum(0).to(torch.int32)
    table = torch.tensor([[2, 4], [5, 1]], dtype=torch.int32)
    slots = [
        int(table[request, place // SIZE]) * SIZE + place % SIZE
        for request, (length, width) in enumerate(zip(lens, widths, strict=True))
        for place in range(length - width, length)
    ]
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(lens, dtype=torch.int32),
        num_reqs=len(lens),
        num_actual_tokens=sum(widths),
        max_query_len=max(widths),
        max_seq_len=max(lens),
        block_table_tensor=table,
        slot_mapping=torch.tensor(slots),
        causal=causal,
    )


def builder(config: Any) -> ours.SpecopsMetadataBuilder:
    spec = FullAttentionSpec(block_size=SIZE, num_kv_heads=KV_HEADS, head_size=DIM, dtype=torch.float32)
    return ours.SpecopsMetadataBuilder(spec, ["layer"], config, torch.device("cpu"))


def impl(**options: Any) -> ours.SpecopsImpl:
    given = {"num_heads": HEADS, "head_size": DIM, "scale": 0.2, "num_kv_heads": KV_HEADS, **options}
    before = torch.get_default_dtype()
    torch.set_default_dtype(options.pop("dtype", torch.float32))
    try:
        return ours.SpecopsImpl(**{name: value for name, value in given.items() if name != "dtype"})
    finally:
        torch.set_default_dtype(before)


def layer_cache(layout: KVCacheLayout, dtype: torch.dtype) -> torch.Tensor:
    """One layer's ``[P, Hkv, S, 2 D]`` out of a cache of two layers in one of vLLM's layouts."""
    sizes = (2, PAGES, KV_HEADS, SIZE, 2 * DIM)
    order = layout.stride_order
    flat = torch.zeros([sizes[axis] for axis in order], dtype=torch.uint8 if dtype.itemsize == 1 else dtype)
    return flat.permute([order.index(axis) for axis in range(5)])[1]


def test_the_entry_point_registers_both_ways_in(custom: Any) -> None:
    assert AttentionBackendEnum.CUSTOM.get_path() == plugin.BACKEND
    assert AttentionBackendEnum.CUSTOM.get_class() is ours.SpecopsBackend
    assert AttentionBackendEnum.CPU_ATTN.get_path() == f"{plugin.CPU}.CPU_ATTN"


def test_this_vllm_is_a_tested_one() -> None:
    assert plugin.version_warning(plugin.vllm_version()) is None


@pytest.mark.parametrize(("asked", "expected"), [("CUSTOM", "SpecopsBackend"), (None, "CPUAttentionBackend")])
def test_an_engine_gets_specops_only_if_it_asks(tiny: Path, asked: str | None, expected: str) -> None:
    with set_current_vllm_config(engine_config(tiny, attention_backend=asked)):
        assert get_attn_backend(DIM, torch.float32, "auto").__name__ == expected


def test_an_mla_model_is_refused_and_stays_vllms_without_custom(tiny: Path) -> None:
    with set_current_vllm_config(engine_config(tiny)), pytest.raises(ValueError, match="does not serve MLA models"):
        get_attn_backend(576, torch.bfloat16, "auto", use_mla=True)
    with set_current_vllm_config(engine_config(tiny, attention_backend=None)):
        assert "MLA" in get_attn_backend(576, torch.bfloat16, "auto", use_mla=True).__name__


def test_custom_for_some_layers_is_refused_on_a_cpu(tiny: Path) -> None:
    config = engine_config(tiny, attention_backend=None)
    config.attention_config.backend_per_kind = {"sliding_window": AttentionBackendEnum.CUSTOM}
    with set_current_vllm_config(config), pytest.raises(ValueError, match="use attention_backend='CUSTOM'"):
        get_attn_backend(DIM + 32, torch.float32, "auto", has_sliding_window=True)


@pytest.mark.parametrize("method", ["build", "__init__"])
def test_the_builders_parameters_are_vllms(method: str) -> None:
    """vLLM passes some of them by keyword."""
    expected = inspect.signature(getattr(AttentionMetadataBuilder, method)).parameters
    assert list(inspect.signature(getattr(ours.SpecopsMetadataBuilder, method)).parameters) == list(expected)


@pytest.mark.parametrize("method", ["forward", "__init__"])
def test_the_layers_parameters_begin_with_vllms(method: str) -> None:
    expected = list(inspect.signature(getattr(AttentionImpl, method)).parameters)
    assert list(inspect.signature(getattr(ours.SpecopsImpl, method)).parameters)[: len(expected)] == expected


@pytest.mark.parametrize("layout", list(KVCacheLayout), ids=lambda layout: layout.name)
@pytest.mark.parametrize("cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("widths", [[1, 1], [4, 4], [40, 1]], ids=["decode", "verify", "mixed"])
def test_a_layers_two_calls_equal_the_oracle(
    custom: Any, layout: KVCacheLayout, cache_dtype: str, widths: list[int]
) -> None:
    lens = [150, 60]
    torch.manual_seed(0)
    sinks = torch.randn(HEADS, dtype=torch.bfloat16)
    layer = impl(sliding_window=50, logits_soft_cap=5.0, sinks=sinks, kv_cache_dtype=cache_dtype)
    layer.process_weights_after_loading(torch.float32)
    cache = layer_cache(layout, torch.float8_e4m3fn if cache_dtype == "fp8" else torch.float32)
    scales = SimpleNamespace(_k_scale=torch.tensor(0.5), _v_scale=torch.tensor(0.25))
    # The prompts first, then the step under test.
    for before in (True, False):
        step_lens = [length - width for length, width in zip(lens, widths, strict=True)] if before else lens
        step = common(step_lens, step_lens if before else widths)
        metadata = builder(custom).build(0, common_attn_metadata=step)
        tokens = step.num_actual_tokens
        q, k, v = torch.randn(tokens + 3, HEADS, DIM), *torch.randn(2, tokens + 3, KV_HEADS, DIM)
        output = torch.full((tokens + 3, HEADS, DIM), 7.0)
        layer.do_kv_cache_update(scales, k, v, cache, step.slot_mapping)
        assert layer.forward(scales, q, k, v, cache, metadata, output) is output
    keys, values = cache[..., :DIM].transpose(1, 2), cache[..., DIM:].transpose(1, 2)
    fp8: dict[str, Any] = {}
    if cache_dtype == "fp8":
        keys, values = keys.view(torch.float8_e4m3fn), values.view(torch.float8_e4m3fn)
        fp8 = {"k_scale": scales._k_scale, "v_scale": scales._v_scale}
    expected = oracle_mha(
        q[:tokens],
        keys,
        values,
        step.block_table_tensor,
        step.seq_lens,
        layout=metadata.layout,
        scale=0.2,
        window=50,
        softcap=5.0,
        sinks=sinks.float(),
        **fp8,
    )
    assert metadata.layout.kind == ("uniform" if len(set(widths)) == 1 else "packed")
    assert_close_to_oracle(output[:tokens], expected)
    assert bool((output[tokens:] == 7).all())


@pytest.mark.skipif(native.library() is None, reason="no C compiler here, or SPECOPS_NATIVE=0")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_cpu_the_kernels_fill_vllms_tensors_and_follow_the_cache(
    custom: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    custom.model_config.dtype = dtype
    layer = impl(dtype=dtype)
    caches = [layer_cache(KVCacheLayout.LBHNC, dtype) for _ in range(2)]

    def check(cache: torch.Tensor, lens: list[int], widths: list[int]) -> None:
        step = common(lens, widths)
        metadata, tokens = builder(custom).build(0, step), sum(widths)
        # As out of a fused projection, with rows of padding behind.
        q, k, v = (
            torch.randn(tokens + 2, (HEADS + 2 * KV_HEADS) * DIM).to(dtype).split([HEADS * DIM, *2 * [KV_HEADS * DIM]], 1)
        )
        q, k, v = q.view(-1, HEADS, DIM), k.view(-1, KV_HEADS, DIM), v.view(-1, KV_HEADS, DIM)
        output = torch.full((tokens + 2, HEADS, DIM), 7.0, dtype=dtype)
        layer.do_kv_cache_update(None, k, v, cache, step.slot_mapping)
        assert torch.equal(cache.transpose(1, 2).reshape(-1, KV_HEADS, 2 * DIM)[step.slot_mapping, :, :DIM], k[:tokens])
        assert layer.forward(None, q, k, v, cache, metadata, output) is output
        keys, values = cache[..., :DIM].transpose(1, 2), cache[..., DIM:].transpose(1, 2)
        table, seq_lens = step.block_table_tensor, step.seq_lens
        expected = oracle_mha(q[:tokens], keys, values, table, seq_lens, layout=metadata.layout, scale=0.2)
        assert_close_to_oracle(output[:tokens], expected)
        assert bool((output[tokens:] == 7).all())

    check(caches[0], [150, 60], [150, 60])
    check(caches[0], [151, 61], [1, 1])
    # Both kinds of steps have been checked: from here on no op is called.
    with monkeypatch.context() as patch:
        patch.setattr(ours.ops, "store_kv", lambda *args, **options: pytest.fail("an op's call"))
        patch.setattr(ours, "mha_op", lambda *args: pytest.fail("a second check"))
        patch.setattr(layer, "_ops", {kind: lambda *args: pytest.fail("an op's call") for kind in layer._ops})
        check(caches[0], [152, 62], [1, 1])
        check(caches[0], [155, 63], [3, 1])
    # vLLM may give a layer another cache.
    check(caches[1], [150, 60], [150, 60])
    check(caches[1], [151, 61], [1, 1])


def test_calls_are_counted_and_a_measuring_run_gives_zeros(custom: Any) -> None:
    layer, cache = impl(), layer_cache(KVCacheLayout.LBNHC, torch.float32)
    before = dict(COUNTS)
    q, k = torch.randn(2, HEADS, DIM), torch.randn(2, KV_HEADS, DIM)
    assert not layer.forward(None, q, k, k, cache, None, torch.ones_like(q)).any()
    assert before == COUNTS
    step = common([9, 5], [1, 1])
    layer.do_kv_cache_update(None, k, k, cache, step.slot_mapping)
    layer.forward(None, q, k, k, cache, builder(custom).build(0, step), torch.ones_like(q))
    assert {name: COUNTS[name] - before[name] for name in COUNTS} == {"stored": 1, "uniform": 1, "packed": 0}


def test_a_step_that_is_not_causal_is_refused(custom: Any) -> None:
    with pytest.raises(ValueError, match="serves causal attention alone"):
        builder(custom).build(0, common([9, 5], [1, 1], causal=False))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"alibi_slopes": [1.0] * HEADS}, "ALiBi slopes"),
        ({"attn_type": "encoder_only"}, "attention of type encoder_only (decoders are served)"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "cache dtype fp8_e5m2 (specops takes"),
        ({"kv_cache_dtype": "bfloat16"}, "cache dtype bfloat16 with a float32 query (it takes equal ones)"),
        ({"chunk_lookback": 3}, "option chunk_lookback=3"),
    ],
)
def test_a_layer_that_is_not_served_is_refused_when_it_is_made(custom: Any, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match="plug-in cannot serve this model: ") as error:
        impl(**options)
    assert sentence in str(error.value)
    assert str(error.value).endswith("Choose another attention backend")


@pytest.mark.parametrize(
    ("part", "name", "value", "need"),
    [
        ("attention_config", "use_non_causal", True, "attention in both directions"),
        ("parallel_config", "decode_context_parallel_size", 2, "context parallelism"),
        ("parallel_config", "prefill_context_parallel_size", 2, "context parallelism"),
    ],
)
def test_an_engines_wider_needs_are_refused(custom: Any, part: str, name: str, value: Any, need: str) -> None:
    setattr(getattr(custom, part), name, value)
    with pytest.raises(ValueError, match=f"cannot serve this model: {need}. Choose"):
        impl()


def test_options_a_layer_may_carry_unused_are_taken(custom: Any) -> None:
    impl(use_alibi_sqrt=False, chunk_lookback=-1, logits_soft_cap=0.0)


def validated(platform: str = "cpu", **options: Any) -> list[str]:
    fields: dict[str, Any] = {
        "head_size": 128,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": "auto",
        "block_size": 16,
        "use_mla": False,
        "has_sink": True,
        "use_sparse": False,
        "use_mm_prefix": False,
        "use_per_head_quant_scales": False,
        "device_capability": (9, 0),
        "attn_type": "decoder",
        "has_sliding_window": True,
    }
    return ours.SpecopsBackend.validate_configuration(**{**fields, **options})


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if vLLM ran on a GPU of compute capability 9.0."""
    capability = SimpleNamespace(major=9, minor=0)
    platform = SimpleNamespace(device_type="cuda", is_cuda=lambda: True, get_device_capability=lambda: capability)
    monkeypatch.setattr(ours, "current_platform", platform)


def test_a_gpu_engine_is_served(custom: Any, hopper: None) -> None:
    assert validated() == []
    assert validated(kv_cache_dtype="fp8", block_size=None, head_size=80, use_dcp=False) == []
    support = ours.SpecopsMetadataBuilder.get_cudagraph_support(custom, None)
    assert support is AttentionCGSupport.UNIFORM_BATCH


def test_no_graph_is_promised_on_a_cpu(custom: Any) -> None:
    assert ours.SpecopsMetadataBuilder.get_cudagraph_support(custom, None) is AttentionCGSupport.NEVER


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"use_mla": True}, "MLA not supported"),
        ({"use_sparse": True}, "sparse not supported"),
        ({"use_mm_prefix": True}, "partial multimodal token full attention not supported"),
        ({"use_non_causal": True}, "non-causal attention not supported"),
        ({"use_batch_invariant": True}, "batch invariance not supported"),
        ({"use_dcp": True}, "DCP not supported"),
        ({"use_pcp": True}, "PCP not supported"),
        ({"use_rswa": True}, "R-SWA not supported"),
        ({"use_per_head_quant_scales": True}, "per-head quant scales not supported"),
        ({"use_adaptive_verification": True}, "device-cpu query lens mismatch not supported"),
        ({"attn_type": "encoder"}, "attention type encoder not supported"),
        ({"kv_cache_dtype": "nvfp4"}, "cache dtype nvfp4 (specops takes"),
        ({"kv_cache_dtype": "float16"}, "cache dtype float16 with a bfloat16 query"),
        ({"dtype": torch.float64}, "dtype not supported"),
    ],
)
def test_a_gpu_engine_that_is_not_served_hears_why(custom: Any, hopper: None, options: dict[str, Any], reason: str) -> None:
    assert any(found.startswith(reason) for found in validated(**options)), validated(**options)


@pytest.mark.parametrize(
    ("backend", "options", "reason"),
    [
        ("trtllm", {"head_size": 80}, "head dim 80 (it takes 64, 128, 256)"),
        ("trtllm", {"block_size": 48}, "page size 48 (it takes 16, 32, 64, 128)"),
        ("nobody", {}, "no mha backend is called 'nobody'"),
    ],
)
def test_a_named_backends_limits_hold(tiny: Path, hopper: None, backend: str, options: dict[str, Any], reason: str) -> None:
    config = engine_config(tiny, additional_config={"specops": {"backend": backend}})
    with set_current_vllm_config(config):
        assert any(reason in found for found in validated(**options))


def test_a_wrong_option_is_named(tiny: Path) -> None:
    config = engine_config(tiny, additional_config={"specops": {"backned": "triton"}})
    with set_current_vllm_config(config), pytest.raises(ValueError, match=r"takes one option, 'backend'.*backned"):
        impl()


def test_another_version_is_warned_of_once(custom: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(ours, "vllm_version", lambda: "0.99.1")
    monkeypatch.setattr(ours, "_logger", SimpleNamespace(warning=said.append))
    ours._warn_of_version.cache_clear()
    for _ in range(3):
        impl()
    ours._warn_of_version.cache_clear()
    assert len(said) == 1
    assert "tested with vLLM 0.32.0 up to, not including, 0.33.0; this is vLLM 0.99.1" in said[0]
