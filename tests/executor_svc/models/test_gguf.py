"""GGUF files in the executor: blocks, tensors and their order, and which tensors are refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from cadenza_common.gguf.file import TENSOR_TYPES, GgufError, GgufTensor, read_gguf
from executor_svc.device.dequantize import dequantize
from executor_svc.device.stored_linear import QuantRows
from executor_svc.models.folder import LoaderError, check_files, tokenizer_of
from executor_svc.models.gguf.block_types import BLOCK_TYPES
from executor_svc.models.gguf.tensor_names import TensorNames, halves
from executor_svc.models.gguf.weights import GgufRows, GgufWeights
from executor_svc.models.parallel.part import Part
from executor_svc.models.safetensors_file import StoredTensor
from tests.checkpoints import make_checkpoint
from tests.executor_svc.driver import Model
from tests.helpers.models.gguf_blocks import places_of_scales, random_blocks, set_scale
from tests.helpers.models.gguf_files import all_of, write_gguf
from tests.helpers.models.gguf_tensors import neighbours

DATA = Path(__file__).parents[2] / "data" / "gguf"
MIXED = DATA / "llama-q4_k_m.gguf"
HEAD_SIZE = 32
CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
CLEAR = 0.05
"""llama.cpp rounds its activations to 8 bits: its best tokens are compared where they win by this share."""


def weights_of(path: Path, dtype: torch.dtype = torch.float32) -> GgufWeights:
    return GgufWeights(read_gguf(path), TensorNames("llama", HEAD_SIZE), dtype, CPU)


def whole(rows: QuantRows, num_bytes: int = 1 << 20, multiple: int = 1) -> Tensor:
    return torch.cat([dequantize(block, rows.format) for block in rows.blocks(num_bytes, multiple)])


def by_gguf(path: Path, name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    found = next(each for each in gguf.GGUFReader(path).tensors if each.name == name)
    numbers: np.ndarray[Any, np.dtype[np.float32]] = gguf.dequantize(found.data, found.tensor_type)
    return numbers


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_blocks_are_what_ggml_wrote(name: str) -> None:
    tensor = read_gguf(DATA / "types.gguf").tensors[name]
    raw = np.fromfile(tensor.path, np.uint8, tensor.num_bytes, offset=tensor.offset)
    stored = torch.from_numpy(raw).reshape(3, -1, tensor.type.block_bytes)
    block = BLOCK_TYPES[name].unpack(stored)
    assert block.codes.shape == (3, 512)
    np.testing.assert_array_equal(dequantize(block, BLOCK_TYPES[name].format).numpy(), by_gguf(tensor.path, name))


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_blocks_of_any_bits(name: str) -> None:
    """All codes and sub scales, and scales of all kinds, as gguf's dequantize has them, to the bit; one block, too."""
    kind = BLOCK_TYPES[name]
    columns, size = gguf.GGML_QUANT_SIZES[Type[name]]
    raw = np.random.default_rng(1).integers(0, 256, (64, 2, size), np.uint8)
    if name == "MXFP4":
        raw[raw[:, :, 0] == 255, 0] = 254  # NaN of this type; gguf reads it as 2**128
    block = kind.unpack(torch.from_numpy(raw.copy()))
    most = {"TQ1_0": 2, "IQ2_S": 10, "IQ2_XS": 10, "IQ2_XXS": 10, "IQ1_S": 10, "IQ1_M": 10}
    assert int(block.codes.max()) == most.get(name, 2**kind.format.bits - 1)
    with np.errstate(invalid="ignore", over="ignore"):
        wanted = gguf.dequantize(raw.reshape(64, -1), Type[name])
    found = dequantize(block, kind.format).numpy()
    known = ~np.isnan(wanted)
    assert (np.isnan(found) == ~known).all()
    np.testing.assert_array_equal(found[known].view(np.int32), wanted[known].view(np.int32))
    assert wanted.shape == (64, 2 * columns)
    one = dequantize(kind.unpack(torch.from_numpy(raw[:1, :1])), kind.format).numpy()
    np.testing.assert_array_equal(one, found[:1, :columns])


