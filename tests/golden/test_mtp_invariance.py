"""As test_invariance.py: with drafts of the head in a checkpoint, most of them right, requests get the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from executor_svc.config import ExecutorConfig
from executor_svc.models.heads.mtp_loading import load_mtp
from tests.executor_svc.driver import Model
from tests.golden.invariance import ALONE, MODEL_DRAFTS, SETTINGS, Golden, load, run
from tests.golden.test_state_invariance import setting_of
from tests.golden.test_window_invariance import check
from tests.helpers.core.core_model import Rig
from tests.helpers.marks import short_and_long
from tests.helpers.models.mtp_heads import make_mimo
from tests.helpers.models.qwen_mtp import make_qwen_mtp


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def predicting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Golden:
    """A model with a head in its checkpoint whose drafts are mostly right."""
    folder = make_mimo(tmp_path_factory.mktemp("mimo"), predicts=True, dtype=getattr(torch, request.param))
    model = Model(folder, dtype=request.param)
    return Golden(folder, model, run(model, ALONE)[0], request.param)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("predicting", "name"),
    short_and_long(
        [*(("float32", name) for name in MODEL_DRAFTS), ("bfloat16", "drafts, swap")],
        [("float32", "drafts, recompute"), ("float32", "drafts, kept sessions"), ("bfloat16", "drafts, swap")],
    ),
    indirect=["predicting"],
    scope="module",
)
def test_same_bits_with_the_head_of_the_checkpoint(predicting: Golden, name: str) -> None:
    model = predicting.model
    head = load_mtp(ExecutorConfig(**{**model.options, "speculative": "mtp"}), model.device, model.loaded)
    rig = Rig(model, SETTINGS[name], draft_model=head)
    found = rig.run(load())
    for key, alone in predicting.expected.items():
        assert found[key] == alone, key
    counts = rig.core.lanes[0].counts.drafts
    assert 0.3 * sum(counts.drafted) < sum(counts.accepted) < sum(counts.drafted)


@pytest.mark.parametrize(
    ("family", "name"),
    short_and_long(
        [
            *(("qwen3_5_moe_text", name) for name in MODEL_DRAFTS),
            ("qwen3_5_delta", "drafts, swap"),
            ("qwen3_next_delta", "drafts, kept sessions"),
        ],
        [("qwen3_5_moe_text", "drafts, recompute")],
    ),
)
def test_same_bits_with_the_head_of_a_hybrid(tmp_path: Path, family: str, name: str) -> None:
    """Its target has states, and both have experts."""
    folder = make_qwen_mtp(tmp_path, family, predicts=True, **({"mlp_only_layers": []} if "next" in family else {}))
    model = Model(folder, dtype="float32")
    head = load_mtp(ExecutorConfig(**{**model.options, "speculative": "mtp"}), model.device, model.loaded)
    expected, happened = run(model, ALONE)
    assert not happened
    rig = Rig(model, setting_of(name), draft_model=head)
    check(expected, rig.run(load()))
    counts = rig.core.lanes[0].counts.drafts
    assert 0.3 * sum(counts.drafted) < sum(counts.accepted) < sum(counts.drafted)


@pytest.mark.slow
@pytest.mark.parametrize("name", short_and_long(["drafts", "drafts, swap", "drafts, kept sessions"], ["drafts, swap"]))
def test_same_bits_with_the_head_of_a_model_with_windows(tmp_path: Path, name: str) -> None:
    """The head's layer is in the group without a window, and its drafts are as good as in one group."""
    windows = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}
    folder = make_mimo(tmp_path / "mimo", predicts=True, **windows)
    expected, shares = run(Model(folder, disable_hybrid_kv_cache_manager=True), ALONE)[0], []
    for alike in (True, False):
        model = Model(folder, disable_hybrid_kv_cache_manager=alike)
        head = load_mtp(ExecutorConfig(**{**model.options, "speculative": "mtp"}), model.device, model.loaded)
        rig = Rig(model, SETTINGS[name], draft_model=head)
        assert len(rig.pools.kv_groups) == (0 if alike else 2)
        found = rig.run(load())
        for key, one in expected.items():
            assert found[key] == one, key
        counts = rig.core.lanes[0].counts.drafts
        shares.append(sum(counts.accepted) / sum(counts.drafted))
        assert SETTINGS[name].happens - {"swap beams"} <= (+rig.happened).keys(), "beams have room in more pages"
    assert shares[1] > shares[0] - 0.03 > 0.3, shares
