"""The training library: dense forwards against paged ones, the conversation machine, the loss, resuming, evaluation.

OMP_NUM_THREADS=1 pytest tests/training/test_training.py
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from specops import QueryLayout, attention_metadata
from specops.models.config import ModelConfig
from specops.models.eagle import EagleConfig, EagleHead
from specops.models.llama import CausalLM
from specops.training import data, evaluate
from specops.training.bank import fill_bank, initialize, rows_that_fit, target_chances
from specops.training.chat import ChatScript
from specops.training.dense import DenseTarget, UnrolledHead, attend_fused, attend_matmul, attend_paged, prefill
from specops.training.generate import Generator
from specops.training.train import Trainer, TrainSettings, unrolled_loss

VOCAB, H = 48, 32
CONFIG = ModelConfig(
    vocab_size=VOCAB,
    hidden_size=H,
    intermediate_size=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=96,
    attention_bias=True,
)
SCRIPT = ChatScript(
    opening=(1, 7, 8),
    to_answer=(9, 1, 10),
    to_user=(9, 1, 11),
    end_of_turn=2,
    stop=(2,),
    banned=(0, 1),
    openers=((12, 13), (14,), ()),
)
LENGTH = 60


def make_target(seed: int = 0, scale: float = 6.0) -> CausalLM:
    """A random target whose logits are spread out, so that maxima are clear and turns end now and then."""
    torch.manual_seed(seed)
    target = CausalLM(CONFIG).requires_grad_(False)
    target.lm_head.weight.mul_(scale)
    target.allocate_caches(num_pages=64, page_size=4)
    target.set_backend("reference")
    return target


def make_head(target: CausalLM, kept: Tensor | None = None, format: str = "eagle") -> EagleHead:
    size = VOCAB if kept is None else kept.shape[0]
    config = EagleConfig.for_target(CONFIG, format=format, draft_vocab_size=size)  # type: ignore[arg-type]
    d2t = None if kept is None else data.d2t_of(kept)
    head = EagleHead(config, target.embed_tokens, target.lm_head.weight, d2t=d2t)
    return head


def paged_target(target: CausalLM, ids: Tensor, aux_layers: tuple[int, ...] = ()) -> Any:
    """Hidden states of ``[B, L]`` through the paged forward."""
    batch, length = ids.shape
    pages = -(-length // 4)
    page_table = torch.arange(1, batch * pages + 1, dtype=torch.int32).view(batch, pages)
    meta = attention_metadata(page_table, torch.full((batch,), length, dtype=torch.int32), QueryLayout.uniform(length), 4)
    return target(ids.reshape(-1), meta, aux_layers=aux_layers)


def test_prefill_equals_the_paged_target() -> None:
    target = make_target()
    ids = torch.randint(VOCAB, (3, 17))
    hidden, features = prefill(DenseTarget.of(target), ids, aux_layers=(0, 1, 3))
    wanted, aux = paged_target(target, ids, aux_layers=(0, 1, 3))
    torch.testing.assert_close(hidden.flatten(0, 1), wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(features.flatten(0, 1), aux, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("format", ["eagle", "eagle3"])
def test_unrolled_head_equals_paged_drafting(format: str) -> None:
    """Every row's chain of the training forward is a real draft: prefill to that row, then single-token steps."""
    target = make_target()
    head = make_head(target, format=format).requires_grad_(False)
    head.allocate_caches(num_pages=32, page_size=4)
    head.set_backend("reference")
    rows, steps = 9, 4
    ids = torch.randint(VOCAB, (2, rows + steps))
    features = torch.randn(2, rows, head.config.hidden_width)
    chain, state, dense = UnrolledHead(head), features, []
    for step in range(steps):
        state = chain.step(ids[:, 1 + step : 1 + step + rows], state)
        dense.append(state)
    page_table = torch.arange(1, 11, dtype=torch.int32).view(2, 5)
    for row in range(rows):
        width = row + 1
        for step in range(steps):
            layout = QueryLayout.uniform(width if step == 0 else 1)
            lens = torch.full((2,), width + step, dtype=torch.int32)
            meta = attention_metadata(page_table, lens, layout, 4)
            if step == 0:
                tokens, read = ids[:, 1 : 1 + width].reshape(-1), features[:, :width].flatten(0, 1)
                carried = head(tokens, read, meta).view(2, width, -1)[:, -1]
            else:
                carried = head(ids[:, row + 1 + step], carried, meta)
            torch.testing.assert_close(carried, dense[step][:, row], atol=2e-5, rtol=1e-5)


