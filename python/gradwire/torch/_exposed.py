# SPDX-License-Identifier: Apache-2.0
"""What a training waits for. Communication that runs while gradients are still being computed costs nothing; what is
left when they are all there is exposed.

    exposed   from when the last gradients of a step were handed over until the last result was there
    plain     the same for torch's own all-reduce, as far as it can be known: in one early step torch's all-reduce of
              buffers of the same sizes is timed, over the same process group and with nothing else on the link. Buckets
              are then taken to be handed over when they really were, and to be reduced one after the other in these
              times

After JUDGED steps the two are compared, once, on the slowest rank: a step takes as long as the slowest rank computes,
and then what that rank waits. Other ranks wait for that rank too, which is no cost of communication, so the slowest
rank is the one that has waited least.

On a GPU the times are those between events on its streams, and are read when these have passed; the host waits for them
once, when both are compared.
"""

from __future__ import annotations

import math
import statistics
import struct
import threading
import time
import warnings
from typing import Callable, NamedTuple, Sequence

import torch

from . import _streams

TIMED, JUDGED = 20, 50  # the step before which torch's all-reduce is timed, and the one after which both are compared
UNREAD = 16  # pairs of events; to read one takes the host longer than to record it
MARGIN = 1.1  # how much longer a step must wait before that is more than noise


class _Step(NamedTuple):
    """On a GPU: what was recorded in a step, and whether it is to be compared."""

    handed: "list[torch.cuda.Event]"
    end: "torch.cuda.Event"
    compares: bool


