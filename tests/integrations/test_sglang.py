"""The SGLang plug-in: every kind of step against float64 over SGLang's own indexing, and its names against SGLang's source.

    OMP_NUM_THREADS=1 pytest tests/integrations/test_sglang.py

``data/sglang.json`` was read from SGLang 0.5.23. Where SGLang imports, the same tests run over its classes.
"""

from __future__ import annotations

import inspect
import json
import logging
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from specops.integrations import sglang as plugin
from specops.integrations.sglang import mapping
from tests.integrations import sglang_world as world
from tests.integrations.sglang_world import DIM, HEADS, KV_HEADS, load_backend, make_layer, make_runner, modes

RECORD = json.loads((Path(__file__).parent / "data" / "sglang.json").read_text())
BASE = "srt.layers.attention.base_attn_backend:AttentionBackend"
TREE = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]
ROWS = [2, 0, 3]


class Session:
    """Requests in SGLang's pool, and what each of their tokens' key and value is."""

    def __init__(self, runner: Any, lens: Sequence[int], layer: Any = None) -> None:
        self.runner, self.layer = runner, layer or make_layer(1)
        self.table = runner.req_to_token_pool.req_to_token
        self.known: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.lens = list(lens)
        for request, length in enumerate(lens):
            for place in range(length):
                k, v = torch.randn(2, KV_HEADS, DIM)
                self.known[request, place] = (k, v)
                slot = int(self.table[ROWS[request], place])
                for buffer, value in zip(runner.token_to_kv_pool.get_kv_buffer(self.layer.layer_id), (k, v), strict=True):
                    buffer[slot] = value.to(buffer.dtype)

    def batch(self, mode: Any, widths: Sequence[int], seq_lens: Sequence[int], **fields: Any) -> Any:
        places = [(r, place) for r, width in enumerate(widths) for place in range(self.lens[r], self.lens[r] + width)]
        slots = [int(self.table[ROWS[r], place]) for r, place in places]
        self.new = torch.randn(2, len(places), KV_HEADS, DIM)
        for index, place in enumerate(places):
            self.known[place] = (self.new[0, index], self.new[1, index])
        values = {
            "forward_mode": mode,
            "batch_size": len(widths),
            "seq_lens": torch.tensor(seq_lens),
            "req_pool_indices": torch.tensor(ROWS[: len(widths)]),
            "out_cache_loc": torch.tensor(slots),
            "out_cache_loc_is_physical": True,
            "spec_info": None,
            "extend_seq_lens": torch.tensor(widths),
            "extend_seq_lens_cpu": list(widths),
        }
        return SimpleNamespace(**{**values, **fields})

    def expected(self, q: Tensor, widths: Sequence[int], tree: Any = None, **options: Any) -> Tensor:
        rows = []
        for request, width in enumerate(widths):
            start = self.lens[request]
            for i in range(width):
                own = [j for j in range(width) if (j <= i if tree is None else tree[i][j])]
                seen = [*range(start), *(start + j for j in own)]
                if options.get("window"):
                    seen = seen[-options["window"] :]
                rows.append(self.attend(q[len(rows)], request, seen, options))
        return torch.stack(rows)

    def attend(self, q: Tensor, request: int, seen: list[int], options: dict[str, Any]) -> Tensor:
        keys, values = (torch.stack([self.known[request, p][which] for p in seen]).double() for which in (0, 1))
        grouped = q.double().view(KV_HEADS, -1, DIM)
        scores = torch.einsum("hgd,khd->hgk", grouped, keys) * DIM**-0.5
        if options.get("softcap"):
            scores = options["softcap"] * torch.tanh(scores / options["softcap"])
        sinks = options.get("sinks")
        extra = torch.full((KV_HEADS, HEADS // KV_HEADS, 1), -math.inf, dtype=torch.float64)
        if sinks is not None:
            extra = sinks.double().view(KV_HEADS, -1, 1)
        weights = torch.cat((scores, extra), dim=-1).softmax(-1)[..., :-1]
        return torch.einsum("hgk,khd->hgd", weights, values).flatten()

    def run(self, backend: Any, batch: Any, tree: Any = None, *, padding: int = 0, **options: Any) -> Tensor:
        backend.init_forward_metadata(batch)
        count = self.new.shape[1]
        q = torch.randn(count + padding, HEADS * DIM)
        out = backend.forward(q, self.new[0], self.new[1], self.layer, batch, **options.pop("call", {}))
        widths = [int(w) for w in batch.extend_seq_lens]
        torch.testing.assert_close(out[:count].double(), self.expected(q, widths, tree, **options), rtol=2e-5, atol=2e-5)
        return out


@pytest.mark.parametrize("page_size", [1, 4, 8])
def test_prefill_behind_a_cached_prefix(monkeypatch: pytest.MonkeyPatch, page_size: int) -> None:
    module = load_backend(monkeypatch)
    session = Session(make_runner(page_size), [9, 0, 3])
    batch = session.batch(modes().EXTEND, [4, 11, 1], [13, 11, 4])
    backend = module.SpecopsAttnBackend(session.runner)
    out = session.run(backend, batch, padding=2)
    assert backend.forward_metadata.layout.kind == "packed"
    assert not out[16:].any()


@pytest.mark.parametrize("page_size", [1, 4, 8])
def test_decoding_counts_the_new_token(monkeypatch: pytest.MonkeyPatch, page_size: int) -> None:
    module = load_backend(monkeypatch)
    session = Session(make_runner(page_size), [9, 12, 3])
    batch = session.batch(modes().DECODE, [1, 1, 1], [10, 13, 4])
    session.run(module.SpecopsAttnBackend(session.runner), batch)


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("tree", [None, TREE], ids=["chain", "tree"])
def test_verify_leaves_the_drafted_tokens_out_of_its_lengths(
    monkeypatch: pytest.MonkeyPatch, page_size: int, tree: Any
) -> None:
    module = load_backend(monkeypatch, speculative_eagle_topk=1 if tree is None else 2)
    session = Session(make_runner(page_size), [9, 12, 3])
    backend = module.SpecopsAttnBackend(session.runner)
    backend.init_cuda_graph_state(3, 12)
    mask = backend.verify_mask
    assert mask.mode.name == "QLEN_ONLY"
    assert mask.is_read is (tree is not None)
    if tree is not None:
        mask.buffer[: 3 * 16] = torch.tensor(tree, dtype=torch.bool).flatten().repeat(3)
    spec_info = SimpleNamespace(draft_token_num=4, custom_mask=mask.buffer, ragged_verify_layout=None)
    batch = session.batch(modes().TARGET_VERIFY, [4, 4, 4], [9, 12, 3], spec_info=spec_info)
    session.run(backend, batch, tree)
    assert backend.forward_metadata.layout.tokens_per_request == 4


def test_a_batch_beyond_the_mask_reads_the_one_it_brings(monkeypatch: pytest.MonkeyPatch) -> None:
    module = load_backend(monkeypatch, speculative_eagle_topk=2)
    runner = make_runner()
    runner.req_to_token_pool.size = 1
    session, backend = Session(runner, [9, 12, 3]), module.SpecopsAttnBackend(runner)
    brought = torch.tensor(TREE, dtype=torch.bool).flatten().repeat(3)
    spec_info = SimpleNamespace(draft_token_num=4, custom_mask=brought, ragged_verify_layout=None)
    session.run(backend, session.batch(modes().TARGET_VERIFY, [4, 4, 4], [9, 12, 3], spec_info=spec_info), TREE)
    backend.init_cuda_graph_state(5, 20)
    assert backend.verify_mask.fits(5)
    assert backend.verify_mask.buffer.numel() == 5 * 16


def test_draft_extend_counts_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    module = load_backend(monkeypatch)
    session = Session(make_runner(is_draft_worker=True), [9, 12, 3])
    spec_info = SimpleNamespace(num_tokens_per_req=4)
    batch = session.batch(modes().DRAFT_EXTEND_V2, [4, 4, 4], [13, 16, 7], spec_info=spec_info)
    backend = module.SpecopsAttnBackend(session.runner)
    session.run(backend, batch)
    assert backend.verify_mask is None


def test_draft_steps_see_what_those_before_them_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    module = load_backend(monkeypatch)
    session = Session(make_runner(is_draft_worker=True), [9, 12, 3])
    steps = module.SpecopsMultiStepBackend(session.runner, 1, 3)
    steps.init_cuda_graph_state(3, 3)
    assert len(steps.attn_backends) == 2
    committed = list(session.lens)
    for step, backend in enumerate(steps.attn_backends):
        batch = session.batch(modes().DECODE, [1, 1, 1], committed, spec_info=SimpleNamespace())
        steps.init_forward_metadata_out_graph(batch)
        steps.init_forward_metadata(batch)
        assert backend.forward_metadata.seq_lens.tolist() == [n + step + 1 for n in committed]
        session.run(backend, batch)
        session.lens = [n + 1 for n in session.lens]
    with pytest.raises(ValueError, match="--speculative-draft-attention-backend triton"):
        module.SpecopsMultiStepBackend(session.runner, 2, 3)


@pytest.mark.parametrize(
    ("layer", "options"),
    [
        ({"sliding_window_size": 4}, {"window": 5}),
        ({"logit_cap": 2.0}, {"softcap": 2.0}),
        ({}, {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0]), "call": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}}),
    ],
    ids=["window", "softcap", "sinks"],
)
def test_options_of_a_layer(monkeypatch: pytest.MonkeyPatch, layer: dict[str, Any], options: dict[str, Any]) -> None:
    module = load_backend(monkeypatch)
    session = Session(make_runner(), [9, 12, 3], make_layer(0, **layer))
    batch = session.batch(modes().EXTEND, [4, 1, 6], [13, 13, 9])
    session.run(module.SpecopsAttnBackend(session.runner), batch, **options)


