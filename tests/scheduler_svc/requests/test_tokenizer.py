"""Loading, fitting, encoding, chats."""

from __future__ import annotations

import asyncio
import threading

import pytest

from scheduler_svc.requests.chats.fields import ChatError
from scheduler_svc.requests.chats.renderer import ChatSettings
from scheduler_svc.requests.tokenizer import MAX_ADDED_TOKENS, TokenizerAddedToken, TokenizerError, load_tokenizer
from tests.helpers.models.chats import chat_of, encode_chat
from tests.helpers.models.toy_tokenizers import SPECIAL, TEMPLATE, byte_level, hf_byte_level

USER = {"role": "user", "content": "Hi"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    hf_byte_level().save_pretrained(folder)
    return str(folder)


def test_load_from_a_folder(folder):
    tokenizer = load_tokenizer(folder)
    assert tokenizer.vocab_size == byte_level().vocab_size <= 512
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.chats.templates == {"default": TEMPLATE}
    text = "Hello, 你好 😀 <|im_end|>"
    assert tokenizer.encode(text) == byte_level().encode(text)
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text
    assert tokenizer.decode(tokenizer.encode(text)) == "Hello, 你好 😀 "


def test_a_larger_tokenizer_is_another_models(folder):
    with pytest.raises(TokenizerError, match=r"up to \d+, the model a vocabulary of 300"):
        load_tokenizer(folder).check_fits(300)


def test_added_tokens_may_lie_beyond_the_models(tmp_path, caplog):
    """As <image_soft_token> of Gemma 3's tokenizer does for its text models."""
    inner = hf_byte_level()
    largest = max(inner.get_vocab().values())
    inner.add_special_tokens({"additional_special_tokens": ["<|image|>"]})
    inner.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    tokenizer.check_fits(largest + 2)
    assert not caplog.text
    tokenizer.check_fits(largest + 1)
    assert tokenizer.encode("<|image|>") == [largest + 1]
    assert "1 added tokens are beyond the model's vocabulary: <|image|>" in caplog.text
    with pytest.raises(TokenizerError, match=f"up to {largest + 1}, the model a vocabulary of {largest}"):
        tokenizer.check_fits(largest)


def test_nothing_there(tmp_path):
    assert load_tokenizer("") is None
    assert load_tokenizer(str(tmp_path)) is None
    with pytest.raises(TokenizerError, match="holds no tokenizer"):
        load_tokenizer(str(tmp_path), required=True)
    with pytest.raises(TokenizerError, match="--skip-tokenizer-init"):
        load_tokenizer(str(tmp_path / "gone"))


def test_a_broken_tokenizer_is_an_error(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match="cannot load"):
        load_tokenizer(str(tmp_path))


def test_ids_without_a_token_are_nothing():
    assert byte_level().decode([5000]) == ""
    assert byte_level().token_text(5000) == ""


def test_truncation_in_the_file_is_ignored(tmp_path):
    inner = hf_byte_level()
    inner.backend_tokenizer.enable_truncation(3)
    inner.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    assert len(tokenizer.encode("Hello, world! " * 9)) > 3


def test_chat():
    tokenizer = byte_level()

    def render(messages, **options):
        options = {"add_generation_prompt": False} | options
        return tokenizer.decode(encode_chat(tokenizer, chat_of(messages, **options)), skip_special_tokens=False)

    assert render([USER]) == "<|im_start|>user\nHi<|im_end|>\n"
    assert render([USER], add_generation_prompt=True).endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert render([USER], continue_final_message=True) == "<|im_start|>user\nHi"
    with pytest.raises(ChatError, match="no such role"):
        render([{"role": "refused", "content": ""}])
    with pytest.raises(ChatError, match="the tokenizer has no chat template"):
        encode_chat(byte_level(template=False), chat_of([USER]))


def test_several_templates_and_one_in_their_place(tmp_path):
    inner = hf_byte_level()
    inner.chat_template = {"default": "d{{ eos_token }}", "tool_use": "t"}
    inner.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.decode(encode_chat(tokenizer, chat_of([USER])), skip_special_tokens=False) == "d<|endoftext|>"
    assert encode_chat(tokenizer, chat_of([USER], tools=[{}])) == tokenizer.encode("t")
    replaced = load_tokenizer(str(tmp_path), chats=ChatSettings("new"))
    assert encode_chat(replaced, chat_of([USER], tools=[{}])) == replaced.encode("new")


def test_added_tokens_are_named(tmp_path):
    inner = hf_byte_level()
    inner.add_tokens(["<tool_call>", *(f"<more{index}>" for index in range(5000))])
    inner.save_pretrained(tmp_path)
    tokens = load_tokenizer(str(tmp_path)).added_tokens
    assert tokens[:3] == tuple(TokenizerAddedToken(index, text, True) for index, text in enumerate(SPECIAL))
    assert tokens[3] == TokenizerAddedToken(byte_level().vocab_size, "<tool_call>", False)
    assert len(tokens) == MAX_ADDED_TOKENS
    assert [each.token_id for each in tokens] == sorted(each.token_id for each in tokens)


async def test_long_work_leaves_the_event_loop():
    tokenizer = byte_level()
    here = threading.get_ident()
    assert await tokenizer.run(threading.get_ident, 100) == here
    assert await tokenizer.run(threading.get_ident, 100_000) != here
    texts = ["Hello, 你好 " * 2000] * 4
    ids = await asyncio.gather(*(tokenizer.run(lambda t=text: tokenizer.encode(t), len(text)) for text in texts))
    assert ids == [tokenizer.encode(texts[0])] * 4


def test_a_folder_that_is_not_there_is_named() -> None:
    with pytest.raises(TokenizerError, match="there is no folder '/nosuch/folder'"):
        load_tokenizer("/nosuch/folder")
