# SPDX-License-Identifier: Apache-2.0
"""The compressed mean over all ranks of some tensors of float32, in one call and on the user's own process group. It is
for callers that have nothing to do meanwhile, such as an optimizer's step; DDP's buckets travel by _transport.py.
"""

from typing import Any, ContextManager, Sequence

import torch
import torch.distributed as dist

from .. import _core
from ._task import Buffers, Times, between, core_device

_ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its old name


class MeanExchange:
    """The tensors of one model: (name, elements, dimensions) each. `options` are those of a ModelCoder."""

    def __init__(
        self,
        tensors: Sequence[tuple[str, int, int]],
        group: dist.ProcessGroup,
        device: torch.device,
        threads: int,
        **options: Any,
    ) -> None:
        self.group, self.device, self.options = group, device, options
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.core_device = core_device(device, self.stream, threads)
        self.buffers, self.times = Buffers(), Times()
        self.sent = 0  # bytes to other ranks, since the last look
        # NCCL moves GPU memory itself. Every other backend moves host memory.
        self._through_host = device.type == "cuda" and "nccl" not in dist.get_backend(group)
        self._tensors = [(name, count, "f32", dimensions) for name, count, dimensions in tensors]
        self.model = self.fresh_model()
        self._coder: "_core.BucketCoder | None" = None

    def fresh_model(self) -> "_core.ModelCoder":
        """A coder of the same tensors, as it was at the beginning."""
        return _core.ModelCoder(
            self._tensors, rank=self.rank, world=self.world, device=self.core_device, **self.options
        )

    def replace_model(self, model: "_core.ModelCoder") -> None:
        self.model, self._coder = model, None

    def on_stream(self) -> ContextManager[None]:
        """On a GPU the work has a stream of its own, which follows the user's and is followed by it."""
        return between(self.stream, self.device)

    def mean(self, step: int, rate: float, values: Sequence[torch.Tensor]) -> None:
        """Puts the means in the place of the values, with the same bits on all ranks."""
        at = [one.data_ptr() for one in values]
        self.model.begin(step, rate=rate)
        if self._coder is None:
            self._coder = _core.BucketCoder(self.model, list(range(len(self._tensors))), self.core_device)
        coder = self._coder
        with self._measure("encode"):
            coder.begin()
            send = self.buffers.get("up", sum(coder.up_send), self.device)
            coder.encode_up(at, send.data_ptr(), send.numel())
        if not coder.down_recv:  # every rank receives the messages of all ranks
            received = self._gather(send[: coder.up_send[0]])  # the slots are alike
            with self._measure("decode"):
                coder.decode_up(received.data_ptr(), received.numel(), at)
        else:
            received = self._all_to_all(send, coder.up_send, coder.up_recv)
            with self._measure("decode"):
                coder.decode_up(received.data_ptr(), received.numel())
            self._send_down(coder, at)
        with self._measure("decode"):
            self.model.end()
        stats = self.model.stats()
        if stats is not None:
            own = torch.frombuffer(bytearray(stats), dtype=torch.uint8).to(self.device)
            self.model.learn(bytes(self._gather(own).cpu().numpy()))

    def _send_down(self, coder: "_core.BucketCoder", out: Sequence[int]) -> None:
        slots = coder.down_recv
        equal = len(set(slots)) == 1
        with self._measure("encode"):
            mine = self.buffers.get("down", slots[self.rank], self.device)
            coder.encode_down(mine.data_ptr(), mine.numel())
        # torch's all-gather needs equal sizes, and the all-to-all does not.
        received = self._gather(mine) if equal else self._all_to_all(
            mine.repeat(self.world), [slots[self.rank]] * self.world, slots
        )
        with self._measure("decode"):
            coder.decode_down(received.data_ptr(), received.numel(), list(out))

    # Collectives. On a GPU, with any backend but NCCL, messages pass through page-locked host memory.

    def any_rank(self, flags: Sequence[int]) -> list[int]:
        """The largest of all ranks, of each number."""
        if self.world == 1:
            return list(flags)
        values = torch.tensor(flags, device="cpu" if self._through_host else self.device)
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.group)
        return [int(one) for one in values.tolist()]

    def _gather(self, mine: torch.Tensor) -> torch.Tensor:
        if self.world == 1:
            return mine
        self.sent += (self.world - 1) * mine.numel()
        with self.times.measure("wait", "", wall=True):
            send, recv = self._to_host(mine), self._room(self.world * mine.numel())
            _ALL_GATHER(recv, send, group=self.group)
            return self._to_device(recv)

    def _all_to_all(self, message: torch.Tensor, send_slots: list[int], recv_slots: list[int]) -> torch.Tensor:
        if self.world == 1:
            return message
        self.sent += message.numel() - send_slots[self.rank]
        with self.times.measure("wait", "", wall=True):
            send, recv = self._to_host(message), self._room(sum(recv_slots))
            dist.all_to_all_single(recv, send, recv_slots, send_slots, group=self.group)
            return self._to_device(recv)

    def _to_host(self, message: torch.Tensor) -> torch.Tensor:
        if not self._through_host:
            return message
        host = self.buffers.get("to host", message.numel(), torch.device("cpu"), pinned=True)
        host.copy_(message, non_blocking=True)
        torch.cuda.current_stream(self.device).synchronize()  # the backend reads it at once
        return host

    def _room(self, size: int) -> torch.Tensor:
        device = torch.device("cpu") if self._through_host else self.device
        return self.buffers.get("received", size, device, pinned=self._through_host)

    def _to_device(self, received: torch.Tensor) -> torch.Tensor:
        if not self._through_host:
            return received
        here = self.buffers.get("on device", received.numel(), self.device)
        here.copy_(received, non_blocking=True)
        return here

    def _measure(self, kind: str) -> ContextManager[None]:
        return self.times.measure(kind, "", wall=self.device.type == "cuda")
