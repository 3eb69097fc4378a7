# SPDX-License-Identifier: Apache-2.0
"""What the package does with an optimizer that is not its own: it checks whether the rule of _adam.py holds for it,
puts another step in the place of its step, and warns about an Adam that nobody has named.
"""

from __future__ import annotations

import functools
import warnings
import weakref
import zlib
from typing import TYPE_CHECKING, Any, Callable, Mapping

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from .._errors import UnsupportedError, UsageError
from ._agree import Handshake
from ._shards import local

if TYPE_CHECKING:
    from ._adam import Momentum
    from ._reduce_hook import ReduceHook

KINDS = (torch.optim.Adam, torch.optim.AdamW)
_ALLOWED = "allowed are torch.optim.Adam and torch.optim.AdamW"
_REFUSED_FLAGS = ("amsgrad", "maximize", "capturable", "differentiable")
Settings = tuple[float, float, float]  # beta1, beta2, eps


def check(
    optimizer: Any, named: Mapping[str, torch.nn.Parameter], model: torch.nn.Module, before: "Momentum | None"
) -> list[int]:
    """The group of each named parameter. Refuses an optimizer for which the rule does not hold. `before` is the
    exchange that the model has now, which gives the optimizer back before a new one takes it."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"optimizer is of type {type(optimizer).__name__}; {_ALLOWED}", field="optimizer")
    if type(optimizer) not in KINDS:
        kind = "a subclass, whose step may differ; " if isinstance(optimizer, KINDS) else ""
        raise UnsupportedError(f"optimizer is {type(optimizer).__name__}, {kind}{_ALLOWED}", field="optimizer")
    for number, group in enumerate(optimizer.param_groups):
        for flag in _REFUSED_FLAGS:
            if group.get(flag):
                raise UnsupportedError(
                    f"group {number} of the optimizer has {flag}=True, for which momentum cannot be exchanged",
                    field=flag,
                )
    _check_step(optimizer, before)
    groups = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
    for name, parameter in named.items():
        if id(parameter) not in groups:
            raise UsageError(
                f"parameter '{name}' of the model is not one of the optimizer's; with optimizer= the optimizer must "
                "own all parameters that are reduced between ranks",
                field="optimizer",
            )
    reduced = {id(parameter) for parameter in named.values()}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            frozen = id(parameter) in names and not parameter.requires_grad
            if id(parameter) not in reduced and not frozen:
                what = f"'{names[id(parameter)]}'" if id(parameter) in names else f"of shape {tuple(parameter.shape)}"
                raise UsageError(
                    f"group {number} of the optimizer has a parameter {what} that is not reduced between ranks "
                    "here; give it an optimizer of its own",
                    field="optimizer",
                )
    return [groups[id(parameter)] for parameter in named.values()]


def _check_step(optimizer: torch.optim.Optimizer, before: "Momentum | None") -> None:
    step = vars(optimizer).get("step")
    if step is None:
        return
    owner = getattr(step, "_gradwire", None)
    if owner is not None:
        momentum = owner()
        if momentum is not None and momentum is not before:
            raise UsageError("the optimizer is in use by the hook of another model", field="optimizer")
    elif not hasattr(step, "_wrapped_by_lr_sched"):
        raise UnsupportedError(
            "the step of the optimizer was replaced by other code, so it need not be Adam's any more",
            field="optimizer",
        )


def is_decoupled(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether decay is that of AdamW."""
    return bool(group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW)))


