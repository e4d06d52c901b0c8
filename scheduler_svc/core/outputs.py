"""The core's outputs for the engine, in columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter

from cadenza_common.plan.result import LogprobColumns, TokenLogprobs
from scheduler_svc.core.sequences.sequence import Sequence, SequenceGroup
from scheduler_svc.core.types import Finish

_tenant_of = attrgetter("tenant")


def count_by_tenant(sequences: Iterable[Sequence]) -> Counter[str]:
    """The number of sequences of each tenant."""
    return Counter(map(_tenant_of, sequences))


@dataclass(frozen=True, slots=True)
class BeamOutput:
    """One result of a finished beam search; the best has sample_index 0."""

    group: SequenceGroup
    sample_index: int
    token_ids: tuple[int, ...]
    score: float
    """The ranking score: the sum of logprobs divided by the length penalty."""
    cumulative_logprob: float | None
    """None: the search found fewer results than requested, and this one is empty."""
    finish: Finish


@dataclass(slots=True)
class StepOutputs:
    """New tokens, each with its sequence; finishes, with or without a token; prompt logprobs, in order."""

    sequences: list[Sequence] = field(default_factory=list)
    """One for each new token; the tokens of a sequence follow each other."""
    token_ids: list[int] = field(default_factory=list)
    """One for each of `sequences`."""
    logprobs: dict[Sequence, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    """Logprobs of the new tokens, for sequences whose request wants them."""
    finishes: dict[Sequence, Finish] = field(default_factory=dict)
    prompt_logprobs: list[tuple[Sequence, LogprobColumns]] = field(default_factory=list)
    hypotheses: list[BeamOutput] = field(default_factory=list)
    """Results of finished beam searches, all of a search at once."""
    num_by_tenant: Counter[str] = field(default_factory=Counter)
    """Number of tokens by tenant, counted once for all; empty if the order does not share by tenant."""

    def __bool__(self) -> bool:
        return bool(self.sequences or self.finishes or self.prompt_logprobs or self.hypotheses)
