"""The classes that SGLang asks for: an attention backend, and one for the steps of a draft.

A step's metadata is computed from SGLang's tensors in :meth:`SpecopsAttnBackend.init_forward_metadata_in_graph` and nowhere
else. In a CUDA graph that is recorded with the forward which reads it, so a replay makes it anew and there is no buffer to
refresh. Prefill, which is never recorded, takes the same way.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.verify_mask import VerifyMask
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.runtime_context import get_parallel, get_spec
from sglang.srt.speculative.eagle_utils import TreeMaskMode
from torch import Tensor

from specops import ops
from specops.integrations.sglang.mapping import packed_layout, page_table, pages_of, tree_mask
from specops.integrations.vllm.mapping import refusals
from specops.layout import QueryLayout
from specops.ops.capabilities import FP8

# The specops backend that all layers use; there is no option of SGLang's that could carry it.
BACKEND_VARIABLE = "SPECOPS_SGLANG_BACKEND"
ALGORITHMS = (None, "EAGLE", "EAGLE3", "NEXTN", "STANDALONE")


@dataclass
class SpecopsMetadata:
    """One step of ``B`` requests.

    Attributes:
        page_table: ``[B, max_pages]`` int32.
        seq_lens: ``[B]`` int32, keys including the new tokens.
        layout: how rows belong to requests.
        num_rows: rows of the step; the query may have more, which are padding. None where the host does not know.
        tree_mask: ``[T, n]`` bool, or None.
    """

    page_table: Tensor
    seq_lens: Tensor
    layout: QueryLayout
    num_rows: int | None
    tree_mask: Tensor | None = None


class SpecopsAttnBackend(AttentionBackend):  # type: ignore[misc]
    """specops' ops as SGLang's attention backend ``specops``: prefill, decoding, target verify and draft-extend V2.

    Args:
        model_runner: SGLang's.
        draft_step: which step of a draft's decoding this serves; None for all else.

    Raises:
        ValueError: a model, pool or option that is not served; says all of them.
    """

    needs_cpu_seq_lens = False

    def __init__(self, model_runner: Any, *, draft_step: int | None = None) -> None:
        super().__init__()
        self.backend = os.environ.get(BACKEND_VARIABLE, "auto")
        self.draft_step = draft_step
        self.device = torch.device(model_runner.device)
        self.page_size = model_runner.page_size
        self.max_context_len = model_runner.model_config.context_len
        self.req_to_token = model_runner.req_to_token_pool.req_to_token
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.kv_index_translator = model_runner.kv_index_translator
        self.data_type = self.kv_cache_dtype = model_runner.kv_cache_dtype
        reasons = _refusals(model_runner, self.backend)
        if reasons:
            raise ValueError(
                f"specops' SGLang plug-in cannot serve this model: {'; '.join(reasons)}. Choose another --attention-backend"
            )
        spec = get_spec()
        self._width = spec.speculative_num_draft_tokens or 0
        self._tree = (spec.speculative_eagle_topk or 1) > 1
        self._verify_mask: VerifyMask | None = None
        if self._width and draft_step is None and not model_runner.is_draft_worker:
            self._make_verify_mask(model_runner.req_to_token_pool.size)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Nothing has an address of its own but the tree's mask, which the draft fills in place."""
        if self._verify_mask is not None and not self._verify_mask.fits(max_bs):
            self._make_verify_mask(max_bs)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Padding requests see one key of the reserved page."""
        return 1

    @property
    def verify_mask(self) -> VerifyMask | None:
        """Where the draft stage writes the mask of a tree: own tokens alone, the form that the op takes."""
        return self._verify_mask

    def update_verify_buffers_to_fill_after_draft(self, spec_info: Any, cuda_graph_bs: int | None) -> None:
        """Nothing: the mask is read where the draft has written it."""

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """The step's metadata, from tensors.

        Raises:
            ValueError: a ragged target verify.
        """
        mode, spec_info, batch = forward_batch.forward_mode, forward_batch.spec_info, forward_batch.batch_size
        lens, rows = forward_batch.seq_lens[:batch], forward_batch.req_pool_indices[:batch]
        mask: Tensor | None = None
        if mode.is_decode_or_idle():
            layout, num_rows = QueryLayout.uniform(1), batch
            if self.draft_step is not None:
                lens = lens + self.draft_step + 1
        elif mode.is_target_verify():
            if getattr(spec_info, "ragged_verify_layout", None) is not None:
                raise ValueError("specops' SGLang plug-in verifies equally many tokens a request; unset ragged verify")
            layout, num_rows = QueryLayout.uniform(spec_info.draft_token_num), batch * spec_info.draft_token_num
            lens = lens + spec_info.draft_token_num
            if self._tree:
                own = self._verify_mask
                given = own.buffer if own is not None and own.fits(batch) else spec_info.custom_mask
                mask = tree_mask(given, batch, spec_info.draft_token_num)
        elif mode.is_draft_extend_v2():
            width = spec_info.num_tokens_per_req
            layout, num_rows = QueryLayout.uniform(width), batch * width
        else:
            layout, num_rows = packed_layout(forward_batch.extend_seq_lens[:batch], forward_batch.extend_seq_lens_cpu)
        table = page_table(self.req_to_token, rows, self.page_size, self.max_context_len)
        self.forward_metadata = SpecopsMetadata(table, lens.to(torch.int32), layout, num_rows, mask)

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        """See :meth:`forward_extend`."""
        return self.forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        """Store the new keys and values, then attend over the cache.

        Args:
            q: ``[T, Hq * D]`` or ``[T, Hq, D]``; rows behind the step's own are padding.
            k, v: ``[T, Hkv, D]``, or None where they are in the cache already.
            layer: SGLang's ``RadixAttention``.
            forward_batch: the batch; its slots say where ``k`` and ``v`` go.
            save_kv_cache: whether they are stored.
            kwargs: ``sinks`` ``[Hq]``; any other that is set is refused.

        Returns:
            ``[T, Hq * Dv]``; zeros in rows of padding.

        Raises:
            ValueError: an option of the layer or the call that the ops do not have.
        """
        sinks = kwargs.pop("sinks", None)
        _check_layer(layer, kwargs)
        k_scale, v_scale = self._scales(layer)
        if save_kv_cache and k is not None and v is not None:
            where = KVWriteLoc.for_batch(forward_batch)
            if k_scale is None:
                self.token_to_kv_pool.set_kv_buffer(layer, where, k, v)
            else:
                # The pool divides by the scales in place.
                self.token_to_kv_pool.set_kv_buffer(layer, where, k.clone(), v.clone(), layer.k_scale, layer.v_scale)
        meta: SpecopsMetadata = self.forward_metadata
        keys, values = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        q = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        count = q.shape[0] if meta.num_rows is None else min(meta.num_rows, q.shape[0])
        out = ops.mha(
            q[:count],
            pages_of(keys, self.page_size, layer.tp_k_head_num, layer.qk_head_dim),
            pages_of(values, self.page_size, layer.tp_v_head_num, layer.v_head_dim),
            meta.page_table,
            meta.seq_lens,
            layout=meta.layout,
            scale=layer.scaling,
            window=layer.sliding_window_size + 1 if layer.sliding_window_size > -1 else None,
            softcap=layer.logit_cap or None,
            sinks=None if sinks is None else sinks.float(),
            tree_mask=meta.tree_mask,
            k_scale=k_scale,
            v_scale=v_scale,
            backend=self.backend,
        )
        if count < q.shape[0]:
            out = torch.cat((out, out.new_zeros(q.shape[0] - count, *out.shape[1:])))
        return out.flatten(1)

    def _scales(self, layer: Any) -> tuple[Tensor | None, Tensor | None]:
        """One-element float32 scales of an fp8 cache; None where it holds the values themselves."""
        if self.kv_cache_dtype is not FP8 or layer.k_scale is None:
            return None, None
        return layer.k_scale.float().reshape(1), layer.v_scale.float().reshape(1)

    def _make_verify_mask(self, max_requests: int) -> None:
        cells = max_requests * self._width * self._width
        self._verify_mask = VerifyMask(
            buffer=torch.zeros(cells, dtype=torch.bool, device=self.device),
            mode=TreeMaskMode.QLEN_ONLY,
            max_bs=max_requests,
            is_read=self._tree,
        )


class SpecopsMultiStepBackend:
    """The backends of a draft's decoding steps, one a step; a step sees what those before it have stored.

    Args:
        model_runner: the draft's.
        topk: branches of a node; 1.
        speculative_num_steps: levels of the tree. The first comes from draft-extend and needs no backend.

    Raises:
        ValueError: a draft that branches.
    """

    needs_cpu_seq_lens = False

    def __init__(self, model_runner: Any, topk: int, speculative_num_steps: int) -> None:
        if topk > 1:
            raise ValueError(
                f"specops' SGLang plug-in drafts chains, got --speculative-eagle-topk {topk}; give the draft another "
                "backend (--speculative-draft-attention-backend triton): specops then still verifies the tree"
            )
        self.topk, self.speculative_num_steps = topk, speculative_num_steps
        self.attn_backends = [SpecopsAttnBackend(model_runner, draft_step=step) for step in range(speculative_num_steps - 1)]
        self.max_context_len = model_runner.model_config.context_len
        # SGLang writes the names of the backends it has chosen into these.
        self.prefill_attention_backend_str: str | None = None
        self.decode_attention_backend_str: str | None = None

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        for backend in self.attn_backends:
            backend.init_cuda_graph_state(max_bs, max_num_tokens)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.init_forward_metadata_in_graph(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Nothing: all metadata is made in the graph."""

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        for backend in self.attn_backends:
            backend.init_forward_metadata_in_graph(forward_batch)


