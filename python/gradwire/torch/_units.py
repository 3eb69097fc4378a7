# SPDX-License-Identifier: Apache-2.0
"""The two collectives of FSDP2, compressed. Both see a flat buffer with a shard for every rank:

    CompressedReduceScatter   [world x shard] -> [shard]    encode a message for each owner, all-to-all, reduce
    CompressedAllGather       [shard] -> [world x shard]    encode the shard once, all-gather, decode all shards

To the core a unit is a model with a tensor "name/p" for each parameter and each rank p, which owns it (UnitCoder), and
a buffer has some of these parameters (_shard_parts.py). FSDP calls the collectives in the same order on all ranks, and
needs the result when the call returns: in stream order on a GPU, otherwise in host memory. So a Channel, which all
units share, has one stream and one set of buffers, as large as the largest unit needs.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Iterator, Mapping, Sequence, TypeVar

import torch
import torch.distributed as dist

from .. import _core
from .._errors import UnsupportedError, UsageError
from . import _state
from ._hook import DTYPES
from ._meters import Sent, cost
from ._shard_parts import Part, Parts
from ._task import Buffers, Times, between, core_device

if TYPE_CHECKING:
    from ._fsdp import FsdpHook

_MOST_CODERS = 8  # that a unit keeps: steps that leave out layers at random have other parameters each time


class Channel:
    """What the gradients of all units share, or their weights: rules, a stream, buffers, and meters."""

    def __init__(self, rules: str, device: torch.device, threads: int) -> None:
        self.rules, self.device, self.threads = _core.Rules(rules), device, threads
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.buffers, self.times = Buffers(), Times()
        self.coders: dict[str, "UnitCoder"] = {}  # those that keep state from step to step, by unit
        self._bytes, self._elements = Sent(), Sent()  # to other ranks

    def continuing(self, before: "Channel") -> "Channel":
        """Goes on counting where another one has stopped."""
        self.times, self._bytes, self._elements = before.times, before._bytes, before._elements
        return self

    def core_device(self) -> "_core.Device":
        return core_device(self.device, self.stream, self.threads)

    @contextlib.contextmanager
    def on_stream(self) -> Iterator[None]:
        """Runs on our stream, after what FSDP has enqueued on its own stream and before what it enqueues next."""
        # FSDP may gather during an evaluation, but our buffers are used in training too.
        with torch.inference_mode(False), between(self.stream, self.device):
            yield

    def measure(self, kind: str) -> contextlib.AbstractContextManager[None]:
        return self.times.measure(kind, "", wall=self.device.type == "cuda" or kind == "wait")

    # Collectives. On a GPU, with any backend but NCCL, messages pass through page-locked host memory.

    def all_to_all(
        self, send: torch.Tensor, send_slots: list[int], recv_slots: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        """Sends slot p of `send` to rank p. Returns what was received from all ranks."""
        with self.measure("wait"):
            send, recv = self._to_host(send, group), self._receive_buffer(sum(recv_slots), group)
            dist.all_to_all_single(recv, send, recv_slots, send_slots, group=group)
            return self._to_device(recv)

    def gather(self, mine: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        with self.measure("wait"):
            mine, recv = self._to_host(mine, group), self._receive_buffer(group.size() * mine.numel(), group)
            default_collective("AllGather")(recv, mine, group)
            return self._to_device(recv)

    def gather_bytes(self, mine: bytes, group: dist.ProcessGroup) -> bytes:
        own = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(self.device)
        return bytes(self.gather(own, group).cpu().numpy())

    def all_reduce(self, value: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Sums a few numbers, in place."""
        here = value.cpu() if self._through_host(group) else value
        dist.all_reduce(here, group=group)
        if here is not value:
            value.copy_(here)

    def _through_host(self, group: dist.ProcessGroup) -> bool:
        return self.device.type == "cuda" and "nccl" not in dist.get_backend(group)

    def _to_host(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        if not self._through_host(group):
            return tensor
        host = self.buffers.get("out", tensor.numel(), torch.device("cpu"), pinned=True)
        host.copy_(tensor, non_blocking=True)
        torch.cuda.current_stream(self.device).synchronize()  # the backend reads it at once
        return host

    def _receive_buffer(self, size: int, group: dist.ProcessGroup) -> torch.Tensor:
        through_host = self._through_host(group)
        return self.buffers.get("in", size, torch.device("cpu") if through_host else self.device, pinned=through_host)

    def _to_device(self, received: torch.Tensor) -> torch.Tensor:
        if received.device.type == self.device.type:
            return received
        here = self.buffers.get("here", received.numel(), self.device)
        here.copy_(received, non_blocking=True)
        return here

    # Meters.

    def sent(self, size: int, elements: int) -> None:
        self._bytes.add(size)
        self._elements.add(elements)

    def step_done(self) -> None:
        self._bytes.step_done()
        self._elements.step_done()
        self.times.step_done()

    def report(self) -> dict[str, Any]:
        """Before the first step has ended, the last step is the one under way."""
        last = self._elements.last > 0
        size = self._bytes.last if last else self._bytes.now
        elements = self._elements.last if last else self._elements.now
        bits = 8 * size / elements if elements else 0.0
        return {
            "codec": str(self.rules),
            "bits": bits,
            "ratio": 32 / bits if bits else 1.0,
            "last_step": cost(size, 4 * elements, self.times.last),
            "all_steps": cost(
                self._bytes.total + self._bytes.now,
                4 * (self._elements.total + self._elements.now),
                self.times.totals(),
            ),
        }


class UnitCoder:
    """The parameters of one unit as the core sees them, and their coders."""

    def __init__(
        self, channel: Channel, unit: str, parts: Sequence[Part], dtype: torch.dtype, group: dist.ProcessGroup,
        **options: Any,
    ) -> None:  # fmt: skip
        feedback = options["feedback"] == "on"
        codecs = {part.name: part.codec(channel.rules) for part in parts}
        # Of what is not trained nothing is kept: it would take residuals, and distort what is learned from the others.
        sent = [part.name for part in parts if part.trains or not keeps(codecs[part.name], feedback)]
        if dtype not in DTYPES:
            raise UnsupportedError(
                f"module '{unit}' sends {str(dtype)[6:]} (uint8 means parameters of several types, sent as bytes); "
                "allowed are float32, float16 and bfloat16. Give its parameters one type, or leave them to torch with "
                "rules that say fp32",
                field="dtype",
            )
        self.unit, self.group, self.parts, self.dtype = unit, group, parts, dtype
        self._channel, world = channel, group.size()
        # Tensor i belongs to rank i % world.
        self.model = _core.ModelCoder(
            [(name, part.padded, DTYPES[dtype], len(part.shape)) for part in parts for name in part.tensors(world)],
            up="".join(f"{name}/*={codecs[name]};" for name in sent) + "*=fp32",
            owner_feedback="off", rank=group.rank(), world=world, device=channel.core_device(), **options,
        )  # fmt: skip
        self.learns = any(codecs[name].learns for name in sent)
        self.keeps = self.learns or feedback
        self._coders: OrderedDict[tuple[int, ...], _core.BucketCoder] = OrderedDict()  # the one used last is the last

    def coder(self, present: tuple[int, ...]) -> "_core.BucketCoder":
        """Of a buffer that has these parameters, in a step that has begun and has used no coder yet."""
        if present not in self._coders:
            # What is dropped was used in a step that is over and learned from; to free a GPU's memory waits for what
            # still uses it. Residuals are the model's.
            while len(self._coders) >= _MOST_CODERS:
                self._coders.popitem(last=False)
            world = self.group.size()
            tensors = [world * place + p for place in present for p in range(world)]
            self._coders[present] = _core.BucketCoder(self.model, tensors, self._channel.core_device())
        self._coders.move_to_end(present)
        return self._coders[present]

    def places(self, present: tuple[int, ...], flat: torch.Tensor, ranks: int = 1) -> list[int]:
        """The addresses of the parts in a buffer of so many ranks, in the order of the coder's tensors."""
        counts = [self.parts[place].padded for place in present]
        begins, size = [*itertools.accumulate(counts, initial=0)][:-1], flat.element_size()
        return [flat.data_ptr() + (p * sum(counts) + begin) * size for begin in begins for p in range(ranks)]

    def plans(self) -> list[str]:
        """What its codec plans with, for people."""
        return [f"{self.unit}: {line}" for line in self.model.plans()]

    def restore(self, residuals: Mapping[str, torch.Tensor], learned: Mapping[str, torch.Tensor]) -> None:
        """A residual that the state does not have begins with zeros: its codec is newer than the state, or the state
        was saved without feedback. load_state_dict has refused all other cases."""
        current = self.model.state()
        mine = {
            name: residuals[name] if name in residuals else torch.zeros(count)
            for _, name, _, count in current.entries()
        }
        feedback = _state.feedback_of({"up": mine, "down": {}}, "f32")
        for name in current.extra():
            if f"{self.unit}:{name}" in learned:
                feedback.set_extra(name, _state.bytes_of(learned[f"{self.unit}:{name}"]))
        self.model.restore(feedback)

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Residuals and what the codec has learned, by names that differ from those of other units."""
        now = self.model.state()
        residuals = {
            name: torch.from_numpy(now.residual(direction, name, first)) for direction, name, first, _ in now.entries()
        }
        learned = _state.byte_tensors({f"{self.unit}:{name}": extra for name, extra in now.extra().items()})
        return residuals, learned


def keeps(codec: "_core.Codec", feedback: bool) -> bool:
    """Whether something of a parameter with this codec is kept from step to step."""
    return codec.learns or (feedback and not codec.lossless)


def default_collective(name: str) -> Any:
    """The collective that FSDP uses by default."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives

    return getattr(_fsdp_collectives, f"Default{name}")()


C = TypeVar("C", bound="_Comm")


class _Comm:
    """What FSDP calls for one unit."""

    def __init__(self, hook: "FsdpHook", channel: Channel, unit: str, parts: Parts) -> None:
        self.hook, self.channel, self.unit, self.parts = hook, channel, unit, parts
        codecs = [str(part.codec(channel.rules)) for part in parts.all]
        # Places of parameters. A buffer that has none of them is left to torch.
        self.compressed = {i for i, part in enumerate(parts.all) if part.padded and codecs[i] != "fp32"}
        self.coders: dict[tuple[torch.dtype, dist.ProcessGroup], UnitCoder] = {}

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(tuple(size), dtype=dtype, device=device)

    def unit_coder(self, dtype: torch.dtype, group: dist.ProcessGroup) -> UnitCoder:
        if (dtype, group) not in self.coders:
            self.coders[dtype, group] = self.make(dtype, group)
        return self.coders[dtype, group]

    def remade(self: C, channel: Channel) -> C:
        """The same for another channel, with coders for everything that was sent so far."""
        other = type(self)(self.hook, channel, self.unit, self.parts)
        for key in self.coders if other.compressed else ():
            other.unit_coder(*key)
        return other

    def make(self, dtype: torch.dtype, group: dist.ProcessGroup) -> UnitCoder:
        raise NotImplementedError


class CompressedReduceScatter(_Comm):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        self.hook._enter(self.unit)
        count, others = output_tensor.numel(), group.size() - 1
        present = self._present(count) if self.compressed else ()
        plain = self.compressed.isdisjoint(present)
        unit_coder = None if plain else self.unit_coder(input_tensor.dtype, group)
        if unit_coder is None:
            default_collective("ReduceScatter")(output_tensor, input_tensor, group, op)
            self.channel.sent(others * count * input_tensor.element_size(), others * count)
        else:
            with self.channel.on_stream():
                self._reduce(unit_coder, present, output_tensor, input_tensor)
                factor = factor_of(op, group.size())
                if factor != 1:
                    output_tensor.mul_(factor)
        self.hook._saw(self.unit, unit_coder, output_tensor)

    def _present(self, count: int) -> tuple[int, ...]:
        present, feedback = self.parts.in_gradients(count), self.hook._options["feedback"]
        for part in (self.parts.all[place] for place in present):
            if not part.trains and keeps(part.codec(self.channel.rules), feedback):
                raise UsageError(
                    f"parameter '{part.name}' requires a gradient, and did not when compress was called; call compress "
                    "again",
                    field="parameters",
                )
        return present

    def residuals(self) -> Iterator[str]:
        """The names of those that the unit has, or will have when its gradients come."""
        for part in self.parts.all if self.hook._options["feedback"] else ():
            if part.trains and part.padded and not part.codec(self.channel.rules).lossless:
                yield from part.tensors(part.ranks)

    def _reduce(
        self, unit_coder: UnitCoder, present: tuple[int, ...], output: torch.Tensor, gradients: torch.Tensor
    ) -> None:
        channel, hook = self.channel, self.hook
        hook._synchronize()
        unit_coder.model.begin(hook.step, loss_scale=hook._scale(), rate=hook._rate)
        with channel.measure("encode"):
            coder = unit_coder.coder(present)
            coder.begin()
            slots = coder.up_send
            send = channel.buffers.get("send", sum(slots), channel.device)
            places = unit_coder.places(present, gradients, unit_coder.group.size())
            coder.encode_up(places, send.data_ptr(), send.numel())
        received = channel.all_to_all(send, slots, coder.up_recv, unit_coder.group)
        with channel.measure("decode"):
            coder.decode_up(received.data_ptr(), received.numel(), unit_coder.places(present, output))
        others = unit_coder.group.size() - 1
        channel.sent(sum(slots) - slots[unit_coder.group.rank()], others * output.numel())

    def make(self, dtype: torch.dtype, group: dist.ProcessGroup) -> UnitCoder:
        options = self.hook._options
        # The replicas of a hybrid mesh must round differently, or their errors would not average out.
        seed = (options["seed"] + (dist.get_global_rank(group, 0) << 32)) % 2**64
        unit_coder = UnitCoder(
            self.channel, self.unit, self.parts.all, dtype, group,
            kind="reduce_scatter", feedback="on" if options["feedback"] else "off",
            residual=DTYPES[options["residual"]], seed=seed, steps=options["steps"],
        )  # fmt: skip
        if not unit_coder.keeps:
            return unit_coder
        if self.unit in self.channel.coders:
            before = self.channel.coders[self.unit]
            raise UnsupportedError(
                f"the gradients of module '{self.unit}' were {str(before.dtype)[6:]} before, over a group of "
                f"{before.group.size()} ranks, and are {str(dtype)[6:]} now, over {group.size()}; residuals and what "
                "codecs learn need the same type and the same ranks in every step",
                field="unit",
            )
        self.channel.coders[self.unit] = unit_coder
        if self.hook._restored[0] or self.hook._restored[1]:
            unit_coder.restore(*self.hook._restored)
        return unit_coder

    def carry(self, old: Channel) -> list[str]:
        """Takes over what the unit has kept with its former codec. Returns what cannot be kept."""
        before, now = old.coders.get(self.unit), self.channel.coders.get(self.unit)
        if before is None:
            return []
        state = before.model.state()
        if now is None:
            return sorted({name for _, name, _, _ in state.entries()})
        residual = DTYPES[self.hook._options["residual"]]
        carried, dropped = _state.carried(state, now.model.state(), residual)
        now.model.restore(carried)
        return dropped


def factor_of(op: Any, world: int) -> float:
    """The factor between the mean and what `op` asks for."""
    if op == dist.ReduceOp.AVG:
        return 1.0
    if op == dist.ReduceOp.SUM:
        return float(world)
    state: Any = op.__getstate__() if isinstance(op, dist.ReduceOp) else (op, None)  # torch keeps the factor there
    if state[0] == dist.ReduceOp.RedOpType.PREMUL_SUM and isinstance(state[1], float):  # type: ignore[attr-defined]
        return world * state[1]
    raise UnsupportedError(
        f"gradients are reduced by {state[0]}; allowed are AVG, SUM and PREMUL_SUM with a number", field="op"
    )


class CompressedAllGather(_Comm):
    _group: dist.ProcessGroup | None = None

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        if self._group is None:
            self._group = group
        count, others = input_tensor.numel(), group.size() - 1
        # With reshard_after_forward=N the backward pass gathers, over another group, what the forward pass has decoded.
        if not self.compressed or group is not self._group:
            self.channel.sent(others * count * input_tensor.element_size(), others * count)
            return default_collective("AllGather")(output_tensor, input_tensor, group, async_op)
        with self.channel.on_stream():
            self._gather(self.unit_coder(input_tensor.dtype, group), output_tensor, input_tensor)
        return None  # complete in stream order

    def _gather(self, unit_coder: UnitCoder, output: torch.Tensor, shard: torch.Tensor) -> None:
        channel = self.channel
        present = self.parts.in_weights(shard.numel())
        unit_coder.model.begin(self.hook.step)
        with channel.measure("encode"):
            coder = unit_coder.coder(present)
            coder.begin()
            size = coder.down_recv[0]  # all shards have the same codecs and sizes
            mine = channel.buffers.get("send", size, channel.device)
            coder.encode_down(mine.data_ptr(), size, unit_coder.places(present, shard))
        received = channel.gather(mine, unit_coder.group)
        with channel.measure("decode"):
            places = unit_coder.places(present, output, unit_coder.group.size())
            coder.decode_down(received.data_ptr(), received.numel(), places)
            unit_coder.model.end()
        others = unit_coder.group.size() - 1
        channel.sent(others * size, others * shard.numel())

    @staticmethod
    def refuse_learning(channel: Channel, parts: Parts) -> None:
        for codec in (part.codec(channel.rules) for part in parts.all):
            if codec.learns:
                raise UnsupportedError(
                    f"weights is '{codec}', a codec that learns: the forward and the backward pass would see different "
                    "weights; use one that does not learn, such as unigrid:bits=8",
                    field="weights",
                )

    def make(self, dtype: torch.dtype, group: dist.ProcessGroup) -> UnitCoder:
        return UnitCoder(
            self.channel, self.unit, self.parts.all, dtype, group,
            kind="all_gather", feedback="off", seed=self.hook._options["seed"],
        )  # fmt: skip
