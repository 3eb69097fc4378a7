# SPDX-License-Identifier: Apache-2.0
"""What a step waits for, and the warning where compression does not pay. Times are given here and not measured: no test
depends on how fast a machine is.
"""

from __future__ import annotations

import struct
import warnings
from typing import Any

import pytest
import torch
from ranks import Rank, Ranks
from test_ddp import equal, prepared, train, weights
from test_hooks import needs_fsdp

import gradwire.torch as gw
from gradwire.torch import _exposed
from gradwire.torch._exposed import Exposed


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def step(meter: Exposed, clock: Clock, handed: list[float], done: float, reduce: Any = None) -> None:
    begin = clock.now
    meter.begin(reduce)
    begin = max(begin, clock.now)
    for number, after in enumerate(handed):
        clock.now = begin + after
        meter.handed(torch.zeros(1000 * (number + 1)), number == len(handed) - 1)
    clock.now = begin + done
    meter.done()


def test_exposed_is_what_is_left_when_the_last_gradients_are_there() -> None:
    clock = Clock()
    meter = Exposed(torch.device("cpu"), clock)
    step(meter, clock, [0.0, 10.0], 14.0)
    assert meter.seconds() == (4.0, 4.0)
    step(meter, clock, [0.0, 10.0], 11.0)
    assert meter.seconds() == (1.0, 5.0)
    # Results that come in any order, as those of torch's own all-reduce do.
    meter.begin()
    for after, last in ((0.0, False), (2.0, True)):
        clock.now += after
        meter.handed(torch.zeros(1), last)
    meter.landed()
    clock.now += 3.0
    meter.landed()
    assert meter.seconds() == (3.0, 8.0)


@pytest.mark.parametrize(
    "handed, plain",
    [
        ([0.0, 10.0], 2.0),  # the first is hidden
        ([0.0, 0.5], 2.5),  # the second waits for the first
        ([0.0, 0.0], 3.0),  # nothing is hidden
    ],
)
def test_plain_is_what_torch_would_leave_if_buckets_came_as_they_did(handed: list[float], plain: float) -> None:
    clock = Clock()
    meter = Exposed(torch.device("cpu"), clock)
    reduced: list[int] = []

    def reduce(values: torch.Tensor) -> None:
        reduced.append(values.numel())
        clock.now += values.numel() / 1000

    asked: list[bytes] = []

    def gather(mine: bytes) -> bytes:
        """This rank has waited less than the other, which has waited for it too."""
        asked.append(mine)
        exposed, would = struct.unpack("2d", mine)
        return mine + struct.pack("2d", exposed + 5, would + 5)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(_exposed.JUDGED + 3):
            step(meter, clock, handed, handed[-1] + 4.0, reduce)
            meter.judge(gather, "topk:ratio=0.01", True)
    assert reduced == [1, 1000, 2000] and len(asked) == 1
    assert meter.judged == {"exposed": pytest.approx(4.0), "plain": pytest.approx(plain)}
    assert [str(one.message) for one in caught] == [
        f"gradwire: compression does not pay here: a step waits 4e+03 ms for communication with 'topk:ratio=0.01', and "
        f"would wait {1000 * plain:.3g} ms for torch's own all-reduce (medians, on the slowest rank)"
    ]


class Event:
    """In place of torch.cuda.Event, on a stream that is at the clock's time."""

    clock: Clock
    delay = 0.0  # of what is enqueued, behind the clock of the host

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing

    def record(self, stream: Any) -> None:
        self.at = self.clock.now + self.delay

    def query(self) -> bool:
        return self.clock.now >= self.at

    def synchronize(self) -> None:
        self.clock.now = max(self.clock.now, self.at)

    def elapsed_time(self, end: "Event") -> float:
        return 1000 * (end.at - self.at)


@pytest.mark.parametrize("delay", [0.0, 70.0])
def test_on_a_gpu_times_are_those_between_events(monkeypatch: pytest.MonkeyPatch, delay: float) -> None:
    """Also where the GPU is many steps behind the host, which waits for it once."""
    clock = Clock()
    zeros = torch.zeros
    monkeypatch.setattr(Event, "clock", clock, raising=False)
    monkeypatch.setattr(Event, "delay", delay)
    monkeypatch.setattr(_exposed.torch.cuda, "Event", Event)
    monkeypatch.setattr(_exposed._streams, "current", lambda device: None)
    monkeypatch.setattr(_exposed.torch, "zeros", lambda *sizes, device="cpu", **how: zeros(*sizes, **how))
    meter = Exposed(torch.device("cuda"))
    stream: Any = object()
    asked = []

    def reduce(values: torch.Tensor) -> None:
        clock.now += values.numel() / 1000

    def gather(mine: bytes) -> bytes:
        asked.append(struct.unpack("2d", mine))
        return mine

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(_exposed.JUDGED + 3):
            meter.begin(reduce)
            for size, last in ((1000, False), (2000, True)):
                clock.now += 1.0
                meter.handed(zeros(size), last)
            clock.now += 4.0
            meter.done(stream)
            meter.judge(gather, "topk", True)
    # The first bucket takes a second, and is over when the second one comes; that takes two.
    assert asked == [(pytest.approx(4.0), pytest.approx(2.0))] and len(caught) == 1
    assert meter.judged == {"exposed": pytest.approx(4.0), "plain": pytest.approx(2.0)}
    clock.now += delay
    assert meter.seconds() == (pytest.approx(4.0), pytest.approx(4.0 * (_exposed.JUDGED + 3)))
    # Events are used again and again.
    assert len(meter._spare) <= 3 * (_exposed.UNREAD + 20 + delay)


