"""What happened to samples, in columns: what the core tells the engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.types import Finish, PromptLogprobs, SampleDelta, TokenLogprobs


@dataclass(slots=True)
class News:
    """New tokens, one of each sequence named; ends, with a token or without; prompt logprobs, in order."""

    sequences: list[Sequence] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    """One for each of `sequences`."""
    logprobs: dict[Sequence, TokenLogprobs] = field(default_factory=dict)
    """Of the new tokens of those that asked."""
    finishes: dict[Sequence, Finish] = field(default_factory=dict)
    prompt_logprobs: list[tuple[Sequence, PromptLogprobs]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.sequences or self.finishes or self.prompt_logprobs)

    def __iter__(self) -> Iterator[SampleDelta]:
        """The same sample by sample: prompt logprobs first, an end together with the last token."""
        for sequence, prompt_logprobs in self.prompt_logprobs:
            yield SampleDelta(sequence.group.key, sequence.sample_index, prompt_logprobs=prompt_logprobs)
        for sequence, token_id in zip(self.sequences, self.token_ids, strict=True):
            logprobs = self.logprobs.get(sequence)
            yield SampleDelta(
                key=sequence.group.key,
                sample_index=sequence.sample_index,
                token_ids=(token_id,),
                logprobs=(logprobs,) if logprobs is not None else (),
                finish=self.finishes.get(sequence),
            )
        told = set(self.sequences)
        for sequence, finish in self.finishes.items():
            if sequence not in told:
                yield SampleDelta(sequence.group.key, sequence.sample_index, finish=finish)
