"""The short way to a replay, in C and in Python: what it serves, what it leaves to the long way, and what it costs, counted.

The driver and the graphs are pretended and run on the CPU. Run alone: pytest tests/compile/test_short_way.py
"""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton", reason="the staging kernel is a Triton kernel")

from specops.batch import Field, FieldTable
from specops.compile import GraphLost, StepRunner, launch, ready, short_way
from specops.compile.ready import Ready, Staging
from specops.compile.report import BucketReport
from specops.compile.short_way import KEPT_FORMS, ShortWay, form_check
from specops.compile.staging import FusedStaging
from specops.compile.static_tensors import StaticTensors
from tests.compile.fakes import CallCounter, FakeDriver, FakeGraph, as_library, capture, kernel
from tests.compile.test_static_tensors import MOVES, model

TABLE = FieldTable(
    (
        Field("ids", "token", (), torch.int64, -1),
        Field("lens", "request", (), torch.int32),
        Field("x", "token", (4,), torch.float32),
    ),
    2,
)
CPU = torch.device("cpu")


@dataclass
class Setup:
    """A short way for 3 requests in a bucket of 4, what it writes to, and what was called."""

    way: ShortWay
    driver: FakeDriver
    views: dict[str, Tensor]
    module: nn.Module
    replays: list[int] = field(default_factory=list)
    device: int = -1


def fake_driver(patch: pytest.MonkeyPatch, table: FieldTable, pads: list[bytes] | None = None) -> FakeDriver:
    rows = table.allocate(1, CPU)
    if pads is None:
        words = [torch.tensor([entry.pad], dtype=entry.dtype).view(torch.uint8).tolist() for entry in table.fields]
        pads = [bytes(word) for word in words]
    driver = FakeDriver([rows[name].nbytes for name in table.names], pads)
    library = as_library(driver)
    patch.setattr(launch, "_driver", lambda: library)
    return driver


