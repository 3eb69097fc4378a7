# SPDX-License-Identifier: Apache-2.0
"""What hooks read from FSDP2 itself: its groups of parameters, and which of them are in a buffer that it sends. These
attributes are private to torch, so each of them is looked for, and a torch without it is refused by name.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from .._errors import UnsupportedError
from ._parameters import without_wrappers


def door(owner: Any, name: str) -> Any:
    if not hasattr(owner, name):
        raise UnsupportedError(
            f"torch {torch.__version__} has no {type(owner).__name__}.{name}, which compressing FSDP2 needs; "
            "torch 2.13 has it",
            field="torch",
        )
    return getattr(owner, name)


def param_groups(module: Any) -> list[Any]:
    """Of a module that `fully_shard` or `replicate` was called on. What they send goes in one buffer each. Older
    torches have one for each such module, or none."""
    state = door(module, "_get_fsdp_state")()
    if not hasattr(state, "_fsdp_param_groups") and hasattr(state, "_fsdp_param_group"):
        return [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    return list(door(state, "_fsdp_param_groups"))


def module_names(model: torch.nn.Module) -> dict[int, str]:
    return {id(module): without_wrappers(name) for name, module in model.named_modules()}


def name_of(theirs: Any, names: dict[int, str]) -> str:
    """Of one of FSDP's parameters, as in the model's named_parameters()."""
    info = door(theirs, "_module_info")
    prefix = names.get(id(info.module), "")
    return f"{prefix}.{info.param_name}" if prefix else str(info.param_name)


def locals_of_caller(function: str, *variables: str) -> dict[str, Any]:
    """What a function of FSDP knows that has made a buffer, and is one of our callers: the parameters that are in it.
    FSDP leaves parameters without a gradient out, and sizes alone do not say which."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != function:
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None or any(name not in frame.f_locals for name in variables):
        raise UnsupportedError(
            f"torch {torch.__version__} has no {function}({', '.join(variables)}, ...) that makes the buffers of "
            "FSDP2, which compressing them needs; torch 2.13 has it",
            field="torch",
        )
    return frame.f_locals


def refuse_layout(found: int, known: int) -> None:
    if found != known:
        raise UnsupportedError(
            f"torch {torch.__version__} sends {found} elements for parameters of {known}: its buffers are laid out "
            "in a way that is not known here",
            field="torch",
        )
