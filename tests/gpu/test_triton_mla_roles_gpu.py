"""The MLA kernel with roles on a Hopper GPU: every feature, launches that overlap, and replays with other lengths.

python -m pytest -q -m gpu tests/gpu/test_triton_mla_roles_gpu.py
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specops.ops.triton_common import Tiling
from specops.ops.triton_mla import mla
from specops.testing import assert_close_to_oracle, make_mla_case

pytestmark = pytest.mark.gpu

ROLES = Tiling(64, 64, 4, 2, 1, inline_merge=False, roles=True)
CASE = {"latent_dim": 512, "rope_dim": 64, "page_size": 64, "num_heads": 16, "dtype": torch.bfloat16, "device": "cuda"}


@pytest.fixture(autouse=True)
def on_hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel is for compute capability 9.0")


@pytest.mark.parametrize("hold", [False, True])
@pytest.mark.parametrize(
    ("features", "direct", "early"),
    [
        ({"query_lens": 4}, True, True),
        ({"query_lens": 4}, False, False),
        ({"num_heads": 128, "query_lens": 3, "dtype": torch.float16}, True, False),
        ({"query_lens": 2, "page_size": 128, "sinks": True}, False, True),
        ({"num_heads": 24, "query_lens": [1, 6, 0, 3, 30], "slack": 2}, False, True),
        ({"query_lens": 6, "tree_width": 6}, True, False),
        ({"query_lens": 6, "tree_width": 40, "sinks": True}, False, False),
        ({"query_lens": 4, "table_columns": 5}, False, False),
    ],
)
def test_features(features, direct, early, hold) -> None:
    made = make_mla_case(seq_lens=(2100, 64, 40, 65, 333), **{**CASE, **features})
    tiling = replace(ROLES, direct=direct, early=early, hold=hold, rounded_partials=hold, wide_merge=not hold)
    for _ in range(20):
        out = mla(*made.args(), **made.kwargs(), tiling=tiling, split=True)
    assert_close_to_oracle(out, made.oracle())


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("direct", [False, True])
def test_a_replay_follows_lengths_down_and_up(direct, rounded) -> None:
    """One captured call in which every launch may start before the one ahead has ended, output poisoned in between."""
    made = make_mla_case(seq_lens=(4000, 900, 64, 1), query_lens=4, **CASE)
    tiling = replace(ROLES, direct=direct, early=True, rounded_partials=rounded, wide_merge=rounded)
    mla(*made.args(), **made.kwargs(), tiling=tiling, split=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [mla(*made.args(), **made.kwargs(), tiling=tiling, split=True) for _ in range(10)]
    for lens in ((4000, 900, 64, 1), (5, 4, 63, 0), (3000, 128, 64, 1), (4000, 900, 64, 1)):
        made.tensors["seq_lens"].copy_(torch.tensor(lens, dtype=torch.int32))
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        wanted = made.oracle()
        for out in outs:
            assert_close_to_oracle(out, wanted)
