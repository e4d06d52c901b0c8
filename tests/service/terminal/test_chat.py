"""Chats, tokenizing and text in every script, through a real scheduler and tokenizer: LLM's calls, Client, commands."""

from __future__ import annotations

import asyncio
import io
import json

import pytest

from cadenza import AsyncClient, Client, SamplingParams
from cadenza.calls.loop_thread import LoopThread
from cadenza.errors import InvalidRequestError
from cadenza_cli.app import run
from scheduler_svc.requests.chats.renderer import ChatRenderer
from tests.helpers.models.toy_tokenizers import TEMPLATE, hf_byte_level
from tests.helpers.scheduler.scheduler_world import world

SYSTEM = {"role": "system", "content": "You answer briefly. 简短回答。"}
TURNS = [
    SYSTEM,
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi, 你好 👋"},
    {"role": "user", "content": "And cafe\u0301?"},
]
TEXTS = {
    "chinese": "今天天气很好，我们去公园散步吧。",
    "emoji": "👍🏽 👨‍👩‍👧‍👦 🏳️‍🌈 🇨🇳🇫🇷",
    "combining": "Zoe\u0308 cafe\u0301 क्षि ก็ 각",
    "mixed": "naïve 你好 €5 — ✈️!",
}


@pytest.fixture(scope="module")
def tokenizer():
    inner = hf_byte_level()
    inner.chat_template = "{% if messages[-1].content == 'no' %}{{ raise_exception('not this') }}{% endif %}" + TEMPLATE
    return inner


@pytest.fixture(scope="module")
def town(tokenizer, tmp_path_factory):
    """A scheduler over a scripted executor, on the clients' own loop, so that tests may block."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(folder)
    loop, opened = LoopThread.shared(), world(tokenizer=str(folder))
    yield loop.run(opened.__aenter__())
    loop.run(opened.__aexit__(None, None, None))


@pytest.fixture
def client(town):
    with Client(town.target) as client:
        yield client


async def resume(executor) -> None:
    """Let a paused executor go on, on its own loop."""
    executor.pause_after = None
    executor.going.set()


def say(town, tokenizer, text: str, seed: int) -> None:
    """Requests with this seed get this text as one token per byte, so that every character is split."""
    town.executor.scripts[seed] = [*split(tokenizer, text.encode()), 0]


def split(tokenizer, data: bytes) -> list[int]:
    """Ids of the tokens that stand for single bytes, under the names that GPT-2 gave them."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    names = {byte: chr(byte) for byte in plain} | {
        byte: chr(256 + index) for index, byte in enumerate(sorted(set(range(256)) - set(plain)))
    }
    return [tokenizer.convert_tokens_to_ids(names[byte]) for byte in data]


