"""Chooses tokens from rankings: the best tokens that a sequence's masks allow.

Masks apply: allowed_token_ids, bad_words, and stop tokens before min_tokens. Options that would only shift a ranking
(penalties, biases, top_k, top_p, min_p) have no effect.
"""

from __future__ import annotations

import numpy as np

from cadenza_common.plan.result import SlotError
from executor_svc.batch.prompt_rows import PromptColumns, PromptRows
from executor_svc.batch.ragged import spans
from executor_svc.batch.step_result import RowCandidates, RowLogprobs
from executor_svc.plan.arrays import FloatArray, IntArray
from executor_svc.sampling.logits_edits import LogitsEdits, RowTokens
from executor_svc.simulated.ranking import Ranking


def choose(ranking: Ranking, edits: LogitsEdits | None) -> tuple[IntArray, IntArray]:
    """Return (token, SlotError or 0) of each row, [n]: its best allowed token."""
    n = len(ranking.hashes)
    rows, errors = np.arange(n), np.zeros(n, np.int64)
    tokens = ranking.tokens(rows, np.zeros(n, np.int64))
    if edits is not None:
        found, ranks = best_ranks(ranking, np.ones(n, np.int64), edits)
        tokens[found] = ranking.tokens(found, ranks)
        errors[np.setdiff1d(rows, found, assume_unique=True)] = int(SlotError.NO_ALLOWED_TOKEN)
    return tokens, errors


def best_ranks(ranking: Ranking, wanted: IntArray, edits: LogitsEdits | None) -> tuple[IntArray, IntArray]:
    """Return (row, rank) of each row's wanted[row] best allowed tokens, by row, best first.

    A row has fewer if fewer are allowed.
    """
    n, size = len(wanted), ranking.vocab_size
    allowed = RowTokens.none() if edits is None else RowTokens(edits.rows[edits.allowed.rows], edits.allowed.ids)
    forbidden = RowTokens.none() if edits is None else RowTokens(edits.rows[edits.forbidden.rows], edits.forbidden.ids)
    limited = np.zeros(n, np.bool_)
    limited[allowed.rows] = True
    # Without an allowed list, the wanted tokens are among the first wanted + number of forbidden tokens.
    enough = np.minimum(wanted + np.bincount(forbidden.rows, minlength=n), size)
    rows, ranks = spans(np.zeros(n, np.int64), np.where(limited, 0, enough))
    keys = np.concatenate((rows * size + ranks, _keys(ranking, allowed)))
    keys = np.setdiff1d(keys, _keys(ranking, forbidden))
    rows = keys // size
    kept = np.arange(len(keys)) - np.searchsorted(rows, rows) < wanted[rows]
    return rows[kept], keys[kept] % size


def best_candidates(
    ranking: Ranking, candidate_rows: IntArray, num_candidates: IntArray, errors: IntArray, edits: LogitsEdits | None
) -> RowCandidates:
    """Return the best tokens of some of the n rows of a ranking of logits.

    Args:
        ranking: of the n rows.
        candidate_rows: [C], ascending, the rows that report candidates.
        num_candidates: [n] 0 for all other rows.
        errors: [n] SlotError of rows without an allowed token; 0 for the others.
        edits: of the n rows.
    """
    rows, ranks = best_ranks(ranking, num_candidates, edits)
    places = np.searchsorted(candidate_rows, rows), np.arange(len(rows)) - np.searchsorted(rows, rows)
    shape = (len(candidate_rows), int(num_candidates.max()))
    token_ids, logprobs = np.zeros(shape, np.int64), np.zeros(shape, np.float32)
    token_ids[places], logprobs[places] = ranking.tokens(rows, ranks), _rounded(ranking, rows, ranks)
    counts = np.bincount(places[0], minlength=len(candidate_rows))
    return RowCandidates(counts, token_ids, logprobs, errors[candidate_rows])


def row_logprobs(ranking: Ranking, tokens: IntArray, rows: IntArray, num_top: IntArray) -> RowLogprobs:
    """Return logprobs, ranks and best tokens of some of n rows; tokens: [n]; num_top: [len(rows)]."""
    num_top = np.minimum(num_top, ranking.vocab_size)
    widest = int(num_top.max())
    ranks = ranking.ranks(rows, tokens[rows])
    owner, best = np.repeat(rows, widest), np.tile(np.arange(widest), len(rows))
    shape = (len(rows), widest)
    return RowLogprobs(
        rows=rows,
        chosen=_rounded(ranking, rows, ranks),
        ranks=ranks + 1,
        num_top=num_top,
        top_ids=ranking.tokens(owner, best).reshape(shape),
        top=_rounded(ranking, owner, best).reshape(shape),
    )


def prompt_columns(ranking: Ranking, wanted: PromptRows) -> PromptColumns:
    """Return logprobs of the Q wanted prompt tokens; ranking: of the rows that predict them."""
    rows = np.arange(len(wanted.token_ids))
    num_top = np.repeat(wanted.num_top, wanted.counts)
    ranks = ranking.ranks(rows, wanted.token_ids)
    owner, best = spans(np.zeros(len(rows), np.int64), num_top)
    return PromptColumns(
        chosen=_rounded(ranking, rows, ranks),
        ranks=ranks + 1,
        top_ids=ranking.tokens(owner, best),
        top=_rounded(ranking, owner, best),
    )


def _rounded(ranking: Ranking, rows: IntArray, ranks: IntArray) -> FloatArray:
    return ranking.logprobs(rows, ranks).astype(np.float32)


def _keys(ranking: Ranking, tokens: RowTokens) -> IntArray:
    """Return [n] row and rank of tokens as one number, ordered by row first."""
    return tokens.rows * ranking.vocab_size + ranking.ranks(tokens.rows, tokens.ids)
