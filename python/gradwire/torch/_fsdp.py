# SPDX-License-Identifier: Apache-2.0
"""The FSDP2 hook. `fully_shard` cuts a model in units, one for each module that it was called on. A unit gathers its
weights before it is used, and scatters its reduced gradients when back-propagation has passed it; this hook takes the place
of both collectives (_units.py codes and sends) and keeps what goes beyond one unit:

    the step       all units' gradients of one back-propagation. It ends with it, in a callback of autograd
    the verdict    a NaN or an Inf in any unit's result on any rank, and the step changes no residual on any
    the state      residuals by unit, by rank; what codecs have learned

FSDP packs a unit's parameters into one flat buffer with a slice for every rank. Neither the hook nor a codec sees where a
parameter begins, so there are no rules for single parameters here: names are those of modules.
"""

import contextlib
import logging
from typing import Any, Mapping, Sequence

import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp

from .. import _core
from .._errors import UnsupportedError, UsageError
from . import _state
from ._agree import Terms, agreed
from ._ddp import full_rules
from ._units import GatheredWeights, Layout, ScatteredGradients, Side

_LOG = logging.getLogger("gradwire")


def compress_fsdp(
    model: torch.nn.Module,
    gradients: str | None = "qsgd:bits=4",
    weights: str | None = "unigrid:bits=8",
    *,
    feedback: bool = False,
    residual: torch.dtype = torch.float32,
    scaler: "torch.amp.GradScaler | None" = None,
    min_elements: int = 1024,
    seed: int = 0,
    threads: int = 1,
) -> "FsdpHook":
    """Compresses what a model sharded by `fully_shard` sends; returns the hook, which holds the state. Collective.

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        hook = gw.compress_fsdp(model, gradients="qsgd:bits=4", weights="unigrid:bits=8")

    gradients: a codec for the gradients on their way to the rank that owns them, or rules by the name of the module that
        fully_shard was called on ("head=fp32;blocks.*=qsgd:bits=4;*=qsgd:bits=8"; the outermost one is "(root)"). All of a
        module's parameters go alike, small ones and biases included: FSDP sends them as one. None: left to torch.
    weights: the same for the weights on their way from their owners, rounded to nearest. The sharded weights that the
        optimizer works on stay exact, and every rank computes with the same bits, also where it is the owner. Codecs that
        learn are refused: forward and backward must see the same weights. None: left to torch.
    feedback: whether what compression leaves out of a gradient is added to the next one. It needs a residual of the whole
        model on every rank, not only of its shard; how many bytes is logged (logger "gradwire", at INFO) and in stats().
        A back-propagation with a NaN or an Inf in any module's result, on any rank, changes no residual on any. Where several send
        gradients before one step of the optimizer each is judged by itself; with set_requires_gradient_sync(False) one sends for all.
    residual: torch.float32 or torch.bfloat16, what residuals are kept in.
    scaler: with feedback, the GradScaler, if there is one: residuals are kept without its scale.
    min_elements: a unit whose shards have fewer elements goes as it is, where a plain codec is given.
    threads: of the processor, for encoding.

    Messages go over FSDP's own process groups. In a hybrid mesh (replicate x shard) the shard dimension is compressed, the
    all_reduce between replicas is torch's. Where a codec is fp32, torch's own collective does the work: the bits of plain FSDP.
    """
    missing = [name for name in ("set_custom_reduce_scatter", "set_custom_all_gather") if not hasattr(getattr(fsdp, "FSDPModule", None), name)]
    if missing:
        raise UnsupportedError(f"torch {torch.__version__} has no FSDPModule.{missing[0]}, which compress_fsdp needs; a newer torch has it", field="torch")
    units = _units_of(model)
    mesh = _mesh_of(model)
    group = _group_of(mesh)
    options = dict(feedback=feedback, residual=residual, min_elements=min_elements, seed=seed)

    def prepare() -> tuple[FsdpHook, Terms]:
        hook = FsdpHook(model, list(units), mesh, group, (gradients, weights), scaler, threads, options)
        return hook, hook._terms(model)

    hook = agreed(group, prepare)
    for name, module in units.items():
        if gradients is not None:
            module.set_custom_reduce_scatter(ScatteredGradients(hook, hook._gradients, name))
        if weights is not None:
            module.set_custom_all_gather(GatheredWeights(hook, hook._weights, name))
    if gradients is None:
        model.register_forward_pre_hook(lambda *_: hook._step_done())  # nothing else tells one step from the next
    return hook


