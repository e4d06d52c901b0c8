"""Chooses the source of drafts: `--speculative`."""

from __future__ import annotations

from executor_svc.config import ExecutorConfig
from executor_svc.device.interface import DeviceError
from executor_svc.plan.plan import Limits
from executor_svc.speculation.drafts import DraftSource
from executor_svc.speculation.ngram import NgramSource
from executor_svc.speculation.suffix import SuffixSource


def check_speculation(config: ExecutorConfig, device_name: str) -> None:
    """Raise DeviceError if this device cannot have drafts."""
    if config.speculative != "off" and device_name != "cpu":
        raise DeviceError(f"--speculative {config.speculative} is not possible on a GPU so far: it needs --device cpu")


def make_draft_source(config: ExecutorConfig, limits: Limits) -> DraftSource | None:
    """Return the source of the options; None without speculative decoding."""
    match config.speculative:
        case "off":
            return None
        case "ngram":
            return NgramSource(limits)
        case "suffix" | "auto":
            return SuffixSource(limits)
