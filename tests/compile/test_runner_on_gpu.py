"""What the CPU's fakes stand for, on a GPU: prepared launches, torch's own check of addresses, memory of captures.

Run alone: pytest -m gpu tests/compile/test_runner_on_gpu.py
"""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from specops.batch import draft_extend_fields
from specops.compile.capture import capture_stream
from specops.compile.draft_extend import _FIELDS
from specops.compile.launch import PreparedLaunch
from specops.compile.ready import Staging
from specops.spec import SpecConfig
from specops.spec.verify import verify_fields
from tests.compile.toys import batch_of, fill, plain, runner_for, tiny_draft

pytestmark = pytest.mark.gpu
TABLES = {"draft extend": draft_extend_fields(6, 32, 16, torch.bfloat16), "verify": verify_fields(SpecConfig(2, 2, 3), 5)}


@pytest.mark.parametrize("where", ["here", "side stream", "another thread"])
@pytest.mark.parametrize("name", TABLES)
def test_prepared_staging_copies_every_byte(name: str, where: str) -> None:
    from specops.compile.staging import FusedStaging

    table, device = TABLES[name], torch.device("cuda", torch.cuda.current_device())
    buffers, expected = (table.allocate(8, device) for _ in range(2))
    fused = FusedStaging(table)
    fused(buffers, table.allocate(1, device), 1, 1)
    slow: list[int] = []
    for live, bucket in ((1, 1), (5, 7), (8, 8), (3, 8)):
        launch = fused.prepare(buffers, live, bucket)
        assert isinstance(launch, PreparedLaunch), "the driver or the kernel is not as expected"

        def copy_in(*args: Any) -> None:
            slow.append(1)
            table.copy_in(*args)

        stage = Staging(table.names, buffers, live, bucket, copy_in, launch)
        for tensor in (*buffers.values(), *expected.values()):
            tensor.fill_(1 if tensor.dtype == torch.bool else 99)
        raw = {key: torch.randint(0, 2, (live, *t.shape[1:]), device=device).to(t.dtype) for key, t in buffers.items()}
        table.copy_in(expected, raw, live, bucket)
        fields = [raw[key] for key in table.names]
        torch.cuda.synchronize()
        if where == "another thread":
            # One without a context of its own yet may be refused, and is served by the slower means then.
            worker = threading.Thread(target=lambda stage=stage, fields=fields: stage(fields))
            worker.start()
            worker.join()
        elif where == "side stream":
            with torch.cuda.stream(torch.cuda.Stream()):
                stage(fields)
        else:
            stage(fields)
        torch.cuda.synchronize()
        assert slow == [] or where == "another thread"
        assert all(torch.equal(expected[key], buffers[key]) for key in buffers)


