"""The fused form of a layer's products means what the plain one does, whole models included, eager and compiled.

python -m pytest -q tests/models/test_projections.py

Where there is no GPU, the fused ops run as plain torch: what is tested then is the way there, not the kernels, which are
tested in tests/ops/test_linear.py.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from torch.utils._python_dispatch import TorchDispatchMode

from specops import QueryLayout, attention_metadata
from specops.models import llama, projections
from specops.models.config import ModelConfig
from specops.models.llama import CausalLM

CONFIG = ModelConfig(
    vocab_size=50,
    hidden_size=48,
    intermediate_size=80,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=64,
)
GEMMA = {"post_norms": True, "norm_offset": 1.0, "hidden_act": "gelu_pytorch_tanh", "embedding_scale": 6.0}


class Called(TorchDispatchMode):
    """Names of the ops that were called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


def make_model(**options: Any) -> CausalLM:
    torch.manual_seed(1)
    model = CausalLM(dataclasses.replace(CONFIG, **options)).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.15)
    return model


def run(model: CausalLM, forward: Any = None) -> tuple[Tensor, Tensor]:
    """Hidden states of two uniform steps of two requests, the second reading what the first stored; and the K cache."""
    model.allocate_caches(num_pages=9, page_size=4)
    table = torch.tensor([[3, 1, 5, 7], [2, 8, 4, 6]], dtype=torch.int32)
    ids = torch.arange(20).remainder(50)
    outs = []
    with torch.no_grad():
        for step, rows in enumerate((ids[:10], ids[10:])):
            lens = torch.tensor([5, 5], dtype=torch.int32) * (step + 1)
            meta = attention_metadata(table, lens, QueryLayout.uniform(5), 4)
            outs.append((model if forward is None else forward)(rows, meta))
    return torch.stack(outs), torch.stack([cache.k for cache in model.caches])


@pytest.mark.parametrize(
    "options",
    [{}, {"attention_bias": True, "mlp_bias": True, "output_bias": True}, GEMMA, {"qk_norm": True}],
    ids=["llama", "biases", "gemma", "qk_norm"],
)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_model_gives_the_same_either_way(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], compiled: bool) -> None:
    wanted, wanted_cache = run(make_model(**options))
    monkeypatch.setattr(projections, "on_nvidia", lambda x: True)
    monkeypatch.setattr(projections, "FUSED_DTYPES", (torch.float32,))
    model = make_model(**options)
    graphs: list[str] = []

    def traced(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph.code)
        return aot_eager(graph, inputs)

    if compiled:
        hidden, cache = run(model, torch.compile(model, fullgraph=True, backend=traced, dynamic=True))
        code = graphs[0]
    else:
        with Called() as called:
            hidden, cache = run(model)
        code = str(called.names)
    assert ("rms_norm_linear" in code, "project_qkv" in code) == (True, "qk_norm" not in options)
    torch.testing.assert_close(hidden, wanted, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(cache, wanted_cache, atol=2e-5, rtol=2e-5)


def test_what_takes_the_fused_form() -> None:
    linear = nn.Linear(8, 8, dtype=torch.bfloat16)
    x = torch.zeros(2, 8, dtype=torch.bfloat16)
    with torch.no_grad():
        assert not projections.can_fuse(x, linear), "a CPU has no launches to save"
        meta = x.to("meta")
        assert not projections.can_fuse(meta, linear)


@pytest.mark.gpu
def test_on_a_gpu_16_bit_models_take_the_fused_form_and_agree_with_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = nn.Linear(8, 8, dtype=torch.bfloat16, device="cuda")
    x = torch.zeros(2, 8, dtype=torch.bfloat16, device="cuda")
    assert not projections.can_fuse(x, linear), "gradients need the plain form"
    with torch.no_grad():
        assert projections.can_fuse(x, linear)
        assert not projections.can_fuse(x.float(), linear)
        assert not projections.can_fuse(x, linear.float())

        def hidden(dtype: torch.dtype) -> Tensor:
            model = make_model().to("cuda", dtype)
            model.allocate_caches(num_pages=9, page_size=4)
            table = torch.tensor([[3, 1, 5, 7], [2, 8, 4, 6]], dtype=torch.int32, device="cuda")
            lens = torch.tensor([5, 5], dtype=torch.int32, device="cuda")
            meta = attention_metadata(table, lens, QueryLayout.uniform(5), 4)
            result: Tensor = model(torch.arange(10, device="cuda"), meta)
            return result

        exact = hidden(torch.float32)
        fused = hidden(torch.bfloat16)
        monkeypatch.setattr(llama, "can_fuse", lambda x, *linears: False)
        plain = hidden(torch.bfloat16)
        assert not torch.equal(fused, plain), "the fused form did not run"
        error, plain_error = ((other - exact).abs().max().item() for other in (fused.float(), plain.float()))
        assert error <= 1.5 * plain_error


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_layers_take_rows_in_any_number_of_dims(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """As the dense forwards of training and evaluation call them."""
    if device == "cpu":
        monkeypatch.setattr(projections, "on_nvidia", lambda x: True)
    mlp = make_model().layers[0].mlp.to(device, torch.bfloat16)
    x = torch.randn(3, 5, CONFIG.hidden_size, generator=torch.Generator().manual_seed(2)).to(device, torch.bfloat16)
    with torch.no_grad():
        torch.testing.assert_close(mlp(x), mlp(x.flatten(0, 1)).view_as(x), atol=2e-2, rtol=2e-2)
