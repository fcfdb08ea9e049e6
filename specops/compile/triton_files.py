"""The Triton kernels that a process has compiled or found, as files: what torch's own cache artifacts leave out.

Torch saves the kernels that it generates. Those behind ops stand in Triton's cache on disk, a folder a kernel, named by a
hash of its source, its arguments' types, Triton and the device; beside them the small libraries that launch them.
:func:`collect` reads those of this process and :func:`restore` puts them where Triton looks for them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path, PurePosixPath
from typing import Any

from specops.compile.whole_file import write_whole

# Triton's list of a kernel's files, which holds their whole paths.
_GROUP = "__grp__"


def collect() -> dict[str, bytes]:
    """Contents by ``folder/file`` below Triton's cache; empty where Triton is not installed or was not used."""
    if "triton.runtime.jit" not in sys.modules:
        return {}
    root = _root()
    folders = {Path(path) for path in map(_folder, _kernels())} | {path.parent for path in _libraries(root)}
    files = (path for folder in sorted(folders) if folder.parent == root for path in sorted(folder.iterdir()))
    return {f"{path.parent.name}/{path.name}": path.read_bytes() for path in files if path.is_file() and path.name != "lock"}


def restore(files: dict[str, bytes]) -> int:
    """Write what is not there yet.

    Args:
        files: as :func:`collect` returns them.

    Returns:
        How many files there were; 0 where Triton is not installed.

    Raises:
        ValueError: a name that is none of a file in a folder.
    """
    for name in files:
        parts = PurePosixPath(name).parts
        if len(parts) != 2 or parts[0] == "/" or ".." in parts:
            raise ValueError(f"{name!r} is no file of a Triton cache")
    if not files:
        return 0
    try:
        root = _root()
    except ImportError:
        return 0
    for name, content in files.items():
        path = root / name
        if path.exists():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, [_moved(content, path.parent) if path.name.startswith(_GROUP) else content])
    return len(files)


def _root() -> Path:
    from triton import knobs

    return Path(knobs.cache.dir)


def _kernels() -> list[str]:
    """Hashes of the kernels that this process has run, of any module."""
    from triton.runtime.jit import JITFunction

    hashes: set[str] = set()
    for module in list(sys.modules.values()):
        for value in list(getattr(module, "__dict__", {}).values()):
            # By its type: asking a proxy for its class may run anything.
            if issubclass(type(value), JITFunction):
                hashes.update(_hashes(value))
    return sorted(hashes)


def _hashes(function: Any) -> set[str]:
    # A tuple a device; its first part holds the compiled kernels by their arguments' types.
    parts = [part[0] for part in function.device_caches.values() if part and isinstance(part[0], dict)]
    return {kernel.hash for part in parts for kernel in part.values() if isinstance(getattr(kernel, "hash", None), str)}


def _folder(kernel_hash: str) -> str:
    from triton.runtime.cache import get_cache_manager

    return str(getattr(get_cache_manager(kernel_hash), "cache_dir", ""))


def _libraries(root: Path) -> list[Path]:
    """Libraries in Triton's cache that this process has loaded."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    paths = {Path(line.split(maxsplit=5)[5]) for line in lines if line.count(" ") >= 5 and ".so" in line}
    return sorted(path for path in paths if path.parent.parent == root and path.exists())


def _moved(group: bytes, folder: Path) -> bytes:
    """Triton's list of a kernel's files, with the paths that they have in ``folder``."""
    listed = json.loads(group)
    return json.dumps({**listed, "child_paths": {name: str(folder / name) for name in listed["child_paths"]}}).encode()
