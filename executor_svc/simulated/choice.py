"""Choosing from rankings: the best tokens that a sequence's masks leave.

Masks are honoured: allowed_token_ids, bad_words, and stop tokens before min_tokens. What would only shift a ranking
(penalties, biases, top_k, top_p, min_p) is not.
"""

from __future__ import annotations

import numpy as np

from executor_svc.batch.prompt_rows import PromptColumns, PromptRows
from executor_svc.batch.ragged import spans
from executor_svc.batch.step_result import RowCandidates, RowLogprobs
from executor_svc.plan.arrays import FloatArray, IntArray
from executor_svc.plan.plan import SlotError
from executor_svc.sampling.edits import LogitsEdits, RowTokens
from executor_svc.simulated.ranking import Ranking


def choose(ranking: Ranking, edits: LogitsEdits | None) -> tuple[IntArray, IntArray]:
    """(token, SlotError or 0) of each row, [n]: its best token that may be chosen."""
    n = len(ranking.hashes)
    rows, errors = np.arange(n), np.zeros(n, np.int64)
    tokens = ranking.tokens(rows, np.zeros(n, np.int64))
    if edits is not None:
        found, ranks = best_ranks(ranking, np.ones(n, np.int64), edits)
        tokens[found] = ranking.tokens(found, ranks)
        errors[np.setdiff1d(rows, found, assume_unique=True)] = int(SlotError.NO_ALLOWED_TOKEN)
    return tokens, errors


def best_ranks(ranking: Ranking, wanted: IntArray, edits: LogitsEdits | None) -> tuple[IntArray, IntArray]:
    """(row, rank) of each row's wanted[row] best tokens, row after row, best first; fewer where no more are allowed."""
    n, size = len(wanted), ranking.vocab_size
    allowed = RowTokens.none() if edits is None else RowTokens(edits.rows[edits.allowed.rows], edits.allowed.ids)
    forbidden = RowTokens.none() if edits is None else RowTokens(edits.rows[edits.forbidden.rows], edits.forbidden.ids)
    limited = np.zeros(n, np.bool_)
    limited[allowed.rows] = True
    # Where all are allowed, the best that are wanted are among so many and as many more as are forbidden.
    enough = np.minimum(wanted + np.bincount(forbidden.rows, minlength=n), size)
    rows, ranks = spans(np.zeros(n, np.int64), np.where(limited, 0, enough))
    keys = np.concatenate((rows * size + ranks, _keys(ranking, allowed)))
    keys = np.setdiff1d(keys, _keys(ranking, forbidden))
    rows = keys // size
    kept = np.arange(len(keys)) - np.searchsorted(rows, rows) < wanted[rows]
    return rows[kept], keys[kept] % size


def best_candidates(
    ranking: Ranking, told: IntArray, num_candidates: IntArray, errors: IntArray, edits: LogitsEdits | None
) -> RowCandidates:
    """The best tokens of the rows `told` [C], ascending, of the n rows of a ranking of logits.

    Args:
        ranking: of the n rows.
        told: [C] which of them have candidates told.
        num_candidates: [n] 0 for all others.
        errors: [n] SlotError of rows that no token is left to; 0 for the others.
        edits: of the n rows.
    """
    rows, ranks = best_ranks(ranking, num_candidates, edits)
    places = np.searchsorted(told, rows), np.arange(len(rows)) - np.searchsorted(rows, rows)
    shape = (len(told), int(num_candidates.max()))
    token_ids, logprobs = np.zeros(shape, np.int64), np.zeros(shape, np.float32)
    token_ids[places], logprobs[places] = ranking.tokens(rows, ranks), _rounded(ranking, rows, ranks)
    counts = np.bincount(places[0], minlength=len(told))
    return RowCandidates(counts, token_ids, logprobs, errors[told])


def row_logprobs(ranking: Ranking, tokens: IntArray, rows: IntArray, num_top: IntArray) -> RowLogprobs:
    """Logprobs, ranks and best tokens of these rows of n; tokens: [n]; num_top: of these rows."""
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


def prompt_columns(ranking: Ranking, asked: PromptRows) -> PromptColumns:
    """Logprobs of the Q prompt tokens asked for; ranking: of the rows that predict them."""
    rows = np.arange(len(asked.token_ids))
    num_top = np.repeat(asked.num_top, asked.counts)
    ranks = ranking.ranks(rows, asked.token_ids)
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
    """[n] row and rank of tokens as one number, in whose order rows come first."""
    return tokens.rows * ranking.vocab_size + ranking.ranks(tokens.rows, tokens.ids)
