"""One round recorded: the tree that was drafted, what the target thought of it, and the path that was accepted.

Recording runs draft and target once more over the same inputs, which leaves the same caches, so that the round itself goes
as it would have gone. :mod:`specops.trace_drawing` makes a picture of the record.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from specops import ops
from specops.api import Models
from specops.spec import Engine, SamplingParams, SpecConfig
from specops.spec.runners import variant_for


@dataclass(frozen=True)
class TraceNode:
    """One node of the tree.

    Attributes:
        token, text: its token.
        parent: its parent's place in the tree; -1 for the root.
        depth: 0 for the root.
        draft_probability: by the draft, after its parent; None for the root.
        target_probability: by the target at temperature 1, after its parent; None for the root.
        best_text, best_probability: the token that the target finds likeliest *after* this node.
        accepted: whether it is on the accepted path. The root always is.
    """

    token: int
    text: str
    parent: int
    depth: int
    draft_probability: float | None
    target_probability: float | None
    best_text: str
    best_probability: float
    accepted: bool


@dataclass(frozen=True)
class RoundTrace:
    """A round of one request.

    Attributes:
        round: its number, from 1.
        before: the text up to the round, the prompt included, special tokens shown.
        nodes: the tree, root first, parents before children.
        emitted: texts of the tokens the round emitted; the last one is the target's own (bonus) token.
        emitted_tokens: their ids.
        title: the models and the shape of a round, in words.
    """

    round: int
    before: str
    nodes: tuple[TraceNode, ...]
    emitted: tuple[str, ...]
    emitted_tokens: tuple[int, ...]
    title: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@torch.no_grad()
def trace_round(
    models: Models,
    prompt: Sequence[int],
    *,
    round: int = 1,
    config: SpecConfig | None = None,
    sampling: SamplingParams | None = None,
    max_context: int | None = None,
    title: str = "",
) -> RoundTrace:
    """Decode a prompt and record one of its rounds.

    Args:
        models: from :func:`specops.load_models`, with a head.
        prompt: token ids.
        round: which round, from 1.
        config: shape of a round.
        sampling: how tokens are chosen.
        max_context: as for :class:`specops.Engine`.
        title: goes into the picture.

    Raises:
        ValueError: no head, a round below 1, or an answer that ends before that round.
    """
    if models.head is None:
        raise ValueError("a trace shows a draft tree, and there is no draft head; give --draft")
    if round < 1:
        raise ValueError(f"rounds count from 1, got {round}")
    engine = Engine(models.target, models.head, config, max_requests=1, max_context=max_context, mode="eager", split=True)
    limit = engine.max_context - len(prompt)
    stops = models.target.config.eos_token_ids
    request = engine.add(prompt, max_new_tokens=max(1, limit), sampling=sampling, stop_token_ids=stops)
    verify = engine.rounds.build(variant_for(request.sampling)).step
    for done in range(round - 1):
        if request.finished:
            raise ValueError(f"the answer ends in round {done}; there is no round {round}")
        engine.step()
    # The step of round 1 prefills first, which gives the answer's first token.
    begun = max(1, len(request.tokens))
    record: dict[str, Any] = {}
    hooks = [
        engine.runners["draft"].step.register_forward_pre_hook(_record_draft(record), with_kwargs=True),
        verify.register_forward_pre_hook(_record_verify(record), with_kwargs=True),
        verify.register_forward_hook(_record_result(record)),
    ]
    try:
        engine.step()
    finally:
        for hook in hooks:
            hook.remove()
    if "lens" not in record:
        raise ValueError(f"the answer ends before round {round}")
    return _trace(models, [*prompt, *request.tokens[:begun]], record, round, title)


def _record_draft(record: dict[str, Any]) -> Any:
    def hook(step: Any, args: tuple[Any, ...], inputs: dict[str, Tensor]) -> None:
        tokens, scores, parents = step.candidates(**inputs)
        # A tree of the candidates' own numbers tells which of them the real tree keeps.
        numbers = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens).contiguous()
        kept = ops.build_tree(
            inputs["root_tokens"],
            numbers,
            scores,
            parents,
            num_draft_tokens=step.config.width,
            num_steps=step.config.num_steps,
        )[0][:, 1:]
        above = torch.where(parents >= 0, scores.gather(1, parents.clamp(min=0)), 0.0)
        record["draft"] = (scores - above).gather(1, kept)[0].exp().tolist()

    return hook


def _record_verify(record: dict[str, Any]) -> Any:
    def hook(step: Any, args: tuple[Any, ...], inputs: dict[str, Tensor]) -> None:
        tree = {name: inputs[name] for name in ("tokens", "depths", "tree_mask", "seq_lens", "page_table")}
        hidden, _ = step.run_tree(**tree)
        record["target"] = step.target.compute_logits(hidden).float().softmax(1)
        record["tree"] = [inputs[name][0].tolist() for name in ("tokens", "parents", "depths")]

    return hook


def _record_result(record: dict[str, Any]) -> Any:
    def hook(step: nn.Module, args: tuple[Any, ...], result: tuple[Tensor, ...]) -> None:
        record["lens"], record["emitted"] = int(result[0][0]), result[1][0].tolist()

    return hook


def _trace(models: Models, context: Sequence[int], record: dict[str, Any], number: int, title: str) -> RoundTrace:
    tokens, parents, depths = record["tree"]
    emitted = record["emitted"][: record["lens"]]
    path = [0]
    # The last token emitted is the bonus, which is no node.
    for token in emitted[:-1]:
        path.append(next(node for node in range(len(tokens)) if parents[node] == path[-1] and tokens[node] == token))
    best = record["target"].max(dim=1)
    nodes = tuple(
        TraceNode(
            token,
            _shown(models, token),
            parents[node],
            depths[node],
            record["draft"][node - 1] if node else None,
            float(record["target"][parents[node], token]) if node else None,
            _shown(models, int(best.indices[node])),
            float(best.values[node]),
            node in path,
        )
        for node, token in enumerate(tokens)
    )
    before = str(models.tokenizer.decode(list(context)))
    return RoundTrace(number, before, nodes, tuple(_shown(models, token) for token in emitted), tuple(emitted), title)


def _shown(models: Models, token: int) -> str:
    return str(models.tokenizer.decode([token])).replace("\n", "\u21b5").replace(" ", "\u2423") or f"#{token}"
