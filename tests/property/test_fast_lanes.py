"""Each fast lane does what its slow form does, for every field: docs/fast-lanes.md names them.

The fields come from the messages and classes themselves, so a new one fails here until both forms have it.
"""

from __future__ import annotations

import dataclasses
import json
import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from cadenza.outputs import CompletionOutput, RequestOutput
from cadenza.sampling_params import SamplingParams
from cadenza.v1 import execution_pb2, generation_pb2, types_pb2
from cadenza_common.plan.plan import AdmittedSequence, StepPlan
from cadenza_common.plan.result import StepResult
from cadenza_common.plan.sampling import Grammar, SequenceSampling
from cadenza_common.plan_wire import columns, reading, results, writing
from cadenza_common.serving import slices
from cadenza_common.serving.slices import run_at_once
from gateway_svc.openai.answers import AnswerHead
from gateway_svc.openai.chat import _ChatAnswer
from gateway_svc.openai.completions import _CompletionAnswer
from gateway_svc.requests.request import GatewayRequest
from scheduler_svc.convert import plain_output
from scheduler_svc.core.adapters.events import AdapterLoaded, AdapterRegistered
from scheduler_svc.core.lanes.lane import Lane
from scheduler_svc.core.lanes.planned_step import PlannedStep
from scheduler_svc.core.policies.policies import Policies
from scheduler_svc.core.request_table import RequestTable
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequences.sequence import Sequence
from scheduler_svc.core.steps import admission, plain_admission, preemption
from scheduler_svc.core.types import ExecutorSpec, Finish, RequestSpec
from tests.helpers.core.deltas import deltas
from tests.helpers.paths import ROOT

RESERVED = {"transfers", "embeddings", "finished_transfers", "kv_group", "chosen_tokens", "top_tokens"}
"""On the wire for later, or of the messages to clients; no plan or result has them."""


def filled(message: Message, seed: int = 1) -> Message:
    """Set every field of a message, and of those in it, each to another value; of a oneof the first."""
    for number, field in enumerate(message.DESCRIPTOR.fields, start=seed):
        if field.name in RESERVED or (field.containing_oneof and field != field.containing_oneof.fields[0]):
            continue
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            inner = getattr(message, field.name)
            filled(inner.add() if field.is_repeated else inner, number)
        elif field.is_repeated:
            getattr(message, field.name).extend([_value(field, number), _value(field, number + 1)])
        else:
            setattr(message, field.name, _value(field, number))
    return message


def _value(field: FieldDescriptor, number: int) -> Any:
    if field.type == FieldDescriptor.TYPE_BOOL:
        return True
    if field.type == FieldDescriptor.TYPE_STRING:
        return f"text {number}"
    if field.type == FieldDescriptor.TYPE_BYTES:
        return bytes([number])
    if field.type == FieldDescriptor.TYPE_ENUM:
        return 1
    return number / 8 if field.type == FieldDescriptor.TYPE_FLOAT else number


def at_default(value: Any) -> set[str]:
    """Names of the fields that have their default."""
    return {
        each.name
        for each in dataclasses.fields(value)
        if getattr(value, each.name) == (each.default if each.default_factory is dataclasses.MISSING else [])
    }


# ------------------------------------------------------------------------------------------------ plans and results


def as_in_the_scheduler(plan: StepPlan) -> StepPlan:
    """A plan that was read, as the scheduler makes it: the grammar is its sampling's, and it has all of its blocks."""
    (sequence,) = plan.admitted
    spec = execution_pb2.StepPlan.FromString(plan.wire()).admitted[0].grammar.SerializeToString()
    source = dataclasses.replace(sequence.source, num_blocks=0)
    with_grammar = dataclasses.replace(sequence.sampling, grammar=Grammar(spec, b"engine"))
    return dataclasses.replace(plan, admitted=[dataclasses.replace(sequence, sampling=with_grammar, source=source)])


