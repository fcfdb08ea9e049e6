"""Prepared launches against a driver that runs on the CPU: what reaches the driver, and which kernels are refused.

Run alone: pytest tests/compile/test_launch.py
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the staging kernel is a Triton kernel")

from specops.batch import FieldTable, draft_extend_fields
from specops.compile import launch, ready
from specops.compile.launch import PreparedLaunch, aligned, prepare
from specops.compile.ready import HandOver, Staging
from specops.compile.staging import FusedCopy, FusedStaging
from specops.spec import SpecConfig
from specops.spec.verify import verify_fields
from tests.compile.fakes import FakeDriver, kernel

TABLES = {"draft extend": draft_extend_fields(6, 32, 16, torch.bfloat16), "verify": verify_fields(SpecConfig(2, 2, 3), 5)}
CPU = torch.device("cpu")


def driver_for(table: FieldTable, monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    rows = table.allocate(1, CPU)
    pads = [torch.tensor([field.pad], dtype=field.dtype).view(torch.uint8) for field in table.fields]
    driver = FakeDriver([rows[name].nbytes for name in table.names], [bytes(pad.tolist()) for pad in pads])
    monkeypatch.setattr(launch, "_driver", lambda: driver)
    monkeypatch.setattr(ready, "raw_stream", lambda index: 2**40 + 5)
    return driver


def staging_for(table: FieldTable, live: int, bucket: int) -> tuple[Staging, dict[str, Tensor], list[int]]:
    """Staging with a compiled kernel, its poisoned buffers, and the calls of the slower means."""
    fused = FusedStaging(table)
    fused.copy._kernel = kernel()
    buffers = table.allocate(bucket, CPU)
    for buffer in buffers.values():
        buffer.fill_(1 if buffer.dtype == torch.bool else 99)
    slow: list[int] = []

    def copy_in(*args: object) -> None:
        slow.append(1)
        table.copy_in(*args)  # type: ignore[arg-type]

    return Staging(table.names, buffers, live, bucket, copy_in, fused.prepare(buffers, live, bucket)), buffers, slow


def random_batch(table: FieldTable, live: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = table.allocate(live, CPU)
    return {
        name: torch.randint(0, 2, (4, *t.shape), generator=generator)[seed % 4].to(t.dtype).clone()
        for name, t in rows.items()
    }


@pytest.mark.parametrize("sizes", [(1, 1), (5, 7), (3, 8)])
@pytest.mark.parametrize("name", TABLES)
def test_one_launch_stages_what_a_copy_field_by_field_does(
    name: str, sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    table, (live, bucket) = TABLES[name], sizes
    driver = driver_for(table, monkeypatch)
    stage, buffers, slow = staging_for(table, live, bucket)
    for seed in range(3):
        batch = random_batch(table, live, seed)
        expected = {key: torch.full_like(buffer, 1) for key, buffer in buffers.items()}
        table.copy_in(expected, batch, live, bucket)
        stage([batch[key] for key in table.names])
        assert all(torch.equal(expected[key], buffers[key]) for key in buffers)
    assert len(driver.launches) == 3
    assert slow == []


def test_the_driver_gets_grid_threads_stream_and_parameters_in_the_kernels_order(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()
    monkeypatch.setattr(launch, "_driver", lambda: driver)
    pointers = [None if place % 4 == 1 else 1000 + place for place in range(16)]
    prepared = prepare(kernel(num_warps=8, shared=1040), (9, 5), pointers, (3, 2**31 - 1))
    assert isinstance(prepared, PreparedLaunch)
    high = 2**47 + 16
    assert prepared.fire([high, 1, 2, 3], 0)
    assert prepared.fire([4, 5, 6, 7], 2**44)
    assert driver.shared == 1040
    filled = [[high, 1, 2, 3], [4, 5, 6, 7]]
    for (grid, threads, stream, values), expected, on in zip(driver.launches, filled, (0, 2**44), strict=True):
        assert (grid, threads, stream) == ((9, 5), 256, on)
        assert values[1:16:4] == expected
        assert [value for place, value in enumerate(values[:16]) if place % 4 != 1] == [p for p in pointers if p]
        assert values[16:] == [3, 2**31 - 1, 0, 0], "numbers, then the null pointers of scratch memory"


@pytest.mark.parametrize(
    ("changes", "sizes"),
    [
        ({"shared": 49 * 1024}, (8,) * 16 + (4, 4)),
        ({"num_ctas": 2}, (8,) * 16 + (4, 4)),
        ({"global_scratch_size": 64}, (8,) * 16 + (4, 4, 8, 8)),
        ({"launch_cooperative_grid": True}, (8,) * 16 + (4, 4)),
        ({}, (8,) * 15 + (4, 4)),
        ({}, (8,) * 16 + (8, 4)),
        ({}, (8,) * 16 + (4, 4) + (8,) * 9),
        ({}, ()),
    ],
)
def test_kernels_that_are_not_as_expected_are_left_to_triton(
    changes: dict[str, int], sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_driver", lambda: FakeDriver(sizes=sizes))
    assert prepare(kernel(**changes), (1, 1), [None] * 16, (1, 1)) is None
    assert prepare(object(), (1, 1), [None] * 16, (1, 1)) is None


def test_without_a_driver_nothing_is_prepared() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a driver here; without one is what this asks")
    assert prepare(kernel(), (1, 1), [None] * 16, (1, 1)) is None


@pytest.mark.parametrize("why", ["strided", "unaligned", "other device", "driver says no"])
def test_what_a_launch_cannot_take_is_staged_by_slower_means(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table = TABLES["draft extend"]
    driver = driver_for(table, monkeypatch)
    stage, buffers, slow = staging_for(table, 2, 4)
    batch = random_batch(table, 2, 1)
    if why == "strided":
        batch["seq_lens"] = torch.arange(4, dtype=torch.int32)[::2]
    elif why == "unaligned":
        batch["seq_lens"] = torch.arange(3, dtype=torch.int32)[1:]
    elif why == "other device":
        monkeypatch.setattr(ready, "raw_stream", lambda index: None)
    else:
        driver.error = 201
    stage([batch[key] for key in table.names])
    assert slow == [1]
    assert len(driver.launches) == (why == "driver says no")
    assert all(torch.equal(buffers[key][:2], batch[key]) for key in buffers)


def test_a_field_that_asks_for_gradients_is_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    table = TABLES["draft extend"]
    driver_for(table, monkeypatch)
    stage, buffers, _ = staging_for(table, 2, 4)
    batch = random_batch(table, 2, 1)
    batch["hidden_states"] = batch["hidden_states"].requires_grad_()
    for stager in (stage, Staging(table.names, buffers, 2, 4, table.copy_in)):
        stager([batch[key] for key in table.names])
        assert not buffers["hidden_states"].requires_grad
        assert torch.equal(buffers["hidden_states"][:2], batch["hidden_states"].detach())


def test_an_unaligned_view_of_half_words_does_not_reach_the_kernel() -> None:
    table = TABLES["draft extend"]
    buffers = table.allocate(2, CPU)
    batch = random_batch(table, 1, 2)
    batch["hidden_states"] = torch.arange(193.0).to(torch.bfloat16)[1:].view(1, 6, 32)
    fused = FusedStaging(table)
    fused.copy = None  # type: ignore[assignment]
    fused(buffers, batch, 1, 2)
    assert torch.equal(buffers["hidden_states"][:1], batch["hidden_states"])


@pytest.mark.parametrize("fused", [True, False])
def test_outputs_are_handed_over_by_one_launch_into_fresh_memory(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = [torch.randn(4, 64), torch.randn(8, 32).to(torch.bfloat16)]
    driver = FakeDriver([256, 128], [b"\0", b"\0"])
    monkeypatch.setattr(launch, "_driver", lambda: driver)
    monkeypatch.setattr(ready, "raw_stream", lambda index: 0)
    copy = FusedCopy([256, 128])
    copy._kernel = kernel() if fused else None
    hand_over = HandOver(outputs, 3, 4, copy)
    for _ in range(2):
        first = hand_over(False)
        assert [tensor.shape for tensor in first] == [(3, 64), (6, 32)]
        kept = [tensor.clone() for tensor in first]
        assert all(torch.equal(a, b[: len(a)]) for a, b in zip(first, outputs, strict=True))
        for output in outputs:
            output.fill_(7)
        assert all(torch.equal(a, b) for a, b in zip(first, kept, strict=True)), "F28: graph memory is not handed out"
    assert len(driver.launches) == (2 if fused else 0)
    views = hand_over(True)
    assert [view.data_ptr() for view in views] == [output.data_ptr() for output in outputs]


def test_large_outputs_are_copied_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver([2**21], [b"\0"])
    monkeypatch.setattr(launch, "_driver", lambda: driver)
    copy = FusedCopy([2**21])
    copy._kernel = kernel()
    output = torch.randn(4, 2**19)
    assert HandOver([output], 2, 4, copy).launch is not None
    assert HandOver([output], 3, 4, copy).launch is None
    assert torch.equal(HandOver([output], 3, 4, copy)(False)[0], output[:3])


def test_alignment() -> None:
    assert aligned([0, 16, 512])
    assert not aligned([16, 24, 32])


def test_more_fields_than_the_kernel_takes_are_refused() -> None:
    with pytest.raises(ValueError, match="a fused copy takes up to 8 fields, got 9"):
        FusedCopy([4] * 9)
