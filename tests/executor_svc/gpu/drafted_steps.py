"""Requests of many kinds for steps with drafts on the GPU's path, and what they give, two steps in flight."""

from __future__ import annotations

from collections import defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cadenza_common.plan.plan import AdmittedSequence
from cadenza_common.plan.result import StepResult, StepStatus
from cadenza_common.plan.sampling import SequenceSampling
from executor_svc.gpu.graphs import CudaGraphs, DirectReplayer
from executor_svc.gpu.kernels.slots.slots import StepSizes
from executor_svc.gpu.slots.staging import Upload
from executor_svc.worker.worker import Launched
from tests.checkpoints import make_checkpoint
from tests.helpers.executor.plans import ints, scheduled, sequence
from tests.helpers.executor.stepping import Stepper

VOCAB = 131
MAX_DRAFTS = 3
WITH_DRAFTS: dict[str, Any] = {"max_drafts": MAX_DRAFTS, "max_num_seqs": 24, "num_slots": 24, "max_inflight_plans": 2}


def make_model(folder: Path, **fields: Any) -> Path:
    """Write a checkpoint of one layer; fields: of its configuration."""
    return make_checkpoint(
        folder, "llama", vocab_size=VOCAB, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=1,
        head_dim=64, **fields,
    )  # fmt: skip


class Outputs:
    """What each slot's sequence has got."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.logprobs: dict[int, list[float]] = defaultdict(list)
        self.top: dict[int, list[int]] = defaultdict(list)
        self.ended: set[int] = set()
        self.num_drafts = self.num_accepted = 0
        self.refused: list[int] = []
        """Slots by step in which a draft of theirs was not accepted."""

    def add(self, result: StepResult) -> None:
        assert result.status == StepStatus.OK
        counts = result.num_tokens if len(result.num_tokens) else np.ones(len(result.slots), np.int64)
        for slot, token in zip(np.repeat(result.slots, counts).tolist(), result.token_ids.tolist(), strict=True):
            self.tokens[slot].append(token)
        for slot, each in result.logprobs.items():
            assert each.start == STARTS[slot] + len(self.logprobs[slot])
            self.logprobs[slot] += each.logprobs.tolist()
            self.top[slot] += each.top_token_ids.tolist()
        self.num_drafts += sum(result.num_drafts)
        self.num_accepted += sum(result.num_accepted)
        self.refused += [
            slot
            for slot, drafts, accepted in zip(result.slots, result.num_drafts, result.num_accepted)  # noqa: B905
            if drafts > accepted
        ]


LAST = 28
"""The number of tokens at which each sequence ends."""
PERIODIC = [3, 9, 27, 81] * 3
REQUESTS: list[tuple[list[int], dict[str, Any]]] = [
    (PERIODIC, {}),
    ([5] * 9, {"temperature": 0.8, "seed": 5, "top_p": 0.9, "num_logprobs": 3}),
    (PERIODIC[:9], {"num_logprobs": 2, "repetition_penalty": 1.3, "frequency_penalty": 0.4}),
    ([7, 8, 7, 8, 7, 8], {"temperature": 0.3, "seed": 9, "min_tokens": 6, "stop_token_ids": ints(*range(0, VOCAB, 4))}),
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
        begun.append(stepper.launch(step_id=step_id, **fields))
        if len(begun) == 2:
            found.add(begun.popleft().result())
        slots = stepper.executor.slots  # type: ignore[attr-defined]
        if not waiting and slots.stopped[: len(REQUESTS)].all():
            break
    while begun:
        found.add(begun.popleft().result())
    found.ended = set(np.flatnonzero(slots.stopped).tolist())
    return found


def note_device_calls(monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list[StepSizes]]:
    """Return the words of each copy of a step to the device, and the sizes of each replay, as they will come."""
    sent, replayed = list[int](), list[StepSizes]()

    def note(kind: Any, name: str, into: list[Any]) -> None:
        call = getattr(kind, name)

        def noted(self: Any, argument: Any) -> None:
            into.append(argument)
            call(self, argument)

        monkeypatch.setattr(kind, name, noted)

    note(Upload, "send", sent)
    for kind in (DirectReplayer, CudaGraphs):
        note(kind, "replay", replayed)
    return sent, replayed


def copies_of_decodes(stepper: Stepper, sent: list[int], found: Outputs) -> list[int]:
    """Do three equal decodes with three drafts; return how many copies to the device each has made."""
    numbers = []
    for _ in range(3):
        sent.clear()
        found.add(stepper.step(decode_ready=True, max_drafts=3))
        numbers.append(len(sent))
    return numbers
