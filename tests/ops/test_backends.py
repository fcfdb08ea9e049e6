"""Choosing a backend: the order of auto, the capability table, backends from outside, and what import needs.

OMP_NUM_THREADS=1 pytest tests/ops/test_backends.py
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from specops import QueryLayout, ops
from specops.ops import AttentionRequest, UnsupportedAttention
from specops.ops.backends import (
    AUTO_ORDER,
    FP8,
    Backend,
    Capabilities,
    add_backend,
    capable_backends,
    device_kind,
    get_backend,
    register_backend,
    resolve,
)
from specops.ops.builtin import BUILTIN
from specops.testing import make_mha_case, make_mla_case

table = sys.modules["specops.ops.backends"]
DEVICES: dict[str, tuple[str, tuple[int, int] | None]] = {
    "cpu": ("cpu", None),
    "sm80": ("cuda", (8, 0)),
    "sm90": ("cuda", (9, 0)),
    "sm100": ("cuda", (10, 0)),
    "sm120": ("cuda", (12, 0)),
    "hip": ("hip", None),
    "musa": ("musa", None),
}


@pytest.fixture(autouse=True)
def _built_in_backends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "_BACKENDS", {(backend.family, backend.name): backend for backend in BUILTIN})
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.fixture
def every_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every optional package were installed."""
    monkeypatch.setattr(Capabilities, "missing_packages", lambda self: [])


def folded(lines: list[str]) -> str:
    return "\n".join(textwrap.fill(line, 118, subsequent_indent="    ", break_on_hyphens=False) for line in lines)


def request(device: str = "sm90", **changes: Any) -> AttentionRequest:
    device_type, capability = DEVICES[device]
    base: dict[str, Any] = {
        "family": "mha",
        "device_type": device_type,
        "compute_capability": capability,
        "q_dtype": torch.bfloat16,
        "kv_dtype": torch.bfloat16,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "value_dim": 128,
        "page_size": 64,
        "layout": "uniform",
        "max_query_len": 4,
    }
    return AttentionRequest(**{**base, **changes})


def mla_request(device: str) -> AttentionRequest:
    return request(device, family="mla", num_heads=16, num_kv_heads=1, head_dim=576, value_dim=512)


@pytest.mark.usefixtures("every_package")
def test_who_can_serve_a_verify_step_on_which_device() -> None:
    rows = [f"{'':18}{'mha':56}mla"]
    for device in DEVICES:
        able = [" ".join(capable_backends(each)) for each in (request(device), mla_request(device))]
        rows.append(f"{device:18}{able[0]:56}{able[1]}")
    for name, changes in {
        "sm90 packed": {"layout": "packed"},
        "sm90 page 48": {"page_size": 48},
        "sm90 float32": {"q_dtype": torch.float32, "kv_dtype": torch.float32},
        "sm90 tree": {"features": ("tree_mask",)},
        "sm90 softcap": {"features": ("softcap",)},
        "sm90 fp8": {"kv_dtype": FP8, "features": ("fp8_kv",)},
    }.items():
        rows.append(f"{name:18}{' '.join(capable_backends(request(**changes)))}")
    assert_expected_inline(
        "\n".join(row.rstrip() for row in rows),
        """\
                  mha                                                     mla
cpu               cpu reference                                           cpu reference
sm80              triton reference flashinfer_fa2                         triton reference flashinfer_fa2
sm90              triton trtllm reference flashinfer_fa2 flashinfer_fa3   triton reference flashinfer_fa2 flashinfer_fa3
sm100             triton trtllm reference flashinfer_fa2                  triton trtllm tokenspeed reference flashinfer_fa2
sm120             triton trtllm reference flashinfer_fa2                  triton reference flashinfer_fa2
hip               triton reference                                        triton reference
musa              reference                                               reference
sm90 packed       triton reference flashinfer_fa2 flashinfer_fa3
sm90 page 48      triton reference flashinfer_fa2 flashinfer_fa3
sm90 float32      triton reference
sm90 tree         triton trtllm reference flashinfer_fa2
sm90 softcap      triton reference flashinfer_fa2 flashinfer_fa3
sm90 fp8          triton trtllm reference flashinfer_fa2""",
    )