def rendered(tokenizer, messages, **options) -> list[int]:
    """The chat's token ids as transformers makes them."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, **({"add_generation_prompt": True} | options))
    return tokenizer.encode(text, add_special_tokens=False)


# ---------------------------------------------------------------- chats


def test_system_and_turns_are_rendered_by_the_template(client, tokenizer):
    params = SamplingParams(max_tokens=2)
    (output,) = client.chat(TURNS, params)
    assert output.prompt_token_ids == rendered(tokenizer, TURNS)
    streamed = list(client.stream_chat(TURNS, params))
    assert streamed[0].prompt_token_ids == output.prompt_token_ids
    chats = [TURNS[:2], TURNS, [TURNS[1]]] * 20
    assert [each.prompt_token_ids for each in client.chat(chats, params)] == [rendered(tokenizer, c) for c in chats]


def test_without_a_generation_prompt_and_with_an_open_end(client, tokenizer):
    params, begun = SamplingParams(max_tokens=2), TURNS[:3]
    closed = {"add_generation_prompt": False}
    opened = {"add_generation_prompt": False, "continue_final_message": True}
    for options in (closed, opened):
        expected = rendered(tokenizer, begun, **options)
        assert client.chat(begun, params, **options)[0].prompt_token_ids == expected
        assert next(client.stream_chat(begun, params, **options)).prompt_token_ids == expected
        assert client.tokenize(begun, **options) == expected
    assert rendered(tokenizer, begun, **opened) == rendered(tokenizer, begun, **closed)[:-2]  # no <|im_end|>, newline
    with pytest.raises(ValueError, match="continue_final_message needs add_generation_prompt=False"):
        client.chat(begun, params, continue_final_message=True)


def test_a_template_that_refuses_is_quoted(client):
    with pytest.raises(InvalidRequestError, match="the chat template refuses this chat: not this") as caught:
        client.chat([SYSTEM, {"role": "user", "content": "no"}])
    assert caught.value.field_violations[0].field.startswith("prompt")
    with pytest.raises(InvalidRequestError, match=r"^prompt 1: .*not this") as caught:
        client.chat([TURNS, [{"role": "user", "content": "no"}]], SamplingParams(max_tokens=1))
    assert caught.value.outputs[0].finished


async def test_the_async_client_does_the_same(town, tokenizer):
    async with AsyncClient(town.target) as client:
        params = SamplingParams(max_tokens=1)
        (one,), (two, three) = await asyncio.gather(client.chat(TURNS, params), client.chat([TURNS, TURNS[:2]], params))
        assert one.prompt_token_ids == two.prompt_token_ids == await client.tokenize(TURNS)
        assert three.prompt_token_ids == rendered(tokenizer, TURNS[:2])
        ids = await client.tokenize(TEXTS["mixed"], add_special_tokens=False)
        assert await client.detokenize(ids) == TEXTS["mixed"]


# ---------------------------------------------------------------- tokenize, detokenize


@pytest.mark.parametrize("text", [*TEXTS.values(), "", " two  spaces\n"])
def test_there_and_back(client, tokenizer, text):
    ids = client.tokenize(text) if text else []
    assert ids == tokenizer.encode(text)
    assert client.detokenize(ids) == text


def test_special_tokens(client, tokenizer):
    ids = client.tokenize("<|im_start|>Hi", add_special_tokens=False)
    assert ids[0] == tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert client.detokenize(ids) == "Hi"
    assert client.detokenize(ids, skip_special_tokens=False) == "<|im_start|>Hi"


@pytest.mark.parametrize("wrong", [[5, -1], "12", [1.5], None, [10**9]])
def test_what_are_no_token_ids(client, wrong):
    with pytest.raises(ValueError, match="token"):
        client.detokenize(wrong)


@pytest.mark.parametrize("wrong", [5, None, [], [1, 2], "\ud800", [{"content": "x"}]])
def test_what_cannot_be_tokenized(client, wrong):
    with pytest.raises(ValueError, match=r"conversation|messages|message 0|surrogate"):
        client.tokenize(wrong)


# ---------------------------------------------------------------- characters that tokens split


@pytest.mark.parametrize("name", TEXTS)
def test_no_character_is_shown_before_it_is_whole(client, town, tokenizer, name):
    text = TEXTS[name]
    say(town, tokenizer, text, seed=40)
    params = SamplingParams(seed=40, max_tokens=200)
    for stream in (lambda: client.stream("Hello", params), lambda: client.stream_chat(TURNS, params)):
        executor = town.executor
        executor.pause_after = executor.num_plans + len(text.encode()) // 2
        deltas, pieces = stream(), []
        # What the executor has sampled before the pause is shown: it is streamed, not kept back.
        while not any(pieces):
            pieces += [sample.text for sample in next(deltas).outputs]
        LoopThread.shared().run(resume(executor))
        pieces += [sample.text for delta in deltas for sample in delta.outputs]
        assert "".join(pieces) == text
        assert not any("\ufffd" in piece for piece in pieces)
    (whole,) = client.generate("Hello", params)
    assert whole.outputs[0].text == text
    assert len(whole.outputs[0].token_ids) == len(text.encode()) + 1


def test_bytes_that_are_no_text_are_replaced_and_no_others(client, town, tokenizer):
    town.executor.scripts[41] = [*split(tokenizer, "é".encode() + b"\xff" + "你".encode() + "👍".encode()[:3]), 0]
    params = SamplingParams(seed=41, max_tokens=50)
    pieces = [sample.text for delta in client.stream("Hello", params) for sample in delta.outputs]
    assert "".join(pieces) == client.generate("Hello", params)[0].outputs[0].text
    assert "".join(pieces).rstrip("\ufffd") == "é\ufffd你"
    assert "".join(pieces).endswith("\ufffd")


# ---------------------------------------------------------------- commands


@pytest.mark.parametrize("name", TEXTS)
def test_generate_prints_every_character(town, tokenizer, name, capsys):
    say(town, tokenizer, TEXTS[name], seed=42)
    options = ["--target", town.target, "--seed", "42", TEXTS["chinese"]]
    assert run(["generate", *options]) == 0
    assert run(["generate", "--raw", "--json", *options]) == 0
    streamed, as_json = capsys.readouterr().out.splitlines()
    assert streamed == TEXTS[name]
    assert json.loads(as_json)["text"] == TEXTS[name]


def test_chat_goes_on_after_a_refusal_and_keeps_what_was_said(town, tokenizer, capsys, monkeypatch):
    say(town, tokenizer, TEXTS["mixed"], seed=43)
    rendered_chats = []
    render = ChatRenderer.render

    async def noting(self, chat):
        seen = [(message.role, message.content) for message in chat.messages]
        if seen not in rendered_chats:  # it is counted before it is sent, once there are old turns
            rendered_chats.append(seen)
        return await render(self, chat)

    monkeypatch.setattr(ChatRenderer, "render", noting)
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\nno\n再来\n"))
    assert run(["chat", "--target", town.target, "--seed", "43", "--system", SYSTEM["content"]]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{TEXTS['mixed']}\n" * 2
    assert "the chat template refuses this chat: not this" in captured.err
    first = [("system", SYSTEM["content"]), ("user", "Hello")]
    answered = [*first, ("assistant", TEXTS["mixed"])]
    assert rendered_chats == [first, [*answered, ("user", "no")], [*answered, ("user", "再来")]]
