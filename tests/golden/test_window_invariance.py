"""Requests to a model whose layers with a window give memory back: to the bit what they get where all keep everything.

The pages that nobody holds are NaN in each step: what was given back is never read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.checkpoints import make_checkpoint
from tests.executor_svc.driver import NUM_THREADS, Model
from tests.golden.invariance import ALONE, SETTINGS, Golden, kept_outcome, run
from tests.helpers.core.core_model import Outcome, Setting
from tests.helpers.marks import short_and_long

FAMILIES = {
    "gemma3_text": 10,
    "mistral": 10,
}
"""Blocks of pools where preemptions happen. The first has four pages of each block, the second no layer without a
window."""


@pytest.fixture(scope="module", params=FAMILIES)
def golden(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Golden]:
    """Expected: what requests get alone in one KV group."""
    family, folder = request.param, tmp_path_factory.mktemp("model")
    before = torch.get_num_threads()
    torch.set_num_threads(NUM_THREADS)
    folder = make_checkpoint(folder, family)

    def alone() -> Outcome:
        return run(Model(folder, disable_hybrid_kv_cache_manager=True), ALONE)[0]

    yield Golden(folder, Model(folder), kept_outcome(folder / "alone", (family, "one group"), alone), family)
    torch.set_num_threads(before)


def check(golden: Golden, setting: Setting) -> None:
    found, happened = run(golden.model, setting, golden.expected)
    for key, alone in golden.expected.items():
        assert found[key] == alone, key
    print(happened)
    assert setting.happens <= happened.keys()


NAMES = (
    "all at once", "small chunks, few at once", "odd chunks, blocks of 32", "static", "recompute",
    "swap", "auto", "broken sessions", "kept sessions, swap", "aborts", "drafts", "drafts, swap", "drafts, small chunks",
)


@pytest.mark.parametrize(("golden", "name"), [(f, n) for f in FAMILIES for n in NAMES], indirect=["golden"], scope="module")
def test_same_bits(golden: Golden, name: str) -> None:
    setting = SETTINGS[name]
    if setting.num_blocks < 100:
        setting = replace(setting, num_blocks=FAMILIES[golden.dtype])
    check(golden, replace(setting, happens=setting.happens - {"hits"}))
