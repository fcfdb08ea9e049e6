"""The roles of the Hopper MLA kernel against the float64 oracle, emulated on the CPU: schedule, barriers, masks, softmax.

TRITON_INTERPRET=1 python -m pytest -q tests/ops/test_triton_hopper_roles.py

What only the compiler and the device can show is in ``test_triton_compile.py`` and ``tests/gpu``.
"""

from __future__ import annotations

import os
from dataclasses import replace

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import gluon_emulator
import pytest

from specops.ops.triton_common import Tiling
from specops.ops.triton_mla import mla
from specops.testing import assert_close_to_oracle, make_mla_case

roles = pytest.importorskip("specops.ops.triton_hopper_roles", reason="this Triton has no Gluon")

ROLES = Tiling(64, 64, 4, 2, 1, inline_merge=False, roles=True)
CASE = {"latent_dim": 512, "rope_dim": 64, "page_size": 64, "num_heads": 16, "query_lens": 4, "dtype": torch.float16}
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there the kernel itself runs, in tests/gpu")


def check(monkeypatch, tiling: Tiling, seed: int = 0, **case) -> None:
    made = make_mla_case(**{**CASE, "seq_lens": (400, 64, 65), **case})
    monkeypatch.setattr(roles, "latent_roles_kernel", gluon_emulator.emulated(roles, "latent_roles_kernel", seed))
    assert_close_to_oracle(mla(*made.args(), **made.kwargs(), tiling=tiling, split=True), made.oracle())


@pytest.mark.parametrize("hold", [False, True])
@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_any_interleaving_of_the_roles(monkeypatch, hold, direct, seed) -> None:
    check(monkeypatch, replace(ROLES, hold=hold, direct=direct, programs_per_sm=1 + seed), seed)


@pytest.mark.parametrize(
    ("features", "direct"),
    [
        ({"num_heads": 128, "query_lens": 2, "seq_lens": (300, 70)}, True),
        ({"num_heads": 128, "query_lens": 2, "seq_lens": (300, 70)}, False),
        ({"query_lens": 2, "page_size": 128, "sinks": True}, True),
        ({"query_lens": 2, "page_size": 128, "sinks": True}, False),
        ({"num_heads": 24, "query_lens": [1, 6, 0, 30], "slack": 2, "seq_lens": (200, 64, 40, 90)}, False),
        ({"num_heads": 24, "query_lens": [1, 6, 0, 30], "slack": 2, "seq_lens": (200, 64, 40, 90)}, True),
        ({"query_lens": 6, "tree_width": 6}, True),
        ({"query_lens": 6, "tree_width": 40, "sinks": True}, False),
        ({"table_columns": 3}, False),
        ({"table_columns": 3}, True),
        ({"seq_lens": (0, 3, 64), "dtype": torch.bfloat16}, False),
    ],
)
def test_features(monkeypatch, features, direct) -> None:
    check(monkeypatch, replace(ROLES, hold=direct, direct=direct), seed=5, **features)


def test_partial_results_may_be_rounded_to_the_dtype_of_the_query(monkeypatch) -> None:
    check(monkeypatch, replace(ROLES, direct=True, rounded_partials=True), dtype=torch.bfloat16)


def test_a_negative_length_is_no_keys(monkeypatch) -> None:
    made = make_mla_case(**{**CASE, "seq_lens": (200, 0, 65)})
    monkeypatch.setattr(roles, "latent_roles_kernel", gluon_emulator.emulated(roles, "latent_roles_kernel", 3))
    for direct in (False, True):
        tiling = replace(ROLES, direct=direct)
        wanted = mla(*made.args(), **made.kwargs(), tiling=tiling, split=True)
        made.tensors["seq_lens"][1] = -7
        out = mla(*made.args(), **made.kwargs(), tiling=tiling, split=True)
        made.tensors["seq_lens"][1] = 0
        assert not out[4:8].any()
        assert_close_to_oracle(out, wanted.double())
