# SPDX-License-Identifier: Apache-2.0
"""The hook for the replicas of an FSDP2 model: `fully_shard` on a mesh of two dimensions shards a model within each row
of the mesh, and reduces the shards between the rows; `replicate` has one dimension, and whole parameters. The hook
takes the place of that all-reduce (_replica_group.py is the door) and codes it as the hook for DDP does: the replicas
are the ranks, the shards are the tensors, and both have the names of the parameters. Residuals have the size of shards.

A result is needed where torch reads it. On CUDA streams that is a matter of order on the streams. Elsewhere threads
send, and most results are waited for only when the backward pass ends, so that the rest of it is computed meanwhile.

All ranks decide alike about a step: replicas see the same results, and the ranks of a row exchange one number, which is
NaN where a result is not finite.
"""

from __future__ import annotations

import contextlib
import functools
import struct
import time
import weakref
from typing import Any, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from .. import _arrays, _core
from .._errors import UnsupportedError, UsageError
from . import _fsdp, _hook, _replica_state
from ._agree import Handshake, agreed_on_mesh
from ._chunks import CHUNK, FINE_CHUNK, SLOW, Chunk, ChunkKey, split
from ._compress import refuse_foreign
from ._exposed import Exposed, with_exposed
from ._hook import DTYPES, Hook
from ._lessons import Lessons
from ._meters import Meters
from ._reduce_hook import Made, ReduceHook
from ._replica_group import Replicas, Unit, buffer_of_caller, find
from ._rules import by_whole
from ._task import CodingTask, Times, core_device
from ._transport import Transport
from ._units import Channel, factor_of


def attach(model: torch.nn.Module, codec: Any, options: dict[str, Any]) -> Hook:
    """Makes a hook and puts it in place of the one that is there, if there is one. Collective."""
    if codec is None:
        return _fsdp.attach(model, options.pop("gradients", None), options)  # the all-reduce is left to torch
    found = find(model)

    def prepare() -> tuple[ReplicaHook, Handshake]:
        refuse_foreign("HSDP", options)
        hook = ReplicaHook(model, found, codec, options)
        return hook, hook._handshake() + hook._optimizer_terms

    timeout = _hook.valid_timeout(options.get("timeout"))
    # The moments of an optimizer are those of shards: replicas have the same ones.
    hook = agreed_on_mesh(
        found.groups, found.members, "compress", prepare, timeout, first_only=lambda hook: hook._moment_terms
    )
    hook._connect()
    _fsdp.replace_hook(model, hook)
    for unit in found.units:
        unit.install(hook)
    if hook._shards is not None:
        hook._shards._place(model)
    if hook._scaler is not None:
        hook._handles.append(model.register_forward_pre_hook(lambda *_: hook._prefetch_scale()))
    if hook._momentum is not None:
        hook._momentum.attach()
    hook._watch_optimizers()
    return hook


