# SPDX-License-Identifier: Apache-2.0
"""The state of a hook as plain dicts of tensors, by parameter name, so that torch.save, torch.distributed.checkpoint and people
can read it:

    {"format": 1, "step": 120, "world": 4, "codec": "...", "exempt": [names],
     "learned": {name: uint8 tensor},                      # the same on all ranks
     "ranks": {"2": {"up": {parameter: tensor},            # what rank 2 owes of its own gradients
                     "down": {"parameter@first": tensor}}}}  # ... and of the means that it owns, from element `first` on

A state may hold one rank or all. Keys differ from rank to rank, so a distributed checkpoint that every rank writes to holds
them all. Loaded in a world of another size, the debt in units of the mean is kept: every new rank owes the mean of what the
old ones owed, and what owners owed goes to the new owners.
"""

import warnings
import zlib
from typing import TYPE_CHECKING, Any, Mapping, Sequence

import torch
import torch.distributed as dist

from .. import _core
from .._errors import UsageError
from ._agree import agreed

if TYPE_CHECKING:
    from ._ddp import Hook

_FORMAT = 1
State = dict[str, Any]


def _ranks_part(feedback: "_core.ErrorFeedback", dtype: torch.dtype) -> State:
    part: State = {"up": {}, "down": {}}
    for side, name, first, _ in feedback.entries():
        values = torch.from_numpy(feedback.residual(side, name, first)).to(dtype)
        part[side][name if side == "up" else f"{name}@{first}"] = values
    return part


def _feedback_of(part: Mapping[str, Any], dtype: str) -> "_core.ErrorFeedback":
    feedback = _core.ErrorFeedback(dtype, _core.Device())
    for side in ("up", "down"):
        for key, values in part[side].items():
            name, first = (key, 0) if side == "up" else (key.rpartition("@")[0], int(key.rpartition("@")[2]))
            feedback.add(side, name, values.numel(), first)
            feedback.set_residual(side, name, first, values.detach().float().cpu().contiguous().numpy())
    return feedback


def save(hook: "Hook", gather: str | None) -> State:
    if gather not in (None, "all", "debt"):
        raise UsageError(f"gather is {gather!r}; allowed are None, 'all' and 'debt'", field="gather")
    rank = dist.get_rank(hook._group)
    dtype = hook._options["residual"]
    feedback = hook._model.state()
    ranks = {str(rank): _ranks_part(feedback, dtype)}
    if gather is not None:
        every: list[State | None] | None = [None] * hook._world if rank == 0 else None
        dist.gather_object(ranks, every, dst=dist.get_global_rank(hook._group, 0), group=hook._group)
        if every is None:
            return {}
        ranks = {key: part for one in every if one is not None for key, part in one.items()}
    state: State = {
        "format": _FORMAT,
        "step": hook.step,
        "world": hook._world,
        "codec": hook.codec,
        "exempt": [hook._names[tensor] for tensor in hook._meters.exempt],
        "learned": {name: torch.frombuffer(bytearray(note), dtype=torch.uint8) for name, note in feedback.notes().items() if note},
        "ranks": ranks,
    }
    if gather == "debt":
        one = _core.ErrorFeedback.redistribute([_feedback_of(ranks[str(r)], _name(dtype)) for r in range(hook._world)], 1)[0]
        state["world"], state["ranks"] = 1, {"0": _ranks_part(one, dtype)}
    return state


def _name(dtype: torch.dtype) -> str:
    return "f32" if dtype == torch.float32 else "bf16"


