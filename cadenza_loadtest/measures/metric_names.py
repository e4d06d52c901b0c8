"""Names of metrics: a run's numbers under flat names such as "ttft_s.p99", and their labels for display."""

from __future__ import annotations

from dataclasses import dataclass

from cadenza_loadtest.measures.metrics import Metrics, Spread

STATISTICS = ("mean", "p50", "p90", "p95", "p99", "p99_9", "max")
_ACRONYMS = {"ttft_s": "TTFT", "tpot_s": "TPOT", "itl_s": "ITL", "e2e_s": "E2E", "queue_s": "queue time"}
_LEFT_OUT = {"window_s", "slo", "errors", "count", "kept_up", "whole"}
_GROUPS = ("by_kind", "by_tenant", "by_adapter")


@dataclass(frozen=True, slots=True)
class MetricName:
    """How a metric is displayed: the value times `scale` is in `unit`."""

    label: str
    unit: str = ""
    scale: float = 1.0
    less_is_better: bool | None = None
    """None: neither more nor less is better."""


_NAMES = {
    "duration_s": MetricName("duration", "s"),
    "num_requests": MetricName("requests"),
    "num_ok": MetricName("completed requests", less_is_better=False),
    "num_failed": MetricName("failed requests", less_is_better=True),
    "num_cut_prompts": MetricName("truncated prompts"),
    "num_cut_outputs": MetricName("requests with truncated outputs"),
    "num_prompt_tokens": MetricName("prompt", "tokens"),
    "num_cached_tokens": MetricName("from the prefix cache", "tokens"),
    "num_output_tokens": MetricName("output", "tokens"),
    "num_preemptions": MetricName("preemptions", less_is_better=True),
    "num_adapters": MetricName("adapters, distinct"),
    "offered_per_s": MetricName("offered rate", "requests/s"),
    "requests_per_s": MetricName("request throughput", "requests/s", less_is_better=False),
    "output_tokens_per_s": MetricName("output throughput", "tokens/s", less_is_better=False),
    "prompt_tokens_per_s": MetricName("prompt throughput", "tokens/s", less_is_better=False),
    "goodput_per_s": MetricName("goodput", "requests/s", less_is_better=False),
    "slo_share": MetricName("kept the SLO", "%", 100, less_is_better=False),
    "mean_concurrency": MetricName("in flight, mean", "requests"),
    "max_concurrency": MetricName("in flight, most", "requests"),
    "lag_s": MetricName("client's lag", "ms", 1e3, less_is_better=True),
    "steps.num_steps": MetricName("steps"),
    "steps.num_dropped": MetricName("step records lost"),
    "steps.mean_sequences": MetricName("sequences per step, mean"),
    "steps.mean_tokens": MetricName("tokens per step, mean"),
    "steps.mean_device_s": MetricName("device time per step, mean", "ms", 1e3),
    "steps.mean_waiting": MetricName("requests waiting, mean"),
    "steps.mean_running": MetricName("requests running, mean"),
    "steps.mean_swapped": MetricName("requests swapped out, mean"),
    "steps.mean_kv_use": MetricName("KV blocks in use, mean", "%", 100),
    "steps.max_kv_use": MetricName("KV blocks in use, most", "%", 100),
    "steps.num_preemptions": MetricName("preemptions in the steps", less_is_better=True),
    **{name: MetricName(label, "ms", 1e3, less_is_better=True) for name, label in _ACRONYMS.items()},
}


def values_of(metrics: Metrics) -> dict[str, float]:
    """All measured numbers by flat name: "requests_per_s", "ttft_s.p99", "by_kind.long.tpot_s.mean",
    "steps.mean_sequences"; times in seconds, shares from 0 to 1."""
    found: dict[str, float] = {"num_failed": float(sum(metrics.errors.values()))}
    for name, value in metrics:
        if name in _GROUPS:
            for group, part in value.items():
                for inner, number in part:
                    _put(found, f"{name}.{group}.{inner}", number)
        elif name == "steps" and value is not None:
            for inner, number in value:
                _put(found, f"steps.{inner}", number)
        elif name not in _LEFT_OUT:
            _put(found, name, value)
    return found


def describe(name: str) -> MetricName:
    """How the metric with this flat name is displayed; an unknown name is displayed as it is."""
    if name in _NAMES:
        return _NAMES[name]
    kind, _, rest = name.partition(".")
    if kind in _GROUPS:
        # The name of a kind, tenant or adapter may contain dots; a statistic or a plain metric has none.
        pieces = rest.rsplit(".", 2 if rest.rpartition(".")[2] in STATISTICS else 1)
        return _with(describe(".".join(pieces[1:])), f" of {pieces[0] or 'the rest'}")
    base, _, statistic = name.rpartition(".")
    if base in _NAMES and statistic in STATISTICS:
        return _with(_NAMES[base], f" {statistic.replace('_', '.')}")
    return MetricName(name)


def _put(found: dict[str, float], name: str, value: object) -> None:
    if isinstance(value, Spread):
        found.update({f"{name}.{inner}": float(number) for inner, number in value if inner not in _LEFT_OUT})
    elif isinstance(value, int | float):
        found[name] = float(value)


def _with(name: MetricName, more: str) -> MetricName:
    return MetricName(f"{name.label}{more}", name.unit, name.scale, name.less_is_better)
