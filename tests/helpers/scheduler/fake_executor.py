"""An executor without a model, for tests: it counts. The next token is the last one plus 1, and steps obey the test."""

from __future__ import annotations

import threading
from typing import Any

import torch

from executor_svc.batch.forward_batch import ForwardBatch
from executor_svc.plan.arrays import IntArray
from executor_svc.plan.limits import Limits
from executor_svc.sampling.row_math import argmax
from tests.helpers.executor.cpu_sampling import FUNCTIONS

LIMITS = Limits(
    num_slots=16,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    max_model_len=64,
    vocab_size=50,
    max_logprobs=50,
    block_size=8,
    num_device_blocks=64,
    num_host_blocks=16,
    max_inflight_plans=4,
)


class CountingRunner:
    """The logits of a token favour its successor. Knobs: `gate`, `errors` and `nan_tokens`."""

    functions = FUNCTIONS

    def __init__(self, vocab_size: int = LIMITS.vocab_size) -> None:
        self.vocab_size = vocab_size
        self.batches: list[ForwardBatch] = []
        self.entered = threading.Semaphore(0)
        self.gate = threading.Event()
        self.gate.set()
        self.errors: list[Exception] = []
        self.nan_tokens: set[int] = set()

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        self.batches.append(batch)
        self.entered.release()
        assert self.gate.wait(30)
        if self.errors:
            raise self.errors.pop(0)
        return batch.token_ids[:, None]

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        last = hidden[rows, 0]
        logits = torch.zeros(len(last), self.vocab_size)
        logits[torch.arange(len(last)), (last + 1) % self.vocab_size] = 9.0
        for row, token in enumerate(last.tolist()):
            if token in self.nan_tokens:
                logits[row, 3] = float("nan")
        return logits

    def argmax(self, logits: torch.Tensor) -> IntArray:
        return argmax(logits)


class RecordingPools:
    """Block pools that only record the moves that they get."""

    state_headers = None

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[int], list[int]]] = []

    def __getattr__(self, name: str) -> Any:
        if name not in ("copy", "swap_out", "swap_in"):
            raise AttributeError(name)
        return lambda sources, destinations: self.calls.append((name, list(sources), list(destinations)))
