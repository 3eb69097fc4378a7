# SPDX-License-Identifier: Apache-2.0
"""Ranks agree before data moves. What must be equal on all ranks is gathered once, when a model is set up. A rank that
cannot take part says so instead of staying away, so the others fail at once and not by a time-out. These errors are
raised at the same place on all ranks, so the process group stays usable.

A rank that does not make the call at all cannot say so. Ranks therefore meet in the store of the process group before
they use the group itself: every rank that waits there can see who is missing, and gives up after the time-out with that
rank's number. No collective was started by then, so this leaves the process group usable too.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Callable, Generic, Sequence, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from .._errors import EngineError, MismatchError

Handshake = list[tuple[str, str]]  # (field, value), the same on all ranks
T = TypeVar("T")


def agreed(
    group: dist.ProcessGroup,
    call: str,
    prepare: Callable[[], tuple[T, Handshake]],
    timeout: timedelta | None = None,
) -> T:
    """The result of `prepare`, if it succeeds on every rank and its handshake is the same on every rank. Collective.

    call: what the user has called on this rank. timeout: how long to wait for ranks that have not called it; None: as
    long as the process group waits.
    """
    outcome = _outcome(prepare, dist.get_rank(group))
    meet(group, call, timeout)
    return _compared(group, call, outcome)


def agreed_on_mesh(
    groups: Sequence[dist.ProcessGroup],
    members: Sequence[int],
    call: str,
    prepare: Callable[[], tuple[T, Handshake]],
    timeout: timedelta | None = None,
    first_only: Callable[[T], Handshake] | None = None,
) -> T:
    """The same for the ranks of a mesh, with one process group of this rank for every dimension. All ranks of the mesh
    meet first. Then they compare along one dimension after the other, and what was found along the first is told along
    the second, so every rank learns of every other. members: the ranks of the mesh; errors name these. first_only: what
    is compared along the first dimension only.
    """
    outcome = _outcome(prepare, dist.get_rank())
    name = "mesh/" + ",".join(map(str, members))
    _meet(name, list(members), list(members).index(dist.get_rank()), call, timeout or _patience(groups[0]))
    for number, group in enumerate(groups):
        before, ranks = outcome, dist.get_process_group_ranks(group)
        more = first_only(before.made[0]) if first_only is not None and number == 0 and before.made else []
        outcome = _outcome(lambda: (_compared(group, call, before, ranks, more), before.handshake), None)
    if outcome.failure is not None:
        raise outcome.failure
    return outcome.made[0]


class _Outcome(Generic[T]):
    """What a rank has prepared, or why it could not."""

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self.told: str | None = None  # what the other ranks raise
        self.made: list[T] = []
        self.handshake: Handshake = []


def _outcome(prepare: Callable[[], tuple[T, Handshake]], rank: int | None) -> _Outcome[T]:
    """rank: this one, if a failure is its own; None if other ranks were compared with, whose words are passed on."""
    outcome: _Outcome[T] = _Outcome()
    try:
        made, outcome.handshake = prepare()
        outcome.made.append(made)
    except Exception as error:
        outcome.failure = error
        outcome.told = getattr(error, "_told", None) or str(error)
        if rank is not None:
            outcome.told = f"rank {rank} cannot take part: {error}"
            error._told = outcome.told  # type: ignore[attr-defined]
    return outcome


def _compared(
    group: dist.ProcessGroup,
    call: str,
    mine: _Outcome[T],
    names: Sequence[int] | None = None,
    more: Sequence[tuple[str, str]] = (),
) -> T:
    """names: how errors call the ranks of the group. more: what is compared beside the handshake."""
    every: list[tuple[str | None, Handshake]] = [(None, [])] * dist.get_world_size(group)
    names = names or range(len(every))
    dist.all_gather_object(every, (mine.told, [("the call", call), *mine.handshake, *more]), group=group)
    if mine.failure:
        raise mine.failure
    for rank, (message, _) in zip(names, every):
        if message is not None:
            raise MismatchError(message, field="rank", rank=rank)
    first = every[0][1]
    for rank, (_, theirs) in zip(names, every):
        for (field, here), (name, there) in zip(first, theirs):
            if (field, here) != (name, there):
                raise MismatchError(
                    f"ranks disagree about {field}: rank {names[0]} has '{here}', rank {rank} has '{there}'",
                    field=field,
                    rank=rank,
                )
        if len(theirs) != len(first):
            raise MismatchError(
                f"ranks disagree about the number of parameters: rank {names[0]} and rank {rank} differ",
                field="parameters",
                rank=rank,
            )
    return mine.made[0]


def timeout_of_group(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """The time-out of a process group, or None where torch does not tell."""
    try:
        return group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):
        return None


def _patience(group: dist.ProcessGroup) -> timedelta:
    for device in ("cpu", "cuda"):
        found = timeout_of_group(group, torch.device(device))
        if found is not None:
            return found
    return default_pg_timeout


def meet(group: dist.ProcessGroup, call: str, timeout: timedelta | None = None) -> None:
    """Returns when all ranks of the group are here. Raises an EngineError with the missing ranks after the time-out.

    The store has, for each rank, how many meetings it has come to, and for each meeting, who came and how it ended. The
    last rank to come writes "all are here", a rank whose time-out has passed writes how long it has waited, and the
    first of these words stays, so either all ranks go on or none. A rank that comes to a meeting that was given up goes
    to the next one, where the others are if they have tried again.
    """
    world = dist.get_world_size(group)
    _meet(group.group_name, list(range(world)), dist.get_rank(group), call, timeout or _patience(group))


def _meet(name: str, names: list[int], rank: int, call: str, timeout: timedelta) -> None:
    """names: how errors call the ranks that meet. rank: the position of this one."""
    world = len(names)
    if world == 1:
        return
    patience = timeout.total_seconds()
    default = dist.distributed_c10d._get_default_store()  # type: ignore[attr-defined]
    store = dist.PrefixStore(f"gradwire/meet/{name}", default)
    deadline = time.monotonic() + patience
    while True:
        meeting = str(store.add(f"calls of {rank}", 1))
        if store.check([f"{meeting}/end"]):
            continue  # given up before this rank came
        store.set(f"{meeting}/{rank}", call)
        if store.add(f"{meeting}/count", 1) == world:
            store.compare_set(f"{meeting}/end", "", "all are here")
        pause = 0.001
        while not store.check([f"{meeting}/end"]):
            if time.monotonic() > deadline:
                store.compare_set(f"{meeting}/end", "", f"{patience:g}")
            else:
                time.sleep(pause)
                pause = min(2 * pause, 0.05)
        end = store.get(f"{meeting}/end").decode()
        if end != "all are here":
            missing = [names[other] for other in range(world) if not store.check([f"{meeting}/{other}"])]
            raise _absent(call, missing, end)
        return _clean(store, int(meeting) - 1, world, rank)


def _clean(store: dist.Store, meeting: int, world: int, rank: int) -> None:
    """Rank 0 deletes the meeting before this one: everybody has left that."""
    if rank != 0 or meeting < 1:
        return
    try:
        for key in ["count", "end", *map(str, range(world))]:
            store.delete_key(f"{meeting}/{key}")
    except (RuntimeError, NotImplementedError):
        pass  # not every store can delete


def _absent(call: str, missing: list[int], seconds: str) -> EngineError:
    several = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
    who = f"rank{'s' * (len(missing) > 1)} {several}" if missing else "a rank"  # it came in the last moment
    return EngineError(
        f"{call} is collective; {who} did not call it within {seconds} s",
        field="rank",
        rank=missing[0] if missing else None,
    )
