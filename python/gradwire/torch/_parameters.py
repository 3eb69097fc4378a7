# SPDX-License-Identifier: Apache-2.0
"""The parameters that DDP reduces: their names, and what is refused of them."""

from __future__ import annotations

from typing import Mapping, Sequence

import torch
from torch.nn.parallel import DistributedDataParallel

from .. import _core
from .._errors import UnsupportedError, UsageError
from ._hook import DTYPES, memory_order

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")  # of torch.compile and of activation checkpointing


def without_wrappers(name: str) -> str:
    """As a model without them names it, and as its state_dict() does."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def named_parameters(
    ddp: DistributedDataParallel, names: Sequence[str] | None = None
) -> dict[str, torch.nn.Parameter]:
    """The parameters that DDP reduces, by the names of the model itself, whatever it is wrapped in."""
    named: dict[str, torch.nn.Parameter] = {}
    for place, (name, parameter) in enumerate(ddp.module.named_parameters()):
        if not parameter.requires_grad or name in ddp.parameters_to_ignore:
            continue
        name = without_wrappers(names[place] if names is not None else name)
        if parameter.dtype not in DTYPES:
            raise UnsupportedError(
                f"parameter '{name}' is {str(parameter.dtype)[6:]}; allowed are float32, float16 and bfloat16",
                field="dtype",
            )
        named[name] = parameter
    if not named:
        raise UsageError("the model has no parameter that requires a gradient", field="model")
    return named


def one_device(parameters: Mapping[str, torch.Tensor]) -> torch.device:
    devices = {name: parameter.device for name, parameter in parameters.items()}
    first = next(iter(devices.values()))
    for name, device in devices.items():
        if device != first:
            raise UnsupportedError(
                f"parameter '{name}' is on {device}, others are on {first}; a model must be on one device",
                field="device",
            )
    if first.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"the model is on {first}; allowed are cpu and cuda", field="device")
    if first.type == "cuda" and not _core.cuda_devices():
        raise UnsupportedError(
            f"the model is on {first}, but the CUDA part of gradwire: {_core.cuda_description()}", field="device"
        )
    return first


def like_parameter(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """A gradient of a bucket element by element as its parameter. It stands in the memory order of that, and DDP shows
    it as contiguous."""
    if parameter.is_contiguous() or memory_order(parameter) is None:
        return gradient
    return gradient.as_strided(parameter.shape, parameter.stride(), gradient.storage_offset())
