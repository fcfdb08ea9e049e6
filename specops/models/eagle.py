"""EAGLE draft heads: one decoder layer that guesses the target's next hidden state and, through its LM head, its token.

Row ``i`` of a head pairs the embedding of token ``i + 1`` with the target's hidden state of position ``i``, stands at rotary
position ``i``, and predicts token ``i + 2``. Its output row is the *carried* hidden state: in the next draft step it takes
the place of the target's. Sources: EAGLE (Li et al. 2024), EAGLE-3 (Li et al. 2025).

* format ``eagle``: ``fc([embedding, hidden])`` feeds ordinary decoder layers; ``hidden`` is the target's after its final
  norm. The published heads have no norms around ``fc`` and before the LM head; heads trained here have both, since their
  two inputs differ in scale by orders of magnitude, and a norm lets the carried state keep a scale of its own.
* format ``eagle3``: ``fc`` maps the concatenated residual streams of several target layers to the head's width, once; the
  first layer reads ``[embedding, hidden]``, each normalised, and its residual is the hidden state. Further layers are
  ordinary ones. Carried states skip ``fc``.

A head has no embedding and usually no LM head of its own: it borrows the target's. With a reduced draft vocabulary it
takes the rows of the LM head that the vocabulary names. Loading and saving is :mod:`specops.models.eagle_checkpoint`.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specops.kv_cache import PagedKVCache
from specops.metadata import AttentionMetadata
from specops.models.eagle_config import EagleConfig
from specops.models.llama import MLP, Attention, DecoderLayer, Reduce
from specops.models.packed_linear import PackedWeight
from specops.models.projections import RMSNorm
from specops.models.rotary import Rope, Rotary

__all__ = ["EagleConfig", "EagleHead"]


class Eagle3Layer(nn.Module):
    """The first layer of an ``eagle3`` head: attention reads twice the width, the residual is the hidden state."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        layer = config.layer_config()
        self.normed_residual = config.normed_residual
        self.embed_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attn = Attention(layer, input_size=2 * config.hidden_size)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(layer)

    def attention_input(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        return torch.cat((self.embed_norm(embedding), self.hidden_norm(hidden)), dim=-1)

    def forward(self, embedding: Tensor, hidden: Tensor, rope: Rope, meta: AttentionMetadata) -> Tensor:
        normed = self.hidden_norm(hidden)
        residual = normed if self.normed_residual else hidden
        read = torch.cat((self.embed_norm(embedding), normed), dim=-1)
        hidden = self.attn(read, rope, meta, residual=residual)
        return cast(Tensor, self.mlp(hidden, self.mlp_norm, hidden))


class EagleHead(nn.Module):
    """A draft head over paged caches.

    Args:
        config: shape and format.
        embed_tokens: the target's embedding. Shared: it is no submodule, so moving or saving the head leaves it alone.
        lm_head_weight: ``[vocab_size, hidden_size]``, the target's; or ``[draft_vocab_size, hidden_size]``, an own one.
        d2t: ``[draft_vocab_size]`` int64 offsets, target id = draft id + ``d2t[draft id]``. Needed for a reduced
            vocabulary, refused otherwise.

    Attributes:
        d2t: buffer, None for a full vocabulary.
        lm_head_weight: ``[draft_vocab_size, hidden_size]``, rows of the target's; a buffer, or a parameter if owned.
        gather: joins the logits of ranks that hold a part of the vocabulary each (:mod:`specops.parallel`).

    Raises:
        ValueError: sizes that do not fit; names both.
    """

    d2t: Tensor | None
    lm_head_weight: Tensor
    gather: Reduce | None = None

    def __init__(
        self, config: EagleConfig, embed_tokens: nn.Module, lm_head_weight: Tensor, *, d2t: Tensor | None = None
    ) -> None:
        super().__init__()
        self.config = config
        size, eps = config.hidden_size, config.rms_norm_eps
        # In a tuple, so that it is not registered: the embedding belongs to the target.
        self._shared = (embed_tokens,)
        self.own_embedding = nn.Embedding(config.vocab_size, size) if config.own_embedding else None
        eagle = config.format == "eagle"
        layer_config = config.layer_config()
        self.fc = nn.Linear(config.hidden_width + (size if eagle else 0), size, bias=config.fc_bias)
        first = DecoderLayer(layer_config) if eagle else Eagle3Layer(config)
        if eagle and not config.input_norm:
            first.input_norm = nn.Identity()
        others = (DecoderLayer(layer_config, index) for index in range(1, config.num_layers))
        self.layers = nn.ModuleList([first, *others])
        streams = (config.target_hidden_size,) if eagle else (len(config.aux_layers), config.target_hidden_size)
        self.embed_norm = RMSNorm(size, eps) if config.norm_inputs and eagle else None
        self.hidden_norm = RMSNorm(streams, eps) if config.norm_inputs else None
        if config.norm_joined:
            self.hidden_norm = RMSNorm(config.hidden_width, eps)
        self.norm = RMSNorm(size, eps) if config.final_norm else None
        self.rotary = Rotary(config.rope, config.head_dim, config.max_position_embeddings)
        self.register_buffer("d2t", self._checked_map(d2t))
        self.packed_lm_head: PackedWeight | None = None
        weight = self._draft_rows(lm_head_weight)
        if config.own_lm_head:
            self.lm_head_weight = nn.Parameter(weight.detach().clone())
        else:
            self.register_buffer("lm_head_weight", weight.detach(), persistent=False)

    @property
    def embed_tokens(self) -> nn.Module:
        """The embedding in use: the target's, or the head's own."""
        return self._shared[0] if self.own_embedding is None else self.own_embedding

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    def allocate_caches(self, num_pages: int, page_size: int, dtype: torch.dtype | None = None) -> list[PagedKVCache]:
        """Give each layer a cache, as :meth:`specops.models.CausalLM.allocate_caches` does."""
        weight = self.fc.weight
        return [
            attention.allocate_cache(num_pages, page_size, dtype=dtype or weight.dtype, device=weight.device)
            for attention in self.attention_layers()
        ]

    @property
    def caches(self) -> list[PagedKVCache]:
        """The layers' caches; empty before :meth:`allocate_caches`."""
        return [layer.cache for layer in self.attention_layers() if layer.cache is not None]

    def set_backend(self, name: str) -> None:
        """Attention backend of all layers, by name; ``"auto"`` for the fastest capable one."""
        for layer in self.attention_layers():
            layer.backend = name

    def attention_layers(self) -> list[Attention]:
        return [cast(Attention, layer.attn) for layer in self.layers]

    def forward(self, input_ids: Tensor, hidden_states: Tensor, meta: AttentionMetadata) -> Tensor:
        """The carried hidden states of ``T`` rows; their K/V go into the caches at ``meta.slots``.

        Args:
            input_ids: ``[T]`` int64 target ids; row ``i`` holds token ``i + 1``.
            hidden_states: ``[T, config.hidden_width]``, the target's of position ``i``; or ``[T, hidden_size]``, what
                the last draft step returned.
            meta: metadata of this forward.

        Returns:
            ``[T, hidden_size]``, before the head's final norm (after it with ``carry_normed``): input of
            :meth:`compute_logits` and of the next step.
        """
        embedding, hidden = self.inputs(input_ids, hidden_states)
        rope = self.rotary(meta.positions, hidden.dtype)
        for index, layer in enumerate(self.layers):
            joined = embedding is not None and index == 0
            hidden = layer(embedding, hidden, rope, meta) if joined else layer(hidden, rope, meta)
        return cast(Tensor, self.norm(hidden)) if self.config.carry_normed and self.norm is not None else hidden

    def inputs(self, input_ids: Tensor, hidden_states: Tensor) -> tuple[Tensor | None, Tensor]:
        """What the first layer reads: for ``eagle3`` the embedding and its residual, else None and ``fc``'s output.

        Works on any leading dims, so training shares it.
        """
        embedding = self.embed_tokens(input_ids).to(self.fc.weight.dtype)
        hidden = hidden_states.to(self.fc.weight.dtype)
        if self.config.format == "eagle3":
            return embedding, self._fused(hidden) if hidden.shape[-1] == self.config.hidden_width else hidden
        if self.embed_norm is not None and self.hidden_norm is not None:
            embedding, hidden = self.embed_norm(embedding), self.hidden_norm(hidden)
        return None, self.fc(torch.cat((embedding, hidden), dim=-1))

    def _fused(self, streams: Tensor) -> Tensor:
        """One hidden state of width ``hidden_size`` out of the target's streams side by side."""
        if self.hidden_norm is not None:
            weight = self.hidden_norm.weight
            streams = self.hidden_norm(streams.view(*streams.shape[:-1], *weight.shape)).view(streams.shape)
        return cast(Tensor, self.fc(streams))

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """``[R, draft_vocab_size]`` logits of carried states ``hidden`` ``[R, hidden_size]``."""
        if self.norm is not None and not self.config.carry_normed:
            hidden = self.norm(hidden)
        if self.packed_lm_head is not None:
            logits = self.packed_lm_head.linear(hidden, self.lm_head_weight)
        else:
            logits = F.linear(hidden, self.lm_head_weight)
        return logits if self.gather is None else self.gather(logits)

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Target ids of draft ids, any shape, int64. The same tensor for a full vocabulary."""
        return draft_ids if self.d2t is None else draft_ids + self.d2t[draft_ids]

    def extra_repr(self) -> str:
        return f"format={self.config.format}, draft_vocab={self.config.draft_vocab_size} of {self.config.vocab_size}"

    def _checked_map(self, d2t: Tensor | None) -> Tensor | None:
        config = self.config
        if d2t is None:
            if config.reduced_vocab:
                raise ValueError(
                    f"draft vocabulary {config.draft_vocab_size} is smaller than the target's {config.vocab_size}; "
                    "without d2t its ids mean nothing. Give the offsets: target id = draft id + d2t[draft id]"
                )
            return None
        if d2t.shape != (config.draft_vocab_size,):
            raise ValueError(f"d2t must be [{config.draft_vocab_size}], got {tuple(d2t.shape)}")
        d2t = d2t.to(torch.int64)
        ids = d2t + torch.arange(config.draft_vocab_size, device=d2t.device)
        distinct = len(set(ids.tolist()))
        if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size or distinct != ids.numel():
            raise ValueError(
                f"d2t must map {config.draft_vocab_size} draft ids to distinct target ids below {config.vocab_size}; "
                f"it maps to {int(ids.min())} .. {int(ids.max())}, {distinct} of them distinct"
            )
        return d2t if config.reduced_vocab else None

    def _draft_rows(self, weight: Tensor) -> Tensor:
        config = self.config
        wanted = (config.draft_vocab_size if config.own_lm_head else config.vocab_size, config.hidden_size)
        if tuple(weight.shape) != wanted:
            raise ValueError(f"the LM head must be {list(wanted)} for this draft head, got {list(weight.shape)}")
        if config.own_lm_head or self.d2t is None:
            return weight
        rows = self.d2t + torch.arange(config.draft_vocab_size, device=self.d2t.device)
        return weight.detach()[rows.to(weight.device)].contiguous()
