"""Two hosts as network namespaces: a cable between them that can be pulled, and one from the first to the test."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

_NUMBERS = itertools.count()


@dataclass(frozen=True)
class TwoHosts:
    """Their names, and their addresses."""

    first: str
    second: str
    front: str
    """The first host's address for the test."""
    master: str
    """The first host's address for the second."""

    @property
    def prefixes(self) -> list[list[str]]:
        """What a command on each begins with."""
        return [["ip", "netns", "exec", name] for name in (self.first, self.second)]

    def pull(self) -> None:
        """The second host is not reachable any more; no connection is told."""
        _run("ip", "-n", self.second, "link", "set", "between", "down")

    def plug(self) -> None:
        """The second host is reachable again."""
        _run("ip", "-n", self.second, "link", "set", "between", "up")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


@contextlib.contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """Make them; raises OSError where that is not permitted."""
    number = (os.getpid() * 8 + next(_NUMBERS)) % (1 << 14)
    net, names = f"10.{200 + number // 4096}.{number // 16 % 256}", [f"cadenza{number}{end}" for end in "ab"]
    first, low = names[0], number % 16 * 16
    front, master = f"{net}.{low + 2}", f"{net}.{low + 9}"
    with contextlib.ExitStack() as stack:
        for name in names:
            _run("ip", "netns", "add", name)
            stack.callback(_run, "ip", "netns", "del", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        _run("ip", "link", "add", f"cdz{number}", "type", "veth", "peer", "name", "front", "netns", first)
        _run("ip", "-n", first, "link", "add", "between", "type", "veth", "peer", "name", "between", "netns", names[1])
        _run("ip", "address", "add", f"{net}.{low + 1}/30", "dev", f"cdz{number}")
        _run("ip", "link", "set", f"cdz{number}", "up")
        for name, device, address in (
            (first, "front", front),
            (first, "between", master),
            (names[1], "between", f"{net}.{low + 10}"),
        ):
            _run("ip", "-n", name, "address", "add", f"{address}/30", "dev", device)
            _run("ip", "-n", name, "link", "set", device, "up")
        yield TwoHosts(*names, front, master)


@contextlib.contextmanager
def two_hosts_or_skip() -> Iterator[TwoHosts]:
    """Make them, or skip the test where that is not possible."""
    with contextlib.ExitStack() as stack:
        try:
            hosts = stack.enter_context(two_hosts())
        except OSError as error:
            pytest.skip(f"network namespaces cannot be made here, which takes root and Debian's iproute2: {error}")
        yield hosts
