"""Weights in few bits of `cpu_limits`: the files that are made, the bytes that are counted, and who has which."""

from __future__ import annotations

import ctypes
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.common.checkpoints import SHAPES
from benchmarks.common.forward_step import make_runner, step_batch
from benchmarks.common.rows import BenchmarkError
from benchmarks.peers.gguf_file import QUANTIZED_TYPES, gguf_of, gguf_path
from benchmarks.peers.openvino_genai import int4_group, weights_text
from benchmarks.serving import opening
from benchmarks.serving.machine_limits import NATIVE, chosen_isa
from benchmarks.serving.opening import WEIGHTS, model_path, openvino_weights, prepare_weights, rounding_option
from benchmarks.serving.step_work import (
    Chunk,
    Matrices,
    StoredMatrix,
    StoredWeights,
    decoder_work,
    gguf_weights,
    rounded_weights,
)
from executor_svc.cpu.kernels.codegen.isa import forced_isa
from executor_svc.device.kv_layout import KVLayout, LayerKV
from executor_svc.models.gguf.block_types import BLOCK_TYPES
from tests.checkpoints import make_checkpoint

MIXED = Path(__file__).parents[1] / "data" / "gguf" / "llama-q4_k_m.gguf"
needs_level = pytest.mark.skipif(chosen_isa(None) == NATIVE, reason="integer products are those of x86-64")


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_checkpoints_gguf_file_is_the_same_model(family: str, tmp_path: Path) -> None:
    shape = {"max_position_embeddings": 1024, "vocab_size": 1300}
    folder = make_checkpoint(tmp_path / "model", family, dtype=torch.bfloat16, **shape)
    path = gguf_of(folder, tmp_path)
    assert path == gguf_path(folder, tmp_path)
    loaded = [make_runner(model, 1) for model in (folder, path)]
    found = [each.runner.forward(step_batch([(5, 1), (0, 9)], each.layout)).clone() for each in loaded]
    assert torch.equal(*found)
    assert [each.name for each in tmp_path.iterdir() if each.suffix == ".part"] == []


class FakeLlama(types.ModuleType):
    """llama_cpp whose quantizer writes the number of the file type."""

    def __init__(self, code: int = 0) -> None:
        super().__init__("llama_cpp")
        self.code = code
        self.sources: list[bytes] = []

    def llama_backend_init(self) -> None:
        pass

    def llama_model_quantize_default_params(self) -> ctypes.Structure:
        class Params(ctypes.Structure):
            _fields_ = [("ftype", ctypes.c_int), ("nthread", ctypes.c_int)]

        self.params = Params()
        return self.params

    def llama_model_quantize(self, source: bytes, path: bytes, params: Any) -> int:
        self.sources.append(source)
        Path(path.decode()).write_text(str(self.params.ftype), encoding="utf-8")
        return self.code


def test_few_bits_are_made_by_llama_cpp_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    dense = gguf_path(tmp_path, tmp_path)
    dense.touch()
    library = FakeLlama()
    monkeypatch.setitem(sys.modules, "llama_cpp", library)
    for weights, number in QUANTIZED_TYPES.items():
        for _ in range(2):
            path = gguf_of(tmp_path, tmp_path, weights)
            assert path.name == f"{dense.stem}-{weights}.gguf"
            assert path.read_text(encoding="utf-8") == str(number)
    assert library.sources == [str(dense).encode()] * len(QUANTIZED_TYPES)
    monkeypatch.setitem(sys.modules, "llama_cpp", FakeLlama(code=1))
    gguf_path(tmp_path, tmp_path, "Q4_0").unlink()
    with pytest.raises(RuntimeError, match="llama_model_quantize failed with 1"):
        gguf_of(tmp_path, tmp_path, "Q4_0")
    assert not gguf_path(tmp_path, tmp_path, "Q4_0").exists()


def test_a_gguf_file_needs_an_interpreter_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}', encoding="utf-8")
    monkeypatch.setattr(opening, "CACHE", tmp_path)
    prepare_weights(tmp_path, "bf16", None)
    prepare_weights(tmp_path, "int4", None)
    with pytest.raises(BenchmarkError, match="--weights Q4_0: --llama-python is needed once"):
        prepare_weights(tmp_path, "Q4_0", None)
    with pytest.raises(BenchmarkError, match="gpt2 model"):
        prepare_weights(tmp_path, "Q4_0", Path(sys.executable))
    gguf_path(tmp_path, tmp_path, "Q4_0").touch()
    prepare_weights(tmp_path, "Q4_0", None)


def test_what_stands_beside_what(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    assert WEIGHTS == ("bf16", "Q8_0", "Q4_0", "Q4_K_M", "MXFP4", "int8", "int4")
    assert [openvino_weights(each) for each in WEIGHTS] == ["bf16", "int8", "int4", "int4", "MXFP4", "int8", "int4"]
    assert [rounding_option(each) for each in WEIGHTS[-2:]] == [{"quantization": "int8"}, {"quantization": "int4"}]
    assert rounding_option("bf16") == rounding_option("Q4_0") == {}
    assert [model_path(tmp_path, each) == tmp_path for each in WEIGHTS] == [
        *(True, False, False, False, False, True, True)
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--weights int4 --systems cadenza,llama.cpp", "llama.cpp: not with --weights int4, which cadenza, openvino"),
        (
            "--weights Q4_0 --systems vllm",
            "vllm: not with --weights Q4_0, which cadenza, llama.cpp, ik_llama.cpp, openvino",
        ),
    ],
)
def test_a_peer_without_such_weights_is_refused(options: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cpu_limits", *options.split()]) == 1
    assert message in capsys.readouterr().err


def test_openvinos_groups_divide_the_columns() -> None:
    assert {shape: int4_group(config) for shape, config in SHAPES.items()} == {
        "10m": 128, "135m": 32, "135m-131k": 32, "qwen3-0.6b": 128, "1b": 128,
        "olmoe-4l": 128, "qwen3-30b-a3b-3l": 128, "qwen3.5-0.8b": 128, "lfm2.5-1.2b": 128,
    }  # fmt: skip
    assert weights_text("int4", SHAPES["135m"]).startswith("int4 by groups of 32, symmetric")
    # The head's size may be given: 3 heads of 32 are 96 columns.
    config = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 3, "head_dim": 32}
    assert int4_group(config) == 32


