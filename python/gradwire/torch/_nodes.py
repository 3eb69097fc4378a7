# SPDX-License-Identifier: Apache-2.0
"""Which ranks share a node. Ranks of one node are joined by a fast link, and nodes by a slow one. All nodes have
equally many ranks; each rank has a node and a place in it, and the ranks with the same place in all nodes belong
together:

    node 0:   rank 0 (place 0)    rank 1 (place 1)
    node 1:   rank 2 (place 0)    rank 3 (place 1)
"""

import os
import socket
from collections import Counter
from dataclasses import dataclass
from typing import Any, Sequence

import torch.distributed as dist

from .. import _arrays
from .._errors import UsageError


@dataclass(frozen=True)
class Layout:
    """places: (node, place in it) of each rank."""

    nodes: int
    per_node: int
    places: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        return f"{self.nodes} x {self.per_node}"


def checked(nodes: Any) -> "int | str":
    """The option of `compress`."""
    if isinstance(nodes, str) and nodes == "auto":
        return nodes
    try:
        if not isinstance(nodes, (str, bool)) and (number := _arrays.whole(nodes, "nodes", 2**31)) > 0:
            return number
    except UsageError:
        pass
    raise UsageError(f"nodes is {nodes!r}; allowed are 'auto' and a number of nodes, 1 or more", field="nodes")


def by_number(nodes: int, world: int) -> Layout:
    """Nodes of consecutive ranks."""
    if world % nodes:
        allowed = ", ".join(str(k) for k in range(1, world + 1) if world % k == 0)
        raise UsageError(
            f"nodes is {nodes}, which does not divide the {world} ranks of the model; allowed are {allowed}",
            field="nodes",
        )
    per_node = world // nodes
    return Layout(nodes, per_node, tuple(divmod(rank, per_node) for rank in range(world)))


Whereabouts = tuple[str, str, str]  # host name, and torchrun's numbers of the node and of its ranks, or ""


def whereabouts() -> Whereabouts:
    return socket.gethostname(), os.environ.get("GROUP_RANK", ""), os.environ.get("LOCAL_WORLD_SIZE", "")


def by_host(found: Sequence[Whereabouts]) -> Layout:
    """From the whereabouts of all ranks. torchrun's word counts where it agrees with itself: every one of its nodes has
    as many ranks here as it says. Where it does not, for example because the model has a group of some ranks only, or
    was not started by torchrun, ranks with the same host name share a node."""
    started = Counter(node for _, node, _ in found)
    told = all(node and size == str(started[node]) for _, node, size in found)
    keys = [node if told else host for host, node, _ in found]
    members: dict[str, list[int]] = {}
    for rank, key in enumerate(keys):
        members.setdefault(key, []).append(rank)
    sizes = {len(ranks) for ranks in members.values()}
    if len(sizes) > 1:
        several = ", ".join(f"'{key}' has {len(ranks)}" for key, ranks in list(members.items())[:8])
        raise UsageError(
            f"nodes is 'auto', and the nodes have different numbers of ranks: {several}; allowed are nodes of equal "
            "size",
            field="nodes",
        )
    places = {rank: (node, place) for node, ranks in enumerate(members.values()) for place, rank in enumerate(ranks)}
    return Layout(len(members), sizes.pop(), tuple(places[rank] for rank in range(len(found))))


def layout_of(nodes: "int | str", group: dist.ProcessGroup) -> Layout:
    """Collective for "auto". What is refused is refused on all ranks."""
    world = dist.get_world_size(group)
    if isinstance(nodes, int):
        return by_number(nodes, world)
    every: list[Whereabouts] = [("", "", "")] * world
    dist.all_gather_object(every, whereabouts(), group=group)
    return by_host(every)
