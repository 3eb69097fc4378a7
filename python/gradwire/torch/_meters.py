# SPDX-License-Identifier: Apache-2.0
"""Meters and the guard. Bytes are counted as they are sent. Errors are measured every so many steps, on what was really
sent: a rank decodes its own messages and compares. The guard decides alike on all ranks, because it looks at the
largest error of any rank.

    ratio    bytes that an fp32 all-reduce would send / bytes that were sent: larger is better
    error    squared relative error, ||x - x'||^2 / ||x||^2
"""

from __future__ import annotations

import struct
import warnings
from typing import TYPE_CHECKING, Any

import torch

from ._task import Times
from ._transport import Transport

if TYPE_CHECKING:
    from ._chunks import Chunk


class Sent:
    """A count of the step under way, of the last step, and of all steps."""

    def __init__(self) -> None:
        self.now, self.last, self.total, self.steps = 0, 0, 0, 0

    def add(self, count: int) -> None:
        self.now += count

    def step_done(self) -> None:
        self.last, self.total, self.now = self.now, self.total + self.now, 0
        self.steps += 1


def cost(sent: int, fp32: int, seconds: dict[str, float]) -> dict[str, Any]:
    """What one step, or all of them, cost."""
    return {"bytes": sent, "fp32_bytes": fp32, "bytes_saved": fp32 - sent, "seconds": seconds}


class Meters:
    def __init__(self, names: list[str], elements: list[int], every: int, guard: float | None) -> None:
        self.names, self.elements, self.every, self.guard = names, elements, every, guard
        self.steps = 0
        self.bytes = Sent()
        self.exempt: list[int] = []
        self._squares: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # ||x - x'||^2 and ||x||^2
        self.errors: dict[int, float] = {}

    @property
    def due(self) -> bool:
        return self.every > 0 and self.steps % self.every == 0

    def sent(self, count: int) -> None:
        self.bytes.add(count)

    def sent_after_step(self, count: int) -> None:
        """Bytes that belong to the last step, sent after its end."""
        self.bytes.last += count
        self.bytes.total += count

    def measure(self, chunk: "Chunk", send: torch.Tensor) -> None:
        """After a chunk was encoded: compares what its messages decode to with its gradients."""
        if not self.due:
            return
        # Elements that this chunk does not contain add no error.
        seen = [gradient.clone() for gradient in chunk.gradients]
        chunk.coder.decode_own(send.data_ptr(), send.numel(), [one.data_ptr() for one in seen])
        for tensor, gradient, decoded in zip(chunk.tensors, chunk.gradients, seen):
            exact = gradient.double()
            lost = (exact - decoded.double()).square().sum()
            if chunk.chunk == 0:
                self._squares[tensor] = (lost, exact.square().sum())
            else:
                self._squares[tensor] = (self._squares[tensor][0] + lost, self._squares[tensor][1])

    def step_done(self, transport: Transport | None = None) -> list[int]:
        """Ends a step. Returns the parameters that the guard exempts from now on."""
        self.bytes.step_done()
        due = self.due
        self.steps += 1
        if not due or transport is None:
            return []
        for tensor, (lost, whole) in self._squares.items():
            norm = float(whole)
            self.errors[tensor] = float(lost) / norm if norm > 0 else 0.0
        self._squares.clear()
        if self.guard is None:
            return []
        mine = [self.errors.get(tensor, 0.0) for tensor in range(len(self.names))]
        every = struct.unpack(
            f"{transport.world * len(mine)}d", transport.gather_bytes(struct.pack(f"{len(mine)}d", *mine))
        )
        worst = [max(every[tensor :: len(mine)]) for tensor in range(len(mine))]
        exempted = [tensor for tensor, error in enumerate(worst) if error > self.guard and tensor not in self.exempt]
        for tensor in exempted:
            warnings.warn(
                f"gradwire: '{self.names[tensor]}' is sent uncompressed from now on: its squared relative error "
                f"{worst[tensor]:.3g} exceeds guard={self.guard:g}",
                stacklevel=2,
            )
        self.exempt += exempted
        return exempted

    def report(
        self, step: int, skipped: int, up: list[tuple[str, int]], world: int, times: Times, residual_bytes: int
    ) -> dict[str, Any]:
        elements = sum(self.elements)
        fp32_bytes = 8 * elements * (world - 1) // world
        parameters = {
            name: {
                "codec": codec,
                "elements": count,
                "bits": 8 * size / count if count else 0.0,
                "error": self.errors.get(i),
            }
            for i, (name, count, (codec, size)) in enumerate(zip(self.names, self.elements, up))
        }
        return {
            "steps": step,
            "skipped": skipped,
            "bits": 8 * sum(size for _, size in up) / elements,
            "ratio": fp32_bytes / self.bytes.last if self.bytes.last else 1.0,
            "last_step": cost(self.bytes.last, fp32_bytes if self.bytes.steps else 0, times.last),
            "all_steps": cost(self.bytes.total, fp32_bytes * self.bytes.steps, times.totals()),
            "residual_bytes": residual_bytes,
            "exempt": [self.names[tensor] for tensor in self.exempt],
            "parameters": parameters,
        }