def coupled_decay(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> float:
    """The decay that is added to gradients."""
    return 0.0 if is_decoupled(optimizer, group) else float(group["weight_decay"])


class Fixed:
    """What must not change while momentum is exchanged: the parameters of each group, and its settings."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.settings: list[Settings] = [
            (float(group["betas"][0]), float(group["betas"][1]), float(group["eps"]))
            for group in optimizer.param_groups
        ]
        self._owned = [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        now = Fixed(optimizer)
        if now._owned != self._owned:
            raise UsageError(
                "the parameters of the optimizer have changed since compress; call compress again with the optimizer",
                field="optimizer",
            )
        for number, (before, after) in enumerate(zip(self.settings, now.settings)):
            for name, a, b in zip(("beta1", "beta2", "eps"), before, after):
                if a != b:
                    raise UsageError(
                        f"{name} of group {number} of the optimizer was {a:g} when compress was called, and is {b:g} "
                        "now; only lr and weight_decay may change (a OneCycleLR or CyclicLR needs "
                        "cycle_momentum=False)",
                        field=name,
                    )


def handshake(optimizer: torch.optim.Optimizer) -> Handshake:
    """What ranks compare: the optimizer with its numbers."""
    terms = [("optimizer", type(optimizer).__name__)]
    for number, group in enumerate(optimizer.param_groups):
        told = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
        terms.append((f"group {number} of the optimizer", str(told)))
    return terms


@torch.no_grad()
def moments(optimizer: torch.optim.Optimizer, named: Mapping[str, torch.nn.Parameter]) -> Handshake:
    """The moments that the optimizer begins with, which ranks that have the same elements compare."""
    terms = []
    for name, parameter in named.items():
        state = optimizer.state.get(parameter, {})
        check_sum = 0
        for key in ("step", "exp_avg", "exp_avg_sq"):
            if key in state:
                values = local(torch.as_tensor(state[key])).detach().cpu().contiguous().reshape(-1).view(torch.uint8)
                check_sum = zlib.crc32(values.numpy().tobytes(), check_sum)
        terms.append((f"the state of the optimizer for '{name}'", f"{check_sum:08x}"))
    return terms


def own_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """The step of the optimizer's class, without the hooks that torch calls around a step."""
    step = type(optimizer).step
    return getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step


def replace_step(optimizer: torch.optim.Optimizer, momentum: "Momentum") -> Callable[[], None]:
    """Puts the step of `momentum` in the place of the optimizer's. Returns what puts everything back.

    Learning-rate schedulers wrap the step to see whether it was called before theirs. This step tells them itself, so
    it works with schedulers that were made before and after it. It does not keep `momentum` alive: without it the
    optimizer's own step is taken again.
    """
    before = vars(optimizer).get("step")
    torch_step = own_step(optimizer)
    owner = weakref.ref(momentum)
    target = weakref.ref(optimizer)

    def step(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        self._opt_called = True  # type: ignore[attr-defined]
        self._step_count = getattr(self, "_step_count", 0) + 1  # type: ignore[attr-defined]  # for an older torch
        momentum = owner()
        return torch_step(self, closure) if momentum is None else momentum.step(closure)

    hooked: Any = torch.optim.Optimizer.profile_hook_step(functools.wraps(type(optimizer).step)(step))

    @functools.wraps(type(optimizer).step)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return hooked(target(), *args, **kwargs)

    replaced._gradwire = owner  # type: ignore[attr-defined]
    replaced._wrapped_by_lr_sched = replaced._with_counter = True  # type: ignore[attr-defined]
    optimizer.step = replaced  # type: ignore[method-assign]
    # A fused step may leave it to its kernel to divide by the loss scale and to skip. This step does neither, so the
    # GradScaler must do both.
    scaling = vars(optimizer).get("_step_supports_amp_scaling")
    if scaling is not None:
        optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]

    def restore() -> None:
        optimizer = target()
        if optimizer is None:
            return
        if vars(optimizer).get("step") is replaced:
            if before is None:
                del optimizer.step
            else:
                optimizer.step = before  # type: ignore[method-assign]
        if scaling is not None:
            optimizer._step_supports_amp_scaling = scaling  # type: ignore[attr-defined]

    return restore


class Watch:
    """For a hook that suits no Adam, and was given no optimizer: one warning if an Adam steps on the model. It is told
    of every step of every optimizer, until one of them has stepped on the model's parameters.

    torch iterates over its hooks while it calls them, and fails if one is removed meanwhile. Python's garbage collector
    may take a hook at any time, also then. So all watches share one hook of torch's, which goes when the last watch is
    removed by somebody, between steps; a watch that is collected only leaves the set.
    """

    _every: "weakref.WeakSet[Watch]" = weakref.WeakSet()
    _handle: Any = None

    def __init__(self, hook: "ReduceHook") -> None:
        self._hook = weakref.ref(hook)
        self._seen = False
        Watch._every.add(self)
        if Watch._handle is None:
            Watch._handle = register_optimizer_step_post_hook(Watch._after_any)

    @staticmethod
    def _after_any(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for watch in list(Watch._every):
            watch._after_step(optimizer)

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        hook = self._hook()
        if self._seen or hook is None:
            return
        if not any(id(parameter) in hook._index for group in optimizer.param_groups for parameter in group["params"]):
            return
        self._seen = True
        if isinstance(optimizer, KINDS) and hook._tells:
            kind = type(optimizer).__name__
            if hook._uses_feedback(hook.codec):
                why = (
                    "has compressed with error feedback. A value that is sent rarely, and then for many steps at "
                    f"once, inflates the second moments of {kind}, and the model learns slowly"
                )
            else:
                why = f"has rounded to few bits, and {kind} feels that noise"
            warnings.warn(
                f"gradwire: {kind} steps on gradients that '{hook.codec}' {why}. Write compress(model, codec, "
                "optimizer=optimizer), or choose a codec without error feedback and with more bits, such as "
                "'qsgd:bits=4'",
                stacklevel=4,
            )

    def is_over(self) -> bool:
        """Whether there is nothing left to watch. It removes itself here, between steps."""
        if self._seen:
            self.remove()
        return self._seen

    def remove(self) -> None:
        """Not within a step of an optimizer."""
        Watch._every.discard(self)
        if Watch._handle is not None and not Watch._every:
            Watch._handle.remove()
            Watch._handle = None
