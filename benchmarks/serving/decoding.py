"""Decoding of one batch through both services: tokens per second while all its requests decode, and what drafts did."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.common.burst_client import local_services
from benchmarks.common.rows import BenchmarkError
from benchmarks.common.workload import Request
from cadenza import AsyncClient, LocalServices, SamplingParams


@dataclass(frozen=True, slots=True)
class Decoded:
    """One batch."""

    tokens: list[list[int]]
    """Of each request."""
    tokens_per_s: float
    """From the last request's first token to the first request's last one: all are decoding."""
    wall_s: float
    """From the first request sent to the last token of all."""
    tokens_per_step: float
    """Of a sequence, by the executor's counts."""
    drafted: list[int]
    """Drafts by position."""
    accepted: list[int]
    arrivals: list[list[tuple[float, int]]]
    """Of each request: when its client got tokens, by `perf_counter`, and how many."""

    @property
    def acceptance(self) -> list[float]:
        """Share of the drafts at each position that was accepted."""
        return [accepted / drafted for accepted, drafted in zip(self.accepted, self.drafted, strict=True) if drafted]


@dataclass(frozen=True, slots=True)
class Served:
    """Both services, and where their metrics are."""

    services: LocalServices
    metrics_url: str

    def decode(
        self,
        requests: Sequence[Request],
        speculation: int | None = None,
        *,
        ignore_eos: bool = True,
        cache_salt: str | None = None,
        temperature: float = 0.0,
        seed: int | None = None,
    ) -> Decoded:
        """Send all requests at once.

        speculation: the most drafts of each. cache_salt: requests with another one share no texts. seed: of the first
        request; each further one has the next. Raises BenchmarkError.
        """
        before = self._drafts()
        start = time.perf_counter()
        call = _Call(speculation, ignore_eos, cache_salt, temperature, seed)
        streams = asyncio.run(_streams(self.services.target, requests, call))
        wall_s = time.perf_counter() - start
        drafted, accepted = (
            [now - then for then, now in zip(old + [0] * (len(new) - len(old)), new, strict=True)]
            for old, new in zip(before, self._drafts(), strict=True)
        )
        # A sequence's step gives one token, and one more for each accepted draft; the first token is its prompt's.
        decoded = sum(len(stream.tokens) - 1 for stream in streams)
        steps = decoded - sum(accepted)
        return Decoded(
            tokens=[stream.tokens for stream in streams],
            tokens_per_s=_steady_rate(streams),
            wall_s=wall_s,
            tokens_per_step=decoded / steps if steps else 1.0,
            drafted=drafted,
            accepted=accepted,
            arrivals=[stream.arrivals for stream in streams],
        )

    def _drafts(self) -> tuple[list[int], list[int]]:
        """Drafts and accepted drafts since the start, by position."""
        with urllib.request.urlopen(self.metrics_url, timeout=10) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
        return _by_position(families, "cadenza_lane_drafts"), _by_position(families, "cadenza_lane_accepted_drafts")


@contextlib.contextmanager
def served(model: Path, **options: Any) -> Iterator[Served]:
    """Both services, as `local_services`, with metrics."""
    port = _free_ports()
    with local_services(model, metrics_port=port, **options) as services:
        yield Served(services, f"http://127.0.0.1:{port}/metrics")


@dataclass(slots=True)
class _Stream:
    arrivals: list[tuple[float, int]]
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class _Call:
    speculation: int | None
    ignore_eos: bool
    cache_salt: str | None
    temperature: float
    seed: int | None


async def _streams(target: str, requests: Sequence[Request], call: _Call) -> list[_Stream]:
    async with AsyncClient(target) as client:
        await client.model_info()
        return await asyncio.gather(*(_stream(client, index, each, call) for index, each in enumerate(requests)))


async def _stream(client: AsyncClient, index: int, request: Request, call: _Call) -> _Stream:
    seed = None if call.seed is None else call.seed + index
    params = SamplingParams(
        temperature=call.temperature, seed=seed, max_tokens=request.output_len, ignore_eos=call.ignore_eos,
        detokenize=False,
    )  # fmt: skip
    prompt: dict[str, Any] = {"prompt_token_ids": request.prompt}
    if call.cache_salt is not None:
        prompt["cache_salt"] = call.cache_salt
    stream = _Stream([], [])
    async for delta in client.stream(prompt, params, speculation=call.speculation):
        new = [token for sample in delta.outputs for token in sample.token_ids]
        if new:
            stream.arrivals.append((time.perf_counter(), len(new)))
            stream.tokens += new
    if call.ignore_eos and len(stream.tokens) != request.output_len:
        raise BenchmarkError(f"request {request.request_id}: {len(stream.tokens)} tokens, not {request.output_len}")
    return stream


def _by_position(families: list[Any], name: str) -> list[int]:
    found = {
        int(sample.labels["position"]): int(sample.value)
        for family in families
        if family.name == name
        for sample in family.samples
        if sample.name.endswith("_total")
    }
    return [found.get(index, 0) for index in range(max(found, default=-1) + 1)]


def _free_ports() -> int:
    """The first of two ports in a row that are free."""
    while True:
        with socket.socket() as one, socket.socket() as two:
            one.bind(("127.0.0.1", 0))
            port = int(one.getsockname()[1])
            with contextlib.suppress(OSError):
                two.bind(("127.0.0.1", port + 1))
                return port


def _steady_rate(streams: Sequence[_Stream]) -> float:
    start = max(stream.arrivals[0][0] for stream in streams)
    end = min(stream.arrivals[-1][0] for stream in streams)
    count = sum(new for stream in streams for at, new in stream.arrivals if start < at <= end)
    return count / (end - start) if end > start else 0.0
