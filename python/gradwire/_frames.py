# SPDX-License-Identifier: Apache-2.0
"""What encode returns. A Frame is bytes: it can be written, sent, pickled and compared as they can, without a copy. A
CudaFrame holds a tensor of bytes on a GPU, and knows its plan, so that it is decoded there without asking the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict

import numpy as np

from . import _arrays, _core
from ._errors import UsageError

if TYPE_CHECKING:
    from ._plan import Plan

MAX_ELEMENTS = 2**32  # what decode accepts unless told: as the program does
MAX_TENSORS = 2**20


class Frame(_core.Buffer):
    """A message in memory: `bytes(frame)`, `len(frame)`, `file.write(frame)`, `numpy.frombuffer(frame, "u1")`.

    >>> import gradwire, numpy
    >>> frame = gradwire.encode(numpy.ones(1000, "f4"), "onebit")
    >>> len(frame) == frame.nbytes == len(bytes(frame)), frame.head["tensors"][0]["codec"]
    (True, 'onebit:mode=tile')
    >>> frame == bytes(frame)
    True
    """

    def __init__(self, nbytes: int, like: str = "numpy") -> None:
        super().__init__(nbytes)
        self.like = like  # the kind of array it was made of, which decode gives back

    @staticmethod
    def of(data: Any, like: str = "numpy") -> Frame:
        """A frame with a copy of these bytes."""
        source = _arrays.byte_view(data)
        if source.home is not None:
            raise UsageError(f"frame is on cuda:{source.home}; pass frame.cpu()", field="frame")
        frame = Frame(source.size, like)
        _writable(frame)[:] = np.asarray(source.owner)
        return frame

    @property
    def head(self) -> Dict[str, Any]:
        """What the frame says of itself, as `gradwire.inspect` has it, without a look at the body."""
        return describe(read(self.address, self.nbytes))

    def __repr__(self) -> str:
        return f"<Frame of {self.nbytes} bytes>"

    def __eq__(self, other: object) -> bool:
        try:
            return bytes(memoryview(self)) == bytes(memoryview(other))  # type: ignore[arg-type]
        except TypeError:
            return NotImplemented

    def __hash__(self) -> int:
        return hash(bytes(memoryview(self)))

    def __bytes__(self) -> bytes:
        return bytes(memoryview(self))

    def __reduce__(self) -> Any:
        return Frame.of, (bytes(self), self.like)


class CudaFrame:
    """A message on a GPU: `frame.tensor` is a flat uint8 tensor to send; `frame.cpu()` waits and copies it."""

    like = "torch"

    def __init__(self, tensor: Any, plan: Plan) -> None:
        self.tensor = tensor
        self.plan = plan

    @property
    def nbytes(self) -> int:
        return int(self.tensor.numel())

    def cpu(self) -> Frame:
        """The same bytes in host memory."""
        return Frame.of(self.tensor.cpu(), "torch")

    @property
    def head(self) -> Dict[str, Any]:
        """What the frame says of itself; waits for the device."""
        return self.cpu().head

    def __len__(self) -> int:
        return self.nbytes

    def __bytes__(self) -> bytes:
        return bytes(self.cpu())

    def __repr__(self) -> str:
        return f"<CudaFrame of {self.nbytes} bytes on {self.tensor.device}>"


def _writable(frame: Frame) -> Any:
    import ctypes

    return (
        np.ctypeslib.as_array((ctypes.c_uint8 * frame.nbytes).from_address(frame.address))
        if frame.nbytes
        else np.empty(0, np.uint8)
    )


def read(address: int, nbytes: int, max_elements: int = 2**40) -> _core.Head:
    return _core.read_head(address, nbytes, max_elements, MAX_TENSORS)


def head_of(source: _arrays.View, max_elements: int) -> _core.Head:
    """The head of a message, wherever it lies. From a GPU only the head is fetched."""
    if source.home is None:
        return read(source.address, source.size, max_elements)
    room = Frame(source.size)  # read_head() wants the true size; what is behind the head is never touched
    memory = _writable(room)
    first = min(source.size, 64)
    memory[:first] = source.owner[:first].cpu().numpy()
    head_bytes = min(int(memory[44:48].view("<u4")[0]), source.size) if first == 64 else first
    memory[:head_bytes] = source.owner[:head_bytes].cpu().numpy()
    return read(room.address, room.nbytes, max_elements)


def host_view(frame: Any) -> _arrays.View:
    """The bytes of a frame in host memory, aligned as the library wants them."""
    if isinstance(frame, CudaFrame):
        frame = frame.cpu()
    source = _arrays.byte_view(frame)
    if source.home is not None:
        source = _arrays.byte_view(source.owner.cpu())
    if source.address % 4:
        copy = Frame.of(source.owner)
        source = source._replace(address=copy.address, owner=copy)
    return source


def describe(head: _core.Head) -> Dict[str, Any]:
    """A head as a dict, the names as in `gradwire inspect --json`."""

    def bits(nbytes: int, count: int) -> float:
        return 8.0 * nbytes / count if count else 0.0

    elements = sum(tensor.count for tensor in head.tensors)
    tensors = [
        {
            "index": index,
            "name_hash": f"{tensor.name_hash:016x}",
            "count": tensor.count,
            "first": tensor.first,
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "codec": tensor.codec.wire_spec,
            "table": tensor.codec.table,
            "fitted": tensor.codec.describe(),
            "unit": tensor.codec.unit,
            "body_offset": offset,
            "body_bytes": tensor.codec.bytes(tensor.count),
            "bits_per_element": bits(tensor.codec.bytes(tensor.count), tensor.count),
        }
        for index, (tensor, offset) in enumerate(zip(head.tensors, head.body_offsets))
    ]
    return {
        "magic": "GWIR",
        "version": head.version,
        "flags": 0,
        "total_bytes": head.total_bytes,
        "step": head.step,
        "stage": head.stage,
        "rank": head.rank,
        "world": head.world,
        "head_bytes": head.head_bytes,
        "spec_count": head.spec_count,
        "tensor_count": len(tensors),
        "head_check": f"{head.head_check:016x}",
        "body_check": f"{head.body_check:016x}",
        "elements": elements,
        "bits_per_element": bits(head.total_bytes, elements),
        "tensors": tensors,
    }


def inspect(frame: Any) -> Dict[str, Any]:
    """Every field of a frame as a dict, after both checksums were found right; FrameError otherwise.

    >>> import gradwire, numpy
    >>> info = gradwire.inspect(gradwire.encode(numpy.zeros(100, "f4"), "fp16", step=7))
    >>> info["version"], info["step"], info["elements"], info["tensors"][0]["codec"]
    (2, 7, 100, 'fp16')
    """
    source = host_view(frame)
    head = read(source.address, source.size)
    _core.verify_body(source.address, source.size, head)
    return describe(head)
