# SPDX-License-Identifier: Apache-2.0
"""Residuals on another layout. Parameters are cut into shards, and each shard has replicas, which the hook reduces:
nodes of several ranks, and meshes of FSDP2. Position r * shards + s of a layout has shard s of replica r. For each
parameter the mean of the replicas' residuals, and the residuals of the owners, are put together from the old shards and
cut into the new ones. So the sum of the residuals, in units of the mean gradient, stays the same.
"""

from typing import TYPE_CHECKING, Any, Mapping, Protocol, Sequence

import torch

from .._errors import UsageError

if TYPE_CHECKING:
    from .. import _core

State = dict[str, Any]


class Whole(Protocol):
    """A parameter that is cut into shards."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def shard_dim(self) -> int: ...
    def cut(self, whole: torch.Tensor, shards: int) -> list[torch.Tensor]: ...


class Flat:
    """A parameter of DDP, which is cut into pieces of equally many elements, in memory order."""

    shard_dim = 0

    def __init__(self, name: str, count: int) -> None:
        self.name, self.shape = name, (count,)

    def cut(self, whole: torch.Tensor, shards: int) -> list[torch.Tensor]:
        parts = list(torch.chunk(whole.reshape(-1), shards))
        return parts + [parts[0].new_empty(0)] * (shards - len(parts))


def numbers(text: Any, world: int, field: str) -> tuple[int, int]:
    """(replicas, shards) of "2 x 3", in a state of so many ranks."""
    parts = str(text).split(" x ")
    if len(parts) != 2 or not all(part.isdecimal() and 0 < int(part) < 2**31 for part in parts):
        raise UsageError(
            f"the state has no {field} of replicas and shards: a hook for another kind of model has saved it",
            field=field,
        )
    replicas, shards = int(parts[0]), int(parts[1])
    if replicas * shards != world:
        raise UsageError(f"the state is damaged: its {field} is {text}, for {world} ranks", field=field)
    return replicas, shards


def moved(
    parameters: Sequence[Whole],
    ranks: Mapping[str, Any],
    then: tuple[int, int],
    now: tuple[int, int],
    shard: int,
    current: "_core.ErrorFeedback",
    owner_feedback: bool,
    field: str,
) -> State:
    """The residuals of this rank, which has shard `shard` of the layout `now` (replicas, shards), from those of all
    positions of the layout `then`. current: which residuals are needed. owner_feedback: whether the hook has any for
    the way back. field: what the layout is called."""
    replicas, shards = then
    missing = [str(rank) for rank in range(min(replicas * shards, len(ranks) + 8)) if str(rank) not in ranks]
    if missing:
        raise UsageError(
            f"the state was saved with {field} {replicas} x {shards}, and there are {now[0]} x {now[1]} now: the "
            f"states of all ranks are needed, and those of rank {', '.join(missing[:8])} are missing; pass a list of "
            "all states",
            field=field,
        )
    if not owner_feedback and any(ranks[rank]["down"] for rank in ranks):
        raise UsageError(
            "the state has residuals of the way back, which a hook with owner_feedback=False does not keep",
            field="owner_feedback",
        )
    named = {one.name: one for one in parameters}
    part: State = {"up": {}, "down": {}}
    cuts: dict[tuple[str, str], torch.Tensor] = {}
    for direction, name, first, count in current.entries():
        if (direction, name) not in cuts:
            old = together(named[name], ranks, direction, replicas, shards)
            cuts[direction, name] = named[name].cut(old, now[1])[shard].reshape(-1)
        key = name if direction == "up" else f"{name}@{first}"
        part[direction][key] = cuts[direction, name][first : first + count].clone()
    return part


def together(parameter: Whole, ranks: Mapping[str, Any], direction: str, replicas: int, shards: int) -> torch.Tensor:
    """The residual of a whole parameter, from all shards: the mean over the replicas on the way up, and on the way down
    what each owner has. Also s of Adam's momentum, as a mean over the replicas."""
    pieces = parameter.cut(torch.zeros(parameter.shape), shards)
    name, found = parameter.name, False
    for shard, piece in enumerate(pieces):
        flat = torch.zeros(piece.numel(), dtype=torch.float64)
        for replica in range(replicas):
            residuals = ranks[str(replica * shards + shard)][direction]
            for key, values in residuals.items():
                if direction != "down" and key == name:
                    flat += sized(values, flat.numel(), key).double().reshape(-1) / replicas
                    found = True
                elif direction == "down" and key.rpartition("@")[0] == name:
                    first = int(key.rpartition("@")[2])
                    if first + values.numel() > flat.numel():
                        raise UsageError(f"the state is damaged: '{key}' is longer than its shard", field=name)
                    flat[first : first + values.numel()] = values.double().reshape(-1)
                    found = True
        pieces[shard] = flat.float().reshape(piece.shape)
    if not found and direction != "down":
        what = "up residual" if direction == "up" else direction
        raise UsageError(f"the state has no {what} of parameter '{name}'", field=name)
    return torch.cat([piece for piece in pieces if piece.numel()] or pieces[:1], dim=parameter.shard_dim)


def sized(values: torch.Tensor, count: int, name: str) -> torch.Tensor:
    if values.numel() != count:
        raise UsageError(
            f"a shard of parameter '{name}' has {count} elements; what the state has for it has {values.numel()}",
            field=name,
        )
    return values
