# SPDX-License-Identifier: Apache-2.0
"""The hook for DistributedDataParallel. DDP hands over buckets of gradients in the order of the backward pass; each
bucket is sent, compressed, while the rest is still being computed. Residuals are kept by parameter name: DDP rebuilds
its buckets after the first step, and a resumed job starts with other buckets, and neither loses anything.
"""

from __future__ import annotations

import functools
import struct
import time
import weakref
from typing import Any, Mapping, Sequence

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .. import _arrays, _core
from .._errors import UnsupportedError, UsageError
from . import _hook, _nodes, _state, _streams
from ._agree import Handshake, agreed
from ._chunks import CHUNK, FINE_CHUNK, SLOW, Chunk, ChunkKey, split, used_flags
from ._ddp_slot import Slot, hook_of, plain_mean
from ._exposed import Exposed, with_exposed
from ._hook import DTYPES
from ._lessons import Lessons
from ._lowrank_spec import LowRank
from ._meters import Meters
from ._parameters import like_parameter, named_parameters, one_device
from ._reduce_hook import Made, ReduceHook
from ._task import CodingTask, Times, core_device
from ._transport import Transport, runs_on_streams


def _no_graphs(where: str) -> UnsupportedError:
    return UnsupportedError(f"cuda_graphs=True works {where}; leave it out", field="cuda_graphs")


class _Known:
    """A bucket as DDP will hand it over again. It holds the buffer, so that no other bucket can have its address."""

    def __init__(self, buffer: torch.Tensor, tensors: tuple[int, ...], gradients: list[torch.Tensor]) -> None:
        self.tensors, self.gradients = tensors, gradients
        self.chunk: Chunk | None = None  # that it is sent as, once it was
        self.future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        self.future.set_result(buffer)


class _Landing:
    """In place of a future, where the task is over when it was submitted."""

    error: BaseException | None = None

    def set_result(self, buffer: torch.Tensor) -> None:
        pass

    def set_exception(self, error: BaseException) -> None:
        self.error = error


