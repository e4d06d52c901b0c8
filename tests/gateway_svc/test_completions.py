"""POST /v1/completions, over a real scheduler and a scripted executor."""

from __future__ import annotations

import itertools

import pytest

from tests.helpers.gateway.gateway import completion_text
from tests.helpers.models.toy_tokenizers import byte_level
from tests.helpers.scheduler.scheduler_world import script
from tests.helpers.scheduler.scripted_executor import EOS

PATH = "/v1/completions"


async def test_a_text_is_completed(w, g):
    ids = script(w, "The quick brown fox")
    answer = await g.post(PATH, {"model": "toy", "prompt": "Hello", "seed": 1, "max_tokens": 100})
    assert answer["object"] == "text_completion"
    assert answer["model"] == "toy"
    assert answer["id"].startswith("cmpl-")
    (choice,) = answer["choices"]
    assert choice == {
        "index": 0, "text": "The quick brown fox", "logprobs": None, "finish_reason": "stop", "stop_reason": None,
    }  # fmt: skip
    num_prompt = len(byte_level().encode("Hello"))
    assert answer["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": len(ids) + 1,
        "total_tokens": num_prompt + len(ids) + 1,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_a_stream_has_the_same_text_and_ends_with_done(w, g):
    ids = script(w, "The quick brown fox 你好 👍🏽")
    body = {"prompt": "Hello", "seed": 1, "max_tokens": 100, "stream_options": {"include_usage": True}}
    events = await g.events(PATH, body)
    assert events[-1] == "[DONE]"
    usage = events[-2]
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], len(ids) + 1)
    chunks = events[:-2]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == "The quick brown fox 你好 👍🏽"
    ends = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    assert ends == [None] * (len(ends) - 1) + ["stop"]
    assert {chunk["id"] for chunk in events[:-1]} == {usage["id"]}


async def test_continuous_usage_counts_the_tokens_of_each_chunk(w, g):
    ids = script(w, "Hello there")
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await g.events(PATH, {"prompt": [5, 6, 7], "seed": 1, "max_tokens": 100, "stream_options": options})
    counts = [event["usage"]["completion_tokens"] for event in events[:-2]]
    assert counts == sorted(counts)
    assert counts[-1] == len(ids) + 1
    assert {event["usage"]["prompt_tokens"] for event in events[:-1]} == {3}


@pytest.mark.parametrize("stream", [False, True])
async def test_several_prompts_with_several_samples_have_choices_in_order(simulated, stream):
    body = {"prompt": [[5, 6], [7], [8, 9, 10]], "n": 2, "seed": 3, "max_tokens": 4, "ignore_eos": True}
    if stream:
        events = await simulated.events(PATH, body)
        texts = dict.fromkeys(range(6), "")
        for event in events[:-1]:
            for choice in event["choices"]:
                texts[choice["index"]] += choice["text"]
    else:
        answer = await simulated.post(PATH, body)
        texts = {choice["index"]: choice["text"] for choice in answer["choices"]}
        assert [choice["index"] for choice in answer["choices"]] == list(range(6))
        assert answer["usage"]["completion_tokens"] == 24
        assert answer["usage"]["prompt_tokens"] == 6
    assert sorted(texts) == list(range(6))
    assert all(texts.values())


async def test_a_stop_string_ends_and_is_named(w, g):
    script(w, "The quick brown fox")
    answer = await g.post(PATH, {"prompt": "Hello", "seed": 1, "stop": ["brown"], "max_tokens": 100})
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("The quick ", "stop", "brown")


async def test_logprobs_have_openais_columns(w, g):
    script(w, "fox", end=False)
    answer = await g.post(PATH, {"prompt": "Hello", "seed": 1, "logprobs": 2, "max_tokens": 3})
    columns = answer["choices"][0]["logprobs"]
    assert len(columns["tokens"]) == 3
    assert "".join(columns["tokens"]) == answer["choices"][0]["text"]
    assert columns["token_logprobs"] == [-0.5] * 3
    assert all(2 <= len(top) <= 3 for top in columns["top_logprobs"])
    offsets, text = columns["text_offset"], answer["choices"][0]["text"]
    assert [text[at : at + len(token)] for at, token in zip(offsets, columns["tokens"], strict=True)] == columns[
        "tokens"
    ]
    named = await g.post(
        PATH, {"prompt": "Hello", "seed": 1, "logprobs": 0, "max_tokens": 2, "return_tokens_as_token_ids": True}
    )
    columns = named["choices"][0]["logprobs"]
    assert columns["top_logprobs"] is None
    assert all(token.startswith("token_id:") for token in columns["tokens"])


