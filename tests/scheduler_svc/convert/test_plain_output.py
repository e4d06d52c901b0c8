"""Responses made as bytes are those of the plain form: two readers of one request, one for each form."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cadenza.v1 import generation_pb2 as pb
from cadenza_common.plan.result import LogprobColumns, TokenLogprobs
from cadenza_common.plan.sampling import SequenceSampling
from scheduler_svc.convert.generation import fill_response
from scheduler_svc.convert.plain_output import PlainOutput, varint
from scheduler_svc.core.types import BeamSpec, Finish, FinishDetail, RequestSpec
from scheduler_svc.engine.live_request import LiveRequest
from scheduler_svc.engine.reader import RequestReader
from scheduler_svc.engine.resume_point import ResumePoint, SamplePosition
from scheduler_svc.plan_loop.ports import BestOf, EngineRequest
from scheduler_svc.requests.detokenizer import StoppedText
from tests.helpers.models.toy_tokenizers import byte_level

TOKENIZER = byte_level()
LAST = Finish(FinishDetail.MAX_TOKENS)


def live_request(request_id="r", *, text=False, stop=(), best_of=None, sampling=None, **spec):
    found = RequestSpec(request_id, (5, 6), sampling or SequenceSampling(), **spec)
    make_text = (lambda: StoppedText(TOKENIZER, stop=stop)) if text else None
    return LiveRequest(EngineRequest(found, make_text, best_of=best_of), arrival_ns=1)


def plain_form(reader):
    """The reader's new output as a message that is filled in field by field; None if there is none."""
    chunk = reader.take()
    if chunk is None:
        return None
    message = pb.GenerateResponse()
    fill_response(message, reader.live, chunk, with_prompt_ids=False)
    return message


def begun(live, **options):
    """A reader that has taken its first chunk, and what takes its further output as bytes."""
    if not live.samples[0].token_ids:
        live.samples[0].extend((9,))
    reader = RequestReader(live, **options)
    assert PlainOutput.of(reader) is None, "the first response has more than tokens"
    reader.take()
    return reader, PlainOutput.of(reader)


def in_session(message, request_id):
    return pb.SessionResponse(events=[pb.SessionEvent(request_id=request_id, response=message)])


