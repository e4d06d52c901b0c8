"""The launcher's end of the local socket at which the gateway of several models orders and hears."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import threading
from collections.abc import Callable

from cadenza_launcher.pool.pool import ModelPool
from gateway_svc.several.wire import Bounds, ModelStatus, read_order, write_line


class PoolChannel:
    """Listens until `close`, at a path that this user alone can reach. The gateway that connected last is heard."""

    def __init__(self, pool: ModelPool, bounds: Bounds) -> None:
        self._pool, self._bounds = pool, bounds
        self._folder = tempfile.TemporaryDirectory(prefix="cadenza-", ignore_cleanup_errors=True)
        self.path = os.path.join(self._folder.name, "pool")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen(1)
        self._connection: socket.socket | None = None
        self._lock = threading.Lock()
        pool.on_status = self._say
        threading.Thread(target=self._accept, name="pool-channel", daemon=True).start()

    def close(self) -> None:
        """End it."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            if self._connection is not None:
                self._connection.close()
        self._folder.cleanup()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            statuses = self._pool.statuses()
            with self._lock:
                self._connection = connection
                # The bounds come last: then the gateway knows that it has heard of every model.
                self._write(b"".join(map(write_line, statuses)) + write_line(self._bounds))
            for status in self._pool.statuses():  # what has changed meanwhile, once more
                self._say(status)
            threading.Thread(target=self._hear, args=(connection,), name="pool-orders", daemon=True).start()

    def _hear(self, connection: socket.socket) -> None:
        orders: dict[str, Callable[[str], None]] = {"load": self._pool.load, "unload": self._pool.unload}
        with contextlib.suppress(OSError), connection, connection.makefile("rb") as lines:
            for line in lines:
                order, name = read_order(line)
                orders[order](name)

    def _say(self, status: ModelStatus) -> None:
        with self._lock:
            self._write(write_line(status))

    def _write(self, line: bytes) -> None:
        if self._connection is not None:
            with contextlib.suppress(OSError):  # the gateway has gone; the next one hears all
                self._connection.sendall(line)
