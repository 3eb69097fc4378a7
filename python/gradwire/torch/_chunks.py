# SPDX-License-Identifier: Apache-2.0
"""A bucket of DDP, or the shard of a unit of FSDP, is split into chunks, and each chunk is an all-reduce of its own.
Chunks follow each other on the link: while one is being sent the next one is encoded, and many short exchanges fill a
link better than two long ones.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Callable, Protocol, Sequence

import torch

from .. import _core
from . import _streams
from ._task import CodingTask, Times
from ._transport import Exchange, Transport

if TYPE_CHECKING:
    from ._adam import Momentum
    from ._meters import Meters
    from ._node_bucket import NodeBucket

# Elements of a chunk. On a link that carries fewer than SLOW bytes per second FINE_CHUNK fills the link best; on a
# faster link CHUNK takes the least work of the processor.
SLOW, FINE_CHUNK, CHUNK = 1.2e7, 1 << 19, 1 << 20
ChunkKey = tuple[tuple[int, ...], int, int]  # tensors; which chunk of how many, if it is a part of a single tensor


def split(tensors: tuple[int, ...], counts: list[int], model: "_core.ModelCoder", elements: int) -> list[ChunkKey]:
    """The chunks of a bucket, of about so many elements each. 0: the bucket stays whole, as on CUDA streams, where
    DDP's buckets are small enough, and large enough to be worth their kernel launches."""
    if elements == 0:
        return [(tensors, 0, 1)]
    chunks: list[ChunkKey] = []
    open_chunk: list[int] = []
    collected = 0
    for tensor in tensors:
        if counts[tensor] >= 2 * elements and model.divisible(tensor):
            if open_chunk:
                chunks.append((tuple(open_chunk), 0, 1))
            parts = counts[tensor] // elements
            chunks += [((tensor,), part, parts) for part in range(parts)]
            open_chunk, collected = [], 0
            continue
        open_chunk.append(tensor)
        collected += counts[tensor]
        if collected >= elements:
            chunks.append((tuple(open_chunk), 0, 1))
            open_chunk, collected = [], 0
    return chunks + ([(tuple(open_chunk), 0, 1)] if open_chunk else [])


def used_flags(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """1 for each gradient that is not all zeros."""
    return torch.stack([gradient.count_nonzero() for gradient in gradients]).clamp_(max=1).to(torch.uint8)


class Owner(Protocol):
    """What a chunk needs of its hook."""

    _model: "_core.ModelCoder"
    _transport: Transport
    _device: torch.device
    _threads: int
    _times: Times
    _meters: "Meters"
    _momentum: "Momentum | None"
    _used: "list[CodingTask]"  # in this step
    _learns: bool
    _clock: "torch.Tensor | None"  # where the GPU finds the step, if work is recorded

    @property
    def _stream(self) -> "torch.cuda.Stream | None": ...  # on which steps are ended
    def _scale_on_wire(self) -> float: ...
    def _searches_unused(self) -> bool: ...
    def _begin(self, loss_scale: float) -> None: ...
    def _end(self, used: "Sequence[CodingTask]") -> Any: ...


class Chunk(CodingTask):
    """One of DDP's buckets, or the gradients of one of FSDP's units, or a part of it: the BucketTask that the transport
    runs."""

    def __init__(self, hook: Owner, tensors: tuple[int, ...], chunk: int, chunks: int) -> None:
        # On streams buckets are exchanged one after the other, so one stream for all of them loses nothing, and the
        # host has no streams to bring into order.
        stream = hook._stream if hook._transport.on_streams else None
        super().__init__(
            hook._model, list(tensors), hook._transport, hook._device, hook._threads, hook._times, chunk, chunks,
            stream, hook._clock,
        )  # fmt: skip
        self.hook, self.chunk = hook, chunk
        self.gradients: list[torch.Tensor] = []
        self.future: "torch.futures.Future[torch.Tensor] | None" = None
        self.settle: Callable[[], None] | None = None  # what remains to be done with a bucket when its chunks are done
        self.used: torch.Tensor | None = None  # which gradients are not zero, where they were replaced since
        self.inside: "NodeBucket | None" = None  # which the gradients are pieces of, on nodes of several ranks

    def load(self, buffer: torch.Tensor, gradients: list[torch.Tensor], first: bool, last: bool) -> None:
        """The gradients of this step. `first` and `last` say whether the chunk begins or ends the step."""
        if gradients is not self.gradients:
            self.pointers = [gradient.data_ptr() for gradient in gradients]
        self.buffer, self.gradients, self.first, self.last = buffer, gradients, first, last
        self.loss_scale = self.hook._scale_on_wire() if first else 1.0
        self.sent = 0
        if self.stream is not None:
            self.wait_for(_streams.current(self.device))

    def unload(self) -> None:
        self.buffer, self.gradients, self.future = torch.empty(0), [], None

    def start(self) -> Exchange:
        self.open()
        return self.encode()

    def finish(self, received: torch.Tensor | None) -> None:
        with self.on_stream():
            self.receive(received)
        self.close()

    # The two in parts: what is done in every step, and what may be recorded.

    def open(self) -> None:
        hook = self.hook
        if self.first:
            hook._used = []
            hook._begin(self.loss_scale)
        hook._used.append(self)
        self.wait_for(hook._stream)  # on which the previous step was ended
        if self.inside is not None:
            self.wait_for(self.inside.stream)
        if not hook._searches_unused():
            return self.coder.begin()
        with self.on_stream():
            self.coder.begin(self._unused())

    def key(self) -> "tuple[int, ...] | None":
        hook = self.hook
        if hook._meters.due or hook._searches_unused() or (hook._learns and hook._model.teaches()):
            return None
        return self.coder.signature(), self.buffers.made

    def poll(self) -> None:
        self.coder.poll()

    def encode(self) -> Exchange:
        with self.on_stream():
            with self.measure("encode", "up"):
                send, slots, answers = self.encode_up(self.pointers)
                self.hook._meters.measure(self, send)
            return self.exchange("up", send, slots, answers, room=len(answers) * max(slots, default=0))

    def _unused(self) -> list[int]:
        """With find_unused_parameters: which parameters no rank has used in this step. DDP discards their result, so
        their residual must not become a part of it. This costs a small all-reduce per bucket, as DDP's own search
        does."""
        if self.inside is not None:  # a piece that is zero says nothing about its parameter
            return [self.inside.idle[self.inside.index[tensor]] for tensor in self.tensors]
        used = used_flags(self.gradients) if self.used is None else self.used
        unused = [1 - flag for flag in self.transport.any_rank(used)]
        if self.hook._momentum is not None:
            self.hook._momentum.idle.update(tensor for tensor, flag in zip(self.tensors, unused) if flag)
        return unused

    def receive(self, received: torch.Tensor | None) -> None:
        self.decode_answer(received)

    def close(self) -> None:
        with self.on_stream():  # a future records an event on the stream of whoever completes it
            if self.settle is not None:
                self.settle()
                self.settle = None
            if self.last:
                self.hook._end(self.hook._used)
            if self.future is not None:
                self.future.set_result(self.buffer)

    def fail(self, error: BaseException) -> None:
        if self.future is not None:
            with contextlib.suppress(RuntimeError):  # it is complete already
                self.future.set_exception(error)  # type: ignore[arg-type]
