"""The terminal output of a load test: tables of points and comparisons, and warnings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.constrain import Constrain
from rich.table import Table
from rich.text import Text

from cadenza_loadtest.failures import failure_sentences
from cadenza_loadtest.measures.metric_names import STATISTICS, MetricName, describe
from cadenza_loadtest.measures.metrics import LATENCIES, Metrics
from cadenza_loadtest.measures.uncertainty import Estimate
from cadenza_loadtest.reports.tables import Cell, NumberTable
from cadenza_loadtest.results.comparison import Change, Comparison, Interval, Swept
from cadenza_loadtest.results.results import Point

MAX_LAG_S, MAX_LAG_SHARE = 0.010, 0.1
"""If the p99 of the client's lag is over this many seconds, or over this share of the median TTFT, the client affected
the results."""
_WIDTH = 100
"""Most terminal columns, except for the tables of sweeps, which use the full width."""
_PLUS_MINUS = "±: to the farther end of the 95% interval"
COUNTS = (
    "offered_per_s",
    "requests_per_s",
    "output_tokens_per_s",
    "prompt_tokens_per_s",
    "slo_share",
    "goodput_per_s",
    "mean_concurrency",
    "max_concurrency",
    "num_cached_tokens",
    "num_preemptions",
    "num_adapters",
    "steps.mean_sequences",
    "steps.mean_kv_use",
    "steps.max_kv_use",
)
_SWEPT_HEADS = {
    "offered_per_s": "due/s",
    "requests_per_s": "ended/s",
    "output_tokens_per_s": "tokens/s",
    "ttft_s.p50": "TTFT\np50 ms",
    "ttft_s.p99": "TTFT\np99 ms",
    "tpot_s.p50": "TPOT\np50 ms",
    "tpot_s.p99": "TPOT\np99 ms",
    "slo_share": "SLO\nkept, %",
}
"""Columns of a sweep's table, in the units of `describe`."""
COMPARED = (
    "requests_per_s",
    "output_tokens_per_s",
    "slo_share",
    "goodput_per_s",
    *(f"{name}.{statistic}" for name in LATENCIES[:4] for statistic in ("mean", "p50", "p90", "p99")),
    "mean_concurrency",
    "num_failed",
    "num_preemptions",
    "steps.mean_sequences",
    "steps.mean_kv_use",
)


def notices(metrics: Metrics, messages: Mapping[str, str] | None = None) -> list[str]:
    """Warnings about a run's numbers, as sentences; empty if there are none.

    `messages`: the failures' messages by code.
    """
    found = []
    lag, ttft = metrics.lag_s, metrics.ttft_s
    if lag and (lag.p99 > MAX_LAG_S or (ttft and lag.p99 > MAX_LAG_SHARE * ttft.p50)):
        of_ttft = f", {lag.p99 / ttft.p50:.0%} of the median TTFT" if ttft and ttft.p50 > 0 else ""
        found.append(
            f"The client was late: requests were sent {number(lag.p99 * 1e3)} ms after they were due at p99{of_ttft}. "
            "Latencies include this delay; use a faster client, or several, to measure the server's own."
        )
    found += failure_sentences(metrics.errors, messages or {}, metrics.num_requests)
    if not metrics.num_requests:
        found.append(_none_due(metrics))
    elif not metrics.num_ok:
        found.append("No request completed: there are no latencies.")
    elif metrics.errors:
        found.append("Latencies are those of completed requests.")
    if metrics.kept_up is False and metrics.offered_per_s and metrics.requests_per_s is not None:
        found.append(
            f"The server did not keep up: {number(metrics.offered_per_s)} requests/s were due, "
            f"{number(metrics.requests_per_s)} ended. Latencies grow for as long as the load lasts."
        )
    if metrics.num_cut_prompts or metrics.num_cut_outputs:
        found.append(
            f"Lengths were truncated to the limit of the model or --max-total-len: of {metrics.num_requests:,} "
            f"requests, {metrics.num_cut_prompts or 0:,} prompts and {metrics.num_cut_outputs or 0:,} outputs."
        )
    if metrics.slo and metrics.slo_share is None and metrics.num_requests:
        found.append(
            "The ITL limit cannot be checked, because inter-token latencies were not kept: there is no goodput."
        )
    if metrics.steps and metrics.steps.num_dropped:
        found.append(
            f"{metrics.steps.num_dropped:,} step records were lost: occupancy and KV use are computed from the others."
        )
    return found


def cut_short_sentence(why: str) -> str:
    """The sentence for a file whose load test was cut short."""
    return f"Cut short ({why.rstrip('.')}): these are the measurements until then."


def _none_due(metrics: Metrics) -> str:
    if metrics.window_s is None:
        return "No request was due: nothing was measured."
    start_s, end_s = metrics.window_s
    return f"No request was due within the window, {start_s:g} to {end_s:g} s of the run: there are no latencies."


