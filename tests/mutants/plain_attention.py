"""A right backend in parts that can be put wrong one at a time: the stock the mutants are made from.

It loops over requests and rows. Every decision a kernel makes has a method of its own; a mutant overrides one of them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from specops.layout import QueryLayout


class PlainAttention:
    """Right in every respect; instances are called as a backend's function is."""

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        page_table: Tensor,
        seq_lens: Tensor,
        *,
        layout: QueryLayout,
        scale: float,
        **features: Any,
    ) -> Tensor:
        self.page_size, self.num_pages = k_cache.shape[1], k_cache.shape[0]
        self.capacity = page_table.shape[1] * self.page_size
        out = self.output(q, v_cache)
        starts = self.starts(layout, page_table.shape[0])
        for request, seq_len in enumerate(self.lengths(seq_lens)):
            first, last = starts[request], min(starts[request + 1], q.shape[0])
            places = range(self.extent(seq_len))
            slots = [self.slot(page_table, request, place) for place in places]
            keys = self.read(k_cache, slots, features.get("k_scale"))
            values = self.read(v_cache, slots, features.get("v_scale"))
            for row in range(first, last):
                if self.drops(row - first, last - first, layout):
                    continue
                seen = self.visible(seq_len, seq_len - last + row, row, features, layout)
                seen = [place for place in seen if place < len(slots)]
                out[row] = self.attend(q[row], keys, values, seen, scale, features)
        return self.result(out, q)

    def output(self, q: Tensor, v_cache: Tensor) -> Tensor:
        return q.new_zeros((q.shape[0], q.shape[1], v_cache.shape[3]))

    def starts(self, layout: QueryLayout, batch: int) -> list[int]:
        return layout.offsets(batch, torch.device("cpu")).tolist()

    def lengths(self, seq_lens: Tensor) -> list[int]:
        return seq_lens.tolist()

    def extent(self, seq_len: int) -> int:
        return min(seq_len, self.capacity)

    def slot(self, page_table: Tensor, request: int, place: int) -> tuple[int, int]:
        return int(page_table[request, place // self.page_size]), place % self.page_size

    def read(self, cache: Tensor, slots: list[tuple[int, int]], scale: Tensor | None) -> Tensor:
        """``[K, H, D]`` float32."""
        pages = torch.tensor([page for page, _ in slots], dtype=torch.int64)
        offsets = torch.tensor([offset for _, offset in slots], dtype=torch.int64)
        raw = cache.view(torch.uint8) if cache.element_size() == 1 else cache
        rows = raw[pages, offsets].view(cache.dtype).float()
        return rows if scale is None else rows * scale

    def drops(self, row: int, rows: int, layout: QueryLayout) -> bool:
        return False

    def visible(self, seq_len: int, position: int, row: int, features: dict[str, Any], layout: QueryLayout) -> list[int]:
        mask = features.get("tree_mask")
        if mask is None:
            seen = list(range(position + 1))
        else:
            prefix = seq_len - mask.shape[1]
            own = [prefix + node for node in mask[row].nonzero().flatten().tolist()]
            seen = list(range(prefix)) + [place for place in own if place >= 0]
        window = features.get("window")
        return seen if window is None else seen[len(seen) - min(window, len(seen)) :]

    def attend(
        self, q: Tensor, keys: Tensor, values: Tensor, seen: list[int], scale: float, features: dict[str, Any]
    ) -> Tensor:
        """``[Hq, Dv]`` of one row."""
        if not seen:
            return q.new_zeros((q.shape[0], values.shape[2]))
        heads = self.heads(q.shape[0], keys.shape[1])
        scores = self.scores(q.float(), keys[seen][:, heads], scale, features)
        return self.mix(scores, values[seen][:, heads], features).to(q.dtype)

    def heads(self, num_heads: int, num_kv_heads: int) -> list[int]:
        """The KV head of each query head."""
        return [head // (num_heads // num_kv_heads) for head in range(num_heads)]

    def scores(self, q: Tensor, keys: Tensor, scale: float, features: dict[str, Any]) -> Tensor:
        """``[K, Hq]``."""
        return self.capped(torch.einsum("hd,khd->kh", q, keys) * scale, features)

    def capped(self, scores: Tensor, features: dict[str, Any]) -> Tensor:
        cap = features.get("softcap")
        return scores if cap is None else cap * torch.tanh(scores / cap)

    def mix(self, scores: Tensor, values: Tensor, features: dict[str, Any]) -> Tensor:
        """``[Hq, Dv]`` softmax over keys, with the sink in the denominator."""
        sinks = self.sinks(features)
        top = scores.amax(dim=0)
        if sinks is not None:
            top = torch.maximum(top, sinks)
        weights = torch.exp(scores - top)
        total = weights.sum(dim=0)
        if sinks is not None:
            total = total + torch.exp(sinks - top)
        return torch.einsum("kh,khd->hd", weights / total, values)

    def sinks(self, features: dict[str, Any]) -> Tensor | None:
        return features.get("sinks")

    def result(self, out: Tensor, q: Tensor) -> Tensor:
        return out


class PlainLatentAttention:
    """MLA by the same parts: one KV head, whose value is the latent part of its key."""

    inner: type[PlainAttention] = PlainAttention

    def __init__(self) -> None:
        self.attention = self.inner()

    def __call__(
        self,
        q_latent: Tensor,
        q_rope: Tensor,
        kv_cache: Tensor,
        page_table: Tensor,
        seq_lens: Tensor,
        *,
        layout: QueryLayout,
        scale: float,
        kv_scale: Tensor | None = None,
        **features: Any,
    ) -> Tensor:
        if kv_scale is not None:
            features |= {"k_scale": kv_scale, "v_scale": self.value_scale(kv_scale)}
        cache = kv_cache.unsqueeze(2)
        q = self.query(q_latent, q_rope)
        values = self.values(cache, q_latent.shape[2])
        scale = self.scale(scale, q_latent.shape[2], q_rope.shape[2])
        return self.attention(q, cache, values, page_table, seq_lens, layout=layout, scale=scale, **features)

    def query(self, q_latent: Tensor, q_rope: Tensor) -> Tensor:
        return torch.cat((q_latent, q_rope), dim=2)

    def values(self, cache: Tensor, latent_dim: int) -> Tensor:
        return cache[..., :latent_dim]

    def value_scale(self, kv_scale: Tensor) -> Tensor | None:
        return kv_scale

    def scale(self, scale: float, latent_dim: int, rope_dim: int) -> float:
        return scale


def power_of_two(value: int) -> int:
    """The largest power of two that is not above ``value``."""
    return 1 << int(math.log2(value))
