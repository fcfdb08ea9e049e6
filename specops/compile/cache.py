"""Compiled code in a file, so that a fleet compiles once: save after one warm-up, load before every other.

    runner.warm_up()
    runner.save_cache("draft.cache")            # on one machine

    specops.compile.load_cache("draft.cache")   # on each machine of its kind, before warm_up()

The file holds what torch keeps on disk (traced graphs, generated code, autotuning results) for everything this process has
compiled, and the ops' Triton kernels; both are put where they are looked for. A CPU's C++ libraries, which torch does not
save, are compiled from the generated code anew. Captured graphs hold addresses and are never in it: captures are made anew
and take milliseconds. Code is found again under a key made of the step, its shapes, torch, Triton and the device, so a
file of another kind of machine does no harm and no good. Load only files you trust: they hold code.
"""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import torch

from specops.compile import triton_files
from specops.compile.whole_file import write_whole

_MAGIC = b"specops compile cache 2\n"


def save_cache(path: str | os.PathLike[str]) -> int:
    """Write everything this process has compiled to ``path``, which is replaced as a whole.

    Returns:
        Size of the file in bytes.

    Raises:
        RuntimeError: nothing was compiled in this process, or torch's caches are off.
        OSError: the folder is missing or not writable.
    """
    saved = torch.compiler.save_cache_artifacts()
    if saved is None or not saved[0]:
        raise RuntimeError(
            "there is nothing to save: call warm_up() first, in a mode that compiles, with torch's compile caches on"
        )
    path = Path(path)
    parts = {"": saved[0], **triton_files.collect()}
    sizes = {name: len(part) for name, part in parts.items()}
    header = json.dumps({"torch": torch.__version__, "device": _device(), "sizes": sizes}).encode() + b"\n"
    write_whole(path, (_MAGIC, header, *parts.values()))
    return path.stat().st_size


def load_cache(path: str | os.PathLike[str]) -> dict[str, int]:
    """Put the compiled code in ``path`` where torch finds it. Call it before ``warm_up()``.

    Returns:
        How many pieces of each kind there were; ``triton`` counts files.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no such file, is cut off, or was made with another torch or for another device; says which.
    """
    content = Path(path).read_bytes()
    if not content.startswith(_MAGIC):
        raise ValueError(f"{path} is no compile cache of specops; make one with save_cache()")
    line, _, rest = content[len(_MAGIC) :].partition(b"\n")
    try:
        made: dict[str, Any] = json.loads(line)
    except ValueError:
        raise ValueError(f"{path} is cut off or broken; save it again") from None
    here = {"torch": torch.__version__, "device": _device()}
    differing = [f"{name} {made.get(name)!r}, here {here[name]!r}" for name in here if made.get(name) != here[name]]
    if differing:
        raise ValueError(f"{path} was made with {'; '.join(differing)}: its code would never be used; save it again here")
    sizes: dict[str, int] = made.get("sizes", {})
    if "" not in sizes or sum(sizes.values()) != len(rest):
        raise ValueError(f"{path} is cut off or broken; save it again")
    ends = list(itertools.accumulate(sizes.values()))
    parts = {name: rest[end - size : end] for (name, size), end in zip(sizes.items(), ends, strict=True)}
    try:
        info = torch.compiler.load_cache_artifacts(parts.pop(""))
    except Exception as error:
        raise ValueError(f"{path} is cut off or broken ({error}); save it again") from error
    if info is None:
        raise ValueError(f"{path} is cut off or broken; save it again")
    return {**{kind: len(keys) for kind, keys in info.artifacts.items()}, "triton": triton_files.restore(parts)}


def _device() -> str:
    if not torch.cuda.is_available():
        return "cpu"
    major, minor = torch.cuda.get_device_capability()
    return f"{torch.cuda.get_device_name()} sm{major}{minor}"
