"""How the query rows of a batch are laid out: the one place where a stride is computed.

A batch of ``B`` requests hands an attention op ``T`` query rows. Two layouts exist:

* **uniform**: every request owns exactly ``tokens_per_request`` rows, so request ``b`` starts at row
  ``b * tokens_per_request`` and ``T = B * tokens_per_request``. Target verify and draft-extend V2 use it.
* **packed**: request ``b`` owns rows ``query_start[b]`` to ``query_start[b + 1]``. Prefill and draft-extend V1 use it.

Grid sizes, query offsets, masks and padding are derived from this type alone, so a width can't differ between the code
that lays rows out and the code that reads them, nor between capture and replay.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class QueryLayout:
    """Layout of ``T`` query rows over ``B`` requests. Build one with :meth:`uniform` or :meth:`packed`.

    Attributes:
        max_query_len: rows of the widest request. Exact for a uniform layout, an upper bound for a packed one.
        query_start: ``[B + 1]`` int32 row offsets of a packed layout; None means uniform.
    """

    max_query_len: int
    query_start: Tensor | None = None

    @classmethod
    def uniform(cls, tokens_per_request: int) -> QueryLayout:
        """Every request owns ``tokens_per_request`` rows.

        Raises:
            ValueError: if ``tokens_per_request`` is below 1; such a layout would be an empty launch.
        """
        if tokens_per_request < 1:
            raise ValueError(
                f"a uniform layout needs tokens_per_request >= 1, got {tokens_per_request}; "
                "for topk > 1 it is num_draft_tokens, not num_steps + 1"
            )
        return cls(tokens_per_request)

    @classmethod
    def packed(cls, query_start: Tensor, max_query_len: int) -> QueryLayout:
        """Request ``b`` owns rows ``query_start[b]`` to ``query_start[b + 1]``.

        Args:
            query_start: ``[B + 1]`` int32, first entry 0, last entry ``T``, on the device of the query.
            max_query_len: an upper bound for the rows of one request, known on the host. Kernels size their grid with
                it, so rows of a request beyond it would be dropped; checked mode refuses that.

        Raises:
            TypeError: if ``query_start`` is not int32.
            ValueError: if it is not one-dimensional, or ``max_query_len`` is below 1.
        """
        if query_start.dtype != torch.int32:
            raise TypeError(f"query_start must be int32, got {query_start.dtype}; convert it once with .to(torch.int32)")
        if query_start.dim() != 1:
            raise ValueError(f"query_start must be [B + 1], got {query_start.dim()} dimensions")
        if max_query_len < 1:
            raise ValueError(f"max_query_len must be >= 1, got {max_query_len}")
        return cls(max_query_len, query_start)

    @property
    def is_uniform(self) -> bool:
        return self.query_start is None

    @property
    def kind(self) -> str:
        """``"uniform"`` or ``"packed"``, as capability tables spell it."""
        return "uniform" if self.query_start is None else "packed"

    @property
    def tokens_per_request(self) -> int:
        """Rows of every request of a uniform layout."""
        if self.query_start is not None:
            raise ValueError("a packed layout has no tokens_per_request; read query_start")
        return self.max_query_len

    def offsets(self, num_requests: int, device: torch.device) -> Tensor:
        """``[B + 1]`` int32 row offset of each request, for either layout."""
        if self.query_start is not None:
            return self.query_start
        return torch.arange(num_requests + 1, dtype=torch.int32, device=device) * self.max_query_len

    def request_ids(self, num_tokens: int, num_requests: int, device: torch.device) -> Tensor:
        """``[T]`` int64: the request that owns each row. Rows behind the last request get ``num_requests - 1``."""
        rows = torch.arange(num_tokens, device=device)
        if self.query_start is None:
            return rows // self.max_query_len
        owner = torch.searchsorted(self.query_start.contiguous(), rows.to(torch.int32), right=True) - 1
        return owner.clamp_(max=num_requests - 1)

    def query_lens(self, num_requests: int, device: torch.device) -> Tensor:
        """``[B]`` int32: rows of each request."""
        return self.offsets(num_requests, device).diff()
