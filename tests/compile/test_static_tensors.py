"""Memory that a graph reads: whatever moves, is replaced or freed is seen; values changed in place are not.

Run alone: pytest tests/compile/test_static_tensors.py
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from specops.compile.static_tensors import StaticTensors, _address_check


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4, bias=False)
        self.norm = nn.LayerNorm(4)
        self.register_buffer("k", torch.zeros(3, 4))
        self.register_buffer("scale", torch.ones(1))


def model(layers: int = 2) -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(layers))).requires_grad_(False)


def data(m: nn.Module) -> None:
    m[0].proj.weight.data = m[0].proj.weight.data.clone()


def parameter(m: nn.Module) -> None:
    m[1].proj.weight = nn.Parameter(m[1].proj.weight.clone(), requires_grad=False)


def buffer(m: nn.Module) -> None:
    m[1].k = torch.zeros(3, 4)


def one_element(m: nn.Module) -> None:
    m[0].scale = torch.ones(1)


def straight_into_the_dict(m: nn.Module) -> None:
    m[0]._buffers["k"] = torch.zeros(3, 4)


def resized(m: nn.Module) -> None:
    m[0].k.resize_(3000, 400)


def emptied(m: nn.Module) -> None:
    m[0].k.untyped_storage().resize_(0)


def removed(m: nn.Module) -> None:
    del m[1].k


def none(m: nn.Module) -> None:
    m[1].k = None


def cast(m: nn.Module) -> None:
    m.half()


def there_and_back(m: nn.Module) -> None:
    m.double().float()


def child(m: nn.Module) -> None:
    m[0].norm = nn.LayerNorm(4)


def one_more_child(m: nn.Module) -> None:
    m[0].add_module("adapter", nn.Linear(4, 4))


MOVES: dict[Callable[[nn.Module], None], str] = {
    data: "0.proj.weight",
    parameter: "1.proj.weight",
    buffer: "1.k",
    one_element: "0.scale",
    straight_into_the_dict: "0.k",
    resized: "0.k",
    emptied: "0.k",
    removed: "1.k",
    none: "1.k",
    cast: "0.k",
    child: "0.norm",
    one_more_child: "0.adapter",
}


@pytest.mark.parametrize("keep", [False, True], ids=["freed", "kept by somebody"])
@pytest.mark.parametrize("move", MOVES, ids=lambda move: move.__name__)
def test_f26_a_move_is_seen_and_named(move: Callable[[nn.Module], None], keep: bool) -> None:
    module = model()
    statics = StaticTensors(module)
    assert statics.moved() is None
    kept = [tensor.detach() for tensor in [*module.parameters(), *module.buffers()]] if keep and move is not emptied else []
    move(module)
    assert statics.moved() == MOVES[move]
    assert statics.moved() == MOVES[move], "until a new record is made"
    assert StaticTensors(module).moved() is None
    del kept


def test_f26_weights_cast_there_and_back_are_seen_wherever_they_land() -> None:
    module = model()
    statics = StaticTensors(module)
    there_and_back(module)
    assert statics.moved() is not None


@pytest.mark.parametrize("storages_have_objects", [True, False])
@pytest.mark.parametrize("how", ["data", "buffer"])
def test_f26_something_new_at_an_old_address_is_seen(
    how: str, storages_have_objects: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool is freed, and its successor of another dtype and shape gets the same memory."""
    if not storages_have_objects:
        monkeypatch.setattr(torch.Tensor, "untyped_storage", lambda tensor: type("Storage", (), {})())
    memory = bytearray(64)

    class Pool(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("k", torch.frombuffer(memory, dtype=torch.float32))

    pool = Pool()
    address = pool.k.data_ptr()
    statics = StaticTensors(pool)
    assert statics.moved() is None
    if how == "data":
        pool.k.data = torch.frombuffer(memory, dtype=torch.float16)
    else:
        del pool.k
        pool.register_buffer("k", torch.frombuffer(memory, dtype=torch.float16))
    assert pool.k.data_ptr() == address
    assert statics.moved() == "k"


def test_values_changed_in_place_are_no_move() -> None:
    module = model()
    statics = StaticTensors(module)
    module.load_state_dict({name: torch.rand_like(tensor) for name, tensor in module.state_dict().items()})
    module[0].k.fill_(3)
    module[0].note = "an attribute"
    module[0].proj.weight.grad = torch.ones(4, 4)
    assert statics.moved() is None


def test_no_tensor_is_kept_alive() -> None:
    module = model()
    statics = StaticTensors(module)
    gone = [weakref.ref(tensor.untyped_storage()) for tensor in (module[0].k, module[0].proj.weight)]
    module[0].k = torch.zeros(9)
    module[0].proj.weight.data = torch.zeros(4, 4)
    assert [storage() for storage in gone] == [None, None]
    assert statics.moved() is not None


def test_a_module_without_tensors_never_moves() -> None:
    assert StaticTensors(nn.Identity()).moved() is None


def test_python_runs_no_loop_over_tensors() -> None:
    def calls(layers: int) -> int:
        statics, count = StaticTensors(model(layers)), 0

        def profile(frame: object, event: str, arg: object) -> None:
            nonlocal count
            count += event == "call"

        sys.setprofile(profile)
        try:
            assert statics.moved() is None
        finally:
            sys.setprofile(None)
        return count

    assert calls(1) == calls(40)


@pytest.mark.parametrize("kind", ["right", "blind", "other arguments"])
def test_torchs_own_check_is_used_where_it_proves_right(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    used = 0

    def check(tensors: list[Tensor], addresses: list[int], places: list[int]) -> bool:
        nonlocal used
        used += 1
        return kind == "blind" or [tensors[place].data_ptr() for place in places] == addresses

    def other(tensors: list[Tensor]) -> bool:
        return True

    function = other if kind == "other arguments" else check
    monkeypatch.setattr(torch._C, "_tensors_data_ptrs_at_indices_equal", function, raising=False)
    first, second = torch.zeros(2), torch.zeros(2)
    known = [first.data_ptr()], [0]
    at = _address_check([first], *known)
    used = 0
    assert at([first], *known)
    assert not at([second], *known)
    assert used == (2 if kind == "right" else 0)


def test_what_a_module_borrows_is_watched_and_named() -> None:
    """A head's embedding is its target's, kept in a tuple, and its graph reads it all the same."""
    target, head = model(), nn.Module()
    head.shared, head.none = (target[0], 3), ()
    own = nn.Sequential(head)
    statics = StaticTensors(own)
    assert statics.moved() is None
    target[0].proj.weight.data = target[0].proj.weight.data.clone()
    assert statics.moved() == "0.shared.proj.weight"
    statics = StaticTensors(own)
    target[0].k.add_(1)
    assert statics.moved() is None
    target[1].k = torch.zeros(3, 4)
    assert statics.moved() is None, "it reads nothing of the other one"
    head.shared = ()
    assert statics.moved() is None, "somebody has it still"
    del target
    gc.collect()
    assert statics.moved() == "0.shared"
