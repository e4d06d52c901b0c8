"""A process that forks another for each long body: it may die of it, its memory ends with it, and no loop is held.

`python -m gateway_svc.body_forker MAX_BYTES`: takes connections, each as a file descriptor on the socket that is its
stdin, until that ends. A connection brings a pickled function behind its length in 4 bytes, and the bytes for it up to
their end. It gets a pickled `Result`, or nothing if the process that made it has died.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Sequence

# Imported once for all forks: the readers of the APIs.
from gateway_svc.http.bodies.result import MAX_CPU_S, Result
from gateway_svc.http.errors import ApiError
from gateway_svc.kserve import requests as _kserve  # noqa: F401
from gateway_svc.requests import chat, completions, messages, responses, tokens  # noqa: F401
from gateway_svc.vllm import parameters as _vllm  # noqa: F401

_LONGEST_S = 60
_PART_BYTES = 2**20
_AFTER_OTHERS = 5
"""Niceness of a body's process beyond the gateway's: what is streamed goes first."""


def main(control: socket.socket, max_bytes: int) -> None:
    """Serve until the control socket ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started this process ends it
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        for descriptor in descriptors:
            if not _fork():
                _answer(socket.socket(fileno=descriptor), control, max_bytes)
            os.close(descriptor)


def _fork() -> int:
    """As os.fork; what has no process, its other end sees as died."""
    try:
        return os.fork()
    except OSError:
        return -1


def _answer(connection: socket.socket, control: socket.socket, max_bytes: int) -> None:
    """Answer a connection, in the process that is there for it, and end that."""
    try:
        control.close()
        resource.setrlimit(resource.RLIMIT_AS, (_address_space() + max_bytes,) * 2)
        resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_S, MAX_CPU_S))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.alarm(_LONGEST_S)
        os.nice(_AFTER_OTHERS)
        gc.disable()  # it looks at all objects again and again, and nothing here lives on
        parts = []
        while part := connection.recv(_PART_BYTES):
            parts.append(part)
        connection.sendall(pickle.dumps(_result(b"".join(parts)), pickle.HIGHEST_PROTOCOL))
    finally:  # also for want of memory
        os._exit(0)


def _address_space() -> int:
    """Bytes that this process has already; 0 where Linux's /proc is not."""
    with contextlib.suppress(OSError), open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
    return 0


def _result(content: bytes) -> Result:
    end = 4 + int.from_bytes(content[:4], "little")
    try:
        return Result(pickle.loads(content[4:end])(content[end:]))
    except ApiError as error:
        return Result(error=(error.status, error.message, error.param, error.code))
    except MemoryError:
        raise
    except Exception:
        return Result(bug=traceback.format_exc())


def run(arguments: Sequence[str]) -> None:
    """Serve with the socket that is this process's stdin."""
    with socket.socket(fileno=os.dup(0)) as control:
        os.close(0)
        main(control, int(arguments[0]))


if __name__ == "__main__":
    run(sys.argv[1:])
