"""The load for the schedulers under test, the same for all: a case, its prompts, and the record of its timed steps.

Standard library only, because a peer runs it in its own interpreter.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field

from benchmarks.common.rows import percentile

BLOCK_SIZE = 16  # tokens
JOINER_TOKENS = 64
TOKEN = 7
"""The token that every sequence gets in every step."""
EOS = 2
PREFILL_BUDGET = 65_536
"""Tokens per step; large, so that setting up is quick."""
WARM_UP_STEPS = 50
"""Untimed steps with churn: at 5% all initial sequences have left by then, and caches are full."""
_IDS = list(range(300, 8000))  # past special tokens, within the smallest usual vocabularies


@dataclass(frozen=True, slots=True)
class Case:
    """The number and length of running sequences, and the changes in each step."""

    running: int
    churn: float = 0.0
    """Share of the sequences that end with EOS in each step; as many join, with prompts of JOINER_TOKENS."""
    prefix_cache: bool = False
    context_len: int = 1000
    """Mean tokens of a sequence when the timed steps begin; with churn: of the initial sequences."""

    @property
    def num_changing(self) -> int:
        """Number of sequences that join, and that leave, in each step."""
        return max(1, round(self.churn * self.running)) if self.churn else 0

    def longest(self, num_steps: int) -> int:
        """A number of tokens that no sequence reaches within this number of timed steps."""
        return max(self.context_len, JOINER_TOKENS) + BLOCK_SIZE + num_steps + WARM_UP_STEPS + 16

    def num_blocks(self, num_steps: int) -> int:
        """KV blocks: enough for the running sequences, and with churn not many more, so that cached blocks are
        evicted."""
        # With churn a sequence lives for about 1 / churn steps, and none grows by more than this.
        most = self.longest(num_steps) if not self.churn else self.context_len + 3 * BLOCK_SIZE + int(1 / self.churn)
        return (self.running + self.num_changing + 1) * (most // BLOCK_SIZE + 2)

    def prompts(self, seed: int) -> list[tuple[int, ...]]:
        """Prompts of the initial sequences: random, with lengths spread over a block, so that 1 in 16 needs one each
        step."""
        rng = random.Random(seed)
        shortest = max(1, self.context_len - BLOCK_SIZE // 2)
        return [tuple(rng.choices(_IDS, k=shortest + index % BLOCK_SIZE)) for index in range(self.running)]

    def joiner_prompts(self, seed: int) -> Iterator[tuple[int, ...]]:
        """Prompts of the sequences that join, one after the other: random, without shared prefixes."""
        rng = random.Random(seed + 1)
        while True:
            yield tuple(rng.choices(_IDS, k=JOINER_TOKENS))


def leavers(step: int, num_slots: int, count: int) -> range:
    """Indices of the sequences that end with a step, among those that got a token; each in turn."""
    first = step * count % max(1, num_slots - count)
    return range(first, min(first + count, num_slots))


@dataclass(slots=True)
class StepTimes:
    """One entry per timed step, times in nanoseconds."""

    plan_ns: list[int] = field(default_factory=list)
    apply_ns: list[int] = field(default_factory=list)
    convert_ns: list[int] = field(default_factory=list)
    """From the plan to the bytes to send."""
    add_ns: list[int] = field(default_factory=list)
    """Adding the new requests, before the step is planned."""
    parse_ns: list[int] = field(default_factory=list)
    """From the received bytes to the result, where a system has such bytes."""
    plan_bytes: list[int] = field(default_factory=list)

    def add(
        self, added: int, planned: int, converted: int, applied: int, num_bytes: int, *, parsed: int | None = None
    ) -> None:
        """Record one step."""
        if parsed is not None:
            self.parse_ns.append(parsed)
        self.add_ns.append(added)
        self.plan_ns.append(planned)
        self.convert_ns.append(converted)
        self.apply_ns.append(applied)
        self.plan_bytes.append(num_bytes)

    def metrics(self) -> dict[str, float]:
        """Medians over the steps unless the name states otherwise; a step is planning and applying only.

        `us_whole` is all of it: adding requests, planning, both conversions, applying.
        """
        steps = [(plan + apply) / 1e3 for plan, apply in zip(self.plan_ns, self.apply_ns, strict=True)]
        parts = [self.add_ns, self.plan_ns, self.convert_ns, self.apply_ns, *([self.parse_ns] if self.parse_ns else [])]
        whole = [sum(each) / 1e3 for each in zip(*parts, strict=True)]
        parsed = {"us_parse": statistics.median(self.parse_ns) / 1e3} if self.parse_ns else {}
        return {
            "us_per_step": statistics.median(steps),
            "plan_bytes": statistics.median(self.plan_bytes),
            "us_mean": statistics.fmean(steps),
            "us_p99": percentile(steps, 99),
            "us_plan": statistics.median(self.plan_ns) / 1e3,
            "us_apply": statistics.median(self.apply_ns) / 1e3,
            "us_convert": statistics.median(self.convert_ns) / 1e3,
            "us_add": statistics.median(self.add_ns) / 1e3,
            **parsed,
            "us_whole": statistics.median(whole),
            "us_whole_p99": percentile(whole, 99),
            "plan_bytes_mean": statistics.fmean(self.plan_bytes),
        }
