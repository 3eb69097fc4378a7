# SPDX-License-Identifier: Apache-2.0
"""DDP's buckets, cut in pieces, and the way of each. Pieces follow each other on the link: while one is on its way the next is
encoded, and a link is filled better by many short exchanges than by two long ones.
"""

from typing import TYPE_CHECKING

import torch

from .. import _core
from ._carrier import Parcel
from ._passage import Relayed

if TYPE_CHECKING:
    from ._ddp import Hook

# Elements of a piece, where fewer than so many bytes a second go through, and where more do: what a link is filled best by,
# and what the processor has the least work with.
SLOW, FINE_PIECE, PIECE = 1.2e7, 1 << 19, 1 << 20
Cut = tuple[tuple[int, ...], int, int]  # tensors, part, parts


def cut_up(tensors: tuple[int, ...], counts: list[int], model: "_core.RelayModel", piece: int) -> list[Cut]:
    """A bucket in pieces of about so many elements. 0: it stays whole, as on streams, where it is small enough, and large
    enough to be worth its launches."""
    if piece == 0:
        return [(tensors, 0, 1)]
    cuts: list[Cut] = []
    some: list[int] = []
    elements = 0
    for tensor in tensors:
        if counts[tensor] >= 2 * piece and model.divisible(tensor):
            if some:
                cuts.append((tuple(some), 0, 1))
            parts = counts[tensor] // piece
            cuts += [((tensor,), part, parts) for part in range(parts)]
            some, elements = [], 0
            continue
        some.append(tensor)
        elements += counts[tensor]
        if elements >= piece:
            cuts.append((tuple(some), 0, 1))
            some, elements = [], 0
    return cuts + ([(tuple(some), 0, 1)] if some else [])


class Piece(Relayed):
    """One of DDP's buckets, or a part of it, on its way."""

    def __init__(self, hook: "Hook", tensors: tuple[int, ...], part: int, parts: int) -> None:
        super().__init__(hook._model, list(tensors), hook._carrier, hook._device, hook._threads, hook._times, part, parts)
        self.hook, self.part = hook, part
        self.future: "torch.futures.Future[torch.Tensor] | None" = None

    def take(self, buffer: torch.Tensor, gradients: list[torch.Tensor], first: bool, last: bool) -> None:
        self.buffer, self.gradients, self.first, self.last = buffer, gradients, first, last
        self.pointers = [gradient.data_ptr() for gradient in gradients]
        self.loss_scale = self.hook._scale() if first else 1.0
        self.sent = 0
        if self.stream is not None:
            self.come_after(torch.cuda.current_stream(self.device))

    def start(self) -> Parcel:
        if self.first:
            self.hook._used = []
            self.hook._begin(self.loss_scale)
        self.hook._used.append(self)
        self.come_after(self.hook._stream)  # on which the step before was ended
        with self.on_stream():
            with self.spell("encode", "up"):
                self.relay.begin(self._idle())
                send, slots, answers = self.encode_up(self.pointers)
                self.hook._meters.look(self, send)
            return self.parcel("up", send, slots, answers)

    def _idle(self) -> list[int]:
        """With find_unused_parameters, which parameters no rank has used: DDP will drop their result, so their debt must not
        be in it. Costs a small all_reduce a bucket, as DDP's own search does."""
        ddp = self.hook._ddp()
        if ddp is None or not ddp.find_unused_parameters or ddp.static_graph:
            return []
        used = torch.stack([gradient.count_nonzero() for gradient in self.gradients]).clamp_(max=1).to(torch.uint8)
        return [1 - flag for flag in self.carrier.any(used)]

    def middle(self, received: torch.Tensor) -> Parcel | None:
        with self.on_stream():
            with self.spell("decode", "down"):
                here = self.arrived("up", received)
                if not self.relay.down_recv:  # gather
                    self.relay.decode_up(here.data_ptr(), here.numel(), self.pointers)
                    return None
                self.relay.decode_up(here.data_ptr(), here.numel())
            with self.spell("encode", "down"):
                send, slots, answers = self.encode_down([])
            return self.parcel("down", send, slots, answers)

    def finish(self, received: torch.Tensor | None) -> None:
        with self.on_stream():
            if received is not None:
                with self.spell("decode", "end"):
                    here = self.arrived("down", received)
                    self.relay.decode_down(here.data_ptr(), here.numel(), self.pointers)
            if self.last:
                self.hook._end(self.hook._used)
            if self.future is not None:
                self.future.set_result(self.buffer)

    def fail(self, error: BaseException) -> None:
        if self.future is not None:
            self.future.set_exception(error)  # type: ignore[arg-type]
