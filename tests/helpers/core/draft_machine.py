"""A machine whose decode steps have a stated cost and drafts a stated acceptance, under a control of their number."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from scheduler_svc.core.lanes.draft_control import DraftControl
from scheduler_svc.core.lanes.drafted_step import DraftedStep, ScopeDrafts

StepNs = Callable[[int, int], float]
"""Nanoseconds of a step by its number of decodes and of drafts."""


def rows_cost(step_us: float, row_us: float) -> StepNs:
    """So much for a step and so much for each of its rows, drafts included."""
    return lambda num_decodes, num_drafts: 1000 * (step_us + row_us * (num_decodes + num_drafts))


@dataclass
class DraftMachine:
    """Runs decode-only steps with plans in flight; its figures are those of all steps that it has run."""

    control: DraftControl
    step_ns: StepNs
    acceptance: float
    """Probability that a draft is the target's token."""
    found: float = 1.0
    """Probability that the source has drafts for a sequence in a step, and then as many as are allowed."""
    drafting: float = 1.0
    """Share of the sequences that may have drafts."""
    noise: float = 0.02
    """Relative standard deviation of a step's time."""
    depth: int = 2
    scope: int = 0
    """Of all sequences."""
    prompt_every: int = 0
    """Each so many steps one computes a prompt too, and takes ten times as long; 0: none does."""
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    choices: list[int] = field(default_factory=list)
    steps: list[DraftedStep] = field(default_factory=list)

    def run(self, sizes: Iterable[int]) -> DraftMachine:
        """One plan for each number of decoding sequences; the results of the last plans are awaited."""
        planned: deque[tuple[int, int]] = deque()
        for size in sizes:
            if len(planned) == self.depth:
                self._finish(*planned.popleft())
            self.choices.append(self.control.choose(size, {self.scope: max(1, round(size * self.drafting))}))
            planned.append((size, self.choices[-1]))
        while planned:
            self._finish(*planned.popleft())
        return self

    def _finish(self, num_decodes: int, most: int) -> None:
        num_drafting = max(1, round(num_decodes * self.drafting))
        drafted_at, accepted_at = [0] * most, [0] * most
        for _ in range(num_drafting if most and self.found else 0):
            if self.rng.random() >= self.found:
                continue
            right = True
            for index in range(most):
                drafted_at[index] += 1
                right = right and self.rng.random() < self.acceptance
                accepted_at[index] += right
        num_drafts, num_accepted = sum(drafted_at), sum(accepted_at)
        ns = self.step_ns(num_decodes, num_drafts) * max(0.5, self.rng.gauss(1.0, self.noise))
        has_prompt = self.prompt_every > 0 and len(self.steps) % self.prompt_every == 0
        ns *= 10 if has_prompt else 1
        step = DraftedStep(
            num_decodes=num_decodes, num_drafting=num_drafting if most else 0, max_drafts=most, num_drafts=num_drafts,
            num_accepted=num_accepted, step_ns=int(ns), num_other_tokens=500 if has_prompt else 0,
            by_scope={self.scope: ScopeDrafts(num_drafting, accepted_at, drafted_at)} if most else {},
        )  # fmt: skip
        self.steps.append(step)
        observe(self.control, step)

    def goodput(self, since: int = 0, *, of_decodes: bool = False) -> float:
        """Tokens a second, from a step on; of_decodes: in steps that compute no prompt."""
        steps = [step for step in self.steps[since:] if not (of_decodes and step.num_other_tokens)]
        num_tokens = sum(step.num_decodes + step.num_accepted for step in steps)
        return num_tokens / sum(step.step_ns for step in steps) * 1e9


def observe(control: DraftControl, step: DraftedStep) -> None:
    """Tell a control of a result as the core does."""
    if step.num_drafts or not control.counts_only(step.num_decodes, step.num_drafting):
        control.observe(step)


def ideal(step_ns: StepNs, acceptance: float, num_decodes: int, most: int) -> tuple[int, float]:
    """The best number of drafts, 0 to most, and its tokens a second, of a machine that always finds drafts."""
    best = []
    for k in range(most + 1):
        tokens = num_decodes * sum(acceptance**index for index in range(k + 1))
        best.append((tokens / step_ns(num_decodes, num_decodes * k) * 1e9, k))
    goodput, k = max(best)
    return k, goodput
