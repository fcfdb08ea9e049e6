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

from specops.ops import triton_mla
from specops.ops.triton_common import Tiling
from specops.ops.triton_mla import mla
from specops.testing import assert_close_to_oracle, make_mla_case

roles = pytest.importorskip("specops.ops.triton_hopper_roles", reason="this Triton has no Gluon")

ROLES = Tiling(64, 64, 4, 2, 1, inline_merge=False, roles=True)
CASE = {"latent_dim": 512, "rope_dim": 64, "page_size": 64, "num_heads": 16, "query_lens": 4, "dtype": torch.float16}
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there the kernel itself runs, in tests/gpu")


def check(monkeypatch, tiling: Tiling | None, seed: int = 0, **case) -> float:
    made = make_mla_case(**{**CASE, "seq_lens": (400, 64, 65), **case})
    with monkeypatch.context() as patch:
        patch.setattr(roles, "latent_roles_kernel", gluon_emulator.emulated(roles, "latent_roles_kernel", seed))
        out = mla(*made.args(), **made.kwargs(), tiling=tiling, split=True)
    return assert_close_to_oracle(out, made.oracle())


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


@pytest.mark.parametrize("seq_lens", [(320, 260), (900, 64), (70,) * 12])
@pytest.mark.parametrize("rounded", [False, True])
def test_units_of_like_lengths_may_be_cut_alike(monkeypatch, seq_lens, rounded) -> None:
    """Like ones, unlike ones, and more than there are programs, which takes the schedule."""
    tiling = replace(ROLES, even=True, rounded_partials=rounded, hold=rounded)
    check(monkeypatch, tiling, seed=4, seq_lens=seq_lens)


@pytest.mark.parametrize(("dtype", "half_unit"), [(torch.bfloat16, 2**-9), (torch.float16, 2**-12)])
def test_rounded_partial_results_add_less_than_half_a_unit(monkeypatch, dtype, half_unit) -> None:
    """Partial results are means of values, and the output a mean of them, so rounding them adds at most what rounding the
    output does: half a unit in the last place of each number."""
    case = {"dtype": dtype, "seq_lens": (700, 600)}
    exact = check(monkeypatch, replace(ROLES, direct=True), **case)
    rounded = check(monkeypatch, replace(ROLES, direct=True, rounded_partials=True), **case)
    assert exact != rounded
    assert rounded < exact + half_unit


@pytest.mark.parametrize(
    ("case", "chosen"),
    [
        # Of 8 multiprocessors, as assumed here: 4 programs a unit, 2, 1, and 8 for the only unit, which has another kernel.
        ({"seq_lens": (400, 65)}, {"roles", "even", "early", "rounded_partials", "wide_merge"}),
        (
            {"num_heads": 128, "query_lens": 2, "seq_lens": (300,)},
            {"roles", "direct", "hold", "early", "rounded_partials", "wide_merge"},
        ),
        ({"seq_lens": (70,) * 8}, {"roles", "direct", "early"}),
        ({"seq_lens": (400,)}, set()),
    ],
)
def test_what_is_chosen_for_hopper(monkeypatch, case, chosen) -> None:
    taken = []

    def launch(*args, tiling, **options):
        taken.append(tiling)
        return launched(*args, tiling=tiling, **options)

    launched = triton_mla.launch
    monkeypatch.setattr(triton_mla, "launch", launch)
    monkeypatch.setattr(triton_mla, "hopper_products", lambda device: True)
    check(monkeypatch, None, **case)
    options = ("roles", "direct", "even", "hold", "early", "rounded_partials", "wide_merge")
    assert {option for option in options if getattr(taken[0], option) and taken[0].roles} == chosen


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
