"""Sampling: distributions against transformers' logits processors, answers that depend on their seed alone, and the loop's
joint distribution against the exact one.

Run alone: pytest tests/spec/test_sampling.py
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from specops.spec import Engine, SamplingParams, SpecConfig
from specops.spec.runners import variant_for
from specops.spec.sampling import Sampler
from tests.spec.toys import Shadow, greedy, small_llama, target_of, untrained_head

PROMPTS = [[1, 2, 3, 4, 5], [7] * 13, [9, 8], [3] * 30, [11, 12, 13]]
COUNT = 17
WARM = SamplingParams(0.8, seed=5)
NUCLEUS = SamplingParams(1.1, top_p=0.8, seed=5)
FILTERED = SamplingParams(1.1, top_k=12, top_p=0.9, min_p=0.02, repetition_penalty=1.3, seed=5)
SHAPES = {
    "plain": None,
    "chain of 3": SpecConfig(3),
    "one step": SpecConfig(1),
    "tree of 6": SpecConfig(3, 2, 6),
    "tree of 16": SpecConfig(4, 4, 16),
    "narrow tree": SpecConfig(4, 2, 3),
    "packed extend": SpecConfig(3, 2, 6, draft_extend="v1"),
}
PARAMS = [
    SamplingParams(0.7),
    SamplingParams(1.0, top_k=1),
    SamplingParams(1.0, top_k=9),
    SamplingParams(1.3, top_p=0.7),
    SamplingParams(1.0, top_p=1e-6),
    SamplingParams(0.9, min_p=0.1),
    SamplingParams(1.0, repetition_penalty=1.7),
    SamplingParams(0.6, 20, 0.9, 0.05, 1.2),
    SamplingParams(2.0, 1000, 0.99, 1e-4, 0.8),
]


@pytest.fixture(scope="module")
def world() -> dict[str, Any]:
    judge = small_llama()
    target = target_of(judge)
    return {"judge": judge, "target": target, "shadow": Shadow(target), "untrained": untrained_head(target)}


def engine(world: dict[str, Any], draft: str | None, config: SpecConfig | None = None, **options: Any) -> Engine:
    options = {"max_requests": 3, "max_context": 64, "page_size": 4, **options}
    return Engine(world["target"], world[draft] if draft else None, config, **options)


def processed(logits: Tensor, history: list[int], params: SamplingParams) -> Tensor:
    """The distribution by transformers' own processors, in the order its ``generate`` applies them."""
    processors = transformers.LogitsProcessorList([transformers.RepetitionPenaltyLogitsProcessor(params.repetition_penalty)])
    processors.append(transformers.TemperatureLogitsWarper(params.temperature))
    if params.top_k is not None:
        processors.append(transformers.TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        processors.append(transformers.TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        processors.append(transformers.MinPLogitsWarper(params.min_p))
    return processors(torch.tensor([history]), logits[None].double())[0].softmax(0).float()


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_distributions_are_those_of_transformers(params: SamplingParams) -> None:
    vocab, history, path = 50, [3, 4, 4, 7], [9, 3, 11]
    logits = torch.randn(1, 3, vocab) * 3
    sampler = Sampler(2, vocab, torch.device("cpu"))
    sampler.join(1, params, history)
    # A chain: node i has the nodes up to i behind it.
    sees = torch.ones(3, 3, dtype=torch.bool).tril()[None]
    rows, tokens = torch.tensor([1]), torch.tensor([path])
    # A short list will do where top-k cuts, or where nothing but min-p does.
    short = params.top_k if params.top_k and params.top_k < vocab else 1
    for ranks in (vocab, *((short, 25) if params.top_p == 1 or params.top_k in (9, 20) else ())):
        weights, likeliest = sampler.weights(logits, logits.argmax(2), rows, ranks=ranks, tokens=tokens, sees=sees)
        probabilities = sampler.probabilities(weights, likeliest, rows)
        for node in range(3):
            expected = processed(logits[0, node], history + path[: node + 1], params)
            torch.testing.assert_close(probabilities[0, node], expected, rtol=1e-4, atol=1e-6)
            assert torch.equal(probabilities[0, node] == 0, expected == 0)


@pytest.mark.parametrize(
    ("params", "logprobs", "variant"),
    [
        (SamplingParams(), False, "greedy"),
        (SamplingParams(0.0, top_k=3, top_p=0.5, min_p=0.1), False, "greedy"),
        (SamplingParams(), True, "sampled"),
        (SamplingParams(0.5), False, "sampled"),
        (SamplingParams(repetition_penalty=1.1), False, "top_k"),
        (SamplingParams(0.5, min_p=0.1), False, "top_k"),
        (SamplingParams(0.5, top_k=256, top_p=0.9), False, "top_k"),
        (SamplingParams(0.5, top_k=257), False, "filtered"),
        (SamplingParams(0.5, top_p=0.9), False, "filtered"),
    ],
    ids=str,
)
def test_a_request_takes_the_simplest_step_that_serves_it(params: SamplingParams, logprobs: bool, variant: str) -> None:
    assert variant_for(params, logprobs) == variant


def test_rows_of_every_kind_share_a_step_with_a_short_list() -> None:
    vocab, each = 300, [PARAMS[0], PARAMS[2], SamplingParams(0.9, 200, 0.9), PARAMS[5], PARAMS[6], SamplingParams()]
    sampler = Sampler(len(each), vocab, torch.device("cpu"))
    for row, params in enumerate(each):
        sampler.join(row, params, [3, 4])
    logits, rows = torch.randn(len(each), 1, vocab), torch.arange(len(each))
    weights, likeliest = sampler.weights(logits, logits.argmax(2), rows, ranks=256)
    probabilities = sampler.probabilities(weights, likeliest, rows)[:, 0]
    for row, params in enumerate(each[:-1]):
        torch.testing.assert_close(probabilities[row], processed(logits[row, 0], [3, 4], params), rtol=1e-4, atol=1e-7)
    assert probabilities[-1].nonzero().tolist() == [[int(logits[-1].argmax())]]


def test_a_token_in_two_branches_counts_for_its_own_branch_only() -> None:
    # Root 2 with children 5 and 6; node 3 is token 5 below node 2 (token 6), so that node 2 must not see it.
    tokens = torch.tensor([[2, 5, 6, 5]])
    parents = [-1, 0, 0, 2]
    sees = torch.eye(4, dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            sees[node] |= sees[parent]
    params = SamplingParams(1.0, repetition_penalty=2.0)
    sampler = Sampler(1, 10, torch.device("cpu"))
    sampler.join(0, params, [1])
    logits = torch.randn(1, 4, 10)
    weights, _ = sampler.weights(logits, logits.argmax(2), torch.tensor([0]), ranks=10, tokens=tokens, sees=sees[None])
    for node, history in enumerate(([1, 2], [1, 2, 5], [1, 2, 6], [1, 2, 6, 5])):
        torch.testing.assert_close(weights[0, node], processed(logits[0, node], history, params))


def test_a_tiny_temperature_takes_the_likeliest_and_stays_finite() -> None:
    sampler = Sampler(1, 6, torch.device("cpu"))
    sampler.join(0, SamplingParams(1e-20, top_p=0.5), [0])
    logits = torch.randn(1, 4, 6)
    weights, _ = sampler.weights(logits, logits.argmax(2), torch.tensor([0]), ranks=6)
    assert torch.equal(weights, torch.nn.functional.one_hot(logits.argmax(2), 6).float())


@pytest.mark.parametrize("params", [WARM, FILTERED, NUCLEUS], ids=["temperature", "filters", "nucleus"])
@pytest.mark.parametrize("draft", ["shadow", "untrained"])
def test_a_seed_gives_one_answer_with_any_draft_and_in_any_batch(
    world: dict[str, Any], draft: str, params: SamplingParams
) -> None:
    alone = [engine(world, None).generate([p], max_new_tokens=COUNT, sampling=params)[0].tokens for p in PROMPTS]
    for config in SHAPES.values():
        run = engine(world, draft if config else None, config)
        requests = run.generate(PROMPTS, max_new_tokens=COUNT, sampling=params)
        assert [r.tokens for r in requests] == alone
    assert len({tuple(tokens[-6:]) for tokens in alone}) > 1


def test_another_seed_gives_another_answer_and_none_draws_one(world: dict[str, Any]) -> None:
    run = engine(world, "shadow", SpecConfig(3))
    answers = [
        run.generate([PROMPTS[0]], max_new_tokens=COUNT, sampling=SamplingParams(1.0, seed=seed))[0] for seed in range(5)
    ]
    assert len({tuple(r.tokens) for r in answers}) == 5
    drawn = run.generate([PROMPTS[0]] * 3, max_new_tokens=COUNT, sampling=SamplingParams(1.0))
    assert len({tuple(r.tokens) for r in drawn}) == 3
    again = run.generate([PROMPTS[0]], max_new_tokens=COUNT, sampling=drawn[1].sampling)[0]
    assert again.tokens == drawn[1].tokens


@pytest.mark.parametrize("shape", ["plain", "chain of 3", "tree of 6", "packed extend"])
def test_greedy_requests_among_sampling_ones_keep_the_ids_of_transformers(world: dict[str, Any], shape: str) -> None:
    config = SHAPES[shape]
    run = engine(world, "shadow" if config else None, config)
    params = [SamplingParams(), WARM, SamplingParams(), FILTERED, SamplingParams()]
    requests = run.generate(PROMPTS, max_new_tokens=COUNT, sampling=params)
    for index in (0, 2, 4):
        assert requests[index].tokens == greedy(world["judge"], PROMPTS[index], COUNT)
    alone = engine(world, None)
    for index in (1, 3):
        assert (
            requests[index].tokens
            == alone.generate([PROMPTS[index]], max_new_tokens=COUNT, sampling=params[index])[0].tokens
        )
    # Rows are greedy again when their sampling request has left.
    assert run.rounds.sampler is not None
    assert torch.equal(run.rounds.sampler.numbers, torch.tensor([[0.0, 1.0, 0.0, 1.0]]).expand(4, 4))


def test_f61_temperature_0_is_greedy_and_runs_nothing_for_sampling(world: dict[str, Any]) -> None:
    run = engine(world, "shadow", SpecConfig(3, 2, 6))
    requests = run.generate(PROMPTS, max_new_tokens=COUNT, sampling=SamplingParams(0.0, top_k=5, top_p=0.5, seed=3))
    assert [r.tokens for r in requests] == [greedy(world["judge"], p, COUNT) for p in PROMPTS]
    assert list(run.runners) == ["round"]
    assert run.rounds.sampler is None


@pytest.mark.parametrize("acceptance", ["coupled", "residual"])
def test_temperature_0_in_the_sampling_step_is_greedy_too(world: dict[str, Any], acceptance: str) -> None:
    run = engine(world, "shadow", SpecConfig(3, 4, 9, acceptance=acceptance))
    requests = run.generate(PROMPTS, max_new_tokens=COUNT, logprobs=True)
    assert [r.tokens for r in requests] == [greedy(world["judge"], p, COUNT) for p in PROMPTS]
    assert list(run.runners) == ["round", "round_sampled"]


@pytest.mark.parametrize("penalty", [1.4, 0.7])
@pytest.mark.parametrize("shape", ["plain", "chain of 3", "tree of 16"])
def test_greedy_with_a_repetition_penalty_gives_the_ids_of_transformers(
    world: dict[str, Any], shape: str, penalty: float
) -> None:
    config = SHAPES[shape]
    run = engine(world, "shadow" if config else None, config)
    requests = run.generate(PROMPTS, max_new_tokens=COUNT, sampling=SamplingParams(repetition_penalty=penalty))
    for request in requests:
        ids = torch.tensor([request.prompt])
        expected = world["judge"].generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            repetition_penalty=penalty,
            max_new_tokens=COUNT,
            pad_token_id=0,
        )
        assert request.tokens == expected[0, len(request.prompt) :].tolist()


@pytest.mark.parametrize("shape", ["plain", "chain of 3", "tree of 6", "packed extend"])
@pytest.mark.parametrize("params", [SamplingParams(), WARM, FILTERED], ids=["greedy", "temperature", "filters"])
def test_logprobs_are_those_of_the_targets_logits(world: dict[str, Any], shape: str, params: SamplingParams) -> None:
    config = SHAPES[shape]
    run = engine(world, "shadow" if config else None, config)
    for request in run.generate(PROMPTS[:3], max_new_tokens=COUNT, sampling=params, logprobs=True):
        ids = torch.tensor([request.prompt + request.tokens])
        whole = world["judge"](ids).logits[0, len(request.prompt) - 1 : -1].double().log_softmax(1)
        expected = whole.gather(1, torch.tensor(request.tokens)[:, None])[:, 0]
        assert request.logprobs is not None
        torch.testing.assert_close(torch.tensor(request.logprobs), expected.float(), rtol=1e-3, atol=1e-3)
    assert run.generate(PROMPTS[:1], max_new_tokens=2, sampling=params)[0].logprobs is None


@pytest.fixture(scope="module")
def tiny() -> dict[str, Any]:
    judge = small_llama(vocab_size=4, hidden_size=16, intermediate_size=16, num_attention_heads=2, num_key_value_heads=1)
    target = target_of(judge)
    return {"judge": judge, "target": target, "shadow": Shadow(target, noise=0.1)}


def exact_joint(judge: Any, prompt: list[int], length: int, params: SamplingParams) -> Tensor:
    """Probability of every continuation of ``length`` tokens, by transformers in float64."""
    model = judge.double()
    paths: list[tuple[list[int], float]] = [([], 1.0)]
    for _ in range(length):
        longer = []
        for path, probability in paths:
            logits = model(torch.tensor([prompt + path])).logits[0, -1]
            step = processed(logits, prompt + path, params).tolist()
            longer += [([*path, token], probability * p) for token, p in enumerate(step)]
        paths = longer
    judge.float()
    return torch.tensor([probability for _, probability in paths])


@pytest.mark.parametrize("acceptance", ["coupled", "residual"])
@pytest.mark.parametrize(
    "params", [SamplingParams(1.0), SamplingParams(1.5, top_k=3, repetition_penalty=1.5)], ids=["temperature", "filters"]
)
def test_f59_joint_distribution_of_the_loop_is_the_targets(
    tiny: dict[str, Any], acceptance: str, params: SamplingParams
) -> None:
    trials, length, prompt = 4000, 3, [1, 2, 0]
    config = SpecConfig(2, 2, 5, acceptance=acceptance)
    run = Engine(tiny["target"], tiny["shadow"], config, max_requests=1000, max_context=16, page_size=16)
    each = [SamplingParams(**{**vars(params), "seed": seed}) for seed in range(trials)]
    requests = run.generate([prompt] * trials, max_new_tokens=length, sampling=each)
    counts = Counter(tuple(r.tokens) for r in requests)
    seen = torch.tensor([counts[(a, b, c)] / trials for a in range(4) for b in range(4) for c in range(4)])
    expected = exact_joint(tiny["judge"], prompt, length, params)
    assert expected.sum().item() == pytest.approx(1, abs=1e-4)
    # The mean total variation of 64 cells and 4,000 honest trials is at most 0.050.
    assert float((seen - expected).abs().sum() / 2) < 0.06
    assert run.stats.accepted_per_round > 1.2


def test_f61_uniform_logits_give_varying_answers(tiny: dict[str, Any]) -> None:
    target = target_of(tiny["judge"])
    target.lm_head.weight.data.zero_()
    run = Engine(target, Shadow(target), SpecConfig(2), max_requests=400, max_context=16, page_size=16)
    each = [SamplingParams(1.0, seed=seed) for seed in range(400)]
    requests = run.generate([[1]] * 400, max_new_tokens=4, sampling=each)
    counts = torch.tensor([r.tokens for r in requests]).flatten().bincount(minlength=4)
    assert (counts - 400).abs().max() < 80


def test_the_sampling_step_compiles_whole_and_gives_the_same_answers(world: dict[str, Any]) -> None:
    expected = engine(world, None).generate(PROMPTS[:2], max_new_tokens=6, sampling=FILTERED)
    run = engine(world, "shadow", SpecConfig(2, 2, 4), mode="direct", max_requests=2)
    # Traced and guarded as for inductor, without its minutes of C++.
    run.rounds.build("top_k").compiler = "eager"
    requests = run.generate(PROMPTS[:2], max_new_tokens=6, sampling=FILTERED)
    assert [r.tokens for r in requests] == [r.tokens for r in expected]
    report = run.explain()["round_top_k"]
    assert (report.compiled_graphs, report.recompiles) == (2, [])


@pytest.mark.gpu
def test_sampling_rounds_are_captured_and_give_the_answers_of_eager_rounds() -> None:
    target = target_of(small_llama()).cuda()
    options = {"max_requests": 3, "max_context": 64, "page_size": 16, "strict": True}
    # One size of batch, so that each variant is compiled once.
    graphs, eager = (
        Engine(target, Shadow(target), SpecConfig(3, 2, 6), mode=mode, buckets=buckets, **options)
        for mode, buckets in (("direct", [3]), ("eager", None))
    )
    for params in (WARM, FILTERED, NUCLEUS):
        found, wanted = (
            [request.tokens for request in run.generate(PROMPTS, max_new_tokens=COUNT, sampling=params, logprobs=True)]
            for run in (graphs, eager)
        )
        assert found == wanted, params
    reports = graphs.warm_up()
    assert set(reports) == {"prefill", "round", "round_sampled", "round_top_k", "round_filtered"}
    assert all(report.captured for report in reports.values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature must be a number >= 0, got -1.0"),
        ({"temperature": float("nan")}, "temperature must be a number >= 0, got nan"),
        ({"top_k": 0}, "top_k must be >= 1, or None for all tokens, got 0"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, got 0.0"),
        ({"min_p": 1.5}, "min_p must be 0 to 1, got 1.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be a number above 0, got 0.0"),
        ({"seed": -3}, "seed must be 0 to 2\\*\\*63 - 1, got -3"),
    ],
)
def test_parameters_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**options)


def test_as_many_parameters_as_prompts(world: dict[str, Any]) -> None:
    run = engine(world, None)
    with pytest.raises(ValueError, match="there are 2 prompts and sampling parameters for 1"):
        run.generate(PROMPTS[:2], sampling=[WARM])
    assert not run.has_work
