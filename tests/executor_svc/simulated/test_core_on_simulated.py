"""The core's plans, carried out by the simulated executor: preempted, chunked and pipelined, tokens are as known."""

from __future__ import annotations

import random

import pytest

from executor_svc.simulated.expected_tokens import expected_tokens
from scheduler_svc.core.types import FinishDetail, RequestSpec
from tests.helpers.core.core_bench import Bench
from tests.helpers.core.core_executor import CoreExecutor
from tests.helpers.core.core_sampling import core_sampling, for_executor

VOCAB = 60


def specs(count: int, seed: int) -> list[RequestSpec]:
    rng = random.Random(seed)
    return [
        RequestSpec(
            request_id=f"r{index}",
            prompt_token_ids=tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))),
            sampling=core_sampling(
                temperature=rng.choice([0.0, 1.0]),
                seed=rng.randrange(2**64),
                stop_token_ids=tuple(rng.sample(range(VOCAB), rng.randint(0, 2))),
                min_tokens=rng.randint(0, 3),
                bad_words=((rng.randrange(VOCAB),), (rng.randrange(VOCAB), rng.randrange(VOCAB))),
            ),
            max_tokens=rng.randint(1, 20),
        )
        for index in range(count)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_tokens_are_as_known_in_advance(depth: int) -> None:
    bench = Bench(num_blocks=14, max_num_batched_tokens=16)
    bench.executor = CoreExecutor(bench.spec, VOCAB)
    wanted = specs(60, seed=depth)
    for spec in wanted:
        bench.core.add_request(spec, 0.0)
        bench.tokens[spec.request_id] = []
    bench.run(depth)
    assert bench.core.num_preemptions > 0
    for spec in wanted:
        tokens = expected_tokens(spec.prompt_token_ids, for_executor(spec.sampling), spec.max_tokens or 0, VOCAB)
        assert bench.tokens[spec.request_id] == tokens
        stopped = bench.details[spec.request_id] is FinishDetail.STOP_TOKEN
        assert stopped == (tokens[-1] in spec.sampling.stop_token_ids and len(tokens) >= spec.sampling.min_tokens)
    assert not bench.executor.slots
