# SPDX-License-Identifier: Apache-2.0
"""Matrices as products of two thin factors, by power iteration with warm start and error feedback. For a matrix of n
rows and m columns, on W ranks, factors have r rows here, each of which is a column of the matrix's own space:

    p, q        r x n and r x m, with orthonormal rows, kept from step to step: the same bits on all ranks
    residual    n x m, own to a rank

    M = gradient + residual

    alternate=off (PowerSGD), two exchanges      alternate=on (ACP-SGD), one exchange
    X = mean of q M^T;  p = orthonormal X        even steps: X = mean of q M^T, result X^T q, p = orthonormal X
    X = mean of p M, result p^T X                odd steps:  X = mean of p M,   result p^T X, q = orthonormal X
    q = orthonormal X

    residual = M - what this rank has added to the result

"What this rank has added" is the product with its own message as the others decode it, not the result itself: the means
over the ranks are the same, and a rank's own noise, which cancels in the mean, does not pile up in its residual, where
it would make every later message coarser. What the owner's rounding of a mean has left out is added to the residual of
the owner, W times, so that the mean of the residuals is exactly what the result lacks.

Matrices of one shape are stacked, so that one call serves all that stand next to each other in a bucket. On a GPU the
products are torch's, and nothing here waits for it. On the CPU they are the core's, which give the same bits on every
processor, and store M only where it is read more than twice.
"""

from __future__ import annotations

import math
import zlib
from typing import Iterable, Sequence

import torch

from .. import _core
from ._hook import DTYPES
from ._lowrank_spec import LowRank, MatrixShape

_SHIFT, _DEPENDENT = 1e-10, 1e-8  # of a squared length, in double; see orthonormal()


def on_core(device: torch.device) -> bool:
    """Whether the products of matrices on this device are the core's."""
    return device.type == "cpu"


