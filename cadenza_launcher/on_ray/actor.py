"""The actor: it runs one process at a time, an executor or a rank of one, on the machine where Ray has placed it.

Ray starts the actor again when it, or its machine, is gone; the program that made it then starts the process again.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import tempfile
import threading
import time
from collections import deque
from pathlib import Path

from cadenza_common.wire.transport import format_address
from cadenza_launcher.on_ray.orders import News, Order
from cadenza_launcher.services.child_process import ChildService

EXIT_LOST = 1
"""The exit code of a process that is gone with its actor."""
WAIT_S = 5.0
"""The longest wait for news."""
_KEPT_LINES = 1000
_STOP_S = 1.0
_LOOK_S = 0.1


class ProcessActor:
    """Runs a process; its methods take and return text and whole numbers. For several threads at once.

    `life` counts the starts of the process: a call that names any but the last start does nothing.
    """

    def __init__(self) -> None:
        # Ray sets it to the processors of the bundle; how many threads there are is for the options to say.
        os.environ.pop("OMP_NUM_THREADS", None)
        self._starting = threading.Lock()
        self._life = 0
        self._service: ChildService | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._logged = threading.Condition()
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._num_lines = 0
        threading.Thread(target=self._end_with, args=(os.getppid(),), name="raylet", daemon=True).start()

    def start(self, life: int, order: str) -> None:
        """Start the process of an `Order`; one of an earlier life ends. A second call for one life does nothing."""
        with self._starting:
            if life <= self._life:
                return
            self._end(0.0)
            wanted = Order.from_json(order)
            self._folder = tempfile.TemporaryDirectory(prefix="cadenza-ray-")
            for name, text in wanted.files.items():
                with open(Path(self._folder.name) / name, "x", opener=_open_own) as file:
                    file.write(text)
            arguments = [each.replace("{files}", self._folder.name) for each in wanted.arguments]
            with self._logged:
                self._num_lines = 0
                self._lines.clear()
            self._service = ChildService(wanted.name, wanted.program, arguments, self._log, wanted.environment)
            self._life = life

    def news(self, life: int, seen: int, knows_address: int) -> str:
        """Return `News` once there are some, or after WAIT_S.

        seen: lines of the log that the caller has; knows_address: 1 if it has the address.
        """
        until = time.monotonic() + WAIT_S
        while time.monotonic() < until:
            service = self._service
            if life != self._life or service is None:
                return News(code=EXIT_LOST, reason="Ray has started its actor again").to_json()
            ended = service.exit_code() is not None
            if ended or self._num_lines > seen or (service.is_ready and not knows_address):
                return self._news_of(service, seen).to_json()
            with self._logged:
                self._logged.wait(_LOOK_S)
        return News(seen=seen).to_json()

    def stop(self, life: int, grace_ms: int) -> None:
        """Stop the process at once, after `grace_ms` with SIGKILL; returns when it has exited."""
        with self._starting:
            if life == self._life:
                self._end(grace_ms / 1000)

    def place(self) -> str:
        """Return an address of this machine, with a port that is free now."""
        import ray

        host = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((host, 0))
            return format_address(host, probe.getsockname()[1])

    def _news_of(self, service: ChildService, seen: int) -> News:
        code = service.exit_code()
        reason = "" if code is None else service.exit_reason()  # all of its log has been read now
        with self._logged:
            count = self._num_lines
            lines = list(self._lines)[-(count - seen) :] if count > seen else []
        return News(lines, count, service.address, code, reason)

    def _log(self, _name: str, line: str) -> None:
        with self._logged:
            self._lines.append(line)
            self._num_lines += 1
            self._logged.notify_all()

    def _end(self, grace_s: float) -> None:
        if self._service is not None:
            self._service.stop(grace_s)
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _end_with(self, raylet: int) -> None:
        """End when the raylet does: Ray starts the actor again on another machine, and this one may be cut off."""
        if raylet == 1:
            return
        with contextlib.suppress(OSError):  # it has ended already
            select.select([os.pidfd_open(raylet)], [], [])
        sys.stderr.write("error: the raylet of this machine has ended, and so does this actor\n")
        sys.stderr.flush()
        if self._service is not None:
            self._service.stop(_STOP_S)
        if self._folder is not None:
            self._folder.cleanup()  # it may hold keys
        os._exit(1)


def _open_own(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
