"""What the checks of a start have found, kept in a file for the next start on the same GPU.

A file is for one kind of GPU, its driver, PyTorch, Triton and the sources of the kernels. It also names what is being
tried: a way in which a kernel ends the process is not tried again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import triton

_log = logging.getLogger(__name__)
_SOURCES = Path(__file__).parents[1]
"""Folder of all that launches kernels."""
ENDED = "the process ended while it ran"


class CheckStore:
    """Findings by name, and the ways that ended a process; read at once, written at every change."""

    def __init__(self, folder: Path | None, about: Mapping[str, str]) -> None:
        """folder: of such files; None: nothing is read or kept. about: all that the findings depend on."""
        digest = hashlib.sha256(json.dumps(dict(about), sort_keys=True).encode()).hexdigest()
        self.path = None if folder is None else folder / f"{digest[:16]}.json"
        self._content: dict[str, Any] = {"about": dict(about), "found": {}, "ended": [], "trying": None}
        if self.path is not None and self.path.exists():
            self._read(self.path)

    def known(self, name: str) -> dict[str, Any] | None:
        """Return what an earlier start has kept by this name."""
        found: dict[str, Any] | None = self._content["found"].get(name)
        return found

    def keep(self, name: str, found: Mapping[str, Any]) -> None:
        self._content["found"][name] = dict(found)
        self._write()

    def begin(self, name: str, way: str) -> None:
        """Note what is being tried: if the process ends before `end`, `has_ended` says so at the next start."""
        self._content["trying"] = [name, way]
        self._write()

    def end(self) -> None:
        self._content["trying"] = None
        self._write()

    def lose(self) -> None:
        """Note that what is being tried has taken the device from this process."""
        self._content["ended"].append(self._content["trying"])
        self.end()

    def has_ended(self, name: str, way: str) -> bool:
        """Return whether a process has ended, or has lost its device, while this was tried."""
        return [name, way] in self._content["ended"]

    def _read(self, path: Path) -> None:
        try:
            content = json.loads(path.read_text())
            if content.pop("about") == self._content["about"]:
                self._content |= {name: content[name] for name in ("found", "ended", "trying")}
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.warning("%s is not read: %s", path, error)
        if self._content["trying"] is not None:
            self.lose()

    def _write(self) -> None:
        if self.path is None:
            return
        new = self.path.with_suffix(f".{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            new.write_text(json.dumps(self._content, indent=1))
            new.replace(self.path)
        except OSError as error:
            _log.warning("%s cannot be written, the next start checks again: %s", self.path, error)
            self.path = None


def about_device(device: torch.device, arch: int) -> dict[str, str]:
    """Return all that the results of kernels depend on, beside a model: GPU, driver, versions, sources."""
    on_gpu = device.type == "cuda"
    return {
        "gpu": torch.cuda.get_device_name(device) if on_gpu else "none",
        "arch": str(arch),
        "driver": _driver() if on_gpu else "none",
        "cuda": str(torch.version.cuda),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "sources": sources_digest(),
    }


def sources_digest(folder: Path = _SOURCES) -> str:
    """Return the first digits of a digest of all sources below a folder: of the GPU's code, if none is given."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)} {path.stat().st_size} ".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
        return ended.stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown"
