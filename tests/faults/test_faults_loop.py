"""Kinds of fault at the level of runner, pages, decode loop, sampling and import; each named by its id.

OMP_NUM_THREADS=1 pytest -k faults tests/faults/test_faults_loop.py
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from specops import OutOfPages, PageAllocator, PagedKVCache, PageTable, ops
from specops.compile import DraftExtendRunner
from specops.ops.backends import AttentionRequest, Backend, Capabilities, capable_backends
from specops.spec import Engine, SpecConfig
from specops.testing import check_runner
from specops.testing.toy_draft import HIDDEN, MAX_PAGES, ToyDraft
from tests.spec.toys import Shadow, greedy, small_llama, target_of, untrained_head

PROMPTS = [[1, 2, 3, 4, 5], [7] * 13, [9, 8]]


@pytest.fixture(scope="module")
def world() -> dict[str, Any]:
    judge = small_llama()
    target = target_of(judge)
    return {"judge": judge, "target": target, "shadow": Shadow(target)}


def ids(world: dict[str, Any], config: SpecConfig, count: int = 14, **options: Any) -> tuple[Engine, list[list[int]]]:
    engine = Engine(world["target"], world["shadow"], config, **{"max_requests": 3, "max_context": 64, **options})
    requests = engine.generate(PROMPTS, max_new_tokens=count)
    return engine, [request.tokens for request in requests]


def expected(world: dict[str, Any], count: int = 14) -> list[list[int]]:
    return [greedy(world["judge"], prompt, count) for prompt in PROMPTS]


@pytest.mark.parametrize("mode", ["eager", "direct"])
def test_f20_f22_f25_the_runner_over_a_full_pool_a_wide_batch_and_longer_lengths(mode: str) -> None:
    check_runner(mode, only=("small-pool", "widest", "longer-than-at-first")).raise_if_failed()


def test_f23_f48_no_graph_is_lost_within_the_buckets() -> None:
    check_runner("reduce-overhead", only=("every-size",)).raise_if_failed()


def test_f05_page_1_and_topk_8_through_the_loop(world: dict[str, Any]) -> None:
    config = SpecConfig(3, 8, 12)
    engine, got = ids(world, config, page_size=1, max_requests=2)
    assert got == expected(world)
    assert engine.allocator.num_free == engine.allocator.num_pages - 1


@pytest.mark.parametrize("draft_extend", ["v1", "v2"])
def test_f01_f02_six_nodes_of_three_steps_through_the_loop(world: dict[str, Any], draft_extend: str) -> None:
    assert ids(world, SpecConfig(3, 2, 6, draft_extend=draft_extend), page_size=4)[1] == expected(world)


def test_f10_sequences_shorter_than_a_page_through_the_loop(world: dict[str, Any]) -> None:
    assert ids(world, SpecConfig(2, 2, 4), count=3, page_size=32)[1] == expected(world, 3)


def test_f11_pages_are_conserved_over_page_ends(world: dict[str, Any]) -> None:
    engine = Engine(world["target"], world["shadow"], SpecConfig(3), max_requests=2, max_context=64, page_size=16)
    free = engine.allocator.num_free
    for prompt in ([3] * 13, [4] * 16, [5] * 17):
        request = engine.add(prompt, max_new_tokens=9)
        while not request.finished:
            engine.step()
            engine.allocator.check()
        assert engine.allocator.num_free == free
        assert request.tokens == greedy(world["judge"], prompt, 9)


def test_f12_headroom_for_every_branch_is_reserved_or_refused(world: dict[str, Any]) -> None:
    config = SpecConfig(5, 4, 16)
    assert config.scratch_tokens >= (config.num_steps - 1) * config.topk
    with pytest.raises(ValueError, match=r"may need \d+ pages and the pool has 1; raise num_pages"):
        Engine(world["target"], world["shadow"], config, max_context=64, page_size=16, num_pages=2).add(
            [1], max_new_tokens=8
        )
    pages = PageTable(PageAllocator(4, 16), 1, 64)
    pages.reserve(0, 30)
    with pytest.raises(OutOfPages):
        pages.reserve(0, 30 + config.scratch_tokens + 16)
    # The least pool that is taken is enough: the last tree of the longest request fits.
    needed = -(-(64 + config.scratch_tokens) // 16)
    assert ids(world, config, max_requests=1, page_size=16, num_pages=needed + 1)[1] == expected(world)


def test_f14_caches_of_another_page_size_in_one_runner_are_refused() -> None:
    draft = ToyDraft()
    odd = PagedKVCache(20, 8, 2, 16, dtype=torch.float32)
    with pytest.raises(ValueError, match="page size"):
        DraftExtendRunner(
            draft, [draft.caches[0], odd], tokens_per_request=6, max_pages=MAX_PAGES, hidden_size=HIDDEN, mode="eager"
        )


def request(**changes: Any) -> AttentionRequest:
    base: dict[str, Any] = {
        "family": "mha",
        "device_type": "cuda",
        "compute_capability": (9, 0),
        "q_dtype": torch.bfloat16,
        "kv_dtype": torch.bfloat16,
        "num_heads": 8,
        "num_kv_heads": 2,
        "head_dim": 64,
        "value_dim": 64,
        "page_size": 16,
        "layout": "uniform",
        "max_query_len": 2,
    }
    return AttentionRequest(**{**base, **changes})


@pytest.mark.parametrize(("config", "width"), [(SpecConfig(1), 2), (SpecConfig(1, 2, 3), 3)], ids=str)
def test_f29_one_step_has_a_draft_extend_of_its_own_backend(world: dict[str, Any], config: SpecConfig, width: int) -> None:
    engine, got = ids(world, config, split=True, page_size=4)
    assert got == expected(world)
    assert engine.runners["draft_extend"].tokens_per_request == width
    for device in ("cuda", "hip", "musa"):
        asked = request(device_type=device, compute_capability=(9, 0) if device == "cuda" else None, max_query_len=width)
        assert capable_backends(asked) == capable_backends(request(**{**vars(asked), "max_query_len": 6}))
        assert "reference" in capable_backends(asked)


def test_f29_what_a_backend_can_do_is_read_from_data_alone() -> None:
    made = Backend("never_called", "mha", Capabilities(("cuda",)), "no.such.module:kernel")
    assert made.capabilities.why_not(request()) == []


def test_f35_a_draft_with_a_shorter_context_is_refused_with_both_numbers(world: dict[str, Any]) -> None:
    short = untrained_head(world["target"], max_position_embeddings=32)
    with pytest.raises(ValueError, match=r"max_context 64 is beyond the draft's 32 positions \(the target has 128\)"):
        Engine(world["target"], short, max_context=64)
    assert Engine(world["target"], short, SpecConfig(3), max_context=32, page_size=4).generate(
        PROMPTS[:1], max_new_tokens=50
    )[0].tokens == greedy(world["judge"], PROMPTS[0], 27)


def test_f41_a_window_layer_and_a_full_layer_in_one_model() -> None:
    judge = small_llama(kind="Qwen2", use_sliding_window=True, sliding_window=6, max_window_layers=1)
    target = target_of(judge)
    windows = {layer.attn.window for layer in target.layers}
    assert windows == {None, 6}
    shadow = Shadow(target)
    for config in (SpecConfig(3), SpecConfig(3, 2, 6)):
        engine = Engine(target, shadow, config, max_requests=3, max_context=64, page_size=4)
        requests = engine.generate(PROMPTS, max_new_tokens=14)
        assert [r.tokens for r in requests] == [greedy(judge, prompt, 14) for prompt in PROMPTS]


def test_f50_a_cold_import_needs_torch_alone() -> None:
    code = """
