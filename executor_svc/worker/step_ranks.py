"""The part of a step that the ranks of a replica do together: agree on it, and commit the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from cadenza_common.plan.plan import StepPlan
from executor_svc.batch.scheduled import Scheduled
from executor_svc.batch.slots import Slots
from executor_svc.batch.step_result import SampledTokens


class StepRanks(Protocol):
    """A rank's side of each step. Every rank calls these in the same order."""

    samples: bool
    """Whether this rank has whole logits, and samples."""

    def settled(self, num_steps: int) -> None:
        """Say before a plan how many steps of the session are settled here, where they are launched ahead.

        The other ranks settle as many, so that all schedule with the same knowledge of who has stopped.
        """
        ...

    def agreed(self, plan: StepPlan, slots: Slots, apply: Callable[[], Scheduled]) -> Scheduled:
        """Return the work of a plan once every rank has applied it, with the same slots as this one.

        Raises the error of `apply`, and InvalidPlan or RankError if another rank cannot run the plan: then none does.
        """
        ...

    def sampled(self, sample: Callable[[], SampledTokens]) -> SampledTokens:
        """Return what the rank that samples has sampled, after the model has run. Raises RankError if one failed."""
        ...

    def failed(self, error: Exception) -> None:
        """Let the others leave the step, which has failed here."""
        ...

    def clear(self) -> None:
        """Begin a session: every rank has free slots, and no step runs."""
        ...


class Alone:
    """Implements `StepRanks` for a model that is not divided."""

    samples = True

    def settled(self, num_steps: int) -> None:
        """As in `StepRanks`."""

    def agreed(self, plan: StepPlan, slots: Slots, apply: Callable[[], Scheduled]) -> Scheduled:
        """As in `StepRanks`."""
        return apply()

    def sampled(self, sample: Callable[[], SampledTokens]) -> SampledTokens:
        """As in `StepRanks`."""
        return sample()

    def failed(self, error: Exception) -> None:
        """As in `StepRanks`."""

    def clear(self) -> None:
        """As in `StepRanks`."""
