"""Print the signatures of the vendor entry points that specops calls, as JSON.

Run it where one version of each package is installed, and merge the output into ``vendor_signatures.json``::

    python tests/ops/data/record_signatures.py flashinfer-python
    python tests/ops/data/record_signatures.py tokenspeed-mla

``tests/ops/test_signature_binding.py`` binds the arguments that the backends would pass against these records in every
environment, and against the package itself where it is installed. ``tokenspeed_mla.mla_decode`` needs the CuTe DSL to be
imported; for it the signature is read from the source file.
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import pathlib
import sys
from typing import Any

ENTRY_POINTS = {
    "flashinfer-python": (
        "flashinfer.decode:trtllm_batch_decode_with_kv_cache",
        "flashinfer.prefill:trtllm_batch_context_with_kv_cache",
        "flashinfer.prefill:BatchPrefillWithPagedKVCacheWrapper.__init__",
        "flashinfer.prefill:BatchPrefillWithPagedKVCacheWrapper.plan",
        "flashinfer.prefill:BatchPrefillWithPagedKVCacheWrapper.run",
        "flashinfer.prefill:get_customize_batch_prefill_module",
        "flashinfer.mla:BatchMLAPagedAttentionWrapper.__init__",
        "flashinfer.mla:BatchMLAPagedAttentionWrapper.plan",
        "flashinfer.mla:BatchMLAPagedAttentionWrapper.run",
        "flashinfer.mla:trtllm_batch_decode_with_kv_cache_mla",
    ),
    "tokenspeed-mla": ("tokenspeed_mla.mla_decode:tokenspeed_mla_decode",),
}


def entry_point(path: str) -> Any:
    """The function at ``module:name`` or ``module:Class.name``."""
    module, names = path.split(":")
    found: Any = importlib.import_module(module)
    for name in names.split("."):
        found = getattr(found, name)
    return found


def record(signature: inspect.Signature) -> list[list[Any]]:
    """``[name, kind, has a default]`` of each parameter."""
    return [[p.name, p.kind.name, p.default is not p.empty] for p in signature.parameters.values()]


def from_source(path: str) -> list[list[Any]]:
    """As :func:`record`, read from the module's file without importing it."""
    module, name = path.split(":")
    package = importlib.util.find_spec(module.split(".")[0])
    assert package is not None
    assert package.origin is not None
    file = pathlib.Path(package.origin).parent.joinpath(*module.split(".")[1:]).with_suffix(".py")
    functions = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)]
    arguments = next(node.args for node in functions if node.name == name)
    first_default = len(arguments.args) - len(arguments.defaults)
    plain = [[a.arg, "POSITIONAL_OR_KEYWORD", i >= first_default] for i, a in enumerate(arguments.args)]
    keyword = [
        [a.arg, "KEYWORD_ONLY", default is not None]
        for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    return plain + keyword


def main(package: str) -> None:
    version = importlib.metadata.version(package)
    recorded = {}
    for path in ENTRY_POINTS[package]:
        recorded[path] = from_source(path) if package == "tokenspeed-mla" else record(inspect.signature(entry_point(path)))
    print(json.dumps({f"{package} {version}": recorded}))


if __name__ == "__main__":
    main(sys.argv[1])
