# SPDX-License-Identifier: Apache-2.0
"""The door through which a hook takes the all-reduce between replicas from FSDP2. torch has no public one: the hook of
`set_all_reduce_hook` runs after torch's own all-reduce where a mesh has a replicate dimension. But FSDP calls
`dist.all_reduce` with a process group that each of its parameter groups keeps in `mesh_info`, and a process group may
be written in Python. So a ReplicaGroup stands there in the place of torch's. torch still accumulates, divides, and
decides when replicas are reduced at all.

    unit         one parameter group of FSDP: what is reduced in one call, as one flat buffer
    the buffer   the shards of those parameters that have a gradient, in order, each padded to the size of the largest
                 shard of its parameter

The attributes that are used here are private to torch. `find` refuses a torch in which one of them is missing.
"""

from __future__ import annotations

import copy
import functools
import weakref
from typing import TYPE_CHECKING, Any, Sequence

import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp

from .._errors import EngineError, UnsupportedError, UsageError
from ._fsdp_doors import door, locals_of_caller, module_names, name_of, param_groups, refuse_layout
from ._hook import DTYPES

if TYPE_CHECKING:
    from ._replicas import ReplicaHook


def has_replicas(model: torch.nn.Module) -> bool:
    """Whether the gradients of the model are reduced between replicas: by `fully_shard` on a mesh with two dimensions,
    or by `replicate`."""
    from torch.distributed.tensor import DTensor, Replicate

    try:
        infos = [
            theirs.mesh_info
            for module in model.modules()
            if isinstance(module, fsdp.FSDPModule)
            for theirs in param_groups(module)
        ]
        return any(info.replicate_mesh_dim is not None for info in infos)
    except (AttributeError, UnsupportedError):
        # A torch that `find` refuses. Placements are public, but tensor parallelism has replicas too.
        return any(
            isinstance(parameter, DTensor) and any(isinstance(one, Replicate) for one in parameter.placements)
            for parameter in model.parameters()
        )


def _refuse_other_axes(name: str, info: Any) -> None:
    """For a parameter that was a DTensor before it was sharded. torchtitan makes all parameters such, on a mesh with an
    axis for each kind of parallelism, and tells FSDP by `dp_mesh_dims` which axes are its own. What is left over
    changes nothing where it has one rank."""
    mesh, own = getattr(info, "spmd_mesh", None), getattr(info, "dp_mesh_dims", None)
    if mesh is not None and own is not None:
        ours = {*door(own, "shard_names"), *door(own, "replicate_names")}
        others = [axis for axis in zip(mesh.mesh_dim_names, mesh.shape) if axis[0] not in ours and axis[1] > 1]
        if not others:
            return
        why = f"on axis '{others[0][0]}' of its mesh, with {others[0][1]} ranks"
    else:
        why = "by tensor parallelism too"
    raise UnsupportedError(
        f"parameter '{name}' is distributed {why}; allowed are meshes of one or two dimensions, replicate and shard, "
        "and further axes of one rank",
        field="mesh",
    )


def _reduced_as(name: str, theirs: Any) -> torch.dtype:
    """The type that FSDP reduces the gradient of a parameter in, if it is alone in its buffer."""
    policy, sharded = door(theirs, "mp_policy"), door(theirs, "sharded_param")
    if policy.reduce_dtype is not None:
        return policy.reduce_dtype  # type: ignore[no-any-return]
    if not hasattr(theirs, "sharded_grad_dtype"):  # torch before 2.15: the type that the model computes with
        return policy.param_dtype or sharded.dtype  # type: ignore[no-any-return]
    # Not theirs.sharded_grad_dtype: it may be set until the first forward pass, and FSDP takes it over only then.
    if sharded.grad_dtype is None:
        raise UnsupportedError(
            f"the gradient of parameter '{name}' may have any type, because its grad_dtype is None; say reduce_dtype "
            "in the mixed-precision policy",
            field="dtype",
        )
    return sharded.grad_dtype  # type: ignore[no-any-return]


def _is_converted(group: Any, theirs: Any, dtype: torch.dtype) -> bool:
    """Whether FSDP makes another tensor of a parameter's gradient once it is reduced, which has this type."""
    if hasattr(theirs, "sharded_grad_dtype"):
        return theirs.sharded_grad_dtype not in (None, dtype)
    return getattr(group, "_orig_dtype", None) != dtype  # torch before 2.15; None: the group has several types