class Exposed:
    """The meter of one hook. A step is `begin`, `handed` for each bucket, and `done`, perhaps in another thread."""

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self._device, self._clock = device, clock
        self.last, self.total = 0.0, 0.0
        self.judged: dict[str, float] = {}
        self.steps = 0  # since the codec was chosen
        self._handed: list[float] = []  # when, in this step
        self._is_complete, self._landed, self._lock = False, 0, threading.Lock()
        self._sizes: list[tuple[int, torch.dtype]] = []  # of the buckets of this step
        self._before: list[tuple[int, torch.dtype]] = []  # and of the one before
        self._costs: list[float] = []  # of torch's all-reduce, by bucket
        self._timed: list[tuple[int, torch.dtype]] = []
        self._is_timed = False  # the same on all ranks, also where it has failed on some
        self._waits: list[tuple[float, float]] = []  # exposed and plain, of the steps since then
        # On a GPU.
        self._marks: list[torch.cuda.Event] = []  # when buckets were handed over in this step, the last one at least
        self._cost_marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []  # of torch's all-reduce, not read yet
        self._unread: list[_Step] = []
        self._spare: list[torch.cuda.Event] = []

    def restart(self) -> None:
        """The codec has changed: what was compared says nothing about the new one."""
        self.steps, self._waits, self._costs, self._is_timed, self.judged = 0, [], [], False, {}
        self._cost_marks, self._unread = [], [step._replace(compares=False) for step in self._unread]

    # One step.

    def begin(self, reduce: "Callable[[torch.Tensor], None] | None" = None) -> None:
        """reduce: torch's all-reduce, which returns when it is complete, or on a GPU when the current stream waits for
        it; None where it would be no comparison."""
        self._handed, self._marks, self._sizes, self._landed = [], [], [], 0
        if self.steps == TIMED and reduce is not None:
            self._time(reduce)

    def _time(self, reduce: Callable[[torch.Tensor], None]) -> None:
        """All ranks do this in the same step."""
        self._is_timed = True
        costs, marks = [], []
        try:
            reduce(torch.zeros(1, device=self._device))  # ranks come at different times
            for elements, dtype in self._before:
                values = torch.zeros(elements, dtype=dtype, device=self._device)
                if self._device.type == "cuda":
                    began = self._mark()
                    reduce(values)
                    marks.append((began, self._mark()))
                else:
                    at = self._clock()
                    reduce(values)
                    costs.append(self._clock() - at)
        except RuntimeError:
            return  # not every backend can add every type; plain DDP would not work here either
        self._timed, self._costs, self._cost_marks = self._before, costs, marks

    @property
    def _compares(self) -> bool:
        """Whether this step counts for the comparison, as far as is known before its last bucket."""
        return bool(self._timed and (self._costs or self._cost_marks)) and self.steps < JUDGED

    def handed(self, buffer: torch.Tensor, last: bool) -> None:
        self._is_complete = last
        self._sizes.append((buffer.numel(), buffer.dtype))
        if self._device.type == "cpu":
            self._handed.append(self._clock())
        elif last or self._compares:
            self._marks.append(self._mark())

    def landed(self) -> None:
        """One of the results is there, in any order and in any thread."""
        with self._lock:
            self._landed += 1
            complete = self._is_complete and self._landed == len(self._handed)
        if complete:
            self.done()

    def done(self, stream: "torch.cuda.Stream | None" = None) -> None:
        """The last result is there; with a stream, once what is enqueued on it has run."""
        if self._device.type == "cuda":
            self._done_on(stream)
        elif self._handed:
            self.waited(self._clock() - self._handed[-1], self._plain(self._handed))

    def waited(self, seconds: float, plain: float) -> None:
        """Ends a step that has waited so long, and would have waited so long for torch."""
        self.last = seconds
        self.total += seconds
        if self._compares and self._sizes == self._timed:
            self._waits.append((seconds, plain))
        self._step_done()

    def _step_done(self) -> None:
        self._before = self._sizes
        self.steps += 1

    def _plain(self, handed: "Sequence[float]") -> float:
        if not self._costs:
            return 0.0
        end = -math.inf
        for at, cost in zip(handed, self._costs):
            end = max(end, at) + cost
        return end - handed[-1]

    @property
    def plain_total(self) -> float:
        """What torch's all-reduce of all buckets takes, if nothing of it is hidden."""
        return sum(self._costs)

    # On a GPU.

    def _mark(self, stream: "torch.cuda.Stream | None" = None) -> torch.cuda.Event:
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record(stream or _streams.current(self._device))
        return event

    def _done_on(self, stream: "torch.cuda.Stream | None") -> None:
        if stream is None or not self._marks:
            return
        compares = self._compares and self._sizes == self._timed and len(self._marks) == len(self._sizes)
        self._unread.append(_Step(self._marks, self._mark(stream), compares))
        self._marks = []
        self._step_done()
        if len(self._unread) % UNREAD == 0:
            self._read()

    def _read(self, wait: bool = False) -> None:
        """The steps whose events have passed; wait: all."""
        if wait and self._unread:
            self._unread[-1].end.synchronize()
        while self._unread and self._unread[0].end.query():
            handed, end, compares = self._unread.pop(0)
            self.last = _seconds(handed[-1], end)
            self.total += self.last
            if compares:
                if self._cost_marks:
                    self._costs = [_seconds(*pair) for pair in self._cost_marks]
                    self._cost_marks = []
                self._waits.append((self.last, self._plain([_seconds(handed[0], at) for at in handed])))
            self._spare += [*handed, end]

    # For the user.

    def judge(self, gather: Callable[[bytes], bytes], codec: str, tells: bool) -> None:
        """After each step, on all ranks. gather: the bytes of all ranks. tells: whether this is the rank that warns."""
        if self.steps != JUDGED or not self._is_timed:
            return
        self._read(wait=True)
        mine = [statistics.median(times) for times in zip(*self._waits)] or [math.nan, math.nan]
        gathered = gather(struct.pack("2d", *mine))
        found = struct.unpack(f"{len(gathered) // 8}d", gathered)
        every = list(zip(found[::2], found[1::2]))
        if any(math.isnan(exposed) for exposed, _ in every):
            return  # buckets have changed since, or torch's all-reduce has failed
        exposed, plain = min(every)
        self.judged = {"exposed": exposed, "plain": plain}
        if exposed > MARGIN * plain and tells:
            warnings.warn(
                f"gradwire: compression does not pay here: a step waits {1000 * exposed:.3g} ms for communication with "
                f"'{codec}', and would wait {1000 * plain:.3g} ms for torch's own all-reduce (medians, on the slowest "
                "rank)",
                stacklevel=2,
            )

    def seconds(self) -> tuple[float, float]:
        """Of the last step, and of all steps. On a GPU, of those that have ended by now."""
        self._read()
        return self.last, self.total


def _seconds(begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
    return max(0.0, float(begin.elapsed_time(end)) / 1000)


def with_exposed(report: "dict[str, object]", seconds: "Sequence[float | None]", judged: dict[str, float]) -> None:
    """Adds to the statistics of a hook: (of the last step, of all steps), None where it is not known."""
    for name, value in zip(("last_step", "all_steps"), seconds):
        cost = report[name]
        assert isinstance(cost, dict)
        cost["seconds"] = {**cost["seconds"], "exposed": value}
    report["judged"] = judged
