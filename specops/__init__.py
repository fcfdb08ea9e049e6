"""specops: attention backends for speculative decoding as torch ops."""

from specops import ops
from specops.kv_cache import OutOfPages, PageAllocator, PagedKVCache, PagedLatentCache, PageTable
from specops.layout import QueryLayout
from specops.metadata import AttentionMetadata, attention_metadata

__version__ = "0.1.0"

__all__ = [
    "AttentionMetadata",
    "OutOfPages",
    "PageAllocator",
    "PageTable",
    "PagedKVCache",
    "PagedLatentCache",
    "QueryLayout",
    "attention_metadata",
    "ops",
]
