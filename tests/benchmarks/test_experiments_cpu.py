"""Experiments 3, 6 and 7 on the real services: the evaluation of step records, and small runs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.common.checkpoints import DEMO_MODEL
from benchmarks.common.rows import BenchmarkError
from benchmarks.experiments import memory, preemption, preemption_runs, served, served_ratio, served_ratio_runs
from benchmarks.experiments.experiment import Experiment, ExperimentResult, RunSettings
from benchmarks.experiments.memory_runs import held, in_blocks
from benchmarks.experiments.page import draw
from benchmarks.experiments.preemption_runs import num_moved_blocks
from benchmarks.experiments.served import Server
from benchmarks.experiments.simulated import fixed
from cadenza import LocalServices
from cadenza.v1.admin_pb2 import SequenceJoined, SequenceLeft, StepLoad, StepRecord
from tests.helpers.marks import short_and_long

COSTS = {"step_us": 200, "token_us": 5, "moved_block_us": 20}
"""Costs of the executor in place of the CPU's: only the times are synthetic."""


def step(
    number: int,
    computed: dict[int, tuple[int, int]],
    *,
    joined: dict[int, int] | None = None,
    left: dict[int, int] | None = None,
    waiting: int = 1,
    **more: list[int],
) -> StepRecord:
    """The record of a step that took 1 ms. `computed`: context and tokens by sequence; `joined`: prompt lengths;
    `left`: output lengths."""
    left = left or {}
    stored = sum(context + count for each, (context, count) in computed.items() if each not in left)
    return StepRecord(
        step_id=number,
        applied_ns=number * 1_000_000,
        sequence_ids=list(computed),
        context_lens=[context for context, _ in computed.values()],
        num_tokens=[count for _, count in computed.values()],
        joined=[SequenceJoined(sequence_id=each, num_prompt_tokens=count) for each, count in (joined or {}).items()],
        left=[SequenceLeft(sequence_id=each, num_output_tokens=count) for each, count in left.items()],
        load=StepLoad(num_waiting=waiting, num_stored_tokens=stored),
        **more,
    )


def two_requests() -> list[StepRecord]:
    """1 has a prompt of 6 tokens and 3 of output, 2 one of 3 and 2, and ends in step 2; 1 computes on alone."""
    return [
        step(1, {1: (0, 6), 2: (0, 3)}, joined={1: 6, 2: 3}),
        step(2, {1: (6, 1), 2: (3, 1)}, left={2: 2}),
        step(3, {1: (7, 1)}, left={1: 3}),
    ]


# --- from records to shares -------------------------------------------------------------------------------------------


def test_what_blocks_hold_is_as_counted_by_hand() -> None:
    """Only step 3 counts: a quarter of both has ended. It leaves 8 tokens in two blocks of 5, all that will be."""
    found = held(two_requests(), 20, in_blocks(5), output_tokens_per_s=7.0)
    assert found.shares == pytest.approx((8 / 20, 0, 2 / 20, 10 / 20))
    assert (found.num_sequences, found.output_tokens_per_s) == (1, 7.0)


def test_what_is_reserved_to_the_maximum_is_as_counted_by_hand() -> None:
    """Nothing counts until the first request has ended; then steps 2 and 3 would, if no request waited before."""
    records = two_requests()
    records.insert(0, step(0, {9: (0, 2)}, joined={9: 2}, left={9: 1}))
    found = held(records, 32, lambda most: 12, output_tokens_per_s=1.0)
    # Steps of 1 ms each: 9, 11 and 8 tokens stored; 12, 12 and 8 that will be; 2, 2 and 1 ranges of 12.
    assert found.shares == pytest.approx((28 / 96, 4 / 96, 28 / 96, 36 / 96))
    assert found.num_sequences == pytest.approx(5 / 3)


def test_each_step_counts_for_as_long_as_it_takes() -> None:
    records = two_requests()
    records.insert(0, step(0, {9: (0, 2)}, joined={9: 2}, left={9: 1}))
    records[3].applied_ns += 7_000_000
    found = held(records, 32, lambda most: 12, output_tokens_per_s=1.0)
    assert found.num_sequences == pytest.approx((2 + 2 + 8 * 1) / 10)


def test_a_preempted_sequence_holds_nothing_and_returns_with_slots_for_all_its_tokens() -> None:
    records = [
        step(1, {1: (0, 2)}, joined={1: 2}, left={1: 1}),
        step(2, {2: (0, 6), 3: (0, 3)}, joined={2: 6, 3: 3}),
        step(3, {3: (3, 1)}, preempted_ids=[2]),
        step(4, {2: (0, 2)}, joined={2: 6}, left={3: 2}),
        step(5, {2: (2, 5)}, left={2: 2}),
    ]
    records[3].load.num_stored_tokens = 2
    found = held(records, 20, in_blocks(4), output_tokens_per_s=1.0)
    # Steps 2 to 5 hold 3, 1, 3 and 2 blocks of 4; sequence 2 needs 7 tokens in all, 3 needs 4.
    assert found.shares[3] == pytest.approx((80 - 4 * (3 + 1 + 3 + 2)) / 80)
    assert found.shares[0] == pytest.approx((9 + 4 + 6 + 7) / 80)


