# SPDX-License-Identifier: Apache-2.0
"""Files that are replaced as a whole or not at all: a reader finds the old content or the new one, and whatever ends
the process leaves nothing half written in their place.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from typing import BinaryIO, Iterator


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` when the block ends, and is removed if an exception ends it. A link
    stays a link."""
    target = os.path.realpath(path)
    handle, temporary = tempfile.mkstemp(dir=os.path.dirname(target), prefix=".gradwire-")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)  # as open() makes a file
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
