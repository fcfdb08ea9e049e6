"""The demo's figures and charts: where two runs part, text that only grows, and drawings of saved figures.

Run alone: pytest tests/test_demo.py
"""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest

from specops.api import Models
from specops.bench import histogram, run_bench
from specops.demo import divergence_report, run_demo
from specops.plotting import plot_figures
from specops.spec import Request, SpecConfig
from tests.spec.test_text import Pieces
from tests.spec.toys import Shadow, greedy, small_llama, target_of


class Tokenizer(Pieces):
    """Words are numbers."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [int(word) for word in text.split()]}


@pytest.fixture(scope="module")
def world() -> dict[str, Any]:
    judge = small_llama()
    target = target_of(judge)
    return {"judge": judge, "models": Models(target, Tokenizer(), Shadow(target))}


def request(tokens: list[int], margins: list[float]) -> Request:
    made = Request([1], 9)
    made.emit(tokens, margins, 99)
    return made


def test_a_gap_within_rounding_is_a_tie_and_one_above_it_a_fault(world: dict[str, Any]) -> None:
    target, prompt = world["models"].target, [1, 2, 3]
    answer = greedy(world["judge"], prompt, 12)
    wrong = [*answer[:4], (answer[4] + 1) % 64, *answer[5:]]
    plain = request(answer, [1.0] * 12)

    def report(gap: float) -> dict[str, Any] | None:
        return divergence_report(target, [prompt], [request(wrong, [gap] * 12)], [plain], 4)

    assert divergence_report(target, [prompt], [plain], [plain], 4) is None
    fault, tie = report(0.5), report(0.0)
    assert fault is not None
    assert tie is not None
    assert (fault["prompt"], fault["position"], fault["top2_gap"], fault["fault"]) == (0, 4, 0.5, True)
    assert 0 < fault["noise_bound"] < 1e-2
    assert tie["fault"] is False
    short = divergence_report(target, [prompt], [request([5], [0.0])], [request([6], [0.0])], 4)
    assert short is not None
    assert short["noise_bound"] is None
    assert short["fault"] is True


def test_the_demo_shows_the_first_answer_as_it_grows_and_counts_right(world: dict[str, Any]) -> None:
    shown: list[str] = []
    prompts = ["1 2 3", "7 7"]
    figures = run_demo(
        world["models"],
        prompts,
        config=SpecConfig(3, 2, 6),
        max_new_tokens=12,
        max_requests=2,
        phases=True,
        on_text=shown.append,
    )
    assert json.loads(json.dumps(figures)) == figures
    expected = [Pieces().decode(greedy(world["judge"], [int(w) for w in prompt.split()], 12)) for prompt in prompts]
    assert figures["texts"] == expected
    assert "".join(shown) == expected[0]
    assert len([piece for piece in shown if piece]) > 2
    assert figures["tokens"] == 24
    assert figures["identical_to_plain"] is True
    lengths = {int(length): count for length, count in figures["accept_lens"].items()}
    assert sum(lengths.values()) == figures["rounds"]
    mean = sum(length * count for length, count in lengths.items()) / figures["rounds"]
    assert figures["accepted_per_round"] == pytest.approx(mean, abs=1e-3)
    assert {"draft", "verify", "draft_extend"} < set(figures["seconds_by_phase"])


def test_histogram_counts() -> None:
    assert histogram([3, 1, 3, 10]) == {"1": 1, "3": 2, "10": 1}


def test_a_bench_without_a_head_or_without_work_is_refused(world: dict[str, Any]) -> None:
    models = world["models"]
    with pytest.raises(ValueError, match="there is none; give --draft"):
        run_bench(Models(models.target, models.tokenizer, None), ["1"])
    for options in ({"batch_sizes": [0]}, {"repeats": 0}, {"batch_sizes": []}):
        with pytest.raises(ValueError, match="batch sizes of 1 or more"):
            run_bench(models, ["1"], **options)  # type: ignore[arg-type]


FIGURES: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "mode": "eager",
    "num_steps": 3,
    "topk": 1,
    "num_draft_tokens": 4,
    "accept_lens": {"1": 5, "2": 3, "4": 2},
    "seconds_by_phase": {"draft": 0.1, "verify": 0.4, "draft_extend": 0.05},
}
ROWS = [
    {"batch": 1, "plain_tokens_per_s": 10.0, "eagle_tokens_per_s": 25.0, "speedup": 2.5},
    {"batch": 4, "plain_tokens_per_s": 30.0, "eagle_tokens_per_s": 50.0, "speedup": 1.67},
]


@pytest.mark.parametrize(
    ("more", "titles"),
    [
        ({}, ["tokens accepted a round", "time by phase"]),
        (
            {"plain_tokens_per_s": 1.0, "tokens_per_s": 2.0},
            ["tokens accepted a round", "time by phase", "tokens per second"],
        ),
        ({"rows": ROWS}, ["tokens accepted a round", "time by phase", "tokens per second", "speed-up over plain decoding"]),
        ({"rows": ROWS, "accept_lens": {}, "seconds_by_phase": None}, ["tokens per second", "speed-up over plain decoding"]),
    ],
)
def test_a_chart_for_all_there_is_data_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], titles: list[str]
) -> None:
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, *args, **options: (drawn.append(figure), save(figure, *args, **options))
    )
    path = plot_figures({**FIGURES, **more}, tmp_path / "chart.svg")
    assert path.stat().st_size > 1000
    assert [axes.get_title() for axes in drawn[0].axes] == titles
    if titles[0] == "tokens accepted a round":
        shares = [bar.get_height() for bar in drawn[0].axes[0].patches]
        assert shares == pytest.approx([50.0, 30.0, 0.0, 20.0])
        assert drawn[0].axes[0].get_legend().get_texts()[0].get_text() == "mean 1.90"


def test_figures_without_data_and_a_missing_matplotlib_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="these figures have nothing to draw"):
        plot_figures({"device": "cpu"}, tmp_path / "a.png")
    load = builtins.__import__

    def without(name: str, *args: Any, **options: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return load(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"charts need matplotlib: pip install 'specops\[demo\]'"):
        plot_figures(FIGURES, tmp_path / "a.png")