class Parameter:
    """A parameter of the model, of which this rank has a shard."""

    def __init__(self, name: str, theirs: Any, dtype: torch.dtype) -> None:
        self.name, self.dtype = name, dtype  # the type that gradients are reduced in
        self.shape: tuple[int, ...] = tuple(door(theirs, "_orig_size"))
        self.shard_shape: tuple[int, ...] = tuple(door(theirs, "sharded_size"))
        self.shard_dim = int(door(door(theirs, "fsdp_placement"), "dim"))
        self.padded: int = door(theirs, "padded_sharded_param_size").numel()
        self.elements = torch.Size(self.shape).numel()
        self.count = torch.Size(self.shard_shape).numel()  # of the shard
        self.offloaded = bool(door(theirs, "offload_to_cpu"))

    def cut(self, whole: torch.Tensor, shards: int) -> list[torch.Tensor]:
        """The shards of all ranks, as FSDP cuts them."""
        parts = list(torch.chunk(whole.reshape(self.shape), shards, dim=self.shard_dim))
        return parts + [parts[0].new_empty(0)] * (shards - len(parts))


class Unit:
    """A parameter group of FSDP, and our process group in it."""

    def __init__(self, index: int, theirs: Any, names: dict[int, str]) -> None:
        self.index = index
        self._theirs = weakref.ref(theirs)  # it holds our process group, and that holds the hook and this unit
        self.group: dist.ProcessGroup = theirs.mesh_info.replicate_process_group
        if isinstance(self.group, ReplicaGroup):
            self.group = self.group.theirs
        self.parameters: list[Parameter] = []
        self.known: dict[int, int] = {}  # id of FSDP's parameter -> its place in `parameters`
        self.first = 0  # the place of the first one in the hook's list
        for one in theirs.fsdp_params:
            sharded = door(one, "sharded_param")
            if not sharded.requires_grad:
                continue
            name = name_of(one, names)
            dtype = _reduced_as(name, one)
            if getattr(one, "is_dtensor", False):
                _refuse_other_axes(name, theirs.mesh_info)
            if dtype not in DTYPES:
                raise UnsupportedError(
                    f"the gradient of parameter '{name}' is reduced as {str(dtype)[6:]}; allowed are float32, float16 "
                    "and bfloat16",
                    field="dtype",
                )
            self.known[id(one)] = len(self.parameters)
            self.parameters.append(Parameter(name, one, dtype))
        # Since 2.15 they may differ, and one buffer has the smallest type that holds them all.
        types = {parameter.dtype for parameter in self.parameters}
        for parameter in self.parameters:
            parameter.dtype = functools.reduce(torch.promote_types, types)

    def sharded(self) -> list[torch.nn.Parameter]:
        """What an optimizer updates, in the order of `parameters`."""
        theirs: Any = self._theirs()
        return [one.sharded_param for one in theirs.fsdp_params if id(one) in self.known]

    def install(self, hook: "ReplicaHook") -> None:
        theirs = self._theirs()
        if theirs is not None:
            # Several parameter groups may share one mesh_info; each of ours knows its unit.
            theirs.mesh_info = copy.copy(theirs.mesh_info)
            theirs.mesh_info.replicate_process_group = ReplicaGroup(self, hook)

    def uninstall(self) -> None:
        theirs = self._theirs()
        if theirs is not None and isinstance(theirs.mesh_info.replicate_process_group, ReplicaGroup):
            theirs.mesh_info.replicate_process_group = self.group

    def layout(self, flat: torch.Tensor, present: Sequence[Any]) -> tuple[list[int], list[torch.Tensor]]:
        """The shards in a buffer: their places in the hook's list, and views of them. Empty ones are left out."""
        where: list[int] = []
        views: list[torch.Tensor] = []
        at = 0
        for theirs in present:
            if id(theirs) not in self.known:
                raise UsageError(
                    "a parameter requires a gradient that did not require one when compress was called; call compress "
                    "again",
                    field="parameters",
                )
            place = self.known[id(theirs)]
            parameter = self.parameters[place]
            if parameter.dtype != flat.dtype:
                raise UnsupportedError(
                    f"the gradient of parameter '{parameter.name}' is reduced as {str(flat.dtype)[6:]}; when compress "
                    f"was called it was to be {str(parameter.dtype)[6:]}",
                    field="dtype",
                )
            if parameter.count:
                where.append(self.first + place)
                views.append(flat[at : at + parameter.count].view(parameter.shard_shape))
            at += parameter.padded
        refuse_layout(flat.numel(), at)
        return where, views

    def is_read_early(self, flat: torch.Tensor) -> bool:
        """Whether torch, or a hook of the user, reads the result of the all-reduce before the backward pass ends. If
        not, torch only makes views of the buffer."""
        theirs: Any = self._theirs()
        return (
            flat.dtype not in (torch.float32, torch.bfloat16)  # it is divided after the all-reduce
            or bool(getattr(theirs, "force_sum_reduction_for_comms", True))
            or any(_is_converted(theirs, one, flat.dtype) for one in theirs.fsdp_params if id(one) in self.known)
            or getattr(theirs, "_all_reduce_hook", None) is not None
            or any(
                one.sharded_param.grad is not None  # it is added to that
                or one.offload_to_cpu
                or bool(getattr(one.sharded_param, "_post_accumulate_grad_hooks", None))
                for one in theirs.fsdp_params
            )
        )


