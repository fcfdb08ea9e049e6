"""Target models and draft heads over paged caches, and the plain attention layer for models of your own."""

from specops.models.attention_module import PagedAttention
from specops.models.config import ModelConfig, RopeConfig
from specops.models.llama import CausalLM
from specops.models.loading import load_target, load_tokenizer

__all__ = ["CausalLM", "ModelConfig", "PagedAttention", "RopeConfig", "load_target", "load_tokenizer"]
