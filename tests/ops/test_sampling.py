"""Verification by sampling is lossless: by total variation over 100,000 trials, and node by node against plain Python.

OMP_NUM_THREADS=1 pytest tests/ops/test_sampling.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specops import ops
from specops.ops import sampling

TRIALS = 100_000
P = torch.tensor([0.5, 0.3, 0.15, 0.05])
Q = torch.tensor([0.1, 0.2, 0.3, 0.4])
# Parents of: a root with two children; a root with two children, of which the first has two and the second one.
SHALLOW = [-1, 0, 0]
DEEP = [-1, 0, 0, 1, 1, 2]


def variation(counts: Tensor, probabilities: Tensor) -> float:
    """Total variation between observed counts and probabilities."""
    return float((counts / counts.sum() - probabilities).abs().sum() / 2)


def verify(tokens: Tensor, parents: list[int], target: Tensor, draft: Tensor | None, num_steps: int) -> tuple[Tensor, ...]:
    batch = tokens.shape[0]
    rows = torch.tensor(parents).expand(batch, -1)
    return ops.verify_sampling(tokens, rows, target, draft, torch.rand(tokens.shape), torch.rand(batch), num_steps=num_steps)


@pytest.mark.parametrize("draft", [Q, P, torch.full((4,), 0.25)], ids=["other", "equal", "uniform"])
@pytest.mark.parametrize("topk", [1, 2, 3])
def test_children_drawn_from_the_draft_give_the_targets_distribution(draft: Tensor, topk: int) -> None:
    children = torch.multinomial(draft.expand(TRIALS, 4), topk)
    tokens = torch.cat((torch.zeros(TRIALS, 1, dtype=torch.int64), children), dim=1)
    shape = (TRIALS, topk + 1, 4)
    lens, _, emitted = verify(tokens, [-1] + [0] * topk, P.expand(shape), draft.expand(shape), 1)
    assert variation(emitted[:, 0].bincount(minlength=4), P) < 0.01
    if draft is P:
        assert (lens == 2).all(), "a draft equal to the target is always accepted"


@pytest.mark.parametrize("children", [[0, 1], [3, 2], [2, 2], [0, 1, 2, 3], [1]], ids=str)
def test_picked_children_give_the_targets_distribution(children: list[int]) -> None:
    tokens = torch.tensor([[0, *children]]).expand(TRIALS, -1)
    lens, _, emitted = verify(tokens, [-1] + [0] * len(children), P.expand(TRIALS, len(children) + 1, 4), None, 1)
    assert variation(emitted[:, 0].bincount(minlength=4), P) < 0.01
    assert (lens == 2).float().mean().item() == pytest.approx(float(P[list(set(children))].sum()), abs=0.01)


@pytest.mark.parametrize("drawn", [True, False])
def test_two_levels_give_the_targets_joint_distribution(drawn: bool) -> None:
    # The target's next distribution depends on the token before: row t of this matrix, row 0 being that of the root too.
    after = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.1, 0.6, 0.1, 0.2], [0.25, 0.25, 0.25, 0.25], [0.7, 0.1, 0.1, 0.1]])
    guess = torch.tensor([[0.2, 0.2, 0.5, 0.1], [0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.4, 0.1]])
    tokens = torch.zeros(TRIALS, len(DEEP), dtype=torch.int64)
    for node in (0, 1, 2):
        children = [child for child, parent in enumerate(DEEP) if parent == node]
        q = guess[tokens[:, node]]
        picked = torch.multinomial(q, len(children)) if drawn else q.topk(len(children)).indices
        tokens[:, children] = picked
    lens, _, emitted = verify(tokens, DEEP, after[tokens], guess[tokens] if drawn else None, 2)
    # Where one token came out, the target goes on by itself.
    alone = torch.multinomial(after[emitted[:, 0]], 1).squeeze(1)
    second = torch.where(lens > 1, emitted[:, 1], alone)
    joint = (emitted[:, 0] * 4 + second).bincount(minlength=16)
    assert variation(joint, (after[0][:, None] * after).flatten()) < 0.01
    # And the bonus token behind a full path, too.
    full = lens == 3
    assert full.sum() > 5000
    seconds = emitted[full, 1].bincount(minlength=4)
    often = (seconds > 2000).nonzero().flatten().tolist()
    assert len(often) > 1
    for last in often:
        third = emitted[full & (emitted[:, 1] == last), 2]
        assert variation(third.bincount(minlength=4), after[last]) < 0.04


def plainly(
    tokens: list[int],
    parents: list[int],
    target: list[list[float]],
    draft: list[list[float]] | None,
    uniforms: list[float],
    bonus: float,
) -> tuple[list[int], list[int]]:
    """Path and emitted tokens of one request by the definition, in Python floats."""
    path, emitted, node = [0], [], 0
    while True:
        p = list(target[node])
        q = None if draft is None else list(draft[node])
        for child in (c for c, parent in enumerate(parents) if parent == node):
            x = tokens[child]
            proposal = q if q is not None else [float(t == x) for t in range(len(p))]
            if uniforms[child] * proposal[x] < p[x]:
                path.append(child)
                emitted.append(x)
                node = child
                break
            p = [max(a - b, 0.0) for a, b in zip(p, proposal, strict=True)]
            p = [a / sum(p) for a in p]
            if q is not None:
                q[x] = 0.0
                q = [a / sum(q) for a in q] if sum(q) > 0 else q
        else:
            height = 0.0
            for t, weight in enumerate(p):
                height += weight
                if height > bonus:
                    return path, [*emitted, t]
            return path, [*emitted, max(range(len(p)), key=p.__getitem__)]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 6), min_size=0, max_size=8),
    st.integers(0, 10_000),
    st.booleans(),
    st.sampled_from([0.5, 2.0, 6.0]),
)
def test_every_walk_is_the_plain_one(draws: list[int], seed: int, drawn: bool, spread: float) -> None:
    parents = [-1] + [draw % (node + 1) for node, draw in enumerate(draws)]
    num_nodes, vocabulary, batch = len(parents), 9, 8
    rng = torch.Generator().manual_seed(seed)
    target, draft = (torch.randn(2, batch, num_nodes, vocabulary, generator=rng) * spread).softmax(dim=3)
    tokens = torch.randint(0, vocabulary, (batch, num_nodes), generator=rng)
    for node in range(num_nodes):
        children = [child for child, parent in enumerate(parents) if parent == node]
        if drawn and children:
            tokens[:, children] = torch.multinomial(draft[:, node], len(children), generator=rng)
    uniforms, bonus = torch.rand(batch, num_nodes, generator=rng), torch.rand(batch, generator=rng)
    rows = torch.tensor(parents).expand(batch, -1)
    lens, index, emitted = ops.verify_sampling(
        tokens, rows, target, draft if drawn else None, uniforms, bonus, num_steps=max(1, num_nodes - 1)
    )
    for b in range(batch):
        path, plain = plainly(
            tokens[b].tolist(),
            parents,
            target[b].double().tolist(),
            draft[b].double().tolist() if drawn else None,
            uniforms[b].tolist(),
            bonus[b].item(),
        )
        spare = [-1] * (index.shape[1] - len(path))
        assert lens[b] == len(path)
        assert index[b].tolist() == path + spare
        assert emitted[b].tolist() == plain + [0] * len(spare)


@pytest.mark.parametrize("drawn", [True, False])
@pytest.mark.parametrize("mass_on_siblings", [0.5, 1 - 1e-6, 1.0])
def test_33_siblings_rejected_in_a_row_leave_a_finite_normalised_rest(drawn: bool, mass_on_siblings: float) -> None:
    vocabulary, siblings = 40, 33
    p = torch.full((vocabulary,), (1 - mass_on_siblings) / (vocabulary - siblings))
    p[:siblings] = mass_on_siblings / siblings
    q = torch.zeros(vocabulary)
    q[:siblings] = 1 / siblings
    tokens = torch.arange(-1, siblings).clamp(min=0)[None]
    parents = torch.tensor([[-1] + [0] * siblings])
    target = p.expand(1, siblings + 1, vocabulary)
    # The largest number below one rejects whatever can be rejected.
    uniforms = torch.full((1, siblings + 1), 1 - 2**-24)
    draft = q.expand_as(target) if drawn else None
    if drawn:
        _, rest = sampling._walk_drawn(tokens, parents, target, q.expand_as(target), uniforms)
    else:
        _, rest = sampling._walk_picked(tokens, parents, target, uniforms, 1)
    assert rest.isfinite().all()
    assert (rest >= 0).all()
    assert rest.sum() > 0
    lens, _, emitted = ops.verify_sampling(tokens, parents, target, draft, uniforms, torch.tensor([0.5]), num_steps=1)
    out = emitted[0, 0].item()
    assert p[out] > 0
    if mass_on_siblings == 0.5:
        assert lens.item() == 1
        assert out >= siblings, "all siblings were rejected, so the bonus token is none of them"
        assert (rest / rest.sum())[0, siblings:].sum().item() == pytest.approx(1.0)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=0, max_size=8), st.integers(0, 10_000), st.booleans())
def test_temperature_0_is_greedy_verification(draws: list[int], seed: int, drawn: bool) -> None:
    parents = [-1] + [draw % (node + 1) for node, draw in enumerate(draws)]
    num_nodes, batch, vocabulary = len(parents), 8, 4
    rng = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocabulary, (batch, num_nodes), generator=rng)
    chosen = torch.randint(0, vocabulary, (batch, num_nodes), generator=rng)
    rows = torch.tensor(parents).expand(batch, -1)
    target = torch.nn.functional.one_hot(chosen, vocabulary).float()
    draft = torch.rand(batch, num_nodes, vocabulary, generator=rng).softmax(dim=2) if drawn else None
    uniforms, bonus = torch.rand(batch, num_nodes, generator=rng), torch.rand(batch, generator=rng)
    steps = max(1, num_nodes - 1)
    sampled = ops.verify_sampling(tokens, rows, target, draft, uniforms, bonus, num_steps=steps)
    greedy = ops.verify_greedy(tokens, rows, rows, chosen, num_steps=steps)
    for got, want in zip(sampled, greedy, strict=True):
        assert torch.equal(got, want)


def test_temperature_1_on_uniform_logits_varies() -> None:
    shape = (1000, 3, 16)
    tokens = torch.tensor([[0, 1, 2]]).expand(1000, -1)
    _, _, emitted = verify(tokens, SHALLOW, torch.full(shape, 1 / 16), None, 1)
    assert len(emitted[:, 0].unique()) == 16


def test_a_bonus_token_never_has_probability_zero() -> None:
    weights = torch.zeros(3, 8)
    weights[:, 3] = torch.tensor([1.0, 1e-30, 0.7])
    weights[2, 5] = 0.3
    for uniform in (0.0, 0.5, 1 - 2**-24):
        drawn = sampling.draw(weights, torch.full((3,), uniform))
        assert drawn[:2].tolist() == [3, 3]
        assert drawn[2].item() == (5 if uniform > 0.7 else 3)


def test_it_compiles_into_one_graph_with_a_dynamic_batch() -> None:
    torch._dynamo.reset()

    def step(tokens: Tensor, parents: Tensor, target: Tensor, uniforms: Tensor, bonus: Tensor) -> tuple[Tensor, ...]:
        return ops.verify_sampling(tokens, parents, target, None, uniforms, bonus, num_steps=2)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch in (4, 2, 3):
        inputs = (
            torch.randint(0, 4, (batch, 6)),
            torch.tensor(DEEP).repeat(batch, 1),
            torch.rand(batch, 6, 4).softmax(dim=2),
            torch.rand(batch, 6),
            torch.rand(batch),
        )
        for got, want in zip(compiled(*inputs), step(*inputs), strict=True):
            assert torch.equal(got, want)


def error(call: Callable[..., Any], *args: Any, **options: Any) -> str:
    with pytest.raises((ValueError, TypeError)) as caught:
        call(*args, **options)
    return f"{caught.type.__name__}: {caught.value}"


def test_errors_say_what_was_given_and_what_is_needed() -> None:
    tokens, probs, uniforms, bonus = (
        torch.zeros(2, 3, dtype=torch.int64),
        torch.ones(2, 3, 4),
        torch.zeros(2, 3),
        torch.zeros(2),
    )
    call = ops.verify_sampling
    messages = [
        error(call, tokens, tokens[:, :2], probs, None, uniforms, bonus, num_steps=1),
        error(call, tokens, tokens, probs[:, :2], None, uniforms, bonus, num_steps=1),
        error(call, tokens, tokens, probs, probs[..., :2], uniforms, bonus, num_steps=1),
        error(call, tokens, tokens, probs, None, uniforms, bonus[:1], num_steps=1),
        error(call, tokens, tokens, probs.half(), None, uniforms, bonus, num_steps=1),
        error(call, tokens, tokens, probs, probs.double(), uniforms, bonus, num_steps=1),
        error(call, tokens, tokens, probs, None, uniforms, bonus, num_steps=0),
    ]
    assert_expected_inline(
        "\n".join(messages),
        """\