@pytest.mark.usefixtures("every_package")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("make", [request, mla_request])
def test_auto_is_the_first_capable_one_of_the_declared_order(make: Any, device: str) -> None:
    asked = make(device)
    order = AUTO_ORDER[asked.device_type]
    able = [name for name in order if (asked.family, name) in table._BACKENDS]
    able = [name for name in able if not get_backend(name, asked.family).capabilities.why_not(asked)]
    assert resolve("auto", asked).name == able[0]


def test_auto_passes_over_a_backend_whose_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Capabilities, "missing_packages", lambda self: ["package x is not installed"] if self.packages else []
    )
    assert resolve("auto", request()).name == "reference"


def test_auto_never_takes_a_backend_outside_the_order() -> None:
    @register_backend("volunteer", device_types=("cpu",), features=ops.backends()[0].capabilities.features)
    def volunteer(*args: Any, **options: Any) -> Tensor:
        raise AssertionError("it was not asked for")

    asked = request("cpu", q_dtype=torch.float32, kv_dtype=torch.float32)
    assert "volunteer" in capable_backends(asked)
    assert resolve("auto", asked).name == "cpu"
    assert resolve("volunteer", asked).name == "volunteer"


@pytest.mark.usefixtures("every_package")
@pytest.mark.parametrize("device", ["cpu", "sm80", "sm90", "sm100", "hip", "musa"])
@pytest.mark.parametrize("num_draft_tokens", [2, 3])
def test_one_draft_step_is_served_like_many_on_every_device_type(num_draft_tokens: int, device: str) -> None:
    # With num_steps=1 there is no multi-step draft decode, so no backend was ever chosen for it. The draft-extend call is
    # judged by what it asks itself, and nothing else is an input of the choice.
    one_step = resolve("auto", request(device, max_query_len=num_draft_tokens))
    many_steps = resolve("auto", request(device, max_query_len=6))
    assert one_step is many_steps
    fields = set(AttentionRequest.__dataclass_fields__)
    assert fields == {
        *("family", "device_type", "compute_capability", "q_dtype", "kv_dtype", "num_heads", "num_kv_heads"),
        *("head_dim", "value_dim", "page_size", "layout", "max_query_len", "features"),
    }


def test_an_amd_device_is_told_apart_from_an_nvidia_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_kind(torch.device("cuda")) == ("cuda" if torch.version.hip is None else "hip")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert device_kind(torch.device("cuda")) == "hip"
    assert table.compute_capability(torch.device("cuda")) is None
    assert device_kind(torch.device("cpu")) == "cpu"


def test_triton_takes_fp8_caches_from_compute_capability_8_9() -> None:
    limits = next(backend.capabilities for backend in BUILTIN if backend.op_name == "triton_mha")
    assert limits.why_not(request("sm80", kv_dtype=FP8)) == [
        "an fp8 cache on compute capability 8.0 (it needs 8.9 or later)"
    ]
    assert not limits.why_not(request("sm80"))
    assert not limits.why_not(request("sm90", kv_dtype=FP8))


def test_triton_serves_a_cpu_only_through_its_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    asked = request("cpu", q_dtype=torch.float32, kv_dtype=torch.float32)
    assert "triton" not in capable_backends(asked)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "triton" in capable_backends(asked)


def test_several_sets_of_limits_are_alternatives() -> None:
    limits = Capabilities(
        ("cuda",),
        compute_capabilities=((9, 0),),
        page_sizes=(16,),
        also=(Capabilities(("cuda",), compute_capabilities=((10, -1),), page_sizes=(64,), layouts=("packed",)),),
    )
    assert limits.why_not(request("sm90", page_size=16)) == []
    assert limits.why_not(request("sm100", page_size=64, layout="packed")) == []
    assert limits.why_not(request("sm90", page_size=64)) == ["page size 64 (it takes 16)"]
    assert limits.why_not(request("sm100", page_size=64)) == ["uniform layout (it takes packed)"]
    assert limits.why_not(request("sm80")) == ["compute capability 8.0 (it runs on 9.0, 10.x)"]


