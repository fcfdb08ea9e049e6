"""Linear layers of few rows on a CPU, where ``F.linear`` is far from the speed of memory.

A step of decoding multiplies 1 to a few dozen rows. :func:`pack_linears` has such products done in one of two ways:

    pack_linears(target)                # nn.Linear layers, LM head included, and whole decoder layers
    pack_linears(head)                  # and the rows of the LM head that a draft head reads

* By the compiled kernels of :mod:`specops.ops.native`, which read the weights where they lie. Decoder layers become
  :class:`~specops.models.native_layer.NativeDecoderLayer`.
* Without a C compiler, over a second copy of every weight that oneDNN has laid out beforehand: ``F.linear`` lays the
  weight out anew at each call, which for such flat products costs as much as the product. The copy doubles the weights'
  memory, and is made anew when a weight was changed in place or replaced.

On two cores of a Xeon with AVX-512, the products of a step of SmolLM2 (LM head included) took, in ms, plain, packed, and
compiled:

    rows      1                   4                   6                   16
    float32   18.6 / 25.6 / 17.8  33.6 / 24.9 / 19.0  36.6 / 26.4 / 21.3  45.7 / 36.1 / 34.1

Other devices and dtypes, many rows, gradients and code under ``torch.compile`` take ``F.linear`` as before. The weights
themselves stay where they are, so saving, loading and moving a packed model work as usual.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specops.ops import native

# As many rows the compiled kernels take; above, F.linear's products are large enough to be faster.
NATIVE_ROWS = 64
# More rows than this are worth F.linear's own packing; with fewer float32 rows than the first it reads the weight once.
MAX_ROWS = 64
MIN_ROWS = {torch.float32: 2, torch.bfloat16: 1}
# Of the free memory, what the copies of one model may take.
MEMORY_SHARE = 0.5


def can_pack(weight: Tensor) -> bool:
    """Whether this build and machine have a packed product for ``weight``."""
    if weight.device.type != "cpu" or weight.dtype not in MIN_ROWS or weight.dim() != 2:
        return False
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):  # type: ignore[no-untyped-call]
        return False
    return weight.dtype != torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class PackedWeight:
    """Products with one weight; holds its packed copy once that is needed.

    Args:
        weight: ``[N, K]`` float32 or bfloat16 on the CPU; :func:`can_pack` must hold.
    """

    def __init__(self, weight: Tensor) -> None:
        self._packed: Tensor | None = None
        self._address: int | None = None
        self._version = 0
        if native.library() is None:
            self._refresh(weight)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """``F.linear(x, weight, bias)``, another way where that is the faster one and possible.

        Args:
            x: ``[..., K]``.
            weight: the weight this copy was made of, or what has taken its place.
            bias: ``[N]`` or None.
        """
        if torch.compiler.is_compiling():
            return F.linear(x, weight, bias)
        rows = x.numel() // x.shape[-1] if x.shape[-1] else 0
        if native.library() is not None:
            return native.linear(x, weight, bias) if _is_native(x, weight, bias, rows) else F.linear(x, weight, bias)
        if not MIN_ROWS.get(x.dtype, 1) <= rows <= MAX_ROWS or weight.dtype != x.dtype or not x.is_cpu:
            return F.linear(x, weight, bias)
        if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
            return F.linear(x, weight, bias)
        if weight.data_ptr() != self._address or _version(weight) != self._version:
            if not can_pack(weight):
                return F.linear(x, weight, bias)
            self._refresh(weight)
        assert self._packed is not None
        return _multiply(x, self._packed, bias)

    def __getstate__(self) -> dict[str, Any]:
        """Without the packed copy, which has no storage to copy or save; a copy of the model packs at its first use."""
        return {**self.__dict__, "_packed": None, "_address": None}

    def _refresh(self, weight: Tensor) -> None:
        with torch.no_grad():
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), 8)
        self._address, self._version = weight.data_ptr(), _version(weight)


class PackedLinear(nn.Linear):
    """An ``nn.Linear`` whose product goes through a :class:`PackedWeight`; what :func:`pack_linears` turns layers into."""

    packed: PackedWeight

    def forward(self, input: Tensor) -> Tensor:
        return self.packed.linear(input, self.weight, self.bias)


def pack_linears(model: nn.Module) -> int:
    """Speed up every ``nn.Linear`` of ``model`` and, in a draft head, the LM head's rows. Layers stay the same objects.

    Subclasses of ``nn.Linear`` are left alone. Without the compiled kernels, so is a model whose packed copies would not
    fit into half of the free memory.

    Returns:
        How many weights are multiplied another way now, those from before included.
    """
    from specops.models.native_layer import use_native_layers

    linears = [module for module in model.modules() if type(module) is nn.Linear and can_pack(module.weight)]
    heads = [(module, rows) for module in model.modules() if (rows := _draft_rows(module)) is not None]
    unpacked = [(head, rows) for head, rows in heads if head.packed_lm_head is None]
    new: list[Tensor] = [linear.weight for linear in linears] + [rows for _, rows in unpacked]
    compiled = native.library() is not None
    if compiled or sum(weight.numel() * weight.element_size() for weight in new) <= MEMORY_SHARE * _free_memory():
        for linear in linears:
            # The class alone changes: names, parameters and hooks stay.
            linear.__class__ = PackedLinear
            object.__setattr__(linear, "packed", PackedWeight(linear.weight))
        for head, rows in unpacked:
            object.__setattr__(head, "packed_lm_head", PackedWeight(rows))
    if compiled:
        use_native_layers(model)
    packed_heads = sum(head.packed_lm_head is not None for head, _ in heads)
    return sum(isinstance(module, PackedLinear) for module in model.modules()) + packed_heads


def unpack_linears(model: nn.Module) -> None:
    """Undo :func:`pack_linears` and free the copies."""
    from specops.models.native_layer import drop_native_layers

    drop_native_layers(model)
    for module in model.modules():
        if isinstance(module, PackedLinear):
            object.__delattr__(module, "packed")
            module.__class__ = nn.Linear  # type: ignore[assignment]
        elif _draft_rows(module) is not None:
            object.__setattr__(module, "packed_lm_head", None)


def _is_native(x: Tensor, weight: Tensor, bias: Tensor | None, rows: int) -> bool:
    """Whether the compiled kernels take a product."""
    given = (x, weight) if bias is None else (x, weight, bias)
    return (
        rows <= NATIVE_ROWS
        and x.dtype in native.DTYPES
        and all(tensor.dtype == x.dtype for tensor in given)
        and weight.is_contiguous()
        and (bias is None or bias.is_contiguous())
        and native.usable(*given)
    )


def _multiply(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return result


def _draft_rows(module: nn.Module) -> Tensor | None:
    """The LM head of a draft head, which is a bare tensor there."""
    weight = getattr(module, "lm_head_weight", None)
    usable = isinstance(weight, Tensor) and hasattr(module, "packed_lm_head") and can_pack(weight)
    return weight if usable else None


def _version(weight: Tensor) -> int:
    """Counts changes in place; inference tensors have no counter, and may not be changed outside inference mode."""
    return 0 if weight.is_inference() else weight._version


def _free_memory() -> int:
    """Free bytes, a large number where the system does not tell."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 1 << 62
