"""Tensor parallel decoding: each rank holds a part of every layer's heads and MLP rows, and they sum twice a layer.

    mesh = torchrun_mesh()                              # one process a GPU, started by torchrun
    target = load_target(path, dtype=torch.bfloat16)    # on the CPU
    head = load_head(folder, target)
    shard(target, head, mesh=mesh)                      # keeps this rank's part and moves it to the mesh's device
    engine = Engine(target, head)

What each rank keeps, for ``n`` ranks (Megatron-LM, Shoeybi et al. 2019):

* attention: ``1/n`` of the query heads, the key and value heads they read, and the columns of the output projection
  that belong to them. The KV cache holds those heads alone. With fewer key and value heads than ranks, several ranks
  keep a copy of the same one;
* MLP: ``1/n`` of the rows of gate and up, and the matching columns of down, with zeros where ``n`` divides neither;
* LM head: ``1/n`` of the vocabulary, the last part filled up with zeros. The logits are gathered, so that every rank
  chooses from the same bits;
* all else, embedding and norms above all, is whole on every rank.

A rank adds its part of a block's output to the others' by one all-reduce after the output projection and one after
down. Collectives are torch's functional ones: they trace under ``torch.compile(fullgraph=True)``, and NCCL's are
captured in CUDA graphs. Every rank runs the same program on the same prompts: scheduling depends on nothing that differs
between them, random numbers on seeds, and seeds that nobody gave are the first rank's.

This module knows no engine. Pipeline, expert and data parallel are not here; neither are models of other packages.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from specops.models.deepseek import LatentAttention
from specops.models.eagle import EagleHead
from specops.models.llama import MLP, Attention, CausalLM
from specops.models.packed_linear import unpack_linears

# MLP rows a rank gets where the ranks do not divide them: a multiple of this, which matrix units like.
TILE = 16

__all__ = ["RankGroup", "group_of", "random_seed", "shard", "torchrun_mesh"]


@dataclass(frozen=True)
class RankGroup:
    """The ranks that share a model, by the name of their process group, so that models stay copyable.

    Attributes:
        name: of the process group.
        rank, size: this process's place among the ranks.
    """

    name: str
    rank: int
    size: int

    @classmethod
    def of(cls, mesh: DeviceMesh) -> RankGroup:
        """The group of a mesh of one dimension.

        Raises:
            ValueError: the mesh has several dimensions.
        """
        if mesh.ndim != 1:
            names = ", ".join(mesh.mesh_dim_names or ())
            raise ValueError(
                f"tensor parallel takes a mesh of one dimension, got {tuple(mesh.shape)}; pass one of its dimensions by "
                f"name, mesh[name]{f' of {names}' if names else ''}"
            )
        group = mesh.get_group()
        return cls(group.group_name, dist.get_rank(group), dist.get_world_size(group))

    def sum(self, x: Tensor) -> Tensor:
        """The sum of every rank's ``x``, in its dtype; the same bits on all of them."""
        ops = torch.ops._c10d_functional
        return cast(Tensor, ops.wait_tensor(ops.all_reduce(x.contiguous(), "sum", self.name)))

    def gather_last(self, x: Tensor, width: int) -> Tensor:
        """Every rank's ``x`` ``[R, C]`` side by side, cut to ``width`` columns: ``[R, width]``."""
        ops = torch.ops._c10d_functional
        parts = ops.wait_tensor(ops.all_gather_into_tensor(x.contiguous(), self.size, self.name))
        whole: Tensor = parts.view(self.size, *x.shape).transpose(0, 1).reshape(x.shape[0], -1)
        return whole[:, :width]

    def first(self, x: Tensor) -> Tensor:
        """The first rank's ``x``."""
        ops = torch.ops._c10d_functional
        return cast(Tensor, ops.wait_tensor(ops.broadcast(x, 0, self.name)))


@dataclass(frozen=True)
class _Gather:
    """Joins the ranks' parts of the logits."""

    group: RankGroup
    vocab: int

    def __call__(self, logits: Tensor) -> Tensor:
        return self.group.gather_last(logits, self.vocab)


