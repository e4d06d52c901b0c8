"""The metadata of GGUF files: what config.json would say, ids of beginnings and ends, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Type

from cadenza_common.gguf.file import GgufFile, read_gguf
from executor_svc.config import ExecutorConfig
from executor_svc.models.base import ModelConfigError
from executor_svc.models.folder import LoaderError
from executor_svc.models.gguf.config_content import config_content, special_token_ids
from executor_svc.models.gguf.weights import read_vector
from executor_svc.models.registry import ARCHITECTURES
from executor_svc.simulated.model import simulated_model
from tests.checkpoints import make_checkpoint
from tests.executor_svc.driver import Model
from tests.helpers.models.gguf_files import all_of, write_gguf

MIXED = Path(__file__).parents[2] / "data" / "gguf" / "llama-q4_k_m.gguf"
SHAPE: dict[str, Any] = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}


def test_ends_of_chats_are_found_by_their_texts(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "source", "llama", **SHAPE)
    texts = [f"<{token}>" for token in range(96)]
    texts[7], texts[8], texts[9] = "<|im_end|>", "<|eot_id|>", "<|end|>"
    types = [1] * 96
    types[7], types[8] = 3, 4
    metadata = {"tokenizer.ggml.tokens": texts, "tokenizer.ggml.token_type": types, "tokenizer.ggml.eos_token_id": 8}
    path = write_gguf(folder, tmp_path / "model.gguf", all_of(Type.Q8_0), tokens=True, metadata=metadata)
    assert special_token_ids(read_gguf(path)) == ([7, 8, 9], 1)
    del metadata["tokenizer.ggml.eos_token_id"]
    path = write_gguf(folder, tmp_path / "model.gguf", all_of(Type.Q8_0), tokens=True, metadata=metadata)
    assert special_token_ids(read_gguf(path)) == ([2, 7, 8, 9], 1), "sentencepiece's own"


def test_a_beginning_beyond_the_vocabulary_is_none(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "source", "llama", **SHAPE)
    metadata = {"tokenizer.ggml.eos_token_id": 96, "tokenizer.ggml.bos_token_id": 2**31}
    loaded = Model(write_gguf(folder, tmp_path / "model.gguf", all_of(Type.Q8_0), metadata=metadata)).loaded
    assert (loaded.eos_token_ids, loaded.bos_token_id) == ((), None)


def content_of(tmp_path: Path, family: str = "llama", **metadata: Any) -> tuple[GgufFile, dict[str, Any]]:
    folder = make_checkpoint(tmp_path / "source", family, **SHAPE)
    path = write_gguf(folder, tmp_path / "model.gguf", all_of(Type.BF16), metadata=metadata)
    file = read_gguf(path)
    return file, config_content(file, lambda name: read_vector(file, name))


def test_numbers_are_those_of_config_json(tmp_path: Path) -> None:
    """Numbers that were rounded to float32 become those that they were; layers of one number may be a list."""
    _, content = content_of(
        tmp_path, "granite", **{"granite.residual_scale": 0.22, "granite.attention.head_count": [4]}
    )
    assert content["rms_norm_eps"] == 1e-5
    assert content["residual_multiplier"] == 0.22
    assert content["num_attention_heads"] == 4
    spec = ARCHITECTURES[content["architectures"][0]](content)
    assert (spec.qkv_bias, spec.mlp_bias, spec.tied, spec.residual_scale) == (True, True, False, 0.22)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "gemma2", "gemma3_text", "phi3"])
def test_the_kind_of_model_is_that_of_config_json(tmp_path: Path, family: str) -> None:
    _, content = content_of(tmp_path, family)
    assert content["model_type"] == family


@pytest.mark.parametrize(
    ("family", "layers", "scalar"), [("gemma2", 46, 16), ("gemma3_text", 62, 16), ("gemma2", 4, 12)]
)
def test_attention_scale_of_the_largest_gemmas(tmp_path: Path, family: str, layers: int, scalar: int) -> None:
    """It is of hidden_size / num_attention_heads in the 27B models, known by their layers, as in llama.cpp."""
    architecture = family.removesuffix("_text")
    _, content = content_of(tmp_path, family, **{f"{architecture}.block_count": layers})
    assert content["query_pre_attn_scalar"] == scalar
    assert content["head_dim"] == 12


def test_as_many_windows_as_layers_may_be(tmp_path: Path) -> None:
    """A count of 2**31 layers is refused by the family, and no list of them is made before."""
    metadata = {"gemma2.attention.sliding_window_pattern": 2, "gemma2.block_count": 2**31}
    _, content = content_of(tmp_path, "gemma2", **metadata)
    assert len(content["layer_types"]) <= 10_000
    with pytest.raises(ModelConfigError, match="num_hidden_layers must be at most 10000"):
        ARCHITECTURES["Gemma2ForCausalLM"](content)


def test_windows_by_layer(tmp_path: Path) -> None:
    pattern = {"gemma2.attention.sliding_window_pattern": [True, False, False, True]}
    _, content = content_of(tmp_path, "gemma2", **pattern)
    spec = ARCHITECTURES["Gemma2ForCausalLM"](content | {"num_hidden_layers": 4})
    assert [layer.window for layer in spec.layers] == [24, None, None, 24]


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with biases."""
    return make_checkpoint(tmp_path_factory.mktemp("biased") / "llama", "llama", **SHAPE, attention_bias=True)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"general.architecture": "mamba"}, "architecture 'mamba' is not supported in GGUF files"),
    "no layers": ({"llama.block_count": 0}, "metadata llama.block_count must be an integer of at least 1, not 0"),
    "many layers": ({"llama.block_count": 2**31}, "num_hidden_layers must be at most 10000, not 2147483648"),
    "a text": ({"llama.embedding_length": "64"}, "metadata llama.embedding_length must be an integer"),
    "experts": ({"llama.expert_count": 8}, "metadata llama.expert_used_count is missing"),
    "values": ({"llama.attention.value_length": 8}, "metadata llama.attention.value_length must be the key length, 16"),
    "layers differ": ({"llama.attention.head_count_kv": [2, 4]}, "head_count_kv must be one positive integer for all"),
    "partial rope": ({"llama.rope.dimension_count": 8}, "rope.dimension_count must be the size of a head, 16, not 8"),
    "rope": ({"llama.rope.scaling.type": "su"}, "metadata llama.rope.scaling.type 'su' is not supported"),
    "theta": ({"llama.rope.freq_base": float("nan")}, "metadata llama.rope.freq_base must be a finite number"),
    "log": (
        {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.yarn_log_multiplier": 0.1},
        "metadata llama.rope.scaling.yarn_log_multiplier other than 0 is not supported",
    ),
    "width": ({"llama.feed_forward_length": 2**20}, "tensor blk.0.ffn_gate.weight has shape [64, 64], the metadata"),
    "eos": ({"tokenizer.ggml.eos_token_id": "1"}, "metadata tokenizer.ggml.eos_token_id must be"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_metadata_that_is_refused(tmp_path: Path, biased: Path, name: str) -> None:
    metadata, message = REFUSED[name]
    path = write_gguf(biased, tmp_path / "model.gguf", all_of(Type.Q8_0), metadata=metadata)
    with pytest.raises(LoaderError, match=re.escape(message)) as found:
        Model(path)
    assert str(path) in str(found.value)


def test_simulated_executor_takes_the_sizes(tmp_path: Path) -> None:
    model = simulated_model(ExecutorConfig(model=str(MIXED), simulate="instant"))
    sizes = model.geometry
    assert (sizes.vocab_size, sizes.num_layers, sizes.num_kv_heads, sizes.head_size) == (96, 1, 1, 32)
    assert sizes.max_model_len == 512
    path = tmp_path / "model.gguf"
    path.write_bytes(MIXED.read_bytes().replace(b"\5\0\0\0\0\0\0\0llama", b"\5\0\0\0\0\0\0\0mamba", 1))
    with pytest.raises(LoaderError, match="architecture 'mamba' is not supported in GGUF files"):
        simulated_model(ExecutorConfig(model=str(path), simulate="instant"))


GEMMA4_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no pattern": ({"gemma4.attention.sliding_window_pattern": [True]}, "sliding_window_pattern must have a flag for"),
    "few heads": ({"gemma4.attention.head_count_kv": [2]}, "head_count_kv must be positive integers for 6 layers"),
    "other heads": ({"gemma4.attention.head_count_kv": [2, 1, 4, 1, 2, 1]}, "head_count_kv must be one number for s"),
    "no heads": ({"gemma4.attention.head_count_kv": [2, 0, 2, 1, 2, 1]}, "head_count_kv must be positive integers"),
    "widths": ({"gemma4.feed_forward_length": [72, 72, 90, 144, 144, 144]}, "feed_forward_length must be that of the"),
    "values": ({"gemma4.attention.value_length_swa": 8}, "value_length_swa must be the key length, 12"),
    "shared": (
        {"gemma4.attention.shared_kv_layers": 6, "gemma4.feed_forward_length": 72},
        "num_kv_shared_layers 6 must be below num_hidden_layers 6",
    ),
    "experts": ({"gemma4.expert_count": 8}, "metadata gemma4.expert_used_count is missing"),
}


@pytest.fixture(scope="module")
def gemma4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("gemma4"), "gemma4_text", attention_bias=False)


