"""One run: an undisturbed part, the faults under load, and the check of what came."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cadenza import AsyncClient
from tests.chaos.checker import Violation, check
from tests.chaos.faults import FaultRunner
from tests.chaos.health import LIMIT_S, SLACK_S, HealthWatch
from tests.chaos.history import History
from tests.chaos.load import Load, undisturbed
from tests.chaos.requests import PROMPTS_OF_A_KIND, Body, catalogue
from tests.chaos.schedule import Fault
from tests.chaos.services import LIMITS, Services, running_services
from tests.chaos.stalls import figures, percentile
from tests.checkpoints import make_llama

NUM_CLIENTS = 20
_FREE_LIMIT_S = 60.0
_CALM_BEFORE_S = 1.0


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What a run is made of, besides its schedule."""

    seed: int
    executor: str
    """"simulated" or "cpu", a tiny model."""
    seconds: float
    """No fault begins later."""
    num_executors: int = 1
    num_clients: int = NUM_CLIENTS
    num_prompts: int = PROMPTS_OF_A_KIND
    """Of each kind of request."""
    slack_s: float = SLACK_S
    """How far health may be over its limit."""


@dataclass
class Report:
    """What a run found."""

    violations: list[str] = field(default_factory=list)
    num_faults: int = 0
    by_kind: dict[str, int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)


async def run_chaos(folder: Path, schedule: list[Fault], options: RunOptions) -> Report:
    """Run a schedule; folder: an empty one, for the history and all files."""
    model = make_llama(folder / "model", tokenizer=True, vocab_size=300, max_position_embeddings=1024)
    history = History(folder / "history.jsonl")
    history.write("run", options=asdict(options))
    for fault in schedule:
        history.write("scheduled", fault=fault.to_json())
    report = Report()

    def violated(text: str) -> None:
        report.violations.append(f"at {history.now():.1f} s: {text[:600]}")
        history.write("violation", text=text[:2000])

    try:
        async with running_services(
            folder, model, history, simulated=options.executor == "simulated", num_executors=options.num_executors,
            clock_jumps=any(fault.kind == "clock jump" for fault in schedule),
        ) as services:  # fmt: skip
            await _run(services, schedule, options, report, violated)
    finally:
        history.close()
    return report


async def _run(
    services: Services, schedule: list[Fault], options: RunOptions, report: Report, violated: Callable[[str], None]
) -> None:
    bodies = catalogue(options.seed, options.num_prompts, grammars=options.executor == "cpu")
    known = [place for place, body in enumerate(bodies) if not body.draws_seed]
    found = await undisturbed(services.target, [bodies[place] for place in known], options.num_clients)
    services.history.write("undisturbed", count=len(found))
    load = Load(lambda: services.client_link.address, bodies, services.history, violated)
    load.expected.update(zip(known, found, strict=True))
    watch = HealthWatch(services.target, services.truth, violated, slack_s=options.slack_s)
    watching = asyncio.create_task(watch.run())
    try:
        load.start(options.num_clients, options.seed)
        await asyncio.sleep(_CALM_BEFORE_S)
        began = time.monotonic()
        runner = FaultRunner(services, load, watch, services.history, violated)
        await runner.run(schedule, asyncio.get_running_loop().time() + options.seconds)
        await load.end()
        report.seconds = time.monotonic() - began
        await _check_free(services, violated)
        await _check_executors(services, violated)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    await _verify_drawn(services, load, bodies, options.num_clients)
    report.num_faults = sum(runner.happened.values())
    report.by_kind = dict(sorted(runner.happened.items()))
    report.counts = dict(sorted(load.counts.items()))
    report.figures = figures(runner.moments, services.marks, load.gaps, load.longest_gaps_s) | _health_figures(watch)


async def _check_free(services: Services, violated: Callable[[str], None]) -> None:
    """Once nothing runs any more, nothing is held."""
    async with AsyncClient(services.target) as client:
        try:
            async with asyncio.timeout(_FREE_LIMIT_S):
                while True:
                    load = (await client.server_info()).load
                    held = (load.num_running, load.num_waiting, load.num_swapped, load.num_used_device_blocks)
                    if not any(held):
                        return
                    await asyncio.sleep(0.2)
        except TimeoutError:
            violated(f"without a client (running, waiting, swapped, blocks) are {held}")


async def _check_executors(services: Services, violated: Callable[[str], None]) -> None:
    """Once nothing is wrong any more, each executor of the list takes requests, and no other."""
    expected = sorted(link.address for link in services.executor_links[: services.num_executors])
    async with AsyncClient(services.target) as client:
        try:
            async with asyncio.timeout(_FREE_LIMIT_S):
                while True:
                    found = (await client.server_info()).executors
                    ready = [each.target for each in found if each.connected and not each.draining and not each.refusal]
                    if sorted(ready) == expected and len(found) == len(expected):
                        return
                    await asyncio.sleep(0.2)
        except TimeoutError:
            violated(f"the executors are {found}, not {expected}")


async def _verify_drawn(services: Services, load: Load, bodies: list[Body], num_clients: int) -> None:
    """Hold each output whose seed the server drew against an undisturbed run with that seed."""
    outcomes = load.to_verify
    seeds = [outcome.content["seed"] for outcome in outcomes if outcome.content is not None]
    seeded = [bodies[outcome.body].with_seed(seed) for outcome, seed in zip(outcomes, seeds, strict=True)]
    for outcome, expected in zip(outcomes, await undisturbed(services.target, seeded, num_clients), strict=True):
        try:
            check(outcome, expected)
        except Violation as broken:
            load.expected[outcome.body] = expected
            load.fail(outcome, broken)


def _health_figures(watch: HealthWatch) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for word, lags in watch.lags_s.items():
        name = word.lower()
        result |= {
            f"health_{name}_changes": len(lags),
            f"health_{name}_p50_s": round(percentile(lags, 0.5), 3),
            f"health_{name}_max_s": round(max(lags, default=0.0), 3),
            f"health_{name}_over_{LIMIT_S:g}_s": sum(lag > LIMIT_S for lag in lags),
        }
    return result


def params(options: RunOptions, report: Report) -> dict[str, Any]:
    """What a row says about the run."""
    return {
        "executor": options.executor,
        "num_executors": options.num_executors,
        "num_clients": options.num_clients,
        "limits": LIMITS,
        "faults": report.by_kind,
    }
