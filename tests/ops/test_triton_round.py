"""The round's small steps as Triton kernels: against plain Python, interpreted, or compiled where there is a GPU.

TRITON_INTERPRET=1 python -m pytest -q tests/ops/test_triton_round.py
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import pytest
from torch import Tensor

from specops import ops
from specops.ops import triton_round, triton_store
from specops.ops.top_tokens import _top_tokens

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize(
    ("rows", "vocab", "k", "dtype"),
    [
        (3, 50, 1, torch.float32),
        (2, 300, 4, torch.bfloat16),
        (5, 17, 16, torch.float16),
        (2, 9000, 2, torch.float32),
        (4, 5000, 4, torch.bfloat16),
        (1, 258, 3, torch.float32),
        (2, 1024, 1, torch.float16),
        (1, 20000, 8, torch.bfloat16),
        (0, 50, 2, torch.float32),
    ],
)
def test_likeliest_tokens_are_those_of_a_sort(rows: int, vocab: int, k: int, dtype: torch.dtype, logprobs: bool) -> None:
    # Every second column of a wider matrix's rows, and many ties in the 16-bit ones.
    logits = (torch.randn(rows, vocab + 3) * 3).to(dtype)[:, :vocab].to(DEVICE)
    values, tokens = triton_round.top_tokens(logits, k, logprobs)
    assert (values.dtype, tokens.dtype, values.shape, tokens.shape) == (torch.float32, torch.int64, (rows, k), (rows, k))
    for row in range(rows):
        numbers = logits[row].tolist()
        best = sorted(range(vocab), key=lambda token: (-numbers[token], token))[:k]
        assert tokens[row].tolist() == best
        total = math.log(math.fsum(math.exp(number) for number in numbers)) if logprobs else 0.0
        assert values[row].tolist() == pytest.approx([numbers[token] - total for token in best], abs=2e-5)


def test_rows_with_few_finite_logits_name_each_token_once() -> None:
    logits = torch.full((2, 40), float("-inf"), device=DEVICE)
    logits[0, 7] = 1.0
    for chosen in (triton_round.top_tokens(logits, 3, False), triton_round.top_tokens(logits, 3, True)):
        tokens = chosen[1]
        assert tokens[0].tolist() == [7, 0, 1]
        assert len(set(tokens[1].tolist())) == 3
        assert 0 <= int(tokens.min()) <= int(tokens.max()) < 40


def test_a_stretch_of_impossible_tokens_adds_nothing() -> None:
    # As the padding of a vocabulary: whole chunks of -inf beside tokens that share all there is, of either zero.
    logits = torch.full((1, 3000), float("-inf"), device=DEVICE)
    logits[0, torch.tensor([700, 1500, 2900, 2999])] = torch.tensor([0.0, -0.0, 0.0, 0.0], device=DEVICE)
    values, tokens = triton_round.top_tokens(logits, 5, True)
    assert tokens[0].tolist() == [700, 1500, 2900, 2999, 0]
    assert values[0].tolist() == pytest.approx([-math.log(4)] * 4 + [float("-inf")])


@pytest.mark.parametrize(("rows", "vocab", "k", "size"), [(1, 8192, 4, 256), (128, 49152, 2, 4096), (1, 200000, 16, 16384)])
def test_chunks_are_small_where_programs_and_parts_stay_few(rows: int, vocab: int, k: int, size: int) -> None:
    assert triton_round.chunk_size(rows, vocab, k) == size


def test_logits_that_are_not_numbers_never_name_a_token_outside_the_vocabulary() -> None:
    logits = torch.full((1, 9000), float("nan"), device=DEVICE)
    tokens = triton_round.top_tokens(logits, 2, False)[1]
    assert 0 <= int(tokens.min()) <= int(tokens.max()) < 9000
    logits[0, 17] = -1e30
    values, tokens = triton_round.top_tokens(logits, 2, False)
    assert (int(tokens[0, 0]), float(values[0, 0])) == (17, pytest.approx(-1e30))


def test_refusals_of_top_tokens() -> None:
    with pytest.raises(ValueError, match=r"logits must be \[R, V\], got \(3,\)"):
        ops.top_tokens(torch.zeros(3), 1)
    with pytest.raises(ValueError, match="k must be 1 to 3, the number of tokens, got 4"):
        ops.top_tokens(torch.zeros(2, 3), 4)


@pytest.mark.parametrize("logprobs", [False, True])
def test_opcheck_of_top_tokens(logprobs: bool) -> None:
    torch.library.opcheck(torch.ops.specops.top_tokens, (torch.randn(3, 20, device=DEVICE), 4, logprobs))


def candidates(batch: int, topk: int, steps: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Levels of a beam search with many equal scores: tokens, scores of paths, parents."""
    rng = random.Random(seed)
    tokens, scores, parents = [], [], []
    for _ in range(batch):
        t, s, p = [rng.randrange(9) for _ in range(topk)], [-float(rng.randrange(3)) for _ in range(topk)], [-1] * topk
        beam = list(range(topk))
        for _level in range(1, steps):
            first = len(t)
            for node in beam:
                for _ in range(topk):
                    t.append(rng.randrange(9))
                    s.append(s[node] - rng.randrange(3))
                    p.append(node)
            beam = sorted(range(first, len(t)), key=lambda c: -s[c])[:topk]
        tokens.append(t)
        scores.append(s)
        parents.append(p)
    return torch.tensor(tokens), torch.tensor(scores), torch.tensor(parents)


