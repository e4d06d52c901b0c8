"""Models with adapters that peft made: peft's logits, and the bits of a row alone in batches of several adapters."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from executor_svc.device.adapters import NO_PLACE
from executor_svc.models.adapters.adapter import Adapter
from executor_svc.models.adapters.places import AdapterSizes, ModelAdapters
from tests.checkpoints import FAMILIES, make_checkpoint
from tests.executor_svc.cpu.kernels.bits import equal_bits
from tests.executor_svc.driver import Driver, Model, Tokens
from tests.helpers.marks import short_and_long
from tests.helpers.models.gguf_files import all_of, write_gguf
from tests.helpers.models.peft_adapters import read, save_peft_adapter

SIZES = AdapterSizes(num_places=4, max_rank=64)
KINDS: dict[str, dict[str, Any]] = {
    "all, rank 8": {"r": 8, "lora_alpha": 2, "target_modules": "all-linear"},
    "ranks 1 to 64": {
        "r": 16,
        "lora_alpha": 2,
        "target_modules": "all-linear",
        "rank_pattern": {
            "q_proj": 1,
            "qkv_proj": 5,
            "query_key_value": 9,
            "c_attn": 7,
            "v_proj": 3,
            "o_proj": 64,
            "down_proj": 17,
            "up_proj": 33,
        },
    },
    "a layer": {
        "r": 2,
        "lora_alpha": 1,
        "target_modules": ["q_proj", "qkv_proj", "query_key_value", "c_attn", "down_proj", "output_linear"],
        "layers_to_transform": [1],
    },
}
TABLES: dict[str, dict[str, Any]] = {
    "embedding": {"r": 5, "lora_alpha": 2, "target_modules": ["embed_tokens", "o_proj"]},
    "head": {"r": 4, "lora_alpha": 1, "target_modules": ["lm_head", "v_proj"]},
    "both": {"r": 5, "lora_alpha": 2, "target_modules": ["embed_tokens", "lm_head"], "rank_pattern": {"lm_head": 20}},
    "tokens": {"r": 2, "lora_alpha": 1, "target_modules": ["o_proj"], "trainable_token_indices": [7, 130, 3]},
    "tokens of both": {
        "r": 2,
        "lora_alpha": 1,
        "target_modules": ["o_proj"],
        "trainable_token_indices": {"embed_tokens": [7, 3], "lm_head": [4]},
    },
    "whole head": {"r": 2, "lora_alpha": 1, "target_modules": ["o_proj"], "modules_to_save": ["lm_head"]},
    "whole embedding": {"r": 2, "lora_alpha": 1, "target_modules": ["o_proj"], "modules_to_save": ["embed_tokens"]},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the tiny checkpoint of a family."""
    return cache(lambda family: make_checkpoint(tmp_path_factory.mktemp(family), family))


@pytest.fixture(scope="module")
def model(checkpoint: Callable[[str], Path]) -> Callable[[str], Model]:
    """Return the model of a family, in fp32, with places for adapters."""
    return cache(lambda family: Model(checkpoint(family), SIZES, dtype="float32", max_num_batched_tokens=128))


def prompt(seed: int, length: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(2, 131) for _ in range(length)]


def places_of(model: Model) -> ModelAdapters:
    assert model.loaded.adapters is not None
    return model.loaded.adapters


def load(model: Model, place: int, adapter: Adapter) -> None:
    adapters = places_of(model)
    adapters.load(place, adapters.pack(adapter))


def alone(driver: Driver, place: int, tokens: list[int], logits: str = "all") -> Tensor:
    """Return the logits of a sequence that runs alone, in one step."""
    sequence = Tokens(tokens, place=place)
    (found,) = driver.step([(sequence, len(tokens))], logits)
    driver.release(sequence)
    driver.forget()
    return found


def check_logits(
    model: Model, base: Path, folder: Path, config: dict[str, Any], seed: int, *, merges: bool = False
) -> None:
    """Compare with peft's unmerged model in float64, and with the merged one, within 1e-5 of the largest logit."""
    driver, place, tokens = model.driver(block_size=8), seed % SIZES.num_places, [*prompt(0, 36), 7, 3, 130, 4]
    peft = save_peft_adapter(base, folder, seed=seed, **config)
    load(model, place, read(base, folder))
    with torch.no_grad():
        expected = peft(torch.tensor([tokens])).logits[0]
        merged = peft.merge_and_unload()(torch.tensor([tokens])).logits[0] if merges else expected
    found, without = alone(driver, place, tokens), alone(driver, NO_PLACE, tokens)
    largest = float(expected.abs().max())
    for wanted in (expected, merged):
        assert float((found.double() - wanted).abs().max()) <= 1e-5 * largest
    assert float((found - without).abs().max()) > 1e-3 * largest
    places_of(model).clear(place)
    assert equal_bits(alone(driver, place, tokens), without)


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    short_and_long(
        [*FAMILIES, "glm4", "granitemoehybrid", "falcon", "gpt2", "gpt_neox", "opt", "phi", "qwen3_5_text"],
        ["gemma3_text", "llama", "phi3", "glm4", "gpt_neox"],
    ),
)
def test_logits_are_those_of_peft(
    checkpoint: Callable[[str], Path], model: Callable[[str], Model], family: str, tmp_path: Path
) -> None:
    for seed, (name, config) in enumerate(KINDS.items()):
        check_logits(model(family), checkpoint(family), tmp_path / name, config, seed, merges=True)