def test_fused_projection_mixes_formats() -> None:
    """Q4_K_M: attn_v has more bits than the others, and so has the table, which is the head too."""
    weights = weights_of(MIXED)
    shapes = {"q_proj": (128, 256), "k_proj": (32, 256), "v_proj": (32, 256), "o_proj": (256, 128)}
    found = {}
    for name, shape in shapes.items():
        rows = weights.open_linear(f"model.layers.0.self_attn.{name}", shape)
        assert isinstance(rows, QuantRows)
        found[name] = rows.format.name
        stored = by_gguf(MIXED, f"blk.0.attn_{'output' if name == 'o_proj' else name[0]}.weight")
        back = whole(rows).numpy()
        if name in ("q_proj", "k_proj"):
            back = neighbours(back, shape[0] // HEAD_SIZE)
        np.testing.assert_array_equal(back, stored)
    assert found == {"q_proj": "Q4_K", "k_proj": "Q4_K", "v_proj": "Q6_K", "o_proj": "Q5_0"}
    table = weights.open_linear("model.embed_tokens", (96, 256))
    assert isinstance(table, QuantRows)
    assert table.format.name == "Q6_K"


@pytest.mark.parametrize(("num_bytes", "multiple"), [(1, 1), (256 * 50, 1), (1, 12), (256 * 100, 32)])
def test_heads_stay_whole_in_any_blocks(num_bytes: int, multiple: int) -> None:
    rows = [weights_of(MIXED).open_linear("model.layers.0.self_attn.q_proj", (128, 256)) for _ in range(2)]
    assert all(isinstance(each, QuantRows) for each in rows)
    found = whole(rows[0], num_bytes, multiple)  # type: ignore[arg-type]
    torch.testing.assert_close(found, whole(rows[1]), rtol=0, atol=0)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint with biases, and its GGUF file in BF16."""
    root = tmp_path_factory.mktemp("dense")
    folder = make_checkpoint(root / "llama", "llama", dtype=torch.bfloat16, **SHAPE, attention_bias=True)
    return folder, write_gguf(folder, root / "model.gguf", all_of(Type.BF16))


@pytest.mark.parametrize("rows", [1, 7, 16, 24, 1000])
def test_dense_rows_change_places_too(dense: tuple[Path, Path], rows: int) -> None:
    from safetensors import safe_open

    folder, path = dense
    weights = GgufWeights(read_gguf(path), TensorNames("llama", 16), torch.bfloat16, CPU)
    with safe_open(folder / "model.safetensors", "pt") as file:
        for name in ("q_proj.weight", "k_proj.weight", "q_proj.bias", "v_proj.bias"):
            wanted = file.get_tensor(f"model.layers.0.self_attn.{name}")
            stored = weights.open(f"model.layers.0.self_attn.{name}", tuple(wanted.shape))
            blocks = [block.clone() for block in stored.blocks(rows)]
            assert all(len(block) == rows for block in blocks[:-1])
            torch.testing.assert_close(torch.cat(blocks), wanted, rtol=0, atol=0)


def test_biases_are_optional_one_by_one(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "source", "llama", **SHAPE, num_attention_heads=4, num_key_value_heads=2)
    sizes = {"attn_q": 64, "attn_k": 32, "attn_v": 32, "attn_output": 64, "ffn_gate": 64, "ffn_up": 64, "ffn_down": 64}
    zeros = {f"blk.0.{part}.bias": np.zeros(size, np.float32) for part, size in sizes.items()}
    draw = np.random.default_rng(3)
    some = {f"blk.0.{part}.bias": draw.standard_normal(sizes[part], np.float32) for part in ("attn_k", "ffn_up")}

    def model(name: str, biases: dict[str, Any]) -> Model:
        path = write_gguf(folder, tmp_path / f"{name}.gguf", all_of(Type.F32), more_tensors=biases)
        return Model(path, dtype="float32")

    models = [model("some", some), model("all", zeros | some), model("none", {})]
    found = [each.whole([5, 9, 33]) for each in models]
    assert torch.equal(found[0], found[1])
    assert models[0].loaded.weights_digest == models[1].loaded.weights_digest
    assert not torch.allclose(found[0], found[2])
    weights = GgufWeights(read_gguf(tmp_path / "some.gguf"), TensorNames("llama", 16), torch.float32, CPU)
    for name in ("q_proj", "k_proj"):
        whole = weights.open(f"model.layers.0.self_attn.{name}.bias", (sizes[f"attn_{name[0]}"],)).whole()
        part = Part((range(16, 32),), of_columns=False, total=len(whole))
        piece = weights.open_part(f"model.layers.0.self_attn.{name}.bias", tuple(whole.shape), part).whole()
        assert torch.equal(piece, whole[16:32])


@pytest.mark.slow
def test_the_log_names_types_and_what_they_take(tmp_path: Path) -> None:
    """Also of those with equal formats; a whole panel of rows, so that nothing is filled up."""
    columns = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    folder = make_checkpoint(tmp_path / "source", "llama", **SHAPE | columns)
    kinds = {"ffn_gate": Type.IQ2_XS, "ffn_up": Type.IQ2_S, "ffn_down": Type.Q3_K}
    path = write_gguf(
        folder, tmp_path / "model.gguf", lambda name: next((kinds[each] for each in kinds if each in name), Type.IQ4_XS)
    )
    few_bits = Model(path, quantized_activations="off").device.few_bits
    words = "bits a number in the file, 4.6 here): weights alone"
    assert few_bits.summary == (f"IQ2_S (2.6 {words}, IQ2_XS (2.3 {words}, IQ4_XS: weights alone, Q3_K: weights alone")
    assert few_bits.described("bfloat16") == "IQ2_S, IQ2_XS, IQ4_XS, Q3_K with bfloat16 activations"


def test_halves_undo_neighbours() -> None:
    values = np.arange(2 * 6 * 3, dtype=np.float32).reshape(12, 3)
    np.testing.assert_array_equal(halves(torch.from_numpy(neighbours(values, 2)), 6).numpy(), values)


@pytest.mark.slow
def test_tokens_equal_llama_cpp() -> None:
    """A mixed file, tied, by llama.cpp: its greedy tokens, where they are clear."""
    model, compared = Model(MIXED, dtype="float32", quantized_activations="off"), 0
    for each in json.loads(MIXED.with_suffix(".json").read_text(encoding="utf-8")):
        prompt, tokens = each["prompt"], each["tokens"]
        best = model.whole(prompt + tokens)[len(prompt) - 1 : -1].argmax(-1).tolist()
        clear = [gap > CLEAR for gap in each["gaps"]]
        assert [token for token, use in zip(best, clear, strict=True) if use] == [
            token for token, use in zip(tokens, clear, strict=True) if use
        ]
        compared += sum(clear)
    assert compared > 40


def test_what_a_file_gives_the_service(tmp_path: Path) -> None:
    """Model dtype, ids of ends, the file's path as source of the tokenizer; a folder with the file is the same."""
    folder = make_checkpoint(tmp_path / "source", "llama", **SHAPE)
    ends = {"tokenizer.ggml.eos_token_id": 5, "tokenizer.ggml.eot_token_id": 3, "tokenizer.ggml.bos_token_id": 1}
    path = write_gguf(folder, tmp_path / "model.gguf", all_of(Type.Q8_0), tokens=True, metadata=ends)
    loaded = Model(path).loaded
    assert loaded.geometry.dtype == "float32"
    assert loaded.geometry.architecture == "LlamaForCausalLM"
    assert loaded.geometry.num_parameters == sum(each.n_elements for each in gguf.GGUFReader(path).tensors)
    assert (loaded.eos_token_ids, loaded.bos_token_id, loaded.tokenizer) == ((3, 5), 1, str(path))
    assert tokenizer_of(str(path), path) == str(path)
    assert tokenizer_of(str(MIXED), MIXED) == ""
    check_files(path, with_weights=True)

    place = tmp_path / "folder"
    place.mkdir()
    path.rename(place / path.name)
    again = Model(place).loaded
    assert (again.weights_digest, again.spec_digest) == (loaded.weights_digest, loaded.spec_digest)
    assert again.tokenizer == str(place / path.name)


def test_digest_is_of_stored_bytes(tmp_path: Path) -> None:
    """One bit of one tensor, and the type of another, change it; parts of a file do not."""
    folder = make_checkpoint(tmp_path / "source", "llama", **SHAPE)
    path = write_gguf(folder, tmp_path / "model.gguf", all_of(Type.Q8_0))
    parts = write_gguf(folder, tmp_path / "parts.gguf", all_of(Type.Q8_0), tensors_per_file=4)
    first = next(tmp_path.glob("parts-00001-of-*.gguf"))
    assert not parts.exists()
    digest = Model(path).loaded.weights_digest
    assert Model(first).loaded.weights_digest == digest
    content, place = bytearray(path.read_bytes()), read_gguf(path).tensors["blk.0.ffn_up.weight"]
    content[place.offset + place.num_bytes - 1] ^= 1
    path.write_bytes(content)
    assert Model(path).loaded.weights_digest != digest


@pytest.mark.parametrize("name", BLOCK_TYPES)
@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf])
def test_scales_that_are_not_finite_are_refused(tmp_path: Path, name: str, scale: float) -> None:
    kind, path = next(each for each in TENSOR_TYPES.values() if each.name == name), tmp_path / "tensor"
    content = random_blocks(Type[name], 3, 512, seed=1)
    path.write_bytes(content.tobytes())
    rows = GgufRows(GgufTensor(path, name, kind, (3, 512), 0), (3, 512), None, lambda digest: None)
    assert whole(rows).isfinite().all()
    for place in places_of_scales(Type[name]):
        bad = content.copy()
        set_scale(bad[2, -kind.block_bytes :], Type[name], place, scale)
        path.write_bytes(bad.tobytes())
        with pytest.raises(LoaderError, match=f"tensor {name} has scales that are NaN or infinite"):
            whole(rows)


