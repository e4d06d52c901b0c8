"""What requests return, to the bit, whatever they run beside: random loads in random settings against each one alone.

Tokens, logprobs of output and prompt, ends; over batches, chunk borders, sizes of blocks and where they lie, prefix
hits, preemption by recompute and by swap, plans in flight, sessions that break, and drafts of every source. Some loads
are the same in every run, some are new in each.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from cadenza_common.plan.plan import StepPlan
from cadenza_common.plan.result import StepResult
from executor_svc.config import ExecutorConfig
from executor_svc.models.heads.draft import load_draft
from executor_svc.models.heads.eagle3_loading import load_eagle3
from executor_svc.startup.speculation import Draft
from tests.checkpoints import blend, make_llama
from tests.executor_svc.driver import Model
from tests.helpers.core.core_chats import Outcome, Setting
from tests.helpers.core.core_model import Rig
from tests.helpers.core.random_loads import draw_load, draw_setting
from tests.helpers.fresh import fresh_seed
from tests.helpers.marks import short_and_long
from tests.helpers.models.eagle3_heads import HeadShape, make_head

NUM_CHATS = 12
NUM_MORE_ROWS = 30
"""Of logits, for drafts."""
ALONE = Setting(
    num_blocks=100, max_num_batched_tokens=512, depth=1, arrivals="alone", options={"enable_prefix_caching": False}
)


DTYPES = "float32", "bfloat16"
SOURCES = ("ngram", "suffix", "draft", "eagle3", "auto")


@pytest.fixture(scope="module", params=DTYPES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(make_llama(tmp_path_factory.mktemp("model")), dtype=request.param)


@pytest.fixture(scope="module")
def drafts(model: Model, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Draft | None]:
    """By source: its model, which is almost the target itself, or its head, of random weights."""
    target = Path(str(model.options["model"]))
    small = make_llama(tmp_path_factory.mktemp("draft"), seed=1)
    blend(small, target, share=0.06)
    config = ExecutorConfig(**model.options)
    head = make_head(tmp_path_factory.mktemp("head"), HeadShape("new"))
    almost = load_draft(str(small), config, model.device, model.loaded)
    eagle3 = load_eagle3(str(head), config, model.device, model.loaded)
    return {"ngram": None, "suffix": None, "draft": almost, "eagle3": eagle3, "auto": almost}


def check(model: Model, drafts: dict[str, Draft | None], seed: int, num_settings: int) -> Counter[str]:
    """Draw a load, then run it in settings drawn for it; returns what happened in them."""
    rng = random.Random(seed)
    load = draw_load(rng, model.loaded.geometry.vocab_size, NUM_CHATS)
    alone = Rig(model, ALONE)
    expected: Outcome = alone.run(load)
    assert not +alone.happened
    happened: Counter[str] = Counter()
    for number in range(num_settings):
        setting, source = draw_setting(rng), None
        if setting.max_drafts:
            source = SOURCES[(seed + number) % len(SOURCES)]
            num_rows = setting.max_num_seqs + NUM_MORE_ROWS
            num_tokens = setting.max_num_batched_tokens + NUM_MORE_ROWS
            setting = replace(setting, max_num_seqs=num_rows, max_num_batched_tokens=num_tokens)
        rig = Rig(model, setting, draft_model=drafts.get(source or ""), speculative=source)
        found = rig.run(load)
        for key, outputs in expected.items():
            assert found[key] == outputs, (seed, key, setting, source)
        happened += rig.happened
        counts = rig.core.lanes[0].counts.drafts
        happened[f"accepted of {source}"] += sum(counts.accepted)
        happened[f"refused of {source}"] += sum(counts.drafted) - sum(counts.accepted)
        happened["plans ahead"] += setting.depth > 1
    return happened


@pytest.mark.parametrize("model", short_and_long(DTYPES, ["float32"]), indirect=True, scope="module")
def test_the_same_loads_in_every_run(model: Model, drafts: dict[str, Draft | None]) -> None:
    happened = sum((check(model, drafts, seed, num_settings=2) for seed in range(8)), Counter[str]())
    for what in ("hits", "host hits", "swap", "recompute", "plans ahead"):
        assert sum(count for name, count in happened.items() if name.startswith(what)) > 2, what
    for source in SOURCES:
        assert happened[f"accepted of {source}"] + happened[f"refused of {source}"] > 0, source
    assert min(happened["accepted of suffix"], happened["accepted of draft"], happened["accepted of eagle3"]) > 2


@pytest.mark.sampled(1)
@pytest.mark.parametrize("repeat", short_and_long(range(2), [0]))
def test_loads_that_no_run_had_before(model: Model, drafts: dict[str, Draft | None], repeat: int) -> None:
    """The seed is printed, with what repeats it."""
    check(model, drafts, fresh_seed(), num_settings=3)


@pytest.mark.sampled(1)
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
