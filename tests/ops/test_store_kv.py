"""Writes into paged caches, eager and compiled, against a loop in plain Python.

OMP_NUM_THREADS=1 pytest tests/ops/test_store_kv.py
"""

from __future__ import annotations

import contextlib
import importlib
import math
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._inductor.compile_fx import compile_fx
from torch._inductor.utils import run_and_get_code

from specops import PagedKVCache, QueryLayout, attention_metadata, ops
from specops.ops import native
from specops.testing import make_mha_case

FP8 = torch.float8_e4m3fn
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
pytestmark = pytest.mark.parametrize("device", DEVICES)


@contextlib.contextmanager
def portable_kernels() -> Iterator[None]:
    """Run the ops' device-independent kernels on the CPU, which has kernels of its own."""
    module = importlib.import_module("specops.ops.store_kv")
    with warnings.catch_warnings(), torch.library._scoped_library("specops", "IMPL") as library:
        warnings.simplefilter("ignore", UserWarning)
        for name, kernel in (("store_kv", module._store_kv), ("store_latent", module._store_latent)):
            library.impl(name, kernel, "CPU", allow_override=True)
        yield


def expected_cache(cache: Tensor, rows: Tensor, slots: Tensor, scale: float | None = None) -> Tensor:
    """The cache after the writes, one entry after another, in float64."""
    result, page_size = cache.double().clone(), cache.shape[1]
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            value = rows[row].double() if scale is None else (rows[row].float() / scale).double().clamp(-448, 448)
            result[slot // page_size, slot % page_size] = value.to(cache.dtype).double()
    return result


def caches(layout: str, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """K and V caches of 6 pages of 4 tokens, 2 heads, dims 8 and 8, filled with distinct numbers."""
    shape = {"nhd": (6, 4, 2, 8), "hnd": (6, 2, 4, 8), "rows": (6, 4, 2, 16), "pages": (6, 2, 4, 2, 8)}[layout]
    count = 2 if layout in ("nhd", "hnd") else 1
    made = [(torch.randn(shape, device=device) * 4).to(dtype) for _ in range(count)]
    if layout == "hnd":
        return made[0].transpose(1, 2), made[1].transpose(1, 2)
    if layout == "rows":
        return made[0][..., :8], made[0][..., 8:]
    if layout == "pages":
        return made[0][:, 0], made[0][:, 1]
    return made[0], made[1]


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8], ids=str)
@pytest.mark.parametrize("layout", ["nhd", "hnd", "rows", "pages"])
@pytest.mark.parametrize("kernels", [True, False])
def test_each_row_lands_in_its_slot_and_nothing_else_changes(
    kernels: bool, layout: str, dtype: torch.dtype, index_dtype: torch.dtype, device: str
) -> None:
    k_cache, v_cache = caches(layout, dtype, device)
    projection = torch.randn(5, 64, device=device)
    k, v = projection[:, 16:32].view(5, 2, 8), torch.randn(10, 2, 8, device=device)[::2]
    slots = torch.tensor([9, -1, 23, 4, -7], dtype=index_dtype, device=device)
    scale = 0.25 if dtype == FP8 else None
    expected = expected_cache(k_cache, k, slots, scale), expected_cache(v_cache, v, slots, scale)
    scales = {} if scale is None else {name: torch.tensor([scale], device=device) for name in ("k_scale", "v_scale")}
    with contextlib.nullcontext() if kernels else native.disabled():
        ops.store_kv(k_cache, v_cache, k, v, slots, **scales)
    assert torch.equal(k_cache.double(), expected[0])
    assert torch.equal(v_cache.double(), expected[1])


@pytest.mark.parametrize("kernels", [True, False])
def test_rows_are_cast_to_the_caches_dtype(kernels: bool, device: str) -> None:
    k_cache, v_cache = caches("nhd", torch.bfloat16, device)
    rows = torch.randn(2, 2, 8, device=device)
    slots = torch.tensor([3, 17], device=device)
    expected = expected_cache(k_cache, rows, slots), expected_cache(v_cache, rows.half(), slots)
    with contextlib.nullcontext() if kernels else native.disabled():
        ops.store_kv(k_cache, v_cache, rows, rows.half(), slots)
    assert torch.equal(k_cache.double(), expected[0])
    assert torch.equal(v_cache.double(), expected[1])


