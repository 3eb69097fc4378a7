# SPDX-License-Identifier: Apache-2.0
"""`python -m gradwire doctor`: what this build, this machine and this torch can do together, what is missing, and the
line that would get it. torch is looked at where it is installed; nothing here needs it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import sys
from typing import Any, Dict, List, Tuple

import numpy as np

from . import _arrays, _core


def _torch() -> Dict[str, Any]:
    """What of torch can be used: an empty dict without it, {"error": words} where it cannot be imported."""
    if importlib.util.find_spec("torch") is None:
        return {}
    try:
        import torch
        import torch.distributed as distributed
    except Exception as error:  # a broken installation is what a doctor is for
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    found: Dict[str, Any] = {
        "version": str(torch.__version__),
        "cuda": bool(torch.cuda.is_available()),
        "distributed": bool(distributed.is_available()),
        "backends": [],
        "ddp_hooks": False,
        "fsdp2_collectives": False,
    }
    if not found["distributed"]:
        return found
    for backend, there in (("gloo", "is_gloo_available"), ("nccl", "is_nccl_available"), ("mpi", "is_mpi_available")):
        if getattr(distributed, there, bool)():
            found["backends"].append(backend)
    found["ddp_hooks"] = hasattr(torch.nn.parallel.DistributedDataParallel, "register_comm_hook")
    try:
        from torch.distributed.fsdp import FSDPModule
    except ImportError:
        return found
    found["fsdp2_collectives"] = all(
        hasattr(FSDPModule, name) for name in ("set_custom_reduce_scatter", "set_custom_all_gather")
    )
    return found


def _cuda_words(devices: int) -> str:
    """What there is of CUDA. The runtime says "driver version is insufficient" also where there is no driver at all."""
    words = _core.cuda_description()
    if _core.cuda_built() and not devices:
        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError:
            return "built, not usable here: there is no NVIDIA driver (libcuda.so.1 is not found); the CPU is used"
        return f"{words}; the CPU is used"
    return words


def findings() -> Dict[str, Any]:
    """Everything that is printed, as a dict."""
    torch = _torch()
    simd = _core.simd_targets()
    gpus = _core.cuda_devices()
    missing: List[Tuple[str, str]] = []
    if not _core.cuda_built():
        missing.append(
            (
                "CUDA in this build",
                "install the CUDA toolkit so that nvcc is on the PATH, then: CMAKE_ARGS=-DGRADWIRE_CUDA=ON pip install "
                "--force-reinstall .",
            )
        )
    elif gpus == 0:
        missing.append(
            ("a usable GPU", "install a current NVIDIA driver (nvidia-smi must list the GPU); no rebuild is needed")
        )
    if not torch:
        missing.append(("torch, for gradwire.torch and CUDA tensors", "pip install torch"))
    elif "error" not in torch:
        if gpus and not torch["cuda"]:
            missing.append(("a torch that sees the GPU", "pip install a CUDA build of torch"))
        if not torch["distributed"]:
            missing.append(("torch.distributed, for gradwire.torch", "install a torch that is built with it"))
        elif not torch["fsdp2_collectives"]:
            missing.append(("FSDP2's custom collectives, for gradwire.torch.compress", "pip install --upgrade torch"))
    if _arrays.bfloat16() is None:
        missing.append(("bfloat16 in NumPy", "pip install ml_dtypes"))
    return {
        "version": _core.version,
        "wire_version": _core.wire_version,
        "python": sys.version.split()[0],
        "cores": len(os.sched_getaffinity(0)),
        "simd_targets": simd,
        "simd_chosen": simd[0] if simd else "scalar",
        "cuda_built": _core.cuda_built(),
        "cuda_devices": gpus,
        "cuda": _cuda_words(gpus),
        "numpy": np.__version__,
        "bfloat16": _arrays.bfloat16() is not None,
        "torch": torch,
        "missing": [{"what": what, "line": line} for what, line in missing],
    }


def _torch_lines(torch: Dict[str, Any]) -> List[Tuple[str, str]]:
    if not torch:
        return [("torch", "not installed")]
    if "error" in torch:
        return [("torch", f"cannot be imported: {torch['error']}")]
    lines = [("torch", f"{torch['version']}, {'sees a GPU' if torch['cuda'] else 'CPU only'}")]
    if not torch["distributed"]:
        return lines + [("", "built without torch.distributed")]
    lines.append(("groups", ", ".join(torch["backends"]) or "none"))
    lines.append(("DDP", "gradwire.torch.compress can be used" if torch["ddp_hooks"] else "has no communication hooks"))
    lines.append(
        (
            "FSDP2",
            "gradwire.torch.compress can be used"
            if torch["fsdp2_collectives"]
            else "has no custom collectives in this torch",
        )
    )
    return lines


def doctor(as_json: bool) -> None:
    found = findings()
    if as_json:
        print(json.dumps(found))
        return
    cores = found["cores"]
    lines = [
        ("gradwire", f"{found['version']}, wire format {found['wire_version']}"),
        ("Python", f"{found['python']}, {cores} core{'' if cores == 1 else 's'} usable"),
        ("SIMD", f"{found['simd_chosen']} is used; usable here: {', '.join(found['simd_targets'] + ['scalar'])}"),
        ("CUDA", found["cuda"]),
        ("NumPy", f"{found['numpy']}, {'with' if found['bfloat16'] else 'without'} bfloat16"),
    ]
    for name, words in lines + _torch_lines(found["torch"]):
        print(f"{name:<10}{words}")
    if not found["missing"]:
        print("\nNothing is missing.")
        return
    print("\nMissing, and how to get it:")
    for item in found["missing"]:
        print(f"  {item['what']}: {item['line']}")
