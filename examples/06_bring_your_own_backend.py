"""A backend of your own in one file: registered, checked against its contract, and used by the runner.

    python examples/06_bring_your_own_backend.py
    python -m specops.testing --import examples/06_bring_your_own_backend.py --backend mine

The kernel here is a loop in PyTorch; yours may be any callable with this signature. What it declares is what is checked:
``ops.mha(..., backend="mine")`` refuses everything else, and names the backends that would do it.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from specops import ops
from specops.batch import DraftExtendBatch
from specops.compile import DraftExtendRunner
from specops.testing import check_backend
from specops.testing.toy_draft import HIDDEN, MAX_PAGES, VOCAB, ToyDraft

limits = {"device_types": ("cpu", "cuda"), "layouts": ("uniform",), "features": ("window",), "graph_safe": False}


@ops.register_backend("mine", family="mha", **limits)
def mine(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, seq_lens: Tensor, *, layout, scale, window=None
) -> Tensor:
    """Request by request: gather its pages, mask what a row may not see, attend."""
    rows, out = layout.tokens_per_request, q.new_zeros((*q.shape[:2], v_cache.shape[3]))
    capacity = page_table.shape[1] * k_cache.shape[1]
    for request, seq_len in enumerate(seq_lens.tolist()):
        pages = page_table[request, : -(-seq_len // k_cache.shape[1])].long()
        length = min(seq_len, capacity)
        keys, values = (cache[pages].flatten(0, 1)[:length].transpose(0, 1) for cache in (k_cache, v_cache))
        position = torch.arange(seq_len - rows, seq_len, device=q.device)[:, None]
        key = torch.arange(length, device=q.device)
        seen = key <= position if window is None else (key <= position) & (key > position - window)
        live = seen.any(dim=1)
        if live.any():
            block = slice(request * rows, (request + 1) * rows)
            heads = q[block][live].transpose(0, 1)
            result = scaled_dot_product_attention(heads, keys, values, seen[live], scale=scale, enable_gqa=True)
            out[block][live] = result.transpose(0, 1)
    return out


if __name__ == "__main__":
    print(check_backend("mine", device="cpu").raise_if_failed())
    draft = ToyDraft(backend="mine")
    sizes = {"tokens_per_request": 4, "max_requests": 4, "max_pages": MAX_PAGES, "hidden_size": HIDDEN}
    runner = DraftExtendRunner(draft, list(draft.caches), mode="eager", **sizes)
    lens, accept = torch.tensor([9, 13], dtype=torch.int32), torch.tensor([1, 4], dtype=torch.int32)
    pages = torch.arange(1, 2 * MAX_PAGES + 1, dtype=torch.int32).view(2, MAX_PAGES)
    batch = DraftExtendBatch(torch.randint(VOCAB, (2, 4)), torch.randn(2, 4, HIDDEN), lens, accept, pages)
    print("logits", tuple(runner(batch).next_token_logits.shape))
