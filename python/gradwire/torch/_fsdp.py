# SPDX-License-Identifier: Apache-2.0
"""The hook for FSDP2. `fully_shard` divides a model into units, one for each module that it was called on. A unit
gathers its weights before it is used, and reduce-scatters its gradients when the backward pass has left it. The hook
takes the place of both collectives (_units.py encodes and sends) and keeps what concerns more than one unit:

    the step           the gradients of all units in one backward pass. A callback of autograd ends it
    the finite check   if a result of any unit on any rank has a NaN or an Inf, the step changes no residual on any rank
    the state          residuals by parameter and rank, and what codecs have learned

This is about one dimension, the one that shards. What replicas send each other is the matter of _replicas.py.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
import weakref
import zlib
from typing import Any, Mapping, Sequence

import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp

from .. import _arrays, _core
from .._errors import UnsupportedError, UsageError
from . import _hook, _state
from ._agree import Handshake, agreed
from ._compress import refuse_foreign
from ._fsdp_doors import door, module_names, param_groups
from ._hook import Hook
from ._lessons import OwnLessons
from ._parameters import without_wrappers
from ._rules import check_patterns, rules_of, written_out
from ._shard_parts import Parts
from ._state_checks import FORMAT, merged, refusing
from ._units import Channel, CompressedAllGather, CompressedReduceScatter, UnitCoder, default_collective

_LOG = logging.getLogger("gradwire")
_HOOKS: "weakref.WeakKeyDictionary[torch.nn.Module, Hook]" = weakref.WeakKeyDictionary()


def attach(model: torch.nn.Module, codec: Any, options: dict[str, Any]) -> "FsdpHook":
    """Makes a hook and puts it in place of the one that is there, if there is one. Collective."""
    _refuse_torch()
    group = _group_of(_mesh_of(model))

    def prepare() -> tuple[FsdpHook, Handshake]:
        refuse_foreign("FSDP2", options)
        hook = make(model, codec, options)
        return hook, hook._handshake()

    hook = agreed(group, "compress", prepare)
    replace_hook(model, hook)
    hook._place(model)
    if options["feedback"] is None and hook._lacks_feedback() and dist.get_rank(group) == 0:
        warnings.warn(
            f"gradwire: what '{hook.codec}' leaves out of a gradient is lost under FSDP2 with one dimension, unless "
            "feedback=True is given. That keeps an unsharded residual on every rank. Or choose a codec without error "
            "feedback, such as 'qsgd:bits=4'",
            stacklevel=3,
        )
    return hook


def make(model: torch.nn.Module, codec: Any, options: dict[str, Any]) -> "FsdpHook":
    """A hook that is not in its place yet."""
    _refuse_torch()
    mesh = _mesh_of(model)
    return FsdpHook(model, _units_of(model), mesh, _group_of(mesh), codec, options)


def hook_of(model: torch.nn.Module) -> Hook | None:
    return _HOOKS.get(model)


def replace_hook(model: torch.nn.Module, hook: Hook) -> None:
    """Removes the hook that the model has, and keeps the new one as long as the model."""
    if model in _HOOKS:
        _HOOKS[model].remove()
    _HOOKS[model] = hook


def _refuse_torch() -> None:
    for name in ("set_custom_reduce_scatter", "set_custom_all_gather"):
        if not hasattr(fsdp.FSDPModule, name):
            raise UnsupportedError(
                f"torch {torch.__version__} has no FSDPModule.{name}, which compressing FSDP2 needs; "
                "a newer torch has it",
                field="torch",
            )


def _units_of(model: torch.nn.Module) -> dict[str, Any]:
    return {
        without_wrappers(name) or "(root)": module
        for name, module in model.named_modules()
        if isinstance(module, fsdp.FSDPModule)
    }


def _mesh_of(model: torch.nn.Module) -> Any:
    from torch.distributed.tensor import DTensor

    meshes = [parameter.device_mesh for parameter in model.parameters() if isinstance(parameter, DTensor)]
    if not meshes:
        raise UsageError("the model has no sharded parameter", field="model")
    return max(meshes, key=lambda mesh: mesh.size())


def _group_of(mesh: Any) -> dist.ProcessGroup:
    """All ranks that train the model together: they agree on the options, and on each step's finite check."""
    if mesh.ndim == 1:
        return mesh.get_group()  # type: ignore[no-any-return]
    if mesh.size() == dist.get_world_size():
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    raise UnsupportedError(
        f"the model's mesh has {mesh.ndim} dimensions and {mesh.size()} of {dist.get_world_size()} ranks; with more "
        "than one dimension it must have all ranks",
        field="mesh",
    )


