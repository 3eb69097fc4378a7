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

from ._nodes import Layout
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


_NAMED = 8  # parameters in a warning


class Meters:
    def __init__(
        self, names: list[str], elements: list[int], every: int, guard: float | None, tells: bool = True
    ) -> None:
        """tells: whether this is the rank that warns."""
        self.names, self.elements, self.every, self.guard, self.tells = names, elements, every, guard, tells
        self.steps = 0
        self.whole = sum(elements)  # of the model, where `elements` are those of pieces
        self.layout: Layout | None = None  # if it is known which ranks share a node
        self.bytes, self.left = Sent(), Sent()  # to other ranks, and of these to other nodes
        self.exempt: list[int] = []
        self._squares: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # ||x - x'||^2 and ||x||^2
        self.errors: dict[int, float] = {}

    @property
    def due(self) -> bool:
        return self.every > 0 and self.steps % self.every == 0

    def sent(self, count: int, left: int | None = None) -> None:
        """left: how many of these bytes leave the node, if it has several ranks."""
        self.bytes.add(count)
        self.left.add(count if left is None else left)

    def sent_after_step(self, count: int, left: int) -> None:
        """Bytes that belong to the last step, sent after its end; left: of these, to other nodes."""
        for sent, more in (self.bytes, count), (self.left, left):
            sent.last += more
            sent.total += more

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
        self.left.step_done()
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
        gathered = transport.gather_everywhere(struct.pack(f"{len(mine)}d", *mine))
        every = struct.unpack(f"{len(gathered) // 8}d", gathered)
        worst = [max(every[tensor :: len(mine)]) for tensor in range(len(mine))]
        exempted = [tensor for tensor, error in enumerate(worst) if error > self.guard and tensor not in self.exempt]
        if exempted and self.tells:
            named = ", ".join(f"'{self.names[tensor]}' ({worst[tensor]:.3g})" for tensor in exempted[:_NAMED])
            more = f" and {len(exempted) - _NAMED} more" if len(exempted) > _NAMED else ""
            warnings.warn(
                f"gradwire: sent uncompressed from now on, because their squared relative error exceeds "
                f"guard={self.guard:g}: {named}{more}; stats()[\"exempt\"] has all of them",
                stacklevel=2,
            )
        self.exempt += exempted
        return exempted

    def report(
        self, step: int, skipped: int, up: list[tuple[str, int]], world: int, times: Times, residual_bytes: int
    ) -> dict[str, Any]:
        elements = sum(self.elements)
        fp32_bytes = 8 * self.whole * (world - 1) // world
        parameters = {
            name: {
                "codec": codec,
                "elements": count,
                "bits": 8 * size / count if count else 0.0,
                "error": self.errors.get(i),
            }
            for i, (name, count, (codec, size)) in enumerate(zip(self.names, self.elements, up))
        }
        last = cost(self.bytes.last, fp32_bytes if self.bytes.steps else 0, times.last)
        total = cost(self.bytes.total, fp32_bytes * self.bytes.steps, times.totals())
        ratio = fp32_bytes / self.bytes.last if self.bytes.last else 1.0
        nodes: dict[str, Any] = {}
        if self.layout is not None:
            fp32_left = self._fp32_left(self.layout)
            last |= {"node_bytes": self.left.last, "fp32_node_bytes": fp32_left if self.left.steps else 0}
            total |= {"node_bytes": self.left.total, "fp32_node_bytes": fp32_left * self.left.steps}
            ratio = fp32_left / self.left.last if self.left.last else 1.0
            nodes = {"nodes": {"nodes": self.layout.nodes, "ranks_per_node": self.layout.per_node}}
        return nodes | {
            "steps": step,
            "skipped": skipped,
            "bits": 8 * sum(size for _, size in up) / max(elements, 1),
            "ratio": ratio,
            "last_step": last,
            "all_steps": total,
            "residual_bytes": residual_bytes,
            "exempt": [self.names[tensor] for tensor in self.exempt],
            "parameters": parameters,
        }

    def _fp32_left(self, layout: "Layout") -> int:
        """Bytes that leave a node, for each of its ranks, if the same shards are all-reduced between nodes in fp32."""
        return 8 * self.whole * (layout.nodes - 1) // (layout.nodes * layout.per_node)
