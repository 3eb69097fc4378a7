# SPDX-License-Identifier: Apache-2.0
"""FSDP2's two collectives, compressed. Both see a flat buffer with a slice for every rank:

    ScatteredGradients   [world x shard] -> [shard]    every rank encodes a message for each owner; all-to-all; the owner adds up
    GatheredWeights      [shard] -> [world x shard]    every owner encodes its shard; all-gather; everybody decodes all

To the core a buffer is a Layout: a tensor "unit/p" for each rank p, which owns it. FSDP calls in the same order on all
ranks, and wants the result when the call returns: on a GPU that of its stream, else that of the host. So a Side, which all
units share, has one stream and one set of buffers, as large as its largest unit needs.
"""

import contextlib
from typing import TYPE_CHECKING, Any, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from .. import _core
from .._errors import UnsupportedError, UsageError
from . import _state
from ._passage import Buffers, Times, core_device

if TYPE_CHECKING:
    from ._fsdp import FsdpHook

_DTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


class Side:
    """Gradients or weights: the rules, a stream, buffers, and what was sent."""

    def __init__(self, rules: str, device: torch.device, threads: int) -> None:
        self.rules, self.device, self.threads = _core.Rules(rules), device, threads
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.buffers, self.times = Buffers(), Times()
        self.layouts: dict[str, "Layout"] = {}  # those that keep something from step to step, by unit
        self._now, self._last = [0, 0], [0, 0]  # bytes and elements to other ranks

    def core_device(self) -> "_core.Device":
        return core_device(self.device, self.stream, self.threads)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """On our stream, after all that is before on FSDP's and before all that comes."""
        with torch.inference_mode(False):  # FSDP may gather for an evaluation; our buffers are for training too
            if self.stream is None:
                yield
                return
            theirs = torch.cuda.current_stream(self.device)
            self.stream.wait_stream(theirs)
            with torch.cuda.stream(self.stream):
                yield
            theirs.wait_stream(self.stream)

    def spell(self, kind: str) -> contextlib.AbstractContextManager[None]:
        return self.times.spell(kind, "", wall=self.device.type == "cuda" or kind == "wait")

    # What process groups carry; on a GPU with any but NCCL it goes through page-locked memory of the host.

    def swap(self, send: torch.Tensor, send_slots: list[int], recv_slots: list[int], group: dist.ProcessGroup) -> torch.Tensor:
        """Slot p of `send` to rank p, and what comes from all."""
        with self.spell("wait"):
            send, recv = self._out(send, group), self._room_in(sum(recv_slots), group)
            dist.all_to_all_single(recv, send, recv_slots, send_slots, group=group)
            return self._here(recv)

    def gather(self, mine: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        with self.spell("wait"):
            mine, recv = self._out(mine, group), self._room_in(group.size() * mine.numel(), group)
            _torch("AllGather")(recv, mine, group)
            return self._here(recv)

    def gather_bytes(self, mine: bytes, group: dist.ProcessGroup) -> bytes:
        own = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(self.device)
        return bytes(self.gather(own, group).cpu().numpy())

    def add_up(self, value: torch.Tensor, group: dist.ProcessGroup) -> None:
        """A few numbers, in place."""
        here = value.cpu() if self._staged(group) else value
        dist.all_reduce(here, group=group)
        if here is not value:
            value.copy_(here)

    def _staged(self, group: dist.ProcessGroup) -> bool:
        return self.device.type == "cuda" and "nccl" not in dist.get_backend(group)

    def _out(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        if not self._staged(group):
            return tensor
        host = self.buffers.room("out", tensor.numel(), torch.device("cpu"), pinned=True)
        host.copy_(tensor, non_blocking=True)
        torch.cuda.current_stream(self.device).synchronize()  # the group reads it at once
        return host

    def _room_in(self, size: int, group: dist.ProcessGroup) -> torch.Tensor:
        staged = self._staged(group)
        return self.buffers.room("in", size, torch.device("cpu") if staged else self.device, pinned=staged)

    def _here(self, received: torch.Tensor) -> torch.Tensor:
        if received.device.type == self.device.type:
            return received
        here = self.buffers.room("here", received.numel(), self.device)
        here.copy_(received, non_blocking=True)
        return here

    # Meters.

    def sent(self, size: int, elements: int) -> None:
        self._now[0] += size
        self._now[1] += elements

    def step_done(self) -> None:
        self._last, self._now = self._now, [0, 0]

    def report(self) -> dict[str, Any]:
        size, elements = self._last if self._last[1] else self._now
        bits = 8 * size / elements if elements else 0.0
        return {"codec": str(self.rules), "bits": bits, "bytes": size, "ratio": bits / 32}


class Layout:
    """A unit's buffer as the core sees it, and the relay that codes it."""

    def __init__(self, side: Side, unit: str, codec: "_core.Codec", count: int, dtype: torch.dtype, group: dist.ProcessGroup, **options: Any) -> None:
        if dtype not in _DTYPES:
            raise UnsupportedError(
                f"module '{unit}' sends {str(dtype)[6:]} (uint8: parameters of several types, as bytes); allowed are float32, float16 and bfloat16. "
                f"Give its parameters one type, or leave it to torch with a rule '{unit}=fp32'",
                field="dtype",
            )
        self.unit, self.group, self.count, self.dtype = unit, group, count, dtype
        world = group.size()
        self.model = _core.RelayModel(
            [(f"{unit}/{p}", count, _DTYPES[dtype], 2) for p in range(world)],
            up=f"*={codec}", owner_feedback="off", rank=group.rank(), world=world, device=side.core_device(), **options,
        )  # fmt: skip
        self.keeps = codec.learns or options.get("feedback") == "on"
        self.relay = _core.Relay(self.model, list(range(world)), side.core_device())

    def slices(self, flat: torch.Tensor) -> list[int]:
        return [flat.data_ptr() + p * self.count * flat.element_size() for p in range(self.group.size())]

    def check(self, residuals: Mapping[str, torch.Tensor]) -> None:
        """Whether a state has what this layout needs."""
        for _, name, _, count in self.model.state().entries():
            if name not in residuals:
                raise UsageError(f"the state has no residual of '{name}'", field=name)
            if residuals[name].numel() != count:
                raise UsageError(f"'{name}' has {count} elements; its residual in the state has {residuals[name].numel()}", field=name)

    def restore(self, residuals: Mapping[str, torch.Tensor], learned: Mapping[str, torch.Tensor]) -> None:
        self.check(residuals)
        current = self.model.state()
        mine = {name: residuals[name] for _, name, _, _ in current.entries()}
        feedback = _state._feedback_of({"up": mine, "down": {}}, "f32")
        for name in current.notes():
            if f"{self.unit}:{name}" in learned:
                feedback.set_note(name, bytes(learned[f"{self.unit}:{name}"].cpu().contiguous().numpy()))
        self.model.restore(feedback)

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Residuals and what was learned, by names that differ from those of other units."""
        now = self.model.state()
        residuals = {name: torch.from_numpy(now.residual(side, name, first)) for side, name, first, _ in now.entries()}
        return residuals, {f"{self.unit}:{name}": torch.frombuffer(bytearray(note), dtype=torch.uint8) for name, note in now.notes().items() if note}


def _torch(name: str) -> Any:
    """FSDP's own collective."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives

    return getattr(_fsdp_collectives, f"Default{name}")()


class _Comm:
    """What FSDP calls, for one unit."""

    def __init__(self, hook: "FsdpHook", side: Side, unit: str) -> None:
        self.hook, self.side, self.unit = hook, side, unit
        self.layouts: dict[tuple[Any, ...], Layout | None] = {}

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(tuple(size), dtype=dtype, device=device)

    def layout(self, count: int, dtype: torch.dtype, group: dist.ProcessGroup) -> Layout | None:
        """None: torch's own collective does it."""
        key = (count, dtype, group)
        if key not in self.layouts:
            codec = self.codec(self.side, self.unit, count)
            self.layouts[key] = None if str(codec) == "fp32" else self.make(codec, count, dtype, group)
        return self.layouts[key]

    @staticmethod
    def codec(side: Side, unit: str, count: int) -> "_core.Codec":
        return side.rules.codec_for(unit, 2, count)

    def make(self, codec: "_core.Codec", count: int, dtype: torch.dtype, group: dist.ProcessGroup) -> Layout:
        raise NotImplementedError


class ScatteredGradients(_Comm):
    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False) -> None:
        self.hook._enter(self.unit)
        count, others = output_tensor.numel(), group.size() - 1
        layout = self.layout(count, input_tensor.dtype, group)
        if layout is None:
            _torch("ReduceScatter")(output_tensor, input_tensor, group, op)
            self.side.sent(others * count * input_tensor.element_size(), others * count)
        else:
            with self.side.turn():
                self._reduce(layout, output_tensor, input_tensor)
                factor = _factor(op, group.size())
                if factor != 1:
                    output_tensor.mul_(factor)
        self.hook._saw(self.unit, layout, output_tensor)

    def _reduce(self, layout: Layout, output: torch.Tensor, gradients: torch.Tensor) -> None:
        side, relay, hook = self.side, layout.relay, self.hook
        layout.model.begin(hook.step, loss_scale=hook._scale(), rate=hook._rate)
        with side.spell("encode"):
            relay.begin()
            slots = relay.up_send
            send = side.buffers.room("send", sum(slots), side.device)
            relay.encode_up(layout.slices(gradients), send.data_ptr(), send.numel())
        received = side.swap(send, slots, relay.up_recv, layout.group)
        with side.spell("decode"):
            relay.decode_up(received.data_ptr(), received.numel(), [output.data_ptr()])
        others = layout.group.size() - 1
        side.sent(sum(slots) - slots[layout.group.rank()], others * layout.count)

    def make(self, codec: "_core.Codec", count: int, dtype: torch.dtype, group: dist.ProcessGroup) -> Layout:
        options = self.hook._options
        # Replicas of a hybrid mesh must not round alike, or their errors would not average out.
        seed = (options["seed"] + (dist.get_global_rank(group, 0) << 32)) % 2**64
        layout = Layout(
            self.side, self.unit, codec, count, dtype, group,
            kind="reduce_scatter", feedback="on" if options["feedback"] else "off", residual=_DTYPES[options["residual"]], seed=seed,
        )  # fmt: skip
        if not layout.keeps:
            return layout
        if self.unit in self.side.layouts:
            before = self.side.layouts[self.unit]
            raise UnsupportedError(
                f"module '{self.unit}' sent {before.count} elements of {before.dtype} a rank before, now it is {count} of {dtype}: parameters without a gradient are left out. "
                "Feedback and codecs that learn need the same every time: call set_reduce_scatter_unused_params(True) on the model, or shard such parameters in a module of their own",
                field="unit",
            )
        self.side.layouts[self.unit] = layout
        if self.hook._restored[0] or self.hook._restored[1]:
            layout.restore(*self.hook._restored)
        return layout


def _factor(op: Any, world: int) -> float:
    """By what the mean must be multiplied to be what `op` asks for."""
    if op == dist.ReduceOp.AVG:
        return 1.0
    if op == dist.ReduceOp.SUM:
        return float(world)
    state: Any = op.__getstate__() if isinstance(op, dist.ReduceOp) else (op, None)  # where torch keeps the factor
    if state[0] == dist.ReduceOp.RedOpType.PREMUL_SUM and isinstance(state[1], float):  # type: ignore[attr-defined]
        return world * state[1]
    raise UnsupportedError(f"gradients are reduced by {state[0]}; allowed are AVG, SUM and PREMUL_SUM with a number", field="op")


class GatheredWeights(_Comm):
    _group: dist.ProcessGroup | None = None

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False) -> Any:
        if self._group is None:
            self._group = group
        count, others = input_tensor.numel(), group.size() - 1
        # With reshard_after_forward=N backward gathers what forward has decoded, over another group: as it is.
        layout = self.layout(count, input_tensor.dtype, group) if group is self._group else None
        if layout is None:
            self.side.sent(others * count * input_tensor.element_size(), others * count)
            return _torch("AllGather")(output_tensor, input_tensor, group, async_op)
        with self.side.turn():
            self._gather(layout, output_tensor, input_tensor)
        return None  # it is done, in the order of the stream

    def _gather(self, layout: Layout, output: torch.Tensor, shard: torch.Tensor) -> None:
        side, relay = self.side, layout.relay
        layout.model.begin(self.hook.step)
        with side.spell("encode"):
            relay.begin()
            size = relay.down_recv[0]  # one codec for all, so all are alike
            mine = side.buffers.room("send", size, side.device)
            relay.encode_down(mine.data_ptr(), size, [shard.data_ptr()])
        received = side.gather(mine, layout.group)
        with side.spell("decode"):
            relay.decode_down(received.data_ptr(), received.numel(), layout.slices(output))
            layout.model.end()
        others = layout.group.size() - 1
        side.sent(others * size, others * layout.count)

    @staticmethod
    def codec(side: Side, unit: str, count: int) -> "_core.Codec":
        codec = side.rules.codec_for(unit, 2, count)
        if codec.learns:
            raise UnsupportedError(f"weights is '{codec}', a codec that learns: forward and backward would see different weights; one that does not, like unigrid:bits=8, is needed", field="weights")
        return codec

    def make(self, codec: "_core.Codec", count: int, dtype: torch.dtype, group: dist.ProcessGroup) -> Layout:
        return Layout(self.side, self.unit, codec, count, dtype, group, kind="all_gather", feedback="off", seed=self.hook._options["seed"])
