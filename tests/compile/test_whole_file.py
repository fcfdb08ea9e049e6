"""A file is replaced as a whole, or stays as it was.

Run alone: pytest tests/compile/test_whole_file.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from specops.compile.whole_file import write_whole


def test_what_is_cut_off_leaves_the_file_as_it_was_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_whole(path, [b"a", b"b"])
    assert path.read_bytes() == b"ab"

    def parts() -> Iterator[bytes]:
        yield b"c"
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        write_whole(path, parts())
    assert path.read_bytes() == b"ab"
    assert list(tmp_path.iterdir()) == [path]
    write_whole(path, [b"d"])
    assert path.read_bytes() == b"d"
