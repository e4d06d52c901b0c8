"""A lane's memory figures: exact (check_integrity compares them with a walk in every test), and without that walk."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler_svc.core.errors import InvariantError
from scheduler_svc.core.policies.batching import StaticBatching
from scheduler_svc.core.policies.policies import Policies
from tests.helpers.core.core_bench import Bench


class Unread(list[int]):
    """A block table of which only the length may be read."""

    def __iter__(self) -> Any:
        raise AssertionError("the blocks were walked")

    def __getitem__(self, index: Any) -> Any:
        raise AssertionError("the blocks were walked")


@pytest.mark.parametrize("batching", [None, StaticBatching(6)], ids=["continuous", "static"])
def test_the_figures_of_decoding_sequences_need_no_walk_over_their_blocks(batching: StaticBatching | None) -> None:
    policies: dict[str, Any] = {} if batching is None else {"batching": batching}
    bench = Bench(Policies(prefix_caching=True, **policies), num_blocks=200, max_num_seqs=8)
    for index in range(6):
        bench.add(f"r{index}", [*range(1, 13), index + 1], max_tokens=30)
        if batching is None:
            bench.step()
    for _ in range(6):
        bench.step()
    lane = bench.lane
    assert len(lane.decode_batch) == len(lane.running) == 6
    assert batching is not None or lane.blocks.num_shared_refs > 0
    assert (lane.num_reserved_tokens > 0) == (batching is not None)
    figures = lane.num_stored_tokens, lane.num_reserved_tokens, lane.num_running_groups
    assert figures[0] == lane.num_distinct_tokens(lane.running.sequences)
    tables = [sequence.block_ids for sequence in lane.running]
    for sequence in lane.running:
        sequence.block_ids = Unread(sequence.block_ids)
    assert (lane.num_stored_tokens, lane.num_reserved_tokens, lane.num_running_groups) == figures
    for sequence, table in zip(lane.running, tables, strict=True):
        sequence.block_ids = table


def test_a_wrong_figure_fails_the_check() -> None:
    bench = Bench(num_blocks=50)
    bench.add("a", 5, max_tokens=20)
    bench.step()
    bench.step()
    bench.core.check_integrity()
    bench.lane.decode_batch._offset_sum += 1
    with pytest.raises(InvariantError, match="miscounted"):
        bench.core.check_integrity()
