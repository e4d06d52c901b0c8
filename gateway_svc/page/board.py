"""What the page shows of a scheduler, from its step records and its state: pure, without a clock or a connection."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from cadenza.info import ExecutorInfo, ServerInfo
from cadenza.v1 import admin_pb2
from gateway_svc.page.blocks import BlockMap
from gateway_svc.page.figures import Figures
from gateway_svc.page.journey import Journey
from gateway_svc.page.pages import PageLayout, PageMap
from gateway_svc.page.rows import ScheduleRows

_NUM_REMEMBERED = 4096
"""Ended sequences that later records, planned before their end was known, may still name."""


@dataclass(slots=True)
class _SlotOwner:
    request_id: str
    num_prompt_tokens: int
    executor: int


@dataclass(slots=True)
class _Lane:
    """One executor."""

    rows: ScheduleRows = field(default_factory=ScheduleRows)
    blocks: BlockMap | PageMap = field(default_factory=BlockMap)
    incarnation: int | None = None
    running: set[int] = field(default_factory=set)
    """Sequences that joined there and have not left."""

    def divide(self, info: ExecutorInfo, *, has_cache: bool) -> None:
        """Take how the executor divides its pool."""
        layout, blocks = PageLayout.of(info), self.blocks
        if layout is not None:
            if not isinstance(blocks, PageMap):
                self.blocks = PageMap(layout)
            elif blocks.layout != layout:
                self.blocks = PageMap(layout, drawn=blocks.numbers)
            return
        if isinstance(blocks, PageMap):
            self.blocks = blocks = BlockMap()
        blocks.block_size, blocks.has_cache = info.block_size, has_cache


class Board:
    """Add records in the order of their arrival, and take what has changed for all pages at once."""

    def __init__(self) -> None:
        self._lanes: dict[int, _Lane] = {}
        self._sequences: dict[int, _SlotOwner] = {}
        self._left: dict[int, None] = {}
        self._journeys: dict[str, Journey] = {}
        self._figures = Figures()
        self._state: dict[str, Any] | None = None
        self._num_dropped = 0

    def follow(self, request_id: str) -> Journey:
        """Note what becomes of a request, until `unfollow`."""
        return self._journeys.setdefault(request_id, Journey(request_id))

    def unfollow(self, request_id: str) -> None:
        """Forget a request."""
        self._journeys.pop(request_id, None)

    def emptied(self) -> Board:
        """Return a new board. It follows the same requests, and knows nothing else."""
        board = Board()
        board._journeys = self._journeys
        return board

    # --- records -----------------------------------------------------------------------------------------------------

    def add(self, record: admin_pb2.StepRecord) -> None:
        """Take a record."""
        lane, at_s = self._lane(record.executor_index), record.planned_ns / 1e9
        self._figures.add(record)
        for sequence_id in record.preempted_ids:
            self._stop(record, lane, sequence_id, "preempted", at_s)
        for sequence_id in record.swapped_out_ids:
            self._note(record, sequence_id, "swapped_out", at_s)
        for join in record.joined:
            self._join(record, lane, join, at_s)
        for sequence_id in record.swapped_in_ids:
            self._note(record, sequence_id, "swapped_in", at_s)
        for change in record.block_changes:
            if change.sequence_id not in self._left:
                lane.blocks.add(change)
        if any(record.num_tokens):
            lane.rows.step(record)
            if self._journeys:
                self._follow_step(record)
        for leave in record.left:
            self._leave(record, leave)
        if isinstance(lane.blocks, PageMap):
            lane.blocks.settle(record)

    def lose(self, num_dropped: int) -> None:
        """So many records were lost to this watch, in all: what sequences hold is not known any more."""
        if num_dropped > self._num_dropped:
            self._num_dropped = num_dropped
            followed = self._journeys.keys()  # the ends of others may be among what was lost
            self._sequences = {key: each for key, each in self._sequences.items() if each.request_id in followed}
            for lane in self._lanes.values():
                lane.blocks.clear()
                lane.rows.leave_all()
                lane.running.clear()

    def _join(self, record: admin_pb2.StepRecord, lane: _Lane, join: admin_pb2.SequenceJoined, at_s: float) -> None:
        sequence_id = join.sequence_id
        if sequence_id in self._left:
            return
        known = self._sequences.get(sequence_id)
        if known is not None and known.executor != record.executor_index:
            self._take_away(self._lane(known.executor), sequence_id)
        self._sequences[sequence_id] = _SlotOwner(join.request_id, join.num_prompt_tokens, record.executor_index)
        label = f"{join.request_id} #{join.sample_index}" if join.sample_index else join.request_id
        lane.running.add(sequence_id)
        lane.rows.join(sequence_id, label, join.num_prompt_tokens)
        self._note(record, sequence_id, "joined", at_s)

    def _stop(self, record: admin_pb2.StepRecord, lane: _Lane, sequence_id: int, what: str, at_s: float) -> None:
        lane.rows.preempt(sequence_id)
        self._note(record, sequence_id, what, at_s)

    def _leave(self, record: admin_pb2.StepRecord, leave: admin_pb2.SequenceLeft) -> None:
        sequence_id = leave.sequence_id
        self._note(record, sequence_id, "left", record.applied_ns / 1e9)
        known = self._sequences.pop(sequence_id, None)
        num_tokens = known.num_prompt_tokens + leave.num_output_tokens - 1 if known is not None else None
        for lane in self._lanes.values():
            lane.blocks.release(sequence_id, num_tokens)
            lane.rows.leave(sequence_id, leave.num_output_tokens)
            lane.running.discard(sequence_id)
        self._left[sequence_id] = None
        if len(self._left) > _NUM_REMEMBERED:
            del self._left[next(iter(self._left))]

    def _take_away(self, lane: _Lane, sequence_id: int) -> None:
        lane.blocks.release(sequence_id)
        lane.rows.leave(sequence_id)
        lane.running.discard(sequence_id)

    def _note(self, record: admin_pb2.StepRecord, sequence_id: int, what: str, at_s: float) -> None:
        if self._journeys and (journey := self._journey(sequence_id)) is not None:
            journey.note(at_s, what, record.executor_index, record.step_id)

    def _follow_step(self, record: admin_pb2.StepRecord) -> None:
        columns = zip(record.sequence_ids, record.num_tokens, record.context_lens, record.num_sampled, strict=True)
        for sequence_id, num_tokens, context_len, num_sampled in columns:
            journey = self._journey(sequence_id)
            if journey is None or not num_tokens:
                continue
            num_prompt_tokens = self._sequences[sequence_id].num_prompt_tokens
            is_prefill = context_len < num_prompt_tokens or num_tokens > 1
            journey.computed(
                record.applied_ns / 1e9,
                record.executor_index,
                record.step_id,
                num_prompt_tokens=num_tokens if is_prefill else 0,
                is_sampled=bool(num_sampled),
            )

    def _journey(self, sequence_id: int) -> Journey | None:
        known = self._sequences.get(sequence_id)
        return None if known is None else self._journeys.get(known.request_id)

    def _lane(self, index: int) -> _Lane:
        lane = self._lanes.get(index)
        if lane is None:
            lane = self._lanes[index] = _Lane()
        return lane

    # --- the server's state ------------------------------------------------------------------------------------------

    def look(self, info: ServerInfo) -> dict[str, Any]:
        """Take the server's state, and return it as the pages get it."""
        has_cache = info.options.get("enable_prefix_caching", "true").lower() == "true"
        for executor in info.executors:
            lane = self._lane(executor.index)
            lane.divide(executor, has_cache=has_cache)
            if lane.incarnation not in (None, executor.incarnation) or not executor.connected:
                self._lose(executor.index, lane, info.uptime_s)
            elif not executor.num_running:  # aborted sequences are named by the next record only
                lane.blocks.keep_only(())
            lane.incarnation = executor.incarnation
        for index in self._lanes.keys() - {executor.index for executor in info.executors}:
            del self._lanes[index]
        point = self._figures.look(info)
        self._state = _state(info)
        return self._state | ({} if point is None else {"point": point})

    def _lose(self, index: int, lane: _Lane, at_s: float) -> None:
        for sequence_id in lane.running:
            known = self._sequences.get(sequence_id)
            if known is not None and (journey := self._journeys.get(known.request_id)) is not None:
                journey.note(at_s, "lost", index, 0)
        lane.running.clear()
        lane.blocks.clear()
        lane.rows.leave_all()

    # --- frames ------------------------------------------------------------------------------------------------------

    def take(self) -> dict[str, Any] | None:
        """What has changed since the last call; None: nothing."""
        lanes = {}
        for index, lane in self._lanes.items():
            changes, schedule = lane.blocks.take_changes(), lane.rows.take()
            if changes or schedule is not None:
                lanes[index] = _lane_fields(lane, changes) | ({} if schedule is None else {"schedule": schedule})
        return {"type": "frame", "lanes": lanes, "dropped": self._num_dropped} if lanes else None

    def snapshot(self) -> dict[str, Any]:
        """Everything, for a page that opens. Changes that `take` has not returned yet come again with the next one."""
        lanes = {
            index: _lane_fields(lane, lane.blocks.states()) | {"schedule": lane.rows.snapshot()}
            for index, lane in self._lanes.items()
        }
        return {
            "type": "snapshot",
            "lanes": lanes,
            "figures": self._figures.snapshot(),
            "state": self._state,
            "dropped": self._num_dropped,
        }


