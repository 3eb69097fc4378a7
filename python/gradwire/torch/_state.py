# SPDX-License-Identifier: Apache-2.0
"""The state of a hook as plain dicts of tensors by parameter name, which torch.save, torch.distributed.checkpoint and
people can read:

    {"format": 1, "step": 120, "world": 4, "codec": "...", "exempt": [names],
     "learned": {name: uint8 tensor},                      # the same on all ranks
     "ranks": {"2": {"up": {parameter: tensor},            # residuals of the gradients of rank 2
                     "down": {"parameter@first": tensor}}}}  # residuals of the means it owns, from `first` on

Where Adam's momentum is exchanged (_adam.py) residuals are in units of the update, and there is more:

     "adam": {"taken": 120, "next_pool": 154,              # steps that were applied, and when moments are pooled next
              "counts": {parameter: int64 tensor of 4}},   # steps, updates of s, of q, of s at the last pooling
     "ranks": {"2": {..., "q": {parameter: tensor}, "s": {parameter: tensor}, "levels": {parameter: tensor}}}

With lowrank (_lowrank.py) the residuals of matrices stand among those of gradients, in the order of memory, and there
are the bases of the next step, which are the same on all ranks:

     "lowrank": {"p": {parameter: tensor of r x n},        # with alternate=on
                 "q": {parameter: tensor of r x m}}

On nodes of several ranks residuals are those of pieces (_node_bucket.py), and each place in a node learns for itself:

     "nodes": "2 x 4",                                     # 2 nodes of 4 ranks
     "learned": {"place/name": uint8 tensor},
     "ranks": {"6": {...}}                                 # of node 1, place 2: 6 = 1 * 4 + 2

A state holds one rank or all of them. Keys differ between ranks, so a distributed checkpoint to which every rank writes
holds them all. When the number of ranks changes, residuals are redistributed so that their sum, in units of the mean
gradient, stays the same: every new rank gets the mean of the old ranks' residuals, and those of the owners go to the
new owners (_relayout.py, if one of both layouts has several ranks in a node). Every new rank gets the mean of the old
ranks' s, and begins with a q of zero.
"""

from __future__ import annotations

import logging
import warnings
import zlib
from typing import TYPE_CHECKING, Any, Mapping, Sequence

import torch
import torch.distributed as dist

from .. import _core
from .._errors import UsageError
from . import _relayout
from ._agree import agreed
from ._state_checks import FORMAT, State, check_part, merged, refusing

if TYPE_CHECKING:
    from ._adam import Momentum
    from ._ddp import DdpHook

_LOG = logging.getLogger("gradwire")
_MOST_RANKS = 1 << 20  # that a checkpoint may claim to be of


def ranks_part(feedback: "_core.ErrorFeedback", dtype: torch.dtype) -> State:
    part: State = {"up": {}, "down": {}}
    for direction, name, first, _ in feedback.entries():
        values = torch.from_numpy(feedback.residual(direction, name, first)).to(dtype)
        part[direction][name if direction == "up" else f"{name}@{first}"] = values
    return part


def feedback_of(part: Mapping[str, Any], dtype: str) -> "_core.ErrorFeedback":
    feedback = _core.ErrorFeedback(dtype, _core.Device())
    for direction in ("up", "down"):
        for key, values in part[direction].items():
            name, first = (key, 0) if direction == "up" else (key.rpartition("@")[0], int(key.rpartition("@")[2]))
            feedback.add(direction, name, values.numel(), first)
            feedback.set_residual(direction, name, first, values.detach().float().cpu().contiguous().numpy())
    return feedback


def adam_part(momentum: "Momentum") -> State:
    """What is the same on all ranks of an exchange of momentum."""
    return {
        "taken": momentum.taken,
        "next_pool": momentum.next_pool,
        "clip": momentum.limits.clip,
        "counts": {name: torch.tensor(counts) for name, counts in zip(momentum.names, momentum.counts)},
    }


