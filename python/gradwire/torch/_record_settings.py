# SPDX-License-Identifier: Apache-2.0
"""What a record (_record.py) says about a training as a whole: settings that the user gives or that are found out. Runs
with the same settings and different seeds form one row of the report.
"""

from __future__ import annotations

import os
import platform
import shlex
import sys
from typing import Any

import torch
import torch.distributed as dist

from .. import _core
from .._errors import Error, UsageError
from ._ddp import DdpHook
from ._hook import Hook
from ._register import found
from ._replicas import ReplicaHook

# The least and the greatest value. Above 2**53 not every program reads a number in JSON as a whole number.
_NUMBERS = {
    "seed": (0, 2**64 - 1), "batch": (1, 2**53), "rate": (0, sys.float_info.max), "parameters": (0, 2**53),
    "workers": (1, 2**53),
}  # fmt: skip
_TEXTS = ("task", "model", "codec", "optimizer", "schedule", "engine", "device", "machine", "collective", "command")
_METRICS = ("accuracy", "loss", "perplexity")


def checked(about: dict[str, Any], hook: Hook | None) -> tuple[dict[str, Any], str | None]:
    """All settings of the record, and the metric if it was given."""
    metric = about.pop("metric", None)
    if metric not in (None, *_METRICS):
        raise UsageError(f"metric is {metric!r}; allowed are {', '.join(_METRICS)}", field="metric")
    settings = _defaults(hook)
    if isinstance(about.get("model"), torch.nn.Module):
        model = about.pop("model")
        settings["model"] = _name_of(model)
        if hook is None:
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            settings["parameters"] = sum(parameter.numel() for parameter in trained)
            settings["device"] = trained[0].device.type if trained else "cpu"
    for name, value in about.items():
        if name in _NUMBERS:
            check_number(value, name)
        elif name not in _TEXTS:
            allowed = ", ".join(sorted([*_NUMBERS, *_TEXTS, "metric"]))
            raise UsageError(f"a record has no {name!r}; it may have {allowed}", field=name)
        elif not isinstance(value, str) or not value:
            raise UsageError(f"{name} is {value!r}; allowed is a text", field=name)
    settings |= about
    if "parameters" not in settings:
        raise UsageError("without a hook a record needs the model: model=ddp, or parameters=", field="parameters")
    if "codec" in about:
        settings["canonical"] = about["codec"]
    return settings, metric


def check_number(value: Any, name: str) -> None:
    least, most = _NUMBERS[name]
    kinds = (int, float) if name == "rate" else (int,)
    if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= most:
        kind = "a number" if name == "rate" else "a whole number"
        raise UsageError(f"{name} is {value!r}; allowed is {kind}, {least} or more", field=name)


def _defaults(hook: Hook | None) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "codec": "fp32", "canonical": "fp32", "seed": 0, "task": "training", "model": "model",
        "workers": dist.get_world_size() if dist.is_initialized() else 1, "collective": "scatter", "device": "cpu",
        "engine": str(dist.get_backend()) if dist.is_initialized() else "none", "batch": 1, "optimizer": "unknown",
        "rate": 0.0, "schedule": "unknown", "command": shlex.join(["python", *sys.argv]),
    }  # fmt: skip
    if isinstance(hook, (DdpHook, ReplicaHook)):
        settings |= {"workers": hook._world, "parameters": hook._meters.whole, "device": hook._device.type}
        settings["codec"], settings["canonical"] = _names_of(hook.codec)
        settings["collective"] = _collective(hook)
        ddp = hook._ddp() if isinstance(hook, DdpHook) else None
        if ddp is not None:
            settings["model"] = _name_of(ddp)
    settings["machine"] = _machine()
    return settings


def _name_of(model: torch.nn.Module) -> str:
    """The type of the user's own module, inside of what DDP and torch.compile put around it."""
    for name in ("module", "_orig_mod"):
        inside = getattr(model, name, None)
        if isinstance(inside, torch.nn.Module):
            return _name_of(inside)
    return type(model).__name__


def _collective(hook: Hook) -> str:
    from ._python_hook import PythonHook

    if isinstance(hook, PythonHook):
        return "gather"  # as its bytes are counted
    return str(getattr(hook, "_model_options", {}).get("method", "scatter"))


def _names_of(rules: str) -> tuple[str, str]:
    """A short name of the codec for the table, and the whole. What all runs have in common, fp32 for small parameters,
    is no part of the short one; where everything is fp32 it is that."""
    parts = [rule.partition("=") for rule in rules.split(";")]
    codecs = {codec for _, _, codec in parts}
    if codecs == {"fp32"}:
        return "fp32", "fp32"
    usual = all(pattern == "1d" or pattern.startswith("<") for pattern, _, codec in parts[:-1] if codec == "fp32")
    if usual and len(codecs - {"fp32"}) == 1 and parts[-1][2] != "fp32":
        return _short(parts[-1][2]), rules
    return rules, rules


def _short(codec: str) -> str:
    """A codec without the parameters that have their default values. The first one, mostly the bits, stays."""
    if found(codec) is not None:
        return codec
    name, _, parameters = codec.partition(":")
    kept = parameters.split(",") if parameters else []
    for parameter in kept[1:]:
        fewer = [one for one in kept if one != parameter]
        try:
            if str(_core.Codec(f"{name}:{','.join(fewer)}")) == codec:
                kept = fewer
        except Error:
            pass  # it cannot be left out
    return f"{name}:{','.join(kept)}" if kept else name


def _machine() -> str:
    processor = platform.processor() or platform.machine() or "processor"
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            processor = next(line.partition(": ")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return f"{os.cpu_count()} x {processor}{gpu}, torch {torch.__version__}"