import sys
for name in ("triton", "flashinfer", "transformers", "tokenspeed_mla", "safetensors", "gguf"):
    sys.modules[name] = None
import specops, specops.testing
try:
    specops.testing.make_mha_case(query_lens=3).run("flashinfer_fa2")
except ValueError as refusal:
    print(refusal)
"""
    path = str(Path(__file__).parents[2])
    environment = {"PATH": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert "flashinfer is not installed: pip install 'specops[flashinfer]'" in done.stdout


def sample(target: torch.Tensor, children: list[int], draft: torch.Tensor | None, trials: int) -> torch.Tensor:
    """First emitted tokens of trees with one level."""
    tokens = torch.tensor([[0, *children]]).expand(trials, -1)
    if draft is not None:
        drawn = torch.multinomial(draft.expand(trials, -1), len(children))
        tokens = torch.cat((tokens[:, :1], drawn), dim=1)
    parents = torch.tensor([-1] + [0] * len(children)).expand(trials, -1)
    shape = (trials, len(children) + 1, target.shape[0])
    probs = None if draft is None else draft.expand(shape)
    uniforms = torch.rand(trials, len(children) + 1), torch.rand(trials)
    _, _, emitted = ops.verify_sampling(tokens, parents, target.expand(shape), probs, *uniforms, num_steps=1)
    return emitted[:, 0]


@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("drawn", [False, True])
def test_f59_sampling_is_lossless_by_total_variation(same: bool, drawn: bool) -> None:
    target = torch.tensor([0.5, 0.3, 0.15, 0.05])
    draft = target if same else torch.tensor([0.1, 0.2, 0.3, 0.4])
    first = sample(target, draft.topk(2).indices.tolist(), draft if drawn else None, 100_000)
    counts = first.bincount(minlength=4) / 100_000
    assert (counts - target).abs().sum() / 2 < 0.01


@pytest.mark.parametrize("drawn", [False, True])
def test_f60_thirty_three_siblings_rejected_in_a_row(drawn: bool) -> None:
    # The target is sure of token 63; the draft offers 33 others, so each is rejected and the residual must survive.
    target, draft = torch.full((64,), 1e-9), torch.zeros(64)
    target[63] = 1.0
    target /= target.sum()
    draft[:40] = 1 / 40
    first = sample(target, list(range(33)), draft if drawn else None, 500)
    assert first.unique().tolist() == [63]


def test_f61_temperature_1_varies_and_temperature_0_is_greedy() -> None:
    uniform = torch.full((64,), 1 / 64)
    first = sample(uniform, [5, 9], None, 2000)
    assert first.unique().numel() == 64
    greedy_row = torch.nn.functional.one_hot(torch.tensor(17), 64).float()
    assert sample(greedy_row, [5, 17], None, 200).unique().tolist() == [17]
    assert sample(greedy_row, [5, 9], None, 200).unique().tolist() == [17]
