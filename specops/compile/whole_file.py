"""A file that is there as a whole or not at all, whoever reads it and however the writer ends."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path


def write_whole(path: Path, parts: Iterable[bytes]) -> None:
    """Write ``parts`` to ``path``, which is replaced if it exists; its folder must.

    Raises:
        OSError: the folder is missing or not writable, or the disk full; then ``path`` is as it was.
    """
    handle, draft = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.writelines(parts)
        os.replace(draft, path)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise
