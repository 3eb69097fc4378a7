# SPDX-License-Identifier: Apache-2.0
"""What a plan consists of, and what identifies a message. Values are checked here, where a wrong one can still be
named."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Sequence, Union

from . import _arrays, _core
from ._errors import UsageError


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of a plan. A tuple in this order is accepted as well. For a chunk of a larger tensor, `first` is the
    index of its first element there. A `shape`, where given, stands in the message: its product is the count."""

    name: str
    count: int
    dtype: Any = "float32"
    codec: Union[str, _core.Codec] = "fp32"
    first: int = 0
    shape: Sequence[int] = ()


class Stamp(NamedTuple):
    """What identifies a message: `Plan.decode(expect=...)` refuses others."""

    step: int = 0
    stage: int = 0
    rank: int = 0
    world: int = 1


def codec_of(codec: Any) -> _core.Codec:
    if isinstance(codec, _core.Codec):
        return codec
    if not isinstance(codec, str):
        raise UsageError(
            f"codec is of type {type(codec).__name__}; allowed are a string such as 'qsgd:bits=4' and a gradwire.Codec",
            field="codec",
        )
    return _core.Codec(codec)


def stamp_of(seed: int, step: int, stage: int, rank: int, world: int) -> _core.Stamp:
    world = _arrays.whole(world, "world", 2**32 - 1)
    if world == 0:
        raise UsageError("world is 0; allowed is an integer from 1 on", field="world")
    return _core.Stamp(
        _arrays.whole(seed, "seed"),
        _arrays.whole(step, "step"),
        _arrays.whole(stage, "stage", 2**32 - 1),
        _arrays.whole(rank, "rank", world - 1),
        world,
    )


def core_spec(entry: Any) -> _core.TensorSpec:
    if isinstance(entry, _core.TensorSpec):
        return entry
    if not isinstance(entry, TensorSpec) and not (isinstance(entry, (list, tuple)) and 2 <= len(entry) <= 6):
        raise UsageError(
            f"a tensor of the plan is {entry!r}; expected (name, count, dtype, codec, first, shape)", field="tensors"
        )
    tensor = entry if isinstance(entry, TensorSpec) else TensorSpec(*entry)
    if not isinstance(tensor.name, str):
        raise UsageError(f"name is {tensor.name!r}; allowed is a string", field="name")
    return _core.TensorSpec(
        tensor.name,
        _arrays.whole(tensor.count, "count", 2**40),
        _arrays.dtype_name(tensor.dtype),
        codec_of(tensor.codec),
        _arrays.whole(tensor.first, "first", 2**40),
        shape=[_arrays.whole(extent, "shape", 2**40) for extent in tensor.shape],
    )
