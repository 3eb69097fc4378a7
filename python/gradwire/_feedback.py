# SPDX-License-Identifier: Apache-2.0
"""Error feedback: what a step could not send, the residual, is kept by tensor name and added to what the next step
sends. Encoding writes the new residual beside the old one; commit or rollback decides, so a step that is skipped
changes nothing.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any, Dict, Iterator, List, Sequence, Union

from . import _arrays, _core
from ._errors import UsageError

if TYPE_CHECKING:
    from ._plan import Plan


def _home_of(device: Any) -> int | None:
    """None for the CPU, or the index of a CUDA device, from None, a string or a torch.device."""
    text = "cpu" if device is None else str(device)
    kind, _, index = text.partition(":")
    if text == "cpu":
        return None
    if kind != "cuda" or not (index == "" or index.isdigit()):
        raise UsageError(f"device is {text}; allowed are cpu, cuda and cuda:INDEX", field="device")
    import torch

    return int(index) if index else int(torch.cuda.current_device())


class ErrorFeedback:
    """Residuals by tensor name, in float32 or bfloat16, on the CPU or (device="cuda:0") on a GPU.

    >>> import gradwire, numpy
    >>> plan = gradwire.Plan([("w", 4, "float32", "onebit")])
    >>> feedback = gradwire.ErrorFeedback()
    >>> feedback.add_plan(plan)
    >>> gradient = numpy.array([1, 2, 3, 6], "f4")
    >>> message = plan.encode([gradient], step=0, feedback=feedback)
    >>> feedback.residual("w").tolist()     # neither committed nor rolled back yet
    [0.0, 0.0, 0.0, 0.0]
    >>> feedback.commit(0)
    >>> feedback.residual("w").tolist()     # their mean was sent
    [-2.0, -1.0, 0.0, 3.0]

    On a GPU it belongs to torch's current stream at the time it is made, and messages that use it are encoded there.
    """

    def __init__(self, dtype: Any = "float32", device: Any = None) -> None:
        self._home = _home_of(device)
        self._stream = _arrays.stream_of(self._home)
        with _arrays.on(self._home):
            self.core = _core.ErrorFeedback(_arrays.dtype_name(dtype), _arrays.device_of(self._home))

    @staticmethod
    def _of(core: _core.ErrorFeedback, home: int | None) -> ErrorFeedback:
        feedback = ErrorFeedback.__new__(ErrorFeedback)
        feedback._home, feedback._stream, feedback.core = home, _arrays.stream_of(home), core
        return feedback

    def add(self, name: str, count: int, *, direction: str = "up", first: int = 0) -> None:
        """Adds a tensor with a residual of zeros. direction: "up" for what a worker sends, "down" for what an owner
        sends."""
        with _arrays.on(self._home):
            self.core.add(direction, name, _arrays.whole(count, "count", 2**40), _arrays.whole(first, "first", 2**40))

    def add_plan(self, plan: Plan, *, direction: str = "up") -> None:
        """Adds every tensor of a plan whose codec is lossy."""
        for tensor in plan.tensors:
            if not tensor.codec.lossless:
                self.add(tensor.name, tensor.count, direction=direction, first=tensor.first)

    def commit(self, step: int) -> None:
        """The step was taken: what was encoded in it has its new residual."""
        with _arrays.on(self._home):
            self.core.commit(_arrays.whole(step, "step"))

    def rollback(self, step: int) -> None:
        """The step was skipped: all residuals stay as they were before it."""
        self.core.rollback(_arrays.whole(step, "step"))

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Commits the step at the end of the block, or rolls it back if an exception leaves it."""
        try:
            yield
        except BaseException:
            self.rollback(step)
            raise
        self.commit(step)

    def save(self, path: Union[str, os.PathLike[str]]) -> None:
        """Writes everything to one file. An old file stays complete until the new one is."""
        self.core.save(os.fspath(path))

    @staticmethod
    def load(path: Union[str, os.PathLike[str]], device: Any = None) -> ErrorFeedback:
        """Reads what `save` has written. A truncated or altered file is refused."""
        home = _home_of(device)
        with _arrays.on(home):
            return ErrorFeedback._of(_core.ErrorFeedback.load(os.fspath(path), _arrays.device_of(home)), home)

    @staticmethod
    def redistribute(ranks: Sequence[ErrorFeedback], world: int) -> List[ErrorFeedback]:
        """The states of all ranks -> the states for another number of ranks. The sum of the residuals, in units of the
        mean gradient, stays the same."""
        fresh = _core.ErrorFeedback.redistribute(
            [rank.core for rank in ranks], _arrays.whole(world, "world", 2**31 - 1)
        )
        return [ErrorFeedback._of(core, ranks[0]._home) for core in fresh]

    def residual(self, name: str, *, direction: str = "up", first: int = 0) -> Any:
        """A copy of the residual of a tensor, as a NumPy array of float32."""
        with _arrays.on(self._home):
            return self.core.residual(direction, name, _arrays.whole(first, "first", 2**40))

    def hash(self) -> int:
        """A hash of everything that is committed: equal states have equal hashes."""
        with _arrays.on(self._home):
            return self.core.hash()

    @property
    def extra(self) -> Dict[str, bytes]:
        """What else is saved with the residuals: what codecs have learned."""
        return self.core.extra()

    @property
    def nbytes(self) -> int:
        """The memory that the residuals take, in bytes. There are two copies: one committed, one of the open step."""
        return self.core.bytes()

    def check_place(self, home: int | None) -> None:
        if home != self._home:
            raise UsageError(
                f"feedback is on {_arrays.place(self._home)}, the tensors are on {_arrays.place(home)}; "
                "they must be in one place",
                field="feedback",
            )
        if _arrays.stream_of(home) != self._stream:
            raise UsageError(
                "feedback was made on another CUDA stream than the current one; use it under the stream it was made on",
                field="feedback",
            )

    def __repr__(self) -> str:
        return f"<ErrorFeedback of {self.nbytes} bytes on {_arrays.place(self._home)}>"
