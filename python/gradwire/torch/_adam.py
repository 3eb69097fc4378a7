# SPDX-License-Identifier: Apache-2.0
"""Adam that exchanges its momentum. With error feedback a coordinate of a gradient is sent rarely, and then as the sum
of many steps. Adam's second moment sees such a sum as a spike, and makes the step small. So the residual is kept behind
the preconditioner: ranks exchange the momentum in units of the update, and second moments come from gradients that were
never compressed.

For each element, on W ranks, with k steps taken so far:

    m, v        torch's exp_avg and exp_avg_sq: the same bits on all ranks
    q, s        own to a rank: a short mean of its gradients, and the second moment that it estimates with them
    den         sqrt(v) / sqrt(1 - beta2^kp) + eps, where kp is the number of steps at the last pooling

    k = 0       gradients are averaged exactly, and the optimizer's own step is taken
    k > 0       u = (beta1 m + (1 - beta1) g) / den                       g: this rank's gradient, clipped (_limits.py)
                |u| at most 10 (1 - beta1^(k + 1))
                m = den * mean of u over all ranks, compressed            what the user finds in p.grad, and may clip
                w = w (1 - rate * decay) - rate / (1 - beta1^(k + 1)) * m / den
    follow      q = rho q + (1 - rho) g,  rho = (W - 1) / (W + 1)         q varies as little as a mean over W ranks
                s = beta2 s + (1 - beta2) (q / (1 - rho^j))^2             j: how often q was updated
    pool        now and then: v = mean of s over all ranks, at least 1e-4 of its mean over the tensor

A step that is skipped is one in which the optimizer's step is not called: it changes none of these. Adam's decay (which
is not that of AdamW) is added to g.

Under HSDP the optimizer's parameters are DTensors. A tensor is then the shard of a parameter that this rank has, and
the ranks of which there are W are the replicas of that shard; g is the gradient of one replica. What is about a whole
parameter or the whole gradient (the mean over a tensor, the norm that is clipped) is summed over the shards of the
replica (_shards.py).
"""

from __future__ import annotations

import warnings
import weakref
from typing import TYPE_CHECKING, Any, Callable, Mapping, Protocol, Sequence

import torch
import torch.distributed as dist

from .. import _core
from .._errors import UnsupportedError, UsageError
from . import _optimizers
from ._limits import GradientLimits
from ._shards import ShardSums, local

if TYPE_CHECKING:
    from ._meters import Meters

WARMUP_CODEC, DOWN_CODEC = "qsgd:bits=4", "optquant:bits=4"
_LARGEST = 10.0  # of an update, in units of the learning rate
_FLOOR = 0.01**2  # of a second moment: a coordinate that was never used must not have a den of eps when it wakes up
_LOOK = 3  # first steps, in which the norms of p.grad show what the loop does with it


def default_warmup(steps: int) -> int:
    return steps // 10 if steps else 200


class Exchanger(Protocol):
    """What an exchange of momentum needs of its hook, which hands gradients over (`begin`, `put`, `settle`, `end`)."""

    _group: dist.ProcessGroup  # of the ranks that have the same elements
    _world: int  # how many these are
    _meters: "Meters"
    _accumulation: str  # how a loop accumulates gradients before they are exchanged

    def _finish_pass(self) -> None: ...  # ends a backward pass that autograd has not ended
    def _follow_phase(self) -> None: ...  # after a step of the optimizer
    def _left_node(self, sent: int) -> int: ...  # of the bytes of a ring all-reduce, those to other nodes


