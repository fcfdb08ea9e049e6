"""One kernel that copies several tensors by rows: a raw batch into a bucket's static buffers, or outputs out of a graph.

Copying field by field costs a launch a field, and two with padding; on a step of a few hundred microseconds that is
what the host's time goes to. The kernel treats every field as rows of 4-byte words (or bytes, where a row is not a multiple
of four), so one launch serves all dtypes. Needs Triton and CUDA; elsewhere :meth:`FieldTable.copy_in` does the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specops.batch import FieldTable
from specops.compile.launch import PreparedLaunch, aligned, prepare

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


class FusedCopy:
    """Copies up to ``MAX_FIELDS`` contiguous tensors by rows in one launch, and pads behind the rows.

    Args:
        row_bytes: bytes of one row of each.
        pads: what fills a row behind those copied: the word, 4 bytes or 1, as a signed integer.
    """

    def __init__(self, row_bytes: Sequence[int], pads: Sequence[int] | None = None) -> None:
        if len(row_bytes) > MAX_FIELDS:
            raise ValueError(f"a fused copy takes up to {MAX_FIELDS} fields, got {len(row_bytes)}")
        units = [unit_of(size) for size in row_bytes]
        spare = [0] * (MAX_FIELDS - len(units))
        wide = sum((unit == 4) << index for index, unit in enumerate(units))
        self._words = [size // unit for size, unit in zip(row_bytes, units, strict=True)]
        self._constants = (*self._words, *spare, *(pads or [0] * len(units)), *spare, wide, BLOCK)
        self._kernel: Any = None

    def __call__(self, sources: Sequence[Tensor], targets: Sequence[Tensor], num_rows: int, bucket: int) -> None:
        """Copy ``num_rows`` rows of each source to its target, whose rows up to ``bucket`` are padded."""
        pointers = [tensor for pair in zip(sources, targets, strict=True) for tensor in pair]
        pointers += [pointers[0]] * (2 * MAX_FIELDS - len(pointers))
        kernel = _stage[self._grid(bucket)](*pointers, num_rows, bucket, *self._constants)
        if self._kernel is None and aligned([tensor.data_ptr() for tensor in pointers]):
            self._kernel = kernel

    def prepare(
        self, sources: Sequence[Tensor] | None, targets: Sequence[Tensor] | None, num_rows: int, bucket: int
    ) -> PreparedLaunch | None:
        """The same launch with its sources or its targets still open (None), for aligned addresses.

        None where the kernel has not been launched yet, or can't be prepared.
        """
        known = [tensor.data_ptr() for tensor in sources or targets or ()]
        if self._kernel is None or not aligned(known):
            return None
        pointers: list[int | None] = []
        for address in known:
            pointers += (None, address) if sources is None else (address, None)
        pointers += [known[0]] * (2 * MAX_FIELDS - len(pointers))
        return prepare(self._kernel, self._grid(bucket), pointers, (num_rows, bucket))

    def _grid(self, bucket: int) -> tuple[int, int]:
        return -(-max(self._words) * bucket // BLOCK), len(self._words)


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
        self.table, self.names = table, table.names
        row_bytes, pads = [], []
        for field in table.fields:
            size = field.dtype.itemsize
            for extent in field.row_shape(table.tokens_per_request):
                size *= extent
            row_bytes.append(size)
            pads.append(_pad_word(field.pad, field.dtype, unit_of(size)))
        self.copy = FusedCopy(row_bytes, pads)

    def __call__(self, buffers: Mapping[str, Tensor], batch: Mapping[str, Tensor], num_requests: int, bucket: int) -> None:
        """As :meth:`FieldTable.copy_in`."""
        sources = [batch[name].detach().contiguous() for name in self.names]
        if any(source.data_ptr() % 4 for source in sources):
            # A view that starts between two words.
            self.table.copy_in(buffers, batch, num_requests, bucket)
        else:
            self.copy(sources, [buffers[name] for name in self.names], num_requests, bucket)

    def prepare(self, buffers: Mapping[str, Tensor], num_requests: int, bucket: int) -> PreparedLaunch | None:
        """The launch for batches of ``num_requests``, whose fields' addresses are still open; None if it can't be."""
        return self.copy.prepare(None, [buffers[name] for name in self.names], num_requests, bucket)


def unit_of(row_bytes: int) -> int:
    """Bytes of the words that a field's rows are moved in."""
    return 1 if row_bytes % 4 else 4


def _pad_word(pad: float, dtype: torch.dtype, unit: int) -> int:
    """The pad value as the unit's signed integer, which must give the value when repeated."""
    raw = torch.full((8,), pad, dtype=dtype).view(torch.int32 if unit == 4 else torch.int8)
    if not bool((raw == raw[0]).all()):
        raise ValueError(f"fused staging can't pad {dtype} with {pad}: its {unit}-byte words differ")
    return int(raw[0])
