"""What the checks of a start have found, kept in a file for the next start on the same GPU.

A file is for one kind of GPU, its driver, PyTorch, Triton and the sources of the kernels. It also names what is being
tried: a way in which a kernel ends the process is not tried again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
import triton

_log = logging.getLogger(__name__)
_SOURCES = Path(__file__).parents[1]
"""Folder of all that launches kernels."""
_DRIVER = Path("/proc/driver/nvidia/version")
ENDED = "the process ended while it ran"


class CheckStore:
    """Findings by name, and the ways that ended a process; read at once, written at every change.

    Several processes may share a folder: each notes what it is trying in a file of its own.
    """

    def __init__(self, folder: Path | None, about: Mapping[str, str]) -> None:
        """folder: of such files; None: nothing is read or kept. about: all that the findings depend on."""
        digest = hashlib.sha256(json.dumps(dict(about), sort_keys=True).encode()).hexdigest()[:16]
        self.path = None if folder is None else folder / f"{digest}.json"
        self._about = dict(about)
        self._found: dict[str, Any] = {}
        self._ended: list[list[str]] = []
        self._own = _Trial(digest, os.getpid(), psutil.Process().create_time())
        self._trying: list[str] = []
        if self.path is not None:
            self._read(self.path)
            for each in _of_dead_processes(self.path.parent, digest):
                self._ended.append(each)
                self._write()

    def known(self, name: str) -> dict[str, Any] | None:
        """Return what an earlier start has kept by this name."""
        found: dict[str, Any] | None = self._found.get(name)
        return found

    def keep(self, name: str, found: Mapping[str, Any]) -> None:
        self._found[name] = dict(found)
        self._write()

    def begin(self, name: str, way: str) -> None:
        """Note what is being tried: if the process ends before `end`, `has_ended` says so at the next start."""
        self._trying = [name, way]
        if self.path is not None:
            self._put(self.path.parent / self._own.file, {"trying": self._trying, "created": self._own.created})

    def end(self) -> None:
        if self.path is not None:
            (self.path.parent / self._own.file).unlink(missing_ok=True)

    def lose(self) -> None:
        """Note that what is being tried has taken the device from this process."""
        self._ended.append(self._trying)
        self._write()
        self.end()

    def has_ended(self, name: str, way: str) -> bool:
        """Return whether a process has ended, or has lost its device, while this was tried."""
        return [name, way] in self._ended

    def _read(self, path: Path) -> None:
        try:
            content = json.loads(path.read_text())
            if content["about"] == self._about:
                self._found = content["found"] | self._found
                self._ended += [each for each in content["ended"] if each not in self._ended]
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.warning("%s is not read: %s", path, error)

    def _write(self) -> None:
        if self.path is not None:
            self._read(self.path)  # what another process has found meanwhile
            self._put(self.path, {"about": self._about, "found": self._found, "ended": self._ended})

    def _put(self, path: Path, content: Mapping[str, Any]) -> None:
        new = path.with_suffix(f".{os.getpid()}.new")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            new.write_text(json.dumps(content, indent=1))
            new.replace(path)
        except OSError as error:
            _log.warning("%s cannot be written, the next start compares again: %s", path, error)
            self.path = None


class _Trial(NamedTuple):
    """The process that tries something."""

    digest: str
    pid: int
    created: float

    @property
    def file(self) -> str:
        """Of what it is trying: a pid means something on its own machine."""
        return f"{self.digest}-{socket.gethostname()}-{self.pid}.trying"


def _of_dead_processes(folder: Path, digest: str) -> list[list[str]]:
    """Return what processes of this machine were trying when they ended; their files are removed."""
    found = []
    for path in sorted(folder.glob(f"{digest}-{socket.gethostname()}-*.trying")):
        pid = int(path.stem.rpartition("-")[2])
        with contextlib.suppress(OSError, ValueError, KeyError):
            content = json.loads(path.read_text())
            with contextlib.suppress(psutil.NoSuchProcess):
                if abs(psutil.Process(pid).create_time() - content["created"]) < 1:
                    continue
            found.append(content["trying"])
            path.unlink()
    return found


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
    """Return the driver's version from /proc, or by nvidia-smi, which takes a second."""
    with contextlib.suppress(OSError):
        # Its first line ends in the version, the date and nothing else that changes.
        return _DRIVER.read_text().partition("\n")[0]
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
        return ended.stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown"
