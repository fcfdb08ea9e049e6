"""Attention calls to test a backend with: seeded, paged, shuffled, and poisoned wherever nothing may be read.

A case holds the tensors and options of one call. Pages of a request are never consecutive or in order; page 0, pages
that nobody owns, slots behind a request's ``seq_len`` and the columns of the page table behind its live pages hold NaN
or name pages that do. ``case.run("triton")`` is the call, ``case.oracle()`` its float64 value, ``case.check("triton")``
compares the two.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from specops import ops
from specops.layout import QueryLayout
from specops.ops.attention_checks import last_visible
from specops.testing.oracle import assert_close_to_oracle, oracle_mha, oracle_mla

FP8 = torch.float8_e4m3fn
SharedStorage = Literal["rows", "pages"]


@dataclass
class AttentionCase:
    """One attention call.

    Attributes:
        family: ``"mha"`` or ``"mla"``.
        tensors: positional arguments by name, in order; replace entries to vary a case.
        layout: how the rows lie.
        scale: factor on the scores.
        options: the optional arguments that are given (window, softcap, sinks, tree_mask, k_scale, v_scale, kv_scale).
    """

    family: Literal["mha", "mla"]
    tensors: dict[str, Tensor]
    layout: QueryLayout
    scale: float
    options: dict[str, Any]

    def args(self) -> tuple[Tensor, ...]:
        """Positional arguments of :func:`specops.ops.mha` or :func:`specops.ops.mla`."""
        return tuple(self.tensors.values())

    def kwargs(self) -> dict[str, Any]:
        """Keyword arguments: layout, scale, and the options given."""
        return {"layout": self.layout, "scale": self.scale, **self.options}

    def op_args(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of the torch op itself, ``torch.ops.specops.<backend>_<family>(*args, **kwargs)``.

        The tree mask is trimmed to the window as :func:`specops.ops.mha` does before it calls the op.
        """
        options = dict(self.options)
        if "window" in options and "tree_mask" in options:
            options["tree_mask"] = last_visible(options["tree_mask"], options["window"])
        return (*self.args(), self.layout.query_start, self.layout.max_query_len, self.scale), options

    def run(self, backend: str = "auto") -> Tensor:
        """The call, served by ``backend``."""
        call: Callable[..., Tensor] = ops.mha if self.family == "mha" else ops.mla
        return call(*self.args(), **self.kwargs(), backend=backend)

    def oracle(self) -> Tensor:
        """``[T, H, Dv]`` float64 on the CPU."""
        call: Callable[..., Tensor] = oracle_mha if self.family == "mha" else oracle_mla
        return call(*self.args(), **self.kwargs())

    def oracle_with_lse(self) -> tuple[Tensor, Tensor]:
        """Output and ``[T, H]`` float64 log-sum-exp."""
        call: Callable[..., tuple[Tensor, Tensor]] = oracle_mha if self.family == "mha" else oracle_mla
        return call(*self.args(), **self.kwargs(), return_lse=True)

    def check(self, backend: str = "auto", dtype: torch.dtype | str | None = None) -> float:
        """Run ``backend``, compare it with the oracle, and return the largest relative error.

        Args:
            backend: a backend's name or ``"auto"``.
            dtype: which error bound holds, see :func:`assert_close_to_oracle`.
        """
        return assert_close_to_oracle(self.run(backend), self.oracle(), dtype)


