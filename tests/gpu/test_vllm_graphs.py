"""What the vLLM plug-in promises to vLLM's full graphs: a captured step of one width replays right for other batches.

The steps are vLLM's: its cache's shape, its buffers, batches padded with requests of length 0 and slots of -1. vLLM is not
needed.

Run alone: pytest -m gpu tests/gpu/test_vllm_graphs.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specops import ops
from specops.integrations.vllm.mapping import cache_views, layout_of
from specops.testing.oracle import assert_close_to_oracle, oracle_mha

pytestmark = pytest.mark.gpu
REQUESTS, HEADS, KV_HEADS, DIM, SIZE, COLUMNS = 4, 8, 2, 64, 16, 8
PAGES = REQUESTS * COLUMNS + 1


class Step:
    """vLLM's persistent buffers of a batch of up to ``REQUESTS`` requests of ``width`` tokens."""

    def __init__(self, width: int, tokens_first: bool) -> None:
        self.width, count = width, REQUESTS * width
        shape = (PAGES, SIZE, KV_HEADS, 2 * DIM) if tokens_first else (PAGES, KV_HEADS, SIZE, 2 * DIM)
        cache = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        self.cache = cache.transpose(1, 2) if tokens_first else cache
        self.q = torch.zeros(count, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
        self.k = torch.zeros(count, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16)
        self.v = torch.zeros_like(self.k)
        self.lens = torch.zeros(REQUESTS, device="cuda", dtype=torch.int32)
        self.table = torch.zeros(REQUESTS, COLUMNS, device="cuda", dtype=torch.int32)
        self.slots = torch.full((count,), -1, device="cuda", dtype=torch.int64)
        self.start = torch.zeros(REQUESTS + 1, device="cuda", dtype=torch.int32)
        self.output = torch.zeros_like(self.q)

    def fill(self, lens: list[int], seed: int) -> None:
        """Another batch; requests behind ``lens`` are padding. What padding holds is NaN."""
        generator = torch.Generator().manual_seed(seed)
        pages = (torch.randperm(PAGES - 1, generator=generator) + 1).view(REQUESTS, COLUMNS)
        live = len(lens) * self.width
        for buffer in (self.q, self.k, self.v):
            buffer.fill_(float("nan"))
            buffer[:live] = torch.randn(live, *buffer.shape[1:], generator=generator).to(buffer)
        self.lens.copy_(torch.tensor(lens + [0] * (REQUESTS - len(lens))))
        self.table.copy_(pages)
        self.table[len(lens) :] = 0
        slots = [
            int(pages[request, place // SIZE]) * SIZE + place % SIZE
            for request, length in enumerate(lens)
            for place in range(length - self.width, length)
        ]
        self.slots.copy_(torch.tensor(slots + [-1] * (len(self.slots) - live)))
        self.start.copy_(torch.arange(REQUESTS + 1).clamp(max=len(lens)) * self.width)

    def arguments(self) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        keys, values = cache_views(self.cache, DIM)
        layout = layout_of(REQUESTS, REQUESTS * self.width, self.width, self.start)
        return (self.q, keys, values, self.table, self.lens), {"layout": layout, "window": 40}

    def run(self) -> None:
        tensors, options = self.arguments()
        ops.store_kv(tensors[1], tensors[2], self.k, self.v, self.slots)
        self.output.copy_(ops.mha(*tensors, **options))


@pytest.mark.parametrize("width", [1, 4], ids=["decode", "verify"])
@pytest.mark.parametrize("tokens_first", [True, False])
def test_a_captured_step_replays_other_batches(width: int, tokens_first: bool) -> None:
    step = Step(width, tokens_first)
    # As vLLM captures: every request at full length.
    step.fill([COLUMNS * SIZE] * REQUESTS, seed=0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step.run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.run()
    for seed, lens in enumerate(([5, 17, 64, 128], [9], [100, 33], [4, 4, 4]), start=1):
        step.fill(lens, seed)
        before = step.cache.clone()
        graph.replay()
        live = len(lens) * width
        tensors, options = step.arguments()
        q = torch.where(step.q.isnan(), 0, step.q)
        expected = oracle_mha(q, *tensors[1:], **options)
        assert_close_to_oracle(step.output[:live], expected[:live])
        assert not step.output[live:].any()
        # Slots of -1 wrote nothing: outside of the batch's own slots the cache is as before.
        flat, was = (cache.transpose(1, 2).reshape(PAGES * SIZE, -1).clone() for cache in (step.cache, before))
        own = step.slots[:live]
        torch.testing.assert_close(flat[own], torch.cat((step.k[:live], step.v[:live]), dim=-1).flatten(1), rtol=0, atol=0)
        flat[own] = was[own]
        assert torch.equal(flat, was)
