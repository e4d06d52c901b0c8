"""Compares result files with the first: differences, ratios, their uncertainty, and what else differed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from scipy import stats

from cadenza_loadtest.measures.metric_names import values_of
from cadenza_loadtest.measures.uncertainty import LEVEL, Estimate, interval, replicates_of, why_unknown
from cadenza_loadtest.requests import Floats, LoadTestError
from cadenza_loadtest.results.results import LoadTestFile, Point

Verdict = Literal["lower", "higher", "no difference shown", "not known"]
How = Literal["welch", "bootstrap", "none"]
Swept = dict[str, float | str]
_ABSENT = "(none)"


@dataclass(frozen=True, slots=True)
class Interval:
    """A value and its confidence interval at `LEVEL`; None: not known."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """One metric of a file compared with the first file's, in the metric's own unit."""

    metric: str
    """Flat name, such as "ttft_s.p99"."""
    base: Estimate
    other: Estimate
    difference: Interval
    """Other - base."""
    ratio: Interval | None
    """Other / base; None if one of them may be 0."""
    how: How
    """welch: both have repetitions: Welch's t for the difference, and on logarithms for the ratio, which is then a
    ratio of geometric means. bootstrap: one has a single run: the requests of each, or for rates its blocks of time,
    are resampled independently. none: there is no interval (`why_unknown`)."""
    verdict: Verdict
    """From the difference's interval. At 95%, one in twenty comparisons of equal systems shows a difference by
    chance."""

    @property
    def why_unknown(self) -> str:
        """Why there is no interval, as the end of a sentence; empty if there is one."""
        return why_unknown(self.metric) if self.verdict == "not known" else ""


@dataclass(frozen=True, slots=True)
class ComparedPoint:
    """A point that all files share."""

    swept: Swept
    changes: tuple[dict[str, Change], ...]
    """Changes by metric, for each file after the first."""


@dataclass(frozen=True, slots=True)
class SettingDifference:
    """A setting or fact that differed between the files, so that the results may not be comparable."""

    where: Literal["file", "settings", "server", "client"]
    name: str
    values: tuple[str, ...]
    """One value for each file."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """All differences between the files."""

    labels: tuple[str, ...]
    """One distinct label for each file; the first file is the base."""
    points: tuple[ComparedPoint, ...]
    differences: tuple[SettingDifference, ...]
    unmatched: tuple[tuple[str, Swept], ...]
    """The points that not all files have: the file's label and the point."""
    max_rates: tuple[float | None, ...]
    """The result of `--find-max-rate` in each file; empty if not all files have one."""


def compare(files: Sequence[LoadTestFile], *, level: float = LEVEL, seed: int = 0) -> Comparison:
    """Compare every later file with the first at the points that all files share.

    Points are equal if they have the same values of every setting that any file sweeps; a file that does not sweep a
    setting contributes its fixed value. Raises LoadTestError for fewer than two files.
    """
    if len(files) < 2:
        raise LoadTestError("a comparison needs at least two result files")
    labels = tuple(distinct_labels([file.label for file in files]))
    names = sorted({name for file in files for point in file.points for name in point.swept})
    keyed = [{_key(file, point, names): point for point in file.points} for file in files]
    shared = [key for key in keyed[0] if all(key in points for points in keyed)]
    unmatched = [
        (label, dict(point.swept))
        for label, points in zip(labels, keyed, strict=True)
        for key, point in points.items()
        if key not in shared
    ]
    rates = [file.max_rate.held for file in files if file.max_rate is not None]
    return Comparison(
        labels=labels,
        points=tuple(_compare_points([points[key] for points in keyed], level, seed) for key in shared),
        differences=tuple(_differences(files)),
        unmatched=tuple(unmatched),
        max_rates=tuple(rates) if len(rates) == len(files) else (),
    )


def welch(base: Sequence[float], other: Sequence[float], level: float = LEVEL) -> Interval:
    """Mean of other - mean of base, with Welch's t interval (https://doi.org/10.1093/biomet/34.1-2.28); at least two
    values each."""
    difference = float(np.mean(other) - np.mean(base))
    parts = [float(np.var(values, ddof=1)) / len(values) for values in (base, other)]
    spread = sum(parts)
    if spread == 0:
        return Interval(difference, difference, difference)
    freedom = spread**2 / sum(part**2 / (len(v) - 1) for part, v in zip(parts, (base, other), strict=True))
    half = float(stats.t.ppf((1 + level) / 2, freedom)) * math.sqrt(spread)
    return Interval(difference, difference - half, difference + half)


def welch_ratio(base: Sequence[float], other: Sequence[float], level: float = LEVEL) -> Interval | None:
    """Ratio of the geometric means, other / base, by Welch's t on logarithms; None unless all values are over 0."""
    if min(*base, *other) <= 0:
        return None
    logs = welch(np.log(base).tolist(), np.log(other).tolist(), level)
    assert logs.low is not None
    assert logs.high is not None
    return Interval(math.exp(logs.value), math.exp(logs.low), math.exp(logs.high))


