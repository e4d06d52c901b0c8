"""Where the commands are played: a fresh clone, or a folder elsewhere with the wheel installed."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.paths import ROOT
from tests.helpers.wheel_environment import build_wheel, install_wheel

_TORCH = ("torch==2.13.0",)


@dataclass(frozen=True, slots=True)
class Place:
    """A folder with `.venv`, `models` and `examples` in it; `is_clone`: `make` works there."""

    folder: Path
    is_clone: bool


def wheel_place(folder: Path) -> Place:
    """The wheel beside the packages of the environment that runs this: made in seconds."""
    wheel = build_wheel(folder)
    install_wheel(wheel, folder / ".venv")
    return _linked(folder)


def installed_place(folder: Path) -> Place:
    """The wheel with its extra `serve`, everything installed anew: takes minutes."""
    wheel = build_wheel(folder)
    subprocess.run([sys.executable, "-m", "venv", folder / ".venv"], check=True)
    pip = [folder / ".venv" / "bin" / "pip", "install", "-q", "-c", ROOT / "constraints.txt"]
    subprocess.run([*pip, *_TORCH], check=True, cwd=folder)
    subprocess.run([*pip, f"cadenza[serve,loadtest] @ {wheel.as_uri()}"], check=True, cwd=folder)
    return _linked(folder)


def clone_place(folder: Path) -> Place:
    """A fresh clone, in which nothing is installed."""
    subprocess.run(["git", "clone", "-q", ROOT, folder / "cadenza"], check=True)
    return Place(folder / "cadenza", is_clone=True)


def _linked(folder: Path) -> Place:
    """The folder with what the pages name by paths."""
    for name in ("models", "examples", "protos"):
        (folder / name).symlink_to(ROOT / name)
    return Place(folder, is_clone=False)
