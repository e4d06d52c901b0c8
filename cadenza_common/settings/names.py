"""Names of options, as variables and on command lines."""

from __future__ import annotations

ENV_PREFIX = "CADENZA_"
STARTER_OPTIONS = ("host", "port", "executors", "http")
"""Options of the program that starts both services. A service that is started alone ignores them."""
OF_OTHERS = (*STARTER_OPTIONS, "load_format")
"""Options that a service without them never takes for a misspelling of its own, however alike they look."""
CLIENT_VARIABLES = ("CADENZA_TOKEN",)
"""Variables that clients read, and services ignore without a word."""


def variable(name: str) -> str:
    """The environment variable of an option."""
    return f"{ENV_PREFIX}{name.upper()}"


def flag(name: str) -> str:
    """The option as written on a command line."""
    return f"--{name.replace('_', '-')}"
