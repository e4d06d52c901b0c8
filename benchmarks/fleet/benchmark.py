"""What do a thousand executors serve of a day's traffic, by the router in front of their schedulers?

Virtual time: 62 schedulers of 16 executors each (992), an executor being eight H200 with
Llama-3.1-405B, failures at Llama 3's rate. A row for each router, `one-queue` among them: one scheduler for all, whose
work takes no time. Nothing here depends on the machine but `cpu_s`, the processor time that a run takes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import replace

from benchmarks.common.benchmark import Benchmark, positive, positive_number, progress
from benchmarks.common.rows import BenchmarkError, Row, make_row
from benchmarks.fleet.options import ONE_QUEUE, FleetCampaign, FleetOptions
from benchmarks.fleet.routers import ROUTERS
from cadenza_loadtest.requests import LoadTestError

NAME = "fleet"
_PRICE = 28.0
"""Of eight H200 for an hour: 3.50 each, the specialty clouds' low end in May 2026
(https://www.mercatus-ai.com/blog/cloud-gpu-pricing)."""
_PLAIN = {
    "executor": (str, "profile of an executor, as of `cadenza simulate`, or its file"),
    "slo": (str, "what a good request keeps"),
    "gpus": (int, "of an executor, for its failures"),
    "failure_rate": (float, "per GPU and hour; 0: none; default Llama 3's"),
    "repair_s": (float, "until a failed executor is back"),
    "prefill": (int, "executors that only compute prompts, the others only decode; 0: all both"),
    "kv_bytes": (float, "KV of a token, which --prefill moves"),
    "link_gb_per_s": (float, "link of each prefill executor"),
}
"""Options that become fields of FleetOptions by their names, and have their defaults."""


def measure(options: FleetOptions) -> dict[str, float]:
    """The summary of one router's run."""
    try:
        campaign = FleetCampaign(options)
    except LoadTestError as error:
        raise BenchmarkError(str(error)) from None
    began = time.process_time()
    result = campaign.run(campaign.routers[0])
    found = result.summary()
    if found["unfinished"]:
        raise BenchmarkError(f"{found['unfinished']:.0f} requests did not end within an hour of the last arrival")
    busiest = max(range(len(result.tally.hourly_due)), key=result.tally.hourly_due.__getitem__)
    good, due = int(result.tally.hourly_good[busiest]), int(result.tally.hourly_due[busiest])
    return found | {"busiest_hour_good_share": good / due, "cpu_s": time.process_time() - began}


def _run(options: argparse.Namespace) -> Iterator[Row]:
    base = FleetOptions(
        schedulers=options.schedulers,
        executors=options.executors,
        traffic=options.traffic,
        course=options.course,
        duration_s=3600 * options.hours,
        price=options.price,
        slice_s=options.slice_s,
        **{name: getattr(options, name) for name in _PLAIN},
    )
    for rate in options.rates:
        for router in options.routers:
            repeats = []
            for seed in range(options.seed, options.seed + options.repeats):
                progress(f"{NAME}: {router}, {rate:g} requests/s, seed {seed}")
                repeats.append(measure(replace(base, routers=(router,), request_rate=rate, seed=seed)))
            params = {
                "router": router,
                "schedulers": base.schedulers,
                "executors": base.executors,
                "traffic": base.traffic.rpartition("/")[2],
                "course": base.course or "",
                "requests_per_s": rate,
                "hours": options.hours,
                "slice_s": base.slice_s,
                **{name: getattr(base, name) for name in _PLAIN},
            }
            yield make_row(NAME, seed=options.seed, params=params, repeats=repeats, other_cores=[])


def _describe(row: Row) -> str:
    found, params = row.medians, row.params
    good = f"{found['good_share']:.2%} good ({found['busiest_hour_good_share']:.2%} in the busiest hour)"
    times = f"TTFT p50 {found['ttft_p50_ms']:.0f}, p99 {found['ttft_p99_ms']:.0f} ms, "
    times += f"ITL p50 {found['itl_p50_ms']:.0f}, p99 {found['itl_p99_ms']:.0f} ms"
    return (
        f"{params['router']}, {params['requests_per_s']:g} requests/s for {params['hours']:g} h: {good}, {times}, "
        f"{found['cached_share']:.1%} cached, {found['cost_per_million_good_tokens']:.2f} a million good tokens; "
        f"{found['failures']:.0f} failures; took {found['cpu_s']:.0f} s of processor time"
    )


def _add_options(parser: argparse.ArgumentParser) -> None:
    choices = (*ROUTERS, ONE_QUEUE)
    parser.add_argument("--schedulers", type=positive, default=62, help="(default 62)")
    parser.add_argument("--executors", type=positive, default=16, help="of each scheduler (default 16)")
    parser.add_argument("--routers", nargs="+", choices=choices, default=choices, help="(default all)")
    parser.add_argument("--rates", type=positive_number, nargs="+", default=[500.0], help="requests/s (default 500)")
    parser.add_argument("--traffic", default="mooncake-conversation", help="statistics or the file of a trace")
    parser.add_argument("--course", choices=("day", "flat"), help="the rate's course (default as the command's)")
    parser.add_argument("--hours", type=positive_number, default=24.0, help="of traffic (default 24)")
    parser.add_argument("--price", type=float, default=_PRICE, help="of an executor for an hour (default 28)")
    for name, (kind, what) in _PLAIN.items():
        default = getattr(FleetOptions(), name)
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=kind, default=default, help=f"{what} (default {default})"
        )
    parser.add_argument("--slice-s", type=positive_number, default=1.0, help="time slice (default 1)")


BENCHMARK = Benchmark(NAME, "what do a thousand executors serve in a day, by router?", _add_options, _run, _describe)
