"""Draft trees against plain recursive Python: building them and verifying them greedily.

OMP_NUM_THREADS=1 pytest tests/ops/test_tree.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st

from specops import ops

Candidate = tuple[int, float, int]


@st.composite
def candidates(draw: st.DrawFn, topk: int, num_steps: int, vocabulary: int) -> list[Candidate]:
    """(token, score, parent) as a draft gives them: level by level, topk children a parent, scores falling along a path.

    Only the topk best of a level are expanded, as EAGLE-2 does. Scores are multiples of 1/8 with many ties, and tokens
    repeat, among siblings as well.
    """
    listed: list[Candidate] = []
    expand = [(-1, 0.0)]
    for _ in range(num_steps):
        level = []
        for parent, score in expand:
            for _ in range(topk):
                step = draw(st.integers(0, 3)) / 8
                listed.append((draw(st.integers(0, vocabulary - 1)), score - step, parent))
                level.append((len(listed) - 1, score - step))
        level.sort(key=lambda node: -node[1])
        expand = level[:topk]
    return listed


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], list[list[Candidate]], int, int]:
    topk, num_steps = draw(st.integers(1, 8)), draw(st.integers(1, 4))
    batch = draw(st.integers(1, 3))
    vocabulary = draw(st.sampled_from((2, 3, 50)))
    requests = [draw(candidates(topk, num_steps, vocabulary)) for _ in range(batch)]
    roots = [draw(st.integers(0, vocabulary - 1)) for _ in range(batch)]
    return roots, requests, draw(st.integers(1, len(requests[0]) + 1)), num_steps


def built_plainly(root: int, listed: list[Candidate], num_nodes: int) -> dict[str, list[Any]]:
    """The tree of one request: the best candidates, ties to the earlier one, in the order they were listed."""
    best = sorted(range(len(listed)), key=lambda c: (-listed[c][1], c))[: num_nodes - 1]
    kept = sorted(best)
    node_of = {candidate: node + 1 for node, candidate in enumerate(kept)} | {-1: 0}
    parents = [-1] + [node_of[listed[c][2]] for c in kept]

    def ancestors(node: int) -> list[int]:
        return [] if node == -1 else [*ancestors(parents[node]), node]

    def first(found: list[int]) -> int:
        return found[0] if found else -1

    nodes = range(num_nodes)
    return {
        "tokens": [root] + [listed[c][0] for c in kept],
        "parents": parents,
        "depths": [len(ancestors(node)) - 1 for node in nodes],
        "tree_mask": [[other in ancestors(node) for other in nodes] for node in nodes],
        "first_child": [first([child for child in nodes if parents[child] == node]) for node in nodes],
        "next_sibling": [first([s for s in nodes if s > node and node and parents[s] == parents[node]]) for node in nodes],
    }


def verified_plainly(tree: dict[str, list[Any]], target: list[int], num_steps: int) -> tuple[int, list[int], list[int]]:
    """Length, node indices and emitted tokens of one request, padded with -1 and 0."""

    def follow(node: int) -> list[int]:
        children = [c for c, parent in enumerate(tree["parents"]) if parent == node and tree["tokens"][c] == target[node]]
        return [node, *(follow(children[0]) if children else [])]

    path = follow(0)
    spare = num_steps + 1 - len(path)
    return len(path), path + [-1] * spare, [target[node] for node in path] + [0] * spare


def tensors(roots: list[int], requests: list[list[Candidate]]) -> tuple[torch.Tensor, ...]:
    token, score, parent = (torch.tensor([[entry[i] for entry in listed] for listed in requests]) for i in range(3))
    return torch.tensor(roots), token.long(), score.float(), parent.long()


@settings(max_examples=200, deadline=None)
@given(batches())
def test_build_is_the_plain_one(drawn: tuple[list[int], list[list[Candidate]], int, int]) -> None:
    roots, requests, num_nodes, num_steps = drawn
    result = ops.build_tree(*tensors(roots, requests), num_draft_tokens=num_nodes, num_steps=num_steps)
    tokens, parents, depths, tree_mask, first_child, next_sibling = (tensor.tolist() for tensor in result)
    for b, (root, listed) in enumerate(zip(roots, requests, strict=True)):
        expected = built_plainly(root, listed, num_nodes)
        assert tokens[b] == expected["tokens"]
        assert parents[b] == expected["parents"]
        assert depths[b] == expected["depths"]
        assert tree_mask[b * num_nodes : (b + 1) * num_nodes] == expected["tree_mask"]
        assert first_child[b] == expected["first_child"]
        assert next_sibling[b] == expected["next_sibling"]


@settings(max_examples=200, deadline=None)
@given(batches(), st.data())
def test_verify_is_the_plain_one(drawn: tuple[list[int], list[list[Candidate]], int, int], data: st.DataObject) -> None:
    roots, requests, num_nodes, num_steps = drawn
    trees = [built_plainly(root, listed, num_nodes) for root, listed in zip(roots, requests, strict=True)]
    targets = []
    for tree in trees:
        # Mostly one of the node's children, so that long paths happen.
        target = []
        for node in range(num_nodes):
            children = [tree["tokens"][c] for c in range(num_nodes) if tree["parents"][c] == node]
            target.append(data.draw(st.sampled_from([*children, 0, 1]) if children else st.integers(0, 3)))
        targets.append(target)
    columns = [torch.tensor([tree[name] for tree in trees]) for name in ("tokens", "parents", "depths")]
    lens, index, tokens = ops.verify_greedy(*columns, torch.tensor(targets), num_steps=num_steps)
    assert (lens.dtype, index.dtype, tokens.dtype) == (torch.int32, torch.int64, torch.int64)
    for b, (tree, target) in enumerate(zip(trees, targets, strict=True)):
        expected = verified_plainly(tree, target, num_steps)
        assert (lens[b].item(), index[b].tolist(), tokens[b].tolist()) == expected


def test_sum_of_log_probabilities_keeps_parents_of_kept_children() -> None:
    # A certain child has its parent's score: 0.0 added to it. The parent is listed first and must win the tie.
    result = ops.build_tree(
        torch.tensor([7]),
        torch.tensor([[1, 2, 3, 4]]),
        torch.tensor([[-0.5, -0.5, -0.5, -0.5]]),
        torch.tensor([[-1, -1, 0, 2]]),
        num_draft_tokens=3,
        num_steps=3,
    )
    assert result[0].tolist() == [[7, 1, 2]]
    assert result[1].tolist() == [[-1, 0, 0]]


def test_node_2_does_not_see_its_sibling_node_1() -> None:
    tree_mask = ops.build_tree(
        torch.tensor([7] * 3),
        torch.tensor([[1, 2, 3]] * 3),
        torch.tensor([[-0.1, -0.2, -0.3]] * 3),
        torch.tensor([[-1, -1, 1]] * 3),
        num_draft_tokens=4,
        num_steps=2,
    )[3]
    expected = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]
    assert tree_mask.int().tolist() == expected * 3


def test_a_request_accepts_the_same_alone_and_beside_its_copy() -> None:
    token, score, parent = (
        torch.randint(0, 3, (1, 8)),
        torch.tensor([[-0.1 * i for i in range(8)]]),
        torch.tensor([[-1] * 4 + [0, 1, 2, 3]]),
    )
    target = torch.randint(0, 3, (1, 7))

    def run(copies: int) -> tuple[torch.Tensor, ...]:
        tree = ops.build_tree(
            torch.tensor([5] * copies),
            token.repeat(copies, 1),
            score.repeat(copies, 1),
            parent.repeat(copies, 1),
            num_draft_tokens=7,
            num_steps=2,
        )
        return ops.verify_greedy(*tree[:3], target.repeat(copies, 1), num_steps=2)

    for alone, twice in zip(run(1), run(2), strict=True):
        assert torch.equal(twice, alone.repeat(2, *(1,) * (alone.dim() - 1)))


@pytest.mark.parametrize("num_nodes", [1, 2, 6, 9])
def test_both_ops_compile_into_one_graph_with_a_dynamic_batch(num_nodes: int) -> None:
    torch._dynamo.reset()

    def step(
        root: torch.Tensor, token: torch.Tensor, score: torch.Tensor, parent: torch.Tensor, target: torch.Tensor
    ) -> Any:
        tree = ops.build_tree(root, token, score, parent, num_draft_tokens=num_nodes, num_steps=3)
        return *tree, *ops.verify_greedy(*tree[:3], target, num_steps=3)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch in (4, 2, 3):
        parent = torch.tensor([[-1, -1, 0, 1, 2, 3, 4, 5]] * batch)
        inputs = (
            torch.randint(0, 4, (batch,)),
            torch.randint(0, 4, (batch, 8)),
            torch.randn(batch, 8).sort(dim=1, descending=True).values,
            parent,
            torch.randint(0, 4, (batch, num_nodes)),
        )
        for got, want in zip(compiled(*inputs), step(*inputs), strict=True):
            assert torch.equal(got, want)


def test_an_empty_batch_is_served() -> None:
    tree = ops.build_tree(
        torch.zeros(0, dtype=torch.int64),
        torch.zeros(0, 4, dtype=torch.int64),
        torch.zeros(0, 4),
        torch.zeros(0, 4, dtype=torch.int64),
        num_draft_tokens=3,
        num_steps=2,
    )
    assert [tuple(tensor.shape) for tensor in tree] == [(0, 3), (0, 3), (0, 3), (0, 3), (0, 3), (0, 3)]
    result = ops.verify_greedy(*tree[:3], torch.zeros(0, 3, dtype=torch.int64), num_steps=2)
    assert [tuple(tensor.shape) for tensor in result] == [(0,), (0, 3), (0, 3)]


def error(call: Callable[..., Any], *args: Any, **options: Any) -> str:
    with pytest.raises((ValueError, TypeError)) as caught:
        call(*args, **options)
    return f"{caught.type.__name__}: {caught.value}"


def test_errors_say_what_was_given_and_what_is_needed() -> None:
    root, token, score = torch.zeros(2, dtype=torch.int64), torch.zeros(2, 4, dtype=torch.int64), torch.zeros(2, 4)
    sizes = {"num_draft_tokens": 3, "num_steps": 2}
    messages = [
        error(ops.build_tree, root, token, score[:, :3], token, **sizes),
        error(ops.build_tree, root[:1], token, score, token, **sizes),
        error(ops.build_tree, root.int(), token, score, token, **sizes),
        error(ops.build_tree, root, token, score, token, num_draft_tokens=6, num_steps=2),
        error(ops.build_tree, root, token, score, token, num_draft_tokens=0, num_steps=2),
        error(ops.build_tree, root, token, score, token, num_draft_tokens=3, num_steps=0),
        error(ops.verify_greedy, token, token, token, token[:, :3], num_steps=2),
        error(ops.verify_greedy, token, token, token, token.float(), num_steps=2),
        error(ops.verify_greedy, token, token, token, token, num_steps=0),
    ]
    assert_expected_inline(
        "\n".join(messages),
        """\
ValueError: candidate_tokens and candidate_scores must both be [B, C], got (2, 4) and (2, 3)
ValueError: candidate_parents must be (2, 4) and root_tokens [2], got (2, 4) and (1,)
TypeError: root_tokens must be int64, got torch.int32
ValueError: num_draft_tokens is 6; with 4 candidates it is 1 to 5
ValueError: num_draft_tokens is 0; with 4 candidates it is 1 to 5
ValueError: num_steps must be >= 1, got 0
ValueError: tokens, parents, depths and target_tokens must all be [B, n], got (2, 4), (2, 4), (2, 4) and (2, 3)
TypeError: target_tokens must be int64, got torch.float32
ValueError: num_steps must be >= 1, got 0""",
    )
