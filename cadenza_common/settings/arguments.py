"""Options as command-line arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


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
