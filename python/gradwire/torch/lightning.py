# SPDX-License-Identifier: Apache-2.0
"""gradwire with Lightning, as `lightning` or as `pytorch_lightning`. docs/lightning.md is the guide.

    trainer = Trainer(strategy="ddp", callbacks=[gradwire.torch.lightning.Compress("optquant:bits=4")])
    trainer.fit(module, ckpt_path="last.ckpt")           # checkpoints hold what every rank has kept
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import torch.distributed as dist

from .. import _core
from .._errors import UsageError
from . import _hook, _rank_files
from ._compress import compress
from ._versions import framework, needs

_KEY = "gradwire"


def _callbacks() -> tuple[Any, ...]:
    """The class Callback of the package that the program uses. Two packages have it, and each Trainer wants its own."""
    packages = ("lightning.pytorch", "pytorch_lightning")
    used = [name for name in packages if name in sys.modules]
    used = used or [name for name in packages if importlib.util.find_spec(name.partition(".")[0]) is not None]
    modules = [framework((name,), __name__) for name in used or packages[:1]]
    for module in modules:
        needs(
            module.Callback,
            ("on_train_start", "on_train_batch_end", "on_save_checkpoint", "on_load_checkpoint"),
            module.__name__.partition(".")[0],
            "2.0",
        )
    return tuple(dict.fromkeys(module.Callback for module in modules))


_Base: Any = type("_Base", _callbacks(), {})


class Compress(_Base):  # type: ignore[misc]
    """A callback that compresses what the model sends, from the start of a training on.

    codec and options: as for `gradwire.torch.compress`. optimizer=True stands for the trainer's own Adam or AdamW;
    `clip` is then `gradient_clip_val`, if it is not given. log_every: every so many steps the statistics go to the
    trainer's loggers; 0: never. hook: the hook, from the start of the training on.

    The state of all ranks is in Lightning's own checkpoints, which rank 0 writes, and fit(ckpt_path=...) restores it.
    """

    def __init__(
        self, codec: "str | _core.Codec | _core.Rules | None", *, log_every: int = 0, **options: Any
    ) -> None:
        super().__init__()
        self.codec, self.options = codec, options
        self.log_every = _hook.steps(log_every, "log_every")
        self.hook: _hook.Hook | None = None
        self._loaded: list[Any] | None = None  # states of a checkpoint, until there is a hook that can use them
        self._group: dist.ProcessGroup | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        options = dict(self.options)
        if options.get("optimizer") is True:
            options["optimizer"] = _only(trainer.optimizers)
            clips_norm = str(getattr(trainer, "gradient_clip_algorithm", None) or "norm").lower().endswith("norm")
            if trainer.gradient_clip_val and clips_norm:
                options.setdefault("clip", float(trainer.gradient_clip_val))
        elif options.get("optimizer") is False:
            del options["optimizer"]
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            options.setdefault("scaler", scaler)
        needs(trainer.strategy, ("model",), "lightning", "2.0")
        self.hook = compress(trainer.strategy.model, self.codec, **options)
        # States are host memory, and NCCL would move them by way of the GPU.
        self._group = dist.group.WORLD if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
        if self._loaded is not None:
            states, self._loaded = self._loaded, None
            if states:
                self.hook.load_state_dict(states)
            else:
                _rank_files.warn_missing(str(trainer.ckpt_path))

    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        if self.hook is not None and self.log_every and trainer.global_step % self.log_every == 0:
            for logger in trainer.loggers:
                logger.log_metrics(self.hook.flat_stats(), step=trainer.global_step)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Lightning calls this on all ranks, and writes what rank 0 has."""
        if self.hook is None:
            return
        every: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(self.hook.state_dict(), every, dst=0, group=self._group)
        if every is not None:
            checkpoint[_KEY] = every

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """The model is not wrapped yet, so the states have to wait for the hook."""
        if trainer.state.fn != "fit":
            return
        states = checkpoint.pop(_KEY, [])
        if not isinstance(states, list):
            raise UsageError(
                f"the checkpoint has a {type(states).__name__} under '{_KEY}', not a list of states", field=_KEY
            )
        if dist.is_initialized() and len(states) == dist.get_world_size():
            states = [states[dist.get_rank()]]
        self._loaded = states


def _only(optimizers: list[Any]) -> Any:
    if len(optimizers) != 1:
        raise UsageError(
            f"the LightningModule has {len(optimizers)} optimizers; optimizer=True is for one that owns all parameters",
            field="optimizer",
        )
    return optimizers[0]
