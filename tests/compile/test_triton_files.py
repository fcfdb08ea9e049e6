"""Triton kernels as files: a process with another cache finds what this one compiled, and only files of a cache are written.

Run alone: OMP_NUM_THREADS=1 pytest tests/compile/test_triton_files.py
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from specops.compile import triton_files

pytest.importorskip("triton.knobs", reason="Triton keeps the kernels")
ROOT = Path(__file__).parents[2]
PROGRAM = """
import json, pickle, sys
sys.path[:0] = [{benchmarks!r}, {root!r}]
from compile_triton import MhaCall, StoreCall, compiled
from specops.compile import triton_files
from triton import knobs

counts = {{"compiled": 0, "found": 0}}
def told(*, cache_hit, **about):
    counts["found" if cache_hit else "compiled"] += 1
knobs.compilation.listener = told
path, mode = sys.argv[1:]
restored = triton_files.restore(pickle.load(open(path, "rb"))) if mode == "load" else None
for call in (MhaCall(), StoreCall()):
    compiled(call)
if mode == "save":
    pickle.dump(triton_files.collect(), open(path, "wb"))
print(json.dumps({{**counts, "restored": restored}}))
"""


def run(folder: Path, path: Path, mode: str) -> dict[str, int]:
    """In a process of its own, since the interpreter may be on in this one."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder)
    program = PROGRAM.format(benchmarks=str(ROOT / "benchmarks"), root=str(ROOT))
    command = [sys.executable, "-c", program, str(path), mode]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_process_that_loads_the_files_compiles_no_kernel(tmp_path: Path) -> None:
    path = tmp_path / "files"
    first = run(tmp_path / "a", path, "save")
    assert (first["compiled"], first["found"]) == (3, 0), "attention, its merge, and the store"
    files = pickle.loads(path.read_bytes())
    assert sum(name.endswith(".cubin") for name in files) == 3
    # The list of a kernel's files holds paths, which lead nowhere now.
    shutil.rmtree(tmp_path / "a")
    second = run(tmp_path / "b", path, "load")
    assert (second["compiled"], second["found"]) == (0, 3)
    assert second["restored"] == len(files)


def test_files_are_kept_as_they_are_and_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    group = json.dumps({"child_paths": {"k.cubin": "/elsewhere/KEY/k.cubin"}}).encode()
    files = {"KEY/k.cubin": b"code", "KEY/__grp__k.json": group}
    assert triton_files.restore(files) == 2
    assert triton_files.restore({"KEY/k.cubin": b"other"}) == 1
    assert (tmp_path / "KEY/k.cubin").read_bytes() == b"code"
    listed = json.loads((tmp_path / "KEY/__grp__k.json").read_text())
    assert listed == {"child_paths": {"k.cubin": str(tmp_path / "KEY" / "k.cubin")}}
    assert sorted(path.name for path in (tmp_path / "KEY").iterdir()) == ["__grp__k.json", "k.cubin"]


@pytest.mark.parametrize("name", ["../other", "/etc/passwd", "a/../b", "a/b/c", "a"])
def test_a_name_outside_of_the_cache_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(ValueError, match="is no file of a Triton cache"):
        triton_files.restore({"KEY/k.cubin": b"code", name: b"x"})
    assert not (tmp_path / "cache").exists()
