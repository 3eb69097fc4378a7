# SPDX-License-Identifier: Apache-2.0
"""The DDP hook. DDP hands over buckets of gradients in the order of back-propagation; each leaves compressed while the rest
is still being computed. Residuals go by parameter name: DDP rebuilds its buckets after the first step, and a resumed
job starts on other buckets, and neither loses anything.
"""

# No `from __future__ import annotations`: DDP compares the annotations of a hook with its own types.

import struct
import time
import weakref
from datetime import timedelta
from typing import Any, Mapping, Sequence

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .. import _core
from .._errors import UnsupportedError, UsageError
from . import _state
from ._agree import Terms, agreed
from ._carrier import Carrier
from ._meters import Meters
from ._passage import Times, core_device
from ._pieces import FINE_PIECE, PIECE, SLOW, Cut, Piece, cut_up

_DTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


def compress(
    ddp: DistributedDataParallel,
    codec: str,
    *,
    down: str | None = None,
    method: str = "scatter",
    feedback: bool | None = None,
    owner_feedback: bool = True,
    residual: torch.dtype = torch.float32,
    min_elements: int = 1024,
    warmup: int = 0,
    scaler: "torch.amp.GradScaler | None" = None,
    seed: int = 0,
    measure_every: int = 0,
    guard: float | None = None,
    threads: int = 1,
    timeout: timedelta | float | None = None,
) -> "Hook":
    """Compresses the gradients that `ddp` sends; returns the hook, which holds the state. Collective: all ranks call it.

    codec: a codec ("optquant:bits=4"; `python -m gradwire codecs` lists them), which then leaves parameters with one
        dimension, or fewer than `min_elements` elements, as they are; or rules, which decide for every parameter by the
        first that matches: "*.bias=fp32;1d=fp32;<1024=fp32;head.*=qsgd:bits=8;*=optquant:bits=4".
        "fp32" hands over to the process group's own all_reduce: the bits of plain DDP.
    down: codec or rules of the way back; by default as up, rounded to nearest.
    method: "scatter" (each rank adds up a share and sends it on, bytes do not grow with the world) or "gather"
        (everybody gets everybody's message: what the papers do).
    feedback: whether what compression leaves out is added to the next step's gradient. None: where the codec wants it.
    owner_feedback: the same for the way back.
    residual: torch.float32 or torch.bfloat16, what residuals are kept in.
    warmup: so many first steps go uncompressed.
    scaler: the GradScaler, if there is one: residuals are kept without its scale, and a step that it will skip
        changes nothing.
    measure_every: every so many steps the relative error of each parameter is measured: hook.stats()["parameters"].
    guard: a limit for that error; a parameter that passes it on any rank goes uncompressed from then on, with a
        warning. Sets measure_every to 50 where that is 0.
    threads: of the processor, for encoding.
    timeout: seconds, of our own process groups; default as the group of `ddp`.
    """
    if not isinstance(ddp, DistributedDataParallel):
        raise UsageError(f"ddp is a {type(ddp).__name__}; expected a DistributedDataParallel", field="ddp")
    if timeout is not None and not isinstance(timeout, timedelta):
        timeout = timedelta(seconds=timeout)
    options = dict(
        down=down, method=method, feedback=feedback, owner_feedback=owner_feedback, residual=residual, min_elements=min_elements, warmup=warmup, seed=seed,
        measure_every=measure_every or (50 if guard is not None else 0), guard=guard,
    )  # fmt: skip
    group: dist.ProcessGroup = ddp.process_group

    def prepare() -> tuple[Hook, Terms]:
        hook = Hook(ddp, codec, scaler, threads, options)
        return hook, hook._terms()

    hook = agreed(group, prepare)
    hook._connect(timeout)
    ddp.register_comm_hook(None, hook._comm_hook)
    if scaler is not None:
        ddp.register_forward_pre_hook(hook._note_scale)
    return hook


def _named_parameters(ddp: DistributedDataParallel) -> dict[str, torch.nn.Parameter]:
    """By the names of the model itself, whether it is compiled or not."""
    named: dict[str, torch.nn.Parameter] = {}
    for name, parameter in ddp.module.named_parameters():
        if not parameter.requires_grad or name in ddp.parameters_to_ignore:
            continue
        name = name.replace("_orig_mod.", "")
        if parameter.dtype not in _DTYPES:
            raise UnsupportedError(f"parameter '{name}' is {str(parameter.dtype)[6:]}; allowed are float32, float16 and bfloat16", field="dtype")
        named[name] = parameter
    if not named:
        raise UsageError("the model has no parameter that needs a gradient", field="ddp")
    return named


def full_rules(codec: str, min_elements: int) -> str:
    """A plain codec with the parameters that are not worth it left out; rules as they are."""
    if not isinstance(codec, str):
        raise UsageError(f"codec is a {type(codec).__name__}; expected a string like 'optquant:bits=4'", field="codec")
    if ";" in codec or codec.strip().startswith("*="):
        return str(_core.Rules(codec))
    small = f"<{min_elements}=fp32;" if min_elements > 0 else ""
    return f"1d=fp32;{small}*={_core.Codec(codec)}"


