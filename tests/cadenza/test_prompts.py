"""The forms of prompts, chats and their parameters."""

from __future__ import annotations

import numpy as np
import pytest

from cadenza.calls.convert import prompt_to_proto, request_to_proto
from cadenza.chats import ChatMessage, ChatOptions
from cadenza.prompts import (
    CallOptions,
    Prompt,
    match_params,
    parse_chats,
    parse_prompts,
    parse_text_or_chat,
    parse_token_ids,
)
from cadenza.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("a", [Prompt(text="a")]),
        ({"prompt": "a"}, [Prompt(text="a")]),
        ([1, 2], [Prompt(token_ids=[1, 2])]),
        ((1, 2), [Prompt(token_ids=[1, 2])]),
        (np.array([1, 2]), [Prompt(token_ids=[1, 2])]),
        ({"prompt_token_ids": [3]}, [Prompt(token_ids=[3])]),
        ({"prompt_token_ids": [3], "prompt": "x"}, [Prompt(token_ids=[3])]),
        ({"prompt": "a", "cache_salt": "s"}, [Prompt(text="a", cache_salt="s")]),
        (["a", "b"], [Prompt(text="a"), Prompt(text="b")]),
        ([[1], [2, 3]], [Prompt(token_ids=[1]), Prompt(token_ids=[2, 3])]),
        (np.array([[1], [2]]), [Prompt(token_ids=[1]), Prompt(token_ids=[2])]),
        (["a", [1], {"prompt": "c"}], [Prompt(text="a"), Prompt(token_ids=[1]), Prompt(text="c")]),
        ((text for text in ["a", "b"]), [Prompt(text="a"), Prompt(text="b")]),
    ],
)
def test_forms(prompts, expected):
    assert parse_prompts(prompts) == expected


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "at least one"),
        (None, "a prompt is"),
        (5, "a prompt is"),
        (b"x", "a prompt is"),
        ([1, "a"], "token ids only"),
        (["a", 1], "prompt 1"),
        (["a", []], "prompt 1: .*at least one"),
        ([[1], [True]], "prompt 1"),
        ([-1], "-1 is no token id"),
        ({"text": "a"}, "cannot have text"),
        ({"prompt": "a", "multi_modal_data": 1}, "cannot have multi_modal_data"),
        ({"prompt": 3}, "a prompt is"),
        ({"prompt_token_ids": "12"}, "list of integers"),
        (["a", "b\ud800"], r"prompt 1: the prompt holds a lone surrogate, '\\ud800', at position 1"),
        ({"prompt": "\udcff"}, "^the prompt holds a lone surrogate"),
        ({"prompt": "a", "cache_salt": "\udcff"}, "^cache_salt holds a lone surrogate"),
    ],
)
def test_what_is_no_prompt(prompts, message):
    with pytest.raises(ValueError, match=message):
        parse_prompts(prompts)


