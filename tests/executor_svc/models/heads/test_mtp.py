"""The head of multi-token prediction in a MiMo checkpoint, against a reference in float64; the model itself."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from executor_svc.config import ExecutorConfig
from executor_svc.device.kv_layout import LayerKV
from executor_svc.models.decoder import Decoder
from executor_svc.models.folder import LoaderError
from executor_svc.models.heads.draft import LoadedDraft
from executor_svc.models.heads.mtp import MtpHead
from executor_svc.models.heads.mtp_loading import check_mtp, has_mtp, load_mtp
from executor_svc.startup.fingerprint import fingerprint
from executor_svc.startup.speculation import load_speculative_model
from tests.checkpoints import edit_config, make_checkpoint
from tests.executor_svc.driver import Model
from tests.executor_svc.models.heads.head_driver import HeadDriver, Text, check_rows, random_tokens
from tests.helpers.models.mtp_heads import PREFIX, ReferenceMtp, all_tensors, edit_tensors, make_mimo
from tests.helpers.models.quantized_layouts import quantize_checkpoint

OPTIONS: dict[str, Any] = {"max_model_len": 256, "max_num_batched_tokens": 96, "max_num_seqs": 8, "block_size": 16}
BLOCKS = [9, 2, 14, 5, 7, 0]
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied, in shards": {"tie_word_embeddings": True, "shards": True},
    "odd heads, a window": {
        "head_dim": 12, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 640_000.0},
    },
}  # fmt: skip


def config_of(target: Model, **options: Any) -> ExecutorConfig:
    return ExecutorConfig(**{**target.options, "speculative": "mtp", **options})


def load(target: Model, **options: Any) -> LoadedDraft[MtpHead]:
    return load_mtp(config_of(target, **options), target.device, target.loaded)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mimo(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def target(folder: Path) -> Model:
    return Model(folder, **OPTIONS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SHAPES)
def test_against_the_reference(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = make_mimo(tmp_path, seed=3, dtype=dtype, **SHAPES[name])
    model = Model(folder, **OPTIONS)
    reference, draft = ReferenceMtp(folder), load(model)
    text = Text(random_tokens(1, 41), BLOCKS)
    states, results, logits = HeadDriver(model, draft).step([(text, 40)])[0]
    expected, expected_logits = reference.forward(torch.tensor(text.tokens[1:]), reference.combine(states))
    for found, wanted in ((results, expected), (logits, expected_logits)):
        if dtype == torch.float32:
            torch.testing.assert_close(found.double(), wanted, rtol=2e-4, atol=2e-4)
        else:
            assert float((found - wanted).norm() / wanted.norm()) < 0.05
    assert logits.shape == (40, 131)
    assert draft.layers.layers == (LayerKV(2, 16),)
    assert draft.num_parameters == sum(each.numel() for key, each in all_tensors(folder).items() if PREFIX in key)


def test_states_are_those_before_the_final_norm_and_logits_those_of_qwen2(folder: Path, target: Model) -> None:
    from transformers import Qwen2ForCausalLM

    text = Text(random_tokens(5, 31), BLOCKS)
    states, _, _ = HeadDriver(target, load(target)).step([(text, 30)])[0]
    hosted: Any = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    kept: list[torch.Tensor] = []
    hosted.model.norm.register_forward_hook(lambda _, given, __: kept.append(given[0][0]))
    with torch.no_grad():
        expected = hosted(torch.tensor([text.tokens[:30]])).logits[0]
    torch.testing.assert_close(states, kept[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(target.whole(text.tokens[:30]), expected, rtol=1e-4, atol=1e-4)


def test_drafts_one_after_the_other(folder: Path, target: Model) -> None:
    """Each reads the result before it, of the one layer."""
    driver = HeadDriver(target, load(target))
    text = Text(random_tokens(2, 21), BLOCKS)
    states, results, logits = driver.step([(text, 20)])[0]
    expected, expected_logits = ReferenceMtp(folder).drafts(text.tokens[1:], states, 6)
    hidden, rows = results[-1], [logits[-1]]
    for ahead in range(6):
        text.tokens.append(int(rows[-1].argmax()))
        if ahead < 5:
            ((hidden, row),) = driver.draft([(text, ahead, hidden)])
            rows.append(row)
    assert text.tokens[21:] == expected
    torch.testing.assert_close(torch.stack(rows).double(), expected_logits, rtol=1e-3, atol=1e-3)


@settings(max_examples=15, deadline=None)
@given(data=st.data(), seed=st.integers(0, 1000))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_do_not_depend_on_batch_and_chunks(
    dtype: str, data: st.DataObject, seed: int, drivers: dict[str, HeadDriver]
) -> None:
    check_rows(drivers[dtype], data, seed)


@pytest.fixture(scope="module")
def drivers(folder: Path) -> dict[str, HeadDriver]:
    models = {dtype: Model(folder, dtype=dtype, **OPTIONS) for dtype in ("float32", "bfloat16")}
    return {dtype: HeadDriver(model, load(model)) for dtype, model in models.items()}


def test_the_head_is_not_part_of_the_fingerprint(folder: Path, target: Model, tmp_path: Path) -> None:
    """Nor is what config.json says of it: the same model without its head is the same model."""
    bare = make_mimo(tmp_path, num_mtp_layers=0)
    prints = []
    for model in (target, Model(bare, **OPTIONS)):
        if model is target:
            load(model)
        pools = model.device.new_kv_cache(model.loaded.geometry, ExecutorConfig(**model.options))
        prints.append(fingerprint(model.loaded, model.device, pools))
    assert prints[0] == prints[1]


def text_logits(target: Model, draft: LoadedDraft[MtpHead]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return states and logits of a text."""
    states, _, logits = HeadDriver(target, draft).step([(Text(random_tokens(1, 31), BLOCKS), 30)])[0]
    return states, logits


