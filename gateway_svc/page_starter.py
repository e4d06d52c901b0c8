"""Between a gateway with the live page and the program that started it, which alone can kill its executors.

The starter gives the page's token by a variable, so that a restarted gateway has it too. The gateway asks by a line on
its standard output, which nobody else writes to: it has checked the token.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

PAGE_TOKEN = "_CADENZA_PAGE_TOKEN"
PAGE_DEMO = "_CADENZA_PAGE_DEMO"
"""Set: the starter kills an executor when asked to."""
_KILL = "kill executor "


@dataclass(frozen=True, slots=True)
class PageRights:
    """What the live page may do for whom, as whoever started the gateway says."""

    token: str = field(repr=False)
    """Whoever shows it sees all requests, and acts."""
    kill: Callable[[str], None] | None = None
    """Kills the executor at an address; None: nobody here can."""


def page_environment(*, has_page: bool, is_demo: bool) -> dict[str, str]:
    """What a gateway with the page gets; nothing for one without."""
    if not has_page:
        return {}
    return {PAGE_TOKEN: secrets.token_urlsafe(24)} | ({PAGE_DEMO: "1"} if is_demo else {})


def ask_to_kill(address: str) -> None:
    """Ask the starter to kill the executor at HOST:PORT."""
    sys.stdout.write(f"{_KILL}{address}\n")
    sys.stdout.flush()


def kill_when_asked(addresses: Mapping[str, str], kill: Callable[[str], None]) -> Callable[[str], bool]:
    """A function for the lines of a gateway: it calls `kill` with the name of the executor at the address that one
    names, and returns whether the line was such a one. addresses: of the executors, by name."""

    def answer(line: str) -> bool:
        if not line.startswith(_KILL):
            return False
        wanted = line.removeprefix(_KILL).strip()
        for name, address in dict(addresses).items():
            if address == wanted:
                kill(name)
        return True

    return answer
