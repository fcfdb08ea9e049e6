"""Every schema and every fake kernel of specops, to be read from top to bottom. Imports torch alone.

One schema per family serves all its backends: ``specops::triton_mha`` and ``specops::reference_mha`` differ in name only,
so a graph dump names the backend and nothing else changes. Attention is functional and returns a fresh, contiguous
tensor; the stores and moves mutate their caches and return nothing. ``project_qkv``, ``expand_beam`` and ``commit_round`` do
both, to save launches. Whatever an op reads is one of its arguments.

Fakes look at shapes and dtypes only, never at values.

    T query rows, B requests, Hq query heads, Hkv KV heads, D key dim, Dv value dim, P pages, S page size,
    Dc latent dim, Dr rotary dim, W tree width, n nodes of a draft tree
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.library import Library

NAMESPACE = "specops"
Call = TypeVar("Call", bound=Callable[..., Any])
LIBRARY: Any = Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]


def without_autograd(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """``kernel`` with gradient mode off: these ops serve inference alone.

    A kernel written in torch would otherwise record itself when a caller forgot ``torch.no_grad()``; a cache would then
    hold the history of all that was ever written to it.
    """

    @functools.wraps(kernel)
    def run(*args: Any) -> Any:
        if not torch.is_grad_enabled():
            return kernel(*args)
        with torch.no_grad():
            return kernel(*args)

    return run


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed; it is not imported for that."""
    return importlib.util.find_spec("triton") is not None


def with_triton(
    plain: Callable[..., Any], module: str, name: str, serves: Callable[..., bool] | None = None
) -> Callable[..., Any]:
    """What an op runs on a GPU: ``name`` of ``specops.ops.{module}`` where Triton is installed, else ``plain``.

    Args:
        plain: the op in torch.
        module: imports Triton, so it is imported at the first call.
        serves: whether the kernel takes a call, told the module and the arguments; ``plain`` runs if not.
    """

    def run(*args: Any) -> Any:
        if not has_triton():
            return plain(*args)
        kernels = importlib.import_module(f"specops.ops.{module}")
        kernel = getattr(kernels, name) if serves is None or serves(kernels, *args) else plain
        return kernel(*args)

    return run


