"""A head trained here, run by the decode loop: every round accepts what the evaluation said it would.

OMP_NUM_THREADS=1 pytest tests/training/test_training_end_to_end.py
"""

from __future__ import annotations

import pytest
import torch

from specops.models.config import ModelConfig
from specops.models.eagle import EagleConfig, EagleHead
from specops.models.llama import CausalLM
from specops.spec import Engine, SpecConfig
from specops.training import data, evaluate
from specops.training.bank import fill_bank, initialize
from specops.training.chat import ChatScript
from specops.training.dense import DenseTarget
from specops.training.generate import Generator
from specops.training.train import Trainer, TrainSettings

VOCAB, STEPS, LENGTH = 32, 3, 72
CONFIG = ModelConfig(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=128,
)
SCRIPT = ChatScript((1, 7), (9, 10), (9, 11), end_of_turn=2, stop=(2,), banned=(0, 1))


@pytest.mark.parametrize("format", ["eagle", "eagle3"])
def test_decode_loop_accepts_what_the_evaluation_predicts(format: str) -> None:
    torch.manual_seed(0)
    target = CausalLM(CONFIG).requires_grad_(False)
    target.lm_head.weight.mul_(8)
    dense = DenseTarget.of(target)
    ids, greedy = Generator(dense, SCRIPT, batch=96, length=LENGTH, max_user_tokens=5).conversations(seed=1)
    kept = data.draft_vocabulary(ids, greedy, VOCAB, 28, always=(2,))
    config = EagleConfig.for_target(CONFIG, format=format, draft_vocab_size=28)  # type: ignore[arg-type]
    head = EagleHead(config, target.embed_tokens, target.lm_head.weight, d2t=data.d2t_of(kept))
    bank = fill_bank(dense, ids, greedy, config.aux_layers)
    initialize(head, bank, seed=0)
    draft_ids = data.draft_ids_of(kept, VOCAB)
    settings = TrainSettings(steps=100, batch_tokens=16 * LENGTH, unroll=STEPS, learning_rate=1e-2, warmup=5)
    Trainer(head, bank, draft_ids, head.lm_head_weight, settings, log=lambda line: None).run()
    head.requires_grad_(False).eval()

    prompts = [[1, 7, 12 + n, 13 + n, 2, 9, 10] for n in range(12)]
    answers, marks = Generator(dense, SCRIPT, batch=12, length=LENGTH).answers(prompts)
    ranks = evaluate.true_ranks(head, dense, answers, draft_ids, STEPS)
    engine = Engine(target, head, SpecConfig(num_steps=STEPS), max_requests=4, max_context=96, page_size=4)
    requests = engine.generate(prompts, max_new_tokens=LENGTH - 7, stop_token_ids=SCRIPT.stop)
    compared, accepted = 0, 0
    for row, request in enumerate(requests):
        end = int(marks[row].nonzero()[-1]) + 1
        assert request.tokens == answers[row, 7:end].tolist()
        root = 7
        for accept_len in request.accept_lens:
            if root + STEPS + 1 >= end:
                break
            right = (ranks[row, root - 1] == 0).tolist()
            assert accept_len == 1 + (right.index(False) if False in right else STEPS)
            root += accept_len
            compared += 1
            accepted += accept_len - 1
    walked = evaluate.walk(ranks, marks, evaluate.chain(STEPS), STEPS)
    assert (walked.rounds, walked.tokens) == (compared, accepted + compared)
    # The comparison is worth something only if guesses are right now and then, and wrong now and then.
    assert compared > 20
    assert 0.2 * compared < accepted < 0.95 * STEPS * compared
