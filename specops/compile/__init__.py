"""Compiled steps as CUDA graphs: buckets, static buffers, runners and their reports."""

from specops.compile.buckets import default_buckets
from specops.compile.cache import load_cache, save_cache
from specops.compile.draft_extend import DraftExtendOutput, DraftExtendRunner, DraftExtendStep, draft_extend_packed
from specops.compile.report import GraphLost, GraphLostError, RunnerReport
from specops.compile.step_runner import StepRunner

__all__ = [
    "DraftExtendOutput",
    "DraftExtendRunner",
    "DraftExtendStep",
    "GraphLost",
    "GraphLostError",
    "RunnerReport",
    "StepRunner",
    "default_buckets",
    "draft_extend_packed",
    "load_cache",
    "save_cache",
]
