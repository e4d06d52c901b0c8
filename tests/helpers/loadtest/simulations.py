"""Simulations for tests: small executors, loads by hand or at random, nothing from the environment."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from cadenza_loadtest.requests import RequestShape
from cadenza_simulator.executor_profiles import ExecutorProfile, Overheads, ProfileLimits
from cadenza_simulator.run import RunOutcome, Simulation
from cadenza_simulator.traffic import Traffic
from executor_svc.simulated.costs import StepCosts
from scheduler_svc.config import SchedulerConfig


def profile(
    costs: dict[str, float] | None = None, overheads: dict[str, float] | None = None, name: str = "toy", **limits: int
) -> ExecutorProfile:
    """An executor; costs and overheads in microseconds, nothing by default."""
    return ExecutorProfile(
        name=name,
        costs=StepCosts(**costs or {}),
        overheads=Overheads(**overheads or {}),
        limits=ProfileLimits(**limits),
    )


def options(**given: Any) -> SchedulerConfig:
    """A scheduler's configuration, whatever the environment says."""
    fields = SchedulerConfig.model_fields.items()
    defaults = {name: field.get_default(call_default_factory=True) for name, field in fields}
    return SchedulerConfig(**{**defaults, **given})


def shape(index: int, num_prompt_tokens: int, num_output_tokens: int, **fields: Any) -> RequestShape:
    return RequestShape(index, num_prompt_tokens, num_output_tokens, **fields)


def simulation(
    schedule: Sequence[tuple[float, RequestShape]],
    fleet: ExecutorProfile | Sequence[ExecutorProfile],
    *,
    config: SchedulerConfig | None = None,
    concurrency: int | None = None,
    duration_s: float | None = None,
    **keywords: Any,
) -> Simulation:
    """One that has not run yet."""
    traffic = Traffic(iter(schedule), concurrency=concurrency, duration_s=duration_s)
    profiles = [fleet] if isinstance(fleet, ExecutorProfile) else list(fleet)
    return Simulation(profiles, config or options(), traffic, **keywords)


def simulate(
    schedule: Sequence[tuple[float, RequestShape]], fleet: ExecutorProfile | Sequence[ExecutorProfile], **keywords: Any
) -> RunOutcome:
    """Let it run."""
    return simulation(schedule, fleet, **keywords).run()


def random_schedule(
    seed: int, count: int, *, rate: float, mixed: bool = True, longest: int = 60
) -> list[tuple[float, RequestShape]]:
    """Poisson arrivals of short requests: of one sample, and if `mixed`, of several, with beams, in sessions."""
    rng = random.Random(seed)
    schedule: list[tuple[float, RequestShape]] = []
    due, index = 0.0, 0
    while index < count:
        due += rng.expovariate(rate)
        how = rng.random() if mixed else 0.0
        fields: dict[str, Any] = {"tenant": rng.choice(["", "blue"]), "kind": rng.choice(["a", "b"])}
        if 0.6 < how <= 0.75:
            fields["n"] = rng.randint(2, 4)
        elif 0.75 < how <= 0.85:
            fields["beam_width"] = rng.randint(2, 3)
        turns = rng.randint(2, 3) if how > 0.85 else 1
        session = index if turns > 1 else -1
        for turn in range(turns):
            made = shape(
                index, rng.randint(1, longest), rng.randint(1, 12), session=session, turn=turn,
                think_s=rng.random() * 0.05, **fields,
            )  # fmt: skip
            schedule.append((due, made))
            index += 1
    return schedule
