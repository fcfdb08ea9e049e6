"""What only a GPU can show of the Triton kernels: graphs, streams, real sizes, addresses beyond 2^31.

    python -m pytest -q -m gpu -n 12 --dist worksteal tests/gpu/test_triton_gpu.py

Most of the time is compiling, a few seconds a kernel, so tests of one kernel with other data stand in one test, and workers
share the rest. The shape and feature grid of ``tests/ops/test_triton_*.py`` runs compiled where there is a GPU; run it there
too.
"""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import torch

from specops import ops
from specops.layout import QueryLayout
from specops.ops import triton_common, triton_mla
from specops.ops.triton_common import Tiling
from specops.ops.triton_mha import mha
from specops.ops.triton_mla import mla
from specops.testing import assert_close_to_oracle, make_mha_case, make_mla_case, oracle_mha

pytestmark = pytest.mark.gpu


# Ways of splitting and merging, each a kernel of its own. None is what a call of this shape takes.
WAYS = {
    "chosen": None,
    "scheduled": Tiling(16, 64, 4, 3, 2),
    "scheduled, second kernel": Tiling(16, 64, 4, 3, 2, inline_merge=False, early=True),
    "even": Tiling(16, 64, 4, 3, 2, even=True, early=True, min_blocks=2, prefetch=2),
    "even, second kernel": Tiling(16, 64, 4, 3, 2, even=True, inline_merge=False),
    "even, wide blocks": Tiling(16, 128, 8, 3, 2, even=True, early=True, swap=True),
    "direct": Tiling(16, 64, 4, 3, 2, direct=True, min_blocks=2, early=True, prefetch=2),
    "direct, second kernel": Tiling(16, 64, 4, 3, 2, direct=True, inline_merge=False),
}


@pytest.mark.parametrize("way", WAYS)
def test_bf16_of_serving_size(way) -> None:
    """Ragged lengths, then equal ones, which a schedule may cut alike."""
    for seq_lens in ((4096, 700, 64, 8, 0, 1300), (1300,) * 6, (1300, 1250) * 16):
        case = make_mha_case(
            seq_lens=seq_lens,
            query_lens=4,
            page_size=64,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            dtype=torch.bfloat16,
            device="cuda",
        )
        for _ in range(2):
            assert_close_to_oracle(mha(*case.args(), **case.kwargs(), tiling=WAYS[way], split=True), case.oracle())


@pytest.mark.parametrize(
    "features",
    [
        {"query_lens": 8},
        {"window": 1000},
        {"query_lens": 6, "tree_width": 6, "sinks": True},
        {"query_lens": 6, "tree_width": 70, "window": 100},
        {"softcap": 30.0, "page_size": 16},
        {"fp8": True},
        {"head_dim": 80},
        {"head_dim": 192, "value_dim": 128},
        {"query_lens": [1, 6, 0, 3, 30, 2], "slack": 2},
        {"query_lens": 40},
    ],
)
def test_features_of_serving_size(features) -> None:
    case = {"page_size": 64, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "query_lens": 4, **features}
    for seq_lens in ((4096, 700, 64, 8, 0, 1300), (1300,) * 6):
        made = make_mha_case(seq_lens=seq_lens, dtype=torch.bfloat16, device="cuda", **case)
        assert_close_to_oracle(mha(*made.args(), **made.kwargs()), made.oracle())


@pytest.mark.parametrize(("batch", "query_len"), [(1, 1), (1, 16), (32, 4)])
def test_short_lengths_under_a_wide_page_table(batch, query_len) -> None:
    """A small model's decode and verify: one launch, whatever the lengths turn out to be."""
    for length in (256, 40, 2000, 17):
        made = make_mha_case(
            seq_lens=[length] * batch,
            query_lens=query_len,
            page_size=16,
            num_heads=9,
            num_kv_heads=3,
            head_dim=64,
            table_columns=128,
            dtype=torch.bfloat16,
            device="cuda",
        )
        assert_close_to_oracle(mha(*made.args(), **made.kwargs()), made.oracle())


@pytest.mark.parametrize("num_heads", [16, 128])
def test_mla_bf16_of_serving_size(num_heads) -> None:
    make_mla_case(
        seq_lens=(2100, 64, 0, 5),
        query_lens=4,
        page_size=64,
        num_heads=num_heads,
        latent_dim=512,
        rope_dim=64,
        dtype=torch.bfloat16,
        device="cuda",
    ).check("triton")


