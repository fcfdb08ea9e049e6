"""One model on several devices: three processes share SmolLM2 and its draft head, and say what one process says.

SmolLM2 has 9 query heads over 3 key/value heads, so it is cut for three. Started plainly, this file starts itself under
torchrun; on three GPUs each process takes one, elsewhere all run on the CPU.

    python examples/09_tensor_parallel.py "What is the capital of France?"
    torchrun --nproc-per-node 3 examples/09_tensor_parallel.py "What is the capital of France?"
"""

import os
import subprocess
import sys

import torch

import specops
from specops.parallel import torchrun_mesh

RANKS = 3

if "RANK" not in os.environ:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    sys.exit(subprocess.call([*command, os.path.abspath(__file__), *sys.argv[1:]]))

prompt = " ".join(sys.argv[1:]) or "What is the capital of France?"
device = "cuda" if torch.cuda.device_count() >= RANKS else "cpu"
mesh = torchrun_mesh(device)
models = specops.load_models("smollm2", mesh=mesh, dtype="float32")
# Every rank makes the same calls; each gets the whole answer.
(answer,) = specops.generate(prompt, model=models, max_new_tokens=16)

if mesh.get_rank() == 0:
    attention = models.target.attention_layers()[0]
    print(f"{mesh.size()} ranks, {attention.num_heads} query heads over {attention.num_kv_heads} key/value head on each")
    print(answer.text)
    whole = specops.load_models("smollm2", device=device, dtype="float32")
    (alone,) = specops.generate(prompt, model=whole, max_new_tokens=16)
    print(f"ids equal to those of one process: {answer.tokens == alone.tokens}")