def test_a_file_that_changes_while_it_is_read(tmp_path: Path) -> None:
    """As large as before: only its numbers are of two models."""
    path, other = tmp_path / "model.gguf", tmp_path / "other"
    path.write_bytes(MIXED.read_bytes())
    file = read_gguf(path)
    weights = GgufWeights(file, TensorNames("llama", HEAD_SIZE), torch.float32, CPU)
    weights.check_all_used(lambda name: True)
    other.write_bytes(path.read_bytes())
    other.replace(path)
    with pytest.raises(GgufError, match=re.escape(f"{path}: the file has changed while it was read")):
        weights.check_all_used(lambda name: True)
    path.unlink()
    with pytest.raises(GgufError, match="cannot be read: No such file"):
        weights.check_all_used(lambda name: True)


def test_a_link_keeps_its_name(tmp_path: Path) -> None:
    """The hub's cache links names that end in .gguf to contents that do not; parts are beside the link."""
    blob, link = tmp_path / "blobs" / "0123", tmp_path / "snapshot" / "model.gguf"
    for each in (blob, link):
        each.parent.mkdir()
    folder = make_checkpoint(tmp_path / "source", "llama", **SHAPE)
    write_gguf(folder, tmp_path / "model.gguf", all_of(Type.Q8_0), tokens=True).rename(blob)
    link.symlink_to(blob)
    assert tokenizer_of(str(link), link) == Model(link).loaded.tokenizer == str(link)
    assert tokenizer_of(str(link.parent), link.parent) == str(link)


