"""Byte-level tokenizers of any size for random checkpoints, trained on the Python files that are installed here."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from benchmarks.common.checkpoints import CACHE, random_checkpoint, vocab_size
from benchmarks.common.rows import BenchmarkError

_SPECIAL = ["<s>", "</s>", "<pad>"]
_BYTES_PER_TOKEN = 500
"""Of text, for each token of the vocabulary."""


def checkpoint_with_tokenizer(shape: str) -> Path:
    """A random checkpoint of one of SHAPES whose vocabulary is a tokenizer's; made once, then read from the cache."""
    plain = random_checkpoint(shape)
    folder = CACHE / f"{plain.name}-tokenizer"
    if not (folder / "tokenizer.json").is_file():
        folder.mkdir(exist_ok=True)
        for file in plain.iterdir():
            link = folder / file.name
            if not link.exists():
                link.symlink_to(file)
        train(vocab_size(plain), folder)
    return folder


def tokenizer_files(size: int) -> list[Path]:
    """The files of a tokenizer of so many tokens; trained once, then read from the cache."""
    folder = CACHE / f"tokenizer-{size}"
    if not (folder / "tokenizer.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        train(size, folder)
    return sorted(folder.iterdir())


def train(size: int, folder: Path) -> None:
    """Save a byte-level BPE tokenizer of so many tokens; takes minutes for 131,072."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(_texts(size * _BYTES_PER_TOKEN), trainer)
    if raw.get_vocab_size() != size:
        raise BenchmarkError(f"the files here make {raw.get_vocab_size()} tokens, not {size}")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    raw.save(str(folder / "tokenizer.json"))


def _texts(most_bytes: int) -> Iterator[str]:
    """The Python files of this environment, in order of their paths, up to some megabytes."""
    num_bytes = 0
    for path in sorted(Path(sysconfig.get_paths()["purelib"]).rglob("*.py")):
        text = path.read_text(encoding="utf-8", errors="ignore")
        num_bytes += len(text)
        if num_bytes > most_bytes:
            return
        yield text
