"""A right draft-extend runner written by hand, and wrong ones that differ from it in one part each.

The hand-written runner pads to a bucket, copies into static buffers, and runs a step over them, as a captured graph would;
``self.captured`` stands for whatever a capture freezes. ``MUTANTS`` names the faults as in ``backends.py``.
"""

from __future__ import annotations

import time
import warnings
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from specops.batch import DraftExtendBatch, draft_extend_fields
from specops.compile import DraftExtendOutput
from specops.layout import QueryLayout
from specops.metadata import attention_metadata

MUTANTS: dict[str, tuple[str, type[HandRunner], dict[str, Any]]] = {}


class HandRunner:
    """Right in every respect. ``mode`` says that it runs its step as Python code, which no check then counts."""

    mode = "eager"

    def __init__(
        self,
        draft: Any,
        caches: Any,
        *,
        tokens_per_request: int,
        max_requests: int,
        buckets: Any,
        max_pages: int,
        hidden_size: int,
    ) -> None:
        if tokens_per_request < 1:
            raise ValueError(f"tokens_per_request must be >= 1, got {tokens_per_request}")
        self.draft, self.width, self.buckets_ = draft, tokens_per_request, sorted(buckets)
        self.page_size = caches[0].page_size
        self.device = caches[0].k.device
        self.table = draft_extend_fields(tokens_per_request, hidden_size, max_pages, torch.float32)
        self.static = self.table.allocate(self.buckets_[-1], self.device)
        self.captured: dict[Any, Any] = {}

    def buffers(self) -> dict[str, Tensor]:
        return self.static

    def warm_up(self) -> None:
        for size in self.buckets_:
            self.pad(0, size)
            self.run({name: buffer[:size] for name, buffer in self.static.items()}, size)

    def __call__(self, batch: DraftExtendBatch) -> Any:
        count = self.table.check(batch.as_dict(), self.device)
        if count == 0:
            return self.empty()
        bucket = self.bucket(count)
        if bucket is None:
            return self.over(batch, count)
        self.copy_in(batch, count)
        self.pad(count, bucket)
        out = self.run({name: buffer[:bucket] for name, buffer in self.static.items()}, bucket)
        return DraftExtendOutput(*(self.hand_over(tensor, count, bucket) for tensor in out))

    def empty(self) -> Any:
        return DraftExtendOutput(
            torch.zeros((0, self.draft.lm_head.shape[0])), torch.zeros((0, self.draft.lm_head.shape[1]))
        )

    def bucket(self, count: int) -> int | None:
        return next((size for size in self.buckets_ if size >= count), None)

    def over(self, batch: DraftExtendBatch, count: int) -> Any:
        warnings.warn(f"{count} requests are above the largest bucket", stacklevel=2)
        return DraftExtendOutput(*self.run(batch.as_dict(), count))

    def copy_in(self, batch: DraftExtendBatch, count: int) -> None:
        for name, tensor in batch.as_dict().items():
            self.static[name][:count].copy_(tensor)

    def pad(self, count: int, bucket: int) -> None:
        for field in self.table.fields:
            self.static[field.name][count:bucket].fill_(field.pad)

    def run(self, rows: dict[str, Tensor], bucket: int) -> tuple[Tensor, Tensor]:
        return self.step(rows)

    def step(self, rows: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        meta = self.metadata(rows)
        hidden = self.draft(rows["input_ids"].reshape(-1), self.target_hidden(rows).flatten(0, 1), meta)
        first = torch.arange(rows["seq_lens"].shape[0]) * self.width
        hidden = hidden[first + self.last(rows)]
        return self.draft.compute_logits(hidden), hidden

    def metadata(self, rows: dict[str, Tensor]) -> Any:
        layout = self.layout(rows)
        table, lens = rows["page_table"], rows["seq_lens"]
        return attention_metadata(table, lens, layout, self.page_size, num_tokens=rows["input_ids"].numel())

    def layout(self, rows: dict[str, Tensor]) -> QueryLayout:
        return QueryLayout.uniform(self.width)

    def target_hidden(self, rows: dict[str, Tensor]) -> Tensor:
        return rows["hidden_states"]

    def last(self, rows: dict[str, Tensor]) -> Tensor:
        return rows["accept_lens"].long() - 1

    def hand_over(self, tensor: Tensor, count: int, bucket: int) -> Tensor:
        return tensor[:count].clone()


def mutant(faults: str, **options: Any) -> Any:
    def enter(kind: type[HandRunner]) -> type[HandRunner]:
        MUTANTS[kind.__name__] = (faults, kind, options)
        return kind

    return enter


def starts(count: int, stride: int) -> Tensor:
    return torch.arange(count + 1, dtype=torch.int32) * stride


class CompiledHandRunner(HandRunner):
    """The same with a traced step and a mode that says so: right, and counted."""

    mode = "compiled"

    def warm_up(self) -> None:
        step = torch.compile(self.step, backend="eager", dynamic=True, fullgraph=True)
        self.captured["step"] = step
        super().warm_up()

    def run(self, rows: dict[str, Tensor], bucket: int) -> tuple[Tensor, Tensor]:
        return self.captured["step"](rows)


@mutant("S1 F01")
class OffsetsByNumStepsPlusOne(HandRunner):
    def layout(self, rows: dict[str, Tensor]) -> QueryLayout:
        return QueryLayout.packed(starts(rows["seq_lens"].shape[0], 4), self.width)


@mutant("S1 F02")
class GridOfNumStepsPlusOneRows(HandRunner):
    def layout(self, rows: dict[str, Tensor]) -> QueryLayout:
        return QueryLayout.packed(starts(rows["seq_lens"].shape[0], self.width), 4)


@mutant("S2 F03")
class ReplayPacksByAcceptedLength(HandRunner):
    def layout(self, rows: dict[str, Tensor]) -> QueryLayout:
        query_start = nn.functional.pad(rows["accept_lens"].cumsum(0), (1, 0)).to(torch.int32)
        return QueryLayout.packed(query_start, self.width)


@mutant("S3 F29")
class GraphDecidedByTheDraftDecodeBackend(CompiledHandRunner):
    """With one step there is no draft-decode backend, so the decision reads None and goes for eager."""

    def run(self, rows: dict[str, Tensor], bucket: int) -> tuple[Tensor, Tensor]:
        decode_backend = getattr(self.draft, "decode_backend", None)
        return super().run(rows, bucket) if decode_backend is not None else self.step(rows)


@mutant("S4 F23")
class CapableBackendLeftOffAList(CompiledHandRunner):
    def run(self, rows: dict[str, Tensor], bucket: int) -> tuple[Tensor, Tensor]:
        return super().run(rows, bucket) if self.draft.backend in ("flashinfer", "triton") else self.step(rows)


@mutant("S4")
class SoftmaxAndTopkInTheGraph(CompiledHandRunner):
    def step(self, rows: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        logits, hidden = super().step(rows)
        logits.softmax(dim=-1).topk(2, dim=-1)
        return logits, hidden


@mutant("S4")
class ReturnsTopkToo(HandRunner):
    def __call__(self, batch: DraftExtendBatch) -> Any:
        out = super().__call__(batch)
        return (*out, out[0].topk(2, dim=1).indices)


@mutant("S5")
class SentToThePrefillKernel(HandRunner):
    """The rows are right and the layout is packed, so a prefill kernel serves them."""

    def layout(self, rows: dict[str, Tensor]) -> QueryLayout:
        return QueryLayout.packed(starts(rows["seq_lens"].shape[0], self.width), self.width)


@mutant("F04")
class WidthOfZeroAccepted(HandRunner):
    def __init__(self, *args: Any, tokens_per_request: int, **options: Any) -> None:
        super().__init__(*args, tokens_per_request=max(1, tokens_per_request), **options)


@mutant("F08 F25")
class PositionsFrozenAtCapture(HandRunner):
    def metadata(self, rows: dict[str, Tensor]) -> Any:
        meta = super().metadata(rows)
        count = rows["seq_lens"].shape[0]
        frozen = self.captured.setdefault(count, meta.positions.clone())
        return type(meta)(frozen, meta.slots, meta.page_table, meta.seq_lens, meta.layout)


@mutant("F25")
class LongestLengthFrozenAtCapture(HandRunner):
    """The number of pages to look at is read on the host, once, of the first real batch."""

    def copy_in(self, batch: DraftExtendBatch, count: int) -> None:
        super().copy_in(batch, count)
        self.captured.setdefault("longest", int(batch.seq_lens.max()))

    def metadata(self, rows: dict[str, Tensor]) -> Any:
        longest = self.captured.get("longest", 10**6)
        return super().metadata({**rows, "seq_lens": rows["seq_lens"].clamp(max=longest)})


@mutant("F15 F16")
class PaddingLeavesTheLastRequestThere(HandRunner):
    def pad(self, count: int, bucket: int) -> None:
        if count == 0:
            super().pad(count, bucket)


@mutant("F15")
class OnlyLengthsArePadded(HandRunner):
    """Padded requests keep a page table and get one key: the page of a request that is gone is written."""

    def pad(self, count: int, bucket: int) -> None:
        if count == 0:
            super().pad(count, bucket)
        self.static["seq_lens"][count:bucket] = 0 if count == 0 else 1
        self.static["accept_lens"][count:bucket] = 1


@mutant("F17 F31")
class PaddingWritesToPageOne(HandRunner):
    def pad(self, count: int, bucket: int) -> None:
        super().pad(count, bucket)
        self.static["page_table"][count:bucket, 0] = 1
        self.static["seq_lens"][count:bucket] = 1


@mutant("F20 F18")
class PaddingAllocatesAPage(HandRunner):
    def pad(self, count: int, bucket: int) -> None:
        super().pad(count, bucket)
        used = {int(page) for page in self.static["page_table"][:count].flatten()}
        free = [page for page in range(1, self.draft.pools()[0].shape[0]) if page not in used]
        if 0 < count < bucket and not free:
            raise RuntimeError("no page left for padding")


@mutant("F31 F30")
class IdleStepRunsOnARealRequest(HandRunner):
    def empty(self) -> Any:
        self.pad(0, 1)
        self.static["page_table"][:1, 0] = 3
        self.static["seq_lens"][:1] = 3
        logits, hidden = self.run({name: buffer[:1] for name, buffer in self.static.items()}, 1)
        return DraftExtendOutput(logits[:0], hidden[:0])


@mutant("F30")
class NoRequestCrashes(HandRunner):
    def empty(self) -> Any:
        return DraftExtendOutput(*self.run({name: buffer[:0] for name, buffer in self.static.items()}, 0))[0]


@mutant("F21")
class PaddedRowsComeBackToo(HandRunner):
    def hand_over(self, tensor: Tensor, count: int, bucket: int) -> Tensor:
        return tensor.clone()


@mutant("F22")
class BucketsCountTokens(HandRunner):
    """Buffers hold max_requests times num_steps + 1 tokens, so a wide tree in a full batch is cut."""

    def bucket(self, count: int) -> int | None:
        rows = self.buckets_[-1] * 8
        return super().bucket(count) if count * self.width <= rows else super().bucket(max(1, rows // self.width))

    def hand_over(self, tensor: Tensor, count: int, bucket: int) -> Tensor:
        return super().hand_over(tensor, min(count, bucket), bucket)

    def copy_in(self, batch: DraftExtendBatch, count: int) -> None:
        super().copy_in(batch, count)
        self.count = count


@mutant("F23")
class OneGraphPerSize(CompiledHandRunner):
    def run(self, rows: dict[str, Tensor], bucket: int) -> tuple[Tensor, Tensor]:
        if bucket not in self.captured:

            def step(rows: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
                return self.step(rows)

            self.captured[bucket] = torch.compile(step, backend="eager", dynamic=False)
        return self.captured[bucket](rows)


@mutant("F24")
class TooLargeABatchIsCut(HandRunner):
    def over(self, batch: DraftExtendBatch, count: int) -> Any:
        most = self.buckets_[-1]
        return self(DraftExtendBatch(**{name: tensor[:most] for name, tensor in batch.as_dict().items()}))


@mutant("F24")
class TooLargeABatchIsSilentlyEager(CompiledHandRunner):
    def over(self, batch: DraftExtendBatch, count: int) -> Any:
        return DraftExtendOutput(*self.step(batch.as_dict()))


@mutant("F26")
class CachesHeldFromCapture(HandRunner):
    def __init__(self, draft: Any, caches: Any, **options: Any) -> None:
        super().__init__(draft, caches, **options)
        self.held = draft.caches

    def run(self, rows: dict[str, Tensor], bucket: int) -> tuple[Tensor, Tensor]:
        current, self.draft.caches = self.draft.caches, self.held
        try:
            return super().run(rows, bucket)
        finally:
            self.draft.caches = current


@mutant("F26")
class WeightsCopiedAtCapture(HandRunner):
    def run(self, rows: dict[str, Tensor], bucket: int) -> tuple[Tensor, Tensor]:
        kept = self.captured.setdefault("mix", self.draft.mix.data.clone())
        current, self.draft.mix.data = self.draft.mix.data, kept
        try:
            return super().run(rows, bucket)
        finally:
            self.draft.mix.data = current


@mutant("F27")
class StaticBuffersOfAllRunnersAreOne(HandRunner):
    """Weights gathered at capture into memory that the next runner's capture takes over."""

    pool: ClassVar[dict[str, Tensor]] = {}

    def warm_up(self) -> None:
        self.pool["lm_head"] = self.draft.lm_head.data
        super().warm_up()

    def step(self, rows: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        _, hidden = super().step(rows)
        return hidden @ self.pool["lm_head"].T, hidden


@mutant("F28")
class ResultsAreViewsOfGraphMemory(HandRunner):
    def hand_over(self, tensor: Tensor, count: int, bucket: int) -> Tensor:
        memory = self.captured.setdefault(tensor.shape[1], torch.zeros((self.buckets_[-1], tensor.shape[1])))
        memory[:bucket].copy_(tensor)
        return memory[:count]


@mutant("F03")
class LastRowOfTheBlock(HandRunner):
    def last(self, rows: dict[str, Tensor]) -> Tensor:
        return torch.full_like(rows["accept_lens"].long(), self.width - 1)


@mutant("F57 F58")
class DraftsOwnHiddenStates(HandRunner):
    """The cache is filled from something else than the target's hidden states."""

    def target_hidden(self, rows: dict[str, Tensor]) -> Tensor:
        return torch.zeros_like(rows["hidden_states"])


@mutant("F34")
class ContextEndIsCutByARow(HandRunner):
    def metadata(self, rows: dict[str, Tensor]) -> Any:
        most = rows["page_table"].shape[1] * self.page_size - 1
        return super().metadata({**rows, "seq_lens": rows["seq_lens"].clamp(max=most)})


@mutant("F45")
class ResultsInHalfPrecision(HandRunner):
    def hand_over(self, tensor: Tensor, count: int, bucket: int) -> Tensor:
        return super().hand_over(tensor, count, bucket).bfloat16()


@mutant("F46")
class TheCallersBatchIsPaddedInPlace(HandRunner):
    def copy_in(self, batch: DraftExtendBatch, count: int) -> None:
        super().copy_in(batch, count)
        batch.page_table.masked_fill_(batch.page_table == 0, self.draft.pools()[0].shape[0] - 1)


@mutant("leak")
class EveryResultIsKept(HandRunner):
    def hand_over(self, tensor: Tensor, count: int, bucket: int) -> Tensor:
        out = super().hand_over(tensor, count, bucket)
        self.captured.setdefault("kept", []).append(out)
        return out


@mutant("form")
class WrongBatchesAreServed(HandRunner):
    def __call__(self, batch: DraftExtendBatch) -> Any:
        rows = {name: tensor.clone() for name, tensor in batch.as_dict().items()}
        rows["page_table"] = rows["page_table"].to(torch.int32)
        return super().__call__(DraftExtendBatch(**rows))


@mutant("hang", time_limit=2.0)
class HangsOnASmallerBatch(HandRunner):
    def copy_in(self, batch: DraftExtendBatch, count: int) -> None:
        while count < self.captured.get("last", 0):
            time.sleep(0.01)
        self.captured["last"] = count
        super().copy_in(batch, count)


@mutant("crash")
class CrashesOnAFullAcceptance(HandRunner):
    def copy_in(self, batch: DraftExtendBatch, count: int) -> None:
        if int(batch.accept_lens.max()) == self.width:
            raise IndexError("index 6 is out of bounds")
        super().copy_in(batch, count)