class ReplicaHook(ReduceHook):
    """The hook of a model that `fully_shard` or `replicate` has replicated."""

    _accumulation = "set_requires_all_reduce(False) or set_requires_gradient_sync(False)"

    def __init__(self, model: torch.nn.Module, found: Replicas, codec: Any, given: dict[str, Any]) -> None:
        self.step = 0
        self._mesh = found
        self._device = _checked(found.device)
        self._group, self._world = found.group, found.replicas
        self._tells = dist.get_rank() == found.members[0]
        self._names = [parameter.name for parameter in found.parameters]
        if not self._names:
            raise UsageError("the model has no parameter that requires a gradient", field="model")
        self._scaler = _hook.scaler(given["scaler"])
        self._timeout = _hook.timeout_of(given.get("timeout"))
        self._threads = _hook.threads(given["threads"])
        self._min_elements = _arrays.whole(given["min_elements"], "min_elements", 2**40)
        self._warmup = _hook.steps(given.get("warmup", 0), "warmup")
        self._residual = _hook.residual_dtype(given["residual"])
        feedback = self._feedback = _hook.switch(given["feedback"], "feedback")
        self._channel = Channel("*=fp32", self._device, self._threads)  # small collectives, and the end of a step
        self._model_options: dict[str, Any] = {
            "method": given.get("method", "scatter"),
            "feedback": "codec" if feedback is None else "on" if feedback else "off",
            "owner_feedback": "off" if _hook.switch(given.get("owner_feedback"), "owner_feedback") is False else "on",
            "residual": DTYPES[self._residual],
            "decay": 1.0,
            "seed": _arrays.whole(given["seed"], "seed"),
            "steps": _arrays.whole(given.get("steps", 0), "steps", 10**9),
        }
        self._index = {id(parameter): i for i, parameter in enumerate(found.sharded)}
        self._name_optimizer(given, codec, self._named(given), model, _fsdp.hook_of(model), found.shard_group)
        self._first_model(codec, given.get("down"))
        self._shards = self._make_shards(model, given)
        self._skipped_before = 0  # by models of earlier codecs
        self._times, self._exposed, self._waited = Times(), Exposed(self._device), 0.0
        self._lessons = Lessons()
        self._meters = Meters(self._names, [parameter.count for parameter in found.parameters], 0, None)
        self._chunks: dict[ChunkKey, Chunk] = {}
        self._used: list[CodingTask] = []
        self._chunk_elements, self._began = CHUNK, 0.0
        # Units that were reduced in this step, with what tells that a result is there.
        self._open: "dict[int, torch.futures.Future[torch.Tensor] | None]" = {}
        self._is_begun = False  # the model's step
        self._ends_itself = False  # autograd calls _end_step
        self._failure: Exception | None = None
        self._flags = torch.zeros(len(found.units), device=self._device)  # NaN: a result of the unit was not finite
        self._handles: list[Any] = []

    def _make_shards(self, model: torch.nn.Module, given: dict[str, Any]) -> "_fsdp.FsdpHook | None":
        """The hook for the shard dimension, if it is to be compressed too."""
        gradients, weights = given.get("gradients"), given.get("weights")
        if gradients is None and weights is None:
            return None
        if self._mesh.shard_group is None:
            raise UsageError(
                "gradients and weights are for what is sent within a shard dimension; this model is replicated only",
                field="gradients" if gradients is not None else "weights",
            )
        options = {name: given[name] for name in ("residual", "min_elements", "scaler", "seed", "threads")}
        options |= {"feedback": None, "weights": weights}
        options |= {name: given[name] for name in ("steps",) if name in given}
        return _fsdp.make(model, gradients, {name: one for name, one in options.items() if name != "weights" or one})

    def _named(self, given: Mapping[str, Any]) -> dict[str, torch.nn.Parameter]:
        """The parameters by name, as an optimizer has them."""
        for one in self._mesh.parameters if given.get("optimizer") is not None else []:
            if one.offloaded:
                raise UnsupportedError(
                    f"parameter '{one.name}' is offloaded to the CPU; with optimizer= it must be where its gradient is "
                    "reduced, because what is exchanged comes from the optimizer's moments",
                    field="offload_policy",
                )
            if one.dtype == torch.float16:
                raise UnsupportedError(
                    f"the gradient of parameter '{one.name}' is reduced as float16; with optimizer= allowed are "
                    "float32 and bfloat16, because Adam's second moments need their range",
                    field="dtype",
                )
        return dict(zip(self._names, self._mesh.sharded))

    def _coder(self, up: str, down: str, options: dict[str, Any]) -> "_core.ModelCoder":
        tensors = [
            (parameter.name, parameter.count, DTYPES[parameter.dtype], len(parameter.shape))
            for parameter in self._mesh.parameters
        ]
        options = options | {
            # The same elements of different shards are rounded independently of each other.
            "seed": (options["seed"] + (self._mesh.shard << 32)) % 2**64,
            "rank": self._mesh.replica,
            "world": self._world,
            "device": core_device(self._device, self._channel.stream, self._threads),
        }
        return _core.ModelCoder(tensors, up=self._by_whole(up), down=self._by_whole(down), **options)

    def _by_whole(self, rules: str) -> str:
        return by_whole(rules, [(one.name, len(one.shape), one.elements, one.count) for one in self._mesh.parameters])

    def _codecs(self, rules: str) -> "list[_core.Codec]":
        chosen = _core.Rules(rules)
        return [chosen.codec_for(one.name, len(one.shape), one.elements) for one in self._mesh.parameters]

    def _use(self, codec: str, down: Any, model: "_core.ModelCoder") -> None:
        self.codec, self._down = codec, down
        self._take(model)
        # Every codec is fp32: the process group's own all-reduce gives the bits of plain FSDP2.
        self._plain = self._is_exact(codec, down)

    def __repr__(self) -> str:
        removed = ", removed" if self._removed else ""
        mesh = f"{self._mesh.replicas} replicas of {self._mesh.shards} shards"
        return f"<ReplicaHook '{self.codec}' for {len(self._names)} parameters, {mesh}, at step {self.step}{removed}>"

    def _handshake(self, codec: str | None = None, down: Any = None) -> Handshake:
        down = self._down if down is None else down
        terms = [("codec", codec or self.codec), ("down", str(down)), ("device", self._device.type)]
        terms.append(("optimizer", self._optimizer_kind))
        terms += [(name, str(value)) for name, value in self._model_options.items()]
        terms += [("warmup", str(self._warmup)), ("mesh", f"{self._mesh.replicas} x {self._mesh.shards}")]
        for one in self._mesh.parameters:
            terms.append(("parameter", f"{one.name}: {one.shape} {one.dtype}, sharded in dimension {one.shard_dim}"))
        return terms + (self._shards._handshake() if self._shards is not None else [])

    def _connect(self) -> None:
        self._transport = Transport.acquire(self._group, self._device, self._timeout)
        self._release = weakref.finalize(self, self._transport.release)
        self._release.atexit = False  # Transport.close_all does it
        self._prepare_lessons()

    def remove(self) -> None:
        if self._removed:
            return
        self._removed = True
        for unit in self._mesh.units:
            unit.uninstall()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._shards is not None:
            self._shards.remove()
        self._let_optimizer_go()
        self._chunks.clear()
        self._release()  # at most once

    def set_codec(
        self,
        codec: "str | _core.Codec | _core.Rules | None" = None,
        *,
        down: Any = None,
        gradients: Any = None,
        weights: Any = None,
    ) -> None:
        """Changes the codecs, or the rules, from the next step on. All ranks must call it between the same two steps.

        codec, down, gradients, weights: as for `compress`; None leaves them as they are. A parameter keeps its residual
        where the new codec has error feedback too; otherwise the residual is dropped. What a codec has learned is kept
        where the same codec is used again.
        """

        def prepare() -> tuple[Made, Handshake]:
            if self._removed:
                raise UsageError("the hook was removed; call compress to begin again", field="hook")
            self._check_idle("change the codec")
            if (gradients is not None or weights is not None) and self._shards is None:
                raise UsageError(
                    "neither gradients nor weights were given to compress, so the shard dimension is left to torch; "
                    "call compress again",
                    field="gradients" if gradients is not None else "weights",
                )
            made = self._changed_model(self.codec if codec is None else codec, self._down if down is None else down)
            shard_codecs = f"{gradients}, {weights}"
            return made, [("step", str(self.step)), ("shards", shard_codecs), *self._handshake(made[0], made[1])]

        made = self._agreed("set_codec", prepare)
        if self._shards is not None and (gradients is not None or weights is not None):
            self._shards.set_codec(gradients, weights=weights)
        self._change_to(*made)
        self._watch_optimizers()

    def _agreed(self, call: str, prepare: Any) -> Any:
        return agreed_on_mesh(self._mesh.groups, self._mesh.members, call, prepare, self._timeout)

    def _check_idle(self, what: str) -> None:
        if self._open:
            raise UsageError(f"a step is under way; {what} between two steps", field="step")
        self._synchronize()

    def _replace_model(self, model: "_core.ModelCoder") -> None:
        self._skipped_before += self._model.skipped()
        self._take(model)
        self._chunks.clear()

    # One step.

    def _all_reduce(self, unit: Unit, flat: torch.Tensor, options: Any) -> Any:
        """What FSDP calls for a unit, on its stream for all-reduces. Returns what torch is to wait for, or None."""
        self._enter(unit)
        if self._is_metered:
            self._exposed.handed(flat, False)
        if self._momentum is not None and not self._open:
            self._momentum.refuse_second_pass(range(len(self._names)))
            self._momentum.begin(self._scale())
        if self._plain:
            self._open[unit.index] = None
            self._meters.sent(2 * flat.element_size() * flat.numel() * (self._world - 1) // self._world)
            return unit.group.allreduce([flat], options)
        self._transport.check()
        buffer = buffer_of_caller()
        tensors, gradients = unit.layout(flat, buffer.parameters)
        factor = factor_of(options.reduceOp, self._world)
        if self._momentum is not None:
            # Momentum is that of the gradient which the loop would see if there were no other replica.
            if factor != buffer.divisor:
                flat.mul_(factor / buffer.divisor)
            self._momentum.put(tensors, gradients)
            factor = buffer.divisor
        done = self._submit(unit, flat, tuple(tensors), gradients, factor)
        self._open[unit.index] = done
        if done is not None and (self._transport.on_streams or not self._ends_itself or unit.is_read_early(flat)):
            with self._waiting():
                done.wait()
        return None

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """Around what the backward pass waits for."""
        began = time.perf_counter()
        yield
        self._waited += time.perf_counter() - began

    @property
    def _is_metered(self) -> bool:
        """Whether it can be known what a step waits for: not where torch waits, nor on CUDA streams."""
        return not self._plain and self._device.type == "cpu"

    def _gather_everywhere(self, mine: bytes) -> bytes:
        every = self._channel.gather_bytes(mine, self._group)
        shards = self._mesh.shard_group
        return every if shards is None else self._channel.gather_bytes(every, shards)

    def _enter(self, unit: Unit) -> None:
        if unit.index in self._open:
            # Nothing has ended the previous step, or the unit is reduced twice in one backward pass: its residual must
            # be decided before it is encoded again.
            self._end_step()
        if not self._open and self._is_metered:
            reduces = self._world > 1
            self._exposed.begin((lambda values: dist.all_reduce(values, group=unit.group)) if reduces else None)
            self._waited = 0.0
        # The callback is queued at every call: only the first one that runs finds a step to end, and one that never ran
        # must not be missed. FSDP's own callback is older, so the last units come before it. Outside of a backward pass
        # there is none.
        self._ends_itself = False
        with contextlib.suppress(RuntimeError):
            torch.autograd.Variable._execution_engine.queue_callback(self._end_step)
            self._ends_itself = True

    def _submit(
        self, unit: Unit, flat: torch.Tensor, tensors: tuple[int, ...], gradients: list[torch.Tensor], factor: float
    ) -> "torch.futures.Future[torch.Tensor] | None":
        if not tensors:
            return None  # this rank has no element of them, and neither have its replicas
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=[self._device] if self._stream else None
        )
        keys = split(
            tensors, self._meters.elements, self._model, 0 if self._transport.on_streams else self._chunk_elements
        )
        for key in keys:
            if key not in self._chunks:
                self._chunks[key] = Chunk(self, *key)
        chunks = [self._chunks[key] for key in keys]
        chunks[-1].settle = functools.partial(self._settle, chunks, unit, flat, tensors, gradients, factor)
        for key, chunk in zip(keys, chunks):
            at = tensors.index(key[0][0])
            chunk.load(flat, gradients[at : at + len(key[0])], not self._is_begun, False)
            self._is_begun = True
            chunk.future = done if chunk is chunks[-1] else None
            self._transport.submit(chunk)
        return done

    def _settle(
        self,
        chunks: Sequence[Chunk],
        unit: Unit,
        flat: torch.Tensor,
        tensors: Sequence[int],
        gradients: Sequence[torch.Tensor],
        factor: float,
    ) -> None:
        """In the thread that decodes, on the stream of the last chunk: the result as torch expects it."""
        for chunk in chunks[:-1]:
            chunks[-1].wait_for(chunk.stream)
        if self._momentum is not None:
            self._momentum.settle(tensors, gradients)
        if factor != 1:
            flat.mul_(factor)
        if self._mesh.shards > 1:
            self._flags[unit.index] = torch.linalg.vector_norm(flat, float("inf")).float() * 0

    def _begin(self, loss_scale: float) -> None:
        """At the first chunk, in the thread that encodes."""
        self._lessons.wait()
        self._began = time.perf_counter()
        self._model.begin(self.step, loss_scale=loss_scale, rate=self._rate, exact=self._sends_exactly())

    def _end_step(self) -> None:
        """After a backward pass, when FSDP has reduced all units. Either all ranks call it or none."""
        failure, self._failure = self._failure, None
        results, self._open = self._open, {}
        began, self._is_begun = self._is_begun, False
        with self._waiting():
            for done in results.values():
                with contextlib.suppress(Exception) if failure is not None else contextlib.nullcontext():
                    if done is not None:
                        done.wait()
        if failure is not None:
            raise failure
        if not results:
            return
        if self._momentum is not None:
            self._momentum.end()
        self._look_after_watch()
        sent = 0
        if not self._plain:
            used, self._used = self._used if began else [], []
            with self._waiting():
                sent = self._end(used)
            for chunk in used:
                chunk.unload()
        self._meters.sent(sent)
        if self._meters.steps % 100 == 1 and began and not self._transport.on_streams:
            self._choose_chunk_size(sent)
        self._times.step_done()
        self._meters.step_done()
        self.step += 1
        if self._is_metered:
            # On CPUs torch waits for each of its all-reduces when it calls it.
            self._exposed.waited(self._waited, self._exposed.plain_total)
            self._exposed.judge(self._gather_everywhere, self.codec, self._tells)

    def _end(self, used: Sequence[CodingTask]) -> int:
        """Decides about the residuals, and begins to learn. Returns how many bytes were sent."""
        channel = self._channel
        with channel.on_stream():
            for chunk in used:
                if channel.stream is not None:
                    chunk.precede(channel.stream)
            flag = self._flags.sum().reshape(1)
            self._flags.zero_()
            if self._mesh.shard_group is not None and self._mesh.shards > 1:
                channel.all_reduce(flag, self._mesh.shard_group)
            if used:
                self._model.check_finite(flag.data_ptr(), 1)
                self._model.end()
        if used and self._learns:
            self._lessons.begin([self._model], self._transport, self._transport.in_turn)
        return sum(chunk.sent for chunk in used)

    def _choose_chunk_size(self, sent: int) -> None:
        """By the speed of the link, as the slowest replica sees it; see DdpHook."""
        mine = struct.pack("d", sent / (time.perf_counter() - self._began))
        speeds = struct.unpack(f"{self._world}d", self._channel.gather_bytes(mine, self._group))
        chosen = FINE_CHUNK if min(speeds) < SLOW else CHUNK
        if chosen != self._chunk_elements:
            self._chunk_elements = chosen
            self._chunks.clear()

    def _fail_later(self, error: Exception) -> None:
        """An error that backward() raises when FSDP has ended its part of it."""
        self._failure = self._failure or error
        if not self._ends_itself:
            raise error

    @property
    def _stream(self) -> "torch.cuda.Stream | None":
        return self._channel.stream

    def _finish_pass(self) -> None:
        self._end_step()

    def _searches_unused(self) -> bool:
        return False  # FSDP leaves such parameters out

    # For the user.

    def end_step(self) -> None:
        """Ends a step. Only needed where gradients are reduced outside of autograd's backward pass, as pipeline
        schedules do; without it such a step ends when its first unit is reduced again. Collective."""
        self._end_step()
        if self._shards is not None:
            self._shards.end_step()

    def residual_hash(self) -> int:
        self._synchronize()
        mine = self._model.hash()
        return mine if self._shards is None else hash((mine, self._shards.residual_hash()))

    def stats(self) -> dict[str, Any]:
        """What was sent between replicas, and what it cost, on this rank: the numbers that a hook for DDP has (see
        DdpHook.stats), with the shards of this rank as parameters. "fp32_bytes" are those of an uncompressed ring
        all-reduce between the replicas. A whole replica sends the bytes of all of its ranks. "exposed" and "judged" are
        known on CPUs only; there "plain" is all of the time that torch's all-reduces take, because torch waits for each
        of them at once.

        mesh: how many replicas and shards there are. shards: the statistics of the shard dimension (as those of an
        FSDP2 model with one dimension), if it is compressed too.
        """
        self._synchronize()
        up = self._model.codecs("up")
        skipped = self._skipped_before + self._model.skipped()
        report = self._meters.report(self.step, skipped, up, self._world, self._times, self._model.residual_bytes())
        report["plan"] = self._model.plans()
        with_exposed(report, self._exposed.seconds() if self._is_metered else (None, None), self._exposed.judged)
        self._report_optimizer(report)
        report["mesh"] = {"replicas": self._mesh.replicas, "shards": self._mesh.shards}
        if self._shards is not None:
            report["shards"] = self._shards.stats()
        return report

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must contain: the residuals of this rank by parameter name, what codecs have learned, the
        step; where momentum is exchanged, also this rank's second moments. Save it on every rank."""
        self._check_idle("save the state")
        return _replica_state.save(self)

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continues from a state: the one of this rank, or a list of the states of all ranks. On another mesh the
        states of all ranks are needed; their residuals are redistributed, so that their mean over the replicas stays
        the same. Collective."""
        self._synchronize()
        _replica_state.load(self, state)

    def _synchronize(self) -> None:
        self._lessons.wait()
        self._transport.check()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _checked(device: torch.device) -> torch.device:
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"the model is on {device.type}; allowed are cpu and cuda", field="device")
    if device.type == "cuda" and not _core.cuda_devices():
        raise UnsupportedError(
            f"the model is on cuda, but the CUDA part of gradwire: {_core.cuda_description()}", field="device"
        )
    return torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else device