@pytest.mark.parametrize("family", ["gpt_oss", "granitemoeshared"])
def test_mixtures(
    checkpoint: Callable[[str], Path], model: Callable[[str], Model], family: str, tmp_path: Path
) -> None:
    """Attention, and the expert that all rows share."""
    modules = ["q_proj", "k_proj", "v_proj", "o_proj", "input_linear", "output_linear"]
    config = {"r": 5, "lora_alpha": 2, "target_modules": modules}
    check_logits(model(family), checkpoint(family), tmp_path, config, seed=1)


OF_RECURRENT: dict[str, tuple[str, ...]] = {
    "falcon_h1": ("in_proj", "q_proj", "gate_proj"),
    "granite_h": ("in_proj", "out_proj", "q_proj", "output_linear"),
    "kimi_linear": ("q_proj", "v_proj", "b_proj", "f_a_proj", "f_b_proj", "g_b_proj", "o_proj"),
    "lfm2": ("q_proj", "in_proj", "out_proj", "w1", "w2"),
    "nemotron_h": ("in_proj", "q_proj", "o_proj"),
    "qwen3_5_delta": ("q_proj", "o_proj", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", "up_proj"),
    "qwen3_next_delta": ("in_proj_qkvz", "in_proj_ba", "out_proj", "k_proj"),
}
"""Modules of recurrences, and others; of attention and recurrences alike in some. peft refuses Mamba's out_proj."""


@pytest.mark.sampled(4)
@pytest.mark.parametrize("family", OF_RECURRENT)
def test_models_with_recurrent_layers(
    checkpoint: Callable[[str], Path], model: Callable[[str], Model], family: str, tmp_path: Path
) -> None:
    config = {"r": 5, "lora_alpha": 2, "target_modules": list(OF_RECURRENT[family])}
    check_logits(model(family), checkpoint(family), tmp_path, config, seed=1)


def test_gguf_files_with_recurrent_layers(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """Those of Falcon-H1 have the factors in their weights, and so no adapters; Qwen's heads have another order."""
    kinds, families = all_of(GGMLQuantizationType.F32), ("lfm2", "falcon_h1", "qwen3_5_moe_text")
    files = [write_gguf(checkpoint(family), tmp_path / f"{family}.gguf", kinds) for family in families]
    config = {"r": 5, "lora_alpha": 2, "target_modules": list(OF_RECURRENT["lfm2"])}
    check_logits(Model(files[0], SIZES, dtype="float32"), checkpoint("lfm2"), tmp_path / "adapter", config, seed=1)
    assert Model(files[1], SIZES, dtype="float32").loaded.adapters is None
    adapters = Model(files[2], SIZES, dtype="float32").loaded.adapters
    assert adapters is not None
    assert {name for _, name in adapters._linears} == {
        "attention.qkv", "attention.output", "shared.gate_up", "shared.down", "lm_head",
    }  # fmt: skip


@pytest.mark.sampled(7)
@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("kind", TABLES)
def test_tables_are_those_of_peft(
    checkpoint: Callable[[str], Path], model: Callable[[str], Model], family: str, kind: str, tmp_path: Path
) -> None:
    """Gemma's table is tied, and its embeddings are scaled."""
    check_logits(model(family), checkpoint(family), tmp_path, TABLES[kind], len(kind))


@pytest.mark.slow
def test_tables_by_the_names_of_a_family(
    checkpoint: Callable[[str], Path], model: Callable[[str], Model], tmp_path: Path
) -> None:
    config = {"r": 2, "lora_alpha": 1, "target_modules": ["wte", "c_fc"], "fan_in_fan_out": True}
    check_logits(model("gpt2"), checkpoint("gpt2"), tmp_path, config, 3)


def made(checkpoint: Path, folder: Path, seed: int, **config: Any) -> Adapter:
    save_peft_adapter(checkpoint, folder, seed=seed, **config)
    return read(checkpoint, folder)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "dtype"), [("gemma2", "float32"), ("llama", "bfloat16")])