def _merged(state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> State:
    states = [state] if isinstance(state, Mapping) else list(state)
    if not states or not all(isinstance(one, Mapping) and "ranks" in one for one in states):
        raise UsageError("state is not one of Hook.state_dict(): it has no 'ranks'", field="state")
    merged = dict(states[0])
    for one in states:
        for field in ("format", "step", "world", "codec"):
            if one.get(field) != merged.get(field):
                raise UsageError(f"the states do not belong together: {field} is {merged.get(field)!r} in one and {one.get(field)!r} in another", field=field)
    if merged["format"] != _FORMAT:
        raise UsageError(f"state has format {merged['format']}; this version reads {_FORMAT}", field="format")
    # A checkpoint keeps no empty dicts.
    merged["ranks"] = {key: {"up": {}, "down": {}, **part} for one in states for key, part in one["ranks"].items()}
    merged["learned"], merged["exempt"] = merged.get("learned", {}), merged.get("exempt", [])
    return merged


def _check(part: Mapping[str, Any], expected: "_core.ErrorFeedback") -> None:
    """Every residual that this model has, and no other."""
    wanted = {(side, name if side == "up" else f"{name}@{first}"): count for side, name, first, count in expected.entries()}
    found = {(side, key): values.numel() for side in ("up", "down") for key, values in part[side].items()}
    for side, key in sorted(wanted.keys() | found.keys()):
        if (side, key) not in found:
            raise UsageError(f"the state has no {side} residual of parameter '{key}'", field=key)
        if (side, key) not in wanted:
            raise UsageError(f"the state has a {side} residual of parameter '{key}', which this model does not have", field=key)
        if found[side, key] != wanted[side, key]:
            raise UsageError(f"parameter '{key}' has {wanted[side, key]} elements; its {side} residual in the state has {found[side, key]}", field=key)


def load(hook: "Hook", state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
    rank, world = dist.get_rank(hook._group), hook._world
    dtype = _name(hook._options["residual"])

    def prepare() -> tuple[tuple[State, Any], list[tuple[str, str]]]:
        whole = _merged(state)
        then, ranks = int(whole["world"]), whole["ranks"]
        if then == world:
            if str(rank) not in ranks:
                raise UsageError(f"the state is of rank {', '.join(ranks)}; this is rank {rank}", field="ranks")
            part = ranks[str(rank)]
        else:
            missing = [str(r) for r in range(then) if str(r) not in ranks]
            if missing:
                raise UsageError(
                    f"the state is of a world of {then}, this one has {world}: all ranks' states are needed, those of {', '.join(missing)} are missing; "
                    "pass a list of them, or save with state_dict(gather='all')",
                    field="world",
                )
            moved = _core.ErrorFeedback.redistribute([_feedback_of(ranks[str(r)], dtype) for r in range(then)], world)
            part = _ranks_part(moved[rank], torch.float32)
        current = hook._model.state()
        _check(part, current)
        feedback = _feedback_of(part, dtype)
        for name, note in whole["learned"].items():
            if name in current.notes():
                feedback.set_note(name, bytes(note.cpu().contiguous().numpy()))
        unknown = [name for name in whole["exempt"] if name not in hook._names]
        if unknown:
            raise UsageError(f"the state exempts parameter '{unknown[0]}', which this model does not have", field="exempt")
        learned = {name: zlib.crc32(bytes(note.cpu().contiguous().numpy())) for name, note in sorted(whole["learned"].items())}
        return (whole, feedback), [("step", str(whole["step"])), ("world", str(then)), ("learned", str(learned)), ("exempt", str(whole["exempt"]))]

    whole, feedback = agreed(hook._group, prepare)
    hook._model.restore(feedback)
    hook.step = int(whole["step"])
    hook._meters.steps = hook.step
    hook._meters.exempt = [hook._names.index(name) for name in whole["exempt"]]
    for tensor in hook._meters.exempt:
        hook._model.exempt(tensor)


def read_checkpoint(path: str, key: str = "gradwire") -> State:
    """The state of all ranks from a checkpoint that torch.distributed.checkpoint.save({..., key: hook.state_dict()}) wrote,
    for hook.load_state_dict in a world of any size. Not collective: every rank reads."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = dcp.FileSystemReader(path)  # type: ignore[attr-defined]
    metadata = reader.read_metadata()
    places = metadata.planner_data or {}
    flat: State = {}
    for name, what in metadata.state_dict_metadata.items():
        if places.get(name, (name,))[0] != key:
            continue
        flat[name] = torch.empty(what.size, dtype=what.properties.dtype) if isinstance(what, TensorStorageMetadata) else None
    if not flat:
        raise UsageError(f"the checkpoint has nothing under '{key}'", field="key")
    with warnings.catch_warnings():  # it asks whether that was meant
        warnings.simplefilter("ignore", UserWarning)
        dcp.load(flat, storage_reader=reader, no_dist=True)  # type: ignore[attr-defined]
    state: State = {"exempt": []}
    for name, value in flat.items():
        at: Any = state
        path_in = places[name][1:]
        for step in path_in[:-1]:
            at = at.setdefault(step, {})
        if isinstance(path_in[-1], int):  # a list, element by element
            at = state["exempt"]
            at.append(value)
        else:
            at[path_in[-1]] = value
    return state
