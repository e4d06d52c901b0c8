"""Metrics of a run from its columns: throughput, latencies, goodput, and statistics of the steps.

Latencies cover the requests that were *due* within the window and completed; throughput covers what *arrived* within
it. So windows that divide a run count each request once, and each token when it arrived.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field

from cadenza_loadtest.measures.columns import RequestColumns, StepColumns
from cadenza_loadtest.measures.latencies import (
    PER_REQUEST,
    Rows,
    Window,
    end_of,
    gaps_of,
    in_flight,
    is_within,
    per_request,
    tokens_within,
)
from cadenza_loadtest.measures.slo import Slo as Slo
from cadenza_loadtest.measures.slo import kept
from cadenza_loadtest.measures.slo import parse_slo as parse_slo
from cadenza_loadtest.measures.windows import kept_up
from cadenza_loadtest.measures.windows import steady_window as steady_window
from cadenza_loadtest.requests import Floats, LoadTestError, Truncations

PERCENTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p99_9": 0.999}
_RATES = (
    "requests_per_s", "goodput_per_s", "output_tokens_per_s", "prompt_tokens_per_s", "mean_concurrency",
    "max_concurrency",
)  # fmt: skip
MAX_ADAPTERS = 16
"""Up to so many adapters, each adapter has metrics of its own."""
LATENCIES = ("ttft_s", "tpot_s", "itl_s", "e2e_s", "queue_s", "lag_s")


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Spread(_Frozen):
    """The distribution of a quantity, in its own unit.

    Percentiles are interpolated linearly between the two nearest values (Hyndman and Fan's type 7,
    https://doi.org/10.1080/00031305.1996.10473566). A percentile p of fewer than 1/(1 - p) values is close to their
    maximum: look at the count.
    """

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    p99_9: float
    max: float


class RequestGroup(_Frozen):
    """The requests of one kind or tenant that were due within the window: counts, and latencies in seconds."""

    num_requests: int
    num_ok: int
    ttft_s: Spread | None
    tpot_s: Spread | None
    itl_s: Spread | None
    e2e_s: Spread | None
    slo_share: float | None
    """Share of the requests that kept every limit; None without an SLO."""


class StepFacts(_Frozen):
    """Statistics of the steps planned within the window: means over steps, with equal weights."""

    num_steps: int
    num_dropped: int
    """Records lost in transit over the whole run."""
    mean_sequences: float
    """Sequences per step: the batch occupancy."""
    mean_tokens: float
    """Computed tokens per step, of prompts and outputs."""
    mean_device_s: float | None
    mean_waiting: float
    mean_running: float
    mean_swapped: float
    mean_kv_use: float | None
    """Share of the executor's blocks that are in use, 0 to 1."""
    max_kv_use: float | None
    num_preemptions: int


class WholeRun(_Frozen):
    """All requests of a run: from its start to the last token, with the drain after the last arrival."""

    duration_s: float
    num_requests: int
    num_ok: int
    requests_per_s: float | None
    """Completed requests per second of `duration_s`; None without a token."""
    output_tokens_per_s: float | None


class Metrics(_Frozen):
    """The metrics of a run; None: nothing was measured. Rates are per second of `duration_s`."""

    window_s: Window | None
    """The window that counts, in seconds of the run; None: the whole run."""
    duration_s: float
    """Length of the window; without one, from the start to the last token."""
    num_requests: int
    """Due within the window."""
    num_ok: int
    errors: dict[str, int]
    """Number of failed requests due within the window, by error code."""
    num_cut_prompts: int | None = None
    """Requests due within the window whose prompt was truncated to the limit of the model or of `--max-total-len`; the
    next field counts truncated outputs. None: not counted, as in files from before this was recorded."""
    num_cut_outputs: int | None = None
    num_prompt_tokens: int
    """Over the completed requests that were due within the window; so are the next three."""
    num_cached_tokens: int | None
    """Prompt tokens from the prefix cache; None if the server does not report it."""
    num_output_tokens: int
    num_preemptions: int | None
    offered_per_s: float | None
    """Requests due per second; without a window, their number less one over the time from the first to the last due
    time. None if all were due at once."""
    requests_per_s: float | None
    """Completed requests whose last token arrived within the window."""
    output_tokens_per_s: float | None
    """Output tokens that arrived within the window, including those of failed requests."""
    prompt_tokens_per_s: float | None
    """Prompt tokens of requests whose first token arrived within the window, including tokens from the prefix cache."""
    mean_concurrency: float | None
    """Mean number of requests between due and last token, over the window: Little's L."""
    max_concurrency: int | None
    ttft_s: Spread | None
    """First token - due."""
    tpot_s: Spread | None
    """(Last - first token) / (tokens of a sample - 1), over requests with more than one token per sample; without
    answers that arrived in one message."""
    itl_s: Spread | None
    """Time between successive messages with tokens of one request; all gaps weigh the same, so long answers weigh
    more."""
    e2e_s: Spread | None
    """Last token - due."""
    queue_s: Spread | None
    """Time in the server's queue, by its own clock."""
    lag_s: Spread | None
    """Sent - due: the client's own part of every latency, including failed requests."""
    slo: Slo | None
    slo_share: float | None
    """Share of all requests due that kept every limit; failed requests did not. None without an SLO, or with a limit on
    ITLs that were not kept."""
    goodput_per_s: float | None
    """Requests that kept every limit and whose last token arrived within the window: a part of `requests_per_s`."""
    kept_up: bool | None = None
    """Whether about as many requests ended as arrived in the second half of the window; None without a window, and in
    files from before this was recorded."""
    by_kind: dict[str, RequestGroup]
    """Empty if all requests have the same unnamed kind; by_tenant and by_adapter likewise."""
    by_tenant: dict[str, RequestGroup]
    by_adapter: dict[str, RequestGroup] = Field(default_factory=dict)
    """Also empty with more than MAX_ADAPTERS adapters."""
    num_adapters: int | None = None
    """Distinct LoRA adapters that requests due within the window named; None if none did."""
    steps: StepFacts | None
    whole: WholeRun | None = None
    """None in files from before this was recorded."""


def measure(
    columns: RequestColumns,
    *,
    window: Window | None,
    slo: Slo | None,
    steps: StepColumns | None = None,
    truncations: Truncations | None = None,
    open_loop: bool = True,
) -> Metrics:
    """All metrics of one run; `window` is in seconds of the run, None: the whole run. A closed loop has no offered
    rate. Raises LoadTestError for a window that does not end after it starts."""
    if window is not None and not window[1] > window[0]:
        raise LoadTestError(f"--window {window[0]:g}:{window[1]:g}: must end after it starts")
    due = is_within(columns.due_s, window)
    ended = due & columns.ok
    over = window or (0.0, end_of(columns))
    good = None if slo is None else kept(columns, slo)
    num_cut_prompts, num_cut_outputs = (
        (None, None) if truncations is None else truncations.count_among(columns.index[due])
    )
    spreads = _spreads(columns, ended)
    return Metrics(
        window_s=window,
        duration_s=over[1] - over[0],
        num_requests=int(due.sum()),
        num_ok=int(ended.sum()),
        errors=_errors(columns, due),
        num_cut_prompts=num_cut_prompts,
        num_cut_outputs=num_cut_outputs,
        num_prompt_tokens=int(columns.num_prompt_tokens[ended].sum()),
        num_cached_tokens=_known_sum(columns.num_cached_tokens[ended]),
        num_output_tokens=int(columns.num_output_tokens[ended].sum()),
        num_preemptions=_known_sum(columns.num_preemptions[ended]),
        offered_per_s=_offered(columns.due_s[due], window) if open_loop else None,
        **_rates(columns, window, over, good),
        **{**spreads, "lag_s": spread_of(per_request(columns)["lag_s"][due])},
        slo=slo,
        slo_share=_share(good, due),
        kept_up=kept_up(columns, window),
        by_kind=_groups(columns, due, columns.kind, good),
        by_tenant=_groups(columns, due, columns.tenant, good),
        by_adapter=_groups(columns, due, columns.adapter, good, MAX_ADAPTERS + 1),
        num_adapters=len(set(columns.adapter[due].tolist()) - {""}) or None,
        steps=None if steps is None else step_facts(steps, window),
        whole=_whole(columns),
    )


def spread_of(values: npt.NDArray[np.floating]) -> Spread | None:
    """The distribution of the values [n] without NaN; None if none is left."""
    known = values[~np.isnan(values)]
    if not len(known):
        return None
    marks = np.quantile(known, list(PERCENTILES.values()), method="linear")
    return Spread(
        count=len(known),
        mean=float(known.mean(dtype=np.float64)),
        max=float(known.max()),
        **{name: float(value) for name, value in zip(PERCENTILES, marks, strict=True)},
    )


def step_facts(steps: StepColumns, window: Window | None) -> StepFacts | None:
    """Statistics of the steps planned within the window; None if there were none."""
    rows = is_within(steps.planned_s, window)
    if not rows.any():
        return None
    pools = rows & (steps.num_blocks > 0)
    use = steps.num_used_blocks[pools] / steps.num_blocks[pools]
    device_s = steps.device_s[rows & ~np.isnan(steps.device_s)]
    return StepFacts(
        num_steps=int(rows.sum()),
        num_dropped=steps.num_dropped,
        mean_sequences=float(steps.num_sequences[rows].mean()),
        mean_tokens=float(steps.num_tokens[rows].mean()),
        mean_device_s=float(device_s.mean()) if len(device_s) else None,
        mean_waiting=float(steps.num_waiting[rows].mean()),
        mean_running=float(steps.num_running[rows].mean()),
        mean_swapped=float(steps.num_swapped[rows].mean()),
        mean_kv_use=float(use.mean()) if len(use) else None,
        max_kv_use=float(use.max()) if len(use) else None,
        num_preemptions=int(steps.num_preempted[rows].sum()),
    )


def _spreads(columns: RequestColumns, rows: Rows) -> dict[str, Any]:
    latencies = per_request(columns)
    found = {name: spread_of(latencies[name][rows]) for name in PER_REQUEST}
    return {**found, "itl_s": spread_of(gaps_of(columns, rows))}


def _rates(columns: RequestColumns, window: Window | None, over: Window, good: Rows | None) -> dict[str, Any]:
    seconds = over[1] - over[0]
    if not seconds > 0:
        return dict.fromkeys(_RATES)
    ended = columns.ok & is_within(columns.last_s, window)
    # Without a window, tokens of unknown arrival time count, too.
    tokens = tokens_within(columns, over) if window else float(columns.num_output_tokens.sum())
    read = is_within(columns.first_s, window) & ~np.isnan(columns.first_s)
    mean, most = in_flight(columns, over)
    return {
        "requests_per_s": int(ended.sum()) / seconds,
        "goodput_per_s": None if good is None else int((good & ended).sum()) / seconds,
        "output_tokens_per_s": tokens / seconds,
        "prompt_tokens_per_s": int(columns.num_prompt_tokens[read].sum()) / seconds,
        "mean_concurrency": mean,
        "max_concurrency": most,
    }


def _whole(columns: RequestColumns) -> WholeRun:
    seconds, num_ok = end_of(columns), int(columns.ok.sum())
    return WholeRun(
        duration_s=seconds,
        num_requests=len(columns.due_s),
        num_ok=num_ok,
        requests_per_s=num_ok / seconds if seconds > 0 else None,
        output_tokens_per_s=float(columns.num_output_tokens.sum()) / seconds if seconds > 0 else None,
    )


def _offered(due_s: Floats, window: Window | None) -> float | None:
    known = due_s[~np.isnan(due_s)]
    if window is not None:
        return len(known) / (window[1] - window[0])
    between = float(known.max() - known.min()) if len(known) else 0.0
    return (len(known) - 1) / between if between > 0 else None


def _errors(columns: RequestColumns, due: Rows) -> dict[str, int]:
    codes, counts = np.unique(columns.error[due & ~columns.ok], return_counts=True)
    return {str(code): int(count) for code, count in zip(codes, counts, strict=True)}


def _known_sum(counts: npt.NDArray[np.int64]) -> int | None:
    known = counts[counts >= 0]
    return int(known.sum()) if len(known) else None


def _share(good: Rows | None, due: Rows) -> float | None:
    return None if good is None or not due.any() else float(good[due].mean())


def _groups(
    columns: RequestColumns, due: Rows, names: npt.NDArray[np.str_], good: Rows | None, most: float = math.inf
) -> dict[str, RequestGroup]:
    present = [str(name) for name in np.unique(names[due])]
    if present in ([], [""]) or len(present) > most:
        return {}
    return {name: _group(columns, due & (names == name), good) for name in present}


def _group(columns: RequestColumns, due: Rows, good: Rows | None) -> RequestGroup:
    spreads = _spreads(columns, due & columns.ok)
    latencies = {name: spreads[name] for name in ("ttft_s", "tpot_s", "itl_s", "e2e_s")}
    num_ok = int((due & columns.ok).sum())
    return RequestGroup(num_requests=int(due.sum()), num_ok=num_ok, slo_share=_share(good, due), **latencies)
