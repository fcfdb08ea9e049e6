"""Speculative decoding: draft, verify, draft-extend, and the loop around them."""

from specops.spec.config import SpecConfig
from specops.spec.engine import Engine
from specops.spec.request import Request
from specops.spec.sampling import SamplingParams
from specops.spec.stats import EngineStats

__all__ = ["Engine", "EngineStats", "Request", "SamplingParams", "SpecConfig"]
