"""The core's outputs for the engine, in columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter, itemgetter

from cadenza_common.plan.result import LogprobColumns, TokenLogprobs
from scheduler_svc.core.sequences.sequence import Sequence, SequenceGroup
from scheduler_svc.core.types import Finish, RequestKey

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


@dataclass(frozen=True, slots=True)
class SampleDelta:
    """New tokens of one sample, its finish, or both."""

    key: RequestKey
    sample_index: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: Finish | None = None
    prompt_logprobs: LogprobColumns | None = None
    """Logprobs of the request's prompt; reported in order, each row once."""
    cumulative_logprob: float | None = None
    """Sum of a beam's logprobs, reported with its finish."""


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

    def __iter__(self) -> Iterator[SampleDelta]:
        """The same outputs per sample: prompt logprobs first; a finish comes with the last token."""
        for sequence, prompt_logprobs in self.prompt_logprobs:
            yield SampleDelta(sequence.group.key, sequence.sample_index, prompt_logprobs=prompt_logprobs)
        for sequence, tokens in groupby(zip(self.sequences, self.token_ids, strict=True), itemgetter(0)):
            yield SampleDelta(
                key=sequence.group.key,
                sample_index=sequence.sample_index,
                token_ids=tuple(token_id for _, token_id in tokens),
                logprobs=self.logprobs.get(sequence, ()),
                finish=self.finishes.get(sequence),
            )
        with_tokens = set(self.sequences)
        for sequence, finish in self.finishes.items():
            if sequence not in with_tokens:
                yield SampleDelta(sequence.group.key, sequence.sample_index, finish=finish)
        for output in self.hypotheses:
            yield SampleDelta(
                key=output.group.key,
                sample_index=output.sample_index,
                token_ids=output.token_ids,
                finish=output.finish,
                cumulative_logprob=output.cumulative_logprob,
            )