def _lane_fields(lane: _Lane, changes: list[int]) -> dict[str, Any]:
    held = {"held": lane.blocks.num_held, "shared": lane.blocks.num_shared}
    if isinstance(lane.blocks, PageMap):
        return {"pages": changes, **held, "kinds": lane.blocks.counts}
    return {"blocks": changes, **held}


def _state(info: ServerInfo) -> dict[str, Any]:
    load = info.load
    return {
        "type": "state",
        "version": info.version,
        "uptime_s": round(info.uptime_s, 3),
        "draining": info.draining,
        "waiting": load.num_waiting,
        "running": load.num_running,
        "swapped": load.num_swapped,
        "host_blocks": load.num_host_blocks,
        "used_host_blocks": load.num_used_host_blocks,
        "cached_host_blocks": load.num_cached_host_blocks,
        "output_tokens": load.num_output_tokens,
        "preemptions": load.num_preemptions,
        "prefix_queries": load.num_prefix_queries,
        "prefix_hits": load.num_prefix_hits,
        "faults": {fault.kind: fault.count for fault in info.faults},
        "executors": [_executor(each) for each in info.executors],
    }


def _executor(info: ExecutorInfo) -> dict[str, Any]:
    layout = {"windows": info.kv_group_windows, "state_pages": info.pages_per_state} if info.kv_group_pages else {}
    memory = [[part.name, part.computed_bytes, part.measured_bytes] for part in info.memory]
    return {
        "index": info.index,
        "target": info.target,
        "device": info.device,
        "state": info.state,
        "reason": info.reason,
        "incarnation": f"{info.incarnation:016x}",
        "waiting": info.num_waiting,
        "running": info.num_running,
        "swapped": info.num_swapped,
        "slots": info.max_num_seqs,
        "block_size": info.block_size,
        "blocks": info.num_device_blocks,
        "used_blocks": info.num_used_device_blocks,
        "cached_blocks": info.num_cached_device_blocks,
        "steps": info.num_steps,
        "output_tokens": info.num_output_tokens,
        **layout,
        **({"memory": memory} if memory else {}),
    }
