"""Every command as a user runs it, on a tiny model: answers against transformers', interrupts, resuming, and bad input.

Run alone: pytest tests/test_cli.py
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from specops.cli import _parser, main
from specops.cli.jsonl import AnswerFile, BadLine, parse_line
from specops.spec import Engine
from tests.tiny_models import TinyModels, save_tiny_models

PROMPTS = ["w1 w2 w3", "w9", "w7 w7 w7 w7 w7", "w4 w5", "w8 w8", "w20 w21 w22"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    return save_tiny_models(tmp_path_factory.mktemp("tiny"))


def write_prompts(path: Path, lines: list[Any]) -> str:
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(text) + "\n", encoding="utf-8")
    return str(path)


def answers_in(path: Path) -> dict[Any, dict[str, Any]]:
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert len({record["id"] for record in records}) == len(records), "an id was answered twice"
    return {record["id"]: record for record in records}


def failure(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()[-1]


# generate


@pytest.mark.parametrize("plain", [[], ["--plain"]])
def test_one_prompt_prints_the_answer_of_transformers(
    tiny: TinyModels, capsys: pytest.CaptureFixture[str], plain: list[str]
) -> None:
    assert main(["generate", *tiny.arguments, *plain, "--prompt", PROMPTS[0], "--max-new-tokens", "9"]) == 0
    assert capsys.readouterr().out == tiny.answer(PROMPTS[0], 9) + "\n"


def test_several_prompts_as_json_with_logprobs(tiny: TinyModels, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = [part for prompt in PROMPTS[:3] for part in ("--prompt", prompt)]
    assert main(["generate", *tiny.arguments, *prompts, "--max-new-tokens", "7", "--json", "--logprobs"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [answer["text"] for answer in result["answers"]] == [tiny.answer(prompt, 7) for prompt in PROMPTS[:3]]
    assert [answer["prompt"] for answer in result["answers"]] == PROMPTS[:3]
    assert all(len(answer["logprobs"]) == 7 and max(answer["logprobs"]) < 0 for answer in result["answers"])


def test_a_stop_string_cuts_the_answer(tiny: TinyModels, capsys: pytest.CaptureFixture[str]) -> None:
    words = tiny.answer(PROMPTS[2], 12).split()
    main(["generate", *tiny.arguments, "--prompt", PROMPTS[2], "--max-new-tokens", "12", "--stop", words[4]])
    first = next(place for place, word in enumerate(words) if words[4] in word)
    assert capsys.readouterr().out.split() == words[:first]


def test_a_file_of_prompts_is_answered_by_id(tiny: TinyModels, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = tiny.tokenizer(PROMPTS[2])["input_ids"]
    lines = [{"id": "a", "prompt": PROMPTS[0]}, "", {"prompt": PROMPTS[1], "max_new_tokens": 3}, {"id": 7, "tokens": ids}]
    out = tmp_path / "out.jsonl"
    file = write_prompts(tmp_path / "in.jsonl", lines)
    assert main(["generate", *tiny.arguments, "--file", file, "--out", str(out), "--max-new-tokens", "8", "--json"]) == 0
    found = answers_in(out)
    assert {key: record["text"] for key, record in found.items()} == {
        "a": tiny.answer(PROMPTS[0], 8),
        3: tiny.answer(PROMPTS[1], 3),
        7: tiny.answer(PROMPTS[2], 8),
    }
    assert found["a"]["finish_reason"] == "length"
    captured = capsys.readouterr()
    summary = json.loads(captured.out)
    assert (summary["answered"], summary["skipped"], summary["refused"], summary["tokens"]) == (3, 0, [], 19)
    assert "3 of 3 lines: 3 answered" in captured.err


def test_without_out_the_answers_go_to_standard_output(
    tiny: TinyModels, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_prompts(tmp_path / "in.jsonl", [{"prompt": PROMPTS[0]}])
    assert main(["generate", *tiny.arguments, "--file", file, "--max-new-tokens", "5"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == tiny.answer(PROMPTS[0], 5)


def test_bad_lines_are_named_and_the_rest_goes_on(
    tiny: TinyModels, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        {"id": 1, "prompt": PROMPTS[0]},
        '{"id": 2, "prompt": "w1"',
        {"id": 3, "prompt": "w1 " * 200},
        {"id": 1, "prompt": "w2"},
        {"id": 5, "prompt": "w5", "temperature": -1},
        {"id": 6, "prompt": PROMPTS[1]},
    ]
    out = tmp_path / "out.jsonl"
    file = write_prompts(tmp_path / "in.jsonl", lines)
    assert main(["generate", *tiny.arguments, "--file", file, "--out", str(out), "--max-new-tokens", "4", "--json"]) == 1
    assert {key: record["text"] for key, record in answers_in(out).items()} == {
        1: tiny.answer(PROMPTS[0], 4),
        6: tiny.answer(PROMPTS[1], 4),
    }
    captured = capsys.readouterr()
    reasons = {entry["line"]: entry["reason"] for entry in json.loads(captured.out)["refused"]}
    assert list(reasons) == [2, 3, 4, 5]
    assert reasons[2].startswith("not JSON: Expecting ',' delimiter")
    assert reasons[3].startswith("the prompt has 200 tokens and the context 128; shorten it")
    assert reasons[4] == "id 1 stands in an earlier line, too"
    assert reasons[5] == "temperature must be a number >= 0, got -1"
    for number, reason in reasons.items():
        assert f"specops: {file} line {number}: {reason}\n" in captured.err


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"\xff", "not UTF-8: invalid start byte at byte 0"),
        (b"[1]", 'a JSON object is needed, such as {"prompt": "..."}; this is a list'),
        (b"{}", "one of prompt, messages and tokens is needed; this has none"),
        (b'{"prompt": "a", "tokens": [1]}', "one of prompt, messages and tokens is needed; this has prompt and tokens"),
        (b'{"prompt": ""}', "prompt must be text, and not empty"),
        (b'{"tokens": [1, true]}', "tokens must be a list of integers, and not empty"),
        (b'{"messages": "hi"}', "messages must be a list of objects, and not empty"),
        (b'{"prompt": "a", "id": 1.5}', "id must be text or an integer; this is a number"),
        (b'{"prompt": "a", "top_k": "4"}', "top_k must be an integer; this is text"),
        (b'{"prompt": "a", "stop": [1]}', "stop must be text or a list of it; this is a list"),
        (b"[" * 100_000, "not JSON: "),
    ],
)
def test_what_is_wrong_with_a_line_is_said(raw: bytes, message: str) -> None:
    with pytest.raises(BadLine) as error:
        parse_line(1, raw)
    assert str(error.value).startswith(message)


def interrupt_after(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Send SIGINT to this process in the middle of a later step."""
    step, count = Engine.step, 0

    def interrupted(engine: Engine, on_tokens: Any = None) -> Any:
        nonlocal count
        count += 1
        if count == steps:
            signal.raise_signal(signal.SIGINT)
        return step(engine, on_tokens)

    monkeypatch.setattr(Engine, "step", interrupted)


