"""One kernel that copies a raw batch into a bucket's static buffers and pads the rest.

Copying field by field costs a launch a field, and two with padding; on a step of a few hundred microseconds that is
what the host's time goes to. The kernel treats every field as rows of 4-byte words (or bytes, where a row is not a multiple
of four), so one launch serves all dtypes. Needs Triton and CUDA; elsewhere :meth:`FieldTable.copy_in` does the same.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from specops.batch import FieldTable

MAX_FIELDS = 8
# Words a program copies. Small fields dominate, so the grid is one program for each of them and a few for hidden states.
BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _copy_field(  # type: ignore[no-untyped-def]
    source, target, num_rows, bucket, pid, WORDS: tl.constexpr, PAD: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr
):
    """Copy block ``pid`` of one field: ``num_rows * WORDS`` words from the batch, then padding up to the bucket."""
    unit = tl.int32 if WIDE else tl.int8
    source = source.to(tl.pointer_type(unit))
    target = target.to(tl.pointer_type(unit))
    at = pid.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < num_rows.to(tl.int64) * WORDS
    value = tl.load(source + at, mask=live, other=0)
    tl.store(target + at, tl.where(live, value, PAD).to(unit), mask=at < bucket.to(tl.int64) * WORDS)


# Batch sizes change from call to call: specialising on 1 or on multiples of 16 would compile again.
@triton.jit(do_not_specialize=["num_rows", "bucket"])  # type: ignore[untyped-decorator]
def _stage(  # type: ignore[no-untyped-def]
    s0, t0, s1, t1, s2, t2, s3, t3, s4, t4, s5, t5, s6, t6, s7, t7,
    num_rows, bucket,
    W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, W3: tl.constexpr,
    W4: tl.constexpr, W5: tl.constexpr, W6: tl.constexpr, W7: tl.constexpr,
    P0: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr, P3: tl.constexpr,
    P4: tl.constexpr, P5: tl.constexpr, P6: tl.constexpr, P7: tl.constexpr,
    WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (i, f) copies block i of field f; ``WIDE`` has a bit for each field that is moved in 4-byte words."""
    pid = tl.program_id(0)
    field = tl.program_id(1)
    if field == 0:
        _copy_field(s0, t0, num_rows, bucket, pid, W0, P0, (WIDE & 1) != 0, BLOCK)
    if W1 > 0:
        if field == 1:
            _copy_field(s1, t1, num_rows, bucket, pid, W1, P1, (WIDE & 2) != 0, BLOCK)
    if W2 > 0:
        if field == 2:
            _copy_field(s2, t2, num_rows, bucket, pid, W2, P2, (WIDE & 4) != 0, BLOCK)
    if W3 > 0:
        if field == 3:
            _copy_field(s3, t3, num_rows, bucket, pid, W3, P3, (WIDE & 8) != 0, BLOCK)
    if W4 > 0:
        if field == 4:
            _copy_field(s4, t4, num_rows, bucket, pid, W4, P4, (WIDE & 16) != 0, BLOCK)
    if W5 > 0:
        if field == 5:
            _copy_field(s5, t5, num_rows, bucket, pid, W5, P5, (WIDE & 32) != 0, BLOCK)
    if W6 > 0:
        if field == 6:
            _copy_field(s6, t6, num_rows, bucket, pid, W6, P6, (WIDE & 64) != 0, BLOCK)
    if W7 > 0:
        if field == 7:
            _copy_field(s7, t7, num_rows, bucket, pid, W7, P7, (WIDE & 128) != 0, BLOCK)


class FusedStaging:
    """``FieldTable.copy_in`` as one launch.

    Args:
        table: at most ``MAX_FIELDS`` fields.

    Raises:
        ValueError: more fields than the kernel takes, or a pad value that is not one word repeated (an int64 5, say).
    """

    def __init__(self, table: FieldTable) -> None:
        if len(table.fields) > MAX_FIELDS:
            raise ValueError(f"fused staging takes up to {MAX_FIELDS} fields, got {len(table.fields)}")
        self.names = table.names
        words, pads, wide = [], [], 0
        for index, field in enumerate(table.fields):
            size = field.dtype.itemsize
            for extent in field.row_shape(table.tokens_per_request):
                size *= extent
            is_wide = size % 4 == 0
            unit = 4 if is_wide else 1
            wide |= int(is_wide) << index
            words.append(size // unit)
            pads.append(_pad_word(field.pad, field.dtype, unit))
        spare = MAX_FIELDS - len(words)
        self._constants = (*words, *[0] * spare, *pads, *[0] * spare, wide, BLOCK)
        self._words = words
        self._spare = spare

    def __call__(self, buffers: Mapping[str, Tensor], batch: Mapping[str, Tensor], num_requests: int, bucket: int) -> None:
        """As :meth:`FieldTable.copy_in`."""
        pointers: list[Tensor] = []
        for name in self.names:
            source = batch[name]
            pointers += (source if source.is_contiguous() else source.contiguous(), buffers[name])
        pointers += [pointers[0]] * (2 * self._spare)
        blocks = -(-max(self._words) * bucket // BLOCK)
        _stage[(blocks, len(self.names))](*pointers, num_requests, bucket, *self._constants)


def _pad_word(pad: float, dtype: torch.dtype, unit: int) -> int:
    """The pad value as the unit's signed integer, which must give the value when repeated."""
    raw = torch.full((8,), pad, dtype=dtype).view(torch.int32 if unit == 4 else torch.int8)
    if not bool((raw == raw[0]).all()):
        raise ValueError(f"fused staging can't pad {dtype} with {pad}: its {unit}-byte words differ")
    return int(raw[0])
