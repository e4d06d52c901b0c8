"""The core's beam search against transformers' generate: token by token, and the scores to the last bit.

transformers computes the logits of its beams without a cache, so that each is seen with all its tokens; the core's
search is given those same logits, and fails if it needs a beam that transformers did not have.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cadenza_common.plan.result import Candidates
from executor_svc.sampling.candidates import CandidateColumns
from scheduler_svc.core.sequences.beams import BeamSearch, Hypothesis
from scheduler_svc.core.types import BeamSpec, Finish, FinishDetail
from tests.checkpoints import make_llama
from tests.executor_svc.driver import NUM_THREADS, Model
from tests.helpers.executor.cpu_sampling import best_candidates
from tests.helpers.marks import short_and_long
from tests.helpers.models.golden import transformers_model

# Peaked enough that beams meet their stop ids, flat enough that they wander; never fewer ids than beams and stop ids.
SHAPES: dict[str, dict[str, Any]] = {
    "small vocabulary": {"vocab_size": 17, "num_hidden_layers": 1, "seed": 1},
    "two layers": {"vocab_size": 23, "num_hidden_layers": 2, "seed": 2},
    "flat": {"vocab_size": 67, "num_hidden_layers": 1, "initializer_range": 0.08, "seed": 3},
}
NUM_CASES = 40
EARLY_STOPPING: dict[bool | None, bool | str] = {True: True, False: False, None: "never"}
"""What transformers calls each of ours."""

CandidatesOf = Callable[[list[int], int], Candidates]
"""Candidates of a text: its tokens, how many."""


@dataclass(frozen=True)
class Case:
    """One request, in the words of both."""

    prompt: list[int]
    spec: BeamSpec
    stop_ids: tuple[int, ...]
    num_returned: int
    max_tokens: int
    min_tokens: int

    def search(self) -> BeamSearch:
        stop_ids = frozenset(self.stop_ids)
        return BeamSearch(
            self.spec,
            stop_ids=stop_ids,
            eos_token_ids=frozenset(self.stop_ids[:1]),
            num_prompt_tokens=len(self.prompt),
            max_len=len(self.prompt) + self.max_tokens,
            length_detail=FinishDetail.MAX_TOKENS,
        )


@dataclass(frozen=True)
class Reference:
    """What transformers found: outputs and scores, best first."""

    outputs: list[tuple[int, ...]]
    scores: list[float]


def random_case(seed: int, vocabulary: int) -> Case:
    rng = random.Random(seed)
    width = rng.choice([2, 2, 3, 4, 5, 8])
    max_tokens = rng.choice([1, 4, 12, 25, 25])
    return Case(
        prompt=[rng.randrange(vocabulary) for _ in range(rng.randint(1, 9))],
        spec=BeamSpec(width, rng.choice([1.0, 1.0, 2.0, 0.6, 0.0, -0.7]), rng.choice([True, False, None])),
        stop_ids=tuple(rng.sample(range(vocabulary), rng.choice([0, 1, 2, 3, 4]))),
        num_returned=rng.randint(1, width),
        max_tokens=max_tokens,
        min_tokens=rng.choice([0, 0, 0, 3]) if max_tokens > 3 else 0,
    )


def by_transformers(model: Any, case: Case, **options: Any) -> Reference:
    ids = torch.tensor([case.prompt])
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            num_beams=case.spec.width,
            num_return_sequences=case.num_returned,
            length_penalty=case.spec.length_penalty,
            early_stopping=EARLY_STOPPING[case.spec.early_stopping],
            eos_token_id=list(case.stop_ids) or None,
            pad_token_id=0,
            max_new_tokens=case.max_tokens,
            min_new_tokens=case.min_tokens or None,
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        )
    # Padding may look like a token; only tokens have a beam that they come from.
    lengths = (out.beam_indices >= 0).sum(dim=1).tolist()
    outputs = out.sequences[:, len(case.prompt) :].tolist()
    return Reference(
        [tuple(output[:length]) for output, length in zip(outputs, lengths, strict=True)],
        out.sequences_scores.tolist(),
    )


def by_core(case: Case, candidates_of: CandidatesOf) -> list[Hypothesis]:
    search = case.search()
    outputs: list[list[int]] = [[]]
    while not search.done:
        candidates = [candidates_of(case.prompt + output, search.num_candidates) for output in outputs]
        children = search.advance(outputs, candidates)
        outputs = [[*outputs[parent], token_id] for parent, token_id in children]
    return search.best(case.num_returned)


def told_of(logits: dict[tuple[int, ...], Tensor], case: Case) -> CandidatesOf:
    """Candidates by torch's own log_softmax and a stable sort, stop ids ruled out where transformers does it."""

    def candidates_of(tokens: list[int], count: int) -> Candidates:
        logprobs = logits[tuple(tokens)].log_softmax(dim=-1)
        if len(tokens) < len(case.prompt) + case.min_tokens:
            logprobs[list(case.stop_ids)] = -torch.inf
        best = logprobs.sort(descending=True, stable=True)
        count = min(count, int(best.values.isfinite().sum()))
        return Candidates(best.indices[:count].tolist(), best.values[:count].tolist())

    return candidates_of


