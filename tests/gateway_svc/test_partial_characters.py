"""Logprobs of tokens that are parts of characters, and of those that are in no text: their bytes and their places."""

from __future__ import annotations

import itertools

import pytest

from cadenza.outputs import Logprob
from gateway_svc.openai.logprobs import TokenNames, num_characters, prompt_offsets
from scheduler_svc.requests.token_bytes import bytes_of_token
from tests.helpers.models.toy_tokenizers import byte_fallback, byte_level, unigram
from tests.helpers.scheduler.scheduler_world import script

TEXT = "é 👍🏽 fox 你好, ǅ!"
"""Some of its characters are several tokens."""
RAW = TEXT.encode()


def raw_bytes(tokenizer, ids) -> list[bytes]:
    return [tokenizer.token_bytes(each) or tokenizer.token_text(each).encode() for each in ids]


def expected_offsets(ids) -> list[int]:
    """Of each token, the character that its first byte belongs to, counted from the bytes alone."""
    starts = itertools.accumulate(map(len, raw_bytes(byte_level(), ids)), initial=0)
    first_bytes = [*itertools.accumulate((len(char.encode()) for char in TEXT), initial=0)]
    return [max(at for at, first in enumerate(first_bytes) if first <= start) for start in starts][:-1]


@pytest.mark.slow
@pytest.mark.parametrize("stop", [[], ["好,"], ["zzz"]])
async def test_completions_say_where_each_token_begins(w, g, stop):
    ids = script(w, TEXT)
    body = {"prompt": "Hello", "seed": 1, "logprobs": 2, "max_tokens": 100, "stop": stop}
    choice = (await g.post("/v1/completions", body))["choices"][0]
    columns, num = choice["logprobs"], len(choice["logprobs"]["tokens"])
    assert choice["text"] == (TEXT if "好," not in stop else TEXT[: TEXT.index("好")])
    offsets = expected_offsets([*ids, 0])[:num]
    assert columns["text_offset"] == [min(each, len(choice["text"])) for each in offsets]
    assert columns["tokens"] == [byte_level().token_text(each) for each in [*ids, 0][:num]]
    assert "\ufffd" in "".join(columns["tokens"])
    events = await g.events("/v1/completions", body)
    for column in ("tokens", "token_logprobs", "text_offset"):
        found = [each for event in events[:-1] for each in event["choices"][0]["logprobs"][column]]
        if column == "text_offset":  # when they came, it was not known that a stop string would take them
            found = [min(each, len(choice["text"])) for each in found]
        assert found == columns[column]


BROKEN = [b"\xe5", b" ", b"t", b"\xe4", b"\xbd", b"\xa0", b"\xf0", b"\x9f", b"a", b"\xc3", b"b", b"\xe5"]
"""Tokens, some of which begin a character that the next one does not go on with."""


async def test_a_token_behind_a_character_that_ends_in_nothing(w, g):
    """Its text comes together with the sign for what is no character."""
    tokenizer = byte_level()
    ids_of = {raw_bytes(tokenizer, [each])[0]: each for each in range(tokenizer.vocab_size)}
    w.executor.scripts[1] = [ids_of[raw] for raw in BROKEN]
    body = {"prompt": "Hello", "seed": 1, "logprobs": 1, "max_tokens": len(BROKEN), "ignore_eos": True}
    choice = (await g.post("/v1/completions", body))["choices"][0]
    assert choice["text"] == "\ufffd t你\ufffda\ufffdb\ufffd"
    found = choice["logprobs"]["text_offset"]
    assert found == [0, 1, 2, 3, 3, 3, 4, 4, 5, 6, 7, 8]
    events = await g.events("/v1/completions", body)
    streamed = [each for event in events[:-1] for each in event["choices"][0]["logprobs"]["text_offset"]]
    assert streamed == found


@pytest.mark.parametrize(
    ("raw", "num"),
    [(b"", 0), (b"ab", 2), (b"\xe5", 1), (b"\xbd\xa0", 1), (b"\xa0b", 2), (b"a\xe5", 2), ("é你".encode(), 2)],
)
def test_characters_that_a_token_has_a_part_of(raw, num):
    assert num_characters(raw) == num


