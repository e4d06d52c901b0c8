"""As test_invariance.py, for mixtures in bf16: a token's bits are its row's, whatever shares its experts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from executor_svc.models.adapters.places import AdapterSizes
from tests.checkpoints import make_checkpoint
from tests.executor_svc.driver import NUM_THREADS, Model
from tests.golden.invariance import ALONE, SETTINGS, Golden, kept_outcome, load, run
from tests.golden.test_mixtures import CASES
from tests.helpers.core.core_chats import Outcome
from tests.helpers.core.core_model import Rig
from tests.helpers.marks import short_and_long
from tests.helpers.models.peft_adapters import save_peft_adapter

FAMILIES = ("qwen3_moe", "glm4_moe", "llama4", "phimoe")
NAMES = ("all at once", "small chunks, few at once", "recompute", "swap", "drafts, swap", "kept sessions, swap")


@pytest.fixture(scope="module", params=FAMILIES)
def golden(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Golden]:
    before = torch.get_num_threads()
    torch.set_num_threads(NUM_THREADS)
    family, shape = CASES[request.param]
    folder = make_checkpoint(tmp_path_factory.mktemp("model"), family, **shape)
    model = Model(folder, dtype="bfloat16")
    yield Golden(folder, model, alone(folder, request.param, model), "bfloat16")
    torch.set_num_threads(before)


def alone(folder: Path, name: str, model: Model) -> Outcome:
    return kept_outcome(folder / f"alone {name}", ("mixture", name), lambda: run(model, ALONE)[0])


def check(expected: Outcome, found: Outcome) -> None:
    for key, one in expected.items():
        assert found[key] == one, key


@pytest.mark.parametrize(
    ("golden", "name"),
    short_and_long(
        [(family, name) for family in FAMILIES for name in NAMES],
        [("qwen3_moe", "small chunks, few at once"), ("qwen3_moe", "drafts, swap"), ("llama4", "recompute")],
    ),
    indirect=["golden"],
    scope="module",
)
def test_same_bits(golden: Golden, name: str) -> None:
    found, happened = run(golden.model, SETTINGS[name], golden.expected)
    check(golden.expected, found)
    assert SETTINGS[name].happens & {"hits", "drafts", "swap one", "recompute one"} <= happened.keys()


@pytest.mark.parametrize("golden", ["qwen3_moe"], indirect=True, scope="module")
def test_same_bits_in_few_bits(golden: Golden) -> None:
    model = Model(golden.folder, quantization="int8", dtype="bfloat16")
    expected = alone(golden.folder, "int8", model)
    check(expected, run(model, SETTINGS["drafts, swap"], expected)[0])


@pytest.mark.parametrize("golden", ["qwen3_moe"], indirect=True, scope="module")
def test_same_bits_with_adapters_of_attention(golden: Golden, tmp_path: Path) -> None:
    folders = {index: tmp_path / str(index) for index in (1, 2, 3)}
    for index, folder in folders.items():
        modules = ["q_proj", "k_proj", "v_proj", "o_proj"]
        save_peft_adapter(golden.folder, folder, seed=index, r=4, lora_alpha=4, target_modules=modules)
    chats = [
        replace(chat, spec=replace(chat.spec, adapter_index=random.Random(chat.spec.request_id).randrange(4)))
        for chat in load()
    ]
    model, loras = Model(golden.folder, AdapterSizes(3, 8), dtype="bfloat16"), {"max_loras": 2, "max_cpu_loras": 3}
    expected = Rig(model, replace(ALONE, **loras), adapters=folders).run(chats)
    check(expected, Rig(model, replace(SETTINGS["swap"], **loras), adapters=folders).run(chats))
    assert expected != golden.expected
