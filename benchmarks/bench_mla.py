"""specops' Triton MLA against FlashInfer fa2 and fa3, side by side.

    python benchmarks/bench_mla.py --json benchmarks/results/mla.json --plot benchmarks/results/mla.png
    python benchmarks/bench_mla.py --rows 16h_1x4x4096 --peers fa3

bf16, 512 latent and 64 rotary dims, page 64; a row's name is heads, requests x rows x keys. Columns as in ``bench_mha.py``,
and ``matrix`` the share of the bf16 rate of an 8192^3 product measured in the same run.
"""

from __future__ import annotations

import os
import sys

sys.path[:0] = [os.path.dirname(os.path.abspath(__file__)), os.path.dirname(os.path.dirname(os.path.abspath(__file__)))]

from attention_bench import parse, run  # noqa: E402
from common import MLA_ROWS, Inputs  # noqa: E402
from peers import LATENT, MLA_PEERS, MLA_SCALE  # noqa: E402
from torch import Tensor  # noqa: E402

from specops import ops  # noqa: E402


def ours(inputs: Inputs, table: Tensor, backend: str) -> Tensor:
    q, cache = inputs.q, inputs.k_cache[:, :, 0]
    given = (q[..., :LATENT], q[..., LATENT:], cache, table, inputs.seq_lens)
    return ops.mla(*given, layout=inputs.layout, scale=MLA_SCALE, backend=backend, **inputs.options)


if __name__ == "__main__":
    args = parse(__doc__.splitlines()[0], MLA_ROWS, list(MLA_PEERS), 80)
    run(args, MLA_ROWS, MLA_PEERS, ours, mla=True)