def test_every_field_of_a_plan_is_read_and_written() -> None:
    """Of a plan with every field of the protocol set, none is lost, on either side."""
    message = filled(execution_pb2.StepPlan())
    message.admitted[0].block_tables.add(kv_group=1, first_block=2, block_ids=[3])
    message.appends.add(kv_group=2, slots=[4], block_ids=[5])
    read = reading.plan_from_wire(message)
    first_block = message.admitted[0].block_tables[0].first_block
    # Only executors with several KV groups have these; others refuse them by name.
    assert {*read.reserved} == {
        f"block_tables.first_block {first_block}", "block_tables.kv_group 1", "appends.kv_group 2",
    }  # fmt: skip
    assert at_default(read) <= {"executor_id", "reserved"}
    (sequence,) = read.admitted
    assert not at_default(sequence)
    assert at_default(sequence.sampling) == {"grammar"}
    written = writing.plan_to_wire(as_in_the_scheduler(read), read.epoch)
    # A sequence with a source has the source's grammar, which is not sent again; its blocks count from the source's.
    message.admitted[0].ClearField("grammar")
    message.admitted[0].source.num_blocks = 0
    assert written == message


def test_every_field_of_a_result_is_read_and_written() -> None:
    message = filled(execution_pb2.StepResult())
    # One token of the slot with logprobs.
    for name in ("slots", "num_tokens", "token_ids", "num_drafts", "num_accepted", "error_slots", "errors"):
        del getattr(message, name)[1:]
    message.slots[0], message.num_tokens[0] = message.logprobs[0].slot, 1
    for entry, num_tokens in ((message.logprobs[0], 1), (message.prompt_logprobs[0], 2)):
        entry.columns.num_top = 1
        for name in ("chosen_logprobs", "chosen_ranks", "top_token_ids", "top_logprobs"):
            del getattr(entry.columns, name)[num_tokens:]
        for name in ("chosen_bytes", "top_bytes"):  # the scheduler's, as texts are
            entry.columns.ClearField(name)
    message.prompt_logprobs[0].start = 3
    read = results.result_from_wire(message)
    assert at_default(read) <= {"num_sequences", "num_computed"} | ({"status"} if read.status == 1 else set())
    # The scheduler knows where the logprobs of new tokens begin.
    message.logprobs[0].start = 0
    assert results.result_to_wire(read, message.epoch, message.incarnation) == message


