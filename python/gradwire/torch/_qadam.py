# SPDX-License-Identifier: Apache-2.0
"""Quantized Adam (after Chen et al., 2021) as an optimizer for torch.distributed. Every rank runs Adam on its own
gradients and sends its update, compressed, with error feedback; all ranks subtract the same mean, and compute the next
gradient at rounded weights. For each element, with k steps taken, this one included:

    m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2             g: this rank's gradient, never averaged
    u = lr / (1 - beta1^k) * m / (sqrt(v / (1 - beta2^k)) + eps)
    send Q(u + e);  e = u + e - Q(u + e)
    x = x - mean of what was sent                                          the same bits on all ranks, in float32
    p = W(x)                                                               what the model computes with

The element rule is that of the library (src/optim/qadam.h), so `gradwire train --optimizer qadam` does the same.
"""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any, Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist

from .. import _arrays, _core
from .._errors import MismatchError, UnsupportedError, UsageError
from . import _hook, _qadam_state
from ._agree import Handshake, agreed
from ._hook import DTYPES
from ._mean import MeanExchange
from ._meters import Meters
from ._parameters import one_device
from ._qadam_state import check_sum
from ._rules import check_patterns, rules_of
from ._state_checks import refusing

WEIGHTS_CODEC = "unigrid:bits=8"
_LARGEST_RATE = 1e6
_LARGEST_GRADIENT = 1e19  # the square of a larger one is no float32 any more, and would stay in a moment for ever
_FINE, _NOT_FINITE, _FAILED = 0, 1, 2


