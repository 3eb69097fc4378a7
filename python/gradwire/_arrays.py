# SPDX-License-Identifier: Apache-2.0
"""What an array is: NumPy's, torch's (CPU or CUDA), or anything that hands NumPy a view. The library below sees
addresses only, so everything that could go wrong with memory is looked at here, and refused with one sentence.

A View is an array whose elements lie side by side, with its address, size and dtype ("f32", "f16" or "bf16"); `home` is
where it lives: None for the host, or the index of a CUDA device. torch is never imported here: a caller that passes
a tensor has done so.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any, ContextManager, NamedTuple

import numpy as np

from . import _core
from ._errors import UnsupportedError, UsageError

DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
_SHORT = {long: short for short, long in DTYPES.items()}
_ALLOWED = "allowed are float32, float16 and bfloat16"


class View(NamedTuple):
    address: int
    size: int  # elements; bytes, where the dtype is "u8"
    dtype: str
    like: str  # "numpy" or "torch"
    home: int | None
    owner: Any  # keeps the memory alive


def torch_module() -> Any:
    """torch if it has been imported, otherwise None."""
    return sys.modules.get("torch")


def is_tensor(value: Any) -> bool:
    torch = torch_module()
    return torch is not None and hasattr(torch, "Tensor") and isinstance(value, torch.Tensor)


def dtype_name(dtype: Any, what: str = "dtype") -> str:
    """'f32', 'f16' or 'bf16' from a name, a NumPy dtype or a torch dtype."""
    text = str(dtype).removeprefix("torch.")
    if text not in DTYPES and text not in _SHORT:
        text = getattr(dtype, "__name__", text)  # np.float32, a class
    if text in DTYPES:
        return text
    if text in _SHORT:
        return _SHORT[text]
    raise UsageError(f"{what} is {text}; {_ALLOWED}", field="dtype")


def bfloat16() -> Any:
    """NumPy's bfloat16, which comes with ml_dtypes, or None."""
    try:
        import ml_dtypes
    except ImportError:
        return None
    return np.dtype(ml_dtypes.bfloat16)


def _refuse(what: str, why: str, field: str) -> UsageError:
    return UsageError(f"{what} {why}", field=field)


def _tensor(tensor: Any, what: str, writable: bool) -> Any:
    """A tensor whose memory can be used as it stands."""
    torch = torch_module()
    if tensor.device.type not in ("cpu", "cuda"):
        raise _refuse(what, f"is on the device {tensor.device}; allowed are cpu and cuda", "device")
    if tensor.layout != torch.strided:
        raise _refuse(
            what, f"has the layout {tensor.layout}; allowed is torch.strided: pass {what}.to_dense()", "layout"
        )
    if not tensor.is_contiguous():
        raise _refuse(
            what, f"is not contiguous (strides {tuple(tensor.stride())}): pass {what}.contiguous()", "strides"
        )
    if writable and tensor.requires_grad:
        raise _refuse(
            what,
            "requires grad, and writing to it would be hidden from autograd: pass a tensor that does not, "
            f"or {what}.detach()",
            "requires_grad",
        )
    tensor = tensor.detach()
    if tensor.is_neg():  # a view that negates when it is read
        if writable:
            raise _refuse(what, "is a view that negates: pass a plain tensor", "layout")
        tensor = tensor.resolve_neg()
    if tensor.numel() and tensor.data_ptr() == 0:
        raise _refuse(what, f"is a {type(tensor).__name__} without memory of its own: pass the local tensor", "layout")
    return tensor


def _ndarray(value: Any, what: str, allowed: str) -> Any:
    if isinstance(value, np.ma.MaskedArray):
        raise _refuse(what, f"is a masked array, and a frame has no room for a mask: pass {what}.filled(0)", "type")
    if isinstance(value, np.ndarray):
        return value
    if hasattr(value, "__cuda_array_interface__"):
        raise _refuse(what, f"is a {type(value).__name__} on a GPU: pass torch.from_dlpack({what})", "device")
    if not isinstance(value, (str, list, tuple, dict, set)):
        try:
            if hasattr(value, "__array_interface__") or hasattr(value, "__array__"):
                return np.asarray(value)
            if hasattr(value, "__dlpack__"):
                return np.from_dlpack(value)
            return np.asarray(memoryview(value))
        except (TypeError, ValueError, BufferError, RuntimeError):
            pass
    raise _refuse(what, f"is of type {type(value).__name__}; {allowed}", "type")


