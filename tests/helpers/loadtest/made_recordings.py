"""Recordings whose steps took what given costs say, with noise if wanted."""

from __future__ import annotations

import numpy as np

from cadenza_simulator.executor_profiles import ProfileLimits
from cadenza_simulator.recordings import RecordedRun, RecordedSteps
from executor_svc.simulated.costs import StepCosts, StepWork

COSTS = StepCosts(
    step_us=800, token_us=120, context_token_us=0.05, kv_token_us=0.4, sample_us=5, moved_block_us=25, hidden_tokens=0
)


def recording(
    costs: StepCosts,
    seed: int = 0,
    *,
    count: int = 2000,
    noise: float = 0.0,
    prefills: float = 0.15,
    moves: float = 0.1,
) -> RecordedRun:
    """Steps of 1 to 60 decoding sequences, some with a chunk of a prompt, some with moved blocks; log-normal noise."""
    rng = np.random.default_rng(seed)
    decodes = rng.integers(1, 60, count)
    contexts = decodes * rng.integers(50, 800, count)
    chunk = np.where(rng.random(count) < prefills, rng.integers(16, 400, count), 0)
    before = np.where(chunk > 0, rng.integers(0, 600, count), 0)
    moved = np.where(rng.random(count) < moves, rng.integers(1, 50, count), 0)
    tokens = decodes + chunk
    context_tokens = contexts + decodes + chunk * before + chunk * (chunk + 1) // 2
    kv_tokens = contexts + decodes + chunk + before
    samples = decodes + (chunk > 0)
    works = [StepWork(*map(int, row)) for row in zip(tokens, context_tokens, samples, moved, kv_tokens, strict=True)]
    jitter = np.exp(rng.normal(-(noise**2) / 2, noise, count))  # of mean 1
    forward = np.array([costs.forward_ns(work) for work in works]) * jitter
    sample = np.array([costs.sample_ns(work) for work in works]) * jitter
    move = np.array([costs.move_ns(work) for work in works]) * jitter
    total = forward + sample + move
    planned = np.cumsum(total / 1e9 + 0.001)
    steps = RecordedSteps(
        planned_s=planned,
        applied_s=planned + total / 1e9 + 0.0005,
        late_s=np.full(count, 0.0002),
        tokens=tokens.astype(float),
        context_tokens=context_tokens.astype(float),
        kv_tokens=kv_tokens.astype(float),
        samples=samples.astype(float),
        moved_blocks=moved.astype(float),
        queue_ns=np.full(count, 100_000.0),
        device_ns=forward,
        sample_ns=sample,
        moves_ns=move,
        total_ns=total,
    )
    return RecordedRun(steps, ProfileLimits(), "toy", "cpu", 0)
