"""Makes rows from runs: medians of each system, and Cadenza's ratios to each peer, repeat by repeat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.common.rows import Row, make_row
from benchmarks.serving.runs import Run

_OWN = ("cadenza", "cadenza-stream")  # the first of these that was measured is compared with the peers
_LATENCIES = ("ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms")
_SPEED = "tokens_per_s"
_COMPARED = {"poisson": _LATENCIES, "start": ("start_s",)}


def serving_row(name: str, seed: int, params: Mapping[str, Any], runs: Sequence[Run]) -> Row:
    """One row of all systems and repeats of one measurement, with `SYSTEM_METRIC` and ratios taken in each repeat."""
    num_repeats = 1 + max(run.repeat for run in runs)
    repeats = [_flat([run for run in runs if run.repeat == index]) for index in range(num_repeats)]
    systems = {run.system: run.about for run in runs}
    row = make_row(
        name,
        seed=seed,
        params={"measure": runs[0].measure, **params, "systems": systems},
        repeats=repeats,
        other_cores=[run.other_cores for run in runs],
    )
    return row.with_runs([_object(run, params, row) for run in runs])


def describe(row: Row) -> str:
    """A row as text: a line for each system."""
    params, found = row.params, row.medians
    lines = [f"{params['model']}, {params['measure']}: {params['requests']} requests, {params['output_tokens']} tokens"]
    for system in params["systems"]:
        shown = [
            metric
            for metric in (_SPEED, *_LATENCIES, "start_s", "peak_mb", "stays_mb", "peak_ratio", "rss_mb")
            if f"{key(system)}_{metric}" in found
        ]
        ratios = [name for name in found if name == f"ratio_{key(system)}" or name in _latency_ratios(system)]
        values = [f"{metric} {found[f'{key(system)}_{metric}']:.4g}" for metric in shown]
        values += [f"{name.replace(f'_{key(system)}', '')} {found[name]:.3g}" for name in ratios]
        lines.append(f"  {system:22} " + ", ".join(values))
    memory = [f"{name} {value:.0f}" for name, value in found.items() if name in ("executor_rss_mb", "scheduler_rss_mb")]
    return "\n".join([*lines, *(f"  {text}" for text in memory)])


def _latency_ratios(system: str) -> set[str]:
    return {f"ratio_{key(system)}_{metric.removesuffix('_ms')}" for metric in _LATENCIES}


def key(system: str) -> str:
    """A system's name as part of a metric's."""
    return system.replace("-", "_").replace(".", "_")


def _flat(runs: Sequence[Run]) -> dict[str, float]:
    """The metrics of one repeat."""
    found: dict[str, float] = {}
    for run in runs:
        # With given arrivals, tokens per second depend on the arrivals, not on the system.
        left_out = {"wall_s", "requests_per_s", *((_SPEED,) if run.measure == "poisson" else ())}
        for metric, value in run.metrics.items():
            if metric.endswith("_rss_mb"):  # of Cadenza's services, for both ways of sending
                found[metric] = max(value, found.get(metric, 0.0))
            elif metric not in left_out:
                found[f"{key(run.system)}_{metric}"] = value
    own = next((run for name in _OWN for run in runs if run.system == name), None)
    for run in runs:
        if own is not None and run.system not in _OWN:
            found |= _ratios(own, run)
    return found


def _ratios(own: Run, peer: Run) -> dict[str, float]:
    """`ratio_SYSTEM`, or `ratio_SYSTEM_METRIC` if several metrics are compared; above 1 Cadenza is better."""
    compared = _COMPARED.get(own.measure, (_SPEED,))
    found = {}
    for metric in compared:
        if metric in own.metrics and metric in peer.metrics:
            name = f"ratio_{key(peer.system)}" + (f"_{metric.removesuffix('_ms')}" if len(compared) > 1 else "")
            own_value, peer_value = own.metrics[metric], peer.metrics[metric]
            found[name] = own_value / peer_value if metric == _SPEED else peer_value / own_value
    return found


def _object(run: Run, params: Mapping[str, Any], row: Row) -> dict[str, Any]:
    """The flat object that --json prints for one run."""
    shared = {name: value for name, value in params.items() if not isinstance(value, dict)}
    return {
        "system": run.system,
        "measure": run.measure,
        "model": shared.pop("model"),
        "repeat": run.repeat,
        **{metric: float(f"{value:.5g}") for metric, value in run.metrics.items()},
        **shared,
        **run.about,
        "options": " ".join(f"{name}={value}" for name, value in params["options"].items()),
        "seed": row.seed,
        "other_cores": round(run.other_cores, 2),
        "cpu": row.machine["cpu"],
        "cores": row.machine["cores"],
        **{name: row.versions[name] for name in ("python", "cadenza", "commit")},
    }