def recorded(model: Any, case: Case) -> tuple[Reference, dict[tuple[int, ...], Tensor]]:
    """transformers' answer, and the next token's logits of every text that it looked at."""
    seen: dict[tuple[int, ...], Tensor] = {}

    def record(_module: Any, _args: Any, inputs: dict[str, Any], output: Any) -> None:
        for tokens, row in zip(inputs["input_ids"].tolist(), output.logits[:, -1].float(), strict=True):
            seen.setdefault(tuple(tokens), row.clone())

    handle = model.register_forward_hook(record, with_kwargs=True)
    try:
        return by_transformers(model, case, use_cache=False), seen
    finally:
        handle.remove()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(NUM_THREADS)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=SHAPES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("beams"), **SHAPES[request.param])


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Any:
    return transformers_model(checkpoint)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("seed", short_and_long(range(NUM_CASES), range(NUM_CASES // 2)))
def test_tokens_and_scores_are_those_of_transformers(reference: Any, seed: int) -> None:
    case = random_case(seed, reference.config.vocab_size)
    theirs, logits = recorded(reference, case)
    ours = by_core(case, told_of(logits, case))
    assert [found.token_ids for found in ours] == theirs.outputs, case
    assert [found.score for found in ours] == theirs.scores, case
    for found in ours:
        last = found.token_ids[-1]
        if last in case.stop_ids[:1]:
            assert found.finish == Finish(FinishDetail.EOS)
        elif last in case.stop_ids:
            assert found.finish == Finish(FinishDetail.STOP_TOKEN, stop_token_id=last)
        else:
            assert found.finish == Finish(FinishDetail.MAX_TOKENS)
            assert len(found.token_ids) == case.max_tokens


@pytest.mark.sampled(1)
def test_each_early_stopping_is_that_of_transformers(reference: Any) -> None:
    """With stop ids and length penalties for which it matters: each two of the three part somewhere."""
    parted = dict.fromkeys(itertools.combinations(EARLY_STOPPING, 2), 0)
    for seed in range(12):
        case = random_case(seed, reference.config.vocab_size)
        case = replace(case, stop_ids=case.stop_ids or (1, 2), max_tokens=25, min_tokens=0)
        outputs = {}
        for early_stopping in EARLY_STOPPING:
            spec = BeamSpec(width=2 + seed % 2, length_penalty=1.0 + seed % 2, early_stopping=early_stopping)
            one = replace(case, spec=spec, num_returned=2)
            theirs, logits = recorded(reference, one)
            outputs[early_stopping] = [found.token_ids for found in by_core(one, told_of(logits, one))]
            assert outputs[early_stopping] == theirs.outputs, one
        for pair in parted:
            parted[pair] += outputs[pair[0]] != outputs[pair[1]]
        if all(parted.values()):
            break
    assert all(parted.values()), parted


@pytest.mark.sampled(5)
@pytest.mark.parametrize("seed", range(6))
def test_the_executors_candidates_lead_to_the_same_beams(checkpoint: Path, reference: Any, seed: int) -> None:
    """From its own logits of every beam, against transformers with its cache; scores differ by rounding."""
    model = Model(checkpoint)
    case = replace(random_case(seed, reference.config.vocab_size), min_tokens=0, max_tokens=12)

    def candidates_of(tokens: list[int], count: int) -> Candidates:
        columns = CandidateColumns(np.zeros(1, np.int64), np.full(1, count))
        found = best_candidates(model.whole(tokens)[-1:], columns)
        return Candidates(found.token_ids[0, :count].tolist(), found.logprobs[0, :count].tolist())

    ours, theirs = by_core(case, candidates_of), by_transformers(reference, case)
    assert [found.token_ids for found in ours] == theirs.outputs, case
    assert [found.score for found in ours] == pytest.approx(theirs.scores, abs=1e-4)
