"""The core's outputs per sample, as tests read them; the engine reads them in columns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from cadenza_common.plan.result import LogprobColumns, TokenLogprobs
from scheduler_svc.core.outputs import StepOutputs
from scheduler_svc.core.types import Finish, RequestKey


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


def deltas(outputs: StepOutputs) -> Iterator[SampleDelta]:
    """The outputs of a step per sample: prompt logprobs first; a finish comes with the last token."""
    for sequence, prompt_logprobs in outputs.prompt_logprobs:
        yield SampleDelta(sequence.group.key, sequence.sample_index, prompt_logprobs=prompt_logprobs)
    for sequence, tokens in groupby(zip(outputs.sequences, outputs.token_ids, strict=True), itemgetter(0)):
        yield SampleDelta(
            key=sequence.group.key,
            sample_index=sequence.sample_index,
            token_ids=tuple(token_id for _, token_id in tokens),
            logprobs=outputs.logprobs.get(sequence, ()),
            finish=outputs.finishes.get(sequence),
        )
    with_tokens = set(outputs.sequences)
    for sequence, finish in outputs.finishes.items():
        if sequence not in with_tokens:
            yield SampleDelta(sequence.group.key, sequence.sample_index, finish=finish)
    for output in outputs.hypotheses:
        yield SampleDelta(
            key=output.group.key,
            sample_index=output.sample_index,
            token_ids=output.token_ids,
            finish=output.finish,
            cumulative_logprob=output.cumulative_logprob,
        )
