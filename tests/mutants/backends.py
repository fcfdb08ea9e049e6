"""Wrong attention backends, each with one fault that real kernels have had.

A mutant overrides one part of :class:`PlainAttention`. ``MUTANTS`` names for each the kinds of fault it stands for, as
``F01`` to ``F62`` or ``S1`` to ``S5`` (faults of serving engines that the library exists to rule out).
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from specops.layout import QueryLayout
from tests.mutants.plain_attention import PlainAttention, PlainLatentAttention, power_of_two

MUTANTS: dict[str, tuple[str, type[Any], dict[str, Any]]] = {}


def mutant(faults: str, **options: Any) -> Any:
    """Enter a class; ``options`` go to ``check_backend``."""

    def enter(kind: type[Any]) -> type[Any]:
        family = {"family": "mla"} if issubclass(kind, PlainLatentAttention) else {}
        MUTANTS[kind.__name__] = (faults, kind, {**family, **options})
        return kind

    return enter


@mutant("F01 S1")
class OffsetsByNumStepsPlusOne(PlainAttention):
    def starts(self, layout: QueryLayout, batch: int) -> list[int]:
        if layout.is_uniform and layout.max_query_len == 6:
            return [request * 4 for request in range(batch + 1)]
        return super().starts(layout, batch)


@mutant("F02 S1")
class GridOfNumStepsPlusOneRows(PlainAttention):
    def drops(self, row: int, rows: int, layout: QueryLayout) -> bool:
        return layout.is_uniform and row >= 4


@mutant("F03 S2")
class PackedReadAsUniform(PlainAttention):
    def starts(self, layout: QueryLayout, batch: int) -> list[int]:
        if layout.is_uniform:
            return super().starts(layout, batch)
        return [request * layout.max_query_len for request in range(batch + 1)]


@mutant("F05")
class IndexBufferOf64Keys(PlainAttention):
    def extent(self, seq_len: int) -> int:
        return min(super().extent(seq_len), 64)


@mutant("F08")
class TileSizedByTheFirstCall(PlainAttention):
    def __init__(self) -> None:
        self.tiles: dict[int, tuple[Tensor, int]] = {}

    def drops(self, row: int, rows: int, layout: QueryLayout) -> bool:
        if layout.is_uniform:
            return False
        assert layout.query_start is not None
        starts = layout.query_start
        return row >= self.tiles.setdefault(starts.data_ptr(), (starts, int(starts.diff().max())))[1]


@mutant("F25")
class LengthsKeptFromTheFirstCall(PlainAttention):
    def __init__(self) -> None:
        self.known: dict[int, tuple[Tensor, list[int]]] = {}

    def lengths(self, seq_lens: Tensor) -> list[int]:
        # The tensor is kept too, so that no other one gets its address.
        return self.known.setdefault(seq_lens.data_ptr(), (seq_lens, seq_lens.tolist()))[1]


@mutant("F25 F26")
class PagesKeptFromTheFirstCall(PlainAttention):
    def __init__(self) -> None:
        self.tables: dict[int, tuple[Tensor, Tensor]] = {}

    def slot(self, page_table: Tensor, request: int, place: int) -> tuple[int, int]:
        if page_table.data_ptr() not in self.tables:
            self.tables[page_table.data_ptr()] = page_table, page_table.clone()
        return super().slot(self.tables[page_table.data_ptr()][1], request, place)


@mutant("F09")
class PagesTakenAsConsecutive(PlainAttention):
    def slot(self, page_table: Tensor, request: int, place: int) -> tuple[int, int]:
        page = int(page_table[request, 0]) + place // self.page_size
        return min(page, self.num_pages - 1), place % self.page_size


@mutant("F09 F33")
class LastPageReadWhole(PlainAttention):
    """The rest of the last page is masked by a weight of zero, which NaN survives."""

    def extent(self, seq_len: int) -> int:
        return min(-(-seq_len // self.page_size) * self.page_size, self.capacity)

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, seen: list[int], scale: float, features: Any) -> Tensor:
        if not seen:
            return super().attend(q, keys, values, seen, scale, features)
        rest = values[seen[-1] + 1 :, self.heads(q.shape[0], keys.shape[1])].sum(dim=0) * 0
        return super().attend(q, keys, values, seen, scale, features) + rest.to(q.dtype)


@mutant("F10")
class ShorterThanAPageIsSkipped(PlainAttention):
    def drops(self, row: int, rows: int, layout: QueryLayout) -> bool:
        return self.short

    def extent(self, seq_len: int) -> int:
        self.short = 1 < seq_len < self.page_size
        return super().extent(seq_len)


@mutant("F13")
class FullLastPageCountsAsEmpty(PlainAttention):
    def extent(self, seq_len: int) -> int:
        whole = super().extent(seq_len)
        return whole - self.page_size if whole and whole % self.page_size == 0 else whole


@mutant("F14")
class PagesOfHalfTheSize(PlainAttention):
    def slot(self, page_table: Tensor, request: int, place: int) -> tuple[int, int]:
        half = max(1, self.page_size // 2)
        column = min(place // half, page_table.shape[1] - 1)
        return int(page_table[request, column]), place % half


@mutant("F15 F17")
class PaddedRequestReadsItsPage(PlainAttention):
    """A padded request counts as one key long, so its rows see page 0."""

    def lengths(self, seq_lens: Tensor) -> list[int]:
        return seq_lens.clamp(min=1).tolist()


@mutant("F19")
class PaddedRowsKeepTheirQueries(PlainAttention):
    """Rows without keys come back as whatever the query held, times zero."""

    def result(self, out: Tensor, q: Tensor) -> Tensor:
        return out + q[..., :1] * 0


@mutant("F23")
class BatchOfOneTakesAnotherPath(PlainAttention):
    def drops(self, row: int, rows: int, layout: QueryLayout) -> bool:
        return self.alone and row < rows - 1

    def starts(self, layout: QueryLayout, batch: int) -> list[int]:
        self.alone = batch == 1
        return super().starts(layout, batch)


@mutant("F28")
class OneOutputBufferForAllCalls(PlainAttention):
    def __init__(self) -> None:
        self.buffers: dict[Any, Tensor] = {}

    def output(self, q: Tensor, v_cache: Tensor) -> Tensor:
        key = (q.shape, v_cache.shape[3], q.dtype)
        if key not in self.buffers:
            self.buffers[key] = super().output(q, v_cache)
        return self.buffers[key].zero_()


@mutant("F32")
class RowWithoutKeysIsNaN(PlainAttention):
    def attend(self, q: Tensor, keys: Tensor, values: Tensor, seen: list[int], scale: float, features: Any) -> Tensor:
        if seen:
            return super().attend(q, keys, values, seen, scale, features)
        return q.new_full((q.shape[0], values.shape[2]), float("nan"))


@mutant("F32")
class RowWithoutKeysIsTheMean(PlainAttention):
    """Masked scores are a large negative number, so a row that sees nothing averages everything."""

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, seen: list[int], scale: float, features: Any) -> Tensor:
        return super().attend(q, keys, values, seen or list(range(len(keys))), scale, features)


@mutant("F36", large_pool=True)
class OffsetsIn32Bits(PlainAttention):
    def read(self, cache: Tensor, slots: list[tuple[int, int]], scale: Tensor | None) -> Tensor:
        stride = cache.stride(0)
        wrapped = [((page * stride + 2**31) % 2**32 - 2**31, offset) for page, offset in slots]
        return super().read(cache, [(max(0, start) // stride, offset) for start, offset in wrapped], scale)


@mutant("F37")
class HeadsInterleaved(PlainAttention):
    def heads(self, num_heads: int, num_kv_heads: int) -> list[int]:
        return [head % num_kv_heads for head in range(num_heads)]


@mutant("F37")
class GroupsOfPowersOfTwoOnly(PlainAttention):
    def heads(self, num_heads: int, num_kv_heads: int) -> list[int]:
        group = power_of_two(num_heads // num_kv_heads)
        return [min(head // group, num_kv_heads - 1) for head in range(num_heads)]


@mutant("F38")
class HeadDimCutToAPowerOfTwo(PlainAttention):
    def scores(self, q: Tensor, keys: Tensor, scale: float, features: Any) -> Tensor:
        dim = power_of_two(q.shape[1])
        return super().scores(q[:, :dim], keys[..., :dim], scale, features)


@mutant("F38 F45")
class ValueDimTakenFromTheKeys(PlainAttention):
    def result(self, out: Tensor, q: Tensor) -> Tensor:
        missing = q.shape[2] - out.shape[2]
        return torch.nn.functional.pad(out, (0, missing)) if missing > 0 else out


@mutant("F39")
class QueryTakenAsContiguous(PlainAttention):
    def __call__(self, q: Tensor, *args: Any, **options: Any) -> Tensor:
        _, heads, dim = q.shape
        inside = q.storage_offset() + q.numel() <= q.untyped_storage().nbytes() // q.element_size()
        flat = q.as_strided(q.shape, (heads * dim, dim, 1)) if inside else q
        return super().__call__(flat, *args, **options)


@mutant("F39")
class CacheTakenAsContiguous(PlainAttention):
    def read(self, cache: Tensor, slots: list[tuple[int, int]], scale: Tensor | None) -> Tensor:
        _, size, heads, dim = cache.shape
        return super().read(cache.as_strided(cache.shape, (size * heads * dim, heads * dim, dim, 1)), slots, scale)


@mutant("F40")
class SeqLensTakenAsContiguous(PlainAttention):
    def lengths(self, seq_lens: Tensor) -> list[int]:
        return seq_lens.as_strided(seq_lens.shape, (1,)).tolist()


@mutant("F45")
class ResultHasTheQuerysStrides(PlainAttention):
    def output(self, q: Tensor, v_cache: Tensor) -> Tensor:
        return super().output(q, v_cache).transpose(0, 1).contiguous().transpose(0, 1)


@mutant("F45")
class ResultIsFloat32(PlainAttention):
    def result(self, out: Tensor, q: Tensor) -> Tensor:
        return out.float()


@mutant("F41")
class WindowIsOneTooWide(PlainAttention):
    def visible(self, seq_len: int, position: int, row: int, features: Any, layout: QueryLayout) -> list[int]:
        if "window" in features:
            features = {**features, "window": features["window"] + 1}
        return super().visible(seq_len, position, row, features, layout)


@mutant("F41")
class WindowForgottenInUniformLayouts(PlainAttention):
    def visible(self, seq_len: int, position: int, row: int, features: Any, layout: QueryLayout) -> list[int]:
        if layout.is_uniform:
            features = {name: value for name, value in features.items() if name != "window"}
        return super().visible(seq_len, position, row, features, layout)


@mutant("F42")
class SiblingsSeeEachOther(PlainAttention):
    def visible(self, seq_len: int, position: int, row: int, features: Any, layout: QueryLayout) -> list[int]:
        features = {name: value for name, value in features.items() if name != "tree_mask"}
        return super().visible(seq_len, position, row, features, layout)


@mutant("F42 F06")
class EveryRequestGetsTheFirstTree(PlainAttention):
    def visible(self, seq_len: int, position: int, row: int, features: Any, layout: QueryLayout) -> list[int]:
        return super().visible(seq_len, position, row % layout.max_query_len, features, layout)


@mutant("F42")
class WideMaskReadAsNarrow(PlainAttention):
    def visible(self, seq_len: int, position: int, row: int, features: Any, layout: QueryLayout) -> list[int]:
        if "tree_mask" in features:
            features = {**features, "tree_mask": features["tree_mask"][:, : layout.max_query_len]}
        return super().visible(seq_len, position, row, features, layout)


@mutant("F43")
class SinksForgottenBesideAWindow(PlainAttention):
    def sinks(self, features: dict[str, Any]) -> Tensor | None:
        return None if "window" in features else super().sinks(features)


@mutant("F43")
class SinksAreScaled(PlainAttention):
    def sinks(self, features: dict[str, Any]) -> Tensor | None:
        sinks = super().sinks(features)
        return None if sinks is None else sinks * 1.4427


@mutant("F43")
class CapBeforeTheScale(PlainAttention):
    def scores(self, q: Tensor, keys: Tensor, scale: float, features: Any) -> Tensor:
        return self.capped(torch.einsum("hd,khd->kh", q, keys), features) * scale


@mutant("F44")
class KeyScaleForgotten(PlainAttention):
    def __call__(self, *args: Any, **options: Any) -> Tensor:
        options.pop("k_scale", None)
        return super().__call__(*args, **options)


@mutant("F44")
class ValueScaleForgottenInPackedLayouts(PlainAttention):
    def __call__(self, *args: Any, **options: Any) -> Tensor:
        if not options["layout"].is_uniform:
            options.pop("v_scale", None)
        return super().__call__(*args, **options)


@mutant("F49")
class SumsInBfloat16(PlainAttention):
    def output(self, q: Tensor, v_cache: Tensor) -> Tensor:
        self.is_half = q.dtype == torch.bfloat16
        return super().output(q, v_cache)

    def mix(self, scores: Tensor, values: Tensor, features: Any) -> Tensor:
        half = torch.bfloat16
        if not self.is_half:
            return super().mix(scores, values, features)
        weights = torch.exp(scores - scores.amax(dim=0)).to(half)
        total, out = weights[0] * 0, (weights[0, :, None] * values[0]).to(half) * 0
        for weight, value in zip(weights, values, strict=True):
            total, out = total + weight, out + (weight[:, None] * value).to(half)
        return (out / total[:, None]).float()


@mutant("F49")
class SoftmaxWithoutTheMaximum(PlainAttention):
    def mix(self, scores: Tensor, values: Tensor, features: Any) -> Tensor:
        weights = torch.exp(scores)
        sinks = self.sinks(features)
        total = weights.sum(dim=0) + (0 if sinks is None else torch.exp(sinks))
        return torch.einsum("kh,khd->hd", weights / total, values)


@mutant("F49")
class ScaleAlwaysFromTheHeadDim(PlainAttention):
    def scores(self, q: Tensor, keys: Tensor, scale: float, features: Any) -> Tensor:
        return super().scores(q, keys, q.shape[1] ** -0.5, features)


@mutant("F15")
class DeadColumnsAreLookedUp(PlainAttention):
    """All columns of the page table are gathered, whatever stands in those behind the live pages."""

    def __call__(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, *args: Any, **options: Any
    ) -> Tensor:
        k_cache[page_table.long().flatten()]
        return super().__call__(q, k_cache, v_cache, page_table, *args, **options)


@mutant("F46")
class QueryScaledInPlace(PlainAttention):
    def __call__(self, q: Tensor, *args: Any, scale: float, **options: Any) -> Tensor:
        q.mul_(scale)
        return super().__call__(q, *args, scale=1.0, **options)


@mutant("F46")
class PageTableSanitisedInPlace(PlainAttention):
    def __call__(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, *args: Any, **options: Any
    ) -> Tensor:
        page_table.clamp_(max=k_cache.shape[0] - 2)
        return super().__call__(q, k_cache, v_cache, page_table, *args, **options)


@mutant("F28 F46")
class ResultWrittenOverTheQuery(PlainAttention):
    def result(self, out: Tensor, q: Tensor) -> Tensor:
        return q.copy_(out) if out.shape == q.shape else out


@mutant("F27")
class EveryResultIsKept(PlainAttention):
    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def result(self, out: Tensor, q: Tensor) -> Tensor:
        self.kept.append(out.clone())
        return out


@mutant("hang", time_limit=1.0)
class HangsOnAPaddedRequest(PlainAttention):
    def lengths(self, seq_lens: Tensor) -> list[int]:
        lens = super().lengths(seq_lens)
        while 0 in lens:
            time.sleep(0.01)
        return lens


@mutant("crash")
class CrashesWithoutRequests(PlainAttention):
    def lengths(self, seq_lens: Tensor) -> list[int]:
        lens = super().lengths(seq_lens)
        max(lens)
        return lens


@mutant("form")
class ReturnsNothing(PlainAttention):
    def result(self, out: Tensor, q: Tensor) -> Any:
        return None


@mutant("F45 F47")
class StridesDependOnTheBatch(PlainAttention):
    """A fake kernel can't know of that, so compiled code would read the result at the wrong places."""

    def result(self, out: Tensor, q: Tensor) -> Tensor:
        return out.transpose(0, 1).contiguous().transpose(0, 1) if out.shape[0] > 8 else out


@mutant("F38")
class LatentValueIncludesTheRope(PlainLatentAttention):
    def values(self, cache: Tensor, latent_dim: int) -> Tensor:
        return cache


@mutant("F38")
class RopePartForgotten(PlainLatentAttention):
    def query(self, q_latent: Tensor, q_rope: Tensor) -> Tensor:
        return torch.cat((q_latent, q_rope * 0), dim=2)


@mutant("F44")
class LatentValueScaleForgotten(PlainLatentAttention):
    def value_scale(self, kv_scale: Tensor) -> Tensor | None:
        return None


@mutant("F38")
class ScaleFromTheLatentDimAlone(PlainLatentAttention):
    def scale(self, scale: float, latent_dim: int, rope_dim: int) -> float:
        return latent_dim**-0.5


class _PackedAsUniform(PackedReadAsUniform):
    """The MLA form of the same fault."""


@mutant("F03 S2")
class LatentPackedReadAsUniform(PlainLatentAttention):
    inner = _PackedAsUniform