def test_an_fp8_cache_holds_values_over_scale_and_the_caller_s_tensors_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    module = load_backend(monkeypatch)
    session = Session(make_runner(dtype=torch.float8_e4m3fn), [0, 0, 0])
    session.layer.k_scale, session.layer.v_scale = torch.tensor(0.5), torch.tensor(0.25)
    batch = session.batch(modes().EXTEND, [4, 1, 6], [4, 1, 6])
    given = session.new.clone()
    for place, row in zip(session.known, range(11), strict=True):
        k, v = given[0, row] / 0.5, given[1, row] / 0.25
        session.known[place] = (k.to(torch.float8_e4m3fn).float() * 0.5, v.to(torch.float8_e4m3fn).float() * 0.25)
    session.run(module.SpecopsAttnBackend(session.runner), batch)
    assert torch.equal(session.new, given)


def test_without_saving_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    module = load_backend(monkeypatch)
    session = Session(make_runner(), [9, 12, 3])
    batch = session.batch(modes().DECODE, [1, 1, 1], [9, 12, 3])
    backend = module.SpecopsAttnBackend(session.runner)
    backend.init_forward_metadata(batch)
    before = session.runner.token_to_kv_pool.get_kv_buffer(1)[0].clone()
    backend.forward(torch.randn(3, HEADS, DIM), *session.new, session.layer, batch, save_kv_cache=False)
    backend.forward(torch.randn(3, HEADS, DIM), None, None, session.layer, batch)
    assert torch.equal(session.runner.token_to_kv_pool.get_kv_buffer(1)[0].nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize(
    ("change", "spec", "message"),
    [
        ({"use_mla_backend": True}, {}, "multi-head latent attention"),
        ({"kv_index_translator": SimpleNamespace(is_translating=True)}, {}, "unified pool"),
        ({"kv_cache_dtype": torch.float8_e5m2}, {}, "cache of torch.float8_e5m2"),
        ({}, {"speculative_algorithm": "NGRAM"}, r"algorithm NGRAM \(served: EAGLE, EAGLE3, NEXTN, STANDALONE\)"),
    ],
)
def test_what_is_not_served_is_refused_at_start(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], spec: dict[str, Any], message: str
) -> None:
    module = load_backend(monkeypatch, **spec)
    runner = make_runner()
    vars(runner).update(change)
    with pytest.raises(ValueError, match=f"cannot serve this model: .*{message}.*Choose another --attention-backend"):
        module.SpecopsAttnBackend(runner)


