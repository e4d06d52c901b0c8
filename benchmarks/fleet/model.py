"""What the coarse simulation knows of an executor: its step costs and its limits, as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cadenza_loadtest.requests import Floats, Ints
from cadenza_simulator.executor_profiles import ExecutorProfile
from executor_svc.simulated.costs import StepCosts
from scheduler_svc.plan_loop.pacing import CONFIDENCE, MARGIN_S


@dataclass(frozen=True, slots=True)
class ExecutorModel:
    """One executor; all of a fleet are alike."""

    costs: StepCosts
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    pool_tokens: int
    """Tokens of the KV pool."""
    block_size: int
    request_s: float
    """From a client's sending to the scheduler's queue."""
    transit_s: float
    """Of a plan to the executor."""
    reply_s: float
    """From the end of a step on the executor until the client has its tokens."""
    plan_s: float
    """The scheduler's work for a step: those of one scheduler's executors are done one after the other."""

    def step_s(self, tokens: Ints, context_tokens: Ints, kv_tokens: Ints, samples: Ints) -> Floats:
        """[n] seconds of steps, by the quantities of `executor_svc.simulated.costs.StepWork`, [n] each."""
        costs = self.costs
        us = costs.step_us + costs.token_us * np.maximum(0.0, tokens - costs.hidden_tokens)
        us += costs.context_token_us * context_tokens + costs.kv_token_us * kv_tokens + costs.sample_us * samples
        seconds: Floats = us / 1e6
        return seconds

    def lead_s(self, step_s: Floats) -> Floats:
        """[n] how long before the end of steps that take `step_s` the next plan is made: what comes later misses it.

        With two plans in flight, as `scheduler_svc.plan_loop.pacing` has it.
        """
        early: Floats = step_s - self.transit_s - np.maximum(0.0, CONFIDENCE * step_s - MARGIN_S)
        return np.maximum(early, self.plan_s + self.transit_s)

    @property
    def position_s(self) -> float:
        """Seconds for each position that a decoding sequence reads."""
        return (self.costs.context_token_us + self.costs.kv_token_us) / 1e6

    def holds(self, prompt: Any, output: Any) -> Any:
        """Whether requests of these lengths fit an executor that serves nothing else."""
        return (prompt + output <= self.max_model_len) & (prompt + output + self.block_size <= self.pool_tokens)


def model_of(profile: ExecutorProfile) -> ExecutorModel:
    """The coarse model of a profile."""
    limits, overheads = profile.limits, profile.overheads
    return ExecutorModel(
        costs=profile.costs,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
        pool_tokens=limits.pool_size * limits.block_size,
        block_size=limits.block_size,
        request_s=overheads.request_us / 1e6,
        transit_s=overheads.transit_us / 1e6,
        reply_s=(overheads.transit_us + overheads.reply_us) / 1e6,
        plan_s=overheads.plan_us / 1e6,
    )
