# SPDX-License-Identifier: Apache-2.0
"""`compress`: finds out what kind of model it was given, and attaches the hook of that kind."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .. import _core
from .._errors import UnsupportedError, UsageError
from ._hook import Hook
from ._unwrap import described, model_around, optimizer_inside, refuse_no_module

# The kinds of models that have an option. HSDP: FSDP2 with replicas, by a mesh of two dimensions or by replicate().
_ONLY = {
    **dict.fromkeys(("measure_every", "guard", "decay", "nodes", "cuda_graphs"), ("DDP",)),
    **dict.fromkeys(("optimizer", "clip", "down", "method", "owner_feedback", "warmup", "timeout"), ("DDP", "HSDP")),
    "weights": ("FSDP2", "HSDP"),
    "gradients": ("HSDP",),
}


def compress(
    model: nn.Module,
    codec: "str | _core.Codec | _core.Rules | None",
    *,
    optimizer: "torch.optim.Optimizer | None" = None,
    clip: float | None = None,
    gradients: "str | _core.Codec | _core.Rules | None" = None,
    weights: "str | _core.Codec | _core.Rules | None" = None,
    down: "str | _core.Codec | _core.Rules | None" = None,
    method: str | None = None,
    feedback: bool | None = None,
    owner_feedback: bool | None = None,
    decay: float | None = None,
    residual: torch.dtype = torch.float32,
    min_elements: int = 1024,
    warmup: int | None = None,
    steps: int | None = None,
    scaler: "torch.amp.GradScaler | None" = None,
    seed: int = 0,
    measure_every: int | None = None,
    guard: float | None = None,
    threads: int = 1,
    timeout: timedelta | float | None = None,
    nodes: "int | str | None" = None,
    cuda_graphs: bool | None = None,
) -> Hook:
    """Compresses what a distributed model sends, and returns the hook, which holds the state. All ranks must call it.

    A second call for the same model replaces the first hook; `hook.remove()` ends the compression.

    model: a DistributedDataParallel, a model sharded by torch.distributed.fsdp.fully_shard (FSDP2) or replicated by
        replicate(), or a module that contains exactly one of them, as torch.compile, accelerate and Fabric make it, or
        a LightningModule in training. An FSDP2 model with replicas, by a mesh of two dimensions (replicate x shard) or
        by replicate(), is called HSDP here: what is compressed is the all-reduce between replicas.
    codec: how gradients are encoded. Either a codec, such as "optquant:bits=4" (`python -m gradwire codecs` lists
        them), or rules, which map names to codecs: in
        "*.bias=fp32;1d=fp32;<1024=fp32;head.*=qsgd:bits=8;*=optquant:bits=4" the first pattern that matches decides
        ("2d": two dimensions or more). A codec alone leaves parameters with one dimension, or with fewer than
        `min_elements` elements, in fp32. Where all parameters are "fp32", torch's own collective is used, with the bits
        of the plain model (under FSDP2 with one dimension: all parameters of a module that fully_shard was called on).
        Under DDP it may be a name that `register` was given, and it may be, or rules may have, "lowrank:rank=4", as
        PowerSGD. None leaves gradients (HSDP: between replicas) to torch.
    feedback: whether what compression leaves out of a gradient (the residual) is added to the next one. None: under DDP
        and HSDP where the codec asks for it; under FSDP2 off, because it needs a residual of the whole model on every
        rank, not only of its shard. How many bytes that takes is logged (logger "gradwire", level INFO), and is in
        `stats()`.
    residual: torch.float32 or torch.bfloat16, the type that residuals are kept in.
    min_elements: parameters with fewer elements are not compressed, if a codec is given and not rules.
    scaler: the GradScaler, if there is one. Residuals are kept without its scale, and a step that it skips changes
        nothing.
    seed: of random rounding.
    steps: the length of the run, for codecs that plan with it ("dqsgd"): `stats()["plan"]` says how. Default: 0, not
        known.
    threads: processor threads that encode and decode.

    Only for DDP, and all but decay, measure_every, guard, nodes and cuda_graphs for HSDP:

    optimizer: the torch.optim.Adam or AdamW that trains the model. With a codec that has error feedback, ranks (under
        HSDP: replicas, each with its shards) then exchange Adam's momentum in units of the update, and p.grad is the
        averaged momentum, not the averaged gradient; the optimizer's step is replaced by one that knows this, until
        `hook.remove()`. The training loop, schedulers and the GradScaler stay as they are. With a codec without error
        feedback gradients are exchanged as ever, and the optimizer is left alone.
    clip: the norm that the loop clips gradients to, where momentum is exchanged: every rank (under HSDP: every replica,
        over all of its shards) then clips its own gradient before it enters the momentum. Default: found out in the
        first three steps, if clip_grad_norm_ has changed p.grad in one of them; the option is for loops whose first
        gradients are smaller than that.
    down: codec or rules for the reduced gradients on their way back to all ranks. Default: as `codec`, rounded to
        nearest; where momentum is exchanged, "optquant:bits=4".
    method: "scatter" (default): every rank reduces a shard and sends the result, so bytes do not grow with the number
        of ranks. "gather": every rank receives the messages of all ranks, as most papers describe it.
    owner_feedback: feedback for the way back. Default: True.
    decay: what is left of a residual when it is added to the next step, above 0 and at most 1. Below 1 old residuals
        fade, and what has faded is lost. Default: 1. Refused where no codec has error feedback.
    warmup: the number of first steps that are sent uncompressed. Default: 0. Where momentum is exchanged, only the very
        first step is sent uncompressed, and the others use "qsgd:bits=4"; the default is a tenth of `steps`, or 200.
    measure_every: every so many steps the error of each parameter is measured: `stats()["parameters"]`. Default: 0,
        never.
    guard: a limit for that squared relative error, ||x - x'||^2 / ||x||^2. A parameter that exceeds it on any rank is
        sent uncompressed from then on, with a warning. Sets measure_every to 50 where it is not given.
    timeout: seconds until a rank that does not answer is an error. Default: the time-out of the model's process group.
    nodes: two levels, for nodes of several ranks that are joined by a slow link. Gradients are reduced within a node
        uncompressed, each rank gets a shard of the sum, and only the shards are compressed, and exchanged between the
        ranks with the same place in all nodes. A number: so many nodes of consecutive ranks. "auto": found out, by
        torchrun's words or by host names. All nodes must have equally many ranks. With one node gradients are left to
        torch; with one rank in each node there is only one level. Refused with optimizer=. Default: one level.

    cuda_graphs: on a GPU with NCCL, whether what a bucket enqueues, exchanges included, is recorded as a CUDA graph and
        run again in later steps, with one call of the host. No value depends on it. If a rank is gone, gradwire's own
        process group is aborted after its time-out. Default: False.

    Only for HSDP:

    gradients: codec or rules for the reduce-scatter within the shard dimension, without feedback. Default: None, left
        to torch.

    Only for FSDP2 and HSDP:

    weights: codec or rules for the weights on their way from their owners to all ranks, rounded to nearest. The sharded
        weights that the optimizer updates stay exact, and every rank, the owner too, computes with the same rounded
        bits. Codecs that learn are refused, because the forward and the backward pass must see the same weights.
        Default: None, left to torch.
    """
    kind, inner = _recognise(model)
    optimizer = optimizer_inside(optimizer)
    options: dict[str, Any] = {
        "feedback": feedback, "residual": residual, "min_elements": min_elements, "scaler": scaler, "seed": seed,
        "threads": threads,
    }  # fmt: skip
    specific = {
        "gradients": gradients, "weights": weights, "down": down, "method": method, "owner_feedback": owner_feedback,
        "decay": decay, "warmup": warmup, "steps": steps, "measure_every": measure_every, "guard": guard,
        "timeout": timeout, "optimizer": optimizer, "clip": clip, "nodes": nodes, "cuda_graphs": cuda_graphs,
    }  # fmt: skip
    options |= {name: value for name, value in specific.items() if value is not None}
    if kind == "DDP":
        from . import _ddp_slot

        names = None
        if not isinstance(inner, DistributedDataParallel):
            inner, names = _ddp_inside(inner)
        return _ddp_slot.attach(inner, codec, options, names)
    from . import _fsdp, _replica_group, _replicas

    if _replica_group.has_replicas(inner):
        return _replicas.attach(inner, codec, options)
    return _fsdp.attach(inner, codec, options)


# Why, where a user may ask.
_BECAUSE = {
    ("FSDP2", "optimizer"): ", whose reduce-scatter leaves every rank with elements of its own: a rank has Adam's "
    "moments of its shard only, and would have to send momentum of all elements"
}


def refuse_foreign(kind: str, options: dict[str, Any]) -> None:
    """Refuses options that only other kinds of models have."""
    for name, kinds in _ONLY.items():
        if kind not in kinds and name in options:
            raise UsageError(
                f"{name} is an option for {' and '.join(kinds)} models; this model uses {kind}"
                f"{_BECAUSE.get((kind, name), '')}",
                field=name,
            )


def _recognise(model: Any) -> tuple[str, nn.Module]:
    """("DDP" or "FSDP2", the module that is compressed)."""
    if not isinstance(model, nn.Module):
        refuse_no_module(model)
    import torch.distributed.fsdp as fsdp

    sharded_type = getattr(fsdp, "FSDPModule", ())
    ddp: dict[str, nn.Module] = {}
    sharded: dict[str, nn.Module] = {}  # the outermost ones only
    for name, module in model.named_modules():
        if isinstance(module, fsdp.FullyShardedDataParallel):
            raise UnsupportedError(
                f"{_where(name)} is a FullyShardedDataParallel (FSDP1), which cannot be compressed; shard the model "
                "with torch.distributed.fsdp.fully_shard (FSDP2)",
                field="model",
            )
        if isinstance(module, DistributedDataParallel) or _is_composable_ddp(module):
            ddp[name] = module
        elif isinstance(module, sharded_type) and not any(
            name.startswith(f"{outer}." if outer else "") for outer in sharded
        ):
            sharded[name] = module
    if ddp and sharded:
        raise UnsupportedError(
            f"{_where(next(iter(ddp)))} is a DistributedDataParallel and {_where(next(iter(sharded)))} is sharded by "
            "fully_shard; compress each by itself",
            field="model",
        )
    if len(ddp) > 1:
        names = ", ".join(f"'{name}'" for name in ddp)
        raise UsageError(
            f"the model contains {len(ddp)} DistributedDataParallel modules ({names}); compress each by itself",
            field="model",
        )
    if ddp:
        return "DDP", next(iter(ddp.values()))
    if sharded:
        return "FSDP2", next(iter(sharded.values())) if len(sharded) == 1 else model
    around = model_around(model)
    if around is not None:
        return _recognise(around)
    raise UsageError(
        f"model is a {described(model)} that is not distributed: no module of it is a DistributedDataParallel, and "
        "none was sharded. Wrap it with DistributedDataParallel, or call torch.distributed.fsdp.fully_shard on it, "
        "first",
        field="model",
    )


def _is_composable_ddp(module: nn.Module) -> bool:
    """Whether torch.distributed._composable.replicate was called on it, which makes a DDP of its parameters."""
    try:
        from torch.distributed._composable.replicate import DDP
    except ImportError:
        return False
    return isinstance(module, DDP)


def _ddp_inside(module: nn.Module) -> tuple[DistributedDataParallel, list[str]]:
    """The DDP of a module that was replicated so, and the names of its parameters. torch makes it before the first
    forward pass; here it is made at once."""
    from torch.distributed._composable.replicate import replicate

    state: Any = replicate.state(module)
    for name in ("lazy_init", "_init_args", "_param_names"):
        if not hasattr(state, name):
            raise UnsupportedError(
                f"torch {torch.__version__} has no {name} in the state of replicate(), which compressing it needs; "
                "torch 2.13 has it",
                field="torch",
            )
    if state._init_args:
        state.lazy_init()
    return state._ddp, list(state._param_names)


def _where(name: str) -> str:
    return f"module '{name}'" if name else "the model"