def test_every_decode_attention_is_the_formula() -> None:
    q, keys, values = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 9, 8), torch.randn(2, 3, 9, 8)
    seen = torch.arange(9) <= 5
    scores = torch.einsum("bhgd,bhpd->bhgp", q.double(), keys[:, :, :6].double()) / 8**0.5
    wanted = torch.einsum("bhgp,bhpd->bhgd", scores.softmax(-1), values[:, :, :6].double())
    for attend in (attend_matmul, attend_fused, attend_paged):
        torch.testing.assert_close(attend(q, keys, values, seen).double(), wanted, atol=1e-5, rtol=1e-5)


def check_conversation(target: CausalLM, ids: Tensor, greedy: Tensor) -> None:
    """Replay one row by hand: pieces in order, greedy tokens the target's choice, user turns free of banned tokens."""
    logits = target.compute_logits(paged_target(target, ids[None, :]))
    best = logits.argmax(dim=-1)
    position, row = 0, ids.tolist()

    def piece(tokens: tuple[int, ...]) -> None:
        nonlocal position
        for token in tokens[: len(row) - position]:
            assert (row[position], bool(greedy[position])) == (token, False)
            position += 1

    piece(SCRIPT.opening)
    while position < len(row):
        for opener in sorted(SCRIPT.openers, key=len, reverse=True):
            if tuple(row[position : position + len(opener)]) == opener:
                position += len(opener)
                break
        while position < len(row) and row[position] != SCRIPT.end_of_turn:
            assert not greedy[position]
            assert row[position] not in SCRIPT.banned
            position += 1
        piece((SCRIPT.end_of_turn, *SCRIPT.to_answer))
        while position < len(row):
            assert greedy[position]
            assert row[position] == best[position - 1]
            position += 1
            if row[position - 1] == SCRIPT.end_of_turn:
                break
        piece(SCRIPT.to_user)


def test_conversations_follow_the_script_and_answers_are_greedy() -> None:
    target = make_target()
    generator = Generator(DenseTarget.of(target), SCRIPT, batch=24, length=LENGTH, max_user_tokens=6)
    ids, greedy = generator.conversations(seed=5)
    for row in range(24):
        check_conversation(target, ids[row], greedy[row])
    ended = ((ids == SCRIPT.end_of_turn) & greedy).any(dim=1)
    assert ended.any()
    assert not ended.all()
    assert 0.3 < greedy.float().mean().item() < 0.95


def test_conversations_may_begin_with_prompts() -> None:
    target = make_target()
    prompts = [(*SCRIPT.opening, 20, 21, SCRIPT.end_of_turn, *SCRIPT.to_answer), (*SCRIPT.opening, 22, 2, *SCRIPT.to_answer)]
    generator = Generator(DenseTarget.of(target), SCRIPT, batch=6, length=LENGTH, max_user_tokens=6)
    ids, greedy = generator.conversations(5, prompts)
    for row, prompt in enumerate(prompts):
        assert tuple(ids[row, : len(prompt)].tolist()) == prompt
        assert not greedy[row, : len(prompt)].any()
        best = target.compute_logits(paged_target(target, ids[row : row + 1])).argmax(dim=-1)
        answer = [bool(g) for g in greedy[row, len(prompt) :]]
        length = answer.index(False) if False in answer else len(answer)
        assert length > 0
        assert ids[row, len(prompt) : len(prompt) + length].tolist() == best[len(prompt) - 1 :][:length].tolist()
        if length < len(answer):
            # After an answer that ended comes a user turn like any other.
            behind = ids[row, len(prompt) + length :].tolist()
            assert tuple(behind[: len(SCRIPT.to_user)]) == SCRIPT.to_user[: len(behind)]
    for row in range(len(prompts), 6):
        check_conversation(target, ids[row], greedy[row])
    with pytest.raises(ValueError, match="7 prompts for a batch of 6"):
        generator.conversations(5, [(1,)] * 7)


