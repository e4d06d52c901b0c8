"""A warm process: it has imported what takes long, and forks for each piece of work; what hangs is killed."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

Event = dict[str, Any]

_IMPORTS = (
    "torch numpy hypothesis.extra.numpy pytest_asyncio scipy.stats transformers.models.llama.modeling_llama tokenizers "
    "grpc.aio grpc_status.rpc_status grpc_health.v1.health_pb2_grpc grpc_reflection.v1alpha.reflection "
    "safetensors.torch llvmlite.binding triton pydantic_settings uvloop jinja2 typer rich"
).split()
"""Of other projects alone: what is under test must be imported after the change."""

_PR_SET_CHILD_SUBREAPER = 36


def warm_up() -> None:
    """Import what tests import, and adopt the processes that killed tests leave."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    importlib.import_module("tests.conftest")  # sets variables that must be there before torch and Triton
    for name in _IMPORTS:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def in_fork(
    work: Callable[[Callable[[Event], None]], None], log: Path, seconds_allowed: Callable[[Event], float]
) -> tuple[list[Event], bool]:
    """What the work sends from its fork, until it ends; whether it was killed.

    It is killed when nothing was sent for so long as its last event (`{}` at first) is allowed.
    """
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        _child(work, theirs, log)
    os.close(theirs)
    events: list[Event] = []
    rest, ended, killed = b"", False, False
    deadline = time.monotonic() + seconds_allowed({})
    with contextlib.closing(os.fdopen(ours, "rb", buffering=0)) as pipe:
        while not ended:
            if not select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
                killed = True
                break
            data = pipe.read(1 << 16)
            *lines, rest = (rest + data).split(b"\n")
            events += [json.loads(line) for line in lines]
            ended = not data or any("ended" in event for event in events[-len(lines) :] if lines)
            if lines:
                deadline = time.monotonic() + seconds_allowed(events[-1])
    _end(child)
    return events, killed


def _child(work: Callable[[Callable[[Event], None]], None], pipe: int, log: Path) -> None:
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)

    def send(event: Event) -> None:
        data = json.dumps(event).encode() + b"\n"
        while data:
            data = data[os.write(pipe, data) :]

    try:
        work(send)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    send({"ended": True})
    os._exit(0)


def _end(child: int) -> None:
    """Kill the fork and all that it has started, and collect them."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    while left := psutil.Process().children(recursive=True):
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, 0)
