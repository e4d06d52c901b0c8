"""What sampling on the device reads: a record of parameters per slot, lists, token histories, counts; its scratch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from executor_svc.gpu.kernels.sampling.arithmetic import CHUNK, MAX_VOCAB, SUB
from executor_svc.plan.sampling import COLUMNS, Need

_BYTES = 128
_TYPES: dict[type[np.generic], str] = {np.float32: "<f4", np.int64: "<i4", np.uint64: "<u8"}
_PLACES = "has_floor penalised has_allowed bias_start bias_length word_start word_length stop_start stop_length".split()


def _record() -> np.dtype[Any]:
    """Columns of the table that kernels read, widest first, then flags and places of lists, filled up to 128 bytes."""
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

has_floor: has it a floor for a draw. penalised: are the slot's tokens counted. has_allowed: its row of allowed bits
counts. *_start and *_length: its list in the columns of `SamplingLists`.
"""
RECORD_WORDS = RECORD.itemsize // 4

MAX_INT32 = 2**31 - 1
"""What larger limits are told as: none is ever reached."""


def field(name: str) -> int:
    """Place of a field in a record, in 32-bit words."""
    fields = RECORD.fields
    assert fields is not None
    return int(fields[name][1]) // 4


@dataclass(frozen=True, slots=True)
class SamplingLists:
    """Lists of all slots one behind the other, where each record says; contiguous."""

    bias_ids: Tensor
    """int32, no id twice in a slot's list."""
    biases: Tensor
    """float32, one for each of bias_ids."""
    word_ids: Tensor
    """int32, the tokens of bad words."""
    word_following: Tensor
    """int32, how many tokens of its word follow each of word_ids."""
    stop_ids: Tensor
    """int32."""

    @classmethod
    def empty(cls, length: int, device: torch.device) -> SamplingLists:
        """Room for so many entries in each column."""
        ints = torch.zeros((4, length), dtype=torch.int32, device=device)
        return cls(ints[0], torch.zeros(length, device=device), ints[1], ints[2], ints[3])


@dataclass(frozen=True, slots=True)
class SamplingState:
    """What there is by slot, n slots; all contiguous and on one device."""

    records: Tensor
    """[n, RECORD_WORDS] int32: the bytes of a RECORD each."""
    token_ids: Tensor
    """[n, max_model_len + 1] int32, known tokens."""
    num_tokens: Tensor
    """[n] int32, how many are known: the position of the token to be chosen."""
    num_prompt_tokens: Tensor
    """[n] int32."""
    counts: Tensor
    """[n, vocab] int32: of slots that are penalised, twice the token's count in the output, plus 1 if in the prompt."""
    allowed_bits: Tensor
    """[n, ceil(vocab / 32)] int32: bit i % 32 of word i / 32 is token i's."""
    lists: SamplingLists

    @classmethod
    def empty(
        cls, num_slots: int, vocab: int, max_model_len: int, list_length: int, device: torch.device
    ) -> SamplingState:
        """All slots greedy, without tokens."""

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
    """Scratch for R rows of vocab logits; its content means nothing between calls."""

    vocab: int
    edited: Tensor
    """[R, vocab rounded up to 64] float32."""
    edited_rows: Tensor
    """[R] int32: are this row's logits in `edited`."""
    best: Tensor
    """[R, 2, chunks] int64, joined keys: of raw logits, of edited ones."""
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
    """[R] float32: least scaled logit that a draw keeps, of rows that have a floor."""

    @classmethod
    def empty(cls, max_rows: int, vocab: int, device: torch.device) -> SamplingWorkspace:
        """Scratch for at most so many rows."""
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
    """Programs that share a row."""
    return -(-vocab // CHUNK)


def num_blocks(vocab: int) -> int:
    """Blocks of token ids."""
    return -(-vocab // SUB)


def num_words(vocab: int) -> int:
    """32-bit words that hold a bit for each token id."""
    return -(-vocab // 32)


def check_vocab(vocab: int) -> None:
    """Raise ValueError unless the kernels can take a vocabulary of this size."""
    if not 1 <= vocab <= MAX_VOCAB:
        raise ValueError(f"vocab {vocab} is not 1 to {MAX_VOCAB}")
