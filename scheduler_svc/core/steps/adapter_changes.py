"""Events of adapters: which requests may run, which wait outside of the queue, and which can never run."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial

from scheduler_svc.core.adapters.events import (
    AdapterCommands,
    AdapterDue,
    AdapterEvent,
    AdapterFailure,
    AdapterLoaded,
    AdapterRegistered,
    AdapterRemoved,
)
from scheduler_svc.core.adapters.lane_adapters import FAILED_PRECONDITION, NO_ADAPTERS
from scheduler_svc.core.errors import RequestRejectedError
from scheduler_svc.core.lanes.lane import Lane
from scheduler_svc.core.placement.candidates import check_fits_one, holding_lanes, kinds_of, may_continue
from scheduler_svc.core.request_table import RequestTable
from scheduler_svc.core.sequences.sequence import SequenceGroup
from scheduler_svc.core.types import RequestSpec


def apply_event(requests: RequestTable, event: AdapterEvent, lane: Lane | None) -> None:
    """Apply an event; lane: the executor that answers. Raises InvariantError for an index that was used before."""
    if isinstance(event, AdapterRegistered):
        requests.adapters.register(event)
    elif isinstance(event, AdapterRemoved):
        requests.adapters.remove(event.index)
    elif isinstance(event, AdapterDue):
        requests.adapters.on_due(event.index)
    elif lane is not None and isinstance(event, AdapterLoaded):
        requests.adapters.num_answers += 1
        if _take(requests, lane, event):
            requests.placer.on_adapter_loaded()
            for group in [each for each in requests.adapters.parked if each.spec.adapter_index == event.index]:
                requests.unpark(group)
    elif lane is not None:
        requests.adapters.num_answers += 1
        lane.adapters.on_unloaded(event.index)


def adopt_loaded(requests: RequestTable, lane: Lane, answers: Collection[AdapterLoaded]) -> None:
    """Forget what an executor had, and take what it has, at the start of a session; nothing without one."""
    requests.adapters.num_answers += 1
    lane.adapters.reset()
    for answer in answers:
        lane.adapters.start_load(answer.index)
        _take(requests, lane, answer)
    sort_waiting(requests)


def commands(requests: RequestTable, lane: Lane) -> AdapterCommands:
    """What an executor with a session is to load and unload now; groups whose adapter leaves with it wait elsewhere."""
    table = requests.adapters
    held, users = partial(_held, requests, lane), partial(_users_of, requests, lane)
    found = table.commands(lane.adapters, held, users, requests.placer.num_strandings)
    if any(index in table.users for index in found.unloads):
        sort_waiting(requests)
        requests.placer.on_lane_changed(lane.executor_id)
    return found


def sort_waiting(requests: RequestTable) -> None:
    """Queue the groups whose adapter an executor has, and no others."""
    if not requests.adapters.users:
        return
    for group in [each for each in requests.waiting if not _has_lane(requests, each)]:
        requests.park(group)
    for group in [each for each in requests.adapters.parked if _has_lane(requests, each)]:
        requests.unpark(group)


def refusal(requests: RequestTable, index: int, wanted_hash: bytes = b"") -> AdapterFailure | None:
    """Why no executor can ever run requests with an adapter; None: one may.

    wanted_hash: the content that the adapter must have; empty: any.
    """
    adapter = requests.adapters.adapters.get(index)
    if adapter is None:  # it has lost its name, and its last request has ended here
        return None
    known = adapter.content_hash
    if wanted_hash and known and wanted_hash != known:
        message = f"its files have changed since the request began: {known.hex()[:16]} is not {wanted_hash.hex()[:16]}"
        return AdapterFailure(FAILED_PRECONDITION, message)
    lanes = requests.lanes.values()
    if not lanes or any(lane.adapters.may_have(index) for lane in lanes):
        return None
    states = [lane.adapters.state(index) for lane in lanes]
    return next((each.error for each in states if each is not None and each.error is not None), NO_ADAPTERS)


def misfit(
    requests: RequestTable, spec: RequestSpec, count: int, *, has_output: bool = False
) -> RequestRejectedError | None:
    """Why no executor can hold a request, of those that may load its adapter if there are any; None: one can.

    count: its sequences that must run together.
    """
    lanes = requests.lanes.values()
    able = [lane.spec for lane in lanes if lane.adapters.may_have(spec.adapter_index)]
    try:
        check_fits_one(spec, able or [lane.spec for lane in lanes], count, has_output=has_output)
    except RequestRejectedError as exc:
        return exc
    return None


def group_misfit(requests: RequestTable, group: SequenceGroup, count: int) -> RequestRejectedError | None:
    """As `misfit` of an unfinished group; also why none that may load its adapter can go on with its tokens."""
    index = group.spec.adapter_index
    able = [lane for lane in requests.lanes.values() if lane.adapters.may_have(index)]
    if index and able and not any(may_continue(lane, group) for lane in able):
        return RequestRejectedError("adapter", "the executors that may load it have other numerics than its tokens")
    return misfit(requests, group.spec, count, has_output=group.has_output)


def adapter_misfit(requests: RequestTable, spec: RequestSpec) -> RequestRejectedError | None:
    """As `misfit` of a new request that an executor without its adapter could hold; None otherwise."""
    found = misfit(requests, spec, spec.num_sequences) if requests.lanes else None
    if found is None or misfit(requests, replace(spec, adapter_index=0), spec.num_sequences) is not None:
        return None
    return found


def _take(requests: RequestTable, lane: Lane, answer: AdapterLoaded) -> bool:
    """Take an executor's answer; returns whether plans may name the adapter from now on."""
    adapter = requests.adapters.adapters.get(answer.index)
    if not lane.adapters.on_loaded(answer, adapter.content_hash if adapter is not None else b""):
        return False
    requests.adapters.on_loaded(answer.index, answer.content_hash)
    return True


def _has_lane(requests: RequestTable, group: SequenceGroup) -> bool:
    return any(lane.adapters.has(group.spec.adapter_index) for lane in requests.lanes.values())


def _users_of(requests: RequestTable, lane: Lane) -> Collection[int]:
    """The adapters that a lane is to have, those that were needed first first: of all unfinished groups.

    If some group can run only where its adapter is not loaded, of groups that the lane can hold: others keep no place.
    """
    table = requests.adapters
    if not requests.placer.strands_adapters:
        return table.users
    kinds, here = kinds_of(requests.lanes.values()), _held(requests, lane)
    for group in requests.groups.values():
        index = group.spec.adapter_index
        if index and index not in here and lane in holding_lanes(group, kinds):
            here.add(index)
    return [index for index in table.users if index in here]


def _held(requests: RequestTable, lane: Lane) -> set[int]:
    """The adapters of unfinished groups that have run on a lane, and may hold something there."""
    groups = requests.groups.values()
    return {group.spec.adapter_index for group in groups if group.was_admitted and group.lane_id == lane.executor_id}
