# SPDX-License-Identifier: Apache-2.0
"""The exchanges of low-rank factors (_lowrank.py) as tasks of the transport. The first exchange is one for each of
DDP's buckets: a factor of every matrix of the bucket, and beside them the parameters of the bucket that are sent
exactly. The second one, with alternate=off, has the other factors of the whole model. It is submitted when the first
exchange of the last bucket is done, to a transport of its own: there it comes in the same order on all ranks, also
where another model hands over buckets meanwhile.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Callable, Sequence

import torch

from ._chunks import used_flags
from ._lowrank import Run, orthonormal, taint, taints
from ._task import CodingTask
from ._transport import Exchange, Transport

if TYPE_CHECKING:
    from ._lowrank_hook import LowRankHook


class FactorTask(CodingTask):
    """An exchange of one factor of each matrix of `runs`, and of `passengers`: parameters that are sent exactly."""

    runs: list[Run]  # what is exchanged of them is p where `is_p` says so, else q
    is_p: list[bool]
    is_value: list[bool]  # whether the mean makes the result; otherwise its rows are only a basis
    passengers: list[torch.Tensor]

    def __init__(self, hook: "LowRankHook", tensors: list[int], transport: Transport) -> None:
        super().__init__(hook._factors, tensors, transport, hook._device, hook._threads, hook._times)
        self.hook = hook

    def _x(self, run: Run, p: bool) -> torch.Tensor:
        return run.cut(run.group.x_p if p else run.group.x_q)

    def _own(self, run: Run, p: bool) -> torch.Tensor:
        return run.cut(run.group.own_p if p else run.group.own_q)

    def _point(self, stacks: Sequence[torch.Tensor]) -> list[int]:
        """Addresses of factors, and of the passengers behind them."""
        factors = [one.data_ptr() for stack in stacks for one in stack.unbind()]
        return factors + [one.data_ptr() for one in self.passengers]

    def encode(self) -> Exchange | None:
        """Encodes, and finds out what this rank adds to the means."""
        if not self.tensors:
            return None
        stacks = [self._x(run, p) for run, p in zip(self.runs, self.is_p)]
        self.pointers = self._point(stacks)
        self.coder.begin()
        send, slots, answers = self.encode_up(self.pointers)
        owns = [self._own(run, p) for run, p in zip(self.runs, self.is_p)]
        if any(value and run.group.codec.bits < 32 for run, value in zip(self.runs, self.is_value)):
            # Passengers are decoded into themselves: they are exact.
            self.coder.decode_own(send.data_ptr(), send.numel(), self._point(owns))
        else:
            for own, stack in zip(owns, stacks):
                own.copy_(stack)
        return self.exchange("up", send, slots, answers)

    def add_lost(self) -> None:
        """What the rounding of a mean has left out becomes a part of what its owner has not added."""
        lossy = [value and run.group.codec.bits < 32 for run, value in zip(self.runs, self.is_value)]
        if not any(lossy):
            return
        stacks = [self._x(run, p) for run, p in zip(self.runs, self.is_p)]
        exact = [stack.clone() for stack in stacks]
        places: list[int] = []
        for copy, some in zip(exact, lossy):
            places += [one.data_ptr() if some else 0 for one in copy.unbind()]
        self.coder.read_means(places + [0] * len(self.passengers))
        for run, p, mean, stack in zip(self.runs, self.is_p, exact, stacks):
            self._own(run, p).sub_(mean.sub_(stack), alpha=self.transport.world)

    def conclude(self) -> None:
        """From the means of values: the residuals, the results and the next bases."""
        values = [(run, p) for run, p, value in zip(self.runs, self.is_p, self.is_value) if value]
        stacks = [self._x(run, p) for run, p in values]
        for (run, p), stack, found in zip(values, stacks, taints(stacks)):
            group = run.group
            if not group.codec.alternate:
                found.add_(run.cut(group.taint))
            self.hook._taints.append(found.sum())
            stack.add_(found)
            own, result = (
                ((group.own_p, group.q), (group.x_p, group.q)) if p else ((group.p, group.own_q), (group.p, group.x_q))
            )
            self.hook._measure_before(run)
            run.split(own, result, [self.hook._views[one] for one in run.parameters], self.hook._open_scale)
            self.hook._measure_after(run)
        starts = [run.cut(run.group.p_start if p else run.group.q_start) for run, p in values]
        for (run, p), made in zip(values, orthonormal(stacks, starts)):
            run.cut(run.group.new_p if p else run.group.new_q).copy_(made)
            self.hook._keep_idle(run)


class FirstExchange(FactorTask):
    """That of one of DDP's buckets, at steps of one parity."""

    def __init__(self, hook: "LowRankHook", bucket: tuple[int, ...], step: int) -> None:
        self.runs = [run for group in hook._groups for run in group.runs(bucket)]
        self.is_p = [run.group.sends_p(step) for run in self.runs]
        self.is_value = [run.group.codec.alternate for run in self.runs]
        self.matrices = [one for run in self.runs for one in run.parameters]
        self.exact = [one for one in bucket if one in hook._passenger_at]
        self.bucket = bucket
        wired = [hook._wired(one, p) for run, p in zip(self.runs, self.is_p) for one in run.parameters]
        super().__init__(hook, wired + [hook._passenger_at[one] for one in self.exact], hook._transport)
        self.settle: Callable[[], None] | None = None
        self.beside: Sequence[CodingTask] = []  # of the same bucket, with other codecs
        self.used: torch.Tensor | None = None  # which gradients are not zero, where they were replaced since

    def load(
        self, buffer: torch.Tensor, gradients: Sequence[torch.Tensor], first: bool, last: bool,
        future: "torch.futures.Future[torch.Tensor]",
    ) -> None:  # fmt: skip
        self.buffer, self.first, self.last, self.future = buffer, first, last, future
        self.gradients = dict(zip(self.bucket, gradients))
        self.passengers = [self.gradients[one] for one in self.exact]
        self.sent = 0
        if self.stream is not None:
            self.wait_for(torch.cuda.current_stream(self.device))

    def start(self) -> Exchange | None:
        hook = self.hook
        if self.first:
            hook._used = []
            hook._begin(hook._open_scale)
        hook._used.append(self)
        self.wait_for(hook._stream)  # on which the previous step was ended
        with self.on_stream(), self.measure("encode", "up"):
            idle = self._unused()
            for run, p in zip(self.runs, self.is_p):
                matrices = [hook._shapes[one].of(self.gradients[one]) for one in run.parameters]
                hook._views.update(zip(run.parameters, matrices))
                run.load(matrices, 1 / hook._open_scale, hook._model_options["decay"])
                run.project_p() if p else run.project_q()
                for one in idle.intersection(run.parameters):
                    run.keep(one)
            hook._idle |= idle
            return self.encode()

    def _unused(self) -> set[int]:
        """As Chunk._unused."""
        mine = self.matrices + self.exact
        if not self.hook._searches_unused() or not mine:
            return set()
        if self.used is None:
            flags = used_flags([self.gradients[one] for one in mine])
        else:
            flags = self.used[[self.bucket.index(one) for one in mine]]
        unused = {one for one, flag in zip(mine, self.transport.any_rank(flags)) if flag == 0}
        if self.hook._momentum is not None:
            self.hook._momentum.idle |= unused
        return unused & set(self.matrices)

    def finish(self, received: torch.Tensor | None) -> None:
        hook = self.hook
        with self.on_stream():
            self.decode_answer(received)
            with self.measure("decode", "end"):
                for other in self.beside:
                    self.wait_for(other.stream)
                results = [one for at, one in self.gradients.items() if at not in self.matrices]
                if results:
                    hook._taints.append(taint(results).sum())
                self.add_lost()
                self.conclude()
                self._make_bases()
            if self.last:
                hook._close_step(self)
            if not hook._second_runs:
                self.complete()

    def _make_bases(self) -> None:
        """For the second exchange."""
        runs = [run for run, value in zip(self.runs, self.is_value) if not value]
        stacks = [run.cut(run.group.x_p) for run in runs]
        bases = orthonormal(stacks, [run.cut(run.group.p_start) for run in runs])
        for run, found, made in zip(runs, taints(stacks), bases):
            run.cut(run.group.taint).copy_(found)
            run.cut(run.group.p).copy_(made)
            run.project_q()
            self.hook._keep_idle(run)

    def complete(self) -> None:
        """On the stream that has written the results."""
        if self.settle is not None:
            self.settle()
            self.settle = None
        self.future.set_result(self.buffer)

    def fail(self, error: BaseException) -> None:
        self.hook._fail_open(error)

    def give_up(self, error: BaseException) -> None:
        with contextlib.suppress(RuntimeError):  # it is complete already
            self.future.set_exception(error)  # type: ignore[arg-type]


class SecondExchange(FactorTask):
    """That of the whole model."""

    def __init__(self, hook: "LowRankHook") -> None:
        self.runs, self.passengers = hook._second_runs, []
        self.is_p, self.is_value = [False] * len(self.runs), [True] * len(self.runs)
        super().__init__(hook, [hook._wired(one, False) for run in self.runs for one in run.parameters], hook._after)

    def start(self) -> Exchange | None:
        self.sent = 0
        self.hook._used.append(self)
        for first in self.hook._open:
            self.wait_for(first.stream)
        with self.on_stream(), self.measure("encode", "up"):
            return self.encode()

    def finish(self, received: torch.Tensor | None) -> None:
        with self.on_stream():
            self.decode_answer(received)
            with self.measure("decode", "end"):
                self.add_lost()
                self.conclude()
            self.hook._end(self.hook._used)
            for first in self.hook._open:
                first.complete()

    def fail(self, error: BaseException) -> None:
        self.hook._fail_open(error)
