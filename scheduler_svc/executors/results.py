"""execution.proto: converts results from the wire form."""

from __future__ import annotations

from array import array
from typing import Any

from cadenza.v1 import execution_pb2 as pb
from cadenza_common.serving.slices import SLICE_ITEMS, Work, run_at_once, slices_of
from scheduler_svc.core.result import Candidates, PromptLogprobs, SlotError, StepResult, StepStatus, TokenLogprobs
from scheduler_svc.executors.convert import ProtocolError

_ENTRY_ITEMS = 64
"""The work of reading the logprobs of one token, in numbers that take as long: 4 us (measured)."""
_STATUSES = {int(status): status for status in StepStatus}


def step_result(message: pb.StepResult) -> StepResult:
    """Return a result; raises ProtocolError if its columns differ in length."""
    if message.logprobs or message.prompt_logprobs:
        return run_at_once(result_in_slices(message))
    return _filled(message, _checked_status(message), {}, {})


def result_in_slices(message: pb.StepResult) -> Work[StepResult]:
    """Return a result, with a pause after each slice of its logprobs; raises ProtocolError.

    One without logprobs is short: `step_result` returns it at less cost.
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
    return status


def _filled(
    message: pb.StepResult,
    status: StepStatus,
    logprobs: dict[int, tuple[TokenLogprobs, ...]],
    prompt_logprobs: dict[int, PromptLogprobs],
) -> StepResult:
    timings = message.timings
    return StepResult(
        step_id=message.step_id,
        status=status,
        error_message=message.error_message,
        slots=message.slots[:],
        num_tokens=message.num_tokens[:],
        token_ids=message.token_ids[:],
        num_drafts=message.num_drafts[:],
        num_accepted=message.num_accepted[:],
        error_slots=message.error_slots[:],
        errors=[_slot_error(error) for error in message.errors],
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        candidates=_candidates(message),
        debug_digest=message.debug_digest,
        queue_ns=timings.queue_ns,
        device_ns=timings.device_ns,
        sample_ns=timings.sample_ns,
        moves_ns=timings.moves_ns,
        total_ns=timings.total_ns,
    )


def _logprobs(message: pb.StepResult) -> Work[dict[int, tuple[TokenLogprobs, ...]]]:
    by_slot = {}
    counts = dict(zip(message.slots, message.num_tokens or [1] * len(message.slots), strict=False))
    num_items = 0
    for entry in message.logprobs:
        by_slot[entry.slot] = _token_logprobs(entry, counts.get(entry.slot, 1))
        num_items += len(entry.columns.chosen_logprobs) * (_ENTRY_ITEMS + entry.columns.num_top)
        if num_items > SLICE_ITEMS:
            num_items = 0
            yield
    return by_slot


def _token_logprobs(entry: pb.SlotLogprobs, num_tokens: int) -> tuple[TokenLogprobs, ...]:
    """Return logprobs in compact arrays, as `_prompt_columns`: Python numbers would take eight times the memory."""
    columns, width = entry.columns, entry.columns.num_top
    logprobs, ranks = columns.chosen_logprobs, columns.chosen_ranks
    if not len(logprobs) == len(ranks) == num_tokens:
        raise ProtocolError(f"slot {entry.slot}: logprobs of {len(logprobs)} tokens for {num_tokens}")
    if not num_tokens * width == len(columns.top_token_ids) == len(columns.top_logprobs):
        raise ProtocolError(
            f"slot {entry.slot}: {len(columns.top_token_ids)} top tokens for {num_tokens} tokens with {width} each"
        )
    return tuple(
        TokenLogprobs(
            logprob=logprobs[index],
            rank=ranks[index],
            top_token_ids=array("I", columns.top_token_ids[index * width : (index + 1) * width]),
            top_logprobs=array("f", columns.top_logprobs[index * width : (index + 1) * width]),
        )
        for index in range(num_tokens)
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


def _prompt_logprobs(message: pb.StepResult) -> Work[dict[int, PromptLogprobs]]:
    by_slot = {}
    for entry in message.prompt_logprobs:
        by_slot[entry.slot] = yield from _prompt_columns(entry)
    if len(by_slot) != len(message.prompt_logprobs):
        raise ProtocolError(f"result of step {message.step_id}: prompt logprobs of a slot come twice")
    return by_slot


def _prompt_columns(entry: pb.SlotLogprobs) -> Work[PromptLogprobs]:
    """Return prompt logprobs in compact arrays, since they are kept as long as the request lives."""
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
    return PromptLogprobs(
        start=entry.start,
        logprobs=(yield from _to_array("f", columns.chosen_logprobs)),
        ranks=(yield from _to_array("I", columns.chosen_ranks)),
        num_top=columns.num_top,
        top_token_ids=(yield from _to_array("I", columns.top_token_ids)),
        top_logprobs=(yield from _to_array("f", columns.top_logprobs)),
    )


def _to_array(typecode: str, values: Any) -> Work[array[Any]]:
    """Copy a repeated field, with a pause after each slice of a long one."""
    copied = array(typecode)
    for part in slices_of(values):
        copied.extend(part)
        if len(values) > SLICE_ITEMS:
            yield
    return copied