def point_view(point: Point, title: str = "") -> RenderableType:
    """Throughput, latencies, kinds, tenants and adapters of a point, and warnings about its runs."""
    parts: list[RenderableType] = [_counts_table(point, title or _title(point)), _latency_table(point)]
    metrics = point.runs[0].metrics
    for name in ("kind", "tenant", "adapter"):
        where = f"by_{name}"
        groups = getattr(metrics, where)
        if groups:
            parts.append(_group_table(point.summary, where, list(groups), name))
    for index, run in enumerate(point.runs, start=1):
        which = f"Run {index}: " if len(point.runs) > 1 else ""
        parts += [Text(f"! {which}{notice}", style="yellow") for notice in notices(run.metrics, run.messages)]
    return Constrain(Group(*parts), _WIDTH)


def points_view(points: Sequence[Point]) -> RenderableType:
    """A sweep: a row for each point, and warnings about its runs."""
    shown = [name for name in _SWEPT_HEADS if any(name in point.summary for point in points)]
    rows = [[swept_text(point.swept), *(_value(point.summary, name, "") for name in shown)] for point in points]
    warnings = [
        Text(f"! {swept_text(point.swept)}: {notice}", style="yellow")
        for point in points
        for notice in dict.fromkeys(notice for run in point.runs for notice in notices(run.metrics, run.messages))
    ]
    table = NumberTable(["", *(_SWEPT_HEADS[name] for name in shown)], rows)
    return Group(table, Constrain(Group(*warnings), _WIDTH))


def comparison_view(comparison: Comparison, metrics: Sequence[str] = COMPARED) -> RenderableType:
    """The differing settings, and the changes of these metrics for each point and file."""
    parts: list[RenderableType] = []
    if comparison.differences:
        parts.append(_differences_table(comparison))
    for point in comparison.points:
        for label, changes in zip(comparison.labels[1:], point.changes, strict=True):
            where = f" at {swept_text(point.swept)}" if point.swept else ""
            rows = [changes[name] for name in metrics if name in changes]
            parts.append(
                _changes_table(rows, comparison.labels[0], label, f"{label} against {comparison.labels[0]}{where}")
            )
            parts += [Text(sentence, style="dim") for sentence in unknown_sentences(rows)]
    if comparison.max_rates:
        pairs = zip(comparison.labels, comparison.max_rates, strict=True)
        rates = ", ".join(f"{label} {'none' if rate is None else number(rate)}" for label, rate in pairs)
        parts.append(Text(f"Highest rate that held, requests/s: {rates}"))
    for label, swept in comparison.unmatched:
        parts.append(
            Text(f"! Not all files have the point {swept_text(swept) or 'without swept values'} of {label}.", "yellow")
        )
    if not comparison.points:
        parts.append(Text("! The files share no point: nothing can be compared.", style="yellow"))
    return Constrain(Group(*parts), _WIDTH)


def unknown_sentences(changes: Sequence[Change]) -> list[str]:
    """Why some changes have no interval: one sentence for each reason."""
    reasons: dict[str, list[str]] = {}
    for change in changes:
        if change.why_unknown:
            reasons.setdefault(change.why_unknown, []).append(describe(change.metric).label)
    return [f"Uncertainty not known for {', '.join(labels)}: {reason}." for reason, labels in reasons.items()]


def number(value: float) -> str:
    """A number with three significant digits and all integer digits; whole numbers unchanged."""
    if value == int(value):
        return f"{int(value):,}"
    size = math.floor(math.log10(abs(value)))
    return f"{value:,.{max(0, min(2 - size, 6))}f}" if size > -4 else f"{value:.2g}"


def swept_text(swept: Swept) -> str:
    """The swept values as text, such as "request-rate 4, input-len 128"."""
    return ", ".join(
        f"{name.replace('_', '-')} {value:g}" if isinstance(value, float) else f"{name.replace('_', '-')} {value}"
        for name, value in swept.items()
    )


def _title(point: Point) -> str:
    """The whole time and throughput, and below them the window that the tables are of."""
    metrics = point.runs[0].metrics
    several = f", mean of {len(point.runs)} runs" if len(point.runs) > 1 else ""
    due = f"{metrics.num_requests:,} requests in {number(metrics.duration_s)} s"
    wholes = [run.metrics.whole for run in point.runs if run.metrics.whole is not None]
    if not wholes:
        lines = [due + several]
    else:
        whole, rates = wholes[0], []
        for name, unit in (("requests_per_s", "requests/s"), ("output_tokens_per_s", "tokens/s")):
            known = [value for each in wholes if (value := getattr(each, name)) is not None]
            rates += [f"{number(sum(known) / len(known))} {unit}"] if known else []
        counted = f"{whole.num_ok:,} of {whole.num_requests:,} completed in {number(whole.duration_s)} s"
        lines = [": ".join(filter(None, (counted, ", ".join(rates)))) + several]
        if metrics.window_s is not None:
            start_s, end_s = (number(each) for each in metrics.window_s)
            lines.append(f"below: what was due or came from {start_s} to {end_s} s of it, {due}")
    if point.swept:
        lines[0] = f"{swept_text(point.swept)}: {lines[0]}"
    return "\n".join(lines)


