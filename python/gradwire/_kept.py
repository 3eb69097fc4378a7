# SPDX-License-Identifier: Apache-2.0
"""Things that are dear to make and small to keep: the ones used last stay, by key."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Callable, Generic, Tuple, TypeVar

Thing = TypeVar("Thing")


class Kept(Generic[Thing]):
    def __init__(self, most: int) -> None:
        self._most = most
        self._things: OrderedDict[Tuple[object, ...], Thing] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Tuple[object, ...], make: Callable[[], Thing]) -> Thing:
        """The thing of this key; made, if it is not there."""
        with self._lock:
            if key in self._things:
                self._things.move_to_end(key)
                return self._things[key]
        thing = make()  # without the lock, as below: both may take their time
        with self._lock:
            self._things[key] = thing
            dropped = self._things.popitem(last=False)[1] if len(self._things) > self._most else None
        del dropped
        return thing