HOPPER = Tiling(64, 64, 8, 2, 1, inline_merge=False, hopper=True)


@pytest.mark.parametrize(
    ("features", "direct", "early"),
    [
        ({"num_heads": 16, "query_lens": 4, "dtype": torch.bfloat16}, True, True),
        ({"num_heads": 16, "query_lens": 4, "dtype": torch.bfloat16}, False, False),
        ({"num_heads": 128, "query_lens": 3, "dtype": torch.float16}, True, False),
        ({"num_heads": 7, "query_lens": 5, "page_size": 16}, False, True),
        ({"num_heads": 16, "query_lens": 2, "page_size": 1}, True, True),
        ({"num_heads": 16, "query_lens": 2, "page_size": 48, "sinks": True}, False, False),
        ({"num_heads": 16, "query_lens": 2, "page_size": 128}, True, False),
        ({"num_heads": 24, "query_lens": [1, 6, 0, 3, 30], "slack": 2}, False, True),
        ({"num_heads": 16, "query_lens": 6, "tree_width": 6}, False, True),
        ({"num_heads": 16, "query_lens": 6, "tree_width": 40, "sinks": True}, True, True),
        ({"num_heads": 16, "query_lens": 4, "strided_q": True}, False, True),
    ],
)
def test_the_hopper_kernel_of_mla(features, direct, early) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel is for compute capability 9.0")
    case = {"latent_dim": 512, "rope_dim": 64, "page_size": 64, "dtype": torch.float16, "device": "cuda", **features}
    made = make_mla_case(seq_lens=(2100, 64, 40, 65, 333), **case)
    tiling = replace(HOPPER, direct=direct, early=early, programs_per_sm=2)
    assert_close_to_oracle(mla(*made.args(), **made.kwargs(), tiling=tiling, split=True), made.oracle())


@pytest.mark.parametrize(
    ("features", "direct"),
    [
        ({"query_lens": 4}, True),
        ({"query_lens": [1, 6, 0, 3, 30]}, False),
        ({"query_lens": 4, "page_size": 16, "table_columns": 20}, False),
        ({"query_lens": 6, "tree_width": 40, "sinks": True}, True),
    ],
)
def test_the_hopper_kernel_reads_nothing_behind_the_page_table(features, direct) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel is for compute capability 9.0")
    case = {"page_size": 64, "table_columns": 5, "num_heads": 16, **features}
    made = make_mla_case(
        seq_lens=(2100, 64, 322, 320, 333), latent_dim=512, rope_dim=64, dtype=torch.float16, device="cuda", **case
    )
    tiling = replace(HOPPER, direct=direct, programs_per_sm=2)
    out = mla(*made.args(), **made.kwargs(), tiling=tiling, split=True)
    assert_close_to_oracle(out, made.oracle())
    lens = made.tensors["seq_lens"]
    lens[1] = 0
    wanted = mla(*made.args(), **made.kwargs(), tiling=tiling, split=True)
    lens[1] = -7
    assert torch.equal(mla(*made.args(), **made.kwargs(), tiling=tiling, split=True), wanted)


def test_mla_takes_the_hopper_kernel_where_it_can(monkeypatch) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel is for compute capability 9.0")
    taken = []
    monkeypatch.setattr(triton_mla, "launch", lambda *args, tiling, **options: taken.append(tiling.hopper or tiling.roles))
    for case in ({}, {"window": 9}, {"latent_dim": 256}, {"dtype": torch.float32}, {"tree_width": 6, "query_lens": 6}):
        made = make_mla_case(
            **{"seq_lens": (90, 8), "latent_dim": 512, "rope_dim": 64, "dtype": torch.float16, "device": "cuda", **case}
        )
        mla(*made.args(), **made.kwargs())
    assert taken == [True, False, False, False, True]


@pytest.mark.parametrize("seq_lens", [(3000,), (1500, 1500)])
@pytest.mark.parametrize("way", ["scheduled, second kernel", "even", "direct", "direct, second kernel"])
def test_launches_that_overlap_keep_their_order(way, seq_lens) -> None:
    """Many calls in one graph, each on the output of the one before: nothing is read before it is written."""
    made = make_mha_case(
        seq_lens=seq_lens, query_lens=4, page_size=64, num_heads=8, head_dim=128, dtype=torch.float16, device="cuda"
    )
    tiling = replace(WAYS[way], early=True)

    def chain(q):
        for _ in range(20):
            q = mha(q, *made.args()[1:], **made.kwargs(), tiling=tiling, split=True) + made.tensors["q"]
        return q

    made_one_by_one = made.tensors["q"]
    for _ in range(20):
        made_one_by_one = (
            mha(made_one_by_one, *made.args()[1:], **made.kwargs(), tiling=replace(tiling, early=False), split=True)
            + made.tensors["q"]
        )
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(made.tensors["q"])
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, made_one_by_one)


