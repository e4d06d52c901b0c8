"""Converts step records and block tables to admin.proto."""

from __future__ import annotations

from collections.abc import Sequence

from cadenza.v1 import admin_pb2 as pb
from cadenza.v1 import execution_pb2
from scheduler_svc.plan_loop.ports import Load, SequenceBlockTable, StepRecord


def watch_response(records: Sequence[StepRecord], num_dropped: int, *, block_tables: bool) -> pb.WatchStepsResponse:
    """A response with step records, in order."""
    return pb.WatchStepsResponse(
        records=[_record(record, block_tables=block_tables) for record in records], num_dropped=num_dropped
    )


def block_table_response(tables: Sequence[SequenceBlockTable]) -> pb.GetBlockTableResponse:
    """The block tables of one request."""
    return pb.GetBlockTableResponse(
        sequences=[
            pb.SequenceBlocks(
                sample_index=table.sample_index,
                block_tables=[execution_pb2.BlockTable(kv_group=0, block_ids=table.block_ids)],
                ref_counts=table.ref_counts,
                num_computed_tokens=table.num_computed_tokens,
                swapped=table.swapped,
            )
            for table in tables
        ]
    )


def _record(record: StepRecord, *, block_tables: bool) -> pb.StepRecord:
    result = record.result
    return pb.StepRecord(
        step_id=record.step_id,
        executor_index=record.executor_id,
        planned_ns=max(0, record.planned_ns),
        applied_ns=max(0, record.applied_ns),
        status=execution_pb2.StepStatus.ValueType(result.status),
        timings=execution_pb2.StepTimings(
            queue_ns=result.queue_ns,
            device_ns=result.device_ns,
            sample_ns=result.sample_ns,
            moves_ns=result.moves_ns,
            total_ns=result.total_ns,
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
        left=[pb.SequenceLeft(sequence_id=sequence_id, num_output_tokens=count) for sequence_id, count in record.left],
        preempted_ids=record.preempted_ids,
        swapped_out_ids=record.swapped_out_ids,
        swapped_in_ids=record.swapped_in_ids,
        first_token_ns=record.first_token_ns,
        load=_load(record.load),
        block_changes=[
            pb.BlockTableChange(sequence_id=sequence_id, appended=appended, cleared=cleared)
            for sequence_id, appended, cleared in (record.block_changes if block_tables else ())
        ],
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
