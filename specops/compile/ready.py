"""A number of requests made ready to run: how its batch gets into the static buffers, and its outputs out of the graph.

Only what stands before a replay delays a step: behind it the host works while the device does. So everything that can be
known of a number of requests is worked out once, a batch is staged by one prepared launch, and fresh outputs are made and
filled, by one launch too, while the graph runs. Where launches can't be prepared (no CUDA, no Triton, an unaligned or
strided field) the same is done by slower means.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specops.batch import unpad
from specops.compile.launch import PreparedLaunch, aligned, raw_stream
from specops.compile.report import BucketReport

if TYPE_CHECKING:
    from specops.compile.staging import FusedCopy

_ADDRESS = Tensor.data_ptr
_CONTIGUOUS = Tensor.is_contiguous
# Outputs up to this size are copied by one launch; larger ones take long enough to be worth torch's copy, one each.
FUSED_BYTES = 4 * 2**20
# As FieldTable.copy_in.
CopyIn = Callable[[Mapping[str, Tensor], Mapping[str, Tensor], int, int], None]


class Staging:
    """Copies raw batches of one number of requests into static buffers.

    Args:
        names: the fields, in order.
        views: static buffers of the bucket.
        num_requests, bucket: live and padded rows.
        copy_in: the slower means.
        launch: copies fields whose addresses it is given, if there is such a launch.
    """

    def __init__(
        self,
        names: Sequence[str],
        views: Mapping[str, Tensor],
        num_requests: int,
        bucket: int,
        copy_in: CopyIn,
        launch: PreparedLaunch | None = None,
    ) -> None:
        self.names, self.views, self.num_requests, self.bucket = names, views, num_requests, bucket
        self.copy_in, self.launch = copy_in, launch

    def __call__(self, fields: Sequence[Tensor]) -> None:
        """Stage ``fields``, whose form has been checked."""
        launch = self.launch
        if launch is not None and all(map(_CONTIGUOUS, fields)):
            addresses = list(map(_ADDRESS, fields))
            stream = raw_stream(fields[0].get_device())
            if stream is not None and aligned(addresses) and launch.fire(addresses, stream):
                return
        with torch.no_grad():
            self.copy_in(self.views, dict(zip(self.names, fields, strict=True)), self.num_requests, self.bucket)


class HandOver:
    """Hands over the live rows of a graph's outputs.

    Args:
        outputs: the graph's own, of the whole bucket.
        num_requests, bucket: live and padded rows.
        copy: copies outputs by requests, if it fits them.
    """

    def __init__(self, outputs: Sequence[Tensor], num_requests: int, bucket: int, copy: FusedCopy | None = None) -> None:
        self.live = unpad(outputs, num_requests, bucket)
        small = sum(output.nbytes for output in self.live) <= FUSED_BYTES
        self.launch = copy.prepare(self.live, None, num_requests, num_requests) if copy is not None and small else None

    def __call__(self, as_views: bool) -> list[Tensor]:
        """Fresh tensors, or graph memory."""
        return list(self.live) if as_views else _fresh(self.live, self.launch)


class HandOverLeft:
    """Hands over the live rows of outputs that torch's own graphs make anew at each replay, mostly in the same memory.

    None of them is kept: torch minds which are alive.

    Args:
        num_requests, bucket: live and padded rows.
        copy: copies outputs by requests, if it fits them.

    Attributes:
        left: what the latest replay left, put here by it; empty if that was of ``recorded``.
        recorded: hands over what is left by a graph that is replayed without torch's trees.
    """

    def __init__(self, num_requests: int, bucket: int, copy: FusedCopy | None = None) -> None:
        self.num_requests, self.bucket, self.copy = num_requests, bucket, copy
        self.left: Sequence[Tensor] = ()
        self.recorded: HandOver | None = None
        self.launch: PreparedLaunch | None = None
        self._addresses: list[int] = []

    def __call__(self, as_views: bool) -> list[Tensor]:
        """As :meth:`HandOver.__call__`."""
        if self.recorded is not None and not self.left:
            return self.recorded(as_views)
        live, self.left = unpad(self.left, self.num_requests, self.bucket), ()
        if as_views:
            return live
        addresses = list(map(_ADDRESS, live))
        if addresses != self._addresses:
            small = sum(output.nbytes for output in live) <= FUSED_BYTES
            known = self.copy is not None and small and all(map(_CONTIGUOUS, live))
            count = self.num_requests
            self.launch = self.copy.prepare(live, None, count, count) if known and self.copy is not None else None
            self._addresses = addresses
        return _fresh(live, self.launch)


def _fresh(live: Sequence[Tensor], launch: PreparedLaunch | None) -> list[Tensor]:
    """Copies, by one launch if there is one."""
    if launch is not None:
        fresh = list(map(torch.empty_like, live))
        stream = raw_stream(fresh[0].get_device())
        if stream is not None and launch.fire(list(map(_ADDRESS, fresh)), stream):
            return fresh
    return [output.clone() for output in live]


@dataclass(eq=False, slots=True)
class Ready:
    """What a call with a known number of requests needs.

    Attributes:
        num_requests: live rows.
        bucket: padded number of requests.
        views: static buffers of the bucket.
        entry: the bucket's line of the report.
        stage: fills the static buffers.
        replay: runs the graph, be it captured or torch's own; None when the compiled step is called instead.
        hand_over: hands over what the graph left.
        prepared: the launch that stages a batch, where there is one and nothing else is to be done before a replay.
    """

    num_requests: int
    bucket: int
    views: Mapping[str, Tensor]
    entry: BucketReport
    stage: Staging
    replay: Callable[[], None] | None = None
    hand_over: HandOver | HandOverLeft | None = None
    prepared: PreparedLaunch | None = None


def copy_of_outputs(outputs: Sequence[Tensor], bucket: int) -> FusedCopy | None:
    """A fused copy of such outputs by requests, launched once so that its kernel is compiled; None if they don't fit it."""
    from specops.compile.staging import MAX_FIELDS, FusedCopy

    if (
        not 0 < len(outputs) <= MAX_FIELDS
        or not all(map(_CONTIGUOUS, outputs))
        or not all(output.numel() for output in outputs)
    ):
        return None
    copy = FusedCopy([output.nbytes // bucket for output in outputs])
    live = unpad(outputs, 1, bucket)
    copy(live, [torch.empty_like(output) for output in live], 1, 1)
    return copy
