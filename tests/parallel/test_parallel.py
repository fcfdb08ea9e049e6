"""Tensor parallel: two processes over gloo give the ids of one, whatever the model, the draft and the shape of a round.

    OMP_NUM_THREADS=1 pytest tests/parallel/test_parallel.py

Two runs of ``ranks.py`` under torchrun give all the results; the tests read them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import specops
from specops import parallel
from specops.models.config import ModelConfig
from specops.models.llama import CausalLM
from specops.parallel import RankGroup, random_seed, shard, torchrun_mesh
from tests.parallel import ranks
from tests.spec.toys import greedy, small_llama, target_of, untrained_head

ROOT = Path(__file__).resolve().parents[2]
CASES = [
    *(f"llama/{draft}/{shape}/eager" for draft in ("shadow", "head", "reduced") for shape in ("chain", "tree")),
    "llama/None/plain/eager",
    "llama, biases/reduced/tree/eager",
    "llama, one kv head/reduced/tree/eager",
    "qwen 3/reduced/tree/eager",
    "deepseek v3/shadow/tree/eager",
    "deepseek v2, plain query/shadow/tree/eager",
    f"{ranks.SMALL}/reduced/tree/eager",
]


def torchrun(*arguments: str, processes: int = 2) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    if "cuda" not in arguments:
        # A GPU's many small kernels are compiled side by side.
        environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    try:
        return subprocess.run([*command, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    except subprocess.TimeoutExpired as late:
        said = late.stderr or ""
        said = said if isinstance(said, str) else said.decode(errors="replace")
        raise AssertionError(f"no end within {late.timeout:.0f} s:\n{said[-4000:]}") from None


def results(*arguments: str) -> dict[str, Any]:
    done = torchrun("tests/parallel/ranks.py", *arguments)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def eager() -> dict[str, Any]:
    return results()


@pytest.mark.slow
def test_every_case_ran(eager: dict[str, Any]) -> None:
    assert {key for key in eager if key.endswith("/eager")} == set(CASES)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_both_ranks_have_the_ids_of_one_process(eager: dict[str, Any], case: str) -> None:
    whole, parts = eager[case]["whole"], eager[case]["ranks"]
    for part in parts:
        assert part["tokens"] == whole["tokens"]
        assert part["accept_lens"] == whole["accept_lens"]
    if "shadow" in case:
        # Drafts that nobody accepts would prove little about the draft's own parts.
        assert max(max(lens) for lens in whole["accept_lens"]) > 1


@pytest.mark.slow
def test_the_ids_are_those_of_transformers(eager: dict[str, Any]) -> None:
    torch.manual_seed(0)
    judge = ranks.models("llama", "cpu")["judge"]
    expected = [greedy(judge, prompt, ranks.COUNT) for prompt in ranks.PROMPTS]
    assert [rank["tokens"] for rank in eager["llama/reduced/tree/eager"]["ranks"]] == [expected, expected]


@pytest.mark.slow
def test_a_rank_caches_its_own_heads_alone(eager: dict[str, Any]) -> None:
    assert [rank["kv_heads"] for rank in eager["llama/None/plain/eager"]["ranks"]] == [[1, 1], [1, 1]]
    assert eager["llama/None/plain/eager"]["whole"]["kv_heads"] == [2, 2]
    # One key/value head cannot be cut: each rank has it.
    assert [rank["kv_heads"] for rank in eager["llama, one kv head/reduced/tree/eager"]["ranks"]] == [[1, 1], [1, 1]]


@pytest.mark.slow
def test_a_seed_gives_the_answer_of_one_process(eager: dict[str, Any]) -> None:
    case = eager["llama/shadow/tree/seeded"]
    assert [rank["tokens"] for rank in case["ranks"]] == [case["whole"]["tokens"]] * 2


@pytest.mark.slow
def test_ranks_agree_on_seeds_that_nobody_gave(eager: dict[str, Any]) -> None:
    first, second = eager["llama/shadow/tree/seedless"]["ranks"]
    assert first["seeds"] == second["seeds"]
    assert len(set(first["seeds"])) == len(ranks.PROMPTS)
    assert first["tokens"] == second["tokens"]


@pytest.mark.slow
def test_a_model_is_cut_once(eager: dict[str, Any]) -> None:
    found = eager["group"]["ranks"]
    assert [(rank["rank"], rank["size"]) for rank in found] == [(0, 2), (1, 2)]
    assert all("CausalLM is cut already; load it again to cut it for 2 ranks" in rank["again"] for rank in found)


@pytest.mark.slow
def test_a_compiled_step_with_collectives_gives_the_same_ids() -> None:
    case = results("--models", ranks.SMALL, "--modes", "direct")[f"{ranks.SMALL}/None/plain/direct"]
    assert [rank["tokens"] for rank in case["ranks"]] == [case["whole"]["tokens"]] * 2
    assert [rank["warnings"] for rank in case["ranks"]] == [[], []]


@pytest.mark.slow
def test_the_command_line_tells_once_which_numbers_of_processes_would_do() -> None:
    done = torchrun("-m", "specops.cli", "generate", "--device", "cpu", "--prompt", "Hi", "--plain")
    assert done.returncode != 0
    assert done.stdout == ""
    assert (
        "specops: CausalLM cannot be cut for 2 ranks: 9 query heads over 3 key/value heads. It can be for 1, 3 or 9"
        in done.stderr.splitlines()
    )


def test_other_commands_and_other_prompts_say_that_they_run_in_one_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from specops.cli import main

    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["backends"]) == 2
    assert "backends runs in one process" in capsys.readouterr().err
    assert main(["generate", "--file", "prompts.jsonl"]) == 2
    assert "give them with --prompt" in capsys.readouterr().err


@pytest.fixture
def three_ranks() -> Iterator[Any]:
    """A mesh of three ranks of which this process is the second; its collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=3)
    try:
        yield torchrun_mesh("cpu")
    finally:
        dist.destroy_process_group()


