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
from typing import TYPE_CHECKING, Any, Mapping, Sequence

import torch
import torch.distributed as dist

from .. import _arrays, _core
from .._errors import UnsupportedError, UsageError
from . import _fsdp, _hook, _replica_state, _state
from ._agree import Handshake, agreed_on_mesh
from ._chunks import CHUNK, FINE_CHUNK, SLOW, Chunk, ChunkKey, split
from ._compress import refuse_foreign
from ._hook import DTYPES, Hook
from ._meters import Meters
from ._replica_group import Replicas, Unit, find, parameters_in_buffer
from ._rules import check_patterns, rules_of
from ._task import Times, core_device
from ._transport import Transport
from ._units import Channel, factor_of

if TYPE_CHECKING:
    from ._adam import Momentum


def attach(model: torch.nn.Module, codec: Any, options: dict[str, Any]) -> Hook:
    """Makes a hook and puts it in place of the one that is there, if there is one. Collective."""
    if codec is None:
        return _fsdp.attach(model, options.pop("gradients", None), options)  # the all-reduce is left to torch
    found = find(model)

    def prepare() -> tuple[ReplicaHook, Handshake]:
        refuse_foreign("HSDP", options)
        hook = ReplicaHook(model, found, codec, options)
        return hook, hook._handshake()

    timeout = _hook.valid_timeout(options.get("timeout"))
    hook = agreed_on_mesh(found.groups, found.members, "compress", prepare, timeout)
    hook._connect()
    _fsdp.replace_hook(model, hook)
    for unit in found.units:
        unit.install(hook)
    if hook._shards is not None:
        hook._shards._place(model)
    if hook._scaler is not None:
        hook._handles.append(model.register_forward_pre_hook(lambda *_: hook._prefetch_scale()))
    return hook