def test_a_pool_for_windows_alone_and_an_unknown_backend_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = load_backend(monkeypatch)
    pool = object.__new__(module.SWAKVPool)
    with pytest.raises(ValueError, match="--disable-hybrid-swa-memory"):
        module.SpecopsAttnBackend(make_runner(pool=pool))
    monkeypatch.setenv(module.BACKEND_VARIABLE, "flashinfer_fa3")
    with pytest.raises(ValueError, match="flashinfer_fa3"):
        module.SpecopsAttnBackend(make_runner())


def test_options_that_the_ops_lack_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    module = load_backend(monkeypatch)
    session = Session(make_runner(), [9, 12, 3])
    backend = module.SpecopsAttnBackend(session.runner)
    batch = session.batch(modes().DECODE, [1, 1, 1], [10, 13, 4])
    backend.init_forward_metadata(batch)
    with pytest.raises(ValueError, match=r"has no k_rope \(layer 1\)"):
        backend.forward(torch.randn(3, HEADS, DIM), *session.new, session.layer, batch, k_rope=torch.zeros(1))
    session.layer.attn_type = module.AttentionType.ENCODER_ONLY
    with pytest.raises(ValueError, match="attention of type"):
        backend.forward(torch.randn(3, HEADS, DIM), *session.new, session.layer, batch)
    ragged = SimpleNamespace(draft_token_num=4, custom_mask=None, ragged_verify_layout=object())
    with pytest.raises(ValueError, match="equally many tokens"):
        backend.init_forward_metadata(session.batch(modes().TARGET_VERIFY, [4] * 3, [9, 12, 3], spec_info=ragged))


