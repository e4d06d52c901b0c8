"""How long streams stood still, and what the time of a restart went into."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.chaos.load import Gap
from tests.chaos.schedule import Fault
from tests.chaos.services import EXECUTOR, SCHEDULER, Mark

_BEFORE_S, _AFTER_S = 1.0, 0.3
_ALIKE_S = 0.02
_PARTS = ("noticing", "restart", "loading", "recompute", "stall")
_KILLS = {"kill executor": EXECUTOR, "changed executor": EXECUTOR, "kill scheduler": SCHEDULER}


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest-rank percentile; 0 without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def splits(
    moments: Sequence[tuple[float, Fault]], marks: Sequence[Mark], gaps: Sequence[Gap], service: str
) -> dict[str, list[float]]:
    """Seconds of each part of the stalls of streams under kills of a service.

    Noticing: from the kill until the scheduler has lost its session, or until the supervisor has noticed its death;
    restart: until the new process starts; loading: until the next session is open, or the scheduler is ready;
    recompute: until the stream's next token; stall: from the stream's last token before the kill until that one. A kill
    counts only if it ended a session, and no other fault of a service came before the end of loading.
    """
    found: dict[str, list[float]] = {part: [] for part in _PARTS}
    for place, (at, fault) in enumerate(moments):
        if _KILLS.get(fault.kind) != service:
            continue
        noticed = _first(marks, "lost" if service == EXECUTOR else "scheduler died", at)
        started = _first(marks, f"{service} started", at)
        opened = _first(marks, "open" if service == EXECUTOR else "scheduler ready", max(at, started or at))
        following = next((moment for moment, other in moments[place + 1 :] if not _is_harmless(other)), None)
        if noticed is None or started is None or opened is None or noticed > started:
            continue
        if following is not None and following < opened:
            continue
        for gap in gaps:
            if at - _BEFORE_S < gap.begin < at + _AFTER_S and gap.end >= started:
                found["stall"].append(gap.end - gap.begin)
                found["recompute"].append(max(0.0, gap.end - opened))
        found["noticing"].append(noticed - at)
        found["restart"].append(started - noticed)
        found["loading"].append(opened - started)
    return found


def _is_harmless(fault: Fault) -> bool:
    """Whether it concerns a client alone, or a clock."""
    return fault.kind.startswith("client") or fault.kind in ("cancel", "deadline", "clock jump")


def _first(marks: Sequence[Mark], what: str, after: float) -> float | None:
    return min((mark.at for mark in marks if mark.what == what and mark.at >= after - _ALIKE_S), default=None)


def figures(
    moments: Sequence[tuple[float, Fault]], marks: Sequence[Mark], gaps: Sequence[Gap], longest_s: Sequence[float]
) -> dict[str, Any]:
    """p50 and p99 of all of them, in seconds."""
    result: dict[str, Any] = {
        "longest_gap_of_a_stream_p50_s": round(percentile(longest_s, 0.5), 3),
        "longest_gap_of_a_stream_p99_s": round(percentile(longest_s, 0.99), 3),
    }
    for service in (EXECUTOR, SCHEDULER):
        parts = splits(moments, marks, gaps, service)
        result[f"{service}_kills_split"] = len(parts["noticing"])
        for part, values in parts.items():
            if not values:
                continue  # without such a kill there is nothing to say
            result[f"{service}_{part}_p50_s"] = round(percentile(values, 0.5), 3)
            result[f"{service}_{part}_p99_s"] = round(percentile(values, 0.99), 3)
    return result
