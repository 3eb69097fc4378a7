# SPDX-License-Identifier: Apache-2.0
"""gradwire with the Trainer of Hugging Face transformers. docs/transformers.md is the guide.

    class MyTrainer(gradwire.torch.transformers.CompressMixin, transformers.Trainer):
        codec = "optquant:bits=4"

    MyTrainer(model=model, args=args, train_dataset=data).train(resume_from_checkpoint=True)
"""

from __future__ import annotations

import os
import weakref
from typing import Any, Mapping

from .. import _core
from .._errors import UsageError
from . import _rank_files
from ._compress import compress
from ._hook import Hook
from ._versions import framework, needs

_TRANSFORMERS = framework(("transformers",), __name__)
needs(_TRANSFORMERS.TrainerCallback, ("on_save",), "transformers", "4.40")


class _Save(_TRANSFORMERS.TrainerCallback):  # type: ignore[misc, name-defined]
    """transformers calls this on every rank after a checkpoint."""

    def __init__(self, trainer: "CompressMixin") -> None:
        self._trainer = trainer

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        hook = self._trainer.hook
        if hook is not None and not args.save_only_model:
            _rank_files.save([hook], os.path.join(args.output_dir, f"checkpoint-{state.global_step}"))


class CompressMixin:
    """For a subclass of transformers.Trainer, to the left of it: `class MyTrainer(CompressMixin, Trainer)`.

    codec: as for `gradwire.torch.compress`. codec_options: its options. "optimizer": True stands for the Trainer's own
    Adam or AdamW; `clip` is then `max_grad_norm`, if it is not given. Both can be given to the constructor as well.
    hook: the hook, from the first training step on.

    Every rank writes its state into each checkpoint, as gradwire_RANK.pt, and train(resume_from_checkpoint=...) reads
    it.
    """

    codec: "str | _core.Codec | _core.Rules | None" = None
    codec_options: Mapping[str, Any] = {}
    hook: Hook | None = None
    _resumed: str | None = None
    _wrapped: "weakref.ref[Any] | None" = None  # what the hook is attached to

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        trainer = _TRANSFORMERS.Trainer
        if trainer in order and order.index(trainer) < order.index(CompressMixin):
            raise UsageError(
                f"in {cls.__name__} the Trainer comes before CompressMixin and hides it; write class "
                f"{cls.__name__}(CompressMixin, Trainer)",
                field="CompressMixin",
            )

    def __init__(self, *args: Any, codec: Any = None, codec_options: Mapping[str, Any] | None = None, **kwargs: Any):
        if not isinstance(self, _TRANSFORMERS.Trainer):
            raise UsageError(
                f"{type(self).__name__} is no Trainer; write class {type(self).__name__}(CompressMixin, Trainer)",
                field="CompressMixin",
            )
        needs(_TRANSFORMERS.Trainer, ("train", "training_step", "add_callback"), "transformers", "4.40")
        self.codec = self.codec if codec is None else codec
        self.codec_options = self.codec_options if codec_options is None else codec_options
        if self.codec is None:
            raise UsageError(
                "there is no codec; set the attribute codec of the class, or give codec= to the constructor",
                field="codec",
            )
        super().__init__(*args, **kwargs)
        self.add_callback(_Save(self))

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As Trainer.train, with the state of gradwire."""
        self._resumed, self.hook = None, None
        if resume_from_checkpoint:
            self._resumed = resume_from_checkpoint
            if resume_from_checkpoint is True:
                folder = self.args.output_dir  # type: ignore[attr-defined]
                self._resumed = _TRANSFORMERS.trainer_utils.get_last_checkpoint(folder)
        return super().train(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]

    def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """As Trainer.training_step; the first one attaches the hook. `model` is the wrapped model here. With
        auto_find_batch_size the Trainer wraps it anew for each batch size that it tries."""
        if self.hook is None or self._wrapped is None or self._wrapped() is not model:
            self.hook, self._wrapped = self._attached(model), weakref.ref(model)
            if self._resumed is not None:
                _rank_files.load([self.hook], self._resumed)
        return super().training_step(model, *args, **kwargs)  # type: ignore[misc]

    def _attached(self, model: Any) -> Hook:
        options = dict(self.codec_options)
        trainer: Any = self
        if options.get("optimizer") is True:
            options["optimizer"] = trainer.optimizer
            if trainer.args.max_grad_norm:
                options.setdefault("clip", float(trainer.args.max_grad_norm))
        elif options.get("optimizer") is False:
            del options["optimizer"]
        scaler = getattr(trainer.accelerator, "scaler", None)
        if scaler is not None:
            options.setdefault("scaler", scaler)
        return compress(model, self.codec, **options)
