"""The state of sampling on the device: a record of parameters per slot, lists, token histories, counts; scratch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cadenza_common.plan.sampling import COLUMNS, Need
from executor_svc.gpu.kernels.sampling.arithmetic import CHUNK, MAX_VOCAB, SUB

_BYTES = 128
_TYPES = {"f4": "<f4", "i8": "<i4", "u8": "<u8"}
_PLACES = "has_floor penalised has_allowed bias_start bias_length word_start word_length stop_start stop_length".split()


def _record() -> np.dtype[Any]:
    """Return the type of a record: the table's columns that kernels read, widest first, flags, list places, padding."""
    columns = sorted(
        (column for column in COLUMNS.values() if column.need is not Need.NOTHING or column.name == "min_tokens"),
        key=lambda column: -np.dtype(_TYPES[column.dtype]).itemsize,
    )
    fields: list[Any] = [(column.name, _TYPES[column.dtype]) for column in columns]
    fields += [(name, "<i4") for name in _PLACES]
    num_unused = (_BYTES - np.dtype(fields).itemsize) // 4
    return np.dtype([*fields, ("unused", "<i4", (num_unused,))])


RECORD = _record()
"""Sampling parameters of one slot, as `plan.sampling` stores them, in 128 bytes.

has_floor: whether the slot has a floor for a draw. penalised: whether its tokens are counted. has_allowed: whether its
row of allowed bits is used. *_start and *_length: its list in the columns of `SamplingLists`.
"""
RECORD_WORDS = RECORD.itemsize // 4

MAX_INT32 = 2**31 - 1
"""The stored value of larger limits, which no sequence reaches."""
VOCABS = (32768, 65536, 131072, 262144)
"""Kernels are compiled ahead of time up to these vocabularies; the launcher rounds any up to a power of two."""


def field(name: str) -> int:
    """Return the place of a field in a record, in 32-bit words."""
    fields = RECORD.fields
    assert fields is not None
    return int(fields[name][1]) // 4


@dataclass(frozen=True, slots=True)
class SamplingLists:
    """Columns with the lists of all slots, at the places in the slots' records; contiguous."""

    bias_ids: Tensor
    """int32, distinct ids in a slot's list."""
    biases: Tensor
    """float32, one for each of bias_ids."""
    word_ids: Tensor
    """int32, the tokens of bad words."""
    word_following: Tensor
    """int32, the number of tokens of the word that follow each of word_ids."""
    stop_ids: Tensor
    """int32."""

    @classmethod
    def empty(cls, length: int, device: torch.device) -> SamplingLists:
        """Return columns of `length` entries each."""
        ints = torch.zeros((4, length), dtype=torch.int32, device=device)
        return cls(ints[0], torch.zeros(length, device=device), ints[1], ints[2], ints[3])


@dataclass(frozen=True, slots=True)
class SamplingState:
    """The state of n slots; all tensors are contiguous and on one device."""

    records: Tensor
    """[n, RECORD_WORDS] int32: the bytes of a RECORD each."""
    token_ids: Tensor
    """[n, max_model_len + 1] int32, known tokens."""
    num_tokens: Tensor
    """[n] int32, number of known tokens, which is the position of the token to be chosen."""
    num_prompt_tokens: Tensor
    """[n] int32."""
    counts: Tensor
    """[n, vocab] int32: for slots with penalties, twice the token's count in the output, plus 1 if in the prompt."""
    allowed_bits: Tensor
    """[n, ceil(vocab / 32)] int32: bit i % 32 of word i / 32 is the bit of token i."""
    lists: SamplingLists

    @classmethod
    def empty(
        cls, num_slots: int, vocab: int, max_model_len: int, list_length: int, device: torch.device
    ) -> SamplingState:
        """Return the state of slots that are greedy and without tokens."""

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return cls(
            ints(num_slots, RECORD_WORDS),
            ints(num_slots, max_model_len + 1),
            ints(num_slots),
            ints(num_slots),
            ints(num_slots, vocab),
            ints(num_slots, num_words(vocab)),
            SamplingLists.empty(list_length, device),
        )


@dataclass(frozen=True, slots=True)
class SamplingWorkspace:
    """Scratch for R rows of vocab logits; its content is undefined between calls."""

    vocab: int
    edited: Tensor
    """[R, vocab rounded up to 64] float32."""
    edited_rows: Tensor
    """[R] int32: whether the row's logits are in `edited`."""
    best: Tensor
    """[R, 2, chunks] int64, joined keys of raw and of edited logits."""
    tops: Tensor
    """[R, blocks] int32: ordered key of each block's largest logit."""
    blocks: Tensor
    """[R, blocks] int32: the blocks that a row's search reads."""
    race_values: Tensor
    """[R, chunks] float32."""
    race_ids: Tensor
    """[R, chunks] int32."""
    sums: Tensor
    """[R, chunks] float32."""
    floors: Tensor
    """[R] float32: smallest scaled logit that a draw keeps, for rows with a floor."""

    @classmethod
    def empty(cls, max_rows: int, vocab: int, device: torch.device) -> SamplingWorkspace:
        """Return scratch for at most `max_rows` rows."""
        check_vocab(vocab)
        chunks, blocks = num_chunks(vocab), num_blocks(vocab)

        def make(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.empty((max_rows, *shape), dtype=dtype, device=device)

        return cls(
            vocab,
            make(torch.float32, blocks * SUB),
            make(torch.int32),
            make(torch.int64, 2, chunks),
            make(torch.int32, blocks),
            make(torch.int32, blocks),
            make(torch.float32, chunks),
            make(torch.int32, chunks),
            make(torch.float32, chunks),
            make(torch.float32),
        )


def num_chunks(vocab: int) -> int:
    """Return the number of programs that share a row."""
    return -(-vocab // CHUNK)


def num_blocks(vocab: int) -> int:
    """Return the number of blocks of token ids."""
    return -(-vocab // SUB)


def num_words(vocab: int) -> int:
    """Return the number of 32-bit words with a bit for each token id."""
    return -(-vocab // 32)


def check_vocab(vocab: int) -> None:
    """Raise ValueError unless the kernels support a vocabulary of this size."""
    if not 1 <= vocab <= MAX_VOCAB:
        raise ValueError(f"vocab {vocab} is not 1 to {MAX_VOCAB}")
