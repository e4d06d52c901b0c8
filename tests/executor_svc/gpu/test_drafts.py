"""Steps with drafts on the GPU's path, two in flight: the tokens, ends and logprobs of steps without drafts."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from executor_svc.plan.plan import AdmittedSequence, Limits, StepResult, StepStatus
from executor_svc.plan.sampling import SequenceSampling
from executor_svc.speculation.drafts import DraftSource
from executor_svc.speculation.ngram import NgramSource
from executor_svc.speculation.suffix import SuffixSource
from executor_svc.worker.worker import Launched
from tests.checkpoints import make_checkpoint
from tests.executor_svc.driver import Model
from tests.helpers.plans import ints, plan, scheduled, sequence
from tests.helpers.stepping import Stepper

VOCAB = 131
MAX_DRAFTS = 3
SOURCES: dict[str, Callable[[Limits], DraftSource]] = {"ngram": NgramSource, "suffix": SuffixSource}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp("llama"), "llama", vocab_size=VOCAB, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=1, head_dim=64,
    )  # fmt: skip


@pytest.fixture(scope="module")
def cpu(folder: Path) -> Model:
    return Model(folder)


@pytest.fixture(scope="module")
def gpu(folder: Path) -> Model:
    return Model(folder, device="cuda")


class Outputs:
    """What each slot's sequence has got."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.logprobs: dict[int, list[float]] = defaultdict(list)
        self.top: dict[int, list[int]] = defaultdict(list)
        self.ended: set[int] = set()
        self.num_drafts = self.num_accepted = 0

    def add(self, result: StepResult) -> None:
        assert result.status == StepStatus.OK
        counts = result.num_tokens if len(result.num_tokens) else np.ones(len(result.slots), np.int64)
        for slot, token in zip(np.repeat(result.slots, counts).tolist(), result.token_ids.tolist(), strict=True):
            self.tokens[slot].append(token)
        for each in result.logprobs:
            assert each.start == STARTS[each.slot] + len(self.logprobs[each.slot])
            self.logprobs[each.slot] += each.chosen_logprobs.tolist()
            self.top[each.slot] += each.top_token_ids.tolist()
        self.num_drafts += int(result.num_drafts.sum())
        self.num_accepted += int(result.num_accepted.sum())


LAST = 60
"""The number of tokens at which each sequence ends."""
PERIODIC = [3, 9, 27, 81] * 4
REQUESTS: list[tuple[list[int], dict[str, Any]]] = [
    (PERIODIC, {}),
    ([5] * 9, {"temperature": 0.8, "seed": 5, "top_p": 0.9, "num_logprobs": 3}),
    (PERIODIC[:9], {"num_logprobs": 2, "repetition_penalty": 1.3, "frequency_penalty": 0.4}),
    ([7, 8, 7, 8, 7, 8], {"temperature": 0.3, "seed": 9, "min_tokens": 9, "stop_token_ids": ints(*range(0, VOCAB, 4))}),
    ([1, 2, 3] * 5, {"bad_words": (ints(7), ints(3, 1)), "allowed_token_ids": ints(*range(12))}),
]
STARTS = [len(tokens) for tokens, _ in REQUESTS]


def admissions(max_drafts: int) -> list[AdmittedSequence]:
    return [
        sequence(
            slot,
            tokens,
            Stepper.blocks(slot),
            sampling=SequenceSampling(**sampling),
            max_drafts=max_drafts,
            max_len=LAST,
        )
        for slot, (tokens, sampling) in enumerate(REQUESTS)
    ]


def outputs(stepper: Stepper, max_drafts: int) -> Outputs:
    """Start one sequence after the other, each in two chunks, and run them to their ends."""
    begun, found = deque[Launched](), Outputs()
    waiting = deque(admissions(max_drafts or MAX_DRAFTS))
    for step_id in range(1, 200):
        fields: dict[str, Any] = {"decode_ready": True, "max_drafts": max_drafts}
        if step_id % 4 == 1 and waiting:
            fields |= {"admitted": (waiting[0],), "scheduled": scheduled((waiting[0].slot, 4, False))}
        if step_id % 4 == 2 and waiting:
            rest = len(waiting[0].token_ids) - 4
            fields["scheduled"] = scheduled((waiting.popleft().slot, rest, True))
        begun.append(stepper.executor.launch(plan(step_id=step_id, **fields), 0))
        if len(begun) == 2:
            found.add(begun.popleft().result())
        slots = stepper.executor.slots  # type: ignore[attr-defined]
        if not waiting and slots.stopped[: len(REQUESTS)].all():
            break
    while begun:
        found.add(begun.popleft().result())
    found.ended = set(np.flatnonzero(slots.stopped).tolist())
    return found


@pytest.fixture(scope="module")
def expected(cpu: Model) -> Outputs:
    return outputs(Stepper(cpu, max_drafts=MAX_DRAFTS), 0)


@pytest.mark.parametrize("kind", SOURCES)
def test_tokens_are_those_without_drafts(kind: str, gpu: Model, expected: Outputs) -> None:
    found = outputs(
        Stepper(gpu, max_drafts=MAX_DRAFTS, drafts=SOURCES[kind], max_num_seqs=24, num_slots=24), MAX_DRAFTS
    )
    assert found.tokens == expected.tokens
    assert found.ended == expected.ended == set(range(len(REQUESTS)))
    assert found.top == expected.top
    for slot, logprobs in expected.logprobs.items():
        np.testing.assert_allclose(found.logprobs[slot], logprobs, atol=3e-5)
    assert found.num_accepted > 20