def test_no_request_waits_or_the_counts_disagree() -> None:
    calm = two_requests()
    for record in calm:
        record.load.num_waiting = 0
    with pytest.raises(BenchmarkError, match="no request waited"):
        held(calm, 20, in_blocks(5), output_tokens_per_s=1.0)
    wrong = two_requests()
    wrong[1].load.num_stored_tokens = 8
    with pytest.raises(BenchmarkError, match="step 2: the scheduler counts 8 tokens with KV, its records 7"):
        held(wrong, 20, in_blocks(5), output_tokens_per_s=1.0)


def test_moved_blocks_are_those_that_hold_anything() -> None:
    records = [
        step(1, {1: (0, 17), 2: (0, 16)}),
        step(2, {1: (17, 1)}, preempted_ids=[2], swapped_out_ids=[2]),
        step(3, {2: (16, 1)}, swapped_in_ids=[2], swapped_out_ids=[1]),
    ]
    assert num_moved_blocks(records, 16) == 1 + 1 + 2
    assert num_moved_blocks(records, 8) == 2 + 2 + 3
    assert num_moved_blocks(records[:1], 16) == 0


# --- on the services --------------------------------------------------------------------------------------------------


@pytest.fixture
def made_up_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers have an executor whose steps take the time of COSTS, in place of a model."""
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps(COSTS), encoding="utf-8")

    def services(model: object, **options: object) -> LocalServices:
        return LocalServices(DEMO_MODEL, **{**options, "simulate": str(costs)})

    monkeypatch.setattr(served, "LocalServices", services)
    monkeypatch.setattr(served_ratio_runs, "random_checkpoint", lambda shape: DEMO_MODEL)
    short = {"input_len": "uniform:16:112", "output_len": "exponential:48:8:128"}
    for module, name in ((preemption_runs, "_LOAD"), (served_ratio_runs, "_CPU_LOAD")):
        assert getattr(module, name)["output_len"] != short["output_len"]
        monkeypatch.setattr(module, name, short)


@pytest.mark.slow
def test_a_watched_load_reports_all_its_steps(made_up_steps: None) -> None:
    """Blocks from the records equal the scheduler's counts, although some sequences are preempted and resumed."""
    shapes = fixed([20 + index for index in range(24)], [30 + index % 7 for index in range(24)])
    with Server(DEMO_MODEL, {"num_gpu_blocks": 40, "block_size": 8, "max_num_seqs": 16}) as server:
        server.load(shapes[:2])
        columns, records = server.watched_load(shapes)
    assert len(columns) == 24
    assert columns.num_preemptions.sum() == sum(len(record.preempted_ids) for record in records) > 0
    assert [record.step_id for record in records] == list(range(records[0].step_id, records[-1].step_id + 1))
    found = held(records, 320, in_blocks(8), output_tokens_per_s=1.0)
    assert sum(found.shares) == pytest.approx(1)
    assert min(found.shares) >= 0
    counted = [record.load.num_used_blocks for record in records if not record.left and record.load.num_waiting]
    assert found.shares[3] == pytest.approx(1 - sum(counted) / len(counted) / 40, abs=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "each",
    short_and_long([memory.EXPERIMENT, preemption.EXPERIMENT, served_ratio.EXPERIMENT], [memory.EXPERIMENT]),
    ids=lambda each: each.name,
)
def test_it_runs_in_small(each: Experiment, made_up_steps: None, tmp_path: Path) -> None:
    result = each.run(RunSettings("cpu", 7, quick=True))
    assert (result.experiment, result.place, result.seed) == (each.name, "cpu", 7)
    assert ExperimentResult.model_validate_json(result.model_dump_json()) == result
    for finding in result.findings:
        assert re.search(r"\d", finding.evidence), f"no numbers: {finding.evidence}"
        assert "nan" not in finding.evidence
        assert "](https://" in finding.claim or "xpected" in finding.claim or "](options.md)" in finding.claim
    for table in result.tables:
        assert {len(row) for row in table.rows} == {len(table.columns)}
    for figure in result.figures:
        draw(figure, tmp_path / f"{figure.name}.svg")
        assert ElementTree.parse(tmp_path / f"{figure.name}.svg").getroot().tag.endswith("svg")
