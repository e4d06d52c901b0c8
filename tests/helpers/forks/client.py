"""`subprocess.Popen` of a Cadenza module, by the fork server (`server.py`) in place of a new interpreter.

Who starts `python -m MODULE` sees no difference, but in the time that it takes: it has a child process of that id. What
another interpreter would see as it starts is left to one: variables of libraries, limits, other folders of modules.
"""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

from tests.helpers.forks.server import Request, ask
from tests.helpers.paths import PACKAGES, ROOT

_READ_AT_START = (
    "LD_", "MALLOC_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "PYTHON", "TORCH", "TRITON_", "GRPC_", "HF_",
    "CUDA_", "TRANSFORMERS_", "TOKENIZERS_",
)  # fmt: skip
_NO_MODULES = ("cadenza_common.grammar.child", "scheduler_svc.requests.chats.child")
"""Those that limit their own memory: a fork has this process's, which is more."""
_PADDING = "x" * 8192
_PR_SET_CHILD_SUBREAPER = 36

_exec = subprocess.Popen._execute_child
_lock = threading.Lock()
_channel: socket.socket | None = None
_process: subprocess.Popen[bytes] | None = None
_at_start: dict[str, str] = {}
"""What the server's interpreter has read of its environment."""
_kept: dict[str, str] = {}
"""What a new interpreter would have read of this process's environment before the first test."""
is_on = True
"""Off: all processes are new interpreters."""


def end() -> None:
    """End this process's server; what it has forked goes on."""
    global _channel
    if _process is not None and _channel is not None:
        _channel.close()
        _channel = None
        _process.wait()


def keep_variables() -> None:
    """Note this process's variables, as `check_variables` wants them."""
    global _kept
    _kept = _read_at_start(os.environ)


def check_variables() -> None:
    """Raise AssertionError if variables that a new interpreter would read are not those kept, and put them back."""
    now = _read_at_start(os.environ)
    if now == _kept:
        return
    changed = {name: now.get(name) for name in now.keys() | _kept.keys() if now.get(name) != _kept.get(name)}
    for name in changed:
        os.environ.pop(name, None)
    os.environ.update({name: _kept[name] for name in changed.keys() & _kept.keys()})
    raise AssertionError(f"the test has left variables behind: {changed}; services of later tests would be no forks")


def use(channel: socket.socket | None) -> None:
    """Ask this server from now on; None: there is none, and all processes are new interpreters."""
    global _channel, is_on, _at_start
    _channel, is_on, _at_start = channel, channel is not None, _read_at_start(os.environ)
    install()


def install() -> None:
    """Let all Popen objects of this process, and of those that come from the server, go by it."""
    subprocess.Popen._execute_child = _execute_child


def _execute_child(self: Any, *arguments: Any) -> None:
    (args, executable, preexec_fn, _close_fds, pass_fds, cwd, env, _info, _flags, shell, *pipes) = arguments[:16]
    *_, gid, gids, uid, umask, new_session, group = arguments[16:]
    plain = executable in (None, args[0]) and preexec_fn is None and not shell
    plain = plain and gid is gids is uid is None and umask == -1 and group == -1
    environment = dict(os.environ if env is None else env)
    if not (is_on and plain and _is_forked(args, environment)):
        return _exec(self, *arguments)
    p2cread, _, _, c2pwrite, _, errwrite = pipes
    request = Request(
        [os.fsdecode(each) for each in args[2:]], environment, os.fspath(cwd or os.getcwd()), new_session, [*pass_fds]
    )
    descriptors = (
        p2cread if p2cread != -1 else 0,
        c2pwrite if c2pwrite != -1 else 1,
        errwrite if errwrite != -1 else 2,
        *pass_fds,
    )
    try:
        self.pid = _ask(request, descriptors)
        self._child_created = True
    finally:
        self._close_pipe_fds(*pipes)
    return None


def _is_forked(args: Any, environment: dict[str, str]) -> bool:
    if isinstance(args, (str, bytes)) or list(args[:2]) != [sys.executable, "-m"] or len(args) < 3:
        return False
    if args[2].partition(".")[0] not in PACKAGES or args[2] in _NO_MODULES:
        return False
    return _read_at_start(environment) == (_at_start if _channel is not None else _read_at_start(os.environ))


def _read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(_READ_AT_START)}


def _ask(request: Request, descriptors: tuple[int, int, int]) -> int:
    with _lock:
        channel = _server()
        libc = ctypes.CDLL(None, use_errno=True)
        # Orphans of others are not ours, but for this moment.
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            return ask(channel, request, descriptors)
        finally:
            libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _server() -> socket.socket:
    """This process's server, started with its first process."""
    global _channel, _process, _at_start
    if _channel is None:
        _at_start = _read_at_start(os.environ)
        _channel, its = socket.socketpair()
        path = os.pathsep.join([str(ROOT), str(ROOT / "client"), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", "tests.helpers.forks.server", str(its.fileno()), _PADDING]
        with its:
            # numpy's library starts threads as it is loaded, and a process with threads cannot be forked. Services
            # silence gRPC before they import it.
            environment = {**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1", "GRPC_VERBOSITY": "NONE"}
            _process = subprocess.Popen(
                command, pass_fds=[its.fileno()], cwd=ROOT, env=environment, start_new_session=True
            )
    return _channel