def test_chats():
    chat = [{"role": "user", "content": "a"}]
    assert parse_chats(chat) == [Prompt(messages=[ChatMessage("user", "a")])]
    assert parse_chats([chat, chat]) == [Prompt(messages=[ChatMessage("user", "a")])] * 2
    assert parse_chats([{"role": "user", "content": ""}]) == [Prompt(messages=[ChatMessage("user", "")])]
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert parse_chats(parts)[0].messages == [ChatMessage("user", "ab")]
    nothing = {"role": "tool", "tool_call_id": "1", "content": None}
    assert parse_chats([nothing])[0].messages == [ChatMessage("tool", "", tool_call_id="1")]
    for bad, message in (
        ("hello", "conversation"),
        ([], "at least one"),
        ([{"content": "x"}], "message 0 has no role"),
        ([{"role": "user"}], "^message 0: content is missing$"),
        ([chat, [*chat, {"role": "user"}]], "^conversation 1: message 1: content is missing$"),
        (
            [{"role": "assistant", "content": None}],
            "^message 0: content must be a str or a list",
        ),
        ([{"role": "user", "content": "\ud800"}], "message 0: content holds a lone surrogate"),
        ([chat, [{"role": "user", "content": 3}]], "conversation 1: message 0"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "only text parts"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_chats(bad)


def test_how_chats_are_rendered():
    chat = [{"role": "user", "content": "a"}]
    opened = ChatOptions(add_generation_prompt=False, continue_final_message=True)
    for prompt in (*parse_chats([chat, chat], opened), parse_text_or_chat(chat, opened)):
        message = prompt_to_proto(prompt).chat
        assert (message.add_generation_prompt, message.continue_final_message) == (False, True)
    message = prompt_to_proto(parse_chats(chat, ChatOptions())[0]).chat
    assert (message.add_generation_prompt, message.continue_final_message) == (True, False)
    with pytest.raises(ValueError, match="continue_final_message needs add_generation_prompt=False"):
        ChatOptions(continue_final_message=True)
    with pytest.raises(ValueError, match="add_generation_prompt must be a bool, not int 1"):
        ChatOptions(add_generation_prompt=1)


def test_what_is_tokenized_and_back():
    assert parse_text_or_chat("a") == Prompt(text="a")
    assert parse_text_or_chat("") == Prompt(text="")
    assert parse_token_ids(()) == []
    assert parse_token_ids(np.array([1, 2])) == [1, 2]
    for wrong in (5, None, [1, 2], []):
        with pytest.raises(ValueError, match=r"conversation|message"):
            parse_text_or_chat(wrong)
    for wrong in ("12", 5, [1.0], [True], [-1], [2**32]):
        with pytest.raises(ValueError, match=r"token id|integers"):
            parse_token_ids(wrong)


def test_params_for_each_prompt():
    one, two = SamplingParams(max_tokens=1), SamplingParams(max_tokens=2)
    assert match_params(None, 2) == [SamplingParams()] * 2
    assert match_params(one, 2) == [one, one]
    assert match_params([one, two], 2) == [one, two]
    with pytest.raises(ValueError, match="1 SamplingParams for 2 prompts"):
        match_params([one], 2)
    with pytest.raises(TypeError, match="params 1"):
        match_params([one, {}], 2)
    with pytest.raises(TypeError, match="SamplingParams"):
        match_params({"max_tokens": 3}, 1)


def test_prompts_on_the_wire():
    assert prompt_to_proto(Prompt(text="a")).text == "a"
    assert list(prompt_to_proto(Prompt(token_ids=[1, 2])).tokens.ids) == [1, 2]
    (turn,) = prompt_to_proto(Prompt(messages=[ChatMessage("user", "a")])).chat.messages
    assert (turn.role, turn.content) == ("user", "a")


def test_the_options_of_a_call_on_the_wire():
    """What is not given is not sent, so that a repeated request has the same body; a limit of 0 is sent."""

    def sent(*options):
        return request_to_proto(
            "r", Prompt(text="a"), SamplingParams(), final_only=False, options=CallOptions(*options)
        )

    plain = request_to_proto("r", Prompt(text="a"), SamplingParams(), final_only=False)
    assert sent() == sent(True, None) == plain
    assert not plain.HasField("speculation")
    assert not plain.HasField("enable_prefix_caching")
    assert sent(False).enable_prefix_caching is False
    assert sent(False).HasField("enable_prefix_caching")
    for most, expected in ((0, 0), (False, 0), (1, 1), (64, 64), (np.int64(5), 5)):
        assert sent(True, most).HasField("speculation")
        assert sent(True, most).speculation.num_draft_tokens == expected


@pytest.mark.parametrize("wrong", [True, -1, 65, 2**40, 0.0, 2.5, float("nan"), "", "2", b"2", [], (2,), {}, np.True_])
def test_what_is_no_limit_of_drafts(wrong):
    with pytest.raises(ValueError, match=r"^speculation must be 0 .* to 64 .*None .*, not "):
        CallOptions(speculation=wrong)


def test_prompt_ids_come_back_only_when_they_are_not_known():
    def needs_tokenizer(prompt, **params):
        return request_to_proto("r", prompt, SamplingParams(**params), final_only=False).return_prompt_token_ids

    assert needs_tokenizer(Prompt(text="a"))
    assert not needs_tokenizer(Prompt(token_ids=[1]))
    assert needs_tokenizer(Prompt(token_ids=[1]), truncate_prompt_tokens=1)