def make_mha_case(
    *,
    seq_lens: Sequence[int] = (9, 13),
    query_lens: int | Sequence[int] = 1,
    page_size: int = 4,
    num_heads: int = 8,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    tree_width: int | None = None,
    fp8: bool = False,
    k_scale: float = 0.25,
    v_scale: float = 0.5,
    strided_q: bool = False,
    hnd: bool = False,
    shared_storage: SharedStorage | None = None,
    gain: float = 1.0,
    spare_pages: int = 3,
    spare_columns: int = 2,
    table_columns: int | None = None,
    slack: int = 0,
    poison: bool = True,
) -> AttentionCase:
    """An MHA case.

    Args:
        seq_lens: keys of each request, its own rows included; 0 makes a padded request on page 0.
        query_lens: one number for a uniform layout, a list for a packed one.
        page_size, num_heads, num_kv_heads, head_dim, value_dim, dtype, device: as named; value_dim defaults to head_dim.
        seed: everything random comes from it, the same on every device.
        scale: factor on the scores, ``head_dim ** -0.5`` when not given.
        window, softcap: as for :func:`specops.ops.mha`.
        sinks: give sinks, of the size of a typical score.
        tree_width: give a tree mask this wide, of a random tree a request; at least ``query_lens``, and above it for a
            wide mask, whose rows are the last nodes of the tree. Uniform only.
        fp8: float8_e4m3fn cache with k_scale and v_scale.
        strided_q: q as a slice of a fused projection.
        hnd: caches as transposed views of ``[P, Hkv, S, D]``.
        shared_storage: k and v as views of one storage: ``"rows"`` of ``[P, S, Hkv, D + Dv]``, ``"pages"`` of
            ``[P, 2, S, Hkv, D]``.
        gain: factor on q; large values make the softmax sharp.
        spare_pages: pages nobody owns, beside page 0.
        spare_columns: columns of the page table behind the longest request; they name pages nobody owns.
        table_columns: columns of the page table, fewer than the longest request needs; its last keys do not exist then.
        slack: added to the ``max_query_len`` of a packed layout, which is an upper bound.
        poison: fill whatever may not be read with NaN; else with zeros.
    """
    value_dim = head_dim if value_dim is None else value_dim
    rng = torch.Generator().manual_seed(seed)
    layout, num_rows = _layout(query_lens, len(seq_lens), device, slack)
    page_table, num_pages, owned = _paging(seq_lens, page_size, spare_pages, spare_columns, table_columns, seed)
    keys = torch.randn((num_pages, page_size, num_kv_heads, head_dim), generator=rng)
    values = torch.randn((num_pages, page_size, num_kv_heads, value_dim), generator=rng)
    cache_dtype = FP8 if fp8 else dtype
    if fp8:
        keys, values = keys / k_scale, values / v_scale
    fill = float("nan") if poison else 0.0
    keys[~owned], values[~owned] = fill, fill
    k_cache, v_cache = _caches(keys.to(cache_dtype), values.to(cache_dtype), hnd, shared_storage, device)
    q = (torch.randn((num_rows, num_heads, head_dim), generator=rng) * gain).to(device, dtype)
    options = _options(window, softcap, sinks, tree_width, num_heads, len(seq_lens), layout, rng, device, seed)
    if fp8:
        options["k_scale"] = torch.tensor([k_scale], device=device)
        options["v_scale"] = torch.tensor([v_scale], device=device)
    tensors = {
        "q": _inside_projection(q) if strided_q else q,
        "k_cache": k_cache,
        "v_cache": v_cache,
        "page_table": page_table.to(device),
        "seq_lens": torch.tensor(list(seq_lens), dtype=torch.int32, device=device),
    }
    return AttentionCase("mha", tensors, layout, head_dim**-0.5 if scale is None else scale, options)


def make_mla_case(
    *,
    seq_lens: Sequence[int] = (9, 13),
    query_lens: int | Sequence[int] = 1,
    page_size: int = 4,
    num_heads: int = 4,
    latent_dim: int = 64,
    rope_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    tree_width: int | None = None,
    fp8: bool = False,
    kv_scale: float = 0.25,
    strided_q: bool = False,
    padded_rows: bool = False,
    gain: float = 1.0,
    spare_pages: int = 3,
    spare_columns: int = 2,
    table_columns: int | None = None,
    slack: int = 0,
    poison: bool = True,
) -> AttentionCase:
    """An MLA case; arguments as for :func:`make_mha_case`.

    Args:
        latent_dim, rope_dim: ``Dc`` and ``Dr``; DeepSeek has 512 and 64.
        kv_scale: scale of an fp8 cache.
        strided_q: q_latent and q_rope as slices of one ``[T, H, Dc + Dr]``.
        padded_rows: the cache as a slice of wider rows.
    """
    rng = torch.Generator().manual_seed(seed)
    layout, num_rows = _layout(query_lens, len(seq_lens), device, slack)
    page_table, num_pages, owned = _paging(seq_lens, page_size, spare_pages, spare_columns, table_columns, seed)
    width = latent_dim + rope_dim
    rows = torch.randn((num_pages, page_size, width), generator=rng)
    if fp8:
        rows = rows / kv_scale
    rows[~owned] = float("nan") if poison else 0.0
    storage = torch.full((num_pages, page_size, width + (16 if padded_rows else 0)), float("nan"))
    storage[..., :width] = rows
    kv_cache = storage.to(FP8 if fp8 else dtype).to(device)[..., :width]
    q = (torch.randn((num_rows, num_heads, width), generator=rng) * gain).to(device, dtype)
    q_latent, q_rope = q[..., :latent_dim], q[..., latent_dim:]
    options = _options(window, softcap, sinks, tree_width, num_heads, len(seq_lens), layout, rng, device, seed)
    if fp8:
        options["kv_scale"] = torch.tensor([kv_scale], device=device)
    tensors = {
        "q_latent": q_latent if strided_q else q_latent.contiguous(),
        "q_rope": q_rope if strided_q else q_rope.contiguous(),
        "kv_cache": kv_cache,
        "page_table": page_table.to(device),
        "seq_lens": torch.tensor(list(seq_lens), dtype=torch.int32, device=device),
    }
    return AttentionCase("mla", tensors, layout, width**-0.5 if scale is None else scale, options)


