"""A process that has imported all of Cadenza, and forks to run a module of it, which need not import or compile again.

    python -m tests.helpers.forks.server FD PADDING

It reads requests from the Unix socket FD, one after the other (`Request`, as JSON behind its length, with standard
input, output, error and what else is passed as descriptors), and answers each with a process id. The process runs the
module as `python -m` would. It is a child of who asked: it is forked twice, and the kernel gives an orphan to the
nearest ancestor that takes them (PR_SET_CHILD_SUBREAPER, prctl(2)), which who asked is for that moment. So signals and
waiting are as always.
PADDING reserves room, in which /proc/PID/cmdline of the forked process is written.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import io
import json
import os
import runpy
import signal
import socket
import sys
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

LAUNCHERS = ("cadenza", "cadenza_cli")
"""Modules that start services; a process of theirs gets a server of its own, so that it is the parent of these."""
_RANKS = "--tensor-parallel-size"
"""The option of an executor that starts processes, too."""
_MOST_PASSED = 8
_IMPORTED = (
    "cadenza.client", "cadenza.async_client", "cadenza_launcher.services.child_guard", "cadenza_launcher.llm",
    "cadenza_launcher.local", "cadenza_cli.app", "cadenza_cli.admin.drain", "cadenza_cli.top.top", "gateway_svc.serve",
    "gateway_svc.kserve.servicer", "gateway_svc.vllm.servicer", "scheduler_svc.app", "executor_svc.app",
    "scheduler_svc.executors.addresses", "executor_svc.startup.build", "executor_svc.simulated.executor",
    "transformers", "uvloop",
    "transformers.models.auto.tokenization_auto",
)  # fmt: skip
_LENGTH_BYTES = 4
_CMDLINE_START = 48 - 3
"""Of arg_start in /proc/PID/stat (proc(5)), behind the name in parentheses."""


@dataclass(frozen=True, slots=True)
class Request:
    """What is to run: `arguments` of `python -m`, the module first."""

    arguments: list[str]
    environment: dict[str, str]
    folder: str
    new_session: bool
    passed: list[int]
    """The numbers of further descriptors, which follow the three of standard input, output and error."""

    @property
    def starts_processes(self) -> bool:
        """Whether its process gets a server of its own."""
        return self.arguments[0] in LAUNCHERS or any(each.startswith(_RANKS) for each in self.arguments)


def ask(channel: socket.socket, request: Request, descriptors: tuple[int, ...]) -> int:
    """Have a module run; returns its process id. descriptors: its standard input, output and error, and `passed`."""
    body = json.dumps(asdict(request)).encode()
    socket.send_fds(channel, [len(body).to_bytes(_LENGTH_BYTES, "big")], descriptors)
    channel.sendall(body)
    answer = _read(channel, _LENGTH_BYTES)
    if not answer:
        raise RuntimeError("the fork server has ended")
    return int.from_bytes(answer, "big")


def serve(channel: socket.socket) -> tuple[Request, list[int]]:
    """Answer requests; returns in each forked process what that one is to run, and ends at the end of the socket."""
    while True:
        head, descriptors, *_ = socket.recv_fds(channel, _LENGTH_BYTES, 3 + _MOST_PASSED)
        if not head:
            os._exit(0)
        request = Request(**json.loads(_read(channel, int.from_bytes(head, "big"))))
        pid_read, pid_write = os.pipe()
        go_read, go_write = os.pipe()
        between = os.fork()
        if not between:
            if os.fork():
                os._exit(0)
            channel.close()
            _name_process([sys.executable, "-m", *request.arguments])
            os.write(pid_write, os.getpid().to_bytes(_LENGTH_BYTES, "big"))
            for descriptor in (pid_read, pid_write, go_write):
                os.close(descriptor)
            os.read(go_read, 1)  # until who asked is its parent
            os.close(go_read)
            return request, descriptors
        os.waitpid(between, 0)
        process_id = os.read(pid_read, _LENGTH_BYTES)
        for descriptor in (pid_read, pid_write, go_read, go_write, *descriptors):
            os.close(descriptor)
        channel.sendall(process_id)


def run(request: Request, descriptors: list[int]) -> None:
    """Be the process that was asked for."""
    _place(descriptors, [0, 1, 2, *request.passed])
    if request.new_session:
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    sys.stdin, sys.stdout = open(0, closefd=False), _stream(1, "strict")  # noqa: SIM115
    sys.stderr = _stream(2, "backslashreplace")
    module = request.arguments[0]
    if request.starts_processes:
        _serve_beside()
    sys.argv = list(request.arguments)
    sys.modules.pop(module, None)  # or runpy would warn of it
    code: object = None
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
    _leave(code)


def _place(descriptors: list[int], numbers: list[int]) -> None:
    """Give these descriptors these numbers. Some may be numbers of others: all are moved out of the way first."""
    above = max(*descriptors, *numbers) + 1
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, above) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, number in zip(moved, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)


def _leave(code: object) -> NoReturn:
    """End as `sys.exit(code)` does, but take no module apart: that of all which are imported here costs 0.5 CPU-s."""
    if not (code is None or isinstance(code, int)):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # it waits for threads, as the interpreter does
    atexit._run_exitfuncs()
    sys.stderr.flush()
    try:
        sys.stdout.flush()
    except OSError:  # its reader is gone
        code = 120
    os._exit((code or 0) & 0xFF)


def _stream(descriptor: int, errors: str) -> io.TextIOWrapper:
    raw = open(descriptor, "wb", closefd=False)  # noqa: SIM115
    lines = descriptor == 2 or os.isatty(descriptor)
    return io.TextIOWrapper(raw, encoding="utf-8", errors=errors, line_buffering=lines)


def _serve_beside() -> None:
    """Fork a server for the processes of this one."""
    from tests.helpers.forks import client

    mine, its = socket.socketpair()
    if os.fork():
        its.close()
        client.use(mine)
        return
    mine.close()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nowhere, number)
    os.close(nowhere)
    os.setsid()
    _name_process(["fork server"])
    client.use(None)
    run(*serve(its))
    sys.exit()


def _name_process(arguments: list[str]) -> None:
    """Write /proc/self/cmdline, as far as there is room."""
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[_CMDLINE_START:][:2])
    text = b"".join(each.encode() + b"\0" for each in arguments)[: end - start - 1]
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def _read(channel: socket.socket, size: int) -> bytes:
    parts = []
    while size and (part := channel.recv(size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _compile_kernels() -> None:
    """Compile the CPU's kernels of a model with either dtype: most of a second of each executor's start."""
    from executor_svc.config import ExecutorConfig
    from executor_svc.startup.build import build_model
    from tests.helpers.paths import ROOT

    model, sizes = ROOT / "models" / "cadenza-demo", {"num_gpu_blocks": 8, "max_num_seqs": 2, "max_model_len": 64}
    for dtype in ("float32", "bfloat16"):
        build_model(ExecutorConfig(model=str(model), device="cpu", dtype=dtype, num_threads=1, **sizes))
    gc.collect()
    for thread in set(threading.enumerate()) - {threading.main_thread()}:
        thread.join(10)


def _load_tokenizer() -> None:
    """Import what transformers does only as it loads a model's tokenizer: 2 CPU-s of each scheduler's start."""
    from scheduler_svc.requests.tokenizer import load_tokenizer
    from tests.helpers.paths import ROOT

    load_tokenizer(str(ROOT / "models" / "cadenza-demo"))


def main() -> None:
    """Import everything, compile what is common, then serve."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in _IMPORTED:
        importlib.import_module(name)
    _load_tokenizer()
    _compile_kernels()
    gc.collect()
    gc.freeze()
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked"
    run(*serve(channel))


if __name__ == "__main__":
    main()
