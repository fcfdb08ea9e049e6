"""What one forward needs to know beside its tokens, computed from tensors inside the compiled forward.

There is no second "replay metadata": positions, slots and offsets are functions of ``seq_lens``, ``page_table`` and the
layout, evaluated by the same code in eager mode, at capture and at replay. All of it runs on the device without a sync; for
a uniform layout on a GPU in one launch (:mod:`specops.ops.places`, which also has the arithmetic in plain torch).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specops.layout import QueryLayout
from specops.ops.places import grown, row_places, slots_of


@dataclass(frozen=True, eq=False)
class AttentionMetadata:
    """Metadata of one forward over ``T`` rows of ``B`` requests.

    Attributes:
        positions: ``[T]`` int64 rotary position of each row, never negative.
        slots: ``[T]`` int64 cache slot of each row's K/V, -1 for rows that must write nothing.
        page_table: ``[B, max_pages]`` int32.
        seq_lens: ``[B]`` int32, keys including the request's own rows.
        layout: how rows belong to requests.
        tree_mask: ``[T, W]`` bool or None, see :func:`specops.ops.mha`.
        plan: handle of a planned backend, or None.
        page_size: tokens per page that ``slots`` were computed with; layers refuse a cache of another.
    """

    positions: Tensor
    slots: Tensor
    page_table: Tensor
    seq_lens: Tensor
    layout: QueryLayout
    tree_mask: Tensor | None = None
    plan: Tensor | None = None
    page_size: int | None = None

    def check_page_size(self, page_size: int) -> None:
        """Refuse a cache whose pages are not the ones the slots were computed for.

        Raises:
            ValueError: naming both sizes.
        """
        if self.page_size is not None and self.page_size != page_size:
            raise ValueError(
                f"slots were computed for pages of {self.page_size} tokens and the cache has pages of {page_size}; pass the "
                "cache's page_size to attention_metadata"
            )


def attention_metadata(
    page_table: Tensor,
    seq_lens: Tensor,
    layout: QueryLayout,
    page_size: int,
    *,
    num_tokens: int | None = None,
    depths: Tensor | int | None = None,
    tree_mask: Tensor | None = None,
    plan: Tensor | None = None,
    grow: int = 0,
) -> AttentionMetadata:
    """Positions and slots of every row.

    Row ``i`` of a request with ``c`` rows stands at position ``seq_len - c + i``. Rows at a negative position (a padded
    request has ``seq_len`` 0), behind the page table, or on the reserved page 0 get slot -1: they write nothing.

    Args:
        page_table: ``[B, max_pages]`` int32.
        seq_lens: ``[B]`` int32, keys including the request's own rows.
        layout: uniform or packed.
        page_size: tokens per page.
        num_tokens: ``T``; needed for a packed layout, whose ``T`` is not known on the host.
        depths: ``[T]`` int64, depth of each row in its tree, or one number for all of them. Slots stay consecutive, while
            the rotary position becomes ``seq_len - W + depth``, ``W`` being the width of ``tree_mask``.
        tree_mask: ``[T, W]`` bool.
        plan: handle of a planned backend.
        grow: rows that ``seq_lens`` does not count yet: the result's lengths are so many larger, 0 staying 0.

    Raises:
        ValueError: a packed layout without ``num_tokens``, or depths without their mask.
    """
    if depths is not None and tree_mask is None:
        raise ValueError("depths need the tree_mask they belong to")
    if layout.is_uniform:
        behind, by_row = None, None
        if depths is not None and tree_mask is not None:
            behind, by_row = (
                (tree_mask.shape[1], depths) if isinstance(depths, Tensor) else (tree_mask.shape[1] - depths, None)
            )
        lens, positions, slots = row_places(
            page_table, seq_lens, layout.tokens_per_request, page_size, grow=grow, behind=behind, depths=by_row
        )
        return AttentionMetadata(positions, slots, page_table, lens, layout, tree_mask, plan, page_size)
    if num_tokens is None:
        raise ValueError("a packed layout needs num_tokens, the number of rows")
    assert layout.query_start is not None
    lens, device = grown(seq_lens, grow), page_table.device
    request = layout.request_ids(num_tokens, page_table.shape[0], device)
    # Not [1:]: without an end, inductor would have to know how many requests there are (CompiledStep).
    ends = layout.query_start[1 : page_table.shape[0] + 1]
    before_end = ends.long()[request] - torch.arange(num_tokens, device=device)
    # Rows after the last request belong to nobody: before_end is not positive there.
    place = torch.where(before_end > 0, lens.long()[request] - before_end, -1)
    slots = slots_of(place, request, page_table, page_size)
    positions = place
    if depths is not None and tree_mask is not None:
        positions = lens.long()[request] - tree_mask.shape[1] + depths
    return AttentionMetadata(positions.clamp(min=0), slots, page_table, lens, layout, tree_mask, plan, page_size)