@given(
    st.text(min_size=1, max_size=60).filter(lambda name: "\x00" not in name),
    st.lists(st.lists(st.integers(0, 399), max_size=5), max_size=40),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_bytes_are_those_of_the_plain_form(request_id, pushes, text, session, ends):
    live = live_request(request_id, text=text)
    _, fast = begun(live, with_text_ends=ends)
    slow, _ = begun(live, with_text_ends=ends)
    for ids in pushes:
        live.samples[0].extend(ids if text else [each * 700 for each in ids])
        expected = plain_form(slow)
        if session:
            found, raw = pb.SessionResponse(), fast.take_event()
            expected = None if expected is None else in_session(expected, request_id)
        else:
            found, raw = pb.GenerateResponse(), fast.take_response()
        assert (raw is None) == (expected is None)
        if raw is not None:
            found.ParseFromString(raw)
            assert found == expected
            assert raw == expected.SerializeToString(), "nor does the order of the fields differ"


def test_what_is_kept_for_outputs_of_one_size_is_right_for_all_sizes():
    """More sizes than are kept, each of them twice."""
    live = live_request()
    _, fast = begun(live)
    slow, _ = begun(live)
    for count in (*range(1, 30), *range(1, 30)):
        live.samples[0].extend([70_000] * count)
        assert fast.take_event() == in_session(plain_form(slow), "r").SerializeToString()


def test_large_numbers():
    for value in (0, 1, 127, 128, 16383, 16384, 2**21, 2**32 - 1):
        assert pb.SampleOutput.FromString(b"\x08" + varint(value)).sample_index == value
    live = live_request("r" * 128)
    live.samples[0].extend([2**32 - 1] * 20_000)
    _, fast = begun(live)
    slow, _ = begun(live)
    for count in (1, 64):
        live.samples[0].extend([2**32 - 1] * count)
        assert pb.GenerateResponse.FromString(fast.take_response()) == plain_form(slow)


def test_both_forms_in_turns_repeat_and_lose_nothing():
    live = live_request(text=True)
    reader, fast = begun(live)
    ids = TOKENIZER.encode("Hello, world! 你好，世界。" * 5, add_special_tokens=False)
    messages = []
    for turn, start in enumerate(range(0, len(ids), 3)):
        live.samples[0].extend(ids[start : start + 3])
        if turn % 2:
            messages.append(pb.GenerateResponse.FromString(fast.take_response()))
        else:
            messages.append(plain_form(reader))
    live.samples[0].extend((), finish=LAST)
    assert fast.take_response() is None
    messages.append(plain_form(reader))
    outputs = [message.outputs[0] for message in messages]
    assert [each for output in outputs for each in output.token_ids] == ids
    assert "".join(output.text for output in outputs) == live.samples[0].text.text[len(TOKENIZER.decode([9])) :]
    assert reader.done
    assert messages[-1].HasField("stats")


@pytest.mark.parametrize(
    "live",
    [
        live_request(num_samples=2),
        live_request(num_samples=2, beams=BeamSpec(2)),
        live_request(num_samples=2, best_of=BestOf(1, returns_logprobs=False)),
        live_request(sampling=SequenceSampling(num_logprobs=0)),
        live_request(sampling=SequenceSampling(num_prompt_logprobs=1)),
    ],
)
def test_other_requests_have_the_plain_form_only(live):
    if live.prompt_logprobs is not None:
        live.prompt_logprobs.extend(LogprobColumns(1, [-1.0], [1], 1, [3], [-1.0]))
    entry = TokenLogprobs(-1.0, 1, (), ())
    for sample in live.samples:
        sample.extend((9,), (entry,) if live.request.spec.sampling.num_logprobs is not None else ())
    _, fast = begun(live)
    assert fast is None


def test_final_results_have_the_plain_form_only():
    assert begun(live_request(), final_only=True)[1] is None


@pytest.mark.parametrize("state", ["finish", "error", "hidden", "nothing new", "too many tokens", "too much text"])
def test_what_is_left_to_the_plain_form(state):
    live = live_request(text=state == "too much text")
    _, fast = begun(live)
    sample = live.samples[0]
    if state != "nothing new":
        sample.extend([10] * (65 if state == "too many tokens" else 1))
    match state:
        case "finish":
            sample.extend((), finish=LAST)
        case "error":
            live.error = ValueError("lost")
        case "hidden":
            live.hidden = True
        case "too much text":
            sample.text.text += "x" * 1025
    assert fast.take_response() is None
    assert fast.take_event() is None


def test_output_that_is_not_durable_stays():
    live = live_request(text=True)
    _, fast = begun(live)
    slow, _ = begun(live)
    sample = live.samples[0]
    sample.extend(TOKENIZER.encode("one two three", add_special_tokens=False))
    for shown in range(1, len(sample.token_ids) + 1):
        sample.max_shown_tokens = shown
        raw, expected = fast.take_response(), plain_form(slow)
        assert (raw is None) == (expected is None) == (shown == 1)
        assert raw is None or pb.GenerateResponse.FromString(raw) == expected


def test_a_client_that_has_more_output_than_the_request():
    """A restarted scheduler computes the request again."""
    live = live_request(text=True)
    live.catches_up = True
    live.samples[0].extend((9,))
    reader = RequestReader(live, resume=ResumePoint((SamplePosition(0, 3, finished=False),), 0), starts_at_once=True)
    assert reader.take() is not None
    fast = PlainOutput.of(reader)
    assert fast is not None
    live.samples[0].extend((10,))
    assert fast.take_response() is None
    assert plain_form(reader) is None
    live.samples[0].extend((11, 12))
    assert fast.take_response() is None, "where its text ends is found by the plain form"
    assert plain_form(reader).outputs[0].first_token_index == 3
    live.samples[0].extend((13,))
    found = pb.GenerateResponse.FromString(fast.take_response()).outputs[0]
    assert (found.first_token_index, list(found.token_ids)) == (4, [13])
    assert live.samples[0].text.text.endswith(found.text)
