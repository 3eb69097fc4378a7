# SPDX-License-Identifier: Apache-2.0
"""One exception class per kind of error. All are `Error`; those that mean a bad value are also `ValueError`, and the
one about files is also `OSError`, so that code that knows nothing of gradwire catches them as it would expect to.
"""

from __future__ import annotations


class Error(RuntimeError):
    """Something failed; the message names the field, the value and what is allowed.

    kind: the kind of error; field: what was at fault, e.g. "bits" or "body_check"; rank: whose fault it was, or None.

        >>> import gradwire
        >>> try:
        ...     gradwire.Codec("qsgd:bits=99")
        ... except gradwire.Error as error:
        ...     print(error.kind, error.field, error.rank)
        usage bits None
    """

    kind = "internal"

    def __init__(self, message: str, *, field: str = "", rank: int | None = None) -> None:
        super().__init__(message)
        self.field = field
        self.rank = rank

    def __reduce__(self) -> tuple[object, ...]:
        return _restore, (type(self), str(self), self.field, self.rank)


def _restore(type_: type[Error], message: str, field: str, rank: int | None) -> Error:
    return type_(message, field=field, rank=rank)


class UsageError(Error, ValueError):
    """An argument, a codec or rules are wrong."""

    kind = "usage"


class FrameError(Error, ValueError):
    """A frame is truncated, altered, malformed, or of another version."""

    kind = "frame"


class MismatchError(Error):
    """Ranks disagree about what they are about to do."""

    kind = "mismatch"


class EngineError(Error):
    """A peer stalled or died."""

    kind = "engine"


class FileError(Error, OSError):
    """A file could not be read or written."""

    kind = "io"


class UnsupportedError(Error):
    """This build or this machine cannot do it."""

    kind = "unsupported"


class DeviceError(Error):
    """A call of the device failed."""

    kind = "device"


for _class in (Error, UsageError, FrameError, MismatchError, EngineError, FileError, UnsupportedError, DeviceError):
    _class.__module__ = "gradwire"  # where users find them
