"""A file on a disk that becomes full."""

from __future__ import annotations

import errno
import os
from io import FileIO
from typing import Any


class FullDisk(FileIO):
    """Takes `capacity` bytes, a part of a write too as a kernel does, and then none; it can fail when it is closed."""

    def __init__(
        self, path: str, mode: str, *, capacity: int, fails_at_close: bool = False, opener: Any = None
    ) -> None:
        super().__init__(path, mode, opener=opener)
        self._capacity = capacity
        self._fails_at_close = fails_at_close

    def write(self, data: Any) -> int:
        part = memoryview(data)[: self._capacity - self.tell()]
        if not part:
            raise _full()
        return super().write(part)

    def close(self) -> None:
        was_open = not self.closed
        super().close()
        if was_open and self._fails_at_close:
            raise _full()


def _full() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
