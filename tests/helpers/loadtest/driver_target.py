"""A target and prompts in this process, for tests of the load test's driver."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cadenza.errors import UnavailableError
from cadenza_loadtest.driving.live import RequestInFlight
from cadenza_loadtest.driving.target import ServerFacts
from cadenza_loadtest.requests import LoadTestError, RequestShape


@dataclass
class FakePrompts:
    """Prompts of the shape's index; knows how many it has made, and can refuse one."""

    made: list[int] = field(default_factory=list)
    refused: int = -1

    def token_ids(self, shape: RequestShape, history: Sequence[int] = ()) -> list[int]:
        if shape.index == self.refused:
            raise LoadTestError(f"request {shape.index}: no such prompt")
        self.made.append(shape.index)
        return [*history, *[shape.index] * shape.num_prompt_tokens]

    def text(self, shape: RequestShape, history_text: str = "") -> str:
        return f"{history_text}[{shape.prompt_text or shape.index}]"


@dataclass
class FakeTarget:
    """Each request takes `takes_s` (or until `going` is set), then gives all its tokens in one message."""

    takes_s: float = 0.0
    errors: dict[int, str] = field(default_factory=dict)
    at_once: frozenset[int] = frozenset()
    """Requests that wait for nothing."""
    reports_output: bool = True
    going: asyncio.Event = field(default_factory=asyncio.Event)
    prompts: dict[int, list[int] | str] = field(default_factory=dict)
    started: list[int] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    most_tasks: int = 0

    def __post_init__(self) -> None:
        self.going.set()

    async def run(self, shape: RequestShape, prompt: list[int] | str, live: RequestInFlight) -> None:
        live.sent_s = time.perf_counter()
        self.prompts[shape.index] = prompt
        self.started.append(shape.index)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        self.most_tasks = max(self.most_tasks, len(asyncio.all_tasks()))
        try:
            if self.takes_s:
                await asyncio.sleep(self.takes_s)
            if shape.index not in self.at_once:
                await self.going.wait()
        except asyncio.CancelledError:
            self.aborted.append(shape.index)
            raise
        finally:
            self.running -= 1
        if shape.index in self.errors:
            live.failed(self.errors[shape.index])
            return
        live.tokens(time.perf_counter(), shape.num_output_tokens * shape.num_samples)
        if live.keep_output and self.reports_output:
            live.output_ids = [1000 + shape.index] * shape.num_output_tokens
            live.output_text = [f"<{shape.index}", ">"]


class CampaignTarget(FakeTarget):
    """A whole target, which is gone before a run, or hangs in it, where a test says so."""

    facts = ServerFacts("openai", "completions", "http://fake", "m")

    num_runs = 0
    gone_before: int | None = None
    hangs_in: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.hanging = asyncio.Event()

    async def start(self) -> ServerFacts:
        return self.facts

    def new_run(self) -> None:
        if self.num_runs == self.gone_before:
            raise UnavailableError("the server has gone")
        if self.num_runs == self.hangs_in:
            self.going.clear()
        self.num_runs += 1

    async def run(self, *request: Any) -> None:
        if not self.going.is_set():
            self.hanging.set()
        await super().run(*request)

    async def close(self) -> None:
        pass


def shape(index: int, **fields) -> RequestShape:
    return RequestShape(index, **{"num_prompt_tokens": 2, "num_output_tokens": 3, **fields})


def at(*due_s: float) -> list[tuple[float, RequestShape]]:
    return [(each, shape(index)) for index, each in enumerate(due_s)]
