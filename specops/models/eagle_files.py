"""A draft head's folder as config fields and tensors: safetensors, or the ``.bin`` files of older heads.

``.bin`` files are pickles. They are read with ``weights_only``, which builds tensors and containers and runs nothing else;
a file that asks for more is refused. With ``shapes_only`` no weight's values are read, save those of the vocabulary maps.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specops.models.checkpoint import open_directory, read_json, weight_files

BIN_INDEX = "pytorch_model.bin.index.json"
MAPS = ("d2t", "t2d")


def read_head_files(path: Path, *, shapes_only: bool = False) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Fields of ``config.json`` and the weights by name.

    Args:
        path: the folder.
        shapes_only: give weights on the meta device, without reading their values.

    Raises:
        FileNotFoundError: no folder, no config, no weights, or a shard that an index names is missing.
        ValueError: a file that is not what its name says, or is cut off.
    """
    if not path.is_dir():
        raise FileNotFoundError(f"there is no folder {path}; a draft head is a folder with config.json and its weights")
    if any(path.glob("*.safetensors")) or not any(path.glob("*.bin")):
        if shapes_only:
            return read_json(path / "config.json", "a head's folder holds it beside the weights"), _shapes(path)
        checkpoint = open_directory(path)
        return checkpoint.config, dict(checkpoint.tensors)
    fields = read_json(path / "config.json", "a head's folder holds it beside the weights")
    tensors: dict[str, Tensor] = {}
    for file in _bin_files(path):
        tensors.update(_read_bin(file))
    if shapes_only:
        tensors = {name: tensor if name in MAPS else tensor.to("meta") for name, tensor in tensors.items()}
    return fields, tensors


def _shapes(path: Path) -> dict[str, Tensor]:
    return dict(safetensors_shapes(weight_files(path)))


def safetensors_shapes(files: list[Path]) -> list[tuple[str, Tensor]]:
    """Name and meta tensor of every weight, from the files' headers; the vocabulary maps are read as they are."""
    from safetensors import SafetensorError, safe_open

    found: list[tuple[str, Tensor]] = []
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping, keys() is its only iterator
                    if name in MAPS:
                        found.append((name, file.get_tensor(name)))
                    else:
                        view = file.get_slice(name)
                        dtype = _DTYPES.get(view.get_dtype(), torch.float32)
                        found.append((name, torch.empty(view.get_shape(), dtype=dtype, device="meta")))
        except SafetensorError as error:
            size = path.stat().st_size
            raise ValueError(f"{path} ({size} bytes) is broken or cut off ({error}); copy or download it again") from None
    return found


_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def _bin_files(path: Path) -> list[Path]:
    if (path / BIN_INDEX).is_file():
        names = sorted(set(read_json(path / BIN_INDEX).get("weight_map", {}).values()))
        absent = [name for name in names if not (path / name).is_file()]
        if absent:
            raise FileNotFoundError(f"{path} lacks {', '.join(absent)}, which {BIN_INDEX} names; copy or download it")
        return [path / name for name in names]
    files = sorted(path.glob("pytorch_model*.bin")) or sorted(path.glob("*.bin"))
    return files


def _read_bin(path: Path) -> dict[str, Tensor]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=_is_zip(path))
    except pickle.UnpicklingError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"{path} holds more than tensors and is not loaded ({reason}); save the weights as safetensors where the file "
            "is trusted"
        ) from None
    except (RuntimeError, EOFError, KeyError, OSError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        size = path.stat().st_size
        raise ValueError(f"{path} ({size} bytes) is broken or cut off ({reason}); copy or download it again") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not weights by name; give the state_dict of the head")
    other = [str(name) for name, value in content.items() if not isinstance(value, Tensor)]
    if other:
        raise ValueError(
            f"{path} holds {', '.join(other[:3])} beside or instead of tensors; give the state_dict of the head alone"
        )
    return {str(name): tensor for name, tensor in content.items()}


def _is_zip(path: Path) -> bool:
    """Whether it is in torch's current file format, the only one that can be mapped."""
    with path.open("rb") as file:
        return file.read(2) == b"PK"
