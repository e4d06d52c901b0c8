"""Beam search over candidates from an executor: which beams continue, which have finished, and the best of them.

The algorithm is that of transformers 5 (generation/utils.py, `_beam_search` and its helpers) for one prompt. The
`width` best continuations that do not stop become the next beams. If one of the `width` best overall stops, it becomes
a hypothesis; the `width` best hypotheses are kept. Sums and scores are rounded to float32, as there, so that near ties
are resolved alike. Every stop id counts as eos_token_id does in transformers.

Three things differ, all where transformers has no meaningful answer:
- Which of two equal sums goes first is left open by torch; here the beam that was better before, then the candidate
  listed first.
- Where fewer than `width` beams can run, because few tokens are allowed, transformers fills up with copies of beams
  scored -1e9, which may come out as hypotheses and end a search early; here fewer run, and fewer come out.
- transformers drops hypotheses scored under -1e9, which needs a very negative length penalty; here they are kept.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace

from cadenza_common.plan.result import Candidates
from cadenza_common.plan.sampling import MAX_CANDIDATES
from scheduler_svc.core.errors import InvariantError
from scheduler_svc.core.types import BeamSpec, Finish, FinishDetail


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished output, or one that was ended early."""

    token_ids: tuple[int, ...]
    """The output, including the token that ended it."""
    score: float
    """cumulative_logprob / len(token_ids) ** length_penalty; 0 for an empty output."""
    cumulative_logprob: float
    finish: Finish