@pytest.fixture(params=["C", "C, addresses by method", "Python"])
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    """Which of the two ways is taken."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "Python":
            patch.setattr(short_way, "native_way", lambda: None)
        else:
            assert short_way.native_way() is not None, "it needs a C compiler and Python's headers"
        if request.param == "C, addresses by method":
            patch.setattr(short_way, "_address_in_c", lambda: 0)
        yield request.param.split(",")[0]


@pytest.fixture
def setup(kind: str, monkeypatch: pytest.MonkeyPatch) -> Setup:
    driver = fake_driver(monkeypatch, TABLE)
    views, module = TABLE.allocate(4, CPU), model()
    fused = FusedStaging(TABLE)
    fused.copy._kernel = kernel()
    stage = Staging(TABLE.names, views, 3, 4, TABLE.copy_in, fused.prepare(views, 3, 4))
    made = Setup(None, driver, views, module)  # type: ignore[arg-type]
    monkeypatch.setattr(launch, "raw_stream", lambda index: 2**40 + 5 if index == made.device else None)
    monkeypatch.setattr(launch, "device_functions", lambda: (lambda: made.device, lambda index: 2**40 + 5))
    served = Ready(
        3, 4, views, BucketReport(4), stage, lambda: made.replays.append(len(driver.launches)), None, stage.launch
    )
    made.way = ShortWay(served, StaticTensors(module), -1)
    assert made.way.native == (kind == "C")
    made.way.learn(fields())
    return made


def fields(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(9, (3, 2), generator=generator),
        torch.randint(9, (3,), generator=generator).to(torch.int32),
        torch.randn(3, 2, 4, generator=generator),
    ]


def test_a_batch_is_staged_by_one_launch_and_replayed_behind_it(setup: Setup) -> None:
    for seed in range(3):
        for view in setup.views.values():
            view.fill_(77)
        batch = fields(seed)
        expected = {name: torch.full_like(view, 88) for name, view in setup.views.items()}
        TABLE.copy_in(expected, dict(zip(TABLE.names, batch, strict=True)), 3, 4)
        assert setup.way.go(tuple(batch) if seed else batch, False) is True
        assert all(torch.equal(expected[name], setup.views[name]) for name in expected)
    assert setup.replays == [1, 2, 3], "each behind its own launch"
    assert {stream for *_, stream, _ in setup.driver.launches} == {2**40 + 5}


def test_what_is_staged_already_is_only_replayed(setup: Setup) -> None:
    assert setup.way.go(fields(), True) is True
    assert (setup.driver.launches, setup.replays) == ([], [0])


def wrong(how: str) -> list[Any]:
    ids, lens, x = fields()
    return {
        "dtype": [ids, lens.long(), x],
        "fewer requests": [ids[:2], lens[:2], x[:2]],
        "wider": [ids, lens, torch.zeros(3, 2, 5)],
        "flat": [ids.flatten(), lens, x],
        "strided": [ids, torch.zeros(6, dtype=torch.int32)[::2], x],
        "on another device": [ids, lens, x.to("meta")],
        "too few": [ids, lens],
        "too many": [ids, lens, x, x],
        "a number": [ids, 3, x],
        "a list": [ids, lens.tolist(), x],
        "none": [None, None, None],
        "sparse": [ids, lens, x.to_sparse()],
        "negated": [ids, lens, torch.complex(x, x).conj().imag.contiguous()._neg_view()],
    }[how]


@pytest.mark.parametrize(
    "how",
    [
        *("dtype", "fewer requests", "wider", "flat", "strided", "on another device"),
        *("too few", "too many", "a number", "a list", "none", "negated", "sparse"),
    ],
)
def test_a_batch_of_another_form_is_not_served(setup: Setup, how: str) -> None:
    for staged in (False, True):
        assert setup.way.go(wrong(how), staged) is False
    assert (setup.driver.launches, setup.replays) == ([], [])
    assert setup.way.go(fields(), False) is True, "and does no harm"


def test_a_form_that_was_learnt_is_served_and_one_that_no_launch_can_take_is_not_learnt(setup: Setup) -> None:
    flat = [fields()[0].flatten(), fields()[1], fields()[2].flatten(0, 1)]
    assert setup.way.go(flat, False) is False
    setup.way.learn(flat)
    assert setup.way.go(flat, False) is True
    assert setup.way.go(fields(), False) is True, "beside the first"
    for how in ("strided", "sparse"):
        setup.way.learn(wrong(how))
        assert setup.way.go(wrong(how), False) is False
    for _ in range(2 * KEPT_FORMS):
        setup.way.learn(flat)
    assert len(setup.way.forms) == KEPT_FORMS


@pytest.mark.parametrize("why", ["unaligned", "other device", "driver says no"])
def test_what_a_launch_cannot_take_is_not_replayed(setup: Setup, why: str) -> None:
    batch = fields()
    if why == "unaligned":
        batch[1] = torch.arange(4, dtype=torch.int32)[1:]
    elif why == "other device":
        setup.device = 0
    else:
        setup.driver.error = 201
    assert setup.way.go(batch, False) is False
    assert setup.replays == []
    assert len(setup.driver.launches) == (why == "driver says no")


@pytest.mark.parametrize("move", MOVES, ids=lambda move: move.__name__)
def test_f26_nothing_is_replayed_after_a_move(setup: Setup, move: Any) -> None:
    assert setup.way.go(fields(), False) is True
    move(setup.module)
    for staged in (False, True):
        assert setup.way.go(fields(), staged) is False
    assert len(setup.replays) == 1


def test_f26_nothing_is_replayed_when_something_new_is_at_an_old_address(setup: Setup) -> None:
    """As after a pool was freed: the address is that of capture, what is there is not."""
    memory = bytearray(64)
    pool = nn.Module()
    pool.register_buffer("k", torch.frombuffer(memory, dtype=torch.float32))
    way = ShortWay(setup.way.ready, StaticTensors(pool), -1)
    way.learn(fields())
    assert way.go(fields(), False) is True
    pool.k = torch.frombuffer(memory, dtype=torch.float16)
    assert way.go(fields(), False) is False
    assert len(setup.replays) == 1


def test_what_a_replay_raises_is_raised(setup: Setup) -> None:
    def fail() -> None:
        raise RuntimeError("the device is gone")

    setup.way.ready.replay = fail
    with pytest.raises(RuntimeError, match="the device is gone"):
        setup.way.go(fields(), False)


def test_calls_keep_nothing(setup: Setup) -> None:
    batch = fields()
    weight = setup.module[0].proj.weight
    held = [*batch, weight, setup.way.ready, True, None]
    setup.way.go(batch, False)
    before = list(map(sys.getrefcount, held))
    for _ in range(100):
        setup.way.go(batch, False)
        setup.way.go(wrong("too few"), False)
        setup.way.go(wrong("flat"), False)
    after = list(map(sys.getrefcount, held))
    assert all(abs(now - then) < 50 for now, then in zip(after, before, strict=True)), (before, after)
    gone = [weakref.ref(tensor) for tensor in batch]
    del batch, held
    assert [reference() for reference in gone] == [None] * 3, "not by the form that was learnt of them either"


@pytest.mark.parametrize("guards", ["torch's", "Python's"])
def test_a_form_tells_every_difference(guards: str) -> None:
    if guards == "torch's":
        assert short_way._guards() is not None, "Python's serve, but cost more"
    make = form_check if guards == "torch's" else short_way._compare
    check = make(fields())
    assert check(*fields(1))
    for how in ("dtype", "fewer requests", "wider", "flat", "strided", "on another device"):
        assert not check(*wrong(how)), how
    permuted = fields()
    permuted[0] = permuted[0].t().contiguous().t()
    assert not check(*permuted)


@pytest.mark.parametrize("broken", ["blind", "never", "other arguments", "missing"])
def test_guards_of_torch_that_prove_wrong_are_not_used(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._C._dynamo import guards

    class Guards:
        def __init__(self, *tensors: Tensor, dynamic_dims_sizes: Any, dynamic_dims_strides: Any) -> None:
            self.check = lambda *tensors: broken == "blind"

    if broken == "missing":
        monkeypatch.delattr(guards, "TensorGuards")
    else:
        monkeypatch.setattr(guards, "TensorGuards", (lambda tensors: None) if broken == "other arguments" else Guards)
    short_way._guards.cache_clear()
    try:
        assert short_way._guards() is None
        check = form_check(fields())
        assert check(*fields(1))
        assert not check(*wrong("dtype"))
    finally:
        short_way._guards.cache_clear()


@pytest.mark.parametrize("broken", ["missing", "no guards", "wrong"])
def test_without_torchs_c_function_addresses_are_asked_in_python(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._C._dynamo import guards

    name = "_torchinductor_pyobject_tensor_data_ptr"
    short_way._address_in_c.cache_clear()
    assert short_way._address_in_c() == getattr(guards, name)
    other = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object)(lambda tensor: 4096)
    if broken == "missing":
        monkeypatch.delattr(guards, name)
    elif broken == "wrong":
        monkeypatch.setattr(guards, name, ctypes.cast(other, ctypes.c_void_p).value)
    else:
        monkeypatch.setattr(short_way, "_guards", lambda: None)
    short_way._address_in_c.cache_clear()
    try:
        assert short_way._address_in_c() == 0
    finally:
        short_way._address_in_c.cache_clear()


@pytest.mark.parametrize("trouble", ["no compiler", "one that fails", "turned off"])
def test_without_a_compiler_python_serves_and_it_is_told(
    trouble: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("SPECOPS_CACHE", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    if trouble == "no compiler":
        monkeypatch.setattr(short_way, "shutil", SimpleNamespace(which=lambda name: None))
    elif trouble == "one that fails":
        monkeypatch.setenv("CC", f"{sys.executable} -c raise(SystemExit('no'))")
    else:
        monkeypatch.setenv("SPECOPS_NATIVE", "0")
    short_way.native_way.cache_clear()
    try:
        if trouble == "turned off":
            assert short_way.native_way() is None
        else:
            with pytest.warns(RuntimeWarning, match=r"a replay begins some 10 us later than it could: .*(no C comp|failed)"):
                assert short_way.native_way() is None
            assert short_way.native_way() is None, "told once"
    finally:
        short_way.native_way.cache_clear()
    assert list(tmp_path.iterdir()) == []


class Wide(nn.Module):
    """Adds its fields up and scales them."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(layers)).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, **views: Tensor) -> tuple[Tensor]:
        return (sum(views.values()) * self.scale,)


