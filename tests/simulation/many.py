"""Many histories, in this process or on all cores, and a summary of them."""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from collections.abc import Iterable, Sequence

from tests.simulation.history import HistoryError, Report, run_history

_CHUNK = 50


def run_chunk(seeds: Iterable[int]) -> list[Report]:
    """Run these histories one after another; raises HistoryError for the first that breaks a promise."""
    return [run_history(seed) for seed in seeds]


def _run_chunk(seeds: Sequence[int]) -> list[Report] | str:
    """The reports, or the message of a failure: exceptions of histories hold what cannot be sent to another process."""
    try:
        return run_chunk(seeds)
    except HistoryError as exc:
        return str(exc)


def run_many(seeds: range, workers: int | None = None) -> list[Report]:
    """Run histories on all cores; raises HistoryError for the first failure that becomes known."""
    chunks = [seeds[start : start + _CHUNK] for start in range(0, len(seeds), _CHUNK)]
    reports: list[Report] = []
    with multiprocessing.Pool(workers or os.cpu_count()) as pool:
        for found in pool.imap(_run_chunk, chunks):
            if isinstance(found, str):
                raise HistoryError(found)
            reports += found
    return reports


def total(reports: Iterable[Report]) -> Counter[str]:
    """The sum of all counts."""
    counts: Counter[str] = Counter()
    for report in reports:
        counts.update(report.counts)
    return counts


def summary(reports: Sequence[Report]) -> str:
    """Faults per history, and how requests ended."""
    counts, number = total(reports), len(reports)
    faults = Counter(sum(n for name, n in each.counts.items() if name.startswith("fault: ")) for each in reports)
    events, seconds = sum(each.num_callbacks for each in reports), sum(each.seconds for each in reports)
    lines = [
        f"{number} histories; in each {events / number:.0f} events, {counts['steps'] / number:.0f} steps and "
        f"{seconds / number:.1f} s of virtual time",
        "histories by number of faults: " + ", ".join(f"{count}: {faults[count]}" for count in sorted(faults)),
    ]
    for title, prefix in (("faults", "fault: "), ("ends of samples", "end: "), ("turned away", "turned away: ")):
        found = {name.removeprefix(prefix): n for name, n in sorted(counts.items()) if name.startswith(prefix)}
        lines.append(f"{title}: " + ", ".join(f"{name} {n}" for name, n in found.items()))
    rest = {name: n for name, n in sorted(counts.items()) if ": " not in name}
    lines.append("also: " + ", ".join(f"{name} {n}" for name, n in rest.items()))
    return "\n".join(lines)
