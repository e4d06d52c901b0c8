"""Sizes of KV groups: what windows keep, what admissions take, and what fits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cadenza_common.plan.plan import AdmittedSequence, GroupAppends, GroupTable, StepPlan
from cadenza_common.plan.sampling import SequenceSampling
from cadenza_common.plan_wire.reading import plan_from_wire
from cadenza_common.plan_wire.writing import plan_to_wire
from scheduler_svc.core.errors import RequestRejectedError
from scheduler_svc.core.kv_groups import GroupSizes, KVGroup
from scheduler_svc.core.placement.candidates import check_fits_one
from scheduler_svc.core.sequences.sequence import Sequence, SequenceGroup
from scheduler_svc.core.types import ExecutorSpec, RequestSpec
from tests.helpers.core.core_sampling import core_sampling

FULL, WINDOW = KVGroup(0), KVGroup(1, 1024, 5)
GEMMA = ExecutorSpec(16, 12_288, 8, 8, 8192, 32_768, kv_groups=(FULL, WINDOW))
"""Gemma 3 12B: 8 layers without a window, 40 with one of 1,024. The pool holds 32,768 tokens of all layers."""


def sizes_of(spec: ExecutorSpec) -> GroupSizes:
    assert spec.group_sizes is not None
    return spec.group_sizes


@pytest.mark.parametrize("window", [1, 2, 7, 16, 33])
@pytest.mark.parametrize("size", [1, 4, 16])
@pytest.mark.parametrize("chunk", [1, 5, 16])
def test_a_quota_holds_every_chunk_and_the_token_behind_it(window: int, size: int, chunk: int) -> None:
    sizes = GroupSizes(size, 1, (KVGroup(1, window),), chunk, chunk)
    most = 0
    for context_len in range(200):
        first = sizes.first_block(window, context_len)
        # A result may take back a token of each of 4 plans.
        assert first * size <= max(0, context_len - 4 - window + 1)
        most = max(most, -(-(context_len + chunk + 1) // size) - first)
    assert most == sizes.quota(window, chunk)


@pytest.mark.parametrize("window", [1, 5, 16])
@pytest.mark.parametrize("size", [1, 4, 16])
def test_what_decodes_can_be_admitted_again(window: int, size: int) -> None:
    """A decode gives back when it needs a block: then it holds no more than an admission takes for one token a step."""
    sizes = GroupSizes(size, 1, (KVGroup(1, window),), 1, 1)
    for num_blocks in range(1, 60):
        held = num_blocks + 1 - sizes.first_block(window, num_blocks * size)
        assert held <= sizes.quota(window, 1)


def test_windows_take_under_a_third() -> None:
    alike = GEMMA.num_blocks
    assert GEMMA.footprint(32_768, sizes_of(GEMMA).max_chunk) < alike / 3
    assert sizes_of(GEMMA).capacity(GEMMA.num_blocks, 10**6) > 3 * 32_768
    assert sizes_of(GEMMA).max_chunk == 2048


def test_an_executor_of_one_group_counts_blocks() -> None:
    alone = replace(GEMMA, kv_groups=(FULL,))
    assert alone.group_sizes is None
    assert alone.footprint(100) == replace(GEMMA, kv_groups=()).footprint(100) == 7


def test_what_no_pool_holds_is_refused_in_pages() -> None:
    small = replace(GEMMA, num_blocks=100)
    request = RequestSpec("r", tuple(range(300)), core_sampling(seed=1))
    with pytest.raises(RequestRejectedError, match="need 114 pages of KV; the pool has 100"):
        check_fits_one(request, [small], 1)
    check_fits_one(request, [replace(small, num_blocks=114)], 1)


def test_a_sequence_at_its_greatest_length_awaits_nothing() -> None:
    """Drafts may bring it there by fewer plans than were made for it; preempted, it would wait for ever."""
    group = SequenceGroup(RequestSpec("r", (1, 2), core_sampling(seed=1), max_tokens=3), 0, 0.0, 100)
    sequence = Sequence(1, group, 0)
    group.sequences.append(sequence)
    for _ in range(3):
        sequence.schedule(sequence.num_uncomputed_tokens)
    sequence.reset_computed_tokens()
    sequence.output_ids += [3, 4]
    sequence.count_more(1)
    assert not group.has_all_results
    sequence.output_ids.append(5)
    assert sequence.num_pending == 1
    assert group.has_all_results


def test_tables_of_groups_travel() -> None:
    admitted = AdmittedSequence(1, [5, 6], 2, 0, [7, 8], SequenceSampling(), first_block=2)
    admitted.group_tables = [GroupTable(2, 3, [4, 5])]
    appends = [GroupAppends(2, [1, 1], [9, 6])]
    plan = StepPlan(1, admitted=[admitted], append_slots=[1], append_block_ids=[3], group_appends=appends)
    read = plan_from_wire(plan_to_wire(plan, 1))
    found = read.admitted[0]
    assert (found.first_block, list(found.block_ids), list(read.append_block_ids)) == (2, [7, 8], [3])
    assert [(each.kv_group, each.first_block, list(each.page_ids)) for each in found.group_tables] == [(2, 3, [4, 5])]
    assert [(each.kv_group, list(each.slots), list(each.page_ids)) for each in read.group_appends] == [
        (2, [1, 1], [9, 6])
    ]
    assert read.reserved == ("block_tables.first_block 2", "block_tables.kv_group 2", "appends.kv_group 2")
