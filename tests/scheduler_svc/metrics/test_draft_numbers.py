"""What is measured of steps with drafts, against counts and times that the tests keep themselves."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace

import pytest
from prometheus_client.samples import Sample

from cadenza_common.plan.plan import StepPlan
from cadenza_common.plan.result import StepResult, StepTimings
from scheduler_svc.convert import generation
from scheduler_svc.core.lanes.lane import Lane
from scheduler_svc.core.lanes.lane_counts import DraftCounts
from scheduler_svc.core.policies.policies import Policies
from scheduler_svc.core.sequences.sequence import Sequence
from scheduler_svc.core.types import RequestSpec
from scheduler_svc.engine.step_watch import StepRecorder, StepRecordWatch
from scheduler_svc.metrics.draft_gain import DraftGain
from scheduler_svc.metrics.lane_numbers import LaneNumbers
from scheduler_svc.plan_loop.gauges import Load
from scheduler_svc.plan_loop.ports import EngineRequest, StepRecord
from tests.helpers.core.core_bench import Bench
from tests.helpers.core.core_executor import CoreExecutor
from tests.helpers.core.core_sampling import core_sampling
from tests.helpers.core.known import VOCAB_SIZE
from tests.helpers.scheduler.fake_clock import TimedExecutor
from tests.helpers.scheduler.scraped import samples
from tests.helpers.scheduler.virtual_engine import MODEL, STEP_S, World, started


@dataclass
class Seen:
    """Counts and times of a run, by sequence."""

    results: list[StepResult] = field(default_factory=list)
    times: defaultdict[Sequence, list[float]] = field(default_factory=lambda: defaultdict(list))
    """When each token came."""
    decodes: list[int] = field(default_factory=list)
    """Tokens of each sequence that decoded in a step."""
    records: list[StepRecord] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.times.values()))


def measured(bench: Bench) -> tuple[LaneNumbers, Seen]:
    """Run to the end; two plans are in flight."""
    numbers, seen, stalled = LaneNumbers("e:0", bench.lane.counts), Seen(), {}
    recorder = StepRecorder(Load, 0)
    recorder.watches.add(watch := StepRecordWatch(set(), include_block_tables=False))
    apply = bench.core.apply_result

    def apply_and_measure(executor_id, result, now):
        step, outputs = apply(executor_id, result, now)
        numbers.on_applied(step, result, outputs, now, stalled)
        record = recorder.record_later(bench.lane, step, result, outputs, now)
        assert record is not None
        record()
        seen.results.append(result)
        for sequence in outputs.sequences:
            seen.times[sequence].append(now)
        outside = {chunk.sequence for chunk in step.chunks}
        counts = Counter(outputs.sequences)
        seen.decodes += [count for sequence, count in counts.items() if sequence not in outside]
        return step, outputs

    bench.core.apply_result = apply_and_measure  # type: ignore[method-assign]
    while bench.core.groups:
        while len(bench.plans) < 2 and bench.plan() is not None:
            step = bench.lane.inflight[-1]
            stalled.update(dict.fromkeys(step.preempted, numbers.last_result_at))
        bench.apply()
    seen.records = list(watch._records)
    return numbers, seen


def busy_bench(**limits: int) -> Bench:
    """Requests with and without drafts, with stops, that end at different times."""
    bench = Bench(max_drafts=3, num_slots=16, max_num_seqs=16, max_num_batched_tokens=32, **limits)
    for index in range(5):
        bench.add(f"r{index}", 4 + 3 * index, 12 + 9 * index, max_drafts=(None, 0, 2)[index % 3], seed=index)
    return bench


@pytest.mark.parametrize("num_blocks", [64, 30])
def test_tokens_of_one_step_share_its_time(num_blocks: int) -> None:
    """With 30 blocks sequences are preempted, and wait while others decode."""
    numbers, seen = measured(bench := busy_bench(num_blocks=num_blocks))
    assert (bench.lane.counts.num_preemptions > 0) == (num_blocks == 30)
    assert seen.num_tokens == bench.lane.counts.num_output_tokens == sum(map(len, bench.tokens.values()))
    assert max(seen.decodes) == 4, "a step accepted all drafts"
    between = [times[-1] - times[0] for times in seen.times.values()]
    assert numbers.token_s.num_values == seen.num_tokens - len(between)
    assert numbers.token_s.total == pytest.approx(sum(between))
    assert (numbers.num_decodes, numbers.num_decoded_tokens) == (len(seen.decodes), sum(seen.decodes))
    if num_blocks == 64:
        # A step takes 1 s here: a share of it is 1/2 s, 1/3 s or 1/4 s.
        counts = Counter(seen.decodes)
        shares = numbers.token_s.cumulative((0.2, 0.3, 0.4, 0.75, 1.0))
        sums = [0, 4 * counts[4], 3 * counts[3], 2 * counts[2], counts[1]]
        assert shares == [sum(sums[: place + 1]) for place in range(5)] + [seen.num_tokens - len(between)]


def test_intervals_without_drafts_are_whole() -> None:
    bench = Bench(num_slots=16, max_num_seqs=16)
    for index in range(3):
        bench.add(f"r{index}", 4, 9)
    numbers, seen = measured(bench)
    assert numbers.token_s.total == numbers.token_s.num_values == seen.num_tokens - 3
    assert numbers.num_decodes == numbers.num_decoded_tokens == seen.num_tokens - 3
    assert numbers.draft_gain.seconds == numbers.draft_gain.seconds_without == 0


def test_drafts_are_counted_by_position_and_in_computed_tokens() -> None:
    bench = busy_bench()
    numbers, seen = measured(bench)
    drafts, accepted = (
        [sum(count > position for result in seen.results for count in getattr(result, name)) for position in range(3)]
        for name in ("num_drafts", "num_accepted")
    )
    counts = numbers.counts.drafts
    assert (counts.drafted, counts.accepted) == (drafts, accepted)
    assert (counts.num_drafts, counts.num_accepted) == (sum(drafts), sum(accepted))
    assert drafts[0] > drafts[2] > accepted[2] > 0
    assert numbers.step_tokens.total == bench.num_computed_tokens + sum(drafts)
    copied = numbers.copied()
    copied.add(numbers)
    assert copied.counts.drafts.drafted == [2 * count for count in drafts]
    assert copied.num_decodes == 2 * numbers.num_decodes
    assert numbers.counts.drafts.drafted == drafts, "a copy is no part of it"


@pytest.mark.parametrize("num_blocks", [64, 30])
def test_records_of_drafted_steps_say_what_each_sequence_did(num_blocks: int) -> None:
    _, seen = measured(busy_bench(num_blocks=num_blocks))
    lengths: dict[int, int] = {}
    prompts: dict[int, int] = {}
    for record in seen.records:
        prompts |= {joined[0]: joined[3] for joined in record.joined}
        columns = [record.num_tokens, record.context_lens, record.num_sampled]
        drafts = record.num_drafts or [0] * len(record.sequence_ids)
        accepted = record.num_accepted_drafts or [0] * len(record.sequence_ids)
        for sequence, num_tokens, context_len, num_sampled, num_drafts, num_accepted in zip(
            record.sequence_ids, *columns, drafts, accepted, strict=True
        ):
            length = lengths.setdefault(sequence, prompts[sequence])
            if context_len + num_tokens < length:
                assert (num_sampled, num_drafts) == (0, 0), "a part of a prompt"
            else:
                assert context_len + num_tokens == length, "the last token, which has no KV yet"
                assert num_accepted <= num_drafts <= 3
                assert num_sampled <= 1 + num_accepted
            lengths[sequence] += num_sampled
        assert sum(drafts) == sum(record.result.num_drafts)
        assert sum(accepted) == sum(record.result.num_accepted)
    assert sum(lengths.values()) - sum(prompts.values()) == seen.num_tokens
    assert sum(map(sum, (record.num_drafts for record in seen.records))) > 0


def test_the_gain_compares_equal_numbers_of_sequences() -> None:
    gain = DraftGain()
    for _ in range(3):
        gain.observe(2, 0, 2, 0.010)
    gain.observe(2, 6, 5, 0.012)
    assert gain.seconds == 0, "three steps without drafts are too few"
    gain.observe(2, 0, 2, 0.010)
    gain.observe(4, 9, 9, 0.020)
    assert gain.seconds == 0, "as many sequences have not been measured without drafts"
    gain.observe(2, 6, 5, 0.012)
    gain.observe(2, 6, 3, 0.013)
    assert gain.seconds == pytest.approx(0.025)
    assert gain.seconds_without == pytest.approx(8 / 2 * 0.010)
    for _ in range(400):
        gain.observe(2, 0, 2, 0.020)
    before = gain.copied()
    gain.observe(2, 6, 4, 0.015)
    assert gain.seconds_without - before.seconds_without == pytest.approx(2 * 0.020), "the latest ones count"
    before.add(gain)
    assert before.seconds == pytest.approx(0.025 + 0.025 + 0.015)


class DraftingExecutor(TimedExecutor):
    """Simulated, and drafts; each step takes `step_s`."""

    inner: CoreExecutor | None = None

    def result_of(self, plan: StepPlan, lane: Lane) -> StepResult:
        self.inner = self.inner or CoreExecutor(lane.spec, VOCAB_SIZE)
        return replace(self.inner.run(plan), timings=StepTimings(total_ns=round(self.step_s * 1e9), moves_ns=0))


DRAFTING = replace(MODEL, vocab_size=VOCAB_SIZE, num_slots=32, max_num_seqs=32, max_drafts=4, fingerprint=b"drafts")


def submit(world: World, request_id: str, max_tokens: int, max_drafts: int | None = None) -> None:
    spec = RequestSpec(
        request_id, (5, 6, 7), core_sampling(temperature=1.0, seed=len(request_id)), max_tokens, max_drafts=max_drafts
    )
    world.engine.submit(EngineRequest(spec))


def value(found: dict[str, list[Sample]], name: str) -> float:
    return sum(sample.value for sample in found[name])


async def test_a_scrape_and_the_server_info_have_the_same_counts() -> None:
    async with started(model=DRAFTING, policies=Policies(), make_executor=DraftingExecutor) as world:
        for index in range(3):
            submit(world, f"a{index}", 60, max_drafts=0)
        await world.clock.advance(100 * STEP_S)
        empty = samples(world.engine)
        for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
            assert value(empty, f"vllm:spec_decode_{name}_total") == 0
        for index in range(3):
            submit(world, f"b{index}", 60)
        await world.clock.advance(100 * STEP_S)
        assert not world.core.groups
        counts, found = world.core.counts.drafts, samples(world.engine)
        assert counts.num_drafts > counts.num_accepted > 0
        load, (state,) = generation.load(world.engine.load(), num_client_tasks=0), world.engine.executor_infos()
        for each in (load, generation.executor_info(state)):
            assert (each.num_drafts, each.num_accepted_drafts) == (counts.num_drafts, counts.num_accepted)
        assert generation.executor_info(state).max_drafts == value(found, "cadenza_lane_max_drafts") == 4
        assert value(found, "vllm:spec_decode_num_drafts_total") == counts.drafted[0]
        assert value(found, "vllm:spec_decode_num_draft_tokens_total") == counts.num_drafts
        assert value(found, "vllm:spec_decode_num_accepted_tokens_total") == counts.num_accepted
        by_position = {
            sample.labels["position"]: sample.value
            for sample in found["vllm:spec_decode_num_accepted_tokens_per_pos_total"]
        }
        assert by_position == {str(position): count for position, count in enumerate(counts.accepted)}
        positions = [sample.labels for sample in found["cadenza_lane_drafts_total"]]
        assert positions == [{"executor": "virtual", "position": str(position)} for position in range(4)]
        assert value(found, "cadenza_lane_accepted_drafts_total") == counts.num_accepted
        per_step = value(found, "cadenza_lane_decoded_tokens_total") / value(found, "cadenza_lane_decodes_total")
        assert 1 < per_step < 5
        # Both kinds of steps take as long here, and those without gave each sequence one token.
        took = value(found, "cadenza_lane_drafting_seconds_total")
        without = value(found, "cadenza_lane_without_drafts_seconds_total")
        assert took >= 5 * STEP_S
        assert 1.2 < without / took < 5


async def test_an_executor_that_drafts_no_more_allows_none() -> None:
    async with started(model=DRAFTING, make_executor=DraftingExecutor) as world:
        submit(world, "a", 30)
        await world.clock.advance(100 * STEP_S)
        assert world.engine.executor_infos()[0].max_drafts == 4
        submit(world, "b", 30, max_drafts=0)
        await world.clock.advance(100 * STEP_S)
        assert world.engine.executor_infos()[0].max_drafts == 0


def test_counts_of_a_shorter_executor_are_added() -> None:
    counts = DraftCounts([5, 3, 1], [4, 2, 0])
    counts.add([2], [1])
    assert (counts.drafted, counts.accepted) == ([7, 3, 1], [5, 2, 0])
    assert DraftCounts().num_drafts == 0
