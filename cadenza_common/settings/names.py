"""Names of options, as variables and on command lines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ENV_PREFIX = "CADENZA_"
STARTER_OPTIONS = ("host", "port", "executors", "http")
"""Options of the program that starts both services. A service that is started alone ignores them."""
OF_OTHERS = (*STARTER_OPTIONS, "load_format")
"""Options that a service without them never takes for a misspelling of its own, however alike they look."""
CLIENT_VARIABLES = ("CADENZA_TOKEN", "CADENZA_REAL_FILES")
"""Variables that clients read, and services ignore without a word."""


def variable(name: str) -> str:
    """The environment variable of an option."""
    return f"{ENV_PREFIX}{name.upper()}"


def flag(name: str) -> str:
    """The option as written on a command line."""
    return f"--{name.replace('_', '-')}"


def to_arguments(options: Mapping[str, Any]) -> list[str]:
    """Command-line arguments: kebab case, `--name=value`, `--name` or `--no-name` for booleans."""
    arguments: list[str] = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, (list, tuple)):
            arguments += [f"--{flag}={item}" for item in value]
        else:
            arguments.append(f"--{flag}={value}")
    return arguments
