"""Sampling parameters to and from the wire. A numeric parameter of the table needs no line here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

from cadenza.v1 import types_pb2
from cadenza_common.plan.errors import InvalidPlan
from cadenza_common.plan.sampling import COLUMNS, SequenceSampling
from cadenza_common.plan_wire.columns import copied_in_slices, ints, ints_in_slices
from cadenza_common.serving.slices import SLICE_ITEMS, Work, run_at_once

MAX_LISTS = 1024
"""Most lists of one kind: of words, or of moves, appends and block tables by KV group."""
_MAX_SHORT_LIST = SLICE_ITEMS
"""Most numbers in each list of a sequence's sampling parameters that is read in one call; requests have 2,048 at most.
"""

_NUMBERS = tuple(name for name in COLUMNS if name not in ("seed", "sample_index"))
_OFF = tuple(each.default for name in _NUMBERS for each in dataclasses.fields(SequenceSampling) if each.name == name)
_numbers: Callable[[SequenceSampling], tuple[Any, ...]] = attrgetter(*_NUMBERS)


def sampling_to_wire(sampling: SequenceSampling, sample_index: int = 0) -> types_pb2.SequenceSampling:
    """Return the wire form of one sequence's sampling parameters."""
    message = types_pb2.SequenceSampling()
    fill_sampling(message, sampling, sample_index)
    return message


def fill_sampling(
    message: types_pb2.SequenceSampling, sampling: SequenceSampling, sample_index: int, *, with_allowed: bool = True
) -> None:
    """Fill an empty message with what is on. Assigning the seed makes a part of another message present, even if all is
    zero.

    with_allowed: whether to fill in the allowed token ids, the longest list.
    """
    message.seed = sampling.seed
    if sample_index:
        message.sample_index = sample_index
    numbers = _numbers(sampling)
    if numbers != _OFF:
        for name, value, off in zip(_NUMBERS, numbers, _OFF, strict=True):
            if value != off:
                setattr(message, name, value)
    if sampling.stop_token_ids:
        message.stop_token_ids.extend(sampling.stop_token_ids)
    if sampling.bias_token_ids:
        message.bias_token_ids.extend(sampling.bias_token_ids)
        message.biases.extend(sampling.biases)
    if sampling.allowed_token_ids and with_allowed:
        message.allowed_token_ids.extend(sampling.allowed_token_ids)
    for word in sampling.bad_words:
        message.bad_words.add().ids.extend(word)


def sampling_from_wire(message: types_pb2.SequenceSampling) -> SequenceSampling:
    """Reverse `sampling_to_wire`, as the scheduler has it: lists are tuples. Raises InvalidPlan."""
    found = run_at_once(sampling_in_slices(message))
    return dataclasses.replace(
        found,
        stop_token_ids=tuple(found.stop_token_ids),
        allowed_token_ids=tuple(found.allowed_token_ids),
        bias_token_ids=tuple(found.bias_token_ids),
        biases=tuple(found.biases),
        bad_words=tuple(map(tuple, found.bad_words)),
    )


def sampling_in_slices(message: types_pb2.SequenceSampling) -> Work[SequenceSampling]:
    """Read every field that is set, with a pause after each slice of a long list; raises InvalidPlan."""
    same_length("biases", message.bias_token_ids, message.biases)
    values: dict[str, Any] = {}
    for field, value in message.ListFields():
        name = field.name
        if name == "allowed_token_ids":
            values[name] = yield from ints_in_slices(value)
        elif name == "bad_words":
            values[name] = yield from _words_in_slices(value)
        elif field.is_repeated:
            check_count(name, value, _MAX_SHORT_LIST)
            values[name] = (yield from copied_in_slices("f", value)) if name == "biases" else ints(value)
        else:
            values[name] = value
    return SequenceSampling(**values)


def _words_in_slices(messages: Sequence[types_pb2.TokenIds]) -> Work[tuple[Sequence[int], ...]]:
    check_count("bad_words", messages)
    words, num_items = [], 0
    for message in messages:
        words.append((yield from ints_in_slices(message.ids)))
        num_items += len(words[-1])
        if num_items > SLICE_ITEMS:
            num_items = 0
            yield
    return tuple(words)


def same_length(part: str, *columns: Sequence[Any]) -> None:
    """Raise InvalidPlan if columns differ in length."""
    lengths = [len(column) for column in columns]
    if len(set(lengths)) > 1:
        raise InvalidPlan(f"{part}: columns of different lengths {lengths}")


def check_count(part: str, lists: Sequence[Any], limit: int = MAX_LISTS) -> None:
    """Raise InvalidPlan for more lists, or numbers, than one call should read."""
    if len(lists) > limit:
        raise InvalidPlan(f"{part}: {len(lists)} entries; at most {limit} are allowed")
