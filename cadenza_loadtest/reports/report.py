"""A self-contained HTML page of one or several result files, and the figures as files."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files as resources
from pathlib import Path
from typing import Any, TypeVar

from jinja2 import Environment
from matplotlib.figure import Figure

from cadenza_loadtest.figures.changes import ratios
from cadenza_loadtest.figures.latency import Sample, latency_cdfs, latency_over_time, sample_of
from cadenza_loadtest.figures.occupancy import occupancy
from cadenza_loadtest.figures.style import MOST_NAME, Look, drawable, inline_svg, look, look_within, save
from cadenza_loadtest.figures.sweeps import Curve, over_swept, rates, throughput_and_latency
from cadenza_loadtest.measures.metric_names import STATISTICS, describe
from cadenza_loadtest.measures.metrics import LATENCIES
from cadenza_loadtest.reports.curves import curves_of
from cadenza_loadtest.reports.summary import (
    COMPARED,
    COUNTS,
    cut_short_sentence,
    notices,
    number,
    unknown_sentences,
)
from cadenza_loadtest.reports.titles import page_title, point_name, section_line, section_names
from cadenza_loadtest.requests import LoadTestError
from cadenza_loadtest.results.comparison import Comparison, compare, distinct_labels
from cadenza_loadtest.results.results import LoadTestFile, Point

MOST_SERIES = 6
"""Most points whose distributions are drawn in one figure; of more points, an even selection, the same of each file."""
_MOST_RUNS = 3
"""Most points whose course over time is drawn."""
_MOST_CHANGES = 6
"""Most comparisons that are drawn; the tables have all of them."""
_ALL = "all requests"
"""Label of a series that needs no name."""
_OVERVIEW = ("offered_per_s", "requests_per_s", "output_tokens_per_s", "ttft_s.p50", "ttft_s.p99", "tpot_s.p50",
             "tpot_s.p99", "slo_share")  # fmt: skip
"""Columns of a table of several points."""
_Item = TypeVar("_Item")
Named = tuple[str, Figure, str]
"""A figure's name, the figure, and its caption."""


