"""Print what the SGLang plug-in relies on, read from SGLang's source without importing it, as JSON.

    pip download --no-deps sglang==0.5.23 && unzip -d src sglang-*.whl
    python tests/integrations/data/record_sglang.py src > tests/integrations/data/sglang.json

``functions`` holds ``[name, has a default]`` of each parameter, ``*`` and ``**`` in front of those that take many;
``names`` what a class or module has: its fields, methods, and attributes set on ``self``.
"""

from __future__ import annotations

import ast
import json
import pathlib
import re
import sys
from typing import Any

ATTENTION = "srt.layers.attention"
BACKEND = f"{ATTENTION}.base_attn_backend:AttentionBackend"
METHODS = (
    "init_forward_metadata",
    "init_forward_metadata_out_graph",
    "init_forward_metadata_in_graph",
    "init_cuda_graph_state",
    "get_cuda_graph_seq_len_fill_value",
    "update_verify_buffers_to_fill_after_draft",
    "forward",
    "forward_decode",
    "forward_extend",
)
FUNCTIONS = (
    *(f"{BACKEND}.{name}" for name in METHODS),
    f"{ATTENTION}.attention_registry:register_attention_backend",
    "srt.plugins.hook_registry:HookRegistry.register",
    "srt.speculative.draft_utils:DraftBackendFactory._create_backend",
    "srt.mem_cache.memory_pool:KVWriteLoc.for_batch",
    "srt.mem_cache.memory_pool:MHATokenToKVPool.set_kv_buffer",
    "srt.mem_cache.memory_pool:MHATokenToKVPool.get_kv_buffer",
    "srt.runtime_context:get_spec",
    "srt.runtime_context:get_parallel",
)
NAMES = (
    BACKEND,
    f"{ATTENTION}.attention_registry:",
    f"{ATTENTION}.verify_mask:VerifyMask",
    "srt.arg_groups.choices:",
    "srt.layers.radix_attention:RadixAttention",
    "srt.layers.radix_attention:AttentionType",
    "srt.mem_cache.memory_pool:KVWriteLoc",
    "srt.mem_cache.swa_memory_pool:",
    "srt.model_executor.forward_batch_info:ForwardBatch",
    "srt.model_executor.forward_batch_info:ForwardMode",
    "srt.model_executor.model_runner:ModelRunner",
    "srt.speculative.draft_utils:DraftBackendFactory",
    "srt.speculative.eagle_info:EagleVerifyInput",
    "srt.speculative.eagle_info:EagleDraftExtendInput",
    "kernels.ops.speculative.spec_tree:TreeMaskMode",
    "srt.speculative.spec_info:SpecInput",
    "srt.arg_groups.field_order:",
)
# Long lists are cut down to what is relied on; the test says if one of these is missing.
KEPT = {
    "srt.layers.radix_attention:RadixAttention": "tp_q_head_num tp_k_head_num tp_v_head_num qk_head_dim v_head_dim scaling "
    "layer_id logit_cap logit_capping_method sliding_window_size is_cross_attention attn_type xai_temperature_len "
    "k_scale v_scale",
    "srt.model_executor.forward_batch_info:ForwardBatch": "forward_mode batch_size seq_lens req_pool_indices spec_info "
    "extend_seq_lens extend_seq_lens_cpu out_cache_loc out_cache_loc_is_physical",
    "srt.model_executor.forward_batch_info:ForwardMode": "is_decode_or_idle is_target_verify is_draft_extend_v2 is_decode "
    "is_idle",
    "srt.model_executor.model_runner:ModelRunner": "device page_size model_config req_to_token_pool token_to_kv_pool "
    "kv_index_translator dtype is_draft_worker use_mla_backend draft_attention_backend",
    "srt.arg_groups.field_order:": "speculative_num_draft_tokens speculative_eagle_topk speculative_algorithm",
    "srt.speculative.eagle_info:EagleVerifyInput": "custom_mask draft_token_num topk num_tokens_per_req",
    "srt.speculative.eagle_info:EagleDraftExtendInput": "num_tokens_per_req",
    "srt.speculative.spec_info:SpecInput": "ragged_verify_layout",
    "srt.arg_groups.choices:": "ATTENTION_BACKEND_CHOICES DRAFT_ATTENTION_BACKEND_CHOICES add_attention_backend_choices "
    "add_draft_attention_backend_choices",
    "srt.mem_cache.swa_memory_pool:": "SWAKVPool",
    f"{ATTENTION}.attention_registry:": "ATTENTION_BACKENDS register_attention_backend",
    f"{BACKEND}": "needs_cpu_seq_lens forward_metadata verify_mask data_type kv_cache_dtype",
    "srt.speculative.draft_utils:DraftBackendFactory": "draft_model_runner topk speculative_num_steps _create_backend",
}


def find(root: pathlib.Path, path: str) -> ast.AST:
    module, names = path.split(":")
    file = root.joinpath("sglang", *module.split("."))
    file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
    node: Any = ast.parse(file.read_text())
    for name in filter(None, names.split(".")):
        kinds = (ast.ClassDef, ast.FunctionDef)
        node = next(child for child in node.body if isinstance(child, kinds) and child.name == name)
    return node


def parameters(function: Any) -> list[list[Any]]:
    arguments = function.args
    first = len(arguments.args) - len(arguments.defaults)
    found = [[a.arg, index >= first] for index, a in enumerate(arguments.args)]
    found += [[f"*{arguments.vararg.arg}", True]] if arguments.vararg else []
    found += [[a.arg, d is not None] for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    return found + ([[f"**{arguments.kwarg.arg}", True]] if arguments.kwarg else [])


def names(node: Any) -> list[str]:
    found = {child.name for child in node.body if hasattr(child, "name")}
    for child in ast.walk(node):
        if isinstance(child, ast.Constant) and isinstance(node, ast.Module) and isinstance(child.value, str):
            # Options of the command line are listed by name.
            found |= {child.value} if child.value.startswith("speculative_") else set()
        targets = (
            child.targets if isinstance(child, ast.Assign) else [child.target] if isinstance(child, ast.AnnAssign) else []
        )
        for target in targets:
            if isinstance(target, ast.Name) and child in node.body:
                found.add(target.id)
            elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
                found.add(target.attr)
    return sorted(found)


def record(root: pathlib.Path) -> dict[str, Any]:
    version = re.search(r"\nVersion: (\S+)", next(root.glob("sglang-*.dist-info/METADATA")).read_text())
    assert version is not None
    kept = {path: set(text.split()) for path, text in KEPT.items()}
    listed = {path: names(find(root, path)) for path in NAMES}
    return {
        "version": version[1],
        "functions": {path: parameters(find(root, path)) for path in FUNCTIONS},
        "names": {path: [n for n in found if path not in kept or n in kept[path]] for path, found in listed.items()},
    }


if __name__ == "__main__":
    print(json.dumps(record(pathlib.Path(sys.argv[1])), indent=1))
