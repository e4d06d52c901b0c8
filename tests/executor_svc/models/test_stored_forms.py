"""Checkpoints that say one thing and hold another: the head, its copies, biases and names. Logits are transformers'."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file
from torch import Tensor

from executor_svc.config import ExecutorConfig
from executor_svc.models.decoder import Decoder
from executor_svc.models.folder import LoaderError
from executor_svc.models.heads.draft import load_draft
from tests.checkpoints import FAMILIES, edit_config, make_checkpoint, make_llama
from tests.executor_svc.driver import Model
from tests.executor_svc.models.adapters.test_adapted_models import SIZES, TABLES, check_logits, places_of
from tests.executor_svc.models.test_parallel import logits_of
from tests.helpers.executor.rank_threads import RankThreads
from tests.helpers.marks import short_and_long
from tests.helpers.models import peft_adapters
from tests.helpers.models.gguf_files import all_of, write_gguf
from tests.helpers.models.golden import random_prompts, teacher_forced, transformers_model
from tests.helpers.models.quantized_layouts import LAYOUTS, quantize_checkpoint

pytestmark = pytest.mark.slow
TOKENS = [3, 17, 99, 4, 120, 64, 5, 2, 77, 31]
HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"
CLOSE = 1e-4


@pytest.fixture
def untied(tmp_path: Path) -> Path:
    """A checkpoint with a head of its own whose config.json says that there is none."""
    folder = make_llama(tmp_path / "untied")
    edit_config(folder, tie_word_embeddings=True)
    return folder


def change(folder: Path, how: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Path:
    """Change the tensors of a folder."""
    path = folder / "model.safetensors"
    save_file({name: each.contiguous().clone() for name, each in how(load_file(path)).items()}, path, {"format": "pt"})
    return folder


def check(folder: Path, ours: Path | None = None, **options: Any) -> Model:
    """Compare logits with those of transformers; return the model."""
    model = Model(ours or folder, **options)
    expected = teacher_forced(transformers_model(folder), TOKENS)
    torch.testing.assert_close(model.whole(TOKENS), expected.float(), rtol=CLOSE, atol=CLOSE)
    return model


def parameters(model: Model) -> int:
    return model.loaded.geometry.num_parameters


@pytest.mark.parametrize("family", short_and_long([name for name in FAMILIES if name != "phi3"], ["llama", "gemma2"]))
def test_a_stored_head_is_used_whatever_config_says(
    tmp_path: Path, family: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_checkpoint(tmp_path / "made", family, tie_word_embeddings=False)
    edit_config(folder, tie_word_embeddings=True)
    with caplog.at_level(logging.WARNING):
        model = check(folder)
    assert "tie_word_embeddings is true, and the checkpoint has a head of its own" in caplog.text
    edit_config(folder, tie_word_embeddings=False)
    assert torch.equal(Model(folder).whole(TOKENS), model.whole(TOKENS))


def test_an_equal_copy_ties(tmp_path: Path) -> None:
    folder = make_llama(tmp_path / "tied", tie_word_embeddings=True)
    alone = check(folder)
    change(folder, lambda tensors: tensors | {HEAD: tensors[TABLE]})
    copied = check(folder)
    assert parameters(copied) == parameters(alone)
    assert copied.loaded.weights_digest == alone.loaded.weights_digest
    change(folder, lambda tensors: tensors | {HEAD: tensors[TABLE].bfloat16()})
    assert parameters(Model(folder, dtype="bfloat16")) == parameters(alone), "the same numbers in the model's dtype"
    assert parameters(check(folder)) == parameters(alone) + 131 * 40
    change(folder, lambda tensors: tensors | {HEAD: tensors[TABLE], "lm_head.bias": torch.ones(131)})
    with pytest.raises(LoaderError, match=r"1 tensors that the model does not use: lm_head.bias"):
        Model(folder)


def test_one_number_makes_a_head_of_its_own(tmp_path: Path) -> None:
    def edit(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        head = tensors[TABLE].clone()
        head[-1, -1] += 1
        return tensors | {HEAD: head}

    check(change(make_llama(tmp_path / "tied", tie_word_embeddings=True), edit))


def test_a_head_of_another_shape_is_named(untied: Path) -> None:
    change(untied, lambda tensors: tensors | {HEAD: tensors[HEAD][:-1]})
    with pytest.raises(LoaderError, match=r"tensor lm_head.weight has shape \[130, 40\], config.json says \[131, 40\]"):
        Model(untied)


def test_a_tied_checkpoint_may_hold_the_head_alone(tmp_path: Path) -> None:
    folder = make_llama(tmp_path / "tied", tie_word_embeddings=True)
    usual = check(folder)
    change(folder, lambda tensors: {HEAD if name == TABLE else name: each for name, each in tensors.items()})
    assert torch.equal(check(folder).whole(TOKENS), usual.whole(TOKENS))
    edit_config(folder, tie_word_embeddings=False)
    with pytest.raises(LoaderError, match=r"tensor model.embed_tokens.weight is missing"):
        Model(folder)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("layout", short_and_long(list(LAYOUTS), ["w4a16", "gptq", "awq", "fp8"]))
@pytest.mark.parametrize("head", ["dense", "in few bits"])
def test_in_few_bits(tmp_path: Path, layout: str, head: str) -> None:
    config, pack = LAYOUTS[layout]
    made, few, dense = tmp_path / "made", tmp_path / "few", tmp_path / "dense"
    make_llama(made, hidden_size=64, intermediate_size=96, vocab_size=128)
    quantize_checkpoint(made, layout, few, dense)
    if head == "in few bits":
        packed, numbers = pack(load_file(made / "model.safetensors")[HEAD].float())
        stored = {f"lm_head.{kind}": each for kind, each in packed.items()}
        change(few, lambda tensors: {name: each for name, each in tensors.items() if name != HEAD} | stored)
        change(dense, lambda tensors: tensors | {HEAD: numbers})
        config = {name: value for name, value in config.items() if name != "ignore"}
    edit_config(few, tie_word_embeddings=True, quantization_config=config)
    check(dense, few, quantized_activations="off")


def test_saved_in_few_bits(tmp_path: Path) -> None:
    """What --save-quantized writes is the model that wrote it."""
    folder, target = make_llama(tmp_path / "made", hidden_size=64, intermediate_size=96), tmp_path / "saved"
    edit_config(folder, tie_word_embeddings=True)
    first = Model(folder, quantization="int8", save_quantized=str(target)).whole(TOKENS)
    assert torch.equal(Model(target).whole(TOKENS), first)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_have_parts_of_the_stored_head(untied: Path, size: int) -> None:
    (tokens,) = random_prompts(131, (50,))
    expected = teacher_forced(transformers_model(untied), tokens)
    found = logits_of(RankThreads(untied, size, {"dtype": "float32"}), tokens)
    assert float((found - expected).abs().max()) <= 1e-5 * float(expected.abs().max())


def test_ranks_of_a_tied_checkpoint_with_the_head_alone(tmp_path: Path) -> None:
    folder = make_llama(tmp_path / "tied", tie_word_embeddings=True)
    (tokens,) = random_prompts(131, (50,))
    expected = logits_of(RankThreads(folder, 2, {"dtype": "float32"}), tokens)
    change(folder, lambda tensors: {HEAD if name == TABLE else name: each for name, each in tensors.items()})
    assert torch.equal(logits_of(RankThreads(folder, 2, {"dtype": "float32"}), tokens), expected)


@pytest.mark.parametrize("kind", ["embedding", "head", "tokens of both", "whole head", "whole embedding"])
def test_adapters_see_two_tables(untied: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(untied, SIZES, dtype="float32", max_num_batched_tokens=128)
    monkeypatch.setattr(peft_adapters, "spec_of", lambda base: places_of(model).spec)  # as a server reads adapters
    check_logits(model, untied, tmp_path / "adapter", TABLES[kind], len(kind))


def test_a_draft_has_its_stored_head(tmp_path: Path) -> None:
    target = Model(make_llama(tmp_path / "target"))
    folder = make_llama(tmp_path / "draft", num_hidden_layers=1, seed=3)
    config = ExecutorConfig(**target.options)
    expected = load_draft(str(folder), config, target.device, target.loaded)
    edit_config(folder, tie_word_embeddings=True)
    found = load_draft(str(folder), config, target.device, target.loaded)
    assert found.num_parameters == expected.num_parameters
    assert isinstance(found.model, Decoder)
    rows = torch.randn(4, 40, generator=torch.Generator().manual_seed(1))
    assert torch.equal(found.model.logits(rows), expected.model.logits(rows))


@pytest.mark.parametrize("kind", [Type.F32, Type.Q8_0])
def test_gguf(tmp_path: Path, kind: Type) -> None:
    """A head of its own, and a copy."""
    made = make_llama(tmp_path / "made", hidden_size=64, intermediate_size=96)
    own = Model(write_gguf(made, tmp_path / "own.gguf", all_of(kind)))
    change(made, lambda tensors: tensors | {HEAD: tensors[TABLE]})
    copied = Model(write_gguf(made, tmp_path / "copied.gguf", all_of(kind)))
    change(made, lambda tensors: {name: each for name, each in tensors.items() if name != HEAD})
    tied = Model(write_gguf(made, tmp_path / "tied.gguf", all_of(kind)))
    assert parameters(tied) == parameters(copied) == parameters(own) - 131 * 64
    assert torch.equal(copied.whole(TOKENS), tied.whole(TOKENS))
    assert not torch.equal(own.whole(TOKENS), tied.whole(TOKENS))


BIASES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "kept",
    [["q_proj", "k_proj", "v_proj"], ["k_proj"], ["o_proj"], ["q_proj", "o_proj", "up_proj"], ["down_proj"], BIASES],
)
@pytest.mark.parametrize("form", ["folder", "gguf", "ranks"])
def test_each_bias_stands_alone(tmp_path: Path, kept: list[str], form: str) -> None:
    """Transformers takes a bias that is not stored for 0."""
    attention, mlp = (bool(set(kept) & set(names)) for names in (BIASES[:4], BIASES[4:]))
    folder = make_llama(tmp_path / "made", attention_bias=attention, mlp_bias=mlp)
    names = tuple(f"{name}.bias" for name in kept)
    change(folder, lambda tensors: {n: each for n, each in tensors.items() if "bias" not in n or n.endswith(names)})
    if form == "ranks":
        (tokens,) = random_prompts(131, (50,))
        expected = teacher_forced(transformers_model(folder), tokens)
        found = logits_of(RankThreads(folder, 2, {"dtype": "float32"}), tokens)
        assert float((found - expected).abs().max()) <= 1e-5 * float(expected.abs().max())
        return
    check(
        folder,
        folder if form == "folder" else write_gguf(folder, tmp_path / "m.gguf", all_of(Type.F32)),
        dtype="float32",
    )


def test_a_bias_of_one_layer(tmp_path: Path) -> None:
    """In GGUF, as in llama.cpp, each tensor stands alone; in a folder one that other layers have is missing."""
    folder = make_llama(tmp_path / "made", attention_bias=True)
    change(
        folder,
        lambda tensors: {
            name: each for name, each in tensors.items() if name != "model.layers.1.self_attn.k_proj.bias"
        },
    )
    check(folder, write_gguf(folder, tmp_path / "model.gguf", all_of(Type.F32)), dtype="float32")
    with pytest.raises(LoaderError, match=r"tensor model.layers.1.self_attn.k_proj.bias is missing"):
        Model(folder)


def test_qkv_bias_of_config(tmp_path: Path) -> None:
    folder = make_llama(tmp_path / "made", attention_bias=True)
    change(folder, lambda tensors: {name: each for name, each in tensors.items() if not name.endswith("o_proj.bias")})
    expected = check(folder).whole(TOKENS)
    edit_config(folder, attention_bias=False, qkv_bias=True)
    assert torch.equal(Model(folder).whole(TOKENS), expected)


PREFIXES = {
    "": ("", "lm_head."),
    "transformer": ("transformer.", "lm_head."),
    "language_model": ("language_model.model.", "language_model.lm_head."),
    "of transformers 5": ("model.language_model.", "lm_head."),
}


@pytest.mark.parametrize("family", ["llama", "qwen2", "granite"])
def test_tensors_without_effect_may_be_left_over(tmp_path: Path, family: str) -> None:
    """Biases of 0 for all linears, as AutoGPTQ writes them and what is made of its files keeps, and empty tensors."""
    folder = make_checkpoint(tmp_path / "made", family, **({"attention_bias": False} if family == "granite" else {}))
    expected = Model(folder).loaded.weights_digest

    def edit(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        linears = [name.removesuffix("weight") for name in tensors if "_proj.weight" in name or name == HEAD]
        biases = {f"{name}bias": torch.zeros(len(tensors[f"{name}weight"]), dtype=torch.float16) for name in linears}
        return biases | tensors | {"model.layers.1.self_attn.masked_bias": torch.zeros(0, 3)}

    assert check(change(folder, edit)).loaded.weights_digest == expected
    change(folder, lambda tensors: tensors | {f"{HEAD.removesuffix('weight')}bias": torch.eye(131)[130]})
    with pytest.raises(LoaderError, match=r"1 tensors that the model does not use: lm_head.bias"):
        Model(folder)
    change(folder, lambda tensors: tensors | {"lm_head.bias": torch.zeros(131), "more.weight": torch.zeros(3)})
    with pytest.raises(LoaderError, match=r"1 tensors that the model does not use: more.weight"):
        Model(folder)


@pytest.mark.parametrize("name", PREFIXES)
@pytest.mark.parametrize("shards", [False, True])
def test_names_with_other_words_before_them(tmp_path: Path, name: str, shards: bool) -> None:
    folder = make_llama(tmp_path / "made")
    expected = Model(folder)
    body, head = PREFIXES[name]
    tensors = load_file(folder / "model.safetensors")
    renamed = {(head + n[8:]) if n.startswith("lm_head.") else (body + n[6:]): each for n, each in tensors.items()}
    if shards:
        (folder / "model.safetensors").unlink()
        halves = [dict(list(renamed.items())[index::2]) for index in range(2)]
        for index, half in enumerate(halves):
            save_file(half, folder / f"{index}.safetensors", {"format": "pt"})
        places = {n: f"{index}.safetensors" for index, half in enumerate(halves) for n in half}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    else:
        save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    found = Model(folder)
    assert found.loaded.weights_digest == expected.loaded.weights_digest
    assert torch.equal(found.whole(TOKENS), expected.whole(TOKENS))


@pytest.mark.parametrize("layout", ["w4a16", "gptq", "awq", "fp8"])
def test_names_without_model_in_few_bits(tmp_path: Path, layout: str) -> None:
    made, few = make_llama(tmp_path / "made", hidden_size=64, intermediate_size=96), tmp_path / "few"
    quantize_checkpoint(made, layout, few, tmp_path / "dense")
    expected = Model(few).loaded.weights_digest
    change(few, lambda tensors: {name.removeprefix("model."): each for name, each in tensors.items()})
    assert Model(few).loaded.weights_digest == expected


@pytest.mark.parametrize("family", short_and_long(list(FAMILIES), ["qwen3", "gemma3_text"]))
def test_a_model_saved_without_its_head(tmp_path: Path, family: str) -> None:
    """AutoModel writes names without model. and, of a tied model, all that there is."""
    from transformers import AutoModel

    folder = make_checkpoint(tmp_path / "made", family, tie_word_embeddings=True)
    expected = Model(folder)
    AutoModel.from_pretrained(folder).save_pretrained(tmp_path / "bare")
    names = json.loads((tmp_path / "bare" / "config.json").read_text())["architectures"]
    assert not names[0].endswith("ForCausalLM")
    found = check(tmp_path / "bare")
    assert found.loaded.geometry.architecture == expected.loaded.geometry.architecture
    assert found.loaded.weights_digest == expected.loaded.weights_digest


@pytest.mark.sampled(5)
@pytest.mark.parametrize("family", [*FAMILIES, "gpt_neox"])
def test_model_type_without_architectures(tmp_path: Path, family: str) -> None:
    folder = make_checkpoint(tmp_path / "made", family)
    options = {"numerics": "fast"} if family == "gpt_neox" else {}
    expected = Model(folder, **options).loaded.geometry
    edit_config(folder, architectures=None)
    assert Model(folder, **options).loaded.geometry == expected


def test_the_name_of_before_transformers(tmp_path: Path) -> None:
    """That of decapoda-research's files, which vLLM and SGLang know, too."""
    folder = make_llama(tmp_path / "made")
    edit_config(folder, architectures=["LLaMAForCausalLM"])
    assert check(folder).loaded.geometry.architecture == "LlamaForCausalLM"


