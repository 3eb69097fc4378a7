# SPDX-License-Identifier: Apache-2.0
"""A bucket of DDP within a node of several ranks. Each parameter is cut into as many equal pieces as the node has
ranks, and the rank with place p gets piece p of every parameter:

    scatter   every rank sends piece p of its gradients to place p, which adds what it gets, in the order of the places
              and in float32: the mean of the node
    ...       chunks of the pieces are exchanged between nodes, compressed
    gather    every rank sends the results of its pieces to all of its node

Pieces are cut from parameters and not from buckets, so DDP may rebuild its buckets, and a residual stays where it was.
The sum does not depend on the backend, because the order of its terms is fixed here.

The transport runs both ends of a bucket as tasks of their own, before and after its chunks, because a rank may have no
chunk of a bucket: a parameter of one element has one piece.
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, ContextManager, Sequence

import torch

from ._chunks import Chunk, used_flags
from ._task import StagedTask
from ._transport import Exchange

if TYPE_CHECKING:
    from ._nodes_hook import NodesHook

_ALIGNED = 8  # pieces begin at multiples of so many elements


class NodeBucket(StagedTask):
    """The buffers of one bucket. `shard` holds this rank's pieces, in float32: first the mean of the node, then the
    result."""

    def __init__(self, hook: "NodesHook", tensors: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__(hook._transport, hook._device, hook._times)
        if self.stream is None:
            self.buffers = hook._rows  # each end of a bucket has a thread, which takes one bucket after the other
        self.hook, self.tensors, self.dtype = hook, tensors, dtype
        self.ranks, self.place = hook._layout.per_node, hook._transport.place
        self.index = {tensor: i for i, tensor in enumerate(tensors)}
        self.starts: list[int] = []  # of the pieces, in a row of every buffer
        self.sizes: list[int] = []  # of a piece; the last one of a parameter may be shorter, or empty
        self._row = 0
        for tensor in tensors:
            self.starts.append(self._row)
            self.sizes.append(math.ceil(hook._parameters[tensor].numel() / self.ranks))
            self._row += math.ceil(self.sizes[-1] / _ALIGNED) * _ALIGNED
        self.shard = torch.zeros(self._row, dtype=torch.float32, device=self.device)
        self.flag = torch.zeros(1, dtype=torch.float32, device=self.device)
        self.idle: list[int] = []
        self.used: torch.Tensor | None = None  # which gradients are not zero, where they were replaced since
        self.shaped: list[torch.Tensor] = []  # the gradients element by element as their parameters
        self.chunks: Sequence[Chunk] = []
        self.future: "torch.futures.Future[torch.Tensor] | None" = None

    def piece(self, tensor: int) -> torch.Tensor:
        """This rank's piece of a parameter."""
        start = self.starts[self.index[tensor]]
        return self.shard[start : start + self.hook._meters.elements[tensor]]

    def _buffer(self, name: str, elements: int) -> torch.Tensor:
        return self.buffers.get(name, elements * self.dtype.itemsize, self.device).view(self.dtype)

    def load(
        self,
        buffer: torch.Tensor,
        gradients: Sequence[torch.Tensor],
        first: bool,
        last: bool,
        future: "torch.futures.Future[torch.Tensor]",
    ) -> None:
        """The gradients of this step, which lie in the buffer. `first` and `last` say whether the bucket begins or ends
        the step."""
        self.buffer, self.gradients, self.first, self.last, self.future = buffer, gradients, first, last, future
        self.loss_scale = self.hook._scale_on_wire() if first else 1.0
        self.sent = 0
        if self.stream is not None:
            self.wait_for(torch.cuda.current_stream(self.device))

    def _pieces(self, rows: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(elements of the buffer, their place in `rows`) for all pieces of all ranks."""
        pairs = []
        for gradient, start, size in zip(self.gradients, self.starts, self.sizes):
            count = gradient.numel()
            if count == 0:
                continue
            at = (gradient.data_ptr() - self.buffer.data_ptr()) // self.buffer.element_size()
            whole, rest = divmod(count, size)
            flat = self.buffer[at : at + count]
            pairs.append((flat[: whole * size].view(whole, size), rows[:whole, start : start + size]))
            if rest:
                pairs.append((flat[whole * size :], rows[whole, start : start + rest]))
        return pairs

    def scatter(self) -> None:
        """In the thread "up"."""
        hook = self.hook
        if self.first:
            hook._used, hook._used_buckets = [], []
            hook._begin(self.loss_scale)
        hook._used_buckets.append(self)
        self.wait_for(hook._stream)  # on which the previous step was ended
        with self.on_stream():
            self.idle = self._unused()
            with self.measure("encode", "up"):
                packed = self._buffer("packed", self.ranks * self._row)
                packed.zero_()  # what pieces do not fill is added, too
                for theirs, ours in self._pieces(packed.view(self.ranks, -1)):
                    ours.copy_(theirs)
            send = packed.view(torch.uint8)
            slots = [send.numel() // self.ranks] * self.ranks
            exchange = self.exchange("in", send, slots, slots, self.place)
            self.transport.within(exchange, "in", Scatter(self))
            with self.measure("encode", "up"):
                rows = self.to_device("in", exchange.recv).view(self.dtype).view(self.ranks, -1)
                self.shard.copy_(rows[0])
                for row in rows[1:]:
                    self.shard.add_(row)
                self.shard.div_(self.ranks)

    def _unused(self) -> list[int]:
        """With find_unused_parameters: 1 for each parameter that no rank of any node has used in this step."""
        if not self.hook._searches_unused():
            return []
        used = used_flags(self.gradients) if self.used is None else self.used
        unused = [1 - flag for flag in self.transport.any_rank(used)]
        if self.hook._momentum is not None:
            self.hook._momentum.idle.update(tensor for tensor, flag in zip(self.tensors, unused) if flag)
        return unused

    def gather(self) -> None:
        """In the thread "end"."""
        with self.on_stream():
            for chunk in self.chunks:
                self.wait_for(chunk.stream)
            with self.measure("decode", "end"):
                # The row ends with numbers that are NaN where the result of this rank is not finite.
                result = self._buffer("result", self._row + _ALIGNED)
                result[: self._row].copy_(self.shard)
                result[self._row :] = torch.linalg.vector_norm(result[: self._row], float("inf")) * 0
            send = result.view(torch.uint8)
            exchange = self.exchange("out", send, [send.numel()], [send.numel()] * self.ranks)
            self.transport.within(exchange, "out", Gather(self))
            with self.measure("decode", "end"):
                rows = self.to_device("out", exchange.recv).view(self.dtype).view(self.ranks, -1)
                for theirs, ours in self._pieces(rows):
                    theirs.copy_(ours)
                self.flag.copy_(rows[:, self._row].float().sum().reshape(1))
                if self.hook._momentum is not None:
                    self.hook._momentum.settle(self.tensors, self.shaped)
            if self.last:
                self.hook._end(self.hook._used)
            if self.future is not None:
                self.future.set_result(self.buffer)


class _Inside:
    """What the transport runs: one end of a bucket. There is nothing to exchange between nodes."""

    recordings = None

    def __init__(self, bucket: NodeBucket) -> None:
        self.bucket = bucket

    def on_stream(self) -> ContextManager[object]:
        return self.bucket.on_stream()

    def start(self) -> Exchange | None:
        return None

    def reduce(self, received: torch.Tensor) -> Exchange | None:
        return None

    def finish(self, received: torch.Tensor | None) -> None:
        return None

    def waited(self, phase: str, seconds: float) -> None:
        self.bucket.waited(phase, seconds)

    def fail(self, error: BaseException) -> None:
        if self.bucket.future is not None:
            with contextlib.suppress(RuntimeError):  # it is complete already
                self.bucket.future.set_exception(error)  # type: ignore[arg-type]


class Scatter(_Inside):
    def start(self) -> Exchange | None:
        self.bucket.scatter()
        return None


class Gather(_Inside):
    def finish(self, received: torch.Tensor | None) -> None:
        self.bucket.gather()
