"""The fused staging kernel against a copy field by field, through Triton's interpreter where there is no GPU.

Run alone: pytest tests/compile/test_staging.py
"""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton", reason="fused staging is a Triton kernel")

from specops.batch import Field, FieldTable, draft_extend_fields
from specops.compile.staging import FusedStaging
from specops.spec import SpecConfig
from specops.spec.draft import draft_fields
from specops.spec.verify import verify_fields

TABLES = {
    "draft extend": draft_extend_fields(6, 32, 16, torch.bfloat16),
    "draft extend, wide": draft_extend_fields(3, 700, 5, torch.float32),
    "verify": verify_fields(SpecConfig(3, 2, 6), 16),
    "verify, odd mask rows": verify_fields(SpecConfig(2, 2, 3), 5),
    "draft": draft_fields(333, 32, 7, torch.float16),
}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("sizes", [(1, 1), (5, 7), (8, 8), (3, 8)])
@pytest.mark.parametrize("name", TABLES)
def test_every_byte_is_that_of_a_copy_field_by_field(name: str, sizes: tuple[int, int]) -> None:
    table, (live, bucket) = TABLES[name], sizes
    expected, got = (table.allocate(8, torch.device(DEVICE)) for _ in range(2))
    for buffers in (expected, got):
        for buffer in buffers.values():
            buffer.fill_(1 if buffer.dtype == torch.bool else 99)
    raw = {
        key: torch.randint(0, 2, (live, *buffer.shape[1:]), device=DEVICE).to(buffer.dtype) for key, buffer in got.items()
    }
    table.copy_in(expected, raw, live, bucket)
    FusedStaging(table)(got, raw, live, bucket)
    assert all(torch.equal(expected[key], got[key]) for key in got)


def test_a_strided_field_is_copied_right() -> None:
    table = TABLES["draft extend"]
    buffers = table.allocate(4, torch.device(DEVICE))
    raw = {key: buffer[:3].clone() for key, buffer in buffers.items()}
    raw["seq_lens"] = torch.arange(6, dtype=torch.int32, device=DEVICE)[::2]
    FusedStaging(table)(buffers, raw, 3, 4)
    assert buffers["seq_lens"].tolist() == [0, 2, 4, 0]


def test_what_the_kernel_cannot_do_is_refused() -> None:
    with pytest.raises(ValueError, match=r"can't pad torch.int64 with 5: its 4-byte words differ"):
        FusedStaging(FieldTable((Field("ids", "token", (), torch.int64, 5),), 3))
    many = tuple(Field(f"f{i}", "request", (), torch.int32) for i in range(9))
    with pytest.raises(ValueError, match="takes up to 8 fields, got 9"):
        FusedStaging(FieldTable(many, 1))