@pytest.mark.parametrize("name", GEMMA4_REFUSED)
def test_layers_of_gemma4_that_are_refused(tmp_path: Path, gemma4: Path, name: str) -> None:
    metadata, message = GEMMA4_REFUSED[name]
    path = write_gguf(gemma4, tmp_path / "model.gguf", all_of(Type.BF16), metadata=metadata)
    with pytest.raises(LoaderError, match=re.escape(message)):
        Model(path)


def test_angles_of_gemma4_that_are_refused(tmp_path: Path, gemma4: Path) -> None:
    path = write_gguf(gemma4, tmp_path / "model.gguf", all_of(Type.BF16))
    file = read_gguf(path)
    with pytest.raises(LoaderError, match=r"rope_freqs\.weight must hold 1, and 1e30 from some number on"):
        config_content(file, lambda name: [1.0, 2.0, 1e30] if name == "rope_freqs.weight" else None)


MIXTURES_REFUSED: list[tuple[str, str, Any, str]] = [
    ("qwen3_moe", "qwen3moe.expert_gating_func", 2, "is 2, which is not supported; supported: 1"),
    ("qwen3_moe", "qwen3moe.expert_used_count", 9, "num_experts_per_tok 9 is more than the 8 experts to choose"),
    ("qwen3_moe", "qwen3moe.expert_feed_forward_length", [0, 0], "must be one positive integer for all layers"),
    ("glm4_moe", "glm4moe.expert_gating_func", 1, "is 1, which is not supported; supported: 2"),
    ("glm4_moe", "glm4moe.expert_gating_func", "sigmoid", "must be an integer of at least 0, not 'sigmoid'"),
    ("glm4_moe", "glm4moe.expert_weights_norm", 1, "must be true or false, not 1"),
    ("granitemoe", "granitemoe.expert_gating_func", 2, "is 2, which is not supported; supported: 1, 3"),
    ("deepseek_v3", "deepseek2.expert_gating_func", 3, "is 3, which is not supported; supported: 1, 2"),
]


@pytest.mark.parametrize(("family", "key", "value", "message"), MIXTURES_REFUSED)
def test_routers_that_are_refused(tmp_path: Path, family: str, key: str, value: Any, message: str) -> None:
    folder = make_checkpoint(tmp_path / "made", family)
    path = write_gguf(folder, tmp_path / "model.gguf", all_of(Type.BF16), metadata={key: value})
    with pytest.raises(LoaderError, match=re.escape(message)):
        Model(path)
