# SPDX-License-Identifier: Apache-2.0
"""Ranks agree before data moves. What must be equal on all ranks is gathered once, when a model is set up. A rank that
cannot take part says so instead of staying away, so the others fail at once and not by a time-out. These errors are
raised at the same place on all ranks, so the process group stays usable.
"""

from typing import Callable, TypeVar

import torch.distributed as dist

from .._errors import MismatchError

Handshake = list[tuple[str, str]]  # (field, value), the same on all ranks
T = TypeVar("T")


def agreed(group: dist.ProcessGroup, prepare: Callable[[], tuple[T, Handshake]]) -> T:
    """The result of `prepare`, if it succeeds on every rank and its handshake is the same on every rank. Collective."""
    failure: Exception | None = None
    made: list[T] = []
    handshake: Handshake = []
    try:
        result, handshake = prepare()
        made.append(result)
    except Exception as error:
        failure = error
    every: list[tuple[str | None, Handshake]] = [(None, [])] * dist.get_world_size(group)
    dist.all_gather_object(every, (str(failure) if failure else None, handshake), group=group)
    if failure:
        raise failure
    for rank, (message, _) in enumerate(every):
        if message is not None:
            raise MismatchError(f"rank {rank} cannot take part: {message}", field="rank", rank=rank)
    first = every[0][1]
    for rank, (_, theirs) in enumerate(every):
        for (field, here), (name, there) in zip(first, theirs):
            if (field, here) != (name, there):
                raise MismatchError(
                    f"ranks disagree about {field}: rank 0 has '{here}', rank {rank} has '{there}'",
                    field=field,
                    rank=rank,
                )
        if len(theirs) != len(first):
            raise MismatchError(
                f"ranks disagree about the number of parameters: rank 0 and rank {rank} differ",
                field="parameters",
                rank=rank,
            )
    return made[0]
