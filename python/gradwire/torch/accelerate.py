# SPDX-License-Identifier: Apache-2.0
"""gradwire with Hugging Face accelerate. docs/accelerate.md is the guide.

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    hook = gradwire.torch.accelerate.attach(accelerator, model, "optquant:bits=4")

    accelerator.save_state("checkpoint")                 # holds what every rank has kept
    accelerator.load_state("checkpoint")
"""

from __future__ import annotations

import os
import weakref
from typing import Any

from .. import _core
from . import _rank_files
from ._compress import compress
from ._hook import Hook
from ._versions import framework, needs

_NEEDED = ("register_save_state_pre_hook", "register_load_state_pre_hook")
_HOOKS: "weakref.WeakKeyDictionary[Any, list[Hook]]" = weakref.WeakKeyDictionary()  # of each accelerator


def attach(
    accelerator: Any,
    model: Any,
    codec: "str | _core.Codec | _core.Rules | None",
    optimizer: Any = None,
    **options: Any,
) -> Hook:
    """Compresses what a prepared model sends, and puts the state of the hook into accelerate's checkpoints: every rank
    writes its own file into the folder of `save_state`, and `load_state` reads it. All ranks must call it, after
    `prepare` and before `load_state`; for several models in the same order whenever the training is resumed.

    model: what `accelerator.prepare` has returned for it. optimizer: the Adam or AdamW that trains it, as `prepare` has
    returned it. The other options are those of `gradwire.torch.compress`; with mixed_precision="fp16" `scaler` is that
    of the accelerator.
    """
    framework(("accelerate",), __name__)
    needs(accelerator, _NEEDED, "accelerate", "1.0")
    scaler = getattr(accelerator, "scaler", None)
    if scaler is not None:
        options.setdefault("scaler", scaler)
    hook = compress(model, codec, optimizer=optimizer, **options)
    if accelerator not in _HOOKS:
        _save_with(accelerator)
    _HOOKS[accelerator].append(hook)
    return hook


def _save_with(accelerator: Any) -> None:
    """Once for an accelerator: its checkpoints contain the states of all hooks that are not removed by then."""
    hooks = _HOOKS[accelerator] = []

    def present() -> list[Hook]:
        hooks[:] = [hook for hook in hooks if not hook._removed]
        return hooks

    def save(models: list[Any], weights: list[Any], folder: str | os.PathLike[str]) -> None:
        if present():
            _rank_files.save(hooks, folder)

    def load(models: list[Any], folder: str | os.PathLike[str]) -> None:
        if present():
            _rank_files.load(hooks, folder)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