def test_what_cannot_be_known_is_not_judged() -> None:
    for kind in ("no comparison", "fails", "other buckets", "another codec"):
        clock = Clock()
        meter = Exposed(torch.device("cpu"), clock)

        def reduce(values: torch.Tensor) -> None:
            if kind == "fails":
                raise RuntimeError("this backend cannot add that")
            clock.now += 1.0

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for number in range(_exposed.JUDGED + 1):
                handed = [0.0, 1.0] if kind != "other buckets" or number < _exposed.TIMED else [0.0, 1.0, 2.0]
                step(meter, clock, handed, 9.0, None if kind == "no comparison" else reduce)
                if kind == "another codec" and number == 30:
                    meter.restart()
                meter.judge(lambda mine: mine, "x", True)
        assert meter.judged == {} and meter.last > 0, kind


def judged(rank: Rank, cost: float, hook_of: str) -> Any:
    """A few steps, with what torch's all-reduce takes given, or without timing it (0); the warnings, the statistics,
    the sizes that were timed, and the weights."""
    before = _exposed.TIMED, _exposed.JUDGED, Exposed._time
    timed: list[int] = []

    def given(self: Exposed, reduce: Any) -> None:
        def noting(values: torch.Tensor) -> None:
            timed.append(values.numel())
            reduce(values)

        before[2](self, noting)
        self._costs = [cost] * len(self._costs)

    # Steps of a test are few.
    _exposed.TIMED, _exposed.JUDGED, Exposed._time = 2 if cost else -1, 5, given  # type: ignore[method-assign]
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if hook_of == "DDP":
                ddp, optimizer, hook = prepared(rank, "qsgd:bits=4", **({"nodes": 2} if rank.world == 4 else {}))
                train(rank, ddp, optimizer, range(8))
                found = weights(ddp)
            else:
                from test_hsdp import backward, made

                model = made(rank, (2, 2))
                hook = gw.compress(model, "qsgd:bits=4")
                for number in range(8):
                    backward(rank, model, number)
                found = []
    finally:
        _exposed.TIMED, _exposed.JUDGED, Exposed._time = before  # type: ignore[method-assign]
    mine = [str(one.message) for one in caught if "does not pay" in str(one.message)]
    return mine, hook.stats(), timed, found


@pytest.mark.parametrize("world", [2, 4])
def test_a_hook_warns_once_on_one_rank_if_compression_does_not_pay(ranks: Ranks, world: int) -> None:
    never = ranks.run(world, judged, 1e9, "DDP")
    always = ranks.run(world, judged, 1e-12, "DDP")
    untimed = ranks.run(world, judged, 0, "DDP")
    assert [(one[0], one[1]["judged"], one[2]) for one in untimed] == [([], {}, [])] * world
    for rank in range(world):
        for results, warned in ((never, 0), (always, int(rank == 0))):
            said, stats, timed, found = results[rank]
            assert len(said) == warned and stats["judged"] == results[0][1]["judged"]
            assert stats["judged"]["exposed"] > 0 and timed[0] == 1 and sum(timed) == 1 + 16522
            assert 0 < stats["last_step"]["seconds"]["exposed"] <= stats["all_steps"]["seconds"]["exposed"]
            assert equal(found, untimed[rank][3]), "timing changes no value"
    assert "a step waits" in always[0][0][0] and "and would wait" in always[0][0][0]
    assert always[0][1]["judged"]["plain"] < 1e-9 and never[0][1]["judged"]["plain"] > 1e8


@needs_fsdp
def test_the_hook_for_replicas_does_so_too(ranks: Ranks) -> None:
    from test_hsdp import need_mesh

    need_mesh(ranks, (2, 2))
    for rank, (said, stats, timed, _) in enumerate(ranks.run(4, judged, 1e-12, "HSDP")):
        assert len(said) == (rank == 0) and timed[0] == 1 and len(timed) > 2
        assert stats["judged"]["exposed"] > stats["judged"]["plain"] > 0
        assert 0 < stats["last_step"]["seconds"]["exposed"] <= stats["all_steps"]["seconds"]["exposed"]
    for said, stats, _, _ in ranks.run(4, judged, 1e9, "HSDP"):
        assert not said and stats["judged"]["plain"] > 1e8


def plain(rank: Rank) -> Any:
    ddp, optimizer, hook = prepared(rank, "fp32")
    train(rank, ddp, optimizer, range(3))
    return hook.stats()


def test_torchs_own_all_reduce_is_metered_and_not_judged(ranks: Ranks) -> None:
    for stats in ranks.run(2, plain):
        assert 0 < stats["last_step"]["seconds"]["exposed"] < stats["all_steps"]["seconds"]["exposed"]
        assert stats["judged"] == {}