def test_conversations_depend_on_the_seed_alone() -> None:
    generator = Generator(DenseTarget.of(make_target()), SCRIPT, batch=6, length=40)
    first, other, again = generator.conversations(1), generator.conversations(2), generator.conversations(1)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], other[0])


def test_user_turns_close_in_time() -> None:
    generator = Generator(DenseTarget.of(make_target()), SCRIPT, batch=16, length=30, max_user_tokens=4, min_user_tokens=4)
    _, greedy = generator.conversations(seed=0)
    openers = {3 + len(opener) for opener in SCRIPT.openers}
    # Opening, opener, exactly four sampled tokens, the end of the turn, three more, and the answer begins.
    firsts = {int(row.nonzero()[0]) for row in greedy}
    assert firsts <= {first + 4 + 1 + 3 for first in openers}


def test_sampling_follows_the_softmax() -> None:
    """Without a prefix to differ in, the first sampled token of many rows has the target's probabilities."""
    target = make_target(scale=1.5)
    script = ChatScript((1, 7), (9,), (9,), end_of_turn=2, stop=(2,), banned=(), openers=((),))
    generator = Generator(DenseTarget.of(target), script, batch=4000, length=3, min_user_tokens=0)
    ids, _ = generator.conversations(seed=0)
    wanted = target.compute_logits(paged_target(target, torch.tensor([[1, 7]])))[-1].softmax(-1)
    seen = torch.bincount(ids[:, 2], minlength=VOCAB) / 4000
    # Total variation of 4000 draws from 48 outcomes: sqrt(48 / (2 pi 4000)) = 0.044 at most.
    assert 0.5 * (seen - wanted).abs().sum() < 0.06


def test_answers_to_given_prompts_stop_once() -> None:
    target = make_target()
    prompts = [[1, 7, 8, 20 + n, 2, 9, 1, 10][: 8 - n % 3] for n in range(12)]
    ids, greedy = Generator(DenseTarget.of(target), SCRIPT, batch=12, length=LENGTH).answers(prompts)
    stopped = 0
    for prompt, row, marks in zip(prompts, ids, greedy, strict=True):
        start = len(prompt)
        assert row[:start].tolist() == prompt
        end = int(marks.nonzero()[-1]) + 1
        assert marks.tolist() == [start <= position < end for position in range(LENGTH)]
        best = target.compute_logits(paged_target(target, row[None, :end])).argmax(dim=-1)
        assert torch.equal(row[start:end], best[start - 1 : end - 1])
        stopped += end < LENGTH
        assert (row[start:end] == 2).sum() == int(end < LENGTH or row[end - 1] == 2)
    assert stopped > 0


def reference_loss(head: EagleHead, target: CausalLM, ids: Tensor, greedy: Tensor, settings: TrainSettings) -> float:
    """The loss in float64, row by row and token by token, from carried states of the training forward."""
    dense = DenseTarget.of(target)
    hidden, _ = prefill(dense, ids)
    chances = (hidden.double() @ dense.lm_head.double().T).softmax(dim=-1)
    kept = head.to_target_ids(torch.arange(head.config.draft_vocab_size)).tolist()
    rows = ids.shape[1] - 1 - settings.unroll
    chain, state, total = UnrolledHead(head), hidden[:, :rows], 0.0
    for step in range(settings.unroll):
        state = chain.step(ids[:, 1 + step : 1 + step + rows], state)
        log_q = head.compute_logits(state).double().log_softmax(dim=-1)
        sums, count = 0.0, 0
        for b in range(ids.shape[0]):
            for i in range(rows):
                if not greedy[b, i + 1 : i + 3 + step].all():
                    continue
                count += 1
                soft = -sum(chances[b, i + 1 + step, token] * log_q[b, i, d] for d, token in enumerate(kept))
                label = int(ids[b, i + 2 + step])
                hard = -log_q[b, i, kept.index(label)] if label in kept else 0.0
                near = head.norm(state[b, i]).double() - hidden[b, i + 1 + step].double()  # type: ignore[misc]
                bent = torch.where(near.abs() < 1, 0.5 * near**2, near.abs() - 0.5).mean()
                w = settings.hard_weight
                sums += float((1 - w) * soft + w * hard + settings.hidden_weight * bent)
        total += settings.decay**step * sums / max(1, count)
    return total


