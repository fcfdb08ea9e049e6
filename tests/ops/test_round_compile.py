"""The kernels of a round's small steps compile for Hopper on a machine without a GPU, and meet few barriers.

    python -m pytest -q tests/ops/test_round_compile.py

A process of its own compiles, since the interpreter may be on in this one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Sizes of a tree of 16 nodes in 4 levels of 4, one request, and a draft vocabulary of 8192.
SCRIPT = """
import json, sys
sys.path[:0] = [{benchmarks!r}, {root!r}]
import torch
from compile_triton import _compile_only, _report
from specops.ops import triton_beam, triton_places, triton_round, triton_round_end
def ints(*shape): return torch.empty(shape, dtype=torch.int64, device="meta")
def short(*shape): return torch.empty(shape, dtype=torch.int32, device="meta")
def half(*shape): return torch.empty(shape, dtype=torch.bfloat16, device="meta")
def real(*shape): return torch.empty(shape, device="meta")
found, mask = (ints(1, 52), real(1, 52), ints(1, 52)), torch.empty((4, 8), dtype=torch.bool, device="meta")
kernels = []
with _compile_only(90, kernels):
    triton_round.top_tokens(half(16, 49152), 2)
    triton_beam.expand_beam(*found, half(4, 8192), 4, None, real(1, 4), ints(1, 4), mask)
    triton_round.build_tree(ints(1), *found[:1], found[1], found[2], 16, 4, False)
    triton_round.verify_greedy(*[ints(1, 16)] * 3, ints(1, 16, 2)[:, :, 0], 4)
    triton_places.row_places(short(1, 64), short(1), 16, 16, 0, 16, ints(16))
    triton_places.take_requests(short(9, 64), short(9), ints(9), ints(1), 16)
    triton_round_end.hand_on(ints(1, 5), ints(1, 5), real(16, 2), half(16, 1728), short(1), short(1, 64), 16, 16, True)
    state = short(9), ints(9), half(9, 8192), half(9, 576)
    left = ints(1), short(1), short(1), ints(1, 16), half(1, 8192), half(1, 576)
    triton_round_end.commit_round(*state, *left, [real(1, 16)])
print(json.dumps([(kernel.metadata.name, _report(kernel).stack, kernel.asm["ptx"].count("bar.sync")) for kernel in kernels]))
"""
# At most as many barriers: a warp alone needs none, and the draft's steps are too short for many.
BARRIERS = {
    **dict.fromkeys(("top_kernel", "join_kernel", "verify_kernel", "places_kernel", "take_kernel"), 0),
    **dict.fromkeys(("hand_kernel", "commit_kernel"), 0),
    "beam_kernel": 24,
    "tree_kernel": 32,
}


def test_the_kernels_of_a_round_compile_without_spills_and_with_few_barriers() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = SCRIPT.format(benchmarks=str(ROOT / "benchmarks"), root=str(ROOT))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = json.loads(done.stdout.splitlines()[-1])
    assert {name for name, _, _ in kernels} == set(BARRIERS)
    for name, stack, barriers in kernels:
        assert stack == 0, name
        assert barriers <= BARRIERS[name], (name, barriers)
