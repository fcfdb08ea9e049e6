"""A recorded round as a picture: SVG, or an HTML page with the picture, the text around it and a table. Loads nothing."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from specops.trace import RoundTrace, TraceNode

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
