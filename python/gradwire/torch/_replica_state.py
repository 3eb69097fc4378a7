# SPDX-License-Identifier: Apache-2.0
"""The state of a hook for replicas. It is that of _state.py, with a mesh:

    {"format": 1, "step": 120, "world": 6, "mesh": "2 x 3", "codec": "...", "exempt": [],
     "shapes": {parameter: int64 tensor},                  # the dimension that is sharded, then the whole shape
     "learned": {"shard/name": uint8 tensor},              # the same on all replicas
     "ranks": {"4": {"up": ..., "down": ...}},             # of replica 1, shard 1: 4 = 1 * 3 + 1
     "shards": {...}}                                      # of the shard dimension, if it is compressed too

Where Adam's momentum is exchanged there is "adam", and "q", "s" and "levels" of every rank, as in _state.py; they are
those of its shards.

On another mesh residuals are redistributed (_relayout.py); their sum, in units of the mean gradient, stays the same. So
is s, of which new replicas get the mean; they begin with a q of zero. A new shard has the share in the level of its
parameter that it has in the elements.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Mapping, Sequence

import torch

from .._errors import UsageError
from . import _relayout, _state
from ._replica_group import Parameter
from ._state_checks import FORMAT, State, check_part, merged, refusing

if TYPE_CHECKING:
    from .. import _core
    from ._agree import Handshake
    from ._replicas import ReplicaHook


def save(hook: "ReplicaHook") -> State:
    mesh = hook._mesh
    feedback = hook._model.state()
    learned = {f"{mesh.shard}/{name}": extra for name, extra in feedback.extra().items()}
    state: State = {
        "format": FORMAT,
        "step": hook.step,
        "world": mesh.replicas * mesh.shards,
        "mesh": f"{mesh.replicas} x {mesh.shards}",
        "codec": hook.codec,
        "exempt": [],
        "shapes": {one.name: torch.tensor([one.shard_dim, *one.shape]) for one in mesh.parameters},
        "learned": _state.byte_tensors(learned),
        "ranks": {str(mesh.replica * mesh.shards + mesh.shard): _state.ranks_part(feedback, hook._residual)},
    }
    if hook._momentum is not None:
        next(iter(state["ranks"].values())).update(_state.own_moments(hook._momentum))
        state["adam"] = _state.adam_part(hook._momentum)
    if hook._shards is not None:
        state["shards"] = hook._shards.state_dict()
    return state


def load(hook: "ReplicaHook", state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
    def prepare() -> "tuple[tuple[State, State, _core.ModelCoder], Handshake]":
        if hook._open:
            raise UsageError("a step is under way; load a state between two steps", field="step")
        whole, replicas, shards = _merged(state)
        _check_shapes(whole, hook._mesh.parameters)
        model = hook._fresh_model(whole["adam"]["taken"] if "adam" in whole else 0)
        current = model.state()
        part = _part_for(hook, whole, replicas, shards, current)
        adam = _state.adam_for(hook._momentum, whole, part)
        check_part(part, current)
        feedback = _state.feedback_of(part, _state.dtype_name(hook._residual))
        for name in current.extra():
            # Every shard of the old mesh has learned for itself. On another mesh any of them is a good beginning.
            key = f"{hook._mesh.shard % shards}/{name}"
            if key in whole["learned"]:
                feedback.set_extra(name, _state.bytes_of(whole["learned"][key]))
        model.restore(feedback)
        terms = [("step", str(whole["step"])), ("mesh of the state", whole["mesh"])]
        terms += [(field, str(value)) for field, value in _state.adam_terms(adam).items()]
        return (whole, adam, model), terms

    whole, adam, model = hook._agreed("load_state_dict", refusing(prepare))
    if hook._shards is not None and "shards" in whole:
        hook._shards.load_state_dict(whole["shards"])
    hook.step = hook._meters.steps = whole["step"]
    hook._replace_model(model)
    hook._prepare_lessons()  # the state may be of a later phase, whose codecs learn
    hook._warm = hook._is_warm(adam["taken"])
    if hook._momentum is not None:
        hook._momentum.restore(adam)


def _merged(state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> tuple[State, int, int]:
    """One state, and its mesh: (replicas, shards)."""
    whole = merged(state)
    states: Sequence[Mapping[str, Any]] = [state] if isinstance(state, Mapping) else state
    for one in states:
        if one.get("mesh") != whole.get("mesh"):
            raise UsageError("the states do not belong together: their meshes differ", field="mesh")
        whole["learned"] = {**whole["learned"], **one.get("learned", {})}
    replicas, shards = _relayout.numbers(whole.get("mesh"), whole["world"], "mesh")
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
    keeps_down = hook._model_options["owner_feedback"] != "off"
    now = (mesh.replicas, mesh.shards)
    part = _relayout.moved(mesh.parameters, ranks, (replicas, shards), now, mesh.shard, current, keeps_down, "mesh")
    if "adam" in whole:
        part |= _moments_for(hook, ranks, replicas, shards)
    return part


def _moments_for(hook: "ReplicaHook", ranks: Mapping[str, Any], replicas: int, shards: int) -> State:
    """What momentum is exchanged with, on this mesh."""
    part: State = {"q": {}, "s": {}, "levels": {}}
    for one in hook._mesh.parameters:
        whole = _relayout.together(one, ranks, "s", replicas, shards)
        part["s"][one.name] = one.cut(whole, hook._mesh.shards)[hook._mesh.shard].reshape(one.shard_shape).clone()
        means = [
            sum(_relayout.sized(ranks[str(replica * shards + shard)]["levels"][one.name], 1, one.name).double()
                for replica in range(replicas)) / replicas
            for shard in range(shards)
        ]  # fmt: skip
        level = torch.stack([torch.as_tensor(mean) for mean in means]).norm()
        part["levels"][one.name] = (level * (one.count / max(one.elements, 1)) ** 0.5).reshape(())
    return part
