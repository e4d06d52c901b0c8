"""Plans of executors with one KV group, byte for byte as recorded before there were several."""

from __future__ import annotations

import hashlib
import random
from collections import deque
from contextlib import suppress

import pytest

from cadenza_common.plan.plan import StepPlan
from cadenza_common.plan_wire.writing import plan_to_wire
from scheduler_svc.core.errors import RequestRejectedError
from scheduler_svc.core.policies.batching import ContinuousBatching, StaticBatching
from scheduler_svc.core.policies.policies import Policies
from scheduler_svc.core.queues.orders import FairOrder, FcfsOrder, PriorityOrder
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.types import ExecutorSpec, SessionEnd
from tests.helpers.core.core_executor import CoreExecutor
from tests.helpers.core.known import VOCAB_SIZE
from tests.helpers.core.random_loads import draw_load

_CUTS_EVERY = 37
RECORDED = {
    0: (105, "c10877ec69675e5e"),
    3: (67, "1783edf7264bdf5e"),
    5: (68, "22d1abeb84d44ad9"),
    7: (127, "4172ac1fef81c78d"),
}
"""By seed: the number of plans, and a digest of their bytes."""


@pytest.mark.slow
@pytest.mark.parametrize("seed", RECORDED)
def test_plans_are_as_recorded(seed: int) -> None:
    """Samples, beams, drafts, swaps, cached prefixes and sessions that end, at random."""
    rng = random.Random(seed)
    spec, policies = _draw_spec(rng), _draw_policies(rng)
    core, executor = Scheduler(policies), CoreExecutor(spec, VOCAB_SIZE)
    core.add_executor(0, spec)
    chats, depth = draw_load(rng, VOCAB_SIZE, 14), rng.choice([1, 2, 3])
    plans, digest, num_plans, step = deque[StepPlan](), hashlib.sha256(), 0, 0
    while step == 0 or core.groups or chats or plans:
        now = 0.01 * (step + 1)
        if chats and rng.random() < 0.3:
            with suppress(RequestRejectedError):
                core.add_request(chats.pop().spec, now)
        if not chats:
            core.drain(True)
        while len(plans) < depth and (plan := core.plan_step(0, now)) is not None:
            wire = plan_to_wire(plan, 1).SerializeToString(deterministic=True)
            digest.update(len(wire).to_bytes(4, "little") + wire)
            num_plans += 1
            plans.append(plan)
        core.take_outputs()
        step += 1
        if step % _CUTS_EVERY == 0:
            plans.clear()
            executor.clear()
            core.executor_lost(0, now, SessionEnd())
            core.session_opened(0, same_incarnation=True, keeps_kv=True)
        elif plans:
            core.apply_result(0, executor.run(plans.popleft()), now)
    assert (num_plans, digest.hexdigest()[:16]) == RECORDED[seed]


def _draw_spec(rng: random.Random) -> ExecutorSpec:
    size = rng.choice([4, 8, 16])
    return ExecutorSpec(
        block_size=size,
        num_blocks=rng.choice([120, 240, 500]) // size,
        num_slots=12,
        max_num_seqs=8,
        max_num_batched_tokens=rng.choice([16, 40, 80]),
        max_model_len=100,
        watermark=0.01,
        num_host_blocks=rng.choice([0, 20, 60]),
        max_drafts=rng.choice([0, 3]),
    )


def _draw_policies(rng: random.Random) -> Policies:
    return Policies(
        order=rng.choice([FcfsOrder, PriorityOrder, FairOrder])(),
        batching=rng.choice([ContinuousBatching(), ContinuousBatching(), StaticBatching(3)]),
        prefix_caching=rng.random() < 0.7,
        preemption=rng.choice(["swap", "recompute", "auto"]),
    )