class Momentum:
    """The exchange of one optimizer's momentum, for one hook. shards: the ranks that have the other shards of the same
    replica, where parameters are sharded."""

    def __init__(
        self,
        hook: Exchanger,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, torch.nn.Parameter],
        groups: list[int],
        clip: float = 0.0,
        shards: dist.ProcessGroup | None = None,
    ) -> None:
        self._hook = weakref.ref(hook)
        self.optimizer = optimizer
        self.names, self.parameters, self.groups = list(parameters), list(parameters.values()), groups
        for name, parameter in parameters.items():
            if parameter.dtype not in (torch.float32, torch.bfloat16):
                raise UnsupportedError(
                    f"parameter '{name}' is {str(parameter.dtype)[6:]}; with optimizer= allowed are float32 and "
                    "bfloat16, because Adam's second moments need their range",
                    field="dtype",
                )
        self._fixed = _optimizers.Fixed(optimizer)
        self._settings = self._fixed.settings
        self._world, self._group = hook._world, hook._group
        self.rho = (self._world - 1) / (self._world + 1)
        self.taken = 0  # steps that were applied
        self.next_pool = 0  # the step after which second moments are pooled
        self.pooled = False  # whether they were pooled ever: before that, gradients are exchanged exactly
        self.pools, self.pool_bytes = 0, 0
        self.pool_dtype: torch.dtype | None = None  # bfloat16 where the process group can add it
        # For each parameter: steps, updates of s, updates of q, updates of s at the last pooling. They differ only
        # where parameters were without a gradient in some steps.
        self.counts = [[0, 0, 0, 0] for _ in self.parameters]
        self._fresh = True  # the optimizer's state was not looked at yet
        self._pending = False  # there is a result that no step has used
        self._scale = 1.0
        self.idle: set[int] = set()  # parameters that no rank has used in this backward pass
        self._came: set[int] = set()  # parameters whose gradients were put in this backward pass
        self._sums = ShardSums(shards)
        with torch.no_grad():
            self._counts_here = [local(parameter).numel() for parameter in self.parameters]
        # The smallest one of which this rank has something.
        self._smallest = min(range(len(self.parameters)), key=lambda i: self._counts_here[i] or 2**62)
        self._norms: dict[int, torch.Tensor] = {}  # of p.grad as the loop gets it, in the first steps
        self._told_clip = clip
        self.limits = GradientLimits(len(self.parameters), self.parameters[0].device, clip, self._sums)
        self._undo: list[Callable[[], None]] = []

    # The life of an exchange.

    def attach(self) -> None:
        """Takes the optimizer's step, and memory."""
        self.q, self.s = self._zeros(), self._zeros()
        self._own, self._den = self._zeros(), self._zeros()
        # torch's square root, of several threads at its first call, may be inexact on one rank (see "The optimizers are
        # gradwire's own" in docs/decisions.md). One thread makes that call here.
        torch.ones(64).sqrt_()
        self._torch_step = _optimizers.own_step(self.optimizer)
        self._undo.append(_optimizers.replace_step(self.optimizer, self))
        me = weakref.ref(self)

        def loaded(_: torch.optim.Optimizer) -> None:
            momentum = me()
            if momentum is not None:
                momentum._fresh = True

        self._undo.append(self.optimizer.register_load_state_dict_post_hook(loaded).remove)

    def watch_accumulation(self) -> None:
        """For a hook that sees gradients only after autograd has added them to p.grad."""
        me = weakref.ref(self)

        def before_accumulation(_: torch.Tensor) -> None:
            momentum = me()
            if momentum is not None:
                momentum.refuse_second_pass([momentum._smallest])

        self._undo.append(self.parameters[self._smallest].register_hook(before_accumulation).remove)

    @torch.no_grad()
    def detach(self) -> None:
        """Gives the optimizer back. Its second moments are those of the last pooling; they are corrected for the steps
        since then, as the optimizer's own step expects them."""
        for undo in self._undo:
            undo()
        if self._undo and not self._fresh:
            for i, (steps, _, _, at_pooling) in enumerate(self.counts):
                beta2 = self._settings[self.groups[i]][1]
                if at_pooling and "exp_avg_sq" in self._state(i):
                    self._variance(i).mul_((1 - beta2**steps) / (1 - beta2**at_pooling))
        self._undo.clear()

    @torch.no_grad()
    def _zeros(self) -> list[torch.Tensor]:
        return [torch.zeros_like(local(p), dtype=torch.float32, requires_grad=False) for p in self.parameters]

    def _here(self, which: Sequence[int]) -> list[torch.Tensor]:
        return [local(self.parameters[i]) for i in which]

    def _state(self, i: int) -> dict[str, Any]:
        return self.optimizer.state[self.parameters[i]] if self.parameters[i] in self.optimizer.state else {}

    def _moments(self, which: Sequence[int], name: str) -> list[torch.Tensor]:
        return [local(self.optimizer.state[self.parameters[i]][name]) for i in which]

    def _moment(self, i: int) -> torch.Tensor:
        """The momentum, which a parameter that was never used does not have yet."""
        state = self._state(i)
        return local(state["exp_avg"]) if "exp_avg" in state else torch.zeros_like(self._own[i])

    def _variance(self, i: int) -> torch.Tensor:
        return local(self._state(i)["exp_avg_sq"])

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from a state that was checked. Collective."""
        self.taken, self.next_pool = state["taken"], state["next_pool"]
        self.counts = [list(state["counts"][name]) for name in self.names]
        self.pooled = any(at_pooling for _, _, _, at_pooling in self.counts)
        for i, name in enumerate(self.names):
            self.q[i].copy_(state["q"][name])
            self.s[i].copy_(state["s"][name])
        levels = torch.stack([state["levels"][name].double() for name in self.names])
        self.limits.restore(self._told_clip or state["clip"], levels)
        self._fresh, self._pending = True, False

    # A backward pass.

    @property
    def is_exact(self) -> bool:
        """Whether gradients are exchanged, without compression, in place of the momentum."""
        return not self.pooled

    @torch.no_grad()
    def begin(self, scale: float) -> None:
        """Before the first bucket."""
        self._scale = scale
        self.idle, self._came = set(), set()
        if self._fresh:
            self._adopt()

    @torch.no_grad()
    def put(self, which: Sequence[int], gradients: Sequence[torch.Tensor]) -> None:
        """Keeps the gradients of a bucket, and puts what is exchanged in their place."""
        self._came.update(which)
        for number, some in self._by_group(which):
            group, (beta1, _, _) = self.optimizer.param_groups[number], self._settings[number]
            bucket = [gradients[at] for at, i in enumerate(which) if self.groups[i] == number]
            own = [self._own[i] for i in some]
            torch._foreach_copy_(own, bucket)
            if self._scale != 1:
                torch._foreach_mul_(own, 1 / self._scale)
            if self.is_exact:
                continue
            changed = self.limits.apply(some, own)
            decay = _optimizers.coupled_decay(self.optimizer, group)
            if decay:
                torch._foreach_add_(own, self._here(some), alpha=decay)
            in_place = all(one.dtype == torch.float32 for one in bucket)
            u = bucket if in_place else list(torch._foreach_mul(own, 1.0))
            if in_place and (changed or decay or self._scale != 1):
                torch._foreach_copy_(u, own)
            torch._foreach_lerp_(u, [self._moment(i).float() for i in some], beta1)
            torch._foreach_div_(u, [self._den[i] for i in some])
            # The bias of a young momentum is corrected later, and makes the update larger.
            _clamp(u, [_LARGEST * (1 - beta1 ** (self.counts[i][0] + 1)) for i in some], own)
            if not in_place:
                torch._foreach_copy_(bucket, u)

    def settle(self, which: Sequence[int], gradients: Sequence[torch.Tensor]) -> None:
        """After the last chunk of a bucket: what was exchanged becomes the momentum, in units of the gradient and with
        the loss scale, as the user expects it in p.grad."""
        if self.is_exact:
            self._remember(which, gradients)
            return
        values = [gradient.float() for gradient in gradients]  # a copy only of other types
        torch._foreach_mul_(values, [self._den[i] for i in which])
        if self._scale != 1:
            torch._foreach_mul_(values, self._scale)
        if any(value is not gradient for value, gradient in zip(values, gradients)):
            torch._foreach_copy_(list(gradients), values)
        self._remember(which, values)

    def _remember(self, which: Sequence[int], values: Sequence[torch.Tensor]) -> None:
        if self.taken < _LOOK:
            self._norms.update(zip(which, torch._foreach_norm([value.float() for value in values])))

    def end(self) -> None:
        """After the last bucket was handed over."""
        self._pending = True

    @torch.no_grad()
    def refuse_second_pass(self, which: Sequence[int]) -> None:
        """Refuses to add to a result that no step has used. which: parameters that are looked at. All ranks that share
        a replica refuse, also one whose shards are zero."""
        if not self._pending:
            return
        gradients = (self.parameters[i].grad for i in which)
        if self._on_any_shard(any(one is not None and bool(local(one).any()) for one in gradients)):
            hook = self._hook()
            raise UsageError(
                "a backward pass begins while p.grad holds the averaged momentum of the one before, and a gradient "
                "cannot be added to that; call optimizer.step() and zero_grad(), or accumulate with "
                f"{hook._accumulation if hook is not None else ''}",
                field="gradient",
            )

    def _adopt(self) -> None:
        """Before the first backward pass with a state of the optimizer: what it means here."""
        steps = [int(self._state(i).get("step", 0)) for i in range(len(self.parameters))]
        if self.pooled:
            for name, here, (there, *_) in zip(self.names, steps, self.counts):
                if here != there:
                    raise UsageError(
                        f"the optimizer has taken {here} steps with parameter '{name}', and the hook {there}: load the "
                        "states of both from the same checkpoint, with optimizer.load_state_dict and "
                        "hook.load_state_dict",
                        field="step",
                    )
        elif self._on_any_shard(any(bool(self._variance(i).any()) for i, count in enumerate(steps) if count)):
            # The optimizer comes from a training without this exchange: its second moments are what the ranks' own
            # ones would be.
            for i, count in enumerate(steps):
                self.counts[i] = [count, count, 0, count]
                if count:
                    self.s[i].copy_(self._variance(i))
            self.taken = max(steps)
            self.next_pool, self.pooled = _core.next_pooling(self.taken) - 1, True
        if self.pooled:
            self._make_dens()
        self._fresh = False

    def _on_any_shard(self, here: bool) -> bool:
        if self._sums.group is None:
            return here
        return bool(self._sums.total(torch.tensor([float(here)], device=self.s[0].device)) > 0)

    # The step of the optimizer.

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._fixed.check(self.optimizer)
        hook = self._hook()
        if hook is not None:
            hook._finish_pass()
        applied = [i for i, parameter in enumerate(self.parameters) if parameter.grad is not None]
        if not self._pending:
            if applied and self.pooled:
                raise UsageError(
                    "optimizer.step was called without a backward pass whose result it could use: with optimizer= "
                    "p.grad must be what the ranks have exchanged since the last step",
                    field="optimizer",
                )
            # Checkpoint tools take such a step to make the optimizer's state.
            self._torch_step(self.optimizer)
            self._fresh = True
            return loss
        self._pending = False
        found_clip = self._look(applied)
        self._rest(applied)
        if found_clip and not self.is_exact:
            self.limits.see(applied, [self._own[i] for i in applied])
        if self.is_exact:
            self._limit_first(applied)
            self._torch_step(self.optimizer)
            for i in applied:
                self.counts[i][0] = int(self._state(i)["step"])
        else:
            self._refuse_late(applied)
            for number, some in self._by_group(applied):
                self._update(number, some)
        for number, some in self._by_group(applied):
            self._follow(number, some)
        self.taken += 1
        self.limits.commit(self.taken)
        if not self.pooled or self.taken > self.next_pool:
            self._pool()
        if hook is not None:
            hook._follow_phase()
        return loss

    def _rest(self, applied: Sequence[int]) -> None:
        """Parameters whose gradients were left out of the backward pass, and that have an old p.grad of zeros."""
        for i in applied:
            if i not in self._came:
                self._own[i].zero_()
                self.idle.add(i)

    def _update(self, number: int, some: Sequence[int]) -> None:
        group, (beta1, _, _) = self.optimizer.param_groups[number], self._settings[number]
        rate, decay = float(group["lr"]), float(group["weight_decay"])
        parameters, moments = self._here(some), self._moments(some, "exp_avg")
        for i, moment in zip(some, moments):
            gradient = self.parameters[i].grad
            assert gradient is not None
            if i in self.idle:  # its gradient was left as it was: it is zero on all ranks
                moment.mul_(beta1)
            else:
                moment.copy_(local(gradient))
        if decay and _optimizers.is_decoupled(self.optimizer, group):
            torch._foreach_mul_(parameters, 1 - rate * decay)
        for i in some:
            self.counts[i][0] += 1
        torch._foreach_add_(self._moments(some, "step"), 1)
        # Parameters that were left out of some steps have fewer of them than others of their group.
        for steps in sorted({self.counts[i][0] for i in some}):
            at = [n for n, i in enumerate(some) if self.counts[i][0] == steps]
            targets, m, den = [parameters[n] for n in at], [moments[n] for n in at], [self._den[some[n]] for n in at]
            size = -rate / (1 - beta1**steps)
            if all(one.dtype == torch.float32 for one in targets + m):
                torch._foreach_addcdiv_(targets, m, den, value=size)
            else:
                torch._foreach_add_(targets, torch._foreach_div([one.float() for one in m], den), alpha=size)

    def _follow(self, number: int, some: Sequence[int]) -> None:
        """This rank's own second moments."""
        beta2 = self._settings[number][1]
        q, s = [self.q[i] for i in some], [self.s[i] for i in some]
        torch._foreach_lerp_(q, [self._own[i] for i in some], 1 - self.rho)
        torch._foreach_mul_(s, beta2)
        for i in some:
            self.counts[i][1] += 1
            self.counts[i][2] += 1
        for updates in sorted({self.counts[i][2] for i in some}):
            at = [n for n, i in enumerate(some) if self.counts[i][2] == updates]
            share = (1 - beta2) / (1 - self.rho**updates) ** 2
            mean = [q[n] for n in at]
            torch._foreach_addcmul_([s[n] for n in at], mean, mean, value=share)

    def _pool(self) -> None:
        sizes = [own.numel() for own in self.s]
        flat = torch.empty(sum(sizes), dtype=self._dtype_of_pool(), device=self.s[0].device)
        parts = [part.view(own.shape) for part, own in zip(flat.split(sizes), self.s)]
        torch._foreach_copy_(parts, self.s)
        if flat.numel():
            dist.all_reduce(flat, group=self._group)
        sums = self._sums.total(torch.stack([part.sum(dtype=torch.float64) for part in parts]))
        for i, (part, whole) in enumerate(zip(parts, sums.unbind())):
            if self._state(i):
                floor = (whole / (self._world * self.parameters[i].numel()) * _FLOOR).float()
                self._variance(i).copy_(torch.maximum(part.float() / self._world, floor))
                self.counts[i][3] = self.counts[i][1]
        self.pooled, self.next_pool = True, _core.next_pooling(self.taken) - 1
        sent = 2 * flat.numel() * flat.element_size() * (self._world - 1) // self._world
        self.pools, self.pool_bytes = self.pools + 1, self.pool_bytes + sent
        hook = self._hook()
        if hook is not None:
            hook._meters.sent_after_step(sent, hook._left_node(sent))
        self._make_dens()

    def _dtype_of_pool(self) -> torch.dtype:
        """All ranks find out alike: a process group refuses a type before it sends anything."""
        if self.pool_dtype is None:
            self.pool_dtype = torch.float32
            if self._world > 1:
                try:
                    dist.all_reduce(torch.zeros(1, dtype=torch.bfloat16, device=self.s[0].device), group=self._group)
                    self.pool_dtype = torch.bfloat16
                except (RuntimeError, TypeError, ValueError):
                    pass
        return self.pool_dtype

    @torch.no_grad()
    def _make_dens(self) -> None:
        for i, (_, _, _, at_pooling) in enumerate(self.counts):
            _, beta2, eps = self._settings[self.groups[i]]
            if at_pooling:
                self._den[i].copy_(self._variance(i)).sqrt_().div_((1 - beta2**at_pooling) ** 0.5).add_(eps)
            else:
                self._den[i].fill_(1)

    def _by_group(self, which: Sequence[int]) -> list[tuple[int, list[int]]]:
        return [
            (number, some)
            for number in range(len(self._settings))
            if (some := [i for i in which if self.groups[i] == number])
        ]

    def _refuse_late(self, applied: Sequence[int]) -> None:
        for i in applied:
            if self.counts[i][3] == 0:
                raise UnsupportedError(
                    f"parameter '{self.names[i]}' has a gradient for the first time, and the first step was without "
                    "it; with optimizer= all parameters must be used in the first step",
                    field="gradient",
                )

    def _look(self, applied: Sequence[int]) -> bool:
        """In the first steps: what has the loop done with p.grad? Returns whether this has shown its clip."""
        norms, self._norms = self._norms, {}
        if self.taken >= _LOOK:
            return False
        known = [i for i in applied if i in norms]
        gradients = [self.parameters[i].grad for i in known]
        found_clip = self.limits.learn(
            [norms[i] for i in known], [local(one).float() for one in gradients if one is not None], self._scale
        )
        gradient = self.parameters[self._smallest].grad
        if self._scale != 1 or self._smallest not in norms or gradient is None:
            return found_clip
        if not self.is_exact and float(local(gradient).norm()) < float(norms[self._smallest]) / 1024:
            # A GradScaler that compress does not know divides the momentum by a scale that it was never multiplied by.
            warnings.warn(
                f"gradwire: p.grad of '{self.names[self._smallest]}' became more than 1024 times as small between "
                "backward() and optimizer.step(). If a GradScaler did that, compress must be told: "
                "compress(model, codec, optimizer=optimizer, scaler=scaler)",
                stacklevel=5,
            )
        return found_clip

    def _limit_first(self, applied: Sequence[int]) -> None:
        """This rank's own first gradient, which was averaged as it is, and is followed as clipped."""
        self.limits.apply(applied, [self._own[i] for i in applied], together=True)
        for number, some in self._by_group(applied):
            decay = _optimizers.coupled_decay(self.optimizer, self.optimizer.param_groups[number])
            if decay:
                torch._foreach_add_([self._own[i] for i in some], self._here(some), alpha=decay)

    # For people.

    def phase(self, warmup: int) -> str:
        return "exact" if self.is_exact else "warm-up" if self.taken < warmup else "compressed"

    def report(self, warmup: int) -> dict[str, Any]:
        return {
            "exchange": "momentum",
            "phase": self.phase(warmup),
            "steps": self.taken,
            "warmup": warmup,
            "next_pool": self.next_pool,
            "pools": self.pools,
            "pool_bytes": self.pool_bytes,
            "clip": self.limits.clip,
            "memory_bytes": 16 * sum(self._counts_here),
        }


def _clamp(u: list[torch.Tensor], limits: list[float], own: list[torch.Tensor]) -> None:
    """Clamps each tensor to its limit, in place. An Inf of `own`, which u comes from, becomes a NaN and is not hidden.
    Each operation reads and writes all elements, and this is one of the most expensive parts of the exchange."""
    if own[0].is_cuda:
        torch._foreach_clamp_min_(u, [-limit for limit in limits])
        torch._foreach_clamp_max_(u, limits)
        torch._foreach_add_(u, own, alpha=0.0)
        return
    for one, limit in zip(u, limits):
        one.clamp_(-limit, limit)
    # The host can look: a norm is read only, and nearly always finite.
    if not bool(torch.isfinite(torch.stack(torch._foreach_norm(own))).all()):
        torch._foreach_add_(u, own, alpha=0.0)