def test_tensors_that_are_refused(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "source", "llama", **SHAPE)

    def refused(message: str, path: Path) -> None:
        with pytest.raises(LoaderError, match=f"^{re.escape(str(path))}: {re.escape(message)}"):
            Model(path)

    odd = write_gguf(folder, tmp_path / "odd.gguf", all_of(Type.F32), more_tensors={"more": np.ones(3, np.float32)})
    refused("1 tensors that the model does not use: more", odd)
    path = write_gguf(folder, tmp_path / "model.gguf", all_of(Type.F32))
    content = path.read_bytes()
    renamed = tmp_path / "renamed.gguf"
    renamed.write_bytes(content.replace(b"blk.0.ffn_up", b"blk.0.ffn_xx"))
    refused("tensor blk.0.ffn_up.weight is missing", renamed)
    steep = {"rope_freqs.weight": np.full(8, 1e-30, np.float32)}
    refused(
        "max_model_len 512 has rotary angles over",
        write_gguf(folder, tmp_path / "steep.gguf", all_of(Type.F32), more_tensors=steep),
    )
    for number, kind, stored in ((26, "I32", "attn_v.weight"), (26, "I32", "attn_norm.weight")):
        at = content.index(f"blk.0.{stored}".encode()) + len(f"blk.0.{stored}")
        dimensions = int.from_bytes(content[at : at + 4], "little")
        at += 4 + 8 * dimensions
        typed = tmp_path / f"{stored}.gguf"
        typed.write_bytes(content[:at] + number.to_bytes(4, "little") + content[at + 4 :])
        refused(f"tensor blk.0.{stored} is {kind}, which is not supported; supported: F32, F16, BF16, Q8_0", typed)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_layers_of_multi_token_prediction_are_left_alone(tmp_path: Path, family: str) -> None:
    """They follow the model's in the file, which counts them; some of their tensors have names of their own."""
    shape = {**SHAPE, "num_hidden_layers": 2, "first_k_dense_replace": 1}
    folder = make_checkpoint(tmp_path / "source", family, **shape)
    kinds, name = all_of(Type.F32), {"deepseek_v3": "deepseek2"}.get(family, "glm4moe")
    alone = write_gguf(folder, tmp_path / "alone.gguf", kinds)
    more = {f"blk.2.{each}.weight": np.ones(3, np.float32) for each in ("attn_norm", "nextn.enorm", "nextn.eh_proj")}
    counts = {f"{name}.block_count": 3, f"{name}.nextn_predict_layers": 1}
    whole = write_gguf(folder, tmp_path / "whole.gguf", kinds, metadata=counts, more_tensors=more)
    assert torch.equal(Model(whole).whole([3, 4, 5]), Model(alone).whole([3, 4, 5]))