async def test_an_echo_has_the_places_of_the_prompts_tokens_too(simulated):
    ids = byte_level().encode(TEXT)
    for prompt in (TEXT, ids):
        for stream in (False, True):
            body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 4, "seed": 3, "ignore_eos": True}
            if stream:
                chunks = [event["choices"][0] for event in (await simulated.events("/v1/completions", body))[:-1]]
                text = "".join(each["text"] for each in chunks)
                columns = {
                    key: [x for each in chunks for x in each["logprobs"][key]] for key in ("text_offset", "tokens")
                }
            else:
                (choice,) = (await simulated.post("/v1/completions", body))["choices"]
                text, columns = choice["text"], choice["logprobs"]
            assert columns["text_offset"][: len(ids)] == expected_offsets(ids)
            assert columns["tokens"][: len(ids)] == [*map(byte_level().token_text, ids)]
            assert text.startswith(TEXT)
            assert len(columns["tokens"]) == len(ids) + 4
            assert columns["text_offset"][len(ids)] == len(TEXT)


async def test_chats_and_responses_have_the_bytes_of_each_token(w, g):
    ids = script(w, TEXT)
    body = {"messages": [{"role": "user", "content": "Hello"}], "seed": 1, "logprobs": True, "top_logprobs": 2}
    content = (await g.post("/v1/chat/completions", body))["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content[: len(ids)]) == RAW
    assert [entry["bytes"] for entry in content[: len(ids)]] == [*map(list, raw_bytes(byte_level(), ids))]
    assert all(top["bytes"] for entry in content for top in entry["top_logprobs"])
    events = await g.events("/v1/chat/completions", body)
    parts = [choice["logprobs"] for event in events[:-1] for choice in event["choices"] if choice["logprobs"]]
    assert [*itertools.chain.from_iterable(part["content"] for part in parts)] == content
    body = {"input": "Hello", "seed": 1, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    (item,) = (await g.post("/v1/responses", body))["output"]
    assert [row["bytes"] for row in item["content"][0]["logprobs"]] == [entry["bytes"] for entry in content]
    streamed = (await g.events("/v1/responses", body))[-1]["response"]["output"][0]
    assert streamed["content"][0]["logprobs"] == item["content"][0]["logprobs"]


@pytest.mark.parametrize("tokenizer", [byte_level, byte_fallback, unigram])
@pytest.mark.parametrize("text", [TEXT, "Hi one", " Hi", "<s>Hi", "", "é", "fine ½ x"])
def test_tokens_of_a_prompt_are_found_in_its_text(tokenizer, text):
    """With a token before and one behind it that are in no text."""
    tokenizer = tokenizer()
    ids = [1, *tokenizer.encode(text, add_special_tokens=False), 2]
    pieces = raw_bytes(tokenizer, ids)
    offsets = prompt_offsets(text, pieces)
    assert offsets == sorted(offsets)
    assert (offsets[0], offsets[-1]) == (0, len(text))
    for offset, piece in zip(offsets[1:-1], pieces[1:-1], strict=True):
        rest = text[offset:].encode()
        is_part = any(rest[at:].startswith((piece, piece.lstrip(b" "))) for at in range(4))
        assert is_part or offset == 0 or tokenizer is unigram(), (offset, piece)


def test_a_prompt_that_was_cut_on_the_left_ends_where_its_text_does():
    assert prompt_offsets("The quick fox", [b" quick", b" fox"]) == [3, 9]


@pytest.mark.parametrize("tokenizer", [byte_level, byte_fallback])
def test_bytes_of_all_tokens_are_known(tokenizer):
    found = {tokenizer().token_bytes(each) for each in range(tokenizer().vocab_size)}
    assert {bytes([each]) for each in range(0x80, 0x100)} <= found
    assert tokenizer().token_bytes(tokenizer().vocab_size + 5) == b""


def test_a_name_that_says_no_bytes_gives_none():
    assert bytes_of_token("▁\ufffd", " \ufffd") == b""
    assert bytes_of_token("Ġa", "b\ufffd") == b""
    assert bytes_of_token("ï¿½", "\ufffd") == b"\xef\xbf\xbd"


def test_tokens_with_one_text_do_not_hide_each_other():
    row = {
        7: Logprob(-1.0, 1, "\ufffd", b"\xf0"),
        8: Logprob(-2.0, 2, "\ufffd", b"\x9f\x91"),
        9: Logprob(-3.0, 3, "\ufffd"),
    }
    assert TokenNames().apart(row) == {"\ufffd": -1.0, "bytes:\\x9f\\x91": -2.0, "token_id:9": -3.0}
    assert TokenNames(as_ids=True).apart(row) == {"token_id:7": -1.0, "token_id:8": -2.0, "token_id:9": -3.0}