@needs_level
def test_a_files_matrices_are_counted_as_they_are_stored() -> None:
    """A mixed file with a tied table in Q6_K."""
    isa = forced_isa(None)
    stored = gguf_weights(MIXED, isa, "off")
    assert stored.activations == "bf16"
    counted = dict.fromkeys(("Q4_K", "Q5_0", "Q6_K", "Q8_0"), 0)
    for each in stored.matrices:
        assert each.format is not None
        counted[each.format.name] += each.num_bytes
    assert counted == {"Q4_K": 4608 + 18432 + 9216 + 9216, "Q5_0": 22528, "Q6_K": 20160 + 6720, "Q8_0": 17408}
    assert stored.stored_bytes == sum(counted.values()) + 3 * 1024
    head = [each for each in stored.matrices if each.part == "head"]
    assert [(each.parameters, each.num_bytes) for each in head] == [(96 * 256, 20160)]
    both = gguf_weights(MIXED, isa, "int8")
    assert both.activations == "int8"
    work = both.work(decoder_work(SHAPES["10m"]))
    assert work.weight_bytes == sum(each.num_bytes for each in both.matrices) < both.stored_bytes
    assert work.head == Matrices(head[0].parameters, head[0].num_bytes, head[0].parameters)
    assert work.layers.int8_parameters == work.layers.parameters


def test_formats_in_int8_are_named_where_others_are_not() -> None:
    four, six = (BLOCK_TYPES[name].format for name in ("Q4_K", "Q6_K"))
    matrices = (
        StoredMatrix("layers", 512, 288, four),
        StoredMatrix("layers", 256, 210, six),
        StoredMatrix("head", 8, 16, None),
    )
    stored = StoredWeights(matrices, 514, frozenset({four}))
    assert stored.activations == "int8 for Q4_K; else bf16"
    assert stored.words_in_short == 8
    work = stored.work(decoder_work(SHAPES["10m"]))
    assert (work.layers, work.head) == (Matrices(768, 498, 512), Matrices(8, 16))


@needs_level
def test_rounded_weights_have_a_scale_for_32_columns() -> None:
    dense, isa = decoder_work(SHAPES["10m"]), forced_isa(None)
    layers, head = dense.layers.parameters, dense.head.parameters
    stored = rounded_weights(dense, False, "int4", isa, "auto")
    assert stored.work(dense).layers == Matrices(layers, layers * 18 // 32, layers)
    assert stored.work(dense).head == Matrices(head, head * 34 // 32, head)
    assert stored.stored_bytes == layers * 18 // 32 + 2 * (head * 34 // 32)  # its table of embeddings is not the head
    assert rounded_weights(dense, True, "int8", isa, "off").stored_bytes == (layers + head) * 34 // 32


def test_a_mixtures_work_counts_the_experts_that_rows_choose() -> None:
    """Read once each, as many as the routers chose; every row is multiplied with its own."""
    sizes = SHAPES["olmoe-4l"]
    work = decoder_work(sizes)
    assert work.experts is not None
    one = 4 * 3 * 2048 * 1024
    assert work.experts.one == Matrices(one, 2 * one)
    assert work.layers.parameters == 4 * 2048 * (4 * 2048 + 64)
    counted = replace(work, experts=replace(work.experts, touched={1: 8.0, 3: 20.0}))
    for rows, touched in ((1, 8), (2, 14), (3, 20), (9, 20)):
        found = counted.step([Chunk(0, 1)] * rows)
        without = replace(work, experts=None).step([Chunk(0, 1)] * rows)
        assert found.read_bytes - without.read_bytes == 2 * one * touched
        assert found.flops - without.flops == 2 * one * 8 * rows
    assert counted.weight_bytes == counted.layers.num_bytes + counted.head.num_bytes + 8 * 2 * one


def test_more_sequences_than_blocks_are_refused() -> None:
    layout = KVLayout.of([LayerKV(1, 16)], 16, torch.float32)
    with pytest.raises(BenchmarkError, match="64 sequences take 832 blocks, of 560"):
        step_batch([(192, 1)] * 64, layout)


def test_states_of_a_step_are_in_no_blocks_pages() -> None:
    """Nor in those of another step."""
    layout = KVLayout.of([LayerKV(1, 16), LayerKV(0, 16)], 16, torch.float32, units=[(), (4096, 8192)])
    batches = [step_batch([(192, 1)] * count, layout) for count in (1, 16, 43)]
    states = [batch.states.tables for batch in batches if batch.states is not None]
    assert [each.shape for each in states] == [(count, layout.pages_per_state) for count in (1, 16, 43)]
    assert all(int(each.min()) > max(int(batch.block_tables.max()) for batch in batches) for each in states)
