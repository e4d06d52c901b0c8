"""Outcomes as rows, and as tables for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.common.rows import Row, make_row
from benchmarks.gpu.common.cases import Goal, Outcome
from benchmarks.gpu.common.environment import with_gpu


def row_of(benchmark: str, outcome: Outcome, seed: int, other_cores: float = 0.0) -> Row:
    """The row of an outcome that has metrics."""
    params = {"group": outcome.group, "case": outcome.case, **outcome.params}
    row = make_row(benchmark, seed=seed, params=params, repeats=[outcome.metrics], other_cores=[other_cores])
    return with_gpu(row)


def as_line(outcome: Outcome, goal: Goal | None = None) -> str:
    """An outcome in one line."""
    where = f"{outcome.group}: {outcome.case}: "
    if outcome.error:
        return where + "FAILED: " + outcome.error
    if outcome.skipped:
        return where + "skipped: " + outcome.skipped
    metrics = ", ".join(f"{name} {number(value)}" for name, value in outcome.metrics.items())
    judged = goal.judge(outcome.metrics) if goal else ""
    return where + metrics + (f" (goal {judged})" if judged else "")


def table(title: str, rows: Sequence[tuple[Outcome, Goal | None]]) -> str:
    """One group: a line per case with all metrics of the group; failed and skipped cases are listed below."""
    columns = list(dict.fromkeys(name for outcome, _ in rows for name in outcome.metrics))
    goals = any(goal for _, goal in rows)
    head = ["case", *columns, *(["goal"] if goals else [])]
    lines = [head]
    for outcome, goal in rows:
        if outcome.metrics:
            values = [number(outcome.metrics[name]) if name in outcome.metrics else "" for name in columns]
            lines.append([outcome.case, *values, *([_judged(outcome.metrics, goal)] if goals else [])])
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    text = [f"== {title}", *("  ".join(_cells(line, widths)).rstrip() for line in lines)]
    text += [as_line(outcome) for outcome, _ in rows if not outcome.metrics]
    return "\n".join(text)


def summary(done: Sequence[tuple[Outcome, Goal | None]]) -> str:
    """Counts of cases that failed or were skipped, and of goals that were met or missed."""
    judged = [goal.judge(outcome.metrics) for outcome, goal in done if goal]
    failed, skipped = (sum(bool(getattr(outcome, name)) for outcome, _ in done) for name in ("error", "skipped"))
    return (
        f"== {len(done)} cases: {failed} failed, {skipped} skipped; goals: {judged.count('met')} met, "
        f"{judged.count('missed')} missed"
    )


def number(value: float) -> str:
    """Four significant digits, without an exponent."""
    if value == 0 or not 1e-4 <= abs(value) < 1e15:
        return f"{value:.4g}"
    digits = max(0, 4 - len(str(int(abs(value))).lstrip("0")))
    return f"{value:.{min(digits, 6)}f}" if abs(value) < 1e4 else f"{value:.0f}"


def best_of(rows: Sequence[Outcome], by: Sequence[str], metric: str) -> list[str]:
    """A line for each set of rows with equal parameters `by`: the row with the largest `metric`."""
    found: dict[tuple[Any, ...], Outcome] = {}
    for outcome in rows:
        key = tuple(outcome.params.get(name) for name in by)
        if metric in outcome.metrics and (key not in found or outcome.metrics[metric] > found[key].metrics[metric]):
            found[key] = outcome
    return [f"best: {outcome.case}, {metric} {number(outcome.metrics[metric])}" for outcome in found.values()]


def _judged(metrics: Mapping[str, float], goal: Goal | None) -> str:
    if goal is None or not (judged := goal.judge(metrics)):
        return ""
    bound = f">= {goal.at_least:g}" if goal.at_least is not None else f"<= {goal.at_most:g}"
    return f"{judged}: {goal.metric} {bound}"


def _cells(line: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [
        cell.ljust(width) if column == 0 or column == len(widths) - 1 else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(line, widths, strict=True))
    ]
