"""Requests to a model whose layers with a window give memory back: to the bit what they get where all keep everything.

The pages that nobody holds are NaN in each step: what was given back is never read.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from executor_svc.config import ExecutorConfig
from executor_svc.models.adapters.places import AdapterSizes
from executor_svc.models.heads.draft import load_draft
from executor_svc.models.heads.eagle3_loading import load_eagle3
from tests.checkpoints import blend, make_checkpoint
from tests.executor_svc.driver import NUM_THREADS, Model
from tests.golden.invariance import ALONE, SETTINGS, Golden, kept_outcome, load, run
from tests.golden.test_adapter_invariance import LINEARS
from tests.helpers.core.core_chats import Outcome, Setting
from tests.helpers.core.core_model import Rig
from tests.helpers.executor.rank_threads import RankThreads
from tests.helpers.marks import short_and_long
from tests.helpers.models.eagle3_heads import HeadShape, make_head
from tests.helpers.models.peft_adapters import save_peft_adapter

ONE_GROUP: dict[str, Any] = {"disable_hybrid_kv_cache_manager": True}
NUM_BLOCKS = {"gemma3_text": 11, "mistral": 14, "gpt_oss": 16}
"""Of small pools, where preemptions happen. The first has a page for the full layer and three for the others; the
second has no layer without a window; the third has a page for each."""
NAMES = (
    "all at once", "small chunks, few at once", "odd chunks, blocks of 32", "static", "recompute", "swap", "auto",
    "broken sessions", "kept sessions, swap", "aborts", "drafts", "drafts, swap", "drafts, small chunks",
    "drafts, kept sessions",
)  # fmt: skip
SHORT = (
    "small chunks, few at once", "odd chunks, blocks of 32", "recompute", "broken sessions", "kept sessions, swap",
    "drafts, swap", "drafts, small chunks",
)  # fmt: skip
"""Each size of chunks and blocks, each cause of what is given back, forgotten, moved and kept; some in pairs."""


HEADED = ("drafts", "drafts, recompute", "drafts, swap", "drafts, kept sessions")


@pytest.fixture(scope="module")
def golden(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Golden]:
    """Of a family; expected: what requests get alone in one KV group."""
    before = torch.get_num_threads()
    torch.set_num_threads(NUM_THREADS)
    folder = make_checkpoint(tmp_path_factory.mktemp("model"), request.param)
    yield Golden(folder, Model(folder), alone(folder, request.param), request.param)
    torch.set_num_threads(before)


def alone(folder: Path, name: str, **options: Any) -> Outcome:
    return kept_outcome(
        folder / f"alone {name}",
        (name, "in one group"),
        lambda: run(Model(folder, **ONE_GROUP, **options), ALONE)[0],
    )


def setting_of(name: str, family: str = "gemma3_text") -> Setting:
    """What `auto` chooses depends on the sizes."""
    setting = SETTINGS[name]
    happens = setting.happens if name != "auto" else frozenset()
    return replace(setting, happens=happens, num_blocks=NUM_BLOCKS[family] if setting.num_blocks < 100 else 600)


def check(expected: Outcome, found: Outcome) -> None:
    for key, one in expected.items():
        assert found[key] == one, key


@pytest.mark.parametrize(
    ("golden", "name"),
    short_and_long(
        [(family, name) for family in ("gemma3_text", "mistral") for name in NAMES],
        [
            *(("gemma3_text", name) for name in SHORT),
            *(("mistral", name) for name in ("small chunks, few at once", "drafts, swap")),
        ],
    ),
    indirect=["golden"],
    scope="module",
)
def test_same_bits(golden: Golden, name: str) -> None:
    setting = setting_of(name, golden.dtype)
    found, happened = run(golden.model, setting, golden.expected)
    check(golden.expected, found)
    assert setting.happens <= happened.keys()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("golden", ["gemma3_text"], indirect=True, scope="module")
@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"quantization": "int8"}], ids=["bfloat16", "int8"])
def test_same_bits_in_fewer_bits(golden: Golden, options: dict[str, Any]) -> None:
    expected = alone(golden.folder, next(iter(options.values())), **options)
    check(expected, run(Model(golden.folder, **options), setting_of("drafts, swap"), expected)[0])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("golden", ["gemma3_text"], indirect=True, scope="module")
@pytest.mark.parametrize(
    ("name", "share"),
    short_and_long(
        [
            (name, share)
            for name in ("drafts, swap", "drafts, recompute", "drafts, kept sessions")
            for share in (0.06, 0)
        ],
        [("drafts, swap", 0.06), ("drafts, kept sessions", 0)],
    ),
)
def test_same_bits_with_a_draft_model(golden: Golden, name: str, share: float, tmp_path: Path) -> None:
    """Its layers, with and without windows, are in the group without a window; with the target's own weights all drafts
    are accepted but those behind a stop token."""
    folder = make_checkpoint(tmp_path, "gemma3_text", seed=1)
    blend(folder, golden.folder, share)
    config = ExecutorConfig(**{**golden.model.options, "speculative": "draft", "speculative_model": str(folder)})
    draft = load_draft(str(folder), config, golden.model.device, golden.model.loaded)
    rig = Rig(golden.model, replace(setting_of(name), num_blocks=17), draft_model=draft)
    assert len(rig.pools.draft_layers) == len(rig.pools.layers) == 4
    check(golden.expected, rig.run(load()))
    counts = rig.core.lanes[0].counts.drafts
    assert sum(counts.accepted) / sum(counts.drafted) > (0.2 if share else 0.95), counts


@pytest.mark.parametrize(
    ("golden", "name"),
    short_and_long(
        [(family, name) for family in ("gemma3_text", "gpt_oss") for name in HEADED],
        [("gemma3_text", "drafts, swap"), ("gpt_oss", "drafts, kept sessions")],
    ),
    indirect=["golden"],
    scope="module",
)
def test_same_bits_with_a_head(golden: Golden, name: str, tmp_path: Path) -> None:
    """Its layers, of which one has a window, are in the group without a window."""
    windows = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9}
    shape = HeadShape(decoder={"num_hidden_layers": 2, **windows})
    folder = make_head(tmp_path, shape)
    config = ExecutorConfig(**{**golden.model.options, "speculative": "eagle3", "speculative_model": str(folder)})
    head = load_eagle3(str(folder), config, golden.model.device, golden.model.loaded)
    setting = setting_of(name, golden.dtype)
    setting = replace(setting, num_blocks=max(20, setting.num_blocks))
    rig = Rig(golden.model, setting, draft_model=head)
    groups = {layer.group for layer in rig.pools.layout.layers[-2:]}
    assert groups == {rig.pools.layout.windows.index(0)} == {0}
    check(golden.expected, rig.run(load()))
    counts = rig.core.lanes[0].counts.drafts
    assert 0 < sum(counts.accepted) < sum(counts.drafted)
    assert setting.happens <= (+rig.happened).keys()


@pytest.mark.parametrize("golden", ["gemma3_text"], indirect=True, scope="module")
def test_same_bits_with_adapters(golden: Golden, tmp_path: Path) -> None:
    folders = {index: tmp_path / str(index) for index in (1, 2, 3)}
    for index, folder in folders.items():
        save_peft_adapter(golden.folder, folder, seed=index, r=4, lora_alpha=4, target_modules=LINEARS)
    chats = [
        replace(chat, spec=replace(chat.spec, adapter_index=random.Random(chat.spec.request_id).randrange(4)))
        for chat in load()
    ]
    one, several = (Model(golden.folder, AdapterSizes(3, 8), **options) for options in (ONE_GROUP, {}))
    loras: dict[str, Any] = {"max_loras": 2, "max_cpu_loras": 3}
    expected = Rig(one, replace(ALONE, **loras), adapters=folders).run(chats)
    check(expected, Rig(several, replace(setting_of("swap"), **loras), adapters=folders).run(chats))
    assert expected != golden.expected


@pytest.mark.parametrize("golden", ["gemma3_text"], indirect=True, scope="module")
def test_same_bits_in_two_ranks(golden: Golden) -> None:
    """Each has the same pages, of its own heads."""
    options: dict[str, Any] = {"dtype": "float32"}
    outcomes = []
    for setting, more in ((ALONE, ONE_GROUP), (setting_of("swap"), {})):
        ranks = RankThreads(golden.folder, 2, options | more)
        try:
            outcomes.append(Rig(ranks.first, setting, ranks=ranks).run(load()))
        finally:
            ranks.stop()
    check(*outcomes)
