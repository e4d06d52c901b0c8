"""Plays the commands of the pages as a person does, and says what went wrong."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.first_minutes.pages import Command
from tests.first_minutes.places import Place
from tests.first_minutes.shell import Shell

_ADDRESS = "127.0.0.1:50051"
_MINUTE_S = 60.0
_SKIPPED = (
    ("docker", "needs an engine: tests/service/deploy/test_compose_engine.py"),
    ("make test", "it runs this"),
    ("pip install", "done before by --place installed, which needs a network"),
    ("cadenza loadtest --url", "needs another server: tests/service/loadtest/test_loadtest_openai.py"),
)
_SLOW = ("make ", "cadenza loadtest", "cadenza simulate")


@dataclass(frozen=True, slots=True)
class Played:
    """One command in one terminal; `problem` is empty if all went well."""

    line: str
    size: tuple[int, int]
    seconds: float
    problem: str


@dataclass(slots=True)
class Player:
    """One person with two terminals of one size: the server's and another."""

    place: Place
    server: Shell
    client: Shell
    timeout_s: float
    """Of a command that ends by itself."""
    _serves: bool = field(default=False, init=False)

    def skip_reason(self, command: Command, *, quick: bool) -> str:
        """Why a command is not played here; empty if it is."""
        for start, reason in _SKIPPED:
            if command.line.startswith(start):
                return reason
        if not self.place.is_clone and command.line.startswith("make "):
            return "there is no Makefile outside a clone"
        return "takes longer than seconds" if quick and command.line.startswith(_SLOW) else ""

    def play(self, command: Command) -> Played:
        """Play one command; errors are part of what is returned."""
        began = time.monotonic()
        try:
            problem = self._play(command.line)
        except AssertionError as error:
            problem = str(error)
        return Played(command.line, self.client.size, time.monotonic() - began, problem)

    def close(self) -> None:
        """Stop the server and close both terminals."""
        if self._serves:
            self.server.interrupt()
        self.client.close()
        self.server.close()

    def _play(self, line: str) -> str:
        if line.startswith(("cadenza up", "cadenza serve")):
            return self._start_server(line)
        if "source " in line and not self._serves:
            return self._fails(self.server.run(line, self.timeout_s), self.server) or self._run(line)
        if line.startswith("cadenza chat"):
            return self._chat(line)
        if line == "cadenza top":
            return self._watch(line)
        if line.startswith("cadenza top --json"):
            return self._write_lines(line)
        return self._run(line)

    def _run(self, line: str) -> str:
        code = self.client.run(line, self.timeout_s)
        return self._fails(code, self.client)

    def _fails(self, code: int, shell: Shell, expected: int = 0) -> str:
        if code != expected:
            return f"exit code {code}: {shell.output[-2000:]}"
        return "a traceback was shown" if "Traceback" in shell.output else ""

    def _start_server(self, line: str) -> str:
        if self._serves:
            problem = self._fails(self.server.interrupt(), self.server)
            if problem:
                return problem
        self.server.begin(line)
        self.server.wait_screen(rf"ready {re.escape(_ADDRESS)}", _MINUTE_S)
        self._serves = True
        return ""

    def _chat(self, line: str) -> str:
        self.client.begin(line)
        self.client.wait_screen(r"\n> ?\n*\Z")
        self.client.type("Tell me a story about a fox.\n")
        self.client.wait_screen(r"fox\.\n(.|\n)*\n> ?\n*\Z", _MINUTE_S)
        self.client.type("/quit\n")
        return self._fails(self.client.wait_prompt(20), self.client)

    def _watch(self, line: str) -> str:
        self.client.begin(line)
        self.client.wait_screen("running")
        self.client.type("q")
        return self._fails(self.client.wait_prompt(20), self.client)

    def _write_lines(self, line: str) -> str:
        """A command that writes lines to a file until Ctrl-C."""
        path = self.place.folder / line.rpartition(">")[2].strip()
        path.unlink(missing_ok=True)  # of a run before
        self.client.begin(line)
        deadline = time.monotonic() + _MINUTE_S
        while not (path.exists() and path.read_text().endswith("}\n")):
            assert time.monotonic() < deadline, f"{path.name} stays empty"
            time.sleep(0.05)
        return self._fails(self.client.interrupt(), self.client, expected=130)


def play_all(
    place: Place,
    size: tuple[int, int],
    commands: Iterable[Command],
    *,
    home: Path,
    quick: bool,
) -> Iterator[Played]:
    """Play the commands in terminals of `size` (columns, lines); those that are skipped are left out."""
    environment = {"HOME": str(home), "HF_HUB_OFFLINE": "1"}
    shells = [Shell(place.folder, size, environment) for _ in range(2)]
    player = Player(place, *shells, timeout_s=_MINUTE_S if quick else 15 * _MINUTE_S)
    try:
        if not place.is_clone:
            for shell in shells:
                assert shell.run("source .venv/bin/activate", 10) == 0
        for command in commands:
            if not player.skip_reason(command, quick=quick):
                yield player.play(command)
    finally:
        player.close()
