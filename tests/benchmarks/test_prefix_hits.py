"""Hits behind windows through both services, as the benchmark counts them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import prefix_hits
from benchmarks.common.burst_client import local_services
from benchmarks.common.rows import make_row
from benchmarks.prefix_hits import MODELS, Found, shortened, talk
from cadenza import AsyncClient

pytestmark = pytest.mark.slow
GROUPS = MODELS["gemma-3-12b"]


@pytest.fixture(scope="module")
def target() -> Iterator[str]:
    options = {"simulate": "instant", "max_model_len": 8192, "max_num_batched_tokens": 2048, "num_gpu_blocks": 6000}
    with local_services(Path("simulated"), simulate_kv_groups=GROUPS.windowed, **options) as services:
        yield services.target


@pytest.mark.parametrize("missing", [0, 1, 100])
def test_64_requests_with_a_shortened_prefix_all_hit(target: str, missing: int) -> None:
    async def measure() -> Found:
        async with AsyncClient(target) as client:
            assert (await client.server_info()).options["enable_prefix_caching"] == "true"
            return await shortened(client, GROUPS, missing, seed=missing)

    found = asyncio.run(measure())
    assert found.num_without == 0
    assert found.num_cached == 64 * ((GROUPS.prefix - missing) // 16 * 16)


def test_a_talk_finds_what_came_before(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_hits, "_NUM_TURNS", 6)

    async def measure() -> Found:
        async with AsyncClient(target) as client:
            return await talk(client, 2, seed=1)

    found = asyncio.run(measure())
    assert found.num_without == 0
    assert found.num_cached > 0.8 * found.num_prompt


def test_a_row_says_what_was_found() -> None:
    metrics = {"cached_share": 0.9, "requests_without": 1.0, "full_cached_share": 0.5, "full_requests_without": 3.0}
    params = {"model": "gpt-oss", "what": "talk", "num": 4, "pages": 6000}
    row = make_row("prefix_hits", seed=1, params=params, repeats=[metrics], other_cores=[])
    assert "4 talks: 90.0% of the prompt tokens cached, 1 requests find nothing" in prefix_hits.BENCHMARK.describe(row)
