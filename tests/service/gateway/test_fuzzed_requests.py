"""Requests that nobody would think of: any values in any fields, any bytes. They end, and the service serves on."""

from __future__ import annotations

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cadenza.v1 import generation_pb2, types_pb2
from tests.checkpoints import make_llama
from tests.helpers.errors import error_servers
from tests.helpers.errors.error_calls import in_session, perform, perform_in_session
from tests.helpers.errors.error_table import CALLS

pytestmark = [pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="module")]

FUZZED = ["Generate"] * 5 + ["Tokenize", "Detokenize", "Abort", "GetBlockTable", "Drain", "WatchSteps"]
FUZZED += ["LoadAdapter", "UnloadAdapter", "ListAdapters"]
RARE = set(
    "request_id resume resume_grace_s adapter n best_of beam_width length_penalty early_stopping grammar".split()
)
"""Fields of which nearly any value is refused: seldom set, so that the others are reached."""
STATUSES = {"OK", "INVALID_ARGUMENT", "NOT_FOUND"}
few = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def services(tmp_path_factory):
    folder = make_llama(tmp_path_factory.mktemp("model"), tokenizer=True, vocab_size=300)
    async with error_servers.main_server(folder, speculative="suffix") as services:
        yield services


def integers(low, high):
    edges = [low, high, 0, 1, 2, 3, 255, 256, 299, 300, 2**31 - 1]
    near = st.integers(max(low, -2), min(high, 299))
    return near | st.sampled_from([edge for edge in edges if low <= edge <= high]) | st.integers(low, high)


def scalars(field):
    """Any value of a field's type."""
    types = {
        field.TYPE_DOUBLE: st.floats(0, 1) | st.sampled_from([2.0, -1.0, 1e300, 1e-300]) | st.floats(),
        field.TYPE_BOOL: st.booleans(),
        field.TYPE_INT32: integers(-(2**31), 2**31 - 1),
        field.TYPE_UINT32: integers(0, 2**32 - 1),
        field.TYPE_UINT64: integers(0, 2**64 - 1),
        field.TYPE_ENUM: integers(-3, 5),
        field.TYPE_STRING: st.text(st.characters(exclude_categories=["C"]), max_size=300) | st.text(max_size=300),
        field.TYPE_BYTES: st.binary(max_size=200),
    }
    return types[field.type]


def values(field):
    """Any value of a field, lists and messages too."""
    if field.message_type is None:
        items = st.lists(scalars(field), min_size=1, max_size=4) | st.just([])
        return items if field.is_repeated else scalars(field)
    if field.message_type.GetOptions().map_entry:
        fields = field.message_type.fields_by_name
        return st.dictionaries(scalars(fields["key"]), scalars(fields["value"]), max_size=3)
    inner = st.deferred(lambda: changes(field.message_type))
    return st.lists(inner, min_size=1, max_size=3) if field.is_repeated else inner


@st.composite
def changes(draw, descriptor):
    """Some of a message's fields with any values: few, so that not every request ends at the first check."""
    oneofs = [[field.name for field in oneof.fields] for oneof in descriptor.oneofs if len(oneof.fields) > 1]
    names = sorted(descriptor.fields_by_name)
    if common := sorted(set(names) - RARE):
        names = draw(st.sampled_from([common, common, common, common, names]))
    names = draw(st.lists(st.sampled_from(names), min_size=1, max_size=4, unique=True)) if names else []
    for oneof in oneofs:
        chosen = [name for name in names if name in oneof]
        names = [name for name in names if name not in chosen[1:]]
    return {name: draw(values(descriptor.fields_by_name[name])) for name in names}


@st.composite
def payloads(draw, call):
    """A request that is right but for some fields; sometimes with bytes spoiled, or bytes alone."""
    given_id = {"request_id": "fuzzed"} if call == "Generate" else {}
    payload = CALLS[call].make(given_id | draw(changes(CALLS[call].request.DESCRIPTOR))).SerializeToString()
    match draw(st.integers(0, 19)):
        case 0:
            return draw(st.binary(max_size=40))
        case 1 if payload:
            at = draw(st.integers(0, len(payload) - 1))
            return payload[:at] + draw(st.binary(max_size=3)) + payload[at + 1 :]
        case _:
            return payload


async def forget(services):
    """A request with a grace would keep its id for the next example."""
    abort = generation_pb2.AbortRequest(request_id="fuzzed").SerializeToString()
    assert (await perform(services.scheduler, services.target, "Abort", abort)).status == "OK"


def check(outcome, call=""):
    assert outcome.status in STATUSES or (call == "LoadAdapter" and outcome.status == "PERMISSION_DENIED"), outcome
    # The executor took every plan, and could compute it.
    assert "ERROR" not in outcome.message.split()[-1:], outcome
    assert "NON_FINITE" not in outcome.message, outcome


@few
@given(st.sampled_from(FUZZED).flatmap(lambda call: st.tuples(st.just(call), payloads(call))))
async def test_any_request_ends(services, sent):
    call, payload = sent
    check(await perform(services.scheduler, services.target, call, payload), call)
    if call == "Drain":
        await perform(services.scheduler, services.target, "Resume", b"")
    await forget(services)


@few
@given(changes(types_pb2.SamplingParams.DESCRIPTOR))
async def test_any_sampling_params_end(services, params):
    payload = CALLS["Generate"].make({"sampling_params": params}).SerializeToString()
    check(await perform(services.scheduler, services.target, "Generate", payload))


@few
@given(st.one_of([payloads("Generate").map(in_session)] * 4 + [payloads("Session")]))
async def test_any_message_leaves_the_others_of_its_session_alone(services, payload):
    check(await perform_in_session(services.scheduler, services.target, payload, services.healthy))
    await forget(services)
