"""A naive model of one sequence on an executor: lists, and loops over tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cadenza_common.plan.sampling import SequenceSampling
from executor_svc.sampling.logits_edits import LogitsEdits
from tests.helpers.scheduler.fake_executor import LIMITS

BLOCK = LIMITS.block_size


@dataclass
class Naive:
    """One sequence."""

    tokens: list[int]
    prompt: int
    computed: int
    blocks: list[int]
    stop: set[int]
    min_tokens: int
    held: bool
    stopped: bool = False
    sampling: SequenceSampling = field(default_factory=SequenceSampling)

    @property
    def left(self) -> int:
        return len(self.tokens) - self.computed

    @property
    def ready(self) -> bool:
        return not self.held and not self.stopped and self.left == 1

    def room(self) -> int:
        """Tokens that can still be computed."""
        return min(self.left, len(self.blocks) * BLOCK - self.computed, LIMITS.max_model_len - self.computed)

    def sample(self, token: int) -> None:
        self.tokens.append(token)
        if token in self.stop and len(self.tokens) - self.prompt >= self.min_tokens:
            self.stopped = True

    def edits(self) -> Edits:
        """What is done to the logits of the next token, by the definitions."""
        sampling, output = self.sampling, self.tokens[self.prompt :]
        forbidden = set(self.stop) if len(output) < self.min_tokens else set()
        for word in map(list, sampling.bad_words):
            if len(word) == 1 or output[-len(word) + 1 :] == word[:-1]:
                forbidden.add(word[-1])
        penalties = (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty)
        counted: set[int] = set()
        if penalties != (1, 0, 0):
            counted = set(output) | (set(self.tokens) if penalties[0] != 1 else set())
        return (
            set(sampling.allowed_token_ids),
            forbidden,
            dict(zip(sampling.bias_token_ids, sampling.biases, strict=True)),
            {token: (output.count(token), *penalties) for token in counted},
        )


Edits = tuple[set[int], set[int], dict[int, float], dict[int, tuple[float, ...]]]
"""Of one row: allowed, forbidden, biases, and counted tokens with their count and penalties."""


def by_row(edits: LogitsEdits | None) -> dict[int, Edits]:
    """The flat lists as one entry for each row of the batch."""
    if edits is None:
        return {}
    found: dict[int, Edits] = {row: (set(), set(), {}, {}) for row in edits.rows.tolist()}

    def pairs(tokens: Any, *values: np.ndarray) -> Any:
        return zip(edits.rows[tokens.rows].tolist(), tokens.ids.tolist(), *(v.tolist() for v in values), strict=True)

    for row, token in pairs(edits.allowed):
        found[row][0].add(token)
    for row, token in pairs(edits.forbidden):
        found[row][1].add(token)
    for row, token, bias in pairs(edits.biased, edits.biases):
        found[row][2][token] = bias
    penalties = (edits.repetition_penalty, edits.frequency_penalty, edits.presence_penalty)
    for row, token, *numbers in pairs(edits.counted, edits.counts, *penalties):
        assert token not in found[row][3], "a token is counted once"
        found[row][3][token] = tuple(numbers)
    return found
