"""Where the commands are played: a fresh clone, or a folder elsewhere with the wheel installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.first_minutes.pages import all_commands
from tests.helpers.machine.wheel_environment import build_wheel, install_wheel, share_packages
from tests.helpers.paths import ROOT


@dataclass(frozen=True, slots=True)
class Place:
    """A folder with `.venv`, `models` and `examples` in it; `is_clone`: `make` works there."""

    folder: Path
    is_clone: bool


def wheel_place(folder: Path) -> Place:
    """The wheel beside the packages of the environment that runs this: made in seconds."""
    wheel, _ = build_wheel(folder / "dist")
    install_wheel(wheel, folder / ".venv")
    share_packages(folder / ".venv")
    return _linked(folder)


def installed_place(folder: Path) -> Place:
    """The wheel, installed with all that it needs by the lines of the pages: takes minutes."""
    build_wheel(folder / "dist")
    subprocess.run([sys.executable, "-m", "venv", folder / ".venv"], check=True)
    for command in all_commands():
        if command.line.startswith("pip install"):
            subprocess.run(["bash", "-ec", f"source .venv/bin/activate; {command.line}"], check=True, cwd=folder)
    return _linked(folder)


def clone_place(folder: Path) -> Place:
    """A fresh clone, in which nothing is installed."""
    subprocess.run(["git", "clone", "-q", ROOT, folder / "cadenza"], check=True)
    return Place(folder / "cadenza", is_clone=True)


def _linked(folder: Path) -> Place:
    """The folder with what the pages name by paths."""
    shutil.copytree(ROOT / "models" / "cadenza-demo", folder / "models" / "cadenza-demo")
    (folder / "examples").symlink_to(ROOT / "examples")
    return Place(folder, is_clone=False)