def test_a_plan_in_slices_is_that_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists that are longer than a slice are copied part by part."""
    message = filled(execution_pb2.StepPlan())
    read = reading.plan_from_wire(message)
    plan = as_in_the_scheduler(read)
    written = writing.plan_to_wire(plan, 3).SerializeToString()
    for module in (columns, reading, writing, slices):
        monkeypatch.setattr(module, "SLICE_ITEMS", 1)
    assert len(list(reading.plan_in_slices(message))) > 9
    again = reading.plan_from_wire(message)
    assert again == read
    assert len(list(writing.request_in_slices(plan, 3))) > 1
    assert writing.plan_to_wire(plan, 3).SerializeToString() == written


def test_a_result_without_logprobs_is_read_as_one_with() -> None:
    message = filled(execution_pb2.StepResult())
    for name in ("logprobs", "prompt_logprobs"):
        message.ClearField(name)
    message.num_tokens[:] = [1, 1]
    assert results.result_from_wire(message) == run_at_once(results.result_in_slices(message))


# ------------------------------------------------------------------------------------- admissions, ends, blocks

GRAMMAR = types_pb2.GrammarSpec(regex="a+").SerializeToString()


def spec_of(rng: random.Random, name: str) -> RequestSpec:
    """A request of one sequence, with a prompt that others may begin with too."""
    prompt = (7,) * rng.randrange(13) + tuple(rng.choices(range(3, 30), k=rng.randrange(1, 12)))
    sampling = SequenceSampling(
        seed=len(name), stop_token_ids=rng.choice([(2, 5), (2,), ()]), temperature=rng.choice([0.0, 0.5]),
        grammar=Grammar(GRAMMAR, b"engine") if rng.random() < 0.3 else None,
    )  # fmt: skip
    return RequestSpec(
        name, prompt, sampling, rng.choice([None, 1, 2, 9]), frozenset({2}), tenant=rng.choice(["", "blue"]),
        adapter_index=rng.choice([0, 0, 1, 2]), max_drafts=rng.choice([None, 0, 2]),
    )  # fmt: skip


def history(seed: int, *, with_drafts: bool) -> list[str]:
    """The plans and outputs of a load on a small pool, and the order in which sequences finished."""
    rng = random.Random(seed)
    core = Scheduler(Policies(prefix_caching=seed % 2 == 1))
    core.add_executor(
        0,
        ExecutorSpec(
            4, rng.choice([50, 90]), 24, 12, rng.choice([32, 96]), 60, watermark=0.05, grammar_engine=b"engine",
            max_drafts=3 if with_drafts else 0, max_loras=2, max_cpu_loras=2, shares_prefixes=True,
        ),
    )  # fmt: skip
    for index in (1, 2):
        core.adapter_event(AdapterRegistered(index, f"a{index}", "/a"))
    found: list[str] = []
    for number in range(100):
        for index in range(rng.choice([0, 0, 1, 2, 6])):
            core.add_request(spec_of(rng, f"{number}.{index}"), 0.0)
        for load in core.adapter_commands(0).loads:
            core.adapter_event(AdapterLoaded(load.index, b"%d" % load.index), 0)
        plan = core.plan_step(0, 0.0)
        found.append("" if plan is None else writing.plan_to_wire(plan, 1).SerializeToString().hex())
        if len(core.lanes[0].inflight) == 2 or (plan is None and core.lanes[0].inflight):
            step = core.lanes[0].inflight[0]
            slots = list(step.sampling_slots)
            token_ids = rng.choices(range(2, 12), k=len(slots))
            _, outputs = core.apply_result(0, StepResult(step.plan.step_id, slots=slots, token_ids=token_ids), 0.0)
            found.append(repr([(each.key, each.token_ids, each.finish) for each in deltas(outputs)]))
            found.append(repr([sequence.sequence_id for sequence in core.take_finished()]))
        core.check_integrity()
    return found


def finish_each(requests: RequestTable, _: Lane, finishes: dict[Sequence, Finish]) -> None:
    for sequence, finish in finishes.items():
        requests.finish(sequence, finish)


def append_each(lane: Lane, step: PlannedStep) -> None:
    """As `preemption._append_blocks` without beams, a line of the plan at a time."""
    needing_blocks = list(lane.decode_batch.needing_blocks)
    if not needing_blocks:
        return
    block_ids = lane.blocks.take(len(needing_blocks))
    for sequence in needing_blocks if lane.blocks.caching else ():
        lane.blocks.cache_full_blocks(sequence)
    lane.decode_batch.append_blocks(needing_blocks, block_ids)
    for sequence, block_id in zip(needing_blocks, block_ids, strict=True):
        preemption._note_append(step, sequence, block_id)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("with_drafts", [False, True])
def test_plans_and_outputs_are_those_of_one_by_one(
    seed: int, with_drafts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Joins of new requests, ends and appends of a step, together and each by itself."""
    admitted: list[AdmittedSequence] = []
    described = plain_admission.described
    monkeypatch.setattr(plain_admission, "described", lambda *args: admitted.append(described(*args)) or admitted[-1])
    together = history(seed, with_drafts=with_drafts)
    unused = set.intersection(*map(at_default, admitted))
    # Of several sequences, of those that wait, in executors, with several KV groups, and with states.
    unused -= {"sample_index", "source", "held", "grammar", "first_block", "group_tables", "state_pages"}
    assert unused <= (set() if with_drafts else {"max_drafts", "max_len", "draft_scope"}), "fields that none has"
    num_admitted = len(admitted)
    assert num_admitted > 20
    monkeypatch.setattr(admission, "admit_new", lambda *args: None)
    monkeypatch.setattr(RequestTable, "finish_all", finish_each)
    monkeypatch.setattr(preemption, "_append_blocks", append_each)
    assert history(seed, with_drafts=with_drafts) == together
    assert len(admitted) == num_admitted, "the second history takes none of the lanes"


