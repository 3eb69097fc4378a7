# SPDX-License-Identifier: Apache-2.0
"""Compressed gradients for PyTorch: one line after DDP, one after FSDP2.

    import gradwire.torch as gw

    ddp = torch.nn.parallel.DistributedDataParallel(model)
    hook = gw.compress(ddp, "optquant:bits=4")           # that is all

    torch.save({"model": model.state_dict(), "gradwire": hook.state_dict()}, path)     # each rank its own file
    hook.load_state_dict(torch.load(path)["gradwire"])

    gw.compress_fsdp(fsdp_model, gradients="qsgd:bits=4", weights="unigrid:bits=8")    # FSDP2

Gloo on CPU and CUDA, NCCL on CUDA. docs/pytorch.md is the guide; `compress` and `Hook` say what each option means.
"""

from ._ddp import Hook, compress
from ._fsdp import FsdpHook, compress_fsdp
from ._state import read_checkpoint

__all__ = ["FsdpHook", "Hook", "compress", "compress_fsdp", "read_checkpoint"]