def test_a_file_beside_a_stale_index(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = make_llama(tmp_path / "made")
    expected = Model(folder).loaded.weights_digest
    index = folder / "model.safetensors.index.json"
    for content in ("{}", "rubbish", json.dumps({"weight_map": {TABLE: "model-00001-of-00002.safetensors"}})):
        index.write_text(content)
        caplog.clear()
        assert check(folder).loaded.weights_digest == expected
        assert "model.safetensors is read; model.safetensors.index.json, which is of other files, is not" in caplog.text
    tensors = load_file(folder / "model.safetensors")
    head = tensors.pop(HEAD)
    save_file(tensors, folder / "model.safetensors")
    save_file({HEAD: head}, folder / "head.safetensors")
    index.write_text(
        json.dumps({"weight_map": dict.fromkeys(tensors, "model.safetensors") | {HEAD: "head.safetensors"}})
    )
    assert Model(folder).loaded.weights_digest == expected, "one of the files that the index names"


def test_an_index_that_forgets_tensors(tmp_path: Path) -> None:
    folder = make_llama(tmp_path / "made", shards=True)
    expected = Model(folder).loaded.weights_digest
    index = folder / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    for forgotten in ("model.norm.weight", "model.layers.1.mlp.up_proj.weight"):
        kept = {name: file for name, file in places.items() if name != forgotten}
        index.write_text(json.dumps({"weight_map": kept}))
        assert Model(folder).loaded.weights_digest == expected
    index.write_text(json.dumps({"weight_map": places | {"model.layers.9.a": places[HEAD]}}))
    with pytest.raises(LoaderError, match=r"1 tensors that the model does not use: model.layers.9.a"):
        Model(folder)
    index.write_text(json.dumps({"weight_map": places | {HEAD: places["model.layers.0.mlp.up_proj.weight"]}}))
    with pytest.raises(LoaderError, match=r"tensor lm_head.weight cannot be read: the file does not hold it"):
        Model(folder)


@pytest.mark.parametrize("field", ["embedding_multiplier", "attention_multiplier", "residual_multiplier"])
def test_multipliers_of_0(tmp_path: Path, field: str) -> None:
    check(make_checkpoint(tmp_path / "made", "granite", **{field: 0.0}))


def test_a_divisor_of_0_is_named(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "made", "granite")
    edit_config(folder, logits_scaling=0)
    with pytest.raises(LoaderError, match=r"config.json: logits_scaling must be a number above 0, not 0"):
        Model(folder)


def test_multipliers_of_0_in_gguf_are_absent(tmp_path: Path) -> None:
    """As in llama.cpp."""
    folder = make_checkpoint(tmp_path / "made", "granite", residual_multiplier=1.0, embedding_multiplier=1.0)
    zeros = {"granite.residual_scale": 0.0, "granite.embedding_scale": 0.0}
    check(folder, write_gguf(folder, tmp_path / "model.gguf", all_of(Type.F32), metadata=zeros), dtype="float32")
