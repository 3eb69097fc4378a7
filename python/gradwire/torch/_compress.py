# SPDX-License-Identifier: Apache-2.0
"""`compress`: finds out what kind of model it was given, and attaches the hook of that kind."""

from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .. import _core
from .._errors import UnsupportedError, UsageError
from ._hook import Hook

_ONLY = {
    "DDP": ("down", "method", "owner_feedback", "warmup", "measure_every", "guard", "timeout", "optimizer"),
    "FSDP2": ("weights",),
}


def compress(
    model: nn.Module,
    codec: "str | _core.Codec | _core.Rules | None",
    *,
    optimizer: "torch.optim.Optimizer | None" = None,
    weights: "str | _core.Codec | _core.Rules | None" = None,
    down: "str | _core.Codec | _core.Rules | None" = None,
    method: str | None = None,
    feedback: bool | None = None,
    owner_feedback: bool | None = None,
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
) -> Hook:
    """Compresses what a distributed model sends, and returns the hook, which holds the state. All ranks must call it.

    A second call for the same model replaces the first hook; `hook.remove()` ends the compression.

    model: a DistributedDataParallel, a model sharded by torch.distributed.fsdp.fully_shard (FSDP2), or a module that
        contains exactly one of them.
    codec: how gradients are encoded. Either a codec, such as "optquant:bits=4" (`python -m gradwire codecs` lists
        them), or rules, which map names to codecs: in
        "*.bias=fp32;1d=fp32;<1024=fp32;head.*=qsgd:bits=8;*=optquant:bits=4" the first pattern that matches decides. A
        codec alone leaves parameters with one dimension, or with fewer than `min_elements` elements, in fp32. Where all
        parameters are "fp32", torch's own collective is used, with the bits of the plain model. Under FSDP2 names are
        those of the modules that fully_shard was called on (the outermost one is "(root)"), because FSDP sends all
        parameters of a module as one buffer, and None leaves gradients to torch.
    feedback: whether what compression leaves out of a gradient (the residual) is added to the next one. None: under DDP
        where the codec asks for it; under FSDP2 off, because it needs a residual of the whole model on every rank, not
        only of its shard. How many bytes that takes is logged (logger "gradwire", level INFO), and is in `stats()`.
    residual: torch.float32 or torch.bfloat16, the type that residuals are kept in.
    min_elements: tensors with fewer elements (under FSDP2: shards) are not compressed, if a codec is given and not
        rules.
    scaler: the GradScaler, if there is one. Residuals are kept without its scale, and a step that it skips changes
        nothing.
    seed: of random rounding.
    steps: the length of the run, for codecs that plan with it ("dqsgd"): `stats()["plan"]` says how. Default: 0, not
        known.
    threads: processor threads that encode and decode.

    Only for DDP:

    optimizer: the torch.optim.Adam or AdamW that trains the model. With a codec that has error feedback, ranks then
        exchange Adam's momentum in units of the update, and p.grad is the averaged momentum, not the averaged gradient;
        the optimizer's step is replaced by one that knows this, until `hook.remove()`. The training loop, schedulers
        and the GradScaler stay as they are. With a codec without error feedback gradients are exchanged as ever, and
        the optimizer is left alone.
    down: codec or rules for the reduced gradients on their way back to all ranks. Default: as `codec`, rounded to
        nearest; where momentum is exchanged, "optquant:bits=4".
    method: "scatter" (default): every rank reduces a shard and sends the result, so bytes do not grow with the number
        of ranks. "gather": every rank receives the messages of all ranks, as most papers describe it.
    owner_feedback: feedback for the way back. Default: True.
    warmup: the number of first steps that are sent uncompressed. Default: 0. Where momentum is exchanged, only the very
        first step is sent uncompressed, and the others use "qsgd:bits=4"; the default is a tenth of `steps`, or 200.
    measure_every: every so many steps the error of each parameter is measured: `stats()["parameters"]`. Default: 0,
        never.
    guard: a limit for that squared relative error, ||x - x'||^2 / ||x||^2. A parameter that exceeds it on any rank is
        sent uncompressed from then on, with a warning. Sets measure_every to 50 where it is not given.
    timeout: seconds until a rank that does not answer is an error. Default: the time-out of the model's process group.

    Only for FSDP2:

    weights: codec or rules for the weights on their way from their owners to all ranks, rounded to nearest. The sharded
        weights that the optimizer updates stay exact, and every rank, the owner too, computes with the same rounded
        bits. Codecs that learn are refused, because the forward and the backward pass must see the same weights.
        Default: None, left to torch. In a hybrid mesh (replicate x shard) the shard dimension is compressed; the
        all-reduce between replicas is torch's.
    """
    kind, inner = _recognise(model)
    options: dict[str, Any] = {
        "feedback": feedback, "residual": residual, "min_elements": min_elements, "scaler": scaler, "seed": seed,
        "threads": threads,
    }  # fmt: skip
    specific = {
        "weights": weights, "down": down, "method": method, "owner_feedback": owner_feedback, "warmup": warmup,
        "steps": steps, "measure_every": measure_every, "guard": guard, "timeout": timeout, "optimizer": optimizer,
    }  # fmt: skip
    options |= {name: value for name, value in specific.items() if value is not None}
    if kind == "DDP":
        from . import _ddp

        assert isinstance(inner, DistributedDataParallel)
        return _ddp.attach(inner, codec, options)
    from . import _fsdp

    return _fsdp.attach(inner, codec, options)


def refuse_foreign(kind: str, options: dict[str, Any]) -> None:
    """Refuses options that the other kind of model has."""
    for other, names in _ONLY.items():
        for name in names:
            if other != kind and name in options:
                raise UsageError(f"{name} is an option for {other} models; this model uses {kind}", field=name)


def _recognise(model: Any) -> tuple[str, nn.Module]:
    """("DDP" or "FSDP2", the module that is compressed)."""
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"model is of type {type(model).__name__}; expected a DistributedDataParallel or a module sharded by "
            "fully_shard",
            field="model",
        )
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
        if isinstance(module, DistributedDataParallel):
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
    raise UsageError(
        f"model is a {type(model).__name__} that is not distributed: no module of it is a DistributedDataParallel, and "
        "none was sharded. Wrap it with DistributedDataParallel, or call torch.distributed.fsdp.fully_shard on it, "
        "first",
        field="model",
    )


def _where(name: str) -> str:
    return f"module '{name}'" if name else "the model"
