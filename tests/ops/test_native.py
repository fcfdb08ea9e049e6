"""The compiled CPU kernels: values against float64, rows that don't depend on their neighbours, and life without them.

OMP_NUM_THREADS=1 pytest tests/ops/test_native.py
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specops import QueryLayout, ops
from specops.ops import native
from specops.testing import MHA_GRID, make_mha_case

needs_kernels = pytest.mark.skipif(native.library() is None, reason="no C compiler here, or SPECOPS_NATIVE=0")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@needs_kernels
@pytest.mark.parametrize("dtype", native.DTYPES, ids=str)
@pytest.mark.parametrize(("columns", "width"), [(1, 1), (3, 7), (8, 32), (13, 33), (21, 100), (64, 256)])
def test_a_product_is_that_of_float64(columns: int, width: int, dtype: torch.dtype) -> None:
    weight, bias = torch.randn(columns, width).to(dtype), torch.randn(columns).to(dtype)
    for rows in range(10):
        x = torch.randn(rows, width).to(dtype)
        expected = x.double() @ weight.double().T
        for given, more in ((None, 0), (bias, bias.double())):
            out = native.linear(x, weight, given)
            assert out.dtype == dtype
            tolerance = TOLERANCE[dtype]
            torch.testing.assert_close(out.double(), expected + more, rtol=tolerance, atol=10 * tolerance)


@needs_kernels
@pytest.mark.parametrize("dtype", native.DTYPES, ids=str)
def test_a_row_of_a_product_depends_on_nothing_beside_it(dtype: torch.dtype, threads: None) -> None:
    weight, x = torch.randn(70, 330).to(dtype), torch.randn(11, 330).to(dtype)
    expected = torch.cat([native.linear(row[None], weight) for row in x])
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        for rows in range(1, 12):
            assert torch.equal(native.linear(x[:rows], weight), expected[:rows])


@needs_kernels
def test_leading_dims_and_strides_of_the_input_are_kept() -> None:
    weight, x = torch.randn(8, 32), torch.randn(2, 3, 64)[..., ::2]
    torch.testing.assert_close(native.linear(x, weight), x @ weight.T, rtol=1e-5, atol=1e-5)


@needs_kernels
@pytest.mark.parametrize("dtype", native.DTYPES, ids=str)
@pytest.mark.parametrize("options", [{}, {"window": 150}, {"softcap": 5.0}], ids=str)
def test_a_verified_row_is_the_row_of_plain_decoding_bit_for_bit(dtype: torch.dtype, options: dict, threads: None) -> None:
    # Rows on both sides of a chunk's end; every row by itself, with its keys alone, is plain decoding.
    heads, kv_heads, dim, page, width = 6, 2, 32, 16, 5
    k, v = (torch.randn(40, page, kv_heads, dim).to(dtype) for _ in range(2))
    table = torch.randperm(39)[None, :30].int() + 1
    for last in (4, 130, 257, 258, 400):
        last = max(last, width)
        q = torch.randn(width, heads, dim).to(dtype)
        results: list[Tensor] = []
        for count in (1, 3):
            torch.set_num_threads(count)
            lens = torch.tensor([last], dtype=torch.int32)
            results.append(ops.mha(q, k, v, table, lens, layout=QueryLayout.uniform(width), backend="cpu", **options))
            rows = []
            for row in range(width):
                lens = torch.tensor([last - width + row + 1], dtype=torch.int32)
                one = QueryLayout.uniform(1)
                rows.append(ops.mha(q[row : row + 1], k, v, table, lens, layout=one, backend="cpu", **options))
            results.append(torch.cat(rows))
        assert all(torch.equal(result, results[0]) for result in results[1:])


@needs_kernels
@pytest.mark.parametrize("dtype", native.DTYPES, ids=str)
def test_long_contexts_many_requests_and_heads(dtype: torch.dtype) -> None:
    make_mha_case(seq_lens=(700, 0, 3, 129, 128), query_lens=6, num_heads=14, num_kv_heads=2, dtype=dtype).check("cpu")
    make_mha_case(seq_lens=(513, 64), query_lens=(30, 64), num_heads=4, num_kv_heads=4, dtype=dtype).check("cpu")


# Requests of more rows than are served row by row: their keys are turned, block by block.
PROMPTS = {
    "one": {"seq_lens": (70,), "query_lens": 70},
    "behind a cache": {"seq_lens": (300, 65), "query_lens": 65},
    "fewer keys than rows": {"seq_lens": (100, 66), "query_lens": 80},
    "beside decoding": {"seq_lens": (513, 200, 0, 66), "query_lens": (140, 1, 0, 66), "num_heads": 6},
    "window": {"seq_lens": (330,), "query_lens": 200, "window": 70},
    "window of one": {"seq_lens": (99,), "query_lens": 90, "window": 1},
    "softcap and sinks": {"seq_lens": (150, 90), "query_lens": (150, 70), "softcap": 5.0, "sinks": True},
    "tree": {"seq_lens": (150,), "query_lens": 70, "tree_width": 70},
    "hnd": {"seq_lens": (131,), "query_lens": 131, "hnd": True},
    "rows hold k and v": {"seq_lens": (77,), "query_lens": 77, "shared_storage": "rows", "strided_q": True},
    "many heads a group": {"seq_lens": (80,), "query_lens": 66, "num_heads": 40, "num_kv_heads": 1},
    "heads as many": {"seq_lens": (80,), "query_lens": 66, "num_heads": 3, "num_kv_heads": 3},
    **{f"dim {dim}": {"seq_lens": (100,), "query_lens": 70, "head_dim": dim} for dim in (16, 48, 80, 96, 256)},
    "two dims": {"seq_lens": (100,), "query_lens": 70, "head_dim": 64, "value_dim": 48},
}


@needs_kernels
@pytest.mark.parametrize("dtype", native.DTYPES, ids=str)
@pytest.mark.parametrize("name", PROMPTS)
def test_prompts(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, threads: None) -> None:
    monkeypatch.setattr("specops.ops.cpu._attention", lambda *args: pytest.fail("not the kernel"))
    for count in (1, 3):
        torch.set_num_threads(count)
        make_mha_case(**PROMPTS[name], dtype=dtype).check("cpu")


@needs_kernels
@pytest.mark.parametrize("dtype", native.DTYPES, ids=str)
def test_a_decoded_row_does_not_depend_on_the_prompt_beside_it(dtype: torch.dtype) -> None:
    case = make_mha_case(seq_lens=(200, 150), query_lens=(1, 90), dtype=dtype)
    tensors = case.tensors
    alone = ops.mha(
        tensors["q"][:1],
        tensors["k_cache"],
        tensors["v_cache"],
        tensors["page_table"][:1],
        tensors["seq_lens"][:1],
        layout=QueryLayout.uniform(1),
        backend="cpu",
    )
    assert torch.equal(case.run("cpu")[:1], alone)


@needs_kernels
def test_scores_far_apart_neither_overflow_nor_lose_the_largest() -> None:
    q = torch.full((1, 1, 16), 100.0)
    k = torch.zeros(3, 16, 1, 16)
    k[1, 5] = 100.0
    k[1, 6] = -100.0
    v = torch.randn(3, 16, 1, 16)
    table, lens = torch.tensor([[1, 2]], dtype=torch.int32), torch.tensor([20], dtype=torch.int32)
    out = ops.mha(q, k, v, table, lens, layout=QueryLayout.uniform(1), backend="cpu")
    assert torch.equal(out[0], v[1, 5])


@needs_kernels
def test_a_query_that_is_not_a_number_gives_none() -> None:
    case = make_mha_case(seq_lens=(300, 9), query_lens=1, num_heads=2, num_kv_heads=1)
    case.tensors["q"][0] = float("nan")
    out = case.run("cpu")
    assert out[0].isnan().all()
    assert not out[1].isnan().any()


@needs_kernels
def test_the_kernel_serves_the_calls_it_is_made_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specops.ops.cpu._attention", lambda *args: pytest.fail("not the kernel"))
    for name in ("window", "tree"):
        for dtype in native.DTYPES:
            make_mha_case(**MHA_GRID[name], dtype=dtype).check("cpu")


@pytest.mark.parametrize("name", MHA_GRID)
def test_attention_without_the_kernels(name: str) -> None:
    with native.disabled():
        make_mha_case(**MHA_GRID[name]).check("cpu")


def test_nothing_is_served_behind_the_back_of_who_traces_or_records() -> None:
    x = torch.randn(2, 2)
    assert native.usable(x)
    assert not native.usable(x, torch.randn(2, device="meta"))
    assert not native.usable(x, torch.randn(2, requires_grad=True))
    with torch.no_grad():
        assert native.usable(x, torch.randn(2, requires_grad=True))
    with torch._subclasses.FakeTensorMode():
        assert not native.usable(x)
    with torch.autocast("cpu"):
        assert not native.usable(x)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Loading starts anew, with an empty cache folder."""
    monkeypatch.setenv("SPECOPS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("SPECOPS_NATIVE", raising=False)
    monkeypatch.delenv("CC", raising=False)
    kept = native._load
    monkeypatch.setattr(native, "_load", functools.cache(kept.__wrapped__))
    return tmp_path


@pytest.mark.parametrize("compiler", ["missing", "absent", "failing"])
def test_without_a_compiler_it_is_said_once_and_everything_runs(
    compiler: str, fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if compiler == "missing":
        monkeypatch.setattr(native.shutil, "which", lambda name: None)
        expected = "there is no C compiler"
    elif compiler == "absent":
        monkeypatch.setenv("CC", str(fresh / "no-such-compiler"))
        expected = "could not be run"
    else:
        script = fresh / "compiler"
        script.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "it is broken" >&2\nexit 3\n')
        script.chmod(0o755)
        monkeypatch.setenv("CC", str(script))
        expected = "failed .it is broken"
    with pytest.warns(RuntimeWarning, match=expected):
        assert native.library() is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert native.library() is None
        make_mha_case(query_lens=2).check("cpu")
    with pytest.raises(native.NativeUnavailable, match=r"use F\.linear"):
        native.linear(torch.randn(1, 4), torch.randn(4, 4))


def test_turned_off_is_silent(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECOPS_NATIVE", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert native.library() is None
    assert not (fresh / "cache").exists()


@needs_kernels
def test_compiled_once_and_anew_for_another_source(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    run = native._run

    def counted(command: list[str]) -> str:
        commands.append(command)
        return run(command)

    monkeypatch.setattr(native, "_run", counted)
    monkeypatch.setattr(native, "FLAGS", ("-O0", *native.FLAGS[1:2], "-std=gnu11", "-fPIC", "-fopenmp", "-O0"))
    first = native.compiled()
    compiles = [command for command in commands if "-c" in command]
    assert len(compiles) == 1
    assert native.compiled() == first
    assert [command for command in commands if "-c" in command] == compiles
    assert list(first.parent.iterdir()) == [first]
    source = fresh / "native.c"
    source.write_text("int specops_native_version(void) { return 0; }\n")
    monkeypatch.setattr(native, "SOURCE", source)
    assert native.compiled() != first
    with pytest.warns(RuntimeWarning, match="another version"):
        assert native.library() is None


@needs_kernels
@pytest.mark.parametrize("dtype", native.DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [1, 5, 16, 33, 1000])
def test_likeliest_tokens_are_those_of_a_sort(vocab: int, dtype: torch.dtype) -> None:
    # Few values, so that many are equal: a stable sort puts the least token first.
    logits = torch.randint(-8, 8, (5, vocab)).to(dtype) / 4
    order = logits.double().sort(dim=1, descending=True, stable=True)
    for k in {1, min(2, vocab), min(7, vocab)}:
        values, tokens = native.top_tokens(logits, k)
        assert torch.equal(tokens, order.indices[:, :k])
        assert torch.equal(values.double(), order.values[:, :k])
        values, tokens = native.top_tokens(logits, k, logprobs=True)
        assert torch.equal(tokens, order.indices[:, :k])
        expected = logits.double().log_softmax(dim=1).gather(1, tokens)
        torch.testing.assert_close(values.double(), expected, rtol=1e-5, atol=1e-5)


@needs_kernels
def test_infinite_logits_and_those_that_are_no_number() -> None:
    inf, nan = float("inf"), float("nan")
    logits = torch.full((3, 40), -inf)
    logits[1, 30], logits[1, 35] = 2.0, 1.0
    logits[2, 33], logits[2, 4] = nan, 7.0
    values, tokens = native.top_tokens(logits, 2)
    assert tokens[0].tolist() == [0, 1]
    assert (tokens[1].tolist(), values[1].tolist()) == ([30, 35], [2.0, 1.0])
    assert tokens[2].tolist() == [33, 4]
    assert native.top_tokens(logits, 2, logprobs=True)[0][1].tolist() == pytest.approx([-0.3132617, -1.3132617])
    assert native.top_tokens(logits, native.MAX_RANKS + 1) is None


def test_it_is_known_beforehand_whether_compiling_comes_first(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECOPS_NATIVE", "0")
    assert not native.must_compile()
    monkeypatch.delenv("SPECOPS_NATIVE")
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    assert not native.must_compile()
    script = fresh / "compiler"
    script.write_text("#!/bin/sh\nexit 0\n")
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))
    assert native.must_compile()
    with native.disabled():
        assert not native.must_compile()
    native._plan()[1].write_bytes(b"")
    assert not native.must_compile()