@pytest.mark.parametrize("way", ["even", "direct"])
def test_calls_one_after_another_without_anything_between(way) -> None:
    """Launches that overlap share counters and, in a graph's pool, memory: every result is right all the same."""
    cases = [
        make_mha_case(seq_lens=(900 + seed,) * 3, query_lens=4, page_size=64, dtype=torch.float16, device="cuda", seed=seed)
        for seed in range(3)
    ]

    def call(case) -> torch.Tensor:
        return mha(*case.args(), **case.kwargs(), tiling=replace(WAYS[way], early=True), split=True)

    eager = [call(case) for _ in range(10) for case in cases]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [call(case) for _ in range(10) for case in cases]
    for _ in range(5):
        graph.replay()
    wanted = [case.oracle() for case in cases]
    for index, out in enumerate(eager + outs):
        assert_close_to_oracle(out, wanted[index % len(cases)])


@pytest.mark.parametrize("way", ["even", "direct, second kernel"])
def test_an_early_launch_behind_a_copy_and_behind_two_streams(way) -> None:
    """What a call waits for may be no kernel, or more than one: it is captured and replayed in order all the same."""
    case = make_mha_case(seq_lens=(900, 900), query_lens=4, page_size=64, dtype=torch.float16, device="cuda")
    q, lens = torch.zeros_like(case.tensors["q"]), torch.zeros_like(case.tensors["seq_lens"])
    tiling, side = replace(WAYS[way], early=True), torch.cuda.Stream()

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        lens.copy_(case.tensors["seq_lens"])
        q.copy_(case.tensors["q"])
        first = mha(q, *case.args()[1:4], lens, **case.kwargs(), tiling=tiling, split=True)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            lens.zero_()
            lens.add_(case.tensors["seq_lens"])
        q.zero_()
        q.add_(case.tensors["q"])
        torch.cuda.current_stream().wait_stream(side)
        return first, mha(q, *case.args()[1:4], lens, **case.kwargs(), tiling=tiling, split=True)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = step()
    for _ in range(20):
        q.fill_(float("nan"))
        lens.zero_()
        graph.replay()
        for out in outs:
            assert_close_to_oracle(out, case.oracle())


def test_a_replay_follows_lengths_down_and_up() -> None:
    """One captured call, lengths and page contents changed between replays, output poisoned in between."""
    lengths = [(300, 17, 4, 129), (4, 5, 6, 7), (500, 500, 500, 500), (0, 64, 0, 333), (300, 17, 4, 129)]
    cases = [
        make_mha_case(seq_lens=lens, query_lens=4, page_size=16, dtype=torch.float16, device="cuda", seed=i)
        for i, lens in enumerate(lengths)
    ]
    pages = max(case.tensors["k_cache"].shape[0] for case in cases)
    columns = max(case.tensors["page_table"].shape[1] for case in cases)
    static = {
        "q": torch.zeros_like(cases[0].tensors["q"]),
        "k_cache": torch.zeros((pages, 16, 2, 64), dtype=torch.float16, device="cuda"),
        "v_cache": torch.zeros((pages, 16, 2, 64), dtype=torch.float16, device="cuda"),
        "page_table": torch.zeros((4, columns), dtype=torch.int32, device="cuda"),
        "seq_lens": torch.zeros(4, dtype=torch.int32, device="cuda"),
    }

    def call() -> torch.Tensor:
        return ops.mha(*static.values(), layout=cases[0].layout, scale=cases[0].scale, backend="triton")

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for case in cases:
        for name, tensor in static.items():
            given = case.tensors[name]
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))
            else:
                tensor.zero_()
            tensor[tuple(slice(0, size) for size in given.shape)] = given
        out.fill_(float("nan"))
        graph.replay()
        assert_close_to_oracle(out, case.oracle())


