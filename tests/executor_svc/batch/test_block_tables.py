"""Block tables of several KV groups: where pages go, and what plans may not say about them."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from cadenza_common.plan.errors import InvalidPlan
from cadenza_common.plan.plan import GroupAppends, GroupTable, PrefixSource
from executor_svc.batch.forward_batch import build_batch
from executor_svc.batch.slot_digest import digest_of
from executor_svc.batch.slots import Slots
from executor_svc.plan.limits import GroupShape, Limits
from tests.helpers.executor.plans import columns, plan, run, scheduled, sequence

LIMITS = Limits(
    num_slots=3, max_num_seqs=3, max_num_batched_tokens=64, max_model_len=24, vocab_size=50, max_logprobs=0,
    block_size=4, num_device_blocks=90, num_host_blocks=0, max_inflight_plans=1,
    kv_groups=(GroupShape(0, 2), GroupShape(6, 3)),
)  # fmt: skip
TOKENS = list(range(10))


def test_pages_of_each_strip_go_to_its_table() -> None:
    slots = Slots(LIMITS)
    first = sequence(0, TOKENS, [1, 2, 3, 4, 5, 6], 8, group_tables=[GroupTable(1, 1, [10, 11, 12, 20, 21, 22])])
    slots.apply(plan(admitted=(first,)))
    assert slots.tables[0, :, :4].tolist() == [
        [1, 3, 5, 0],
        [2, 4, 6, 0],
        [0, 10, 20, 0],
        [0, 11, 21, 0],
        [0, 12, 22, 0],
    ]
    assert slots.places.num_blocks[:, 0].tolist() == [3, 3]
    appends = [GroupAppends(1, [0] * 3, [30, 31, 32]), GroupAppends(1, [0] * 3, [40, 41, 42])]
    slots.apply(plan(appends=columns((0, 7), (0, 8)), group_appends=appends))
    assert slots.tables[0, :, 3:5].tolist() == [[7, 0], [8, 0], [30, 40], [31, 41], [32, 42]]
    assert slots.places.room(slots.admitted.nonzero()[0]).tolist() == [4]
    batch = build_batch(slots, slots.schedule(plan(scheduled=scheduled((0, 2, True)))))
    assert batch is not None
    assert batch.slot_mapping.tolist() == [[page * 4, page * 4 + 1] for page in (5, 6, 20, 21, 22)]
    assert batch.block_tables[0].tolist() == slots.tables[0, :, :3].tolist()


def test_pages_of_a_source_are_shared_in_the_group_without_a_window() -> None:
    slots = Slots(LIMITS)
    first = sequence(0, TOKENS, [1, 2, 3, 4, 5, 6], group_tables=[GroupTable(1, 0, list(range(10, 19)))])
    run(slots, plan(admitted=(first,), scheduled=scheduled((0, 10, True))), [7])
    table = GroupTable(1, 1, [13, 14, 15, 50, 51, 52])
    second = sequence(1, TOKENS[8:], [8, 9], 8, prompt=10, source=PrefixSource(0, 8, 4), group_tables=[table])
    complete = slots.apply(plan(admitted=(second,)))
    assert list(complete.admitted[0].block_ids) == [1, 2, 3, 4, 8, 9]
    assert slots.tables[1, :, :3].tolist() == [[1, 3, 8], [2, 4, 9], [0, 13, 50], [0, 14, 51], [0, 15, 52]]


def test_the_digest_is_over_what_rows_read_of_every_table() -> None:
    slots = Slots(LIMITS)
    first = sequence(0, TOKENS, [1, 2, 3, 4, 5, 6], 9, group_tables=[GroupTable(1, 1, [10, 11, 12, 20, 21, 22])])
    slots.apply(plan(admitted=(first,)))
    digest = digest_of(slots)
    for table, block in product(range(5), range(4)):
        is_read = block < 3 and (table < 2 or block > 0)
        slots.tables[0, table, block] += 1
        assert (digest_of(slots) != digest) == is_read, (table, block)
        slots.tables[0, table, block] -= 1
    slots.places.num_blocks[1, 0] = 2
    assert digest_of(slots) != digest


GOOD: dict[str, Any] = {"group_tables": [GroupTable(1, 0, list(range(9)))]}


@pytest.mark.parametrize(
    ("blocks", "fields", "message"),
    [
        ([1, 2, 3], GOOD, "slot 0 has 3 pages: no whole number of blocks"),
        ([1, 2], {"group_tables": [GroupTable(1, 0, [1, 2])]}, "slot 0 has 2 pages in KV group 1: no whole"),
        ([1, 2], {"group_tables": [GroupTable(2, 0, [1])]}, "slot 0: KV group 2: there are 2"),
        ([1, 2], {"first_block": 1}, "slot 0: first_block 1 in KV group 0 without a window"),
        (
            [1, 2],
            {"group_tables": [GroupTable(1, 6, [1, 2, 3])]},
            "has 7 blocks in KV group 1: over the 6 of max_model_len",
        ),
        ([1, 2], {"group_tables": [GroupTable(1, 0, [1, 2, 90])]}, "slot 0 in KV group 1: block 90 is out of range"),
        ([1, 90], GOOD, "slot 0: block 90 is out of range"),
    ],
)
def test_admissions_that_cannot_be(blocks: list[int], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidPlan, match=message):
        Slots(LIMITS).apply(plan(admitted=(sequence(0, TOKENS, blocks, **fields),)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"appends": columns((0, 1))}, "appends: blocks of other than 2 pages"),
        ({"appends": columns((0, 1), (1, 2))}, "appends: blocks of other than 2 pages"),
        ({"group_appends": [GroupAppends(1, [0, 0, 1], [1, 2, 3])]}, "appends in KV group 1: blocks of other than 3"),
        ({"group_appends": [GroupAppends(3, [0], [1])]}, "appends: KV group 3: there are 2"),
        ({"group_appends": [GroupAppends(1, [2] * 3, [1, 2, 3])]}, "appends: slot 2 is not admitted"),
        ({"group_appends": [GroupAppends(1, [0] * 3, [1, 2, 99])]}, "appends in KV group 1: block 99 is out of range"),
        ({"group_appends": [GroupAppends(1, [0] * 18, [1] * 18)]}, "the block table of slot 0 would exceed 6 blocks"),
        (
            {"scheduled": scheduled((0, 10, True))},
            "table of slot 0 is too short in KV group 1: 10 tokens need more than",
        ),
        (
            {"reserved": ("appends.kv_group 1", "copies.kv_group 1")},
            "not supported by this executor: copies.kv_group 1$",
        ),
    ],
)
def test_steps_that_cannot_be(fields: dict[str, Any], message: str) -> None:
    slots = Slots(LIMITS)
    tables = [GroupTable(1, 0, [1, 2, 3])]
    both = [sequence(slot, TOKENS, [1, 2, 3, 4, 5, 6], group_tables=tables) for slot in (0, 1)]
    slots.apply(plan(admitted=both))
    with pytest.raises(InvalidPlan, match=message):
        slots.schedule(slots.apply(plan(**fields)))


def test_executors_of_one_group_refuse_others() -> None:
    slots = Slots(replace(LIMITS, kv_groups=()))
    with pytest.raises(InvalidPlan, match=r"not supported by this executor: block_tables\.kv_group 1"):
        slots.apply(plan(reserved=("block_tables.kv_group 1",)))