@pytest.mark.parametrize("kernels", [True, False])
def test_a_slot_behind_the_cache_is_an_error_on_a_cpu(kernels: bool, device: str) -> None:
    if device != "cpu":
        pytest.skip("a GPU's kernel reads no slot on the host")
    k_cache, v_cache = caches("nhd", torch.float32, device)
    rows = torch.randn(1, 2, 8)
    before = k_cache.clone()
    with contextlib.nullcontext() if kernels else native.disabled(), pytest.raises(IndexError):
        ops.store_kv(k_cache, v_cache, rows, rows, torch.tensor([24]))
    assert torch.equal(k_cache, before)


@settings(max_examples=100, deadline=None)
@given(slots=st.lists(st.integers(-2, 23), max_size=8, unique_by=lambda slot: slot if slot >= 0 else object()))
@pytest.mark.parametrize("portable", [False, True])
def test_any_slots(portable: bool, device: str, slots: list[int]) -> None:
    k_cache, v_cache = caches("nhd", torch.float32, device)
    k, v = torch.randn(len(slots), 2, 8, device=device), torch.randn(len(slots), 2, 8, device=device)
    index = torch.tensor(slots, dtype=torch.int64, device=device)
    expected = expected_cache(k_cache, k, index), expected_cache(v_cache, v, index)
    with portable_kernels() if portable and device == "cpu" else contextlib.nullcontext():
        ops.store_kv(k_cache, v_cache, k, v, index)
    assert torch.equal(k_cache.double(), expected[0])
    assert torch.equal(v_cache.double(), expected[1])


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_padded_rows_of_nan_write_no_page(portable: bool, index_dtype: torch.dtype, device: str) -> None:
    k_cache, v_cache = caches("nhd", torch.float32, device)
    before = k_cache.clone(), v_cache.clone()
    nan = torch.full((3, 2, 8), float("nan"), device=device)
    with portable_kernels() if portable and device == "cpu" else contextlib.nullcontext():
        ops.store_kv(k_cache, v_cache, nan, nan, torch.full((3,), -1, dtype=index_dtype, device=device))
    assert torch.equal(k_cache, before[0])
    assert torch.equal(v_cache, before[1])


@pytest.mark.parametrize("portable", [False, True])
def test_fp8_saturates_and_keeps_nan(portable: bool, device: str) -> None:
    k_cache, v_cache = (torch.zeros(2, 4, 1, 4, dtype=FP8, device=device) for _ in range(2))
    rows = torch.tensor([[1e6, -1e6, 0.5, float("nan")]], device=device)[:, None]
    with portable_kernels() if portable and device == "cpu" else contextlib.nullcontext():
        ops.store_kv(
            k_cache, v_cache, rows, rows, torch.tensor([4], device=device), k_scale=torch.tensor([0.5], device=device)
        )
    assert k_cache[1, 0, 0, :3].tolist() == [448.0, -448.0, 1.0]
    assert v_cache[1, 0, 0, :3].tolist() == [448.0, -448.0, 0.5]
    assert k_cache[1, 0, 0, 3].isnan()


def test_latent_and_rope_share_a_row(device: str) -> None:
    cache = torch.zeros(3, 4, 6, device=device)
    latent, rope = torch.randn(3, 4, device=device), torch.randn(3, 2, device=device)
    ops.store_latent(cache, latent, rope, torch.tensor([5, -1, 11], device=device))
    expected = torch.zeros(12, 6, device=device)
    expected[5], expected[11] = torch.cat((latent[0], rope[0])), torch.cat((latent[2], rope[2]))
    assert torch.equal(cache.flatten(0, 1), expected)


@settings(max_examples=100, deadline=None)
@given(pairs=st.lists(st.tuples(st.integers(-1, 23), st.integers(-1, 23)), max_size=8, unique_by=lambda pair: pair[1]))
@pytest.mark.parametrize("dtype", [torch.float32, FP8], ids=str)
def test_moves_read_everything_before_they_write(dtype: torch.dtype, device: str, pairs: list[tuple[int, int]]) -> None:
    k_cache, v_cache = caches("hnd", dtype, device)
    latent = k_cache[..., 0, :].contiguous()
    expected = {id(cache): cache.double().flatten(0, 1).clone() for cache in (k_cache, v_cache, latent)}
    for cache in (k_cache, v_cache, latent):
        old = cache.double().flatten(0, 1)
        for source, target in pairs:
            if source >= 0 and target >= 0:
                expected[id(cache)][target] = old[source]
    source, target = (torch.tensor([pair[i] for pair in pairs], dtype=torch.int64, device=device) for i in (0, 1))
    ops.move_kv(k_cache, v_cache, source, target)
    ops.move_latent(latent, source, target)
    for cache in (k_cache, v_cache, latent):
        assert torch.equal(cache.double().flatten(0, 1), expected[id(cache)])


