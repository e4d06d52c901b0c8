"""Writes the data files of this folder: vocabularies, texts, and their token ids by llama.cpp.

    python -m tests.data.gguf_tokenizers.record

Needs llama-cpp-python; recorded with 0.3.36. Vocabularies are trained without splitting text into words, so that their
tokens cross each border that a pre-tokenizer can draw, and its regular expression shows in the ids.
"""

from __future__ import annotations

import ctypes
import json
import random
import tempfile
import unicodedata
from pathlib import Path
from typing import Any

import llama_cpp
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from tests.helpers.models.gguf_vocabularies import DATA, recorded, vocabulary, write_vocabulary

ROOT = Path(__file__).parents[3]
_SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|end|>", "<|endoftext|>"]
_TYPES = {"<unk>": 2, "<user-defined>": 4, "  \n": 4}
_BYTE_TYPE = 6

BYTE_LEVEL = ("default", "gpt-2", "smollm", "llama-bpe", "dbrx", "qwen2", "tekken", "gpt-4o")
CASES: dict[str, dict[str, Any]] = {
    **{f"bpe-{pre}": {"vocabulary": "byte_level", "metadata": {"pre": pre}} for pre in BYTE_LEVEL},
    "bpe-no-bos": {"texts": 20, "vocabulary": "byte_level", "metadata": {"pre": "llama-bpe", "add_bos_token": False}},
    "bpe-eos": {"texts": 20, "vocabulary": "byte_level", "metadata": {"pre": "qwen2", "add_eos_token": True}},
    "bpe-normal-special": {
        "vocabulary": "byte_level",
        "metadata": {
            "pre": "qwen2",
            "padding_token_id": 0,
            "eos_token_id": 65,
            "bos_token_id": 34,
            "unknown_token_id": 72,
        },
    },
    "bpe-without-pre": {"texts": 20, "vocabulary": "byte_level", "metadata": {}},
    "demo-gpt-2": {"vocabulary": "demo", "metadata": {"pre": "gpt-2", "add_bos_token": True}},
    "demo-llama-bpe": {"vocabulary": "demo", "metadata": {"pre": "llama-bpe"}},
    "spm-llama": {"vocabulary": "sentencepiece", "metadata": {"add_bos_token": True, "add_eos_token": False}},
    "spm-defaults": {"texts": 20, "vocabulary": "sentencepiece", "metadata": {}},
    "spm-gemma": {"vocabulary": "sentencepiece", "metadata": {"add_space_prefix": False}},
    "spm-eos": {
        "texts": 20,
        "vocabulary": "sentencepiece",
        "metadata": {"add_bos_token": False, "add_eos_token": True},
    },
    "spm-phi-3": {"vocabulary": "sentencepiece", "metadata": {"general.name": "Phi-3 Mini"}, "normal": ["  \n"]},
}

KNOWN_TEXTS = (
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|calls|> <|flush|> <end_of_turn> <|endoftext|> </s> <|eom_id|> "
    "<EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> <｜end▁of▁sentence｜> "
    "[e~[ <|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] <|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame> "
    "<|file_sep|> <|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> <|code_prefix|> <|prefix|> "
    "<|fim_suffix|> <fim-suffix> <fim_suffix> <｜fim▁hole｜> <SUF> ▁<SUF> <|code_suffix|> <|suffix|> <|fim_middle|> "
    "<fim-middle> <fim_middle> <｜fim▁end｜> <MID> ▁<MID> <|code_middle|> <|middle|> <|channel|> <|message|> <|start|> "
    "<|constrain|> <s> <unk> <bos> <pad> [INST] <|im_start|> <|user|> <|begin_of_text|> <start_of_turn> "
    "<mask> [BOS] ordinary"
).split()
"""Texts by which llama.cpp knows tokens, and others like them."""

ODD = [
    "",
    " ",
    "  ",
    "   a",
    "a   ",
    "\n",
    "\n\n",
    " \n",
    "\t\t x",
    "a \n\n  b\r\nc",
    "\u00a0x\u3000y\u2009z",
    "a\u200bb\u200dc",
    "x" * 50,
    " " * 33,
    "\n" * 17,
    "-" * 40,
    "a" * 3 + " " * 5 + "b" * 3,
    "=" * 8 + "\n" + "=" * 9,
    "0",
    "12",
    "123",
    "1234567890",
    "3.14159",
    "1,000,000",
    "٣٤٥ १२३ ½ Ⅷ",
    "2026-11-23T23:32:28Z",
    "0x1F3A 1e-9",
    "I'm you're we'll they'd it's DON'T Can'T 'S 'ſ",
    "''''",
    "don’t l’été",
    "snake_case camelCase SCREAMING_CASE XMLHttp",
    "ÉCOLE École éÉ ÅngströmÅ ΑΒΓαβγ АБВабв",
    "नमस्ते दुनिया",
    "สวัสดีชาวโลก",
    "مرحبا بالعالم",
    "שָׁלוֹם",
    "안녕하세요 세계",
    "こんにちは、世界。カタカナ",
    "你好，世界！今天天气很好。",
    "e\u0301a\u0308 Zoë naïve",
    "😀😃 👨‍👩‍👧‍👦 🏳️‍🌈 👍🏽",
    "𝒳 𐍈 🜁",
    "∑∫√≠ ©®™ €£¥",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "<s>a</s>",
    "<s> a </s> b",
    "a<unk>b",
    "<|user|>\n Hello<|end|>\n\n b",
    "<|im_start|><|im_end|>",
    "<|im_start",
    "|im_end|>",
    "<0x41>",
    "<user-defined> x<user-defined>",
    "a  \nb",
    "a   \n  \nc",
    "▁a▁▁b",
    "Ġthe Ċ",
    "</s",
    "<|endoftext|> x <|endoftext|>\ty",
    "\ufeffBOM",
    "a\x00b\x01\x7f",
    "\ufffd\ufffd",
]