def test_schemas() -> None:
    names = (
        *("reference_mha", "reference_mla", "store_kv", "store_latent", "move_kv", "move_latent"),
        *("build_tree", "verify_greedy", "verify_sampling"),
    )
    schemas = [str(getattr(torch.ops.specops, name).default._schema) for name in names]
    assert_expected_inline(
        folded(schemas),
        """\
specops::reference_mha(Tensor q, Tensor k_cache, Tensor v_cache, Tensor page_table, Tensor seq_lens, Tensor?
    query_start, SymInt max_query_len, float scale, SymInt? window=None, float? softcap=None, Tensor? sinks=None,
    Tensor? tree_mask=None, Tensor? k_scale=None, Tensor? v_scale=None, Tensor? plan=None) -> Tensor
specops::reference_mla(Tensor q_latent, Tensor q_rope, Tensor kv_cache, Tensor page_table, Tensor seq_lens, Tensor?
    query_start, SymInt max_query_len, float scale, SymInt? window=None, float? softcap=None, Tensor? sinks=None,
    Tensor? tree_mask=None, Tensor? kv_scale=None, Tensor? plan=None) -> Tensor
specops::store_kv(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor slots, Tensor? k_scale=None,
    Tensor? v_scale=None) -> ()
specops::store_latent(Tensor(a!) kv_cache, Tensor latent, Tensor rope, Tensor slots, Tensor? kv_scale=None) -> ()
specops::move_kv(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor source_slots, Tensor target_slots) -> ()
specops::move_latent(Tensor(a!) kv_cache, Tensor source_slots, Tensor target_slots) -> ()
specops::build_tree(Tensor root_tokens, Tensor candidate_tokens, Tensor candidate_scores, Tensor candidate_parents,
    SymInt num_draft_tokens, int num_steps, bool links=True) -> (Tensor tokens, Tensor parents, Tensor depths, Tensor
    tree_mask, Tensor first_child, Tensor next_sibling)
specops::verify_greedy(Tensor tokens, Tensor parents, Tensor depths, Tensor target_tokens, int num_steps) -> (Tensor
    accept_lens, Tensor accept_index, Tensor accept_tokens)
specops::verify_sampling(Tensor tokens, Tensor parents, Tensor target_probs, Tensor? draft_probs, Tensor
    accept_uniforms, Tensor bonus_uniforms, int num_steps) -> (Tensor accept_lens, Tensor accept_index, Tensor
    accept_tokens)""",
    )


def test_backends_of_a_family_differ_in_name_only() -> None:
    for family in ("mha", "mla"):
        schemas = set()
        for backend in ops.backends(family):
            overload = getattr(torch.ops.specops, backend.op_name).default
            schemas.add(str(overload._schema).replace(backend.op_name, "OP"))
            assert (torch.Tag.cudagraph_unsafe in overload.tags) == (not backend.capabilities.graph_safe)
            assert torch.Tag.pt2_compliant_tag in overload.tags
        assert len(schemas) == 1


USER_FILE = """
import torch
import specops

@specops.ops.register_backend("handmade", device_types=("cpu",), head_dims=(16,), page_sizes=(4,), layouts=("uniform",))
def handmade(q, k_cache, v_cache, page_table, seq_lens, *, layout, scale):
    width, (batch, heads, dim) = layout.tokens_per_request, (page_table.shape[0], *q.shape[1:])
    keys = torch.nan_to_num(k_cache[page_table].flatten(1, 2)).transpose(1, 2)
    values = torch.nan_to_num(v_cache[page_table].flatten(1, 2)).transpose(1, 2)
    place = seq_lens[:, None] - width + torch.arange(width)
    hidden = torch.arange(keys.shape[2]) > place[:, :, None]
    out = torch.nn.functional.scaled_dot_product_attention(
        q.view(batch, width, heads, dim).transpose(1, 2), keys, values, ~hidden[:, None], scale=scale, enable_gqa=True
    )
    return out.transpose(1, 2).reshape(q.shape)
"""


