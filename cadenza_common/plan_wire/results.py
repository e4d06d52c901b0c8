"""Results to and from the wire."""

from __future__ import annotations

from typing import Any

from cadenza.v1 import execution_pb2 as pb
from cadenza_common.plan.errors import ProtocolError
from cadenza_common.plan.result import Candidates, LogprobColumns, SlotError, StepResult, StepStatus, StepTimings
from cadenza_common.plan_wire.columns import RESULT_LISTS, RESULT_NUMBERS, TIMINGS, copied_in_slices
from cadenza_common.serving.slices import SLICE_ITEMS, Work, run_at_once, slices_of

_ENTRY_ITEMS = 64
"""The work of the logprobs of one token, in numbers that take as long: reading them takes 4 us (measured)."""
_STATUSES = {int(status): status for status in StepStatus}
_LISTS = tuple(name for name in RESULT_LISTS if name != "errors")


def result_to_wire(result: StepResult, epoch: int, incarnation: int) -> pb.StepResult:
    """Return the wire form of a result of this session."""
    return run_at_once(response_in_slices(result, epoch, incarnation)).result


def response_in_slices(result: StepResult, epoch: int, incarnation: int) -> Work[pb.ExecuteResponse]:
    """Return the message of a result of this session, with a pause after each slice of its logprobs.

    It is filled in place: protobuf would copy each part of a message that it is put together from.
    """
    response = pb.ExecuteResponse()
    message = response.result
    message.epoch, message.incarnation = epoch, incarnation
    _fill_without_logprobs(message, result)
    num_items = num_in_all = 0
    for by_slot, messages in (
        (result.logprobs, message.logprobs),
        (result.prompt_logprobs, message.prompt_logprobs),
    ):
        for slot, item in by_slot.items():
            yield from _fill_logprobs(messages.add(slot=slot), item)
            num_of_item = _ENTRY_ITEMS + len(item.logprobs) + len(item.top_token_ids)
            num_items, num_in_all = num_items + num_of_item, num_in_all + num_of_item
            if num_items > SLICE_ITEMS:
                num_items = 0
                yield
    if num_in_all > SLICE_ITEMS:
        yield  # Serializing it is a slice of its own.
    return response


def _fill_without_logprobs(message: pb.StepResult, result: StepResult) -> None:
    for name in RESULT_NUMBERS:
        setattr(message, name, getattr(result, name))
    for name in RESULT_LISTS:
        if values := getattr(result, name):
            getattr(message, name).extend(values)
    for slot, found in result.candidates.items():
        message.candidates.add(slot=slot, token_ids=found.token_ids, logprobs=found.logprobs)
    for name in TIMINGS:
        setattr(message.timings, name, getattr(result.timings, name))


def _fill_logprobs(message: pb.SlotLogprobs, item: LogprobColumns) -> Work[None]:
    message.start = item.start
    columns = message.columns
    columns.num_top = item.num_top
    for field, values in (
        (columns.chosen_logprobs, item.logprobs),
        (columns.chosen_ranks, item.ranks),
        (columns.top_token_ids, item.top_token_ids),
        (columns.top_logprobs, item.top_logprobs),
    ):
        for part in slices_of(values):
            field.extend(part)
            if len(values) > SLICE_ITEMS:
                yield


def result_from_wire(message: pb.StepResult) -> StepResult:
    """Return a result; raises ProtocolError if its columns differ in length."""
    if message.logprobs or message.prompt_logprobs:
        return run_at_once(result_in_slices(message))
    return _filled(message, _checked_status(message), {}, {})


def result_in_slices(message: pb.StepResult) -> Work[StepResult]:
    """Return a result, with a pause after each slice of its logprobs; raises ProtocolError.

    One without logprobs is short: `result_from_wire` returns it at less cost.
    """
    if len(message.logprobs) * _ENTRY_ITEMS + _num_prompt_values(message) > SLICE_ITEMS:
        yield  # Parsing it was a slice of its own.
    status = _checked_status(message)
    logprobs = yield from _logprobs(message)
    prompt_logprobs = yield from _prompt_logprobs(message)
    return _filled(message, status, logprobs, prompt_logprobs)


def _checked_status(message: pb.StepResult) -> StepStatus:
    """Return the status; raises ProtocolError for an unknown one, and for columns that differ in length."""
    status = _STATUSES.get(message.status)
    if status is None:
        raise ProtocolError(f"result of step {message.step_id}: status {message.status} is unknown")
    num_slots, num_counts, num_tokens = len(message.slots), len(message.num_tokens), len(message.token_ids)
    num_sampled = sum(message.num_tokens) if num_counts else num_slots
    if status is StepStatus.OK and (num_counts not in (0, num_slots) or num_sampled != num_tokens):
        raise ProtocolError(
            f"result of step {message.step_id}: {num_slots} slots, {num_counts} counts, {num_tokens} token ids"
        )
    if len(message.errors) != len(message.error_slots):
        raise ProtocolError(
            f"result of step {message.step_id}: {len(message.errors)} errors of {len(message.error_slots)} slots"
        )
    if len(message.saved_slots) != len(message.saved_positions):
        raise ProtocolError(
            f"result of step {message.step_id}: {len(message.saved_slots)} saved_slots and "
            f"{len(message.saved_positions)} saved_positions"
        )
    return status


