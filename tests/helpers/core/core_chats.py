"""Requests of a rig of `core_model`, and their results."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from scheduler_svc.core.types import Finish, RequestSpec
from tests.helpers.core.deltas import SampleDelta


@dataclass(frozen=True)
class Chat:
    """A request, and what the user says after each answer: a turn's prompt is all that was said before it."""

    spec: RequestSpec
    says: tuple[tuple[int, ...], ...] = ()

    def turn(self, answer: list[int]) -> Chat:
        """The next one."""
        prompt = (*self.spec.prompt_token_ids, *answer, *self.says[0])
        return Chat(
            replace(self.spec, request_id=f"{self.spec.request_id}, on", prompt_token_ids=prompt), self.says[1:]
        )


@dataclass
class Told:
    """All that was reported of a sample."""

    token_ids: list[int] = field(default_factory=list)
    chosen_logprobs: list[float] = field(default_factory=list)
    logprobs: bytes = b""
    """Bits of every row: ranks, top ids, logprobs."""
    prompt_logprobs: bytes = b""
    """The same of the prompt, with indices."""
    cumulative_logprob: float | None = None
    finish: Finish | None = None

    def add(self, delta: SampleDelta) -> None:
        """Take what one delta brings."""
        assert self.finish is None, "outputs of a sample that has ended"
        self.token_ids += delta.token_ids
        for row in delta.logprobs:
            self.chosen_logprobs.append(row.logprob)
            self.logprobs += _bits((row.rank, *row.top_token_ids), (row.logprob, *row.top_logprobs))
        if (prompt := delta.prompt_logprobs) is not None:
            for at, (logprob, rank) in enumerate(zip(prompt.logprobs, prompt.ranks, strict=True)):
                top = slice(at * prompt.num_top, (at + 1) * prompt.num_top)
                self.prompt_logprobs += _bits(
                    (prompt.start + at, rank, *prompt.top_token_ids[top]), (logprob, *prompt.top_logprobs[top])
                )
        self.finish, self.cumulative_logprob = delta.finish, delta.cumulative_logprob


Outcome = dict[tuple[str, int], Told]
"""By request id and sample index."""


@dataclass(frozen=True)
class Setting:
    """Sizes, options of the scheduler, who comes when, and what must happen."""

    block_size: int = 16
    num_blocks: int = 600
    num_host_blocks: int = 0
    max_num_seqs: int = 24
    max_num_batched_tokens: int = 256
    depth: int = 2
    """Plans in flight."""
    arrivals: Literal["together", "shuffled", "scattered", "alone"] = "together"
    """All before the first step, in one order or another; now and then; each when the one before has ended."""
    loses_every: int = 0
    """The session with the executor breaks after so many steps, and its memory is gone; 0: never."""
    cuts_every: int = 0
    """The session breaks after so many steps, and the executor keeps its memory; 0: never."""
    max_drafts: int = 0
    """The most drafts of a sequence in one step."""
    max_loras: int = 0
    max_cpu_loras: int = 0
    aborts: bool = False
    """Others come that are aborted."""
    happens: frozenset[str] = frozenset()
    """Of: hits, host hits, drafts; recompute or swap, and whom: one, samples, beams."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of the scheduler service, those that rule the core."""


def _bits(integers: Iterable[int], numbers: Iterable[float]) -> bytes:
    return array("q", integers).tobytes() + array("d", numbers).tobytes()
