"""Converts step records and block tables to admin.proto."""

from __future__ import annotations

from collections.abc import Sequence

from cadenza.v1 import admin_pb2 as pb
from cadenza.v1 import execution_pb2
from cadenza_common.serving.slices import SLICE_ITEMS, Work
from scheduler_svc.core.adapters.lane_adapters import AdapterState
from scheduler_svc.engine.adapters.adapters import NamedAdapter
from scheduler_svc.plan_loop.gauges import Load
from scheduler_svc.plan_loop.ports import ExecutorState, GroupPages, SequenceBlockTable, StepRecord

_COLUMNS = 6
"""Of a record: values for each of its sequences."""


def watch_response(
    records: Sequence[StepRecord], num_dropped: int, *, block_tables: bool
) -> Work[pb.WatchStepsResponse]:
    """A response with step records, in order. With `block_tables` a record may have 131,072 blocks."""
    response = pb.WatchStepsResponse(num_dropped=num_dropped)
    num_items = 0
    for record in records:
        if num_items + (num_own := _COLUMNS * len(record.sequence_ids)) > SLICE_ITEMS:
            num_items = 0
            yield
        num_items += num_own
        added = _add_record(response, record)
        if not block_tables:
            continue
        added.freed_pages.extend(record.freed_pages)
        num_items += len(record.freed_pages)
        for change in record.block_changes:
            if num_items + (num_own := len(change.appended) + len(change.state_pages)) > SLICE_ITEMS:
                num_items = 0
                yield
            num_items += num_own
            added.block_changes.add(**change._asdict())
        for position, page_ids, is_made in record.state_copies:
            num_items += len(page_ids)
            added.state_copies.add(position=position, page_ids=page_ids, is_made=is_made)
    return response


def block_table_response(tables: Sequence[SequenceBlockTable]) -> Work[pb.GetBlockTableResponse]:
    """The block tables of one request, which may have 131,072 blocks in all."""
    response = pb.GetBlockTableResponse()
    num_items = 0
    for table in tables:
        num_own = 2 * len(table.block_ids) + sum(len(group.page_ids) for group in table.groups)
        if num_items + num_own > SLICE_ITEMS:
            num_items = 0
            yield
        num_items += num_own
        sequence = response.sequences.add(
            sample_index=table.sample_index, num_computed_tokens=table.num_computed_tokens, swapped=table.swapped
        )
        for index, group in enumerate(table.groups or (GroupPages(0, table.block_ids),)):
            block_table = sequence.block_tables.add(kv_group=index, first_block=group.first_block)
            block_table.block_ids.extend(group.page_ids)
        sequence.ref_counts.extend(table.ref_counts)
    return response


def _add_record(response: pb.WatchStepsResponse, record: StepRecord) -> pb.StepRecord:
    """Add a step record without its block table changes, and return it."""
    result = record.result
    return response.records.add(
        step_id=record.step_id,
        executor_index=record.executor_id,
        planned_ns=max(0, record.planned_ns),
        applied_ns=max(0, record.applied_ns),
        status=execution_pb2.StepStatus.ValueType(result.status),
        timings=execution_pb2.StepTimings(
            queue_ns=result.timings.queue_ns,
            device_ns=result.timings.device_ns,
            sample_ns=result.timings.sample_ns,
            moves_ns=result.timings.moves_ns,
            total_ns=result.timings.total_ns,
        ),
        joined=[
            pb.SequenceJoined(
                sequence_id=sequence_id,
                request_id=request_id,
                sample_index=sample_index,
                num_prompt_tokens=num_prompt_tokens,
                slot=slot,
            )
            for sequence_id, request_id, sample_index, num_prompt_tokens, slot in record.joined
        ],
        sequence_ids=record.sequence_ids,
        num_tokens=record.num_tokens,
        context_lens=record.context_lens,
        num_sampled=record.num_sampled,
        num_drafts=record.num_drafts,
        num_accepted_drafts=record.num_accepted_drafts,
        left=[pb.SequenceLeft(sequence_id=sequence_id, num_output_tokens=count) for sequence_id, count in record.left],
        preempted_ids=record.preempted_ids,
        swapped_out_ids=record.swapped_out_ids,
        swapped_in_ids=record.swapped_in_ids,
        first_token_ns=record.first_token_ns,
        load=_load(record.load),
    )


def _load(load: Load) -> pb.StepLoad:
    return pb.StepLoad(
        num_waiting=load.num_waiting,
        num_running=load.num_running,
        num_swapped=load.num_swapped,
        num_used_blocks=load.num_used_device_blocks,
        num_blocks=load.num_device_blocks,
        num_stored_tokens=load.num_stored_tokens,
    )


def adapter_info(info: NamedAdapter, executors: Sequence[ExecutorState]) -> pb.AdapterInfo:
    """An adapter, with its state on each executor that has adapters."""
    targets = {executor.index: executor.target for executor in executors}
    return pb.AdapterInfo(
        name=info.name,
        path=info.path,
        adapter_index=info.index,
        content_hash=info.content_hash,
        num_requests=info.num_requests,
        executors=[
            pb.AdapterOnExecutor(target=targets[executor_id], state=_ADAPTER_STATES[state], error=error)
            for executor_id, state, error in info.states
            if executor_id in targets
        ],
    )


_ADAPTER_STATES: dict[AdapterState | None, pb.AdapterState.ValueType] = {
    None: pb.ADAPTER_STATE_NOT_LOADED,
    AdapterState.LOADING: pb.ADAPTER_STATE_LOADING,
    AdapterState.LOADED: pb.ADAPTER_STATE_LOADED,
    AdapterState.UNLOADING: pb.ADAPTER_STATE_UNLOADING,
    AdapterState.FAILED: pb.ADAPTER_STATE_FAILED,
}
