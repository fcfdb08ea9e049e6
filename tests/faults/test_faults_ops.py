"""Kinds of fault at the level of ops, on every backend that runs here; each named by its id.

OMP_NUM_THREADS=1 pytest -k faults tests/faults/test_faults_ops.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from specops import PagedKVCache, QueryLayout, attention_metadata, ops
from specops.ops.backends import UnsupportedAttention, get_backend
from specops.testing import assert_close_to_oracle, check_backend, make_mha_case, make_mla_case

BACKENDS = ["reference", "cpu"]
on_every_backend = pytest.mark.parametrize("backend", BACKENDS)
FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize(("batch", "offsets"), [(1, [0, 6]), (2, [0, 6, 12])])
def test_f01_offsets_step_by_the_nodes_of_the_tree_not_by_the_steps(batch: int, offsets: list[int]) -> None:
    assert QueryLayout.uniform(6).offsets(batch, torch.device("cpu")).tolist() == offsets


@on_every_backend
@pytest.mark.parametrize("seq_lens", [(9,), (9, 13)])
def test_f01_f02_all_six_rows_of_each_block_are_computed(backend: str, seq_lens: tuple[int, ...]) -> None:
    case = make_mha_case(seq_lens=seq_lens, query_lens=6, tree_width=6)
    case.check(backend)
    assert case.run(backend).view(len(seq_lens), 6, -1)[:, 4:].abs().amin(dim=2).amax() > 0


def test_f02_a_width_that_does_not_fit_the_rows_is_refused() -> None:
    case = make_mha_case(seq_lens=(9, 13), query_lens=6)
    with pytest.raises(ValueError, match="q has 12 rows, but 2 requests of 4 rows need 8; for topk > 1 the width is"):
        ops.mha(*case.args(), layout=QueryLayout.uniform(4))
    narrow = QueryLayout.packed(torch.tensor([0, 6, 12], dtype=torch.int32), 4)
    with ops.checked(), pytest.raises(ValueError, match="a request has 6 rows, above max_query_len 4"):
        ops.mha(*case.args(), layout=narrow)


@on_every_backend
def test_f05_page_1_with_topk_8(backend: str) -> None:
    make_mha_case(seq_lens=(44, 44), query_lens=8, tree_width=24, page_size=1).check(backend)


@on_every_backend
def test_f08_f25_nothing_of_an_earlier_call_is_kept(backend: str) -> None:
    check_backend(backend, only=("stale",)).raise_if_failed()
    check_backend(backend, family="mla", only=("stale",)).raise_if_failed()
    make_mha_case(seq_lens=(9, 13, 5, 13), query_lens=(1, 1, 1, 1)).check(backend)
    make_mha_case(seq_lens=(9, 13, 5, 13), query_lens=(1, 1, 1, 13)).check(backend)


@on_every_backend
@pytest.mark.parametrize("query_lens", [1, 3])
def test_f09_a_last_page_that_is_partly_filled(backend: str, query_lens: int) -> None:
    make_mha_case(seq_lens=(3, 4, 5, 7, 8), query_lens=query_lens).check(backend)


@on_every_backend
def test_f10_every_sequence_is_shorter_than_a_page(backend: str) -> None:
    make_mha_case(seq_lens=(5, 9), page_size=16, query_lens=3, tree_width=3).check(backend)


@on_every_backend
def test_f13_lengths_around_whole_pages(backend: str) -> None:
    make_mha_case(seq_lens=(64, 65, 127, 128), page_size=64, query_lens=2).check(backend)


@on_every_backend
def test_f14_pages_of_128_are_read_as_such(backend: str) -> None:
    make_mha_case(seq_lens=(130, 250), page_size=128, query_lens=2).check(backend)


def test_f14_a_kernel_for_pages_of_64_refuses_pages_of_128() -> None:
    limits = get_backend("trtllm", "mha").capabilities.also[0]
    assert 128 not in (limits.page_sizes or ())

    @ops.register_backend("f14_pages_of_64", device_types=("cpu",), page_sizes=(64,))
    def kernel(q: Tensor, *args: Any, **options: Any) -> Tensor:
        raise AssertionError("must not be called")

    with pytest.raises(UnsupportedAttention, match=r"page size 128 \(it takes 64\)"):
        make_mha_case(page_size=128).run("f14_pages_of_64")


@on_every_backend
def test_f32_a_row_without_keys_gives_zero_with_sinks_and_without(backend: str) -> None:
    for sinks in (False, True):
        case = make_mha_case(seq_lens=(0, 2), query_lens=4, sinks=sinks)
        expected, lse = case.oracle_with_lse()
        out = case.run(backend)
        assert out[:6].count_nonzero() == 0
        assert expected[:6].count_nonzero() == 0
        wanted = case.options["sinks"].double() if sinks else torch.full((8,), -torch.inf, dtype=torch.float64)
        assert torch.equal(lse[0], wanted), "lse of an empty row is the sink's logit, -inf without one"


@on_every_backend
@pytest.mark.parametrize(("lens", "rows"), [((1, 3), 1), ((32, 64, 96, 48), 4), ((13,), 2)])
def test_f33_nan_in_all_memory_of_nobody(backend: str, lens: tuple[int, ...], rows: int) -> None:
    make_mha_case(seq_lens=lens, query_lens=rows).check(backend)
    make_mla_case(seq_lens=lens, query_lens=rows).check(backend)
    check_backend(backend, only=("poison",)).raise_if_failed()


@on_every_backend
def test_f36_pages_beyond_two_to_the_31_elements(backend: str) -> None:
    report = check_backend(backend, only=("large-pool",), large_pool=True)
    assert report.checks["large-pool"] == 2
    report.raise_if_failed()


def test_f36_a_store_beyond_two_to_the_31_elements() -> None:
    # Reserved and hardly touched, so it takes no memory: 2^31 bytes and one page.
    pages = 2**31 // (16 * 8 * 128) + 1
    cache = torch.empty((pages, 16, 8, 128), dtype=FP8)
    slot = torch.tensor([pages * 16 - 1])
    ops.store_kv(cache, cache, torch.ones(1, 8, 128), torch.ones(1, 8, 128), slot)
    assert cache[-1, -1].float().sum() == 8 * 128
    ops.move_kv(cache, cache, slot, slot - 1)
    assert cache[-1, -2].float().sum() == 8 * 128


@on_every_backend
@pytest.mark.parametrize("heads", [(9, 3), (24, 4), (28, 4), (40, 8), (14, 2), (64, 4), (8, 8)], ids=str)
def test_f37_group_sizes(backend: str, heads: tuple[int, int]) -> None:
    make_mha_case(num_heads=heads[0], num_kv_heads=heads[1], query_lens=3).check(backend)


@on_every_backend
@pytest.mark.parametrize("dims", [32, 64, 80, 96, 128, 192, 256, (192, 128)], ids=str)
def test_f38_head_dims(backend: str, dims: Any) -> None:
    key, value = dims if isinstance(dims, tuple) else (dims, dims)
    make_mha_case(head_dim=key, value_dim=value, query_lens=2).check(backend)


@on_every_backend
@pytest.mark.parametrize("heads", [16, 128])
def test_f38_deepseeks_latent_and_rotary_dims(backend: str, heads: int) -> None:
    make_mla_case(num_heads=heads, latent_dim=512, rope_dim=64, query_lens=2).check(backend)


@on_every_backend
def test_f39_slices_of_one_projection(backend: str) -> None:
    case = make_mha_case(query_lens=3, strided_q=True)
    case.check(backend)
    fused = torch.randn(6, 2 * 2 * 64)
    k, v = torch.repeat_interleave(torch.randn(6, 2, 64), 2, dim=0)[::2], fused[:, 128:].view(6, 2, 64)
    slots = torch.arange(4, 10)
    caches = torch.zeros(4, 4, 2, 64), torch.zeros(4, 4, 2, 64)
    ops.store_kv(*caches, k, v, slots)
    assert torch.equal(caches[0].flatten(0, 1)[4:10], k)
    assert torch.equal(caches[1].flatten(0, 1)[4:10], v)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_f40_slots_of_either_width(dtype: torch.dtype) -> None:
    cache = torch.zeros(3, 4, 1, 8)
    ops.store_kv(cache, cache, torch.ones(2, 1, 8), torch.ones(2, 1, 8), torch.tensor([5, -1], dtype=dtype))
    assert cache.flatten(1).sum(dim=1).tolist() == [0, 8, 0]


def test_f40_a_page_table_of_int64_is_refused() -> None:
    case = make_mha_case()
    case.tensors["page_table"] = case.tensors["page_table"].long()
    with pytest.raises(TypeError, match=r"page_table must be int32, got torch\.int64; convert it once"):
        case.run()


@on_every_backend
@pytest.mark.parametrize("rows", [1, 4, 6])
def test_f41_a_window_layer_and_a_full_layer_over_the_same_keys(backend: str, rows: int) -> None:
    options: dict[str, Any] = {"seq_lens": (23, 9, 12), "query_lens": rows}
    make_mha_case(**options, window=5).check(backend)
    make_mha_case(**options).check(backend)
    make_mha_case(**options, window=5, tree_width=rows).check(backend)


@on_every_backend
def test_f42_a_node_does_not_see_its_sibling_in_a_padded_bucket(backend: str) -> None:
    case = make_mha_case(seq_lens=(9, 7, 12, 0), query_lens=3, tree_width=3)
    case.options["tree_mask"] = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool).repeat(4, 1)
    case.check(backend)
    before = case.run(backend)
    place = 9 - 2
    page = case.tensors["page_table"][0, place // 4]
    case.tensors["k_cache"][page, place % 4] = 9.0
    after = case.run(backend)
    assert torch.equal(before[2], after[2]), "node 2 must not change with its sibling's key"
    assert not torch.equal(before[1], after[1])


@on_every_backend
@pytest.mark.parametrize("query_lens", [3, (3, 1)])
def test_f43_sink_window_and_cap_together(backend: str, query_lens: Any) -> None:
    make_mha_case(query_lens=query_lens, sinks=True, window=5, softcap=3.0).check(backend)


@on_every_backend
@pytest.mark.parametrize("query_lens", [3, (3, 1)])
def test_f44_scales_of_an_fp8_cache_are_applied_everywhere(backend: str, query_lens: Any) -> None:
    make_mha_case(query_lens=query_lens, fp8=True, k_scale=0.25, v_scale=0.5).check(backend)
    make_mla_case(query_lens=query_lens, fp8=True, kv_scale=0.25).check(backend)


@on_every_backend
def test_f44_stored_and_read_back_with_scales_beside_a_bf16_cache(backend: str) -> None:
    k, v = torch.randn(4, 2, 16, dtype=torch.bfloat16), torch.randn(4, 2, 16, dtype=torch.bfloat16)
    target = PagedKVCache(3, 4, 2, 16, dtype=FP8, k_scale=0.25, v_scale=0.5)
    draft = PagedKVCache(3, 4, 2, 16, dtype=torch.bfloat16)
    slots = torch.arange(4, 8)
    ops.store_kv(target.k, target.v, k, v, slots, k_scale=target.k_scale, v_scale=target.v_scale)
    ops.store_kv(draft.k, draft.v, k, v, slots)
    assert torch.equal(target.k[1], (k.float() / 0.25).to(FP8))
    table, lens = torch.tensor([[1]], dtype=torch.int32), torch.tensor([4], dtype=torch.int32)
    q = torch.randn(1, 4, 16, dtype=torch.bfloat16)
    scales = {"k_scale": target.k_scale, "v_scale": target.v_scale}
    one = {"layout": QueryLayout.uniform(1), "backend": backend}
    got = ops.mha(q, target.k, target.v, table, lens, **one, **scales)
    plain = ops.mha(q, draft.k, draft.v, table, lens, **one)
    keys, values = (target.k[1].double() * 0.25, target.v[1].double() * 0.5)
    for out, (a, b) in ((got, (keys, values)), (plain, (k.double(), v.double()))):
        grouped = q.double().view(2, 2, 16)
        weights = (torch.einsum("hgd,khd->hgk", grouped, a) * 0.25).softmax(dim=2)
        assert_close_to_oracle(out, torch.einsum("hgk,khd->hgd", weights, b).reshape(1, 4, 16))


@on_every_backend
@pytest.mark.parametrize("options", [{"strided_q": True}, {"value_dim": 32}, {"hnd": True, "value_dim": 96}], ids=str)
def test_f45_strides_and_dtype_of_the_fake_are_the_real_ones(backend: str, options: dict[str, Any]) -> None:
    case = make_mha_case(query_lens=3, dtype=torch.bfloat16, **options)
    case.tensors["q"] = case.tensors["q"].transpose(0, 1).contiguous().transpose(0, 1)
    real = case.run(backend)
    with FakeTensorMode() as mode:
        args, kwargs = case.op_args()
        fake_args = [mode.from_tensor(arg) if isinstance(arg, Tensor) else arg for arg in args]
        fake = getattr(torch.ops.specops, f"{backend}_mha")(*fake_args, **kwargs)
    heads, value_dim = 8, case.tensors["v_cache"].shape[3]
    assert fake.shape == real.shape == (6, heads, value_dim)
    assert fake.stride() == real.stride() == (heads * value_dim, value_dim, 1)
    assert fake.dtype == real.dtype == torch.bfloat16


def test_f46_writes_happen_once_in_order_and_in_place_under_compile() -> None:
    both = torch.zeros(4, 2, 4, 1, 8)

    def step(k: Tensor, slots: Tensor) -> Tensor:
        k_cache, v_cache = both[:, 0], both[:, 1]
        ops.store_kv(k_cache, v_cache, k, k * 2, slots)
        first = k_cache[1, 0].clone()
        ops.store_kv(k_cache, v_cache, k + 10, k * 3, slots)
        return first

    address = both.data_ptr()
    k, slots = torch.ones(1, 1, 8), torch.tensor([4])
    torch._dynamo.reset()
    with torch.no_grad():
        first = torch.compile(step, fullgraph=True, backend="aot_eager")(k, slots)
    assert first.flatten().tolist() == [1.0] * 8
    assert both[1, 0, 0].flatten().tolist() == [11.0] * 8
    assert both[1, 1, 0].flatten().tolist() == [3.0] * 8
    assert both.data_ptr() == address
    assert both.count_nonzero() == 16


def test_f47_everything_traces_without_data_at_a_dynamic_batch() -> None:
    seen: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        seen.append(graph)
        return graph.forward

    cache = PagedKVCache(60, 4, 2, 16, dtype=torch.float32)

    def step(q: Tensor, kv: Tensor, table: Tensor, lens: Tensor) -> Tensor:
        meta = attention_metadata(table, lens, QueryLayout.uniform(3), 4)
        ops.store_kv(cache.k, cache.v, kv, kv, meta.slots)
        return ops.mha(q, cache.k, cache.v, table, lens, layout=meta.layout)

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    for batch in (5, 2, 3):
        lens = torch.full((batch,), 7, dtype=torch.int32)
        table = torch.arange(1, 7 * batch + 1, dtype=torch.int32).view(batch, 7)
        q, kv = torch.randn(3 * batch, 4, 16), torch.randn(3 * batch, 2, 16)
        for tensor in (q, kv, table, lens):
            torch._dynamo.mark_dynamic(tensor, 0)
        assert compiled(q, kv, table, lens).shape == (3 * batch, 4, 16)
    assert len(seen) == 1


@on_every_backend
def test_f49_bf16_is_judged_by_float64(backend: str) -> None:
    case = make_mha_case(seq_lens=(1000, 1500), query_lens=4, page_size=16, dtype=torch.bfloat16)
    assert case.check(backend) < 2**-7