def save(hook: "DdpHook", gather: str | None) -> State:
    if gather not in (None, "all", "merged"):
        raise UsageError(f"gather is {gather!r}; allowed are None, 'all' and 'merged'", field="gather")
    rank = dist.get_rank(hook._group)
    nodes, per_node, node, place = hook._place()
    position = str(node * per_node + place)
    dtype = hook._options["residual"]
    feedback = hook._model.state()
    ranks = {position: ranks_part(feedback, dtype)}
    learned = {_learned_key(per_node, place, name): extra for name, extra in feedback.extra().items()}
    ranks[position]["up"] |= hook._own_residuals()
    momentum = hook._momentum
    if momentum is not None:
        ranks[position] |= own_moments(momentum)
    if gather is not None:
        every: list[tuple[State, State] | None] | None = [None] * hook._world if rank == 0 else None
        dist.gather_object((ranks, learned), every, dst=dist.get_global_rank(hook._group, 0), group=hook._group)
        if every is None:
            return {}
        ranks = {key: part for one in every if one is not None for key, part in one[0].items()}
        learned = {key: extra for one in every if one is not None for key, extra in one[1].items()}
    state: State = {
        "format": FORMAT,
        "step": hook.step,
        "world": hook._world,
        "codec": hook.codec,
        "exempt": [hook._names[tensor] for tensor in hook._meters.exempt],
        "learned": byte_tensors(learned),
        "ranks": ranks,
    }
    if per_node > 1 and gather != "merged":
        state["nodes"] = f"{nodes} x {per_node}"
    if momentum is not None:
        state["adam"] = adam_part(momentum)
    state |= hook._own_state()
    if gather == "merged" and per_node > 1:
        state["world"], state["ranks"] = 1, {"0": _pieces_together(hook, ranks, nodes, per_node, dtype)}
        state["learned"] = byte_tensors(feedback.extra())
    elif gather == "merged":
        every_feedback = [feedback_of(ranks[str(r)], dtype_name(dtype)) for r in range(hook._world)]
        one = _core.ErrorFeedback.redistribute(every_feedback, 1)[0]
        state["world"], state["ranks"] = 1, {"0": ranks_part(one, dtype)}
    if gather == "merged" and momentum is not None:
        s, levels = _mean_of_ranks(ranks, "s"), _mean_of_ranks(ranks, "levels")
        q = {name: torch.zeros_like(values) for name, values in s.items()}
        state["ranks"]["0"] |= {"q": q, "s": s, "levels": levels}
        for counts in state["adam"]["counts"].values():
            counts[2] = 0
    return state


def _learned_key(per_node: int, place: int, name: str) -> str:
    return f"{place % per_node}/{name}" if per_node > 1 else name


def _wholes(hook: "DdpHook") -> list[_relayout.Flat]:
    return [_relayout.Flat(name, parameter.numel()) for name, parameter in zip(hook._names, hook._parameters)]


def _pieces_together(hook: "DdpHook", ranks: State, nodes: int, per_node: int, dtype: torch.dtype) -> State:
    """The residuals of one rank that has those of all."""
    part: State = {"up": {}, "down": {}}
    for whole in _wholes(hook):
        for direction in part:
            keys = [key if direction == "up" else key.rpartition("@")[0] for key in _keys(ranks, direction)]
            if whole.name in keys:
                values = _relayout.together(whole, ranks, direction, nodes, per_node).to(dtype)
                part[direction][whole.name if direction == "up" else f"{whole.name}@0"] = values
    return part


def _keys(ranks: State, direction: str) -> set[str]:
    return {key for part in ranks.values() for key in part[direction]}


def own_moments(momentum: "Momentum") -> State:
    return {
        kind: {name: values.detach().cpu().clone() for name, values in zip(momentum.names, tensors)}
        for kind, tensors in (("q", momentum.q), ("s", momentum.s), ("levels", momentum.limits.levels.unbind()))
    }


def _mean_of_ranks(ranks: Mapping[str, Any], kind: str) -> dict[str, torch.Tensor]:
    """The mean of something over all ranks, added in the order of the ranks, so that all find the same bits."""
    parts = [ranks[str(rank)][kind] for rank in range(len(ranks))]
    return {name: torch.stack([part[name].double() for part in parts]).mean(0).float() for name in parts[0]}


def byte_tensors(extra: Mapping[str, bytes]) -> dict[str, torch.Tensor]:
    return {name: torch.frombuffer(bytearray(some), dtype=torch.uint8) for name, some in extra.items() if some}


def bytes_of(values: torch.Tensor) -> bytes:
    return bytes(values.cpu().contiguous().numpy())


def dtype_name(dtype: torch.dtype) -> str:
    return "f32" if dtype == torch.float32 else "bf16"


