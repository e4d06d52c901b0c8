"""EAGLE-3 heads against a reference in float64, on the hidden states of a real target, in both formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from executor_svc.device.kv_layout import LayerKV
from executor_svc.models.decoder import Decoder
from tests.checkpoints import make_checkpoint, make_llama
from tests.executor_svc.driver import Model, flat_batch
from tests.executor_svc.models.heads.head_driver import HeadDriver, Text, check_rows, load_head, random_tokens
from tests.helpers.models.eagle3_heads import HeadShape, ReferenceHead, make_head

OPTIONS: dict[str, Any] = {"max_model_len": 256, "max_num_batched_tokens": 96, "max_num_seqs": 8, "block_size": 16}
BLOCKS = [9, 2, 14, 5, 7, 0]

SHAPES = {
    "old": HeadShape("old"),
    "old, the target's embedding": HeadShape("old", own_embedding=False),
    "old, all of the vocabulary, the target's head": HeadShape("old", draft_vocab_size=131, own_head=False),
    "new, normalized residual": HeadShape(flags={"norm_before_residual": True}),
    "new, normalized inputs and output": HeadShape(
        flags={"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}
    ),
    "new, each input normalized": HeadShape(flags={"fc_norm": True}, layer_ids=(1, 2)),
    "new, qwen3, two layers": HeadShape(
        decoder={"model_type": "qwen3", "num_hidden_layers": 2, "attention_bias": True}, flags={"norm_output": True}
    ),
    "new, wider than the target, with a window": HeadShape(
        decoder={"hidden_size": 48, "layer_types": ["sliding_attention"], "sliding_window": 7},
        flags={"norm_before_residual": True, "fc_norm": True},
    ),
    "new, three layers with biases": HeadShape(decoder={"num_hidden_layers": 3, "attention_bias": True}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(folder: Path) -> Model:
    return Model(folder, **OPTIONS)


@pytest.fixture(scope="module")
def narrow(folder: Path) -> Model:
    return Model(folder, dtype="bfloat16", **OPTIONS)


def reference_of(head: Path, shape: HeadShape, target: Path) -> ReferenceHead:
    stored = load_file(target / "model.safetensors")
    return ReferenceHead(
        head,
        shape,
        embedding=None if shape.own_embedding else stored["model.embed_tokens.weight"],
        head=None if shape.own_head else stored["lm_head.weight"],
    )


@pytest.mark.sampled(5)
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SHAPES)
def test_against_the_reference(
    name: str, dtype: torch.dtype, folder: Path, target: Model, narrow: Model, tmp_path: Path
) -> None:
    shape = SHAPES[name]
    head = make_head(tmp_path / "head", shape, seed=3)
    reference = reference_of(head, shape, folder)
    draft = load_head(head, target if dtype == torch.float32 else narrow)
    driver = HeadDriver(target if dtype == torch.float32 else narrow, draft)
    text = Text(random_tokens(1, 41), BLOCKS)
    states, results, logits = driver.step([(text, 40)])[0]
    expected, expected_logits = reference.forward(torch.tensor(text.tokens[1:]), reference.combine(states))
    for found, wanted in ((results, expected), (logits, expected_logits)):
        if dtype == torch.float32:
            torch.testing.assert_close(found.double(), wanted, rtol=2e-4, atol=2e-4)
        else:  # weights, too, are rounded to 8 bits
            assert float((found - wanted).norm() / wanted.norm()) < 0.05
    assert torch.equal(logits, logits.to(dtype).float()), "rounded to the model's dtype"
    assert logits.shape == (40, shape.draft_vocab_size)
    assert draft.layers.layers == (LayerKV(2, 16),) * shape.fields["num_hidden_layers"]


@pytest.mark.parametrize(
    "name", ["old", "new, normalized inputs and output", "new, wider than the target, with a window"]
)
def test_drafts_one_after_the_other(name: str, folder: Path, target: Model, tmp_path: Path) -> None:
    """Rows whose states the target has not computed read the head's own result for the row before."""
    shape = SHAPES[name]
    head = make_head(tmp_path / "head", shape, seed=4)
    reference = reference_of(head, shape, folder)
    driver = HeadDriver(target, load_head(head, target))
    text = Text(random_tokens(2, 21), BLOCKS)
    states, results, logits = driver.step([(text, 20)])[0]
    expected, expected_logits = reference.drafts(text.tokens[1:], states, 6)
    hidden, found, rows = results[-1], [], [logits[-1]]
    for ahead in range(6):
        token = int(driver.head.to_target(rows[-1].argmax()))
        found.append(token)
        text.tokens.append(token)
        if ahead < 5:
            ((hidden, row),) = driver.draft([(text, ahead, hidden)])
            rows.append(row)
    assert found == expected
    torch.testing.assert_close(torch.stack(rows).double(), expected_logits, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(data=st.data(), seed=st.integers(0, 1000))
@pytest.mark.parametrize("narrowed", [False, True])
@pytest.mark.parametrize("name", ["old", "new, qwen3, two layers", "new, wider than the target, with a window"])
def test_rows_do_not_depend_on_batch_and_chunks(
    name: str, narrowed: bool, data: st.DataObject, seed: int, drivers: dict[tuple[str, bool], HeadDriver]
) -> None:
    check_rows(drivers[name, narrowed], data, seed)


@pytest.fixture(scope="module")
def drivers(
    target: Model, narrow: Model, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, bool], HeadDriver]:
    found = {}
    for name, shape in SHAPES.items():
        head = make_head(tmp_path_factory.mktemp("head"), shape, seed=7)
        for narrowed, model in ((False, target), (True, narrow)):
            found[name, narrowed] = HeadDriver(model, load_head(head, model))
    return found


