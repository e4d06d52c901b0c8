"""Models in few bits on a GPU: tokens of the same numbers kept dense, their memory, and what is refused."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type

from executor_svc.device.dequantize import dequantize
from executor_svc.device.interface import DeviceError
from executor_svc.device.stored_linear import FewBits, StoredLinear
from executor_svc.gpu.kernels.few_bits import widening
from executor_svc.gpu.linear import GpuLinear, PlainLinear, Quantization, SumsWorkspace, make_linear
from executor_svc.gpu.stored_linear import GpuStoredLinear
from tests.checkpoints import make_checkpoint
from tests.executor_svc.cpu.kernels.quantized.formats import Q4_K, Q6_K, format_of, random_block
from tests.executor_svc.cpu.kernels.quantized.formats_in_memory import BlockRows
from tests.executor_svc.driver import Model
from tests.executor_svc.gpu.runner.test_families import tokens_of
from tests.helpers.marks import short_and_long
from tests.helpers.models.gguf_files import Kinds, dequantized, low_bits, write_gguf
from tests.helpers.models.quantized_layouts import quantize_checkpoint

GPU: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16"}
SHAPE: dict[str, Any] = {
    "vocab_size": 131, "hidden_size": 128, "intermediate_size": 96, "head_dim": 64, "num_hidden_layers": 1,
}  # fmt: skip


def mixed(name: str) -> Type:
    """Return another type for each part of a fused projection, one of them dense."""
    parts = {"attn_q": Type.Q5_1, "attn_k": Type.Q8_0, "attn_v": Type.F16, "ffn_gate": Type.Q4_1, "ffn_up": Type.Q5_0}
    return next((kind for part, kind in parts.items() if f".{part}." in name), Type.Q4_0)


def mixed_experts(name: str) -> Type:
    """Return types of which gate and up of an expert have different ones."""
    parts = {"ffn_gate_inp": Type.F32, "ffn_gate_exps": Type.Q4_1, "ffn_up_exps": Type.Q8_0}
    return next((kind for part, kind in parts.items() if f".{part}." in name), Type.Q4_0)


def forms(model: Model) -> set[str]:
    return {form.rpartition(": ")[2] for form in model.device.few_bits.forms}


@pytest.mark.parametrize(
    ("kinds", "tied"),
    short_and_long([(mixed, False), (mixed, True), (low_bits, True)], [(mixed, True), (low_bits, True)]),
)
def test_tokens_of_a_gguf_file_are_those_of_its_numbers(tmp_path: Path, kinds: Kinds, tied: bool) -> None:
    shape = SHAPE if kinds is mixed else SHAPE | {"hidden_size": 256, "intermediate_size": 256}
    folder = make_checkpoint(tmp_path / "made", "llama", tie_word_embeddings=tied, **shape)
    model = Model(write_gguf(folder, tmp_path / "mixed.gguf", kinds), **GPU)
    assert forms(model) == {"weights alone"}
    assert ("IQ4_XS (4.2 bits a number in the file, 8." in model.device.few_bits.summary) == (kinds is low_bits)
    assert tokens_of(model) == tokens_of(Model(dequantized(folder, tmp_path / "dense", kinds), **GPU))


@pytest.mark.parametrize("layout", short_and_long(["gptq with desc_act", "fp8 in blocks"], ["gptq with desc_act"]))
def test_tokens_of_a_checkpoint_are_those_of_its_numbers(tmp_path: Path, layout: str) -> None:
    folder = make_checkpoint(tmp_path / "made", "llama", **SHAPE)
    quantize_checkpoint(folder, layout, tmp_path / "few bits", tmp_path / "dense")
    model, dense = Model(tmp_path / "few bits", **GPU), Model(tmp_path / "dense", **GPU)
    assert forms(model) == {"weights alone"}
    assert model.loaded.geometry.weight_bytes < dense.loaded.geometry.weight_bytes
    assert tokens_of(model) == tokens_of(dense)
    with pytest.raises(DeviceError, match=r"--quantization int8: .* is in few bits already; use --quantization none"):
        Model(tmp_path / "few bits", quantization="int8", **GPU)


@pytest.mark.parametrize("layout", ["gptq with desc_act", "mxfp4", "GGUF"])
def test_tokens_of_a_mixture_in_few_bits_are_those_of_its_numbers(tmp_path: Path, layout: str) -> None:
    shape = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "head_dim": 64}
    folder = make_checkpoint(tmp_path / "made", "qwen3_moe", num_hidden_layers=1, **shape)
    dense = tmp_path / "dense"
    if layout == "GGUF":
        few_bits = write_gguf(folder, tmp_path / "mixed.gguf", mixed_experts)
        dequantized(folder, dense, mixed_experts)
    else:
        few_bits = tmp_path / "few bits"
        quantize_checkpoint(folder, layout, few_bits, dense)
    model = Model(few_bits, **GPU)
    assert forms(model) == {"weights alone"}
    assert tokens_of(model) == tokens_of(Model(dense, **GPU))


def test_experts_are_quantized_and_routers_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One in float32, as GLM-4.5 has it, could not be."""
    made: list[tuple[torch.dtype, int, str]] = []

    def noted(weight: torch.Tensor, bias: Any, quantization: Quantization, workspace: SumsWorkspace) -> GpuLinear:
        made.append((weight.dtype, len(weight), quantization))
        return make_linear(weight, bias, quantization, workspace)

    monkeypatch.setattr("executor_svc.gpu.device.make_linear", noted)
    shape = {"num_hidden_layers": 2, "moe_intermediate_size": 24, "n_routed_experts": 7, "n_group": 1, "topk_group": 1}
    folder = make_checkpoint(tmp_path, "glm4_moe", **shape)
    model = Model(folder, quantization="int8", **GPU)
    assert [each for each in made if each[0] == torch.float32] == [(torch.float32, 7, "none")]
    assert made.count((torch.bfloat16, 48, "int8")) >= 7
    assert [len(step) for step in tokens_of(model)] == [0, 2, 2]