def _check_ndarray(array: Any, what: str, writable: bool) -> None:
    if not array.flags.c_contiguous:
        raise _refuse(
            what, f"is not contiguous (strides {array.strides}): pass numpy.ascontiguousarray({what})", "strides"
        )
    if not array.flags.aligned:
        raise _refuse(what, f"is not aligned to its elements: pass {what}.copy()", "alignment")
    if writable and not array.flags.writeable:
        raise _refuse(what, "is read-only; it must be writable", "out")


def view(value: Any, what: str = "tensor", *, writable: bool = False) -> View:
    """The elements of an array, or UsageError."""
    if is_tensor(value):
        if str(value.dtype).removeprefix("torch.") not in _SHORT:
            raise _refuse(what, f"has dtype {str(value.dtype).removeprefix('torch.')}; {_ALLOWED}", "dtype")
        tensor = _tensor(value, what, writable)
        home = tensor.device.index if tensor.device.type == "cuda" else None
        return View(tensor.data_ptr(), tensor.numel(), dtype_name(tensor.dtype), "torch", home, tensor)
    array = _ndarray(value, what, "allowed are NumPy arrays, torch tensors and objects that hand out their memory")
    if array.dtype.name not in _SHORT or not array.dtype.isnative:
        name = array.dtype.name if array.dtype.isnative else f"{array.dtype.name} of the other byte order"
        raise _refuse(what, f"has dtype {name}; {_ALLOWED}", "dtype")
    _check_ndarray(array, what, writable)
    return View(address(array), array.size, _SHORT[array.dtype.name], "numpy", None, array)


def byte_view(value: Any, what: str = "frame", *, writable: bool = False) -> View:
    """Bytes, with the dtype "u8": bytes-like objects, arrays and tensors of uint8."""
    if is_tensor(value):
        if value.dtype != torch_module().uint8:
            raise _refuse(what, f"has dtype {str(value.dtype).removeprefix('torch.')}; allowed is uint8", "dtype")
        tensor = _tensor(value, what, writable)
        home = tensor.device.index if tensor.device.type == "cuda" else None
        return View(tensor.data_ptr(), tensor.numel(), "u8", "torch", home, tensor)
    array = _ndarray(value, what, "allowed are frames, bytes, and arrays or tensors of uint8")
    if array.dtype != np.uint8:
        raise _refuse(what, f"has dtype {array.dtype.name}; allowed is uint8", "dtype")
    _check_ndarray(array, what, writable)
    return View(address(array), array.size, "u8", "numpy", None, array)


def address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def empty(count: int, dtype: str, like: str, home: int | None) -> Any:
    """A new flat array. NumPy has bf16 only with ml_dtypes."""
    if like == "torch":
        import torch

        return torch.empty(count, dtype=getattr(torch, DTYPES[dtype]), device="cpu" if home is None else f"cuda:{home}")
    if dtype != "bf16":
        return np.empty(count, DTYPES[dtype])
    if bfloat16() is None:
        raise UnsupportedError(
            "dtype is bf16, which NumPy has only with the package ml_dtypes; install it, or ask for dtype='float32'",
            field="dtype",
        )
    return np.empty(count, bfloat16())


def whole(value: Any, field: str, limit: int = 2**64 - 1) -> int:
    """An integer from 0 to limit."""
    try:
        number = int(value.__index__())
    except (AttributeError, TypeError):
        number = -1
    if not 0 <= number <= limit:
        raise UsageError(f"{field} is {value!r}; allowed is an integer from 0 to {limit}", field=field)
    return number


def threads_for(count: int, threads: int | None) -> int:
    """As asked; otherwise OMP_NUM_THREADS or the usable cores, but no more than a tensor has work for."""
    if threads is not None:
        if isinstance(threads, bool) or not hasattr(threads, "__index__") or not 1 <= threads <= 1024:
            raise UsageError(f"threads is {threads!r}; allowed is an integer from 1 to 1024", field="threads")
        return int(threads)
    said = os.environ.get("OMP_NUM_THREADS", "")
    cores = int(said) if said.isdigit() and int(said) > 0 else len(os.sched_getaffinity(0))
    return max(1, min(cores, count >> 16, 1024))  # a task of the library is 65,536 elements


def stream_of(home: int | None) -> int:
    """torch's current stream on that device."""
    return 0 if home is None else int(torch_module().cuda.current_stream(home).cuda_stream)


def device_of(home: int | None, threads: int = 1) -> _core.Device:
    if home is None:
        return _core.Device("cpu", threads=threads)
    return _core.Device("cuda", index=home, stream=stream_of(home))


def on(home: int | None) -> ContextManager[Any]:
    """The library makes its device the current one; torch gets its own back."""
    if home is None:
        return contextlib.nullcontext()
    guard: ContextManager[Any] = torch_module().cuda.device(home)
    return guard


def place(home: int | None) -> str:
    return "the CPU" if home is None else f"cuda:{home}"