@pytest.mark.parametrize("sampled", [[], ["--temperature", "0.9", "--seed", "11"]], ids=["greedy", "sampled"])
def test_an_interrupted_run_goes_on_where_it_was(
    tiny: TinyModels,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    sampled: list[str],
) -> None:
    file = write_prompts(
        tmp_path / "in.jsonl", [{"prompt": prompt, "max_new_tokens": 4 + 3 * i} for i, prompt in enumerate(PROMPTS)]
    )
    common = ["generate", *tiny.arguments, *sampled, "--max-requests", "2", "--file", file, "--out"]
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    assert main([*common, str(whole)]) == 0
    # Jobs in the background of a shell begin with interrupts ignored.
    asked_before = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        interrupt_after(patch, 9)
        assert main([*common, str(parts)]) == 130
    begun = answers_in(parts)
    assert 0 < len(begun) < len(PROMPTS)
    assert f"the same command goes on from {parts}" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is asked_before
    # As if the power had gone in the middle of a line.
    before = parts.read_bytes()
    parts.write_bytes(before + b'{"id": 6, "text": "w')
    assert main([*common, str(parts), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["skipped"] == len(begun)
    assert parts.read_bytes().startswith(before), "answers that were there stay as they are"
    tokens = {key: record["tokens"] for key, record in answers_in(parts).items()}
    assert tokens == {key: record["tokens"] for key, record in answers_in(whole).items()}
    assert len(tokens) == len(PROMPTS)


def test_a_second_interrupt_never_tears_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = AnswerFile(tmp_path / "out.jsonl")
    write, seen = os.write, []

    def slow_disk(descriptor: int, data: bytes) -> int:
        seen.append(out.writing)
        return write(descriptor, data[:7])

    monkeypatch.setattr(os, "write", slow_disk)
    out.append({"id": 1, "text": "some longer text"})
    assert len(seen) > 3
    assert all(seen), "signals are told that a line is being written"
    assert not out.writing
    out.close()
    assert answers_in(tmp_path / "out.jsonl")[1]["text"] == "some longer text"


def test_an_answer_file_is_repaired_and_foreign_files_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(b'{"id": 1}\n\n{"id": "1"}')
    out = AnswerFile(path)
    assert out.done == {"1", '"1"'}
    with pytest.raises(ValueError, match="another run is writing to"):
        AnswerFile(path)
    out.append({"id": "é"})
    out.close()
    assert path.read_text(encoding="utf-8") == '{"id": 1}\n\n{"id": "1"}\n{"id": "é"}\n'
    notes = tmp_path / "notes.txt"
    notes.write_bytes(b"dear diary\nmore\n")
    with pytest.raises(ValueError, match=r"notes.txt line 1 is no answer of specops; give another --out"):
        AnswerFile(notes)
    assert notes.read_bytes() == b"dear diary\nmore\n"


# bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--file", "/nowhere/in.jsonl", "--out", "x"], "specops: there is no file /nowhere/in.jsonl"),
        (["--model", "/nowhere/model", "--prompt", "a"], "specops: there is no /nowhere/model; give a model directory"),
        (["--prompt", "a", "--out", "x"], "specops: --out goes with --file"),
        (["--prompt", "a", "--file", "x"], "specops: give --prompt or --file, not both"),
        (["--file", __file__, "--json"], "specops: --json prints a summary, and without --out"),
        (["--prompt", "a", "--top-p", "0"], "specops: top_p must be above 0 and at most 1, got 0.0"),
        (["--prompt", "w1 " * 130], "specops: the prompt has 130 tokens and the context 128; shorten it"),
        (["--prompt", "w1", "--max-context", "999"], "specops: max_context 999 is beyond the target's 128 positions"),
        (["--prompt", "w1", "--num-steps", "0"], "specops: num_steps and topk must be >= 1"),
        (["--prompt", "w1", "--dtype", "int8"], "specops: dtype must be a torch float dtype"),
    ],
)
def test_bad_arguments_end_in_one_line(
    tiny: TinyModels, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert failure(capsys, ["generate", *tiny.arguments, *arguments]).startswith(message)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.\nmore"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:1] . DefaultCPUAllocator: can't allocate memory: you tried 9 bytes"),
        MemoryError(),
    ],
    ids=["cuda", "cpu", "python"],
)
def test_out_of_memory_says_what_to_lower(
    tiny: TinyModels, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def full(*args: Any, **options: Any) -> Any:
        raise error

    monkeypatch.setattr(Engine, "__init__", full)
    line = failure(capsys, ["generate", *tiny.arguments, "--prompt", "w1"])
    assert line.startswith(
        "specops: out of memory. The page pool grows with --max-requests times --max-context: lower those"
    )
    assert (str(error).splitlines() or ["MemoryError"])[0] in line


def test_an_error_that_is_no_users_fault_keeps_its_traceback(tiny: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **options: Any) -> Any:
        raise RuntimeError("a bug")

    monkeypatch.setattr(Engine, "step", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        main(["generate", *tiny.arguments, "--prompt", "w1"])


# the other commands


def test_bench_measures_every_batch_and_draws(tiny: TinyModels, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chart = tmp_path / "bench.svg"
    common = [
        "bench",
        *tiny.arguments,
        "--max-new-tokens",
        "6",
        "--repeats",
        "1",
        "--batch-sizes",
        "2,1",
        "--prompt",
        "w1 w2",
    ]
    assert main([*common, "--json", "--plot", str(chart)]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert [row["batch"] for row in figures["rows"]] == [1, 2]
    for row in figures["rows"]:
        assert row["identical_answers"] == row["batch"]
        assert row["speedup"] == pytest.approx(row["eagle_tokens_per_s"] / row["plain_tokens_per_s"], rel=0.01)
    assert set(figures["seconds_by_phase"]) == {"prefill", "draft", "verify", "draft_extend", "read_back"}
    assert chart.read_text(encoding="utf-8").lstrip().startswith("<?xml")
    assert main(common) == 0
    assert "accepted per round" in capsys.readouterr().out


def test_demo_compares_and_draws(tiny: TinyModels, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chart = tmp_path / "demo.png"
    common = ["demo", *tiny.arguments, "--prompt", PROMPTS[0], "--prompt", PROMPTS[1], "--max-new-tokens", "8"]
    assert main([*common, "--json", "--plot", str(chart)]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["identical_to_plain"] is True
    assert figures["texts"] == [tiny.answer(prompt, 8) for prompt in PROMPTS[:2]]
    assert sum(figures["accept_lens"].values()) == figures["rounds"]
    assert chart.read_bytes().startswith(b"\x89PNG")
    assert main(common) == 0
    out = capsys.readouterr().out
    assert out.startswith(tiny.answer(PROMPTS[0], 8))
    assert "compared with plain decoding  identical" in out


@pytest.mark.parametrize("ending", ["html", "svg"])
def test_trace_draws_a_round(tiny: TinyModels, tmp_path: Path, capsys: pytest.CaptureFixture[str], ending: str) -> None:
    out = tmp_path / f"round.{ending}"
    assert main(["trace", *tiny.arguments, "--prompt", PROMPTS[0], "--round", "2", "--out", str(out), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["round"], len(record["nodes"])) == (2, 16)
    assert "<svg" in out.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "--plot", "x.bmp"], "specops: a chart's file ends in .png, .svg, .pdf; got 'x.bmp'"),
        (["demo", "--plot", "/nowhere/x.png"], "specops: there is no folder /nowhere for the chart"),
        (["trace", "--out", "x.txt"], "specops: --out ends in .html or .svg; got 'x.txt'"),
        (["trace", "--out", "/nowhere/x.svg"], "specops: there is no folder /nowhere for --out"),
    ],
)
def test_files_that_cannot_be_written_are_told_of_before_the_work(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert failure(capsys, arguments) == message


def test_check_hands_its_options_to_the_kit(monkeypatch: pytest.MonkeyPatch) -> None:
    kit, got = types.ModuleType("specops.testing.__main__"), []
    kit.main = lambda arguments: got.append(arguments) or 1  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "specops.testing.__main__", kit)
    assert main(["check", "--backend", "triton", "--family", "mha", "--json"]) == 1
    assert main(["check", "--device", "cpu"]) == 1
    assert got[0] == ["--json", "--backend", "triton", "--family", "mha"]
    assert got[1][:2] == ["--device", "cpu"]
    assert {"reference", "cpu"} <= set(got[1][3::2])
    assert set(got[1][2::2]) == {"--backend"}


def test_check_runs_the_kit(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--backend", "reference", "--family", "mla", "--device", "cpu", "--only", "shared-pages", "--quiet"]
    assert main(["check", *arguments, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["failed"], result["ok"]) == (0, True)
    assert result["checks"] > 0


def test_unknown_options_of_other_commands_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["backends", "--colour"])
    assert end.value.code == 2
    assert "unrecognized arguments: --colour" in capsys.readouterr().err


def test_backends_lists_what_runs_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["backends", "--device", "cpu", "--json"]) == 0
    found = {(entry["name"], entry["family"]): entry["available"] for entry in json.loads(capsys.readouterr().out)}
    assert found["cpu", "mha"] is True
    assert found["trtllm", "mha"] is False


@pytest.mark.parametrize("command", ["demo", "generate", "bench", "trace", "check", "inspect", "backends"])
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    assert "--json" in capsys.readouterr().out


def test_the_guide_names_every_option_of_a_run() -> None:
    guide = (Path(__file__).parent.parent / "docs" / "cli.md").read_text(encoding="utf-8")
    named = set(re.findall(r"--[a-z][a-z-]+", guide))
    parser = _parser()
    commands = next(action.choices for action in parser._actions if isinstance(action.choices, dict))
    known = {name: set(command._option_string_actions) for name, command in commands.items()}
    for command in ("generate", "bench", "demo", "trace"):
        assert {option for option in known[command] if option.startswith("--")} - {"--help"} <= named
    assert named - set.union(*known.values()) == {"--family"}, "an option of the kit's own"
    assert set(re.findall(r"^\| `specops (\w+)`", guide, re.MULTILINE)) == set(commands)
