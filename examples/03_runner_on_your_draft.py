"""The draft-extend runner on a draft module of your own.

A draft model needs ``forward(input_ids, hidden_states, meta)`` and ``compute_logits(hidden)``. The runner pads to a bucket,
replays a CUDA graph where there is a GPU, and returns logits and hidden states of the live requests.

    python examples/03_runner_on_your_draft.py
"""

import torch
from torch import Tensor, nn

import specops
from specops.batch import DraftExtendBatch
from specops.compile import DraftExtendRunner

VOCAB, HIDDEN, HEADS, HEAD_DIM, ROWS = 1000, 256, 4, 64, 4


class MyDraft(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.mix = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)
        self.qkv = nn.Linear(HIDDEN, 3 * HEADS * HEAD_DIM, bias=False)
        self.out = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.cache = specops.PagedKVCache(256, 16, HEADS, HEAD_DIM, dtype=torch.float32)

    def forward(self, input_ids: Tensor, hidden_states: Tensor, meta: specops.AttentionMetadata) -> Tensor:
        x = self.mix(torch.cat((self.embedding(input_ids), hidden_states), dim=-1))
        q, k, v = self.qkv(x).unflatten(1, (-1, HEAD_DIM)).chunk(3, dim=1)
        specops.ops.store_kv(self.cache.k, self.cache.v, k, v, meta.slots)
        attended = specops.ops.mha(q, self.cache.k, self.cache.v, meta.page_table, meta.seq_lens, layout=meta.layout)
        return x + self.out(attended.flatten(1))

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden)


device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
draft = MyDraft().to(device).requires_grad_(False)
runner = DraftExtendRunner(
    draft, draft.cache, tokens_per_request=ROWS, max_requests=4, max_pages=8, hidden_size=HIDDEN, buckets=[1, 2, 4]
)
runner.warm_up(lambda done, total, what: print(f"  {what} ({done}/{total})"))
for size in (3, 1, 4, 2):
    pages = torch.arange(1, size * 8 + 1, dtype=torch.int32, device=device).view(size, 8)
    batch = DraftExtendBatch(
        input_ids=torch.randint(VOCAB, (size, ROWS), device=device),
        hidden_states=torch.randn(size, ROWS, HIDDEN, device=device),
        seq_lens=torch.full((size,), 20, dtype=torch.int32, device=device),
        accept_lens=torch.randint(1, ROWS + 1, (size,), dtype=torch.int32, device=device),
        page_table=pages,
    )
    out = runner(batch)
    print(f"{size} requests: logits {tuple(out.next_token_logits.shape)}, hidden states {tuple(out.hidden_states.shape)}")
print(runner.explain())
