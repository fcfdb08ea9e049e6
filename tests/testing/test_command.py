"""The kit as a command and as a pytest plugin, each in a process of its own.

OMP_NUM_THREADS=1 pytest tests/testing/test_command.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from specops.testing.__main__ import main
from tests.testing.backend_files import KILLED, RIGHT, WRONG

FEW = ("--only", "values,leak", "--quiet")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "specops.testing", *arguments]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.parametrize(("text", "code"), [(RIGHT, 0), (WRONG, 1), (KILLED, 1)], ids=["right", "wrong", "killed"])
def test_a_backend_file_is_imported_and_judged(tmp_path: Path, text: str, code: int) -> None:
    (tmp_path / "mine.py").write_text(text)
    done = run("--import", str(tmp_path / "mine.py"), "--backend", "filed", "--json", *FEW)
    assert done.returncode == code, done.stderr
    result = json.loads(done.stdout)
    assert result["ok"] == (code == 0)
    assert (result["failed"] == 0) == (code == 0)
    assert result["checks"] >= 1
    findings = result["subjects"][0]["findings"]
    if text is KILLED:
        assert "the process died of SIGSEGV" in findings[0]["problem"]
    elif text is WRONG:
        assert "replay('filed', \"mha\"" in findings[0]["snippet"]


def test_progress_goes_to_standard_error_and_the_report_to_standard_output() -> None:
    done = run("--backend", "reference", "--family", "mha", "--only", "values")
    assert done.returncode == 0
    assert done.stdout.startswith("reference_mha on cpu: ")
    assert "reference_mha: values (1/" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to check: pass --backend NAME or --runner MODE"),
        (["--backend", "nobody"], "no backend is called 'nobody'; there are reference, cpu"),
        (["--backend", "tokenspeed", "--family", "mha"], "no mha backend is called 'tokenspeed'"),
        (["--backend", "cpu", "--only", "speed"], "unknown checks ['speed']"),
        (["--import", "nowhere.py", "--backend", "cpu"], "there is no file nowhere.py"),
        (["--backend", "trtllm", "--family", "mha"], "the backend runs on cuda, and none of them is here"),
    ],
)
def test_bad_input_is_told_in_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("what is not here differs on a machine with a GPU")
    assert main([*arguments, "--quiet"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert len(err.splitlines()) == 1


def test_a_runner_is_checked_by_its_mode() -> None:
    done = run("--runner", "eager", "--json", "--quiet")
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["checks"] == 19


PLUGIN_TESTS = """
import pytest

def test_right(conforms):
    assert conforms("reference", only=("values",)).checks["values"] > 60

def test_wrong(conforms):
    conforms(lambda q, *args, **options: q * 0, only=("values",))

@pytest.mark.conformance(runner="eager", only=("idle", "widest"))
def test_marked(conformance_report):
    assert conformance_report.checks == {"idle": 1, "widest": 1}

def test_unmarked(conformance_report):
    pass

def test_nothing(conforms):
    conforms()
"""


def test_the_plugin_fails_a_test_with_the_report(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(PLUGIN_TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "specops.testing.plugin", "--strict-markers", "-q", str(tmp_path)]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert "2 failed, 2 passed, 1 error" in done.stdout, done.stdout
    assert "smallest input that fails:" in done.stdout
    assert 'replay(subject, "mha", "values"' in done.stdout
    assert "conformance_report needs @pytest.mark.conformance" in done.stdout
    assert "name one thing to check" in done.stdout
