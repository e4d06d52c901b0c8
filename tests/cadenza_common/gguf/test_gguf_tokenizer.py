"""Tokenizers of GGUF files: ids equal llama.cpp's, decoding, special tokens, chat templates, broken files."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as RawTokenizer

from cadenza_common.gguf.metadata import GgufError
from cadenza_common.gguf.pre_tokenizers import PRE_TOKENIZERS
from cadenza_common.gguf.tokenizer import load_gguf_tokenizer
from scheduler_svc.requests.chats.fields import ChatFields, MessageFields
from scheduler_svc.requests.tokenizer import Tokenizer, TokenizerError, load_tokenizer
from tests.helpers import real_files
from tests.helpers.models.chats import encode_chat
from tests.helpers.models.gguf_vocabularies import DEMO, Pairs, recorded, vocabulary, write_vocabulary

CHAT = ChatFields((MessageFields("user", "Hi"),), add_generation_prompt=False)
BYTE_LEVEL, SENTENCEPIECE = "bpe-llama-bpe", "spm-llama"


def load(folder: Path, pairs: Pairs) -> Tokenizer:
    tokenizer = load_tokenizer(str(write_vocabulary(folder / "model.gguf", pairs)))
    assert tokenizer is not None
    return tokenizer


@pytest.mark.sampled(5)
@pytest.mark.slow
@pytest.mark.parametrize("name", recorded("cases"))
def test_ids_equal_those_of_llama_cpp(name: str, tmp_path: Path) -> None:
    tokenizer = load(tmp_path, vocabulary(name))
    for text, expected in zip(recorded("texts"), recorded("ids")[name], strict=False):
        assert tokenizer.encode(text) == expected, text


def test_the_recorded_pre_tokenizers_differ() -> None:
    """Otherwise one regular expression might stand for another."""
    ids = recorded("ids")
    names = ["default", "gpt-2", "smollm", "llama-bpe", "dbrx", "qwen2", "tekken", "gpt-4o"]
    distinct = {name: str(ids[f"bpe-{name}"]) for name in names}
    assert len(set(distinct.values())) == len(names)
    assert ids["bpe-without-pre"] == ids["bpe-default"][: len(ids["bpe-without-pre"])]


@pytest.mark.parametrize(
    ("names", "recorded_as"),
    [
        ("a.x-4.0 exaone4 gigachat jais mellum modern-bert mpt olmo trillion", "gpt-2"),
        ("codeshell command-r exaone mellum2 minerva-7b", "smollm"),
        ("falcon-h1 lfm2 midm-2.0", "llama-bpe"),
        ("chatglm-bpe", "dbrx"),
        ("f2llmv2 grok-2 hunyuan kormo solar-open stablelm2", "qwen2"),
        ("kanana2 llama4 minimax-m2 talkie", "gpt-4o"),
    ],
)
def test_names_of_the_same_rules(names: str, recorded_as: str) -> None:
    """As llama.cpp has them."""
    assert {PRE_TOKENIZERS[name] for name in names.split()} == {PRE_TOKENIZERS[recorded_as]}


def test_glm_has_llama3s_words_and_no_bos() -> None:
    assert PRE_TOKENIZERS["glm4"] == replace(PRE_TOKENIZERS["llama-bpe"], adds_bos=False)


@pytest.mark.real
def test_ids_of_llama_cpps_own_tests() -> None:
    """The strings beside its vocabularies, and their ids."""
    checked, refused = set(), []
    for name, path in real_files.vocabularies().items():
        texts, ids = path.with_name(f"{path.name}.inp"), path.with_name(f"{path.name}.out")
        try:
            tokenizer = load_gguf_tokenizer(path)
        except GgufError as error:
            refused.append(str(error))
            continue
        if not texts.exists():
            continue
        checked.add(name)
        tried = texts.read_bytes().decode().split("\n__ggml_vocab_test__\n")
        lines = ids.read_text().split("\n")
        assert not any(lines[len(tried) :]), "the last line of some files ends, that of others does not"
        for text, expected in zip(tried, lines[: len(tried)], strict=True):
            found = tokenizer.encode(text, add_special_tokens=False)
            assert found == [int(token_id) for token_id in expected.split()], (name, text)
    for problem in refused:
        assert re.search(r"tokenizer\.ggml\.(model|pre) is '(bert|t5|deepseek-llm)'; supported", problem)
    assert checked == {
        "command-r", "deepseek-coder", "falcon", "gemma-4", "gpt-2", "llama-bpe", "llama-spm", "mpt", "phi-3", "qwen2",
        "qwen35", "refact", "starcoder",
    }  # fmt: skip


def test_gemma4_merges_over_whole_texts(tmp_path: Path) -> None:
    """By the merges of the file, over spaces and line ends; what is no token has its bytes, and BOS is always there."""
    special, pieces = ["<pad>", "<eos>", "<bos>", "<unk>"], ["▁", "a", "b", "\n", "▁a", "ab", "▁ab", "\n\n"]
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    pairs: Pairs = {
        "model": "gemma4",
        "tokens": tokens,
        "token_type": [3] * 4 + [6] * 256 + [1] * len(pieces),
        "merges": ["▁ a", "▁a b", "a b", "\n \n"],
        "add_space_prefix": False,
        "add_bos_token": False,
        **{f"{name}_token_id": at for at, name in enumerate(("padding", "eos", "bos", "unknown"))},
    }
    tokenizer = load(tmp_path, pairs)
    found = tokenizer.encode("ab ab  b\n\nac")
    texts = [tokens[token_id] for token_id in found]
    assert texts == ["<bos>", "ab", "▁ab", "▁", "▁", "b", "\n\n", "a", "<0x63>"]
    assert tokenizer.decode(found) == "ab ab  b\n\nac"


@pytest.mark.parametrize("name", [BYTE_LEVEL, "bpe-qwen2", SENTENCEPIECE, "spm-gemma"])
def test_decoding_gives_the_text_back(name: str, tmp_path: Path) -> None:
    tokenizer = load(tmp_path, vocabulary(name))
    for text in recorded("texts"):
        # Special tokens are skipped; ▁ stands for a space; sentencepiece drops the first space, and adds one after each
        # added token, as "  \n" is.
        marks = ("<", "▁", "  \n")
        if any(mark in text for mark in marks) or (text.startswith(" ") and name == SENTENCEPIECE):
            continue
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens(tmp_path: Path) -> None:
    pairs = vocabulary(SENTENCEPIECE)
    tokenizer, tokens = load(tmp_path, pairs), pairs["tokens"]
    special = {"<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|end|>", "<|endoftext|>"}
    assert {tokens[token_id] for token_id in tokenizer.special_ids} == special
    assert tokenizer.vocab_size == len(tokens)
    ids = tokenizer.encode("a<|im_end|> b<user-defined>c")
    assert tokenizer.decode(ids) == "a  b<user-defined> c"
    assert ids[0] == tokens.index("<s>")
    assert tokenizer.encode("a<|im_end|>", add_special_tokens=False) == ids[1:4] == tokenizer.encode("a<|im_end|>")[1:]


def test_a_token_that_looks_like_an_end_is_a_control_token(tmp_path: Path) -> None:
    """Converters have written <|im_end|> as a normal token; llama.cpp takes it for a control token."""
    pairs = vocabulary(BYTE_LEVEL)
    types = [
        1 if text == "<|im_end|>" else kind for text, kind in zip(pairs["tokens"], pairs["token_type"], strict=True)
    ]
    tokenizer = load(tmp_path, pairs | {"token_type": types})
    assert pairs["tokens"].index("<|im_end|>") in tokenizer.special_ids
    assert tokenizer.encode("<|im_end|>")[1:] == [pairs["tokens"].index("<|im_end|>")]


def test_normal_tokens_that_are_named_stay_normal(tmp_path: Path) -> None:
    """Converters have written 0, the token !, as that of the padding; no text is cut at it, nor is it left out."""
    tokenizer = load(tmp_path, vocabulary("bpe-normal-special"))
    ids = tokenizer.encode("a!bcC")
    assert tokenizer.decode(ids) == "a!bcC"
    assert not tokenizer.special_ids & set(ids)
    template = {"tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}"}
    tokenizer = load(tmp_path, vocabulary("bpe-normal-special") | template)
    assert encode_chat(tokenizer, CHAT) == tokenizer.encode("CHi")


def test_words_without_a_token_have_their_bytes(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, vocabulary(SENTENCEPIECE))
    token_id = tokenizer.encode("ᚠ")[-1]
    assert tokenizer.token_text(token_id) == "\ufffd"
    assert tokenizer.decode(tokenizer.encode("aᚠb")) == "aᚠb"


def test_streams_decode_a_token_at_a_time(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, vocabulary(SENTENCEPIECE))
    assert tokenizer.fixed_text(tokenizer.encode("model")[-1]) is not None
    tokenizer = load(tmp_path, vocabulary(BYTE_LEVEL))
    assert tokenizer.fixed_text(tokenizer.encode("model")[-1]) is not None


def test_chat_template(tmp_path: Path) -> None:
    template = "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.content }}{{ eos_token }}{% endfor %}"
    pairs = vocabulary(BYTE_LEVEL)
    tokenizer = load(tmp_path, pairs | {"tokenizer.chat_template": template})
    ids = encode_chat(tokenizer, CHAT)
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s><|im_start|>Hi</s>"
    assert ids[:2] == [pairs["bos_token_id"], pairs["tokens"].index("<|im_start|>")]
    assert not load(tmp_path, pairs).chats.templates


@pytest.mark.parametrize("lists", [{}, {"tokenizer.chat_templates": ["tool_use", "rag", "gone"]}])
def test_chat_templates_by_name(tmp_path: Path, lists: dict[str, Any]) -> None:
    key = "tokenizer.chat_template"
    named = {key: "d", f"{key}.tool_use": "t", f"{key}.rag": "r"}
    tokenizer = load(tmp_path, vocabulary(BYTE_LEVEL) | named | lists)
    expected = {"default": "d", "tool_use": "t"} | ({"rag": "r"} if lists else {})
    assert tokenizer.chats.templates == expected
    with_tools = ChatFields(CHAT.messages, tools=("{}",))
    assert encode_chat(tokenizer, with_tools) == tokenizer.encode("t", add_special_tokens=False)
    assert encode_chat(tokenizer, CHAT) == tokenizer.encode("d", add_special_tokens=False)
    del named[key]
    assert load(tmp_path, vocabulary(BYTE_LEVEL) | named).chats.templates == {"tool_use": "t"}


def test_ids_equal_those_of_the_folder_that_the_file_was_made_of(tmp_path: Path) -> None:
    """Without its regular expression, which has no name in GGUF: word by word."""
    ours = load(tmp_path, vocabulary("demo-gpt-2"))
    theirs = RawTokenizer.from_file(str(DEMO))
    for word in "Hello world the quick brown fox. <|user|> What is café?".split():
        assert ours.encode(f" {word}") == theirs.encode(f" {word}").ids
    assert ours.special_ids == theirs.get_added_tokens_decoder().keys()


def test_a_file_without_a_tokenizer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = str(write_vocabulary(tmp_path / "model.gguf", {"model": "none"}))
    assert load_tokenizer(path) is None
    assert "token ids only" in caplog.text
    with pytest.raises(TokenizerError, match="holds no tokenizer"):
        load_tokenizer(path, required=True)
    write_vocabulary(tmp_path / "model.gguf", {})
    assert load_tokenizer(str(tmp_path)) is None


def _pieces(texts: list[str], kind: int) -> Pairs:
    return {"tokens": texts, "token_type": [kind] * len(texts), "scores": [0.0] * len(texts), "bos_token_id": 0}


def _controls(count: int) -> Pairs:
    """Return a byte-level vocabulary of control tokens and of one merge."""
    tokens = [*(f"{each:x}." for each in range(count)), "a", "b", "ab"]
    ids: Pairs = {"bos_token_id": 0, "eos_token_id": 0}
    return {"tokens": tokens, "token_type": [3] * count + [1] * 3, "merges": ["a b"], **ids}


_DRAWN = "".join(random.Random(23).choices("abcdefghijklmnop", k=1000))
_RUNS = sorted({_DRAWN[start : start + length] for start in range(900) for length in range(1, 60)})
"""All parts of a text: each is made of pairs of tokens at each of its places."""


def _changed(name: str, **changes: Any) -> Pairs:
    pairs = vocabulary(name) | {key: value for key, value in changes.items() if value is not None}
    return {key: value for key, value in pairs.items() if changes.get(key, value) is not None}


@pytest.mark.sampled(5)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes", "problem"),
    [
        (BYTE_LEVEL, {"model": "t5"}, "tokenizer.ggml.model is 't5'; supported: gpt2"),
        (BYTE_LEVEL, {"model": 7}, "tokenizer.ggml.model must be a string"),
        (BYTE_LEVEL, {"pre": "viking"}, "tokenizer.ggml.pre is 'viking'; supported: default, gpt-2"),
        (BYTE_LEVEL, {"tokens": None}, "tokenizer.ggml.tokens is missing"),
        (BYTE_LEVEL, {"tokens": [1, 2]}, "tokenizer.ggml.tokens must be an array of strings"),
        (BYTE_LEVEL, {"tokens": ["a", "b", "a"]}, "tokenizer.ggml.tokens has 'a' twice: 0 and 2"),
        (BYTE_LEVEL, {"token_type": [1, 1]}, r"tokenizer.ggml.token_type has 2 values for \d+ tokens"),
        (BYTE_LEVEL, {"token_type": "x"}, "tokenizer.ggml.token_type must be an array of integers"),
        (BYTE_LEVEL, {"merges": None}, "tokenizer.ggml.merges is missing"),
        (BYTE_LEVEL, {"merges": ["a b", "t h", "ab"]}, "tokenizer.ggml.merges has no two tokens at 2: 'ab'"),
        (BYTE_LEVEL, {"merges": ["a b c"]}, "tokenizer.ggml.merges has no two tokens at 0"),
        (BYTE_LEVEL, {"merges": ["é q"]}, "tokenizer.ggml.merges names 'éq' at 0, which is no token"),
        (BYTE_LEVEL, {"bos_token_id": 5_000_000}, r"tokenizer.ggml.bos_token_id is 5000000, there are \d+ tokens"),
        (BYTE_LEVEL, {"bos_token_id": None}, "tokenizer.ggml.bos_token_id is missing, and each text needs that token"),
        (BYTE_LEVEL, {"add_bos_token": "yes"}, "tokenizer.ggml.add_bos_token must be true or false"),
        (BYTE_LEVEL, {"tokenizer.chat_template": 3}, "tokenizer.chat_template must be a string"),
        (SENTENCEPIECE, {"scores": None}, "tokenizer.ggml.scores is missing"),
        (SENTENCEPIECE, {"scores": [0.0]}, r"tokenizer.ggml.scores has 1 values for \d+ tokens"),
        (SENTENCEPIECE, {"scores": [float("nan")] * 5000}, "tokenizer.ggml.scores has NaN for token 0"),
        (SENTENCEPIECE, {"add_space_prefix": 1}, "tokenizer.ggml.add_space_prefix must be true or false"),
        (SENTENCEPIECE, {"tokens": ["x" * 257]}, "tokenizer.ggml.tokens has 257 characters at 0; at most 256"),
        (
            SENTENCEPIECE,
            _pieces(["a" * 200 + str(each) * 11 for each in range(10_000, 27_000)], 1),
            ".* may be made of",
        ),
        (SENTENCEPIECE, _pieces(_RUNS, 1), "tokenizer.ggml.tokens has tokens that are made of over 1048576 pairs"),
        (BYTE_LEVEL, {"tokens": ["x" * 1025]}, "tokenizer.ggml.tokens has 1025 characters at 0; at most 1024"),
        (BYTE_LEVEL, _controls(65_537), "tokenizer.ggml.token_type has 65537 control, unknown and user-defined tokens"),
    ],
)
def test_broken_metadata_is_named(name: str, changes: dict[str, Any], problem: str, tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "model.gguf", _changed(name, **changes))
    with pytest.raises(TokenizerError, match=f"cannot load a tokenizer: {path}: metadata {problem}"):
        load_tokenizer(str(path))


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUX")
    with pytest.raises(TokenizerError, match=r"model.gguf: not a GGUF file"):
        load_tokenizer(str(tmp_path / "model.gguf"))


_ODD_VALUES: list[Any] = [
    0,
    3,
    2**31,
    "▁",
    True,
    [1],
    ["a", "b"],
    ["a b", "ab a"],
    [6] * 1200,
    [4] * 1200,
    "llama",
    "gpt2",
]


def _mutated(rng: random.Random) -> Pairs:
    """Return metadata with two values of each list exchanged, and often an odd value in the place of one."""
    pairs = dict(vocabulary(rng.choice([BYTE_LEVEL, SENTENCEPIECE, "spm-phi-3"])))
    for key, value in pairs.items():
        if isinstance(value, list):
            first, second = rng.sample(range(len(value)), 2)
            pairs[key] = [*value]
            pairs[key][first], pairs[key][second] = value[second], value[first]
    if rng.random() < 0.6:
        key = rng.choice([*pairs, "add_eos_token", "unknown_token_id", "padding_token_id", "general.name"])
        pairs[key] = rng.choice(_ODD_VALUES)
    return pairs


@pytest.mark.slow
def test_fuzzed_metadata_is_refused_by_name_or_works(tmp_path: Path) -> None:
    rng, refused, worked = random.Random(23), 0, 0
    for _ in range(60):
        path = write_vocabulary(tmp_path / "model.gguf", _mutated(rng))
        try:
            tokenizer = load_tokenizer(str(path))
        except TokenizerError as error:
            refused += f"{path}: metadata " in str(error)
            continue
        assert tokenizer is not None
        tokenizer.decode(tokenizer.encode("Hello <s> \n x ᚠ"), skip_special_tokens=False)
        worked += 1
    assert refused + worked == 60
    assert min(refused, worked) > 5
