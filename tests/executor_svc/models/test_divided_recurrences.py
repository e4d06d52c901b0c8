"""Recurrent layers that are divided among ranks: logits of the whole model, bits in chunks, and what each rank has."""

from __future__ import annotations

from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type

from executor_svc.cpu.kernels.states.plan import unit_places
from executor_svc.device.ranks import Share
from executor_svc.models.folder import LoaderError
from executor_svc.models.parallel.part import Part
from executor_svc.models.parallel.recurrent import is_divided, own_recurrence, parts_of
from executor_svc.models.specs.recurrent_spec import DeltaNames, GatedDeltaSpec, MambaSpec, RecurrentSpec, ShortConvSpec
from executor_svc.plan.arrays import IntArray
from executor_svc.plan.state_sizes import DeltaState, MambaState
from tests.checkpoints import make_checkpoint
from tests.executor_svc.driver import Model
from tests.executor_svc.models.test_divided_mixtures import logits_of
from tests.golden.test_recurrent import CASES
from tests.helpers.executor.rank_threads import RankThreads
from tests.helpers.marks import short_and_long
from tests.helpers.models.gguf_files import all_of, write_gguf
from tests.helpers.models.golden import random_prompts
from tests.helpers.models.quantized_layouts import quantize_checkpoint
from tests.helpers.models.stacked_experts import by_expert

THREE: dict[str, Any] = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48, "intermediate_size": 72}
"""What three ranks can divide."""
DIVIDED: list[tuple[str, int, dict[str, Any]]] = [
    ("falcon_h1", 2, {}),
    ("falcon_h1 with a norm", 4, {}),
    ("falcon_h1 with a norm before", 2, {}),
    ("granite_h", 2, {"mamba_n_groups": 1}),
    ("granite_h without experts", 4, {}),
    ("kimi_linear", 2, {"linear_num_heads": 4}),
    ("lfm2", 3, {**THREE, "block_auto_adjust_ff_dim": False}),
    ("lfm2_moe", 4, {}),
    ("lfm3", 2, {}),
    ("nemotron_h", 2, {}),
    ("nemotron_h of all biases", 4, {}),
    ("qwen3_5_delta", 4, {}),
    ("qwen3_5 of one key head", 3, THREE),
    ("qwen3_next_delta", 2, {}),
    ("qwen3_next_delta", 4, {}),
]
"""Cases of test_recurrent.py in so many ranks: of the same heads and of fewer key heads or groups, too."""
SHORT = [
    ("falcon_h1 with a norm", 4),
    ("granite_h", 2),
    ("kimi_linear", 2),
    ("lfm2", 3),
    ("lfm3", 2),
    ("nemotron_h of all biases", 4),
    ("qwen3_5 of one key head", 3),
    ("qwen3_next_delta", 4),
]


@pytest.mark.parametrize(
    ("name", "size", "shape"), short_and_long(DIVIDED, [each for each in DIVIDED if each[:2] in SHORT])
)
def test_logits_are_those_of_the_whole_model(tmp_path: Path, name: str, size: int, shape: dict[str, Any]) -> None:
    """But for the order of sums; a row's bits do not depend on the cut of tokens. Each rank has its part of a state."""
    family, own_shape = CASES[name]
    folder = make_checkpoint(tmp_path, family, **{**own_shape, **shape})
    (tokens,) = random_prompts(131, (50,))
    model, threads = Model(folder, dtype="float32"), RankThreads(folder, size, {"dtype": "float32"})
    whole, found = model.whole(tokens), logits_of(threads, tokens, 20, 13)
    assert float((found - whole).abs().max()) <= 1e-5 * float(whole.abs().max())
    assert torch.equal(logits_of(threads, tokens, *([1] * 9), 31), found)
    wanted = model.loaded.geometry
    for rank in threads.models:
        for own, all_of_it in zip(rank.loaded.own_geometry.layer_states, wanted.layer_states, strict=True):
            if own is not None and all_of_it is not None:
                heads = [0 if each.recurrence is None else each.recurrence.num_heads for each in (own, all_of_it)]
                assert heads[0] * size == heads[1]
                assert own.conv.channels < all_of_it.conv.channels
    assert threads.first.loaded.geometry.layer_states == wanted.layer_states
    assert threads.first.loaded.geometry.num_parameters == wanted.num_parameters


