# SPDX-License-Identifier: Apache-2.0
"""What all hooks have in common, and the checks of their options."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from datetime import timedelta
from typing import Any, Mapping, Sequence

import torch

from .. import _arrays
from .._errors import UsageError

DTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


def memory_order(like: torch.Tensor) -> list[int] | None:
    """Its dimensions as they stand in memory, the slowest first; None where there are gaps between its elements."""
    order = sorted(range(like.dim()), key=lambda d: (like.shape[d] == 1, -like.stride()[d]))
    return order if like.permute(order).is_contiguous() else None


class Hook(ABC):
    """What `compress` returns: the state of a model's compression. It is not constructed directly.

    step: how many steps were taken. codec: the rules that decide about gradients, in their full form.
    """

    step: int
    codec: str
    _removed = False
    _rate = -1.0  # below 0: not given
    _loss_scale: float | None = None
    _scaler: Any = None
    _scale_copy: "tuple[torch.Tensor, torch.cuda.Event] | None" = None

    def set_rate(self, rate: float) -> None:
        """Sets the learning rate of the following steps, for codecs that depend on it (fft:schedule=rate)."""
        if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not (math.isfinite(rate) and rate >= 0):
            raise UsageError(f"rate is {rate!r}; allowed is a finite number, 0 or more", field="rate")
        self._rate = float(rate)

    def set_loss_scale(self, scale: float | None) -> None:
        """Sets the factor that gradients are multiplied by, where there is no GradScaler to ask. None: ask it again."""
        self._loss_scale = limit(scale, "scale")

    def _scale(self) -> float:
        if self._loss_scale is not None:
            return self._loss_scale
        if self._scaler is None or not self._scaler.is_enabled():
            return 1.0
        if self._scale_copy is not None:
            value, event = self._scale_copy
            event.synchronize()  # it was recorded before the forward pass
            return float(value)
        return float(self._scaler.get_scale())

    def _prefetch_scale(self) -> None:
        """Before a forward pass. On a GPU the scale lies in device memory; reading it in the middle of the backward
        pass would make the host wait for everything that is enqueued."""
        scale = getattr(self._scaler, "_scale", None)
        if isinstance(scale, torch.Tensor) and scale.is_cuda:
            value, event = self._scale_copy or (torch.empty(1, pin_memory=True), torch.cuda.Event())
            value.copy_(scale.reshape(1), non_blocking=True)
            event.record()
            self._scale_copy = (value, event)

    def flat_stats(self, prefix: str = "gradwire") -> dict[str, float]:
        """The numbers of `stats` as one dict of floats, for wandb.log and the like: {"gradwire/ratio": 7.9, ...}. Of
        the parameters it has the errors that were measured, as "gradwire/error/NAME"; `exempt` is how many there are.
        """
        return {f"{prefix}/{name}" if prefix else name: float(value) for name, value in _scalars(self.stats())}

    def log(self, writer: Any, step: int | None = None, prefix: str = "gradwire") -> None:
        """Writes `flat_stats` to a TensorBoard SummaryWriter, or to anything with add_scalar."""
        for name, value in self.flat_stats(prefix).items():
            writer.add_scalar(name, value, self.step if step is None else step)

    @abstractmethod
    def set_codec(self, codec: Any) -> None:
        """Changes the codec, or the rules, from the next step on. All ranks must call it between the same two steps."""

    @abstractmethod
    def remove(self) -> None:
        """Ends the compression: from the next step on the model sends what it sent without the hook. All ranks must
        call it between the same two steps. The state can still be read."""

    @abstractmethod
    def residual_hash(self) -> int:
        """A hash of all residuals and of everything that codecs have learned, on this rank. Equal states have equal
        hashes."""

    @abstractmethod
    def stats(self) -> dict[str, Any]:
        """What was sent, what it cost and what was lost, on this rank."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must contain: residuals, what codecs have learned, the step."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continues from a state. Collective."""


def _scalars(stats: Mapping[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    """The numbers of `stats` by name. Of the parameters only measured errors: the rest does not change."""
    found: list[tuple[str, float]] = []
    for name, value in stats.items():
        if name == "parameters":
            found += [
                (f"error/{parameter}", one["error"]) for parameter, one in value.items() if one["error"] is not None
            ]
        elif isinstance(value, Mapping):
            found += _scalars(value, f"{prefix}{name}/")
        elif isinstance(value, list):
            found.append((prefix + name, len(value)))
        elif isinstance(value, (int, float)):
            found.append((prefix + name, value))
    return found


# Options. They are checked where they are given, on all ranks.


def residual_dtype(dtype: Any) -> torch.dtype:
    if dtype not in (torch.float32, torch.bfloat16):
        raise UsageError(f"residual is {dtype}; allowed are torch.float32 and torch.bfloat16", field="residual")
    return dtype  # type: ignore[no-any-return]


def steps(value: Any, field: str) -> int:
    try:
        return _arrays.whole(value, field, 2**63 - 1)
    except UsageError:
        raise UsageError(f"{field} is {value!r}; it is a number of steps, 0 or more", field=field) from None


def switch(value: Any, field: str) -> bool | None:
    if value is not None and not isinstance(value, bool):
        raise UsageError(f"{field} is {value!r}; allowed are True, False and None", field=field)
    return value


def scaler(value: Any) -> Any:
    if value is not None and not (hasattr(value, "get_scale") and hasattr(value, "is_enabled")):
        raise UsageError(f"scaler is of type {type(value).__name__}; allowed is a torch.amp.GradScaler", field="scaler")
    return value


def threads(value: Any) -> int:
    return _arrays.threads_for(0, 1 if value is None else value)


def limit(value: Any, field: str) -> float | None:
    """A positive, finite number, or None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (math.isfinite(value) and value > 0):
        raise UsageError(f"{field} is {value!r}; allowed is a positive number", field=field)
    return float(value)


def fraction(value: Any, field: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise UsageError(f"{field} is {value!r}; allowed is a number above 0, to 1", field=field)
    return float(value)


def valid_timeout(value: Any) -> timedelta | None:
    """The time-out, or None if it is not given or not valid; the ranks must meet before one of them can refuse it."""
    try:
        return timeout_of(value)
    except UsageError:
        return None


def timeout_of(value: Any) -> timedelta | None:
    if isinstance(value, timedelta):
        value = value.total_seconds()
    seconds = limit(value, "timeout")
    if seconds is not None and seconds > 1e9:
        raise UsageError(f"timeout is {value!r} seconds; allowed are at most 1e9", field="timeout")
    return None if seconds is None else timedelta(seconds=seconds)
