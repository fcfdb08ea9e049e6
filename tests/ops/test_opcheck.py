"""torch.library.opcheck of every op over every optional argument, and fakes that equal the real thing.

A fake that differs from its kernel in shape, dtype or stride shows up as garbage inside a compiled graph, so strides are
compared one by one here as well.

OMP_NUM_THREADS=1 pytest tests/ops/test_opcheck.py
With TRITON_INTERPRET=1 the Triton backends are checked on the CPU as well.
"""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.library import opcheck

from specops import ops
from specops.ops.backends import Backend
from specops.ops.builtin import BUILTIN
from specops.testing import make_mha_case, make_mla_case

FP8 = torch.float8_e4m3fn
Call = tuple[tuple[Any, ...], dict[str, Any]]

# Each optional argument alone, all that go together, both layouts, and views in place of contiguous tensors.
SHARED: dict[str, dict[str, Any]] = {
    "uniform": {"query_lens": 3},
    "packed": {"query_lens": (3, 2)},
    "window": {"query_lens": 2, "window": 3},
    "softcap": {"query_lens": (1, 2), "softcap": 2.0},
    "sinks": {"query_lens": 2, "sinks": True},
    "tree": {"query_lens": 3, "tree_width": 3},
    "wide-tree": {"query_lens": 2, "tree_width": 5},
    "fp8": {"query_lens": 2, "fp8": True},
    "all": {"query_lens": 2, "tree_width": 4, "window": 6, "softcap": 3.0, "sinks": True, "fp8": True, "strided_q": True},
    "strided-q": {"query_lens": 2, "strided_q": True},
}
MHA = {
    **SHARED,
    "transposed-caches": {"query_lens": (2, 1), "hnd": True},
    "value-dim": {"query_lens": 2, "value_dim": 8, "strided_q": True},
    "one-storage": {"query_lens": 2, "shared_storage": "rows"},
}
MLA = {**SHARED, "wider-rows": {"query_lens": 2, "padded_rows": True}}
SMALL_MHA = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "poison": False}
SMALL_MLA = {"num_heads": 2, "latent_dim": 16, "rope_dim": 8, "poison": False}


def attention_call(family: str, name: str) -> Call:
    case = make_mha_case(**{**SMALL_MHA, **MHA[name]}) if family == "mha" else make_mla_case(**{**SMALL_MLA, **MLA[name]})
    return case.op_args()


def runs_here(backend: Backend) -> bool:
    limits = backend.capabilities
    interpreted = "cpu" in limits.interpreted_on and os.environ.get("TRITON_INTERPRET") == "1"
    return ("cpu" in limits.device_types or interpreted) and not limits.missing_packages()


ATTENTION = [
    pytest.param(backend, name, id=f"{backend.op_name}-{name}")
    for backend in BUILTIN
    if runs_here(backend)
    for name in (MHA if backend.family == "mha" else MLA)
]


def store_calls() -> Iterator[tuple[str, str, Call]]:
    """Op, case name and call of everything that mutates a cache."""
    for dtype in (torch.float32, torch.bfloat16, FP8):
        scale = torch.tensor([0.5]) if dtype == FP8 else None
        caches = (torch.zeros(5, 4, 2, 8).to(dtype), torch.zeros(5, 4, 2, 16).to(dtype))
        rows = (torch.randn(3, 2, 8), torch.randn(3, 2, 16))
        for slots in (torch.tensor([4, -1, 9]), torch.tensor([4, 5, 19], dtype=torch.int32)):
            name = f"{dtype}-{slots.dtype}"
            yield "store_kv", name, ((*caches, *rows, slots), {"k_scale": scale, "v_scale": scale})
        latent = (torch.zeros(5, 4, 24).to(dtype), torch.randn(3, 16), torch.randn(3, 8), torch.tensor([4, -1, 9]))
        yield "store_latent", f"{dtype}", (latent, {"kv_scale": scale})
        pairs = (torch.tensor([4, 5, -1]), torch.tensor([5, 6, 7]))
        yield "move_kv", f"{dtype}", ((*caches, *pairs), {})
        yield "move_latent", f"{dtype}", ((latent[0], *pairs), {})
    without_scale = (torch.zeros(5, 4, 2, 8).to(FP8), torch.zeros(5, 4, 2, 8).to(FP8), *(torch.randn(3, 2, 8),) * 2)
    yield "store_kv", "fp8-without-scale", ((*without_scale, torch.tensor([4, 5, 6])), {})
    fused = torch.zeros(5, 2, 4, 2, 8)
    projection = torch.randn(3, 64)
    views = (projection[:, :16].view(3, 2, 8), projection[:, 32:48].view(3, 2, 8))
    yield "store_kv", "views-of-one-storage", ((fused[:, 0], fused[:, 1], *views, torch.tensor([4, 5, -1])), {})
    hnd = (torch.zeros(5, 2, 4, 8).transpose(1, 2), torch.zeros(5, 2, 4, 8).transpose(1, 2))
    yield "store_kv", "hnd", ((*hnd, *views, torch.tensor([4, 5, -1])), {})
    yield "move_kv", "hnd", ((*hnd, torch.tensor([4, 5]), torch.tensor([5, 6])), {})
    yield "store_kv", "no-row", ((*hnd, *(torch.randn(0, 2, 8),) * 2, torch.tensor([], dtype=torch.int64)), {})


