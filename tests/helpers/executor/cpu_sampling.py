"""The sampler as the CPU runs it: with the functions of its kernels."""

from __future__ import annotations

from torch import Tensor

from executor_svc.batch.scheduled import Scheduled
from executor_svc.batch.slots import Slots
from executor_svc.batch.step_result import RowCandidates, RowLogprobs, SampledTokens
from executor_svc.cpu.kernels.cpu_kernels import CpuKernels
from executor_svc.plan.arrays import IntArray
from executor_svc.sampling import candidates, logprobs, sample_step, sampler
from executor_svc.sampling.candidates import CandidateColumns
from executor_svc.sampling.columns import SamplingColumns

FUNCTIONS = CpuKernels(2).functions


def sample(logits: Tensor, columns: SamplingColumns) -> SampledTokens:
    return sampler.sample(logits, columns, FUNCTIONS)


def best_candidates(logits: Tensor, columns: CandidateColumns) -> RowCandidates:
    return candidates.best_candidates(logits, columns, FUNCTIONS)


def row_logprobs(logits: Tensor, tokens: IntArray, rows: IntArray, num_top: IntArray) -> RowLogprobs:
    return logprobs.row_logprobs(logits, tokens, rows, num_top, FUNCTIONS)


def choose(logits: Tensor, best: IntArray, slots: Slots, scheduled: Scheduled) -> SampledTokens:
    return sample_step.choose(logits, best, slots, scheduled, FUNCTIONS)
