"""Plans to the wire; what is unchanged stays absent, so a decode-only step takes a few bytes."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from cadenza.v1 import execution_pb2 as pb
from cadenza_common.plan.plan import AdmittedSequence, StepPlan
from cadenza_common.plan_wire.columns import MOVES, PARTS, PLAN_LISTS, PLAN_NUMBERS, SEQUENCE_NUMBERS
from cadenza_common.plan_wire.sampling import fill_sampling
from cadenza_common.serving.slices import SLICE_ITEMS, Work, run_at_once, slices_of

_SEQUENCE_ITEMS = 128
"""The work of describing one sequence, in numbers that take as long: 20 us (measured)."""
_PLAN_ITEMS = 4096
"""As many numbers of the admissions become part of a message before the first pause: making the plan was work too."""

_COLUMNS = tuple((columns[0][1], part, columns) for part, columns in PARTS.items())
_sequence_numbers = attrgetter(*SEQUENCE_NUMBERS)


def plan_to_wire(plan: StepPlan, epoch: int) -> pb.StepPlan:
    """Return a plan's wire form."""
    return run_at_once(request_in_slices(plan, epoch)).plan


def request_in_slices(plan: StepPlan, epoch: int) -> Work[pb.ExecuteRequest]:
    """Return the message of a plan, with a pause after each slice of its admissions.

    It is filled in place: protobuf would copy each part of a message that it is put together from.
    """
    request = pb.ExecuteRequest()
    _fill_without_admissions(request.plan, plan, epoch)
    admitted = request.plan.admitted
    num_items, most = 0, _PLAN_ITEMS
    for sequence in plan.admitted:
        size = _num_items(sequence)
        if num_items + size > most:
            yield
            num_items, most = 0, SLICE_ITEMS
        num_items += size
        message = admitted.add()
        if size <= SLICE_ITEMS:
            message.token_ids.extend(sequence.token_ids)
            _fill_admitted(message, sequence)
            continue
        yield from _extend(message.token_ids, sequence.token_ids)
        _fill_admitted(message, sequence, with_allowed=False)
        yield from _extend(message.sampling.allowed_token_ids, sequence.sampling.allowed_token_ids)
    return request


def _extend(field: Any, values: Sequence[int]) -> Work[None]:
    """Append to a repeated field, with a pause after each slice of a long list."""
    for part in slices_of(values):
        field.extend(part)
        if len(values) > SLICE_ITEMS:
            yield


def _num_items(sequence: AdmittedSequence) -> int:
    """The work of describing a sequence, in numbers that take as long."""
    num_items = _SEQUENCE_ITEMS + len(sequence.token_ids) + len(sequence.block_ids) + sequence.sampling.num_values
    num_items += sum(len(table.page_ids) for table in sequence.group_tables) + len(sequence.state_pages)
    return num_items if sequence.source is None else num_items - sequence.source.num_blocks


def _fill_without_admissions(message: pb.StepPlan, plan: StepPlan, epoch: int) -> None:
    """Fill in what is there: a decode step has little more than its id."""
    for name in PLAN_NUMBERS:
        if value := getattr(plan, name):
            setattr(message, name, value)
    message.epoch = epoch
    for name in PLAN_LISTS:
        if values := getattr(plan, name):
            getattr(message, name).extend(values)
    for name in MOVES:
        if moves := getattr(plan, name):
            getattr(message, name).add(sources=moves.sources, destinations=moves.destinations)
    for first, part, columns in _COLUMNS:
        if getattr(plan, first):
            to = message.appends.add() if part == "appends" else getattr(message, part)
            for column, name in columns:
                getattr(to, column).extend(getattr(plan, name))
    for each in plan.group_appends:
        message.appends.add(kv_group=each.kv_group, slots=each.slots, block_ids=each.page_ids)
    if saves := plan.state_saves:
        message.state_saves.slots.extend(saves.slots)
        message.state_saves.positions.extend(saves.positions)
        message.state_saves.page_ids.extend(saves.page_ids)


def _fill_admitted(message: pb.AdmittedSequence, sequence: AdmittedSequence, *, with_allowed: bool = True) -> None:
    """Fill in all but the token ids; what is 0 or false stays absent."""
    source, grammar, block_ids = sequence.source, sequence.sampling.grammar, sequence.block_ids
    for name, value in zip(SEQUENCE_NUMBERS, _sequence_numbers(sequence), strict=True):
        if value:
            setattr(message, name, value)
    if source is not None:
        block_ids = block_ids[source.num_blocks :]
        message.source.slot = source.slot
        message.source.num_tokens, message.source.num_blocks = source.num_tokens, source.num_blocks
    table = message.block_tables.add()
    table.block_ids.extend(block_ids)
    if sequence.first_block:
        table.first_block = sequence.first_block
    for other in sequence.group_tables:
        message.block_tables.add(kv_group=other.kv_group, first_block=other.first_block, block_ids=other.page_ids)
    if sequence.state_pages:
        message.state_pages.extend(sequence.state_pages)
    fill_sampling(message.sampling, sequence.sampling, sequence.sample_index, with_allowed=with_allowed)
    if grammar is not None and source is None:
        message.grammar.ParseFromString(grammar.spec)
