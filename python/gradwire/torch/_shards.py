# SPDX-License-Identifier: Apache-2.0
"""Where parameters are sharded, a rank sees a part of each of them. What is about a whole parameter, or about the whole
gradient, is a sum over the ranks that have the other shards of the same replica.
"""

from __future__ import annotations

import torch
import torch.distributed as dist


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this rank has: of a DTensor its local tensor, else all of it. Without gradients."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class ShardSums:
    """Sums over the shards of one replica. Without a group every rank has whole parameters, and nothing is sent."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group if group is not None and dist.get_world_size(group) > 1 else None

    def total(self, mine: torch.Tensor) -> torch.Tensor:
        """The sum of a few numbers over all shards. Collective. Numbers are gathered and added in the order of the
        ranks, so that replicas with the same numbers find the same bits, however their processes are connected."""
        if self.group is None:
            return mine
        through_host = mine.is_cuda and "nccl" not in dist.get_backend(self.group)
        here = mine.cpu() if through_host else mine.contiguous()
        every = [torch.empty_like(here) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(every, here, group=self.group)
        return torch.stack(every).sum(0).to(mine.device)