def test_in_float32_weights_are_dense(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = make_checkpoint(tmp_path / "made", "llama", **SHAPE)
    quantize_checkpoint(folder, "awq", tmp_path / "few bits", tmp_path / "dense")
    with caplog.at_level(logging.WARNING):
        model = Model(tmp_path / "few bits", device="cuda", dtype="float32")
    assert forms(model) == {"dense"}
    assert "attention.qkv: no kernel for AWQ, kept in torch.float32" in caplog.text


def test_a_fused_linear_of_several_formats(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal formats that follow each other are one launch, one of another order of columns is not."""
    columns = 256
    kinds = [Q4_K, Q4_K, Q6_K, Q6_K, format_of("Q8_0", columns)]
    blocks = [random_block(kind, 30 + index, columns, seed=index) for index, kind in enumerate(kinds)]
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(1))
    orders = [None, None, None, order, None]
    few = [BlockRows(*each) for each in zip(kinds, blocks, orders, strict=True)]
    dense = torch.randn(20, columns).to(torch.bfloat16)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(5, columns, generator=generator).to(torch.bfloat16).to(device)
    bias = torch.randn(30 + 31 + 32 + 33 + 34 + 20, generator=generator).to(torch.bfloat16).to(device)

    weight = StoredLinear([*few, TensorRows(dense.to(device))], torch.bfloat16)
    noted = FewBits()
    linear = GpuStoredLinear("qkv", weight, bias, SumsWorkspace(device), noted)
    assert [isinstance(part, PlainLinear) for part in linear.parts] == [False, False, False, False, True]
    found = linear(x, out_dtype=torch.float32)
    # Many rows are multiplied with weights that are widened, and rounded, piece by piece.
    monkeypatch.setattr(widening, "_WIDE_BYTES", 2 * columns * 64)
    many = linear(torch.cat([x] * 27), out_dtype=torch.float32)

    numbers = [dequantize(block, kind) for block, kind in zip(blocks, kinds, strict=True)]
    numbers = [
        each.to(torch.bfloat16).float() if kind.group == 16 else each for each, kind in zip(numbers, kinds, strict=True)
    ]
    numbers[3] = torch.empty_like(numbers[3]).index_copy_(1, order, numbers[3])
    whole = torch.cat([*numbers, dense.float()]).double().to(device)
    expected = x.double() @ whole.t() + bias.double()
    bound = (columns + 8) * 2**-24 * (x.double().abs() @ whole.abs().t() + bias.double().abs())
    assert ((found.double() - expected).abs() <= bound).all()
    assert torch.equal(linear(x), found.to(torch.bfloat16))
    rounded = 2**-8 * (x.double().abs() @ whole.abs().t())
    for rows in many.split(5):
        assert ((rows.double() - expected).abs() <= bound + rounded).all()
    assert noted.saved_bytes > 0


class TensorRows:
    """Implements `WeightRows`: a tensor in memory."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight, self.dtype = weight, weight.dtype
        self.shape = (weight.shape[0], weight.shape[1])

    def whole(self) -> torch.Tensor:
        return self.weight

    def blocks(self, num_bytes: int, multiple: int) -> Any:
        raise NotImplementedError