def random_tree_mask(batch: int, query_len: int, width: int, seed: int) -> Tensor:
    """``[batch * query_len, width]`` bool: the last ``query_len`` nodes of one random tree a request, self included."""
    draw = random.Random(seed)
    mask = torch.zeros((batch, width, width), dtype=torch.bool)
    for request in range(batch):
        for node in range(width):
            if node > 0:
                mask[request, node] = mask[request, draw.randrange(node)]
            mask[request, node, node] = True
    return mask[:, width - query_len :].reshape(batch * query_len, width)


def _layout(query_lens: int | Sequence[int], batch: int, device: torch.device | str, slack: int) -> tuple[QueryLayout, int]:
    if isinstance(query_lens, int):
        return QueryLayout.uniform(query_lens), batch * query_lens
    if len(query_lens) != batch:
        raise ValueError(f"{len(query_lens)} query_lens for {batch} seq_lens")
    starts = [0]
    for length in query_lens:
        starts.append(starts[-1] + length)
    query_start = torch.tensor(starts, dtype=torch.int32, device=device)
    return QueryLayout.packed(query_start, max(1, *query_lens) + slack), starts[-1]


def _paging(
    seq_lens: Sequence[int], page_size: int, spare_pages: int, spare_columns: int, table_columns: int | None, seed: int
) -> tuple[Tensor, int, Tensor]:
    """Page table, number of pages, and ``[P, S]`` bool: slots that a request owns and has filled."""
    needed = [-(-seq_len // page_size) for seq_len in seq_lens]
    num_pages = 1 + sum(needed) + max(spare_pages, 0)
    ids = list(range(1, num_pages))
    random.Random(seed).shuffle(ids)
    spare = ids[sum(needed) :] or [0]
    page_table = torch.zeros((len(seq_lens), max([1, *needed]) + spare_columns), dtype=torch.int32)
    owned = torch.zeros((num_pages, page_size), dtype=torch.bool)
    taken = 0
    for request, count in enumerate(needed):
        if count == 0:
            continue
        page_table[request] = spare[0]
        for column in range(count):
            page = ids[taken + column]
            page_table[request, column] = page
            owned[page, : seq_lens[request] - column * page_size] = True
        taken += count
    if table_columns is not None:
        page_table = page_table[:, :table_columns].contiguous()
    return page_table, num_pages, owned


def _caches(
    keys: Tensor, values: Tensor, hnd: bool, shared_storage: SharedStorage | None, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """The two caches with the strides asked for."""
    keys, values = keys.to(device), values.to(device)
    if hnd:
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    if shared_storage == "rows":
        both = torch.cat((keys.view(torch.uint8), values.view(torch.uint8)), dim=3).view(keys.dtype)
        keys, values = both[..., : keys.shape[3]], both[..., keys.shape[3] :]
    elif shared_storage == "pages":
        both = torch.stack((keys.view(torch.uint8), values.view(torch.uint8)), dim=1).view(keys.dtype)
        keys, values = both[:, 0], both[:, 1]
    else:
        keys, values = keys.contiguous(), values.contiguous()
    return (keys.transpose(1, 2), values.transpose(1, 2)) if hnd else (keys, values)


def _inside_projection(q: Tensor) -> Tensor:
    """The same values as the first columns of a wider projection whose other columns are NaN."""
    rows, heads, dim = q.shape
    fused = torch.full((rows, heads * dim + 2 * dim), float("nan"), dtype=q.dtype, device=q.device)
    fused[:, : heads * dim] = q.reshape(rows, heads * dim)
    return fused[:, : heads * dim].view(rows, heads, dim)


def _options(
    window: int | None,
    softcap: float | None,
    sinks: bool,
    tree_width: int | None,
    num_heads: int,
    batch: int,
    layout: QueryLayout,
    rng: torch.Generator,
    device: torch.device | str,
    seed: int,
) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if window is not None:
        options["window"] = window
    if softcap is not None:
        options["softcap"] = softcap
    if sinks:
        options["sinks"] = torch.randn((num_heads,), generator=rng).to(device)
    if tree_width is not None:
        options["tree_mask"] = random_tree_mask(batch, layout.tokens_per_request, tree_width, seed).to(device)
    return options
