"""Edits of logits rows before a token is chosen, as flat lists, gathered from the arrays by slot that sample.

`logits_processors` defines the meaning of each.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from cadenza_common.plan.sampling import Need
from executor_svc.batch.ragged import SlotLists, spans
from executor_svc.batch.slots import Slots
from executor_svc.plan.arrays import FloatArray, IntArray
from executor_svc.sampling.masks import RowMasks, Words


def _no_masks() -> Words:
    return np.zeros((0, 0), np.uint32)


@dataclass(frozen=True, slots=True)
class RowTokens:
    """Tokens of rows as a flat list of (row, id) pairs in any order; a pair that has a value occurs once."""

    rows: IntArray
    """[n] the row of each pair."""
    ids: IntArray
    """[n] the token id of each pair."""

    @classmethod
    def none(cls) -> RowTokens:
        """Return an empty list of pairs."""
        return cls(np.zeros(0, np.int64), np.zeros(0, np.int64))


@dataclass(frozen=True, slots=True)
class LogitsEdits:
    """Edits of the logits of P rows of a batch. The rows of pairs are indices into `rows`."""

    rows: IntArray
    """[P] rows of the batch, ascending."""
    allowed: RowTokens
    """The only tokens that may be chosen, for the rows that occur in this list."""
    forbidden: RowTokens
    """Tokens that must not be chosen."""
    biased: RowTokens
    biases: FloatArray
    """The bias of each pair of `biased`."""
    counted: RowTokens
    """The distinct tokens in the histories of rows with penalties."""
    counts: FloatArray
    """For each pair of `counted`: the token's occurrences in the output."""
    repetition_penalty: FloatArray
    """For each pair of `counted`, as are the next two."""
    frequency_penalty: FloatArray
    presence_penalty: FloatArray
    masked: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    """[m] indices into `rows`, ascending, of rows with a grammar's mask."""
    mask_bits: Words = field(default_factory=_no_masks)
    """[m, num_mask_words] their masks."""


def logits_edits(
    slots: Slots, rows: IntArray, ahead: IntArray | None = None, masks: RowMasks | None = None
) -> LogitsEdits | None:
    """Return the edits of these slots [R] for their next token, before `commit`; None if there are none.

    They depend only on each slot's parameters and token ids, and on masks: those of the grammars of these rows. ahead:
    [R], for a token after so many drafts of the slot, which `Slots.put_drafts` has written; None: 0 each.
    """
    sampling = slots.sampling
    edited = sampling.processed[rows]
    if masks is not None:
        edited |= masks.is_masked
    (candidates,) = edited.nonzero()
    if not len(candidates):
        return None
    chosen = rows[candidates]
    lengths = slots.num_tokens[chosen] + (0 if ahead is None else ahead[candidates])
    owner, ids, counts = sampling.read_counts(chosen)
    if ahead is not None:
        owner, ids, counts = _with_drafts(slots, chosen, ahead[candidates], (owner, ids, counts))
    biased, places = _listed(sampling.biases, chosen)
    penalised = chosen[owner]
    edits = LogitsEdits(
        rows=candidates,
        allowed=_listed(sampling.allowed_ids, chosen)[0],
        forbidden=_joined(_bad_words(slots, chosen, lengths), _early_stops(slots, chosen, lengths)),
        biased=biased,
        biases=sampling.biases.columns[1][places],
        counted=RowTokens(owner, ids),
        counts=counts.astype(np.float32),
        repetition_penalty=sampling["repetition_penalty"][penalised],
        frequency_penalty=sampling["frequency_penalty"][penalised],
        presence_penalty=sampling["presence_penalty"][penalised],
    )
    if masks is not None:
        edits = replace(edits, masked=np.searchsorted(candidates, masks.rows), mask_bits=masks.bits)
    return _without_idle_rows(edits)


def _with_drafts(
    slots: Slots, rows: IntArray, ahead: IntArray, counted: tuple[IntArray, IntArray, IntArray]
) -> tuple[IntArray, IntArray, IntArray]:
    """Return counted tokens (index into rows, id, occurrences) with the first ahead[i] drafts of each of rows [n]."""
    drafted = np.where(slots.sampling.on(Need.COUNTS)[rows], ahead, 0)
    owner, places = spans(slots.num_tokens[rows], drafted)
    if not len(owner):
        return counted
    vocab = slots.limits.vocab_size
    keys = np.concatenate((counted[0] * vocab + counted[1], owner * vocab + slots.token_ids[rows[owner], places]))
    keys, where = np.unique(keys, return_inverse=True)
    counts = np.bincount(where, np.concatenate((counted[2], np.ones(len(owner), np.int64))), len(keys))
    return keys // vocab, keys % vocab, counts.astype(np.int64)


def _without_idle_rows(edits: LogitsEdits) -> LogitsEdits | None:
    """Remove rows without changes in this step (min_tokens reached, no word begun): they need no copy."""
    lists = (edits.allowed, edits.forbidden, edits.biased, edits.counted)
    touched = np.zeros(len(edits.rows), np.bool_)
    for tokens in lists:
        touched[tokens.rows] = True
    touched[edits.masked] = True
    if touched.all():
        return edits
    if not touched.any():
        return None
    place = np.cumsum(touched) - 1
    allowed, forbidden, biased, counted = (RowTokens(place[tokens.rows], tokens.ids) for tokens in lists)
    return replace(
        edits,
        rows=edits.rows[touched],
        allowed=allowed,
        forbidden=forbidden,
        biased=biased,
        counted=counted,
        masked=place[edits.masked],
    )


def _listed(lists: SlotLists, rows: IntArray) -> tuple[RowTokens, IntArray]:
    """Return the token ids in the first column of these slots' lists, and their places."""
    owner, places = lists.locate(rows)
    return RowTokens(owner, lists.columns[0][places].astype(np.int64)), places


def _joined(*parts: RowTokens) -> RowTokens:
    found = [part for part in parts if len(part.rows)]
    if len(found) < 2:
        return found[0] if found else parts[0]
    return RowTokens(np.concatenate([part.rows for part in parts]), np.concatenate([part.ids for part in parts]))


def _early_stops(slots: Slots, rows: IntArray, lengths: IntArray) -> RowTokens:
    """Return the stop tokens of slots with fewer output tokens than min_tokens; lengths: [R] tokens so far."""
    num_output = lengths - slots.num_prompt_tokens[rows]
    (early,) = (num_output < slots.sampling["min_tokens"][rows]).nonzero()
    if not len(early):
        return RowTokens.none()
    stops, _ = _listed(slots.sampling.stop_ids, rows[early])
    return RowTokens(early[stops.rows], stops.ids)


def _bad_words(slots: Slots, rows: IntArray, lengths: IntArray) -> RowTokens:
    """Return the last token of every bad word whose other tokens end the output; lengths: [R] tokens so far."""
    words = slots.sampling.bad_words
    owner, places = words.locate(rows)
    if not len(owner):
        return RowTokens.none()
    token_ids, following = (column[places].astype(np.int64) for column in words.columns)
    # The position of each token of a word if the word's last token came next. All tokens but the last must be present.
    slot = rows[owner]
    position = lengths[owner] - following
    in_output = position >= slots.num_prompt_tokens[slot]
    is_last = following == 0
    fits = is_last | (in_output & (slots.token_ids[slot, np.maximum(position, 0)] == token_ids))
    last = np.flatnonzero(is_last)
    first = np.concatenate(([0], last[:-1] + 1))
    completed = last[np.logical_and.reduceat(fits, first)]
    return RowTokens(owner[completed], token_ids[completed])
