"""A tenant beside one that floods, in virtual time: the bound of docs/tenants.md."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from cadenza_loadtest.measures.columns import RequestColumns
from cadenza_loadtest.requests import RequestShape
from cadenza_simulator.executor_profiles import ExecutorProfile
from cadenza_simulator.run import Simulation
from cadenza_simulator.traffic import Traffic
from scheduler_svc.config import SchedulerConfig
from tests.helpers.tenants import write_tenants

PROFILE = ExecutorProfile.model_validate(
    {
        "name": "memory-bound",
        "costs": {"step_us": 25_000, "token_us": 50, "hidden_tokens": 256},
        "limits": {
            "num_blocks": 2000, "max_num_seqs": 64, "max_num_batched_tokens": 256, "max_model_len": 1700,
            "max_inflight_plans": 2,
        },
    }
)  # fmt: skip
RATE, COUNT = 8.0, 240
Arrivals = list[tuple[float, str, int]]


def steady(seed: int) -> Arrivals:
    """Poisson arrivals of short prompts."""
    rng, at = random.Random(seed), 0.0
    return [(at := at + rng.expovariate(RATE), "steady", 200) for _ in range(COUNT)]


def flood(seconds: float) -> Arrivals:
    """Long prompts, several times what the executor can compute."""
    return [(number / 40, "flood", 1500) for number in range(int(40 * seconds))]


def run(arrivals: Arrivals, tenants: str, **options: str) -> RequestColumns:
    schedule = [
        (at, RequestShape(index, num_prompt, 48, tenant=name))
        for index, (at, name, num_prompt) in enumerate(sorted(arrivals))
    ]
    config = SchedulerConfig(max_queued_requests=256, tenants=tenants, **options)
    return Simulation([PROFILE], config, Traffic(iter(schedule))).run().requests


def ttft_p99(requests: RequestColumns) -> float:
    mine = requests.tenant == "steady"
    assert requests.ok[mine].all(), "the flood leaves places in the queue"
    return float(np.percentile((requests.first_s - requests.due_s)[mine], 99))


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_a_flood_does_not_move_the_ttft_of_another_tenant(tmp_path: Path, seed: int) -> None:
    tenants = write_tenants(tmp_path / "tenants.toml", {"steady": {"weight": 8}, "flood": {}})
    own = steady(seed)
    alone = run(own, tenants)
    both = run(own + flood(own[-1][0]), tenants)
    assert ttft_p99(both) <= 1.5 * ttft_p99(alone)
    floods = both.tenant == "flood"
    assert (~both.ok[floods]).sum() > 500, "it was refused again and again: its part of the queue was full"
    assert both.num_output_tokens[floods & both.ok].sum() > 5000, "it gets what the other one leaves"


def test_first_come_first_served_would_let_it_wait(tmp_path: Path) -> None:
    """Shows that the test above proves something."""
    tenants = write_tenants(tmp_path / "tenants.toml", {"steady": {}, "flood": {}})
    own = steady(1)[:60]
    arrivals = own + flood(own[-1][0])
    requests = run(arrivals, tenants, order="fcfs")
    mine = (requests.tenant == "steady") & requests.ok
    assert np.percentile((requests.first_s - requests.due_s)[mine], 50) > 1.0
