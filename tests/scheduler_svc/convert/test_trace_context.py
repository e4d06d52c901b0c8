"""A request's trace context: no part of the body by which a repeated request is recognized, but kept with it."""

from __future__ import annotations

from cadenza.v1 import generation_pb2 as pb
from cadenza.v1 import types_pb2
from scheduler_svc.convert.generation import fields_from_body, request_fields

FIRST, SECOND = (f"00-{digit * 32}-{digit * 16}-01" for digit in "ab")


def message(traceparent: str = "", token_id: int = 5) -> pb.GenerateRequest:
    part = types_pb2.PromptPart(tokens=types_pb2.TokenIds(ids=[token_id]))
    return pb.GenerateRequest(request_id="r", prompt=[part], expected_output_tokens=3, traceparent=traceparent)


def test_the_digest_is_that_of_the_request_without_it() -> None:
    plain, first, second = (request_fields(message(each)) for each in ("", FIRST, SECOND))
    assert plain.body_digest == first.body_digest == second.body_digest
    assert request_fields(message(FIRST, token_id=6)).body_digest != first.body_digest
    assert (plain.traceparent, first.traceparent) == ("", FIRST)


def test_a_journal_keeps_it_with_the_body() -> None:
    assert fields_from_body(request_fields(message(FIRST)).body).traceparent == FIRST


def test_a_resume_may_have_one() -> None:
    resume = pb.GenerateRequest(request_id="r", resume=pb.ResumePoint(), traceparent=FIRST)
    assert request_fields(resume).new_request_fields == ()
