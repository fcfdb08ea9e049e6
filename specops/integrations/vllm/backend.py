"""The classes that vLLM asks of an attention backend: what it takes, a step's metadata, and a layer's two calls.

Nothing is copied but the result: specops' attention returns a fresh tensor, vLLM hands one over to be filled. On a CPU the
kernels fill that one themselves: a layer's calls of them are prepared for its cache in the first step of each kind, in which
the ops check the call and serve it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config, get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import KVCacheLayout

from specops import ops
from specops.integrations.vllm import version_warning, vllm_version
from specops.integrations.vllm.mapping import CACHE_DTYPES, cache_views, graph_safe, layout_of, refusals
from specops.integrations.vllm.worker import COUNTS
from specops.layout import QueryLayout
from specops.ops import native
from specops.ops.attention_checks import mha_op
from specops.ops.backends import device_kind
from specops.ops.capabilities import FLOATS, FP8
from specops.ops.cpu import is_native
from specops.ops.prepared import CacheReader, CacheWriter, Step, prepare_step

_logger = init_logger("vllm.specops.backend")


class SpecopsBackend(AttentionBackend):  # type: ignore[misc]
    """specops' ops as vLLM's ``CUSTOM`` attention backend, on GPUs and CPUs."""

    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list[torch.dtype]] = list(FLOATS)
    supported_kv_cache_dtypes: ClassVar[list[Any]] = list(CACHE_DTYPES)

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[SpecopsImpl]:
        return SpecopsImpl

    @staticmethod
    def get_builder_cls() -> type[SpecopsMetadataBuilder]:
        return SpecopsMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(1)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """All, those first whose tokens lie one behind the other: the CPU op reads them in place."""
        first = (KVCacheLayout.LBNHC, KVCacheLayout.BLNHC)
        return (*first, *(layout for layout in KVCacheLayout if layout not in first))

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """The layout is chosen from numbers on the host."""
        return False

    @classmethod
    def validate_configuration(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: Any,
        block_size: int | None,
        *args: Any,
        has_sink: bool = False,
        has_sliding_window: bool = False,
        **kwargs: Any,
    ) -> list[str]:
        """Why this backend cannot serve a model, in words; empty when it can. vLLM raises with them before it loads."""
        _warn_of_version()
        reasons = super().validate_configuration(
            head_size,
            dtype,
            kv_cache_dtype,
            block_size,
            *args,
            has_sink=has_sink,
            has_sliding_window=has_sliding_window,
            **kwargs,
        )
        features = [name for name, needed in (("sinks", has_sink), ("window", has_sliding_window)) if needed]
        return [*reasons, *_refusals(head_size, dtype, kv_cache_dtype, block_size, features=features)]


@dataclass
class SpecopsMetadata:
    """A step of ``T`` tokens of ``B`` requests, padding included. The tensors are views of vLLM's own buffers.

    Attributes:
        num_actual_tokens: ``T``.
        block_table: ``[B, max_pages]`` int32.
        seq_lens: ``[B]`` int32, keys including the new tokens.
        layout: how tokens belong to requests.
        step: the same for the CPU's kernels; None elsewhere.
    """

    num_actual_tokens: int
    block_table: Tensor
    seq_lens: Tensor
    layout: QueryLayout
    step: Step | None


class SpecopsMetadataBuilder(AttentionMetadataBuilder[SpecopsMetadata]):  # type: ignore[misc]
    """Makes a step's :class:`SpecopsMetadata`, the same way in eager mode, at capture and at replay."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: Any) -> AttentionCGSupport:
        """Steps whose requests have one width: a graph holds one layout."""
        safe = graph_safe(_options(vllm_config), current_platform.device_type)
        return AttentionCGSupport.UNIFORM_BATCH if safe else AttentionCGSupport.NEVER

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> SpecopsMetadata:
        """See the base class; ``common_prefix_len`` and ``fast_build`` change nothing.

        Raises:
            ValueError: a step that is not causal.
        """
        common = common_attn_metadata
        if common.causal is not True:
            raise ValueError("specops' vLLM plug-in serves causal attention alone; choose another attention backend")
        layout = layout_of(common.num_reqs, common.num_actual_tokens, common.max_query_len, common.query_start_loc)
        table, lens = common.block_table_tensor, common.seq_lens
        return SpecopsMetadata(
            num_actual_tokens=common.num_actual_tokens,
            block_table=table,
            seq_lens=lens,
            layout=layout,
            step=prepare_step(table, lens, layout) if table.is_cpu else None,
        )