def test_overlapping_ranges_shift_by_one(device: str) -> None:
    cache = torch.arange(8.0, device=device).view(2, 4, 1, 1).clone()
    other = cache.clone()
    ops.move_kv(cache, other, torch.arange(1, 6, device=device), torch.arange(2, 7, device=device))
    assert cache.flatten().tolist() == [0, 1, 1, 2, 3, 4, 5, 7]
    ops.move_kv(cache, other, torch.arange(2, 7, device=device), torch.arange(1, 6, device=device))
    assert cache.flatten().tolist() == [0, 1, 2, 3, 4, 5, 5, 7]


class Layer(torch.nn.Module):
    """Store, then attend: what a decoder layer does with its cache."""

    def __init__(self, cache: PagedKVCache) -> None:
        super().__init__()
        self.cache = cache

    def forward(self, q: Tensor, k: Tensor, v: Tensor, page_table: Tensor, seq_lens: Tensor, layout: QueryLayout) -> Tensor:
        meta = attention_metadata(page_table, seq_lens, layout, self.cache.page_size)
        ops.store_kv(self.cache.k, self.cache.v, k, v, meta.slots)
        return ops.mha(q, self.cache.k, self.cache.v, page_table, seq_lens, layout=layout)


def layer_inputs(batch: int, rows: int, device: str) -> tuple[Any, ...]:
    case = make_mha_case(
        seq_lens=[9 + 4 * b for b in range(batch)],
        query_lens=rows,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        spare_columns=10 - batch,
        device=device,
    )
    k, v = (torch.randn(batch * rows, 2, 16, device=device) for _ in range(2))
    return case.tensors["q"], k, v, case.tensors["page_table"], case.tensors["seq_lens"], case.layout


