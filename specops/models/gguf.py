"""Reading GGUF files: metadata, and tensors dequantised to float32.

Header and common block formats are read here, which takes a second where the gguf package takes five; other formats go
through that package. Values equal its own. Layouts are those of the GGUF specification (ggml, ``docs/gguf.md``).
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
# Arrays longer than this are vocabulary, which the tokenizer's reader takes from the file itself.
_MAX_ARRAY = 1024


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a file: ``shape`` outermost first, ``kind`` its ggml type, ``offset`` from the file's start."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


class GGUFFile:
    """A memory-mapped GGUF file.

    Args:
        path: the file.

    Attributes:
        metadata: key-value pairs; arrays of more than 1024 entries are left out.
        tensors: what the file holds, by name.

    Raises:
        FileNotFoundError, ValueError: no such file; not GGUF; a version other than 2 and 3; cut off.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise FileNotFoundError(f"there is no file {path}; give the path of a GGUF file")
        self.size = path.stat().st_size
        if self.size < 24:
            raise self._cut_off("its header")
        with path.open("rb") as file:
            # A private, writable mapping: torch wants writable memory, the file stays as it is.
            self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        if self._memory[:4] != b"GGUF":
            raise ValueError(f"{path} is not a GGUF file: it starts with {bytes(self._memory[:4])!r}, not b'GGUF'")
        self._at = 4
        self.metadata: dict[str, Any] = {}
        try:
            self._read_header()
        except (struct.error, OverflowError):
            raise self._cut_off("its header") from None
        for info in self.tensors.values():
            if info.offset + _num_bytes(info) > self.size:
                raise self._cut_off(f"tensor {info.name}, which ends at byte {info.offset + _num_bytes(info)}")

    def load(self) -> Iterator[tuple[str, Tensor]]:
        """Name and float32 values of every tensor, in file order."""
        for name, info in self.tensors.items():
            yield name, self.tensor(info)

    def tensor(self, info: TensorInfo) -> Tensor:
        """Values of one tensor, ``info.shape`` float32."""
        raw = torch.frombuffer(self._memory, dtype=torch.uint8, count=_num_bytes(info), offset=info.offset)
        known = _FORMATS.get(info.kind)
        if known is not None:
            _, block_bytes, dequantise = known
            return dequantise(raw.view(-1, block_bytes)).reshape(info.shape)
        gguf = _gguf_package(info)
        values = gguf.dequantize(raw.view(*info.shape[:-1], -1).numpy(), gguf.GGMLQuantizationType(info.kind))
        return torch.from_numpy(values).reshape(info.shape)

    def _read_header(self) -> None:
        version, num_tensors, num_pairs = self._unpack("IQQ")
        if version not in (2, 3):
            raise ValueError(f"{self.path} is GGUF version {version}; versions 2 and 3 can be read")
        for _ in range(num_pairs):
            key = self._string()
            value = self._value(self._unpack("I")[0])
            if value is not None:
                self.metadata[key] = value
        infos = []
        for _ in range(num_tensors):
            name, (num_dims,) = self._string(), self._unpack("I")
            if num_dims > 8:
                raise ValueError(
                    f"{self.path} is damaged: tensor {name} has {num_dims} dimensions; copy or download it again"
                )
            dims = self._unpack(f"{num_dims}Q")
            kind, offset = self._unpack("IQ")
            infos.append(TensorInfo(name, tuple(reversed(dims)), kind, offset))
        alignment = self.metadata.get("general.alignment") or 32
        base = -(-self._at // alignment) * alignment
        self.tensors = {i.name: TensorInfo(i.name, i.shape, i.kind, base + i.offset) for i in infos}

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind in _SCALARS:
            return self._unpack(_SCALARS[kind])[0]
        item_kind, count = self._unpack("IQ")
        if kind != _ARRAY or item_kind not in (*_SCALARS, _STRING):
            raise ValueError(f"{self.path} is damaged: it holds a value of unknown type; copy or download it again")
        if count <= _MAX_ARRAY:
            return [self._value(item_kind) for _ in range(count)]
        if item_kind in _SCALARS:
            self._at += count * struct.calcsize("<" + _SCALARS[item_kind])
        else:
            for _ in range(count):
                (length,) = self._unpack("Q")
                self._at += length
        return None

    def _string(self) -> str:
        (length,) = self._unpack("Q")
        if self._at + length > self.size:
            raise struct.error
        self._at += length
        return bytes(self._memory[self._at - length : self._at]).decode(errors="replace")

    def _unpack(self, fields: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + fields, self._memory, self._at)
        self._at += struct.calcsize("<" + fields)
        return values

    def _cut_off(self, part: str) -> ValueError:
        return ValueError(f"{self.path} is cut off: its {self.size} bytes end before {part}; copy or download it again")


def _halves(blocks: Tensor) -> Tensor:
    """``[n, 2]`` bytes as ``[n, 1]`` float16 widened to float32."""
    return blocks.contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """``[n, 16]`` bytes as ``[n, 32]`` float32: the low halves, then the high ones."""
    return torch.cat((packed & 15, packed >> 4), dim=1).float()


def _plain(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    # clone(): the mapping's memory must not outlive this call inside a parameter.
    return lambda raw: raw.reshape(-1).view(dtype).to(torch.float32, copy=True)


# ggml type: values a block, bytes a block, blocks [n, bytes] -> values [n, values].
_FORMATS: dict[int, tuple[int, int, Callable[[Tensor], Tensor]]] = {
    0: (1, 4, _plain(torch.float32)),
    1: (1, 2, _plain(torch.float16)),
    2: (32, 18, lambda b: (_nibbles(b[:, 2:]) - 8) * _halves(b[:, :2])),
    3: (32, 20, lambda b: _nibbles(b[:, 4:]) * _halves(b[:, :2]) + _halves(b[:, 2:4])),
    8: (32, 34, lambda b: b[:, 2:].view(torch.int8).float() * _halves(b[:, :2])),
    30: (1, 2, _plain(torch.bfloat16)),
}


def _num_bytes(info: TensorInfo) -> int:
    count = 1
    for size in info.shape:
        count *= size
    known = _FORMATS.get(info.kind)
    if known is not None:
        return count // known[0] * known[1]
    gguf = _gguf_package(info)
    sizes = gguf.GGML_QUANT_SIZES.get(info.kind)
    if sizes is None:
        raise ValueError(f"tensor {info.name} has ggml type {info.kind}, which the installed gguf package does not know")
    return int(count // sizes[0] * sizes[1])


def _gguf_package(info: TensorInfo) -> Any:
    try:
        import gguf
    except ImportError:
        raise ImportError(
            f"tensor {info.name} has ggml type {info.kind}, which needs the gguf package: pip install 'specops[hf]'"
        ) from None
    return gguf
