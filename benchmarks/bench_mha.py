"""specops' Triton MHA against FlashInfer fa2 and fa3, TRT-LLM decode (XQA), FlexAttention and SDPA, side by side.

    python benchmarks/bench_mha.py --json benchmarks/results/mha.json --plot benchmarks/results/mha.png
    python benchmarks/bench_mha.py --rows 1x4x4096 ragged --peers fa2 xqa

bf16, 32 query heads in 8, D=128, page 64; a row's name is requests x rows x keys. ``ratio`` is our time over the best
peer's, ``copy`` and ``read`` the share of the bandwidths measured in the same run, ``error`` the largest relative error of
an output vector against float64. FlexAttention and SDPA read dense K and V, the others pages.
"""

from __future__ import annotations

import os
import sys

sys.path[:0] = [os.path.dirname(os.path.abspath(__file__)), os.path.dirname(os.path.dirname(os.path.abspath(__file__)))]

from attention_bench import parse, run  # noqa: E402
from common import MHA_ROWS, Inputs  # noqa: E402
from peers import MHA_PEERS  # noqa: E402
from torch import Tensor  # noqa: E402

from specops import ops  # noqa: E402


def ours(inputs: Inputs, table: Tensor, backend: str) -> Tensor:
    given = (inputs.q, inputs.k_cache, inputs.v_cache, table, inputs.seq_lens)
    return ops.mha(*given, layout=inputs.layout, backend=backend, **inputs.options)


if __name__ == "__main__":
    args = parse(__doc__.splitlines()[0], MHA_ROWS, list(MHA_PEERS), 120)
    run(args, MHA_ROWS, MHA_PEERS, ours, mla=False)
