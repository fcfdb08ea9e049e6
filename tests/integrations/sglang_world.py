"""SGLang for the plug-in's tests: its modules as the record of its source has them, and a small runner over a pool.

Where SGLang itself imports, its own classes serve; elsewhere stand-ins of the same names and parameters, which
``test_sglang.py`` holds against the record.
"""

from __future__ import annotations

import enum
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

LAYERS, HEADS, KV_HEADS, DIM = 2, 4, 2, 16
REAL = importlib.util.find_spec("sglang") is not None
SPEC = {"speculative_num_draft_tokens": 4, "speculative_eagle_topk": 1, "speculative_algorithm": "EAGLE"}
PARALLEL = {"dcp_enabled": False, "attn_tp_size": 1}


class ForwardMode(enum.IntEnum):
    EXTEND = 1
    DECODE = 2
    IDLE = 3
    TARGET_VERIFY = 4
    DRAFT_EXTEND_V2 = 5

    def is_decode(self) -> bool:
        return self == ForwardMode.DECODE

    def is_idle(self) -> bool:
        return self == ForwardMode.IDLE

    def is_decode_or_idle(self) -> bool:
        return self.is_decode() or self.is_idle()

    def is_target_verify(self) -> bool:
        return self == ForwardMode.TARGET_VERIFY

    def is_draft_extend_v2(self) -> bool:
        return self == ForwardMode.DRAFT_EXTEND_V2


class AttentionBackend:
    """SGLang's base class, as far as the plug-in leans on it."""

    needs_cpu_seq_lens = True
    forward_metadata: Any = None
    data_type = kv_cache_dtype = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.init_forward_metadata_out_graph(forward_batch)
        self.init_forward_metadata_in_graph(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None: ...

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        raise NotImplementedError

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs) -> Any:  # type: ignore
        raise NotImplementedError

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs) -> Any:  # type: ignore
        raise NotImplementedError

    def forward(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs) -> Any:  # type: ignore
        call = self.forward_decode if forward_batch.forward_mode.is_decode() else self.forward_extend
        return call(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)


class AttentionType(enum.Enum):
    DECODER = "decoder"
    DECODER_BIDIRECTIONAL = "decoder_bidirectional"
    ENCODER_ONLY = "encoder_only"


class TreeMaskMode(enum.IntEnum):
    FULL_MASK = 0
    QLEN_ONLY = 1
    QLEN_ONLY_BITPACKING = 2


@dataclass(frozen=True)
class VerifyMask:
    buffer: Tensor
    mode: TreeMaskMode
    max_bs: int
    is_read: bool = True

    def fits(self, bs: int) -> bool:
        return bs <= self.max_bs


@dataclass
class KVWriteLoc:
    loc: Tensor

    @classmethod
    def for_batch(cls, forward_batch: Any, *, swa_loc: Any = None, full_loc: Any = None) -> KVWriteLoc:
        return cls(forward_batch.out_cache_loc)


class Pool:
    """Keys and values of all layers, NaN where nothing was written; page 0 takes the padding's."""

    def __init__(self, slots: int, page_size: int, dtype: torch.dtype) -> None:
        self.k_buffer = [torch.full((slots, KV_HEADS, DIM), float("nan")).to(dtype) for _ in range(LAYERS)]
        self.v_buffer = [buffer.clone() for buffer in self.k_buffer]
        self.dtype = dtype

    def get_kv_buffer(self, layer_id: int) -> tuple[Tensor, Tensor]:
        return self.k_buffer[layer_id], self.v_buffer[layer_id]

    def set_kv_buffer(  # type: ignore
        self, layer, loc_info, cache_k, cache_v, k_scale=None, v_scale=None, layer_id_override=None, dcp_kv_mask=None
    ) -> None:
        for buffer, values, scale in (
            (self.k_buffer[layer.layer_id], cache_k, k_scale),
            (self.v_buffer[layer.layer_id], cache_v, v_scale),
        ):
            if scale is not None:
                values.div_(scale)
            buffer[loc_info.loc] = values.to(self.dtype)


class SWAKVPool(Pool): ...


