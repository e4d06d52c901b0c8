"""The schedule from step records, its figures, and its picture."""

from __future__ import annotations

import pytest
from rich.cells import cell_len

from cadenza.steps.cells import Cell
from cadenza.v1 import admin_pb2 as pb
from cadenza.v1 import execution_pb2
from cadenza_cli.demo.schedule import build_schedule, executor_indices, summarize
from cadenza_cli.demo.schedule_picture import draw_schedule

OK = execution_pb2.STEP_STATUS_OK
P, D, W, _, IDLE, U = Cell.PREFILL, Cell.DECODE, Cell.WAITING, Cell.ABSENT, Cell.IDLE, Cell.UNUSED


def record(step_id, work, *, joined=(), left=(), preempted=(), used=0, stored=0, status=OK) -> pb.StepRecord:
    """`work`: (sequence, tokens, context length, sampled); `joined`: (sequence, request, prompt tokens)."""
    columns = list(zip(*work, strict=True)) or [(), (), (), ()]
    return pb.StepRecord(
        step_id=step_id,
        planned_ns=step_id * 10**9,
        applied_ns=(step_id + 2) * 10**9,
        status=status,
        sequence_ids=columns[0],
        num_tokens=columns[1],
        context_lens=columns[2],
        num_sampled=columns[3],
        joined=[pb.SequenceJoined(sequence_id=s, request_id=r, num_prompt_tokens=n) for s, r, n in joined],
        left=[pb.SequenceLeft(sequence_id=s, num_output_tokens=n) for s, n in left],
        preempted_ids=preempted,
        load=pb.StepLoad(num_used_blocks=used, num_blocks=8, num_stored_tokens=stored),
    )


def three_sequences() -> list[pb.StepRecord]:
    """Two slots: the third sequence joins when the second leaves; the first is computed once past its end."""
    return [
        record(1, [(10, 4, 0, 1), (11, 3, 0, 0)], joined=[(10, "a", 4), (11, "b", 5)], used=2, stored=7),
        record(2, [(10, 1, 4, 1), (11, 2, 3, 1)], used=2, stored=10),
        record(3, [(10, 1, 5, 1), (11, 1, 5, 1)], left=[(11, 2)], used=2, stored=12),
        record(4, [(10, 1, 6, 0), (12, 2, 0, 1)], joined=[(12, "c", 2)], left=[(10, 3)], used=2, stored=9),
        record(5, [(12, 1, 2, 1)], left=[(12, 2)], used=1, stored=3),
    ]


def test_cells_say_what_each_sequence_did():
    schedule = build_schedule(three_sequences(), {"a": "first"})
    assert [row.label for row in schedule.rows] == ["first", "b", "c"]
    assert [row.cells for row in schedule.rows] == [[P, D, D, U, _], [P, P, D, _, _], [W, W, W, P, D]]
    assert [(row.num_prompt_tokens, row.num_output_tokens) for row in schedule.rows] == [(4, 3), (5, 2), (2, 2)]
    assert schedule.occupancy == [2, 2, 2, 2, 1]


def test_preempted_sequences_wait_and_are_computed_again():
    records = [
        record(1, [(1, 2, 0, 1), (2, 2, 0, 1)], joined=[(1, "a", 2), (2, "b", 2)]),
        record(2, [(1, 1, 2, 1)]),
        record(3, [(1, 1, 3, 1)], preempted=[2]),
        record(4, [(2, 3, 0, 1)]),
        record(5, [(2, 1, 3, 1)]),
    ]
    schedule = build_schedule(records, {})
    assert schedule.rows[1].cells == [P, IDLE, W, P, D]
    assert summarize(records, block_size=4, batch_size=2).num_preemptions == 1


def with_drafts() -> list[pb.StepRecord]:
    """The first sequence gets 3 tokens of a step, then 1; the second has no drafts."""
    drafted = record(2, [(1, 1, 4, 3), (2, 1, 2, 1)])
    drafted.num_drafts.extend([3, 0])
    drafted.num_accepted_drafts.extend([2, 0])
    refused = record(3, [(1, 1, 7, 1), (2, 1, 3, 1)], left=[(1, 5), (2, 3)])
    refused.num_drafts.extend([3, 0])
    refused.num_accepted_drafts.extend([0, 0])
    return [record(1, [(1, 4, 0, 1), (2, 2, 0, 1)], joined=[(1, "a", 4), (2, "b", 2)]), drafted, refused]


def test_steps_with_several_tokens():
    schedule = build_schedule(with_drafts(), {})
    assert [row.cells for row in schedule.rows] == [[P, Cell.SEVERAL, D], [P, D, D]]
    stats = summarize(with_drafts(), block_size=4, batch_size=2)
    assert (stats.num_drafts, stats.num_accepted_drafts, stats.tokens_per_step) == (6, 2, 6 / 4)
    assert (stats.num_output_tokens, stats.num_static_steps, stats.num_unused) == (8, 3, 0)
    picture = draw_schedule(schedule, width=100).plain
    assert "█▮▪" in picture
    assert "decode, several tokens" in picture
    assert "#Oo" in draw_schedule(schedule, width=100, ascii_only=True).plain
    assert "several" not in draw_schedule(build_schedule(three_sequences(), {}), width=100).plain
    before = summarize(three_sequences(), block_size=4, batch_size=2)
    assert (before.num_drafts, before.tokens_per_step) == (0, 1.0)


