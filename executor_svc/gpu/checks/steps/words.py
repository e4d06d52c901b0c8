"""How numbers on the device differ from what they must be, in words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from cadenza_common.plan.sampling import SequenceSampling
from executor_svc.batch.forward_batch import ForwardBatch
from executor_svc.gpu.kernels.sampling.state import RECORD, SamplingLists
from executor_svc.gpu.kernels.slots.slots import StepInputs
from executor_svc.gpu.sampling.state import following, pack_record
from executor_svc.plan.arrays import BoolArray

_PADDING = (("token_ids", 0), ("positions", 0), ("slot_mapping", -1), ("rope_lens", 1))
_STARTS = ("bias_start", "word_start", "stop_start")


def first_of(reasons: Iterable[str | None]) -> str | None:
    """Return the first reason that is one."""
    return next(filter(None, reasons), None)


def differing(what: str, found: Tensor | NDArray[Any], wanted: Tensor | NDArray[Any]) -> str | None:
    """Return how whole numbers differ, if they do; what: their name."""
    have, want = (each.cpu().numpy() if isinstance(each, Tensor) else np.asarray(each) for each in (found, wanted))
    if have.shape != want.shape:
        return f"{what}: {have.shape} numbers, not {want.shape}"
    wrong = np.argwhere(have != want)
    if not len(wrong):
        return None
    at = tuple(wrong[0].tolist())
    place = ", ".join(map(str, at))
    return f"{what}: {len(wrong)} of {have.size} are wrong, the first at {place}: {have[at]}, not {want[at]}"


def tokens_reason(inputs: StepInputs, computed: BoolArray, batch: ForwardBatch | None) -> str | None:
    """Return how a step's tensors by token differ from those of a batch.

    computed: [T], which tokens are the batch's, the others are padding; batch: None if none are.
    """
    reasons = []
    for name, empty in _PADDING:
        wanted = np.full((*getattr(inputs, name).shape[:-1], len(computed)), empty, np.int64)
        if batch is not None:
            wanted[..., computed] = getattr(batch, name)
        reasons.append(differing(name, getattr(inputs, name), wanted))
    return first_of(reasons)


def numbers_of(words: NDArray[np.int32], sampling: SequenceSampling) -> str | None:
    """Return how a slot's record differs from its parameters, wherever its lists begin."""
    found, wanted = words.view(RECORD).copy(), pack_record(sampling)
    for name in _STARTS:
        found[name] = wanted[name] = 0
    names = RECORD.names or ()
    return next((f"parameter {name}: {found[name][0]}, not {wanted[name][0]}" for name in names
                 if np.any(found[name] != wanted[name])), None)  # fmt: skip


def lists_of_slot(words: NDArray[np.int32], lists: SamplingLists, sampling: SequenceSampling) -> list[str | None]:
    """Return how a slot's lists differ from its parameters."""
    (record,) = words.view(RECORD)
    flat = np.concatenate(sampling.bad_words) if sampling.bad_words else np.zeros(0, np.int64)
    stops = sampling.stop_token_ids if sampling.min_tokens else ()
    reasons = []
    for start, column, wanted in (
        ("bias_start", lists.bias_ids, sampling.bias_token_ids), ("bias_start", lists.biases, sampling.biases),
        ("word_start", lists.word_ids, flat), ("word_start", lists.word_following, following(sampling.bad_words)),
        ("stop_start", lists.stop_ids, stops),
    ):  # fmt: skip
        first = int(record[start])
        reasons.append(differing("lists", column[first : first + len(wanted)], np.asarray(wanted)))
    return reasons
