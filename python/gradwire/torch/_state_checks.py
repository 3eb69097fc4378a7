# SPDX-License-Identifier: Apache-2.0
"""Whatever a file may contain, only a state that can be used leaves here: the states of several ranks belong together,
and what stands in them has the types, the sizes and the values that _state.py says. What is refused is named.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Callable, Mapping, Sequence, TypeVar

import torch

from .._errors import Error, UsageError

if TYPE_CHECKING:
    from .. import _core

FORMAT = 1
State = dict[str, Any]
T = TypeVar("T")


def merged(state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> State:
    """One state from those of several ranks. Whatever a file may contain, only a state that can be used leaves here."""
    states = [state] if isinstance(state, Mapping) else list(state) if isinstance(state, (list, tuple)) else []
    if not states or not all(isinstance(one, Mapping) and isinstance(one.get("ranks"), Mapping) for one in states):
        raise UsageError("state is not a result of Hook.state_dict(): it has no 'ranks'", field="state")
    merged = dict(states[0])
    for one in states:
        for field in ("format", "step", "world", "codec", "nodes"):
            if one.get(field) != merged.get(field):
                raise UsageError(
                    f"the states do not belong together: {field} is {merged.get(field)!r} in one and "
                    f"{one.get(field)!r} in another",
                    field=field,
                )
    if merged.get("format") != FORMAT:
        raise UsageError(f"state has format {merged.get('format')!r}; this version reads {FORMAT}", field="format")
    merged["step"] = _number(merged.get("step"), "step", 0)
    merged["world"] = _number(merged.get("world"), "world", 1)
    merged["ranks"] = {str(rank): _residuals(rank, part) for one in states for rank, part in one["ranks"].items()}
    merged["learned"], merged["exempt"] = merged.get("learned", {}), merged.get("exempt", [])
    if not isinstance(merged["learned"], Mapping) or not isinstance(merged["exempt"], (list, tuple)):
        raise UsageError("the state is damaged: 'learned' is not a dict, or 'exempt' is not a list", field="learned")
    if "adam" in merged:
        merged["adam"] = _adam_counters(merged["adam"])
    for name, values in merged["learned"].items():
        if not isinstance(name, str):
            raise UsageError(f"the state is damaged: {name!r} is not the name of a codec", field="learned")
        check_tensor(values, f"what codecs have learned for '{name}'", name)
        if values.dtype != torch.uint8 or values.dim() != 1:
            raise UsageError(f"the state is damaged: what codecs have learned for '{name}' is not bytes", field=name)
    return merged


def _adam_counters(adam: Any) -> State:
    if not isinstance(adam, Mapping) or not isinstance(adam.get("counts"), Mapping):
        raise UsageError("the state is damaged: 'adam' has no counts by parameter name", field="adam")
    counts = {}
    for name, values in adam["counts"].items():
        check_tensor(values, f"the counts of parameter '{name}'", str(name))
        if values.dtype != torch.int64 or values.shape != (4,) or bool((values < 0).any()):
            raise UsageError(
                f"the state is damaged: the counts of parameter '{name}' are not 4 numbers, 0 or more", field=str(name)
            )
        counts[name] = [int(value) for value in values]
    clip = adam.get("clip")
    if isinstance(clip, bool) or not isinstance(clip, (int, float)) or not (math.isfinite(clip) and clip >= 0):
        raise UsageError(f"clip is {clip!r} in the state; allowed is a finite number, 0 or more", field="clip")
    return {
        "clip": float(clip),
        "taken": _number(adam.get("taken"), "taken", 0),
        "next_pool": _number(adam.get("next_pool"), "next_pool", 0),
        "counts": counts,
    }


def _number(value: Any, field: str, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**63:
        raise UsageError(
            f"{field} is {value!r} in the state; allowed is an integer from {least} to 2**63 - 1", field=field
        )
    return value


def check_tensor(values: Any, what: str, name: str) -> None:
    dense = isinstance(values, torch.Tensor) and values.layout == torch.strided
    if not dense or values.is_meta or values.is_quantized:
        raise UsageError(f"the state is damaged: {what} is not a dense tensor", field=name)


def _residuals(rank: Any, part: Any) -> State:
    """The residuals of one rank. A NaN in a residual would make every later step invalid, on all ranks, so it is
    refused here."""
    # A checkpoint keeps no empty dicts, so either direction may be missing.
    checked: State = {"up": {}, "down": {}, "q": {}, "s": {}, "levels": {}}
    for direction in checked:
        if not isinstance(part, Mapping) or not isinstance(part.get(direction, {}), Mapping):
            raise UsageError(f"the state is damaged: rank {rank} has no residuals by parameter name", field="ranks")
        checked[direction].update(part.get(direction, {}))
    for direction, residuals in checked.items():
        for name, values in residuals.items():
            if not isinstance(name, str) or (direction == "down" and not name.rpartition("@")[2].isdecimal()):
                raise UsageError(
                    f"the state is damaged: '{name}' is not the name of a {direction} residual", field="ranks"
                )
            what = f"{direction} of" if direction in ("q", "s", "levels") else f"the {direction} residual of"
            check_tensor(values, f"{what} parameter '{name}' of rank {rank}", name)
            if not values.is_floating_point() or not bool(torch.isfinite(values).all()):
                raise UsageError(
                    f"{what} parameter '{name}' of rank {rank} is not finite: it contains a NaN or an Inf",
                    field=name,
                )
    return checked


def check_part(part: Mapping[str, Any], expected: "_core.ErrorFeedback") -> None:
    """Every residual that this model has, and no other."""
    wanted = {
        (direction, name if direction == "up" else f"{name}@{first}"): count
        for direction, name, first, count in expected.entries()
    }
    found = {
        (direction, key): values.numel() for direction in ("up", "down") for key, values in part[direction].items()
    }
    for direction, key in sorted(wanted.keys() | found.keys()):
        if (direction, key) not in found:
            raise UsageError(f"the state has no {direction} residual of parameter '{key}'", field=key)
        if (direction, key) not in wanted:
            raise UsageError(
                f"the state has a {direction} residual of parameter '{key}', which this model does not have", field=key
            )
        if found[direction, key] != wanted[direction, key]:
            raise UsageError(
                f"parameter '{key}' has {wanted[direction, key]} elements; its {direction} residual in the state has "
                f"{found[direction, key]}",
                field=key,
            )


def refusing(prepare: Callable[[], T]) -> Callable[[], T]:
    """A file can hold anything: what no check foresees is refused as damage too, not raised as an error of Python."""

    def checked() -> T:
        try:
            return prepare()
        except Error:
            raise
        except Exception as error:
            raise UsageError(f"the state is damaged: {type(error).__name__}: {error}", field="state") from error

    return checked