# Those that torchrun_mesh has made.
_meshes: list[DeviceMesh] = []


def torchrun_mesh(device: str | None = None) -> DeviceMesh:
    """The mesh of all processes that torchrun has started; the first call starts their process group.

    Args:
        device: ``"cuda"`` (NCCL, one GPU a process) or ``"cpu"`` (gloo); a GPU where there is one when not given.

    Raises:
        RuntimeError: not started by torchrun, or fewer GPUs than processes on this host; says what to run.
    """
    kind = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")).type
    if not dist.is_initialized():
        if "RANK" not in os.environ:
            raise RuntimeError(
                "tensor parallel runs as one process a GPU: start the program with torchrun --nproc-per-node N, or start "
                "the process group yourself"
            )
        local, bound = int(os.environ.get("LOCAL_RANK", "0")), None
        if kind == "cuda":
            if local >= torch.cuda.device_count():
                raise RuntimeError(
                    f"process {local} of this host has no GPU: there are {torch.cuda.device_count()}; give torchrun "
                    "--nproc-per-node that number or less, or choose device cpu"
                )
            bound = torch.device("cuda", local)
            torch.cuda.set_device(bound)
        # Its functions have the group of their import as a default, which would keep its threads to the end; see _leave.
        importlib.import_module("torch.distributed.nn.functional")
        dist.init_process_group("nccl" if kind == "cuda" else "gloo", device_id=bound)
        atexit.register(_leave)
    mesh = init_device_mesh(kind, (dist.get_world_size(),))
    _meshes.append(mesh)
    return mesh


def _leave() -> None:
    """Leave the process group; of gloo's, a process whose threads outlive the interpreter is aborted now and then.

    The threads end with the last reference to the group, one of which a mesh keeps. NCCL's group is left to the end of a
    process that has failed, as ranks that go on would be waited for.
    """
    if _failed_on_gpu():
        return
    _drop_graphs()
    if dist.is_initialized():
        dist.destroy_process_group()
    for mesh in _meshes:
        getattr(mesh, "_pg_registry", {}).clear()
    _meshes.clear()


def _drop_graphs() -> None:
    """Drop every captured graph of this process, which is about to end.

    NCCL leaves a communicator only when no graph holds its collectives any more, and waits for that without an end. Torch
    keeps those of ``mode="reduce-overhead"`` until the interpreter is gone, and so does a program its engine.
    """
    if not torch.cuda.is_initialized() or _failed_on_gpu():  # type: ignore[no-untyped-call]
        return
    torch.cuda.synchronize()
    for found in gc.get_objects():
        if issubclass(type(found), torch.cuda.CUDAGraph):
            found.reset()


def _failed_on_gpu() -> bool:
    """Whether an exception ends this process. Its last collective may be one that no other rank comes to."""
    failed = getattr(sys, "last_value", None) is not None
    return failed and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


@torch.no_grad()
def shard(*models: nn.Module, mesh: DeviceMesh) -> RankGroup:
    """Cut models down to this rank's part, in place, and move them to the mesh's device.

    Call it once, with the target and its draft head together (the head reads the target's LM head when it is made), before
    an engine or runner takes them. A head is cut like the target.

    Args:
        models: of this package: :class:`~specops.models.CausalLM`, :class:`~specops.models.eagle.EagleHead`, or modules that
            contain one.
        mesh: of one dimension; its device type is where the models go, its current device which one.

    Returns:
        The ranks, as the models keep them.

    Raises:
        ValueError: heads that the ranks do not divide (names both, and numbers of ranks that would do), a model that is
            cut already, or one with nothing to cut. No model has been changed then.
    """
    group = RankGroup.of(mesh)
    parts = [list(_parts(model)) for model in models]
    for model, found in zip(models, parts, strict=True):
        if not found:
            raise ValueError(
                f"{type(model).__name__} has no layer that can be cut; give a target or a head of specops.models"
            )
        _check(model, found, group)
    device = torch.device(mesh.device_type)
    for model, found in zip(models, parts, strict=True):
        unpack_linears(model)
        for part in found:
            _cut(part, group)
        if device.type != "cpu":
            model.to(torch.device(device.type, torch.cuda.current_device()))
    if device.type != "cpu":
        # Once, however many models; also where the process group is somebody else's.
        atexit.unregister(_drop_graphs)
        atexit.register(_drop_graphs)
    return group


