"""XQA, FlashInfer fa2 and fa3, MHA and MLA, for real: against the oracle, compiled, captured and replayed.

    pytest tests/gpu/test_vendor_kernels.py

flashinfer-python compiles each configuration with nvcc at first use; the fixture compiles those of this file side by side
(one to two minutes on 16 cores, then cached), the tests themselves take seconds.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from specops import QueryLayout, ops
from specops.ops import flashinfer, planning, trtllm_mha
from specops.ops.backends import get_backend
from specops.testing.cases import AttentionCase, make_mha_case, make_mla_case
from specops.testing.oracle import assert_close_to_oracle

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="flashinfer-python is not installed here"),
]

BF16 = torch.bfloat16
PLANNED_MHA = ("flashinfer_fa2", "flashinfer_fa3")


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """Compile every configuration that this file uses in one ninja run."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("these configurations are for compute capability 9.0")
    from flashinfer.jit.attention.modules import (
        gen_batch_mla_module,
        gen_batch_prefill_module,
        gen_customize_batch_prefill_module,
    )
    from flashinfer.jit.core import build_jit_specs
    from flashinfer.jit.xqa import gen_xqa_module

    specs = [
        gen_xqa_module(BF16, BF16, 16, 128, 4, False, BF16, 4),
        gen_xqa_module(BF16, BF16, 16, 128, 4, True, BF16, 1),
        gen_xqa_module(BF16, torch.float8_e4m3fn, 16, 128, 4, False, BF16, 4),
        gen_xqa_module(BF16, BF16, 64, 64, 7, False, BF16, 6),
        gen_xqa_module(BF16, BF16, 64, 64, 7, False, BF16, 1),
    ]
    for variant in ("fa2", "fa3"):
        plain = (variant, BF16, BF16, BF16, torch.int32, 128, 128, 0)
        specs.append(gen_batch_prefill_module(*plain, False, False, False))
        specs.append(gen_batch_prefill_module(*plain, True, True, False))
        key = flashinfer.MhaKey(BF16, BF16, 32, 8, 128, 0.1, sinks=True)
        positional, named = flashinfer.sink_variant(variant, key)
        specs.append(gen_customize_batch_prefill_module(variant, *positional, **named))
        specs.append(gen_batch_mla_module(variant, BF16, BF16, BF16, torch.int32, 512, 64, False))
    fp8 = ("fa2", BF16, torch.float8_e4m3fn, BF16, torch.int32, 128, 128, 0)
    specs.append(gen_batch_prefill_module(*fp8, False, False, False))
    build_jit_specs(specs)


