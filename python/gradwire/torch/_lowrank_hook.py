# SPDX-License-Identifier: Apache-2.0
"""The hook for DistributedDataParallel with lowrank, alone or in rules. It has three kinds of parameters:

    matrices     those that lowrank has been chosen for and that it fits: _lowrank.py and _lowrank_task.py
    passengers   those that are sent exactly, in the messages of the factors: by a rule "fp32", or because lowrank does
                 not fit them (they have one dimension, or fewer rows or columns than its rank, or their factors would
                 be more to send than they are)
    others       by other codecs of the rules, as in a hook without lowrank

Steps that are sent exactly, and those of the warm-up of an exchange of momentum, are those of a hook without lowrank.
"""

from __future__ import annotations

import functools
import weakref
import zlib
from typing import Any, Mapping, Sequence

import torch
from torch.nn.parallel import DistributedDataParallel

from .. import _core
from .._errors import UnsupportedError, UsageError
from . import _hook, _state
from ._agree import Handshake
from ._chunks import Chunk, split
from ._ddp import DdpHook
from ._hook import DTYPES
from ._lowrank import FactorGroup, Run
from ._lowrank_spec import FACTOR_CODECS, NAME, LowRank, MatrixShape
from ._lowrank_task import FirstExchange, SecondExchange
from ._rules import chosen_by, has_lowrank, lowrank_rules_of, without_lowrank
from ._state_checks import check_tensor
from ._transport import Transport

_REFUSED = ("down", "method", "owner_feedback", "guard", "nodes")