def constant_when_compiled(function: Call) -> Call:
    """``torch.compiler.assume_constant_result`` without its import of the compiler, which takes as long as torch's own.

    The mark is all that function sets; a test holds the two together.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def through_op(tensor: Tensor) -> bool:
    """Whether small steps of a round go through an op, one or two launches, or stay torch that is compiled with the rest.

    On a GPU the former. Called while tracing, so it asks for nothing but the device: without Triton the ops run as torch.
    """
    return tensor.is_cuda


def define(name: str, schema: str, fake: Callable[..., Any], kernels: dict[str, Callable[..., Any]]) -> None:
    """Define ``specops::{name}`` with its fake and one kernel per dispatch key."""
    LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)
    for key, kernel in kernels.items():
        LIBRARY.impl(name, without_autograd(kernel), key)


# A uniform layout is written as query_start=None with max_query_len rows for every request.
MHA_SCHEMA = (
    "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor page_table, Tensor seq_lens, Tensor? query_start, "
    "SymInt max_query_len, float scale, SymInt? window=None, float? softcap=None, Tensor? sinks=None, "
    "Tensor? tree_mask=None, Tensor? k_scale=None, Tensor? v_scale=None, Tensor? plan=None) -> Tensor"
)
MLA_SCHEMA = (
    "(Tensor q_latent, Tensor q_rope, Tensor kv_cache, Tensor page_table, Tensor seq_lens, Tensor? query_start, "
    "SymInt max_query_len, float scale, SymInt? window=None, float? softcap=None, Tensor? sinks=None, "
    "Tensor? tree_mask=None, Tensor? kv_scale=None, Tensor? plan=None) -> Tensor"
)
STORE_KV_SCHEMA = (
    "(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor slots, "
    "Tensor? k_scale=None, Tensor? v_scale=None) -> ()"
)
STORE_LATENT_SCHEMA = "(Tensor(a!) kv_cache, Tensor latent, Tensor rope, Tensor slots, Tensor? kv_scale=None) -> ()"
MOVE_KV_SCHEMA = "(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor source_slots, Tensor target_slots) -> ()"
MOVE_LATENT_SCHEMA = "(Tensor(a!) kv_cache, Tensor source_slots, Tensor target_slots) -> ()"
BUILD_TREE_SCHEMA = (
    "(Tensor root_tokens, Tensor candidate_tokens, Tensor candidate_scores, Tensor candidate_parents, "
    "SymInt num_draft_tokens, int num_steps, bool links=True) "
    "-> (Tensor tokens, Tensor parents, Tensor depths, Tensor tree_mask, Tensor first_child, Tensor next_sibling)"
)
VERIFY_GREEDY_SCHEMA = (
    "(Tensor tokens, Tensor parents, Tensor depths, Tensor target_tokens, int num_steps) "
    "-> (Tensor accept_lens, Tensor accept_index, Tensor accept_tokens)"
)
VERIFY_SAMPLING_SCHEMA = (
    "(Tensor tokens, Tensor parents, Tensor target_probs, Tensor? draft_probs, Tensor accept_uniforms, "
    "Tensor bonus_uniforms, int num_steps) -> (Tensor accept_lens, Tensor accept_index, Tensor accept_tokens)"
)

TOP_TOKENS_SCHEMA = "(Tensor logits, int k, bool logprobs=False) -> (Tensor values, Tensor tokens)"
# Candidates of all levels lie in one tensor of each kind, so a level writes its own into them.
EXPAND_BEAM_SCHEMA = (
    "(Tensor(a!) candidate_tokens, Tensor(b!) candidate_scores, Tensor(c!) candidate_parents, Tensor logits, int topk, "
    "Tensor? rows=None, Tensor? scores=None, Tensor? beam=None, Tensor? tree_mask=None) "
    "-> (Tensor best_scores, Tensor best_tokens, Tensor best_candidates, Tensor best_parents, Tensor best_mask)"
)
HAND_ON_SCHEMA = (
    "(Tensor accept_index, Tensor accept_tokens, Tensor best, Tensor hidden, Tensor seq_lens, Tensor page_table, "
    "SymInt width, int page_size, bool moves) "
    "-> (Tensor tokens, Tensor hidden_states, Tensor margins, Tensor source_slots, Tensor target_slots)"
)
COMMIT_ROUND_SCHEMA = (
    "(Tensor(a!) seq_lens, Tensor(b!) root_tokens, Tensor(c!) next_token_logits, Tensor(d!) hidden_states, Tensor rows, "
    "Tensor committed, Tensor accept_lens, Tensor accept_tokens, Tensor logits, Tensor hidden, Tensor[] scores) -> Tensor"
)
ROW_PLACES_SCHEMA = (
    "(Tensor page_table, Tensor seq_lens, SymInt width, int page_size, SymInt grow=0, SymInt? behind=None, "
    "Tensor? depths=None) -> (Tensor lens, Tensor positions, Tensor slots)"
)
TAKE_REQUESTS_SCHEMA = (
    "(Tensor page_table, Tensor seq_lens, Tensor root_tokens, Tensor rows, SymInt grow) "
    "-> (Tensor table, Tensor lens, Tensor grown, Tensor roots)"
)
MOVE_KV_LAYERS_SCHEMA = "(Tensor(a!)[] k_caches, Tensor(b!)[] v_caches, Tensor source_slots, Tensor target_slots) -> ()"
RMS_NORM_LINEAR_SCHEMA = (
    "(Tensor x, Tensor weight, Tensor? norm_weight=None, float norm_eps=1e-06, float norm_offset=0.0, "
    "Tensor? bias=None, str? gate=None, Tensor? residual=None) -> Tensor"
)
# Mutates and returns: rotation and cache write ride along with the product that makes q, k and v.
PROJECT_QKV_SCHEMA = (
    "(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor x, Tensor weight, Tensor cos, Tensor sin, Tensor slots, "
    "int num_heads, Tensor? norm_weight=None, float norm_eps=1e-06, float norm_offset=0.0, Tensor? bias=None, "
    "Tensor? k_scale=None, Tensor? v_scale=None) -> Tensor"
)


def fake_mha(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    query_start: Tensor | None,
    max_query_len: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    tree_mask: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    plan: Tensor | None = None,
) -> Tensor:
    """``[T, Hq, Dv]`` in q's dtype, contiguous whatever q's strides are."""
    return q.new_empty((q.shape[0], q.shape[1], v_cache.shape[3]))


def fake_mla(
    q_latent: Tensor,
    q_rope: Tensor,
    kv_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    query_start: Tensor | None,
    max_query_len: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    tree_mask: Tensor | None = None,
    kv_scale: Tensor | None = None,
    plan: Tensor | None = None,
) -> Tensor:
    """``[T, H, Dc]`` in q_latent's dtype, contiguous whatever q_latent's strides are."""
    return q_latent.new_empty(q_latent.shape)


def fake_store_kv(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Mutates the two caches, returns nothing."""


