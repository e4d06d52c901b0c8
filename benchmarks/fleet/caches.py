"""What a coarse executor is: its step costs and limits as plain numbers, and what of a prompt its cache has.

A prompt is cached by session and by shared beginning, not by block. A session's KV stays where it was computed last,
until as many tokens have come into that cache as it has room for: an LRU list by what was computed since, in place of a
list of blocks. A beginning that many sessions share (a system prompt) has an entry for each place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cadenza_loadtest.requests import Floats, Ints
from cadenza_simulator.executor_profiles import ExecutorProfile
from executor_svc.simulated.costs import StepCosts
from scheduler_svc.plan_loop.pacing import CONFIDENCE, MARGIN_S

NOWHERE = -1


class PrefixCaches:
    """Caches of `num_places`, executors or schedulers, over the sessions of a source of traffic."""

    def __init__(self, num_places: int, num_sessions: int, num_groups: int) -> None:
        self._place = np.full(max(1, num_sessions), NOWHERE, np.int32)
        self._tokens = np.zeros(max(1, num_sessions), np.int32)
        self._stamp = np.zeros(max(1, num_sessions))
        self._inserted = np.zeros(num_places)
        """Tokens that have come into each cache."""
        self._group_stamp = np.full((num_places, max(1, num_groups)), -np.inf)

    def home(self, sessions: Ints, room: Ints) -> tuple[Ints, Ints]:
        """Of each session [n] the place that has it, and how many of its tokens; NOWHERE and 0 if none has.

        `room` [places]: tokens of each cache.
        """
        place = self._place[sessions].astype(np.int64)
        age = self._inserted[place] - self._stamp[sessions]
        alive = (place >= 0) & (sessions >= 0) & (age <= room[place])
        return np.where(alive, place, NOWHERE), np.where(alive, self._tokens[sessions], 0)

    def has_group(self, groups: Ints, places: Ints, room: Ints) -> npt.NDArray[np.bool_]:
        """Whether a place [n] has the shared beginning [n], -1 for none."""
        age = self._inserted[places] - self._group_stamp[places, groups]
        has: npt.NDArray[np.bool_] = (groups >= 0) & (age <= room[places])
        return has

    def touch(self, sessions: Ints, groups: Ints, places: Ints, tokens: Ints, new_tokens: Ints) -> None:
        """These places [n] have the first `tokens` [n] of sessions now, of which `new_tokens` were computed."""
        known, shared = sessions >= 0, groups >= 0
        self._inserted += np.bincount(places, new_tokens, minlength=len(self._inserted))
        where = sessions[known]
        self._place[where] = places[known]
        self._tokens[where] = tokens[known]
        self._stamp[where] = self._inserted[places[known]]
        self._group_stamp[places[shared], groups[shared]] = self._inserted[places[shared]]

    def forget_sessions(self, sessions: Ints) -> None:
        """The numbers of these sessions are used for others."""
        self._place[sessions] = NOWHERE

    def forget_place(self, place: int) -> None:
        """A place has lost all that it had."""
        self._place[self._place == place] = NOWHERE
        self._group_stamp[place] = -np.inf


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