def _one_device(parameters: Mapping[str, torch.Tensor]) -> torch.device:
    devices = {name: parameter.device for name, parameter in parameters.items()}
    first = next(iter(devices.values()))
    for name, device in devices.items():
        if device != first:
            raise UnsupportedError(f"parameter '{name}' is on {device}, others are on {first}; a model must be on one device", field="device")
    if first.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"the model is on {first}; allowed are cpu and cuda", field="device")
    if first.type == "cuda" and not _core.cuda_devices():
        raise UnsupportedError(f"the model is on {first}, but the CUDA part of gradwire: {_core.cuda_description()}", field="device")
    return first


class Hook:
    """What `compress` returns: the state of a model's compression. Not made by hand."""

    def __init__(self, ddp: DistributedDataParallel, codec: str, scaler: Any, threads: int, options: dict[str, Any]) -> None:
        self.step = 0  # steps taken
        self._scaler, self._threads, self._options = scaler, threads, options
        self._ddp = weakref.ref(ddp)  # DDP's reducer holds the hook: what holds DDP again would never be freed
        self._loss_scale: float | None = None
        self._noted_scale: tuple[torch.Tensor, torch.cuda.Event] | None = None
        self._rate = 0.0
        named = _named_parameters(ddp)
        self._names = list(named)
        self._parameters = list(named.values())
        self._index = {id(parameter): i for i, parameter in enumerate(self._parameters)}
        self._device = _one_device(named)
        self.codec = full_rules(codec, options["min_elements"])  # as rules
        rules = _core.Rules(self.codec)
        self._plain = options["down"] is None and all(str(rules.codec_for(name, p.dim(), p.numel())) == "fp32" for name, p in named.items())
        if options["residual"] not in (torch.float32, torch.bfloat16):
            raise UsageError(f"residual is {options['residual']}; allowed are torch.float32 and torch.bfloat16", field="residual")
        if options["warmup"] < 0 or options["measure_every"] < 0:
            raise UsageError("warmup and measure_every are numbers of steps; they cannot be negative", field="warmup")
        self._group: dist.ProcessGroup = ddp.process_group
        self._world = dist.get_world_size(self._group)
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        feedback = options["feedback"]
        self._model = _core.RelayModel(
            [(name, p.numel(), _DTYPES[p.dtype], p.dim()) for name, p in named.items()],
            method=options["method"],
            up=self.codec,
            down="" if options["down"] is None else full_rules(options["down"], options["min_elements"]),
            feedback="codec" if feedback is None else "on" if feedback else "off",
            owner_feedback="on" if options["owner_feedback"] else "off",
            residual=_DTYPES[options["residual"]],
            seed=options["seed"],
            rank=dist.get_rank(self._group),
            world=self._world,
            device=core_device(self._device, self._stream, threads),
        )
        self._times = Times()
        self._meters = Meters(self._names, [p.numel() for p in self._parameters], options["measure_every"], options["guard"])
        self._pieces: dict[Cut, Piece] = {}
        self._used: list[Piece] = []  # in this step
        self._piece_elements = PIECE
        self._began = 0.0

    def _terms(self) -> Terms:
        terms = list(self._model.terms())
        terms += [(name, str(self._options[name])) for name in ("warmup", "measure_every", "guard")]
        terms.append(("device", self._device.type))
        return terms + [("strides", f"{name}: {tuple(p.stride())}") for name, p in zip(self._names, self._parameters)]

    def _connect(self, timeout: timedelta | None) -> None:
        self._carrier = Carrier.of(self._group, self._device, timeout)

    # One step.

    def _comm_hook(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        buffer = bucket.buffer()
        if buffer.layout != torch.strided:
            raise UnsupportedError("sparse gradients cannot be compressed; use sparse=False, or leave the parameter to DDP with parameters_to_ignore", field="layout")
        if self._plain:
            return self._all_reduce(bucket)
        self._carrier.check()
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[self._device] if self._stream else None)
        result = done.then(lambda future: future.value())  # which raises in a way that DDP understands
        tensors = tuple(self._index[id(parameter)] for parameter in bucket.parameters())
        gradients = bucket.gradients()
        cuts = cut_up(tensors, [p.numel() for p in self._parameters], self._model, 0 if self._carrier.on_streams else self._piece_elements)
        if bucket.index() == 0 and cuts[0] not in self._pieces:
            self._pieces.clear()  # DDP has rebuilt its buckets, or the pieces have another size
        for cut in cuts:
            if cut not in self._pieces:
                self._pieces[cut] = Piece(self, *cut)
            piece = self._pieces[cut]
            at = tensors.index(cut[0][0])
            piece.take(buffer, gradients[at : at + len(cut[0])], bucket.index() == 0 and cut is cuts[0], bucket.is_last() and cut is cuts[-1])
            piece.future = done if cut is cuts[-1] else None
            self._carrier.carry(piece)
        return result

    def _all_reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        # As DDP itself does it: by the reciprocal, before the sum.
        buffer = bucket.buffer().mul_(1.0 / self._world)
        self._meters.sent(8 * buffer.numel() * (self._world - 1) // self._world)
        if bucket.is_last():
            self.step += 1
            self._meters.step_done()
        work = dist.all_reduce(buffer, group=self._group, async_op=True)
        return work.get_future().then(lambda done: done.value()[0])  # type: ignore[no-any-return]

    def _scale(self) -> float:
        if self._loss_scale is not None:
            return self._loss_scale
        if self._scaler is None or not self._scaler.is_enabled():
            return 1.0
        if self._noted_scale is not None:
            value, event = self._noted_scale
            event.synchronize()  # it was recorded before the forward pass
            return float(value)
        return float(self._scaler.get_scale())

    def _note_scale(self, *_: Any) -> None:
        """Before a forward pass. On a GPU the scale is a number of the device: asked for in the middle of back-propagation it
        would make the host wait for all that is enqueued."""
        scale = getattr(self._scaler, "_scale", None)
        if isinstance(scale, torch.Tensor) and scale.is_cuda:
            value, event = self._noted_scale or (torch.empty(1, pin_memory=True), torch.cuda.Event())
            value.copy_(scale.reshape(1), non_blocking=True)
            event.record()
            self._noted_scale = (value, event)

    def _begin(self, loss_scale: float) -> None:
        """At the first bucket, in the thread that encodes."""
        self._began = time.perf_counter()
        self._model.begin(self.step, loss_scale=loss_scale, rate=self._rate, exact=self.step < self._options["warmup"])

    def _end(self, used: Sequence[Piece]) -> None:
        """After the last bucket, in the thread that decodes."""
        if self._stream is not None:
            for piece in used:
                piece.precede(self._stream)
        self._model.end()
        evidence = self._model.evidence()
        if evidence is not None:
            self._model.learn(self._carrier.gather(evidence))
        sent = sum(piece.sent for piece in used)
        self._meters.sent(sent)
        if self._meters.steps % 100 == 1 and not self._carrier.on_streams:
            self._choose_pieces(sent)
        for exempt in self._meters.step_done(self._carrier):
            self._model.exempt(exempt)
        self.step += 1

    def _choose_pieces(self, sent: int) -> None:
        """How fast the link is, by the slowest rank. Which tensors travel together changes no value, so this may follow the
        clock; it must only be the same everywhere, and so all decide from the same numbers."""
        mine = sent / (time.perf_counter() - self._began)
        speeds = struct.unpack(f"{self._world}d", self._carrier.gather(struct.pack("d", mine)))
        self._piece_elements = FINE_PIECE if min(speeds) < SLOW else PIECE

    # For the user.

    def set_rate(self, rate: float) -> None:
        """The learning rate of the steps to come, for codecs that follow it (fft:schedule=rate)."""
        self._rate = float(rate)

    def set_loss_scale(self, scale: float | None) -> None:
        """What gradients are multiplied by, where there is no GradScaler to ask; None: ask it again."""
        self._loss_scale = scale

    def residual_hash(self) -> int:
        """Of all residuals and all that was learned, on this rank: two equal states have equal hashes."""
        self._settle()
        return self._model.hash()

    def stats(self) -> dict[str, Any]:
        """Where bits, bytes and seconds went, on this rank.

        steps; skipped (not finite); bits (per element, up); bytes (to other ranks, last step); ratio (of what an fp32
        all-reduce sends); seconds (encode, decode: of the processor, or by the clock where a GPU works; wait); residual_bytes;
        exempt (names); parameters: name -> codec, elements, bits, error (relative, of what was sent, where measured).
        """
        self._settle()
        up = self._model.codecs("up")
        skipped = self._model.skipped()
        return self._meters.report(self.step, skipped, up, self._world, self._times, self._model.residual_bytes())

    def log(self, writer: Any, step: int | None = None, prefix: str = "gradwire") -> None:
        """Writes the numbers of `stats` as scalars to a TensorBoard SummaryWriter, or anything with add_scalar."""
        self._meters.log(self.stats(), writer, self.step if step is None else step, prefix)

    def state_dict(self, *, gather: str | None = None) -> dict[str, Any]:
        """What must survive: residuals by parameter name, what was learned, the step.

        None: this rank's own; save it on every rank. "all": every rank's, on rank 0 (others get {}); collective.
        "debt": the same debt in the size of one model, on rank 0; collective. It resumes as if on another world: nothing is
        lost, but the steps are not the same bit for bit.
        """
        self._settle()
        return _state.save(self, gather)

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Goes on from a state: this rank's own, or one that holds all ranks', or a list of the ranks' states. In a world
        of another size all ranks' are needed: the debt is kept. Collective."""
        self._settle()
        _state.load(self, state)

    def _settle(self) -> None:
        self._carrier.check()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
