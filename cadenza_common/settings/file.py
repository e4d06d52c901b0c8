"""Options in a TOML file: one flat file for both services, with a table for options of one service only."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from cadenza_common.settings.names import OF_OTHERS
from cadenza_common.spelling import misspelling_of, suggestion

TABLES = ("executor", "scheduler", "gateway")


class OptionsFileError(ValueError):
    """An options file cannot be read or has invalid contents; the message names the file and is for the user."""


@dataclass(frozen=True, slots=True)
class OptionsFile:
    """The contents of a file: names in snake case; values as text, as on a command line, and lists of text."""

    path: str
    top: dict[str, Any]
    tables: dict[str, dict[str, Any]]  # by service
    models: dict[str, dict[str, Any]] = field(default_factory=dict)  # of several: the options of each, by name

    def of_service(self, service: str, known: Collection[str]) -> dict[str, Any]:
        """The top-level options of a service, overridden by those of its own table.

        Raises OptionsFileError for an unknown name in its table, and for a top-level name that can only be a
        misspelling of one of its options; other top-level names may be the other service's.
        """
        own = self.tables.get(service, {})
        self.refuse_unknown(own, known, f"[{service}] ")
        wrong = [name for name in self.top if name not in OF_OTHERS and misspelling_of(name, known)]
        self.refuse_unknown(wrong, known)
        return {name: value for name, value in self.top.items() if name in known} | own

    def refuse_unknown(self, names: Collection[str], known: Collection[str], where: str = "") -> None:
        """Raises OptionsFileError for the first unknown name."""
        for name in names:
            if name not in known:
                raise OptionsFileError(f"{self.path}: {where}{name}: there is no such option{suggestion(name, known)}")


def read_file(path: str) -> OptionsFile:
    """Read a file; raises OptionsFileError."""
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            content = tomllib.loads(file.read())
    except OSError as exc:
        raise OptionsFileError(f"{path}: {(exc.strerror or str(exc)).lower()}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise OptionsFileError(f"{path}: this is not TOML: {exc}") from None
    # The scheduler's option `executor` may also be at the top level, as a text or a list of texts.
    tables = {name: content.pop(name) for name in TABLES if isinstance(content.get(name), dict)}
    models = content.pop("models", {})
    if not (isinstance(models, dict) and all(isinstance(each, dict) for each in models.values())):
        raise OptionsFileError(f"{path}: models must be tables, such as [models.small]")
    return OptionsFile(
        path,
        _plain(path, content),
        {name: _plain(f"{path}: [{name}]", table) for name, table in tables.items()},
        {name: _plain(f"{path}: [models.{name}]", table) for name, table in models.items()},
    )


def _plain(where: str, options: Mapping[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for key, value in options.items():
        name = key.replace("-", "_").lower()
        if name in plain:
            raise OptionsFileError(f"{where}: {name} is given twice")
        if isinstance(value, dict):
            raise OptionsFileError(f"{where}: there is no table [{key}]; tables are {', '.join(TABLES)}")
        plain[name] = [_text(item) for item in value] if isinstance(value, list) else _text(value)
    return plain


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