def test_in_few_bits_and_with_dummy_weights(tmp_path: Path) -> None:
    folder = make_mimo(tmp_path, hidden_size=64, intermediate_size=96)
    target = Model(folder, quantization="int8", **OPTIONS)
    draft = load(target)
    assert draft.layers.weight_bytes < 2 * draft.num_parameters
    states, logits = text_logits(target, draft)
    reference = ReferenceMtp(folder)
    expected = reference.forward(torch.tensor(random_tokens(1, 31)[1:]), reference.combine(states))[1]
    assert 1e-4 < float((logits - expected).norm() / expected.norm()) < 0.05
    for path in folder.glob("*.safetensors"):
        path.unlink()
    dummy = Model(folder, load_format="dummy", **OPTIONS)
    assert has_mtp(config_of(dummy))
    assert bool(text_logits(dummy, load(dummy))[1].isfinite().all())


@pytest.mark.slow
def test_a_checkpoint_in_few_bits(tmp_path: Path) -> None:
    """The head's linears are read as those of the other layers are."""
    folder = make_mimo(tmp_path / "model", hidden_size=64, intermediate_size=96)
    quantize_checkpoint(folder, "w4a16", tmp_path / "few bits", tmp_path / "dense")
    models = [Model(tmp_path / name, quantized_activations="off", **OPTIONS) for name in ("few bits", "dense")]
    drafts = [load(model) for model in models]
    assert 3 * drafts[0].layers.weight_bytes < drafts[1].layers.weight_bytes
    (states, found), (dense_states, expected) = map(text_logits, models, drafts)
    torch.testing.assert_close(states, dense_states, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_what_auto_takes(target: Model, tmp_path: Path) -> None:
    """The head of the checkpoint, unless an option names something else."""
    smaller = make_checkpoint(tmp_path / "smaller", "llama")
    plain = Model(make_checkpoint(tmp_path / "plain", "qwen2"), **OPTIONS)

    def taken(model: Model, **options: Any) -> type | None:
        draft = load_speculative_model(config_of(model, **options), model.device, model.loaded)
        return None if draft is None else type(draft.model)

    assert taken(target, speculative="auto") is taken(target, speculative="mtp") is MtpHead
    assert taken(target, speculative="auto", speculative_model=str(smaller)) is Decoder
    assert taken(plain, speculative="auto") is taken(target, speculative="suffix") is None


# --- what is refused -------------------------------------------------------------------------------------------------


def refused(config: ExecutorConfig, message: str) -> None:
    with pytest.raises(LoaderError, match=f"^--speculative mtp: {config.model} {re.escape(message)}"):
        check_mtp(config)
    assert not has_mtp(config)


def test_models_without_a_head(tmp_path: Path) -> None:
    field = "num_nextn_predict_layers"
    for family in ("llama", "gpt_neox"):
        folder = make_checkpoint(tmp_path / family, family)
        config = ExecutorConfig(model=str(folder), speculative="mtp")
        refused(config, f"has no MTP head ({field} is not in config.json); supported: that of MiMoForCausalLM")
        edit_config(folder, num_nextn_predict_layers=1)
        refused(config, f"has no MTP head that is supported ({field} is 1, the architecture ")
    bare = make_mimo(tmp_path / "bare", num_mtp_layers=0)
    refused(ExecutorConfig(model=str(bare), speculative="mtp"), f"has no MTP head ({field} is not in config.json)")


def test_a_head_of_two_layers(tmp_path: Path) -> None:
    """The model runs, its head does not."""
    folder = make_mimo(tmp_path, num_mtp_layers=2)
    assert Model(folder, **OPTIONS).loaded.geometry.num_layers == 2
    config = ExecutorConfig(model=str(folder), speculative="mtp")
    with pytest.raises(LoaderError, match="num_nextn_predict_layers is 2: only heads of 1 layer are supported"):
        check_mtp(config)
    assert not has_mtp(config)
    edit_config(folder, num_nextn_predict_layers=1)
    with pytest.raises(LoaderError, match=r"16 tensors that the model does not use: model\.mtp_layers\.1\."):
        Model(folder, **OPTIONS)


TENSORS: list[tuple[str, torch.Tensor | None, str]] = [
    ("input_proj_weight", None, r"tensor model\.mtp_layers\.0\.input_proj\.weight is missing"),
    ("input_proj_weight", torch.ones(40, 40), r"input_proj\.weight has shape \[40, 40\], config.json says \[40, 80\]"),
    ("token_layernorm_weight", None, r"tensor model\.mtp_layers\.0\.token_layernorm\.weight is missing"),
    ("final_layernorm_weight", torch.ones(39), r"final_layernorm\.weight has shape \[39\]"),
    ("self_attn_q_proj_bias", None, r"self_attn\.q_proj\.bias is missing"),
    ("mlp_down_proj_weight", None, r"mlp\.down_proj\.weight is missing"),
]


@pytest.mark.parametrize(("name", "tensor", "message"), TENSORS)
def test_tensors(name: str, tensor: torch.Tensor | None, message: str, tmp_path: Path) -> None:
    """They are errors where the head is asked for, and nowhere else."""
    folder = make_mimo(tmp_path)
    edit_tensors(folder, **{name: tensor})
    target = Model(folder, **OPTIONS)
    with pytest.raises(LoaderError, match=rf"^--speculative mtp: --model {folder}: .*{message}"):
        load(target)


def test_by_default_a_head_that_cannot_be_loaded_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The model starts without one, and a log says why; who asks for drafts is told."""
    folder = make_mimo(tmp_path)
    edit_tensors(folder, input_proj_weight=None)
    target = Model(folder, **OPTIONS)
    default = ExecutorConfig(**target.options)
    assert load_speculative_model(default, target.device, target.loaded) is None
    assert "no drafts from the model's own head" in caplog.text
    with pytest.raises(LoaderError, match="is missing"):
        load_speculative_model(config_of(target, speculative="auto"), target.device, target.loaded)


def test_a_tensor_that_is_left_over(tmp_path: Path) -> None:
    folder = make_mimo(tmp_path)
    path = folder / "model.safetensors"
    save_file({**load_file(path), f"{PREFIX}extra.weight": torch.ones(2)}, path, {"format": "pt"})
    target = Model(folder, **OPTIONS)
    with pytest.raises(
        LoaderError, match=r"1 tensors that the model does not use: model\.mtp_layers\.0\.extra\.weight"
    ):
        load(target)


def test_tensors_that_are_all_left_out(tmp_path: Path) -> None:
    """As tools that quantize or merge do: with `auto` the model then has no head."""
    folder = make_mimo(tmp_path, num_mtp_layers=0)
    edit_config(folder, num_nextn_predict_layers=1)
    target = Model(folder, **OPTIONS)
    assert not has_mtp(config_of(target))
    with pytest.raises(LoaderError, match=r"tensor model\.mtp_layers\.0\.input_proj\.weight is missing"):
        load(target)


def test_saved_in_few_bits_without_the_head(tmp_path: Path) -> None:
    folder = make_mimo(tmp_path / "dense", hidden_size=64, intermediate_size=96)
    Model(folder, quantization="int8", save_quantized=str(tmp_path / "saved"), **OPTIONS)
    saved = Model(tmp_path / "saved", **OPTIONS)
    refused(config_of(saved), "has no MTP head (num_nextn_predict_layers is 0)")