def stand_ins() -> dict[str, types.ModuleType]:
    """The modules that the plug-in imports, by name."""
    attention = "sglang.srt.layers.attention"
    registry: dict[str, Any] = {}
    hooks: list[Any] = []
    choices = {"ATTENTION_BACKEND_CHOICES": ["triton"], "DRAFT_ATTENTION_BACKEND_CHOICES": ["triton"]}

    def register_attention_backend(name: str) -> Callable[[Any], Any]:
        return lambda function: registry.setdefault(name, function)

    class HookRegistry:
        @classmethod
        def register(cls, target: str, hook: Any, hook_type: Any = "after", *, source: Any = None) -> None:
            hooks.append((target, hook, hook_type))

    contents: dict[str, dict[str, Any]] = {
        f"{attention}.base_attn_backend": {"AttentionBackend": AttentionBackend},
        f"{attention}.verify_mask": {"VerifyMask": VerifyMask},
        f"{attention}.attention_registry": {
            "ATTENTION_BACKENDS": registry,
            "register_attention_backend": register_attention_backend,
        },
        "sglang.srt.layers.radix_attention": {"AttentionType": AttentionType},
        "sglang.srt.mem_cache.memory_pool": {"KVWriteLoc": KVWriteLoc},
        "sglang.srt.mem_cache.swa_memory_pool": {"SWAKVPool": SWAKVPool},
        "sglang.srt.runtime_context": {"get_spec": lambda: None, "get_parallel": lambda: None},
        "sglang.srt.speculative.eagle_utils": {"TreeMaskMode": TreeMaskMode},
        "sglang.srt.arg_groups.choices": {
            **choices,
            "add_attention_backend_choices": choices["ATTENTION_BACKEND_CHOICES"].extend,
            "add_draft_attention_backend_choices": choices["DRAFT_ATTENTION_BACKEND_CHOICES"].extend,
        },
        "sglang.srt.plugins.hook_registry": {
            "HookRegistry": HookRegistry,
            "HookType": SimpleNamespace(AROUND="around"),
            "hooks": hooks,
        },
        "sglang.version": {"__version__": "0.5.23"},
    }
    modules: dict[str, types.ModuleType] = {}
    for name, values in contents.items():
        for place in range(1, name.count(".") + 1):
            parent = name.rsplit(".", place)[0]
            modules.setdefault(parent, types.ModuleType(parent)).__path__ = []  # type: ignore[attr-defined]
        modules[name] = types.ModuleType(name)
        vars(modules[name]).update(values)
    return modules


def load_backend(monkeypatch: pytest.MonkeyPatch, **spec: Any) -> Any:
    """The plug-in's backend module over SGLang or its stand-ins, under the given speculative options."""
    if not REAL:
        for name, module in stand_ins().items():
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.delitem(sys.modules, "specops.integrations.sglang.backend", raising=False)
    module = importlib.import_module("specops.integrations.sglang.backend")
    monkeypatch.setattr(module, "get_spec", lambda: SimpleNamespace(**{**SPEC, **spec}))
    monkeypatch.setattr(module, "get_parallel", lambda: SimpleNamespace(**PARALLEL))
    if not REAL:
        # The next test gets the module over stand-ins of its own.
        monkeypatch.delitem(sys.modules, "specops.integrations.sglang.backend")
    return module


def modes() -> Any:
    """SGLang's ForwardMode."""
    return importlib.import_module("sglang.srt.model_executor.forward_batch_info").ForwardMode if REAL else ForwardMode


def make_layer(layer_id: int, **options: Any) -> Any:
    """SGLang's RadixAttention."""
    if REAL:
        radix = importlib.import_module("sglang.srt.layers.radix_attention")
        return radix.RadixAttention(HEADS, DIM, DIM**-0.5, KV_HEADS, layer_id, **options)
    fields = {
        "tp_q_head_num": HEADS,
        "tp_k_head_num": KV_HEADS,
        "tp_v_head_num": KV_HEADS,
        "qk_head_dim": DIM,
        "v_head_dim": DIM,
        "scaling": DIM**-0.5,
        "layer_id": layer_id,
        "logit_cap": 0.0,
        "logit_capping_method": "tanh",
        "sliding_window_size": -1,
        "is_cross_attention": False,
        "attn_type": AttentionType.DECODER,
        "xai_temperature_len": -1,
        "k_scale": None,
        "v_scale": None,
    }
    return SimpleNamespace(**{**fields, **options})


def make_runner(page_size: int = 4, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """A model runner with a token table of four requests whose pages are shuffled."""
    slots, width = 256, 40
    if REAL and not options.get("pool"):
        pools = importlib.import_module("sglang.srt.mem_cache.memory_pool")
        pool = pools.MHATokenToKVPool(
            slots - page_size, page_size, dtype, KV_HEADS, DIM, LAYERS, "cpu", False, enable_alt_stream=False
        )
    else:
        pool = options.pop("pool", None) or Pool(slots, page_size, dtype)
    pages = torch.randperm(slots // page_size - 1)[: 4 * width // page_size] + 1
    first = (pages.view(4, -1) * page_size)[:, :, None]
    table = (first + torch.arange(page_size)).flatten(1).to(torch.int32)
    fields = {
        "device": "cpu",
        "page_size": page_size,
        "dtype": torch.float32,
        "kv_cache_dtype": dtype,
        "is_draft_worker": False,
        "use_mla_backend": False,
        "draft_attention_backend": None,
        "token_to_kv_pool": pool,
        "req_to_token_pool": SimpleNamespace(req_to_token=table, size=4),
        "kv_index_translator": SimpleNamespace(is_translating=False),
        "model_config": SimpleNamespace(
            context_len=width,
            head_dim=DIM,
            num_attention_heads=HEADS,
            is_encoder_decoder=False,
            get_num_kv_heads=lambda ranks: KV_HEADS // ranks,
        ),
    }
    return SimpleNamespace(**{**fields, **options})
