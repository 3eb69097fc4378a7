# SPDX-License-Identifier: Apache-2.0
"""What the hooks of DDP and of FSDP2's replicas have in common: an all-reduce of named tensors between ranks that have
the same elements, whose codecs a ModelCoder runs, and which carries gradients or Adam's momentum (_adam.py).

Where momentum is exchanged there are two models of coders. That of the warm-up has WARMUP_CODEC in the place of every
codec that keeps a residual, and no residuals on the way up. The user's codecs take over when the warm-up ends.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, Mapping, Sequence

import torch
import torch.distributed as dist

from .. import _core
from .._errors import UnsupportedError, UsageError
from . import _hook, _optimizers, _state
from ._adam import DOWN_CODEC, WARMUP_CODEC, Momentum, default_warmup
from ._agree import Handshake
from ._hook import Hook
from ._lowrank_spec import LowRank
from ._rules import check_patterns, has_lowrank, rules_of, with_codec

if TYPE_CHECKING:
    from ._exposed import Exposed
    from ._meters import Meters
    from ._transport import Transport

Made = tuple[str, Any, "_core.ModelCoder"]  # rules for the way up, `down` as it was given, and a coder for both


class ReduceHook(Hook):
    """A hook that averages tensors between ranks."""

    _accumulation: str  # see Exchanger
    _names: list[str]
    _index: dict[int, int]  # id of a parameter -> its place in `_names`
    _group: dist.ProcessGroup
    _world: int
    _min_elements: int
    _warmup: int
    _feedback: bool | None  # as it was given
    _model_options: dict[str, Any]
    _meters: "Meters"
    _exposed: "Exposed"
    _model: "_core.ModelCoder"
    _tells: bool  # this is the rank that warns
    _learns: bool  # a codec of the model does
    _transport: "Transport"
    _down: Any
    _clock: "torch.Tensor | None" = None  # see Owner
    _momentum: Momentum | None = None
    _watch: "_optimizers.Watch | None" = None
    _warm = False  # the model is that of the warm-up
    _optimizer_kind = "none"
    _optimizer_terms: Handshake  # what ranks compare about the optimizer, when it is named
    _moment_terms: Handshake  # the same about moments, which differ between shards

    @abstractmethod
    def _codecs(self, rules: str) -> "Sequence[_core.Codec | LowRank]":
        """The codec of each parameter."""

    @abstractmethod
    def _coder(self, up: str, down: str, options: dict[str, Any]) -> "_core.ModelCoder": ...

    @abstractmethod
    def _use(self, codec: str, down: Any, model: "_core.ModelCoder") -> None: ...

    @abstractmethod
    def _replace_model(self, model: "_core.ModelCoder") -> None:
        """Between two steps."""

    @abstractmethod
    def _synchronize(self) -> None: ...

    def _name_optimizer(
        self,
        given: Mapping[str, Any],
        codec: Any,
        named: Mapping[str, torch.nn.Parameter],
        model: torch.nn.Module,
        before: Hook | None,
        shards: dist.ProcessGroup | None = None,
    ) -> None:
        """Decides whether momentum is exchanged. before: the hook that the model has now."""
        self._optimizer_terms, self._moment_terms = [], []
        optimizer, clip = given.get("optimizer"), _hook.limit(given.get("clip"), "clip")
        if clip is not None and optimizer is None:
            raise UsageError("clip is an option for optimizer=; without it the loop clips gradients", field="clip")
        if optimizer is None:
            return
        self._optimizer_kind = type(optimizer).__name__
        groups = _optimizers.check(optimizer, named, model, getattr(before, "_momentum", None))
        self._optimizer_terms = [("clip", str(clip)), *_optimizers.handshake(optimizer)]
        self._moment_terms = _optimizers.moments(optimizer, named)
        if self._wants_momentum(self._rules_of(codec)):
            self._momentum = Momentum(self, optimizer, named, groups, clip or 0.0, shards)
            if self._feedback is None:
                self._model_options["feedback"] = "momentum"
            if "warmup" not in given:
                self._warmup = default_warmup(self._model_options["steps"])
        self._warm = self._is_warm(0)

    def _rules_of(self, codec: Any) -> str:
        return rules_of(codec, self._min_elements)

    # Models of coders.

    def _first_model(self, codec: Any, down: Any) -> None:
        made = self._model_for(codec, down)  # also where it is used only later: it may be refused
        self._use(*(self._model_for(codec, down, warm=True) if self._warm else made))

    def _model_for(self, codec: Any, down: Any, warm: bool = False) -> Made:
        """warm: for the warm-up of an exchange of momentum."""
        up = self._rules_of(codec)
        check_patterns(up, self._names, "parameter")
        down_rules = ""
        if down is not None:
            down_rules = rules_of(down, self._min_elements, "down")
            check_patterns(down_rules, self._names, "parameter", "down")
        elif self._momentum is not None and self._model_options["method"] == "scatter":
            down_rules = with_codec(up, self._keeps_residual, DOWN_CODEC)
        options, sent = self._model_options, up
        if warm:
            sent = with_codec(up, self._keeps_residual, WARMUP_CODEC)
            options = options | {"feedback": "off", "decay": 1.0}
            if options["owner_feedback"] == "off":
                options["residual"] = "f32"  # there are none, and their type must not be chosen then
        elif options["decay"] != 1 and not self._uses_feedback(up):
            raise UsageError(
                f"decay is {options['decay']:g}, and '{up}' has no codec with error feedback, so no residual would "
                "decay; choose one that has it, such as topk, or say feedback=True",
                field="decay",
            )
        return up, down, self._coder(sent, down_rules, options)

    def _keeps_residual(self, codec: "_core.Codec | LowRank") -> bool:
        if codec.lossless or self._feedback is not None:
            return not codec.lossless and bool(self._feedback)
        return codec.feedback if self._optimizer_kind == "none" else codec.momentum

    def _uses_feedback(self, up: str) -> bool:
        return any(self._keeps_residual(codec) for codec in self._codecs(up))

    def _wants_momentum(self, up: str) -> bool:
        """Whether Adam's momentum is what should be exchanged, where the optimizer is named."""
        return self._uses_feedback(up)

    def _is_exact(self, codec: str, down: Any) -> bool:
        """Whether the process group's own all-reduce of gradients is what was asked for."""
        return down is None and self._momentum is None and all(str(one) == "fp32" for one in self._codecs(codec))

    def _changed_model(self, codec: Any, down: Any) -> Made:
        """For set_codec."""
        if has_lowrank(codec):
            raise UnsupportedError(
                "lowrank cannot be chosen by set_codec, because its hook is another one; call compress again",
                field="codec",
            )
        made = self._model_for(codec, down)
        if self._optimizer_kind != "none" and self._momentum is None and self._wants_momentum(made[0]):
            raise UsageError(
                f"'{self.codec}' has no error feedback, so gradients are exchanged, and the optimizer was left "
                "alone; call compress again to begin with a codec that has it",
                field="codec",
            )
        return self._model_for(codec, down, warm=True) if self._warm else made

    def _change_to(self, codec: str, down: Any, model: "_core.ModelCoder") -> None:
        """Takes a model over, with what the present one has kept."""
        state, dropped = _state.carried(self._model.state(), model.state(), self._model_options["residual"])
        model.restore(state)
        self._replace_model(model)
        self._use(codec, down, model)
        self._prepare_lessons()
        self._meters.errors.clear()
        self._exposed.restart()
        _state.log_dropped(dropped)

    def _take(self, model: "_core.ModelCoder") -> None:
        self._model = model
        self._learns = model.learns()

    def _prepare_lessons(self) -> None:
        """Before the first step with these codecs, at the same point of the training on all ranks."""
        if self._learns:
            self._transport.prepare_lessons()

    def _fresh_model(self, taken: int = 0) -> "_core.ModelCoder":
        return self._model_for(self.codec, self._down, self._is_warm(taken))[2]

    # An exchange of momentum.

    def _is_warm(self, taken: int) -> bool:
        """Whether the exchange of momentum is in its warm-up after so many steps."""
        return self._momentum is not None and taken < self._warmup

    def _left_node(self, sent: int) -> int:
        return sent

    def _finish_pass(self) -> None:
        """Autograd ends passes."""

    def _follow_phase(self) -> None:
        """After a step of the optimizer: the user's codec takes over when the warm-up ends."""
        if self._warm and self._momentum is not None and not self._is_warm(self._momentum.taken):
            self._synchronize()
            self._warm = False
            self._change_to(*self._model_for(self.codec, self._down))

    def _sends_exactly(self) -> bool:
        """Whether this step is sent uncompressed, whatever the codec."""
        return self.step < self._warmup if self._momentum is None else self._momentum.is_exact

    def _scale_on_wire(self) -> float:
        """Momentum is exchanged without the loss scale."""
        return self._scale() if self._momentum is None or self._momentum.is_exact else 1.0

    def _report_optimizer(self, report: dict[str, Any]) -> None:
        if self._momentum is not None:
            report["optimizer"] = self._momentum.report(self._warmup)
        elif self._optimizer_kind != "none":
            report["optimizer"] = {"exchange": "gradients"}

    # An optimizer that nobody has named.

    def _watch_optimizers(self) -> None:
        if self._optimizer_kind == "none" and self._watch is None and self._troubles_adam():
            self._watch = _optimizers.Watch(self)

    def _troubles_adam(self) -> bool:
        """Whether an Adam that nobody has named would do better with optimizer=."""
        few_bits = self._feedback is None and any(codec.momentum for codec in self._codecs(self.codec))
        return few_bits or self._uses_feedback(self.codec)

    def _look_after_watch(self) -> None:
        if self._watch is not None and self._watch.is_over():
            self._watch = None

    def _let_optimizer_go(self) -> None:
        if self._watch is not None:
            self._watch.remove()
        if self._momentum is not None:
            self._momentum.detach()