@pytest.fixture(scope="module")
def user_module(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    path = tmp_path_factory.mktemp("user") / "handmade_backend.py"
    path.write_text(USER_FILE)
    spec = importlib.util.spec_from_file_location("handmade_backend", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = dict(table._BACKENDS)
    spec.loader.exec_module(module)
    module.backend = table._BACKENDS["mha", "handmade"]
    table._BACKENDS.clear()
    table._BACKENDS.update(before)
    return module


def test_a_backend_in_one_file_of_its_users_runs_checks_and_compiles(user_module: ModuleType) -> None:
    table._BACKENDS["mha", "handmade"] = user_module.backend
    case = make_mha_case(query_lens=3, head_dim=16)
    case.check("handmade")
    args, options = case.op_args()
    unpoisoned = tuple(torch.nan_to_num(arg) if isinstance(arg, Tensor) else arg for arg in args)
    torch.library.opcheck(torch.ops.specops.handmade_mha.default, unpoisoned, options)

    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def keep(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(module)
        return module

    def step(q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, seq_lens: Tensor) -> Tensor:
        layout = QueryLayout.uniform(3)
        return ops.mha(q * 2, k_cache, v_cache, page_table, seq_lens, layout=layout, backend="handmade")

    compiled = torch.compile(step, fullgraph=True, backend=keep)
    for lens in ((9, 13), (5, 40, 7), (12, 6, 9, 10)):
        case = make_mha_case(query_lens=3, head_dim=16, seq_lens=lens, spare_columns=11 - -(-max(lens) // 4))
        assert torch.equal(compiled(*case.args()), step(*case.args()))
    assert len(graphs) <= 2, "one for the first batch, one for every other"
    assert all("specops.handmade_mha" in graph.code for graph in graphs), "a graph dump names the backend"


@pytest.mark.filterwarnings("error", "ignore:.*script_method.*:DeprecationWarning")
@pytest.mark.parametrize(
    "options",
    [
        {"query_lens": 3},
        {"query_lens": (3, 2)},
        {"query_lens": 3, "tree_width": 5, "window": 2, "softcap": 2.0, "sinks": True, "fp8": True},
    ],
    ids=["uniform", "packed", "everything"],
)
@pytest.mark.parametrize("family", ["mha", "mla"])
def test_tracing_warns_nothing_breaks_no_graph_and_equals_eager(family: str, options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    case = make_mha_case(**options) if family == "mha" else make_mla_case(**options)
    call = ops.mha if family == "mha" else ops.mla
    compiled = torch.compile(lambda *args, **given: call(*args, **given), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*case.args(), **case.kwargs()), case.run())


def test_an_unsupported_call_is_refused_while_it_is_traced() -> None:
    torch._dynamo.reset()
    case = make_mha_case(query_lens=3)

    def step(q: Tensor, *rest: Tensor) -> Tensor:
        return ops.mha(q, *rest, layout=QueryLayout.uniform(3), backend="triton")

    with pytest.raises(Exception, match="triton_mha cannot serve this: device type cpu"):
        torch.compile(step, fullgraph=True, backend="eager")(*case.args())


def test_a_backend_that_is_not_graph_safe_says_so_to_inductor() -> None:
    @register_backend("hostbound", family="mla", device_types=("cpu",), graph_safe=False)
    def hostbound(q_latent: Tensor, *args: Any, **options: Any) -> Tensor:
        return torch.zeros_like(q_latent)

    assert torch.Tag.cudagraph_unsafe in torch.ops.specops.hostbound_mla.default.tags
    assert make_mla_case().run("hostbound").count_nonzero() == 0


def test_a_kernel_gets_only_the_features_of_its_call() -> None:
    seen: list[dict[str, Any]] = []

    @register_backend("curious", device_types=("cpu",), features=("window", "sinks", "softcap", "tree_mask", "fp8_kv"))
    def curious(q: Tensor, k: Tensor, v: Tensor, page_table: Tensor, seq_lens: Tensor, **options: Any) -> Tensor:
        seen.append(options)
        return torch.zeros_like(q)

    make_mha_case(query_lens=3).run("curious")
    make_mha_case(query_lens=3, window=9, softcap=2.0, sinks=True, tree_width=3, fp8=True).run("curious")
    assert set(seen[0]) == {"layout", "scale"}
    assert set(seen[1]) == {"layout", "scale", "window", "softcap", "sinks", "tree_mask", "k_scale", "v_scale"}
    assert seen[0]["layout"].tokens_per_request == 3


def test_registration_refuses_what_it_does_not_know() -> None:
    def kernel(*args: Any, **options: Any) -> Tensor:
        raise NotImplementedError

    def error(name: str, **options: Any) -> str:
        with pytest.raises((ValueError, UnsupportedAttention)) as caught:
            register_backend(name, **options)(kernel)
        return str(caught.value)

    messages = [
        error("two words"),
        error("auto"),
        error("cpu"),
        error("new", family="gqa"),
        error("new", device_types=("tpu",)),
        error("new", layouts=("ragged",)),
        error("new", features=("alibi",)),
        error("new", head_dim=(64,)),
    ]
    assert_expected_inline(
        folded(messages),
        """\
a backend's name must be a Python identifier and not 'auto', got 'two words'
a backend's name must be a Python identifier and not 'auto', got 'auto'
a mha backend called 'cpu' is registered already
family must be 'mha' or 'mla', got 'gqa'
unknown device type tpu; known are cpu, cuda, hip, musa
unknown layout ragged; known are uniform, packed
unknown feature alibi; known are window, softcap, sinks, tree_mask, wide_tree_mask, fp8_kv
unknown limit head_dim; known are also, compute_capabilities, extra, fp8_min_compute_capability, graph_safe,
    group_sizes, head_dims, interpreted_on, kv_dtypes, max_query_len, min_compute_capability, mixed_dtypes,
    needs_plan, not_together, packages, page_sizes, q_dtypes, short_requests""",
    )
    with pytest.raises(ValueError, match="registered already"):
        add_backend(Backend("reference", "mla", Capabilities(("cpu",)), kernel))


def run_without(packages: str, code: str, **environment: str) -> str:
    hide = f"import sys\nfor name in {packages.split()!r}: sys.modules[name] = None\n"
    done = subprocess.run(
        [sys.executable, "-c", hide + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        env={"PATH": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2]), **environment},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


OPTIONAL = "triton flashinfer tokenspeed_mla transformers tokenizers safetensors gguf rich matplotlib numpy"


def test_cold_import_needs_torch_alone_and_ops_say_what_to_install() -> None:
    out = run_without(
        OPTIONAL,
        """
        import specops
        from specops.testing import make_mha_case
        case = make_mha_case(query_lens=3)
        case.check("auto")
        try:
            case.run("triton")
        except ValueError as refusal:
            print(refusal)
        """,
        TRITON_INTERPRET="1",
    )
    assert out == (
        "triton_mha cannot serve this: package triton is not installed: pip install 'specops[triton]'. "
        "Backends that can: cpu, reference.\n"
    )


def test_import_leaves_torchs_configuration_alone_and_loads_no_kernel() -> None:
    out = run_without(
        "",
        """
        import torch, torch._inductor.config, torch._dynamo.config, torch._functorch.config
        modules = (torch._inductor.config, torch._dynamo.config, torch._functorch.config)
        before = [module.save_config() for module in modules], torch.get_num_threads(), torch.get_default_dtype()
        import specops
        after = [module.save_config() for module in modules], torch.get_num_threads(), torch.get_default_dtype()
        assert before == after
        kernels = ("cpu", "reference", "triton_mha", "triton_mla", "trtllm_mha", "flashinfer", "tokenspeed_mla")
        print([name for name in kernels if f"specops.ops.{name}" in sys.modules])
        """,
    )
    assert out == "[]\n"
