"""A sequence's sampling parameters in the form of the kernels: a record of numbers, bits of allowed tokens, lists."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cadenza_common.plan.sampling import Need, SequenceSampling
from executor_svc.gpu.kernels.sampling.state import MAX_INT32, RECORD, num_words
from executor_svc.plan.arrays import ints
from executor_svc.plan.sampling import needs_of, stored


def pack_bits(token_ids: Sequence[int], vocab: int) -> NDArray[np.int32]:
    """Return a slot's row of `SamplingState.allowed_bits`."""
    bits = np.zeros(num_words(vocab) * 32, np.bool_)
    bits[ints(token_ids)] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


def pack_record(
    sampling: SequenceSampling, bias_start: int = 0, word_start: int = 0, stop_start: int = 0
) -> np.ndarray:
    """Return a [1] array of RECORD for a slot with lists that begin at these places of the columns."""
    record, numbers = np.zeros(1, RECORD), stored(sampling)
    needs = needs_of(numbers)
    for name, value in numbers.items():
        if name in (RECORD.names or ()):
            record[name] = min(value, MAX_INT32) if RECORD[name] == np.int32 else value
    record["has_floor"] = Need.FLOOR in needs
    record["penalised"] = Need.COUNTS in needs
    record["has_allowed"] = len(sampling.allowed_token_ids) > 0
    record["bias_start"], record["bias_length"] = bias_start, len(sampling.bias_token_ids)
    record["word_start"], record["word_length"] = word_start, sum(len(word) for word in sampling.bad_words)
    record["stop_start"], record["stop_length"] = stop_start, len(sampling.stop_token_ids)
    return record


def following(words: tuple[Sequence[int], ...]) -> NDArray[np.int32]:
    """Return a slot's part of `SamplingLists.word_following`."""
    parts = [np.arange(len(word), dtype=np.int32)[::-1] for word in words]
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)
