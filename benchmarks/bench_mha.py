"""specops' Triton MHA against FlashInfer fa2 and fa3, TRT-LLM decode (XQA), FlexAttention and SDPA, side by side.

    python benchmarks/bench_mha.py --json benchmarks/results/mha.json --plot benchmarks/results/mha.png
    python benchmarks/bench_mha.py --rows 1x4x4096 ragged --peers fa2 xqa

bf16, 32 query heads in 8, D=128, page 64; a row's name is requests x rows x keys. The ``small`` rows are of 9 heads in 3,
D=64, page 16, under a page table for 2048 keys. ``ratio`` is our time over the best peer's, ``copy`` and ``read`` the share
of the bandwidths measured in the same run, ``error`` the largest relative error of an output vector against float64. The
last lines set a feature beside the same call without it. FlexAttention and SDPA read dense K and V, the others pages.
"""

from __future__ import annotations

import os
import sys

sys.path[:0] = [os.path.dirname(os.path.abspath(__file__)), os.path.dirname(os.path.dirname(os.path.abspath(__file__)))]

from typing import Any  # noqa: E402

from attention_bench import parse, run  # noqa: E402
from common import MHA_ROWS, SMALL_ROWS, Inputs  # noqa: E402
from peers import MHA_PEERS  # noqa: E402
from torch import Tensor  # noqa: E402

from specops import ops  # noqa: E402


def ours(inputs: Inputs, table: Tensor, backend: str) -> Tensor:
    given = (inputs.q, inputs.k_cache, inputs.v_cache, table, inputs.seq_lens)
    return ops.mha(*given, layout=inputs.layout, backend=backend, **inputs.options)


# A row with a feature, the row without, what the pair shows, and how much more time the feature may take.
FEATURES = [
    ("window", "window_control", "a window of 1024 at 32768 keys over 1024 keys", 1.20),
    ("tree", "32x4x4096", "a tree mask over causal rows", 1.03),
    ("sinks", "32x4x4096", "sinks over none", 1.03),
    ("ragged", "8x4x4096", "one request of 32768 keys and 31 of 512 (48640 keys) over 8 of 4096 (32768 keys)", 1.60),
]


def features(report: dict[str, Any]) -> list[str]:
    """One line for each pair of ``FEATURES`` that was measured, by the better of each row's two measurements."""
    lines = []
    times = {
        result["row"]: min(result[which].get("us", float("nan")) for which in ("ours", "ours_again"))
        for result in report["rows"]
    }
    for with_it, without, what, most in FEATURES:
        if with_it in times and without in times:
            ratio = times[with_it] / times[without]
            lines.append(f"{what}: {times[with_it]:.1f} / {times[without]:.1f} us = {ratio:.3f} (at most {most:.2f})")
    return lines


if __name__ == "__main__":
    args = parse(__doc__.splitlines()[0], [*MHA_ROWS, *SMALL_ROWS], list(MHA_PEERS), 120)
    run(args, [*MHA_ROWS, *SMALL_ROWS], MHA_PEERS, ours, mla=False, notes=features)