def tree_calls() -> Iterator[tuple[str, str, Call]]:
    tokens, parents = torch.tensor([[3, 4, 5, 6]] * 2), torch.tensor([[-1, -1, 0, 1]] * 2)
    scores = torch.tensor([[-0.1, -0.2, -0.3, -0.4], [-0.5, -0.1, -0.6, -0.1]])
    for nodes in (1, 3, 5):
        yield "build_tree", f"{nodes}-nodes", ((torch.tensor([1, 2]), tokens, scores, parents, nodes, 2), {})
    yield "build_tree", "no-links", ((torch.tensor([1, 2]), tokens, scores, parents, 4, 2), {"links": False})
    views = (torch.tensor([[1, 9], [2, 9]])[:, 0], tokens.T.contiguous().T, scores.T.contiguous().T, parents, 4, 2)
    yield "build_tree", "views", (views, {})
    built = torch.ops.specops.build_tree(torch.tensor([1, 2]), tokens, scores, parents, 5, 2)
    chosen = torch.tensor([[3, 5, 6, 7, 8]] * 2)
    yield "verify_greedy", "tree", ((built[0], built[1], built[2], chosen, 2), {})
    yield "verify_greedy", "views", ((built[0].T.contiguous().T, built[1], built[2], chosen.T.contiguous().T, 3), {})
    probs, uniforms = torch.rand(2, 2, 5, 7).softmax(dim=3), torch.rand(2, 5)
    yield "verify_sampling", "picked", ((built[0], built[1], probs[0], None, uniforms, uniforms[:, 0], 2), {})
    yield "verify_sampling", "drawn", ((built[0], built[1], probs[0], probs[1], uniforms, uniforms[:, 0], 2), {})
    strided = probs[0].transpose(1, 2).contiguous().transpose(1, 2)
    yield "verify_sampling", "views", ((built[0].T.contiguous().T, built[1], strided, None, uniforms, uniforms[:, 3], 3), {})


def projection_calls() -> Iterator[tuple[str, str, Call]]:
    x, weight, norm = torch.randn(3, 24)[:, :16], torch.randn(20, 16), torch.randn(16)
    optional = {
        "plain": {},
        "norm": {"norm_weight": norm, "norm_eps": 1e-5, "norm_offset": 1.0},
        "bias": {"bias": torch.randn(20)},
        "gate": {"gate": "gelu_pytorch_tanh"},
        "residual": {"residual": torch.randn(3, 20)},
        "all": {"norm_weight": norm, "bias": torch.randn(20), "gate": "silu", "residual": torch.randn(3, 10)},
    }
    for name, options in optional.items():
        yield "rms_norm_linear", name, ((x, weight), options)
    caches, table = (torch.zeros(5, 4, 2, 4), torch.zeros(5, 4, 2, 4)), torch.randn(2, 3, 1, 2)
    call = (*caches, x, torch.randn(24, 16), *table, torch.tensor([4, -1, 6]), 2)
    scales = {"k_scale": torch.tensor([0.5]), "v_scale": torch.tensor([0.25])}
    yield "project_qkv", "plain", (call, {})
    yield "project_qkv", "norm and bias", (call, {"norm_weight": norm, "bias": torch.randn(24)})
    half = tuple(cache.to(FP8) for cache in caches)
    yield "project_qkv", "fp8", ((*half, *call[2:]), scales)
    for name, logprobs in (("logits", False), ("logprobs", True)):
        yield "top_tokens", name, ((torch.randn(3, 40)[:, ::2], 4, logprobs), {})
    layers = ([torch.randn(5, 4, 2, 8) for _ in range(2)], [torch.randn(5, 4, 2, 8) for _ in range(2)])
    yield "move_kv_layers", "two", ((*layers, torch.tensor([4, 5, -1]), torch.tensor([5, 6, 7])), {})


