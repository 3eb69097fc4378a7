# SPDX-License-Identifier: Apache-2.0
"""Ranks agree before data move. What must be alike on all of them is gathered once, when a model is set up; a rank
that cannot take part says so instead of staying away, so that the others fail at once and not by a time-out. These
errors come at the same place on all ranks: the process group stays usable.
"""

from typing import Callable, TypeVar

import torch.distributed as dist

from .._errors import MismatchError

Terms = list[tuple[str, str]]
T = TypeVar("T")


def agreed(group: dist.ProcessGroup, prepare: Callable[[], tuple[T, Terms]]) -> T:
    """What `prepare` made, if it succeeded everywhere and its terms are the same everywhere. Collective."""
    failure: Exception | None = None
    made: list[T] = []
    terms: Terms = []
    try:
        result, terms = prepare()
        made.append(result)
    except Exception as error:
        failure = error
    every: list[tuple[str | None, Terms]] = [(None, [])] * dist.get_world_size(group)
    dist.all_gather_object(every, (str(failure) if failure else None, terms), group=group)
    if failure:
        raise failure
    for rank, (words, _) in enumerate(every):
        if words is not None:
            raise MismatchError(f"rank {rank} cannot take part: {words}", field="rank", rank=rank)
    first = every[0][1]
    for rank, (_, theirs) in enumerate(every):
        for (field, here), (name, there) in zip(first, theirs):
            if (field, here) != (name, there):
                raise MismatchError(f"ranks disagree about {field}: rank 0 has '{here}', rank {rank} has '{there}'", field=field, rank=rank)
        if len(theirs) != len(first):
            raise MismatchError(f"ranks disagree about how many parameters there are: rank 0 and rank {rank} differ", field="parameters", rank=rank)
    return made[0]
