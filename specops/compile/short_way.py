"""The short way from a call to its replay, for batches of a form that was served before.

What stands before a replay is time that the device waits for. A form is looked at once in full
(:meth:`specops.batch.FieldTable.check`); from then on one call into torch tells whether a batch has it, dtypes, devices,
sizes and strides together, and what follows is a handful of C calls from one function: addresses, a prepared launch that
stages them, the check of memory that a graph reads, and the replay. Whatever is not as it was then ends the short way, and
the runner goes its long one, which can do everything and says what is wrong.

Where there is a C compiler the handful is one C function (``short_way.c``), which takes about half of the time;
``SPECOPS_NATIVE=0`` turns it off. It asks the same functions of torch and knows nothing of torch's insides.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import operator
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specops.compile import launch
from specops.compile.ready import Ready
from specops.compile.static_tensors import StaticTensors
from specops.ops.native import COMPILERS, NativeUnavailable, cache_folder

# Whether tensors are of the form that it was made for.
FormCheck = Callable[..., bool]
Go = Callable[[Sequence[Tensor], bool], bool]
# Forms kept for one batch size: flat or not, in inference mode or not.
KEPT_FORMS = 4
_SOURCE = Path(__file__).with_name("short_way.c")
_MODULE = "specops_short_way"
_ADDRESS = Tensor.data_ptr
# A form is read by ``map``: loops in C.
SHAPE = Tensor.shape.__get__  # type: ignore[attr-defined]
DTYPE = Tensor.dtype.__get__  # type: ignore[attr-defined]
DEVICE = Tensor.device.__get__  # type: ignore[attr-defined]
_STRIDE = Tensor.stride


class ShortWay:
    """Stages and replays one number of requests.

    Args:
        ready: with a graph and a prepared launch.
        statics: what the graph reads.
        device_index: where the fields are.

    Attributes:
        forms: checks of the forms it serves; see :meth:`learn`.
        go: ``go(fields, staged) -> bool``: whether the graph was replayed on ``fields``. Nothing was replayed if not.
            ``staged`` says that the static buffers hold them already.
        native: whether ``go`` is the C function.
    """

    def __init__(self, ready: Ready, statics: StaticTensors, device_index: int) -> None:
        # Who lets go of ``statics`` no longer hears of memory that is freed.
        self.ready, self.statics, self.forms = ready, statics, list[FormCheck]()
        go = _native(ready, self.forms, statics, device_index)
        self.native = go is not None
        self.go: Go = go or _python(ready, self.forms, statics, device_index)

    def learn(self, fields: Sequence[Tensor]) -> None:
        """Serve batches of the form of ``fields`` from now on, if it is one that a prepared launch can take."""
        if len(self.forms) < KEPT_FORMS and all(map(_is_plain, fields)):
            self.forms.append(form_check(fields))


def _is_plain(field: Tensor) -> bool:
    return type(field) in (Tensor, nn.Parameter) and field.layout == torch.strided and field.is_contiguous()


def _python(ready: Ready, forms: list[FormCheck], statics: StaticTensors, device_index: int) -> Go:
    assert ready.prepared is not None
    # Locals of a closure: looked up faster than attributes.
    fire, in_place, raw_stream = ready.prepared.fire, statics.in_place, launch.raw_stream
    reduce, either = functools.reduce, operator.or_

    def go(fields: Sequence[Tensor], staged: bool) -> bool:
        try:
            for fits in forms:
                if fits(*fields):
                    break
            else:
                return False
        except (TypeError, ValueError, KeyError, RuntimeError):
            # Not so many fields, or no tensors.
            return False
        if not staged:
            addresses = list(map(_ADDRESS, fields))
            # Triton compiled the kernel for addresses that are multiples of 16.
            if reduce(either, addresses) & 15:
                return False
            stream = raw_stream(device_index)
            if stream is None or not fire(addresses, stream):
                return False
        if not in_place():
            return False
        ready.replay()  # type: ignore[misc]
        return True

    return go


def _native(ready: Ready, forms: list[FormCheck], statics: StaticTensors, device_index: int) -> Go | None:
    """The same as a C function; None where it can't be had."""
    way, prepared = native_way(), ready.prepared
    if way is None or prepared is None:
        return None
    held = (
        *(forms, _ADDRESS, *launch.device_functions(), device_index),
        *(*statics.lists(), ready, "replay", (prepared, statics)),
    )
    try:
        go: Go = way(held, _address_in_c(), prepared.in_c(), prepared.shape, prepared.changing).go
    except (TypeError, ValueError):
        return None
    return go