def beam_calls() -> Iterator[tuple[str, str, Call]]:
    found = torch.zeros(2, 12, dtype=torch.int64), torch.zeros(2, 12), torch.zeros(2, 12, dtype=torch.int64)
    logits, rows = torch.randn(4, 22)[:, ::2], torch.tensor([3, 0])
    yield "expand_beam", "first", ((*found, logits[:2], 2), {})
    yield "expand_beam", "first-rows", ((*found, logits, 2, rows), {})
    past = torch.randn(2, 2), torch.tensor([[1, 0], [0, 1]]), torch.eye(2, dtype=torch.bool).repeat(2, 1)
    yield "expand_beam", "second", ((*found, logits, 2, None, *past), {})
    wider = [torch.cat((tensor, tensor), dim=1) for tensor in found]
    views = [tensor[:, :12] for tensor in wider]
    yield "expand_beam", "views", ((*views, logits, 2, None, *past[:2], past[2].repeat(1, 2)), {})


def round_end_calls() -> Iterator[tuple[str, str, Call]]:
    index, tokens = torch.tensor([[0, 2, -1, 9], [0, 1, 3, 9]])[:, :3], torch.tensor([[5, 6, 0], [7, 8, 9]])
    lens, table = torch.tensor([9, 0], dtype=torch.int32), torch.tensor([[1, 2, 3], [0, 0, 0]], dtype=torch.int32)
    best, hidden = torch.randn(8, 2), torch.randn(8, 7)[:, :5]
    for name, moves in (("chain", False), ("tree", True)):
        yield "hand_on", name, ((index, tokens, best, hidden, lens, table, 4, 4, moves), {})
    yield "hand_on", "as-wide", ((index.clamp(max=2), tokens, best[:6], hidden[:6], lens, table, 3, 4, True), {})
    state = torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int64), torch.zeros(4, 6), torch.zeros(4, 5)
    accepted = torch.tensor([2, 3], dtype=torch.int32)
    left = (torch.tensor([2, 0]), lens, accepted, tokens, torch.randn(2, 8)[:, :6], torch.randn(2, 5))
    for count in range(3):
        yield "commit_round", f"{count}-scores", ((*state, *left, [torch.randn(2, 3) for _ in range(count)]), {})


def place_calls() -> Iterator[tuple[str, str, Call]]:
    table = torch.tensor([[1, 2, 3, 9], [4, 0, 5, 9]], dtype=torch.int32)[:, :3]
    lens, depths = torch.tensor([7, 0], dtype=torch.int32), torch.tensor([0, 1, 1, 0, 1, 2])
    yield "row_places", "rows", ((table, lens, 3, 4), {})
    yield "row_places", "growing", ((table, lens, 3, 4, 3), {})
    yield "row_places", "one-depth", ((table, lens, 3, 4, 3, 2), {})
    yield "row_places", "depths", ((table, lens, 3, 4, 0, 3, depths), {})
    yield "row_places", "depth-views", ((table, lens, 3, 4, 0, 3, depths.repeat_interleave(2)[::2]), {})
    yield "take_requests", "rows", ((table, lens, torch.tensor([8, 9]), torch.tensor([1, 0, 1]), 4), {})


OTHER = [
    pytest.param(op, call, id=f"{op}-{name}")
    for op, name, call in (
        *store_calls(),
        *tree_calls(),
        *projection_calls(),
        *beam_calls(),
        *place_calls(),
        *round_end_calls(),
    )
]


def strides(result: Any) -> list[tuple[torch.Size, tuple[int, ...], torch.dtype]]:
    tensors = [result] if isinstance(result, Tensor) else list(result or ())
    return [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors]


def check(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """opcheck, the fake's strides, and the schema's word on mutation and aliasing, which opcheck can't tell for fp8."""
    utilities = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    tensors = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor)]
    if all(tensor.dtype != FP8 for tensor in tensors):
        utilities.append("test_schema")
    opcheck(op, args, kwargs, test_utils=utilities)
    assert_fake_is_real(op, args, kwargs)
    assert_schema_holds(op, args, kwargs)