def some_data(target: CausalLM, rows: int = 32, length: int = 40) -> tuple[Tensor, Tensor]:
    generator = Generator(DenseTarget.of(target), SCRIPT, batch=rows, length=length, max_user_tokens=5)
    return generator.conversations(seed=9)


@torch.no_grad()
def test_loss_is_the_formula() -> None:
    target = make_target()
    ids, greedy = some_data(target, rows=3, length=24)
    kept = data.draft_vocabulary(ids, greedy, VOCAB, 12)
    head = make_head(target, kept)
    settings = TrainSettings(steps=1, unroll=3, decay=0.7, hard_weight=0.25, hidden_weight=0.5)
    bank = fill_bank(DenseTarget.of(target), ids, greedy)
    loss, _ = unrolled_loss(
        head,
        ids,
        greedy,
        bank.features,
        bank.hidden,
        target_chances(bank.hidden, bank.log_norm, head.lm_head_weight),
        data.draft_ids_of(kept, VOCAB),
        settings.unroll,
        settings.decay,
        settings.hard_weight,
        settings.hidden_weight,
    )
    assert loss.item() == pytest.approx(reference_loss(head, target, ids, greedy, settings), rel=1e-5)


def make_trainer(settings: TrainSettings, format: str = "eagle") -> Trainer:
    target = make_target()
    ids, greedy = some_data(target)
    kept = data.draft_vocabulary(ids, greedy, VOCAB, 24)
    head = make_head(target, kept, format)
    bank = fill_bank(DenseTarget.of(target), ids, greedy, head.config.aux_layers)
    initialize(head, bank, seed=3)
    lines: list[str] = []
    draft_ids = data.draft_ids_of(kept, VOCAB)
    return Trainer(head, bank, draft_ids, head.lm_head_weight, settings, log=lines.append)


SETTINGS = TrainSettings(steps=12, batch_tokens=320, unroll=3, learning_rate=3e-3, warmup=2)


@pytest.mark.parametrize("format", ["eagle", "eagle3"])
def test_training_lowers_the_loss_and_raises_acceptance(format: str) -> None:
    trainer = make_trainer(TrainSettings(steps=60, batch_tokens=320, unroll=3, learning_rate=5e-3, warmup=2), format)
    with torch.no_grad():
        before, guesses = trainer._forward(0)
    trainer.run()
    with torch.no_grad():
        after, better = trainer._forward(0)
    assert after < 0.8 * before
    assert better[0, 0] > guesses[0, 0]


@pytest.mark.parametrize("format", ["eagle", "eagle3"])
@torch.no_grad()
def test_initial_state_is_even_and_guesses_are_flat(format: str) -> None:
    """One channel of the target's state is a hundred times the others; the head starts as if it were not."""
    target = make_target()
    ids, greedy = some_data(target)
    config = EagleConfig.for_target(CONFIG, format=format)  # type: ignore[arg-type]
    head = EagleHead(config, target.embed_tokens, target.lm_head.weight)
    bank = fill_bank(DenseTarget.of(target), ids, greedy, config.aux_layers)
    bank = replace(bank, features=bank.features.clone())
    bank.features[..., 5] *= 100
    initialize(head, bank, seed=3)
    _, x = head.inputs(ids[:, 2:].long(), bank.features[:, 1:-1])
    scales = x.square().mean(dim=(0, 1)).sqrt()
    assert scales.max() < 4 * scales.median()
    logits = head.compute_logits(UnrolledHead(head).step(ids[:, 2:].long(), bank.features[:, 1:-1]))
    entropy = torch.distributions.Categorical(logits=logits).entropy().mean().item()
    certain = target.compute_logits(bank.hidden)
    assert entropy > max(0.6 * math.log(VOCAB), 2 * torch.distributions.Categorical(logits=certain).entropy().mean().item())