class SpecopsImpl(AttentionImpl[SpecopsMetadata]):  # type: ignore[misc]
    """Attention of one layer: the arguments of vLLM's, refused here where only the layer knows them."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **others: Any,
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.window = sliding_window
        self.softcap = logits_soft_cap or None
        self.sinks = sinks
        # By layout: what mha would check and choose is the same in every step of an engine, so it is done in the first.
        self._ops: dict[str, Callable[..., Tensor]] = {}
        self._cache: Tensor | None = None
        self._views: tuple[Tensor, Tensor]
        # Of this cache, where the CPU's kernels serve it; the reader by layout, once the ops have found it capable.
        self._writer: CacheWriter | None = None
        self._readers: dict[str, CacheReader] = {}
        config = get_current_vllm_config()
        self.backend = _options(config)
        given = (("window", sliding_window), ("softcap", self.softcap), ("sinks", sinks))
        _warn_of_version()
        reasons = _refusals(
            head_size,
            torch.get_default_dtype(),
            kv_cache_dtype,
            config.cache_config.block_size if config.cache_config is not None else None,
            num_heads=num_heads,
            num_kv_heads=self.num_kv_heads,
            features=[name for name, value in given if value is not None],
        )
        if alibi_slopes is not None:
            reasons.append("ALiBi slopes")
        if attn_type != AttentionType.DECODER:
            reasons.append(f"attention of type {attn_type} (decoders are served)")
        reasons += [f"option {name}={value}" for name, value in others.items() if value not in (None, False, -1)]
        reasons += _wider_needs(config)
        if reasons:
            raise ValueError(
                f"specops' vLLM plug-in cannot serve this model: {'; '.join(reasons)}. Choose another attention backend"
            )

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """The op takes sinks in float32; a checkpoint may hold them in another dtype."""
        if self.sinks is not None:
            self.sinks = self.sinks.float()

    def do_kv_cache_update(self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        """Store the new keys and values ``[T, Hkv, D]``; tokens behind ``slot_mapping``'s end, and slots of -1, are not."""
        COUNTS["stored"] += 1
        if kv_cache is not self._cache:
            self._bind(kv_cache)
        if self._writer is not None and self._writer(key, value, slot_mapping):
            return
        k_cache, v_cache = self._views
        k_scale, v_scale = self._scales(layer)
        count = slot_mapping.shape[0]
        if count < key.shape[0]:
            key, value = key[:count], value[:count]
        ops.store_kv(k_cache, v_cache, key, value, slot_mapping, k_scale=k_scale, v_scale=v_scale)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: SpecopsMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attention of the new tokens over the cache, into ``output [T, Hq, Dv]``; rows of padding keep what they hold.

        Without metadata vLLM is measuring memory, and the result is zeros.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("specops' vLLM plug-in does not quantise its output")
        if attn_metadata is None:
            return output.fill_(0)
        layout, count = attn_metadata.layout, attn_metadata.num_actual_tokens
        kind = layout.kind
        COUNTS[kind] += 1
        if kv_cache is not self._cache:
            self._bind(kv_cache)
        reader = self._readers.get(kind)
        if reader is not None and attn_metadata.step is not None and reader(query, output, attn_metadata.step, count):
            return output
        k_cache, v_cache = self._views
        k_scale, v_scale = self._scales(layer)
        rows, filled = (query, output) if count == query.shape[0] else (query[:count], output[:count])
        table, lens = attn_metadata.block_table, attn_metadata.seq_lens
        features = (self.window, self.softcap, self.sinks, None, k_scale, v_scale)
        op = self._ops.get(kind)
        if op is None:
            op = mha_op(rows, k_cache, v_cache, table, lens, layout, *features, self.backend)
            self._ops[kind] = op
            by_kernels = op is torch.ops.specops.cpu_mha.default and k_scale is None
            if by_kernels and is_native(rows, k_cache, v_cache, layout, self.window, None, max_rows=None):
                options = (self.num_heads, self.scale, self.window, self.softcap, self.sinks)
                self._readers[kind] = CacheReader(k_cache, v_cache, *options)
        start, width = layout.query_start, layout.max_query_len
        filled.copy_(op(rows, k_cache, v_cache, table, lens, start, width, self.scale, *features))
        return output

    def _bind(self, kv_cache: Tensor) -> None:
        """Take ``kv_cache`` as the layer's: its views, and what the CPU's kernels keep of them."""
        self._cache, self._views = kv_cache, cache_views(kv_cache, self.head_size, self.kv_cache_dtype)
        self._ops, self._readers = {}, {}
        plain = kv_cache.is_cpu and CACHE_DTYPES[self.kv_cache_dtype] is not FP8
        self._writer = CacheWriter(*self._views) if plain and native.library() is not None else None

    def _scales(self, layer: Any) -> tuple[Tensor | None, Tensor | None]:
        if CACHE_DTYPES[self.kv_cache_dtype] is not FP8:
            return None, None
        return layer._k_scale, layer._v_scale


