"""Layers on the compiled CPU kernels: transformers' logits in every family, and every way back to the plain layer.

OMP_NUM_THREADS=1 pytest tests/models/test_native_layer.py
"""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections import Counter
from typing import Any

import pytest
import torch
from paged_session import PagedSession, assert_same_logits, check_against_peer, peer_logits
from torch import nn

from specops.models import load_target, native_layer
from specops.models.eagle import Eagle3Layer
from specops.models.llama import CausalLM, DecoderLayer
from specops.models.native_layer import NativeCausalLM, NativeDecoderLayer, NativeEagle3Layer, use_native_layers
from specops.models.packed_linear import pack_linears, unpack_linears
from specops.ops import native
from specops.spec import Engine, SpecConfig
from tests.models.test_llama import FAMILIES, make_peer
from tests.spec.toys import Shadow, small_llama, target_of, untrained_head

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C compiler here, or SPECOPS_NATIVE=0")
# The compiled attention takes heads of a multiple of 16; with others the layers run one by one.
WIDE = {"head_dim": 16}


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often a whole stack, and how often a layer by itself, ran on the kernels."""
    counts: Counter[str] = Counter()
    run, stack = native_layer._run, native_layer.Stack.run

    def counted_run(*args: Any) -> Any:
        out = run(*args)
        counts["layer"] += out is not None
        return out

    def counted_stack(self: Any, *args: Any) -> Any:
        out = stack(self, *args)
        counts["stack"] += out is not None
        return out

    monkeypatch.setattr(native_layer, "_run", counted_run)
    monkeypatch.setattr(native_layer.Stack, "run", counted_stack)
    return counts


def packed(peer: Any, **options: Any) -> Any:
    model = load_target(peer, **options).requires_grad_(False)
    pack_linears(model)
    return model


@pytest.mark.parametrize("more", [{}, WIDE], ids=["heads of 8", "heads of 16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_prefill_decode_blocks_and_trees_equal_transformers(name: str, more: dict[str, Any], served: Counter[str]) -> None:
    peer = make_peer(name, **more)
    check_against_peer(packed(peer), peer, tolerance=3e-4)
    plain = FAMILIES[name][0] == "Gemma2" or "hidden_act" in FAMILIES[name][1]
    wide = bool(more) or "head_dim" in FAMILIES[name][1]
    assert (served.total() > 0) is not plain
    if not plain and wide:
        # Under a tree a window is no matter for the kernel; everything else is one call.
        assert served["stack"] >= 3


def test_bfloat16_stays_near_transformers_float32(served: Counter[str]) -> None:
    peer = make_peer("qwen3")
    model = packed(peer, dtype=torch.bfloat16)
    tokens = torch.randint(97, (12,)).tolist()
    (logits,) = PagedSession(model, 1).prefill([tokens])
    expected = peer_logits(peer, tokens)
    assert logits.dtype == torch.bfloat16
    assert (logits.float() - expected).norm() < 0.05 * expected.norm()
    assert served == {"stack": 1}


def test_aux_layers_are_those_of_the_plain_model(served: Counter[str]) -> None:
    peer = make_peer("llama", **WIDE)
    plain, model = load_target(peer), packed(peer)
    seen: dict[Any, Any] = {}
    for each in (plain, model):

        def forward(ids: Any, meta: Any, each: Any = each) -> Any:
            hidden, seen[each] = each(ids, meta, aux_layers=(2, 0, 3))
            return hidden

        PagedSession(each, 1, forward=forward).prefill([[4, 8, 15, 16]])
    torch.testing.assert_close(seen[model], seen[plain], rtol=1e-4, atol=1e-4)
    assert served == {"stack": 1}


@pytest.mark.parametrize(
    "reason", ["rows", "gradients", "hook on a layer", "hook on a part", "sum over ranks", "backend", "fp8 cache", "off"]
)
def test_what_the_kernels_do_not_serve_runs_as_before(
    reason: str, served: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = make_peer("llama", **WIDE)
    model = packed(peer)
    tokens, calls = list(range(5)), []
    session = PagedSession(model, 1)
    context: Any = torch.no_grad()
    if reason == "rows":
        monkeypatch.setattr(native_layer, "NATIVE_ROWS", len(tokens) - 1)
    elif reason == "gradients":
        session.prefill = PagedSession.prefill.__wrapped__.__get__(session)
        context = torch.enable_grad()
    elif reason == "hook on a layer":
        model.layers[1].register_forward_hook(lambda *args: calls.append(args[0]))
    elif reason == "hook on a part":
        for layer in model.layers:
            layer.mlp.down.register_forward_pre_hook(lambda *args: calls.append(args[0]))
    elif reason == "sum over ranks":
        for layer in model.layers:
            layer.mlp.reduce = lambda x: x
    elif reason == "backend":
        model.set_backend("reference")
    elif reason == "fp8 cache":
        model.allocate_caches(20, 4, dtype=torch.float8_e4m3fn)
    with context, native.disabled() if reason == "off" else contextlib.nullcontext():
        (logits,) = session.prefill([tokens])
    if reason != "fp8 cache":
        assert_same_logits(logits, peer_logits(peer, tokens))
    assert served["stack"] == 0
    # A layer by itself takes any backend, and has hooks around it.
    assert served["layer"] == {"hook on a layer": 3, "backend": 3}.get(reason, 0)
    assert len(calls) == {"hook on a layer": 1, "hook on a part": 3}.get(reason, 0)


@pytest.mark.parametrize("change", ["in place", "replaced", "loaded", "cast", "module", "new cache", "window"])
def test_changes_to_a_model_are_seen(change: str, served: Counter[str]) -> None:
    first, second = make_peer("llama", **WIDE), make_peer("llama", **WIDE)
    model = packed(first)
    tokens = [3, 1, 4, 1, 5, 9]
    PagedSession(model, 1).prefill([tokens])
    served.clear()
    other = load_target(second)
    with torch.no_grad():
        if change == "in place":
            for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
                ours.copy_(theirs)
        elif change == "replaced":
            for name, parameter in other.named_parameters():
                owner, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(owner), leaf, nn.Parameter(parameter.clone(), requires_grad=False))
        elif change == "loaded":
            model.load_state_dict(other.state_dict())
        elif change == "cast":
            model.double().float().load_state_dict(other.state_dict())
        elif change == "module":
            second = first
            for layer in model.layers:
                layer.mlp.down = copy.deepcopy(layer.mlp.down)
        else:
            second = first
    if change == "window":
        for layer in model.layers:
            layer.attn.window = 2
        second = make_peer("mistral_window", sliding_window=2, **WIDE)
        second.load_state_dict(first.state_dict())
    (logits,) = PagedSession(model, 1).prefill([tokens])
    assert_same_logits(logits, peer_logits(second, tokens))
    assert served == {"stack": 1}


def test_copies_stand_alone_and_unpacking_undoes_it_all(served: Counter[str]) -> None:
    peer = make_peer("llama", **WIDE)
    model = packed(peer)
    tokens = [3, 1, 4]
    PagedSession(model, 1).prefill([tokens])
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0)
        (logits,) = PagedSession(other, 1).prefill([tokens])
        assert_same_logits(logits, peer_logits(peer, tokens))
    assert served == {"stack": 3}
    assert type(model) is NativeCausalLM
    assert {type(layer) for layer in model.layers} == {NativeDecoderLayer}
    unpack_linears(model)
    assert type(model) is CausalLM
    assert {type(layer) for layer in model.layers} == {DecoderLayer}
    (logits,) = PagedSession(model, 1).prefill([tokens])
    assert_same_logits(logits, peer_logits(peer, tokens))
    assert served == {"stack": 3}


@pytest.mark.parametrize("format", ["eagle", "eagle3"])
def test_a_draft_heads_layers_are_the_plain_ones_within_rounding(format: str, served: Counter[str]) -> None:
    target = target_of(small_llama(num_hidden_layers=4))
    options = {"format": format, "norm_inputs": True, **({"aux_layers": (1, 2, 3)} if format == "eagle3" else {})}
    head = untrained_head(target, **options)
    kind = type(head.layers[0])
    assert use_native_layers(head) == 1
    assert type(head.layers[0]) is {DecoderLayer: NativeDecoderLayer, Eagle3Layer: NativeEagle3Layer}[kind]
    ids = torch.randint(64, (6,))
    hidden = torch.randn(6, head.config.hidden_width)
    results = []
    for _ in range(2):

        def forward(tokens: Any, meta: Any) -> Any:
            return head(tokens, hidden, meta)

        session = PagedSession(head, 1, forward=forward)
        with native.disabled() if results else torch.no_grad():
            results.append(session.prefill([ids.tolist()])[0])
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-4)
    assert served == {"layer": 1}
    unpack_linears(head)
    assert type(head.layers[0]) is kind


@pytest.mark.parametrize("dtype", native.DTYPES, ids=str)
def test_a_chains_ids_and_margins_are_those_of_plain_decoding_bit_for_bit(dtype: torch.dtype, served: Counter[str]) -> None:
    target = load_target(small_llama(hidden_size=128, max_position_embeddings=256), dtype=dtype)
    prompts = [[1, 2, 3, 4, 5], [9, 8]]
    runs = []
    for config in (None, SpecConfig(3)):
        draft = None if config is None else Shadow(target)
        engine = Engine(target, draft, config, max_requests=2, max_context=200, page_size=4)
        runs.append(engine.generate(prompts, max_new_tokens=60))
    assert [request.tokens for request in runs[0]] == [request.tokens for request in runs[1]]
    assert [request.margins for request in runs[0]] == [request.margins for request in runs[1]]
    assert engine.stats.accepted_per_round > 1.5
    assert served["stack"] > 60