def fake_store_latent(kv_cache: Tensor, latent: Tensor, rope: Tensor, slots: Tensor, kv_scale: Tensor | None = None) -> None:
    """Mutates the cache, returns nothing."""


def fake_move_kv(k_cache: Tensor, v_cache: Tensor, source_slots: Tensor, target_slots: Tensor) -> None:
    """Mutates the two caches, returns nothing."""


def fake_move_latent(kv_cache: Tensor, source_slots: Tensor, target_slots: Tensor) -> None:
    """Mutates the cache, returns nothing."""


def fake_build_tree(
    root_tokens: Tensor,
    candidate_tokens: Tensor,
    candidate_scores: Tensor,
    candidate_parents: Tensor,
    num_draft_tokens: int,
    num_steps: int,
    links: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``[B, n]`` int64 tokens, parents, depths; ``[B * n, n]`` bool mask; ``[B, n]`` int64 links, ``[B, 0]`` without."""
    batch = root_tokens.shape[0]
    node = candidate_tokens.new_empty
    shape, linked = (batch, num_draft_tokens), (batch, num_draft_tokens if links else 0)
    return (
        node(shape),
        node(shape),
        node(shape),
        candidate_tokens.new_empty((batch * num_draft_tokens, num_draft_tokens), dtype=torch.bool),
        node(linked),
        node(linked),
    )


def fake_verify_greedy(
    tokens: Tensor, parents: Tensor, depths: Tensor, target_tokens: Tensor, num_steps: int
) -> tuple[Tensor, Tensor, Tensor]:
    """``[B]`` int32 lengths; ``[B, num_steps + 1]`` int64 node indices and int64 emitted tokens."""
    batch = tokens.shape[0]
    return (
        tokens.new_empty((batch,), dtype=torch.int32),
        tokens.new_empty((batch, num_steps + 1)),
        tokens.new_empty((batch, num_steps + 1)),
    )


def fake_verify_sampling(
    tokens: Tensor,
    parents: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor | None,
    accept_uniforms: Tensor,
    bonus_uniforms: Tensor,
    num_steps: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`fake_verify_greedy`."""
    return fake_verify_greedy(tokens, parents, parents, tokens, num_steps)


def fake_rms_norm_linear(
    x: Tensor,
    weight: Tensor,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_offset: float = 0.0,
    bias: Tensor | None = None,
    gate: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """``[T, N]`` in x's dtype, contiguous; half of the weight's rows with a gate."""
    return x.new_empty((x.shape[0], weight.shape[0] // (1 if gate is None else 2)))


def fake_project_qkv(
    k_cache: Tensor,
    v_cache: Tensor,
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    num_heads: int,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_offset: float = 0.0,
    bias: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Mutates the two caches; ``[T, Hq, D]`` in x's dtype, contiguous."""
    return x.new_empty((x.shape[0], num_heads, k_cache.shape[3]))


def fake_top_tokens(logits: Tensor, k: int, logprobs: bool = False) -> tuple[Tensor, Tensor]:
    """``[R, k]`` float32 values and int64 tokens."""
    shape = (logits.shape[0], k)
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int64)


def fake_expand_beam(
    candidate_tokens: Tensor,
    candidate_scores: Tensor,
    candidate_parents: Tensor,
    logits: Tensor,
    topk: int,
    rows: Tensor | None = None,
    scores: Tensor | None = None,
    beam: Tensor | None = None,
    tree_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Mutates the candidates; ``[B, topk]`` float32 scores, three of int64, and ``[B * topk, W + topk]`` bool."""
    batch, width = candidate_tokens.shape[0], 0 if tree_mask is None else tree_mask.shape[1]
    node = candidate_tokens.new_empty
    return (
        node((batch, topk), dtype=torch.float32),
        node((batch, topk)),
        node((batch, topk)),
        node((batch, topk)),
        node((batch * topk, width + topk), dtype=torch.bool),
    )


def fake_hand_on(
    accept_index: Tensor,
    accept_tokens: Tensor,
    best: Tensor,
    hidden: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    width: int,
    page_size: int,
    moves: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``[B, n]`` int64, ``[B * n, H]`` in hidden's dtype, ``[B, n]`` float32, and twice ``[B * d]`` int64 or ``[0]``."""
    batch, depth = accept_index.shape
    moving = batch * depth if moves else 0
    return (
        accept_tokens.new_empty((batch, width)),
        hidden.new_empty((batch * width, hidden.shape[1])),
        best.new_empty((batch, width)),
        accept_index.new_empty((moving,)),
        accept_index.new_empty((moving,)),
    )


def fake_commit_round(
    seq_lens: Tensor,
    root_tokens: Tensor,
    next_token_logits: Tensor,
    hidden_states: Tensor,
    rows: Tensor,
    committed: Tensor,
    accept_lens: Tensor,
    accept_tokens: Tensor,
    logits: Tensor,
    hidden: Tensor,
    scores: list[Tensor],
) -> Tensor:
    """Mutates the state; ``[B, 1 + (1 + s) n]`` int32 with ``s`` scores."""
    batch, width = accept_tokens.shape
    return accept_lens.new_empty((batch, 1 + (1 + len(scores)) * width), dtype=torch.int32)


def fake_row_places(
    page_table: Tensor,
    seq_lens: Tensor,
    width: int,
    page_size: int,
    grow: int = 0,
    behind: int | None = None,
    depths: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``[B]`` lengths in their dtype; ``[B * width]`` int64 positions and slots."""
    batch = page_table.shape[0]
    rows = (batch * width,)
    lens = seq_lens.new_empty((batch,))
    return lens, seq_lens.new_empty(rows, dtype=torch.int64), seq_lens.new_empty(rows, dtype=torch.int64)


def fake_take_requests(
    page_table: Tensor, seq_lens: Tensor, root_tokens: Tensor, rows: Tensor, grow: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``[B, max_pages]`` table, ``[B]`` lengths, the same grown, ``[B]`` tokens, each in its dtype."""
    batch = (rows.shape[0],)
    return (
        page_table.new_empty((rows.shape[0], page_table.shape[1])),
        seq_lens.new_empty(batch),
        seq_lens.new_empty(batch),
        root_tokens.new_empty(batch),
    )


def fake_move_kv_layers(k_caches: list[Tensor], v_caches: list[Tensor], source_slots: Tensor, target_slots: Tensor) -> None:
    """Mutates all the caches, returns nothing."""
