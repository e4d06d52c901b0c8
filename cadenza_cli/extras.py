"""Refuses a command whose packages are not all installed, before it starts and not in the middle of a run."""

from __future__ import annotations

from importlib.util import find_spec

from cadenza.errors import OptionError
from cadenza_common.settings.extras import install_command

LOADTEST_MODULES = ("aiohttp", "jinja2", "matplotlib", "numpy", "pydantic", "pydantic_settings", "scipy")
"""What the extra `loadtest` installs, by the names of imports."""


def require_loadtest(what: str, extras: str = "loadtest") -> None:
    """Raise an OptionError with the command that installs `extras` if a package for `what` is missing."""
    missing = [name for name in LOADTEST_MODULES if find_spec(name) is None]
    if missing:
        raise OptionError(f"{what} needs {', '.join(missing)}: {install_command(extras)}")
