"""Which adapters operators may load while serving: names, and folders below the allowed ones."""

from __future__ import annotations

import logging
import os.path
from collections.abc import Iterable, Sequence

from scheduler_svc.convert.errors import ForbiddenPathError
from scheduler_svc.core.errors import RequestRejectedError
from scheduler_svc.engine.adapters.adapters import Adapters

_LOG = logging.getLogger(__name__)


def adapter_name(name: str) -> str:
    """Return a name that requests and options may have; raises RequestRejectedError."""
    if not name or "/" in name or "=" in name or "," in name:
        raise RequestRejectedError("name", "must have characters, none of them a slash, an equals sign or a comma")
    return name


def adapter_path(path: str, roots: Sequence[str]) -> str:
    """Return an absolute path that is below one of the roots by its text; raises RequestRejectedError,
    ForbiddenPathError.

    The files may be on another machine, so links are not followed here: an executor follows them, and has roots of its
    own.
    """
    if not os.path.isabs(path) or "\0" in path:
        raise RequestRejectedError("path", "must be absolute")
    found = os.path.normpath(path)
    bounds = [os.path.abspath(os.path.expanduser(root)) for root in roots]
    if ".." in path.split("/") or not any(os.path.commonpath([found, bound]) == bound for bound in bounds):
        allowed = ", ".join(bounds) or "any folder: there is no --lora-root"
        raise ForbiddenPathError(f"{path} is not below {allowed}")
    return found


def restore_adapters(adapters: Adapters, stored: Iterable[tuple[str, str]], roots: Sequence[str]) -> None:
    """Load the adapters of an earlier process again, by name and path. Adapters of the options come first."""
    for name, path in stored:
        if adapters.names.find(name) is not None:
            _LOG.warning("adapter %r of the journal is left out: --lora names another one", name)
            continue
        try:
            adapters.load(name, adapter_path(path, roots))
        except (RequestRejectedError, ForbiddenPathError) as exc:
            _LOG.warning("adapter %r of the journal is left out: %s", name, exc)
