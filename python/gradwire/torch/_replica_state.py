# SPDX-License-Identifier: Apache-2.0
"""The state of a hook for replicas. It is that of _state.py, with a mesh:

    {"format": 1, "step": 120, "world": 6, "mesh": "2 x 3", "codec": "...", "exempt": [],
     "shapes": {parameter: int64 tensor},                  # the dimension that is sharded, then the whole shape
     "learned": {"shard/name": uint8 tensor},              # the same on all replicas
     "ranks": {"4": {"up": ..., "down": ...}},             # of replica 1, shard 1: 4 = 1 * 3 + 1
     "shards": {...}}                                      # of the shard dimension, if it is compressed too

On another mesh residuals are redistributed: for each parameter the mean of the replicas' residuals, and the residuals
of the owners, are put together from the old shards and cut into the new ones. So the sum of the residuals, in units of
the mean gradient, stays the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Mapping, Sequence

import torch

from .._errors import UsageError
from . import _state
from ._replica_group import Parameter
from ._state import State

if TYPE_CHECKING:
    from .. import _core
    from ._agree import Handshake
    from ._replicas import ReplicaHook


def save(hook: "ReplicaHook") -> State:
    mesh = hook._mesh
    feedback = hook._model.state()
    learned = {f"{mesh.shard}/{name}": extra for name, extra in feedback.extra().items()}
    state: State = {
        "format": _state.FORMAT,
        "step": hook.step,
        "world": mesh.replicas * mesh.shards,
        "mesh": f"{mesh.replicas} x {mesh.shards}",
        "codec": hook.codec,
        "exempt": [],
        "shapes": {one.name: torch.tensor([one.shard_dim, *one.shape]) for one in mesh.parameters},
        "learned": _state.byte_tensors(learned),
        "ranks": {str(mesh.replica * mesh.shards + mesh.shard): _state.ranks_part(feedback, hook._residual)},
    }
    if hook._shards is not None:
        state["shards"] = hook._shards.state_dict()
    return state


def load(hook: "ReplicaHook", state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
    def prepare() -> "tuple[tuple[State, _core.ModelCoder], Handshake]":
        if hook._open:
            raise UsageError("a step is under way; load a state between two steps", field="step")
        whole, replicas, shards = _merged(state)
        _check_shapes(whole, hook._mesh.parameters)
        model = hook._fresh_model()
        current = model.state()
        part = _part_for(hook, whole, replicas, shards, current)
        _state.check_part(part, current)
        feedback = _state.feedback_of(part, _state.dtype_name(hook._residual))
        for name in current.extra():
            # Every shard of the old mesh has learned for itself. On another mesh any of them is a good beginning.
            key = f"{hook._mesh.shard % shards}/{name}"
            if key in whole["learned"]:
                feedback.set_extra(name, _state.bytes_of(whole["learned"][key]))
        model.restore(feedback)
        return (whole, model), [("step", str(whole["step"])), ("mesh of the state", whole["mesh"])]

    whole, model = hook._agreed("load_state_dict", _state.refusing(prepare))
    if hook._shards is not None and "shards" in whole:
        hook._shards.load_state_dict(whole["shards"])
    hook.step = hook._meters.steps = whole["step"]
    hook._replace_model(model)


def _merged(state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> tuple[State, int, int]:
    """One state, and its mesh: (replicas, shards)."""
    whole = _state.merged(state)
    states: Sequence[Mapping[str, Any]] = [state] if isinstance(state, Mapping) else state
    for one in states:
        if one.get("mesh") != whole.get("mesh"):
            raise UsageError("the states do not belong together: their meshes differ", field="mesh")
        whole["learned"] = {**whole["learned"], **one.get("learned", {})}
    numbers = str(whole.get("mesh")).split(" x ")
    if len(numbers) != 2 or not all(number.isdecimal() and 0 < int(number) < 2**31 for number in numbers):
        raise UsageError(
            "the state has no mesh of replicas and shards: a hook for another kind of model has saved it", field="mesh"
        )
    replicas, shards = int(numbers[0]), int(numbers[1])
    if replicas * shards != whole["world"]:
        raise UsageError(f"the state is damaged: its mesh is {whole['mesh']}, for {whole['world']} ranks", field="mesh")
    if "shards" in whole:
        whole["shards"] = [one["shards"] for one in states]
    return whole, replicas, shards


def _check_shapes(whole: State, parameters: Sequence[Parameter]) -> None:
    shapes = whole.get("shapes")
    if not isinstance(shapes, Mapping):
        raise UsageError("the state is damaged: it has no shapes by parameter name", field="shapes")
    here = {one.name: [one.shard_dim, *one.shape] for one in parameters}
    for name in sorted(here.keys() ^ shapes.keys()):
        what = "the state does not have" if name in here else "this model does not have"
        raise UsageError(f"{what} parameter '{name}'", field=name)
    for name, found in shapes.items():
        if found.tolist() != here[name]:
            raise UsageError(
                f"parameter '{name}' has the shape {here[name][1:]}, sharded in dimension {here[name][0]}; in the "
                f"state it has {found.tolist()[1:]}, sharded in dimension {found.tolist()[0]}",
                field=name,
            )


def _part_for(hook: "ReplicaHook", whole: State, replicas: int, shards: int, current: "_core.ErrorFeedback") -> State:
    """The residuals of this rank."""
    mesh, ranks = hook._mesh, whole["ranks"]
    if (replicas, shards) == (mesh.replicas, mesh.shards):
        mine = str(mesh.replica * shards + mesh.shard)
        if mine not in ranks:
            raise UsageError(
                f"the state belongs to rank {', '.join(ranks)} of the mesh; this is rank {mine}: save "
                "hook.state_dict() on every rank",
                field="ranks",
            )
        return ranks[mine]  # type: ignore[no-any-return]
    missing = [str(rank) for rank in range(min(replicas * shards, len(ranks) + 8)) if str(rank) not in ranks]
    if missing:
        raise UsageError(
            f"the state was saved on a mesh of {whole['mesh']} ranks, and this one has {mesh.replicas} x "
            f"{mesh.shards}: the states of all ranks are needed, and those of rank {', '.join(missing[:8])} are "
            "missing; pass a list of all states",
            field="mesh",
        )
    parameters = {one.name: one for one in mesh.parameters}
    if hook._model_options["owner_feedback"] == "off" and any(ranks[rank]["down"] for rank in ranks):
        raise UsageError(
            "the state has residuals of the way back, which a hook with owner_feedback=False does not keep",
            field="owner_feedback",
        )
    part: State = {"up": {}, "down": {}}
    cuts: dict[tuple[str, str], torch.Tensor] = {}
    for direction, name, first, count in current.entries():
        if (direction, name) not in cuts:
            old = _together(parameters[name], ranks, direction, replicas, shards)
            cuts[direction, name] = parameters[name].cut(old, mesh.shards)[mesh.shard].reshape(-1)
        key = name if direction == "up" else f"{name}@{first}"
        part[direction][key] = cuts[direction, name][first : first + count].clone()
    return part


def _together(
    parameter: Parameter, ranks: Mapping[str, Any], direction: str, replicas: int, shards: int
) -> torch.Tensor:
    """The residual of a whole parameter, from all shards: the mean over the replicas on the way up, and on the way down
    what each owner has."""
    pieces = parameter.cut(torch.zeros(parameter.shape), shards)
    name, found = parameter.name, False
    for shard, piece in enumerate(pieces):
        flat = torch.zeros(piece.numel(), dtype=torch.float64)
        for replica in range(replicas):
            residuals = ranks[str(replica * shards + shard)][direction]
            for key, values in residuals.items():
                if direction == "up" and key == name:
                    flat += _sized(values, flat.numel(), key).double().reshape(-1) / replicas
                    found = True
                elif direction == "down" and key.rpartition("@")[0] == name:
                    first = int(key.rpartition("@")[2])
                    if first + values.numel() > flat.numel():
                        raise UsageError(f"the state is damaged: '{key}' is longer than its shard", field=name)
                    flat[first : first + values.numel()] = values.double().reshape(-1)
                    found = True
        pieces[shard] = flat.float().reshape(piece.shape)
    if not found and direction == "up":
        raise UsageError(f"the state has no {direction} residual of parameter '{name}'", field=name)
    return torch.cat([piece for piece in pieces if piece.numel()] or pieces[:1], dim=parameter.shard_dim)


def _sized(values: torch.Tensor, count: int, name: str) -> torch.Tensor:
    if values.numel() != count:
        raise UsageError(
            f"a shard of parameter '{name}' has {count} elements; its residual in the state has {values.numel()}",
            field=name,
        )
    return values
