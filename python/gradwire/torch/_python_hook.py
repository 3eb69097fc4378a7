# SPDX-License-Identifier: Apache-2.0
"""The hook of a codec in Python (_register.py). It does what a hook with method="gather" does to the values, and sends
something else: every rank puts its gradients through the function, and the process group averages the results. All of
this happens in the thread of the backward pass.

    x = gradient + decay * residual
    y, bits = quantise(x)
    residual = x - y                    kept only if all results of the step are finite, on all ranks alike
    gradient = mean of y over the ranks
"""

from __future__ import annotations

import math
import zlib
from typing import Any, Mapping, Sequence

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .._errors import UnsupportedError, UsageError
from . import _hook, _state
from ._agree import Handshake, agreed
from ._chunks import used_flags
from ._ddp import DdpHook
from ._exposed import with_exposed
from ._register import PythonCodec
from ._state_checks import merged, refusing

_REFUSED = ("down", "method", "owner_feedback", "guard", "steps", "nodes")


class PythonHook(DdpHook):
    """The hook of a DistributedDataParallel with a codec in Python."""

    def __init__(
        self,
        ddp: DistributedDataParallel,
        codec: PythonCodec,
        given: dict[str, Any],
        names: Sequence[str] | None = None,
    ) -> None:
        self._python = codec
        feedback = _hook.switch(given["feedback"], "feedback")
        self._keeps = codec.feedback if feedback is None else feedback
        self._decay = _hook.fraction(given.get("decay", 1.0), "decay")
        for name in _REFUSED:
            if name in given:
                raise UnsupportedError(f"'{codec.name}' is a codec in Python, which has no option {name}", field=name)
        if given.get("cuda_graphs"):
            raise UnsupportedError(
                f"'{codec.name}' is a codec in Python, whose buckets cannot be recorded; leave cuda_graphs= out",
                field="cuda_graphs",
            )
        if self._keeps and given.get("optimizer") is not None:
            raise UnsupportedError(
                f"'{codec.name}' is a codec in Python, for which Adam's momentum cannot be exchanged; leave optimizer= "
                "out, or say feedback=False",
                field="optimizer",
            )
        if "decay" in given and self._decay != 1 and not self._keeps:
            raise UsageError(f"decay is {self._decay:g}, and no residual is kept; say feedback=True", field="decay")
        # To the library every parameter is fp32. What this hook keeps is its own.
        own = {"feedback": None, "decay": 1.0, "residual": torch.float32}
        super().__init__(ddp, "fp32", given | own, names)
        self._options["residual"] = _hook.residual_dtype(given["residual"])
        small = f"<{self._min_elements}=fp32;" if self._min_elements > 0 else ""
        self.codec = f"1d=fp32;{small}*={codec.name}"
        self._chosen = [p.dim() > 1 and p.numel() >= self._min_elements for p in self._parameters]
        self._bits = [0.0] * len(self._parameters)  # of the last step
        self._residuals: dict[int, torch.Tensor] = {}
        self._open: dict[int, torch.Tensor] = {}  # residuals that the step under way will leave, if it is finite
        self._finite = True
        self._skipped = 0

    def __repr__(self) -> str:
        return super().__repr__().replace("<DdpHook", "<PythonHook (slow)")

    def _uses_feedback(self, up: str) -> bool:
        return self._keeps

    def _troubles_adam(self) -> bool:
        return self._keeps

    def _handshake(self, *_: Any) -> Handshake:
        terms = super()._handshake()
        terms += [("codec", self._python.described), ("min_elements", str(self._min_elements))]
        return terms + [
            ("feedback", str(self._keeps)),
            ("decay", str(self._decay)),
            ("residual", str(self._options["residual"])),
        ]

    def set_codec(self, codec: Any, *, down: Any = None) -> None:
        raise UnsupportedError(
            f"'{self._python.name}' is a codec in Python, which cannot be changed for another one; call compress again",
            field="codec",
        )

    # One step.

    @torch.no_grad()
    def _comm_hook(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        buffer, gradients = bucket.buffer(), bucket.gradients()
        self._check_layout(buffer)
        tensors = [self._index[id(parameter)] for parameter in bucket.parameters()]
        if bucket.index() == 0:
            self._open, self._finite = {}, True
        unused = self._unused(gradients) if self._keeps and self._searches_unused() else [False] * len(tensors)
        with self._times.measure("encode", "up", wall=self._device.type == "cuda"):
            for tensor, gradient, idle in zip(tensors, gradients, unused):
                if not idle:
                    self._meters.sent(self._put(tensor, gradient))
        with self._times.measure("wait", "", wall=True):
            buffer.mul_(1.0 / self._world)
            dist.all_reduce(buffer, group=self._group)
        self._finite = self._finite and bool(torch.isfinite(buffer).all())
        if bucket.is_last():
            self._finish()
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=[self._device] if self._device.type == "cuda" else None
        )
        done.set_result(buffer)
        return done

    def _unused(self, gradients: Sequence[torch.Tensor]) -> list[bool]:
        """Parameters that no rank has used. DDP throws their results away, so their residuals must stay."""
        flags = used_flags(gradients).to(torch.int32)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._group)
        return [flag == 0 for flag in flags.tolist()]

    def _put(self, tensor: int, gradient: torch.Tensor) -> int:
        """Puts what the others would decode in the place of a gradient. Returns the bytes to other ranks."""
        count = gradient.numel()
        if not self._chosen[tensor] or self.step < self._warmup:
            self._bits[tensor] = 32.0 * count
            return 8 * count * (self._world - 1) // self._world  # as a ring all-reduce sends it
        scale = self._scale()
        x = gradient.to(torch.float32, copy=True).div_(scale)
        if tensor in self._residuals:
            x.add_(self._residuals[tensor], alpha=self._decay)
        if not bool(torch.isfinite(x).all()):
            gradient.fill_(math.nan)  # so that every rank sees it
            return 0
        y, bits = self._called(tensor, x.clone())
        self._bits[tensor] = bits
        if self._meters.due:
            exact = x.double()
            self._meters._squares[tensor] = ((exact - y.double()).square().sum(), exact.square().sum())
        gradient.copy_(y * scale if scale != 1 else y)
        if self._keeps:
            self._open[tensor] = x.sub_(y).to(self._options["residual"])
        return (self._world - 1) * math.ceil(bits / 8)

    def _called(self, tensor: int, x: torch.Tensor) -> tuple[torch.Tensor, float]:
        """The user's function, with what it returns checked."""
        name, shape = f"'{self._python.name}' for parameter '{self._names[tensor]}'", x.shape
        result = self._python.quantise(x)
        if not isinstance(result, tuple) or len(result) != 2:
            raise UsageError(
                f"{name} has returned a {type(result).__name__}; expected is (tensor, bits)", field="quantise"
            )
        y, bits = result
        if not isinstance(y, torch.Tensor) or y.shape != shape or not y.is_floating_point() or y.device != x.device:
            what = f"a {type(y).__name__}"
            if isinstance(y, torch.Tensor):
                what = f"numbers of type {str(y.dtype)[6:]} and shape {tuple(y.shape)} on {y.device}"
            raise UsageError(
                f"{name} has returned {what}; expected are floating-point numbers of shape {tuple(shape)} on "
                f"{x.device}",
                field="quantise",
            )
        try:
            number = float(bits)
        except (TypeError, ValueError, RuntimeError):
            number = math.nan
        if not (math.isfinite(number) and number >= 0):
            raise UsageError(f"{name} has declared {bits!r} bits; expected is a number, 0 or more", field="quantise")
        return y.float(), number

    def _finish(self) -> None:
        if self._finite:
            self._residuals |= self._open
        elif self._keeps:
            self._skipped += 1
        self._open = {}
        self.step += 1
        self._step_done(self._transport)

    # For the user.

    def stats(self) -> dict[str, Any]:
        """As for other hooks; bytes and bits are those that the function has declared."""
        codecs = [self._python.name if chosen else "fp32" for chosen in self._chosen]
        up = [(codec, math.ceil(bits / 8)) for codec, bits in zip(codecs, self._bits)]
        kept = sum(one.numel() * one.element_size() for one in self._residuals.values())
        report = self._meters.report(self.step, self._skipped, up, self._world, self._times, kept)
        report["plan"] = []
        with_exposed(report, (None, None), {})  # all of it runs in the backward pass, and is no exchange of messages
        self._report_optimizer(report)
        return report

    def residual_hash(self) -> int:
        found = 0
        for tensor, residual in sorted(self._residuals.items()):
            found = zlib.crc32(residual.float().cpu().contiguous().numpy().tobytes(), zlib.crc32(b"%d" % tensor, found))
        return found

    def state_dict(self, *, gather: str | None = None) -> dict[str, Any]:
        if gather not in (None, "all"):
            raise UsageError(
                f"gather is {gather!r}; allowed are None and 'all' with a codec in Python", field="gather"
            )
        rank = str(dist.get_rank(self._group))
        state = _state.save(self, None)
        state["ranks"][rank]["up"] = {
            self._names[tensor]: residual.detach().cpu().clone() for tensor, residual in self._residuals.items()
        }
        if gather is None:
            return state
        every: list[Any] | None = [None] * self._world if rank == "0" else None
        dist.gather_object(state["ranks"], every, dst=dist.get_global_rank(self._group, 0), group=self._group)
        if every is None:
            return {}
        return state | {"ranks": {key: part for one in every for key, part in one.items()}}

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continues from a state. On another number of ranks every rank gets the mean of the old ranks' residuals."""
        rank = str(dist.get_rank(self._group))

        def prepare() -> tuple[tuple[int, dict[int, torch.Tensor]], Handshake]:
            whole = merged(state)
            if "adam" in whole:
                raise UsageError(
                    "the state was saved by a hook that exchanges Adam's momentum, and its residuals are in units of "
                    "the update, which a codec in Python does not exchange",
                    field="optimizer",
                )
            ranks = [rank] if whole["world"] == self._world else [str(r) for r in range(whole["world"])]
            missing = [one for one in ranks if one not in whole["ranks"]]
            if missing:
                raise UsageError(
                    f"the state was saved with {whole['world']} ranks, and that of rank {missing[0]} is missing",
                    field="ranks",
                )
            kept = [whole["ranks"][one]["up"] for one in ranks]
            if any(one.keys() != kept[0].keys() for one in kept):
                raise UsageError("the states of the ranks do not have the same parameters", field="ranks")
            names = list(kept[0])
            return (whole["step"], {self._index_of(name): self._mean(name, kept) for name in names}), [
                ("step", str(whole["step"])),
                ("parameters with a residual", ", ".join(sorted(names))),
            ]

        self.step, self._residuals = agreed(self._group, "load_state_dict", refusing(prepare), self._timeout)
        self._meters.steps = self.step

    def _index_of(self, name: str) -> int:
        if not self._keeps or name not in self._names:
            raise UsageError(
                f"the state has a residual of parameter '{name}', which this model does not have", field=name
            )
        return self._names.index(name)

    def _mean(self, name: str, parts: Sequence[Mapping[str, torch.Tensor]]) -> torch.Tensor:
        like = self._parameters[self._index_of(name)]
        for part in parts:
            if part[name].shape != like.shape:
                raise UsageError(
                    f"parameter '{name}' has the shape {tuple(like.shape)}; its residual in the state has "
                    f"{tuple(part[name].shape)}",
                    field=name,
                )
        mean = torch.stack([part[name].double() for part in parts]).mean(0)
        return mean.to(self._options["residual"]).to(like.device)
