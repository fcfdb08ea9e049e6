"""Charts of a demo's or a bench's figures: how long accepted runs are, where time goes, what speculation gains by batch.

Needs matplotlib, which is imported at the first chart. Figures are those of ``specops demo --json`` and
``specops bench --json``, so that a chart can be drawn from a saved file, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

FORMATS = (".png", ".svg", ".pdf")
_BLUE, _ORANGE, _GREY = "#2a6fb0", "#d97706", "#9aa3ad"


def plot_figures(figures: Mapping[str, Any], path: str | Path) -> Path:
    """Draw every chart that the figures have data for, side by side.

    Args:
        figures: from :func:`specops.demo.run_demo` or :func:`specops.bench.run_bench`.
        path: ends in .png, .svg or .pdf.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: another ending, or figures without anything to draw.
    """
    path = check_path(path)
    from matplotlib.figure import Figure

    charts: list[Callable[[Any, Mapping[str, Any]], None]] = []
    if figures.get("accept_lens"):
        charts.append(draw_accepted)
    if figures.get("seconds_by_phase"):
        charts.append(draw_phases)
    if figures.get("rows"):
        charts += [draw_throughput, draw_speedup]
    elif "plain_tokens_per_s" in figures:
        charts.append(draw_pair)
    if not charts:
        raise ValueError("these figures have nothing to draw: no accept_lens, seconds_by_phase, rows or tokens_per_s")
    # A figure of its own and not pyplot's: no window system, no global state.
    figure = Figure(figsize=(4.4 * len(charts), 3.6), layout="constrained")
    for axes, chart in zip(figure.subplots(1, len(charts), squeeze=False)[0], charts, strict=True):
        chart(axes, figures)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(_title(figures), fontsize=10, color="#444444")
    figure.savefig(path, dpi=150)
    return path


def check_path(path: str | Path) -> Path:
    """The path, if a chart can be written there: told before hours of measuring, not after.

    Raises:
        ImportError, ValueError, FileNotFoundError: matplotlib is missing, the ending is unknown, or the folder is.
    """
    path = Path(path)
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"a chart's file ends in {', '.join(FORMATS)}; got {str(path)!r}")
    if not path.resolve().parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent} for the chart")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ImportError("charts need matplotlib: pip install 'specops[demo]'") from None
    return path


def draw_accepted(axes: Any, figures: Mapping[str, Any]) -> None:
    """Share of rounds by tokens emitted."""
    counts = {int(length): count for length, count in figures["accept_lens"].items()}
    total = sum(counts.values())
    lengths = range(1, max(counts) + 1)
    axes.bar(lengths, [100 * counts.get(length, 0) / total for length in lengths], color=_BLUE)
    mean = sum(length * count for length, count in counts.items()) / total
    axes.axvline(mean, color=_ORANGE, label=f"mean {mean:.2f}")
    axes.set(title="tokens accepted a round", xlabel="tokens, bonus included", ylabel="rounds, %", xticks=list(lengths))
    axes.legend(frameon=False)


def draw_phases(axes: Any, figures: Mapping[str, Any]) -> None:
    """Time by phase."""
    phases = figures["seconds_by_phase"]
    bars = axes.barh([name.replace("_", " ") for name in phases], [1e3 * value for value in phases.values()], color=_BLUE)
    axes.bar_label(bars, fmt="%.0f", padding=2)
    axes.invert_yaxis()
    axes.set(title="time by phase", xlabel="ms")


def draw_throughput(axes: Any, figures: Mapping[str, Any]) -> None:
    """Tokens per second by batch, both ways of decoding."""
    rows = figures["rows"]
    places = range(len(rows))
    axes.bar([place - 0.2 for place in places], [row["plain_tokens_per_s"] for row in rows], 0.4, color=_GREY, label="plain")
    axes.bar([place + 0.2 for place in places], [row["eagle_tokens_per_s"] for row in rows], 0.4, color=_BLUE, label="EAGLE")
    axes.set(title="tokens per second", xlabel="batch")
    axes.set_xticks(list(places), [str(row["batch"]) for row in rows])
    axes.legend(frameon=False)


def draw_speedup(axes: Any, figures: Mapping[str, Any]) -> None:
    """Speed-up by batch."""
    rows = figures["rows"]
    places = list(range(len(rows)))
    axes.plot(places, [row["speedup"] for row in rows], marker="o", color=_ORANGE)
    axes.axhline(1, color=_GREY, linewidth=1, linestyle="--")
    axes.set(title="speed-up over plain decoding", xlabel="batch")
    axes.set_ylim(bottom=0)
    axes.set_xticks(places, [str(row["batch"]) for row in rows])


def draw_pair(axes: Any, figures: Mapping[str, Any]) -> None:
    """Tokens per second of one run each."""
    bars = axes.bar(["plain", "EAGLE"], [figures["plain_tokens_per_s"], figures["tokens_per_s"]], color=[_GREY, _BLUE])
    axes.bar_label(bars, fmt="%.1f", padding=2)
    axes.set(title="tokens per second")


def _title(figures: Mapping[str, Any]) -> str:
    shape = f"{figures['num_steps']} steps, topk {figures['topk']}, {figures['num_draft_tokens']} nodes"
    return f"{figures['device']}, {figures['dtype']}, mode {figures['mode']}; {shape}"