class _Complete(dist.Work):
    """What torch waits for after a call that it has nothing to wait for."""

    def wait(self, timeout: Any = None) -> bool:
        return True


class ReplicaGroup(dist.ProcessGroup):
    """The replicas that share a unit, as FSDP sees them: all it can do is to reduce that unit's gradients."""

    def __init__(self, unit: Unit, hook: "ReplicaHook") -> None:
        super().__init__(unit.group.rank(), unit.group.size())  # type: ignore[call-arg]
        self.theirs = unit.group
        self._unit, self._hook = unit, hook

    def getBackendName(self) -> str:
        return "gradwire"

    def allreduce(self, tensors: Any, options: Any = None) -> Any:  # type: ignore[override]
        try:
            work = self._hook._all_reduce(self._unit, tensors[0], options)
        except Exception as error:
            # torch would look for this group in its list, to log the error, and raise that it is not there.
            self._hook._fail_later(error)
            work = None
        return _Complete() if work is None else work


class Buffer:
    """What only the function of FSDP that has made a buffer knows of it. It is one of our callers.

    parameters: those that are in it; FSDP leaves parameters without a gradient out. divisor: what FSDP divides the
    result by, when it has it.
    """

    def __init__(self, made_by: dict[str, Any]) -> None:
        self.parameters: Sequence[Any] = made_by["fsdp_params"]
        self.divisor: float = made_by.get("postdivide_factor") or 1.0


def buffer_of_caller() -> Buffer:
    return Buffer(locals_of_caller("foreach_reduce", "fsdp_params"))


class Replicas:
    """What `find` finds: the units that are reduced between replicas, and the mesh."""

    def __init__(self, units: list[Unit], first: Any) -> None:
        self.units = units
        self.group = units[0].group
        self.shard_group: dist.ProcessGroup | None = getattr(first.mesh_info, "shard_process_group", None)
        self.replicas, self.replica = self.group.size(), self.group.rank()
        self.shards = self.shard_group.size() if self.shard_group is not None else 1
        self.shard = self.shard_group.rank() if self.shard_group is not None else 0
        self.members: list[int] = sorted(first.mesh_info.mesh.mesh.flatten().tolist())
        self.device: torch.device = door(first, "device")
        place = 0
        for unit in units:
            unit.first = place
            place += len(unit.parameters)

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        return [self.group] + ([self.shard_group] if self.shard_group is not None else [])

    @property
    def parameters(self) -> list[Parameter]:
        return [parameter for unit in self.units for parameter in unit.parameters]

    @property
    def sharded(self) -> list[torch.nn.Parameter]:
        """The same as an optimizer has them."""
        return [parameter for unit in self.units for parameter in unit.sharded()]


def find(model: torch.nn.Module) -> Replicas:
    names = module_names(model)
    found: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            for theirs in param_groups(module):
                found[id(theirs)] = theirs  # several modules may share a state
    units: list[Unit] = []
    replicated: list[Any] = []
    for theirs in found.values():
        info = door(theirs, "mesh_info")
        door(theirs, "fsdp_params")
        if getattr(info, "replicate_mesh_dim", None) is None:
            continue  # not replicated: left to torch
        mesh = door(info, "mesh")
        if mesh.ndim > 2:
            raise UnsupportedError(
                f"the model's mesh has {mesh.ndim} dimensions; allowed are meshes of one or two dimensions, replicate "
                "and shard",
                field="mesh",
            )
        door(info, "replicate_process_group")
        units.append(Unit(len(units), theirs, names))
        replicated.append(theirs)
        shards = [getattr(one.mesh_info, "shard_process_group", None) for one in replicated]
        if units[-1].group is not units[0].group or shards[-1] is not shards[0]:
            raise UnsupportedError(
                "parts of the model are replicated over different meshes; compress each part by itself", field="mesh"
            )
    if not units:
        raise EngineError("the model has replicated parameters, and no parameter group of FSDP has them", field="model")
    return Replicas(units, replicated[0])
