"""Pages are conserved, page 0 is nobody's, and a refusal takes nothing: checked step by step against a model.

OMP_NUM_THREADS=1 pytest tests/test_kv_cache.py
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from specops import OutOfPages, PageAllocator, PagedKVCache, PagedLatentCache, PageTable

FP8 = torch.float8_e4m3fn


def test_pages_return_after_growing_across_page_ends() -> None:
    # 13, 16, 17 tokens on pages of 16, then accepted lengths 1, 3 and 4, then the end.
    allocator = PageAllocator(8, 16)
    pages = PageTable(allocator, 2, 64)
    for tokens, free in ((13, 6), (16, 6), (17, 5), (18, 5), (21, 5), (25, 5)):
        pages.reserve(0, tokens)
        assert allocator.num_free == free
        allocator.check()
    pages.release(0)
    assert allocator.num_free == 7
    allocator.check()


def test_headroom_for_every_branch_is_reserved_or_refused() -> None:
    # Page 16, topk 4, 5 steps: a tree of 20 nodes on a sequence of 30 tokens needs 50 tokens, 4 pages.
    pages = PageTable(PageAllocator(4, 16), 1, 64)
    pages.reserve(0, 30)
    with pytest.raises(OutOfPages, match="2 pages of 16 tokens asked for, 1 of 3 free"):
        pages.reserve(0, 30 + 4 * 5)
    assert pages.num_pages(0) == 2
    assert pages.tensor()[0].count_nonzero() == 2


def test_out_of_pages_takes_nothing() -> None:
    allocator = PageAllocator(4, 16)
    allocator.allocate(2)
    with pytest.raises(OutOfPages, match=r"2 pages of 16 tokens asked for, 1 of 3 free; let a request finish"):
        allocator.allocate(2)
    assert allocator.num_free == 1
    allocator.check()
    assert allocator.allocate(1) == [3]


def test_page_0_is_never_handed_out() -> None:
    allocator = PageAllocator(6, 1)
    assert sorted(allocator.allocate(5)) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "pages", [[1, 1], [0], [5], [2], [-1]], ids=["twice", "reserved", "outside", "not-owned", "negative"]
)
def test_freeing_what_is_not_owned_frees_nothing(pages: list[int]) -> None:
    allocator = PageAllocator(5, 4)
    allocator.allocate(1)
    with pytest.raises(ValueError, match="not handed out, or named twice; nothing was freed"):
        allocator.free(pages)
    assert allocator.num_free == 3
    allocator.check()


def test_freeing_twice_is_refused() -> None:
    allocator = PageAllocator(5, 4)
    taken = allocator.allocate(2)
    allocator.free(taken)
    with pytest.raises(ValueError, match="nothing was freed"):
        allocator.free(taken)
    allocator.check()


def test_a_corrupt_book_is_noticed() -> None:
    allocator = PageAllocator(5, 4)
    allocator._free.append(1)
    with pytest.raises(RuntimeError, match="free list names a page twice"):
        allocator.check()
    allocator = PageAllocator(5, 4)
    allocator._free.pop()
    with pytest.raises(RuntimeError, match="3 free and 0 owned pages do not make 4"):
        allocator.check()


def test_a_row_that_can_never_hold_that_many_is_refused() -> None:
    pages = PageTable(PageAllocator(50, 4), 1, 16)
    with pytest.raises(ValueError, match="17 tokens need 5 pages, a row holds 4 of 4 tokens"):
        pages.reserve(0, 17)


def test_the_device_tensor_keeps_its_address() -> None:
    pages = PageTable(PageAllocator(100, 4), 20, 40)
    first = pages.tensor()
    for row in range(20):
        pages.reserve(row, 4 + row // 2)
    again = pages.tensor()
    assert again.data_ptr() == first.data_ptr()
    assert again.dtype == torch.int32
    pages.release(3)
    assert pages.tensor()[3].tolist() == [0] * 10


class Requests(RuleBasedStateMachine):
    """Requests that grow and finish at random; the model is a dict of token counts."""

    @initialize(num_pages=st.integers(2, 12), page_size=st.integers(1, 5))
    def start(self, num_pages: int, page_size: int) -> None:
        self.allocator = PageAllocator(num_pages, page_size)
        self.pages = PageTable(self.allocator, 4, 40)
        self.tokens: dict[int, int] = {}

    def needed(self, tokens: int) -> int:
        return (tokens + self.allocator.page_size - 1) // self.allocator.page_size

    @rule(row=st.integers(0, 3), tokens=st.integers(0, 40))
    def reserve(self, row: int, tokens: int) -> None:
        held = self.needed(self.tokens.get(row, 0))
        before = self.pages.tensor().clone()
        if self.needed(tokens) - held > self.allocator.num_free:
            with pytest.raises(OutOfPages):
                self.pages.reserve(row, tokens)
            assert torch.equal(self.pages.tensor(), before)
            return
        self.pages.reserve(row, tokens)
        self.tokens[row] = max(tokens, self.tokens.get(row, 0))
        assert torch.equal(self.pages.tensor()[row, :held], before[row, :held]), "pages a request has stay where they are"

    @rule(row=st.integers(0, 3))
    def release(self, row: int) -> None:
        self.pages.release(row)
        self.tokens.pop(row, None)

    @invariant()
    def pages_are_conserved(self) -> None:
        if not hasattr(self, "pages"):
            return
        self.allocator.check()
        mirror = self.pages.tensor()
        owned = []
        for row in range(4):
            count = self.needed(self.tokens.get(row, 0))
            assert self.pages.num_pages(row) == count
            live = mirror[row, :count].tolist()
            assert 0 not in live
            assert mirror[row, count:].tolist() == [0] * (self.pages.max_pages - count)
            owned += live
        assert len(set(owned)) == len(owned), "a page has two owners"
        assert self.allocator.num_free == self.allocator.num_pages - 1 - len(owned)


Requests.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestRequests = Requests.TestCase


def test_caches_are_buffers_with_the_shapes_of_the_ops() -> None:
    cache = PagedKVCache(6, 4, 2, 16, 8, dtype=torch.float16)
    assert (cache.k.shape, cache.v.shape) == ((6, 4, 2, 16), (6, 4, 2, 8))
    assert {name for name, _ in cache.named_buffers()} == {"k", "v"}
    assert cache.state_dict() == {}, "pages are no part of a checkpoint"
    assert (cache.num_pages, cache.page_size, cache.k_scale) == (6, 4, None)
    latent = PagedLatentCache(6, 4)
    assert latent.kv.shape == (6, 4, 576)
    assert (latent.num_pages, latent.page_size, latent.kv_scale) == (6, 4, None)
    assert "dtype=torch.float16" in repr(cache)
    assert "kv=(6, 4, 576)" in repr(latent)


def test_fp8_caches_carry_their_scales() -> None:
    cache = PagedKVCache(2, 4, 1, 8, dtype=FP8, k_scale=0.25)
    assert (cache.k_scale.tolist(), cache.v_scale.tolist()) == ([0.25], [1.0])
    assert PagedLatentCache(2, 4, dtype=FP8, kv_scale=0.5).kv_scale.tolist() == [0.5]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PagedKVCache(1, 4, 2, 8), "a pool needs at least 2 pages, since page 0 is reserved; got 1"),
        (lambda: PagedKVCache(4, 0, 2, 8), "page_size must be >= 1, got 0"),
        (lambda: PagedKVCache(4, 4, 2, 8, 0), "value_dim must be >= 1, got 0"),
        (lambda: PagedKVCache(4, 4, 2, 8, k_scale=1.0), "k_scale and v_scale belong to a float8_e4m3fn cache"),
        (lambda: PagedLatentCache(4, 4, rope_dim=0), "rope_dim must be >= 1, got 0"),
        (lambda: PagedLatentCache(4, 4, kv_scale=1.0), "kv_scale belongs to a float8_e4m3fn cache"),
        (lambda: PageAllocator(1, 4), "a pool needs at least 2 pages"),
    ],
)
def test_sizes_that_make_no_cache_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
