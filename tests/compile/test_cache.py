"""Compiled code in a file: another process that loads it generates none; what can't be loaded is said.

Run alone: OMP_NUM_THREADS=1 pytest tests/compile/test_cache.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from specops.compile import load_cache, save_cache

PROGRAM = """
import json, sys
import torch
from torch._dynamo.utils import counters
from specops.batch import Field, FieldTable
from specops.compile import StepRunner, load_cache

class Step(torch.nn.Module):
    def forward(self, x):
        return (torch.softmax(x * 2 + 1, -1).sum(-1),)

path, mode = sys.argv[1:]
loaded = load_cache(path) if mode == "load" else None
table = FieldTable((Field("x", "request", (8,), torch.float32),), 1)
runner = StepRunner(Step(), table, device="cpu", max_requests=4, mode="direct")
size = None
if mode == "save":
    size = runner.save_cache(path)
runner.warm_up()
out = runner({"x": torch.ones(3, 8)})[0]
print(json.dumps({"out": out.tolist(), "size": size, "loaded": loaded,
                  "hits": counters["inductor"]["fxgraph_cache_hit"], "misses": counters["inductor"]["fxgraph_cache_miss"]}))
"""


def run(folder: Path, path: Path, mode: str) -> dict[str, object]:
    variables = {"TORCHINDUCTOR_CACHE_DIR": str(folder), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(path), mode]
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def test_a_process_that_loads_the_file_compiles_nothing(tmp_path: Path) -> None:
    path = tmp_path / "step.cache"
    first = run(tmp_path / "a", path, "save")
    assert first["misses"] == 1, "one graph for any batch"
    assert first["size"] == path.stat().st_size
    second = run(tmp_path / "b", path, "load")
    assert second["out"] == first["out"]
    assert (second["hits"], second["misses"]) == (1, 0)
    assert second["loaded"]["inductor"] == 1
    content = path.read_bytes()
    for other in (content[:-1], content + b"x"):
        path.write_bytes(other)
        with pytest.raises(ValueError, match="cut off or broken"):
            load_cache(path)


def test_what_is_no_cache_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_cache(tmp_path / "none")
    path = tmp_path / "other"
    path.write_bytes(b"something else")
    with pytest.raises(ValueError, match="other is no compile cache of specops; make one with save_cache"):
        load_cache(path)
    path.write_bytes(b"specops compile cache 1\nof an older release")
    with pytest.raises(ValueError, match="other is no compile cache of specops; make one with save_cache"):
        load_cache(path)
    path.write_bytes(b'specops compile cache 2\n{"torch": "1.0", "device": "cpu"}\nxyz')
    with pytest.raises(ValueError, match=r"was made with torch '1.0', here '.*save it again here"):
        load_cache(path)
    import torch

    device = "cpu"
    if torch.cuda.is_available():
        pytest.skip("the device's name is not a constant here; the version is checked the same way above")
    made = {"torch": torch.__version__, "device": device}
    for sizes in ({}, {"sizes": {"": 4}}, {"sizes": {"": 3}}, {"sizes": {"a/b": 3}}):
        path.write_bytes(b"specops compile cache 2\n" + json.dumps({**made, **sizes}).encode() + b"\nxyz")
        with pytest.raises(ValueError, match="cut off or broken"):
            load_cache(path)


def test_nothing_compiled_is_nothing_to_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: None)
    with pytest.raises(RuntimeError, match="there is nothing to save: call warm_up"):
        save_cache(tmp_path / "file")
    assert list(tmp_path.iterdir()) == []
