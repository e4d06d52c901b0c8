"""Agents whose contexts are more than the pool holds: what the benchmark serves, over both services."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from pathlib import Path

import pytest

from benchmarks import agents
from benchmarks.agents import Served, Trace, serve
from benchmarks.common.burst_client import local_services
from benchmarks.common.rows import make_row

TRACE = Trace(num_agents=4, num_calls=5, seed=1)
STATE_PAGES = 20


def served(num_host_pages: int) -> Served:
    """The trace on a simulated hybrid, whose pool holds half of what the agents need."""
    num_pages = TRACE.num_blocks(STATE_PAGES) // 2 + 2 * STATE_PAGES
    options = {
        "simulate": "instant", "simulate_vocab_size": 500, "simulate_kv_groups": "full:1",
        "simulate_state_pages": STATE_PAGES, "max_model_len": 4096, "max_num_seqs": 2, "num_gpu_blocks": num_pages,
        "num_cpu_blocks": num_host_pages,
    }  # fmt: skip
    with local_services(Path("simulated"), **options) as services:
        return asyncio.run(serve(services.target, TRACE, 500))


@pytest.mark.slow
def test_a_host_pool_finds_what_the_device_has_lost() -> None:
    without, with_host = served(0), served(2 * TRACE.num_blocks(STATE_PAGES))
    assert without.num_prompt == with_host.num_prompt
    assert len(without.first_s) == 4 * (5 - 1)
    assert without.num_on_host == 0 < with_host.num_on_host
    assert without.num_found < with_host.num_found


def test_each_agent_makes_its_calls_a_few_in_a_row() -> None:
    order = TRACE.order()
    assert Counter(order) == dict.fromkeys(range(4), 5)
    assert order == TRACE.order()
    changes = sum(first != second for first, second in itertools.pairwise(order))
    assert 6 <= changes < len(order) - 1


def test_a_row_says_what_a_host_pool_gave() -> None:
    metrics = {"found_share": 0.5, "on_host_share": 0.25, "ttft_p50_ms": 300.0, "ttft_p90_ms": 900.0}
    params = {"model": "a-model", "agents": 4, "calls": 5, "pool": 0.5, "blocks": 9, "host": True}
    text = agents.BENCHMARK.describe(make_row("agents", seed=1, params=params, repeats=[metrics], other_cores=[]))
    assert "4 agents, the pool holds 50%, with a host pool: found 50.0% of the prompts' tokens (25.0% on the" in text
