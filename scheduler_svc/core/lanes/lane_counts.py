"""Counts of one executor since it was added. They never decrease, whatever becomes of its process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from scheduler_svc.core.memory.prefix_cache import PrefixCounts


@dataclass(slots=True)
class DraftCounts:
    """Counts of drafts by position: the first draft of a sequence in a step has position 0."""

    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    most: int = 0
    """The most drafts of a sequence in the newest step with a result and a decode batch: no count, and not added."""

    def add(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Add a step's counts, or another executor's; both of one length."""
        missing = len(drafted) - len(self.drafted)
        self.drafted += [0] * missing
        self.accepted += [0] * missing
        for index, (num_drafted, num_accepted) in enumerate(zip(drafted, accepted, strict=True)):
            self.drafted[index] += num_drafted
            self.accepted[index] += num_accepted

    def copied(self) -> DraftCounts:
        """The same counts, which do not change any more."""
        return DraftCounts(self.drafted.copy(), self.accepted.copy(), self.most)

    @property
    def num_drafts(self) -> int:
        """Drafts at all positions."""
        return sum(self.drafted)

    @property
    def num_accepted(self) -> int:
        """Accepted drafts."""
        return sum(self.accepted)


@dataclass(slots=True)
class LaneCounts:
    """Counts of steps, tokens and prefix hits."""

    last_step_id: int = 0
    """The newest step that was planned, or that the executor is known to have completed."""
    num_steps: int = 0
    """Number of steps planned."""
    num_output_tokens: int = 0
    num_preemptions: int = 0
    num_swap_preemptions: int = 0
    """Those that moved the KV to the host pool; the others discarded it."""
    prefixes: PrefixCounts = field(default_factory=PrefixCounts)
    drafts: DraftCounts = field(default_factory=DraftCounts)

    def copied(self) -> LaneCounts:
        """The same counts, which do not change any more."""
        return replace(self, prefixes=replace(self.prefixes), drafts=self.drafts.copied())

    def add(self, other: LaneCounts) -> None:
        """Add another executor's counts, except its last step: step ids are counted for each executor."""
        self.num_steps += other.num_steps
        self.num_output_tokens += other.num_output_tokens
        self.num_preemptions += other.num_preemptions
        self.num_swap_preemptions += other.num_swap_preemptions
        self.prefixes.num_queried += other.prefixes.num_queried
        self.prefixes.num_hits += other.prefixes.num_hits
        self.prefixes.num_host_hits += other.prefixes.num_host_hits
        self.drafts.add(other.drafts.drafted, other.drafts.accepted)
