"""One round made visible: the tree that was drafted, what the target thought of it, and the path that was accepted.

``trace_round`` decodes up to a round and records it; ``to_svg`` and ``to_html`` draw the record as one self-contained
file. Recording runs draft and target once more over the same inputs, which leaves the same caches, so that the round
itself goes as it would have gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

import torch
from torch import Tensor, nn

from specops import ops
from specops.api import Models
from specops.spec import Engine, SamplingParams, SpecConfig
from specops.spec.runners import variant_for

_BOX, _COLUMN, _ROW, _MARGIN = (148, 44), 190, 58, 16
_STYLE = """
svg { font: 12px system-ui, sans-serif; background: #fff }
.edge { stroke: #b6bec8; fill: none } .edge.accepted { stroke: #1a7f4b; stroke-width: 2.5 }
.edge.bonus { stroke: #c2660a; stroke-width: 2; stroke-dasharray: 5 3 }
.box { fill: #f2f4f7; stroke: #b6bec8 } .box.accepted { fill: #d9f2e4; stroke: #1a7f4b; stroke-width: 2 }
.box.bonus { fill: #fdebd7; stroke: #c2660a; stroke-width: 2; stroke-dasharray: 5 3 }
.token { font: 600 13px ui-monospace, monospace; fill: #1c2733 } .note { fill: #5a6673; font-size: 11px }
@media (prefers-color-scheme: dark) {
  svg { background: #14181d } .box { fill: #222931; stroke: #46505c } .edge { stroke: #46505c }
  .box.accepted { fill: #123524; stroke: #3fbf7f } .edge.accepted { stroke: #3fbf7f }
  .box.bonus { fill: #3a2812; stroke: #e9964a } .token { fill: #e8edf2 } .note { fill: #9fabb8 }
}
"""
_PAGE_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 24px; color: #1c2733; background: #fff }
pre { white-space: pre-wrap; background: #f2f4f7; padding: 10px 12px; border-radius: 6px } mark { background: #bfe8d0 }
.tree { overflow-x: auto } table { border-collapse: collapse; margin-top: 16px }
td, th { padding: 3px 12px 3px 0; text-align: left; border-bottom: 1px solid #d5dae0 } tr.accepted td { font-weight: 600 }
@media (prefers-color-scheme: dark) {
  body { color: #e8edf2; background: #14181d } pre { background: #222931 } mark { background: #1f5c3d; color: inherit }
  td, th { border-color: #39424d }
}
"""


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


def to_svg(trace: RoundTrace) -> str:
    """The tree as a drawing, left to right; a pointer over a node shows its numbers."""
    places = _layout(trace.nodes)
    last = max(index for index, node in enumerate(trace.nodes) if node.accepted)
    # Right of the path's end, which is free unless it has children; then below everything.
    open_end = all(node.parent != last for node in trace.nodes)
    lowest = max(y for _, y in places)
    bonus = places[last][0] + _COLUMN, places[last][1] if open_end else lowest + _ROW
    width = max(bonus[0], max(x for x, _ in places)) + _BOX[0] + _MARGIN
    height = max(bonus[1], lowest) + _BOX[1] + _MARGIN
    edges, boxes = [], []
    for index, node in enumerate(trace.nodes):
        kind = "accepted" if node.accepted else "rejected"
        if node.parent >= 0:
            edges.append(_edge(places[node.parent], places[index], kind))
        note = "root: chosen by the round before" if not index else f"draft {_percent(node.draft_probability)}"
        if index:
            note += f" · target {_percent(node.target_probability)}"
        tip = f"{node.text} (token {node.token}), {kind}; after it the target would take {node.best_text} "
        boxes.append(_box(places[index], kind, node.text, note, tip + f"({_percent(node.best_probability)})"))
    edges.append(_edge(places[last], bonus, "bonus"))
    tip = f"{trace.emitted[-1]} (token {trace.emitted_tokens[-1]}): the target's own token after the accepted path"
    boxes.append(_box(bonus, "bonus", trace.emitted[-1], "bonus: the target's own", tip))
    label = escape(f"Round {trace.round}: {len(trace.nodes)} nodes, {len(trace.emitted)} tokens emitted")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}" '
        f'role="img" aria-label="{label}"><style>{_STYLE}</style>{"".join(edges)}{"".join(boxes)}</svg>'
    )


def to_html(trace: RoundTrace) -> str:
    """A page with the drawing, the text around it and every number in a table. Loads nothing."""
    rows = "".join(
        f'<tr class="{"accepted" if node.accepted else ""}"><td>{index}</td><td>{escape(node.text)}</td>'
        f"<td>{node.token}</td><td>{node.parent if index else ''}</td><td>{_percent(node.draft_probability)}</td>"
        f"<td>{_percent(node.target_probability)}</td><td>{escape(node.best_text)} {_percent(node.best_probability)}</td>"
        f"<td>{'accepted' if index and node.accepted else 'root' if not index else ''}</td></tr>"
        for index, node in enumerate(trace.nodes)
    )
    emitted = "".join(trace.emitted).replace("\u2423", " ").replace("\u21b5", "\n")
    count = len(trace.emitted)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>specops: round {trace.round}</title>'
        f"<style>{_PAGE_STYLE}</style></head><body><h1>Round {trace.round}: {count} token{'s' * (count != 1)}</h1>"
        f"<p>{escape(trace.title)}</p><pre>{escape(trace.before)}<mark>{escape(emitted)}</mark></pre>"
        f'<div class="tree">{to_svg(trace)}</div>'
        "<p>Green: proposed by the draft and accepted. Grey: proposed and rejected. Dashed: the target's own token.</p>"
        "<table><tr><th>node</th><th>token</th><th>id</th><th>parent</th><th>draft</th><th>target</th>"
        f"<th>target's best after it</th><th></th></tr>{rows}</table></body></html>\n"
    )


def _layout(nodes: Sequence[TraceNode]) -> list[tuple[float, float]]:
    """Top left corners: a column a depth, a row a leaf, parents beside the middle of their children."""
    rows: dict[int, float] = {}
    leaves = 0

    def place(node: int) -> float:
        nonlocal leaves
        children = [index for index, other in enumerate(nodes) if other.parent == node]
        if children:
            below = [place(child) for child in children]
            rows[node] = (below[0] + below[-1]) / 2
        else:
            rows[node] = leaves
            leaves += 1
        return rows[node]

    place(0)
    return [(_MARGIN + node.depth * _COLUMN, _MARGIN + rows[index] * _ROW) for index, node in enumerate(nodes)]


def _edge(start: tuple[float, float], end: tuple[float, float], kind: str) -> str:
    x1, y1, x2, y2 = start[0] + _BOX[0], start[1] + _BOX[1] / 2, end[0], end[1] + _BOX[1] / 2
    middle = (x1 + x2) / 2
    return f'<path class="edge {kind}" d="M{x1:g} {y1:g}C{middle:g} {y1:g} {middle:g} {y2:g} {x2:g} {y2:g}"/>'


def _box(place: tuple[float, float], kind: str, token: str, note: str, tip: str) -> str:
    x, y = place
    short = token if len(token) <= 16 else token[:15] + "…"
    return (
        f'<g><title>{escape(tip)}</title><rect class="box {kind}" x="{x:g}" y="{y:g}" rx="6" width="{_BOX[0]}" '
        f'height="{_BOX[1]}"/><text class="token" x="{x + 10:g}" y="{y + 18:g}">{escape(short)}</text>'
        f'<text class="note" x="{x + 10:g}" y="{y + 35:g}">{escape(note)}</text></g>'
    )


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.3g}%"
