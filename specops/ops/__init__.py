"""specops' torch ops, thinly wrapped: arguments are checked and a backend is chosen, then ``torch.ops.specops.*`` runs."""

from specops.ops.attention import mha, mla
from specops.ops.attention_checks import checked
from specops.ops.backends import UnsupportedAttention, add_backend, backends, register_backend
from specops.ops.beam import expand_beam
from specops.ops.builtin import BUILTIN
from specops.ops.capabilities import AttentionRequest, Capabilities
from specops.ops.linear import project_qkv, rms_norm_linear
from specops.ops.round_end import commit_round, hand_on
from specops.ops.sampling import verify_sampling
from specops.ops.store_kv import move_kv, move_kv_layers, move_latent, store_kv, store_latent
from specops.ops.top_tokens import top_tokens
from specops.ops.tree import build_tree, verify_greedy

__all__ = [
    "AttentionRequest",
    "Capabilities",
    "UnsupportedAttention",
    "backends",
    "build_tree",
    "checked",
    "commit_round",
    "expand_beam",
    "hand_on",
    "mha",
    "mla",
    "move_kv",
    "move_kv_layers",
    "move_latent",
    "project_qkv",
    "register_backend",
    "rms_norm_linear",
    "store_kv",
    "store_latent",
    "top_tokens",
    "verify_greedy",
    "verify_sampling",
]

for _backend in BUILTIN:
    add_backend(_backend)