@pytest.mark.parametrize("mode", ["direct", "reduce-overhead"])
def test_a_runner_stages_and_hands_over_by_prepared_launches(mode: str) -> None:
    draft = tiny_draft(400, device="cuda")
    runner = runner_for(draft, mode, strict=True)
    runner.warm_up()
    for seed, lens in enumerate(([14, 20, 9], [5], [30, 31], [14, 20, 9], [7, 8, 9, 10])):
        batch = batch_of(lens, [1 + (seed + i) % 6 for i in range(len(lens))], device="cuda", seed=seed)
        fill(draft)
        expected = plain(draft, batch)
        fill(draft)
        out = runner(batch)
        torch.testing.assert_close(out.next_token_logits, expected[0], rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(out.hidden_states, expected[1], rtol=1e-3, atol=1e-4)
        ready = runner.runner._ready[len(lens)]
        assert ready.stage.launch is not None
        assert ready.hand_over is not None
        # Torch's recorded graph, where it is replayed by itself, always leaves its outputs in the same memory.
        left = getattr(ready.hand_over, "recorded", None) or ready.hand_over
        assert left.launch is not None


@pytest.mark.parametrize("mode", ["direct", "reduce-overhead"])
@pytest.mark.parametrize("outputs", ["copy", "view"])
def test_a_known_form_goes_the_short_way_in_c(outputs: str, mode: str) -> None:
    draft = tiny_draft(400, device="cuda")
    runner = runner_for(draft, mode, strict=True, outputs=outputs)
    runner.warm_up()
    inner = runner.runner
    long: list[int] = []
    run_long = inner._run_long
    inner._run_long = lambda fields, unchanged: (long.append(1), run_long(fields, unchanged))[1]  # type: ignore[method-assign]
    for seed in range(4):
        batch = batch_of([14, 20, 9], [1 + seed, 2, 6], device="cuda", seed=seed)
        fill(draft)
        expected = plain(draft, batch)
        fill(draft)
        stream = torch.cuda.Stream() if seed == 2 else torch.cuda.current_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            out = runner(batch)
        torch.cuda.synchronize()
        torch.testing.assert_close(out.next_token_logits, expected[0], rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(out.hidden_states, expected[1], rtol=1e-3, atol=1e-4)
    way = inner._short[3]
    assert way.native, "there is a C compiler wherever Triton runs"
    assert len(long) == 1, "the first call of the form"
    unaligned = batch_of([14, 20, 9], [2, 2, 2], device="cuda")
    lens = torch.tensor([0, 14, 20, 9], dtype=torch.int32, device="cuda")[1:]
    assert lens.data_ptr() % 16
    runner(dataclasses.replace(unaligned, seq_lens=lens))
    assert len(long) == 2
    draft.fc.weight.data = draft.fc.weight.data.clone()
    assert not way.go(_FIELDS(unaligned), False)


@pytest.mark.parametrize("mode", ["direct", "reduce-overhead"])
def test_a_warm_up_writes_no_page(mode: str) -> None:
    """With buckets on both sides of the sizes at which attention takes another kernel, compiled as captures come upon it."""
    draft = tiny_draft(8000, device="cuda")
    fill(draft)
    before = [cache.k.clone() for cache in draft.caches]
    runner = runner_for(draft, mode, max_requests=160, buckets=[1, 2, 4, 8, 16, 32, 48, 160], strict=True)
    assert runner.warm_up().captured
    assert all(torch.equal(cache.k, then) for cache, then in zip(draft.caches, before, strict=True))


def test_torchs_own_graphs_are_replayed_without_torch_compile() -> None:
    from torch._inductor import cudagraph_trees

    draft = tiny_draft(400, device="cuda")
    runner = runner_for(draft, "reduce-overhead", strict=True)
    runner.warm_up()
    inner = runner.runner
    assert set(inner._bare) == {1, 2, 4}
    trees = cudagraph_trees.get_manager(torch.cuda.current_device())
    assert trees is not None

    def graphs() -> int:
        return sum(1 + root.num_descendants() for roots in trees.roots.values() for root in roots)

    recorded = graphs()
    assert recorded >= 3
    inner._compiled = None
    for thread in (False, True):
        for seed, count in enumerate((1, 4, 2, 3, 3, 1)):
            batch = batch_of([12] * count, [2] * count, device="cuda", seed=seed)
            fill(draft)
            expected = plain(draft, batch)
            fill(draft)
            out: list[Any] = []
            if thread:
                worker = threading.Thread(target=lambda out=out, batch=batch: out.append(runner(batch)))
                worker.start()
                worker.join()
            else:
                out.append(runner(batch))
            torch.cuda.synchronize()
            torch.testing.assert_close(out[0].next_token_logits, expected[0], rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(out[0].hidden_states, expected[1], rtol=1e-3, atol=1e-4)
    assert graphs() == recorded, "replayed, not recorded again"
    assert inner._compiled is None


def test_addresses_are_checked_by_torch_itself() -> None:
    assert hasattr(torch._C, "_tensors_data_ptrs_at_indices_equal"), "a map over data_ptr serves, but costs more"
    draft = tiny_draft(device="cuda")
    runner = runner_for(draft, "direct")
    runner.warm_up()
    statics = runner.runner._statics
    assert statics is not None
    assert statics.moved() is None
    assert len(statics._storages) == len(statics._addresses), "weak references to storages hold in this torch"
    draft.fc.weight.data = draft.fc.weight.data.clone()
    assert str(statics.moved()).endswith("fc.weight")


def test_buckets_behind_the_first_take_next_to_no_memory() -> None:
    draft = tiny_draft(400, device="cuda")
    runner = runner_for(draft, "direct", max_requests=20, buckets=range(1, 21), strict=True)
    report = runner.warm_up()
    behind = [bucket.memory_bytes for bucket in report.buckets if bucket.num_requests < 20]
    assert sum(behind) <= 8 * 2**20, str(report)


def test_all_captures_use_one_stream() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    assert capture_stream(device) is capture_stream(device)


def test_outputs_survive_replays_of_larger_buckets() -> None:
    draft = tiny_draft(400, device="cuda")
    runner = runner_for(draft, "direct")
    kept: list[tuple[Tensor, Tensor]] = []
    for seed, count in enumerate((1, 4, 2, 3, 4, 1)):
        fill(draft)
        out = runner(batch_of([12] * count, [2] * count, device="cuda", seed=seed))
        kept.extend((tensor, tensor.clone()) for tensor in out)
    assert all(torch.equal(now, then) for now, then in kept)


def test_f27_graphs_live_on_when_torch_records_its_own() -> None:
    """torch drops cuBLAS's workspaces when it records a graph; ours may not use memory that is freed with them."""
    draft = tiny_draft(400, device="cuda")
    runner = runner_for(draft, "direct", strict=True)
    runner.warm_up()
    batch = batch_of([14, 20, 9], [3, 1, 2], device="cuda", seed=1)
    fill(draft)
    expected = [tensor.clone() for tensor in runner(batch)]
    other = runner_for(tiny_draft(400, device="cuda"), "reduce-overhead", strict=True)
    other.warm_up()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    # Whatever was given back is now somebody's, and holds NaN.
    taken = [torch.full((2**22,), float("nan"), device="cuda") for _ in range(32)]
    for _ in range(3):
        fill(draft)
        out = runner(batch)
        torch.cuda.synchronize()
        assert all(torch.equal(now, then) for now, then in zip(out, expected, strict=True))
    assert all(bool(tensor.isnan().all()) for tensor in taken), "a graph wrote to memory that is not its own"