class BeamSearch:
    """The beam search of one request: sums of logprobs and the hypotheses so far. The caller keeps the beams' tokens.

    Running beams are identified by index, best first; initially there is one, the prompt.
    """

    __slots__ = (
        "_eos_token_ids",
        "_hypotheses",
        "_length_detail",
        "_max_output",
        "_num_output_tokens",
        "_num_prompt_tokens",
        "_spec",
        "_stop_ids",
        "_sums",
        "done",
        "num_candidates",
    )

    def __init__(
        self,
        spec: BeamSpec,
        *,
        stop_ids: frozenset[int],
        eos_token_ids: frozenset[int],
        num_prompt_tokens: int,
        max_len: int,
        length_detail: FinishDetail,
    ) -> None:
        """Start with the prompt as the only beam.

        Args:
            spec: width, length penalty, early stopping.
            stop_ids: every id that ends a beam, EOS included unless it is ignored.
            eos_token_ids: which of them count as EOS.
            num_prompt_tokens: length of the prompt.
            max_len: most tokens of a beam, the prompt included; more than the prompt has.
            length_detail: why a beam of that length ends.
        """
        self._spec = spec
        self._stop_ids = stop_ids
        self._eos_token_ids = eos_token_ids
        self._num_prompt_tokens = num_prompt_tokens
        self._max_output = max_len - num_prompt_tokens
        self._length_detail = length_detail
        self._num_output_tokens = 0
        self._sums = [0.0]
        self._hypotheses: list[Hypothesis] = []
        self.num_candidates = min(spec.width + len(stop_ids), MAX_CANDIDATES)
        """Candidates needed per beam: they include the `width` best that do not stop, and the `width` best overall.

        transformers considers more over all beams together, but none beyond these. At MAX_CANDIDATES a beam's
        candidates are truncated, and continuations past them are ignored.
        """
        self.done = False
        """Whether the search is finished, with no beam running."""

    def advance(self, outputs: Sequence[Sequence[int]], candidates: Sequence[Candidates]) -> list[tuple[int, int]]:
        """Advance by one token; returns the continuing beams, best first, each as (parent's index, new token).

        Args:
            outputs: the output of each running beam so far.
            candidates: the best next tokens of each: `num_candidates`, or as many as there are; a beam with none ends.

        At most `width` beams continue, fewer where there are too few candidates; none when the search is finished.
        """
        self._check(outputs, candidates)
        self._num_output_tokens += 1
        width, full_length = self._spec.width, self._num_output_tokens >= self._max_output
        running: list[tuple[int, int]] = []
        sums: list[float] = []
        ended: list[Hypothesis] = []
        for rank, (total, beam, token_id) in enumerate(self._continuations(candidates)):
            if len(running) == width or (full_length and rank == width):
                break
            if not (full_length or token_id in self._stop_ids):
                running.append((beam, token_id))
                sums.append(total)
            elif rank < width:
                ended.append(self._hypothesis((*outputs[beam], token_id), total, self._finish_for(token_id)))
        self._hypotheses = self._best_of(ended)
        self._sums = sums
        if not sums or not self._may_continue():
            self._end()
            return []
        return running

    def apply_max_len(self, max_len: int, detail: FinishDetail) -> None:
        """Set the maximum length to `max_len` tokens, prompt included; beams of that length finish with `detail`.

        If the running beams are shorter, the search continues as if it had started with this limit.
        """
        self._max_output, self._length_detail = max_len - self._num_prompt_tokens, detail

    def best(
        self, num_returned: int, outputs: Sequence[Sequence[int]] = (), detail: FinishDetail | None = None
    ) -> list[Hypothesis]:
        """Return the best hypotheses, best first: at most `num_returned` and `width`.

        Args:
            num_returned: how many to return.
            outputs: the output of each running beam, if running beams count.
            detail: why the search ends early: running beams are hypotheses with this finish. None: they do not count.
        """
        if detail is None:
            return self._hypotheses[:num_returned]
        self._check(outputs, self._sums)
        cut = Finish(detail)
        running = [
            self._hypothesis(tuple(output), total, cut) for output, total in zip(outputs, self._sums, strict=True)
        ]
        return self._best_of(running)[:num_returned]

    def _check(self, outputs: Sequence[Sequence[int]], others: Sequence[object]) -> None:
        if not len(outputs) == len(others) == len(self._sums):
            raise InvariantError(f"{len(self._sums)} beams run, not {len(outputs)} with candidates of {len(others)}")
        if any(len(output) != self._num_output_tokens for output in outputs):
            raise InvariantError(f"beams of {[*map(len, outputs)]} output tokens, not {self._num_output_tokens}")

    def _continuations(self, candidates: Sequence[Candidates]) -> Iterator[tuple[float, int, int]]:
        """Yield (sum, beam, token), best first, equal sums in the order of beams and candidates.

        Each beam's candidates are sorted, also after rounding, so the next best is some beam's next candidate.
        """
        heads = [
            (-_float32(total + top.logprobs[0]), beam, 0)
            for beam, (total, top) in enumerate(zip(self._sums, candidates, strict=True))
            if top.token_ids
        ]
        heapify(heads)
        while heads:
            negated, beam, index = heads[0]
            top = candidates[beam]
            yield -negated, beam, top.token_ids[index]
            index += 1
            if index < len(top.token_ids):
                heapreplace(heads, (-_float32(self._sums[beam] + top.logprobs[index]), beam, index))
            else:
                heappop(heads)

    def _finish_for(self, token_id: int) -> Finish:
        if token_id in self._eos_token_ids and token_id in self._stop_ids:
            return Finish(FinishDetail.EOS)
        if token_id in self._stop_ids:
            return Finish(FinishDetail.STOP_TOKEN, stop_token_id=token_id)
        return Finish(self._length_detail)

    def _hypothesis(self, token_ids: tuple[int, ...], total: float, finish: Finish) -> Hypothesis:
        return Hypothesis(token_ids, self._score(total, len(token_ids)), total, finish)

    def _best_of(self, more: list[Hypothesis]) -> list[Hypothesis]:
        """The best of the hypotheses so far and `more`, best first. The sort is stable: the first of equals wins."""
        return sorted(self._hypotheses + more, key=lambda found: -found.score)[: self._spec.width]

    def _may_continue(self) -> bool:
        """Whether a running beam may still win. As in transformers, a heuristic unless the spec says "never"."""
        width, early_stopping = self._spec.width, self._spec.early_stopping
        if len(self._hypotheses) < width:
            return True
        if early_stopping is True:
            return False
        # A sum of logprobs only falls: divided by the longest possible output it is a bound.
        bounded = early_stopping is None and self._spec.length_penalty > 0
        length = self._max_output if bounded else self._num_output_tokens
        return self._score(self._sums[0], length) > self._hypotheses[-1].score

    def _score(self, total: float, length: int) -> float:
        """total / length ** length_penalty in float32, whatever their sizes; 0 for length 0."""
        if total == 0 or length == 0:
            return 0.0
        try:
            divisor = _float32(float(length) ** self._spec.length_penalty)
        except OverflowError:
            divisor = math.inf
        return _float32(total / divisor) if divisor else math.copysign(math.inf, total)

    def _end(self) -> None:
        self._sums = []
        self.done = True


def _float32(value: float) -> float:
    """The nearest float32; infinite where that overflows."""
    return array("f", (value,))[0]
