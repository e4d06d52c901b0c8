"""Beam search in the core: by hand where each rule shows, and against a search over whole rows of logprobs.

That it is transformers' own is shown in tests/golden/test_beam_search.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import event, given, settings

from cadenza_common.plan.result import Candidates
from cadenza_common.plan.sampling import MAX_CANDIDATES
from scheduler_svc.core.errors import InvariantError
from scheduler_svc.core.sequences.beams import BeamSearch, Hypothesis
from scheduler_svc.core.types import BeamSpec, Finish, FinishDetail

EOS, STOP = 1, 2
NUM_PROMPT_TOKENS = 7


def top(*best: tuple[int, float]) -> Candidates:
    """Candidates, best first: tokens and logprobs."""
    return Candidates([token_id for token_id, _ in best], [logprob for _, logprob in best])


class ByHand:
    """A search whose candidates a test names; keeps the outputs, as its user must."""

    def __init__(
        self,
        width: int = 2,
        *,
        length_penalty: float = 1.0,
        early_stopping: bool | None = False,
        max_tokens: int = 10,
        stop_ids: frozenset[int] = frozenset({EOS, STOP}),
    ) -> None:
        self.search = BeamSearch(
            BeamSpec(width, length_penalty, early_stopping),
            stop_ids=stop_ids,
            eos_token_ids=frozenset({EOS}),
            num_prompt_tokens=NUM_PROMPT_TOKENS,
            max_len=NUM_PROMPT_TOKENS + max_tokens,
            length_detail=FinishDetail.MAX_TOKENS,
        )
        self.outputs: list[list[int]] = [[]]

    def step(self, *candidates: Candidates) -> list[list[int]]:
        """The outputs of the beams that run on."""
        pairs = self.search.advance(self.outputs, candidates)
        self.outputs = [[*self.outputs[parent], token_id] for parent, token_id in pairs]
        return self.outputs

    def found(self, num_returned: int = 100) -> list[tuple[list[int], float]]:
        """Hypotheses so far and their scores."""
        return [(list(one.token_ids), one.score) for one in self.search.best(num_returned)]


def test_the_best_go_on_whoever_their_parents_are() -> None:
    beams = ByHand(width=2)
    assert beams.step(top((5, -1.0), (6, -1.5), (7, -2.0))) == [[5], [6]]
    assert beams.step(top((8, -3.0), (9, -4.0)), top((8, -0.25), (9, -0.5))) == [[6, 8], [6, 9]]
    assert beams.step(top((3, -2.0), (4, -9.0)), top((4, -0.25), (3, -8.0))) == [[6, 9, 4], [6, 8, 3]]
    assert beams.search.best(2) == []


def test_a_beam_that_stops_among_the_best_is_a_hypothesis_and_another_goes_on() -> None:
    beams = ByHand(width=2)
    beams.step(top((5, -1.0), (6, -1.5)))
    assert beams.step(top((EOS, -0.5), (8, -2.0), (9, -3.0)), top((7, -1.0), (STOP, -4.0))) == [[6, 7], [5, 8]]
    assert beams.search.best(2) == [Hypothesis((5, EOS), -0.75, -1.5, Finish(FinishDetail.EOS))]
    beams.step(top((STOP, -0.5), (7, -1.0)), top((EOS, -0.5), (7, -1.0)))
    assert beams.search.best(2)[1] == Hypothesis(
        (6, 7, STOP), -1.0, -3.0, Finish(FinishDetail.STOP_TOKEN, stop_token_id=STOP)
    )


def test_a_beam_that_stops_behind_the_best_is_forgotten() -> None:
    beams = ByHand(width=2)
    assert beams.step(top((5, -1.0), (6, -1.5), (EOS, -1.75), (7, -2.0))) == [[5], [6]]
    assert beams.found() == []


def test_only_the_best_hypotheses_are_kept() -> None:
    beams = ByHand(width=2, length_penalty=0.0, early_stopping=None)
    beams.step(top((EOS, -3.0), (5, -3.25), (6, -4.0)))
    beams.step(top((EOS, -0.25), (7, -0.25)), top((8, -0.5)))
    assert beams.found() == [([EOS], -3.0), ([5, EOS], -3.5)]
    beams = ByHand(width=2, early_stopping=None)
    beams.step(top((EOS, -3.0), (5, -3.25), (6, -4.0)))
    beams.step(top((EOS, -0.25), (7, -0.25)), top((8, -0.5)))
    assert beams.found() == [([5, EOS], -1.75), ([EOS], -3.0)]
    beams.step(top((EOS, -0.5), (7, -9.0)), top((8, -9.0)))
    assert beams.found() == [([5, 7, EOS], np.float32(-4 / 3)), ([5, EOS], -1.75)]
    assert beams.found(1) == [([5, 7, EOS], np.float32(-4 / 3))]


def test_equals_go_in_the_order_of_beams_and_candidates() -> None:
    beams = ByHand(width=3)
    beams.step(top((9, -1.0), (4, -1.0), (5, -1.0), (3, -1.0)))
    assert beams.outputs == [[9], [4], [5]]
    assert beams.step(top((8, -1.0)), top((3, -0.5), (6, -1.0)), top((2, -9.0))) == [[4, 3], [9, 8], [4, 6]]


def test_sums_and_scores_are_rounded_to_float32() -> None:
    beams = ByHand(width=2, length_penalty=0.5)
    beams.step(top((5, -100.0), (6, -100.0)))
    # In float64 the second would be better.
    assert beams.step(top((7, -1e-7)), top((7, 0.0)))[0] == [5, 7]
    beams = ByHand(width=2, length_penalty=0.7)
    logprobs = [float(np.float32(logprob)) for logprob in (-0.1, -0.2, -0.3)]
    total = np.float32(0)
    for token_id, logprob in zip((5, 6, EOS), logprobs, strict=True):
        beams.step(top((token_id, logprob), (9, -50.0)), *[top((9, -50.0))] * (len(beams.outputs) - 1))
        total += np.float32(logprob)
    best = beams.search.best(1)[0]
    assert best.cumulative_logprob == float(total)
    assert best.score == float(total / np.float32(3**0.7))


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty", "next_logprob", "done"),
    [
        (True, 1.0, -0.25, True),
        # The best that runs has -1.25 + next_logprob, after 2 tokens; the worst that ended -1.
        (False, 1.0, -0.5, False),
        (False, 1.0, -0.75, True),
        (False, 1.0, -1.0, True),
        (None, 1.0, -1.0, False),
        (None, 1.0, -8.5, False),
        (None, 1.0, -9.0, True),
        # Without a reward for length, "never" looks at no other length either.
        (None, 0.0, -0.25, True),
        (None, -1.0, -0.25, True),
        (False, 0.0, -0.25, True),
    ],
)
def test_when_a_search_is_over(
    early_stopping: bool | None, length_penalty: float, next_logprob: float, done: bool
) -> None:
    beams = ByHand(width=2, early_stopping=early_stopping, length_penalty=length_penalty, max_tokens=10)
    beams.step(top((EOS, -1.0), (5, -1.25), (6, -20.0)))
    assert not beams.search.done
    # It ends with -1.4375: -0.71875 for penalty 1, which leaves -1 the worst; without penalty it is the worst itself.
    running = beams.step(top((EOS, -0.1875), (7, next_logprob)), top((8, -20.0)))
    assert beams.search.done is done
    assert (running == []) is done
    assert len(beams.found()) == 2


def test_never_goes_by_the_present_length_where_length_is_punished() -> None:
    beams = ByHand(width=2, early_stopping=None, length_penalty=-1.0, max_tokens=10)
    beams.step(top((EOS, -1.0), (5, -1.25), (6, -20.0)))
    assert beams.step(top((7, -0.125), (EOS, -0.25)), top((8, -20.0)))[0] == [5, 7]
    assert beams.found() == [([EOS], -1.0), ([5, EOS], -3.0)]


def test_at_the_full_length_all_of_the_best_are_hypotheses() -> None:
    beams = ByHand(width=2, max_tokens=2)
    beams.step(top((5, -1.0), (6, -2.0)))
    assert beams.step(top((7, -1.0), (8, -1.5), (9, -1.75)), top((EOS, -0.25), (7, -0.25))) == []
    assert beams.search.done
    assert beams.search.best(2) == [
        Hypothesis((5, 7), -1.0, -2.0, Finish(FinishDetail.MAX_TOKENS)),
        Hypothesis((6, EOS), -1.125, -2.25, Finish(FinishDetail.EOS)),
    ]


def test_an_eos_that_is_ignored_is_a_token_like_others() -> None:
    beams = ByHand(width=2, max_tokens=2, stop_ids=frozenset())
    assert beams.step(top((EOS, -1.0), (6, -2.0))) == [[EOS], [6]]
    beams.step(top((EOS, -1.0)), top((EOS, -1.0)))
    assert [one.finish for one in beams.search.best(2)] == [Finish(FinishDetail.MAX_TOKENS)] * 2


def test_one_token_is_chosen_from_the_prompts_candidates() -> None:
    beams = ByHand(width=3, max_tokens=1)
    assert beams.step(top((5, -1.0), (STOP, -2.0), (6, -3.0), (7, -4.0))) == []
    assert beams.found(2) == [([5], -1.0), ([STOP], -2.0)]


def test_a_limit_that_comes_later_counts_from_then_on() -> None:
    beams = ByHand(width=2, max_tokens=10)
    beams.step(top((5, -1.0), (6, -2.0)))
    beams.search.apply_max_len(NUM_PROMPT_TOKENS + 11, FinishDetail.MAX_MODEL_LEN)
    assert beams.step(top((5, -1.0)), top((6, -2.0))) == [[5, 5], [6, 6]]
    beams.search.apply_max_len(NUM_PROMPT_TOKENS + 3, FinishDetail.MAX_MODEL_LEN)
    assert beams.step(top((5, -1.0)), top((6, -2.0))) == []
    assert [one.finish.detail for one in beams.search.best(2)] == [FinishDetail.MAX_MODEL_LEN] * 2
    beams = ByHand(width=2, max_tokens=1)
    beams.search.apply_max_len(NUM_PROMPT_TOKENS + 2, FinishDetail.MAX_MODEL_LEN)
    assert beams.step(top((5, -1.0), (6, -2.0))) == [[5], [6]], "an executor with a larger limit"
    assert beams.step(top((5, -1.0)), top((6, -2.0))) == []


def test_finished_early_the_running_beams_count_as_they_are() -> None:
    beams = ByHand(width=2)
    beams.step(top((EOS, -2.0), (5, -2.5), (6, -8.0)))
    beams.step(top((7, -0.5)), top((7, -0.5)))
    assert beams.found() == [([EOS], -2.0)]
    assert beams.search.best(9, beams.outputs, FinishDetail.KV_CAPACITY) == [
        Hypothesis((5, 7), -1.5, -3.0, Finish(FinishDetail.KV_CAPACITY)),
        Hypothesis((EOS,), -2.0, -2.0, Finish(FinishDetail.EOS)),
    ]
    assert len(beams.search.best(1, beams.outputs, FinishDetail.KV_CAPACITY)) == 1
    assert beams.step(top((8, -0.5)), top((8, -0.5))), "returning them changes nothing"


def test_finished_early_before_its_first_token_the_output_is_empty() -> None:
    found = ByHand().search.best(2, [[]], FinishDetail.KV_CAPACITY)
    assert found == [Hypothesis((), 0.0, 0.0, Finish(FinishDetail.KV_CAPACITY))]


def test_with_few_candidates_fewer_beams_run() -> None:
    beams = ByHand(width=4)
    assert beams.step(top((5, -1.0), (EOS, -2.0))) == [[5]]
    assert beams.step(top((5, -1.0), (6, -1.5), (EOS, -2.0))) == [[5, 5], [5, 6]]
    assert beams.step(top(), top((3, -1.0))) == [[5, 6, 3]]
    assert beams.step(top()) == []
    assert beams.search.done
    assert beams.found() == [([5, EOS], -1.5), ([EOS], -2.0)]


def test_nothing_is_found_where_no_token_is_allowed() -> None:
    beams = ByHand()
    assert beams.step(top()) == []
    assert beams.search.done
    assert beams.found() == []


@pytest.mark.parametrize(
    ("length_penalty", "scores"),
    [(1e6, [-1.0, 0.0]), (-1e6, [-1.0, -np.inf]), (1e3, [-1.0, 0.0]), (-1e3, [-1.0, -np.inf])],
)
def test_no_length_penalty_is_too_large(length_penalty: float, scores: list[float]) -> None:
    beams = ByHand(length_penalty=length_penalty, early_stopping=None)
    beams.step(top((EOS, -1.0), (5, -1.25), (6, -20.0)))
    beams.step(top((EOS, -0.5), (7, -0.75)), top((8, -20.0)))
    assert sorted(score for _, score in beams.found()) == sorted(scores)
    certain = ByHand(length_penalty=length_penalty)
    certain.step(top((5, 0.0)))
    certain.step(top((EOS, 0.0)))
    assert certain.found() == [([5, EOS], 0.0)]


def test_as_many_candidates_as_can_matter() -> None:
    assert ByHand(width=4, stop_ids=frozenset()).search.num_candidates == 4
    assert ByHand(width=4, stop_ids=frozenset({1, 2, 3})).search.num_candidates == 7
    assert ByHand(width=255).search.num_candidates == MAX_CANDIDATES


def test_what_does_not_fit_the_running_beams_is_refused() -> None:
    beams = ByHand(width=2)
    beams.step(top((5, -1.0), (6, -2.0)))
    fine = [top((7, -1.0)), top((7, -1.0))]
    for outputs, candidates in (([[5]], fine), ([[5], [6]], fine[:1]), ([[5], [6, 7]], fine), ([[], []], fine)):
        with pytest.raises(InvariantError):
            beams.search.advance(outputs, candidates)
    with pytest.raises(InvariantError):
        beams.search.best(1, [], FinishDetail.KV_CAPACITY)
    assert beams.step(*fine) == [[5, 7], [6, 7]]
    ended = ByHand(max_tokens=1)
    ended.step(top((5, -1.0)))
    with pytest.raises(InvariantError):
        ended.search.advance([[5]], [top((6, -1.0))])


@dataclass(frozen=True)
class Model:
    """Logprobs of every text, in quarters, so that many are equal; some tokens are ruled out."""

    seed: int
    vocab_size: int
    share_allowed: float

    def row(self, tokens: tuple[int, ...]) -> npt.NDArray[np.float32]:
        rng = np.random.default_rng([self.seed, *tokens])
        logprobs = (rng.integers(-16, 0, self.vocab_size) / 4).astype(np.float32)
        logprobs[rng.random(self.vocab_size) >= self.share_allowed] = -np.inf
        return logprobs

    def candidates(self, tokens: tuple[int, ...], count: int) -> Candidates:
        row = self.row(tokens)
        best = np.argsort(-row, kind="stable")[: min(count, int(np.isfinite(row).sum()))]
        return Candidates(best.tolist(), row[best].tolist())


def whole_rows(model: Model, spec: BeamSpec, stop_ids: frozenset[int], max_tokens: int) -> list[tuple[object, ...]]:
    """The same search over all continuations of all beams: tokens, sum and score of its hypotheses, best first."""
    beams: list[tuple[tuple[int, ...], np.float32]] = [((), np.float32(0))]
    ended: list[tuple[tuple[int, ...], np.float32, np.float32]] = []

    def score(total: np.float32, length: int) -> np.float32:
        return np.float32(total / np.float32(length**spec.length_penalty))

    for length in range(1, max_tokens + 1):
        sums = np.stack([total + model.row(tokens) for tokens, total in beams])
        order = [divmod(int(at), model.vocab_size) for at in np.argsort(-sums, axis=None, kind="stable")]
        ordered = [((*beams[beam][0], token), sums[beam, token]) for beam, token in order]
        ordered = [(tokens, total) for tokens, total in ordered if np.isfinite(total)]
        stops = [length == max_tokens or tokens[-1] in stop_ids for tokens, _ in ordered]
        for (tokens, total), stopped in list(zip(ordered, stops, strict=True))[: spec.width]:
            ended += [(tokens, total, score(total, length))] if stopped else []
        ended = sorted(ended, key=lambda one: -one[2])[: spec.width]
        beams = [one for one, stopped in zip(ordered, stops, strict=True) if not stopped][: spec.width]
        if not beams:
            break
        if len(ended) == spec.width:
            far = max_tokens if spec.early_stopping is None and spec.length_penalty > 0 else length
            if spec.early_stopping is True or score(beams[0][1], far) <= ended[-1][2]:
                break
    return list(ended)


@pytest.mark.slow
@settings(max_examples=300)
@given(
    model=st.builds(Model, st.integers(0, 10**6), st.integers(2, 9), st.sampled_from([1.0, 1.0, 0.8, 0.4])),
    spec=st.builds(
        BeamSpec, st.integers(2, 5), st.sampled_from([1.0, 0.0, 0.5, 2.0, -1.0]), st.sampled_from([True, False, None])
    ),
    stop_ids=st.frozensets(st.integers(0, 8), max_size=3),
    max_tokens=st.integers(1, 7),
)
def test_the_returned_candidates_are_enough(
    model: Model, spec: BeamSpec, stop_ids: frozenset[int], max_tokens: int
) -> None:
    search = BeamSearch(
        spec,
        stop_ids=stop_ids,
        eos_token_ids=stop_ids,
        num_prompt_tokens=NUM_PROMPT_TOKENS,
        max_len=NUM_PROMPT_TOKENS + max_tokens,
        length_detail=FinishDetail.MAX_TOKENS,
    )
    outputs: list[tuple[int, ...]] = [()]
    while not search.done:
        candidates = [model.candidates(output, search.num_candidates) for output in outputs]
        assert all(len(one.token_ids) <= spec.width + len(stop_ids) for one in candidates)
        outputs = [(*outputs[parent], token_id) for parent, token_id in search.advance(outputs, candidates)]
        assert len(outputs) <= spec.width
    found = [(one.token_ids, one.cumulative_logprob, one.score) for one in search.best(spec.width)]
    assert found == whole_rows(model, spec, stop_ids, max_tokens)
    event(f"{len(found)} of {spec.width} found")
