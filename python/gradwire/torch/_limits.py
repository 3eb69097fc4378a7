# SPDX-License-Identifier: Apache-2.0
"""Clipping where Adam's momentum is exchanged. Adam stays stable because a gradient that is far too large is clipped
before it enters the momentum. The loop of the user clips p.grad, which is the averaged momentum here, and that comes
too late: a gradient of ten times the limit is only a tenth of the momentum. So every rank clips its own gradient.

The norm of a whole gradient is known only when the backward pass has ended, and by then most of it was sent. So each
parameter has a limit of its own: the share of the clip that it had in the norms of earlier steps (as in
src/train/gradient_limits.h).

    n_i       the norm of this rank's gradient of parameter i, without the loss scale
    level_i   a running mean of n_i over about 20 steps in which n_i is not 0; no n_i counts for more than 3 level_i
    limit_i   clip * level_i / sqrt(sum of level_j^2)

Where parameters are sharded, a replica is what clips, and its gradient is spread over the ranks that hold its shards.
There i is one shard of a parameter, and j runs over all shards of all parameters on all of these ranks. The squares of
the limits still add up to clip^2, so the whole gradient of a replica is held, and a gradient that is too large as a
whole is scaled down by one factor. Only the sum of the squares is exchanged, once a step and not while gradients are
sent: it changes when a step is taken.
"""

from __future__ import annotations

from typing import Sequence

import torch

from ._shards import ShardSums

_MEMORY, _SURPRISE = 20, 3.0
_CLIPPED = 0.999  # a norm that the loop has made smaller than this share of what it was


class GradientLimits:
    """On one rank. All numbers stay on the device of the model; the host waits for none of them, but for those that
    tell the clip of the user's loop."""

    def __init__(self, parameters: int, device: torch.device, clip: float, sums: ShardSums | None = None) -> None:
        self.clip = clip  # 0: not known, so nothing is clipped
        self._sums = sums or ShardSums()
        self._searches = clip == 0
        self.levels = torch.zeros(parameters, dtype=torch.float64, device=device)
        self._seen = torch.zeros_like(self.levels)
        self._elsewhere = torch.zeros((), dtype=torch.float64, device=device)  # squares of the levels of other shards
        self._places: dict[tuple[int, ...], torch.Tensor] = {}

    def apply(self, which: Sequence[int], gradients: Sequence[torch.Tensor], together: bool = False) -> bool:
        """Scales gradients down to their limits, in place, and returns whether it has changed any. What is not finite
        stays so. together: these are all gradients of a step that has no levels yet, and all ranks are here; collective
        then."""
        if not self.clip or not which:
            return False
        places, norms = self.see(which, gradients)
        # A parameter without a level, as in the first step, counts with its norm.
        mine = self.levels[places]
        levels = torch.where(mine > 0, mine, norms)
        here = torch.where(self.levels > 0, self.levels, self._seen).square().sum()
        if together:
            self._elsewhere = self._of_other_shards(here)
        whole = (here + self._elsewhere).sqrt()
        factors = (self.clip * levels / (norms * whole + 1e-30)).clamp_max_(1).float()
        if not factors.is_cuda and bool((factors == 1).all()):
            return False  # on the CPU the host can look, and an operation on all elements is saved
        torch._foreach_mul_(list(gradients), list(factors.unbind()))
        return True

    def see(self, which: Sequence[int], gradients: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Keeps the norms of gradients for `commit`. Returns the places of the parameters, and the norms."""
        key = tuple(which)
        if key not in self._places:
            self._places[key] = torch.tensor(key, device=self.levels.device)
        places = self._places[key]
        norms = torch.stack(torch._foreach_norm(list(gradients))).double()
        self._seen.index_copy_(0, places, norms)
        return places, norms

    def commit(self, taken: int) -> None:
        """A step was taken, the first one with taken = 1: levels follow what `apply` has seen. Collective."""
        if not self.clip:
            return
        following = self.levels + (torch.minimum(self._seen, _SURPRISE * self.levels) - self.levels) / min(
            taken, _MEMORY
        )
        following = torch.where(self.levels > 0, following, self._seen)
        self.levels.copy_(torch.where(self._seen > 0, following, self.levels))
        self._seen.zero_()
        self._elsewhere = self._of_other_shards(self.levels.square().sum())

    def restore(self, clip: float, levels: torch.Tensor) -> None:
        """Goes on from a state. Collective."""
        self.clip = clip
        self.levels.copy_(levels)
        self._seen.zero_()
        self._elsewhere = self._of_other_shards(self.levels.square().sum())

    def _of_other_shards(self, here: torch.Tensor) -> torch.Tensor:
        return (self._sums.total(here) - here).clamp_min_(0)

    def learn(self, before: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], scale: float) -> bool:
        """Finds the clip of the user's loop: the norm of p.grad at the step of the optimizer, if it is smaller than the
        norms `before` say that were handed to the loop with the loss scale `scale`. A clip has the same norm in every
        step that it changes; a loop that divides p.grad by something has not. Returns whether this step has shown it.
        Collective."""
        if not self._searches:
            return False
        squares = torch.zeros(2, dtype=torch.float64, device=self.levels.device)
        if before:
            squares[0] = torch.stack(list(before)).double().square().sum() / scale**2
            squares[1] = torch.stack(torch._foreach_norm(list(gradients))).double().square().sum()
        was, now = self._sums.total(squares).sqrt().tolist()
        # A factor of a thousand is not a clip but a GradScaler that nobody has told us of.
        if not was / 1024 < now < _CLIPPED * was:
            return False
        found = self.clip == 0
        self._searches = found or abs(now - self.clip) < 1e-3 * self.clip
        self.clip = (self.clip or now) if self._searches else 0.0
        return found
