"""Composed questions: repeatable, varied, and not those that an evaluation asks.

pytest tests/training/test_questions.py
"""

from __future__ import annotations

import importlib.util
from itertools import cycle
from pathlib import Path

import pytest

from specops.demo import PROMPTS
from specops.training.questions import questions, subjects

EXAMPLE = Path(__file__).parents[2] / "examples" / "05_train_eagle_head.py"
# Words too common to be what a prompt is about.
COMMON = {"C", "Go", "Java", "Python", "a cat", "a dog", "a robot"}


def held_out() -> list[str]:
    spec = importlib.util.spec_from_file_location("train_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return [*module.PROMPTS, *PROMPTS]


def test_questions_are_a_function_of_the_seed_and_differ() -> None:
    first = questions(500, 3)
    assert first == questions(500, 3)
    assert len(set(first)) == 500
    assert len(set(first) & set(questions(500, 4))) < 100


def test_no_subject_is_one_that_the_held_out_prompts_ask_about() -> None:
    text = " ".join(held_out()).lower()
    assert {subject for subject in subjects() if subject.lower() in text} <= COMMON


def test_no_question_is_a_held_out_prompt() -> None:
    asked = {question.lower() for seed in range(10) for question in questions(2000, seed)}
    assert not asked & {prompt.lower() for prompt in held_out()}


def test_patterns_are_filled() -> None:
    for question in questions(3000, 0):
        assert not set("{}|\n") & set(question)
        assert "  " not in question


def test_more_than_there_are_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specops.training.questions._drawn", lambda draw: cycle(["one", "two", "three"]))
    assert questions(3, 0) == ["one", "two", "three"]
    with pytest.raises(ValueError, match="4 different questions can't be put together, only some 3"):
        questions(4, 0)
