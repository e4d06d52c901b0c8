"""Service level objectives: limits on the latencies of a request."""

from __future__ import annotations

import math

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from cadenza_loadtest.measures.columns import RequestColumns
from cadenza_loadtest.measures.latencies import Rows, longest_gap_s, per_request
from cadenza_loadtest.requests import Floats, LoadTestError

_NAMES = ("ttft", "tpot", "itl", "e2e")


class Slo(BaseModel):
    """Limits in seconds; a good request keeps all of them, a failed one is not good. None: no limit."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ttft_s: float | None = Field(None, gt=0, allow_inf_nan=False)
    tpot_s: float | None = Field(None, gt=0, allow_inf_nan=False)
    itl_s: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Limit of a request's longest inter-token latency: no pause may be longer. (Their mean is the TPOT.)"""
    e2e_s: float | None = Field(None, gt=0, allow_inf_nan=False)

    @property
    def limits(self) -> dict[str, float]:
        """The limits that are set, by name: ttft_s, tpot_s, itl_s, e2e_s."""
        return {name: value for name, value in self if value is not None}

    def __str__(self) -> str:
        """The limits in the form that `parse_slo` reads."""
        return ",".join(f"{name.removesuffix('_s')}={value:g}" for name, value in self.limits.items())


def parse_slo(text: str) -> Slo:
    """Parse limits such as "ttft=0.5,tpot=0.05", in seconds; also itl and e2e. Raises a LoadTestError that names
    `--slo`."""
    try:
        return slo_of(text)
    except ValueError as error:
        raise LoadTestError(f"--slo {text}: {error}") from None


def slo_of(text: str) -> Slo:
    """As parse_slo, for callers that name the option themselves; raises ValueError."""
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or name not in _NAMES:
            raise ValueError(f"{part.strip()!r} must be NAME=SECONDS, NAME one of {', '.join(_NAMES)}")
        if name in limits:
            raise ValueError(f"{name} is given twice")
        limits[name] = _seconds(value, name)
    return Slo(**{f"{name}_s": value for name, value in limits.items()})


def kept(columns: RequestColumns, slo: Slo) -> Rows | None:
    """[n] whether each request completed within every limit; None if that is unknown because ITLs were not kept.

    A request of one token has neither TPOT nor ITL, and for an answer in one message they are not known: both count as
    within these limits.
    """
    good = columns.ok.copy()
    latencies = per_request(columns)
    for name, limit in slo.limits.items():
        longest = longest_gap_s(columns) if name == "itl_s" else latencies[name]
        if longest is None:
            return None
        good &= _keeps(longest, limit, may_lack=name in ("tpot_s", "itl_s"))
    return good


def _keeps(values: Floats, limit: float, may_lack: bool) -> Rows:
    within: Rows = values <= limit
    return within | np.isnan(values) if may_lack else within


def _seconds(text: str, name: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be a number of seconds over 0, not {text!r}")
    return value