def _units_of(model: torch.nn.Module) -> dict[str, Any]:
    units: dict[str, Any] = {}
    for name, module in model.named_modules():
        if isinstance(module, fsdp.FullyShardedDataParallel):
            raise UnsupportedError(f"module '{name}' is a FullyShardedDataParallel; only FSDP2 can be compressed: shard with torch.distributed.fsdp.fully_shard", field="model")
        if isinstance(module, fsdp.FSDPModule):
            units[name.replace("_orig_mod.", "").removesuffix("_orig_mod") or "(root)"] = module
    if not units:
        raise UsageError("no module of the model was sharded: call torch.distributed.fsdp.fully_shard on it first", field="model")
    return units


def _mesh_of(model: torch.nn.Module) -> Any:
    from torch.distributed.tensor import DTensor

    meshes = [parameter.device_mesh for parameter in model.parameters() if isinstance(parameter, DTensor)]
    if not meshes:
        raise UsageError("the model has no sharded parameter", field="model")
    return max(meshes, key=lambda mesh: mesh.size())


def _group_of(mesh: Any) -> dist.ProcessGroup:
    """All ranks that take the model's steps together: they agree on the options and on each step's verdict."""
    if mesh.ndim == 1:
        return mesh.get_group()  # type: ignore[no-any-return]
    if mesh.size() == dist.get_world_size():
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    raise UnsupportedError(f"the model's mesh has {mesh.ndim} dimensions and {mesh.size()} of {dist.get_world_size()} ranks; with more than one it must have all ranks", field="mesh")


def _device_of(mesh: Any) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    if mesh.device_type != "cuda":
        raise UnsupportedError(f"the model is on {mesh.device_type}; allowed are cpu and cuda", field="device")
    if not _core.cuda_devices():
        raise UnsupportedError(f"the model is on cuda, but the CUDA part of gradwire: {_core.cuda_description()}", field="device")
    return torch.device("cuda", torch.cuda.current_device())