def run_both(step: Callable[..., Tensor], cache: PagedKVCache, inputs: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """Output of the compiled step and of eager code, from the same cache; the caches must agree afterwards too."""
    before = cache.k.clone(), cache.v.clone()
    out = step(*inputs)
    after = cache.k.clone(), cache.v.clone()
    cache.k.copy_(before[0])
    cache.v.copy_(before[1])
    eager = Layer(cache)(*inputs)
    assert torch.equal(cache.k, after[0])
    assert torch.equal(cache.v, after[1])
    assert not torch.equal(after[0], before[0]), "the write must have happened"
    return out, eager


def test_batches_1_to_8_equal_eager_and_take_at_most_two_graphs(device: str) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    cache = PagedKVCache(80, 4, 2, 16, dtype=torch.float32, device=device)
    graphs = 0

    def counting(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        nonlocal graphs
        graphs += 1
        return compile_fx(module, inputs)

    step = torch.compile(Layer(cache), backend=counting, fullgraph=True)
    with torch.no_grad():
        for batch in (3, 8, 1, 2, 5, 4, 7, 6):
            inputs = layer_inputs(batch, 3, device)
            for tensor in inputs[:5]:
                if batch > 1:
                    torch._dynamo.mark_dynamic(tensor, 0)
            out, eager = run_both(step, cache, inputs)
            torch.testing.assert_close(out, eager, rtol=1e-5, atol=1e-5)
    assert graphs <= 2
    assert torch._dynamo.utils.counters["graph_break"] == {}


def test_automatic_dynamic_batch_takes_at_most_three_graphs(device: str) -> None:
    # Static for the first batch, dynamic from the second on, and batch 1 by itself, as torch specialises it.
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    cache = PagedKVCache(80, 4, 2, 16, dtype=torch.float32, device=device)
    step = torch.compile(Layer(cache), fullgraph=True)
    with torch.no_grad():
        for batch in (2, 3, 8, 5, 4, 7, 6, 1):
            out, eager = run_both(step, cache, layer_inputs(batch, 3, device))
            torch.testing.assert_close(out, eager, rtol=1e-5, atol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3


@pytest.mark.parametrize("storage", ["separate", "one"])
def test_generated_code_writes_once_in_place_and_clones_no_pool(storage: str, device: str) -> None:
    torch._dynamo.reset()
    if storage == "separate":
        k_cache, v_cache = (torch.zeros(50, 4, 2, 16, device=device) for _ in range(2))
    else:
        both = torch.zeros(50, 2, 4, 2, 16, device=device)
        k_cache, v_cache = both[:, 0], both[:, 1]

    page_table = torch.tensor([[1]], dtype=torch.int32, device=device)
    seq_lens = torch.tensor([1], dtype=torch.int32, device=device)

    def attend(q: Tensor) -> Tensor:
        return ops.mha(q, k_cache, v_cache, page_table, seq_lens, layout=QueryLayout.uniform(1))

    def step(q: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        ops.store_kv(k_cache, v_cache, k, v, slots)
        before = attend(q)
        ops.store_kv(k_cache, v_cache, k + 1, v + 1, slots)
        return before, attend(q)

    q, k, v = (torch.randn(rows, 2, 16, device=device) for rows in (1, 2, 2))
    slots = torch.tensor([4, -1], device=device)
    with torch.no_grad():
        (before, after), codes = run_and_get_code(torch.compile(step, fullgraph=True), q, k, v, slots)
    # One key alone: attention returns its value.
    torch.testing.assert_close(before, v[:1])
    torch.testing.assert_close(after, v[:1] + 1)
    code = "\n".join(codes)
    assert code.count("torch.ops.specops.store_kv.default(") == 2
    shapes = re.findall(r"empty_strided\w*\(\(([\d, ]+?),? ?\)", code)
    sizes = [math.prod(map(int, shape.split(", "))) for shape in shapes]
    assert sizes, "k + 1 and v + 1 are allocated"
    assert max(sizes) < k_cache.numel(), f"a buffer as large as the pool was allocated: {shapes}"
    assert "copy_" not in code.replace("copy_misaligned", ""), "the pool is written in place"


def test_a_store_whose_result_nobody_reads_is_kept(device: str) -> None:
    torch._dynamo.reset()
    cache = PagedKVCache(4, 4, 2, 16, dtype=torch.float32, device=device)

    def step(k: Tensor, v: Tensor, slots: Tensor) -> Tensor:
        ops.store_kv(cache.k, cache.v, k, v, slots)
        return k.sum()

    k = torch.randn(1, 2, 16, device=device)
    with torch.no_grad():
        torch.compile(step, fullgraph=True)(k, k, torch.tensor([6], device=device))
    assert torch.equal(cache.k[1, 2], k[0])


def error(call: Callable[..., Any], *args: Any) -> str:
    with pytest.raises((ValueError, TypeError)) as caught:
        call(*args)
    return f"{caught.type.__name__}: {caught.value}"


def test_errors_say_what_was_given_and_what_is_needed(device: str) -> None:
    if device != "cpu":
        pytest.skip("messages do not depend on the device")
    k_cache, rows, slots = torch.zeros(3, 4, 2, 8), torch.zeros(5, 2, 8), torch.zeros(5, dtype=torch.int64)
    messages = [
        error(ops.store_kv, k_cache, torch.zeros(3, 8, 2, 8), rows, rows, slots),
        error(ops.store_kv, k_cache, k_cache, torch.zeros(5, 2, 4), rows, slots),
        error(ops.store_kv, k_cache, k_cache, rows, torch.zeros(5, 16), slots),
        error(ops.store_kv, k_cache, k_cache, rows, rows[:4], slots),
        error(ops.store_kv, k_cache, k_cache, rows, rows, slots.float()),
        error(ops.store_kv, k_cache, k_cache, rows, rows, slots[:4]),
        error(ops.store_latent, torch.zeros(3, 4, 6), torch.zeros(5, 4), torch.zeros(5, 1), slots),
        error(ops.store_latent, torch.zeros(3, 4, 1, 6), torch.zeros(5, 4), torch.zeros(5, 2), slots),
        error(ops.move_kv, k_cache, k_cache, slots, slots[:3]),
        error(ops.move_latent, torch.zeros(3, 4, 6), slots.to(torch.int16), slots),
    ]
    assert_expected_inline(
        "\n".join(messages),
        """\
ValueError: k_cache must be [P, S, Hkv, D] and v_cache [P, S, Hkv, Dv], got (3, 4, 2, 8) and (3, 8, 2, 8)
ValueError: k must be [T, 2, 8], got (5, 2, 4)
ValueError: v must be [T, 2, 8], got (5, 16)
ValueError: k has 5 rows and v 4; they must be equal
TypeError: slots must be int32 or int64, got torch.float32
ValueError: slots must be [5], got (4,)
ValueError: latent (5, 4) and rope (5, 1) do not fill kv_cache (3, 4, 6)
ValueError: kv_cache must be [P, S, Dc + Dr], latent [T, Dc] and rope [T, Dr], got (3, 4, 1, 6), (5, 4) and (5, 2)
ValueError: slots must be [3], got (5,)
TypeError: slots must be int32 or int64, got torch.int16""",
    )