def test_training_leaves_the_target_alone() -> None:
    trainer = make_trainer(SETTINGS)
    embedding, rows = trainer.head.embed_tokens.weight.clone(), trainer.head.lm_head_weight.clone()
    trainer.run()
    assert torch.equal(trainer.head.embed_tokens.weight, embedding)
    assert torch.equal(trainer.head.lm_head_weight, rows)


def test_resumed_run_ends_like_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = make_trainer(SETTINGS)
    whole.run()
    # Stopped in the middle of its second epoch: the schedule is that of twelve steps all the same.
    first = make_trainer(SETTINGS)
    for _ in range(7):
        first._train_step()
        first.step += 1
    first.save(tmp_path / "checkpoint.pt")
    second = make_trainer(SETTINGS)
    assert second.resume(tmp_path / "checkpoint.pt")
    assert second.step == 7
    second.run(tmp_path / "checkpoint.pt")
    for (name, one), (_, other) in zip(whole.head.named_parameters(), second.head.named_parameters(), strict=True):
        assert torch.equal(one, other), name


def test_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer(SETTINGS)
    trainer.save(tmp_path / "checkpoint.pt")
    other = make_trainer(TrainSettings(steps=12, batch_tokens=320, unroll=2, learning_rate=3e-3, warmup=2))
    with pytest.raises(ValueError, match="unroll 3 -> 2"):
        other.resume(tmp_path / "checkpoint.pt")
    assert not make_trainer(SETTINGS).resume(tmp_path / "nothing.pt")


def test_rows_of_an_epoch_are_a_permutation() -> None:
    trainer = make_trainer(SETTINGS)
    assert trainer.steps_per_epoch == 4
    epochs = [torch.cat([trainer.rows_of(4 * epoch + place) for place in range(4)]) for epoch in range(2)]
    for order in epochs:
        assert sorted(order.tolist()) == list(range(32))
    assert not torch.equal(*epochs)


def test_learning_rate_ends_with_the_budget_that_ends_first() -> None:
    trainer = make_trainer(TrainSettings(steps=100, seconds=10.0, warmup=0, learning_rate=1.0))
    trainer.step, trainer.seconds_used = 50, 1.0
    assert trainer.rate() == pytest.approx(0.5)
    trainer.seconds_used = 10.0
    assert trainer.rate() == pytest.approx(0.0)
    trainer.seconds_used = 7.5
    assert trainer.rate() == pytest.approx(0.5 * (1 + math.cos(0.75 * math.pi)))


def test_draft_vocabulary_keeps_the_most_frequent_answer_tokens() -> None:
    ids = torch.tensor([[5, 5, 5, 9, 9, 3, 7, 7, 7, 7]], dtype=torch.int32)
    greedy = torch.tensor([[True] * 6 + [False] * 4])
    kept = data.draft_vocabulary(ids, greedy, 16, 3, always=(2,))
    assert kept.tolist() == [2, 5, 9]
    assert data.d2t_of(kept).tolist() == [2, 4, 7]
    assert data.draft_ids_of(kept, 16)[[2, 5, 9, 3]].tolist() == [0, 1, 2, -1]
    assert data.coverage(ids, greedy, kept) == pytest.approx(5 / 6)


def test_shards_continue_where_they_stopped(tmp_path: Path) -> None:
    generator = Generator(DenseTarget.of(make_target()), SCRIPT, batch=4, length=24)
    options: dict[str, Any] = {"seed": 0, "vocab_size": VOCAB, "log": lambda line: None}
    assert data.write_shards(generator, tmp_path, count=3, **options) == 3
    data.write_shards(generator, tmp_path, count=1, held_out=True, **options)
    ids, greedy = data.load_shards(tmp_path)
    (tmp_path / "train_00001.safetensors").unlink()
    data.write_shards(generator, tmp_path, count=3, **options)
    again, marks = data.load_shards(tmp_path)
    assert torch.equal(ids, again)
    assert torch.equal(greedy, marks)
    held_out, _ = data.load_shards(tmp_path, "held_out")
    assert not (held_out[:, None] == ids[None]).all(dim=2).any()
    assert data.write_shards(generator, tmp_path, count=9, seconds=0.0, **options) == 4
    with pytest.raises(FileNotFoundError, match="--stage data"):
        data.load_shards(tmp_path / "nowhere")