def _refusals(model_runner: Any, backend: str) -> list[str]:
    """Why a model, its pool or its options cannot be served, in words."""
    config, device = model_runner.model_config, torch.device(model_runner.device)
    reasons = []
    if model_runner.use_mla_backend:
        reasons.append("multi-head latent attention")
    if config.is_encoder_decoder:
        reasons.append("cross attention")
    if isinstance(model_runner.token_to_kv_pool, SWAKVPool):
        reasons.append("a pool of its own for layers with a window (--disable-hybrid-swa-memory gives all one pool)")
    if model_runner.kv_index_translator.is_translating:
        reasons.append("a unified pool, whose token ids are translated")
    if get_parallel().dcp_enabled:
        reasons.append("decode context parallelism")
    algorithm = get_spec().speculative_algorithm
    if algorithm not in ALGORITHMS:
        reasons.append(f"speculative algorithm {algorithm} (served: {', '.join(a for a in ALGORITHMS if a)})")
    if model_runner.kv_cache_dtype not in (model_runner.dtype, FP8):
        reasons.append(f"a cache of {model_runner.kv_cache_dtype} (served: the model's dtype, fp8_e4m3)")
    if reasons:
        return reasons
    ranks = get_parallel().attn_tp_size
    return refusals(
        backend=backend,
        device_type=device.type,
        compute_capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
        head_dim=config.head_dim,
        q_dtype=model_runner.dtype,
        cache_dtype="fp8" if model_runner.kv_cache_dtype is FP8 else "auto",
        page_size=model_runner.page_size,
        max_query_len=config.context_len,
        num_heads=config.num_attention_heads // ranks,
        num_kv_heads=config.get_num_kv_heads(ranks),
    )


def _check_layer(layer: Any, options: dict[str, Any]) -> None:
    """Refuse what the ops have no argument for.

    Raises:
        ValueError: names it.
    """
    unknown = [name for name, value in options.items() if value is not None and value is not False]
    if layer.is_cross_attention or layer.attn_type != AttentionType.DECODER:
        unknown.append(f"attention of type {layer.attn_type}")
    if layer.xai_temperature_len > 0:
        unknown.append("a temperature by position")
    if layer.logit_cap and layer.logit_capping_method != "tanh":
        unknown.append(f"a logit cap of kind {layer.logit_capping_method}")
    if unknown:
        raise ValueError(
            f"specops' SGLang plug-in has no {', no '.join(unknown)} (layer {layer.layer_id}); choose another "
            "--attention-backend"
        )