def test_tensors_are_checked_before_any_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names, shapes and types of linears, however many layers there are."""

    def read(stored: StoredTensor, rows: int) -> Iterator[Tensor]:
        raise AssertionError(f"{stored.name} is read")

    folder = make_checkpoint(tmp_path / "source", "llama", **SHAPE | {"num_hidden_layers": 3})
    path = write_gguf(folder, tmp_path / "model.gguf", all_of(Type.Q4_0))
    content = bytearray(path.read_bytes())
    at = content.index(b"blk.2.ffn_down.weight") + len("blk.2.ffn_down.weight") + 20
    assert content[at] == Type.Q4_0
    content[at] = Type.NVFP4  # of the same size
    path.write_bytes(content)
    monkeypatch.setattr(StoredTensor, "blocks", read)
    with pytest.raises(LoaderError, match=r"tensor blk\.2\.ffn_down\.weight is NVFP4, which is not supported"):
        Model(path)


def test_broken_file_names_itself(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(MIXED.read_bytes()[:-100])
    message = re.escape(f"--model {path}: {path}: tensor ")
    with pytest.raises(LoaderError, match=f"^{message}.* truncated"):
        Model(path)
    with pytest.raises(LoaderError, match=f"^{message}.* truncated"):
        check_files(path, with_weights=True)
    with pytest.raises(LoaderError, match=r"nothing\.gguf: no such file$"):
        Model(tmp_path / "nothing.gguf")
