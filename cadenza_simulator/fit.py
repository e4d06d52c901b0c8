"""Fits step costs to a recording: the part of a step's time that its work explains, and the gaps between the
services."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from cadenza_loadtest.measures.columns import RequestColumns
from cadenza_loadtest.requests import Floats, LoadTestError
from cadenza_simulator.executor_profiles import ExecutorProfile, Noise, Overheads
from cadenza_simulator.host_gaps import measure_host_gaps
from cadenza_simulator.recordings import RecordedRun, RecordedSteps
from executor_svc.simulated.costs import StepCosts, StepWork

_TERMS = ("step_us", "token_us", "context_token_us", "kv_token_us")
_OUTLIER_FACTOR = 4.0
"""A step that took this many times the modelled time was delayed by something else and is left out."""
_ROUNDS = 8
_FEWEST_STEPS = 20
_COLLINEAR = 0.9995
"""Two terms whose columns have at least this correlation cannot be distinguished."""
_MAX_ERROR_SHARE = 0.9
"""Hidden tokens are accepted if they leave at most this share of the squared error."""
_HIDDEN = (2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class Fit:
    """Fitted costs, how well they predict the recorded step times, and which terms the recording could not
    determine."""

    costs: StepCosts
    overheads: Overheads
    noise: Noise
    num_steps: int
    median_error: float
    """Median of |modelled - measured| / measured over the steps; p90_error is its 90th percentile."""
    p90_error: float
    explained: float
    """Share of the variance of step times that the costs explain."""
    total_ratio: float
    """Modelled time of all steps over their measured time."""
    warnings: tuple[str, ...]


def fit_costs(recording: RecordedRun) -> Fit:
    """Fit a recording's steps; raises LoadTestError if there are too few.

    The method is non-negative least squares (Lawson and Hanson, Solving Least Squares Problems, chapter 23), repeated
    with weights from the previous model: a step's variance is assumed to be proportional to its time, as it is where
    interruptions come at random. Steps that took more than four times their modelled time are left out.
    """
    steps = _with_times(recording.steps)
    if len(steps) < _FEWEST_STEPS:
        raise LoadTestError(f"the recording has {len(steps)} steps with times; at least {_FEWEST_STEPS} are needed")
    warnings: list[str] = []
    sample_us = _rate(steps.sample_ns, steps.samples)
    sample_rest_ns = np.maximum(0.0, steps.sample_ns - 1000 * sample_us * steps.samples)
    moved_block_us = _moved_block_us(steps, warnings)
    # Everything that is neither sampling nor moving counts as forward pass, including the executor's own work.
    forward_us = (steps.total_ns - steps.sample_ns - steps.moves_ns + sample_rest_ns) / 1000
    terms, hidden_tokens = _forward(steps, forward_us, warnings)
    costs = StepCosts(
        **{name: round(value, 6) for name, value in terms.items()},
        sample_us=round(sample_us, 6),
        moved_block_us=round(moved_block_us, 3),
        hidden_tokens=hidden_tokens,
    )
    modelled, measured = _modelled_ns(costs, steps), steps.total_ns
    gaps = measure_host_gaps(steps)
    errors = np.abs(modelled - measured) / measured
    spread = ((measured - measured.mean()) ** 2).sum()
    return Fit(
        costs=costs.model_copy(update={"step_us": round(costs.step_us + gaps.gap_us, 6)}),
        overheads=Overheads(plan_us=gaps.plan_us, transit_us=gaps.transit_us),
        noise=Noise(step_us=_noise_us(measured, modelled), overheads=gaps.variation),
        num_steps=len(steps),
        median_error=float(np.median(errors)),
        p90_error=float(np.quantile(errors, 0.9)),
        explained=float(1 - ((modelled - measured) ** 2).sum() / spread) if spread else 1.0,
        total_ratio=float(modelled.sum() / measured.sum()),
        warnings=tuple(warnings),
    )


def with_clients(fit: Fit, requests: RequestColumns) -> Fit:
    """The same fit with the overheads between clients and the queue, from a load test of the recorded server.

    They are the difference of the client's TTFT and the server's own, half on the way there and half on the way back.
    Raises LoadTestError if the server reported no times.
    """
    beyond_s = (requests.first_s - requests.sent_s - requests.server_first_s)[requests.ok]
    known_us = 1e6 * beyond_s[~np.isnan(beyond_s)]
    if not len(known_us):
        raise LoadTestError("the load test has no request with the server's own times")
    each = round(max(0.0, float(np.median(known_us))) / 2, 1)
    return replace(fit, overheads=fit.overheads.model_copy(update={"request_us": each, "reply_us": each}))


def fitted_profile(recording: RecordedRun, fit: Fit, name: str, path: str) -> ExecutorProfile:
    """The profile of the recorded executor."""
    source = f"fitted to {fit.num_steps} steps of {recording.model} on {recording.device} in {path}"
    return ExecutorProfile(
        costs=fit.costs,
        overheads=fit.overheads,
        noise=fit.noise,
        limits=recording.limits,
        name=name,
        source=source,
    )


def _with_times(steps: RecordedSteps) -> RecordedSteps:
    """The steps that computed tokens and took time."""
    rows = (steps.tokens > 0) & (steps.total_ns > 0)
    return RecordedSteps(*(getattr(steps, field.name)[rows] for field in fields(steps)))


def _forward(steps: RecordedSteps, forward_us: Floats, warnings: list[str]) -> tuple[dict[str, float], float]:
    """The terms of the forward pass, and the number of tokens hidden behind its fixed part."""
    columns = {
        "step_us": np.ones(len(steps)),
        "token_us": steps.tokens,
        "context_token_us": steps.context_tokens,
        "kv_token_us": steps.kv_tokens,
    }
    _drop_undetermined(columns, warnings)
    best, hidden = _weighted_nnls(columns, forward_us), 0.0
    if "token_us" in columns:
        for count in (each for each in _HIDDEN if each < steps.tokens.max()):
            found = _weighted_nnls({**columns, "token_us": np.maximum(0.0, steps.tokens - count)}, forward_us)
            if found[1] < _MAX_ERROR_SHARE * best[1]:
                best, hidden = found, float(count)
    terms = dict(zip(columns, best[0].tolist(), strict=True))
    return {name: terms.get(name, 0.0) for name in _TERMS}, hidden


def _drop_undetermined(columns: dict[str, Floats], warnings: list[str]) -> None:
    """Remove the terms that the recording cannot determine: constant columns, and columns like another one."""
    for name in list(columns)[1:]:
        column = columns[name]
        if np.ptp(column) == 0:
            del columns[name]
            warnings.append(f"{name} cannot be fitted: every step had {column[0]:.0f} of them; it is part of step_us")
            continue
        for other in [known for known in columns if known not in ("step_us", name)]:
            if list(columns).index(other) < list(columns).index(name) and _are_collinear(column, columns[other]):
                del columns[name]
                warnings.append(
                    f"{name} cannot be distinguished from {other}: they vary together in every step; it is 0"
                )
                break


def _are_collinear(one: Floats, other: Floats) -> bool:
    return abs(float(np.corrcoef(one, other)[0, 1])) > _COLLINEAR


def _weighted_nnls(columns: dict[str, Floats], times: Floats) -> tuple[Floats, float]:
    """Coefficients of weighted least squares, and the mean of the remaining weighted squared errors."""
    matrix = np.stack(list(columns.values()), axis=1)
    modelled, kept = times, np.ones(len(times), bool)
    for _ in range(_ROUNDS):
        roots = np.sqrt(modelled[kept])
        found, error = _scaled_nnls(matrix[kept] / roots[:, None], times[kept] / roots)
        modelled = np.maximum(matrix @ found, 1e-3)
        kept = times <= _OUTLIER_FACTOR * modelled
    return found, error**2 / len(roots)


def _scaled_nnls(matrix: npt.NDArray[np.float64], target: Floats) -> tuple[Floats, float]:
    """nnls on columns scaled to equal norms, because their units differ by orders of magnitude."""
    sizes = np.sqrt((matrix**2).sum(0))
    sizes[sizes == 0] = 1.0
    found, error = nnls(matrix / sizes, target)
    return found / sizes, float(error)


def _rate(times_ns: Floats, counts: Floats) -> float:
    """Microseconds per item, by a fit with a constant term, which is accounted for elsewhere."""
    rows = counts > 0
    if not rows.any() or not times_ns[rows].any():
        return 0.0
    found, _ = _scaled_nnls(np.stack([np.ones(int(rows.sum())), counts[rows]], axis=1), times_ns[rows] / 1000)
    return float(found[1]) if np.ptp(counts[rows]) else 0.0


def _moved_block_us(steps: RecordedSteps, warnings: list[str]) -> float:
    """Microseconds per moved block: a quotient of sums, so that large moves weigh more than small ones."""
    moved = steps.moved_blocks.sum()
    if not moved:
        warnings.append("moved_block_us cannot be fitted: no block was swapped or copied; it is 0")
        return 0.0
    return float(steps.moves_ns.sum() / moved / 1000)


def _noise_us(measured: Floats, modelled: Floats) -> float:
    """Variance over mean of step times without outliers: the mean of the single steps' estimates."""
    kept = measured <= _OUTLIER_FACTOR * modelled
    squares = (measured[kept] - modelled[kept]) ** 2 / modelled[kept]
    return round(float(squares.mean()) / 1000, 1)


def _modelled_ns(costs: StepCosts, steps: RecordedSteps) -> Floats:
    rows = zip(
        steps.tokens.astype(int).tolist(), steps.context_tokens.astype(int).tolist(),
        steps.samples.astype(int).tolist(),
        steps.moved_blocks.astype(int).tolist(), steps.kv_tokens.astype(int).tolist(), strict=True,
    )  # fmt: skip
    return np.array(
        [costs.forward_ns(w) + costs.sample_ns(w) + costs.move_ns(w) for w in (StepWork(*row) for row in rows)]
    )
