"""What became of a request, held against what is known in advance."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

from cadenza_common.plan.result import Candidates, LogprobColumns, TokenLogprobs
from executor_svc.simulated.expected_tokens import expected_candidates, expected_logprobs, expected_tokens
from scheduler_svc.core.outputs import BeamOutput
from scheduler_svc.core.sequences.beams import BeamSearch, Hypothesis
from scheduler_svc.core.types import Finish, FinishDetail, RequestSpec
from tests.helpers.core.core_sampling import for_executor

_CUT = (
    FinishDetail.ABORTED,
    FinishDetail.EXECUTOR_ERROR,
    FinishDetail.STOP_STRING,
    FinishDetail.NON_FINITE_LOGITS,
)
"""Ends from outside: the tokens up to there are as they should be."""


@dataclass
class Outcome:
    """All that was reported of one request."""

    spec: RequestSpec
    tokens: list[list[int]]
    logprobs: list[list[TokenLogprobs]]
    finishes: dict[int, Finish] = field(default_factory=dict)
    prompt_logprobs: list[LogprobColumns] = field(default_factory=list)
    hypotheses: list[BeamOutput] = field(default_factory=list)
    aborted: bool = False

    @classmethod
    def of(cls, spec: RequestSpec) -> Outcome:
        """Nothing has been reported yet."""
        samples = range(spec.num_samples)
        return cls(spec, [[] for _ in samples], [[] for _ in samples])

    @property
    def ended(self) -> bool:
        """Have all samples?"""
        return len(self.finishes) == self.spec.num_samples

    def token(self, index: int, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """One more."""
        assert index not in self.finishes, f"sample {index} goes on after its end"
        assert self.spec.beams is None, "a beam search streams nothing"
        self.tokens[index].append(token_id)
        if logprobs is not None:
            self.logprobs[index].append(logprobs)

    def finish(self, index: int, finish: Finish) -> None:
        """The end of a sample."""
        assert index not in self.finishes, f"sample {index} ended twice"
        assert index < self.spec.num_samples
        self.finishes[index] = finish

    def hypothesis(self, output: BeamOutput) -> None:
        """A beam search has ended with this one."""
        self.finish(output.sample_index, output.finish)
        self.hypotheses.append(output)


@dataclass(frozen=True)
class Limits:
    """What lengths depend on."""

    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int | None
    """Pages of the pool, of a block each; None if it was not always the same."""
    pages_per_state: int = 0

    def may_fill_pool(self, num_prompt: int, num_output: int, num_sequences: int) -> bool:
        """Can so many sequences of one prompt, which share its full blocks and nothing else, exceed the pool?"""
        if self.num_blocks is None:
            return True
        num_shared = num_prompt // self.block_size
        num_own = -(-(num_prompt + num_output) // self.block_size) - num_shared
        return num_shared + num_sequences * (num_own + self.pages_per_state) > self.num_blocks


def check(outcome: Outcome, limits: Limits) -> None:
    """Assert that an ended request got what it should have."""
    if outcome.spec.beams is None:
        for index in range(outcome.spec.num_samples):
            _check_sample(outcome, index, limits)
    else:
        _check_beams(outcome, limits)
    _check_prompt_logprobs(outcome, limits)


def _max_output(spec: RequestSpec, limits: Limits) -> tuple[int, FinishDetail]:
    room = limits.max_model_len - len(spec.prompt_token_ids)
    if spec.max_tokens is not None and spec.max_tokens <= room:
        return spec.max_tokens, FinishDetail.MAX_TOKENS
    return room, FinishDetail.MAX_MODEL_LEN


def _check_sample(outcome: Outcome, index: int, limits: Limits) -> None:
    spec, tokens, finish = outcome.spec, outcome.tokens[index], outcome.finishes[index]
    count, by_length = _max_output(spec, limits)
    prompt = spec.prompt_token_ids
    full = expected_tokens(prompt, for_executor(spec.sampling), count, limits.vocab_size, sample_index=index)
    assert tokens == full[: len(tokens)], f"sample {index}: {tokens} instead of {full}"
    if finish.detail is FinishDetail.KV_CAPACITY:
        length, num_blocks = len(prompt) + len(tokens), limits.num_blocks
        is_full = num_blocks is None or length == (num_blocks - limits.pages_per_state) * limits.block_size + 1
        assert is_full, f"{length} tokens fill the pool"
    elif finish.detail not in _CUT:
        assert tokens == full, f"sample {index} ended {finish} after {len(tokens)} tokens of {len(full)}"
        assert finish == _expected_finish(spec, full, count, by_length)
    if spec.sampling.num_logprobs is not None:
        assert len(outcome.logprobs[index]) == len(tokens)
        for place, found in enumerate(outcome.logprobs[index], start=len(prompt)):
            wanted = expected_logprobs([*prompt, *tokens], place, spec.sampling.num_logprobs, limits.vocab_size)
            _check_logprobs(found, *wanted)


def _expected_finish(spec: RequestSpec, full: list[int], count: int, by_length: FinishDetail) -> Finish:
    if full and full[-1] in spec.sampling.stop_token_ids and len(full) >= spec.sampling.min_tokens:
        if full[-1] in spec.eos_token_ids:
            return Finish(FinishDetail.EOS)
        return Finish(FinishDetail.STOP_TOKEN, stop_token_id=full[-1])
    return Finish(by_length if len(full) == count else FinishDetail.NO_ALLOWED_TOKEN)


def _check_beams(outcome: Outcome, limits: Limits) -> None:
    """Against the same search alone; or the same cut short at one step or another, if it may have filled the pool."""
    spec, found = outcome.spec, [_told(output) for output in outcome.hypotheses]
    details = {finish.detail for finish in outcome.finishes.values()}
    if not found:
        began_never = FinishDetail.KV_CAPACITY not in details or limits.num_blocks is None
        assert details <= {*_CUT, FinishDetail.KV_CAPACITY}
        assert began_never, "a search that never began has filled the pool"
        return
    by = FinishDetail.ABORTED if outcome.aborted else FinishDetail.KV_CAPACITY
    if FinishDetail.EXECUTOR_ERROR in details:
        by = FinishDetail.EXECUTOR_ERROR  # It does not fit the executor that came back.
    *cuts, whole = _search(spec, limits, by)
    if not outcome.aborted and _agree(whole, found, FinishDetail.NO_ALLOWED_TOKEN):
        return
    num_prompt, width = len(spec.prompt_token_ids), spec.num_sequences
    at = [num for num, cut in enumerate(cuts, start=1) if _agree(cut, found, by)]
    assert at, f"{found} instead of {whole}"
    assert by is not FinishDetail.KV_CAPACITY or any(limits.may_fill_pool(num_prompt, num, width) for num in at), (
        f"cut short after {at} tokens"
    )


def _told(output: BeamOutput) -> Hypothesis:
    return Hypothesis(output.token_ids, output.score, output.cumulative_logprob or 0.0, output.finish)


def _told_of_nothing(detail: FinishDetail) -> Hypothesis:
    return Hypothesis((), -math.inf, 0.0, Finish(detail))


def _agree(wanted: list[Hypothesis], found: list[Hypothesis], otherwise: FinishDetail) -> bool:
    """Samples for which the search has nothing end empty."""
    return found == wanted + [_told_of_nothing(otherwise)] * (len(found) - len(wanted))


def _search(spec: RequestSpec, limits: Limits, by: FinishDetail) -> Iterator[list[Hypothesis]]:
    """The n best: if the search were cut short after the first token, the second and so on, and at its end."""
    assert spec.beams is not None
    count, detail = _max_output(spec, limits)
    prompt = spec.prompt_token_ids
    search = BeamSearch(
        spec.beams,
        stop_ids=frozenset(spec.sampling.stop_token_ids),
        eos_token_ids=spec.eos_token_ids,
        num_prompt_tokens=len(prompt),
        max_len=len(prompt) + count,
        length_detail=detail,
    )
    outputs: list[list[int]] = [[]]
    while True:
        reported = [
            expected_candidates(prompt, output, for_executor(spec.sampling), search.num_candidates, limits.vocab_size)
            for output in outputs
        ]
        columns = [
            Candidates([token_id for token_id, _ in each], array("f", (logprob for _, logprob in each)))
            for each in reported
        ]
        pairs = search.advance(outputs, columns)
        if search.done:
            break
        outputs = [[*outputs[parent], token_id] for parent, token_id in pairs]
        yield search.best(spec.num_samples, outputs, by)
    yield search.best(spec.num_samples)


def _check_prompt_logprobs(outcome: Outcome, limits: Limits) -> None:
    """Each once and in order; all of them if there is any output."""
    prompt, num_top, end = outcome.spec.prompt_token_ids, outcome.spec.sampling.num_prompt_logprobs, 1
    for part in outcome.prompt_logprobs:
        assert num_top is not None
        assert (part.start, part.num_top) == (end, num_top)
        end = part.end
        for row in range(part.end - part.start):
            top = slice(row * num_top, (row + 1) * num_top)
            found = TokenLogprobs(part.logprobs[row], part.ranks[row], part.top_token_ids[top], part.top_logprobs[top])
            _check_logprobs(found, *expected_logprobs(prompt, part.start + row, num_top, limits.vocab_size))
    if num_top is not None and any(outcome.tokens):
        assert end == len(prompt)


def _check_logprobs(found: TokenLogprobs, logprob: float, rank: int, top: list[int], top_logprobs: list[float]) -> None:
    assert (found.rank, list(found.top_token_ids)) == (rank, top)
    for ours, theirs in zip([found.logprob, *found.top_logprobs], [logprob, *top_logprobs], strict=True):
        assert math.isclose(ours, theirs, rel_tol=1e-6, abs_tol=1e-6)