def _refusals(head_size: int, dtype: torch.dtype, cache_dtype: Any, block_size: int | None, **more: Any) -> list[str]:
    """:func:`~specops.integrations.vllm.mapping.refusals` on the current platform, under the current config."""
    config = get_current_vllm_config_or_none()
    capability = current_platform.get_device_capability() if current_platform.is_cuda() else None
    return refusals(
        backend=_options(config),
        device_type=device_kind(torch.device(current_platform.device_type)),
        compute_capability=None if capability is None else (capability.major, capability.minor),
        head_dim=head_size,
        q_dtype=dtype,
        cache_dtype=cache_dtype,
        page_size=block_size,
        max_query_len=1 if config is None else config.scheduler_config.max_num_batched_tokens,
        **more,
    )


def _wider_needs(config: VllmConfig) -> list[str]:
    """What an engine needs beyond causal attention on one rank. vLLM's CPU platform asks no backend about it."""
    parallel, model = config.parallel_config, config.model_config
    needs = (
        ("attention in both directions", config.attention_config.use_non_causal),
        ("images seen in both directions", model is not None and model.is_mm_prefix_lm),
        ("a reference sliding window", model is not None and model.rswa_window is not None),
        ("context parallelism", max(parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size) > 1),
    )
    return [what for what, needed in needs if needed]


def _options(config: VllmConfig | None) -> str:
    """The specops backend that ``additional_config={"specops": {"backend": ...}}`` names, or ``"auto"``.

    Raises:
        ValueError: other options under ``"specops"``.
    """
    options = dict((config.additional_config or {}).get("specops", {})) if config is not None else {}
    backend = options.pop("backend", "auto")
    if options or not isinstance(backend, str):
        raise ValueError(
            "additional_config['specops'] takes one option, 'backend', the name of a specops backend; "
            f"got backend {backend!r} and {options or 'nothing'} beside it"
        )
    return backend


@functools.cache
def _warn_of_version() -> None:
    """One warning a process where vLLM's version is outside of the tested range."""
    warning = version_warning(vllm_version())
    if warning is not None:
        _logger.warning(warning)