def test_steps_that_failed_are_no_columns():
    records = [record(2, [(1, 1, 2, 1)]), record(1, [(1, 2, 0, 1)], joined=[(1, "a", 2)])]
    records.append(record(3, [(1, 1, 3, 0)], status=execution_pb2.STEP_STATUS_FAILED))
    schedule = build_schedule(records, {})
    assert schedule.step_ids == [1, 2]
    assert schedule.rows[0].cells == [P, D]


def test_the_steps_of_two_executors_have_the_same_numbers():
    """Each counts its own; a request that moves is computed again where it goes on."""

    def of_second(step_id, *arguments, **fields) -> pb.StepRecord:
        made = record(step_id, *arguments, **fields)
        made.executor_index, made.planned_ns = 1, made.planned_ns + 10
        return made

    records = [
        record(1, [(1, 2, 0, 1)], joined=[(1, "a", 2)]),
        of_second(1, [(2, 2, 0, 1)], joined=[(2, "b", 2)]),
        record(2, [(1, 1, 2, 1)]),
        of_second(2, [(2, 1, 2, 1), (1, 3, 0, 1)], joined=[(1, "a", 2)], left=[(2, 2)]),
        of_second(3, [(1, 1, 3, 1)], left=[(1, 4)]),
    ]
    first, second = (build_schedule(records[::-1], {}, index) for index in executor_indices(records))
    assert [row.cells for row in first.rows] == [[P, D]]
    assert [(row.label, row.cells) for row in second.rows] == [("b", [P, D, _]), ("a", [W, P, D])]
    whole = summarize(records, block_size=4, batch_size=2)
    assert (whole.num_steps, whole.num_output_tokens, whole.mean_occupancy) == (5, 6, 6 / 5)
    assert [row.num_output_tokens for row in first.rows] == [4], "where it ended does not matter"
    assert executor_indices([]) == []


def test_a_sequence_without_its_joining_record_is_shown():
    (row,) = build_schedule([record(1, [(7, 1, 20, 1)])], {}).rows
    assert (row.label, row.cells) == ("sequence 7", [D])


def test_figures():
    stats = summarize(three_sequences(), block_size=8, batch_size=2)
    assert (stats.num_steps, stats.duration_s) == (5, 6.0)
    assert (stats.num_prefill_tokens, stats.num_output_tokens) == (11, 7)
    assert stats.output_tokens_per_s == pytest.approx(7 / 6)
    assert stats.mean_occupancy == pytest.approx(9 / 5)
    assert (stats.peak_used_blocks, stats.num_blocks, stats.num_unused) == (2, 8, 1)
    assert stats.waste == pytest.approx(1 - 41 / 72)
    # Sequences took 3, 3 and 2 steps: batches (3, 3) and (2).
    assert stats.num_static_steps == 5


def test_no_records():
    stats = summarize([], block_size=16, batch_size=4)
    assert (stats.num_steps, stats.output_tokens_per_s, stats.waste) == (0, 0.0, 0.0)
    assert "no steps" in draw_schedule(build_schedule([], {}), width=80).plain


def test_picture():
    schedule = build_schedule(three_sequences(), {"a": "你好，天气？", "b": "time", "c": "a book"})
    lines = draw_schedule(schedule, width=60).plain.splitlines()
    assert lines == [
        "3 sequences over 5 steps",
        "你好，天气？  █▪▪×   4+3",
        "time          ██▪    5+2",
        "a book        ···█▪  2+2",
        "in the batch  22221",
        "step          1────",
        "█ prefill   ▪ decode   × computed past its end   · waiting",
        "tokens: prompt+output",
    ]
    # Wide characters count two: the first cell of every row stands in the same terminal column.
    assert {cell_len(line[: line.index(mark)]) for line, mark in zip(lines[1:4], "██·", strict=True)} == {14}


def test_picture_in_ascii():
    plain = draw_schedule(build_schedule(three_sequences(), {}), width=60, ascii_only=True).plain
    assert plain.isascii()
    assert "#oox" in plain


def long_schedule(num_steps: int):
    records = [record(1, [(1, 3, 0, 1)], joined=[(1, "r" * 40, 3)])]
    records += [record(step, [(1, 1, step + 1, 1)]) for step in range(2, num_steps)]
    records.append(record(num_steps, [(1, 1, num_steps + 1, 1), (2, 5, 0, 1)], joined=[(2, "请" * 40, 5)]))
    return build_schedule(records, {})


@pytest.mark.parametrize("width", [40, 80, 81, 200])
@pytest.mark.parametrize("num_steps", [2, 50, 333])
def test_picture_fits_any_width(width, num_steps):
    lines = draw_schedule(long_schedule(num_steps), width=width).plain.splitlines()
    assert max(cell_len(line) for line in lines[1:]) <= width
    if num_steps > width:
        assert "one column is" in lines[0]


def test_a_shared_column_shows_the_prefill():
    lines = draw_schedule(long_schedule(333), width=60).plain.splitlines()
    assert lines[1].count("█") == 1
    assert lines[2].count("█") == 1
    assert lines[2].rstrip().split("  ")[-2].endswith("█")
