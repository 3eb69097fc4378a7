# SPDX-License-Identifier: Apache-2.0
"""Where the parameters of a unit lie in the flat buffers of FSDP2's shard dimension. A buffer has a shard for every
rank, and a shard has a part of every parameter: its elements, padded to as many as the largest part of that parameter
has on any rank.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from .. import _core
from .._errors import UnsupportedError, UsageError
from ._fsdp_doors import door, locals_of_caller, name_of, param_groups, refuse_layout


class Part(NamedTuple):
    """What a rank has of a parameter, padded."""

    name: str
    shape: tuple[int, ...]  # of the whole parameter
    padded: int
    ranks: int  # that have a part of it
    trains: bool  # when compress was called

    def codec(self, rules: "_core.Rules") -> "_core.Codec":
        """Rules are about whole parameters."""
        return rules.codec_for(self.name, len(self.shape), math.prod(self.shape))

    def tensors(self, ranks: int) -> list[str]:
        """The names of the parts of all ranks, as the core and states have them."""
        return [f"{self.name}/{p}" for p in range(ranks)]


class Parts:
    """Those of the parameters that a module has as a unit of FSDP."""

    def __init__(self, module: torch.nn.Module, names: dict[int, str]) -> None:
        self.all: list[Part] = []
        self._known: dict[int, int] = {}  # id of FSDP's parameter -> its place in `all`
        for group in param_groups(module):
            ranks = getattr(door(group, "mesh_info"), "shard_mesh_size", 1)
            for theirs in door(group, "fsdp_params"):
                self._known[id(theirs)] = len(self.all)
                shape, padded = tuple(door(theirs, "_orig_size")), door(theirs, "padded_sharded_param_size")
                trains = bool(door(theirs, "sharded_param").requires_grad)
                self.all.append(Part(name_of(theirs, names), shape, padded.numel(), ranks, trains))

    def in_gradients(self, count: int) -> tuple[int, ...]:
        """Which are in the buffer that FSDP reduce-scatters in a call of ours, with so many elements for a rank."""
        return self._places(locals_of_caller("foreach_reduce", "fsdp_params")["fsdp_params"], count)

    def in_weights(self, count: int) -> tuple[int, ...]:
        """Which are in the buffer that FSDP gathers."""
        found = locals_of_caller("foreach_all_gather", "fsdp_params", "inp_split_sizes")
        if len(found["inp_split_sizes"]) != len(found["fsdp_params"]):
            raise UnsupportedError(
                "a parameter is gathered as several tensors, by an extension of FSDP; leave its module to torch with a "
                "rule such as 'module.*=fp32'",
                field="weights",
            )
        return self._places(found["fsdp_params"], count)

    def _places(self, present: Any, count: int) -> tuple[int, ...]:
        places = []
        for theirs in present:
            if id(theirs) not in self._known:
                raise UsageError(
                    "a module was sharded, or a parameter replaced, after compress was called; call compress again",
                    field="parameters",
                )
            places.append(self._known[id(theirs)])
        refuse_layout(count, sum(self.all[place].padded for place in places))
        return tuple(place for place in places if self.all[place].padded)  # the core has no shards without elements
