"""The same sequences in the CPU's slots and in the GPU sampler's state, and both samplers run over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cadenza_common.plan.plan import AdmittedSequence, StepPlan
from cadenza_common.plan.sampling import SequenceSampling
from executor_svc.batch.slots import Slots
from executor_svc.batch.step_result import SampledTokens
from executor_svc.gpu.kernels.sampling.penalties import restart_counts
from executor_svc.gpu.kernels.sampling.sampling import sample
from executor_svc.gpu.kernels.sampling.state import SamplingState, SamplingWorkspace
from executor_svc.gpu.sampling.state import following, pack_bits, pack_record
from executor_svc.plan.limits import Limits
from executor_svc.sampling import sampler
from executor_svc.sampling.columns import SAMPLER_NEEDS, SamplingColumns
from executor_svc.sampling.logits_edits import logits_edits
from tests.helpers.executor.cpu_sampling import FUNCTIONS

MAX_MODEL_LEN = 48
UNTOUCHED = -77


def sequence(slot: int, prompt: Sequence[int] = (0,), output: Sequence[int] = (), **sampling: Any) -> AdmittedSequence:
    """A sequence with these tokens; sampling: fields of SequenceSampling, lists as such."""
    lists = {
        name: np.array(value, np.float32 if name == "biases" else np.int64)
        for name, value in sampling.items()
        if isinstance(value, list) and name != "bad_words"
    }
    words = tuple(np.array(word, np.int64) for word in sampling.get("bad_words", ()))
    fields = {**sampling, **lists, "bad_words": words}
    tokens = np.array([*prompt, *output], np.int64)
    return AdmittedSequence(
        slot, tokens, len(prompt), len(tokens) - 1, np.arange(1), SequenceSampling(**fields)
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class World:
    """Some sequences, known to both."""

    slots: Slots
    state: SamplingState
    device: torch.device

    @property
    def vocab(self) -> int:
        return self.slots.limits.vocab_size

    def on_cpu(self, logits: torch.Tensor, rows: Sequence[int], sources: Sequence[int] | None = None) -> SampledTokens:
        """What the CPU's sampler chooses for these slots."""
        index, sampling = np.array(rows, np.int64), self.slots.sampling
        columns = SamplingColumns(
            sampling.rows(index, *SAMPLER_NEEDS),
            position=self.slots.num_tokens[index],
            edits=logits_edits(self.slots, index),
            sources=None if sources is None else np.array(sources, np.int64),
        )
        with np.errstate(all="ignore"):
            return sampler.sample(logits, columns, FUNCTIONS)

    def on_device(
        self,
        logits: torch.Tensor,
        rows: Sequence[int],
        sources: Sequence[int] | None = None,
        workspace: SamplingWorkspace | None = None,
        **flags: bool,
    ) -> tuple[list[int], list[int]]:
        """(tokens, errors) that the kernels choose for these slots, UNTOUCHED where they write nothing."""
        num_rows = len(rows)
        tokens = torch.full((num_rows,), UNTOUCHED, dtype=torch.int64, device=self.device)
        errors = torch.full((num_rows,), UNTOUCHED, dtype=torch.int32, device=self.device)
        with np.errstate(all="ignore"):
            sample(
                logits.to(self.device), self.ints(rows), self.ints(range(num_rows) if sources is None else sources),
                self.state, workspace or SamplingWorkspace.empty(num_rows, self.vocab, self.device), tokens, errors,
                **flags,
            )  # fmt: skip
        return tokens.tolist(), errors.tolist()

    def ints(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=self.device)


def world(vocab: int, sequences: Sequence[AdmittedSequence], device: torch.device) -> World:
    """Admit the sequences to as many slots and one more, which stays empty."""
    num_slots = len(sequences) + 1
    limits = Limits(num_slots, num_slots, 64, MAX_MODEL_LEN, vocab, vocab, 64, 4, 0, 2)
    slots = Slots(limits)
    slots.apply(StepPlan(1, admitted=list(sequences)))
    state = SamplingState.empty(num_slots, vocab, MAX_MODEL_LEN, 512, device)
    ends = {"bias": 3, "word": 5, "stop": 7}
    for one in sequences:
        _put(state, one, ends, vocab)
    restart_counts(
        state.counts, torch.tensor([one.slot for one in sequences], dtype=torch.int32, device=device), state.records,
        state.token_ids, state.num_tokens, state.num_prompt_tokens, max(len(one.token_ids) for one in sequences),
    )  # fmt: skip
    return World(slots, state, device)


def _put(state: SamplingState, one: AdmittedSequence, ends: dict[str, int], vocab: int) -> None:
    slot, sampling, lists = one.slot, one.sampling, state.lists
    record = pack_record(sampling, ends["bias"], ends["word"], ends["stop"])
    state.records[slot] = torch.from_numpy(record.view(np.int32))
    state.token_ids[slot, : len(one.token_ids)] = torch.tensor(one.token_ids, dtype=torch.int32)
    state.num_tokens[slot], state.num_prompt_tokens[slot] = len(one.token_ids), one.num_prompt_tokens
    if len(sampling.allowed_token_ids):
        state.allowed_bits[slot] = torch.from_numpy(pack_bits(sampling.allowed_token_ids, vocab))
    words = np.concatenate(sampling.bad_words) if sampling.bad_words else np.zeros(0, np.int64)
    for name, column, values in (
        ("bias", lists.bias_ids, sampling.bias_token_ids),
        ("bias", lists.biases, sampling.biases),
        ("word", lists.word_ids, words),
        ("word", lists.word_following, following(sampling.bad_words)),
        ("stop", lists.stop_ids, sampling.stop_token_ids),
    ):
        column[ends[name] : ends[name] + len(values)] = torch.from_numpy(np.array(values)).to(column.dtype)
    ends["bias"] += len(sampling.bias_token_ids)
    ends["word"] += len(words)
    ends["stop"] += len(sampling.stop_token_ids)
