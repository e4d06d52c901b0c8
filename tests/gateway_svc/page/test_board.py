"""What the live page shows, from step records: blocks, rows of the schedule, figures, journeys."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cadenza.info import DeviceMemory
from cadenza.steps.cells import Cell
from cadenza.v1 import admin_pb2 as pb
from gateway_svc.page.blocks import CACHED, FREE, BlockMap
from gateway_svc.page.board import Board
from gateway_svc.page.rows import MAX_COLUMNS, MAX_ROWS, ScheduleRows
from tests.helpers.client.top_figures import info, record


def states(changes: list[int]) -> dict[int, tuple[int, int]]:
    """Holder and number of holders by block."""
    return {changes[at]: (changes[at + 1], changes[at + 2]) for at in range(0, len(changes), 3)}


def change(sequence_id: int, *appended: int, cleared: bool = False) -> pb.BlockTableChange:
    return pb.BlockTableChange(sequence_id=sequence_id, appended=appended, cleared=cleared)


def join(sequence_id: int, num_prompt_tokens: int, request_id: str) -> pb.SequenceJoined:
    return pb.SequenceJoined(sequence_id=sequence_id, num_prompt_tokens=num_prompt_tokens, request_id=request_id)


def executor(index: int = 0, *, incarnation: int = 1, connected: bool = True, num_running: int = 1):
    plain = info(0.0, num_executors=index + 1).executors[index]
    return replace(plain, incarnation=incarnation, connected=connected, num_running=num_running)


def server(at_s: float, *executors, **load: int):
    return replace(info(at_s, **load), executors=list(executors))


def test_blocks_are_held_shared_and_cached_until_another_sequence_gets_them():
    blocks = BlockMap(16)
    blocks.change(1, [3, 4, 5], cleared=True)
    blocks.change(2, [3, 6], cleared=True)
    assert states(blocks.take_changes()) == {3: (1, 2), 4: (1, 1), 5: (1, 1), 6: (2, 1)}
    assert (blocks.num_held, blocks.num_shared, blocks.take_changes()) == (4, 1, [])
    blocks.release(1, num_tokens=35)
    assert states(blocks.take_changes()) == {3: (2, 1), 4: (CACHED, 0), 5: (FREE, 0)}, "35 tokens fill two blocks"
    blocks.change(7, [4], cleared=False)
    blocks.change(2, [8], cleared=True)
    assert states(blocks.states()) == {3: (CACHED, 0), 4: (7, 1), 8: (2, 1)}
    blocks.clear()
    assert blocks.states() == []
    assert states(blocks.take_changes()) == {3: (FREE, 0), 4: (FREE, 0), 6: (FREE, 0), 8: (FREE, 0)}


def test_without_a_prefix_cache_released_blocks_are_free():
    blocks = BlockMap(16, has_cache=False)
    blocks.change(1, [3, 4], cleared=True)
    blocks.keep_only([2])
    assert states(blocks.take_changes()) == {3: (FREE, 0), 4: (FREE, 0)}


def test_rows_are_what_the_readme_draws():
    rows = ScheduleRows()
    rows.join(1, "one", 6)
    rows.step(record(1.0, [(1, 6, 0, 1)], step_id=11))
    rows.join(2, "two", 4)
    rows.step(record(1.1, [(1, 1, 6, 1), (2, 4, 0, 1)], step_id=12))
    rows.step(record(1.2, [(2, 1, 4, 3)], step_id=13))
    rows.leave(2, num_output_tokens=3)
    rows.preempt(1)
    rows.step(record(1.3, [(2, 1, 7, 0)], step_id=14))
    taken = rows.take()
    columns = [(column, step, batch, cells[:2]) for column, step, batch, cells in taken["columns"]]
    prefill, decode, several, unused, idle, waiting = map(
        int, (Cell.PREFILL, Cell.DECODE, Cell.SEVERAL, Cell.UNUSED, Cell.IDLE, Cell.WAITING)
    )
    assert columns == [
        (0, 11, 1, f"{prefill}0"),
        (1, 12, 2, f"{decode}{prefill}"),
        (2, 13, 1, f"{idle}{several}"),
        (3, 14, 1, f"{waiting}{unused}"),
    ]
    assert taken["rows"] == [[0, 1, "one", 6, 2, 0, 0], [1, 2, "two", 4, 3, 1, 0]]
    assert rows.take() is None
    assert rows.snapshot()["columns"] == taken["columns"]


def test_many_steps_share_columns_and_the_history_is_bounded():
    rows = ScheduleRows()
    rows.join(1, "one", 1)
    for step in range(100):
        rows.step(record(1.0, [(1, 1, step, 1)], step_id=step))
    columns = rows.take()["columns"]
    assert len(columns) == 25
    assert [step for _, step, _, _ in columns] == list(range(3, 100, 4))
    assert columns[0][3][0] == str(int(Cell.PREFILL)), "of steps in a column the largest cell is shown"
    for step in range(300):
        rows.step(record(1.0, [(1, 1, step, 1)], step_id=step))
        rows.take()
    assert len(rows.snapshot()["columns"]) == MAX_COLUMNS


def test_a_row_is_taken_again_after_its_sequence_has_ended():
    rows = ScheduleRows()
    for sequence in range(1, MAX_ROWS + 3):
        rows.join(sequence, f"s{sequence}", 1)
    assert rows.num_hidden == 2
    rows.step(record(1.0, [(5, 1, 0, 1)], step_id=1))
    rows.take()
    rows.leave(5)
    rows.join(99, "new", 1)
    row = next(row for row in rows.take()["rows"] if row[1] == 99)
    assert (row[0], row[6]) == (4, 1), "the place of the ended one, from the next column on"
    assert len(rows.snapshot()["rows"]) == MAX_ROWS


def test_sequences_without_a_row_are_counted_while_they_are_there():
    rows = ScheduleRows()
    for sequence in range(1, MAX_ROWS + 4):
        rows.join(sequence, f"s{sequence}", 1)
    rows.take()
    last = MAX_ROWS + 3
    rows.preempt(last)
    rows.join(last, "again", 1)
    assert rows.num_hidden == 3, "one that comes back is the same"
    rows.leave(last)
    assert rows.take()["hidden"] == 2
    rows.leave(1)
    rows.join(last - 1, "again", 1)
    assert rows.take()["hidden"] == 1, "it has come back to a row"
    rows.leave_all()
    assert rows.take()["hidden"] == 0


def test_sequences_that_joined_before_the_watch_have_rows_too():
    rows = ScheduleRows()
    rows.step(record(1.0, [(7, 1, 20, 1)]))
    assert rows.take()["rows"][0][1:4] == [7, "sequence 7", 0]


def test_a_journey_tells_what_became_of_a_request():
    board = Board()
    journey = board.follow("mine")
    board.look(server(0.5, executor(0), executor(1)))
    board.add(record(1.0, [(1, 4, 0, 0)], joined=[], block_changes=[change(1, 3, 4, cleared=True)]))
    assert journey.events == [], "it was not known by its id yet"
    board = Board()
    journey = board.follow("mine")
    first = record(1.0, [(1, 4, 0, 0)], step_id=5)
    first.joined.append(join(1, 6, "mine"))
    board.add(first)
    board.add(record(1.1, [(1, 2, 4, 1)], step_id=6))
    board.add(record(1.2, [(1, 1, 6, 1)], step_id=7))
    board.look(server(1.5, executor(0, connected=False), executor(1)))
    moved = record(2.0, [(1, 8, 0, 1)], executor=1, step_id=2)
    moved.joined.append(join(1, 6, "mine"))
    board.add(moved)
    board.add(record(2.1, [(1, 1, 8, 1)], left=[1], executor=1, step_id=3))
    assert [(what, lane, step) for _, what, lane, step in journey.events] == [
        ("joined", 0, 5), ("first", 0, 6), ("lost", 0, 0), ("moved", 1, 2), ("left", 1, 3),
    ]  # fmt: skip
    assert (journey.num_prefill_steps, journey.num_decode_steps, journey.num_computed_prompt_tokens) == (3, 2, 14)
    board.unfollow("mine")
    board.add(moved)
    assert len(journey.events) == 5


async def test_waiting_for_the_end_of_a_journey_has_a_limit():
    board = Board()
    journey = board.follow("mine")
    await journey.wait_left(0.001)
    joined = record(1.0, [(1, 4, 0, 1)], left=[1])
    joined.joined.append(join(1, 4, "mine"))
    board.add(joined)
    await journey.wait_left(60)
    assert journey.fields()["events"][-1][1] == "left"


def test_a_lost_executor_holds_nothing_and_one_without_requests_neither():
    board = Board()
    board.look(server(1.0, executor(0)))
    board.add(record(1.0, [(1, 4, 0, 1)], joined=[(1, 4)], block_changes=[change(1, 2, cleared=True)]))
    assert board.take()["lanes"][0]["held"] == 1
    board.look(server(2.0, executor(0, incarnation=2)))
    frame = board.take()["lanes"][0]
    assert (frame["held"], frame["blocks"]) == (0, [2, FREE, 0])
    board.add(record(2.0, [(2, 4, 0, 1)], joined=[(2, 4)], block_changes=[change(2, 5, 6, cleared=True)]))
    board.look(server(3.0, executor(0, incarnation=2, num_running=0)))
    assert states(board.take()["lanes"][0]["blocks"]) == {5: (CACHED, 0), 6: (FREE, 0)}
    state = board.look(server(4.0))
    assert (state["executors"], board.snapshot()["lanes"]) == ([], {})


def test_the_memory_of_a_gpu_comes_with_the_state_of_its_executor():
    parts = (DeviceMemory("weights", 15 << 30, 16 << 30), DeviceMemory("drafts and adapters", 0, -(1 << 20)))
    on_cpu, on_gpu = Board().look(server(1.0, executor(0), replace(executor(1), memory=parts)))["executors"]
    assert "memory" not in on_cpu
    assert on_gpu["memory"] == [["weights", 15 << 30, 16 << 30], ["drafts and adapters", 0, -(1 << 20)]]


def test_records_planned_before_an_end_was_known_change_nothing():
    board = Board()
    board.look(server(1.0, executor(0)))
    board.add(record(1.0, [(1, 4, 0, 1)], joined=[(1, 4)], block_changes=[change(1, 2, cleared=True)], left=[1]))
    board.add(record(1.1, [(1, 1, 4, 0)], block_changes=[change(1, 3)]))
    lane = board.take()["lanes"][0]
    assert (lane["held"], states(lane["blocks"])) == (0, {2: (FREE, 0)})
    assert lane["schedule"]["columns"][1][3][0] == str(int(Cell.UNUSED))


def test_after_lost_records_nothing_is_known_of_blocks():
    board = Board()
    board.add(record(1.0, [(1, 4, 0, 1)], joined=[(1, 4)], block_changes=[change(1, 2, cleared=True)]))
    board.lose(3)
    frame = board.take()
    assert (frame["dropped"], frame["lanes"][0]["held"]) == (3, 0)
    board.lose(3)
    assert board.take() is None


def test_sequences_whose_ends_were_lost_are_forgotten():
    board = Board()
    journey = board.follow("mine")
    for number in range(1, 101):
        joined = record(1.0, [(number, 4, 0, 1)], step_id=number)
        joined.joined.append(join(number, 4, "mine" if number == 100 else f"r{number}"))
        board.add(joined)
        board.lose(number)
    assert list(board._sequences) == [100]
    board.add(record(2.0, [(100, 1, 4, 1)], left=[100], step_id=101))
    assert journey.fields()["events"][-1][1] == "left", "one that is followed is not"


def test_points_are_rates_and_percentiles_between_two_looks():
    board = Board()
    assert "point" not in board.look(server(10.0, num_output_tokens=100))
    board.add(record(10.5, [(1, 6, 0, 1), (2, 4, 0, 0)], joined=[(1, 6), (2, 5)], ttfts_ms=[20], total_ms=4))
    board.add(record(11.0, [(1, 1, 6, 1), (2, 1, 4, 1)], ttfts_ms=[30], total_ms=8))
    state = board.look(server(12.0, num_output_tokens=105, num_running=2, num_waiting=1))
    point = dict(zip(board.snapshot()["figures"]["columns"], state["point"], strict=True))
    assert point["output_tokens_per_s"] == 2.5
    assert point["prompt_tokens_per_s"] == 5.5, "a chunk of one token that ends its prompt is no output"
    assert (point["ttft_p50_ms"], point["ttft_max_ms"], point["step_p50_ms"]) == (25, 30, 6)
    assert point["step_p99_ms"] == pytest.approx(7.96)
    assert (point["num_running"], point["num_waiting"], point["num_swapped"]) == (2, 1, 0)
    idle = board.look(server(13.0, num_output_tokens=105))["point"]
    assert idle[1:7] == [0, 0, None, None, None, None]
    assert len(board.snapshot()["figures"]["points"]) == 2
