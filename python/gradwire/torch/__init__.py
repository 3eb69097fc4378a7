# SPDX-License-Identifier: Apache-2.0
"""Compressed communication for PyTorch: one line after DDP or FSDP2.

    import gradwire.torch as gw

    ddp = torch.nn.parallel.DistributedDataParallel(model)
    hook = gw.compress(ddp, "optquant:bits=4")           # on every rank

    torch.save({"model": model.state_dict(), "gradwire": hook.state_dict()}, path)     # every rank its own file
    hook.load_state_dict(torch.load(path)["gradwire"])

    fully_shard(model)                                   # FSDP2: gradients and, if asked for, weights
    hook = gw.compress(model, "qsgd:bits=4", weights="unigrid:bits=8")

Gloo on CPU and CUDA, NCCL on CUDA. docs/pytorch.md is the guide; the docstring of `compress` explains every option.
"""

from ._compress import compress
from ._hook import Hook
from ._state import read_checkpoint

__all__ = ["Hook", "compress", "read_checkpoint"]
