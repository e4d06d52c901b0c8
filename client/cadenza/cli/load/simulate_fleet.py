"""`cadenza simulate-fleet`: many schedulers behind a router, in a coarse model of up to thousands of executors."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cadenza.cli.extras import require_loadtest
from cadenza.cli.text import notice, number
from cadenza.errors import CadenzaError, OptionError

if TYPE_CHECKING:
    from cadenza.loadtest.reports.tables import NumberTable
    from cadenza.simulate.fleet.options import FleetCampaign, Wanted

HELP = """Simulate a fleet: schedulers with executors behind a router, for a day, in a coarse model of each executor.

\b
Examples:
  cadenza simulate-fleet --schedulers 62 --executors 16 --request-rate 500 --router round-robin,llm-d,one-queue
  cadenza simulate-fleet --schedulers 4 --traffic trace.jsonl --duration-s 3600 --price 20
  cadenza simulate-fleet --executors 8 --prefill 3 --kv-bytes 131072 --executor h200-llama-3.1-8b --request-rate 40

Traffic is a public trace (Azure's or BurstGPT's CSV, Mooncake's JSON lines) or is drawn from published statistics
(mooncake-conversation, azure-conversation, azure-code). Executors are those of `cadenza simulate`.
"""
EPILOG = "Exit codes: 0 simulated, 1 no request was served, 2 wrong options, 130 Ctrl-C."

Router = Annotated[
    str,
    typer.Option(
        metavar="NAME,NAME,…",
        help="round-robin, least-requests, power-of-two, session-hash, bounded-hash, prefix-hash, cache-aware, "
        "llm-d; one-queue: a single scheduler whose work takes no time. A run for each.",
    ),
]
Executor = Annotated[
    str | None, typer.Option(metavar="NAME|FILE", help="Profile of an executor.  [default: 8xh200-llama-3.1-405b-fp8]")
]
Traffic = Annotated[
    str | None, typer.Option(metavar="NAME|FILE", help="Statistics, or a trace.  [default: mooncake-conversation]")
]
Rate = Annotated[
    float | None, typer.Option(metavar="PER_S", help="Requests a second on average.  [default: the trace's own]")
]
Course = Annotated[
    str | None, typer.Option(metavar="day|flat", help="The rate's course.  [default: day; flat for a trace]")
]
FailureRate = Annotated[
    float | None,
    typer.Option(metavar="RATE", help="Failures per GPU and hour; 0: none.  [default: 1.97e-5, Llama 3's]"),
]
Prefill = Annotated[
    int, typer.Option(metavar="N", help="Executors that only compute prompts, the others only decode; 0: all both.")
]
KvBytes = Annotated[float | None, typer.Option(metavar="BYTES", help="KV of a token, which --prefill moves.")]
Slice = Annotated[
    float, typer.Option(metavar="SECONDS", help="Between two looks of routers and schedulers at their loads.")
]


def simulate_fleet(
    schedulers: Annotated[int, typer.Option(metavar="N", help="Schedulers behind the router.")] = 1,
    executors: Annotated[int, typer.Option(metavar="N", help="Executors of each scheduler.")] = 16,
    router: Router = "round-robin",
    executor: Executor = None,
    traffic: Traffic = None,
    request_rate: Rate = None,
    course: Course = None,
    duration_s: Annotated[float, typer.Option(metavar="SECONDS", help="Time of arrivals.")] = 86400.0,
    slo: Annotated[str, typer.Option(metavar="LIMITS", help="What a good request keeps.")] = "ttft=10,tpot=0.1",
    gpus: Annotated[int, typer.Option(metavar="N", help="GPUs of an executor, for its failures.")] = 8,
    failure_rate: FailureRate = None,
    repair_s: Annotated[float, typer.Option(metavar="SECONDS", help="Until a failed executor is back.")] = 600.0,
    price: Annotated[float, typer.Option(metavar="PRICE", help="Of an executor for an hour.")] = 0.0,
    prefill: Prefill = 0,
    kv_bytes: KvBytes = None,
    link_gb_per_s: Annotated[float, typer.Option(metavar="RATE", help="Link of each prefill executor.")] = 50.0,
    link_latency_ms: Annotated[float, typer.Option(metavar="MS", help="Latency of that link.")] = 0.0,
    max_num_seqs: Annotated[int | None, typer.Option(metavar="N", help="As of the executor.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(metavar="N", help="As of the executor.")] = None,
    slice_s: Slice = 0.25,
    seed: Annotated[int, typer.Option(metavar="N", help="Of traffic, failures and routers.")] = 0,
    output: Annotated[str | None, typer.Option(metavar="FILE", help="Write the results as JSON.")] = None,
) -> None:
    """Run the command; raises CadenzaError."""
    require_loadtest("the simulator", "loadtest,scheduler")
    from cadenza.cli.load.results import check_outputs
    from cadenza.simulate.fleet.failures import FAILURES_PER_GPU_HOUR
    from cadenza.simulate.fleet.options import DEFAULT_EXECUTOR, DEFAULT_TRAFFIC, FleetCampaign, FleetOptions

    limits = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
    options = FleetOptions(
        executor=executor or DEFAULT_EXECUTOR,
        schedulers=schedulers,
        executors=executors,
        routers=tuple(each.strip() for each in router.split(",")),
        traffic=traffic or DEFAULT_TRAFFIC,
        request_rate=request_rate,
        course=course,
        duration_s=duration_s,
        slo=slo,
        gpus=gpus,
        failure_rate=FAILURES_PER_GPU_HOUR if failure_rate is None else failure_rate,
        repair_s=repair_s,
        price=price,
        prefill=prefill,
        kv_bytes=kv_bytes,
        link_gb_per_s=link_gb_per_s,
        link_latency_s=link_latency_ms / 1000,
        slice_s=slice_s,
        seed=seed,
        limits=tuple((name, value) for name, value in limits.items() if value is not None),
    )
    paths = check_outputs(output=output, read=[executor, traffic])
    campaign = FleetCampaign(options)
    notice(campaign.traffic)
    runs: dict[str, dict[str, Any]] = {wanted: _run(campaign, wanted) for wanted in campaign.routers}
    if paths.output is not None:
        _write(paths.output, {"fleet": campaign.facts(), "runs": runs})
    _print({name: each["summary"] for name, each in runs.items()}, options.slo)


def _run(campaign: FleetCampaign, router: Wanted) -> dict[str, Any]:
    """Simulate the fleet behind this router; returns the run's summary and its hours."""
    began = time.perf_counter()
    result = campaign.run(router)
    found, took_s = result.summary(), time.perf_counter() - began
    notice(f"{router}: {found['requests']:,.0f} requests of {campaign.options.duration_s:,.0f} s in {took_s:.0f} s")
    hourly = [
        {"requests": due, "good": good}
        for due, good in zip(result.tally.hourly_due.tolist(), result.tally.hourly_good.tolist(), strict=True)
    ]
    return {"summary": found, "hourly": hourly}


def fleet_table(summaries: dict[str, dict[str, float]], slo: str) -> NumberTable:
    """A row for each router."""
    from cadenza.loadtest.reports.tables import NumberTable

    priced = any("cost_per_million_tokens" in each for each in summaries.values())
    rows = [
        [
            name,
            f"{found['good_share']:.2%}",
            number(found["goodput_per_s"]),
            *(number(found[f"ttft_p{mark}_ms"]) for mark in (50, 99)),
            *(number(found[f"itl_p{mark}_ms"]) for mark in (50, 99)),
            number(found["output_tokens_per_s"]),
            f"{found['cached_share']:.1%}",
            f"{found['busy_share']:.1%}",
            *(number(found[f"cost_per_million_{what}tokens"]) for what in (("", "good_") if priced else ())),
        ]
        for name, found in summaries.items()
    ]
    heads = [
        "router", "good", "good/s", "TTFT\np50 ms", "TTFT\np99 ms", "ITL\np50 ms", "ITL\np99 ms", "tokens/s", "cached",
        "busy", *(["price of\n1M tokens", "of 1M\ngood ones"] * priced),
    ]  # fmt: skip
    return NumberTable(heads, rows, title=f"Fleet; good: {slo}")


def _print(summaries: dict[str, dict[str, float]], slo: str) -> None:
    """Print the table; raises CadenzaError if no request was served."""
    from cadenza.cli.load.results import tables_console

    tables_console().print(fleet_table(summaries, slo))
    if not any(each["requests"] > each["refused"] + each["unfinished"] for each in summaries.values()):
        raise CadenzaError("no request was served")


def _write(path: Path, content: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise OptionError(f"--output {path}: {(error.strerror or str(error)).lower()}") from None
