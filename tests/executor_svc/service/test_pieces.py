"""Long plans are parsed and read in pieces, to the same plan; nothing else may be long."""

from __future__ import annotations

import dataclasses
import random
from array import array
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from cadenza.v1 import execution_pb2 as pb
from cadenza.v1 import types_pb2
from cadenza_common.plan.errors import InvalidPlan
from cadenza_common.plan_wire.reading import plan_from_wire, plan_in_slices
from cadenza_common.serving.slices import SLICE_ITEMS, run_at_once
from cadenza_common.wire.transport import MAX_PLAN_BYTES, MAX_SHORT_BYTES
from executor_svc.service import pieces
from executor_svc.service.pieces import request_in_slices
from scheduler_svc.core.steps.budget import MAX_ADMITTED_VALUES
from tests.fuzz.wire.messages import any_message, with_length

_PLAN_TAG = b"\x12"
UNKNOWN = b"\x98\x06\x01"


def long(plan: bytes) -> bytes:
    """A message of the plan stream that is long enough to be parsed in pieces."""
    padded = plan + UNKNOWN * (MAX_SHORT_BYTES // len(UNKNOWN) + 1)
    return _PLAN_TAG + with_length(padded)


def sequence(slot: int, num_tokens: int, **sampling: Any) -> pb.AdmittedSequence:
    """A sequence with ids, and as many blocks, of 4 bytes."""
    numbers = range(2**21, 2**21 + num_tokens)
    return pb.AdmittedSequence(
        slot=slot,
        token_ids=numbers,
        num_prompt_tokens=num_tokens,
        block_tables=[{"block_ids": numbers}],
        sampling=types_pb2.SequenceSampling(
            temperature=0.7, top_p=0.9, top_k=2**21, min_p=0.1, repetition_penalty=1.1, presence_penalty=0.1,
            frequency_penalty=0.1, seed=2**63, sample_index=slot, min_tokens=2**21, num_logprobs=20, top_n_sigma=1.5,
            **sampling,
        ),
    )  # fmt: skip


def changes(num_slots: int, num_moves: int) -> pb.StepPlan:
    """All that a plan has besides admissions, for so many slots and moved blocks."""
    slots, blocks = range(num_slots), range(2**21, 2**21 + num_moves)
    return pb.StepPlan(
        step_id=2**40,
        epoch=9,
        released_slots=slots,
        held_slots=slots,
        resumed_slots=slots,
        swap_out=[pb.BlockMoves(sources=blocks, destinations=blocks)],
        appends=[pb.BlockAppends(slots=slots, block_ids=range(2**21, 2**21 + num_slots))],
        scheduled=pb.ScheduledTokens(slots=slots, num_tokens=slots, samples=[True] * num_slots),
        forks=pb.SampleForks(source_slots=slots, slots=slots),
    )


def largest(num_sequences: int) -> bytes:
    """A plan whose admissions have as many numbers as a scheduler sends, 4,096 slots, 32,768 swapped blocks."""
    plan = changes(4096, 32_768)
    for slot in range(num_sequences):
        plan.admitted.append(sequence(slot, MAX_ADMITTED_VALUES // num_sequences // 2))
    return pb.ExecuteRequest(plan=plan).SerializeToString()


def prompt_with_allowed_ids() -> bytes:
    plan = changes(4096, 32_768)
    plan.admitted.append(sequence(0, 65_536, allowed_token_ids=range(2**21, 2**21 + 131_072)))
    return pb.ExecuteRequest(plan=plan).SerializeToString()


LARGEST = {
    "one sequence": lambda: largest(1),
    "256 sequences": lambda: largest(256),
    "4,096 sequences": lambda: largest(4096),
    "allowed ids": prompt_with_allowed_ids,
}


@pytest.mark.parametrize("name", LARGEST)
def test_the_largest_plans_that_a_scheduler_sends_fit_and_are_parsed_in_pieces(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = LARGEST[name]()
    assert MAX_SHORT_BYTES < len(raw) <= MAX_PLAN_BYTES
    expected = pb.ExecuteRequest.FromString(raw)
    assert run_at_once(request_in_slices(raw)) == expected
    assert len(list(request_in_slices(raw))) >= len(raw) // pieces.PIECE_BYTES


@given(any_message(pb.StepPlan.DESCRIPTOR), st.integers(16, 200))
def test_pieces_of_any_size_give_the_same_plan(body: bytes, piece_bytes: int) -> None:
    raw = _PLAN_TAG + with_length(body)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "MAX_SHORT_BYTES", 0)
        patch.setattr(pieces, "PIECE_BYTES", piece_bytes)
        patch.setattr(pieces, "_SLICE_FIELDS", 7)
        try:
            expected = pb.ExecuteRequest.FromString(raw)
        except DecodeError:
            with pytest.raises(DecodeError):
                run_at_once(request_in_slices(raw))
            return
        read = run_at_once(request_in_slices(raw))
    assert read.SerializeToString(deterministic=True) == expected.SerializeToString(deterministic=True)


class CountingParser:
    """In place of a message: what each call would parse."""

    DESCRIPTOR = pb.StepPlan.DESCRIPTOR

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def MergeFromString(self, raw: bytes) -> None:
        self.sizes.append(len(raw))


@pytest.mark.parametrize(
    "body",
    [
        (b"\x9a\x06" + with_length(b"x" * 30)) * 60_000,
        pb.StepPlan(released_slots=[5] * 2_000_000).SerializeToString(),
        (b"\x22" + with_length(UNKNOWN * 10)) * 60_000,
    ],
    ids=["unknown fields", "one list", "many lists"],
)
def test_no_call_parses_more_than_a_piece(body: bytes) -> None:
    parser = CountingParser()
    for _ in pieces._merge(parser, body, 0, len(body)):
        pass
    assert max(parser.sizes) <= pieces.PIECE_BYTES + 16  # the header of a list's part
    assert len(body) <= sum(parser.sizes) <= len(body) + 16 * len(parser.sizes)


@pytest.mark.parametrize(
    "raw",
    [
        UNKNOWN * 30_000,
        pb.ExecuteRequest(open=pb.OpenSession(scheduler_id="x" * 70_000)).SerializeToString(),
        long(b"")[:-1],
        long(b"") + UNKNOWN,
        b"\xff" * 70_000,
        _PLAN_TAG + with_length(b"\x1a\xff\xff\x7f" + b"\x80" * 100_000),
        _PLAN_TAG + with_length(b"\x1a" + with_length(b"\x80" * 300_000)),
    ],
    ids=["unknown fields", "opening", "cut", "more than a plan", "noise", "beyond the end", "an endless number"],
)
def test_another_long_message_is_an_error(raw: bytes) -> None:
    with pytest.raises(DecodeError):
        run_at_once(request_in_slices(raw))


@pytest.mark.parametrize("fields", [UNKNOWN, b"\x3a\x00"], ids=["unknown", "sequences"])
def test_a_long_plan_of_too_many_fields_is_an_error(fields: bytes) -> None:
    assert run_at_once(request_in_slices(_PLAN_TAG + with_length(fields * 65_536))).HasField("plan")
    with pytest.raises(DecodeError, match="it has over 65536 fields"):
        run_at_once(request_in_slices(_PLAN_TAG + with_length(fields * 65_537)))


def test_the_length_of_a_long_opening_is_named() -> None:
    raw = pb.ExecuteRequest(open=pb.OpenSession(scheduler_id="x" * 70_000)).SerializeToString()
    with pytest.raises(DecodeError, match=f"it has {len(raw)} bytes and is no plan; at most 65536 are allowed"):
        run_at_once(request_in_slices(raw))


# ---------------------------------------------------------------- reading the parsed plan

_MANY = random.Random(3).choices(range(200_000), k=5 * SLICE_ITEMS)


@pytest.mark.parametrize(
    ("plan", "num_lists"),
    [
        (pb.StepPlan(released_slots=_MANY), 1),
        (pb.StepPlan(held_slots=_MANY), 1),
        (pb.StepPlan(resumed_slots=_MANY), 1),
        (pb.StepPlan(swap_out=[{"sources": _MANY, "destinations": _MANY}]), 2),
        (pb.StepPlan(appends=[{"slots": _MANY, "block_ids": _MANY}]), 2),
        (pb.StepPlan(given={"slots": _MANY, "token_ids": _MANY}), 2),
        (pb.StepPlan(scheduled={"slots": _MANY, "num_tokens": _MANY, "samples": [True] * len(_MANY)}), 3),
        (pb.StepPlan(admitted=[{"token_ids": _MANY, "block_tables": [{"block_ids": _MANY}]}]), 2),
        (pb.StepPlan(admitted=[{"sampling": {"bad_words": [{"ids": _MANY}]}}]), 1),
    ],
    ids=["released", "held", "resumed", "moves", "appends", "given", "scheduled", "admitted", "bad words"],
)
def test_each_long_list_is_read_in_slices(plan: pb.StepPlan, num_lists: int) -> None:
    assert len(list(plan_in_slices(plan))) >= 5 * num_lists
    read = plan_from_wire(plan)
    columns = [getattr(read, field.name) for field in dataclasses.fields(read)]
    for each in (read.swap_out, read.copies, read.swap_in):
        columns += [getattr(each, field.name) for field in dataclasses.fields(each)]
    for each in read.admitted:
        columns += [each.token_ids, each.block_ids, *each.sampling.bad_words]
    assert sum(isinstance(each, array) and len(each) == len(_MANY) for each in columns) == num_lists


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (pb.StepPlan(swap_in=[{}] * 1025), "swap_in: 1025 entries; at most 1024 are allowed"),
        (pb.StepPlan(appends=[{}] * 1025), "appends: 1025 entries"),
        (pb.StepPlan(admitted=[{}] * 16_385), "admitted: 16385 entries; at most 16384 are allowed"),
        (pb.StepPlan(admitted=[{"block_tables": [{}] * 1025}]), "block_tables: 1025 entries"),
        (pb.StepPlan(admitted=[{"sampling": {"bad_words": [{}] * 1025}}]), "bad_words: 1025 entries"),
        (pb.StepPlan(admitted=[{"sampling": {"stop_token_ids": _MANY}}]), "stop_token_ids: 81920 entries"),
    ],
    ids=["moves", "appends", "sequences", "block tables", "bad words", "stop ids"],
)
def test_more_lists_than_a_plan_can_have_are_refused(plan: pb.StepPlan, reason: str) -> None:
    with pytest.raises(InvalidPlan, match=reason):
        plan_from_wire(plan)
