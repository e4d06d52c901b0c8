"""Screens of a busy server as SVG pictures, for docs/figures."""

from __future__ import annotations

import io
from pathlib import Path

from pyte.screens import Char
from rich.console import Console
from rich.style import Style
from rich.text import Text

from tests.first_minutes.places import Place
from tests.first_minutes.shell import Shell
from tests.helpers.machine.terminal import Terminal

_SERVER = "cadenza up models/cadenza-demo"
_LOAD = "cadenza loadtest --request-rate 40 --num-requests 100000 --quiet"
_BAR = """python -c '
from cadenza import LLM, SamplingParams
with LLM("models/cadenza-demo") as llm:
    llm.generate(["Tell me a story."] * 400, SamplingParams(max_tokens=64))
'"""
_NAMES = {"brown": "yellow", "default": None}


def take_pictures(place: Place, size: tuple[int, int], home: Path, folder: Path) -> None:
    """Keep screens of `top`, `top`'s details, `chat` and of LLM's bar."""
    shells = server, load, client = [Shell(place.folder, size, {"HOME": str(home)}) for _ in range(3)]
    try:
        for shell in shells:
            shell.run("source .venv/bin/activate", 10)
            shell.clear()

        def keep(shell: Shell, name: str, title: str) -> None:
            save_picture(shell.terminal, folder / f"terminal-{name}-{size[0]}x{size[1]}.svg", title)

        server.begin(_SERVER)
        server.wait_screen("ready ", 60)
        client.begin("cadenza chat")
        client.wait_screen(r"\n> ?\n*\Z")
        client.type("Tell me a story about a fox.\n")
        client.wait_screen(r"fox\.\n(.|\n)*\n> ?\n*\Z", 60)
        keep(client, "chat", "cadenza chat")
        client.type("/quit\n")
        client.wait_prompt(20)
        load.begin(_LOAD)
        client.begin("cadenza top")
        # Bars of many intervals, so that there is something to see.
        client.wait_screen("[▁▂▃▄▅▆▇█]{8}" if size[0] >= 80 else "TTFT p50 +[0-9]", 60)
        keep(client, "top", "cadenza top")
        client.type("d")
        client.wait_screen("plans")
        keep(client, "top-details", "cadenza top, details")
        client.type("q")
        client.wait_prompt(20)
        load.interrupt()
        server.interrupt()
        client.clear()
        client.begin(_BAR)
        client.wait_screen(r"[1-9]\d%")
        keep(client, "bar", "LLM.generate")
        client.wait_prompt(60)
    finally:
        for shell in shells:
            shell.close()


def save_picture(terminal: Terminal, path: Path, title: str) -> None:
    """Write the screen as it is now, without its empty last lines."""
    rows = terminal.cells
    while rows and not any(char.data.strip() for char in rows[-1]):
        rows.pop()
    console = Console(
        record=True, width=len(rows[0]), file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    for row in rows:
        console.print(Text.assemble(*((char.data, _style(char)) for char in row), no_wrap=True, end="\n"))
    path.write_text(console.export_svg(title=title, unique_id=path.stem), encoding="utf-8")


def _style(char: Char) -> Style:
    return Style(color=_colour(char.fg), bgcolor=_colour(char.bg), bold=char.bold, reverse=char.reverse)


def _colour(name: str) -> str | None:
    if name.startswith("bright"):
        return f"bright_{name.removeprefix('bright').removeprefix('brown') or 'yellow'}"
    if len(name) == 6 and name not in _NAMES and all(digit in "0123456789abcdef" for digit in name):
        return f"#{name}"
    return _NAMES.get(name, name)