class ReplicaHook(Hook):
    """The hook of a model that `fully_shard` or `replicate` has replicated."""

    _momentum: "Momentum | None" = None  # for Chunk: gradients are exchanged

    def __init__(self, model: torch.nn.Module, found: Replicas, codec: Any, given: dict[str, Any]) -> None:
        self.step = 0
        self._mesh = found
        self._device = _checked(found.device)
        self._group, self._world = found.group, found.replicas
        self._names = [parameter.name for parameter in found.parameters]
        if not self._names:
            raise UsageError("the model has no parameter that requires a gradient", field="model")
        self._scaler = _hook.scaler(given["scaler"])
        self._timeout = _hook.timeout_of(given.get("timeout"))
        self._threads = _hook.threads(given["threads"])
        self._min_elements = _arrays.whole(given["min_elements"], "min_elements", 2**40)
        self._warmup = _hook.steps(given.get("warmup", 0), "warmup")
        self._residual = _hook.residual_dtype(given["residual"])
        feedback = _hook.switch(given["feedback"], "feedback")
        self._channel = Channel("*=fp32", self._device, self._threads)  # small collectives, and the end of a step
        self._model_options: dict[str, Any] = {
            "method": given.get("method", "scatter"),
            "feedback": "codec" if feedback is None else "on" if feedback else "off",
            "owner_feedback": "off" if _hook.switch(given.get("owner_feedback"), "owner_feedback") is False else "on",
            "residual": DTYPES[self._residual],
            "seed": _arrays.whole(given["seed"], "seed"),
            "steps": _arrays.whole(given.get("steps", 0), "steps", 10**9),
        }
        self._use(*self._model_for(codec, given.get("down")))
        self._shards = self._make_shards(model, given)
        self._skipped_before = 0  # by models of earlier codecs
        self._times = Times()
        self._meters = Meters(self._names, [parameter.count for parameter in found.parameters], 0, None)
        self._chunks: dict[ChunkKey, Chunk] = {}
        self._used: list[Chunk] = []
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

    def _model_for(self, codec: Any, down: Any) -> tuple[str, Any, "_core.ModelCoder"]:
        """The rules for gradients, `down` as it was given, and a coder for both."""
        up = rules_of(codec, self._min_elements)
        check_patterns(up, self._names, "parameter")
        down_rules = ""
        if down is not None:
            down_rules = rules_of(down, self._min_elements, "down")
            check_patterns(down_rules, self._names, "parameter", "down")
        tensors = [
            (parameter.name, parameter.count, DTYPES[parameter.dtype], len(parameter.shape))
            for parameter in self._mesh.parameters
        ]
        options = self._model_options | {
            # The same elements of different shards are rounded independently of each other.
            "seed": (self._model_options["seed"] + (self._mesh.shard << 32)) % 2**64,
            "rank": self._mesh.replica,
            "world": self._world,
            "device": core_device(self._device, self._channel.stream, self._threads),
        }
        return up, down, _core.ModelCoder(tensors, up=self._by_whole(up), down=self._by_whole(down_rules), **options)

    def _by_whole(self, rules: str) -> str:
        """Rules that give a shard the codec of its whole parameter: "<N" is about parameters, and the coder sees
        shards."""
        if not rules:
            return ""
        chosen, exceptions = _core.Rules(rules), ""
        for parameter, wanted in zip(self._mesh.parameters, self._codecs(rules)):
            if str(chosen.codec_for(parameter.name, len(parameter.shape), parameter.count)) != str(wanted):
                exceptions += f"{parameter.name}={wanted};"
        return exceptions + rules

    def _codecs(self, rules: str) -> "list[_core.Codec]":
        """The codec of each parameter."""
        chosen = _core.Rules(rules)
        return [chosen.codec_for(one.name, len(one.shape), one.elements) for one in self._mesh.parameters]

    def _use(self, codec: str, down: Any, model: "_core.ModelCoder") -> None:
        self.codec, self._down, self._model = codec, down, model
        # Every codec is fp32: the process group's own all-reduce gives the bits of plain FSDP2.
        self._plain = down is None and all(str(one) == "fp32" for one in self._codecs(codec))

    def __repr__(self) -> str:
        removed = ", removed" if self._removed else ""
        mesh = f"{self._mesh.replicas} replicas of {self._mesh.shards} shards"
        return f"<ReplicaHook '{self.codec}' for {len(self._names)} parameters, {mesh}, at step {self.step}{removed}>"

    def _handshake(self, codec: str | None = None, down: Any = None) -> Handshake:
        down = self._down if down is None else down
        terms = [("codec", codec or self.codec), ("down", str(down)), ("device", self._device.type)]
        terms += [(name, str(value)) for name, value in self._model_options.items()]
        terms += [("warmup", str(self._warmup)), ("mesh", f"{self._mesh.replicas} x {self._mesh.shards}")]
        for one in self._mesh.parameters:
            terms.append(("parameter", f"{one.name}: {one.shape} {one.dtype}, sharded in dimension {one.shard_dim}"))
        return terms + (self._shards._handshake() if self._shards is not None else [])

    def _connect(self) -> None:
        self._transport = Transport.acquire(self._group, self._device, self._timeout)
        self._release = weakref.finalize(self, self._transport.release)
        self._release.atexit = False  # Transport.close_all does it

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

        def prepare() -> tuple[tuple[str, Any, "_core.ModelCoder"], Handshake]:
            if self._removed:
                raise UsageError("the hook was removed; call compress to begin again", field="hook")
            self._check_idle("change the codec")
            if (gradients is not None or weights is not None) and self._shards is None:
                raise UsageError(
                    "neither gradients nor weights were given to compress, so the shard dimension is left to torch; "
                    "call compress again",
                    field="gradients" if gradients is not None else "weights",
                )
            made = self._model_for(self.codec if codec is None else codec, self._down if down is None else down)
            shard_codecs = f"{gradients}, {weights}"
            return made, [("step", str(self.step)), ("shards", shard_codecs), *self._handshake(made[0], made[1])]

        rules, new_down, model = self._agreed("set_codec", prepare)
        if self._shards is not None and (gradients is not None or weights is not None):
            self._shards.set_codec(gradients, weights=weights)
        state, dropped = _state.carried(self._model.state(), model.state(), self._model_options["residual"])
        model.restore(state)
        self._replace_model(model)
        self._use(rules, new_down, model)
        _state.log_dropped(dropped)

    def _agreed(self, call: str, prepare: Any) -> Any:
        return agreed_on_mesh(self._mesh.groups, self._mesh.members, call, prepare, self._timeout)

    def _check_idle(self, what: str) -> None:
        if self._open:
            raise UsageError(f"a step is under way; {what} between two steps", field="step")
        self._synchronize()

    def _fresh_model(self) -> "_core.ModelCoder":
        return self._model_for(self.codec, self._down)[2]

    def _replace_model(self, model: "_core.ModelCoder") -> None:
        """Between two steps."""
        self._skipped_before += self._model.skipped()
        self._model = model
        self._chunks.clear()

    # One step.

    def _all_reduce(self, unit: Unit, flat: torch.Tensor, options: Any) -> Any:
        """What FSDP calls for a unit, on its stream for all-reduces. Returns what torch is to wait for, or None."""
        self._enter(unit)
        if self._plain:
            self._open[unit.index] = None
            self._meters.sent(2 * flat.element_size() * flat.numel() * (self._world - 1) // self._world)
            return unit.group.allreduce([flat], options)
        self._transport.check()
        tensors, gradients = unit.layout(flat, parameters_in_buffer())
        done = self._submit(unit, flat, tuple(tensors), gradients, factor_of(options.reduceOp, self._world))
        self._open[unit.index] = done
        if done is not None and (self._transport.on_streams or not self._ends_itself or unit.is_read_early(flat)):
            done.wait()
        return None

    def _enter(self, unit: Unit) -> None:
        if unit.index in self._open:
            # Nothing has ended the previous step, or the unit is reduced twice in one backward pass: its residual must
            # be decided before it is encoded again.
            self._end_step()
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
        chunks[-1].settle = functools.partial(self._settle, chunks, unit, flat, factor)
        for key, chunk in zip(keys, chunks):
            at = tensors.index(key[0][0])
            chunk.load(flat, gradients[at : at + len(key[0])], not self._is_begun, False)
            self._is_begun = True
            chunk.future = done if chunk is chunks[-1] else None
            self._transport.submit(chunk)
        return done

    def _settle(self, chunks: Sequence[Chunk], unit: Unit, flat: torch.Tensor, factor: float) -> None:
        """In the thread that decodes, on the stream of the last chunk: the result as torch expects it."""
        for chunk in chunks[:-1]:
            chunks[-1].wait_for(chunk.stream)
        if factor != 1:
            flat.mul_(factor)
        if self._mesh.shards > 1:
            self._flags[unit.index] = torch.linalg.vector_norm(flat, float("inf")).float() * 0

    def _begin(self, loss_scale: float) -> None:
        """At the first chunk, in the thread that encodes."""
        self._began = time.perf_counter()
        self._model.begin(self.step, loss_scale=loss_scale, rate=self._rate, exact=self.step < self._warmup)

    def _end_step(self) -> None:
        """After a backward pass, when FSDP has reduced all units. Either all ranks call it or none."""
        failure, self._failure = self._failure, None
        results, self._open = self._open, {}
        began, self._is_begun = self._is_begun, False
        for done in results.values():
            with contextlib.suppress(Exception) if failure is not None else contextlib.nullcontext():
                if done is not None:
                    done.wait()
        if failure is not None:
            raise failure
        if not results:
            return
        sent = 0
        if not self._plain:
            used, self._used = self._used if began else [], []
            sent = self._end(used)
            for chunk in used:
                chunk.unload()
        self._meters.sent(sent)
        if self._meters.steps % 100 == 1 and began and not self._transport.on_streams:
            self._choose_chunk_size(sent)
        self._times.step_done()
        self._meters.step_done()
        self.step += 1

    def _end(self, used: Sequence[Chunk]) -> int:
        """Decides about the residuals, and learns. Returns how many bytes were sent."""
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
                stats = self._model.stats()
                if stats is not None:
                    self._model.learn(channel.gather_bytes(stats, self._group))
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

    def _scale_on_wire(self) -> float:
        return self._scale()

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
        all-reduce between the replicas. A whole replica sends the bytes of all of its ranks.

        mesh: how many replicas and shards there are. shards: the statistics of the shard dimension (as those of an
        FSDP2 model with one dimension), if it is compressed too.
        """
        self._synchronize()
        up = self._model.codecs("up")
        skipped = self._skipped_before + self._model.skipped()
        report = self._meters.report(self.step, skipped, up, self._world, self._times, self._model.residual_bytes())
        report["plan"] = self._model.plans()
        report["mesh"] = {"replicas": self._mesh.replicas, "shards": self._mesh.shards}
        if self._shards is not None:
            report["shards"] = self._shards.stats()
        return report

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must contain: the residuals of this rank by parameter name, what codecs have learned, the
        step. Save it on every rank."""
        self._check_idle("save the state")
        return _replica_state.save(self)

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continues from a state: the one of this rank, or a list of the states of all ranks. On another mesh the
        states of all ranks are needed; their residuals are redistributed, so that their mean over the replicas stays
        the same. Collective."""
        self._synchronize()
        _replica_state.load(self, state)

    def _synchronize(self) -> None:
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
