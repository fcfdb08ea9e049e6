"""Ops inside a module of your own, under ``torch.compile(mode="reduce-overhead", fullgraph=True)``.

The cache is a submodule, so its pages are buffers with fixed addresses, and no CUDA graph is skipped for mutating them.

    python examples/02_in_your_own_model.py
"""

import torch
from torch import nn
from torch._dynamo.utils import counters

import specops

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, PAGE = 256, 4, 2, 64, 16


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.out = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)
        self.cache = specops.PagedKVCache(64, PAGE, KV_HEADS, HEAD_DIM, dtype=torch.float32)

    def forward(self, x: torch.Tensor, page_table: torch.Tensor, seq_lens: torch.Tensor) -> torch.Tensor:
        layout = specops.QueryLayout.uniform(4)
        meta = specops.attention_metadata(page_table, seq_lens, layout, PAGE)  # positions and slots, from tensors
        q, k, v = self.qkv(x).unflatten(1, (-1, HEAD_DIM)).split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        specops.ops.store_kv(self.cache.k, self.cache.v, k, v, meta.slots)
        attended = specops.ops.mha(q, self.cache.k, self.cache.v, page_table, seq_lens, layout=layout)
        return x + self.out(attended.flatten(1))


device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = Attention().to(device).requires_grad_(False)
step = torch.compile(model, mode="reduce-overhead", fullgraph=True)
page_table = torch.arange(1, 9, dtype=torch.int32, device=device).view(2, 4)
for length in (10, 30, 64, 7):
    x = torch.randn(8, HIDDEN, device=device)
    seq_lens = torch.tensor([length, length - 3], dtype=torch.int32, device=device)
    compiled = step(x, page_table, seq_lens).clone()
    torch.testing.assert_close(compiled, model(x, page_table, seq_lens), rtol=1e-4, atol=1e-4)
    print(f"seq_lens {seq_lens.tolist()}: compiled equals eager")
skipped = counters["inductor"]["cudagraph_skips"] if device == "cuda" else "none to skip on a CPU"
print(f"graphs compiled: {counters['stats']['unique_graphs']}, CUDA graphs skipped: {skipped}")
