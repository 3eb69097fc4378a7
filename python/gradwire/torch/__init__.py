# SPDX-License-Identifier: Apache-2.0
"""Compressed communication for PyTorch: one line after DDP or FSDP2.

    import gradwire.torch as gw

    ddp = torch.nn.parallel.DistributedDataParallel(model)
    hook = gw.compress(ddp, "optquant:bits=4")           # on every rank

    torch.save({"model": model.state_dict(), "gradwire": hook.state_dict()}, path)     # every rank its own file
    hook.load_state_dict(torch.load(path)["gradwire"])

    fully_shard(model, mesh=mesh)                        # FSDP2, replicate x shard: what replicas send each other
    hook = gw.compress(model, "optquant:bits=4")

    fully_shard(model)                                   # FSDP2, one dimension: gradients and, if asked for, weights
    hook = gw.compress(model, "qsgd:bits=4", weights="unigrid:bits=8")

    optimizer = gw.QAdam(model.named_parameters(), lr=1e-3)  # Quantized Adam, for a model without DDP

    gw.register("mine", quantise)                        # a codec in Python, to try an idea out
    record = gw.Record("runs/mine", hook)                # what `gradwire report runs/*` shows beside other runs

gradwire.torch.lightning, gradwire.torch.transformers and gradwire.torch.accelerate are for models that a framework
trains. Gloo on CPU and CUDA, NCCL on CUDA. docs/pytorch.md is the guide; the docstring of `compress` explains every
option.
"""

import torch as _torch

from . import _versions

_versions.check_torch(str(_torch.__version__))
try:
    from ._compress import compress
    from ._hook import Hook
    from ._qadam import QAdam
    from ._record import Record
    from ._register import register
    from ._state import read_checkpoint
except ImportError as _error:
    _versions.refuse_torch(str(_torch.__version__), _error)
    raise

__all__ = ["Hook", "QAdam", "Record", "compress", "read_checkpoint", "register"]