def mha(**options: Any) -> AttentionCase:
    """A case of the shapes compiled above; lengths long enough for the KV to be split, one padded request."""
    shape = {"page_size": 16, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": BF16, "device": "cuda"}
    return make_mha_case(**{**shape, "query_lens": 4, "seq_lens": (1500, 0, 37, 4), **options})


def mla(**options: Any) -> AttentionCase:
    shape = {"page_size": 64, "num_heads": 16, "latent_dim": 512, "rope_dim": 64, "dtype": BF16, "device": "cuda"}
    return make_mla_case(**{**shape, "query_lens": 4, "seq_lens": (1500, 0, 37, 4), **options})


XQA: dict[str, dict[str, Any]] = {
    "causal": {},
    "hnd": {"hnd": True},
    "strided q": {"strided_q": True},
    "sinks": {"sinks": True},
    "tree": {"tree_width": 4},
    "short requests": {"seq_lens": (300, 3, 1, 0), "poison": False},
    "lengths behind the page table": {"seq_lens": (1540, 1538, 700, 4), "table_columns": 96},
    "window": {"window": 300},
    "window and sinks": {"window": 20, "sinks": True},
    "window, one row": {"query_lens": 1, "window": 300},
    "fp8": {"fp8": True},
    "fp8 and tree": {"fp8": True, "tree_width": 4},
    "group of 7 in two blocks": {"num_heads": 14, "num_kv_heads": 2, "head_dim": 64, "page_size": 64, "query_lens": 6},
    "group of 7 with sinks": {
        "num_heads": 14,
        "num_kv_heads": 2,
        "head_dim": 64,
        "page_size": 64,
        "query_lens": 6,
        "sinks": True,
    },
}
for _options in (XQA["group of 7 in two blocks"], XQA["group of 7 with sinks"]):
    _options["seq_lens"] = (1500, 0, 37, 6)


@pytest.mark.parametrize("name", XQA)
def test_xqa(name: str) -> None:
    mha(**XQA[name]).check("trtllm")


def test_layers_share_what_xqa_prepared() -> None:
    case = mha(tree_width=4)
    prepared = trtllm_mha.prepare(
        case.tensors["seq_lens"], case.tensors["page_table"], case.layout, 16, case.options["tree_mask"]
    )
    out = ops.mha(*case.args(), **case.kwargs(), plan=prepared, backend="trtllm")
    assert_close_to_oracle(out, case.oracle())


FA: dict[str, dict[str, Any]] = {
    "uniform": {},
    "short requests": {"seq_lens": (300, 3, 1, 0)},
    "packed": {"query_lens": (3, 1, 130, 4), "seq_lens": (1500, 20, 200, 4)},
    "window and softcap": {"window": 300, "softcap": 20.0},
    "sinks": {"sinks": True},
    "hnd": {"hnd": True},
    "strided q": {"strided_q": True},
    "page size 1": {"page_size": 1},
}
FA2: dict[str, dict[str, Any]] = {
    "tree": {"tree_width": 4},
    "tree and window": {"tree_width": 4, "window": 100},
    "wide tree": {"tree_width": 9, "seq_lens": (1500, 0, 37, 9)},
    "fp8": {"fp8": True},
}


@pytest.mark.parametrize("name", FA)
@pytest.mark.parametrize("backend", PLANNED_MHA)
def test_flashinfer_mha(backend: str, name: str) -> None:
    mha(**FA[name]).check(backend)


@pytest.mark.parametrize("name", FA2)
def test_fa2_masks_and_fp8(name: str) -> None:
    mha(**FA2[name]).check("flashinfer_fa2")


@pytest.mark.parametrize("options", [{}, {"query_lens": 1}, {"query_lens": (3, 1, 5, 4)}, {"seq_lens": (300, 3, 1, 0)}])
@pytest.mark.parametrize("backend", PLANNED_MHA)
def test_flashinfer_mla(backend: str, options: dict[str, Any]) -> None:
    mla(**options).check(backend)


LENGTHS = ((1500, 700, 37, 4), (4, 4, 4, 4), (900, 4, 0, 0), (1501, 1400, 1300, 1200))


def steps(make: Callable[..., AttentionCase]) -> Iterator[AttentionCase]:
    """Cases of one shape, page table included, whose lengths go down, to zero and up again."""
    page_size = 16 if make is mha else 64
    columns = 1536 // page_size
    for seq_lens in LENGTHS:
        owned = sum(-(-seq_len // page_size) for seq_len in seq_lens)
        case = make(seq_lens=seq_lens, spare_pages=4 * columns - owned)
        table = case.tensors["page_table"]
        case.tensors["page_table"] = torch.nn.functional.pad(table, (0, columns - table.shape[1]))
        yield case


def fixed_inputs(case: AttentionCase) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in case.tensors.items()}


ALL = [("trtllm", "mha"), *((name, "mha") for name in PLANNED_MHA), *((name, "mla") for name in PLANNED_MHA)]


def plan_for(backend: str, family: str, case: AttentionCase) -> planning.Plan | None:
    if not get_backend(backend, case.family).capabilities.needs_plan:
        return None
    page_size = list(case.tensors.values())[-3].shape[1]
    return planning.make_plan(backend, case.family, case.tensors["page_table"], case.layout, page_size=page_size)


@pytest.mark.parametrize(("backend", "family"), ALL)
def test_compiled_with_reduce_overhead_over_shrinking_and_growing_lengths(backend: str, family: str) -> None:
    """fullgraph, no skipped graph, no recompile; one plan, updated before each step."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    call = ops.mha if family == "mha" else ops.mla
    cases = list(steps(mha if family == "mha" else mla))
    plan = plan_for(backend, family, cases[0])
    layout, scale = QueryLayout.uniform(4), cases[0].scale

    @torch.compile(mode="reduce-overhead", fullgraph=True)
    def step(handle: torch.Tensor | None, *tensors: torch.Tensor) -> torch.Tensor:
        return call(*tensors, layout=layout, scale=scale, backend=backend, plan=handle) * 1.0

    for _ in range(3):
        for case in cases:
            if plan is not None:
                plan.update(case.tensors["page_table"], case.tensors["seq_lens"], layout)
            with torch.no_grad():
                out = step(None if plan is None else plan.handle, *case.args()).clone()
            assert_close_to_oracle(out, case.oracle())
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize(("backend", "family"), ALL)
def test_one_captured_graph_replayed_over_shrinking_and_growing_lengths(backend: str, family: str) -> None:
    call = ops.mha if family == "mha" else ops.mla
    cases = list(steps(mha if family == "mha" else mla))
    inputs, layout = fixed_inputs(cases[0]), QueryLayout.uniform(4)
    plan = plan_for(backend, family, cases[0])

    def update(case: AttentionCase) -> None:
        for name, tensor in inputs.items():
            tensor.copy_(case.tensors[name])
        if plan is not None:
            host = case.tensors["seq_lens"].cpu()
            plan.update(inputs["page_table"], inputs["seq_lens"], layout, seq_lens_cpu=host)

    def step() -> torch.Tensor:
        handle = None if plan is None else plan.handle
        out: torch.Tensor = call(*inputs.values(), layout=layout, scale=cases[0].scale, backend=backend, plan=handle)
        return out

    update(cases[0])
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for case in (*cases, *reversed(cases)):
        out.fill_(float("nan"))
        update(case)
        graph.replay()
        assert_close_to_oracle(out, case.oracle())


def test_two_xqa_graphs_run_at_the_same_time_on_two_streams() -> None:
    """Captured on two streams, they own two workspaces."""
    cases = [mha(seed=seed, seq_lens=(1500, 1400, 1300, 1200)) for seed in (1, 2)]
    graphs, outs, streams = [], [], [torch.cuda.Stream() for _ in cases]
    for case, stream in zip(cases, streams, strict=True):
        case.run("trtllm")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            outs.append(case.run("trtllm"))
        graphs.append(graph)
    torch.cuda.synchronize()
    for _ in range(50):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for case, out in zip(cases, outs, strict=True):
        assert_close_to_oracle(out, case.oracle())


def test_a_planned_op_without_a_plan_refuses_a_capture() -> None:
    case = mha()
    case.run("flashinfer_fa2")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="plans on the host, which a CUDA graph can't capture"), torch.cuda.graph(graph):
        case.run("flashinfer_fa2")
    torch.cuda.synchronize()


def test_opcheck_of_every_vendor_op() -> None:
    for backend in ("trtllm", *PLANNED_MHA):
        args, kwargs = mha().op_args()
        torch.library.opcheck(getattr(torch.ops.specops, f"{backend}_mha").default, args, kwargs)
    for backend in PLANNED_MHA:
        args, kwargs = mla().op_args()
        torch.library.opcheck(getattr(torch.ops.specops, f"{backend}_mla").default, args, kwargs)
