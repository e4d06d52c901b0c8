"""Executors that close, open and leave: what becomes of their KV and of the requests that they held."""

from __future__ import annotations

from collections.abc import Collection

from scheduler_svc.core.adapters.events import AdapterLoaded
from scheduler_svc.core.lanes.lane import Lane
from scheduler_svc.core.request_table import RequestTable
from scheduler_svc.core.steps.adapter_changes import adopt_loaded, sort_waiting
from scheduler_svc.core.steps.kept_kv import forget_kv, keep_kv
from scheduler_svc.core.steps.suspects import begun_steps, record_death
from scheduler_svc.core.types import SessionEnd


def close(requests: RequestTable, lane: Lane, end: SessionEnd | None) -> None:
    """A session ended. With `end`, certain KV stays until it is known what became of the executor."""
    lane.is_open = False
    lane.turnover.pause()
    if end is None:
        forget_kv(requests, lane)
    else:
        begun = begun_steps(lane, end)
        keep_kv(requests, lane)
        if end.failed_step_id:
            record_death(requests, begun)
        else:
            requests.begun[lane.executor_id] = begun
            lane.unexplained = frozenset(sequence.group for sequence in begun.computed)
    requests.placer.on_lane_changed(lane.executor_id)


def open_again(
    requests: RequestTable,
    lane: Lane,
    *,
    same_incarnation: bool,
    keeps_kv: bool,
    opens: bool = True,
    adapters: Collection[AdapterLoaded] = (),
) -> None:
    """It is known what became of an executor whose session ended: it is the same, with or without its KV, or has died.

    Without `opens` there is no new session: it is not waited for. `adapters`: the executor has loaded these.
    """
    loaded = {answer.index for answer in adapters}
    keeps_kv = keeps_kv and all(index in loaded for index in lane.running.num_by_adapter)
    begun = requests.begun.pop(lane.executor_id, None)
    lane.unexplained = frozenset()
    if not keeps_kv:
        forget_kv(requests, lane)
    if begun is not None and not same_incarnation:
        record_death(requests, begun)
    lane.is_open = opens
    adopt_loaded(requests, lane, adapters)
    requests.placer.on_lane_changed(lane.executor_id)


def remove(requests: RequestTable, lane: Lane) -> None:
    """Forget an executor and what it holds; the operator removed it, so no request is suspected."""
    requests.begun.pop(lane.executor_id, None)
    lane.unexplained = frozenset()
    forget_kv(requests, lane)
    requests.add_counts(lane)
    for group in requests.groups.values():
        if group.lane_id == lane.executor_id:
            group.lane_id = None
            for sequence in group.sequences:
                sequence.last_slot = None
    del requests.lanes[lane.executor_id]
    # The executors that remain may have no adapters.
    requests.adapters.num_answers += 1
    sort_waiting(requests)
    requests.placer.on_lane_changed(lane.executor_id)