class LowRankHook(DdpHook):
    """The hook of a DistributedDataParallel with low-rank factors."""

    def __init__(
        self,
        ddp: DistributedDataParallel,
        codec: str,
        given: dict[str, Any],
        names: Sequence[str] | None = None,
    ) -> None:
        for name in _REFUSED:
            if name in given:
                raise UnsupportedError(f"{name} is given, and lowrank has no such option", field=name)
        if given["feedback"] is False:
            raise UnsupportedError(
                "feedback is False, and without error feedback what lowrank leaves out would be lost for ever",
                field="feedback",
            )
        if _hook.residual_dtype(given["residual"]) != torch.float32:
            raise UnsupportedError(
                f"residual is {given['residual']}; lowrank computes with its residuals, and keeps them in float32",
                field="residual",
            )
        super().__init__(ddp, codec, given, names)
        self._shapes = {i: MatrixShape(p) for i, p in enumerate(self._parameters) if p.dim() > 1}
        chosen = self._codecs(self.codec)
        alike: dict[tuple[int, int, LowRank], list[int]] = {}
        for i, one in enumerate(chosen):
            if isinstance(one, LowRank):
                alike.setdefault((self._shapes[i].rows, self._shapes[i].columns, one), []).append(i)
        self._groups = [
            FactorGroup(one, self._shapes[some[0]], some, self._names, self._device, self._threads)
            for (_, _, one), some in alike.items()
        ]
        self._matrices = {i: group for group in self._groups for i in group.parameters}
        everything = range(len(self._parameters))
        self._second_runs = [
            run for group in self._groups if not group.codec.alternate for run in group.runs(everything)
        ]
        self._passengers = [i for i, one in enumerate(chosen) if str(one) == "fp32"]
        self._others = {i for i in everything if i not in self._matrices and i not in self._passengers}
        self._factors = self._factor_model()
        self._first: dict[tuple[tuple[int, ...], int], FirstExchange] = {}
        self._second: SecondExchange | None = None
        self._open: list[FirstExchange] = []  # of the step under way
        self._compresses = False  # the step under way is one of factors
        self._open_scale = 1.0
        self._views: dict[int, torch.Tensor] = {}  # gradients as matrices, in the step under way
        self._taints: list[torch.Tensor] = []  # of its results; see taint()
        self._idle: set[int] = set()  # matrices that no rank has used in it
        self._flag = torch.zeros(1)

    def __repr__(self) -> str:
        return super().__repr__().replace("<DdpHook", "<LowRankHook")

    # What the core sees.

    def _rules_of(self, codec: Any) -> str:
        return lowrank_rules_of(codec, self._min_elements)

    def _codecs(self, rules: str) -> "Sequence[_core.Codec | LowRank]":
        tensors = [(name, p.dim(), p.numel()) for name, p in zip(self._names, self._parameters)]
        exact = _core.Codec("fp32")
        return [
            exact if isinstance(one, LowRank) and (p.dim() < 2 or not one.fits(MatrixShape(p))) else one
            for one, p in zip(chosen_by(rules, tensors), self._parameters)
        ]

    def _coder(self, up: str, down: str, options: dict[str, Any]) -> "_core.ModelCoder":
        """That of the others; its tensors are all parameters, for the steps that are not compressed."""
        if down and has_lowrank(up):
            exact = [name for name, one in zip(self._names, self._codecs(up)) if isinstance(one, LowRank)]
            down = "".join(f"{name}=fp32;" for name in exact) + down
        return super()._coder(without_lowrank(up), down, options)

    def _factor_model(self) -> "_core.ModelCoder":
        """The factors, as tensors of their own, and the passengers. They have no residuals: those of the matrices have
        what the rounding of factors leaves out."""
        tensors: list[tuple[str, int, str, int]] = []
        rules = ""
        self._p_at: dict[int, int] = {}
        for i, group in sorted(self._matrices.items()):
            self._p_at[i] = len(tensors)
            for which, size in (("P", group.rows), ("Q", group.columns)):
                tensors.append((f"{self._names[i]}/{which}", group.rank * size, "f32", 2))
                rules += f"{tensors[-1][0]}={FACTOR_CODECS[group.codec.bits]};"
        self._passenger_at = {i: len(tensors) + at for at, i in enumerate(self._passengers)}
        for i in self._passengers:
            parameter = self._parameters[i]
            tensors.append((self._names[i], parameter.numel(), DTYPES[parameter.dtype], parameter.dim()))
        own = {"feedback": "off", "owner_feedback": "off", "decay": 1.0}
        return _core.ModelCoder(tensors, up=f"{rules}*=fp32", **(self._model_options | own))

    def _wired(self, parameter: int, p: bool) -> int:
        """Where a factor stands in the list of `_factors`."""
        return self._p_at[parameter] + (0 if p else 1)

    def _handshake(self, model: "_core.ModelCoder | None" = None, codec: str | None = None) -> Handshake:
        terms = super()._handshake(model, codec)
        terms += [("codec", self.codec)]
        terms += [("factors", f"{name}: {value}") for name, value in self._factors.handshake()]
        return terms + [
            ("matrix", f"{self._names[i]}: {group.rows} x {group.columns}") for i, group in self._matrices.items()
        ]

    def set_codec(self, codec: Any, *, down: Any = None) -> None:
        raise UnsupportedError(
            f"'{self.codec}' has lowrank, which cannot be changed for another codec; call compress again", field="codec"
        )

    def _connect(self) -> None:
        super()._connect()
        self._after = self._transport  # of second exchanges
        if self._second_runs and not self._transport.on_streams:
            self._after = Transport.acquire(self._group, self._device, self._timeout, purpose="second exchanges")
            self._release_after = weakref.finalize(self, self._after.release)
            self._release_after.atexit = False

    def _ending_transport(self) -> Transport:
        return self._after if self._compresses else self._transport

    def remove(self) -> None:
        super().remove()
        if self._after is not self._transport:
            self._release_after()

    def _synchronize(self) -> None:
        super()._synchronize()
        self._after.check()

    def _wants_momentum(self, up: str) -> bool:
        """Momentum in units of the update is described less well by few directions than gradients are, so lowrank has
        it only where a user asks for it."""
        codecs = [one for one in self._codecs(up) if self._feedback or not isinstance(one, LowRank)]
        return any(self._keeps_residual(one) for one in codecs)

    def _watch_optimizers(self) -> None:
        """Every element of a low-rank result changes in every step, so second moments have no spikes by it."""
        if any(self._keeps_residual(one) for one in self._codecs(self.codec) if not isinstance(one, LowRank)):
            super()._watch_optimizers()

    # One step.

    _is_light = False  # the tasks of factors have streams of their own

    def _send(
        self, bucket: Any, done: Any, tensors: tuple[int, ...], gradients: list[torch.Tensor] | None = None
    ) -> None:
        if bucket.index() == 0:
            self._compresses = not self._warm and not self._sends_exactly()
        if not self._compresses:
            return super()._send(bucket, done, tensors)
        buffer, gradients = bucket.buffer(), bucket.gradients()
        first, last = bucket.index() == 0, bucket.is_last()
        if first:
            self._open, self._open_scale = [], self._scale_on_wire()
        used, shaped = self._put_momentum(bucket, tensors, gradients)
        parity = self.step % 2
        if first and not any(known == tensors for known, _ in self._first):
            self._forget_chunks()  # DDP has rebuilt its buckets
        if (tensors, parity) not in self._first:
            self._first[tensors, parity] = FirstExchange(self, tensors, self.step)
        task = self._first[tensors, parity]
        task.beside = self._send_others(buffer, dict(zip(tensors, gradients)), used, tensors, first)
        task.used = used
        if self._momentum is not None:
            task.settle = functools.partial(self._momentum.settle, tensors, shaped)
        task.load(buffer, gradients, first and not task.beside, last, done)
        self._open.append(task)
        self._transport.submit(task)
        if self._momentum is not None and last:
            self._momentum.end()

    def _send_others(
        self,
        buffer: torch.Tensor,
        gradients: Mapping[int, torch.Tensor],
        used: torch.Tensor | None,
        tensors: tuple[int, ...],
        first: bool,
    ) -> list[Chunk]:
        """Submits the parameters of a bucket that have other codecs, as chunks."""
        others = tuple(one for one in tensors if one in self._others)
        if not others:
            return []
        size = 0 if self._transport.on_streams else self._chunk_elements
        chunks: list[Chunk] = []
        for key in split(others, self._meters.elements, self._model, size):
            if key not in self._chunks:
                self._chunks[key] = Chunk(self, *key)
            chunk = self._chunks[key]
            chunk.used = used[[tensors.index(one) for one in key[0]]] if used is not None else None
            chunk.load(buffer, [gradients[one] for one in key[0]], first and not chunks, False)
            chunk.future = None
            chunks.append(chunk)
        for chunk in chunks:
            self._transport.submit(chunk)
        return chunks

    def _forget_chunks(self) -> None:
        super()._forget_chunks()
        if hasattr(self, "_first"):
            self._first.clear()
            self._second = None

    def _begin(self, loss_scale: float) -> None:
        super()._begin(loss_scale)
        self._taints, self._idle, self._views = [], set(), {}
        if self._compresses:
            self._factors.begin(self.step)

    def _close_step(self, last: FirstExchange) -> None:
        """After the first exchange of the last bucket, in the thread that decodes."""
        if not self._second_runs:
            self._end(self._used)
            return
        if self._second is None:
            self._second = SecondExchange(self)
        self._after.submit(self._second)

    def _fail_open(self, error: BaseException) -> None:
        for task in self._open:
            task.give_up(error)

    def _keep_idle(self, run: Run) -> None:
        for one in self._idle.intersection(run.parameters):
            run.keep(one)

    def _check_results(self) -> None:
        """The step is decided for all parameters alike: by the results, which all ranks have."""
        if not self._compresses:
            return
        with torch.cuda.stream(self._stream) if self._stream is not None else torch.no_grad():
            none = torch.zeros(1, device=self._device)
            total = torch.stack(self._taints).sum().reshape(1) if self._taints else none
            finite = total[0] == 0
            for group in self._groups:
                group.commit(finite, self.step)
            self._flag = total.clone()
        self._model.check_finite(self._flag.data_ptr(), 1)
        self._factors.end()
        self._views = {}

    def _measure_before(self, run: Run) -> None:
        if self._meters.due:
            for one, matrix in zip(run.parameters, run.whole()):
                self._meters._squares[one] = (torch.zeros(()), matrix.double().square().sum())

    def _measure_after(self, run: Run) -> None:
        if self._meters.due:
            for one, matrix in zip(run.parameters, run.work):
                self._meters._squares[one] = (matrix.double().square().sum(), self._meters._squares[one][1])

    # For the user.

    def _sent(self) -> list[tuple[str, int]]:
        sent = super()._sent()
        if self._warm:
            return sent
        factors = self._factors.codecs("up")
        for i, group in self._matrices.items():
            both = factors[self._p_at[i]][1] + factors[self._p_at[i] + 1][1]
            sent[i] = (str(group.codec), both // 2 if group.codec.alternate else both)
        return sent

    def stats(self) -> dict[str, Any]:
        report = super().stats()
        report["residual_bytes"] += sum(group.nbytes for group in self._groups)
        return report

    def residual_hash(self) -> int:
        found = super().residual_hash()
        for group in self._groups:
            for stack in (group.residual, *(getattr(group, kept) for kept in group.kept)):
                found = zlib.crc32(stack.cpu().contiguous().numpy().tobytes(), found & 0xFFFFFFFF)
        return found

    # The state.

    def _own_residuals(self) -> dict[str, torch.Tensor]:
        return {
            self._names[i]: group.residual[at].detach().cpu().flatten().clone()
            for group in self._groups
            for at, i in enumerate(group.parameters)
        }

    def _own_state(self) -> dict[str, Any]:
        factors: dict[str, dict[str, torch.Tensor]] = {}
        for group in self._groups:
            for kept in group.kept:
                stack = getattr(group, kept).detach().cpu()
                factors.setdefault(kept, {}).update(
                    (self._names[i], stack[at].clone()) for at, i in enumerate(group.parameters)
                )
        return {"lowrank": factors}

    def _take_own(self, whole: Mapping[str, Any], part: dict[str, Any], taken: int) -> tuple[dict[str, Any], Handshake]:
        factors = whole.get("lowrank", {})
        if not isinstance(factors, Mapping) or not all(isinstance(one, Mapping) for one in factors.values()):
            raise UsageError("the state is damaged: 'lowrank' is not a dict of factors by parameter name", field=NAME)
        if self._matrices and not factors:
            raise UsageError("the state was saved by a hook without lowrank: it has no factors", field=NAME)
        own: dict[str, Any] = {"residual": {}, "p": {}, "q": {}}
        check = 0
        for i, group in sorted(self._matrices.items()):
            name = self._names[i]
            if name not in part["up"]:
                raise UsageError(f"the state has no up residual of parameter '{name}'", field=name)
            values = part["up"].pop(name).float()
            if values.numel() != group.rows * group.columns:
                raise UsageError(
                    f"parameter '{name}' has {group.rows * group.columns} elements; its up residual in the state has "
                    f"{values.numel()}",
                    field=name,
                )
            own["residual"][i] = values
            for kept in group.kept:
                factor = factors.get(kept, {}).get(name)
                check_tensor(factor, f"{kept} of parameter '{name}'", name)
                wanted = (group.rank, group.rows if kept == "p" else group.columns)
                if tuple(factor.shape) != wanted or not bool(torch.isfinite(factor).all()):
                    raise UsageError(
                        f"{kept} of parameter '{name}' has the shape {tuple(factor.shape)} in the state, or a value "
                        f"that is not finite; expected are finite numbers of shape {wanted}",
                        field=name,
                    )
                own[kept][i] = factor.float()
                check = zlib.crc32(_state.bytes_of(own[kept][i]), check)
        known = {self._names[i] for i in self._matrices}
        for kept, found in factors.items():
            for name in found:
                if name not in known:
                    raise UsageError(
                        f"the state has factors of parameter '{name}', which lowrank is not chosen for here",
                        field=str(name),
                    )
        return own, [("factors", str(check))]

    def _restore_own(self, own: Mapping[str, Any]) -> None:
        for group in self._groups:
            for at, i in enumerate(group.parameters):
                group.residual[at].copy_(own["residual"][i].view(group.rows, group.columns))
                for kept in group.kept:
                    getattr(group, kept)[at].copy_(own[kept][i])