def group_of(model: nn.Module) -> RankGroup | None:
    """The ranks that share ``model``; None for a whole one."""
    gather = getattr(model, "gather", None)
    return gather.group if isinstance(gather, _Gather) else None


def random_seed(model: nn.Module, device: torch.device) -> int:
    """A seed from torch's generator; that of the first rank where ``model`` is shared, whose ``device`` is given."""
    seed, group = torch.randint(2**62, ()), group_of(model)
    return int(seed if group is None else group.first(seed.to(device)))


def _parts(model: nn.Module) -> Iterator[nn.Module]:
    """The modules of ``model`` that are cut."""
    for module in model.modules():
        if isinstance(module, (Attention, LatentAttention, MLP, CausalLM, EagleHead)):
            yield module


def _check(model: nn.Module, parts: list[nn.Module], group: RankGroup) -> None:
    if any(getattr(part, name, None) is not None for part in parts for name in ("reduce", "gather")):
        raise ValueError(f"{type(model).__name__} is cut already; load it again to cut it for {group.size} ranks")
    heads = sorted({found for part in parts if (found := _heads(part)) is not None})
    failing = [f"{q} query heads over {kv} key/value heads" for q, kv in heads if not _divides(q, kv, group.size)]
    if failing:
        most = max(q for q, _ in heads)
        sizes = [n for n in range(1, most + 1) if all(_divides(q, kv, n) for q, kv in heads)]
        raise ValueError(
            f"{type(model).__name__} cannot be cut for {group.size} ranks: {' and '.join(failing)}. It can be for "
            + (f"{', '.join(map(str, sizes[:-1]))} or {sizes[-1]}" if len(sizes) > 1 else "no more than 1")
        )


def _heads(part: nn.Module) -> tuple[int, int] | None:
    """Query heads and key/value heads of an attention layer."""
    if isinstance(part, Attention):
        return part.num_heads, part.num_kv_heads
    return (part.num_heads, 1) if isinstance(part, LatentAttention) else None


def _divides(heads: int, kv_heads: int, size: int) -> bool:
    return heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)


def _cut(part: nn.Module, group: RankGroup) -> None:
    if isinstance(part, Attention):
        _cut_attention(part, group)
    elif isinstance(part, LatentAttention):
        _cut_latent(part, group)
    elif isinstance(part, MLP):
        rows = part.down.in_features
        own = _own_or_none(rows, group)
        _keep_rows(part.gate_up, torch.cat((own, torch.where(own < 0, own, rows + own))))
        _keep_columns(part.down, own, group)
        part.reduce = group.sum
    elif isinstance(part, CausalLM):
        _cut_lm_head(part, group)
    elif isinstance(part, EagleHead):
        weight = _vocabulary_rows(part.lm_head_weight, group)
        part.gather = _Gather(group, part.lm_head_weight.shape[0])
        part.lm_head_weight = nn.Parameter(weight, requires_grad=False) if part.config.own_lm_head else weight