def redistributed(whole: Mapping[str, Any], rank: int, world: int, dtype: str, how: str) -> State:
    """What `rank` of `world` ranks gets of a state that was saved by another number of ranks. `how` says what the user
    must pass if some of them are missing."""
    then, ranks = whole["world"], whole["ranks"]
    # Of a number of ranks that was made up, only those that are looked for would be listed.
    missing = [str(r) for r in range(min(then, len(ranks) + 8)) if str(r) not in ranks]
    if missing:
        raise UsageError(
            f"the state was saved with {then} ranks, and there are {world} now: the states of all ranks are needed, "
            f"and those of rank {', '.join(missing[:8])} are missing; pass {how}",
            field="world",
        )
    moved = _core.ErrorFeedback.redistribute([feedback_of(ranks[str(r)], dtype) for r in range(then)], world)
    return ranks_part(moved[rank], torch.float32)


def load(hook: "DdpHook", state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
    nodes, per_node, node, place = hook._place()
    position = str(node * per_node + place)
    dtype = dtype_name(hook._options["residual"])

    def prepare() -> tuple[tuple[State, State, State, "_core.ModelCoder"], list[tuple[str, str]]]:
        whole = merged(state)
        ranks, then = whole["ranks"], (whole["world"], 1)
        if whole.get("nodes") is not None:
            then = _relayout.numbers(whole["nodes"], whole["world"], "nodes")
            for one in [state] if isinstance(state, Mapping) else state:
                whole["learned"] = {**whole["learned"], **one.get("learned", {})}
        if then == (nodes, per_node):
            if position not in ranks:
                which = "rank" if per_node == 1 else "position"
                raise UsageError(
                    f"the state belongs to {which} {', '.join(ranks)}; this is {which} {position}: save "
                    "hook.state_dict() on every rank, or on rank 0 that of hook.state_dict(gather='all'), which all "
                    "ranks call",
                    field="ranks",
                )
            part = ranks[position]
        elif then[1] == per_node == 1:
            how = "a list of all states, or save with state_dict(gather='all')"
            part = redistributed(whole, node, nodes, dtype, how)
            part["q"] = {}
            part |= {kind: _mean_of_ranks(ranks, kind) if "adam" in whole else {} for kind in ("s", "levels")}
        else:
            keeps_down = hook._model_options["owner_feedback"] != "off"
            now, needed = (nodes, per_node), hook._fresh_model(whole.get("adam", {}).get("taken", 0)).state()
            part = _relayout.moved(_wholes(hook), ranks, then, now, place, needed, keeps_down, "nodes")
            part["q"] = {}
            part |= {kind: _mean_of_ranks(ranks, kind) if "adam" in whole else {} for kind in ("s", "levels")}
        adam = adam_for(hook._momentum, whole, part)
        own, own_terms = hook._take_own(whole, part, adam["taken"])
        # Only a codec can say whether what it has learned makes sense. It says so to a coder of its own, so that a
        # state that is refused changes nothing.
        model = hook._fresh_model(adam["taken"])
        current = model.state()
        check_part(part, current)
        feedback = feedback_of(part, dtype)
        for name in current.extra():
            # Every place of another layout has learned for itself. Any of them is a good beginning.
            key = _learned_key(then[1], place, name)
            if key in whole["learned"]:
                feedback.set_extra(name, bytes_of(whole["learned"][key]))
        unknown = [name for name in whole["exempt"] if name not in hook._names]
        if unknown:
            raise UsageError(
                f"the state exempts parameter '{unknown[0]}', which this model does not have", field="exempt"
            )
        model.restore(feedback)
        learned = {name: zlib.crc32(bytes_of(values)) for name, values in sorted(whole["learned"].items())}
        handshake = {"step": whole["step"], "world": whole["world"], "nodes": then, "exempt": whole["exempt"]}
        if then[1] == 1:  # otherwise a rank may have what its own place has learned, and no more
            handshake["learned"] = learned
        terms = [(field, str(value)) for field, value in (handshake | adam_terms(adam)).items()]
        return (whole, adam, own, model), terms + own_terms

    whole, adam, own, model = agreed(hook._group, "load_state_dict", refusing(prepare), hook._timeout)
    hook.step = whole["step"]
    hook._meters.steps = hook.step
    hook._meters.exempt = [hook._names.index(name) for name in whole["exempt"]]
    hook._replace_model(model)
    hook._prepare_lessons()  # the state may be of a later phase, whose codecs learn
    hook._restore_own(own)
    hook._warm = hook._is_warm(adam["taken"])
    if hook._momentum is not None:
        hook._momentum.restore(adam)


def adam_terms(adam: Mapping[str, Any]) -> dict[str, Any]:
    """What ranks compare when they load a state."""
    return {name: adam[name] for name in ("taken", "next_pool", "clip", "counts")}


def adam_for(momentum: "Momentum | None", whole: Mapping[str, Any], part: Mapping[str, Any]) -> State:
    """What the exchange of momentum continues from, on this rank. The residuals of a state say nothing to a hook that
    exchanges something else."""
    if momentum is None:
        if "adam" in whole:
            raise UsageError(
                "the state was saved by a hook that exchanges Adam's momentum, and its residuals are in units of the "
                "update; give compress the optimizer",
                field="optimizer",
            )
        return {"taken": 0, "next_pool": 0, "clip": 0.0, "counts": {}}
    if "adam" not in whole:
        raise UsageError(
            "the state was saved by a hook that exchanges gradients, and its residuals are in units of the gradient; "
            "this hook exchanges Adam's momentum, and can begin without a state",
            field="optimizer",
        )
    adam = dict(whole["adam"])
    q, s, counts = dict(part["q"]), part["s"], {name: list(some) for name, some in adam["counts"].items()}
    if not q:
        q = {name: torch.zeros_like(values) for name, values in s.items()}
        counts = {name: [steps, updates, 0, pooled] for name, (steps, updates, _, pooled) in counts.items()}
    levels = part["levels"]
    for kind, found in (("q", q), ("s", s), ("levels", levels), ("counts", counts)):
        for name in sorted(set(momentum.names) ^ set(found)):
            where = "the state has no" if name in momentum.names else "this model does not have the"
            raise UsageError(f"{where} {kind} of parameter '{name}'", field=name)
    for name, mine in zip(momentum.names, momentum.s):
        for kind, values in (("q", q[name]), ("s", s[name])):
            if values.shape != mine.shape:
                raise UsageError(
                    f"parameter '{name}' has the shape {tuple(mine.shape)}; its {kind} in the state has "
                    f"{tuple(values.shape)}",
                    field=name,
                )
        if levels[name].numel() != 1:
            raise UsageError(f"the level of parameter '{name}' in the state is not one number", field=name)
    levels = {name: one.reshape(()) for name, one in levels.items()}
    return adam | {"q": q, "s": s, "levels": levels, "counts": counts}


def carried(
    old: "_core.ErrorFeedback", new: "_core.ErrorFeedback", dtype: str
) -> tuple["_core.ErrorFeedback", list[str]]:
    """For a model whose codecs change: a state like `new`, with the residuals of `old` where both have one, and with
    what codecs have learned where both have the same codec. Also the names of the tensors that had a residual and have
    none any more."""
    had = {(direction, name, first): count for direction, name, first, count in old.entries()}
    feedback = _core.ErrorFeedback(dtype, _core.Device())
    for direction, name, first, count in new.entries():
        feedback.add(direction, name, count, first)
        if had.pop((direction, name, first), None) == count:
            feedback.set_residual(direction, name, first, old.residual(direction, name, first))
    for name in new.extra():
        if old.extra().get(name):
            feedback.set_extra(name, old.extra()[name])
    return feedback, sorted({name for _, name, _ in had})


def log_dropped(names: list[str]) -> None:
    if names:
        _LOG.info("gradwire: the new codec keeps no residual of %s; theirs is dropped", ", ".join(names))


def read_checkpoint(path: str, key: str = "gradwire") -> State:
    """Reads the states of all ranks from a checkpoint that torch.distributed.checkpoint.save({..., key:
    hook.state_dict()}) has written. hook.load_state_dict accepts the result on any number of ranks. Not collective:
    every rank reads."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = dcp.FileSystemReader(path)  # type: ignore[attr-defined]
    metadata = reader.read_metadata()
    places = metadata.planner_data or {}
    flat: State = {}
    for name, what in metadata.state_dict_metadata.items():
        if places.get(name, (name,))[0] != key:
            continue
        is_tensor = isinstance(what, TensorStorageMetadata)
        flat[name] = torch.empty(what.size, dtype=what.properties.dtype) if is_tensor else None
    if not flat:
        raise UsageError(f"the checkpoint has nothing under '{key}'", field="key")
    with warnings.catch_warnings():  # torch warns that a load without process groups may be a mistake
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
    for one in (state, state.get("shards")):
        _add_ranks(one)
    return state


def _add_ranks(state: Any) -> None:
    """A checkpoint keeps no empty dicts, so ranks without residuals are missing in it."""
    world = state.get("world") if isinstance(state, dict) else None
    if isinstance(world, int) and 0 < world <= _MOST_RANKS and isinstance(state.setdefault("ranks", {}), dict):
        for rank in range(world):
            state["ranks"].setdefault(str(rank), {})
