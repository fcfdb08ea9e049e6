"""The batch of one compiled step as a table of fields: the table drives allocation, padding, copy-in and unpadding.

A field has an extent (one entry a request, or one a token), a trailing shape, a dtype and the value that pads it. Padded
requests have ``seq_len`` 0 and page table 0, so they stand at negative positions: they write no page, see no key, and
their attention output is zero. Adding an input to a step means adding one line to its table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Field:
    """One input of a step.

    Attributes:
        name: the step's argument.
        extent: ``"request"`` for ``[B, *shape]``, ``"token"`` for ``[B, tokens_per_request, *shape]``.
        shape: trailing shape.
        dtype: dtype of the static buffer.
        pad: value of padded requests.
    """

    name: str
    extent: Literal["request", "token"]
    shape: tuple[int, ...]
    dtype: torch.dtype
    pad: float = 0

    def row_shape(self, tokens_per_request: int) -> tuple[int, ...]:
        return (tokens_per_request, *self.shape) if self.extent == "token" else self.shape


@dataclass(frozen=True)
class FieldTable:
    """The fields of a step and the width they share.

    Raises:
        ValueError: if ``tokens_per_request`` is below 1, or a name stands twice.
    """

    fields: tuple[Field, ...]
    tokens_per_request: int

    def __post_init__(self) -> None:
        if self.tokens_per_request < 1:
            raise ValueError(
                f"tokens_per_request must be >= 1, got {self.tokens_per_request}; it is the number of rows every request "
                "has in a step (num_draft_tokens), and must be known before warm-up"
            )
        names = [field.name for field in self.fields]
        if len(set(names)) != len(names):
            raise ValueError(f"a field is named twice: {names}")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(field.name for field in self.fields)

    def allocate(self, num_requests: int, device: torch.device) -> dict[str, Tensor]:
        """Padded buffers ``[num_requests, *row_shape]`` for every field."""
        return {
            field.name: torch.full(
                (num_requests, *field.row_shape(self.tokens_per_request)), field.pad, dtype=field.dtype, device=device
            )
            for field in self.fields
        }

    def check(self, batch: Mapping[str, Tensor], device: torch.device) -> int:
        """Number of requests of a raw batch.

        Token fields may come flat, ``[B * tokens_per_request, *shape]``.

        Raises:
            ValueError, TypeError: a field that is missing, unknown, of another width, dtype or device.
        """
        missing = [name for name in self.names if name not in batch]
        unknown = [name for name in batch if name not in self.names]
        if missing or unknown:
            raise ValueError(
                f"the batch lacks {missing or 'nothing'} and has unknown {unknown or 'nothing'}; fields are {self.names}"
            )
        counts = {}
        for field in self.fields:
            tensor = batch[field.name]
            row_shape = field.row_shape(self.tokens_per_request)
            rows = tensor.shape[0] if tensor.dim() else 0
            if tuple(tensor.shape[1:]) != row_shape:
                flat = field.extent == "token" and tuple(tensor.shape[1:]) == field.shape
                if not flat or rows % self.tokens_per_request:
                    raise ValueError(
                        f"{field.name} must be [B, {', '.join(map(str, row_shape))}] "
                        f"(tokens_per_request is {self.tokens_per_request}), got {tuple(tensor.shape)}"
                    )
                rows //= self.tokens_per_request
            if tensor.dtype != field.dtype:
                raise TypeError(f"{field.name} must be {field.dtype}, got {tensor.dtype}")
            if tensor.device != device:
                raise ValueError(f"{field.name} is on {tensor.device}, the step runs on {device}")
            counts[field.name] = rows
        if len(set(counts.values())) > 1:
            raise ValueError(f"the fields disagree about the number of requests: {counts}")
        return next(iter(counts.values()))

    def rows(self, batch: Mapping[str, Tensor], num_requests: int) -> dict[str, Tensor]:
        """The batch with flat token fields seen as ``[B, tokens_per_request, *shape]``; no copies."""
        return {
            field.name: batch[field.name].reshape(num_requests, *field.row_shape(self.tokens_per_request))
            for field in self.fields
        }

    def copy_in(self, buffers: Mapping[str, Tensor], batch: Mapping[str, Tensor], num_requests: int, bucket: int) -> None:
        """Write a batch into static buffers and pad rows ``num_requests`` to ``bucket``, whatever stood there before."""
        for field in self.fields:
            buffer = buffers[field.name]
            buffer[:num_requests].copy_(batch[field.name].reshape(num_requests, *buffer.shape[1:]))
            if bucket > num_requests:
                buffer[num_requests:bucket].fill_(field.pad)

    def describe(self) -> str:
        """The table in words, one field a line."""
        return "\n".join(
            f"{field.name:14} [B{''.join(f', {size}' for size in field.row_shape(self.tokens_per_request))}] "
            f"{str(field.dtype).removeprefix('torch.')} pad {field.pad:g}"
            for field in self.fields
        )


@dataclass(frozen=True, eq=False)
class DraftExtendBatch:
    """Raw input of a draft-extend V2 step; token fields may be flat or ``[B, n, ...]``.

    Attributes:
        input_ids: ``[B, n]`` int64. Row ``i`` holds the token *after* the one whose hidden state it is paired with;
            rows at and behind ``accept_lens`` are filler.
        hidden_states: ``[B, n, H]``, the target's hidden states at the accepted nodes.
        seq_lens: ``[B]`` int32, keys including all ``n`` rows.
        accept_lens: ``[B]`` int32, accepted rows of each request, 1 to n.
        page_table: ``[B, max_pages]`` int32.
    """

    input_ids: Tensor
    hidden_states: Tensor
    seq_lens: Tensor
    accept_lens: Tensor
    page_table: Tensor

    def as_dict(self) -> dict[str, Tensor]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


def draft_extend_fields(tokens_per_request: int, hidden_size: int, max_pages: int, dtype: torch.dtype) -> FieldTable:
    """Field table of draft-extend V2. Padded requests accept one row, so that the last-row selection stays in range."""
    return FieldTable(
        (
            Field("input_ids", "token", (), torch.int64),
            Field("hidden_states", "token", (hidden_size,), dtype),
            Field("seq_lens", "request", (), torch.int32),
            Field("accept_lens", "request", (), torch.int32, pad=1),
            Field("page_table", "request", (max_pages,), torch.int32),
        ),
        tokens_per_request,
    )


def unpad(outputs: Sequence[Tensor], num_requests: int, bucket: int) -> list[Tensor]:
    """The rows of live requests: an output has one row, or a whole number of rows, per request of the bucket."""
    return [output[: output.shape[0] // bucket * num_requests] for output in outputs]
