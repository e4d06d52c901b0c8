"""A request's tokens and logprobs, to the bit, whatever it is batched with, on the real CPU executor.

Over batch composition, order of arrival, batching policies and orders of service, chunk and block sizes, plans in
flight, preemption by recompute and by swap in pools so small that it happens, the prefix cache and its host tier, and
sessions that break; in one process, where a run repeats itself exactly. All decoding algorithms in one load; fp32 and
bf16. test_invariance_over_grpc.py runs the load through both services.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from executor_svc.config import ExecutorConfig
from executor_svc.models.heads.draft import load_draft
from executor_svc.models.heads.eagle3_loading import load_eagle3
from scheduler_svc.core.types import FinishDetail
from tests.checkpoints import blend, make_llama
from tests.golden.invariance import (
    DTYPES,
    IN_BFLOAT16,
    MODEL_DRAFTS,
    SETTINGS,
    Golden,
    golden_in,
    load,
    run,
)
from tests.helpers.core.core_chats import Setting
from tests.helpers.core.core_model import Rig
from tests.helpers.core.random_loads import draw_setting
from tests.helpers.marks import short_and_long
from tests.helpers.models.eagle3_heads import Format, HeadShape, make_head

SHORT = (
    "other order, three plans", "small chunks, few at once", "long prompts in pieces, blocks of 64",
    "static, few blocks", "dynamic", "newcomers held back", "recompute, no cache, four plans",
    "swap, no cache, one plan", "swap, a small host pool", "auto", "auto, more blocks", "the urgent first",
    "the short first", "cached in the host pool", "kept sessions, recompute, small chunks", "aborts",
    "drafts, few rows of logits",
)  # fmt: skip
"""Each policy, order, arrival, depth, cause of a preemption and kind of block move, once at least."""


@pytest.fixture(scope="module", params=DTYPES)
def golden(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Golden]:
    yield from golden_in(request.param, tmp_path_factory.mktemp("model"))


def check(golden: Golden, setting: Setting) -> None:
    found, happened = run(golden.model, setting, golden.expected)
    for key, alone in golden.expected.items():
        assert found[key] == alone, key
    assert setting.happens <= happened.keys()


def test_the_load_has_something_of_everything(golden: Golden) -> None:
    alone = list(golden.expected.values())
    assert len({tuple(one.token_ids) for one in alone}) == len(alone), "the outputs differ"
    assert {one.finish.detail for one in alone if one.finish} == {
        FinishDetail.EOS, FinishDetail.STOP_TOKEN, FinishDetail.MAX_TOKENS
    }  # fmt: skip
    assert sum(1 for one in alone if one.logprobs) > 15
    assert sum(1 for one in alone if one.prompt_logprobs) == 3
    assert sum(1 for one in alone if one.cumulative_logprob is not None) == 11


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("golden", "name"),
    short_and_long(
        [*(("float32", name) for name in SETTINGS), *(("bfloat16", name) for name in IN_BFLOAT16)],
        [
            *(("float32", name) for name in SHORT),
            *(("bfloat16", name) for name in ("small chunks, few at once", "swap", "drafts, swap")),
        ],
    ),
    indirect=["golden"],
    scope="module",  # or what each request gets alone would be computed again for each of them
)
def test_same_request_same_bits(golden: Golden, name: str) -> None:
    check(golden, SETTINGS[name])


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("golden", "name", "share"),
    short_and_long(
        [(dtype, name, share) for dtype in DTYPES for name in MODEL_DRAFTS for share in (0.06, 0.0)],
        [
            *(("float32", name, 0.06) for name in ("drafts, recompute", "drafts, broken sessions")),
            ("float32", "drafts, swap", 0.0),
            ("float32", "drafts, kept sessions", 0.0),
            ("bfloat16", "drafts, swap", 0.06),
        ],
    ),
    indirect=["golden"],
    scope="module",
)
def test_same_bits_with_a_draft_model(golden: Golden, name: str, share: float, tmp_path: Path) -> None:
    """Of other weights, drafts are accepted and refused. With the target's own weights and noise all are accepted
    but those behind a stop token, or what the model has read of its KV was wrong."""
    folder = make_llama(tmp_path, seed=1, dtype=getattr(torch, golden.dtype))
    blend(folder, golden.folder, share)
    config = ExecutorConfig(**{**golden.model.options, "speculative": "draft", "speculative_model": str(folder)})
    draft = load_draft(str(folder), config, golden.model.device, golden.model.loaded)
    rig = Rig(golden.model, SETTINGS[name], draft_model=draft)
    found = rig.run(load())
    for key, alone in golden.expected.items():
        assert found[key] == alone, key
    counts = rig.core.lanes[0].counts.drafts
    accepted = sum(counts.accepted) / sum(counts.drafted)
    assert accepted < 1 or not share
    assert accepted > (0.2 if share else 0.95), counts


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("golden", "name", "layout"),
    short_and_long(
        [(dtype, name, layout) for dtype in DTYPES for name in MODEL_DRAFTS for layout in ("old", "new")],
        [
            ("float32", "drafts, recompute", "new"),
            ("float32", "drafts, kept sessions", "old"),
            ("bfloat16", "drafts, swap", "old"),
        ],
    ),
    indirect=["golden"],
    scope="module",
)
def test_same_bits_with_a_head(golden: Golden, name: str, layout: Format, tmp_path: Path) -> None:
    """Its weights are random: drafts are right where few tokens are allowed, by noise that it shares."""
    folder = make_head(tmp_path, HeadShape(layout), dtype=getattr(torch, golden.dtype))
    config = ExecutorConfig(**{**golden.model.options, "speculative": "eagle3", "speculative_model": str(folder)})
    head = load_eagle3(str(folder), config, golden.model.device, golden.model.loaded)
    rig = Rig(golden.model, SETTINGS[name], draft_model=head)
    found = rig.run(load())
    for key, alone in golden.expected.items():
        assert found[key] == alone, key
    counts = rig.core.lanes[0].counts.drafts
    assert 0 < sum(counts.accepted) < sum(counts.drafted)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("golden", "seed"),
    short_and_long([(dtype, seed) for dtype in DTYPES for seed in range(2)], [("float32", 0), ("bfloat16", 1)]),
    indirect=["golden"],
    scope="module",
)
def test_everything_at_once(golden: Golden, seed: int) -> None:
    check(golden, draw_setting(random.Random(seed)))
