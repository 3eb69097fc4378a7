# SPDX-License-Identifier: Apache-2.0
"""Meters and the guard. Bytes are counted as they leave; errors are measured every so many steps, on what was really
sent: a rank decodes its own messages and compares. The guard's verdict is the same on all ranks, because it is drawn from
the largest error of any of them.
"""

import struct
import warnings
from typing import TYPE_CHECKING, Any

import torch

from ._carrier import Carrier
from ._passage import Times

if TYPE_CHECKING:
    from ._pieces import Piece


class Meters:
    def __init__(self, names: list[str], elements: list[int], every: int, guard: float | None) -> None:
        self.names, self.elements, self.every, self.guard = names, elements, every, guard
        self.steps = 0
        self.bytes = 0
        self.exempt: list[int] = []
        self._bytes_now = 0
        self._squares: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # of what was left out, and of what was to be sent
        self.errors: dict[int, float] = {}

    @property
    def due(self) -> bool:
        return self.every > 0 and self.steps % self.every == 0

    def sent(self, count: int) -> None:
        self._bytes_now += count

    def look(self, piece: "Piece", send: torch.Tensor) -> None:
        """After a piece was encoded: what its own messages say, against what they were to say."""
        if not self.due:
            return
        seen = [gradient.clone() for gradient in piece.gradients]  # where this part does not reach, nothing is left out
        piece.relay.decode_own(send.data_ptr(), send.numel(), [one.data_ptr() for one in seen])
        for tensor, gradient, decoded in zip(piece.tensors, piece.gradients, seen):
            wanted = gradient.double()
            left_out = (wanted - decoded.double()).square().sum()
            if piece.part == 0:
                self._squares[tensor] = (left_out, wanted.square().sum())
            else:
                self._squares[tensor] = (self._squares[tensor][0] + left_out, self._squares[tensor][1])

    def step_done(self, carrier: Carrier | None = None) -> list[int]:
        """Ends a step; the parameters that the guard exempts from now on."""
        self.bytes, self._bytes_now = self._bytes_now, 0
        due = self.due
        self.steps += 1
        if not due or carrier is None:
            return []
        for tensor, (left_out, whole) in self._squares.items():
            norm = float(whole)
            self.errors[tensor] = (float(left_out) / norm) ** 0.5 if norm > 0 else 0.0
        self._squares.clear()
        if self.guard is None:
            return []
        mine = [self.errors.get(tensor, 0.0) for tensor in range(len(self.names))]
        every = struct.unpack(f"{carrier.world * len(mine)}d", carrier.gather(struct.pack(f"{len(mine)}d", *mine)))
        worst = [max(every[tensor :: len(mine)]) for tensor in range(len(mine))]
        passed = [tensor for tensor, error in enumerate(worst) if error > self.guard and tensor not in self.exempt]
        for tensor in passed:
            warnings.warn(f"gradwire: '{self.names[tensor]}' goes uncompressed from now on: its relative error {worst[tensor]:.3g} passed the guard's {self.guard:g}", stacklevel=2)
        self.exempt += passed
        return passed

    def report(self, step: int, skipped: int, up: list[tuple[str, int]], world: int, times: Times, residual_bytes: int) -> dict[str, Any]:
        elements = sum(self.elements)
        exact = 8 * elements * (world - 1) // world
        parameters = {
            name: {"codec": codec, "elements": count, "bits": 8 * size / count if count else 0.0, "error": self.errors.get(i)}
            for i, (name, count, (codec, size)) in enumerate(zip(self.names, self.elements, up))
        }
        return {
            "steps": step,
            "skipped": skipped,
            "bits": 8 * sum(size for _, size in up) / elements,
            "bytes": self.bytes,
            "ratio": self.bytes / exact if exact else 0.0,
            "seconds": {kind: times.total(kind) for kind in ("encode", "wait", "decode")},
            "residual_bytes": residual_bytes,
            "exempt": [self.names[tensor] for tensor in self.exempt],
            "parameters": parameters,
        }

    @staticmethod
    def log(stats: dict[str, Any], writer: Any, step: int, prefix: str) -> None:
        for name in ("bits", "bytes", "ratio", "skipped"):
            writer.add_scalar(f"{prefix}/{name}", stats[name], step)
        for kind, seconds in stats["seconds"].items():
            writer.add_scalar(f"{prefix}/seconds/{kind}", seconds, step)
        for name, one in stats["parameters"].items():
            if one["error"] is not None:
                writer.add_scalar(f"{prefix}/error/{name}", one["error"], step)