ValueError: tokens, parents and accept_uniforms must all be [B, n], got (2, 3), (2, 2) and (2, 3)
ValueError: target_probs must be [2, 3, V], got (2, 2, 4)
ValueError: draft_probs (2, 3, 2) and target_probs (2, 3, 4) must agree; map a reduced draft vocabulary to the target's first
ValueError: bonus_uniforms must be [2], got (1,)
TypeError: target_probs must be torch.float32, got torch.float16
TypeError: draft_probs must be torch.float32, got torch.float64
ValueError: num_steps must be >= 1, got 0""",
    )


@pytest.mark.gpu
@pytest.mark.parametrize("drawn", [True, False])
def test_a_round_of_tree_ops_replays_from_a_cuda_graph_with_other_inputs(drawn: bool) -> None:
    batch, vocabulary, parent = 3, 50, torch.tensor([[-1, -1, 0, 1, 2, 3, 4, 5]])

    def inputs(seed: int) -> list[Tensor]:
        rng = torch.Generator().manual_seed(seed)
        scores = torch.randn(batch, 8, generator=rng).sort(dim=1, descending=True).values
        tokens = torch.randint(0, vocabulary, (batch, 8), generator=rng)
        target, draft = (torch.randn(2, batch, 6, vocabulary, generator=rng) * 3).softmax(dim=3)
        chosen = torch.randint(0, vocabulary, (batch, 6), generator=rng)
        uniforms = torch.rand(batch, 6, generator=rng), torch.rand(batch, generator=rng)
        root = torch.randint(0, vocabulary, (batch,), generator=rng)
        return [root, tokens, scores, parent.repeat(batch, 1), chosen, target, draft, *uniforms]

    def step(*given: Tensor) -> tuple[Tensor, ...]:
        root, tokens, scores, parents, chosen, target, draft, accept, bonus = given
        tree = ops.build_tree(root, tokens, scores, parents, num_draft_tokens=6, num_steps=4)
        greedy = ops.verify_greedy(*tree[:3], chosen, num_steps=4)
        sampled = ops.verify_sampling(tree[0], tree[1], target, draft if drawn else None, accept, bonus, num_steps=4)
        return *tree, *greedy, *sampled

    static = [tensor.cuda() for tensor in inputs(0)]
    step(*static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(*static)
    for seed in range(1, 6):
        fresh = inputs(seed)
        for buffer, tensor in zip(static, fresh, strict=True):
            buffer.copy_(tensor)
        graph.replay()
        for got, want in zip(captured, step(*fresh), strict=True):
            assert torch.equal(got.cpu(), want)
