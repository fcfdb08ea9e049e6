"""The reference backend's own: slices of requests, and CUDA graphs. Its values are tested in test_backend_contract.py.

OMP_NUM_THREADS=1 pytest tests/ops/test_reference.py
"""

from __future__ import annotations

import pytest
import torch

from specops.testing import MHA_GRID, MLA_GRID, make_mha_case, make_mla_case

BACKEND = "reference"


def test_slices_of_requests_give_what_one_slice_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_mha_case(seq_lens=(9, 13, 5), query_lens=(1, 6, 3))
    whole = case.run(BACKEND)
    monkeypatch.setattr("specops.ops.reference.SLICE_ELEMENTS", 1)
    assert torch.allclose(case.run(BACKEND), whole, rtol=0, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MHA_GRID)
def test_mha_on_a_gpu(name: str) -> None:
    make_mha_case(**MHA_GRID[name], device="cuda").check(BACKEND)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MLA_GRID)
def test_mla_on_a_gpu(name: str) -> None:
    make_mla_case(**MLA_GRID[name], device="cuda").check(BACKEND)


@pytest.mark.gpu
@pytest.mark.parametrize("query_lens", [6, (1, 1)], ids=("uniform", "packed"))
def test_capture_with_short_lengths_replays_with_long_ones(query_lens: int | tuple[int, ...]) -> None:
    case = make_mha_case(seq_lens=(40, 33), query_lens=query_lens, slack=12, device="cuda")
    seq_lens = case.tensors["seq_lens"]
    real = seq_lens.clone()
    case.run(BACKEND)
    seq_lens.fill_(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = case.run(BACKEND)
    seq_lens.copy_(real)
    graph.replay()
    assert torch.equal(out, case.run(BACKEND))