class DdpHook(ReduceHook):
    """The hook of a DistributedDataParallel."""

    _accumulation = "ddp.no_sync()"
    _is_light = True  # on streams all results are on the hook's own one

    def __init__(
        self,
        ddp: DistributedDataParallel,
        codec: Any,
        given: dict[str, Any],
        names: Sequence[str] | None = None,
        layout: _nodes.Layout | None = None,
    ) -> None:
        self.step = 0
        self._layout = layout
        guard = _hook.limit(given.get("guard"), "guard")
        self._options: dict[str, Any] = {
            "residual": _hook.residual_dtype(given["residual"]),
            "measure_every": _hook.steps(given.get("measure_every", 0), "measure_every") or (
                50 if guard is not None else 0
            ),
            "guard": guard,
        }
        self._warmup = _hook.steps(given.get("warmup", 0), "warmup")
        self._timeout = _hook.timeout_of(given.get("timeout"))
        self._threads = _hook.threads(given["threads"])
        self._scaler = _hook.scaler(given["scaler"])
        self._ddp = weakref.ref(ddp)  # DDP's reducer holds the hook, so a reference back would keep both alive forever
        self._slot: "weakref.ref[Slot] | None" = None
        self._handles: list[Any] = []
        named = named_parameters(ddp, names)
        self._names = list(named)
        self._parameters = list(named.values())
        self._index = {id(parameter): i for i, parameter in enumerate(self._parameters)}
        self._device = one_device(named)
        self._min_elements = _arrays.whole(given["min_elements"], "min_elements", 2**40)
        self._group: dist.ProcessGroup = ddp.process_group
        self._world = dist.get_world_size(self._group)
        self._tells = dist.get_rank(self._group) == 0
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        feedback = _hook.switch(given["feedback"], "feedback")
        self._model_options: dict[str, Any] = {
            "method": given.get("method", "scatter"),
            "feedback": "codec" if feedback is None else "on" if feedback else "off",
            "owner_feedback": "off" if _hook.switch(given.get("owner_feedback"), "owner_feedback") is False else "on",
            "residual": DTYPES[self._options["residual"]],
            "decay": _hook.fraction(given.get("decay", 1.0), "decay"),
            "seed": _arrays.whole(given["seed"], "seed"),
            "steps": _arrays.whole(given.get("steps", 0), "steps", 10**9),
            "rank": dist.get_rank(self._group),
            "world": self._world,
        }
        self._options["cuda_graphs"] = bool(_hook.switch(given.get("cuda_graphs"), "cuda_graphs"))
        if self._options["cuda_graphs"]:
            if not self._is_light or not runs_on_streams(self._group, self._device):
                raise _no_graphs("with NCCL on a GPU, on one level and with codecs other than lowrank")
            self._clock = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._device_of_core = core_device(self._device, self._stream, self._threads, self._clock)
        self._model_options["device"] = self._device_of_core
        self._feedback = feedback
        self._name_optimizer(given, codec, named, ddp.module, hook_of(ddp))
        self._first_model(codec, given.get("down"))
        self._skipped_before = 0  # by models of earlier codecs
        self._times, self._exposed = Times(), Exposed(self._device)
        self._meters = Meters(self._names, self._counts(), self._options["measure_every"], guard, self._tells)
        self._meters.whole, self._meters.layout = sum(p.numel() for p in self._parameters), layout
        self._chunks: dict[ChunkKey, Chunk] = {}
        self._used: list[CodingTask] = []  # in this step
        self._chunk_elements = CHUNK
        self._began = 0.0
        self._lessons = Lessons()
        self._known: dict[int, _Known] = {}  # on streams: buckets by the address of their buffers
        self._results = _streams.Following()

    def _place(self) -> tuple[int, int, int, int]:
        """(nodes, ranks per node, the node of this rank, its place in that), as residuals are cut."""
        return self._world, 1, dist.get_rank(self._group), 0

    def _counts(self) -> list[int]:
        """Elements of each parameter that this rank encodes."""
        return [p.numel() for p in self._parameters]

    def _coder(self, up: str, down: str, options: dict[str, Any]) -> "_core.ModelCoder":
        tensors = [(name, p.numel(), DTYPES[p.dtype], p.dim()) for name, p in zip(self._names, self._parameters)]
        return _core.ModelCoder(tensors, up=up, down=down, **options)

    def _codecs(self, rules: str) -> "Sequence[_core.Codec | LowRank]":
        chosen = _core.Rules(rules)
        return [chosen.codec_for(name, p.dim(), p.numel()) for name, p in zip(self._names, self._parameters)]

    def _use(self, codec: str, down: Any, model: "_core.ModelCoder") -> None:
        self.codec, self._down = codec, down
        self._take(model)
        # Every codec is fp32: the process group's own all-reduce gives the bits of plain DDP.
        self._plain = self._is_exact(codec, down)

    def __repr__(self) -> str:
        elements = self._meters.whole
        removed = ", removed" if self._slot is None else ""
        size = f"{len(self._names)} parameters, {elements} elements"
        return f"<DdpHook '{self.codec}' for {size}, on {self._world} ranks, at step {self.step}{removed}>"

    def _handshake(self, model: "_core.ModelCoder | None" = None, codec: str | None = None) -> Handshake:
        terms = [*(model or self._model).handshake(), ("optimizer", self._optimizer_kind)]
        if self._momentum is not None:
            terms.append(("codec", codec or self.codec))  # the model may be that of the warm-up
        terms.append(("warmup", str(self._warmup)))
        terms += [(name, str(self._options[name])) for name in ("measure_every", "guard", "cuda_graphs")]
        terms.append(("device", self._device.type))
        return terms + [("strides", f"{name}: {tuple(p.stride())}") for name, p in zip(self._names, self._parameters)]

    def _connect(self) -> None:
        self._transport = self._make_transport()
        if self._clock is not None and not self._transport.recorder.works():
            self._transport.release()
            raise _no_graphs("if NCCL's exchanges can be recorded on all ranks, and here they cannot")
        self._release = weakref.finalize(self, self._transport.release)
        self._release.atexit = False  # type: ignore[misc]  # Transport.close_all does it
        self._prepare_lessons()

    def _make_transport(self) -> Transport:
        return Transport.acquire(self._group, self._device, self._timeout)

    def remove(self) -> None:
        slot = self._slot() if self._slot is not None else None
        if slot is not None and slot.hook is self:
            slot.hook = None
        self._slot = None
        self._removed = True
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._let_optimizer_go()
        self._forget_chunks()
        self._release()  # at most once

    def set_codec(self, codec: "str | _core.Codec | _core.Rules", *, down: Any = None) -> None:
        """Changes the codec, or the rules, from the next step on. All ranks must call it between the same two steps.

        codec and down are as for `compress`; None leaves `down` as it was given to `compress`. A parameter keeps its
        residual where the new codec has error feedback too. Where it has none, the residual is dropped: what it holds
        is lost, which is at most what the old codec left out of one step's gradient and the steps before. What a codec
        has learned is kept where the same codec is used again. Parameters that the guard has exempted stay so.
        """

        def prepare() -> tuple[Made, Handshake]:
            if self._slot is None:
                raise UsageError("the hook was removed; call compress to begin again", field="hook")
            self._synchronize()
            made = self._changed_model(codec, self._down if down is None else down)
            return made, [("step", str(self.step)), *self._handshake(made[2], made[0])]

        self._change_to(*agreed(self._group, "set_codec", prepare, self._timeout))
        self._watch_optimizers()

    def _replace_model(self, model: "_core.ModelCoder") -> None:
        for tensor in self._meters.exempt:
            model.exempt(tensor)
        self._skipped_before += self._model.skipped()
        self._take(model)
        self._forget_chunks()

    def _forget_chunks(self) -> None:
        self._chunks.clear()
        self._forget_addresses()

    def _forget_addresses(self) -> None:
        for known in self._known.values():
            if known.chunk is not None and known.chunk.recordings is not None:
                known.chunk.recordings.forget()
                known.chunk.recordings = None
        self._known.clear()

    # One step.

    def _comm_hook(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        buffer = bucket.buffer()
        self._check_layout(buffer)
        if not self._plain:
            self._transport.check()
        first = bucket.index() == 0
        if first:
            compares = not self._plain and self._world > 1
            self._exposed.begin((lambda values: dist.all_reduce(values, group=self._group)) if compares else None)
        if self._is_metered:
            self._exposed.handed(buffer, bucket.is_last())
        if self._plain:
            return self._all_reduce(bucket)
        if first:
            self._look_after_watch()
        if self._transport.on_streams and self._is_light:
            return self._on_streams(bucket, buffer)
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=[self._device] if self._stream else None
        )
        result = done.then(lambda future: future.value())  # raises in a way that DDP understands
        tensors = tuple(self._index[id(parameter)] for parameter in bucket.parameters())
        self._send(bucket, done, tensors)
        return result

    def _on_streams(
        self, bucket: Any, buffer: torch.Tensor
    ) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        """DDP looks at no result before the last bucket was handed over. So futures are complete from the start, and
        the stream of the backward pass waits once, for all buckets."""
        known = self._known.get(buffer.data_ptr())
        if known is None:
            if bucket.index() == 0:
                self._forget_addresses()  # DDP has rebuilt its buckets
            tensors = tuple(self._index[id(parameter)] for parameter in bucket.parameters())
            known = self._known[buffer.data_ptr()] = _Known(buffer, tensors, bucket.gradients())
        landing, chunk = _Landing(), known.chunk
        if chunk is None or self._momentum is not None:
            self._send(bucket, landing, known.tensors, known.gradients)
            if chunk is None:
                known.chunk = self._chunks[known.tensors, 0, 1]
                if self._clock is not None:
                    known.chunk.recordings = self._transport.recorder.recordings(self._device_of_core, self)
        else:
            chunk.load(buffer, known.gradients, bucket.index() == 0, bucket.is_last())
            chunk.future = landing  # type: ignore[assignment]
            self._transport.submit(chunk)
        if landing.error is not None:
            raise landing.error
        if bucket.is_last() and self._stream is not None:
            self._results.wait_for(self._stream, _streams.current(self._device))
        return known.future

    def _send(
        self, bucket: Any, done: Any, tensors: tuple[int, ...], gradients: list[torch.Tensor] | None = None
    ) -> None:
        """Submits a bucket to the transport, which completes `done`."""
        buffer = bucket.buffer()
        gradients = bucket.gradients() if gradients is None else gradients
        used, shaped = self._put_momentum(bucket, tensors, gradients)
        keys = split(
            tensors, self._meters.elements, self._model, 0 if self._transport.on_streams else self._chunk_elements
        )
        if bucket.index() == 0 and keys[0] not in self._chunks:
            self._chunks.clear()  # DDP has rebuilt its buckets, or the size of chunks has changed
        for key in keys:
            if key not in self._chunks:
                self._chunks[key] = Chunk(self, *key)
        chunks = [self._chunks[key] for key in keys]
        if self._momentum is not None:
            chunks[-1].settle = functools.partial(self._settle, chunks, tensors, shaped)
        for key, chunk in zip(keys, chunks):
            at = tensors.index(key[0][0])
            chunk.used = used[at : at + len(key[0])] if used is not None else None
            chunk.load(
                buffer,
                gradients if len(key[0]) == len(gradients) else gradients[at : at + len(key[0])],
                bucket.index() == 0 and key is keys[0],
                bucket.is_last() and key is keys[-1],
            )
            chunk.future = done if key is keys[-1] else None
            self._transport.submit(chunk)
        if self._momentum is not None and bucket.is_last():
            self._momentum.end()

    def _put_momentum(
        self, bucket: Any, tensors: Sequence[int], gradients: list[torch.Tensor]
    ) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
        """Where momentum is exchanged, puts it in the place of a bucket's gradients. (which of these were not zero, if
        that will be asked; the same memory element by element as the parameters, for the results)"""
        if self._momentum is None:
            return None, []
        if bucket.index() == 0:
            self._momentum.begin(self._scale())
        used = used_flags(gradients) if self._searches_unused() else None
        shaped = [like_parameter(self._parameters[tensor], gradient) for tensor, gradient in zip(tensors, gradients)]
        self._momentum.put(tensors, shaped)
        return used, shaped

    def _check_layout(self, buffer: torch.Tensor) -> None:
        if buffer.layout != torch.strided:
            raise UnsupportedError(
                "sparse gradients cannot be compressed; use sparse=False, or leave the parameter to DDP with "
                "parameters_to_ignore",
                field="layout",
            )

    def _settle(self, chunks: Sequence[Chunk], tensors: Sequence[int], gradients: Sequence[torch.Tensor]) -> None:
        """In the thread that decodes, on the stream of the last chunk."""
        for chunk in chunks[:-1]:
            chunks[-1].wait_for(chunk.stream)
        assert self._momentum is not None
        self._momentum.settle(tensors, gradients)

    def _searches_unused(self) -> bool:
        ddp = self._ddp()
        return ddp is not None and bool(ddp.find_unused_parameters) and not ddp.static_graph

    def _all_reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        buffer = bucket.buffer()
        sent = 2 * buffer.element_size() * buffer.numel() * (self._world - 1) // self._world
        self._meters.sent(sent, self._left_node(sent))
        if bucket.is_last():
            self.step += 1
            self._step_done(None)
        result = plain_mean(bucket, self._group)
        return result.then(self._landed) if self._is_metered else result

    def _left_node(self, sent: int) -> int:
        """In a ring one rank of each node sends to another node."""
        layout = self._layout
        return sent if layout is None else sent // layout.per_node if layout.nodes > 1 else 0

    def _landed(self, result: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        self._exposed.landed()
        return result.value()

    @property
    def _is_metered(self) -> bool:
        """Whether it can be known what a step waits for. The all-reduce of NCCL is not ours to follow."""
        return not self._plain or self._device.type == "cpu"

    def _begin(self, loss_scale: float) -> None:
        """At the first bucket, in the thread that encodes."""
        self._lessons.wait()
        self._began = time.perf_counter()
        self._model.begin(self.step, loss_scale=loss_scale, rate=self._rate, exact=self._sends_exactly())

    def _end(self, used: Sequence[CodingTask]) -> None:
        """After the last bucket, in the thread that decodes."""
        if self._stream is not None:
            for chunk in used:
                chunk.precede(self._stream)
        self._check_results()
        transport = self._ending_transport()
        teaches = self._learns and self._model.teaches()
        self._model.end()
        sent = self._count_sent(used)
        if self._meters.steps % 100 == 1 and not transport.on_streams:
            self._choose_chunk_size(sent, transport)
        for exempt in self._step_done(transport):
            self._model.exempt(exempt)
        self.step += 1
        self._exposed.done(_streams.current(self._device) if self._stream is not None else None)
        self._exposed.judge(transport.gather_everywhere, self.codec, self._tells)
        if teaches:
            self._lessons.begin([self._model], transport, transport.later)

    def _ending_transport(self) -> Transport:
        """The one whose thread ends the step."""
        return self._transport

    def _check_results(self) -> None:
        """Before a step is decided: all ranks see the same results, and the core has checked them."""

    def _count_sent(self, used: Sequence[CodingTask]) -> int:
        sent = sum(chunk.sent for chunk in used)
        self._meters.sent(sent)
        return sent

    def _step_done(self, transport: Transport | None) -> list[int]:
        self._times.step_done()
        return self._meters.step_done(transport)

    def _choose_chunk_size(self, sent: int, transport: Transport) -> None:
        """By the speed of the link, as the slowest rank sees it. How tensors are grouped changes no value, so this may
        depend on the clock. It must only be the same on all ranks, so all ranks decide from the same numbers."""
        mine = sent / (time.perf_counter() - self._began)
        speeds = struct.unpack(f"{self._world}d", transport.gather_everywhere(struct.pack("d", mine)))
        self._chunk_elements = FINE_CHUNK if min(speeds) < SLOW else CHUNK

    # For the user.

    def residual_hash(self) -> int:
        self._synchronize()
        return self._model.hash()

    def stats(self) -> dict[str, Any]:
        """What was sent, what it cost and what was lost, on this rank.

        steps: steps taken. skipped: steps that changed no residual, because a result was not finite.
        bits: bits per element, of the messages that this rank sends with its own gradients. ratio: fp32 bytes / bytes
        sent, in the last step; 1.0 where nothing is sent.
        last_step, all_steps: the same numbers for the last step, and for all steps since `compress`. "bytes": to other
        ranks; "fp32_bytes": those of an uncompressed ring all-reduce; "bytes_saved": fp32_bytes - bytes; "seconds":
        "encode" and "decode" (processor time, or wall time if a GPU does the work), "wait" (for other ranks) and
        "exposed": from when the last gradients were handed over until the last result was there, which is what the
        training waits for (None where it cannot be known).
        judged: after 50 steps "exposed", the median of that, and "plain", what the wait for torch's own all-reduce
        would be, both on the slowest rank; empty before, and where that cannot be known. If the first is more than 1.1
        of the second, rank 0 warns once.
        With nodes= there are also nodes: how many there are, and ranks in each; and in last_step and all_steps
        "node_bytes": of the bytes, those to other nodes; "fp32_node_bytes": those of an fp32 all-reduce of the same
        shards between nodes. ratio is the ratio of these two then.
        plan: a line for each codec that plans ahead (dqsgd): the budget, the number of steps it plans with, the bits so
        far. residual_bytes: memory that residuals take. exempt: parameters that the guard has exempted.
        optimizer: with optimizer= what is exchanged ("momentum" or "gradients"), and for the momentum the phase
        ("exact", "warm-up" or "compressed"), the number of steps, the step after which second moments are pooled next,
        how often they were and the bytes of that, and the memory that the exchange takes.
        parameters: for each name "codec", "elements", "bits" and "error": the squared relative error
        ||x - x'||^2 / ||x||^2 of what was sent, or None if it was not measured (see measure_every).
        """
        self._synchronize()
        up = self._sent()
        skipped = self._skipped_before + self._model.skipped()
        report = self._meters.report(self.step, skipped, up, self._world, self._times, self._model.residual_bytes())
        report["plan"] = self._model.plans()
        with_exposed(report, self._exposed.seconds() if self._is_metered else (None, None), self._exposed.judged)
        self._report_optimizer(report)
        return report

    def _sent(self) -> list[tuple[str, int]]:
        """The codec of each parameter, and the bytes of its messages."""
        return self._model.codecs("up")

    def state_dict(self, *, gather: str | None = None) -> dict[str, Any]:
        """What a checkpoint must contain: residuals by parameter name, what codecs have learned, the step. Where
        momentum is exchanged, also this rank's second moments; those that ranks share are in optimizer.state_dict().

        gather=None: the state of this rank; save it on every rank.
        gather="all": the states of all ranks, on rank 0; the other ranks get {}. Collective.
        gather="merged": residuals merged to the size of one model, on rank 0; the other ranks get {}. Collective. It is
        loaded like the state of another number of ranks: nothing is lost, but the following steps are not the same bit
        for bit.
        """
        self._synchronize()
        return _state.save(self, gather)

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continues from a state: the one of this rank, one that holds those of all ranks, or a list of the states of
        all ranks. If the number of ranks has changed, the states of all ranks are needed; their residuals are
        redistributed, so that their mean stays the same. Collective. Where momentum is exchanged, the state of the
        optimizer is loaded from the same checkpoint, before or after this one."""
        self._synchronize()
        _state.load(self, state)

    # What a hook of another kind keeps beside the model of coders; see _state.py.

    def _own_residuals(self) -> dict[str, torch.Tensor]:
        """By parameter, flat."""
        return {}

    def _own_state(self) -> dict[str, Any]:
        return {}

    def _take_own(self, whole: Mapping[str, Any], part: dict[str, Any], taken: int) -> tuple[dict[str, Any], Handshake]:
        """Takes what is this hook's own out of a state that is loaded, checked; and what ranks compare of it. part: of
        this rank. taken: steps that an exchange of momentum has taken."""
        return {}, []

    def _restore_own(self, own: Mapping[str, Any]) -> None:
        """Continues from what `_take_own` has taken."""

    def _synchronize(self) -> None:
        self._lessons.wait()
        self._transport.check()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