def _compare_points(points: Sequence[Point], level: float, seed: int) -> ComparedPoint:
    base = _Sample.of(points[0])
    changes = []
    drawn: Mapping[str, Floats] | None = None
    for index, point in enumerate(points[1:], start=1):
        other = _Sample.of(point)
        shared = [name for name in base.values if name in other.values]
        if base.num_runs > 1 and other.num_runs > 1:
            changes.append({name: _by_welch(name, base, other, level) for name in shared})
            continue
        drawn = _replicates(points[0], seed) if drawn is None else drawn
        others = _replicates(point, seed + index)
        changes.append({name: _by_bootstrap(name, base, other, drawn, others, level) for name in shared})
    return ComparedPoint(dict(points[0].swept), tuple(changes))


@dataclass(frozen=True, slots=True)
class _Sample:
    """A point of one file: each metric's values over the runs that have it, and its estimate."""

    num_runs: int
    values: dict[str, list[float]]
    summary: Mapping[str, Estimate]

    @classmethod
    def of(cls, point: Point) -> _Sample:
        runs = [values_of(run.metrics) for run in point.runs]
        values = {name: [each[name] for each in runs if name in each] for name in point.summary}
        return cls(len(runs), {name: found for name, found in values.items() if found}, point.summary)


def _by_welch(name: str, base: _Sample, other: _Sample, level: float) -> Change:
    first, second = base.values[name], other.values[name]
    if min(len(first), len(second)) < 2:
        return _by_bootstrap(name, base, other, {}, {}, level)
    difference = welch(first, second, level)
    ratio = welch_ratio(first, second, level)
    return _change(name, base, other, difference, ratio, "welch")


def _by_bootstrap(
    name: str,
    base: _Sample,
    other: _Sample,
    drawn: Mapping[str, Floats],
    others: Mapping[str, Floats],
    level: float,
) -> Change:
    first, second = base.summary[name].value, other.summary[name].value
    difference, ratio = Interval(second - first), Interval(second / first) if first > 0 and second > 0 else None
    if name not in drawn or name not in others:
        return _change(name, base, other, difference, ratio, "none")
    difference = Interval(second - first, *interval(others[name] - drawn[name], level))
    if ratio is not None and drawn[name].min() > 0:
        ratio = Interval(ratio.value, *interval(others[name] / drawn[name], level))
    return _change(name, base, other, difference, ratio, "bootstrap")


def _change(name: str, base: _Sample, other: _Sample, difference: Interval, ratio: Interval | None, how: How) -> Change:
    return Change(name, base.summary[name], other.summary[name], difference, ratio, how, _verdict(difference))


def _verdict(difference: Interval) -> Verdict:
    if difference.low is None or difference.high is None:
        return "not known"
    if difference.low > 0:
        return "higher"
    return "lower" if difference.high < 0 else "no difference shown"


def _replicates(point: Point, seed: int) -> dict[str, Floats]:
    """Replicates of each metric; for several runs, the mean of their replicates."""
    runs = [replicates_of(run.requests, run.metrics, seed=seed + 1009 * k) for k, run in enumerate(point.runs)]
    return {name: np.mean([run[name][0] for run in runs], axis=0) for name in runs[0] if all(name in r for r in runs)}


def distinct_labels(labels: Sequence[str]) -> list[str]:
    """The labels, with a number appended to repeated ones."""
    found: list[str] = []
    for label in labels:
        named, number = label, 2
        while named in found:
            named, number = f"{label} ({number})", number + 1
        found.append(named)
    return found


def _key(file: LoadTestFile, point: Point, names: Sequence[str]) -> tuple[float | str, ...]:
    return tuple(_plain(point.swept.get(name, file.settings.get(name))) for name in names)


def _plain(value: Any) -> float | str:
    """The value in a form in which 2, 2.0 and "2" are equal."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return str(value)
    return str(value) if math.isnan(number) else number


def _differences(files: Sequence[LoadTestFile]) -> list[SettingDifference]:
    client = [file.client.model_dump() for file in files]
    file_facts = [
        {"source": f.source, "repetitions": [len(point.runs) for point in f.points], "cut_short": f.cut_short or None}
        for f in files
    ]
    return [
        *_different("file", file_facts),
        *_different("settings", [file.settings for file in files]),
        *_different("server", [file.server or {} for file in files]),
        *_different("client", client),
    ]


def _different(
    where: Literal["file", "settings", "server", "client"], each: Sequence[Mapping[str, Any]]
) -> list[SettingDifference]:
    flat = [_flat(values) for values in each]
    names = dict.fromkeys(name for values in flat for name in values)
    found = []
    for name in names:
        # A file from before an option existed lacks it; other files have None.
        values = [_ABSENT if flat_values.get(name) is None else flat_values[name] for flat_values in flat]
        if len({_plain(value) for value in values}) > 1:
            found.append(SettingDifference(where, name, tuple(str(value) for value in values)))
    return found


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found.update(_flat(value, f"{prefix}{name}."))
        else:
            found[f"{prefix}{name}"] = value
    return found