class FsdpHook:
    """What `compress_fsdp` returns: the state of a sharded model's compression. Not made by hand."""

    def __init__(
        self, model: torch.nn.Module, units: list[str], mesh: Any, group: dist.ProcessGroup, codecs: tuple[str | None, str | None],
        scaler: "torch.amp.GradScaler | None", threads: int, options: dict[str, Any],
    ) -> None:  # fmt: skip
        if options["residual"] not in (torch.float32, torch.bfloat16):
            raise UsageError(f"residual is {options['residual']}; allowed are torch.float32 and torch.bfloat16", field="residual")
        self._units, self._group, self._scaler, self._options = units, group, scaler, options
        self._device = _device_of(mesh)
        rules = [full_rules(codec, options["min_elements"]) if codec is not None else "*=fp32" for codec in codecs]
        self._gradients, self._weights = (Side(text, self._device, threads) for text in rules)
        shard = sum(parameter.numel() for parameter in model.parameters()) // mesh.size()
        for unit in units:
            GatheredWeights.codec(self._weights, unit, shard)  # refuses now what would be refused in the first forward
        self.step = 0  # steps taken: back-propagations that sent gradients
        self._flag = torch.zeros(1, device=self._device)  # NaN: a result of this step was not finite
        self._open: dict[str, Layout | None] = {}  # units whose gradients have come in this step; None: torch sent them
        self._loss_scale: float | None = None
        self._rate = 0.0
        self._restored: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]] = ({}, {})  # for units that have not come yet

    def _terms(self, model: torch.nn.Module) -> Terms:
        terms = [("gradients", str(self._gradients.rules)), ("weights", str(self._weights.rules)), ("device", self._device.type)]
        terms += [(name, str(value)) for name, value in self._options.items()]
        terms += [("module", unit) for unit in self._units]
        return terms + [("parameter", f"{name}: {tuple(p.shape)} {p.dtype}") for name, p in model.named_parameters()]

    # One step.

    def _enter(self, unit: str) -> None:
        """Before a unit's gradients are encoded."""
        if unit in self._open:
            self._end()  # nothing has ended the step before: what the unit owes from there must be settled
        # At every call: only the first of them that runs finds a step to end, and one that never ran must not be missed.
        # FSDP's own callback is older, and brings the last units. Outside of a back-propagation there is no callback.
        with contextlib.suppress(RuntimeError):
            torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _saw(self, unit: str, layout: Layout | None, result: torch.Tensor) -> None:
        """After a unit's gradients have come: 0 is added where they are finite, else NaN."""
        self._open[unit] = layout
        with self._gradients.turn(), torch.no_grad():
            self._flag += torch.linalg.vector_norm(result, float("inf")).float() * 0

    def _end(self) -> None:
        """After a back-propagation: one verdict, and what follows from it. The same on all ranks, so all call it or none."""
        layouts = [layout for layout in self._open.values() if layout is not None]
        if not self._open:
            return
        self._open = {}
        with self._gradients.turn():
            if any(layout.keeps for layout in layouts):
                self._gradients.add_up(self._flag, self._group)
                for layout in layouts:
                    layout.model.look(self._flag.data_ptr(), 1)
            for layout in layouts:
                layout.model.end()
            self._flag.zero_()
            self._learn(layouts)
        self._step_done()
        if self.step == 1 and self._options["feedback"] and dist.get_rank(self._group) == 0:
            _LOG.info("gradwire: the residuals of feedback take %d bytes on every rank", self._residual_bytes())

    def _step_done(self) -> None:
        self.step += 1
        self._gradients.step_done()
        self._weights.step_done()

    def _learn(self, layouts: Sequence[Layout]) -> None:
        for layout in layouts:
            evidence = layout.model.evidence()
            if evidence is not None:
                layout.model.learn(self._gradients.gather_bytes(evidence, layout.group))

    def _scale(self) -> float:
        if self._loss_scale is not None:
            return self._loss_scale
        if not self._options["feedback"] or self._scaler is None or not self._scaler.is_enabled():
            return 1.0
        return float(self._scaler.get_scale())

    # For the user.

    def end_step(self) -> None:
        """Ends a step. Only needed where gradients are reduced outside of autograd's back-propagation, as pipeline
        schedules do; without it such a step ends when the first unit comes again. Collective."""
        self._end()

    def set_rate(self, rate: float) -> None:
        """The learning rate of the steps to come, for codecs that follow it (fft:schedule=rate)."""
        self._rate = float(rate)

    def set_loss_scale(self, scale: float | None) -> None:
        """What gradients are multiplied by, where there is no GradScaler to ask; None: ask it again."""
        self._loss_scale = scale

    def residual_hash(self) -> int:
        """Of all residuals and all that was learned, on this rank: two equal states have equal hashes."""
        return hash(tuple(layout.model.hash() for _, layout in sorted(self._gradients.layouts.items())))

    def _residual_bytes(self) -> int:
        return sum(layout.model.residual_bytes() for layout in self._gradients.layouts.values())

    def stats(self) -> dict[str, Any]:
        """Where bits, bytes and seconds went, on this rank.

        steps; skipped (not finite; counted where there is a state to keep); gradients, weights: codec, bits (per element),
        bytes (to other ranks, last step), ratio (of what FSDP sends in fp32); seconds (encode, decode: of the processor, or
        by the clock where a GPU works; wait); residual_bytes.
        """
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        sides = (self._gradients, self._weights)
        return {
            "steps": self.step,
            "skipped": max([layout.model.skipped() for layout in self._gradients.layouts.values()], default=0),
            "gradients": self._gradients.report(),
            "weights": self._weights.report(),
            "seconds": {kind: sum(side.times.total(kind) for side in sides) for kind in ("encode", "wait", "decode")},
            "residual_bytes": self._residual_bytes(),
        }

    def state_dict(self) -> dict[str, Any]:
        """What must survive, of this rank: its residuals by "module/rank", what was learned, the step. Save it on every rank."""
        residuals, learned = (dict(part) for part in self._restored)
        for layout in self._gradients.layouts.values():
            more, notes = layout.state()
            residuals |= {name: values.to(self._options["residual"]) for name, values in more.items()}
            learned |= notes
        ranks = {str(dist.get_rank(self._group)): {"up": residuals, "down": {}}}
        return {
            "format": _state._FORMAT, "step": self.step, "world": dist.get_world_size(self._group), "codec": str(self._gradients.rules), "exempt": [],
            "learned": learned, "ranks": ranks,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Goes on from this rank's own state, in a world of the same size. Collective. In another world shards are cut
        elsewhere, and residuals of the old cuts mean nothing: there, go on without (what is lost is what compression left
        out of the last step's gradients)."""

        def prepare() -> tuple[dict[str, Any], Terms]:
            whole = _state._merged(state)
            rank, world = str(dist.get_rank(self._group)), dist.get_world_size(self._group)
            if whole["world"] != world:
                raise UsageError(
                    f"the state is of a world of {whole['world']}, this one has {world}: residuals of other shards cannot be used; leave load_state_dict out to go on without them",
                    field="world",
                )
            if rank not in whole["ranks"]:
                raise UsageError(f"the state is of rank {', '.join(whole['ranks'])}; this is rank {rank}", field="ranks")
            residuals = whole["ranks"][rank]["up"]
            unknown = [name for name in residuals if name.rpartition("/")[0] not in self._units]
            if unknown:
                raise UsageError(f"the state has a residual of '{unknown[0]}', but no such module of this model is sharded", field=unknown[0])
            for layout in self._gradients.layouts.values():
                layout.check(residuals)
            return whole, [("step", str(whole["step"])), ("learned", str(sorted(whole["learned"])))]

        whole = agreed(self._group, prepare)
        self._open = {}
        self._restored = (dict(whole["ranks"][str(dist.get_rank(self._group))]["up"]), dict(whole["learned"]))
        for layout in self._gradients.layouts.values():
            layout.restore(*self._restored)
        self.step = int(whole["step"])
