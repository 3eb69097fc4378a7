# SPDX-License-Identifier: Apache-2.0
"""What frameworks put around a model and around an optimizer, taken off again.

Most wrappers of models (torch.compile's OptimizedModule, Fabric's module, the result of accelerate's prepare) are
modules with the DistributedDataParallel inside, where `compress` finds it. A LightningModule is the other way round: it
is inside, and its trainer knows the outermost module. Wrappers of optimizers are recognised by their names, because the
frameworks need not be installed; a wrapper that is not known here may change what a step does.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn

from .._errors import UnsupportedError, UsageError

_OPTIMIZERS = {
    "AcceleratedOptimizer": ("accelerate",),
    "LightningOptimizer": ("lightning", "pytorch_lightning"),
    "_FabricOptimizer": ("lightning", "lightning_fabric"),
}
_FRAMEWORKS = ("accelerate", "lightning", "pytorch_lightning", "lightning_fabric", "transformers")


def _is_a(value: object, name: str, packages: tuple[str, ...]) -> bool:
    """Whether `value` is of a class of that name, of one of these packages, or of one derived from it."""
    return any(
        kind.__name__ == name and kind.__module__.partition(".")[0] in packages for kind in type(value).__mro__
    )


def optimizer_inside(optimizer: Any) -> Any:
    """The torch optimizer that a framework has wrapped, or what was given."""
    for name, packages in _OPTIMIZERS.items():
        if not _is_a(optimizer, name, packages):
            continue
        if getattr(optimizer, "scaler", None) is not None:  # accelerate with fp16
            raise UnsupportedError(
                "accelerate puts a step of its own into the optimizer with mixed_precision='fp16', which cannot be "
                "replaced by one that exchanges momentum; use 'bf16', or a codec without error feedback and no "
                "optimizer=",
                field="optimizer",
            )
        inside = getattr(optimizer, "optimizer", None) or getattr(optimizer, "_optimizer", None)
        if not isinstance(inside, torch.optim.Optimizer):
            raise UnsupportedError(
                f"optimizer is a {type(optimizer).__name__} of {packages[0]} without the optimizer inside, which this "
                f"version of gradwire looks for; pass the torch optimizer, or install another {packages[0]}",
                field="optimizer",
            )
        return optimizer_inside(inside)
    return optimizer


def model_around(model: nn.Module) -> nn.Module | None:
    """The outermost module of a LightningModule in training, which its trainer's strategy has; None: there is none."""
    if not _is_a(model, "LightningModule", ("lightning", "pytorch_lightning")):
        return None
    strategy = getattr(getattr(model, "_trainer", None), "strategy", None)
    outer = getattr(strategy, "model", None)
    if isinstance(outer, nn.Module) and outer is not model:
        return outer
    if strategy is None:
        raise UsageError(
            f"model is the LightningModule {type(model).__name__}, which no Trainer has wrapped yet; give the Trainer "
            "the callback gradwire.torch.lightning.Compress, or call compress in on_train_start",
            field="model",
        )
    raise UsageError(
        f"model is the LightningModule {type(model).__name__} in the strategy {type(strategy).__name__}, which has "
        "wrapped it in no DistributedDataParallel and sharded none of its modules; use Trainer(strategy='ddp')",
        field="model",
    )


def refuse_no_module(model: object) -> NoReturn:
    """Something that is no module: says what it is, and where the module would be."""
    where = {
        "Accelerator": "pass what its prepare() has returned for the model, or call gradwire.torch.accelerate.attach",
        "AcceleratedOptimizer": "the model comes first, and the optimizer is the option optimizer=",
        "Fabric": "pass what its setup() has returned for the model",
        "Trainer": "see docs/lightning.md and docs/transformers.md for what a Trainer needs",
    }
    for name, what in where.items():
        if _is_a(model, name, _FRAMEWORKS):
            raise UsageError(f"model is a {type(model).__name__}; {what}", field="model")
    if isinstance(model, torch.optim.Optimizer):
        raise UsageError(
            f"model is the optimizer {type(model).__name__}; the model comes first, and the optimizer is the option "
            "optimizer=",
            field="model",
        )
    raise UsageError(
        f"model is of type {type(model).__name__}; expected a DistributedDataParallel or a module sharded by "
        "fully_shard or replicated by replicate",
        field="model",
    )


def described(model: nn.Module) -> str:
    """The type of a module, with those that it is wrapped in."""
    names = [type(model).__name__]
    while True:
        inside = getattr(model, "_orig_mod", None) or getattr(model, "_forward_module", None)
        if not isinstance(inside, nn.Module) or inside is model:
            return " around a ".join(names)
        model = inside
        names.append(type(model).__name__)
