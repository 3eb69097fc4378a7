# SPDX-License-Identifier: Apache-2.0
"""CUDA streams at little cost for the host. Where a training waits for its host, what a hook does for each bucket is
added to every step, and torch's own context managers and stream objects would be most of that: they ask for devices and
make objects anew. Here objects are kept, and torch is asked through the functions that its own classes use.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch

_get: Any = getattr(torch._C, "_cuda_getCurrentStream", None)
_set: Any = getattr(torch._C, "_cuda_setStream", None)
_known: dict[tuple[int, int, int], torch.cuda.Stream] = {}


def current(device: torch.device) -> torch.cuda.Stream:
    """torch.cuda.current_stream(device)."""
    if _get is None or device.index is None:
        return torch.cuda.current_stream(device)
    key = _get(device.index)
    found = _known.get(key)
    if found is None:
        found = _known[key] = torch.cuda.current_stream(device)
    return found


class On:
    """torch.cuda.stream(stream), to be entered again and again, also inside itself. It belongs to one thread at a
    time."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._before: list[Any] = []

    def __enter__(self) -> None:
        if _get is None or _set is None:
            self._before.append(torch.cuda.stream(self._stream))
            self._before[-1].__enter__()
            return
        self._before.append(_get(torch._C._cuda_getDevice()))  # type: ignore[attr-defined]
        self._use(self._stream.stream_id, self._stream.device_index, self._stream.device_type)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        before = self._before.pop()
        if _get is None or _set is None:
            before.__exit__(kind, error, trace)
        else:
            self._use(*before)

    @staticmethod
    def _use(stream_id: int, device_index: int, device_type: int) -> None:
        _set(stream_id=stream_id, device_index=device_index, device_type=device_type)


class Following:
    """Lets one stream wait for another, with an event that is made once."""

    def __init__(self) -> None:
        self._event: torch.cuda.Event | None = None

    def wait_for(self, first: torch.cuda.Stream, then: torch.cuda.Stream) -> None:
        if first is then:
            return
        if self._event is None:
            self._event = torch.cuda.Event()
        self._event.record(first)
        then.wait_event(self._event)