def _filled(
    message: pb.StepResult,
    status: StepStatus,
    logprobs: dict[int, LogprobColumns],
    prompt_logprobs: dict[int, LogprobColumns],
) -> StepResult:
    fields: dict[str, Any] = {name: getattr(message, name) for name in RESULT_NUMBERS}
    for name in _LISTS:
        # A list: nothing else comes out of a message as fast.
        fields[name] = getattr(message, name)[:]
    fields["status"] = status
    timings = message.timings
    return StepResult(
        **fields,
        errors=[_slot_error(error) for error in message.errors],
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        candidates=_candidates(message) if message.candidates else {},
        timings=StepTimings(**{name: getattr(timings, name) for name in TIMINGS}),
    )


def _logprobs(message: pb.StepResult) -> Work[dict[int, LogprobColumns]]:
    by_slot = {}
    counts = dict(zip(message.slots, message.num_tokens or [1] * len(message.slots), strict=False))
    num_items = 0
    for entry in message.logprobs:
        _check_counts(entry, counts.get(entry.slot, 1))
        # The core knows where they start, and plan logs do without.
        by_slot[entry.slot] = yield from _columns(entry, 0)
        num_items += len(entry.columns.chosen_logprobs) * (_ENTRY_ITEMS + entry.columns.num_top)
        if num_items > SLICE_ITEMS:
            num_items = 0
            yield
    return by_slot


def _check_counts(entry: pb.SlotLogprobs, num_tokens: int) -> None:
    """Raise ProtocolError if the logprobs of sampled tokens are not those of so many."""
    columns, width = entry.columns, entry.columns.num_top
    if not len(columns.chosen_logprobs) == len(columns.chosen_ranks) == num_tokens:
        raise ProtocolError(f"slot {entry.slot}: logprobs of {len(columns.chosen_logprobs)} tokens for {num_tokens}")
    if not num_tokens * width == len(columns.top_token_ids) == len(columns.top_logprobs):
        raise ProtocolError(
            f"slot {entry.slot}: {len(columns.top_token_ids)} top tokens for {num_tokens} tokens with {width} each"
        )


def _candidates(message: pb.StepResult) -> dict[int, Candidates]:
    by_slot = {entry.slot: _slot_candidates(entry) for entry in message.candidates}
    if len(by_slot) != len(message.candidates):
        raise ProtocolError(f"result of step {message.step_id}: candidates of a slot come twice")
    return by_slot


def _slot_candidates(entry: pb.SlotCandidates) -> Candidates:
    token_ids, logprobs = list(entry.token_ids), list(entry.logprobs)
    if not 0 < len(token_ids) == len(logprobs):
        raise ProtocolError(f"slot {entry.slot}: {len(token_ids)} candidates and {len(logprobs)} logprobs")
    return Candidates(token_ids, logprobs)


def _slot_error(number: int) -> SlotError:
    try:
        return SlotError(number)
    except ValueError:
        return SlotError.UNSPECIFIED


def _num_prompt_values(message: pb.StepResult) -> int:
    return sum(len(entry.columns.chosen_logprobs) * (1 + entry.columns.num_top) for entry in message.prompt_logprobs)


def _prompt_logprobs(message: pb.StepResult) -> Work[dict[int, LogprobColumns]]:
    by_slot = {}
    for entry in message.prompt_logprobs:
        _check_prompt_counts(entry)
        by_slot[entry.slot] = yield from _columns(entry, entry.start)
    if len(by_slot) != len(message.prompt_logprobs):
        raise ProtocolError(f"result of step {message.step_id}: prompt logprobs of a slot come twice")
    return by_slot


def _check_prompt_counts(entry: pb.SlotLogprobs) -> None:
    columns = entry.columns
    num_tokens, num_top = len(columns.chosen_logprobs), len(columns.top_token_ids)
    if entry.start < 1 or num_tokens < 1 or len(columns.chosen_ranks) != num_tokens:
        raise ProtocolError(
            f"slot {entry.slot}: {num_tokens} prompt logprobs and {len(columns.chosen_ranks)} ranks from {entry.start}"
        )
    if not num_tokens * columns.num_top == num_top == len(columns.top_logprobs):
        raise ProtocolError(
            f"slot {entry.slot}: {num_top} top tokens and {len(columns.top_logprobs)} logprobs "
            f"for {num_tokens} prompt tokens with {columns.num_top} each"
        )


def _columns(entry: pb.SlotLogprobs, start: int) -> Work[LogprobColumns]:
    """Return logprobs in buffers: they are kept as long as the request lives."""
    columns = entry.columns
    return LogprobColumns(
        start=start,
        logprobs=(yield from copied_in_slices("f", columns.chosen_logprobs)),
        ranks=(yield from copied_in_slices("I", columns.chosen_ranks)),
        num_top=columns.num_top,
        top_token_ids=(yield from copied_in_slices("I", columns.top_token_ids)),
        top_logprobs=(yield from copied_in_slices("f", columns.top_logprobs)),
    )