def orthonormal(factors: Sequence[torch.Tensor], starts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Stacks of factors with orthonormal rows that span what the rows of `factors` span: Cholesky's factorisation of
    their Gram matrices, in double, twice. A row that is zero, or that earlier rows span (but for an angle of 1e-4), is
    replaced by the row of `starts` in its place. Factors that are not finite give anything, finite or not."""
    if factors and on_core(factors[0].device):
        made = [factor.float().clone(memory_format=torch.contiguous_format) for factor in factors]
        for one, start in zip(made, starts):
            start = start.float().contiguous()
            _core.make_orthonormal(one.data_ptr(), *one.shape, start.data_ptr())
        return made
    wide = [factor.double() for factor in factors]
    for again in (False, True):
        made = [torch.empty(0)] * len(wide)
        for rank in sorted({one.shape[1] for one in wide}):
            some = [i for i, one in enumerate(wide) if one.shape[1] == rank]
            transform, lost = _transform(torch.cat([torch.bmm(wide[i], wide[i].mT) for i in some]))
            counts = [wide[i].shape[0] for i in some]
            for i, by, filled in zip(some, transform.split(counts), lost.split(counts)):
                made[i] = torch.bmm(by, wide[i])
                if not again:
                    made[i].addcmul_(filled.unsqueeze(2).double(), starts[i].double())
        wide = made
    return [one.float() for one in wide]


def _transform(gram: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(r x r matrices that make rows with these products orthonormal, or zero; which rows they make zero)."""
    square = gram.diagonal(dim1=1, dim2=2)
    zero = ~(square > 0)
    scale = torch.where(zero, 0.0, square.clamp(min=1e-300).rsqrt())
    unit = gram * scale.unsqueeze(2) * scale.unsqueeze(1)
    unit.diagonal(dim1=1, dim2=2).add_(zero.double() + _SHIFT)
    root = torch.linalg.cholesky_ex(unit).L
    lost = zero | ~(root.diagonal(dim1=1, dim2=2).square() > _DEPENDENT)
    transform = torch.linalg.solve_triangular(root, torch.diag_embed(scale), upper=False)
    return torch.where(lost.unsqueeze(2), 0.0, transform), lost


def taint(values: Iterable[torch.Tensor]) -> torch.Tensor:
    """For each tensor 0, or NaN where it has a value that is not finite."""
    return torch.stack([one.float() for one in torch._foreach_norm(list(values), math.inf)]).mul_(0.0)


def taints(stacks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The same for each matrix of each stack, to be added to it."""
    if not stacks:
        return []
    found = taint(one for stack in stacks for one in stack.unbind())
    return [some.view(-1, 1, 1) for some in found.split([len(stack) for stack in stacks])]


class FactorGroup:
    """The matrices of one shape and one codec, `parameters` of the model, as stacks."""

    def __init__(
        self,
        codec: LowRank,
        shape: MatrixShape,
        parameters: Sequence[int],
        names: Sequence[str],
        device: torch.device,
        threads: int = 1,
    ) -> None:
        self.codec, self.parameters, self.rank = codec, list(parameters), codec.rank
        self.rows, self.columns = shape.rows, shape.columns
        # Made on the CPU, by names: every rank, of any world, begins with the same bits.
        self.p_start = self._start("P", self.rows, names).to(device)
        self.q_start = self._start("Q", self.columns, names).to(device)
        self.p, self.q = self.p_start.clone(), self.q_start.clone()  # alternate=off keeps q only
        self.new_p, self.new_q = self.p.clone(), self.q.clone()  # which the open step will leave, if it is finite
        self.taint = torch.zeros(len(self.parameters), 1, 1, device=device)  # of p; see taint()
        # What is exchanged: this rank's factors, and then their means. `own` is what this rank has added to a mean.
        self.x_p, self.x_q = torch.zeros_like(self.p), torch.zeros_like(self.q)
        self.own_p, self.own_q = torch.zeros_like(self.p), torch.zeros_like(self.q)
        size = (len(self.parameters), self.rows, self.columns)
        self.residual = torch.zeros(size, device=device)
        # M, where it is stored, and then the residual that the open step will leave.
        self.work = torch.zeros(size, device=device)
        self.stores = not codec.alternate  # on the CPU: it is read three times then
        self.pool = _core.Pool(threads) if on_core(device) else None
        self.gradients = [torch.empty(0)] * len(self.parameters)  # of the open step, on the CPU
        self.mix = 1.0, 1.0  # of the gradient and of the residual in M

    def _start(self, which: str, size: int, names: Sequence[str]) -> torch.Tensor:
        drawn = []
        for parameter in self.parameters:
            draw = torch.Generator().manual_seed(zlib.crc32(f"{names[parameter]}/{which}".encode()))
            drawn.append(torch.randn(self.rank, size, generator=draw, dtype=torch.float64))
        stack = torch.stack(drawn)
        return orthonormal([stack], [stack])[0]

    def sends_p(self, step: int) -> bool:
        """Whether the first exchange of a step is about p."""
        return not self.codec.alternate or step % 2 == 0

    def runs(self, parameters: Iterable[int]) -> "list[Run]":
        """The matrices of these parameters, as few slices of the stacks as possible."""
        places = sorted(self.parameters.index(one) for one in set(parameters) & set(self.parameters))
        found: list[list[int]] = []
        for place in places:
            if found and found[-1][-1] == place - 1:
                found[-1].append(place)
            else:
                found.append([place])
        return [Run(self, places[0], places[-1] + 1) for places in found]

    @property
    def kept(self) -> list[str]:
        """The factors that are kept from step to step."""
        return ["p", "q"] if self.codec.alternate else ["q"]

    def commit(self, finite: torch.Tensor, step: int) -> None:
        """Ends a step: it changes what is kept if it is finite."""
        self.gradients = [torch.empty(0)] * len(self.parameters)  # DDP's buckets may be freed
        if self.codec.alternate and self.sends_p(step):
            torch.where(finite, self.new_p, self.p, out=self.p)
        else:
            torch.where(finite, self.new_q, self.q, out=self.q)
        if finite.is_cuda:
            torch.where(finite, self.work, self.residual, out=self.residual)
        elif bool(finite):
            self.residual, self.work = self.work, self.residual

    @property
    def nbytes(self) -> int:
        """Of residuals, both copies."""
        return 2 * self.residual.numel() * self.residual.element_size()


class Run:
    """Neighbours in the stacks of a group that stand in one bucket."""

    def __init__(self, group: FactorGroup, first: int, end: int) -> None:
        self.group, self.first, self.end = group, first, end
        self.parameters = group.parameters[first:end]

    def cut(self, stack: torch.Tensor) -> torch.Tensor:
        return stack[self.first : self.end]

    @property
    def work(self) -> torch.Tensor:
        return self.cut(self.group.work)

    def load(self, matrices: Sequence[torch.Tensor], factor: float, decay: float) -> None:
        """M = factor * gradient + decay * residual."""
        if self.group.pool is not None:
            self.group.gradients[self.first : self.end] = matrices
            self.group.mix = factor, decay
            return
        for out, gradient, residual in zip(self.work, matrices, self.cut(self.group.residual)):
            if factor == 1 and gradient.dtype == torch.float32:
                torch.add(gradient, residual, alpha=decay, out=out)
            else:
                out.copy_(gradient).mul_(factor).add_(residual, alpha=decay)

    def matrices(self, projected: bool = True) -> _core.LowRankMatrices:
        """What load() was given, on the CPU. projected: after project_p()."""
        group = self.group
        assert group.pool is not None
        gradients = group.gradients[self.first : self.end]
        return _core.LowRankMatrices(
            group.pool,
            group.rows,
            group.columns,
            group.rank,
            [one.data_ptr() for one in gradients],
            DTYPES[gradients[0].dtype],
            self.cut(group.residual).data_ptr(),
            *group.mix,
            self.work.data_ptr() if group.stores and projected else 0,
        )

    def whole(self) -> torch.Tensor:
        """M, for measurements."""
        if self.group.pool is None or self.group.stores:
            return self.work
        factor, decay = self.group.mix
        gradients = self.group.gradients[self.first : self.end]
        return torch.stack([one.float() for one in gradients]) * factor + decay * self.cut(self.group.residual)

    def keep(self, parameter: int) -> None:
        """This parameter was used by no rank: it leaves the step as it came."""
        at, group = self.group.parameters.index(parameter), self.group
        group.work[at].copy_(group.residual[at])
        group.new_p[at].copy_(group.p[at])
        group.new_q[at].copy_(group.q[at])
        for stack in (group.x_p, group.x_q, group.own_p, group.own_q):
            stack[at].zero_()

    def project_p(self) -> None:
        """x_p = q M^T."""
        q, x = self.cut(self.group.q), self.cut(self.group.x_p)
        if self.group.pool is not None:
            stored = self.work.data_ptr() if self.group.stores else 0
            self.matrices(projected=False).project_rows(q.data_ptr(), x.data_ptr(), stored)
        else:
            torch.bmm(q, self.work.mT, out=x)

    def project_q(self) -> None:
        """x_q = p M."""
        p, x = self.cut(self.group.p), self.cut(self.group.x_q)
        if self.group.pool is not None:
            self.matrices().project_columns(p.data_ptr(), x.data_ptr())
        else:
            torch.bmm(p, self.work, out=x)

    def split(
        self,
        own: tuple[torch.Tensor, torch.Tensor],
        result: tuple[torch.Tensor, torch.Tensor],
        matrices: Sequence[torch.Tensor],
        scale: float,
    ) -> None:
        """M - own, the residual that the step will leave; and the result, in the place of the gradients. Both are
        products left^T right."""
        own, result = (self.cut(own[0]), self.cut(own[1])), (self.cut(result[0]), self.cut(result[1]))
        if self.group.pool is not None:
            self.matrices().split(
                (own[0].data_ptr(), own[1].data_ptr()),
                (result[0].data_ptr(), result[1].data_ptr()),
                scale,
                self.work.data_ptr(),
                [one.data_ptr() for one in matrices],
            )
            return
        self.work.baddbmm_(own[0].mT, own[1], alpha=-1)
        for out, left, right in zip(matrices, *result):
            if scale != 1:
                right = right * scale
            if out.dtype == torch.float32:
                torch.mm(left.mT, right, out=out)
            else:
                out.copy_(torch.mm(left.mT, right))
