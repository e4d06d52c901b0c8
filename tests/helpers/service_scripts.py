"""Small scripts in place of the services, and what tests look at in them."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

from cadenza_launcher.local import LocalServices
from cadenza_launcher.services.family import Programs

# Listens, notes how it was called in its folder, says ready, and waits. A file `NAME.fail` makes it fail at start;
# Signals end it unless a file `NAME.deaf` is there.
SERVICE = """
import json, os, pathlib, signal, socket, sys, time
folder, name = pathlib.Path(__file__).parent, pathlib.Path(__file__).stem
with open(folder / f"{name}.log", "a") as log:
    print(json.dumps({"pid": os.getpid(), "arguments": sys.argv[1:]}), file=log)
print("loading", file=sys.stderr, flush=True)
if (folder / f"{name}.fail").exists():
    print(f"{name}: no such model", file=sys.stderr)
    sys.exit(3)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN if (folder / f"{name}.deaf").exists() else signal.SIG_DFL)
http = [each.removeprefix("--http=") for each in sys.argv if each.startswith("--http=")]
host, _, port = (http or sys.argv[sys.argv.index("--listen") + 1 :])[0].rpartition(":")
listener = socket.create_server((host, int(port)))
print("chatter on stdout", flush=True)
print(f"ready {host}:{listener.getsockname()[1]}", flush=True)
while True:
    time.sleep(0.1)
"""


class Fakes:
    """The scripts in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("executor", "scheduler", "gateway"):
            (folder / f"{name}.py").write_text(SERVICE)
        self.programs = Programs(*((str(folder / f"{name}.py"),) for name in ("executor", "scheduler", "gateway")))
        # The first lines of a program whose services are these scripts; they need no model.
        self.prelude = (
            "import cadenza_launcher.local\n"
            "cadenza_launcher.local.check_files = lambda model, settings: None\n"
            "cadenza_launcher.local.local_path = lambda model, settings, on_event: model\n"
            "cadenza_launcher.local.Programs.__init__.__defaults__ = "
            f"({self.programs.executor!r}, {self.programs.scheduler!r}, {self.programs.gateway!r})\n"
        )
        self.events: list[str] = []
        self.lines: list[tuple[str, str]] = []

    def start(self, **options) -> LocalServices:
        options = {"stop_grace_s": 5.0, "on_event": self.events.append} | options
        return LocalServices("model", programs=self.programs, on_log=lambda *line: self.lines.append(line), **options)

    def starts(self, name: str) -> list[dict]:
        path = self.folder / f"{name}.log"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def alive(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def until(condition, timeout_s=20.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def children(fakes: Fakes) -> list[int]:
    """The process ids of both services' first processes."""
    return [fakes.starts(name)[0]["pid"] for name in ("executor", "scheduler")]
