"""What the program says to its actors and hears from them: text, JSON, and whole numbers only."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True, slots=True)
class Order:
    """A process to start. Secrets travel in `files` and `environment`, not on the command line."""

    name: str
    program: Sequence[str]
    """`["-m", module]` or `[script.py]`."""
    arguments: Sequence[str]
    """`{files}` in them is the folder of the files."""
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    """Texts by name, for this process alone."""

    def to_json(self) -> str:
        """Return the order as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Order:
        """Return the order of a text."""
        return cls(**json.loads(text))


@dataclass(frozen=True, slots=True)
class News:
    """What has happened to a process since the last news."""

    lines: Sequence[str] = ()
    """Of its log, from `seen` on."""
    seen: int = 0
    """Lines of its log so far."""
    address: str = ""
    """`HOST:PORT` once it is ready."""
    code: int | None = None
    """Its exit code once it has ended."""
    reason: str = ""
    """How it has ended."""

    def to_json(self) -> str:
        """Return the news as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> News:
        """Return the news of a text."""
        return cls(**json.loads(text))
