"""The size of a message before it is parsed: what counts as texts, lists and small fields, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cadenza.v1 import generation_pb2 as pb
from cadenza.v1 import types_pb2
from cadenza_common.wire.transport import MAX_REQUEST_BYTES
from scheduler_svc.convert.limits import LIMITS, MAX_LIST_BYTES, MAX_OTHER_BYTES, MAX_PROMPT_TOKENS, check_size
from scheduler_svc.convert.wire import sizes_of
from scheduler_svc.core.errors import RequestRejectedError
from scheduler_svc.front.unreadable import Unreadable, _read

LONGEST_IDS = types_pb2.TokenIds(ids=[2**21 - 1] * MAX_PROMPT_TOKENS)


def chat(num_messages: int, num_chars: int) -> types_pb2.PromptPart:
    message = types_pb2.ChatMessage(role="user", content="x" * num_chars)
    return types_pb2.PromptPart(chat=types_pb2.Chat(messages=[message] * num_messages))


def test_texts_lists_and_all_else_are_told_apart() -> None:
    message = pb.GenerateRequest(
        prompt=[{"text": "x" * 1000}, {"tokens": {"ids": [5] * 300}}],
        sampling_params={"stop": ["y" * 50], "allowed_token_ids": [7] * 40, "logit_bias": {5: 1.0, 6: 2.0}},
    )
    sizes = sizes_of(message.SerializeToString(), pb.GenerateRequest)
    assert (sizes.texts, sizes.lists) == (1050, 340)
    assert sizes.others == message.ByteSize() - 1390


@pytest.mark.parametrize(
    "message",
    [
        pb.GenerateRequest(
            prompt=[{"tokens": LONGEST_IDS}],
            sampling_params={
                "allowed_token_ids": range(131_072),
                "logit_bias": dict.fromkeys(range(2**21, 2**21 + 2048), -1.5),
            },
        ),
        pb.GenerateRequest(prompt=[{"text": "x" * 1024 * 1024}]),
        pb.GenerateRequest(
            prompt=[chat(LIMITS["Chat.messages"].items or 0, 2048)],
            sampling_params={
                "logit_bias": dict.fromkeys(range(2**21, 2**21 + 2048), -1.5),
                "stop": ["x" * 256] * 128,
                "bad_words": ["y" * 128] * 128,
            },
        ),
        pb.SessionRequest(generate={"prompt": [{"tokens": LONGEST_IDS}], "request_id": "a"}),
        pb.TokenizeRequest(prompt=[{"tokens": LONGEST_IDS}]),
        pb.DetokenizeRequest(token_ids=LONGEST_IDS.ids),
        pb.GenerateRequest(sampling_params={"stop": ["x" * 256] * 128, "bad_words": ["y" * 128] * 128}),
    ],
    ids=["ids, allowed ids, biases", "text", "chat", "session", "tokenize", "detokenize", "stops and bad words"],
)
def test_what_the_fields_limits_allow_is_parsed(message: Any) -> None:
    raw = message.SerializeToString()
    assert _read(type(message), type(message).FromString, raw) == message


TOO_LONG = {
    "message": b"\x0a" + pb.GenerateRequest(adapter="x" * MAX_REQUEST_BYTES).SerializeToString(),
    "prompt": pb.GenerateRequest(prompt=[{"tokens": {"ids": [5] * (MAX_LIST_BYTES + 1)}}]).SerializeToString(),
    "sampling_params.logit_bias": pb.GenerateRequest(
        sampling_params={"logit_bias": dict.fromkeys(range(MAX_OTHER_BYTES // 8), 1.0)}
    ).SerializeToString(),
    "sampling_params.stop": pb.GenerateRequest(
        prompt=[{"text": "Hello"}], sampling_params={"stop": ["a"] * MAX_OTHER_BYTES}
    ).SerializeToString(),
}


@pytest.mark.parametrize("field", TOO_LONG)
def test_what_is_too_long_does_not_reach_the_parser(field: str) -> None:

    def parse(raw: bytes) -> Any:
        raise AssertionError("parsed")

    got = _read(pb.GenerateRequest, parse, TOO_LONG[field])
    assert isinstance(got, Unreadable)
    assert isinstance(got.error, RequestRejectedError)
    assert got.error.field == field


def test_a_long_message_of_a_session_is_refused_under_its_id() -> None:
    raw = pb.SessionRequest(generate={"request_id": "a", "adapter": "x" * MAX_REQUEST_BYTES}).SerializeToString()
    got = _read(pb.SessionRequest, pb.SessionRequest.FromString, raw)
    assert isinstance(got, Unreadable)
    assert got.request_id == "a"


def test_strings_beyond_those_that_are_looked_at_count_as_small_fields() -> None:
    """Else many short strings, which take long to parse, would count as texts."""
    raw = pb.GenerateRequest(sampling_params={"stop": ["x" * 60] * 10_000}).SerializeToString()
    with pytest.raises(RequestRejectedError, match=r"has \d+ bytes beside its texts") as caught:
        check_size(raw, pb.GenerateRequest)
    assert caught.value.field == "sampling_params.stop"
    raw = pb.SessionRequest(generate={"request_id": "a", "prompt": [{}] * MAX_OTHER_BYTES}).SerializeToString()
    with pytest.raises(RequestRejectedError) as caught:
        check_size(raw, pb.SessionRequest)
    assert caught.value.field == "prompt"


@given(st.binary(max_size=200))
def test_the_sizes_of_any_bytes_add_up(raw: bytes) -> None:
    sizes = sizes_of(raw, pb.SessionRequest)
    assert min(sizes.texts, sizes.lists, sizes.others) >= 0
    assert sizes.texts + sizes.lists + sizes.others == len(raw)