def assert_schema_holds(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    given = {argument.name: value for argument, value in zip(op._schema.arguments, args, strict=False)} | kwargs
    before = {name: value.clone() for name, value in given.items() if isinstance(value, Tensor)}
    result = op(*args, **kwargs)
    mutable = {argument.name for argument in op._schema.arguments if argument.is_write}
    for name, old in before.items():
        if name not in mutable:
            torch.testing.assert_close(given[name].float(), old.float(), rtol=0, atol=0)
    storages = {given[name].untyped_storage().data_ptr() for name in before}
    outputs = [result] if isinstance(result, Tensor) else list(result or ())
    assert not storages & {tensor.untyped_storage().data_ptr() for tensor in outputs}


def assert_fake_is_real(op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    with FakeTensorMode() as mode:
        fakes = [
            [mode.from_tensor(each) for each in arg]
            if isinstance(arg, list)
            else mode.from_tensor(arg)
            if isinstance(arg, Tensor)
            else arg
            for arg in args
        ]
        named = {key: mode.from_tensor(arg) if isinstance(arg, Tensor) else arg for key, arg in kwargs.items()}
        fake = strides(op(*fakes, **named))
    assert fake == strides(op(*args, **kwargs))


@pytest.mark.parametrize(("backend", "name"), ATTENTION)
def test_attention_ops(backend: Backend, name: str) -> None:
    args, kwargs = attention_call(backend.family, name)
    op = getattr(torch.ops.specops, backend.op_name).default
    check(op, args, kwargs)


@pytest.mark.parametrize(("name", "call"), OTHER)
def test_other_ops(name: str, call: Call) -> None:
    args, kwargs = call
    op = getattr(torch.ops.specops, name).default
    check(op, args, kwargs)


def test_every_op_of_a_fresh_process_is_checked_here_or_cannot_run_here() -> None:
    code = "import torch, specops; print(*torch._C._dispatch_get_all_op_names())"
    names = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    defined = {name.removeprefix("specops::") for name in names if name.startswith("specops::")}
    checked = {backend.op_name for backend in BUILTIN if runs_here(backend)} | {param.values[0] for param in OTHER}
    elsewhere = {backend.op_name for backend in BUILTIN if not runs_here(backend)}
    assert defined - elsewhere == checked


@pytest.mark.parametrize("name", ["uniform", "packed", "tree", "fp8", "all"])
@pytest.mark.parametrize("backend", [backend for backend in BUILTIN if runs_here(backend)], ids=lambda b: b.op_name)
def test_fakes_take_a_symbolic_batch_and_read_no_value(backend: Backend, name: str) -> None:
    args, kwargs = attention_call(backend.family, name)
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)

    def fake(position: int, tensor: Tensor) -> Tensor:
        dynamic = [DimDynamic.STATIC] * tensor.dim()
        cache = tensor.dim() >= 3 and position not in (0, 1 if backend.family == "mla" else 0)
        if not cache:
            dynamic[0] = DimDynamic.DYNAMIC
        return mode.from_tensor(tensor, symbolic_context=StatelessSymbolicContext(dynamic_sizes=dynamic))

    fakes = [fake(position, arg) if isinstance(arg, Tensor) else arg for position, arg in enumerate(args)]
    named = {key: fake(0, arg) if isinstance(arg, Tensor) else arg for key, arg in kwargs.items()}
    with mode:
        out = getattr(torch.ops.specops, backend.op_name)(*fakes, **named)
    assert isinstance(out.shape[0], torch.SymInt)
    assert out.shape[0].node.expr == fakes[0].shape[0].node.expr
    assert out.is_contiguous()
    assert not env.guards, f"the fake must not specialise a size: {env.guards}"


def test_a_cache_holds_no_gradient_history() -> None:
    case = make_mha_case()
    caches = case.tensors["k_cache"], case.tensors["v_cache"]
    rows = torch.randn(2, 2, 64, requires_grad=True) * 2
    torch.ops.specops.store_kv(*caches, rows, rows, torch.tensor([4, 5]))
    assert not caches[0].requires_grad
    assert caches[0].grad_fn is None


def test_triton_kernels_have_the_defaults_of_their_schemas() -> None:
    """The dispatcher leaves out last arguments that are as the schema has them."""
    pytest.importorskip("triton")
    checked = set()
    for path in Path(ops.__file__).parent.glob("triton_*.py"):
        if path.stem == "triton_hopper_roles":  # Needs Gluon, and has no op of its own.
            continue
        module = importlib.import_module(f"specops.ops.{path.stem}")
        for name, kernel in inspect.getmembers(module, inspect.isfunction):
            if kernel.__module__ != module.__name__ or not hasattr(torch.ops.specops, name):
                continue
            schema = getattr(torch.ops.specops, name).default._schema
            taken = list(inspect.signature(kernel).parameters.values())
            for argument, parameter in zip(schema.arguments, taken, strict=False):
                assert not argument.has_default_value() or parameter.default == argument.default_value, (name, parameter)
            assert all(parameter.default is not parameter.empty for parameter in taken[len(schema.arguments) :]), name
            checked.add(name)
    assert checked >= {"expand_beam", "project_qkv", "row_places", "store_kv", "top_tokens", "build_tree", "commit_round"}
