"""Whether launches of Triton's kernels can be noted here."""

from __future__ import annotations

import torch
import triton
from triton.runtime import driver

_KNOWN = "3.6."
"""The version of Triton whose launcher is known; with others nothing is noted."""
_watched: list[type] = []


def watch_launches() -> None:
    """Let the launches of kernels that are loaded from now on be noted, if this version's launcher is known."""
    if not triton.__version__.startswith(_KNOWN):
        return
    # Not imported before: other versions may lack what it needs.
    from executor_svc.gpu.launches.watched_launcher import WatchedLauncher

    _watched[:] = [WatchedLauncher]
    if driver.active.launcher_cls in WatchedLauncher.__bases__:
        driver.active.launcher_cls = WatchedLauncher


def are_watched(device: torch.device) -> bool:
    """Return whether launches on this device can be noted."""
    return device.type == "cuda" and driver.active.launcher_cls in _watched