@functools.cache
def _address_in_c() -> int:
    """Address of torch's C function from a tensor to its data, which inductor's own code calls; 0 where there is none.

    It throws, which C could not catch, for what has no plain memory. That has none of the forms that are learnt, and torch's
    guards, without which it is not used, see to type, device and layout.
    """
    try:
        from torch._C._dynamo.guards import _torchinductor_pyobject_tensor_data_ptr as found  # type: ignore[attr-defined]

        address = int(found)
        read = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object)(address)
        tensor = torch.zeros(8, device="cpu")
        right = bool(address) and all(read(part) == part.data_ptr() for part in (tensor, tensor[3:]))
    except (ImportError, TypeError, ValueError):
        return 0
    return address if right and _guards() is not None else 0


@functools.cache
def native_way() -> Any:
    """The type of ``short_way.c``, compiled at first use and kept in a file; None where it can't be had, told of once."""
    if os.environ.get("SPECOPS_NATIVE", "1") == "0":
        return None
    try:
        spec = importlib.util.spec_from_file_location(_MODULE, _compiled())
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.Way
    except (NativeUnavailable, OSError, ImportError, subprocess.SubprocessError) as error:
        warnings.warn(
            f"a replay begins some 10 us later than it could: {error}. SPECOPS_NATIVE=0 says that this is wanted",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def _compiled() -> Path:
    """Path of the compiled ``short_way.c``; takes a quarter of a second if there is none for this source and Python.

    Raises:
        NativeUnavailable: no compiler or no headers of Python; says what the compiler said.
        OSError, subprocess.SubprocessError: the compiler could not be run.
    """
    compiler = os.environ.get("CC") or next((name for name in COMPILERS if shutil.which(name)), None)
    if compiler is None:
        raise NativeUnavailable(f"there is no C compiler ({', '.join(COMPILERS)}); install one, or name it in CC")
    command = [*compiler.split(), "-O2", "-fPIC", "-shared", f"-I{sysconfig.get_path('include')}", str(_SOURCE)]
    parts = (_SOURCE.read_text(encoding="utf-8"), sys.version, repr(command), platform.machine())
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    path = cache_folder() / f"{_MODULE}-{digest}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            result = Path(folder, path.name)
            done = subprocess.run([*command, "-o", str(result)], capture_output=True, text=True, timeout=60, check=False)
            if done.returncode != 0:
                raise NativeUnavailable(f"{compiler} failed ({(done.stderr.strip().splitlines() or ['without a word'])[0]})")
            # In one step, for processes that compile at the same time.
            result.replace(path)
    return path


def form_check(fields: Sequence[Tensor]) -> FormCheck:
    """What tells whether tensors have the dtypes, devices, sizes and strides of ``fields``, and are as many.

    torch's guards for compiled code do it in one call. Beyond that they tell apart what does no harm: subclasses, and
    tensors of inference mode. They are private to torch, so without them, or if they prove wrong, Python compares.
    """
    make = _guards()
    return _compare(fields) if make is None else make(fields)


@functools.cache
def _guards() -> Callable[[Sequence[Tensor]], FormCheck] | None:
    """Makes torch's check of a form; None where there is none that sees every difference."""
    try:
        from torch._C._dynamo.guards import TensorGuards

        def make(fields: Sequence[Tensor]) -> FormCheck:
            check: FormCheck = TensorGuards(*fields, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
            return check

        one, other = torch.zeros(2, 3, device="cpu"), torch.zeros(4, dtype=torch.int32, device="cpu")
        check = make([one, other])
        same = check(one + 1, other + 1)
        different: Any = [
            (one.repeat(1, 2), other),
            (one[:1], other),
            (one.flatten(), other),
            (one.double(), other),
            (one.t().contiguous().t(), other),
            (one, other.repeat(2)[::2]),
            (one, other.long()),
            (one.to("meta"), other),
            (one.to_sparse(), other),
        ]
        return make if same and not any(check(*fields) for fields in different) else None
    except (ImportError, TypeError, ValueError, RuntimeError):
        return None


def _compare(fields: Sequence[Tensor]) -> FormCheck:
    def form(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        return (*map(SHAPE, tensors), *map(_STRIDE, tensors), *map(DTYPE, tensors), *map(DEVICE, tensors))

    known = form(fields)
    return lambda *tensors: form(tensors) == known
