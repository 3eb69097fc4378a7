# SPDX-License-Identifier: Apache-2.0
"""Codecs that are written in Python: a name, and a function that a user gives.

    def quantise(x):                     # float32, in the shape of the parameter
        scale = x.abs().mean()
        return scale * x.sign(), x.numel() + 32              # what arrives, and the size of the message in bits

    gw.register("mine", quantise)
    hook = gw.compress(ddp, "mine", feedback=True)

This module knows the names; _python_hook.py exchanges.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Callable

import torch

from .. import _core
from .._errors import UnsupportedError, UsageError

Quantise = Callable[[torch.Tensor], "tuple[torch.Tensor, int | float]"]
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


@dataclass(frozen=True)
class PythonCodec:
    name: str
    quantise: Quantise
    feedback: bool  # whether residuals are kept if compress is not told

    @property
    def described(self) -> str:
        """What ranks compare. Two functions cannot be compared, so their names have to do."""
        where = getattr(self.quantise, "__qualname__", type(self.quantise).__qualname__)
        return f"{self.name}, in Python: {where}"


_CODECS: dict[str, PythonCodec] = {}


def register(name: str, quantise: Quantise, *, feedback: bool = False) -> None:
    """Gives a function a name that `compress(ddp, name)` accepts as a codec. All ranks must register the same.

    quantise(x) is called for each parameter in each step, with this rank's gradient as float32, in the shape of the
    parameter and without the loss scale; with error feedback the residual was added to it. It returns what a receiver
    would decode, a tensor of the same shape, and the size of the message in bits. It may overwrite x.

    This is for trying ideas out, and it is slow: the function runs on the critical path of the backward pass, one
    parameter after the other. No message exists. What the function returns is averaged by the process group's own
    all-reduce, uncompressed, so the model trains as it would with the codec, but nothing is sent faster. `stats()`
    counts bytes as declared: every message once for every other rank, as with method="gather".

    feedback: whether residuals are kept where `compress` is not told by its own option.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UsageError(
            f"name is {name!r}; allowed are letters, digits, '-' and '_', and no digit in front", field="name"
        )
    if name in {info["codec"] for info in _core.codecs()}:
        raise UsageError(f"'{name}' is a codec of gradwire; choose another name", field="name")
    if name in _CODECS:
        raise UsageError(f"'{name}' is registered already; choose another name", field="name")
    if not callable(quantise):
        raise UsageError(
            f"quantise is of type {type(quantise).__name__}; expected is a function of a tensor", field="quantise"
        )
    if not isinstance(feedback, bool):
        raise UsageError(f"feedback is {feedback!r}; allowed are True and False", field="feedback")
    _CODECS[name] = PythonCodec(name, quantise, feedback)


def found(codec: Any) -> PythonCodec | None:
    """The codec of that name, if one was registered."""
    return _CODECS.get(codec) if isinstance(codec, str) else None


def refuse(codec: str, field: str) -> None:
    """Refuses a text with a registered name where a codec of the library is needed: in rules, for another direction, or
    for another kind of model."""
    for rule in codec.split(";"):
        spec = rule.rpartition("=")[2] if ":" not in rule else rule
        name = spec.partition(":")[0].rpartition("=")[2].strip()
        if name in _CODECS:
            raise UnsupportedError(
                f"'{name}' is a codec in Python, which stands alone and without parameters, as the codec of a "
                f"DistributedDataParallel: compress(ddp, '{name}'); it cannot be part of rules, nor be given to "
                "set_codec, to other options or for FSDP2",
                field=field,
            )