@pytest.mark.skipif(world.REAL, reason="over SGLang itself its own registries would keep the entry")
def test_registering_adds_names_and_one_hook_once(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = world.stand_ins()
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "specops.integrations.sglang.backend", raising=False)
    plugin.register()
    plugin.register()
    choices = modules["sglang.srt.arg_groups.choices"]
    assert choices.ATTENTION_BACKEND_CHOICES == choices.DRAFT_ATTENTION_BACKEND_CHOICES == ["triton", "specops"]
    registry = modules["sglang.srt.layers.attention.attention_registry"].ATTENTION_BACKENDS
    assert registry == {"specops": plugin.create}
    assert modules["sglang.srt.plugins.hook_registry"].hooks == [(plugin.DRAFT_FACTORY, plugin.with_specops, "around")]
    module, names = plugin.DRAFT_FACTORY.removeprefix("sglang.").rsplit(".", 2)[0], plugin.DRAFT_FACTORY.split(".")[-2:]
    assert f"{module}:{'.'.join(names)}" in RECORD["functions"]


def test_the_hook_adds_the_two_draft_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    module = load_backend(monkeypatch)
    monkeypatch.setitem(sys.modules, "specops.integrations.sglang.backend", module)
    factory = SimpleNamespace(draft_model_runner=make_runner(is_draft_worker=True), topk=1, speculative_num_steps=3)
    seen: list[dict[str, Any]] = []

    def original(self: Any, backend_name: str, backend_map: Any, error_template: str, stamps_children: bool = False) -> Any:
        seen.append(backend_map)
        return backend_map["specops"]()

    given = {"triton": lambda: ("triton", None)}
    call = ("decode_attention_backend", given, "template")
    name, steps = plugin.with_specops(original, factory, *call, stamps_children=True)
    assert (name, type(steps), len(steps.attn_backends)) == ("specops", module.SpecopsMultiStepBackend, 2)
    name, single = plugin.with_specops(original, factory, *call)
    assert (name, type(single)) == ("specops", module.SpecopsAttnBackend)
    assert single.draft_step is None
    assert set(given) == {"triton"}
    assert set(seen[0]) == {"triton", "specops"}


def test_without_sglang_registering_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "sglang", None)
    for name in [name for name in sys.modules if name.startswith("sglang.")]:
        monkeypatch.delitem(sys.modules, name)
    with caplog.at_level(logging.WARNING, logger="sglang.specops"):
        plugin.register()
    assert "specops is not registered with SGLang (written for 0.5.23)" in caplog.text


def test_importing_the_plug_in_imports_no_sglang() -> None:
    code = "import sys, specops.integrations.sglang, specops.integrations.sglang.mapping\nprint('sglang' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_the_entry_point_names_register() -> None:
    text = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    assert '[project.entry-points."sglang.srt.plugins"]\nspecops = "specops.integrations.sglang:register"\n' in text


