"""Plans from the wire; checks only what is needed to read columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from cadenza.v1 import execution_pb2 as pb
from cadenza_common.grammar.wire import spec_from_wire
from cadenza_common.plan.errors import InvalidPlan
from cadenza_common.plan.plan import (
    KV_GROUP,
    AdmittedSequence,
    BlockMoves,
    GroupAppends,
    GroupTable,
    PrefixSource,
    StateSaves,
    StepPlan,
)
from cadenza_common.plan_wire.columns import MOVES, PARTS, PLAN_LISTS, PLAN_NUMBERS, SEQUENCE_NUMBERS, ints_in_slices
from cadenza_common.plan_wire.sampling import check_count, same_length, sampling_in_slices
from cadenza_common.serving.slices import SLICE_ITEMS, Work, run_at_once

_SEQUENCE_ITEMS = 128
"""The work of reading one sequence, in numbers that take as long: 40 us (measured)."""
_MAX_ADMITTED = 16_384
"""Most sequences that a plan admits: 2 MiB hold no more with sampling parameters. A garbage collection would hold the
loop for 45 ms for a million objects."""
_MAX_NAMED = 10
"""Maximum reserved fields that an error names."""

_Read = Work[dict[str, Any]]
"""Fields of a StepPlan by name."""


def plan_from_wire(message: pb.StepPlan) -> StepPlan:
    """Read a plan; raises InvalidPlan if its columns differ in length."""
    return run_at_once(plan_in_slices(message))


def plan_from_bytes(wire: bytes) -> StepPlan:
    """Reverse `StepPlan.wire`; errors as those of `plan_from_wire`."""
    return replace(plan_from_wire(pb.StepPlan.FromString(wire)), wire=lambda: wire)


def plan_in_slices(message: pb.StepPlan) -> Work[StepPlan]:
    """Read a plan, with a pause after each slice of its admissions; raises InvalidPlan, as `plan_from_wire`."""
    # A step that only decodes has none of the parts.
    present = {field.name: value for field, value in message.ListFields()}
    fields = {name: present.pop(name) for name in PLAN_NUMBERS if name in present}
    reserved = [name for name in present if name not in _READERS]
    for part, read in _READERS.items():
        if part in present:
            fields |= yield from read(part, present[part], reserved)
    # Each once and only some of them: a list of millions would be the error message.
    named = tuple(dict.fromkeys(reserved))[:_MAX_NAMED]
    return StepPlan(**{"step_id": 0} | fields, reserved=named, wire=message.SerializeToString)


def _list(part: str, values: Any, _reserved: list[str]) -> _Read:
    return {part: (yield from ints_in_slices(values))}


def _columns(part: str, message: Any, _reserved: list[str]) -> _Read:
    same_length(part, *(getattr(message, column) for column, _ in PARTS[part]))
    fields = {}
    for column, name in PARTS[part]:
        fields[name] = yield from ints_in_slices(getattr(message, column))
    return fields


def _moves(part: str, messages: Sequence[pb.BlockMoves], reserved: list[str]) -> _Read:
    return {part: BlockMoves(*(yield from _by_group(part, messages, ("sources", "destinations"), reserved)))}


def _appends(part: str, messages: Sequence[pb.BlockAppends], reserved: list[str]) -> _Read:
    columns, names = zip(*PARTS[part], strict=True)
    check_count(part, messages)
    first = [message for message in messages if not message.kv_group]
    fields = dict(zip(names, (yield from _joined(part, first, columns)), strict=True)) if first else {}
    others: list[GroupAppends] = []
    for message in messages:
        if message.kv_group:
            _note_group(part, message.kv_group, reserved)
            others.append(GroupAppends(message.kv_group, *(yield from _joined(part, [message], columns))))
    return fields | {"group_appends": others} if others else fields


def _state_saves(part: str, message: pb.StateSaves, _reserved: list[str]) -> _Read:
    same_length(part, message.slots, message.positions)
    num_slots, num_pages = len(message.slots), len(message.page_ids)
    if num_pages % num_slots if num_slots else num_pages:
        raise InvalidPlan(f"{part}: {num_pages} page_ids for {num_slots} slots are not as many for each")
    return {
        part: StateSaves(
            (yield from ints_in_slices(message.slots)),
            (yield from ints_in_slices(message.positions)),
            (yield from ints_in_slices(message.page_ids)),
        )
    }


def _by_group(part: str, messages: Sequence[Any], names: tuple[str, ...], reserved: list[str]) -> Work[list[Any]]:
    """Read columns of equal length from one message or more, which name KV group 0."""
    check_count(part, messages)
    for message in messages:
        if message.kv_group:
            _note_group(part, message.kv_group, reserved)
    return (yield from _joined(part, messages, names))


def _joined(part: str, messages: Sequence[Any], names: tuple[str, ...]) -> Work[list[Any]]:
    for message in messages:
        same_length(part, *(getattr(message, name) for name in names))
    columns = []
    for name in names:
        joined = yield from ints_in_slices(getattr(messages[0], name))
        for message in messages[1:]:
            joined += yield from ints_in_slices(getattr(message, name))
        columns.append(joined)
    return columns


def _note_group(part: str, kv_group: int, reserved: list[str]) -> None:
    """Add a KV group other than 0 to the fields that executors of one group refuse."""
    reserved.append(f"{part}.{KV_GROUP} {kv_group}")


def _admitted(part: str, messages: Sequence[pb.AdmittedSequence], reserved: list[str]) -> _Read:
    """Read admissions, with a pause after each slice of numbers and sequences."""
    check_count(part, messages, _MAX_ADMITTED)
    admitted: list[AdmittedSequence] = []
    num_items = 0
    for message in messages:
        admitted.append((yield from _sequence(message, reserved)))
        num_items += _SEQUENCE_ITEMS + len(admitted[-1].token_ids) + len(admitted[-1].block_ids)
        if num_items > SLICE_ITEMS:
            num_items = 0
            yield
    return {part: admitted}


def _sequence(message: pb.AdmittedSequence, reserved: list[str]) -> Work[AdmittedSequence]:
    tables = message.block_tables
    check_count("block_tables", tables)
    if len({table.kv_group for table in tables}) < len(tables):
        raise InvalidPlan(f"admitted: slot {message.slot} has several block tables in one KV group")
    first = next((table for table in tables if not table.kv_group), None)
    if first is not None and first.first_block:
        reserved.append(f"block_tables.first_block {first.first_block}")
    others: list[GroupTable] = []
    for table in tables:
        if table.kv_group:
            _note_group("block_tables", table.kv_group, reserved)
            page_ids = yield from ints_in_slices(table.block_ids)
            others.append(GroupTable(table.kv_group, table.first_block, page_ids))
    return AdmittedSequence(
        token_ids=(yield from ints_in_slices(message.token_ids)),
        block_ids=(yield from ints_in_slices(() if first is None else first.block_ids)),
        first_block=0 if first is None else first.first_block,
        group_tables=tuple(others),
        sampling=(yield from sampling_in_slices(message.sampling)),
        sample_index=message.sampling.sample_index,
        state_pages=(yield from ints_in_slices(message.state_pages)) if message.state_pages else (),
        source=_source(message.source) if message.HasField("source") else None,
        grammar=spec_from_wire(message.grammar) if message.HasField("grammar") else None,
        **{name: getattr(message, name) for name in SEQUENCE_NUMBERS},
    )


def _source(message: pb.PrefixSource) -> PrefixSource:
    return PrefixSource(message.slot, message.num_tokens, message.num_blocks)


# The parts of a plan. If several are wrong, the error is that of the first one here.
_READERS: dict[str, Callable[[str, Any, list[str]], _Read]] = {
    "admitted": _admitted,
    **dict.fromkeys(PLAN_LISTS, _list),
    **dict.fromkeys(MOVES, _moves),
    **dict.fromkeys(PARTS, _columns),
    "appends": _appends,
    "state_saves": _state_saves,
}
