"""Where the repository is, and its packages in it."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"cadenza": ROOT / "client"} | dict.fromkeys(
    (
        "cadenza_common",
        "scheduler_svc",
        "executor_svc",
        "gateway_svc",
        "cadenza_loadtest",
        "cadenza_launcher",
        "cadenza_simulator",
        "cadenza_cli",
    ),
    ROOT,
)
"""What is installed, each with the folder that it lies in."""