# ------------------------------------------------------------------------------------------------ outputs and SSE

AS_BYTES = {
    generation_pb2.GenerateResponse: {"request_id", "outputs"},
    generation_pb2.SampleOutput: {"first_token_index", "token_ids", "text", "text_offset", "text_ends"},
    generation_pb2.SessionEvent: {"request_id", "response"},
    generation_pb2.SessionResponse: {"events"},
}
"""What `PlainOutput` writes."""
AS_MESSAGES = {
    generation_pb2.GenerateResponse: {"info", "prompt_logprobs", "prompt_logprobs_start", "stats"},
    generation_pb2.SampleOutput: {"sample_index", "logprobs", "finish", "cumulative_logprob"},
    generation_pb2.SessionEvent: {"error", "done"},
    generation_pb2.SessionResponse: set(),
}
"""What it leaves to messages: tests/scheduler_svc/convert/test_plain_output.py shows that it takes nothing then."""


def test_every_field_of_an_output_is_in_one_of_both_forms() -> None:
    written = re.findall(r"pb\.(\w+)\.(\w+)_FIELD_NUMBER", Path(plain_output.__file__).read_text())
    for message, names in AS_BYTES.items():
        assert names == {field.lower() for of, field in written if of == message.__name__}
        assert names | AS_MESSAGES[message] == {field.name for field in message.DESCRIPTOR.fields}


GENERATION = SimpleNamespace(prompt_token_ids=lambda prompt: [], total=lambda prompt: None)
PLAIN = SimpleNamespace(is_plain=True, opening=None)
"""How a chat's output is read where it is text alone."""
ANSWERS = {
    "chat": lambda asked: _ChatAnswer(asked, PLAIN, "model").events(GENERATION),
    "completions": lambda asked: _CompletionAnswer(asked, AnswerHead(asked.id, "text_completion", "model"), ()).events(
        GENERATION
    ),
}


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("include_usage", [False, True])
@given(texts=st.lists(st.text(min_size=1), min_size=1, max_size=4))
def test_events_of_text_are_those_of_objects(name: str, include_usage: bool, texts: list[str]) -> None:
    asked = GatewayRequest(
        id="id", prompts=["p"], params=SamplingParams(n=2), is_streamed=True, with_usage=include_usage
    )
    with patch("gateway_svc.openai.answers.time.time", return_value=7.0):
        fast, slow = ANSWERS[name](asked), ANSWERS[name](asked)
    assert fast._is_plain
    slow._is_plain = False
    for index, text in enumerate(texts):
        taken = [(0, RequestOutput("r", outputs=[CompletionOutput(index % 2, text, [index])]))]
        found, expected = fast.deltas(taken), slow.deltas(taken)
        assert choices_of(found) == choices_of(expected)
        # All else is equal to the byte, and so are choices, but that objects also say `"stop_reason":null`.
        assert found == expected.replace(b',"stop_reason":null', b"") or b"stop_reason" in text.encode()


def choices_of(events: bytes) -> list[dict[str, Any]]:
    """The chunks of events, without what is null in a choice."""
    chunks = [json.loads(event.removeprefix("data: ")) for event in events.decode().split("\n\n") if event]
    for chunk in chunks:
        chunk["choices"] = [
            {key: value for key, value in each.items() if value is not None} for each in chunk["choices"]
        ]
    return chunks


# ------------------------------------------------------------------------------------------------ the page


def test_the_page_names_every_test_of_this_file() -> None:
    page = (ROOT / "docs" / "fast-lanes.md").read_text()
    tests = {
        name for name in globals() if name.startswith("test_") and name != "test_the_page_names_every_test_of_this_file"
    }
    assert set(re.findall(r"`(test_\w+)`", page)) == tests
