"""What became of one request, step by step, from step records."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import Any

_MAX_EVENTS = 64


@dataclass(slots=True)
class Journey:
    """What happened to a request that the page's own chat has sent."""

    request_id: str
    executor: int | None = None
    """Index of the executor that it ran on last."""
    num_prefill_steps: int = 0
    num_decode_steps: int = 0
    num_computed_prompt_tokens: int = 0
    """Prompt tokens that steps computed, those of a recompute too."""
    events: list[tuple[float, str, int, int]] = field(default_factory=list)
    """(seconds of the server's clock, what, executor, step): joined, first, preempted, swapped_out, swapped_in, moved,
    lost, left."""
    version: int = 0
    _left: asyncio.Event = field(default_factory=asyncio.Event)

    def note(self, at_s: float, what: str, executor: int, step: int) -> None:
        """Add an event; of many the first ones and the end are kept."""
        self.version += 1
        if what == "joined" and self.executor not in (None, executor):
            what = "moved"
        if what in ("joined", "moved"):
            self.executor = executor
        if len(self.events) < _MAX_EVENTS or what == "left":
            self.events.append((round(at_s, 4), what, executor, step))
        if what == "left":
            self._left.set()

    def computed(self, at_s: float, executor: int, step: int, *, num_prompt_tokens: int, is_sampled: bool) -> None:
        """A step has computed tokens of it."""
        self.version += 1
        if num_prompt_tokens:
            self.num_prefill_steps += 1
            self.num_computed_prompt_tokens += num_prompt_tokens
        else:
            self.num_decode_steps += 1
        if is_sampled and not any(what == "first" for _, what, _, _ in self.events):
            self.note(at_s, "first", executor, step)

    async def wait_left(self, timeout_s: float) -> None:
        """Wait for the record of its end, which comes after its last token; for so long at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._left.wait()

    def fields(self) -> dict[str, Any]:
        """As the page gets it."""
        return {
            "type": "journey",
            "executor": self.executor,
            "prefill_steps": self.num_prefill_steps,
            "decode_steps": self.num_decode_steps,
            "computed_prompt_tokens": self.num_computed_prompt_tokens,
            "events": self.events,
        }
