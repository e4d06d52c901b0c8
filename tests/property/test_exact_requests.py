"""What requests return, to the bit, whatever they run beside: random loads in random settings against each one alone.

Tokens, logprobs of output and prompt, ends; over batches, chunk borders, sizes of blocks and where they lie, prefix
hits, preemption by recompute and by swap, plans in flight, and sessions that break. Some loads are the same in every
run, some are new in each.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest

from executor_svc.plan.plan import StepPlan, StepResult
from tests.checkpoints import make_llama
from tests.executor_svc.driver import Model
from tests.helpers.core_model import Outcome, Rig, Setting
from tests.helpers.fresh import fresh_seed
from tests.helpers.random_loads import draw_load, draw_setting

NUM_CHATS = 12
ALONE = Setting(
    num_blocks=100, max_num_batched_tokens=512, depth=1, arrivals="alone", options={"enable_prefix_caching": False}
)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(make_llama(tmp_path_factory.mktemp("model")), dtype=request.param)


def check(model: Model, seed: int, num_settings: int) -> Counter[str]:
    """Draw a load, then run it in settings drawn for it; returns what happened in them."""
    rng = random.Random(seed)
    load = draw_load(rng, model.loaded.geometry.vocab_size, NUM_CHATS)
    alone = Rig(model, ALONE)
    expected: Outcome = alone.run(load)
    assert not +alone.happened
    happened: Counter[str] = Counter()
    for _ in range(num_settings):
        setting = draw_setting(rng)
        rig = Rig(model, setting)
        found = rig.run(load)
        for key, outputs in expected.items():
            assert found[key] == outputs, (seed, key, setting)
        happened += rig.happened
        happened["plans ahead"] += setting.depth > 1
    return happened


def test_the_same_loads_in_every_run(model: Model) -> None:
    happened = sum((check(model, seed, num_settings=3) for seed in range(8)), Counter[str]())
    for what in ("hits", "host hits", "swap", "recompute", "plans ahead"):
        assert sum(count for name, count in happened.items() if name.startswith(what)) > 2, what


@pytest.mark.parametrize("repeat", range(2))
def test_loads_that_no_run_had_before(model: Model, repeat: int) -> None:
    """The seed is printed, with what repeats it."""
    check(model, fresh_seed(), num_settings=3)


def test_the_comparison_sees_a_small_difference(model: Model) -> None:
    """Let what is cached change a little after a step: the outputs must differ, or these tests prove nothing."""
    load = draw_load(random.Random(0), model.loaded.geometry.vocab_size, NUM_CHATS)
    expected = Rig(model, ALONE).run(load)
    rig = Rig(model, ALONE)
    execute, steps = rig.executor.execute, itertools.count()

    def disturbed(plan: StepPlan, received_ns: int) -> StepResult:
        result = execute(plan, received_ns)
        if next(steps) == 2:
            for layer in rig.pools.layers:
                layer.mul_(1 + 2**-7)
        return result

    rig.executor.execute = disturbed  # type: ignore[method-assign]
    assert rig.run(load) != expected