def _cut_attention(part: Attention, group: RankGroup) -> None:
    dim, heads, kv_heads = part.head_dim, part.num_heads, part.num_kv_heads
    own = _own(heads, group)
    own_kv = _own(kv_heads, group) if kv_heads % group.size == 0 else torch.tensor([group.rank * kv_heads // group.size])
    stacked = torch.cat((own, heads + own_kv, heads + kv_heads + own_kv))
    _keep_rows(part.qkv, _spread(stacked, dim))
    _keep_columns(part.o, _spread(own, dim), group)
    if part.qk_norm is not None:
        part.qk_norm.weight = _parameter(part.qk_norm.weight[torch.cat((own, heads + own_kv))])
    if part.sinks is not None:
        part.sinks = _parameter(part.sinks[own])
    part.num_heads, part.num_kv_heads, part.cache = len(own), len(own_kv), None
    part.reduce = group.sum


def _cut_latent(part: LatentAttention, group: RankGroup) -> None:
    """Heads of the query and of the up-projections; the latent and its cache are whole on every rank."""
    own, key_dim = _own(part.num_heads, group), part.nope_dim + part.rope_dim
    query_rows = _spread(own, key_dim)
    if part.query_up is not None:
        _keep_rows(part.query_up, query_rows)
    else:
        shared = torch.arange(part.first_rows, part.down.out_features)
        _keep_rows(part.down, torch.cat((query_rows, shared)))
        part.first_rows = len(query_rows)
    part.kv_up = _parameter(part.kv_up[_spread(own, part.nope_dim + part.value_dim)])
    _keep_columns(part.o, _spread(own, part.value_dim), group)
    part.num_heads, part.cache = len(own), None
    part.reduce = group.sum


def _cut_lm_head(model: CausalLM, group: RankGroup) -> None:
    weight = model.lm_head.weight
    part = _vocabulary_rows(weight, group)
    model.lm_head = nn.Linear(weight.shape[1], part.shape[0], bias=False, device="meta")
    model.lm_head.weight = nn.Parameter(part, requires_grad=False)
    model.gather = _Gather(group, weight.shape[0])


def _vocabulary_rows(weight: Tensor, group: RankGroup) -> Tensor:
    """This rank's rows, with zeros behind the last ones where the ranks do not divide the vocabulary."""
    rows = -(-weight.shape[0] // group.size)
    own = torch.arange(group.rank * rows, (group.rank + 1) * rows)
    return _selected(weight.detach(), 0, torch.where(own < weight.shape[0], own, -1))


def _own(count: int, group: RankGroup) -> Tensor:
    """Indices of this rank's part of ``count`` things."""
    size = count // group.size
    return torch.arange(group.rank * size, (group.rank + 1) * size)


def _own_or_none(count: int, group: RankGroup) -> Tensor:
    """As :func:`_own` for a count that the ranks need not divide: parts of whole tiles, with -1 where nothing is left."""
    if count % group.size == 0:
        return _own(count, group)
    size = -(-count // (group.size * TILE)) * TILE
    own = torch.arange(group.rank * size, (group.rank + 1) * size)
    return torch.where(own < count, own, -1)


def _spread(heads: Tensor, dim: int) -> Tensor:
    """Rows of heads of ``dim`` rows each."""
    return (heads[:, None] * dim + torch.arange(dim)).flatten()


def _keep_rows(linear: nn.Linear, rows: Tensor) -> None:
    linear.weight = _parameter(_selected(linear.weight, 0, rows))
    if linear.bias is not None:
        linear.bias = _parameter(_selected(linear.bias, 0, rows))
    linear.out_features = len(rows)


def _keep_columns(linear: nn.Linear, columns: Tensor, group: RankGroup) -> None:
    """The outputs are summed over ranks, so the bias stays on the first alone."""
    linear.weight = _parameter(_selected(linear.weight, 1, columns))
    if linear.bias is not None and group.rank:
        linear.bias = _parameter(torch.zeros_like(linear.bias))
    linear.in_features = len(columns)


def _selected(weight: Tensor, dim: int, index: Tensor) -> Tensor:
    """Rows or columns of a weight by index, zeros for -1."""
    index = index.to(weight.device)
    picked = weight.index_select(dim, index.clamp(min=0))
    if int(index.min()) >= 0:
        return picked
    kept = (index >= 0).to(weight.dtype)
    return picked * (kept if dim == weight.dim() - 1 else kept[:, None])


def _parameter(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values.contiguous(), requires_grad=False)
