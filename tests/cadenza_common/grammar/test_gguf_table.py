"""The table of a GGUF file's tokens: their bytes are what a detokenizer writes, masks those of the folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import llguidance.numpy
import pytest
from tokenizers.pre_tokenizers import ByteLevel

from cadenza_common.gguf.file import read_gguf
from cadenza_common.grammar.compiling import new_matcher
from cadenza_common.grammar.spec import GrammarSpec
from cadenza_common.grammar.table import TableSource, table_source
from scheduler_svc.requests.tokenizer import TokenizerError, load_tokenizer
from tests.helpers import real_files
from tests.helpers.models.gguf_vocabularies import DEMO, Pairs, demo_vocabulary, vocabulary, write_vocabulary

SCHEMA = (
    '{"type": "object", "properties": {"name": {"type": "string"}, "n": {"type": "integer"}}, "required": ["name"]}'
)
ANSWER = '{"name": "Zoë \\"Z\\" \u4e2d\U0001f600 O\'Hara", "n": -12}'
SPECIAL = b"\xff"
"""Byte before the name of a special token in llguidance's tables; no text has it."""


def gguf_source(folder: Path, pairs: Pairs, **changes: object) -> TableSource:
    path = write_vocabulary(folder / "model.gguf", pairs | changes)
    found = table_source(str(path), len(pairs["tokens"]), [1])
    assert found is not None
    return found


def check_bytes(path: Path) -> int:
    """Compare the bytes of all tokens with what they add to a text; returns how many are parts of characters."""
    tokenizer = load_tokenizer(str(path))
    assert tokenizer is not None
    source = table_source(str(path), tokenizer.vocab_size, [1])
    assert source is not None
    table, num_parts = source.table(), 0
    [anchor] = tokenizer.encode("a", add_special_tokens=False)[-1:]
    before = tokenizer.decode([anchor], skip_special_tokens=False)
    for token_id in range(tokenizer.vocab_size):
        text = tokenizer.decode([anchor, token_id], skip_special_tokens=False).removeprefix(before)
        found = table.decode_bytes([token_id])
        if found == f"<[{token_id}]>".encode():  # it stands for no bytes: Command R has emoji that are not in bytes
            assert not set(tokenizer._inner.convert_ids_to_tokens(token_id)) <= set(ByteLevel.alphabet())
        elif "\ufffd" not in text:
            assert found == text.encode(), token_id
        elif found:  # empty is the byte 0xFF alone
            num_parts += 1
            assert found.decode(errors="replace") == text, token_id
    return num_parts


@pytest.mark.parametrize("name", ["bpe-llama-bpe", "demo-gpt-2", "spm-llama", "spm-gemma"])
def test_bytes_are_those_of_the_detokenizer(name: str, tmp_path: Path) -> None:
    assert check_bytes(write_vocabulary(tmp_path / "model.gguf", vocabulary(name))) > 100


@pytest.mark.real
@pytest.mark.timeout(600)
def test_bytes_of_real_vocabularies() -> None:
    paths = [*real_files.vocabularies().values(), real_files.smollm2(), real_files.gemma3()]
    checked = 0
    for path in paths:
        try:
            load_tokenizer(str(path))
        except TokenizerError:  # a kind of tokenizer that no served model has
            continue
        checked += 1
        assert check_bytes(path) > 100
    assert checked > 10


def masks(source: TableSource, spec: GrammarSpec, answer: str) -> list[bytes]:
    """The masks before each token of an answer, and behind the last one."""
    table = source.table()
    matcher: Any = new_matcher(spec, table)
    bits = llguidance.numpy.allocate_token_bitmask(1, source.vocab_size)
    found = []
    for token_id in [*table.tokenize_str(answer), None]:
        llguidance.numpy.fill_next_token_bitmask(matcher, bits, 0)
        found.append(bits.tobytes())
        assert token_id is None or matcher.consume_token(token_id)
    return found


def test_masks_are_those_of_the_folder_that_the_file_was_made_of(tmp_path: Path) -> None:
    pairs = demo_vocabulary()
    folder = table_source(str(DEMO.parent), len(pairs["tokens"]), [1])
    assert folder is not None
    spec = GrammarSpec("json_schema", SCHEMA)
    assert masks(gguf_source(tmp_path, pairs), spec, ANSWER) == masks(folder, spec, ANSWER)


def test_a_sentencepiece_vocabulary_is_led_too(tmp_path: Path) -> None:
    assert len(masks(gguf_source(tmp_path, vocabulary("spm-llama")), GrammarSpec("json_schema", SCHEMA), ANSWER)) > 10


def test_digests_tell_vocabularies_apart(tmp_path: Path) -> None:
    pairs = demo_vocabulary()
    tokens = [*pairs["tokens"][:-1], "other"]
    digest = gguf_source(tmp_path, pairs).engine().table_digest
    assert gguf_source(tmp_path, pairs, **{"general.author": "someone"}).engine().table_digest == digest
    assert gguf_source(tmp_path, pairs, tokens=tokens).engine().table_digest != digest
    assert gguf_source(tmp_path, pairs, bos_token_id=5).engine().table_digest != digest


def test_a_file_without_a_tokenizer_has_no_table(tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "model.gguf", {"model": "none"})
    assert read_gguf(path).metadata.text("tokenizer.ggml.model") == "none"
    assert table_source(str(path), 10, [1]) is None