def test_two_graphs_replayed_at_once_do_not_share_counters() -> None:
    """Split units are merged by counters; each captured call has its own, so replays on two streams can't mix."""
    cases = [
        make_mha_case(seq_lens=(3000, 2000), query_lens=4, page_size=64, dtype=torch.float16, device="cuda", seed=seed)
        for seed in (1, 2)
    ]
    graphs, outs = [], []
    for case in cases:
        case.run("triton")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs.append(case.run("triton"))
        graphs.append(graph)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    for _ in range(200):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for case, out in zip(cases, outs, strict=True):
        assert_close_to_oracle(out, case.oracle())


def test_eager_calls_on_two_streams_at_once() -> None:
    case = make_mha_case(seq_lens=(3000, 2000), query_lens=4, page_size=64, dtype=torch.float16, device="cuda")
    wanted = case.run("triton")
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    outs = []
    for _ in range(50):
        for stream in streams:
            with torch.cuda.stream(stream):
                outs.append(case.run("triton"))
    torch.cuda.synchronize()
    assert all(torch.allclose(out, wanted, rtol=2e-3, atol=2e-3) for out in outs)


def test_counters_are_zero_after_a_call() -> None:
    make_mha_case(seq_lens=(3000, 2000), query_lens=4, page_size=64, dtype=torch.float16, device="cuda").run("triton")
    counters = triton_common.merge_counters(torch.device("cuda", torch.cuda.current_device()), 4)
    assert not counters.any()


def test_reduce_overhead_keeps_its_graphs() -> None:
    """The counters are no part of inductor's graph pool, and calls under its warm-up leave nothing behind in it."""
    case = make_mha_case(seq_lens=(900, 70), query_lens=4, page_size=64, dtype=torch.float16, device="cuda")

    def step(q, k, v, table, lens):
        return ops.mha(q * 1, k, v, table, lens, layout=QueryLayout.uniform(4), scale=case.scale, backend="triton") * 1

    compiled = torch.compile(step, mode="reduce-overhead", fullgraph=True)
    wanted = case.oracle()
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        assert_close_to_oracle(compiled(*case.args()).clone(), wanted)


def test_pages_beyond_two_to_the_31_elements() -> None:
    """F36: the last page of a pool whose element offsets do not fit 32 bits, in a one-byte dtype."""
    pages, page_size, heads, dim = 140_000, 16, 8, 128
    k = torch.zeros((pages, page_size, heads, dim), dtype=torch.float8_e4m3fn, device="cuda")
    v = torch.zeros_like(k)
    generator = torch.Generator("cuda").manual_seed(3)
    rows = torch.randn((page_size, heads, dim), device="cuda", generator=generator)
    slots = torch.arange((pages - 1) * page_size, pages * page_size, device="cuda")
    ops.store_kv(k, v, rows, rows * 2, slots)
    assert torch.equal(k[-1].float(), rows.to(torch.float8_e4m3fn).float())
    table = torch.tensor([[pages - 1]], dtype=torch.int32, device="cuda")
    lens = torch.tensor([page_size], dtype=torch.int32, device="cuda")
    q = torch.randn((1, 8, dim), device="cuda", dtype=torch.float16, generator=generator)
    out = ops.mha(q, k, v, table, lens, layout=QueryLayout.uniform(1), backend="triton")
    small = torch.zeros_like(table)
    assert_close_to_oracle(out, oracle_mha(q, k[-1:], v[-1:], small, lens, layout=QueryLayout.uniform(1)))


def test_stores_and_moves_on_the_gpu_use_the_fused_kernels_and_agree_with_the_generic_form() -> None:
    generic = importlib.import_module("specops.ops.store_kv")  # the package's attribute of that name is the function
    k, v = torch.randn((9, 8, 128), device="cuda"), torch.randn((9, 8, 64), device="cuda")
    slots = torch.tensor([3, -1, 70, 5, 200, -1, 9, 10, 11], device="cuda")
    caches = [(torch.zeros((16, 16, 8, 128), device="cuda"), torch.zeros((16, 16, 8, 64), device="cuda")) for _ in range(2)]
    ops.store_kv(*caches[0], k, v, slots)
    generic._store_kv(*caches[1], k, v, slots)
    source, target = torch.tensor([70, 9, -1, 10], device="cuda"), torch.tensor([9, 10, 12, 11], device="cuda")
    ops.move_kv(*caches[0], source, target)
    generic._move_kv(*caches[1], source, target)
    for fused, plain in zip(caches[0], caches[1], strict=True):
        assert torch.equal(fused, plain)
