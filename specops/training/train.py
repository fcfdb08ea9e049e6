"""Fitting a draft head: an unrolled loss against the frozen target's distribution, checkpoints, and a time budget.

The data is a :class:`~specops.training.bank.Bank`. One step: cut ``[B, L]`` rows, unroll the head ``steps`` times on its
own carried state, compare each step with the target.

A run is a function of its settings and its seed. A checkpoint holds head, optimiser, step and time used; the order of rows
depends on the step alone, so a run that was cut and resumed ends like one that was not.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specops.models.eagle import EagleHead
from specops.training.bank import Bank, target_chances
from specops.training.dense import UnrolledHead
from specops.training.distill_loss import distill_loss


@dataclass(frozen=True)
class TrainSettings:
    """What shapes a run.

    Attributes:
        steps: optimiser steps. With ``seconds`` the learning rate ends at whichever comes first.
        seconds: time of training proper, without its start; None for no limit.
        batch_tokens: tokens of one optimiser step.
        unroll: draft steps of the loss.
        learning_rate, warmup, weight_decay, clip: AdamW with a linear warm-up of ``warmup`` steps and a cosine to zero.
        decay: weight of each draft step relative to the one before.
        hard_weight: share of the loss on the token the target chose; the rest is on its whole distribution.
        hidden_weight: smooth-L1 between the normed carried state and the target's hidden state.
        seed: order of the rows.
    """

    steps: int
    seconds: float | None = None
    batch_tokens: int = 32768
    unroll: int = 4
    learning_rate: float = 1e-3
    warmup: int = 200
    weight_decay: float = 0.01
    clip: float = 1.0
    decay: float = 0.9
    hard_weight: float = 0.3
    hidden_weight: float = 0.1
    seed: int = 0


def unrolled_loss(
    head: EagleHead,
    ids: Tensor,
    greedy: Tensor,
    features: Tensor,
    hidden: Tensor,
    chances: Tensor,
    draft_ids: Tensor,
    unroll: int,
    decay: float,
    hard_weight: float,
    hidden_weight: float,
) -> tuple[Tensor, Tensor]:
    """Loss of one batch, and how the guesses fared.

    In step ``j`` row ``i`` predicts token ``i + 2 + j``, whose distribution the target gives at position ``i + 1 + j``.
    The loss of a step is ``-sum_v p(v) log q(v)`` over the draft vocabulary with the target's *true* probabilities: a token
    the draft can't propose weighs nothing, and a row whose mass lies outside weighs little. Only rows whose root and
    whose label, and all between, are greedy tokens count: those are the ones a draft is asked for.

    Args:
        ids: ``[B, L]`` int64; greedy: ``[B, L]`` bool; features, hidden: as in :class:`Bank`.
        chances: ``[B, L, draft_vocab]``, from :func:`target_chances`.
        draft_ids: ``[vocab]`` int64, draft id of each target id or -1.
        unroll, decay, hard_weight, hidden_weight: see :class:`TrainSettings`.

    Returns:
        loss: float32 scalar.
        counts: ``[unroll, 2]`` float32, per step: rows where every guess so far was right, and rows where every guess
            before was right.
    """
    # Rows that have a label in every step, in a number that keeps matrix rows aligned where there are many.
    rows = ids.shape[1] - 1 - unroll
    rows = rows // 8 * 8 if rows >= 64 else rows
    chain = UnrolledHead(head)
    state = features[:, :rows]
    counted = greedy[:, 1 : 1 + rows]
    alive = counted
    loss = torch.zeros((), device=ids.device)
    counts = []
    for step in range(unroll):
        state = chain.step(ids[:, 1 + step : 1 + step + rows], state)
        z = head.compute_logits(state)
        p = chances[:, 1 + step : 1 + step + rows]
        label = draft_ids[ids[:, 2 + step : 2 + step + rows]]
        counted = counted & greedy[:, 2 + step : 2 + step + rows]
        weight = counted * (decay**step / counted.sum().clamp(min=1))
        part, right = distill_loss(z.flatten(0, 1), p.flatten(0, 1), label.flatten(), weight.flatten(), hard_weight)
        loss = loss + part
        if hidden_weight > 0:
            normed = state if head.norm is None else head.norm(state)
            wanted = hidden[:, 1 + step : 1 + step + rows].float()
            apart = F.smooth_l1_loss(normed.float(), wanted, reduction="none").mean(dim=-1)
            loss = loss + hidden_weight * torch.where(counted, apart * weight, 0.0).sum()
        with torch.no_grad():
            before = alive & counted
            alive = before & right.view_as(before)
            counts.append(torch.stack((alive.sum(), before.sum())).float())
    return loss, torch.stack(counts)


class Trainer:
    """One run over a bank.

    Args:
        head: float32 master weights; trained in place.
        bank: the data.
        draft_ids: ``[vocab]`` int64, see :func:`unrolled_loss`.
        target_rows: ``[draft_vocab, H]``.
        settings: of the run.
        autocast: compute in bf16 where autocast says so.
        log: gets one line now and then.
    """

    def __init__(
        self,
        head: EagleHead,
        bank: Bank,
        draft_ids: Tensor,
        target_rows: Tensor,
        settings: TrainSettings,
        *,
        autocast: bool = False,
        log: Callable[[str], None] = print,
    ) -> None:
        self.head, self.bank, self.settings, self.log = head, bank, settings, log
        self.draft_ids, self.target_rows, self.autocast = draft_ids, target_rows, autocast
        self.step, self.seconds_used = 0, 0.0
        self.batch = max(1, settings.batch_tokens // bank.ids.shape[1])
        self.parameters = [parameter for parameter in head.parameters() if parameter.requires_grad]
        groups = [
            {"params": [p for p in self.parameters if p.dim() >= 2], "weight_decay": settings.weight_decay},
            {"params": [p for p in self.parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        fused = bank.ids.is_cuda
        self.optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.95), fused=fused)
        self._order: tuple[int, Tensor] | None = None

    @property
    def steps_per_epoch(self) -> int:
        return max(1, self.bank.ids.shape[0] // self.batch)

    def rows_of(self, step: int) -> Tensor:
        """The rows of one step: each epoch is a permutation drawn from the seed and the epoch's number."""
        epoch, place = divmod(step, self.steps_per_epoch)
        if self._order is None or self._order[0] != epoch:
            generator = torch.Generator().manual_seed(self.settings.seed * 7919 + epoch)
            order = torch.randperm(self.bank.ids.shape[0], generator=generator)
            self._order = (epoch, order.to(self.bank.ids.device))
        return self._order[1][place * self.batch : (place + 1) * self.batch]

    def rate(self) -> float:
        """Learning rate of the next step."""
        settings = self.settings
        progress = self.step / settings.steps
        if settings.seconds is not None:
            progress = max(progress, self.seconds_used / settings.seconds)
        warm = min(1.0, (self.step + 1) / max(1, settings.warmup))
        return settings.learning_rate * warm * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))

    def run(self, checkpoint: Path | None = None, *, every_seconds: float = 60.0, log_every: int = 100) -> None:
        """Train to the end of the budget. Checkpoints at the end and every so often."""
        self._warm_up()
        begun, used_before = time.perf_counter(), self.seconds_used
        saved = logged = begun
        logged_step, totals, losses = self.step, torch.zeros((self.settings.unroll, 2)), torch.zeros(())
        totals, losses = totals.to(self.bank.ids.device), losses.to(self.bank.ids.device)
        while self.step < self.settings.steps:
            if self.settings.seconds is not None and self.seconds_used >= self.settings.seconds:
                break
            loss, counts = self._train_step()
            totals += counts
            losses += loss
            self.step += 1
            if self.step % log_every == 0 or self.step == self.settings.steps:
                mean, shares = (losses / (self.step - logged_step)).item(), chain_shares(totals)
                now = time.perf_counter()
                speed = (self.step - logged_step) * self.batch * self.bank.ids.shape[1] / (now - logged)
                self.log(
                    f"step {self.step}: loss {mean:.3f}, accepted {' '.join(f'{s:.3f}' for s in shares)}, "
                    f"{self.step / self.steps_per_epoch:.2f} epochs, {speed / 1e3:.0f}k tokens/s, {self.seconds_used:.0f} s"
                )
                if not math.isfinite(mean):
                    raise FloatingPointError(f"the loss is {mean} at step {self.step}; lower the learning rate")
                logged, logged_step = now, self.step
                totals.zero_()
                losses.zero_()
            # Without a synchronisation this runs ahead of the device by as much as its queue holds.
            self.seconds_used = used_before + time.perf_counter() - begun
            if checkpoint is not None and time.perf_counter() - saved > every_seconds:
                self.save(checkpoint)
                saved = time.perf_counter()
        if checkpoint is not None:
            self.save(checkpoint)

    def _batch(self, step: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        rows, bank = self.rows_of(step), self.bank
        features = bank.features[rows]
        hidden = features if bank.hidden is bank.features else bank.hidden[rows]
        chances = target_chances(hidden, bank.log_norm[rows], self.target_rows)
        return bank.ids[rows].long(), bank.greedy[rows], features, hidden, chances

    def _forward(self, step: int) -> tuple[Tensor, Tensor]:
        settings, batch = self.settings, self._batch(step)
        with torch.autocast(self.bank.ids.device.type, dtype=torch.bfloat16, enabled=self.autocast):
            return unrolled_loss(
                self.head,
                *batch,
                self.draft_ids,
                settings.unroll,
                settings.decay,
                settings.hard_weight,
                settings.hidden_weight,
            )

    def _warm_up(self) -> None:
        """One forward and backward outside the time budget, whose gradients are dropped: kernels load, memory is found."""
        begun = time.perf_counter()
        loss, _ = self._forward(self.step)
        torch.autograd.backward(loss)
        self.optimizer.zero_grad(set_to_none=True)
        self.log(f"first step: {time.perf_counter() - begun:.1f} s, loss {loss.item():.3f}")

    def _train_step(self) -> tuple[Tensor, Tensor]:
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate()
        loss, counts = self._forward(self.step)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self.parameters, self.settings.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach(), counts

    def save(self, path: Path) -> None:
        """Write a checkpoint atomically."""
        state = {
            "head": {name: p.detach().cpu() for name, p in self.head.named_parameters()},
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "seconds_used": self.seconds_used,
            "settings": asdict(self.settings),
        }
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, path)

    def resume(self, path: Path) -> bool:
        """Continue from a checkpoint, if there is one.

        Raises:
            ValueError: it was made with other settings (steps and seconds may differ: a run may be prolonged).
        """
        if not path.exists():
            return False
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        given, stored = asdict(self.settings), state["settings"]
        differing = sorted(name for name in given if name not in ("steps", "seconds") and given[name] != stored[name])
        if differing:
            changes = ", ".join(f"{name} {stored[name]} -> {given[name]}" for name in differing)
            raise ValueError(f"checkpoint {path} belongs to a run with other settings ({changes}); remove it to start anew")
        with torch.no_grad():
            for name, parameter in self.head.named_parameters():
                parameter.copy_(state["head"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds_used = state["step"], state["seconds_used"]
        return True


def chain_shares(counts: Tensor) -> list[float]:
    """Per step, the share of right guesses among rows whose guesses before were right."""
    return [right / max(1.0, tried) for right, tried in counts.tolist()]
