"""The EAGLE v2 draft-extend step and its runner.

The draft model runs over the ``n`` rows of every request with the *target's* hidden states, so that its KV cache holds
entries made from true hidden states. Row ``accept_len - 1`` of each request gives the logits and the hidden state that
start the next round. Nothing else is returned: softmax and top-k belong to the worker.

A draft model is any module with ``forward(input_ids [T], hidden_states [T, H], meta) -> hidden [T, H']`` and
``compute_logits(hidden [R, H']) -> [R, V]`` that stores its K/V at ``meta.slots`` and attends with ``specops.ops``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from specops.batch import DraftExtendBatch, draft_extend_fields
from specops.compile.plans import MakePlan, attention_plan, planned_backend
from specops.compile.step_runner import Mode, StepRunner
from specops.kv_cache import PagedKVCache, PagedLatentCache
from specops.layout import QueryLayout
from specops.metadata import attention_metadata

Cache = PagedKVCache | PagedLatentCache
Rows = Literal["last", "all"]
# In the table's order.
_FIELDS = attrgetter("input_ids", "hidden_states", "seq_lens", "accept_lens", "page_table")


class DraftExtendOutput(NamedTuple):
    """What a draft-extend returns, and nothing more.

    Attributes:
        next_token_logits: ``[B, V]``, or ``[B * n, V]`` with ``rows="all"``.
        hidden_states: ``[B, H']``, or ``[B * n, H']``.
    """

    next_token_logits: Tensor
    hidden_states: Tensor


class DraftExtendStep(nn.Module):
    """Draft-extend V2: uniform layout, static shapes, no host synchronisation."""

    def __init__(self, draft: nn.Module, page_size: int, tokens_per_request: int, rows: Rows = "last") -> None:
        super().__init__()
        self.draft = draft
        self.page_size = page_size
        self.tokens_per_request = tokens_per_request
        self.rows = rows

    def forward(
        self,
        input_ids: Tensor,
        hidden_states: Tensor,
        seq_lens: Tensor,
        accept_lens: Tensor,
        page_table: Tensor,
        plan: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Fields as in :class:`DraftExtendBatch`; token fields ``[B, n, ...]``; ``plan`` as of a planned backend."""
        layout = QueryLayout.uniform(self.tokens_per_request)
        meta = attention_metadata(page_table, seq_lens, layout, self.page_size, plan=plan)
        hidden = self.draft(input_ids.reshape(-1), hidden_states.flatten(0, 1), meta)
        if self.rows == "last":
            # Chosen before the LM head, which then works on B rows instead of B * n.
            first = torch.arange(seq_lens.shape[0], device=seq_lens.device) * self.tokens_per_request
            hidden = hidden[first + accept_lens.long() - 1]
        return self.draft.compute_logits(hidden), hidden  # type: ignore[operator]


