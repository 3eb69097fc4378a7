# SPDX-License-Identifier: Apache-2.0
"""The place of a hook in a DistributedDataParallel. DDP accepts one communication hook per model, forever, so what is
registered is a slot, in which a hook can be placed, replaced and removed. While it is empty DDP computes the mean as it
does without a communication hook.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Sequence

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .._errors import UsageError
from . import _hook, _nodes, _register
from ._agree import Handshake, agreed
from ._compress import refuse_foreign
from ._rules import has_lowrank
from ._transport import Transport, never_free

if TYPE_CHECKING:
    from ._ddp import DdpHook


class Slot:
    """What DDP holds. DDP copies it when it is copied or pickled; the copy of a slot is empty, as the copied DDP has no
    communication hook either."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.hook: "DdpHook | None" = None

    def __deepcopy__(self, memo: object) -> "Slot":
        return Slot()

    def __reduce__(self) -> tuple[Any, ...]:
        return Slot, ()

    def before_forward(self, *_: Any) -> None:
        if self.hook is not None:
            self.hook._prefetch_scale()


_SLOTS: "weakref.WeakKeyDictionary[DistributedDataParallel, Slot]" = weakref.WeakKeyDictionary()


def hook_of(ddp: DistributedDataParallel) -> "DdpHook | None":
    slot = _SLOTS.get(ddp)
    return slot.hook if slot is not None else None


def _outlive_backward(ended: bool) -> None:
    """At the end of the process. The destructor of a DDP waits for its backward pass; one that has not ended by now
    never will, because it needs the interpreter to call the hook."""
    if not ended:
        for ddp in list(_SLOTS):
            never_free(ddp)


Transport.at_exit.append(_outlive_backward)


def _run_slot(  # type: ignore[name-defined]
    slot: object, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """The communication hook that is registered with DDP."""
    assert isinstance(slot, Slot) and slot.group is not None
    if slot.hook is None:
        return plain_mean(bucket, slot.group)
    return slot.hook._comm_hook(bucket)


# DDP compares the annotations of a communication hook with its own types, and in this file they are texts.
_run_slot.__annotations__["bucket"] = dist.GradBucket  # type: ignore[attr-defined]
_run_slot.__annotations__["return"] = torch.futures.Future[torch.Tensor]


def plain_mean(  # type: ignore[name-defined]
    bucket: dist.GradBucket, group: dist.ProcessGroup
) -> torch.futures.Future[torch.Tensor]:
    """As DDP itself computes it: multiplied by the reciprocal, then summed."""
    buffer = bucket.buffer().mul_(1.0 / dist.get_world_size(group))
    work = dist.all_reduce(buffer, group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])  # type: ignore[no-any-return]


def attach(
    ddp: DistributedDataParallel, codec: Any, options: dict[str, Any], names: Sequence[str] | None = None
) -> "DdpHook":
    """Makes a hook and puts it in place of the one that is there, if there is one. Collective. names: those of the
    parameters, where DDP does not know them."""
    group: dist.ProcessGroup = ddp.process_group
    layout = _layout(group, options)
    registered: list[tuple[Any, object]] = getattr(ddp, "_comm_hooks", [])

    def prepare() -> tuple[DdpHook, Handshake]:
        refuse_foreign("DDP", options)
        others = [comm_hook for comm_hook, state in registered if not isinstance(state, Slot)]
        if others:
            raise UsageError(
                f"the model has the communication hook '{others[0].__qualname__}' already, and DDP accepts only one",
                field="model",
            )
        hook = _hook_for(ddp, codec, options, names, layout)
        terms = [("nodes", str(options.get("nodes"))), *hook._handshake()]
        return hook, terms + hook._optimizer_terms + hook._moment_terms

    hook = agreed(group, "compress", prepare, _hook.valid_timeout(options.get("timeout")))
    hook._connect()
    if ddp not in _SLOTS:
        registered.clear()  # slots that were copied with the model, and that its reducer does not know
        slot = Slot(group)
        ddp.register_comm_hook(slot, _run_slot)
        _SLOTS[ddp] = slot
    slot = _SLOTS[ddp]
    if slot.hook is not None:
        slot.hook.remove()
    slot.hook = hook
    hook._slot = weakref.ref(slot)
    if hook._scaler is not None:
        hook._handles.append(ddp.register_forward_pre_hook(slot.before_forward))
    if hook._momentum is not None:
        hook._momentum.attach()
        hook._momentum.watch_accumulation()
    hook._watch_optimizers()
    return hook


def _hook_for(
    ddp: DistributedDataParallel,
    codec: Any,
    options: dict[str, Any],
    names: Sequence[str] | None,
    layout: _nodes.Layout | None,
) -> "DdpHook":
    """Of the kind that the codec and the nodes ask for. They are imported here because they look into slots."""
    python_codec = _register.found(codec)
    if python_codec is not None:
        from ._python_hook import PythonHook

        return PythonHook(ddp, python_codec, options, names)
    if has_lowrank(codec):
        from ._lowrank_hook import LowRankHook

        return LowRankHook(ddp, codec, options, names)
    if layout is not None and layout.per_node > 1:
        from ._nodes_hook import NodesHook

        return NodesHook(ddp, codec, options, names, layout)
    from ._ddp import DdpHook

    return DdpHook(ddp, codec, options, names, layout)


def _layout(group: dist.ProcessGroup, options: dict[str, Any]) -> _nodes.Layout | None:
    """Which ranks share a node, if the user has asked for that. Collective."""
    if "nodes" not in options:
        return None

    def prepare() -> tuple[_nodes.Layout | None, Handshake]:
        nodes = _nodes.checked(options["nodes"])
        known = None if nodes == "auto" else _nodes.layout_of(nodes, group)
        return known, [("nodes", str(nodes))]

    # Ranks must agree that they are looking for nodes before they do; a rank that is not fails in the same comparison.
    layout = agreed(group, "compress", prepare, _hook.valid_timeout(options.get("timeout")))
    return layout or _nodes.layout_of("auto", group)