class QAdam(torch.optim.Optimizer):
    """Quantized Adam. All ranks must make it, with the same arguments, and all ranks must call `step` together.

    The model is a plain one, not a DistributedDataParallel: gradients stay where they are computed. All ranks begin
    with the same weights, and hold the same bits of them after every step.

    params: parameters, groups of them, or named parameters (model.named_parameters()), which rules can then name;
        without names they are called "0", "1", ... in their order. Frozen parameters are left alone.
    lr, betas, eps, weight_decay: as in torch.optim.Adam. Each group may have its own. weight_decay is added to the
        gradient.
    codec: codec or rules for the updates that a rank sends. A codec alone leaves parameters with one dimension, or
        with fewer than `min_elements` elements, in fp32.
    weights: codec or rules for the weights that the model computes with. Default: "unigrid:bits=8". Codecs that learn
        are refused. "fp32" leaves weights exact.
    down: a codec, or rules, in the place of `weights`: every rank averages a shard of the updates and sends the mean,
        compressed with error feedback, to all ranks, and weights stay exact (Efficient-Adam, by the same authors). The
        bytes then do not grow with the number of ranks.
    moments: "local": second moments are each rank's own. "shared": they are averaged now and then, in fp32, for ranks
        whose data differ; `share_every` says after how many steps.
    correction: of the bias of young moments, as in Adam. False: second moments begin at eps, as in the paper.
    feedback: whether what compression leaves out of an update is added to the next one. None: where the codec asks for
        it.
    residual: torch.float32 or torch.bfloat16, the type that residuals are kept in.
    seed, threads: of random rounding; processor threads that encode and decode.
    group: the process group. Default: all ranks. timeout: seconds until a rank that does not make the optimizer, or
        does not load a state, is an error.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        codec: "str | _core.Codec | _core.Rules" = "loggrid:k=2",
        weights: "str | _core.Codec | _core.Rules | None" = None,
        down: "str | _core.Codec | _core.Rules | None" = None,
        moments: str = "local",
        share_every: int = 16,
        correction: bool = True,
        feedback: bool | None = None,
        residual: torch.dtype = torch.float32,
        min_elements: int = 1024,
        seed: int = 0,
        threads: int = 1,
        group: "dist.ProcessGroup | None" = None,
        timeout: timedelta | float | None = None,
    ) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise UsageError("torch.distributed is not initialized; call init_process_group first", field="group")
        self._made = False
        self._rules: dict[int, tuple[tuple[float, float, float], "_core.QAdamRule"]] = {}  # by group
        self._taken = self._skipped = 0
        self._checked = False  # ranks have compared their weights, and found that their gradients differ
        self._group: dist.ProcessGroup = dist.group.WORLD if group is None else group  # type: ignore[assignment]
        self._step_supports_amp_scaling = True  # all ranks must take part in a step that one GradScaler would skip
        self._timeout = _hook.valid_timeout(timeout)

        def prepare() -> tuple[None, Handshake]:
            _hook.timeout_of(timeout)
            torch.optim.Optimizer.__init__(
                self, params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
            )
            self._options: dict[str, Any] = {
                "moments": moments, "share_every": _arrays.whole(share_every, "share_every", 10**9),
                "correction": _hook.switch(correction, "correction"), "seed": _arrays.whole(seed, "seed"),
                "residual": DTYPES[_hook.residual_dtype(residual)],
            }  # fmt: skip
            if moments not in ("local", "shared"):
                raise UsageError(f"moments is {moments!r}; allowed are 'local' and 'shared'", field="moments")
            self._collect()
            least = _arrays.whole(min_elements, "min_elements", 2**40)
            self._make_exchange(codec, down, _hook.switch(feedback, "feedback"), least, _hook.threads(threads))
            self._make_weights(weights, down, least)
            for number in range(len(self.param_groups)):
                self._rule(number)  # refuses what a step would refuse
            return None, self._handshake()

        agreed(self._group, "QAdam", prepare, self._timeout)
        self._made = True

    # What it is made of.

    def _collect(self) -> None:
        """The parameters that are trained, with their names and groups."""
        self._names: list[str] = []
        self._parameters: list[torch.nn.Parameter] = []
        self._groups: list[int] = []
        number = 0
        for index, group in enumerate(self.param_groups):
            names = group.get("param_names") or [str(number + i) for i in range(len(group["params"]))]
            number += len(group["params"])
            for name, parameter in zip(names, group["params"]):
                if parameter.requires_grad:
                    self._names.append(name)
                    self._parameters.append(parameter)
                    self._groups.append(index)
        if not self._names:
            raise UsageError("no parameter requires a gradient", field="params")
        for name, parameter in zip(self._names, self._parameters):
            if type(parameter.data).__name__ == "DTensor" or parameter.layout != torch.strided:
                raise UnsupportedError(
                    f"parameter '{name}' is sharded or sparse; QAdam needs whole, dense parameters on every rank",
                    field="params",
                )
            if parameter.dtype not in DTYPES:
                raise UnsupportedError(
                    f"parameter '{name}' is {str(parameter.dtype)[6:]}; allowed are float32, float16 and bfloat16",
                    field="dtype",
                )
        self._device = one_device(dict(zip(self._names, self._parameters)))

    def _make_exchange(self, codec: Any, down: Any, feedback: bool | None, least: int, threads: int) -> None:
        up = rules_of(codec, least)
        check_patterns(up, self._names, "parameter")
        self.codec, down_rules = up, ""
        if down is not None:
            down_rules = rules_of(down, least, "down")
            check_patterns(down_rules, self._names, "parameter", "down")
        tensors = [(name, p.numel(), p.dim()) for name, p in zip(self._names, self._parameters)]
        self._exchange = MeanExchange(
            tensors, self._group, self._device, threads, method="scatter" if down_rules else "gather", up=up,
            down=down_rules, feedback="codec" if feedback is None else "on" if feedback else "off",
            owner_feedback="off" if feedback is False else "on", residual=self._options["residual"],
            seed=self._options["seed"],
        )  # fmt: skip
        self._pool: MeanExchange | None = None
        if self._options["moments"] == "shared":
            self._pool = MeanExchange(tensors, self._group, self._device, threads, up="*=fp32", down="*=fp32")
        self._meters = Meters(self._names, [p.numel() for p in self._parameters], 0, None)
        self._updates = [torch.zeros(p.numel(), device=self._device) for p in self._parameters]

    def _make_weights(self, weights: Any, down: Any, least: int) -> None:
        """How the weights that the model computes with are rounded."""
        if weights is not None and down is not None:
            raise UsageError(
                "weights and down are both given; with down= the mean of the updates is sent, and weights stay exact",
                field="weights",
            )
        chosen = WEIGHTS_CODEC if weights is None and down is None else weights
        self._weights = "*=fp32" if chosen is None else rules_of(chosen, least, "weights")
        check_patterns(self._weights, self._names, "parameter", "weights")
        rules, specs = _core.Rules(self._weights), []
        self._rounded: list[int] = []  # parameters that are not x itself, bit for bit
        for i, (name, p) in enumerate(zip(self._names, self._parameters)):
            codec = rules.codec_for(name, p.dim(), p.numel())
            if codec.learns:
                raise UnsupportedError(
                    f"weights is '{codec}', a codec that learns; use one that does not, such as {WEIGHTS_CODEC}",
                    field="weights",
                )
            if str(codec) != "fp32" or p.dtype != torch.float32 or not p.is_contiguous():
                self._rounded.append(i)
                specs.append(_core.TensorSpec(name, p.numel(), "f32", codec))
        self._seen: list[tuple[int, int]] = []  # what tells whether other code has changed them
        self._plan = _core.Plan(specs)
        self._runner = _core.Runner(self._plan, self._exchange.core_device) if specs else None

    def _rule(self, number: int) -> "_core.QAdamRule":
        settings = self._settings(number)
        if number not in self._rules or self._rules[number][0] != settings:
            rule = _core.QAdamRule(
                *settings, self._options["correction"], self._pool is not None, self._options["share_every"],
                self._exchange.core_device,
            )  # fmt: skip
            self._rules[number] = settings, rule
        return self._rules[number][1]

    def _settings(self, number: int) -> tuple[float, float, float]:
        group = self.param_groups[number]
        return float(group["betas"][0]), float(group["betas"][1]), float(group["eps"])

    def _rate(self, number: int) -> tuple[float, float]:
        """Learning rate and weight decay, which may change from step to step."""
        found = []
        for field in ("lr", "weight_decay"):
            value = float(self.param_groups[number][field])
            if not (math.isfinite(value) and 0 <= value <= _LARGEST_RATE):
                raise UsageError(
                    f"{field} of group {number} is {value:g}; allowed is 0 to {_LARGEST_RATE:g}", field=field
                )
            found.append(value)
        return found[0], found[1]

    def _handshake(self) -> Handshake:
        terms = [*self._exchange.model.handshake(), ("weights", self._weights), ("device", self._device.type)]
        terms += [(name, str(value)) for name, value in self._options.items()]
        for number in range(len(self.param_groups)):
            terms.append((f"group {number} of the optimizer", str((self._rate(number), self._settings(number)))))
        return terms + [
            (f"parameter '{name}'", f"{tuple(p.shape)} {p.dtype}") for name, p in zip(self._names, self._parameters)
        ]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._made:
            raise UnsupportedError(
                "parameters cannot be added to a QAdam, because ranks have agreed on them; make a new one",
                field="params",
            )
        super().add_param_group(param_group)

    # A step.

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step, which all ranks take together. If a gradient of any rank has a NaN or an Inf, or is beyond 1e19, no
        rank changes anything."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        failure: Exception | None = None
        state, gradients = _FINE, []
        with self._exchange.on_stream():
            try:
                rates = [self._rate(number) for number in range(len(self.param_groups))]
                gradients = self._gradients()
                state = _FINE if self._are_finite(gradients) else _NOT_FINITE
            except Exception as error:
                failure, state = error, _FAILED
            has = any(p.grad is not None for p in self._parameters)
            state, has_any = self._exchange.any_rank([state, int(has)])
            if failure is not None:
                raise failure
            if state == _FAILED:
                raise MismatchError("another rank could not take this step; its own error says why", field="rank")
            if not has_any:
                return loss
            if state == _NOT_FINITE:
                self._skipped += 1
                return loss
            if not self._checked:
                self._compare(gradients)
            self._take(gradients, rates)
        return loss

    def _gradients(self) -> list[torch.Tensor]:
        """This rank's own, in float32 and without the loss scale. A parameter without one has a gradient of zero."""
        scale = getattr(self, "grad_scale", None)  # set by a GradScaler that has not unscaled them itself
        found = []
        for name, group, p in zip(self._names, self._groups, self._parameters):
            if p.grad is None:
                found.append(torch.zeros(p.numel(), device=self._device))
                continue
            if p.grad.layout != torch.strided:
                raise UnsupportedError(
                    f"the gradient of parameter '{name}' is sparse; QAdam needs dense gradients", field="layout"
                )
            gradient, decay = p.grad.detach().float().contiguous().view(-1), self._rate(group)[1]
            if scale is not None:
                gradient = gradient / scale
            found.append(gradient.add(p.detach().float().contiguous().view(-1), alpha=decay) if decay else gradient)
        return found

    def _are_finite(self, gradients: Sequence[torch.Tensor]) -> bool:
        tops = torch.stack([gradient.abs().max() if gradient.numel() else gradient.sum() for gradient in gradients])
        return bool((tops < _LARGEST_GRADIENT).all())  # False for a NaN

    def _compare(self, gradients: Sequence[torch.Tensor]) -> None:
        """Before the first step: ranks must begin with the same weights, and their gradients must be their own."""
        mine = [check_sum([p]) for p in self._parameters], check_sum(gradients)
        every: list[Any] = [mine] * self._exchange.world
        if self._exchange.world > 1:
            dist.all_gather_object(every, mine, group=self._group)
        for rank, (sums, _) in enumerate(every):
            for name, here, there in zip(self._names, every[0][0], sums):
                if here != there:
                    raise MismatchError(
                        f"parameter '{name}' differs between rank 0 and rank {rank}: all ranks must begin with the "
                        "same weights; send those of rank 0 with torch.distributed.broadcast",
                        field="weights",
                        rank=rank,
                    )
        nonzero = any(bool(gradient.any()) for gradient in gradients)
        if len(every) > 1 and nonzero and all(one[1] == every[0][1] for one in every):
            raise UsageError(
                "all ranks have the same gradients, so they were averaged already, or computed from the same data: "
                "QAdam needs the model itself, not a DistributedDataParallel, and each rank its own data",
                field="gradient",
            )
        self._checked = True

    def _take(self, gradients: Sequence[torch.Tensor], rates: Sequence[tuple[float, float]]) -> None:
        states = [self._state_of(i) for i in range(len(self._parameters))]
        self._adopt()
        rules, spans = [], []
        for number in range(len(self.param_groups)):
            some = [i for i, group in enumerate(self._groups) if group == number]
            rules.append(self._rule(number))
            spans.append([(_addresses(gradients[i], states[i], self._updates[i]), gradients[i].numel()) for i in some])
            rules[-1].step(spans[-1], self._taken + 1, rates[number][0])
        if self._pool is not None and rules[0].pools(self._taken):
            self._share(states, rules)
            for rule, span, (rate, _) in zip(rules, spans, rates):
                rule.step(span, self._taken + 1, rate, moves=False)
        self._exchange.mean(self._taken, rates[0][0], self._updates)
        for p, state, update in zip(self._parameters, states, self._updates):
            exact = state["exact"].view(-1) if "exact" in state else p.data.view(-1)
            exact.sub_(update)
        self._taken += 1
        self._write_weights()
        self._meters.sent(self._exchange.sent + (self._pool.sent if self._pool is not None else 0))
        self._exchange.sent = 0
        if self._pool is not None:
            self._pool.sent = 0
        self._exchange.times.step_done()
        self._meters.step_done()

    def _share(self, states: Sequence[dict[str, torch.Tensor]], rules: Sequence["_core.QAdamRule"]) -> None:
        """The mean of all ranks' second moments, corrected for their age, takes the place of the shared ones."""
        assert self._pool is not None
        ages = [rules[group].correction(self._taken + 1) for group in self._groups]
        values = [state["exp_avg_sq"].view(-1) / age for state, age in zip(states, ages)]
        with self._pool.on_stream():
            self._pool.mean(self._taken, -1.0, values)
        for state, value, age in zip(states, values, ages):
            state["shared"].view(-1).copy_(value.mul_(age))

    def _state_of(self, i: int) -> dict[str, torch.Tensor]:
        """Moments and, where the model computes with rounded weights, the exact ones: all in float32, in the order of
        the parameter's elements."""
        p = self._parameters[i]
        state = self.state[p]
        if "exp_avg" not in state:
            start = 0.0 if self._options["correction"] else self._settings(self._groups[i])[2]
            state["exp_avg"] = torch.zeros(p.shape, device=self._device)
            state["exp_avg_sq"] = torch.full(p.shape, start, device=self._device)
            if self._pool is not None:
                state["shared"] = state["exp_avg_sq"].clone()
            if i in self._rounded:
                state["exact"] = torch.empty(p.shape, device=self._device).copy_(p.detach())
        return state

    # The weights that the model computes with.

    def _round(self) -> list[torch.Tensor]:
        """The exact weights as the codec leaves them, in the memory of the updates."""
        exact = [self.state[self._parameters[i]]["exact"].data_ptr() for i in self._rounded]
        rounded = [self._updates[i] for i in self._rounded]
        assert self._runner is not None
        message = self._exchange.buffers.get("weights", self._plan.message_bytes, self._device)
        stamp = _core.Stamp(self._options["seed"], self._taken, 1, 0, 1)
        self._runner.encode(exact, stamp, message.data_ptr(), message.numel())
        self._runner.decode(
            message.data_ptr(), message.numel(), [one.data_ptr() for one in rounded], wait=self._device.type == "cpu"
        )
        return rounded

    def _write_weights(self) -> None:
        if self._rounded:
            for i, values in zip(self._rounded, self._round()):
                self._parameters[i].data.copy_(values.view(self._parameters[i].shape))
        self._seen = self._marks()

    def _marks(self) -> list[tuple[int, int]]:
        return [(self._parameters[i]._version, self._parameters[i].data_ptr()) for i in self._rounded]

    def _adopt(self) -> None:
        """Where other code has changed weights since the last step, the new values are the exact ones. Weights that it
        has left alone keep what rounding has hidden. Torch does not count changes by way of p.data."""
        if not self._seen or self._seen == self._marks():
            return
        for i, values in zip(self._rounded, self._round()):
            p = self._parameters[i].detach()
            exact = self.state[self._parameters[i]]["exact"]
            exact.copy_(torch.where(p == values.view(p.shape).to(p.dtype), exact, p.float()))

    # For the user.

    def stats(self) -> dict[str, Any]:
        """What was sent, and what it cost, on this rank: "steps" that were taken, "skipped" (a gradient was not
        finite), "bits" per element of an update, "ratio", "last_step", "all_steps", "residual_bytes" and "parameters",
        as in the statistics of the hook for DDP."""
        model, exchange = self._exchange.model, self._exchange
        report = self._meters.report(
            self._taken, self._skipped, model.codecs("up"), exchange.world, exchange.times, model.residual_bytes()
        )
        report["plan"] = model.plans()
        return report

    def residual_hash(self) -> int:
        """A hash of all residuals and of everything that codecs have learned, on this rank."""
        return self._exchange.model.hash()

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank, to be saved on every rank: moments and exact weights under "state", as torch has
        them, and residuals and what codecs have learned under "gradwire"."""
        return super().state_dict() | {"gradwire": _qadam_state.save(self)}

    def load_state_dict(self, state_dict: Any) -> None:
        """Continues from the state of this rank, or from a list of the states of all ranks. The weights are set to the
        rounded ones of the state. If the number of ranks has changed, the states of all ranks are needed: residuals are
        redistributed, so that their mean stays the same, and every rank begins with the mean of all moments.
        Collective. A state that is refused changes nothing."""
        states = [state_dict] if isinstance(state_dict, Mapping) else list(state_dict)
        prepare = refusing(lambda: _qadam_state.prepare(self, states))
        step, loaded, model = agreed(self._group, "load_state_dict", prepare, self._timeout)
        super().load_state_dict(loaded)
        # torch gives moments the type of their parameter.
        order = [p for group in self.param_groups for p in group["params"]]
        for number, values in loaded["state"].items():
            self.state[order[number]] = {
                name: torch.empty(value.shape, device=self._device).copy_(value) for name, value in values.items()
            }
        self._taken, self._skipped, self._checked = step, 0, False
        self._exchange.replace_model(model)
        if self._taken:
            with torch.no_grad(), self._exchange.on_stream():
                self._write_weights()


def _addresses(
    gradient: torch.Tensor, state: Mapping[str, torch.Tensor], update: torch.Tensor
) -> tuple[int, int, int, int, int]:
    shared = state["shared"].data_ptr() if "shared" in state else 0
    first, second = state["exp_avg"].data_ptr(), state["exp_avg_sq"].data_ptr()
    return gradient.data_ptr(), first, second, shared, update.data_ptr()
