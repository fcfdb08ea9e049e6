"""One op: write keys and values into a paged cache, attend to them, and compare with the float64 formula.

python examples/01_one_op.py
"""

import torch

import specops
from specops.testing.oracle import oracle_mha

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
requests, rows, num_heads, num_kv_heads, head_dim, page_size = 2, 4, 8, 2, 64, 16

cache = specops.PagedKVCache(32, page_size, num_kv_heads, head_dim, dtype=torch.float32, device=device)
page_table = torch.tensor([[5, 9], [3, 0]], dtype=torch.int32, device=device)  # page 0 stands for "no page"
layout = specops.QueryLayout.uniform(rows)  # every request owns 4 query rows

# The history: 20 tokens of request 0 and 6 of request 1, written one request after the other.
for request, length in enumerate((20, 6)):
    places = torch.arange(length, device=device)
    slots = page_table[request, places // page_size].long() * page_size + places % page_size
    k, v = torch.randn(2, length, num_kv_heads, head_dim, device=device).unbind(0)
    specops.ops.store_kv(cache.k, cache.v, k, v, slots)

# seq_lens counts the query rows too: their keys are in the cache already.
seq_lens = torch.tensor([20, 6], dtype=torch.int32, device=device)
q = torch.randn(requests * rows, num_heads, head_dim, device=device)
out = specops.ops.mha(q, cache.k, cache.v, page_table, seq_lens, layout=layout)

expected = oracle_mha(q, cache.k, cache.v, page_table, seq_lens, layout=layout, scale=head_dim**-0.5)
error = (out.double() - expected).norm() / expected.norm()
print(f"out {tuple(out.shape)} {out.dtype}, relative error against float64: {error:.1e}")
