"""The documentation is run: its Python blocks, its links, its examples, and the page made from docstrings.

A block whose fence says ``python gpu`` or ``python norun`` is left out on a machine without a GPU, or everywhere; a comment
in the block says why. The blocks of one page share a namespace and run in order, as a reader would type them.

    pytest tests/test_docs.py
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("0[0-9]_*.py"))
# Every stage of the training example runs in tests/training/test_train_example.py.
TRAINING = "05_train_eagle_head.py"
_BLOCK = re.compile(r"^```python(?: (\w+))?\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def _build_api() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_api", ROOT / "docs" / "build_api.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build_api = _build_api()
PAGES = build_api.pages()


def _blocks(page: Path) -> list[tuple[int, str, str]]:
    """Line, marker and code of every Python block of a page."""
    text = page.read_text()
    return [(text[: m.start(2)].count("\n"), m[1] or "", m[2]) for m in _BLOCK.finditer(text)]


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [page for page in PAGES if _blocks(page)], ids=_name)
def test_every_block_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    left_out = {"norun"} | (set() if torch.cuda.is_available() else {"gpu"})
    script = [f"# {page.name}"]
    for line, marker, code in _blocks(page):
        assert marker in ("", "gpu", "norun"), f"{_name(page)}:{line}: unknown marker {marker!r}"
        assert not marker or "#" in code, f"{_name(page)}:{line}: a block that is left out says why in a comment"
        compile(code, f"{_name(page)}:{line}", "exec")
        if marker not in left_out:
            script.append("\n" * max(0, line - "\n".join(script).count("\n") - 1) + code)
    # A process a page: a block may register backends or attention functions, which stay for the life of a process.
    file = tmp_path / f"page_{page.stem}.py"
    file.write_text("\n".join(script))
    _run([str(file)], tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_relative_links_point_to_files_and_headings(page: Path) -> None:
    assert build_api.broken_links(page) == []


def test_a_broken_link_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_api, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("# One\n[a](#one) [b](#two) [c](page.md) [d](gone.md) [e](https://example.org)\n")
    assert build_api.broken_links(page) == ["page.md: #two names no heading", "page.md: gone.md does not exist"]


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    missing = [
        page.name for page in (ROOT / "docs").glob("*.md") if page.name != "README.md" and f"({page.name})" not in index
    ]
    assert missing == []


def test_api_page_is_current_and_every_public_name_has_a_docstring() -> None:
    api = build_api.Api()
    assert api.warnings == []
    assert (ROOT / "docs" / "api.md").read_text() == api.text, "run `make docs`"


def test_commands_in_the_examples_name_files_that_exist() -> None:
    for example in EXAMPLES:
        for path in re.findall(r"examples/\w+\.py", example.read_text()):
            assert (ROOT / path).is_file(), f"{example.name} names {path}"


@pytest.mark.slow
@pytest.mark.parametrize("example", [e for e in EXAMPLES if e.name != TRAINING], ids=lambda e: e.name)
def test_example_runs(example: Path, tmp_path: Path) -> None:
    assert _run([str(example)], tmp_path).strip()


def _run(arguments: list[str], folder: Path) -> str:
    """Standard output of a Python process of one thread; its errors are this test's."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
