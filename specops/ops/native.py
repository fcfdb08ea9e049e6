"""The kernels of ``native.c``: compiled at first use with the machine's C compiler, kept in a cache, called with ctypes.

    lib = native.library()              # None where there is no compiler, which is told of once
    if lib is not None:
        out = native.linear(x, weight)

They serve float32 and bfloat16 tensors on the CPU that need no gradient. Compiling takes some five seconds; later processes
load the file from ``$SPECOPS_CACHE``, or ``~/.cache/specops``. Its name holds a digest of the source, the compiler, and
the processor's features, so none of these can change unnoticed. ``SPECOPS_NATIVE=0`` turns the kernels off, and so does
:func:`disabled` for a block of code; what they do is then done by PyTorch's operators, more slowly.

The file is linked with the OpenMP runtime that torch has loaded: a second one would bring threads of its own, which fight
over the cores with torch's.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("native.c")
# Must be what specops_native_version() returns.
VERSION = 4
FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-fopenmp")
COMPILERS = ("gcc", "cc", "clang")
COMPILE_SECONDS = 120
DTYPES = (torch.float32, torch.bfloat16)
# Sizes that native.c reserves room for.
MAX_DIM = 256
MAX_GROUP = 64
# More are found by PyTorch's topk: the kernel keeps its finds sorted as it goes.
MAX_RANKS = 32

_lock = threading.Lock()
_disabled = 0


class NativeUnavailable(RuntimeError):
    """There are no native kernels here; says why."""


def library() -> ctypes.CDLL | None:
    """The compiled kernels; None where they are turned off or can't be had, which is warned of once."""
    return None if _disabled else _library()


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Within this context PyTorch's operators do what the kernels would."""
    global _disabled
    _disabled += 1
    try:
        yield
    finally:
        _disabled -= 1


def usable(*tensors: Tensor) -> bool:
    """Whether plain memory of these tensors can be read and written behind PyTorch's back: nobody traces or records."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or torch.is_autocast_enabled("cpu"):
        return False
    if any(type(tensor) not in _PLAIN or not tensor.is_cpu for tensor in tensors):
        return False
    return not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear`` for few rows; each row's result is the same, bit for bit, whatever rows are beside it.

    Args:
        x: ``[..., K]`` float32 or bfloat16; :func:`usable` must hold for all tensors.
        weight: ``[N, K]`` contiguous, of x's dtype.
        bias: ``[N]`` contiguous, of x's dtype, or None.

    Raises:
        NativeUnavailable: without the kernels.
    """
    lib = library()
    if lib is None:
        raise NativeUnavailable("the native kernels are turned off or could not be compiled; use F.linear")
    num_columns, width = weight.shape
    x = x.contiguous()
    out = x.new_empty((*x.shape[:-1], num_columns))
    rows = out.numel() // num_columns if num_columns else 0
    half = x.dtype == torch.bfloat16
    work = torch.empty(rows * width, dtype=torch.float32, device="cpu") if half else None
    lib.specops_linear(
        x.data_ptr(),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        rows,
        num_columns,
        width,
        half,
        None if work is None else work.data_ptr(),
        torch.get_num_threads(),
    )
    return out


def top_tokens(logits: Tensor, k: int, logprobs: bool = False) -> tuple[Tensor, Tensor] | None:
    """As :func:`specops.ops.top_tokens`, the least token first among equals; None where the kernel does not serve it."""
    lib = library()
    if lib is None or k > MAX_RANKS or logits.dtype not in DTYPES or not usable(logits):
        return None
    logits = logits.contiguous()
    rows, vocab = logits.shape
    values = torch.empty((rows, k), dtype=torch.float32, device="cpu")
    tokens = torch.empty((rows, k), dtype=torch.int64, device="cpu")
    lib.specops_top_tokens(
        logits.data_ptr(),
        rows,
        vocab,
        k,
        logits.dtype == torch.bfloat16,
        logprobs,
        values.data_ptr(),
        tokens.data_ptr(),
        torch.get_num_threads(),
    )
    return values, tokens


class Layer(ctypes.Structure):
    """Weights and sizes of a decoder layer, as ``native.c`` reads them."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("input_norm", "qkv", "qkv_bias", "qk_norm", "o", "o_bias"),
                *("mlp_norm", "gate_up", "gate_up_bias", "down", "down_bias"),
            )
        ),
        *((name, ctypes.c_int64) for name in ("input", "hidden", "heads", "kv_heads", "dim", "inner", "half")),
        *((name, ctypes.c_double) for name in ("eps", "offset")),
    )


class Attention(ctypes.Structure):
    """Arguments of an attention call, as ``native.c`` reads them: the call's, the step's and the layer's in this order."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "out")),
        *((name, ctypes.c_int64) for name in ("q_row", "q_head", "rows")),
        *((name, ctypes.c_void_p) for name in ("table", "seq_lens", "query_start")),
        *((name, ctypes.c_int64) for name in ("table_row", "batch", "width", "max_pages")),
        *((name, ctypes.c_void_p) for name in ("k", "v", "sinks", "tree")),
        *(
            (name, ctypes.c_int64)
            for name in (
                *("tree_row", "tree_width", "k_page", "k_slot", "k_head", "v_page", "v_slot", "v_head"),
                *("heads", "kv_heads", "dim", "value_dim", "page_size", "window", "half"),
            )
        ),
        *((name, ctypes.c_double) for name in ("scale", "softcap")),
    )