def _counts_table(point: Point, title: str) -> Table:
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", expand=True)
    for head, justify in (("", "left"), ("value", "right"), ("unit", "left"), ("95% interval", "left")):
        table.add_column(head, justify=justify, ratio=2 if not head else 1)  # type: ignore[arg-type]
    for name in COUNTS:
        if name in point.summary:
            name_info, estimate = describe(name), point.summary[name]
            table.add_row(
                name_info.label,
                number(estimate.value * name_info.scale),
                name_info.unit,
                _interval(estimate, name_info.scale),
            )
    return table


def _latency_table(point: Point) -> NumberTable:
    """The latency table; below each value with an interval, the distance to the interval's farther end."""
    rows: list[list[Cell]] = []
    spreads = {name: getattr(point.runs[0].metrics, name) for name in LATENCIES}
    for name, spread in spreads.items():
        if spread is None or f"{name}.mean" not in point.summary:
            continue
        name_info = describe(name)
        unit, scale = ("s", 1.0) if point.summary[f"{name}.max"].value >= 100 else (name_info.unit, name_info.scale)
        found = [point.summary[f"{name}.{statistic}"] for statistic in STATISTICS]
        count = sum(run_spread.count for run in point.runs if (run_spread := getattr(run.metrics, name)))
        rows.append([f"{name_info.label}, {unit}", f"{count:,}", *(number(each.value * scale) for each in found)])
        if any(each.low is not None for each in found):
            ends = (_plus_minus(each.value, each.low, each.high, scale) for each in found)
            rows.append(["", "", *(Text(end, style="dim") for end in ends)])
    heads = ["latency", "count", *(statistic.replace("_", ".") for statistic in STATISTICS)]
    return NumberTable(heads, rows, caption=_PLUS_MINUS, expand=True)


def _group_table(summary: Mapping[str, Estimate], where: str, groups: Sequence[str], head: str) -> NumberTable:
    columns = [(name, statistic) for name in ("ttft_s", "tpot_s", "e2e_s") for statistic in ("p50", "p99")]
    rows = []
    for group in groups:
        cells = [_value(summary, f"{where}.{group}.{name}.{statistic}") for name, statistic in columns]
        rows.append([group or "(the rest)", _value(summary, f"{where}.{group}.num_requests"), *cells])
    heads = [head, "requests", *(f"{describe(name).label}\n{mark} ms" for name, mark in columns)]
    return NumberTable(heads, rows, expand=True)


def _differences_table(comparison: Comparison) -> Table:
    table = Table(
        box=SIMPLE_HEAD, title="Differing settings", title_justify="left", title_style="bold yellow", expand=True
    )
    table.add_column("", overflow="fold")
    for label in comparison.labels:
        table.add_column(label, overflow="fold")
    for each in comparison.differences:
        table.add_row(f"{each.where}: {each.name}", *each.values)
    return table


def _changes_table(rows: Sequence[Change], base: str, other: str, title: str) -> NumberTable:
    return NumberTable(
        ["", base, other, "difference", "ratio\n[95% interval]", "verdict"],
        [_change_row(change) for change in rows],
        title=title,
        caption=_PLUS_MINUS,
        text_columns=[5],
        expand=True,
    )


def _change_row(change: Change) -> list[Cell]:
    name_info = describe(change.metric)
    ends = _plus_minus(change.difference.value, change.difference.low, change.difference.high, name_info.scale)
    plus = "+" if change.difference.value > 0 else ""
    return [
        f"{name_info.label}, {name_info.unit}" if name_info.unit else name_info.label,
        number(change.base.value * name_info.scale),
        number(change.other.value * name_info.scale),
        f"{plus}{number(change.difference.value * name_info.scale)} {ends}",
        _ratio(change.ratio),
        _verdict(change, name_info),
    ]


def _verdict(change: Change, name_info: MetricName) -> Text:
    if change.verdict not in ("lower", "higher"):
        return Text("none shown" if change.verdict == "no difference shown" else change.verdict, style="dim")
    if name_info.less_is_better is None:
        return Text(change.verdict)
    return Text(change.verdict, style="green" if name_info.less_is_better == (change.verdict == "lower") else "red")


def _value(summary: Mapping[str, Estimate], name: str, none: str = "-") -> str:
    return number(summary[name].value * describe(name).scale) if name in summary else none


def _interval(estimate: Estimate, scale: float) -> str:
    if estimate.low is None or estimate.high is None:
        return ""
    return f"{number(estimate.low * scale)} – {number(estimate.high * scale)}"


def _plus_minus(value: float, low: float | None, high: float | None, scale: float) -> str:
    return "" if low is None or high is None else f"±{number(max(value - low, high - value) * scale)}"


def _ratio(ratio: Interval | None) -> str:
    if ratio is None or ratio.low is None or ratio.high is None:
        return "" if ratio is None else number(ratio.value)
    return f"{number(ratio.value)} [{number(ratio.low)}, {number(ratio.high)}]"