def test_pool_shapes() -> None:
    flat = torch.arange(24 * KV_HEADS * DIM).view(24, KV_HEADS, DIM)
    for given in (flat, flat.flatten(1), flat.view(6, 4, KV_HEADS, DIM).transpose(1, 2).contiguous()):
        pages = mapping.pages_of(given, 4, KV_HEADS, DIM)
        assert pages.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()
        assert torch.equal(pages, flat.view(6, 4, KV_HEADS, DIM))
    wide = torch.zeros(24, 3, KV_HEADS, DIM)[:, 1]
    # Pages of one slot: the stride over pages is the slots'; the other has one entry to step over.
    pages = mapping.pages_of(wide, 1, KV_HEADS, DIM)
    assert (pages.shape, pages.stride(0)) == ((24, 1, KV_HEADS, DIM), 3 * KV_HEADS * DIM)
    with pytest.raises(ValueError, match="SGLang's pool must be"):
        mapping.pages_of(flat[:23], 4, KV_HEADS, DIM)


def methods() -> Iterator[str]:
    yield from (path for path in RECORD["functions"] if path.startswith(BASE))


@pytest.mark.parametrize("path", list(methods()))
def test_our_methods_take_what_sglang_passes(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    module = load_backend(monkeypatch)
    ours = inspect.signature(getattr(module.SpecopsAttnBackend, path.rsplit(".", 1)[1]))
    plain = [name for name, _ in RECORD["functions"][path] if not name.startswith("*")]
    ours.bind(*plain)
    ours.bind(plain[0], **dict.fromkeys(plain[1:]))
    ours.bind(*[name for name, has_default in RECORD["functions"][path] if not has_default])


def test_stand_ins_have_the_recorded_names_and_parameters() -> None:
    functions, names = RECORD["functions"], RECORD["names"]
    stand_ins: dict[str, Any] = {
        "srt.mem_cache.memory_pool:MHATokenToKVPool.set_kv_buffer": world.Pool.set_kv_buffer,
        "srt.mem_cache.memory_pool:MHATokenToKVPool.get_kv_buffer": world.Pool.get_kv_buffer,
        **{path: getattr(world.AttentionBackend, path.rsplit(".", 1)[1], None) for path in methods()},
    }
    for path, function in stand_ins.items():
        if function is not None:
            plain = [name for name, _ in functions[path] if not name.startswith("*")]
            assert [name for name in inspect.signature(function).parameters if name != "kwargs"] == plain, path
    hooked = [name for name, _ in functions["srt.speculative.draft_utils:DraftBackendFactory._create_backend"]]
    assert hooked == ["self", "backend_name", "backend_map", "error_template", "stamps_children"]
    # Everything a stand-in has is in SGLang's source: the record keeps what the plug-in relies on.
    assert set(vars(make_layer(0))) <= set(names["srt.layers.radix_attention:RadixAttention"]) or world.REAL
    runner = set(vars(make_runner())) - {"kv_cache_dtype"}
    assert runner <= set(names["srt.model_executor.model_runner:ModelRunner"])
    session = Session(make_runner(), [1, 1, 1])
    batch = session.batch(modes().DECODE, [1, 1, 1], [2, 2, 2])
    assert set(vars(batch)) <= set(names["srt.model_executor.forward_batch_info:ForwardBatch"])
    assert {mode for mode in dir(world.ForwardMode) if mode.startswith("is_") and mode != "is_integer"} <= set(
        names["srt.model_executor.forward_batch_info:ForwardMode"]
    )
    assert set(world.SPEC) <= set(names["srt.arg_groups.field_order:"])
    assert {field.name for field in world.AttentionType} <= set(names["srt.layers.radix_attention:AttentionType"])
    assert {field.name for field in world.TreeMaskMode} <= set(names["kernels.ops.speculative.spec_tree:TreeMaskMode"])
    assert {"buffer", "mode", "max_bs", "is_read", "fits"} <= set(names["srt.layers.attention.verify_mask:VerifyMask"])
    assert "num_tokens_per_req" in names["srt.speculative.eagle_info:EagleDraftExtendInput"]
    assert {"draft_token_num", "custom_mask"} <= set(names["srt.speculative.eagle_info:EagleVerifyInput"])
    assert "ragged_verify_layout" in names["srt.speculative.spec_info:SpecInput"]
    assert RECORD["version"] == plugin.READ