def warm_runner(
    patch: pytest.MonkeyPatch, num_fields: int, layers: int
) -> tuple[StepRunner, dict[int, FakeGraph], FakeDriver]:
    """A direct runner whose graphs and prepared launches are pretended."""
    table = FieldTable(tuple(Field(f"f{i}", "request", (4,), torch.float32) for i in range(num_fields)), 1)
    runner = StepRunner(Wide(layers), table, device="cpu", max_requests=4, buckets=[2, 4], mode="direct", compiler="eager")
    runner.warm_up()
    graphs = capture(runner)
    driver = fake_driver(patch, table, [b"\0"] * num_fields)
    for module in (launch, ready):
        patch.setattr(module, "raw_stream", lambda index: 5)
    # Functions without Python, as torch's are.
    patch.setattr(launch, "device_functions", lambda: ((-1).__index__, [5].__getitem__))
    fused = FusedStaging(table)
    fused.copy._kernel = kernel()
    runner._stage = fused
    return runner, graphs, driver


def test_the_second_call_of_a_form_goes_the_short_way(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, graphs, driver = warm_runner(monkeypatch, 2, 1)
    long: list[int] = []
    run_long = runner._run_long
    monkeypatch.setattr(runner, "_run_long", lambda rows, same: (long.append(1), run_long(rows, same))[1])
    for seed, count in enumerate([3, 3, 4, 3, 4, 1, 1]):
        batch = [torch.full((count, 4), float(seed)), torch.full((count, 4), 10.0)]
        assert runner.run(batch)[0].tolist() == [[10.0 + seed] * 4] * count
    assert len(long) == 3, "one a number of requests"
    assert len(driver.launches) == 7
    assert {size: graph.replays for size, graph in graphs.items()} == {2: 2, 4: 5}
    assert {b.num_requests: b.replays for b in runner.explain().buckets} == {2: 2, 4: 5}
    again = runner.run([torch.zeros(1, 4)] * 2, unchanged=True)
    assert again[0].tolist() == [[16.0] * 4], "it was vouched for"
    assert len(driver.launches) == 7
    with pytest.raises(ValueError, match="f1 must be"):
        runner.run([torch.zeros(3, 4), torch.zeros(3, 5)])


def test_f26_a_weight_that_moves_between_short_calls_is_recorded_again(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, graphs, _ = warm_runner(monkeypatch, 2, 1)
    batch = [torch.ones(2, 4), torch.ones(2, 4)]
    for _ in range(3):
        runner.run(batch)
    assert runner._short
    runner.step.scale = nn.Parameter(torch.full((4,), 5.0), requires_grad=False)
    # The new record can't be a graph here.
    runner._uses_graphs = False
    with pytest.warns(GraphLost, match="scale has moved since capture; recording again"):
        assert runner.run(batch)[0].tolist() == [[10.0] * 4] * 2
    assert runner.run(batch)[0].tolist() == [[10.0] * 4] * 2
    assert graphs[2].replays == 3
    assert not runner._short


def test_python_functions_before_a_replay_are_few_whatever_the_number_of_fields_and_weights(kind: str) -> None:
    def calls(num_fields: int, layers: int) -> int:
        with pytest.MonkeyPatch.context() as patch:
            runner, _, driver = warm_runner(patch, num_fields, layers)
            batch = [torch.ones(2, 4) for _ in range(num_fields)]
            runner.run(batch)
            way = runner._short[2]
            counted = CallCounter(driver)
            counts: list[int] = []
            way.ready.replay = lambda: counts.append(counted.count)
            with counted:
                runner.run(batch)
            return counts[0] - counted.inside

    few = calls(2, 1)
    assert calls(8, 60) == few
    # run and the replay; check of addresses, which CUDA builds of torch have in C; in Python go, raw_stream, fire, in_place.
    assert few <= (4 if kind == "C" else 8)