class DraftExtendRunner:
    """Draft-extend V2 for any batch up to ``max_requests``, padded to a bucket and run as a CUDA graph.

    Args:
        draft: the draft model (see the module docstring).
        cache: its paged cache, or the caches of its layers; gives page size and device.
        tokens_per_request: rows of every request, ``num_draft_tokens``.
        max_requests: the largest bucket.
        max_pages: width of the page tables it will get; the whole pool when not given.
        hidden_size: width of the target's hidden states; read from ``draft.config.hidden_width`` when not given.
        dtype: dtype of the hidden states; that of the draft's first parameter when not given.
        rows: ``"last"`` returns one row a request, ``"all"`` every row.
        plan: as for :class:`StepRunner`; when not given, that of the planned backend which the draft's layers name, if any.
        mode, buckets, strict, over_bucket, outputs, pool: as for :class:`StepRunner`.

    Raises:
        ValueError: ``tokens_per_request`` below 1, an unknown mode, caches of different page sizes, or a hidden size that
            can't be told.
    """

    def __init__(
        self,
        draft: nn.Module,
        cache: Cache | Sequence[Cache],
        *,
        tokens_per_request: int,
        max_requests: int = 32,
        max_pages: int | None = None,
        hidden_size: int | None = None,
        dtype: torch.dtype | None = None,
        rows: Rows = "last",
        mode: Mode = "reduce-overhead",
        buckets: Iterable[int] | None = None,
        plan: MakePlan | None = None,
        **options: Any,
    ) -> None:
        caches = [cache] if isinstance(cache, nn.Module) else list(cache)
        first = caches[0]
        sizes = sorted({each.page_size for each in caches})
        if len(sizes) > 1:
            raise ValueError(f"the caches of a draft share their pages, so they need one page size; got {sizes}")
        pages = next(first.buffers())
        if hidden_size is None:
            hidden_size = getattr(getattr(draft, "config", None), "hidden_width", None)
            if hidden_size is None:
                raise ValueError("hidden_size is needed: the draft has no config.hidden_width to read it from")
        if rows not in ("last", "all"):
            raise ValueError(f"rows must be 'last' or 'all', got {rows!r}")
        dtype = dtype or next(draft.parameters()).dtype
        table = draft_extend_fields(tokens_per_request, hidden_size, max_pages or first.num_pages, dtype)
        step = DraftExtendStep(draft, first.page_size, tokens_per_request, rows)
        family: Literal["mha", "mla"] = "mha" if isinstance(first, PagedKVCache) else "mla"
        backend = planned_backend(draft, family) if plan is None else None
        if backend is not None:
            plan = attention_plan(backend, family, QueryLayout.uniform(tokens_per_request), first.page_size)
        self.runner = StepRunner(
            step,
            table,
            device=pages.device,
            max_requests=max_requests,
            buckets=buckets,
            mode=mode,
            plan=plan,
            name="DraftExtendRunner",
            **options,
        )

    @property
    def tokens_per_request(self) -> int:
        return self.runner.tokens_per_request

    def warm_up(self, progress: Any = None) -> Any:
        """Compile and capture every bucket; see :meth:`StepRunner.warm_up`."""
        return self.runner.warm_up(progress)

    def explain(self) -> Any:
        """A report with one line a bucket; see :meth:`StepRunner.explain`."""
        return self.runner.explain()

    def save_cache(self, path: str | os.PathLike[str]) -> int:
        """Write the compiled code to a file; see :func:`specops.compile.save_cache`."""
        return self.runner.save_cache(path)

    def __call__(self, batch: DraftExtendBatch) -> DraftExtendOutput:
        """Run one draft-extend. See :meth:`StepRunner.__call__` for what is raised."""
        logits, hidden = self.runner.run(_FIELDS(batch))
        return DraftExtendOutput(logits, hidden)


def draft_extend_packed(
    draft: nn.Module,
    page_size: int,
    input_ids: Tensor,
    hidden_states: Tensor,
    seq_lens: Tensor,
    accept_lens: Tensor,
    page_table: Tensor,
    *,
    max_accept_len: int,
) -> DraftExtendOutput:
    """Draft-extend V1: packed rows, each request with its accepted tokens only. Not for graphs: ``T`` changes every step.

    Args:
        draft: the draft model.
        page_size: tokens per page of its cache.
        input_ids: ``[T]`` int64, ``T`` the sum of ``accept_lens``.
        hidden_states: ``[T, H]``.
        seq_lens: ``[B]`` int32, keys including the accepted rows.
        accept_lens: ``[B]`` int32.
        page_table: ``[B, max_pages]`` int32.
        max_accept_len: an upper bound for ``accept_lens``.

    Returns:
        One row a request, as V2 does with ``rows="last"``.
    """
    query_start = nn.functional.pad(accept_lens.cumsum(0), (1, 0)).to(torch.int32)
    layout = QueryLayout.packed(query_start, max_accept_len)
    meta = attention_metadata(page_table, seq_lens, layout, page_size, num_tokens=input_ids.shape[0])
    hidden = draft(input_ids, hidden_states, meta)[query_start[1:].long() - 1]
    return DraftExtendOutput(draft.compute_logits(hidden), hidden)  # type: ignore[operator]