def test_a_row_has_the_bits_that_it_has_alone(
    checkpoint: Callable[[str], Path], family: str, dtype: str, tmp_path: Path
) -> None:
    """In chunks and decodes among sequences of several adapters and none, for other largest ranks, threads and places.

    Sequences without adapters have the bits of a model that was loaded without.
    """
    base = checkpoint(family)
    options = {"dtype": dtype, "max_num_batched_tokens": 128}
    kinds = [KINDS["all, rank 8"], KINDS["ranks 1 to 64"], TABLES["both"], TABLES["tokens of both"]]
    mixed, one = Model(base, SIZES, num_threads=2, **options), Model(base, AdapterSizes(1, 75), **options)
    driver, driver_of_one = mixed.driver(block_size=8), one.driver(block_size=8)
    texts, expected = [prompt(seed, 20 + 3 * seed) for seed in range(9)], []
    for place, config in enumerate(kinds):
        adapter = made(base, tmp_path / str(place), place, **config)
        load(mixed, place, adapter)
        load(one, 0, adapter)
        own = texts[2 * place : 2 * place + 2]
        expected += [(text, place, alone(driver_of_one, 0, text)) for text in own]
    expected.append((texts[8], NO_PLACE, Model(base, **options).whole(texts[8])))

    draw = random.Random(0)
    work = [(Tokens(text, place=which), logits) for text, which, logits in expected]
    modes = ["all", "asked"]
    while left := [(sequence, logits) for sequence, logits in work if sequence.num_computed < len(sequence.tokens)]:
        chosen = draw.sample(left, draw.randint(1, len(left)))
        counts = [min(draw.choice([1, 1, 5, 11]), len(seq.tokens) - seq.num_computed) for seq, _ in chosen]
        starts = [sequence.num_computed for sequence, _ in chosen]
        found = driver.step([(seq, count) for (seq, _), count in zip(chosen, counts, strict=True)], draw.choice(modes))
        for (_, logits), start, count, rows in zip(chosen, starts, counts, found, strict=True):
            assert equal_bits(rows, logits[start : start + count])


def test_an_adapter_that_does_not_fit_is_refused(
    checkpoint: Callable[[str], Path], model: Callable[[str], Model], tmp_path: Path
) -> None:
    base = checkpoint("llama")
    adapter = made(base, tmp_path, 0, **KINDS["all, rank 8"])
    with pytest.raises(ValueError, match="rank 8: at most 7"):
        load(Model(base, AdapterSizes(1, 7), dtype="float32"), 0, adapter)
    with pytest.raises(ValueError, match="the model has no"):
        load(model("llama"), 0, replace(adapter, linears={(2, "mlp.down"): adapter.linears[1, "mlp.down"]}))
    with pytest.raises(ValueError, match="place 4"):
        load(model("llama"), 4, adapter)


def test_memory_of_an_adapter(checkpoint: Callable[[str], Path], model: Callable[[str], Model], tmp_path: Path) -> None:
    """That of its own numbers, some padding aside, and at most that of its largest rank."""
    base, adapters = checkpoint("llama"), places_of(model("llama"))
    full = made(base, tmp_path / "full", 0, r=8, target_modules="all-linear")
    packed = adapters.pack(full)
    assert full.num_bytes <= packed.num_bytes < adapters.bytes_of_rank(8)
    everywhere = made(base, tmp_path / "everywhere", 0, r=8, target_modules=r".*(proj|embed_tokens|lm_head)")
    assert adapters.pack(everywhere).num_bytes == adapters.bytes_of_rank(8)
    some = made(base, tmp_path / "some", 0, **KINDS["a layer"])
    assert some.num_bytes <= adapters.pack(some).num_bytes <= adapters.bytes_of_rank(2)
    tables = made(base, tmp_path / "tables", 0, **TABLES["both"])
    assert adapters.pack(tables).num_bytes >= tables.num_bytes


def test_a_step_without_adapters_runs_the_program_without(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = checkpoint("llama")
    model = Model(base, SIZES, dtype="float32")
    driver, plain = model.driver(block_size=8), Model(base, dtype="float32").driver(block_size=8)
    load(model, 1, made(base, tmp_path, 0, **KINDS["all, rank 8"]))
    launches = []
    team = model.device.kernels._team  # type: ignore[attr-defined]
    drive = team.drive
    monkeypatch.setattr(team, "drive", lambda state: (launches.append(_num_launches(state)), drive(state)))
    tokens = prompt(0, 9)
    alone(driver, NO_PLACE, tokens)
    without = launches.pop()
    alone(driver, 1, tokens)
    assert launches.pop() > without
    team = plain.runner._recorded._kernels._team  # type: ignore[attr-defined]
    drive_plain = team.drive
    monkeypatch.setattr(team, "drive", lambda state: (launches.append(_num_launches(state)), drive_plain(state)))
    alone(plain, NO_PLACE, tokens)
    assert launches.pop() == without


def _num_launches(state: int) -> int:
    """Return the number of launches of a program: the second number of its state."""
    import ctypes

    return int(np.ctypeslib.as_array((ctypes.c_int64 * 2).from_address(state))[1])
