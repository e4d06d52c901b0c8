"""Diagnosis of messages that cannot be parsed."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st

from cadenza.v1 import generation_pb2 as pb
from scheduler_svc.convert.wire import path_of_bad_string, string_at

BAD = "\ufffe\ufffd"


def with_bad_utf8(message):
    """The message on the wire, its marked strings no longer UTF-8, of the same length."""
    raw = message.SerializeToString().replace(BAD.encode(), b"\xff" * len(BAD.encode()))
    with pytest.raises(DecodeError):
        type(message).FromString(raw)
    return raw


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"request_id": BAD}, "request_id"),
        ({"timeout_s": 2.5, "output_mode": 2, "adapter": BAD}, "adapter"),
        ({"prompt": [{"text": "fine"}, {"tokens": {"ids": [1, 300]}}, {"text": "a" + BAD}]}, "prompt[2].text"),
        ({"sampling_params": {"stop": ["a", "b", BAD], "seed": 2**64 - 1}}, "sampling_params.stop[2]"),
        (
            {"prompt": [{"chat": {"messages": [{"role": "user"}, {"role": BAD}]}}]},
            "prompt[0].chat.messages[1].role",
        ),
        ({"sampling_params": {"logit_bias": {5: 1.0}, "bad_words": [BAD]}}, "sampling_params.bad_words[0]"),
    ],
)
def test_the_bad_string_is_found(fields, path):
    assert path_of_bad_string(with_bad_utf8(pb.GenerateRequest(**fields)), pb.GenerateRequest) == path


def test_whose_message_it_is():
    message = pb.SessionRequest(generate={"request_id": "名前", "adapter": BAD})
    assert string_at(with_bad_utf8(message), 1, 1) == "名前"
    assert path_of_bad_string(with_bad_utf8(message), pb.SessionRequest) == "generate.adapter"
    assert string_at(with_bad_utf8(pb.SessionRequest(generate={"request_id": BAD})), 1, 1) == ""


def test_the_search_gives_up():
    """A message can hold millions of fields, and nothing else is served meanwhile."""
    many = pb.GenerateRequest(prompt=[{}] * 20_000, adapter=BAD)
    assert path_of_bad_string(with_bad_utf8(many), pb.GenerateRequest) == ""
    assert string_at(many.SerializeToString(), 12) == ""


@given(st.binary(max_size=60))
@example(b"\xff" * 11)
@example(b"\x0a\x7fab")
@example(b"\x0b")
def test_any_bytes_are_survived(raw):
    path_of_bad_string(raw, pb.SessionRequest)
    string_at(raw, 1, 1)
