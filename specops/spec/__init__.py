"""Speculative decoding: draft, verify, draft-extend, and the loop around them."""

from specops.spec.config import SpecConfig
from specops.spec.engine import Engine, EngineStats
from specops.spec.request import Request
from specops.spec.sampling import SamplingParams

__all__ = ["Engine", "EngineStats", "Request", "SamplingParams", "SpecConfig"]
