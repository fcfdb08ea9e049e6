"""The target writes conversations with itself: dense, batched, one CUDA graph a step.

All rows of a batch start with the template's opening and stand at the same position, so attention needs no mask but
"keys up to now", no padding and no prefill. A row is in one of three states: *forced* (a template piece or an opener is
being copied), *user* (sampled at a temperature, ends at the end-of-turn token), *answer* (greedy, ends at a stop token,
after which the next user turn begins). So every row is written to its full length and nothing is thrown away; which
tokens are greedy answers is recorded, since those alone are trained on.

The state machine is tensor arithmetic inside the step: the host only replays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from specops.training.chat import ChatScript
from specops.training.dense import (
    DenseTarget,
    attend_fused,
    attend_matmul,
    attend_paged,
    decode_layer,
    full_precision_logits,
    rms_norm,
)

# Prefix lengths a step is captured for: reading a little too much of the cache is cheaper than one graph a position.
PREFIX_BUCKET = 128
# Piece tables are so wide, or a multiple.
TABLE_WIDTH = 64


class Generator:
    """Static buffers and steps for one batch size and length.

    Args:
        target: the frozen target.
        script: the chat pieces.
        batch: rows written together.
        length: tokens a row.
        temperature: of the user turns.
        max_user_tokens: a user turn is closed after so many sampled tokens.
        min_user_tokens: a user turn is not closed before so many.
        compile: compile the layer and the choice of tokens (wanted on a GPU).
        graphs: replay CUDA graphs, one for each prefix bucket.
    """

    def __init__(
        self,
        target: DenseTarget,
        script: ChatScript,
        *,
        batch: int,
        length: int,
        temperature: float = 1.0,
        max_user_tokens: int = 64,
        min_user_tokens: int = 3,
        compile: bool = False,
        graphs: bool = False,
    ) -> None:
        device = target.embed.device
        self.target, self.script, self.batch, self.length = target, script, batch, length
        self.temperature, self.max_user_tokens, self.min_user_tokens = temperature, max_user_tokens, min_user_tokens
        shape = (len(target.layers), batch, target.num_kv_heads, length, target.head_dim)
        self.keys = torch.zeros(shape, dtype=target.embed.dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self.tokens = torch.zeros((batch, length), dtype=torch.int64, device=device)
        self.greedy = torch.zeros((batch, length), dtype=torch.bool, device=device)
        self.index = torch.zeros((1,), dtype=torch.int64, device=device)
        self.state = torch.zeros((5, batch), dtype=torch.int64, device=device)
        self.noise = torch.empty((batch, target.lm_head.shape[0]), dtype=torch.float32, device=device)
        self.banned = torch.zeros(target.lm_head.shape[0], dtype=torch.float32, device=device)
        self.banned[list(script.banned)] = -math.inf
        self.stop = torch.tensor(script.stop, dtype=torch.int64, device=device)
        self.table = self._pad([script.to_answer])
        self._layer: Callable[..., Tensor] = decode_layer
        self._choose: Callable[..., tuple[Tensor, Tensor, Tensor]] = choose_tokens
        if compile:
            # One compiled function serves all layers: it takes their weights as arguments.
            self._layer = torch.compile(decode_layer, dynamic=False)
            self._choose = torch.compile(choose_tokens, dynamic=False)
        self._graphs: dict[int, torch.cuda.CUDAGraph] | None = {} if graphs else None
        self._attend = self._faster_attention() if graphs else attend_matmul

    def conversations(self, seed: int, prompts: Sequence[Sequence[int]] = ()) -> tuple[Tensor, Tensor]:
        """Write one batch of conversations.

        Args:
            seed: of what is drawn.
            prompts: complete first turns (:func:`specops.training.chat.chat_prompt`), at most ``batch``; so many rows begin
                with an answer to one of them, the others with a user turn of the target's own.

        Returns:
            ids: ``[batch, length]`` int64.
            greedy: ``[batch, length]`` bool, True for tokens of greedy answers.
        """
        self._refuse_long(prompts)
        script, picker = self.script, torch.Generator().manual_seed(seed)
        openers = script.openers
        first = [(*script.opening, *opener) for opener in openers]
        later = [(*script.to_user, *opener) for opener in openers]
        drawn = torch.randint(len(openers), (2, self.batch), generator=picker)
        begins, asked = drawn[0] + 1, len(prompts)
        begins[:asked] = 1 + 2 * len(openers) + torch.arange(asked)
        self._set_table([script.to_answer, *first, *later, *prompts])
        return self._write(seed, begins, drawn[1] + 1 + len(openers), torch.arange(self.batch) < asked)

    def answers(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Answer given prompts (at most ``batch``), greedily.

        Returns:
            ids: ``[len(prompts), length]`` int64; the prompt, the answer, then whatever follows.
            greedy: ``[len(prompts), length]`` bool, True for the tokens of the first answer, its stop token included.
        """
        self._refuse_long(prompts)
        self._set_table([self.script.to_answer, self.script.to_user, *prompts])
        rows = torch.arange(self.batch).clamp(max=len(prompts) - 1)
        ids, greedy = self._write(0, rows + 2, torch.ones_like(rows), torch.ones_like(rows))
        ids, greedy = ids[: len(prompts)], greedy[: len(prompts)]
        stopped = torch.isin(ids, self.stop) & greedy
        ended_before = stopped.cumsum(dim=1) - stopped.long()
        return ids, greedy & (ended_before == 0)

    def _refuse_long(self, prompts: Sequence[Sequence[int]]) -> None:
        if len(prompts) > self.batch:
            raise ValueError(f"{len(prompts)} prompts for a batch of {self.batch}; make the batch larger")
        longest = max(map(len, prompts), default=0)
        if longest >= self.length:
            raise ValueError(f"a prompt has {longest} tokens; rows hold {self.length}")

    def _pad(self, pieces: Sequence[Sequence[int]]) -> Tensor:
        """``[R, F]`` int64 table of pieces, -1 behind their end; the last column is always -1."""
        # Few widths, so that tables of one number of pieces have one shape and graphs are kept.
        width = max(map(len, pieces)) // TABLE_WIDTH * TABLE_WIDTH + TABLE_WIDTH
        rows = [[*piece, *[-1] * (width - len(piece))] for piece in pieces]
        return torch.tensor(rows, dtype=torch.int64, device=self.index.device)

    def _set_table(self, pieces: Sequence[Sequence[int]]) -> None:
        table = self._pad(pieces)
        if table.shape == self.table.shape:
            self.table.copy_(table)
        else:
            # Captured graphs read the old table's memory.
            self.table = table
            if self._graphs is not None:
                self._graphs = {}

    def _write(self, seed: int, first: Tensor, later: Tensor, answering: Tensor) -> tuple[Tensor, Tensor]:
        torch.manual_seed(seed)
        if self._graphs is not None:
            # Capturing runs steps, and the state of an earlier call may name pieces that this table lacks.
            self._reset(first, later, answering)
            for prefix in sorted({self._prefix(position) for position in range(self.length - 1)}):
                if prefix not in self._graphs:
                    self._graphs[prefix] = self._capture(prefix)
            torch.manual_seed(seed)
        self._reset(first, later, answering)
        for position in range(self.length - 1):
            if self._graphs is None:
                self._step(self._prefix(position))
            else:
                self._graphs[self._prefix(position)].replay()
        return self.tokens.clone(), self.greedy.clone()

    def _reset(self, first: Tensor, later: Tensor, answering: Tensor) -> None:
        self.index.zero_()
        self.greedy.zero_()
        # Rows of the state: piece being copied, place in it, whether an answer is due, tokens of this turn, next opening.
        self.state.zero_()
        self.state[0].copy_(first)
        self.state[1].fill_(1)
        self.state[2].copy_(answering)
        self.state[4].copy_(later)
        self.tokens[:, 0] = self.table[self.state[0], 0]

    def _prefix(self, position: int) -> int:
        return min(self.length, (position // PREFIX_BUCKET + 1) * PREFIX_BUCKET)

    def _faster_attention(self) -> Callable[..., Tensor]:
        """Which is fastest depends on the shapes, and on the kernels torch picks for such flat matrices; ask the clock."""
        keys, values = self.keys[0], self.values[0]
        q = keys.new_zeros((self.batch, keys.shape[1], self.target.num_heads // keys.shape[1], keys.shape[3]))
        seen = torch.ones((self.length,), dtype=torch.bool, device=q.device)
        times: dict[Callable[..., Tensor], float] = {}
        for attend in (attend_matmul, attend_fused, attend_paged):
            begin: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for repeat in range(13):
                if repeat == 3:
                    begin.record()
                attend(q, keys, values, seen)
            end.record()
            end.synchronize()
            times[attend] = begin.elapsed_time(end)
        return min(times, key=lambda attend: times[attend])

    def _capture(self, prefix: int) -> torch.cuda.CUDAGraph:
        side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self.index.zero_()
                self._step(prefix)
        torch.cuda.current_stream().wait_stream(side)
        self.index.zero_()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step(prefix)
        return graph

    @torch.no_grad()
    def _step(self, prefix: int) -> None:
        """Read the tokens at ``index``, write those at ``index + 1``."""
        target, at = self.target, self.index
        token = self.tokens.index_select(1, at).squeeze(1)
        x = target.embed[token]
        cos, sin = target.cos.index_select(0, at), target.sin.index_select(0, at)
        for layer, keys, values in zip(target.layers, self.keys, self.values, strict=True):
            x = self._layer(x, layer, keys, values, cos, sin, at, prefix, target.num_heads, target.eps, self._attend)
        logits = full_precision_logits(rms_norm(x, target.norm, target.eps), target.lm_head)
        self.noise.exponential_()
        chosen, greedy, state = self._choose(
            logits,
            self.noise,
            self.banned,
            self.table,
            self.state,
            self.stop,
            self.script.end_of_turn,
            self.temperature,
            self.min_user_tokens,
            self.max_user_tokens,
        )
        self.state.copy_(state)
        at += 1
        self.tokens.index_copy_(1, at, chosen[:, None])
        self.greedy.index_copy_(1, at, greedy[:, None])


def choose_tokens(
    logits: Tensor,
    noise: Tensor,
    banned: Tensor,
    table: Tensor,
    state: Tensor,
    stop: Tensor,
    end_of_turn: int,
    temperature: float,
    min_user_tokens: int,
    max_user_tokens: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The next token of each row, whether it is a greedy one, and the next state.

    Args:
        logits: ``[B, V]`` float32.
        noise: ``[B, V]`` float32 of Exp(1); ``argmax(logit / T - log(noise))`` is a draw from the softmax (Gumbel).
        banned: ``[V]`` float32, -inf for tokens that a user turn must not contain.
        table: ``[R, F]`` int64 pieces to copy, -1 behind their end; row 0 leads to an answer.
        state: ``[5, B]`` int64: piece, place in it, answering, tokens of this turn, piece of the next user turn.
        stop: tokens that end an answer.
        end_of_turn, temperature, min_user_tokens, max_user_tokens: see :class:`Generator`.
    """
    piece, place, answering, turn_tokens, later = state.unbind(0)
    forced = table[piece, place]
    is_forced = forced >= 0
    answer_due = answering > 0
    likeliest = logits.argmax(dim=-1)
    too_soon = turn_tokens < min_user_tokens
    is_end = torch.arange(logits.shape[1], device=logits.device) == end_of_turn
    perturbed = logits / temperature - noise.clamp(min=1e-20).log() + banned
    sampled = torch.where(too_soon[:, None] & is_end[None, :], -math.inf, perturbed).argmax(dim=-1)
    chosen = torch.where(is_forced, forced, torch.where(answer_due, likeliest, sampled))

    user_over = ~is_forced & ~answer_due & ((chosen == end_of_turn) | (turn_tokens >= max_user_tokens))
    chosen = torch.where(user_over, end_of_turn, chosen)
    stopped = (chosen[:, None] == stop[None, :]).any(dim=1)
    answer_over = ~is_forced & answer_due & stopped
    over = user_over | answer_over
    next_state = torch.stack(
        (
            torch.where(user_over, 0, torch.where(answer_over, later, piece)),
            torch.where(over, 0, place + is_forced.long()),
            ((answer_due | user_over) & ~answer_over).long(),
            torch.where(over, 0, turn_tokens + (~is_forced).long()),
            later,
        )
    )
    return chosen, ~is_forced & answer_due, next_state
