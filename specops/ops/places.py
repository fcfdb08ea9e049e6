"""Where the rows of a forward stand: rotary positions and cache slots of a uniform layout, as an op and in plain torch.

The plain form is what a CPU compiles into the forward. On a GPU it is one launch, and for another reason than its time: all
layers share lengths, table and slots, and inductor may compute a tensor of one element, which all of these can be where one
request runs, anew for every op that reads it. What comes out of an op is there.

``take_requests`` reads the rows of requests from state that lives on the device, for the same reason.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specops.ops import contracts


def slots_of(places: Tensor, requests: Tensor, page_table: Tensor, page_size: int) -> Tensor:
    """``[T]`` int64 cache slot of each ``(request, place in its sequence)``; -1 where nothing may be written.

    Args:
        places: ``[T]`` int64 index into the request's sequence.
        requests: ``[T]`` int64 row of the page table.
        page_table: ``[B, max_pages]`` int32.
        page_size: tokens per page.
    """
    column = places // page_size
    inside = (places >= 0) & (column < page_table.shape[1])
    page = page_table[requests, column.clamp(0, page_table.shape[1] - 1)].long()
    return torch.where(inside & (page > 0), page * page_size + places % page_size, -1)


def grown(seq_lens: Tensor, by: int) -> Tensor:
    """``seq_lens`` with ``by`` more keys in every request that has any; padded ones stay at 0."""
    return torch.where(seq_lens > 0, seq_lens + by, 0) if by else seq_lens


def row_places(
    page_table: Tensor,
    seq_lens: Tensor,
    width: int,
    page_size: int,
    grow: int = 0,
    behind: int | None = None,
    depths: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Lengths, positions and slots of ``width`` rows a request: the last ``width`` places of each.

    Args:
        page_table: ``[B, max_pages]`` int32.
        seq_lens: ``[B]`` int32, keys including the request's own rows but the ``grow`` last.
        width: rows of every request.
        page_size: tokens per page.
        grow: as for :func:`grown`.
        behind: rotary positions count from ``seq_len - behind`` on and by ``depths`` alone, not by rows.
        depths: ``[T]`` int64, with ``behind``; 0 for all rows when not given.

    Returns:
        ``[B]`` int32 grown lengths; ``[T]`` int64 positions, at least 0; ``[T]`` int64 slots, see :func:`slots_of`.
    """
    if contracts.through_op(page_table):
        result: tuple[Tensor, Tensor, Tensor] = torch.ops.specops.row_places(
            page_table, seq_lens, width, page_size, grow, behind, depths
        )
        return result
    return _row_places(page_table, seq_lens, width, page_size, grow, behind, depths)


def _row_places(
    page_table: Tensor,
    seq_lens: Tensor,
    width: int,
    page_size: int,
    grow: int = 0,
    behind: int | None = None,
    depths: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, device = page_table.shape[0], page_table.device
    lens = grown(seq_lens, grow)
    place = (lens.long()[:, None] - width + torch.arange(width, device=device)).reshape(-1)
    request = torch.arange(batch, device=device)[:, None].expand(batch, width).reshape(-1)
    slots = slots_of(place, request, page_table, page_size)
    positions = place
    if behind is not None:
        positions = lens.long()[request] - behind
        positions = positions if depths is None else positions + depths
    return lens, positions.clamp(min=0), slots


def take_requests(
    page_table: Tensor, seq_lens: Tensor, root_tokens: Tensor, rows: Tensor, *, grow: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What a round reads of its requests' state.

    Args:
        page_table: ``[R, max_pages]`` int32.
        seq_lens: ``[R]`` int32.
        root_tokens: ``[R]`` int64.
        rows: ``[B]`` int64 rows of the state.
        grow: as for :func:`grown`.

    Returns:
        ``[B, max_pages]`` int32 page table, ``[B]`` int32 lengths, the same grown, and ``[B]`` int64 tokens.
    """
    result: tuple[Tensor, Tensor, Tensor, Tensor] = torch.ops.specops.take_requests(
        page_table, seq_lens, root_tokens, rows, grow
    )
    return result


def _own_row_places(*arguments: Tensor | int | None) -> tuple[Tensor, Tensor, Tensor]:
    lens, positions, slots = _row_places(*arguments)  # type: ignore[arg-type]
    # An op's results share no memory with what it was given.
    return lens.clone() if lens is arguments[1] else lens, positions, slots


def _take_requests(
    page_table: Tensor, seq_lens: Tensor, root_tokens: Tensor, rows: Tensor, grow: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    lens = seq_lens[rows]
    return page_table[rows], lens, torch.where(lens > 0, lens + grow, 0), root_tokens[rows]


for _name, _schema, _fake, _kernel in (
    ("row_places", contracts.ROW_PLACES_SCHEMA, contracts.fake_row_places, _own_row_places),
    ("take_requests", contracts.TAKE_REQUESTS_SCHEMA, contracts.fake_take_requests, _take_requests),
):
    _cuda_kernel = contracts.with_triton(_kernel, "triton_places", _name)
    contracts.define(_name, _schema, _fake, {"CompositeExplicitAutograd": _kernel, "CUDA": _cuda_kernel})