def texts() -> list[str]:
    """Return pieces of the repository's files, odd ones, and random characters of each category."""
    chosen = list(ODD)
    for name in (
        "README.md",
        "README.zh-CN.md",
        "pyproject.toml",
        "Makefile",
        "scheduler_svc/app.py",
        "docs/errors.md",
    ):
        text = (ROOT / name).read_text(encoding="utf-8")
        chosen += [text[start : start + 150] for start in range(0, len(text), max(1, len(text) // 6))][:6]
    rng = random.Random(23)
    # Characters that came to Unicode after 2015 are in some tables and not in others.
    known = [chr(code) for code in range(0x20, 0x30000) if unicodedata.ucd_3_2_0.category(chr(code))[0] not in "C"]
    chosen += ["".join(rng.choice(known if rng.random() < 0.5 else "aB1 .\n'") for _ in range(60)) for _ in range(12)]
    return chosen


def train(size: int, spaces: str | None) -> tuple[list[str], dict[str, int]]:
    """Return the merges and the tokens of a vocabulary trained on the repository's documents."""
    raw = Tokenizer(models.BPE())
    if spaces is None:
        raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        raw.normalizer = normalizers.Replace(" ", spaces)
        alphabet = []
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, limit_alphabet=300, max_token_length=10, show_progress=False
    )
    names = ("README.md", "README.zh-CN.md", "docs/quickstart.md", "scheduler_svc/app.py")
    lines = [(ROOT / name).read_text(encoding="utf-8") for name in names]
    parts = [text[start : start + 500] for text in lines for start in range(0, len(text), 500)]
    # A file cannot hold a token with NUL: llama.cpp reads C strings.
    raw.train_from_iterator([text for text in (*parts, *ODD * 3) if "\0" not in text], trainer)
    return [" ".join(merge) for merge in json.loads(raw.to_str())["model"]["merges"]], raw.get_vocab()


def byte_level() -> dict[str, Any]:
    merges, ids = train(1100, None)
    tokens = [*sorted(ids, key=ids.__getitem__), *_SPECIAL, "<user-defined>", "  \n"]
    return {
        "model": "gpt2",
        "tokens": tokens,
        "token_type": [3 if text in _SPECIAL and text != "<unk>" else _TYPES.get(text, 1) for text in tokens],
        "merges": merges,
        "bos_token_id": tokens.index("<s>"),
        "eos_token_id": tokens.index("</s>"),
    }


def sentencepiece() -> dict[str, Any]:
    _, ids = train(1000, "▁")
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = sorted(ids, key=ids.__getitem__)
    own = ["<unk>", "<s>", "</s>", *bytes_, *_SPECIAL[3:], "<user-defined>", "  \n"]
    types = {**dict.fromkeys(_SPECIAL, 3), **_TYPES, **dict.fromkeys(bytes_, _BYTE_TYPE)}
    # As sentencepiece's trainer has it: merged pieces in their order, then single characters.
    pieces = [text for text in pieces if len(text) > 1] + [text for text in pieces if len(text) == 1]
    tokens = own + [text for text in pieces if text not in own]
    return {
        "model": "llama",
        "tokens": tokens,
        "token_type": [types.get(text, 1) for text in tokens],
        "scores": [0.0] * len(own) + [-float(rank) for rank in range(len(tokens) - len(own))],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }


def llama_vocab(path: Path) -> Any:
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
    if not model:
        raise SystemExit(f"llama.cpp does not load {path}")
    return llama_cpp.llama_model_get_vocab(model)


def llama_ids(path: Path, contents: list[str]) -> list[list[int]]:
    """Return llama_tokenize's ids of texts, with add_special and parse_special."""
    vocab, found = llama_vocab(path), []
    for text in contents:
        data = text.encode()
        room = (ctypes.c_int32 * (len(data) + 8))()
        count = llama_cpp.llama_tokenize(vocab, data, len(data), room, len(room), True, True)
        found.append(list(room[:count]))
    return found


def known_texts() -> dict[str, list[bool]]:
    """Return whether a normal token with such a text becomes a control token, and whether it ends a generation."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for text in KNOWN_TEXTS:
            pairs = vocabulary("bpe-without-pre")
            tokens = [f"[{each}]" if each in _SPECIAL else each for each in pairs["tokens"]] + [text]
            types = [1] * len(tokens)
            merges = [each for each in pairs["merges"] if set(each.split()) <= set(tokens)]
            ends = {"bos_token_id": 0, "eos_token_id": 0}
            pairs |= {"tokens": tokens, "token_type": types, "merges": merges, **ends}
            vocab = llama_vocab(write_vocabulary(Path(folder) / "model.gguf", pairs))
            last = len(tokens) - 1
            found[text] = [llama_cpp.llama_vocab_is_control(vocab, last), llama_cpp.llama_vocab_is_eog(vocab, last)]
    return found


def write(name: str, content: Any) -> None:
    (DATA / f"{name}.json").write_text(json.dumps(content, ensure_ascii=False, separators=(",", ":")) + "\n", "utf-8")


def main() -> None:
    write("texts", texts())
    write("byte_level", byte_level())
    write("sentencepiece", sentencepiece())
    write("cases", CASES)
    with tempfile.TemporaryDirectory() as folder:
        ids = {}
        for name in CASES:
            path = write_vocabulary(Path(folder) / f"{name}.gguf", vocabulary(name))
            ids[name] = llama_ids(path, recorded("texts")[: CASES[name].get("texts")])
    write("ids", ids)
    write("known_texts", known_texts())


if __name__ == "__main__":
    main()
