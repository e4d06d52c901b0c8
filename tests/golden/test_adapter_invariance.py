"""As test_invariance.py, with 16 LoRA adapters and none in one load: requests get the bits that they have alone.

More adapters than an executor holds, and more of them loaded than may run at once: they come and go all the time.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from executor_svc.batch.slots import Slots
from executor_svc.config import ExecutorConfig
from executor_svc.models.adapters.places import AdapterSizes
from executor_svc.models.heads.draft import load_draft
from executor_svc.plan.arrays import IntArray
from tests.checkpoints import blend, make_llama
from tests.executor_svc.driver import NUM_THREADS, Model
from tests.golden.invariance import ALONE, SETTINGS, VOCAB_SIZE, kept_outcome, known_texts, load
from tests.helpers.core.core_chats import Chat, Outcome, Setting
from tests.helpers.core.core_model import Rig
from tests.helpers.executor.known_drafts import KnownDrafts
from tests.helpers.kept import kept_copy
from tests.helpers.marks import short_and_long
from tests.helpers.models.peft_adapters import save_peft_adapter

SIZES = AdapterSizes(num_places=16, max_rank=64)
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
KINDS: list[dict[str, Any]] = [
    {"target_modules": LINEARS},
    {"target_modules": ["q_proj", "down_proj"], "use_rslora": True},
    {"target_modules": ["embed_tokens", "v_proj"]},
    {"target_modules": ["lm_head", "o_proj"]},
    {"target_modules": ["gate_proj"], "layers_to_transform": [1], "trainable_token_indices": [7, 30, 99]},
]
RANKS = (1, 2, 3, 5, 8, 15, 16, 17, 33, 64)
NAMES = (
    "all at once", "small chunks, few at once", "static", "recompute, no cache, four plans", "swap",
    "cached in the host pool", "broken sessions", "kept sessions, swap", "aborts", "drafts", "drafts, swap",
)  # fmt: skip

SHORT = (
    "small chunks, few at once", "recompute, no cache, four plans", "cached in the host pool", "broken sessions",
    "kept sessions, swap", "drafts",
)  # fmt: skip


@dataclass(frozen=True)
class Adapted:
    """A model, its adapters by index, and the outcome of each request alone."""

    model: Model
    folders: Mapping[int, Path]
    expected: Outcome
    folder: Path


def adapted_load() -> list[Chat]:
    """The load of test_invariance, with an adapter for most requests, by name."""
    chats = []
    for chat in load():
        index = random.Random(f"{chat.spec.request_id}, adapter").choice([0, 0, 0, *range(1, 17)])
        chats.append(replace(chat, spec=replace(chat.spec, adapter_index=index)))
    return chats


def make_adapters(base: Path, dtype: str) -> dict[int, Path]:
    """Return 16 adapters' folders by index, in the folder of their base, which is `make_llama`'s in this dtype."""

    def make(made: Path) -> None:
        for index in range(1, 17):
            rank = RANKS[index % len(RANKS)]
            config = {"r": rank, "lora_alpha": rank // 4 + 1, **KINDS[index % len(KINDS)]}
            save_peft_adapter(base, made / str(index), seed=index, **config)

    kept_copy(base / "adapters", ("16 adapters", dtype), make)
    return {index: base / "adapters" / str(index) for index in range(1, 17)}


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def adapted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    torch.set_num_threads(NUM_THREADS)
    folder = make_llama(tmp_path_factory.mktemp("model"), dtype=getattr(torch, request.param))
    folders = make_adapters(folder, request.param)
    model = Model(folder, SIZES, dtype=request.param)
    alone = replace(ALONE, max_loras=1, max_cpu_loras=1)
    expected = kept_outcome(
        folder / "alone", f"adapted, {request.param}", lambda: Rig(model, alone, adapters=folders).run(adapted_load())
    )
    return Adapted(model, folders, expected, folder)


def setting_of(name: str) -> Setting:
    return replace(SETTINGS[name], max_loras=3, max_cpu_loras=5)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("adapted", "name"),
    short_and_long(
        [*(("float32", name) for name in NAMES), *(("bfloat16", name) for name in ("recompute", "swap", "drafts"))],
        [*(("float32", name) for name in SHORT), ("bfloat16", "swap")],
    ),
    indirect=["adapted"],
    scope="module",
)
def test_same_request_same_bits(adapted: Adapted, name: str) -> None:
    setting, drafts = setting_of(name), None
    if setting.max_drafts:
        drafts = KnownDrafts(known_texts(adapted.expected), VOCAB_SIZE, acceptance=0.8)
    rig = Rig(adapted.model, setting, drafts, adapters=adapted.folders)
    check(adapted, rig)
    assert bool(setting.max_drafts) == (rig.happened["drafts"] > 0)


@pytest.mark.parametrize("adapted", ["float32"], indirect=True, scope="module")
def test_same_bits_with_all_16_adapters_in_one_batch(adapted: Adapted) -> None:
    setting = replace(SETTINGS["all at once"], max_loras=16, max_cpu_loras=16, max_num_seqs=100, num_blocks=900)
    rig = Rig(adapted.model, setting, adapters=adapted.folders)
    widest = 0
    place = rig.executor.adapters
    assert place is not None
    places_of = place.places_of

    def counted(slots: Slots) -> IntArray | None:
        nonlocal widest
        found = places_of(slots)
        widest = max(widest, 0 if found is None else len(np.unique(found[found >= 0])))
        return found

    place.places_of = counted  # type: ignore[method-assign]
    found = rig.run(adapted_load())
    for key, alone in adapted.expected.items():
        assert found[key] == alone, key
    assert widest >= 12


@pytest.mark.parametrize("adapted", ["float32"], indirect=True, scope="module")
def test_same_bits_with_a_draft_model_that_has_no_adapters(adapted: Adapted, tmp_path: Path) -> None:
    folder = make_llama(tmp_path, seed=1)
    blend(folder, adapted.folder, 0.06)
    options = {**adapted.model.options, "speculative": "draft", "speculative_model": str(folder)}
    draft = load_draft(str(folder), ExecutorConfig(**options), adapted.model.device, adapted.model.loaded)
    rig = Rig(adapted.model, setting_of("drafts, swap"), draft_model=draft, adapters=adapted.folders)
    check(adapted, rig)
    assert rig.happened["drafts"] > 0


@pytest.mark.parametrize("adapted", ["float32"], indirect=True, scope="module")
def test_the_load_has_requests_of_many_adapters(adapted: Adapted) -> None:
    chats = adapted_load()
    assert len({chat.spec.adapter_index for chat in chats}) > 12
    assert any(chat.spec.beams and chat.spec.adapter_index for chat in chats)
    assert any(chat.spec.num_samples > 1 and not chat.spec.beams and chat.spec.adapter_index for chat in chats)
    base = Rig(adapted.model, ALONE).run(load())
    changed = {key for key, told in adapted.expected.items() if told.token_ids != base[key].token_ids}
    with_adapters = {chat.spec.request_id for chat in chats if chat.spec.adapter_index}
    assert {name for name, _ in changed} <= with_adapters | {f"{name}, on" for name in with_adapters} | {
        f"{name}, on, on" for name in with_adapters
    }
    assert len(changed) > 25


def check(adapted: Adapted, rig: Rig) -> None:
    found = rig.run(adapted_load())
    for key, alone in adapted.expected.items():
        assert found[key] == alone, key
    assert rig.adapters is not None
    assert rig.adapters.num_unloads > 0
