"""At temperature 1, tokens with drafts follow the target's own distribution, whatever made the drafts."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from executor_svc.config import ExecutorConfig
from executor_svc.models.heads.draft import load_draft
from scheduler_svc.core.types import RequestSpec
from tests.checkpoints import make_llama
from tests.executor_svc.driver import NUM_THREADS, Model
from tests.helpers.core.core_chats import Chat, Setting
from tests.helpers.core.core_model import Rig
from tests.helpers.core.core_sampling import core_sampling
from tests.helpers.executor.known_drafts import KnownDrafts

PROMPT = (5, 9, 17, 4, 9, 17)
ALLOWED = (3, 4, 9, 17)
"""Few tokens, so that each output of three is drawn often."""
NUM_REQUESTS, NUM_TOKENS = 3000, 3
ALPHA = 1e-6
"""One failure in a million runs of a right sampler; seeds are fixed, so it holds for ever or is a bug."""
SETTING = Setting(num_blocks=70, max_num_seqs=240, max_num_batched_tokens=512, max_drafts=2)
"""A block for each of 70 sequences at a time, and rows for all of their drafts."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    before = torch.get_num_threads()
    torch.set_num_threads(NUM_THREADS)
    yield Model(make_llama(tmp_path_factory.mktemp("model")))
    torch.set_num_threads(before)


def probabilities(model: Model, output: tuple[int, ...]) -> np.ndarray:
    """Of the allowed tokens after an output: softmax of the target's logits, in float64."""
    logits = model.whole([*PROMPT, *output])[-1].double()[list(ALLOWED)]
    return torch.softmax(logits, 0).numpy()


def joint(model: Model) -> dict[tuple[int, ...], float]:
    """The probability of each output."""
    found = {}
    for output in itertools.product(ALLOWED, repeat=NUM_TOKENS):
        rows = [probabilities(model, output[:place]) for place in range(NUM_TOKENS)]
        found[output] = float(np.prod([row[ALLOWED.index(token)] for row, token in zip(rows, output, strict=True)]))
    return found


def load() -> list[Chat]:
    sampling = [
        core_sampling(temperature=1.0, seed=7919 * index, allowed_token_ids=ALLOWED) for index in range(NUM_REQUESTS)
    ]
    return [Chat(RequestSpec(f"{index}", PROMPT, each, NUM_TOKENS)) for index, each in enumerate(sampling)]


def check(rig: Rig, expected: dict[tuple[int, ...], float]) -> float:
    """Compare the outputs' frequencies with their probabilities; returns the share of drafts accepted."""
    counts = Counter(tuple(output.token_ids) for output in rig.run(load()).values())
    assert counts.total() == NUM_REQUESTS
    observed, wanted = np.array([(counts[output], NUM_REQUESTS * share) for output, share in expected.items()]).T
    assert observed.sum() == NUM_REQUESTS
    rare = wanted < 10
    assert (~rare).sum() > 20
    observed, wanted = (np.append(each[~rare], each[rare].sum()) for each in (observed, wanted))
    assert stats.chisquare(observed, wanted).pvalue > ALPHA
    drafts = rig.core.lanes[0].counts.drafts
    assert sum(drafts.drafted) > NUM_REQUESTS / 2, "else drafts change little"
    return sum(drafts.accepted) / sum(drafts.drafted)


def test_with_a_draft_model_of_other_weights(target: Model, tmp_path: Path) -> None:
    """It draws with the target's noise, and agrees more often than one that draws with noise of its own would."""
    folder = make_llama(tmp_path, seed=1)
    config = ExecutorConfig(**{**target.options, "speculative": "draft", "speculative_model": str(folder)})
    draft = load_draft(str(folder), config, target.device, target.loaded)
    expected = joint(target)
    accepted = check(Rig(target, SETTING, draft_model=draft), expected)
    other = Model(folder)
    first, likely = probabilities(target, ()), []
    for token in ALLOWED:
        ours, theirs = probabilities(target, (token,)), probabilities(other, (token,))
        likely.append((float(ours @ theirs), float(np.minimum(ours, theirs).sum())))
    independent, best = first @ np.array(likely)
    assert independent + 0.5 * (best - independent) < accepted <= best + 0.03


def test_with_drafts_that_do_not_know_the_noise(target: Model) -> None:
    """Always the most likely output: a draft is right as often as it is likely."""
    expected = joint(target)
    likely = max(expected, key=lambda output: expected[output])
    drafts = KnownDrafts([(PROMPT, likely)], target.loaded.geometry.vocab_size, acceptance=1.0)
    assert 0.1 < check(Rig(target, SETTING, drafts), expected) < 0.9
