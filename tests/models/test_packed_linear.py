"""Packed CPU weights: equal to F.linear within rounding, in every case that falls back, and as weights change.

Every test but the last ones runs with the compiled kernels turned off, as on a machine without a compiler.

Run alone: OMP_NUM_THREADS=1 pytest tests/models/test_packed_linear.py
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from specops.models import packed_linear
from specops.models.packed_linear import MAX_ROWS, NATIVE_ROWS, PackedLinear, can_pack, pack_linears, unpack_linears
from specops.ops import native
from specops.spec import Engine, SpecConfig
from tests.compile.toys import tiny_draft
from tests.spec.toys import Shadow, greedy, small_llama, target_of

DTYPES = [dtype for dtype in (torch.float32, torch.bfloat16) if can_pack(torch.zeros(2, 2, dtype=dtype))]
needs_packing = pytest.mark.skipif(not DTYPES, reason="this build of torch has no oneDNN, so nothing is packed")
PROMPTS = [[1, 2, 3, 4, 5], [7] * 13, [9, 8]]


@pytest.fixture(autouse=True)
def without_kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    with contextlib.nullcontext() if "with_kernels" in request.fixturenames else native.disabled():
        yield


@pytest.fixture
def with_kernels() -> None:
    if native.library() is None:
        pytest.skip("there is no C compiler here, or SPECOPS_NATIVE=0")


@pytest.fixture
def packed_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Row counts of the products that went through a packed weight."""
    calls: list[int] = []
    plain = packed_linear._multiply

    def counted(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        calls.append(x.numel() // x.shape[-1])
        return plain(x, packed, bias)

    monkeypatch.setattr(packed_linear, "_multiply", counted)
    return calls


@needs_packing
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 2, 6, MAX_ROWS, MAX_ROWS + 1])
def test_a_product_is_that_of_float64(dtype: torch.dtype, bias: bool, rows: int, packed_calls: list[int]) -> None:
    linear = nn.Linear(96, 80, bias=bias).to(dtype).requires_grad_(False)
    x = torch.randn(rows, 96).to(dtype)
    expected = x.double() @ linear.weight.double().T + (linear.bias.double() if bias else 0)
    assert pack_linears(linear) == 1
    out = linear(x)
    assert out.dtype == dtype
    assert out.shape == (rows, 80)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    torch.testing.assert_close(out.double(), expected, **tolerance)
    fast = packed_linear.MIN_ROWS[dtype] <= rows <= MAX_ROWS
    assert packed_calls == ([rows] if fast else [])


@needs_packing
def test_leading_dims_and_strides_are_kept() -> None:
    linear = nn.Linear(96, 80).requires_grad_(False)
    x = torch.randn(3, 2, 192)[..., ::2]
    expected = linear(x)
    pack_linears(linear)
    torch.testing.assert_close(linear(x), expected, rtol=1e-5, atol=1e-5)


