"""The CPU backend's own: what it reads, and in what blocks. Its values are tested in test_backend_contract.py.

OMP_NUM_THREADS=1 pytest tests/ops/test_cpu.py
"""

from __future__ import annotations

import pytest
import torch

from specops.testing import MHA_GRID, make_mha_case

BACKEND = "cpu"
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def test_auto_takes_it_on_a_cpu() -> None:
    case = make_mha_case(query_lens=3)
    with torch.profiler.profile() as profile:
        case.run("auto")
    assert "specops::cpu_mha" in {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("order", [range(1, 17), range(16, 0, -1)], ids=("run", "backwards"))
def test_pages_in_a_run_are_read_in_place_with_the_same_result(order: range, dtype: torch.dtype) -> None:
    case = make_mha_case(seq_lens=(61,), query_lens=3, dtype=dtype)
    pages = case.tensors["page_table"][0, :16].long()
    moved = torch.tensor(list(order))
    for name in ("k_cache", "v_cache"):
        cache = case.tensors[name]
        target = torch.full((20, *cache.shape[1:]), float("nan"), dtype=dtype)
        target[moved] = cache[pages]
        case.tensors[name] = target
    case.tensors["page_table"] = moved[None].int()
    case.check(BACKEND)


def test_blocks_of_rows_give_what_one_block_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specops.ops.cpu.BLOCK_SCORES", 1)
    for name in ("prefill", "window", "tree", "wide-tree-and-window", "fewer-keys-than-rows", "sinks-without-keys"):
        make_mha_case(**MHA_GRID[name]).check(BACKEND)


def test_memory_behind_the_window_is_not_touched() -> None:
    case = make_mha_case(seq_lens=(40,), query_lens=2, window=5)
    # Rows stand at 38 and 39 and see keys from 34 on; pages 0 to 7 hold keys 0 to 31.
    out_of_window = case.tensors["page_table"][0, :8].long()
    case.tensors["k_cache"][out_of_window] = float("nan")
    case.tensors["v_cache"][out_of_window] = float("nan")
    case.check(BACKEND)


def test_default_device_of_the_process_does_not_matter() -> None:
    case = make_mha_case(query_lens=3, window=2)
    with torch.device("meta"):
        out = case.run(BACKEND)
    assert torch.equal(out, case.run(BACKEND))