@torch.no_grad()
def test_ranks_count_the_likelier_tokens() -> None:
    target = make_target()
    ids, greedy = some_data(target, rows=3, length=20)
    kept = data.draft_vocabulary(ids, greedy, VOCAB, 12)
    head = make_head(target, kept)
    ranks = evaluate.true_ranks(head, DenseTarget.of(target), ids, data.draft_ids_of(kept, VOCAB), 3, chunk_tokens=40)
    hidden, _ = prefill(DenseTarget.of(target), ids)
    chain, state = UnrolledHead(head), hidden[:, :15]
    for step in range(3):
        state = chain.step(ids[:, 1 + step : 16 + step], state)
        order = head.to_target_ids(head.compute_logits(state).argsort(dim=-1, descending=True))
        for b in range(3):
            for i in range(15):
                token = int(ids[b, i + 2 + step])
                ranking = order[b, i].tolist()
                assert ranks[b, i, step] == (ranking.index(token) if token in ranking else 12)
    assert (ranks[:, -1] == 12).all()


def test_walk_counts_rounds_by_hand() -> None:
    """One answer of 12 tokens at positions 2 to 13; depth 2. Roots: 2, then 2 + accepted + 1, while root + 3 < 14."""
    greedy = torch.zeros((1, 16), dtype=torch.bool)
    greedy[0, 2:14] = True
    ranks = torch.full((1, 16, 2), 9, dtype=torch.int32)
    ranks[0, 1] = torch.tensor([0, 0])  # root 2: both right, next root 5
    ranks[0, 4] = torch.tensor([1, 0])  # root 5: only a tree with a second child goes on
    assert evaluate.answer_spans(greedy) == [(0, 2, 14)]
    # Chain: roots 2 (3 tokens), 5, 6, 7, 8, 9, 10 (1 token each).
    assert evaluate.walk(ranks, greedy, evaluate.chain(2), 2) == evaluate.Walk(7, 9)
    # Tree: roots 2 (3), 5 (3), 8, 9, 10 (1 each).
    tree = evaluate.chain(2) | {(1,), (1, 0)}
    assert evaluate.walk(ranks, greedy, tree, 2) == evaluate.Walk(5, 9)


def test_best_tree_takes_the_likeliest_paths() -> None:
    # Path values: (0) .6, (0,0) .36, (1) .3, (1,0) .18, (0,1) .18, (0,0,0) .216, (1,1) .09
    shares = [[0.6, 0.3], [0.6, 0.3], [0.6, 0.3]]
    assert evaluate.best_tree(shares, 4) == {(0,), (0, 0), (1,), (0, 0, 0)}
    tree = evaluate.best_tree(shares, 9)
    assert len(tree) == 9
    assert all(path[:-1] in tree or len(path) == 1 for path in tree)


def test_acceptance_is_conditional() -> None:
    greedy = torch.ones((1, 6), dtype=torch.bool)
    ranks = torch.tensor([[[0, 0], [0, 1], [3, 0], [1, 9], [9, 9], [9, 9]]], dtype=torch.int32)
    # Step 0: rows 0 to 3, two right. Step 1: rows 0 and 1 (labels 3 and 4), one right.
    assert evaluate.acceptance(ranks, greedy) == [0.5, 0.5]


def test_targets_the_dense_forward_cannot_serve_are_refused() -> None:
    config = replace(CONFIG, layer_windows=(8, None, None), qk_norm=True)
    with pytest.raises(ValueError, match="a sliding window, head norms"):
        DenseTarget.of(CausalLM(config))