async def test_streamed_logprobs_are_those_of_one_answer(w, g):
    script(w, "The quick brown fox", end=False)
    body = {"prompt": "Hello", "seed": 1, "logprobs": 1, "max_tokens": 6}
    whole = (await g.post(PATH, body))["choices"][0]
    events = await g.events(PATH, body)
    assert completion_text(events) == whole["text"]
    for column in ("tokens", "token_logprobs", "text_offset"):
        parts = [event["choices"][0]["logprobs"][column] for event in events[:-1]]
        assert [*itertools.chain.from_iterable(parts)] == whole["logprobs"][column]


async def test_echo_repeats_the_prompt(w, g):
    script(w, " fox", end=False)
    for stream in (False, True):
        body = {"prompt": "The quick brown", "seed": 1, "echo": True, "max_tokens": 2}
        if stream:
            text = completion_text(await g.events(PATH, body))
        else:
            text = (await g.post(PATH, body))["choices"][0]["text"]
        assert text.startswith("The quick brown fox")
    ids = byte_level().encode("The quick")
    answer = await g.post(PATH, {"prompt": ids, "seed": 1, "echo": True, "max_tokens": 0})
    assert answer["choices"][0]["text"] == "The quick"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    await g.post(PATH, {"prompt": ids, "max_tokens": 0}, 400)


async def test_a_prompt_alone_ends_with_its_length_whatever_token_is_drawn(w, g):
    w.executor.scripts[1] = [EOS]
    body = {"prompt": "The quick", "seed": 1, "echo": True, "max_tokens": 0}
    assert (await g.post(PATH, body))["choices"][0]["finish_reason"] == "length"
    events = await g.events(PATH, body)
    assert completion_text(events) == "The quick"
    assert events[-2]["choices"][0]["finish_reason"] == "length"


async def test_token_ids_come_back_on_request(w, g):
    ids = script(w, "Hello there", end=False)
    body = {"prompt": [5, 6, 7], "seed": 1, "max_tokens": len(ids), "return_token_ids": True}
    choice = (await g.post(PATH, body))["choices"][0]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([5, 6, 7], ids)
    events = await g.events(PATH, body)
    assert [*itertools.chain.from_iterable(event["choices"][0]["token_ids"] for event in events[:-1])] == ids
    assert events[0]["choices"][0]["prompt_token_ids"] == [5, 6, 7]


async def test_best_of_returns_the_most_likely(simulated):
    answer = await simulated.post(
        PATH, {"prompt": "Hello", "best_of": 3, "n": 2, "max_tokens": 2, "seed": 4, "ignore_eos": True}
    )
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["usage"]["completion_tokens"] == 6, "the third was drawn too"
    refused = await simulated.post(PATH, {"prompt": "Hello", "best_of": 3, "stream": True}, 400)
    assert refused["error"]["param"] == "best_of"


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt"),
        ({"prompt": [5, "a"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [{"prompt": "a"}]}, "prompt"),
        ({"prompt": [10**9]}, "prompt"),
        ({"prompt": "a", "n": 0}, "n"),
        ({"prompt": "a", "n": 65}, "n"),
        ({"prompt": "a", "temperature": -1}, "temperature"),
        ({"prompt": "a", "temperature": "hot"}, "temperature"),
        ({"prompt": "a", "top_p": 0}, "top_p"),
        ({"prompt": "a", "logprobs": -1}, "logprobs"),
        ({"prompt": "a", "logprobs": 100_000}, "logprobs"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"7": 1000}}, "logit_bias"),
        ({"prompt": "a", "stop": ["", "b"]}, "stop"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 1.5}, "max_tokens"),
        ({"prompt": "a", "seed": 2**64}, "seed"),
        ({"prompt": "a", "min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": "a", "stream": True, "stream_options": {"nothing": True}}, "stream_options"),
        ({"prompt": "a", "stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"prompt": "a", "temprature": 1}, "temprature"),
        ({"prompt": "a", "request_id": ""}, "request_id"),
        ({"prompt": "a" * 3000}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"prompt": "a", "store": 1}, "store"),
        ({"prompt": "a", "length_penalty": 2}, "length_penalty"),
        ({"prompt": "a", "early_stopping": True, "use_beam_search": False}, "early_stopping"),
        ({"prompt": "a", "response_format": {"type": "text", "schema": {}}}, "response_format"),
        ({"prompt": "a", "response_format": {"type": "json_object", "json_schema": {}}}, "response_format"),
        ({"prompt": "a", "truncation_side": "right"}, "truncation_side"),
        ({"prompt": "a", "allowed_token_ids": [10**6]}, "allowed_token_ids"),
    ],
)
async def test_what_is_wrong_is_named(shared_gateway, body, param):
    error = (await shared_gateway.post(PATH, body, 400))["error"]
    assert error["param"] == param, error
    assert error["type"] == "invalid_request_error"
    assert error["message"]
