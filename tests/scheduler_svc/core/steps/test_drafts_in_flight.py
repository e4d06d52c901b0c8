"""What the core makes of drafts that are refused, that arrive late, and that others wait beside."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from cadenza_common.plan_wire.writing import plan_to_wire
from scheduler_svc.core.memory.prefix_cache import PrefixCache, pack_blocks
from scheduler_svc.core.policies.policies import Policies
from scheduler_svc.core.types import SequenceState
from tests.helpers.core.core_bench import Bench

SIZES = {"max_drafts": 4, "num_slots": 32, "max_num_seqs": 32, "max_num_batched_tokens": 64}


def bench_of(policies: Policies | None = None, **changes: Any) -> Bench:
    return Bench(policies, **{**SIZES, **changes})


@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_the_prefix_cache_never_has_a_refused_token(block_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block that enters it is of a request's prompt and true output, also while plans with drafts are in flight,
    over preemptions and a broken session."""
    added: list[tuple[Any, bytes, int]] = []
    add = PrefixCache.add

    def recorded(self: PrefixCache, parent: Any, content: bytes, place: int) -> int:
        node = add(self, parent, content, place)
        added.append((parent, content, node))
        return node

    monkeypatch.setattr(PrefixCache, "add", recorded)
    bench = bench_of(Policies(prefix_caching=True), block_size=block_size, num_blocks=400 // block_size)
    for index in range(6):
        bench.add(f"r{index}", 5 + index, 40, seed=index)
    for _ in range(12):
        bench.step()
    bench.cut_session()
    bench.run()
    drafts = bench.lane.counts.drafts
    assert sum(drafts.drafted) - sum(drafts.accepted) > 20, "refused ones"
    known = set()
    for index in range(6):
        text = [*bench.specs[f"r{index}"].prompt_token_ids, *bench.known(f"r{index}")]
        assert bench.tokens[f"r{index}"] == text[5 + index :]
        blocks = pack_blocks(text, block_size)
        known |= {tuple(blocks[: end + 1]) for end in range(len(blocks))}
    chains: dict[int, tuple[bytes, ...]] = {}
    for parent, content, node in added:
        chains[node] = (*chains.get(parent, ()), content)
    assert len(added) > 300 // block_size / 2
    assert set(chains.values()) <= known


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_a_preempted_sequence_with_a_check_in_flight_takes_its_late_tokens(preemption: str) -> None:
    """It then has all confirmed tokens and, swapped out, the KV of all but one."""
    bench = bench_of(Policies(preemption=preemption), num_blocks=16, num_host_blocks=100)
    for index in range(5):
        bench.add(f"r{index}", 5, 60, seed=index)
    late: Counter[SequenceState] = Counter()
    while True:
        while len(bench.plans) < 4 and bench.plan() is not None:
            pass
        if not bench.plans:
            break
        away = {
            each: len(each.token_ids)
            for group in bench.core.groups.values()
            for each in group.sequences
            if each.state in (SequenceState.SWAPPED, SequenceState.WAITING)
        }
        bench.apply()
        for sequence, before in away.items():
            num_tokens = len(sequence.token_ids)
            if num_tokens > before + 1 and sequence.state is not SequenceState.FINISHED:
                late[sequence.state] += 1
            if not sequence.num_pending and sequence.state is SequenceState.SWAPPED:
                assert sequence.num_computed_tokens == num_tokens - 1
            if sequence.state is SequenceState.WAITING:
                assert sequence.num_computed_tokens == 0
    assert late[SequenceState.SWAPPED if preemption == "swap" else SequenceState.WAITING] > 0
    assert all(bench.tokens[f"r{index}"] == bench.known(f"r{index}") for index in range(5))


@pytest.mark.parametrize("num_sequences", [1, 60])
def test_a_decode_only_plan_with_drafts_is_a_few_bytes(num_sequences: int) -> None:
    """Whatever the batch size: two bytes more than one without drafts."""
    sizes = {}
    for most in (0, 4):
        bench = bench_of(
            max_drafts=most, num_blocks=4000, block_size=16, num_slots=400, max_num_seqs=400, max_num_batched_tokens=800
        )
        for index in range(num_sequences):
            bench.add(f"r{index}", 5, 100, seed=index)
        bench.step(depth=1)
        smallest = []
        for _ in range(6):
            plan = bench.plan()
            assert plan is not None
            assert plan.decode_ready
            assert plan.max_drafts == most
            if not plan.append_slots:
                smallest.append(plan_to_wire(plan, 1).ByteSize())
            bench.apply()
        sizes[most] = min(smallest)
    assert sizes[4] == sizes[0] + 2 <= 16


def test_a_newcomer_counts_as_drafting_once_it_decodes() -> None:
    """Else a source would seem to find drafts for fewer sequences than it does. One with a prompt of one token decodes
    at once: to executors it looks like the others."""
    bench = bench_of()
    for name in "abc":
        bench.add(name, 5, 40)
    bench.step(depth=1)
    bench.add("new", 5, 20)
    plan = bench.plan()
    assert plan is not None
    assert plan.admitted
    step = bench.lane.inflight[-1]
    assert (step.num_drafting, step.most_tokens) == (3, 3 + 5 + 4 * 3)
    bench.add("one token", 1, 20)
    plan = bench.plan()
    assert plan is not None
    assert (plan.admitted[0].slot in plan.scheduled_slots, bench.lane.inflight[-1].num_drafting) == (False, 5)


def test_newcomers_have_rows_before_drafts() -> None:
    """Three sequences decode with drafts in all rows that there are; a newcomer begins in the next plan."""
    bench = bench_of(max_num_seqs=15)
    for name in "abc":
        bench.add(name, 5, 40)
    bench.step(depth=1)
    full = bench.plan()
    assert full is not None
    assert full.max_drafts == 4
    bench.add("new", 5, 20)
    plan = bench.plan()
    assert plan is not None
    assert (len(plan.admitted), plan.scheduled_samples) == (1, [True])
    assert plan.max_drafts == (15 - 3 - 1) // 3


def test_measured_rates_and_counts_are_of_accepted_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = bench_of()
    for name in "ab":
        bench.add(name, 5, 40)
    observed: list[int] = []
    monkeypatch.setattr(bench.lane.rates, "observe", lambda num_tokens, *_: observed.append(num_tokens))
    bench.run()
    drafts = bench.lane.counts.drafts
    assert sum(drafts.accepted) < sum(drafts.drafted)
    assert bench.lane.counts.num_output_tokens == 80 == len(bench.tokens["a"]) + len(bench.tokens["b"])
    # Each token but a sequence's last is computed once, and so is its prompt.
    assert sum(observed) == 2 * (5 + 39)
