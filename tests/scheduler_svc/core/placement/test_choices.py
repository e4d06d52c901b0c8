"""What placement keeps between two placements is what each lane shows now, and its choice is the best of all lanes.

Requests that are admitted together are those that would be admitted one by one.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field
from typing import ClassVar

import pytest

from scheduler_svc.core.lanes.lane import Lane
from scheduler_svc.core.placement.lookups import first_waiting
from scheduler_svc.core.policies.placement import Candidate, ExpectedTime, NeededTokens, expected_s
from scheduler_svc.core.policies.policies import Policies
from scheduler_svc.core.sequences.sequence import Sequence, SequenceGroup
from scheduler_svc.core.steps import admission
from tests.helpers.core.fleet_bench import FleetBench, spec
from tests.helpers.marks import short_and_long

SPECS = (
    spec(),
    spec(block_size=8, num_blocks=40, num_slots=6, max_num_seqs=3),
    spec(num_blocks=48, num_host_blocks=16, max_num_batched_tokens=24),
    spec(max_model_len=60),
)
PREFIXES = ([7, *range(16)], [8, *range(9)], [9] * 5)


@dataclass(slots=True)
class Watched:
    """ExpectedTime, each of whose choices is compared with a look at all lanes."""

    rebalances: ClassVar[bool] = True
    policy: ExpectedTime = field(default_factory=ExpectedTime)
    bench: FleetBench | None = None
    num_choices: int = 0
    num_hits: int = 0
    num_partial: int = 0
    """Choices among some of the open lanes only."""

    def choose(self, group: SequenceGroup, candidates: Ids[Candidate], needed: NeededTokens, now: float) -> Candidate:
        assert self.bench is not None
        first = first_waiting(group)
        num_open = 0
        for lane in self.bench.core.lanes.values():
            if lane.is_open and not lane.draining:
                num_open += 1
                found = 0 if first is None else lane.blocks.num_cached_tokens(first)
                assert needed.hits.get(lane.executor_id, 0) == found
                self.num_hits += found > 0
        longest = {group.length_limit(each.lane.spec.max_model_len)[0] for each in candidates}
        assert len(longest) == 1, "its tokens must not depend on where it runs"
        self.num_partial += len(candidates) < num_open
        fresh = [Candidate(each.lane, each.num_queued, each.num_queued_tokens) for each in candidates]
        most = min(each.num_sequences for each in fresh) + self.policy.max_excess
        rated = [
            (
                expected_s(each, needed.num_tokens - needed.hits.get(each.lane.executor_id, 0), now),
                each.num_sequences,
                each.lane.executor_id,
            )
            for each in fresh
            if each.num_sequences <= most
        ]
        chosen = self.policy.choose(group, candidates, needed, now)
        assert chosen.lane.executor_id == min(rated)[2]
        self.num_choices += 1
        return chosen


@pytest.mark.slow
@pytest.mark.parametrize("seed", short_and_long(range(2), [0]))
def test_each_choice_is_that_of_a_look_at_all_lanes(seed: int) -> None:
    rng, policy = random.Random(seed), Watched()
    bench = policy.bench = FleetBench(*SPECS, *SPECS[:2], policies=Policies(prefix_caching=True, placement=policy))
    lost: list[int] = []
    for index in range(60):
        tail = [rng.randrange(50) for _ in range(rng.randrange(1, 12))]
        max_tokens = rng.choice([3, 9, 20, None])
        bench.add(f"r{index}", [*rng.choice(PREFIXES), *tail], max_tokens, n=rng.choice([1, 1, 1, 2]))
        if index % 17 == 5:
            bench.core.drain_executor(index % 5, True, bench.now)
        if index % 17 == 11:
            bench.core.drain_executor((index - 6) % 5, False, bench.now)
        if index % 40 == 20:
            lost.append(rng.choice([each for each, rig in bench.rigs.items() if rig.is_open]))
            bench.lose(lost[-1])
        if index % 40 == 30:
            bench.return_(lost.pop())
        if rng.random() < 0.6:
            bench.step()
    bench.run()
    assert policy.num_choices >= 60
    assert policy.num_hits > 50
    assert policy.num_partial > 10


def test_a_lane_is_looked_up_only_where_the_first_block_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = FleetBench(*[spec()] * 4)
    bench.add("warm", [*PREFIXES[0], 1])
    bench.run()
    (home,) = bench.ran_on["warm"]
    looked_up = []
    for lane in bench.core.lanes.values():
        look_up, executor_id = lane.blocks.look_up, lane.executor_id
        monkeypatch.setattr(
            lane.blocks, "look_up", lambda *given, of=look_up, at=executor_id: looked_up.append(at) or of(*given)
        )
    bench.add("again", [*PREFIXES[0], 2])
    bench.run()
    assert set(looked_up) == {home}


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("tick", [0.01, 0.3])
def test_requests_are_admitted_together_as_one_by_one(tick: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lanes are full most of the time; with the longer tick the head of the queue is overdue."""
    together = []
    admit_new = admission.admit_new

    def watched(requests: object, lane: Lane, *rest: object) -> None:
        before = len(lane.running)
        admit_new(requests, lane, *rest)  # type: ignore[arg-type]
        together.append(len(lane.running) - before)

    def admitted() -> tuple[dict[str, list[int]], float]:
        rng = random.Random(5)
        bench = FleetBench(*[spec(max_num_batched_tokens=64)] * 2, spec(max_num_seqs=3), tick=tick)
        bench.add("stranded", [1] * 4, None)
        for index in range(60):
            bench.add(f"r{index}", [*rng.choice(PREFIXES), index % 50], rng.choice([2, 5, 9]))
            if rng.random() < 0.3:
                bench.step()
        bench.run()
        return bench.ran_on, bench.now

    monkeypatch.setattr(admission, "admit_new", watched)
    found = admitted()
    monkeypatch.setattr(admission, "admit_new", lambda *given: None)
    assert found == admitted()
    assert max(together) >= 2
    assert sum(together) >= 50


def test_who_was_asked_is_not_asked_again_for_a_takeover(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request waits for a busy lane. An idle one looks at it in each plan, by what its cache had at first."""
    bench = FleetBench(*[spec(max_num_seqs=1, num_slots=2)] * 2)
    for index in range(4):
        bench.add(f"r{index}", [*PREFIXES[0], index], 30 if index % 2 else 3)
    bench.plan(0)
    looked_up: list[Sequence] = []
    for lane in bench.core.lanes.values():
        of = lane.blocks.num_cached_tokens
        monkeypatch.setattr(
            lane.blocks, "num_cached_tokens", lambda sequence, of=of: looked_up.append(sequence) or of(sequence)
        )
    bench.run()
    assert not looked_up