def test_both_formats_are_the_same_head(target: Model, tmp_path: Path) -> None:
    logits = []
    for layout in ("old", "new"):
        shape = HeadShape("old" if layout == "old" else "new", flags={"norm_before_residual": True})
        driver = HeadDriver(target, load_head(make_head(tmp_path / layout, shape, seed=5), target))
        logits.append(driver.step([(Text(random_tokens(3, 31), BLOCKS), 30)])[0][2])
    assert torch.equal(*logits)


def test_ids_of_the_target(target: Model, tmp_path: Path) -> None:
    """d2t holds differences: id i of the head is id i + d2t[i] of the target."""
    head = make_head(tmp_path / "head", HeadShape(), seed=6)
    offsets = load_file(head / "model.safetensors")["d2t"]
    loaded = load_head(head, target).model
    assert loaded.target_ids is not None
    assert loaded.target_ids.tolist() == [index + int(offset) for index, offset in enumerate(offsets)]
    assert loaded.to_target(torch.tensor([[3], [49]])).tolist() == [[3 + int(offsets[3])], [49 + int(offsets[49])]]
    logits = torch.randn(2, 50)
    wide = loaded.spread(logits)
    assert wide.shape == (2, 131)
    assert torch.equal(wide[:, loaded.target_ids], logits)
    assert int(wide.isinf().sum()) == 2 * (131 - 50)
    whole = load_head(make_head(tmp_path / "whole", HeadShape(draft_vocab_size=131)), target).model
    assert whole.target_ids is None
    assert whole.spread(wide) is wide


def test_in_few_bits_and_with_dummy_weights(tmp_path: Path) -> None:
    target = Model(make_llama(tmp_path / "target", hidden_size=64), quantization="int8", **OPTIONS)
    shape = HeadShape(decoder={"hidden_size": 64, "head_dim": 16}, target_hidden_size=64)
    head = make_head(tmp_path / "head", shape, seed=2)
    draft = load_head(head, target)
    assert draft.layers.weight_bytes < 2 * draft.num_parameters
    text = Text(random_tokens(1, 31), BLOCKS)
    states, _, logits = HeadDriver(target, draft).step([(text, 30)])[0]
    reference = ReferenceHead(head, shape)
    expected = reference.forward(torch.tensor(text.tokens[1:]), reference.combine(states))[1]
    assert 1e-4 < float((logits - expected).norm() / expected.norm()) < 0.05
    dummy = load_head(head, target, load_format="dummy", quantization="none")
    assert dummy.model.target_ids is not None
    assert dummy.model.target_ids.tolist() == list(range(50))
    assert bool(HeadDriver(target, dummy).step([(Text(random_tokens(1, 31), BLOCKS), 30)])[0][2].isfinite().all())


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma2", "granite", "qwen3"])
def test_hidden_states_of_the_target(family: str, tmp_path: Path) -> None:
    """Before each layer they are transformers' `hidden_states`; asking for them changes no bit of the result."""
    from transformers import AutoModelForCausalLM

    folder = make_checkpoint(tmp_path, family)
    model = Model(folder, **OPTIONS)
    decoder, kernels = model.loaded.model, model.device.kernels
    assert isinstance(decoder, Decoder)
    tokens = random_tokens(4, 30)
    with torch.no_grad():
        hosted: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        expected = hosted(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    batch = flat_batch([(0, 30)], [BLOCKS], 16, tokens)
    cache = model.driver().cache
    ropes = decoder.new_ropes(batch.positions)
    decoder.fill_ropes(batch.positions, batch.rope_lens, ropes)
    plans = [kernels.new_attention_plan(shape, 256, 96, 8) for shape in decoder.attention_shapes]
    for plan in plans:
        plan.fill(batch.slot_mapping, batch.query_start_loc, batch.seq_lens, batch.block_tables)
    layers = tuple(range(decoder.num_layers + 1))
    hidden, states = decoder.forward_with_states(batch.token_ids, ropes, cache.layers, plans, layers)
    parts = states.chunk(len(layers), 1)
    for index, found in enumerate(parts):
        if index < decoder.num_layers:
            torch.testing.assert_close(found, expected[index][0], rtol=1e-4, atol=1e-4)
    assert torch.equal(states[:, -decoder.hidden_size :], hidden)
    plain = decoder.forward(batch.token_ids, ropes, cache.layers, plans)
    assert torch.equal(plain, hidden)
    _, some = decoder.forward_with_states(batch.token_ids, ropes, cache.layers, plans, (1, decoder.num_layers))
    assert torch.equal(some, torch.cat([parts[index] for index in (1, -1)], 1))
