"""The port of what loads LoRA adapters, its errors, and the folders of adapters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from executor_svc.models.adapters.paths import CONFIG_FILE, allowed_folder, is_missing
from executor_svc.models.folder import LoaderError


class AdapterRefused(Exception):
    """An adapter cannot be loaded; the message names the file, tensor, field or limit."""

    def __init__(self, reason: Literal["not found", "invalid", "full"], message: str) -> None:
        """reason: there is nothing at its path, what is there cannot be used, or as many as possible are loaded."""
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter that plans may name."""

    index: int
    content_hash: bytes
    """Equal for adapters that compute the same."""
    num_bytes: int
    rank: int


class AdapterLoader(Protocol):
    """Loads adapters while steps run: `load` on a thread of its own, the others between steps."""

    def load(self, index: int, name: str, path: str) -> LoadedAdapter:
        """Load an adapter; returns once plans may name it, at once if it is loaded. Raises AdapterRefused."""
        ...

    def unload(self, index: int) -> None:
        """Unload an adapter that no slot of a later step has; does nothing if it is not loaded."""
        ...

    def clear(self) -> None:
        """Unload all, while no step runs."""
        ...

    @property
    def loaded(self) -> Sequence[LoadedAdapter]:
        """The loaded adapters."""
        ...


def find_folder(name: str, path: str, roots: Sequence[Path] | None) -> Path:
    """Return the folder of an adapter, which lies below one of the roots (None: anywhere); raises AdapterRefused."""
    try:
        folder = Path(path) if roots is None else allowed_folder(path, roots)
        found = (folder / CONFIG_FILE).is_file()
    except (LoaderError, ValueError, OSError) as error:
        reason: Literal["not found", "invalid"] = "not found" if is_missing(path, roots or ()) else "invalid"
        raise AdapterRefused(reason, f"adapter {name}: {error}") from error
    if not found:
        raise AdapterRefused("not found", f"adapter {name}: {path} has no {CONFIG_FILE}")
    return folder