def test_heads_that_the_ranks_do_not_divide_are_refused_and_nothing_is_cut(three_ranks: Any) -> None:
    target = target_of(small_llama())
    head = untrained_head(target)
    before = {name: tensor.shape for name, tensor in target.state_dict().items()}
    with pytest.raises(ValueError, match=r"for 3 ranks: 8 query heads over 2 key/value heads\. It can be for 1, 2, 4 or 8"):
        shard(target, head, mesh=three_ranks)
    assert {name: tensor.shape for name, tensor in target.state_dict().items()} == before


def test_a_real_shape_is_cut_by_three(three_ranks: Any) -> None:
    config = ModelConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1408,
        num_layers=1,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    model = CausalLM(config)
    whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    group = shard(model, mesh=three_ranks)
    assert (group.rank, group.size) == (1, 3)
    attn, mlp = model.layers[0].attn, model.layers[0].mlp
    qkv = whole["layers.0.attn.qkv.weight"]
    expected = torch.cat((qkv[192:384], qkv[576 + 64 : 576 + 128], qkv[768 + 64 : 768 + 128]))
    torch.testing.assert_close(attn.qkv.weight, expected, rtol=0, atol=0)
    torch.testing.assert_close(attn.o.weight, whole["layers.0.attn.o.weight"][:, 192:384], rtol=0, atol=0)
    assert (attn.num_heads, attn.num_kv_heads) == (3, 1)
    # 1408 rows are three parts of 480, the last one short.
    up = whole["layers.0.mlp.gate_up.weight"][1408:]
    torch.testing.assert_close(mlp.gate_up.weight[480:], up[480:960], rtol=0, atol=0)
    torch.testing.assert_close(mlp.down.weight, whole["layers.0.mlp.down.weight"][:, 480:960], rtol=0, atol=0)
    assert model.embed_tokens.weight.shape == (49152, 576)
    torch.testing.assert_close(model.lm_head.weight, whole["embed_tokens.weight"][16384:32768], rtol=0, atol=0)


def test_what_cannot_be_cut_says_so(three_ranks: Any) -> None:
    with pytest.raises(ValueError, match="Linear has no layer that can be cut"):
        shard(torch.nn.Linear(3, 3), mesh=three_ranks)
    mesh = dist.device_mesh.init_device_mesh("cpu", (1, 3), mesh_dim_names=("dp", "tp"))
    with pytest.raises(ValueError, match=r"one dimension, got \(1, 3\); pass one of its dimensions by name.*dp, tp"):
        RankGroup.of(mesh)
    assert RankGroup.of(mesh["tp"]).size == 3


def test_without_torchrun_the_mesh_says_how_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(RuntimeError, match="start the program with torchrun --nproc-per-node N"):
        torchrun_mesh("cpu")


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc, which this system lacks")
def test_no_thread_of_gloo_is_left_when_the_process_ends() -> None:
    """Such a thread may wait for an interpreter that is gone, and the process is aborted; the mesh is still in use."""
    code = """
import os, torch
from specops import parallel

def gloo():
    names = [open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")]
    return sum("gloo" in name for name in names)

mesh = parallel.torchrun_mesh("cpu")
import torch.distributed.nn.functional  # Loading a model does; what is imported now has the group in its defaults.
group = mesh.get_group().group_name
torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(torch.ones(3), "sum", group))
print(gloo())
parallel._leave()
print(gloo())
"""
    rendezvous = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "LOCAL_RANK": "0"}
    environment = {**os.environ, **rendezvous, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    before, after = map(int, done.stdout.split())
    assert before > 0
    assert after == 0


def test_every_graph_is_dropped_before_the_group_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL waits for graphs with its collectives, which torch and a program's engine keep to the end."""

    class Graph:
        dropped = False

        def reset(self) -> None:
            self.dropped = True

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    order: list[Any] = []
    kept, cycle = {"engine": [Graph()]}, [Graph()]
    cycle.append(cycle)  # type: ignore[arg-type]
    graphs = [kept["engine"][0], cycle[0]]
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: order.extend(graph.dropped for graph in graphs))
    monkeypatch.setattr(sys, "last_value", ValueError(), raising=False)
    parallel._leave()
    parallel._drop_graphs()
    assert not any(graph.dropped for graph in graphs), "a rank that failed waits for nobody"
    monkeypatch.delattr(sys, "last_value")
    parallel._leave()
    assert order == [True, True]


def test_a_whole_model_draws_its_seeds_alone() -> None:
    torch.manual_seed(3)
    expected = int(torch.randint(2**62, ()))
    torch.manual_seed(3)
    assert random_seed(torch.nn.Identity(), torch.device("cpu")) == expected


def test_loading_takes_a_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    target = torch.nn.Identity()
    monkeypatch.setattr("specops.api.load_target", lambda model, **options: seen.append(options) or target)
    monkeypatch.setattr("specops.parallel.shard", lambda *models, mesh: seen.append((models, mesh)))

    class Mesh:
        device_type = "cuda"

        def size(self) -> int:
            return 2

    mesh: Any = Mesh()
    specops.load_models("anything", None, tokenizer=object(), mesh=mesh)
    assert (seen[0]["device"], seen[0]["dtype"]) == ("cpu", torch.bfloat16)
    assert seen[1] == ((target,), mesh)
