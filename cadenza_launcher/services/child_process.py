"""One service as a child process: start it, wait until it is ready, forward its log, stop it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Protocol

from cadenza.errors import LocalServiceError
from cadenza_common.telemetry.logs import CRITICAL, parse_line

LogSink = Callable[[str, str], None]  # (service, line)

TAIL_LINES = 40
_LOOK_S = 0.02
_READY = "ready "
_ERROR = "error: "


def subject(name: str) -> str:
    """The name of a service as the subject of a sentence: the executor; but executor 1."""
    return name if name[-1:].isdigit() else f"the {name}"


class StartedService(Protocol):
    """What `wait_until_ready` looks at."""

    name: str

    @property
    def address(self) -> str:
        """`HOST:PORT`, once it is ready."""

    @property
    def is_ready(self) -> bool:
        """Whether it serves."""

    def exit_code(self) -> int | None:
        """Its exit code; None while it runs."""

    def exit_reason(self) -> str:
        """How it ended."""

    def log_tail(self) -> str:
        """The last lines of its log."""


def wait_until_ready(
    service: StartedService, timeout_s: float, cancelled: threading.Event, *, beside: Sequence[StartedService] = ()
) -> str:
    """Wait until a service is ready, and return `HOST:PORT`.

    Raises LocalServiceError if it, or one `beside` it, exits before it is ready, or `timeout_s` seconds pass, or
    `cancelled` is set.
    """
    deadline = time.monotonic() + timeout_s
    while not service.is_ready:
        for each in (service, *beside):
            if each.exit_code() is not None and not each.is_ready:
                raise LocalServiceError(f"{subject(each.name)} did not start: {each.exit_reason()}")
        if cancelled.is_set():
            raise LocalServiceError(f"{subject(service.name)} did not start: stopped")
        if time.monotonic() > deadline:
            late = f"{subject(service.name)} was not ready after {timeout_s:g} s"
            raise LocalServiceError(f"{late}\n{service.log_tail()}")
        time.sleep(_LOOK_S)  # not Event.wait: a KeyboardInterrupt within it can become a RuntimeError
    return service.address


class ChildService:
    """A child process that prints `ready HOST:PORT` on stdout once it serves, and logs to stderr.

    `program` is `["-m", module]` or `[script.py]`. The child gets its options as arguments only: the caller has read
    the environment and the options file, and the child gets no CADENZA_ variable. `environment` is added to its own.
    The child runs in its own session, so that Ctrl-C in a terminal reaches only the parent, and it exits when the
    parent dies.
    """

    def __init__(
        self,
        name: str,
        program: Sequence[str],
        arguments: Sequence[str],
        on_log: LogSink,
        environment: Mapping[str, str] | None = None,
        on_line: Callable[[str], bool] | None = None,
    ) -> None:
        """on_line: gets each line of stdout after the ready line first, and returns whether it was for it."""
        self.name = name
        self._on_line = on_line
        self._on_log = on_log
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._ready = threading.Event()
        self._address = ""
        self._kill_reason = ""
        self._stopping = False
        self._process = subprocess.Popen(
            [sys.executable, "-m", "cadenza_launcher.services.child_guard", *program, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env={**_environment(), **(environment or {})},
            text=True,
            encoding="utf-8",
            errors="replace",
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._readers = [
            threading.Thread(target=self._read_stdout, args=(self._process.stdout,), daemon=True),
            threading.Thread(target=self._read_stderr, args=(self._process.stderr,), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._process.pid

    @property
    def address(self) -> str:
        """`HOST:PORT` of its ready line; empty before that."""
        return self._address

    @property
    def is_ready(self) -> bool:
        """Whether it has printed its ready line."""
        return self._ready.is_set()

    def exit_code(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    def exit_reason(self) -> str:
        """How the child ended, in one line: exit code or signal, and the end of its log; or the reason of `kill`."""
        for reader in self._readers:
            reader.join(timeout=1.0)
        code = self.exit_code()
        if self._kill_reason and code == -signal.SIGKILL:
            return self._kill_reason
        how = f"exit code {code}" if code is None or code >= 0 else f"killed by signal {-code}"
        # A service reports its error in one line with this prefix; the last line of a traceback is its error.
        lines = [line.strip() for line in self._tail if line.strip()] or ["it logged nothing"]
        errors = [error for line in lines if (error := _error_of(line)) is not None]
        if not errors and code is not None and -code in (signal.SIGKILL, signal.SIGTERM):
            return how  # it was killed and logged no error
        last = parse_line(lines[-1])
        return f"{how}: {'; '.join(errors or [lines[-1] if last is None else str(last['message'])])}"

    def log_tail(self) -> str:
        """The last lines of its log."""
        return "\n".join(self._tail)

    def drain(self, timeout_s: float) -> None:
        """Send it SIGTERM, so that it finishes its work, and wait until it has exited; `timeout_s` seconds at most."""
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)

    def kill(self, reason: str) -> None:
        """Send it SIGKILL, which ends a stopped process too; `exit_reason` gives the reason."""
        self._kill_reason = reason
        self._process.kill()

    def begin_stop(self) -> None:
        """Send the signal that stops it at once, and do not wait; `stop` waits."""
        if not self._stopping:
            self._stopping = True
            # A service that has not said that it is ready handles no SIGINT yet, and Python would print a traceback.
            self._signal(signal.SIGINT if self.is_ready else signal.SIGTERM)

    def stop(self, grace_s: float) -> None:
        """Stop it at once, after `grace_s` seconds with SIGKILL; returns when it has exited and is reaped."""
        self.begin_stop()
        try:
            self._process.wait(timeout=grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for reader in self._readers:
            reader.join(timeout=1.0)
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def _read_stdout(self, pipe: IO[str]) -> None:
        for line in pipe:
            if line.startswith(_READY) and not self._ready.is_set():
                self._address = line.removeprefix(_READY).strip()
                self._ready.set()
            elif self._on_line is None or not self._on_line(line):
                self._on_log(self.name, line.rstrip("\n"))

    def _read_stderr(self, pipe: IO[str]) -> None:
        for line in pipe:
            self._tail.append(line.rstrip("\n"))
            if _error_of(line) is None:  # `exit_reason` has it: logged too, it would be read twice
                self._on_log(self.name, line.rstrip("\n"))


def _error_of(line: str) -> str | None:
    """The error that a line of the log reports as the end of the process; None: it reports none."""
    if line.startswith(_ERROR):
        return line.removeprefix(_ERROR)
    fields = parse_line(line)
    return str(fields["message"]) if fields is not None and fields.get("level") == CRITICAL else None


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.upper().startswith("CADENZA_")}