def plain_tree(tokens: list[int], scores: list[float], parents: list[int], root: int, n: int) -> dict[str, list]:
    """A tree by the definition, with lists."""
    best = sorted(range(len(tokens)), key=lambda c: (-scores[c], c))[: n - 1]
    kept = sorted(best)
    node = {candidate: place + 1 for place, candidate in enumerate(kept)}
    up = [-1] + [0 if parents[c] < 0 else node[parents[c]] for c in kept]
    sees = []
    for start in range(n):
        at, line = start, set()
        while at >= 0:
            line.add(at)
            at = up[at]
        sees.append([column in line for column in range(n)])
    children = [[child for child in range(n) if up[child] == parent] for parent in range(n)]
    after = [[other for other in range(n) if up[other] == up[child] and other > child] for child in range(n)]
    return {
        "tokens": [root] + [tokens[c] for c in kept],
        "parents": up,
        "depths": [sum(line) - 1 for line in sees],
        "mask": sees,
        "first_child": [min(found, default=-1) for found in children],
        "next_sibling": [-1] + [min(found, default=-1) for found in after[1:]],
    }


@pytest.mark.parametrize(
    ("topk", "steps", "n"), [(1, 1, 2), (1, 5, 6), (2, 3, 6), (2, 1, 3), (4, 3, 16), (4, 4, 40), (8, 3, 33), (3, 2, 1)]
)
def test_trees_are_those_of_the_definition(topk: int, steps: int, n: int) -> None:
    batch = 3
    tokens, scores, parents = candidates(batch, topk, steps, seed=topk * 10 + steps)
    roots = torch.tensor([11, 12, 13])
    given = [tensor.to(DEVICE) for tensor in (roots, tokens, scores, parents)]
    found = [tensor.cpu() for tensor in triton_round.build_tree(*given, n, steps)]
    for request in range(batch):
        wanted = plain_tree(tokens[request].tolist(), scores[request].tolist(), parents[request].tolist(), 11 + request, n)
        for name, tensor in zip(("tokens", "parents", "depths", "mask", "first_child", "next_sibling"), found, strict=True):
            shape = (batch, n, n) if name == "mask" else (batch, n)
            assert tensor.reshape(shape)[request].tolist() == wanted[name], name
    bare = triton_round.build_tree(*given, n, steps, links=False)
    assert [tuple(tensor.shape) for tensor in bare[4:]] == [(batch, 0)] * 2
    assert all(torch.equal(one.cpu(), other) for one, other in zip(bare[:4], found[:4], strict=True))


