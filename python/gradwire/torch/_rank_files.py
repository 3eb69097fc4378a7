# SPDX-License-Identifier: Apache-2.0
"""The states of hooks in the checkpoint of a framework. Every rank has residuals of its own, and most frameworks write
on rank 0 only. Where all ranks know the folder of the checkpoint, each writes a file into it:

    gradwire_0.pt, gradwire_1.pt, ...    {"world": 2, "rank": 1, "states": [hook.state_dict() for each model]}
"""

from __future__ import annotations

import os
import pickle
import warnings
from pathlib import Path
from typing import Any, Sequence

import torch
import torch.distributed as dist

from .._errors import FileError, UsageError
from .._whole_file import replacing
from ._agree import Handshake, agreed
from ._hook import Hook


def _path(folder: str | os.PathLike[str], rank: int) -> Path:
    return Path(folder) / f"gradwire_{rank}.pt"


def save(hooks: Sequence[Hook], folder: str | os.PathLike[str]) -> None:
    """Writes this rank's file, as a whole or not at all. All ranks call it."""
    rank = dist.get_rank()
    path = _path(folder, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    states = [hook.state_dict() for hook in hooks]
    with replacing(path) as file:
        torch.save({"world": dist.get_world_size(), "rank": rank, "states": states}, file)


def load(hooks: Sequence[Hook], folder: str | os.PathLike[str]) -> None:
    """Continues from the files of a folder. If it has none, residuals stay as they are, and a warning says so.
    Collective."""
    group = dist.group.WORLD
    assert group is not None

    def prepare() -> tuple[list[list[Any]], Handshake]:
        states = _read(folder)
        if states and len(states[0]) != len(hooks):
            raise UsageError(
                f"the checkpoint {folder} has states of gradwire for {len(states[0])} models, and there are "
                f"{len(hooks)} compressed models now",
                field="checkpoint",
            )
        return states, [("a state of gradwire in the checkpoint", "yes" if states else "no")]

    states = agreed(group, "load_state", prepare)
    if not states:
        warn_missing(str(folder))
        return
    for hook, *parts in zip(hooks, *states):
        hook.load_state_dict(parts)


def warn_missing(checkpoint: str) -> None:
    warnings.warn(
        f"gradwire: the checkpoint {checkpoint} has no state of gradwire, so residuals begin at zero and codecs learn "
        "anew",
        stacklevel=3,
    )


def _read(folder: str | os.PathLike[str]) -> list[list[Any]]:
    """What this rank has saved, or what all ranks have saved if their number has changed, or nothing. Rank 0 writes in
    every save, so its file knows of how many ranks the last one was; on a machine that does not have it, this rank's
    own does."""
    rank, world = dist.get_rank(), dist.get_world_size()
    first = next((one for one in (0, rank) if _path(folder, one).exists()), None)
    if first is None:
        return []
    head = _file(folder, first)
    if head["world"] != world:
        return [_file(folder, other)["states"] for other in range(head["world"])]
    return [(head if first == rank else _file(folder, rank))["states"]]


def _file(folder: str | os.PathLike[str], rank: int) -> dict[str, Any]:
    path = _path(folder, rank)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise FileError(f"{path} is missing; the checkpoint needs the files of all ranks", field="checkpoint") from None
    except (RuntimeError, EOFError, OSError, KeyError, ValueError, pickle.UnpicklingError) as error:
        raise FileError(f"{path} cannot be read: {error}", field="checkpoint") from None
    fields = {"rank": int, "world": int, "states": list}
    whole = isinstance(content, dict) and all(isinstance(content.get(name), kind) for name, kind in fields.items())
    if not whole or content["rank"] != rank:
        raise UsageError(f"{path} is not what gradwire has written for rank {rank}", field="checkpoint")
    return dict(content)