def _first_of_shards(units: Mapping[str, Any]) -> int:
    """The first of the ranks that have the shards of the same parameters, this one among them."""
    group = next(group for module in units.values() for group in param_groups(module))
    return min(dist.get_process_group_ranks(door(door(group, "mesh_info"), "shard_process_group")))


def _device_of(mesh: Any) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    if mesh.device_type != "cuda":
        raise UnsupportedError(f"the model is on {mesh.device_type}; allowed are cpu and cuda", field="device")
    if not _core.cuda_devices():
        raise UnsupportedError(
            f"the model is on cuda, but the CUDA part of gradwire: {_core.cuda_description()}", field="device"
        )
    return torch.device("cuda", torch.cuda.current_device())


class FsdpHook(Hook):
    """The hook of a model that was sharded by `fully_shard`."""

    def __init__(
        self,
        model: torch.nn.Module,
        units: Mapping[str, Any],
        mesh: Any,
        group: dist.ProcessGroup,
        codec: Any,
        given: dict[str, Any],
    ) -> None:
        self.step = 0  # backward passes that sent gradients
        self._units = list(units)
        self._modules = [weakref.ref(module) for module in units.values()]
        self._group, self._scaler = group, _hook.scaler(given["scaler"])
        self._options: dict[str, Any] = {
            "feedback": bool(_hook.switch(given["feedback"], "feedback")),
            "residual": _hook.residual_dtype(given["residual"]),
            "min_elements": _arrays.whole(given["min_elements"], "min_elements", 2**40),
            "seed": _arrays.whole(given["seed"], "seed"),
            "steps": _arrays.whole(given.get("steps", 0), "steps", 10**9),
        }
        self._threads = _hook.threads(given["threads"])
        self._device = _device_of(mesh)
        # On a mesh of two dimensions each row learns for itself, and a checkpoint of all ranks has all that they learn.
        self._has_rows = mesh.ndim > 1
        self._row = f"{_first_of_shards(units)}/" if self._has_rows else ""
        self._parameters = [f"{name}: {tuple(p.shape)} {p.dtype}" for name, p in model.named_parameters()]
        names = module_names(model)
        self._parts = {unit: Parts(module, names) for unit, module in units.items()}
        self._gradients = self._channel(codec, "codec")
        self._weights = self._channel(given.get("weights"), "weights")
        self.codec = written_out(str(self._gradients.rules))
        self._flag = torch.zeros(1, device=self._device)  # NaN: a result of this step was not finite
        # Units that have sent gradients in this step; None: by the default collective.
        self._open: dict[str, UnitCoder | None] = {}
        # For units that have not sent anything yet.
        self._restored: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]] = ({}, {})
        self._replaces = {"codec": codec is not None, "weights": given.get("weights") is not None}  # which collectives
        self._reducers: list[CompressedReduceScatter] = []  # by unit
        self._gatherers: list[CompressedAllGather] = []
        self._skipped_before = 0  # with earlier codecs
        self._handles: list[Any] = []
        self._lessons: dict[dist.ProcessGroup, OwnLessons] = {}  # by the group that has the shards of a unit

    def _channel(self, codec: Any, field: str) -> Channel:
        rules = rules_of(codec, self._options["min_elements"], field) if codec is not None else "*=fp32"
        check_patterns(rules, self._names(), "sharded parameter", field)
        channel = Channel(rules, self._device, self._threads)
        if field == "weights":
            for parts in self._parts.values():
                # Refuses here what the first forward pass would refuse.
                CompressedAllGather.refuse_learning(channel, parts)
        return channel

    def _names(self) -> list[str]:
        return [part.name for parts in self._parts.values() for part in parts.all]

    def _place(self, model: torch.nn.Module) -> None:
        """After the ranks have agreed."""
        for name in self._units:
            if self._replaces["codec"]:
                self._reducers.append(CompressedReduceScatter(self, self._gradients, name, self._parts[name]))
            if self._replaces["weights"]:
                self._gatherers.append(CompressedAllGather(self, self._weights, name, self._parts[name]))
        self._install()
        if not self._replaces["codec"]:
            # Nothing else separates the steps. An evaluation is none.
            self._handles.append(
                model.register_forward_pre_hook(lambda *_: self._step_done() if torch.is_grad_enabled() else None)
            )

    def _install(self) -> None:
        """Puts our collectives in the place of torch's."""
        modules = dict(zip(self._units, (ref() for ref in self._modules)))
        for reducer in self._reducers:
            if (module := modules[reducer.unit]) is not None:
                module.set_custom_reduce_scatter(reducer)
        for gatherer in self._gatherers:
            if (module := modules[gatherer.unit]) is not None:
                module.set_custom_all_gather(gatherer)

    def __repr__(self) -> str:
        removed = ", removed" if self._removed else ""
        return (
            f"<FsdpHook '{self.codec}' for gradients and '{self._weights.rules}' for weights of "
            f"{len(self._units)} modules, on {dist.get_world_size(self._group)} ranks, at step {self.step}{removed}>"
        )

    def _handshake(self) -> Handshake:
        terms = [
            ("codec", str(self._gradients.rules)), ("weights", str(self._weights.rules)), ("device", self._device.type)
        ]
        terms += [(name, str(value)) for name, value in self._options.items()]
        terms += [("module", unit) for unit in self._units]
        return terms + [("parameter", parameter) for parameter in self._parameters]

    def remove(self) -> None:
        if self._removed:
            return
        self._removed = True
        for module in (ref() for ref in self._modules):
            if module is not None and self._replaces["codec"]:
                module.set_custom_reduce_scatter(default_collective("ReduceScatter"))
            if module is not None and self._replaces["weights"]:
                module.set_custom_all_gather(default_collective("AllGather"))
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for lessons in self._lessons.values():
            lessons.release()

    def set_codec(
        self, codec: "str | _core.Codec | _core.Rules | None" = None, *, weights: Any = None
    ) -> None:
        """Changes the codecs, or the rules, from the next step on. All ranks must call it between the same two steps.

        codec, weights: as for `compress`; None leaves them as they are. Only what `compress` was told to compress can
        be changed. A parameter keeps its residual where it has error feedback with the new codec too; otherwise the
        residual is dropped. What a codec has learned is kept where the same codec is used again.
        """

        def prepare() -> tuple[tuple[Channel, list[Any], Channel, list[Any]], Handshake]:
            if self._removed:
                raise UsageError("the hook was removed; call compress to begin again", field="hook")
            if self._open:
                raise UsageError("a step is under way; change the codec between two steps", field="step")
            self._synchronize()
            for field, value in (("codec", codec), ("weights", weights)):
                if value is not None and not self._replaces[field]:
                    what = "gradients" if field == "codec" else "weights"
                    raise UsageError(
                        f"{field} was not given to compress, so {what} are left to torch; call compress again",
                        field=field,
                    )
            gradients, reducers = self._gradients, self._reducers
            if codec is not None:
                gradients = self._channel(codec, "codec").continuing(self._gradients)
                restored, self._restored = self._restored, ({}, {})  # it is for the codecs of the state
                try:
                    reducers = [reducer.remade(gradients) for reducer in reducers]
                finally:
                    self._restored = restored
            channel, gatherers = self._weights, self._gatherers
            if weights is not None:
                channel = self._channel(weights, "weights").continuing(self._weights)
                gatherers = [gatherer.remade(channel) for gatherer in gatherers]
            terms = [("step", str(self.step)), ("codec", str(gradients.rules)), ("weights", str(channel.rules))]
            return (gradients, reducers, channel, gatherers), terms

        gradients, reducers, channel, gatherers = agreed(self._group, "set_codec", prepare)
        if gradients is not self._gradients:
            self._skipped_before = self._skipped()
            dropped = [name for reducer in reducers for name in reducer.carry(self._gradients)]
            _state.log_dropped(dropped)
            for name in dropped:
                self._restored[0].pop(name, None)
        self._gradients, self._reducers, self._weights, self._gatherers = gradients, reducers, channel, gatherers
        self.codec = written_out(str(gradients.rules))
        self._install()

    # One step.

    def _enter(self, unit: str) -> None:
        """Before the gradients of a unit are encoded."""
        if unit in self._open:
            # Nothing has ended the previous step, and its residual must be decided before the unit is encoded again.
            self._end()
        # The callback is queued at every call: only the first one that runs finds a step to end, and one that never ran
        # must not be missed. FSDP's own callback is older, so the last units come before it. Outside of a backward pass
        # there is none.
        with contextlib.suppress(RuntimeError):
            torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _saw(self, unit: str, unit_coder: UnitCoder | None, result: torch.Tensor) -> None:
        """After the gradients of a unit were reduced. Adds 0 to the flag if they are finite, otherwise NaN."""
        self._open[unit] = unit_coder
        with self._gradients.on_stream(), torch.no_grad():
            self._flag += torch.linalg.vector_norm(result, float("inf")).float() * 0

    def _end(self) -> None:
        """After a backward pass: one finite check for all units and ranks. Either all ranks call it or none."""
        coders = [unit_coder for unit_coder in self._open.values() if unit_coder is not None]
        if not self._open:
            return
        self._open = {}
        with self._gradients.on_stream():
            if any(unit_coder.keeps for unit_coder in coders):
                self._gradients.all_reduce(self._flag, self._group)
                for unit_coder in coders:
                    unit_coder.model.check_finite(self._flag.data_ptr(), 1)
            for unit_coder in coders:
                unit_coder.model.end()
            self._flag.zero_()
        self._step_done()
        if self.step == 1 and self._options["feedback"] and dist.get_rank(self._group) == 0:
            _LOG.info("gradwire: the residuals of feedback take %d bytes on every rank", self._residual_bytes())
        self._begin_to_learn([unit_coder for unit_coder in coders if unit_coder.learns])

    def _step_done(self) -> None:
        self.step += 1
        self._gradients.step_done()
        self._weights.step_done()

    def _begin_to_learn(self, coders: Sequence[UnitCoder]) -> None:
        for group in dict.fromkeys(unit_coder.group for unit_coder in coders):
            if group not in self._lessons:
                self._lessons[group] = OwnLessons(group)
            self._lessons[group].follow([unit_coder.model for unit_coder in coders if unit_coder.group == group])

    def _synchronize(self) -> None:
        """Until the last step has been learned from."""
        for lessons in self._lessons.values():
            lessons.wait()

    def _scale(self) -> float:
        if self._loss_scale is not None:
            return self._loss_scale
        if not self._options["feedback"] or self._scaler is None or not self._scaler.is_enabled():
            return 1.0
        return float(self._scaler.get_scale())

    # For the user.

    def end_step(self) -> None:
        """Ends a step. Only needed where gradients are reduced outside of autograd's backward pass, as pipeline
        schedules do; without it such a step ends when its first unit sends gradients again. Collective."""
        self._end()

    def residual_hash(self) -> int:
        self._synchronize()
        return hash(tuple(unit_coder.model.hash() for _, unit_coder in sorted(self._gradients.coders.items())))

    def _lacks_feedback(self) -> bool:
        """Whether a codec for gradients wants error feedback."""
        parts = (part for unit in self._parts.values() for part in unit.all if part.trains)
        return any(part.codec(self._gradients.rules).feedback for part in parts)

    def _residual_bytes(self) -> int:
        return sum(unit_coder.model.residual_bytes() for unit_coder in self._gradients.coders.values())

    def stats(self) -> dict[str, Any]:
        """What was sent and what it cost, on this rank.

        steps: steps taken. skipped: steps that changed no residual, because a result was not finite (counted only where
        there is something to keep: feedback, or a codec that learns).
        gradients, weights: "codec" (rules), "bits" (per element), "ratio" (fp32 bytes / bytes sent, in the last step;
        1.0 where nothing is sent), and "last_step" and "all_steps": the same numbers for the last step, and for all
        steps since `compress`. "bytes": to other ranks; "fp32_bytes": without compression; "bytes_saved": fp32_bytes -
        bytes; "seconds": "encode" and "decode" (processor time, or wall time if a GPU does the work) and "wait" (for
        other ranks).
        last_step, all_steps: of gradients and weights together.
        plan: for each module whose codec plans ahead (dqsgd) a line: the budget, the number of steps it plans with, the
        bits so far. residual_bytes: memory that residuals take.
        """
        self._synchronize()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        gradients, weights = self._gradients.report(), self._weights.report()
        return {
            "steps": self.step,
            "skipped": self._skipped(),
            "gradients": gradients,
            "weights": weights,
            "last_step": _together(gradients["last_step"], weights["last_step"]),
            "all_steps": _together(gradients["all_steps"], weights["all_steps"]),
            "plan": [line for unit_coder in self._gradients.coders.values() for line in unit_coder.plans()],
            "residual_bytes": self._residual_bytes(),
        }

    def _skipped(self) -> int:
        coders = self._gradients.coders.values()
        return self._skipped_before + max([unit_coder.model.skipped() for unit_coder in coders], default=0)

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank: its residuals by "parameter/rank", what codecs have learned, the step. Save it on
        every rank."""
        self._synchronize()
        residuals, learned = (dict(part) for part in self._restored)
        for unit_coder in self._gradients.coders.values():
            more, also_learned = unit_coder.state()
            residuals |= {name: values.to(self._options["residual"]) for name, values in more.items()}
            learned |= also_learned
        learned = {self._row + name: values for name, values in learned.items()}
        ranks = {str(dist.get_rank(self._group)): {"up": residuals, "down": {}}}
        return {
            "format": FORMAT, "step": self.step, "world": dist.get_world_size(self._group), "codec": self.codec,
            "exempt": [], "learned": learned, "ranks": ranks,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continues from the state of this rank, on the same number of ranks. Collective. On another number of ranks
        the shards begin elsewhere, and residuals of the old shards cannot be used. Continue without them: what is lost
        is what compression has left out of the last step's gradients."""

        def prepare() -> tuple[tuple[dict[str, Any], Channel, list[Any]], Handshake]:
            self._synchronize()
            whole = merged(state)
            rank, world = str(dist.get_rank(self._group)), dist.get_world_size(self._group)
            if whole["world"] != world:
                raise UsageError(
                    f"the state was saved with {whole['world']} ranks, and there are {world} now: residuals of other "
                    "shards cannot be used; do not call load_state_dict, to continue without them",
                    field="world",
                )
            if rank not in whole["ranks"]:
                raise UsageError(
                    f"the state belongs to rank {', '.join(whole['ranks'])}; this is rank {rank}", field="ranks"
                )
            residuals = whole["ranks"][rank]["up"]
            if not isinstance(state, Mapping):
                mine = next(one for one in state if rank in map(str, one["ranks"]))
                whole["learned"] = merged(mine)["learned"]
            whole["learned"] = {
                name.removeprefix(self._row): values
                for name, values in whole["learned"].items()
                if name.startswith(self._row)
            }
            self._check_residuals(residuals)
            # Coders of their own say whether they can go on from it, so that a state that is refused changes nothing.
            channel = self._channel(self.codec, "codec").continuing(self._gradients)
            before, self._restored = self._restored, (dict(residuals), dict(whole["learned"]))
            try:
                reducers = [reducer.remade(channel) for reducer in self._reducers]
            finally:
                self._restored = before
            terms = [("step", str(whole["step"]))]
            if not self._has_rows:
                tables = sorted(whole["learned"].items())
                terms.append(("learned", str({name: zlib.crc32(_state.bytes_of(values)) for name, values in tables})))
            return (whole, channel, reducers), terms

        whole, channel, reducers = agreed(self._group, "load_state_dict", refusing(prepare))
        self._open = {}
        self._skipped_before = self._skipped()
        self._restored = (dict(whole["ranks"][str(dist.get_rank(self._group))]["up"]), dict(whole["learned"]))
        self._gradients, self._reducers = channel, reducers
        self._install()
        self.step = whole["step"]

    def _check_residuals(self, residuals: Mapping[str, torch.Tensor]) -> None:
        """Refuses a state that this model cannot go on from. Units that have not sent anything yet have no coder that
        could, and would refuse it in the backward pass. A state without residuals was saved without feedback."""
        parts = [part for unit in self._parts.values() for part in unit.all]
        counts = {name: part.padded for part in parts for name in part.tensors(part.ranks)}
        for name, values in residuals.items():
            if name not in counts:
                raise UsageError(
                    f"the state has a residual of '{name}', but no such parameter of this model is sharded", field=name
                )
            if values.numel() != counts[name]:
                raise UsageError(
                    f"'{name}' has {counts[name]} elements; its residual in the state has {values.numel()}", field=name
                )
        for name in (name for reducer in self._reducers for name in reducer.residuals()):
            if residuals and name not in residuals:
                raise UsageError(f"the state has no residual of '{name}'", field=name)


def _together(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _together(value, other[name]) if isinstance(value, Mapping) else value + other[name]
        for name, value in one.items()
    }
