"""The commands that the pages for a new user give, in the order of the pages."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.helpers.paths import ROOT

PAGES = ("README.md", "README.zh-CN.md", "docs/quickstart.md", "docs/quickstart.zh-CN.md")


@dataclass(frozen=True, slots=True)
class Command:
    """A line of a shell block, without its comment; `pages` are all that have it."""

    line: str
    pages: tuple[str, ...]


def commands_of(text: str) -> list[str]:
    """The lines of a page's shell blocks; a line that ends with a backslash goes on in the next."""
    lines: list[str] = []
    for block in re.findall(r"^```sh\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        lines += [re.sub(r"\s+#.*", "", line).strip() for line in block.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line]


def all_commands() -> list[Command]:
    """Every command once, although pages of both languages give the same ones."""
    pages: dict[str, list[str]] = {}
    for page in PAGES:
        for line in commands_of((ROOT / page).read_text(encoding="utf-8")):
            pages.setdefault(line, []).append(page)
    return [Command(line, tuple(named)) for line, named in pages.items()]