def write_report(files: Sequence[LoadTestFile], path: Path | str) -> Path:
    """Write the page; with several files, each is compared with the first. Raises LoadTestError if it cannot be
    written."""
    path = Path(path)
    title, lines = page_title(files), [section_line(file) for file in files]
    files = _named(files, section_names(files))
    comparison = compare(files) if len(files) > 1 else None
    text = resources("cadenza_loadtest.reports").joinpath("report.html.j2").read_text(encoding="utf-8")
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(text)
    page = template.render(
        title=title,
        files=[_file(file, line) for file, line in zip(files, lines, strict=True)],
        comparison=_comparison(comparison) if comparison else None,
        figures=[(name, inline_svg(figure, name), caption) for name, figure, caption in figures_of(files, comparison)],
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise LoadTestError(f"{path}: cannot be written: {error.strerror or error}") from error
    return path


def write_figures(files: Sequence[LoadTestFile], folder: Path | str) -> list[Path]:
    """Write every figure of these files together as PNG and SVG; returns the paths. Raises LoadTestError."""
    comparison = compare(files) if len(files) > 1 else None
    return [path for name, figure, _ in figures_of(files, comparison) for path in save(figure, Path(folder), name)]


def figures_of(files: Sequence[LoadTestFile], comparison: Comparison | None = None) -> Iterator[Named]:
    """All figures, made lazily."""
    if len(files) > 1:
        files = _named(files, distinct_labels([drawable(file.label, MOST_NAME) for file in files]))
    points = [(file, point) for file in files for point in file.points]
    limits = next((point.runs[0].metrics.slo.limits for _, point in points if point.runs[0].metrics.slo), None)
    samples = _samples(files)
    yield (
        "latency-distributions",
        latency_cdfs(samples, limits),
        ("Share of the requests due within the window that took no longer than a time; the first run of each point."),
    )
    if any(len(file.points) > 1 for file in files):
        yield from _swept_figures(curves_of(files), limits)
    if comparison:
        pairs = [(label, compared.swept, changes) for compared in comparison.points
                 for label, changes in zip(comparison.labels[1:], compared.changes, strict=True)]  # fmt: skip
        for place, (label, swept, changes) in enumerate(_some(pairs, _MOST_CHANGES)):
            at = f" at {point_name(swept)}" if swept else ""
            shown = [changes[name] for name in COMPARED if name in changes]
            yield (
                f"change-{place}",
                ratios(shown, f"{label} against {comparison.labels[0]}{at}"),
                ("Each metric as a multiple of the first file's value."),
            )
    for place, (file, point) in enumerate(_some(points, _MOST_RUNS)):
        sample, steps, which = _sample(files, file, point), point.runs[0].steps, ""
        if len(point.runs) > 1:
            which = f" The first of {len(point.runs)} runs."
            sample = replace(sample, label=f"{sample.label}, run 1 of {len(point.runs)}")
        elif sample.label == _ALL:
            sample = replace(sample, label="")
        yield (
            f"latency-over-time-{place}",
            latency_over_time(sample),
            "Each request over its due time; the window that counts is shaded. A line that keeps rising shows a queue."
            + which,
        )
        if steps is not None:
            yield (
                f"occupancy-{place}",
                occupancy(steps, sample.label, _block_size(file)),
                "Means over parts of the run, with their ranges as shades; preemptions are marked on the axis." + which,
            )


def _swept_figures(curves: Sequence[Curve], limits: Mapping[str, float] | None) -> Iterator[Named]:
    caption = "What more throughput costs each user: solid p50, dashed p99, bars are 95% intervals."
    yield "throughput-and-latency", throughput_and_latency(curves, limits), caption
    if (over := over_swept(curves, limits)) is not None:
        yield "over-swept", over, "The same over the swept setting: solid p50, dashed p99, bars are 95% intervals."
    if (rated := rates(curves)) is not None:
        caption = "Where the points leave the dotted line, the server no longer keeps up with the load, or not in time."
        yield "rates", rated, caption


def _named(files: Sequence[LoadTestFile], labels: Sequence[str]) -> list[LoadTestFile]:
    """The same files with these labels."""
    return [file.model_copy(update={"label": label}) for file, label in zip(files, labels, strict=True)]


def _some(items: Sequence[_Item], most: int) -> list[_Item]:
    """All items, or `most` of them, evenly spaced and including the first and the last; only the last if `most` is
    1."""
    if len(items) <= most:
        return list(items)
    return [items[round(place * (len(items) - 1) / (most - 1))] for place in range(most)] if most > 1 else [items[-1]]


def _samples(files: Sequence[LoadTestFile]) -> list[Sample]:
    """The samples to draw: a file's points share its colour, as in the other figures, and have different line
    styles."""
    most = max(1, MOST_SERIES // max(1, len(files)))
    if len(files) == 1:
        return [
            _sample(files, files[0], point, look(place)) for place, point in enumerate(_some(files[0].points, most))
        ]
    return [
        _sample(files, file, point, look_within(place, part))
        for place, file in enumerate(files)
        for part, point in enumerate(_some(file.points, most))
    ]


def _sample(files: Sequence[LoadTestFile], file: LoadTestFile, point: Point, own: Look | None = None) -> Sample:
    run = point.runs[0]
    # The swept value is short and distinguishes the points, so a long label must not displace it.
    parts = [drawable(file.label, MOST_NAME)] if len(files) > 1 else []
    parts += [point_name(point.swept)] if point.swept else []
    return sample_of(", ".join(parts) or _ALL, run.requests, run.window_s, own)


def _block_size(file: LoadTestFile) -> int | None:
    """Tokens per KV block, if the server reports it and all its executors have the same."""
    executors = (file.server or {}).get("executors")
    known = executors if isinstance(executors, list) else []
    sizes = {each.get("limits", each).get("block_size") for each in known}  # a simulated one has it among its limits
    size = sizes.pop() if len(sizes) == 1 else None
    return size if isinstance(size, int) and size > 0 else None


# --- tables ---------------------------------------------------------------------------------------------------------


def _file(file: LoadTestFile, line: str) -> dict[str, Any]:
    server, points = dict(file.server or {}), [_point(point) for point in file.points]
    return {
        "label": file.label,
        "line": line,
        "command": shlex.join(file.command),
        "points": points,
        "num_warned": sum(bool(point["notices"]) for point in points),
        "overview": _overview(file.points) if len(file.points) > 1 else None,
        "max_rate": _max_rate(file),
        "cut_short": cut_short_sentence(file.cut_short) if file.cut_short else "",
        "settings": _facts(file.settings),
        "server": _facts(server),
        "client": _facts(file.client.model_dump()),
    }


def _point(point: Point) -> dict[str, Any]:
    runs, metrics = point.runs, point.runs[0].metrics
    beware = dict.fromkeys(notice for run in runs for notice in notices(run.metrics, run.messages))
    groups = [(name, f"by_{name}", getattr(metrics, f"by_{name}")) for name in ("kind", "tenant", "adapter")]
    return {
        "title": point_name(point.swept),
        "runs": f"{metrics.num_requests:,} requests" + (f", mean of {len(runs)} runs" if len(runs) > 1 else ""),
        "counts": [_row(point, name) for name in COUNTS if name in point.summary],
        "latencies": [_latency(point, name) for name in LATENCIES if f"{name}.mean" in point.summary],
        "statistics": [name.replace("_", ".") for name in STATISTICS],
        "notices": list(beware),
        "groups": [(head, [_group(point, where, name) for name in found]) for head, where, found in groups if found],
    }


def _overview(points: Sequence[Point]) -> dict[str, Any]:
    """A table with a row for each point."""
    shown = [name for name in _OVERVIEW if any(name in point.summary for point in points)]
    infos = [describe(name) for name in shown]
    cells = [[_row(point, name)["value"] if name in point.summary else "" for name in shown] for point in points]
    return {
        "heads": [(info.label, info.unit) for info in infos],
        "rows": [(point_name(point.swept), row) for point, row in zip(points, cells, strict=True)],
    }


def _row(point: Point, name: str) -> dict[str, str]:
    name_info, found = describe(name), point.summary[name]
    interval = ""
    if found.low is not None and found.high is not None:
        interval = f"{number(found.low * name_info.scale)} – {number(found.high * name_info.scale)}"
    return {
        "label": name_info.label,
        "value": number(found.value * name_info.scale),
        "unit": name_info.unit,
        "interval": interval,
    }


def _latency(point: Point, name: str) -> dict[str, Any]:
    rows = [_row(point, f"{name}.{statistic}") for statistic in STATISTICS]
    counts = (getattr(run.metrics, name) for run in point.runs)
    return {
        "label": f"{describe(name).label}, {rows[0]['unit']}",
        "count": f"{sum(c.count for c in counts if c):,}",
        "rows": rows,
    }


def _group(point: Point, where: str, group: str) -> list[str]:
    names = ("num_requests", *(f"{name}.{mark}" for name in ("ttft_s", "tpot_s", "e2e_s") for mark in ("p50", "p99")))
    found = (f"{where}.{group}.{name}" for name in names)
    return [group or "(the rest)", *(_row(point, name)["value"] if name in point.summary else "" for name in found)]


def _max_rate(file: LoadTestFile) -> str:
    if (found := file.max_rate) is None:
        return ""
    held = f"{number(found.held)} requests/s" if found.held is not None else "No rate that was tried"
    failed = f"; {number(found.failed)} did not" if found.failed is not None else ""
    early = "" if found.complete else " The search was cut short or had short trials, so these rates are less sure."
    return f"{held} held {found.slo} for {found.slo_share:.0%} of the requests{failed}.{early}"


def _facts(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Names and values, nested ones with dots; empty values are left out."""
    rows: list[tuple[str, str]] = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            rows += _facts(value, f"{prefix}{name}.")
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            for place, each in enumerate(value):
                rows += _facts(each, f"{prefix}{name}[{place}].")
        elif value not in (None, "", [], ()):
            rows.append((f"{prefix}{name}", ", ".join(map(str, value)) if isinstance(value, list) else str(value)))
    return rows


def _comparison(comparison: Comparison) -> dict[str, Any]:
    tables = []
    for point in comparison.points:
        for label, changes in zip(comparison.labels[1:], point.changes, strict=True):
            found = [changes[name] for name in COMPARED if name in changes]
            tables.append(
                {
                    "title": f"{label} against {comparison.labels[0]}",
                    "at": point_name(point.swept),
                    "rows": [_change(change) for change in found],
                    "unknown": unknown_sentences(found),
                }
            )
    return {
        "labels": comparison.labels,
        "tables": tables,
        "differences": comparison.differences,
        "unmatched": [f"{label}: {point_name(swept) or 'nothing swept'}" for label, swept in comparison.unmatched],
    }


def _change(change: Any) -> dict[str, str]:
    name_info = describe(change.metric)

    def shown(value: Any, scale: float) -> str:
        interval = f" ({number(value.low * scale)} – {number(value.high * scale)})" if value.low is not None else ""
        return f"{number(value.value * scale)}{interval}"

    return {
        "label": name_info.label,
        "unit": name_info.unit,
        "base": number(change.base.value * name_info.scale),
        "other": number(change.other.value * name_info.scale),
        "difference": shown(change.difference, name_info.scale),
        "ratio": shown(change.ratio, 1.0) if change.ratio else "",
        "verdict": change.verdict,
    }
