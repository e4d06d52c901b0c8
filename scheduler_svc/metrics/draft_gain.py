"""What drafts gain, from measured times: those of steps with drafts, and of steps without for as many tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

_DECAY = 0.95
"""Weight of earlier steps in the mean of steps without drafts: about the last 20 count, since contexts grow."""
_LEAST_STEPS = 4
"""Steps without drafts from which their mean is used."""


class _PlainSteps:
    """Steps without drafts of one number of sequences."""

    __slots__ = ("num_steps", "num_tokens", "seconds")

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_tokens = 0.0
        """Decayed, as `seconds`."""
        self.seconds = 0.0


@dataclass(slots=True)
class DraftGain:
    """Compares steps of the decode batch with drafts to steps without, at the same number of sequences.

    Only steps that compute no prompt tokens: those say nothing about what decodes cost. Steps with drafts count only
    where at least four steps without, of as many sequences, came before them: nothing is assumed about others.
    """

    seconds: float = 0.0
    """Time of the compared steps with drafts, without block moves."""
    seconds_without: float = 0.0
    """Time that steps without drafts take for the tokens of the compared ones, by the mean of the latest of them."""
    _means: dict[int, _PlainSteps] = field(default_factory=dict)
    """By number of sequences: at most one for each up to max_num_seqs."""

    def observe(self, num_sequences: int, num_drafts: int, num_tokens: int, seconds: float) -> None:
        """Add a step that decoded and did nothing else; `num_tokens`: what its sequences got, `seconds`: its time."""
        mean = self._means.get(num_sequences)
        if num_drafts:
            if mean is not None and mean.num_steps >= _LEAST_STEPS and mean.num_tokens:
                self.seconds += seconds
                self.seconds_without += num_tokens * mean.seconds / mean.num_tokens
            return
        if mean is None:
            mean = self._means[num_sequences] = _PlainSteps()
        mean.num_steps += 1
        mean.num_tokens = mean.num_tokens * _DECAY + num_tokens
        mean.seconds = mean.seconds * _DECAY + seconds

    def copied(self) -> DraftGain:
        """The same sums, which do not change any more."""
        return DraftGain(self.seconds, self.seconds_without)

    def add(self, other: DraftGain) -> None:
        """Add the sums of another lane of the same executor."""
        self.seconds += other.seconds
        self.seconds_without += other.seconds_without
