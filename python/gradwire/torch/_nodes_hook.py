# SPDX-License-Identifier: Apache-2.0
"""The hook for DistributedDataParallel on nodes of several ranks: gradients are reduced within a node uncompressed, and
only the shards that this leaves on each rank are compressed, and exchanged between nodes (_node_bucket.py). To the core
the nodes are the ranks and the pieces of parameters are the tensors, under the names of the parameters, so residuals
have the size of the pieces: 1/L of a model on each of L ranks of a node.

Where Adam's momentum is exchanged (_adam.py), each rank puts its own in the place of its gradients before they are
reduced within the node, and finds the mean of all ranks there after the results were gathered. So all that is about
gradients of one rank is as on one level: second moments, clipping, and the memory for them.
"""

from __future__ import annotations

# No `from __future__ import annotations`: DDP compares the annotations of a communication hook with its own types.

import logging
import math
from typing import Any, Sequence

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .. import _core
from ._agree import Handshake
from ._chunks import Chunk, split
from ._ddp import DdpHook
from ._node_bucket import Gather, NodeBucket, Scatter
from ._nodes import Layout
from ._rules import by_whole
from ._task import Buffers, CodingTask
from ._transport import Transport

_LOG = logging.getLogger("gradwire")


class NodesHook(DdpHook):
    """The hook of a DistributedDataParallel on nodes of several ranks."""

    _layout: Layout

    def __init__(
        self,
        ddp: DistributedDataParallel,
        codec: Any,
        given: dict[str, Any],
        names: Sequence[str] | None,
        layout: Layout,
    ) -> None:
        self._buckets: dict[tuple[int, ...], NodeBucket] = {}
        self._used_buckets: list[NodeBucket] = []  # in this step
        self._flag = torch.zeros(1)
        self._rows = Buffers()  # which all buckets share on a CPU
        super().__init__(ddp, codec, given, names, layout)
        if layout.nodes == 1:
            _LOG.info("gradwire: all ranks share one node, so their gradients are left to torch, uncompressed")

    def __repr__(self) -> str:
        where = f"{self._layout.nodes} node{'s' * (self._layout.nodes > 1)} of {self._layout.per_node} ranks"
        return super().__repr__().replace("<DdpHook", "<NodesHook").replace(f"{self._world} ranks", where)

    # What the core sees.

    def _place(self) -> tuple[int, int, int, int]:
        node, place = self._layout.places[dist.get_rank(self._group)]
        return self._layout.nodes, self._layout.per_node, node, place

    def _counts(self) -> list[int]:
        """Of this rank's pieces."""
        _, ranks, _, place = self._place()
        sizes = [(p.numel(), math.ceil(p.numel() / ranks)) for p in self._parameters]
        return [min(size, max(0, count - place * size)) for count, size in sizes]

    def _coder(self, up: str, down: str, options: dict[str, Any]) -> "_core.ModelCoder":
        nodes, _, node, place = self._place()
        counts = self._counts()
        tensors = [(name, count, "f32", p.dim()) for name, p, count in zip(self._names, self._parameters, counts)]
        wholes = [(name, p.dim(), p.numel(), count) for name, p, count in zip(self._names, self._parameters, counts)]
        # The same elements of different pieces are rounded independently of each other.
        seed = (options["seed"] + (place << 32)) % 2**64
        own = {"rank": node, "world": nodes, "seed": seed}
        return _core.ModelCoder(tensors, up=by_whole(up, wholes), down=by_whole(down, wholes), **(options | own))

    def _wants_momentum(self, up: str) -> bool:
        return self._layout.nodes > 1 and super()._wants_momentum(up)

    def _use(self, codec: str, down: Any, model: "_core.ModelCoder") -> None:
        super()._use(codec, down, model)
        self._plain = self._plain or self._layout.nodes == 1  # nothing leaves the node

    def _handshake(self, model: "_core.ModelCoder | None" = None, codec: str | None = None) -> Handshake:
        # Pieces differ between the ranks of a node, and so do rules by size and seeds that are made for them.
        terms = [term for term in super()._handshake(model, codec) if term[0] not in ("up", "down", "count", "seed")]
        terms += [("codec", codec or self.codec), ("down", str(self._down)), ("seed", str(self._model_options["seed"]))]
        return terms + [
            ("parameter", f"{name}: {tuple(p.shape)} {p.dtype}") for name, p in zip(self._names, self._parameters)
        ]

    def _make_transport(self) -> Transport:
        layout = self._layout if self._layout.nodes > 1 else None
        return Transport.acquire(self._group, self._device, self._timeout, layout)

    def _forget_chunks(self) -> None:
        super()._forget_chunks()
        self._buckets.clear()

    def _sent(self) -> list[tuple[str, int]]:
        if self._layout.nodes > 1:
            return super()._sent()
        return [("fp32", 4 * count) for count in self._counts()]

    # One step.

    _is_light = False  # a bucket ends on the stream of its node

    def _send(
        self, bucket: Any, done: Any, tensors: tuple[int, ...], gradients: list[torch.Tensor] | None = None
    ) -> None:
        buffer, gradients = bucket.buffer(), bucket.gradients()
        used, shaped = self._put_momentum(bucket, tensors, gradients)
        here = tuple(tensor for tensor in tensors if self._meters.elements[tensor])
        keys = []
        if here:
            elements = 0 if self._transport.on_streams else self._chunk_elements
            keys = split(here, self._meters.elements, self._model, elements)
        if bucket.index() == 0 and (tensors not in self._buckets or any(key not in self._chunks for key in keys)):
            self._forget_chunks()  # DDP has rebuilt its buckets, or the size of chunks has changed
        if tensors not in self._buckets:
            self._buckets[tensors] = NodeBucket(self, tensors, buffer.dtype)
        inside = self._buckets[tensors]
        for key in keys:
            if key not in self._chunks:
                self._chunks[key] = Chunk(self, *key)
        inside.chunks = [self._chunks[key] for key in keys]
        inside.load(buffer, gradients, bucket.index() == 0, bucket.is_last(), done)
        inside.used, inside.shaped = used, shaped
        self._transport.submit(Scatter(inside))
        for chunk in inside.chunks:
            chunk.load(inside.shard, [inside.piece(tensor) for tensor in chunk.tensors], False, False)
            chunk.inside = inside
            self._transport.submit(chunk)
        self._transport.submit(Gather(inside))
        if self._momentum is not None and bucket.is_last():
            self._momentum.end()

    def _check_results(self) -> None:
        """A result that is not finite on one rank of a node is not finite on any: the step is decided for all pieces
        alike."""
        if self._stream is None:
            self._flag = torch.cat([bucket.flag for bucket in self._used_buckets]).sum().reshape(1)
        else:
            with torch.cuda.stream(self._stream):
                for bucket in self._used_buckets:
                    bucket.precede(self._stream)
                self._flag = torch.cat([bucket.flag for bucket in self._used_buckets]).sum().reshape(1)
        self._model.check_finite(self._flag.data_ptr(), 1)

    def _count_sent(self, used: Sequence[CodingTask]) -> int:
        left = sum(chunk.sent for chunk in used)
        self._meters.sent(left + sum(bucket.sent for bucket in self._used_buckets), left)
        return left