def test_programs_that_are_recorded_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one thread's program holds addresses of is not dropped for another's: a layer would have another's state."""
    family, shape = CASES["kimi_linear"]
    folder = make_checkpoint(tmp_path, family, **{**shape, "linear_num_heads": 4})
    (tokens,) = random_prompts(131, (50,))
    model, threads = Model(folder, dtype="float32"), RankThreads(folder, 2, {"dtype": "float32"})
    whole, both = model.whole(tokens), Barrier(2)

    def made_at_once(pages: tuple[int, ...], offsets: tuple[int, ...]) -> IntArray:
        both.wait(timeout=60)
        return unit_places(pages, offsets)

    monkeypatch.setattr("executor_svc.cpu.kernels.states.plan.unit_places", made_at_once)
    found = logits_of(threads, tokens, 20, 13)
    assert float((found - whole).abs().max()) <= 1e-5 * float(whole.abs().max())


def test_what_sizes_do_not_allow_is_whole_on_each_rank(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Three heads of two ranks; what is beside them is divided. Budgets count it on each, and the log says so."""
    folder = make_checkpoint(tmp_path, "kimi_linear")
    (tokens,) = random_prompts(131, (50,))
    model, threads = Model(folder, dtype="float32"), RankThreads(folder, 2, {"dtype": "float32"})
    whole, found = model.whole(tokens), logits_of(threads, tokens, 20)
    assert float((found - whole).abs().max()) <= 1e-5 * float(whole.abs().max())
    own, all_of_it = threads.first.loaded.own_geometry, model.loaded.geometry
    assert own.layer_states == all_of_it.layer_states
    assert own.weight_bytes > 0.6 * all_of_it.weight_bytes
    assert "2 recurrent layers are whole on each of 2 ranks" in caplog.text


_WIDE = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16, "moe_intermediate_size": 64}
_DELTA: dict[str, Any] = {
    **_WIDE,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "shared_expert_intermediate_size": 64,
    "attention_bias": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
}
_NEMOTRON = {**_WIDE, "mamba_head_dim": 16, "moe_shared_expert_intermediate_size": 64}
_KIMI = {
    **_WIDE,
    "linear_head_dim": 32,
    "linear_num_heads": 8,
    "mlp_layer_types": ["sparse"] * 3,
    "kv_lora_rank": 32,
    "v_head_dim": 16,
}
FEW_BITS: list[tuple[str, str, dict[str, Any]]] = [
    ("qwen3_5_delta", "GGUF", _DELTA),  # value heads that are tiled: a rank has several runs of columns
    ("qwen3_5_delta", "awq", _DELTA),
    ("qwen3_next_delta", "int4", _DELTA),
    ("granite_h", "w4a16", {**_WIDE, "mamba_d_head": 16, "shared_intermediate_size": 64}),
    ("lfm2", "w4a16", {**_WIDE, "block_auto_adjust_ff_dim": False, "conv_bias": False}),
    ("nemotron_h", "gptq", _NEMOTRON),
    ("kimi_linear", "awq", _KIMI),
]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "kind", "shape"), short_and_long(FEW_BITS, [each for each in FEW_BITS if each[1] in ("GGUF", "awq")])
)
def test_in_few_bits(tmp_path: Path, family: str, kind: str, shape: dict[str, Any]) -> None:
    """The same numbers as undivided, but for the order of sums."""
    options: dict[str, Any] = {"dtype": "float32", "quantized_activations": "off"}
    folder = make_checkpoint(tmp_path / "dense", family, vocab_size=160, **shape)
    if kind == "GGUF":
        folder = write_gguf(folder, tmp_path / "model.gguf", all_of(Type.Q8_0))
    elif kind == "int4":
        options["quantization"] = kind
    else:
        by_expert(folder)
        quantize_checkpoint(folder, kind, tmp_path / "quantized", tmp_path / "again")
        folder = tmp_path / "quantized"
    (tokens,) = random_prompts(131, (50,))
    threads, model = RankThreads(folder, 2, options), Model(folder, **options)
    whole, halves = model.whole(tokens), logits_of(threads, tokens, 20)
    torch.testing.assert_close(halves, whole, rtol=0, atol=1e-4 * float(whole.abs().max()))
    wanted, found = model.loaded.geometry, threads.first.loaded.own_geometry
    assert 0.5 * wanted.weight_bytes <= found.weight_bytes < 0.65 * wanted.weight_bytes


def test_groups_that_ranks_would_cut_are_refused_by_name(tmp_path: Path) -> None:
    shape = {**_DELTA, "linear_value_head_dim": 16}
    folder = make_checkpoint(tmp_path / "dense", "qwen3_5_delta", vocab_size=160, num_attention_heads=8, **shape)
    file = write_gguf(folder, tmp_path / "model.gguf", all_of(Type.Q8_0))
    with pytest.raises(LoaderError, match=r"linear_attn.out_proj: Q8_0 has a scale for 32 columns.* 16 of 64 columns"):
        RankThreads(file, 4, {"dtype": "float32"})


KDA = DeltaNames(into=("q", "k", "v", "b", "f_a", "g_a"), low_rank=("f_b", "g_b"), conv=("q_conv", "k_conv", "v_conv"))
SPECS: dict[str, tuple[RecurrentSpec, int]] = {
    "short convolution": (ShortConvSpec(3), 4),
    "gated delta": (GatedDeltaSpec(DeltaState(4, 8, 3, 5), 4, 1e-6), 2),
    "tiled": (GatedDeltaSpec(DeltaState(4, 12, 3, 5, tiled=True), 4, 1e-6), 2),
    "tiled, fewer key heads": (GatedDeltaSpec(DeltaState(2, 8, 3, 5, tiled=True), 4, 1e-6), 4),
    "by key head, fewer": (GatedDeltaSpec(DeltaState(2, 8, 3, 5), 4, 1e-6, DeltaNames(into=("qkvz", "ba"))), 4),
    "partly by key head": (GatedDeltaSpec(DeltaState(4, 8, 3, 5), 4, 1e-6, DeltaNames(into=("qkv", "z", "ba"))), 2),
    "Kimi delta": (GatedDeltaSpec(DeltaState(4, 4, 3, 3, gate_by_key=True), 4, 1e-6, KDA, rank=3), 2),
    "Mamba": (MambaSpec(MambaState(8, 5, 3, 4), 4, 1e-5), 2),
    "Mamba, fewer groups": (MambaSpec(MambaState(8, 5, 3, 2), 4, 1e-5), 4),
    "Mamba of one group": (MambaSpec(MambaState(6, 5, 3, 1), 4, 1e-5), 3),
}


@pytest.mark.parametrize("name", SPECS)
def test_parts_of_all_ranks_are_the_whole(name: str) -> None:
    """With what each rank's own sizes ask for; only what belongs to a shared key head or group is on several."""
    (spec, size), hidden = SPECS[name], 24
    assert is_divided(spec, hidden, size)
    found: dict[str, list[Part]] = {}
    for rank in range(size):
        share = Share(rank, size)
        own, parts = own_recurrence(spec, hidden, share), parts_of(spec, hidden, share)
        for name, (rows, columns) in spec.shapes(hidden).items():
            if name in parts:
                total = columns if parts[name].of_columns else rows
                assert parts[name].total == total
                assert parts[name].shape_of((rows, columns)) == own.shapes(hidden)[name]
            else:
                assert name in KDA.into[4:], "only what goes into low ranks is whole"
        for name, part in parts.items():
            found.setdefault(name, []).append(part)
    for name, of_ranks in found.items():
        rows = [row for part in of_ranks for each in part.ranges for row in each]
        assert set(rows) == set(range(of_ranks[0].total)), name
        if of_ranks[0].of_columns:
            assert len(rows) == of_ranks[0].total, "each column is added once"


@pytest.mark.parametrize("tiled", [False, True])
def test_value_heads_are_with_their_key_head(tiled: bool) -> None:
    """A rank's own order of heads is that of its rows in the whole model."""
    for keys, values, size in ((4, 12, 2), (4, 12, 4), (2, 8, 4), (1, 6, 3)):
        whole = DeltaState(keys, values, 1, 1, tiled=tiled)
        spec = GatedDeltaSpec(whole, 4, 1e-6)
        for rank in range(size):
            own = own_recurrence(spec, 8, Share(rank, size))
            assert isinstance(own, GatedDeltaSpec)
            parts = parts_of(spec, 8, Share(rank, size))
            heads = [head for each in parts[spec.names.decay].ranges for head in each]
            rows = [row for each in parts[spec.names.into[0]].ranges for row in each if row < keys]
            assert len(rows) == own.shape.key_heads
            for index, head in enumerate(heads):
                assert rows[own.shape.key_head(index)] == whole.key_head(head)


@pytest.mark.parametrize(
    ("spec", "size"),
    [
        (ShortConvSpec(3), 5),
        (GatedDeltaSpec(DeltaState(3, 6, 3, 5), 4, 1e-6), 2),
        (GatedDeltaSpec(DeltaState(2, 6, 3, 5), 4, 1e-6), 4),
        (MambaSpec(MambaState(12, 5, 3, 6), 4, 1e-5), 4),
        (MambaSpec(MambaState(9, 5, 3, 3), 4, 1e-5), 2),
    ],
    ids=["channels", "heads of a key head", "fewer key heads", "heads of a group", "heads"],
)
def test_the_rule(spec: RecurrentSpec, size: int) -> None:
    """Heads of one key head, or of one group, would be on ranks that have unequal numbers of them."""
    assert not is_divided(spec, 24, size)
    assert own_recurrence(spec, 24, Share(1, size)) == spec
    assert not parts_of(spec, 24, Share(1, size))
