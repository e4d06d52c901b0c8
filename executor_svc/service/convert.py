"""Converts plans from and results to their wire form; checks only what is needed to read columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from cadenza.v1 import execution_pb2 as pb
from cadenza.v1 import types_pb2
from cadenza_common.grammar.wire import spec_from_wire
from cadenza_common.serving.slices import SLICE_ITEMS, Work, run_at_once, slices_of
from executor_svc.plan import plan as p
from executor_svc.plan.arrays import FloatArray, IntArray
from executor_svc.plan.plan import InvalidPlan
from executor_svc.plan.sampling import SequenceSampling

_SEQUENCE_ITEMS = 128
"""The work of reading one sequence, in numbers that take as long: 40 us (measured)."""
_ENTRY_ITEMS = 64
"""The work of writing the logprobs of one token, in numbers that take as long."""
_MAX_SHORT_LIST = SLICE_ITEMS
"""Most numbers in each list of a sequence's sampling parameters that is read in one call; requests have 2,048 at most.
"""
_MAX_LISTS = 1024
"""Most lists of one kind: of words, or of moves, appends and block tables by KV group."""
_MAX_ADMITTED = 16_384
"""Most sequences that a plan admits: 2 MiB hold no more with sampling parameters. A garbage collection would hold the
loop for 45 ms for a million objects."""
_MAX_NAMED = 10
"""Maximum reserved fields that an error names."""


def _ints(values: Any) -> IntArray:
    """Return a packed repeated field as [n] int64."""
    return np.fromiter(values, np.int64, len(values))


def _ints_in_slices(values: Any) -> Work[IntArray]:
    """Return a packed repeated field as [n] int64, with a pause after each slice of a long one."""
    if len(values) <= SLICE_ITEMS:
        return _ints(values)
    parts = []
    for part in slices_of(values):
        parts.append(_ints(part))
        yield
    return np.concatenate(parts)


def _floats(values: Any) -> FloatArray:
    return np.fromiter(values, np.float32, len(values))


def _same_length(part: str, *columns: Sequence[Any] | np.ndarray[Any, Any]) -> None:
    lengths = [len(column) for column in columns]
    if len(set(lengths)) > 1:
        raise InvalidPlan(f"{part}: columns of different lengths {lengths}")


def plan_from_wire(message: pb.StepPlan) -> p.StepPlan:
    """Read a plan; raises InvalidPlan if its columns differ in length."""
    return run_at_once(plan_in_slices(message))


def plan_from_bytes(wire: bytes) -> p.StepPlan:
    """Reverse `StepPlan.wire`; errors as those of `plan_from_wire`."""
    return replace(plan_from_wire(pb.StepPlan.FromString(wire)), wire=lambda: wire)


def plan_in_slices(message: pb.StepPlan) -> Work[p.StepPlan]:
    """Read a plan, with a pause after each slice of its admissions; raises InvalidPlan, as `plan_from_wire`."""
    # A step that only decodes has none of the parts.
    present = {field.name: value for field, value in message.ListFields()}
    reserved: list[str] = ["transfers"] if "transfers" in present else []
    parts: dict[str, Any] = {}
    for part, read in _PARTS.items():
        if part in present:
            parts[part] = yield from read(part, present[part], reserved)
    return p.StepPlan(
        step_id=message.step_id,
        epoch=message.epoch,
        decode_ready=message.decode_ready,
        max_drafts=message.max_drafts,
        debug_digest=message.debug_digest,
        announces_start=message.announces_start,
        # Each once and only some of them: a list of millions would be the error message.
        reserved=tuple(dict.fromkeys(reserved))[:_MAX_NAMED],
        wire=message.SerializeToString,
        **parts,
    )


def _slots(_part: str, slots: Any, _reserved: list[str]) -> Work[IntArray]:
    return _ints_in_slices(slots)


def _scheduled(part: str, message: pb.ScheduledTokens, _reserved: list[str]) -> Work[p.ScheduledTokens]:
    _same_length(part, message.slots, message.num_tokens, message.samples)
    slots = yield from _ints_in_slices(message.slots)
    num_tokens = yield from _ints_in_slices(message.num_tokens)
    samples = yield from _ints_in_slices(message.samples)
    return p.ScheduledTokens(slots, num_tokens, samples.astype(np.bool_))


def _given(part: str, message: pb.GivenTokens, _reserved: list[str]) -> Work[p.SlotColumns]:
    return _slot_columns(part, message.slots, message.token_ids)


def _forks(part: str, message: pb.SampleForks, _reserved: list[str]) -> Work[p.SlotColumns]:
    return _slot_columns(part, message.slots, message.source_slots)


def _slot_columns(part: str, slots: Any, values: Any) -> Work[p.SlotColumns]:
    _same_length(part, slots, values)
    return p.SlotColumns((yield from _ints_in_slices(slots)), (yield from _ints_in_slices(values)))


def _first_group(part: str, groups: Sequence[int], reserved: list[str]) -> None:
    """Add KV groups other than 0, which only hybrid models have, to the reserved fields."""
    reserved.extend(f"{part}.kv_group {group}" for group in groups if group)


def _check_count(part: str, lists: Sequence[Any], limit: int = _MAX_LISTS) -> None:
    """Raise InvalidPlan for more lists, or numbers, than one call should read."""
    if len(lists) > limit:
        raise InvalidPlan(f"{part}: {len(lists)} entries; at most {limit} are allowed")


def _moves(part: str, messages: Sequence[pb.BlockMoves], reserved: list[str]) -> Work[p.BlockMoves]:
    return p.BlockMoves(*(yield from _by_group(part, messages, ("sources", "destinations"), reserved)))


def _appends(part: str, messages: Sequence[pb.BlockAppends], reserved: list[str]) -> Work[p.SlotColumns]:
    return p.SlotColumns(*(yield from _by_group(part, messages, ("slots", "block_ids"), reserved)))


def _by_group(
    part: str, messages: Sequence[Any], names: tuple[str, str], reserved: list[str]
) -> Work[tuple[IntArray, IntArray]]:
    """Read two columns of equal length from one message or more, which name their KV groups."""
    _check_count(part, messages)
    _first_group(part, [message.kv_group for message in messages], reserved)
    columns = [[getattr(message, name) for message in messages] for name in names]
    for pair in zip(*columns, strict=True):
        _same_length(part, *pair)
    first = yield from _joined(columns[0])
    return first, (yield from _joined(columns[1]))


def _joined(fields: Sequence[Any]) -> Work[IntArray]:
    """Return packed repeated fields, one after the other."""
    parts = []
    for field in fields:
        parts.append((yield from _ints_in_slices(field)))
    return np.concatenate(parts)


def _admitted_in_slices(
    part: str, messages: Sequence[pb.AdmittedSequence], reserved: list[str]
) -> Work[tuple[p.AdmittedSequence, ...]]:
    """Read admissions, with a pause after each slice of numbers and sequences."""
    _check_count(part, messages, _MAX_ADMITTED)
    admitted, num_items = [], 0
    for message in messages:
        admitted.append((yield from _admitted(message, reserved)))
        num_items += _SEQUENCE_ITEMS + len(admitted[-1].token_ids) + len(admitted[-1].block_ids)
        if num_items > SLICE_ITEMS:
            num_items = 0
            yield
    return tuple(admitted)


def _admitted(message: pb.AdmittedSequence, reserved: list[str]) -> Work[p.AdmittedSequence]:
    tables = message.block_tables
    _check_count("block_tables", tables)
    _first_group("block_tables", [table.kv_group for table in tables], reserved)
    if len({table.kv_group for table in tables}) < len(tables):
        raise InvalidPlan(f"admitted: slot {message.slot} has several block tables in one KV group")
    if message.embeddings:
        reserved.append("embeddings")
    return p.AdmittedSequence(
        slot=message.slot,
        token_ids=(yield from _ints_in_slices(message.token_ids)),
        num_prompt_tokens=message.num_prompt_tokens,
        num_computed_tokens=message.num_computed_tokens,
        block_ids=(yield from _ints_in_slices(tables[0].block_ids if tables else ())),
        sampling=(yield from _sampling_in_slices(message.sampling)),
        held=message.held,
        adapter_index=message.adapter_index,
        source=_source(message.source) if message.HasField("source") else None,
        max_drafts=message.max_drafts,
        max_len=message.max_len,
        draft_scope=message.draft_scope,
        grammar=spec_from_wire(message.grammar) if message.HasField("grammar") else None,
        grammar_turn=message.grammar_turn,
    )


# The fields of a plan with columns. If several are wrong, the error is that of the first one here.
_PARTS: dict[str, Callable[[str, Any, list[str]], Work[Any]]] = {
    "admitted": _admitted_in_slices,
    "released_slots": _slots,
    "swap_out": _moves,
    "copies": _moves,
    "swap_in": _moves,
    "appends": _appends,
    "held_slots": _slots,
    "resumed_slots": _slots,
    "given": _given,
    "scheduled": _scheduled,
    "forks": _forks,
}


def _source(message: pb.PrefixSource) -> p.PrefixSource:
    return p.PrefixSource(message.slot, message.num_tokens, message.num_blocks)


def sampling_from_wire(message: types_pb2.SequenceSampling) -> SequenceSampling:
    """Read every field that is set, by its name in the table; other fields are off."""
    return run_at_once(_sampling_in_slices(message))


def _sampling_in_slices(message: types_pb2.SequenceSampling) -> Work[SequenceSampling]:
    """Read every field that is set, with a pause after each slice of a long list; raises InvalidPlan."""
    _same_length("biases", message.bias_token_ids, message.biases)
    values: dict[str, Any] = {}
    for field, value in message.ListFields():
        if field.name == "allowed_token_ids":
            values[field.name] = yield from _ints_in_slices(value)
        elif field.name == "bad_words":
            values[field.name] = yield from _words_in_slices(value)
        else:
            if field.is_repeated:
                _check_count(field.name, value, _MAX_SHORT_LIST)
            values[field.name] = _READERS.get(field.name, _number)(value)
    return SequenceSampling(**values)


def _words_in_slices(messages: Sequence[types_pb2.TokenIds]) -> Work[tuple[IntArray, ...]]:
    _check_count("bad_words", messages)
    words, num_items = [], 0
    for message in messages:
        words.append((yield from _ints_in_slices(message.ids)))
        num_items += len(words[-1])
        if num_items > SLICE_ITEMS:
            num_items = 0
            yield
    return tuple(words)


def _number(value: Any) -> Any:
    return value


_READERS: dict[str, Callable[[Any], Any]] = {
    "stop_token_ids": _ints,
    "bias_token_ids": _ints,
    "biases": _floats,
}


def result_to_wire(result: p.StepResult, epoch: int, incarnation: int) -> pb.StepResult:
    """Return the wire form of a result of this session."""
    return run_at_once(response_in_slices(result, epoch, incarnation)).result


def response_in_slices(result: p.StepResult, epoch: int, incarnation: int) -> Work[pb.ExecuteResponse]:
    """Return the message of a result of this session, with a pause after each slice of its logprobs.

    It is filled in place: protobuf would copy each part of a message that it is put together from.
    """
    response = pb.ExecuteResponse()
    message = response.result
    message.epoch, message.incarnation = epoch, incarnation
    _fill_without_logprobs(message, result)
    num_items = num_in_all = 0
    for items, messages in (
        (result.logprobs, message.logprobs),
        (result.prompt_logprobs, message.prompt_logprobs),
    ):
        for item in items:
            yield from _fill_logprobs(messages.add(), item)
            num_of_item = _ENTRY_ITEMS + len(item.chosen_logprobs) + len(item.top_token_ids)
            num_items, num_in_all = num_items + num_of_item, num_in_all + num_of_item
            if num_items > SLICE_ITEMS:
                num_items = 0
                yield
    if num_in_all > SLICE_ITEMS:
        yield  # Serializing it is a slice of its own.
    return response


def _fill_without_logprobs(message: pb.StepResult, result: p.StepResult) -> None:
    message.step_id = result.step_id
    # The enums of plan.py have the numbers of the protocol.
    message.status = cast(pb.StepStatus.ValueType, int(result.status))
    message.error_message = result.error_message
    message.debug_digest = result.debug_digest
    message.slots.extend(result.slots.tolist())
    message.num_tokens.extend(result.num_tokens.tolist())
    message.token_ids.extend(result.token_ids.tolist())
    message.num_drafts.extend(result.num_drafts.tolist())
    message.num_accepted.extend(result.num_accepted.tolist())
    message.error_slots.extend(result.error_slots.tolist())
    message.errors.extend([cast(pb.SlotError.ValueType, int(error)) for error in result.errors])
    message.candidates.extend([_slot_candidates(item) for item in result.candidates])
    to, timings = message.timings, result.timings
    to.queue_ns, to.device_ns, to.sample_ns = timings.queue_ns, timings.device_ns, timings.sample_ns
    to.total_ns, to.moves_ns = timings.total_ns, timings.moves_ns


def _fill_logprobs(message: pb.SlotLogprobs, item: p.SlotLogprobs) -> Work[None]:
    message.slot, message.start = item.slot, item.start
    columns = message.columns
    columns.num_top = item.num_top
    for field, values in (
        (columns.chosen_logprobs, item.chosen_logprobs),
        (columns.chosen_ranks, item.chosen_ranks),
        (columns.top_token_ids, item.top_token_ids),
        (columns.top_logprobs, item.top_logprobs),
    ):
        for part in slices_of(values):
            field.extend(part.tolist())
            if len(values) > SLICE_ITEMS:
                yield


def _slot_candidates(item: p.SlotCandidates) -> pb.SlotCandidates:
    return pb.SlotCandidates(slot=item.slot, token_ids=item.token_ids.tolist(), logprobs=item.logprobs.tolist())
