"""Beam search over the candidates that an executor tells: which beams run on, which have ended, and the best of them.

The algorithm is that of transformers 5 (generation/utils.py, `_beam_search` and its helpers) for one prompt. Beams go
on with the `width` best continuations that do not stop; of the `width` best of all, those that stop become hypotheses,
and the `width` best hypotheses are kept. Sums and scores are rounded to float32, as there, so that near ties fall the
same way. Every stop id counts as transformers' eos_token_id does.

Three things differ, all where transformers has no meaningful answer:
- Which of two equal sums goes first is left open by torch; here the beam that was better before, then the candidate
  told first.
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

from scheduler_svc.core.errors import InvariantError
from scheduler_svc.core.types import BeamSpec, Candidates, Finish, FinishDetail

MAX_CANDIDATES = 256
"""Most candidates that an executor tells of one beam: see execution.proto."""


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """An output that has ended, or was cut short."""

    token_ids: tuple[int, ...]
    """The output, the token that ended it included."""
    score: float
    """cumulative_logprob / len(token_ids) ** length_penalty; 0 for an empty output."""
    cumulative_logprob: float
    finish: Finish


class BeamSearch:
    """The beams of one request: their sums of logprobs and the hypotheses so far; their tokens are the caller's.

    Beams that run are known by their index, best first; at first there is one, the prompt.
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
        """Candidates needed of each beam: the `width` best that do not stop are among these, as are the `width` best.

        transformers looks at more over all beams together, but at no others. Over the limit, where a beam's
        candidates are cut off, its continuations past them are as if ruled out.
        """
        self.done = False
        """Is the search over, with no beam running?"""

    def advance(self, outputs: Sequence[Sequence[int]], candidates: Sequence[Candidates]) -> list[tuple[int, int]]:
        """Go on by one token; returns the beams that run on, best first, each as its parent's index and its new token.

        Args:
            outputs: the output of each running beam so far.
            candidates: the best next tokens of each: `num_candidates`, or as many as there are; with none it is out.

        At most `width` run on, fewer where there are too few candidates; none when the search is over.
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
                ended.append(self._hypothesis((*outputs[beam], token_id), total, self._finish_by(token_id)))
        self._hypotheses = self._best_of(ended)
        self._sums = sums
        if not sums or not self._goes_on():
            self._end()
            return []
        return running

    def apply_max_len(self, max_len: int, detail: FinishDetail) -> None:
        """Let beams end with this many tokens, prompt included, for this reason, if they may have more.

        The search then is as if it had been started so, where those that run are shorter.
        """
        max_output = max_len - self._num_prompt_tokens
        if max_output < self._max_output:
            self._max_output, self._length_detail = max_output, detail

    def best(
        self, num_returned: int, outputs: Sequence[Sequence[int]] = (), detail: FinishDetail | None = None
    ) -> list[Hypothesis]:
        """Return the best hypotheses, best first: at most `num_returned` and `width`.

        Args:
            num_returned: how many are wanted.
            outputs: the output of each running beam, if they count.
            detail: why the search is cut short: running beams count as hypotheses that end so. None: they do not count.
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
        """Yield sums, beams and tokens, best first, equal ones in the order of beams and candidates.

        Each beam's candidates are in order, and stay so when they are rounded: the next best is some beam's next.
        """
        heads = [
            (-_float32(total + told.logprobs[0]), beam, 0)
            for beam, (total, told) in enumerate(zip(self._sums, candidates, strict=True))
            if told.token_ids
        ]
        heapify(heads)
        while heads:
            negated, beam, index = heads[0]
            told = candidates[beam]
            yield -negated, beam, told.token_ids[index]
            index += 1
            if index < len(told.token_ids):
                heapreplace(heads, (-_float32(self._sums[beam] + told.logprobs[index]), beam, index))
            else:
                heappop(heads)

    def _finish_by(self, token_id: int) -> Finish:
        if token_id in self._eos_token_ids and token_id in self._stop_ids:
            return Finish(FinishDetail.EOS)
        if token_id in self._stop_ids:
            return Finish(FinishDetail.STOP_TOKEN, stop_token_id=token_id)
        return Finish(self._length_detail)

    def _hypothesis(self, token_ids: tuple[int, ...], total: float, finish: Finish) -> Hypothesis:
        return Hypothesis(token_ids, self._score(total, len(token_ids)), total, finish)

    def _best_of(self, more: list[Hypothesis]) -> list[Hypothesis]:
        """The hypotheses so far and some more, best first; the sort is stable: of equals the first."""
        return sorted(self._hypotheses + more, key=lambda found: -found.score)[: self._spec.width]

    def _goes_on(self) -> bool:
        """May a running beam still come out? Decided as transformers does, by a guess unless the spec says "never"."""
        width, early_stopping = self._spec.width, self._spec.early_stopping
        if len(self._hypotheses) < width:
            return True
        if early_stopping is True:
            return False
        # A sum of logprobs only falls: divided by the longest output that there can be, it is a bound.
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