class Store(ctypes.Structure):
    """Arguments of a cache write, as ``native.c`` reads them: the call's, then the layer's."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("k", "v", "slots")),
        *((name, ctypes.c_int64) for name in ("slot_stride", "wide_slots", "rows", "k_row", "k_head", "v_row", "v_head")),
        *((name, ctypes.c_void_p) for name in ("k_cache", "v_cache")),
        *(
            (name, ctypes.c_int64)
            for name in (
                *("k_page", "k_slot", "k_cache_head", "v_page", "v_slot", "v_cache_head"),
                *("heads", "k_size", "v_size", "page_size", "pages"),
            )
        ),
    )


class Block(ctypes.Structure):
    """One layer of a stack, as ``native.c`` reads it."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("layer", "k", "v", "sinks")),
        ("window", ctypes.c_int64),
        *((name, ctypes.c_double) for name in ("scale", "softcap")),
    )


_PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)
_POINTER, _LONG, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_SIGNATURES = {
    "specops_linear": (None, (*[_POINTER] * 4, _LONG, _LONG, _LONG, _INT, _POINTER, _INT)),
    "specops_layer_in": (None, (_POINTER, _POINTER, _LONG, *[_POINTER] * 7, _LONG, _POINTER, _INT)),
    "specops_layer_out": (None, (*[_POINTER] * 4, _LONG, _POINTER, _INT)),
    "specops_attention": (_INT, (_POINTER, _INT)),
    "specops_store": (_LONG, (_POINTER, _INT)),
    "specops_top_tokens": (None, (_POINTER, _LONG, _LONG, _LONG, _INT, _INT, _POINTER, _POINTER, _INT)),
    "specops_stack": (_INT, (_POINTER, _LONG, *[_POINTER] * 6, _INT)),
}


def _library() -> ctypes.CDLL | None:
    # functools.cache alone would let two threads compile at once.
    with _lock:
        return _load()


@functools.cache
def _load() -> ctypes.CDLL | None:
    if os.environ.get("SPECOPS_NATIVE", "1") == "0":
        return None
    try:
        lib = ctypes.CDLL(str(compiled()))
        if lib.specops_native_version() != VERSION:
            raise NativeUnavailable("the compiled file is of another version")
    except (NativeUnavailable, OSError) as error:
        warnings.warn(
            f"CPU decoding falls back to PyTorch's operators, which take 1.5 to 2 times as long: {error}. "
            "SPECOPS_NATIVE=0 says that this is wanted",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib


def compiled() -> Path:
    """Path of the compiled kernels; compiles them if the cache has none for this source, compiler and machine.

    Raises:
        NativeUnavailable: no compiler, or one that fails; says what it said.
    """
    command, path = _plan()
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made, result = Path(folder, "native.o"), Path(folder, path.name)
            _run([*command, *FLAGS, "-c", str(SOURCE), "-o", str(made)])
            runtime = _openmp()
            libraries = ["-fopenmp"] if runtime is None else [str(runtime)]
            _run([*command, "-shared", str(made), "-o", str(result), *libraries, "-lm"])
            # In one step, for processes that compile at the same time.
            result.replace(path)
    return path


def must_compile() -> bool:
    """Whether :func:`library` would compile first, for some seconds."""
    if _disabled or _load.cache_info().currsize or os.environ.get("SPECOPS_NATIVE", "1") == "0":
        return False
    try:
        return not _plan()[1].exists()
    except NativeUnavailable:
        return False


def _plan() -> tuple[list[str], Path]:
    """The compiler's command, and where its result is kept."""
    compiler = os.environ.get("CC") or next((name for name in COMPILERS if shutil.which(name)), None)
    if compiler is None:
        raise NativeUnavailable(f"there is no C compiler ({', '.join(COMPILERS)}); install one, or name it in CC")
    command = compiler.split()
    version = _run([*command, "--version"])
    parts = (SOURCE.read_text(encoding="utf-8"), version, repr(FLAGS), _machine(), torch.__version__, str(_openmp()))
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    return command, cache_folder() / f"native-{digest}.so"


def cache_folder() -> Path:
    """Where compiled kernels are kept, made if need be.

    Raises:
        NativeUnavailable: if it can't be made.
    """
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(os.environ.get("SPECOPS_CACHE") or Path(home, "specops"))
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise NativeUnavailable(
            f"the cache folder {folder} can't be made ({error}); name another in SPECOPS_CACHE"
        ) from error
    return folder


def _openmp() -> Path | None:
    """The OpenMP runtime that torch brings along."""
    return next(iter(sorted(Path(torch.__file__).with_name("lib").glob("libgomp*.so*"))), None)


def _machine() -> str:
    """What ``-march=native`` depends on."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return "".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))
    return platform.processor() + platform.machine()


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(f"{command[0]} could not be run ({error})") from error
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise NativeUnavailable(f"{command[0]} failed ({said[0] if said else f'exit status {done.returncode}'})")
    return done.stdout
