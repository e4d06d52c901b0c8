"""Runs a service as `python -m` would, and ends it when its parent process has died.

`python -m cadenza_launcher.services.child_guard -m executor_svc --model …`: the parent holds the other end of standard
input and never writes to it; end of file means that the parent has died, for any reason. (PR_SET_PDEATHSIG does not
work for this: it fires when the parent's *thread* ends.)
"""

from __future__ import annotations

import os
import runpy
import select
import signal
import sys
import threading
import time

_GRACE_S = 10.0
_AGAIN_S = 0.3
_POLL_S = 1.0


def main() -> None:
    """Run the module (`-m NAME`) or script named by the arguments, with the rest as its own arguments."""
    arguments = sys.argv[1:]
    # A parent may have blocked them, as Ray does, and children inherit that.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))
    threading.Thread(target=_watch, args=(os.getppid(),), name="child-guard", daemon=True).start()
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        readable, _, _ = select.select([0], [], [], _POLL_S)
        if readable and not os.read(0, 4096):
            break
    os.kill(os.getpid(), signal.SIGINT)  # at once: SIGTERM would let it finish its requests
    time.sleep(_AGAIN_S)
    os.kill(os.getpid(), signal.SIGINT)  # after the first signal a rank waits for rank 0
    time.sleep(_GRACE_S)
    os._exit(1)


if __name__ == "__main__":
    main()
