# SPDX-License-Identifier: Apache-2.0
"""gradwire compresses what distributed training sends: gradients up, weights down.

    >>> import gradwire, numpy
    >>> gradient = numpy.random.default_rng(0).standard_normal(100_000).astype("float32")
    >>> frame = gradwire.encode(gradient, "optquant:bits=3")       # NumPy or torch, CPU or CUDA
    >>> restored = gradwire.decode(frame)
    >>> restored.shape, len(frame) < gradient.nbytes / 10
    ((100000,), True)

A codec says how one tensor is encoded: a string such as "optquant:bits=3", or a `Codec`. `codecs()` lists them. `Rules`
map tensor names to codecs. `Plan` puts many tensors into one message, `ErrorFeedback` keeps residuals, and `inspect`
reads the head of a frame. `gradwire.torch` compresses what DDP and FSDP2 send, with one line. From a shell:
python -m gradwire doctor | codecs | bench | encode | decode | inspect, or the script `gradwire`.
"""

from __future__ import annotations

from typing import Any, Dict, List

from . import _core
from ._core import Codec, Rules
from ._errors import (
    DeviceError,
    EngineError,
    Error,
    FileError,
    FrameError,
    MismatchError,
    UnsupportedError,
    UsageError,
)
from ._feedback import ErrorFeedback
from ._frame_calls import decode, decode_all, encode, fit
from ._frames import CudaFrame, Frame, inspect
from ._plan import Plan
from ._specs import Stamp, TensorSpec

__version__: str = _core.version


def codecs() -> List[Dict[str, Any]]:
    """Lists the codecs. Each is a dict with its name, a summary, an example, its traits, and its parameters with their
    allowed values.

    >>> import gradwire
    >>> [info["codec"] for info in gradwire.codecs()][:4]
    ['fp32', 'fp16', 'bf16', 'qsgd']
    """
    return _core.codecs()


__all__ = [
    "Codec",
    "CudaFrame",
    "DeviceError",
    "EngineError",
    "Error",
    "ErrorFeedback",
    "FileError",
    "Frame",
    "FrameError",
    "MismatchError",
    "Plan",
    "Rules",
    "Stamp",
    "TensorSpec",
    "UnsupportedError",
    "UsageError",
    "codecs",
    "decode",
    "decode_all",
    "encode",
    "fit",
    "inspect",
]