@needs_packing
@pytest.mark.parametrize("change", ["in place", "replaced", "loaded", "cast"])
def test_a_changed_weight_is_seen(change: str) -> None:
    linear, other = (nn.Linear(96, 80).requires_grad_(False) for _ in range(2))
    pack_linears(linear)
    x = torch.randn(4, 96)
    before = linear(x)
    if change == "in place":
        linear.weight.copy_(other.weight)
        linear.bias.copy_(other.bias)
    elif change == "replaced":
        linear.weight, linear.bias = other.weight, other.bias
    elif change == "loaded":
        linear.load_state_dict(other.state_dict())
    else:
        linear.double().load_state_dict(other.double().state_dict())
        x = x.double()
    torch.testing.assert_close(linear(x), other(x), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(linear(x).float(), before)


@needs_packing
def test_gradients_flow_as_without_packing(packed_calls: list[int]) -> None:
    linear = nn.Linear(96, 80)
    x = torch.randn(4, 96, requires_grad=True)
    pack_linears(linear)
    linear(x).sum().backward()
    torch.testing.assert_close(x.grad, linear.weight.detach().sum(0).expand(4, -1))
    assert packed_calls == []


@needs_packing
def test_packing_keeps_names_ties_and_identity_and_can_be_undone() -> None:
    target = target_of(small_llama(tie_word_embeddings=True))
    names = list(target.state_dict())
    modules = list(target.modules())
    assert pack_linears(target) == sum(type(module) is nn.Linear or isinstance(module, PackedLinear) for module in modules)
    assert pack_linears(target) > 0
    assert list(target.state_dict()) == names
    assert all(a is b for a, b in zip(target.modules(), modules, strict=True))
    assert target.lm_head.weight is target.embed_tokens.weight
    unpack_linears(target)
    assert not any(isinstance(module, PackedLinear) for module in target.modules())
    x = torch.randn(3, target.config.hidden_size)
    torch.testing.assert_close(target.compute_logits(x), x @ target.embed_tokens.weight.T, rtol=1e-5, atol=1e-5)


@needs_packing
def test_a_draft_heads_lm_head_is_packed_too(packed_calls: list[int]) -> None:
    draft = tiny_draft()
    hidden = torch.randn(4, draft.config.hidden_size)
    expected = draft.compute_logits(hidden)
    pack_linears(draft)
    torch.testing.assert_close(draft.compute_logits(hidden), expected, rtol=1e-5, atol=1e-5)
    assert packed_calls == [4]
    unpack_linears(draft)
    assert draft.packed_lm_head is None


def test_without_the_ops_or_the_memory_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = nn.Linear(8, 8)
    monkeypatch.setattr(packed_linear, "_free_memory", lambda: 100)
    assert pack_linears(linear) == 0
    monkeypatch.undo()
    monkeypatch.setattr(packed_linear, "can_pack", lambda weight: False)
    assert pack_linears(linear) == 0
    assert type(linear) is nn.Linear


def test_other_weights_are_refused() -> None:
    assert not can_pack(torch.zeros(2, 2, dtype=torch.float64))
    assert not can_pack(torch.zeros(2, 2, dtype=torch.float32, device="meta"))


@needs_packing
def test_compiled_code_takes_the_plain_product(packed_calls: list[int]) -> None:
    linear = nn.Linear(96, 80).requires_grad_(False)
    x = torch.randn(4, 96)
    expected = linear(x)
    pack_linears(linear)
    torch.testing.assert_close(torch.compile(linear, backend="eager", fullgraph=True)(x), expected)
    assert packed_calls == []


@needs_packing
@pytest.mark.parametrize("config", [SpecConfig(3), SpecConfig(2, 2, 5), None], ids=str)
def test_an_engine_packs_by_itself_and_ids_stay_those_of_transformers(
    config: SpecConfig | None, packed_calls: list[int]
) -> None:
    judge = small_llama()
    target = target_of(judge)
    engine = Engine(target, Shadow(target) if config else None, config, max_requests=3, max_context=64, page_size=4)
    requests = engine.generate(PROMPTS, max_new_tokens=12)
    assert [request.tokens for request in requests] == [greedy(judge, prompt, 12) for prompt in PROMPTS]
    assert packed_calls


def test_an_engine_told_so_packs_nothing(packed_calls: list[int]) -> None:
    target = target_of(small_llama())
    engine = Engine(target, max_requests=2, max_context=64, page_size=4, pack_weights=False)
    engine.generate(PROMPTS[:2], max_new_tokens=4)
    assert packed_calls == []


def test_a_packed_model_can_be_copied_and_the_copy_stands_alone() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(32, 48)).requires_grad_(False)
    pack_linears(model)
    x = torch.randn(4, 32)
    with torch.no_grad():
        expected = torch.nn.functional.linear(x, model[0].weight, model[0].bias)
        other = copy.deepcopy(model)
        other[0].weight.mul_(2)
        torch.testing.assert_close(model(x), expected)
        torch.testing.assert_close(other(x) - other[0].bias, 2 * (expected - model[0].bias))


@pytest.mark.usefixtures("with_kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [0, 1, 5, NATIVE_ROWS, NATIVE_ROWS + 1])
def test_with_the_kernels_nothing_is_packed(dtype: torch.dtype, rows: int, packed_calls: list[int]) -> None:
    linear = nn.Linear(96, 80).to(dtype).requires_grad_(False)
    x = torch.randn(rows, 96).to(dtype)
    expected = x.double() @ linear.weight.double().T + linear.bias.double()
    assert pack_linears(linear) == 1
    with torch.profiler.profile() as profile:
        out = linear(x)
    plain = "aten::linear" in {event.key for event in profile.key_averages()}
    assert plain == (rows > NATIVE_ROWS)
    assert (out.dtype, out.shape) == (dtype, (rows, 80))
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    assert packed_calls == []


@pytest.mark.usefixtures("with_kernels")
@pytest.mark.parametrize("case", ["gradient", "compiled", "double", "transposed", "fake"])
def test_what_the_kernels_do_not_serve_is_the_plain_product(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    linear = nn.Linear(96, 80).requires_grad_(case == "gradient")
    pack_linears(linear)
    monkeypatch.setattr(native, "linear", lambda *args: pytest.fail("the kernel was called"))
    x, run = torch.randn(4, 96), linear
    if case == "compiled":
        run = torch.compile(linear, backend="eager", fullgraph=True)
    elif case == "double":
        linear.double()
        x = x.double()
    elif case == "transposed":
        linear.weight = nn.Parameter(torch.randn(96, 80).T, requires_grad=False)
    elif case == "fake":
        with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
            assert linear(torch.empty(4, 96)).shape == (4, 80)
        return
    torch.testing.assert_close(run(x), x @ linear.weight.T + linear.bias, rtol=1e-5, atol=1e-5)