@pytest.mark.parametrize(("topk", "steps", "n"), [(1, 1, 2), (1, 5, 6), (2, 3, 6), (4, 3, 16), (4, 4, 40)])
def test_verification_follows_the_targets_choices(topk: int, steps: int, n: int) -> None:
    batch, rng = 6, random.Random(n)
    tokens, scores, parents = candidates(batch, topk, steps, seed=n)
    tree = triton_round.build_tree(*(t.to(DEVICE) for t in (torch.zeros(batch).long(), tokens, scores, parents)), n, steps)
    tokens, parents, depths = tree[:3]
    # The first column of pairs, as the likeliest two tokens of a row are.
    choices = torch.tensor([[[rng.randrange(9), 0] for _ in range(n)] for _ in range(batch)], device=DEVICE)[:, :, 0]
    # Some requests' choices follow a path to its end.
    for request in range(0, batch, 2):
        for node in range(n - 1, 0, -1):
            choices[request, parents[request, node]] = tokens[request, node]
    lens, index, emitted = triton_round.verify_greedy(tokens, parents, depths, choices, steps)
    for request in range(batch):
        names, up, wanted = (tensor[request].tolist() for tensor in (tokens, parents, choices))
        path = [0]
        while len(path) <= steps:
            child = [c for c in range(n) if up[c] == path[-1] and names[c] == wanted[path[-1]]]
            if not child:
                break
            path.append(child[0])
        filler = steps + 1 - len(path)
        assert int(lens[request]) == len(path)
        assert index[request].tolist() == path + [-1] * filler
        assert emitted[request].tolist() == [wanted[node] for node in path] + [0] * filler
    assert int(lens.max()) > 1


@pytest.mark.parametrize("alike", [True, False])
def test_slots_move_in_every_layer(alike: bool) -> None:
    shapes = [(6, 4, 2, 8)] * 3 if alike else [(6, 4, 2, 8), (6, 4, 1, 8), (6, 4, 2, 8)]
    k_caches, v_caches = ([torch.randn(shape, device=DEVICE) for shape in shapes] for _ in range(2))
    wanted = [cache.reshape(24, -1).clone() for cache in (*k_caches, *v_caches)]
    source, target = [9, -1, 10, 11, 20], [8, 3, 9, -1, 10]
    for cache in wanted:
        before = cache.clone()
        for a, b in zip(source, target, strict=True):
            if a >= 0 and b >= 0:
                cache[b] = before[a]
    slots = torch.tensor(source, device=DEVICE), torch.tensor(target, device=DEVICE)
    copies = [cache.clone() for cache in k_caches], [cache.clone() for cache in v_caches]
    triton_store.move_kv_layers(k_caches, v_caches, *slots)
    ops.move_kv_layers(*copies, *slots)
    for moved, copy, right in zip((*k_caches, *v_caches), (*copies[0], *copies[1]), wanted, strict=True):
        assert torch.equal(moved.reshape(24, -1), right)
        assert torch.equal(copy.reshape(24, -1), right)


def test_opcheck_of_moving_layers() -> None:
    caches = [[torch.randn(6, 4, 2, 8, device=DEVICE) for _ in range(2)] for _ in range(2)]
    slots = torch.tensor([9, -1, 10], device=DEVICE), torch.tensor([8, 3, 9], device=DEVICE)
    torch.library.opcheck(torch.ops.specops.move_kv_layers, (*caches, *slots))
    with pytest.raises(ValueError, match="a V cache for each K cache, got 2 and 1"):
        ops.move_kv_layers(caches[0], caches[1][:1], *slots)


def test_the_plain_form_agrees() -> None:
    logits = torch.randn(4, 30)
    for logprobs in (False, True):
        values, tokens = _top_tokens(logits, 3, logprobs)
        fused_values, fused_tokens = (t.cpu() for t in triton_round.top_tokens(logits.to(DEVICE), 3, logprobs))
        assert torch.equal(tokens, fused_tokens)
        torch.testing.assert_close(values, fused_values, atol=1e-5, rtol=0)


def test_what_a_move_keeps_is_made_outside_of_graph_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first move of a step may run inside a graph's own pool, where torch counts every tensor that stays."""
    made: list[Tensor] = []

    def outside(make: Callable[[], Tensor], device: torch.device) -> Tensor:
        made.append(make())
        return made[0]

    monkeypatch.setattr(triton_store, "outside_graph_pools", outside)
    caches = [[torch.randn(6, 4, 2, 8, device=DEVICE) for _ in range(2)] for _ in range(2)]
    slots = torch.tensor([9, 10], device=DEVICE), torch.tensor([8, 9], device=DEVICE)
    for _ in range(2):
        triton_store.move_kv_layers(*caches, *slots)
    assert [tensor.tolist() for tensor in made] == [[cache.data_ptr() for cache in (*caches[0], *caches[1])]]
