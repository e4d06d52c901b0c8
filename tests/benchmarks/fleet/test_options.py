"""The options of a fleet: the same seed, traffic in words, and wrong options."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fleet.options import FleetCampaign, FleetOptions
from cadenza.errors import OptionError
from cadenza_loadtest.requests import LoadTestError

TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:15:{second:02d}.5,{100 + 17 * second},{10 + second}\n" for second in range(30)
)


@pytest.fixture
def small(tmp_path: Path) -> FleetOptions:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return FleetOptions(executor="a100-80gb-opt-13b", traffic=str(path), duration_s=30, slice_s=0.5)


def test_a_run_for_each_router_repeats_with_its_seed(small: FleetOptions) -> None:
    options = replace(
        small, schedulers=2, executors=2, request_rate=4, price=3, failure_rate=0.5, slo="ttft=1,tpot=0.1",
        routers=("round-robin", "llm-d", "one-queue"),
    )  # fmt: skip

    def runs(seed: int) -> list[dict[str, float]]:
        campaign = FleetCampaign(replace(options, seed=seed))
        return [campaign.run(router).summary() for router in campaign.routers]

    campaign = FleetCampaign(options)
    assert campaign.traffic.startswith("Traffic: 4")
    assert campaign.facts()["executors_per_scheduler"] == 2
    found = runs(0)
    assert found[0]["requests"] > 90
    assert "cost_per_million_tokens" in found[0]
    assert runs(0) == found != runs(5)


def test_drawn_traffic_says_so() -> None:
    campaign = FleetCampaign(FleetOptions(executors=2, request_rate=0.5, duration_s=20, course="flat"))
    assert "Traffic drawn from published statistics of mooncake-conversation, no trace itself" in campaign.traffic


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"routers": ("luck",)}, "--router luck: must be one of round-robin, least-requests"),
        ({"schedulers": 0}, "--schedulers 0: must be 1 or more"),
        (
            {"schedulers": 2000, "executors": 16},
            "--executors 16: with --schedulers 2000 there are over 16,384 executors",
        ),
        ({"duration_s": 0.0}, "--duration-s 0: must be a number over 0"),
        ({"slice_s": -1.0}, "--slice-s -1: must be a number over 0"),
        ({"request_rate": 0.0}, "--request-rate 0: must be a number over 0"),
        ({"course": "year"}, "--course year: must be one of day, flat"),
        ({"slo": "itl=1"}, "--slo itl=1: itl is not simulated; there are ttft and tpot"),
        ({"slo": "ttft=fast"}, "--slo ttft=fast: ttft must be a number of seconds over 0"),
        ({"failure_rate": -1.0}, "--failure-rate -1: must be 0 or more"),
        ({"gpus": 0}, "--gpus 0: must be 1 or more"),
        ({"seed": -1}, "--seed -1: must be 0 or more"),
        ({"price": -2.0}, "--price -2: must be 0 or more"),
        ({"prefill": 16}, "--prefill 16: must be from 1 to --executors less one"),
        ({"prefill": 2}, "--kv-bytes: is needed with --prefill"),
        ({"prefill": 2, "kv_bytes": 9.0, "schedulers": 2}, "--prefill 2: goes with one scheduler"),
        ({"prefill": 2, "kv_bytes": 0.0}, "--kv-bytes 0: must be a number over 0"),
        ({"limits": (("max_num_seqs", 4096),)}, "max_num_batched_tokens (2048) must be at least max_num_seqs (4096)"),
        ({"traffic": "nothing"}, "--traffic nothing: must be one of mooncake-conversation"),
        ({"traffic": "/nowhere.csv"}, "--traffic /nowhere.csv: no such file or directory"),
        ({"executor": "unknown"}, "--executor unknown: neither a file nor a known profile"),
    ],
)
def test_wrong_options_are_named(small: FleetOptions, changed: dict[str, Any], problem: str) -> None:
    with pytest.raises((LoadTestError, OptionError)) as caught:
        FleetCampaign(replace(small, **changed)).daily  # noqa: B018
    assert problem in str(caught.value)


def test_a_rate_is_needed_without_a_trace() -> None:
    with pytest.raises(LoadTestError, match="--request-rate: is needed, as no trace is given that has one"):
        FleetCampaign(FleetOptions())
