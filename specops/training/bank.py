"""What the target says about the training data, kept in memory: hidden states, and what probabilities are made from.

The target is frozen, so it runs once over all conversations. Of its distributions only the normaliser is kept: the rest
is one product with the LM head's rows of the draft vocabulary, cheaper to repeat than to store. The head's starting
weights come from here too, since they depend on the scales of these states.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from specops.models.eagle import EagleHead
from specops.training.dense import DenseTarget, full_precision_logits, prefill, prefill_layer

# Of the free memory; the rest is for the activations of a step.
BANK_SHARE = 0.7


@dataclass(frozen=True)
class Bank:
    """What the target says about every token of the data.

    Attributes:
        ids: ``[N, L]`` int32.
        greedy: ``[N, L]`` bool.
        features: ``[N, L, width]``, what the head reads.
        hidden: ``[N, L, H]`` after the target's final norm; the same tensor as ``features`` for format ``eagle``.
        log_norm: ``[N, L]`` float32, logsumexp of the target's logits over its whole vocabulary.
    """

    ids: Tensor
    greedy: Tensor
    features: Tensor
    hidden: Tensor
    log_norm: Tensor


def rows_that_fit(target: DenseTarget, length: int, aux_layers: tuple[int, ...] = ()) -> int | None:
    """Rows of ``length`` tokens whose hidden states fit on the target's device beside a training step; None on a CPU."""
    device = target.embed.device
    if device.type != "cuda":
        return None
    return int(torch.cuda.mem_get_info(device)[0] * BANK_SHARE) // _row_bytes(target, length, aux_layers)


def _row_bytes(target: DenseTarget, length: int, aux_layers: tuple[int, ...]) -> int:
    return length * target.embed.shape[1] * (1 + len(aux_layers)) * target.embed.element_size()


@torch.no_grad()
def fill_bank(
    target: DenseTarget,
    ids: Tensor,
    greedy: Tensor,
    aux_layers: tuple[int, ...] = (),
    *,
    compile: bool = False,
    chunk_tokens: int = 32768,
) -> Bank:
    """Run the target over ``ids`` ``[N, L]``, ``chunk_tokens`` at a time.

    Raises:
        MemoryError: the hidden states would not fit on the device; says how many rows would.
    """
    device, dtype, (rows, length) = target.embed.device, target.embed.dtype, ids.shape
    fitting = rows_that_fit(target, length, aux_layers)
    if fitting is not None and rows > fitting:
        raise MemoryError(
            f"hidden states of {rows} rows need {rows * _row_bytes(target, length, aux_layers) / 1e9:.1f} GB, more than is "
            f"to spare; train on {fitting} rows or fewer"
        )
    ids, greedy = ids.to(device), greedy.to(device)
    hidden = torch.empty((rows, length, target.embed.shape[1]), dtype=dtype, device=device)
    features = hidden
    if aux_layers:
        features = torch.empty((rows, length, target.embed.shape[1] * len(aux_layers)), dtype=dtype, device=device)
    log_norm = torch.empty((rows, length), dtype=torch.float32, device=device)
    run_layer = torch.compile(prefill_layer, dynamic=False) if compile else prefill_layer
    # Shards have a round number of rows; a power of two divides it, so that there is one shape to compile.
    chunk = 1 << max(0, (chunk_tokens // length).bit_length() - 1)
    for start in range(0, rows, chunk):
        part = slice(start, start + chunk)
        hidden[part], read = prefill(target, ids[part].long(), aux_layers, run_layer)
        if aux_layers:
            features[part] = read
        log_norm[part] = full_precision_logits(hidden[part].flatten(0, 1), target.lm_head).logsumexp(-1).view(-1, length)
    return Bank(ids, greedy, features, hidden, log_norm)


@torch.no_grad()
def initialize(head: EagleHead, bank: Bank, seed: int) -> None:
    """Starting weights, some of them from the data.

    Channels of a hidden state differ in scale by orders of magnitude, so the input norms start with the inverse of each
    channel's scale, and the final norm with the scales of the state to be predicted, small enough for flat first guesses.
    Each branch adds little to the residual stream, which in format ``eagle`` begins as the hidden state.
    """
    generator = torch.Generator().manual_seed(seed)
    for module in head.modules():
        if isinstance(module, nn.Linear):
            weight = torch.empty(module.weight.shape).normal_(0, module.in_features**-0.5, generator=generator)
            module.weight.copy_(weight)
            if module.bias is not None:
                module.bias.zero_()
    for layer in cast(Any, head.layers):
        layer.attn.o.weight.mul_(0.2)
        layer.mlp.down.weight.mul_(0.2)
    # Every few tokens, without the first of each row: it is the attention sink, unlike all others.
    rows = slice(None, None, max(1, bank.ids.shape[0] // 64))
    ids, features, hidden = (t[rows, 1:].flatten(0, 1) for t in (bank.ids, bank.features, bank.hidden))
    size, embedded = head.config.hidden_size, _channel_scales(head.embed_tokens(ids.long()))
    if head.hidden_norm is not None:
        streams = features.view(features.shape[0], *head.hidden_norm.weight.shape)
        head.hidden_norm.weight.copy_(1 / _channel_scales(streams))
    if head.config.format == "eagle":
        if head.embed_norm is not None:
            head.embed_norm.weight.copy_(1 / embedded)
        head.fc.weight[:, :size].mul_(0.5)
        if head.fc.weight.shape[1] == 2 * size:
            head.fc.weight[:, size:].copy_(torch.eye(size))
    else:
        cast(Any, head.layers[0]).embed_norm.weight.copy_(1 / embedded)
    if head.norm is not None and hidden.shape[1] == size:
        head.norm.weight.copy_(0.3 * hidden.float().square().mean(dim=0).sqrt())


def _channel_scales(rows: Tensor) -> Tensor:
    """Root mean square of each channel of ``[R, ..., C]`` rows brought to unit scale; never so small as to be noise."""
    wide = rows.float()
    unit = wide / wide.square().mean(dim=-1, keepdim=True).sqrt().clamp(min=1e-6)
    return unit.square().mean(dim=0).sqrt().clamp(min=0.02)


@torch.no_grad()
def target_chances(hidden: Tensor, log_norm: Tensor, target_rows: Tensor) -> Tensor:
    """The target's probabilities of the draft vocabulary's tokens, as they are: they need not add up to one.

    Args:
        hidden: ``[B, L, H]`` after the final norm.
        log_norm: ``[B, L]`` float32, logsumexp over the whole vocabulary.
        target_rows: ``[draft_vocab, H]``, rows of the target's LM head.

    Returns:
        ``[B, L, draft_vocab]`` in hidden's dtype.
    """
    logits = full_precision_logits(hidden.flatten(0, 1), target_rows).view(*hidden.shape[:2], -1)
    return logits.sub_(log_norm[..., None]).exp_().to(hidden.dtype)