def test_capturing_for_a_smaller_table_reads_no_piece_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture runs steps; here each is run as it is, so that an index out of range raises."""

    class Replayed:
        def __init__(self, step: Any) -> None:
            self.replay = step

    def capture(self: Generator, prefix: int) -> Replayed:
        for _ in range(3):
            self.index.zero_()
            self._step(prefix)
        return Replayed(lambda: self._step(prefix))

    monkeypatch.setattr(Generator, "_capture", capture)
    target = make_target()
    eager, graphs = (Generator(DenseTarget.of(target), SCRIPT, batch=16, length=LENGTH) for _ in range(2))
    graphs._graphs = {}
    prompts = [[1, 7, 8, 20 + n, 2, 9, 1, 10] for n in range(16)]
    for write in (lambda g: g.answers(prompts), lambda g: g.conversations(seed=3)):
        for one, other in zip(write(eager), write(graphs), strict=True):
            assert torch.equal(one, other)


@pytest.mark.gpu
def test_graph_replay_writes_what_eager_writes() -> None:
    target = make_target().cuda()
    dense = DenseTarget.of(target)
    eager = Generator(dense, SCRIPT, batch=16, length=LENGTH)
    graphs = Generator(dense, SCRIPT, batch=16, length=LENGTH, graphs=True, compile=True)
    prompts = [[1, 7, 8, 20 + n, 2, 9, 1, 10] for n in range(16)]
    for one, other in zip(eager.answers(prompts), graphs.answers(prompts), strict=True):
        assert torch.equal(one, other)
    ids, greedy = graphs.conversations(seed=3)
    for row in range(4):
        check_conversation(make_target(), ids[row].cpu(), greedy[row].cpu())
    again, _ = graphs.conversations(seed=3)
    assert torch.equal(ids, again)


@pytest.mark.gpu
def test_a_step_on_a_gpu_has_the_loss_and_the_gradients_of_a_cpu() -> None:
    """The loss is one kernel there and torch's operators here; the target's forward is compiled there."""
    losses, slopes = [], []
    ids, greedy = some_data(make_target())
    kept = data.draft_vocabulary(ids, greedy, VOCAB, 24)
    for device in ("cpu", "cuda"):
        target = make_target().to(device)
        head = make_head(target, kept.to(device)).to(device)
        bank = fill_bank(DenseTarget.of(target), ids, greedy, compile=device == "cuda")
        initialize(head, bank, seed=3)
        draft_ids = data.draft_ids_of(kept.to(device), VOCAB)
        trainer = Trainer(head, bank, draft_ids, head.lm_head_weight, SETTINGS, log=lambda line: None)
        loss, counts = trainer._forward(0)
        torch.autograd.backward(loss)
        losses.append((loss.detach().cpu(), counts.cpu()))
        slopes.append([parameter.grad.cpu() for parameter in head.parameters() if parameter.grad is not None])
    torch.testing.assert_close(losses[0][0], losses[1][0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(losses[0][1], losses[1][1], rtol=0, atol=2)
    for one, other in zip(*slopes, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
def test_a_head_is_evaluated_on_a_gpu_as_on_a_cpu() -> None:
    ids, _ = some_data(make_target())
    kept = data.draft_vocabulary(ids, torch.ones_like(ids, dtype=torch.bool), VOCAB, 24)
    ranks = []
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.float32), ("cuda", torch.bfloat16)):
        target = make_target().to(device, dtype)
        torch.manual_seed(4)
        head = make_head(target, kept.to(device)).to(device, dtype).requires_grad_(False)
        ranks.append(evaluate.true_ranks(head, DenseTarget.of(target), ids, data.draft_ids_of(kept.to(device), VOCAB), 3))
    assert (ranks[0] == ranks[1]).float().mean() > 0.99
    # Sixteen bits change the order of near ones.
    assert (ranks[0] - ranks[2]).abs().float().mean() < 1.0


def test_as_many_rows_as_seven_tenths_of_the_free_memory_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    embed = SimpleNamespace(device=torch.device("cuda"), shape=(VOCAB, 8), element_size=lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100_000, 200_000))
    # A row of 5 tokens holds hidden states and three streams, 8 numbers of two bytes each.
    assert rows_that_fit(cast(Any, SimpleNamespace(embed=embed)), 5, (0, 1, 2)) == 70_000 // (5 * 4 * 8 * 2)
    assert rows_that_fit(DenseTarget.of(make_target()), 5) is None
