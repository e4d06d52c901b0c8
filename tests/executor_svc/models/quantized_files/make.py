"""Writes the files of this folder: a linear in each layout, packed and dequantized by the code of the packages.

    python make.py FOLDER_OF_AUTO_GPTQ FOLDER_OF_AUTOAWQ

It needs compressed-tensors 0.20.0 installed, and the unpacked AutoGPTQ 0.7.1 wheel and AutoAWQ 0.2.9 source. A file
holds the tensors of a linear named `linear`, `expected` [N, K] float32 from the package's own dequantization, and
its quantization_config as metadata.
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

HERE = Path(__file__).parent
ROWS, COLUMNS, GROUP = 32, 64, 32


def save(name: str, tensors: dict[str, Tensor], expected: Tensor, config: dict[str, Any]) -> None:
    """Write a file."""
    named = {f"linear.{key}": tensor.contiguous() for key, tensor in tensors.items()}
    named["expected"] = expected.float().contiguous()
    save_file(named, HERE / f"{name}.safetensors", {"quantization_config": json.dumps(config)})


def compressed(name: str, form: str, scale_dtype: torch.dtype = torch.bfloat16, **fields: Any) -> None:
    """Write a file of compressed-tensors; fields: of its weights."""
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    activations = fields.pop("activations", None)
    args = QuantizationArgs(**fields)
    scheme = QuantizationScheme(
        targets=["Linear"], weights=args, input_activations=QuantizationArgs(**activations) if activations else None
    )
    weight = torch.randn(ROWS, COLUMNS)
    if args.strategy == "block":
        height, width = args.block_structure
        blocks = weight.unflatten(1, (-1, width)).unflatten(0, (-1, height))
        low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
    elif args.strategy == "tensor":
        low, high = weight.amin().reshape(1), weight.amax().reshape(1)
    else:
        groups = weight.unflatten(1, (-1, args.group_size if args.strategy == "group" else COLUMNS))
        low, high = groups.amin(2), groups.amax(2)
    scale, zero = calculate_qparams(low, high, args)
    state = {"weight": weight, "weight_scale": scale.to(scale_dtype), "weight_zero_point": zero}
    compressor = BaseCompressor.get_value_from_registry(form)
    stored = compressor.compress(state, scheme)
    wide = {key: tensor.float() if tensor.dtype == scale_dtype else tensor for key, tensor in stored.items()}
    expected = compressor.decompress(wide, scheme)["weight"]
    group = scheme.model_dump(mode="json")
    config = {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    save(name, stored, expected, config)


def gptq(name: str, package: Path, bits: int, *, symmetric: bool, desc_act: bool) -> None:
    """Write a file of AutoGPTQ, packed by its QuantLinear."""
    sys.path.insert(0, str(package / "auto_gptq" / "nn_modules" / "qlinear"))
    QuantLinear = importlib.import_module("qlinear_cuda").QuantLinear
    linear = torch.nn.Linear(COLUMNS, ROWS, bias=False, dtype=torch.float16)
    layer = QuantLinear(bits, GROUP, COLUMNS, ROWS, bias=False)
    largest = (1 << bits) - 1
    scales = (torch.rand(ROWS, COLUMNS // GROUP) + 0.5).half() / largest / 4
    zeros = torch.full_like(scales, (largest + 1) // 2) if symmetric else torch.randint(1, largest, scales.shape).half()
    g_idx = torch.arange(COLUMNS, dtype=torch.int32) // GROUP
    if desc_act:
        g_idx = g_idx[torch.randperm(COLUMNS)]
    codes = torch.randint(0, largest + 1, (ROWS, COLUMNS)).float()
    linear.weight.data = ((codes - zeros[:, g_idx].float()) * scales[:, g_idx].float()).half()
    layer.pack(linear, scales, zeros, g_idx)
    stored = {"qweight": layer.qweight, "qzeros": layer.qzeros, "scales": layer.scales, "g_idx": layer.g_idx}
    layer.scales, layer.autogptq_cuda_available = layer.scales.float(), False
    expected = layer(torch.eye(COLUMNS)).t()
    config = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "sym": symmetric, "desc_act": desc_act}
    save(name, stored, expected, config)


def awq(name: str, package: Path) -> None:
    """Write a file of AutoAWQ, packed by its WQLinear_GEMM."""
    for parent in ("awq", "awq.modules", "awq.modules.linear", "awq.utils"):
        module = types.ModuleType(parent)  # without what their __init__ imports
        module.__path__ = [str(package / parent.replace(".", "/"))]
        sys.modules[parent] = module
    sys.modules.setdefault("accelerate", types.ModuleType("accelerate"))  # imported there, and not used here
    gemm = importlib.import_module("awq.modules.linear.gemm")
    packing = importlib.import_module("awq.utils.packing_utils")
    linear = torch.nn.Linear(COLUMNS, ROWS, bias=False, dtype=torch.float16)
    scales = ((torch.rand(COLUMNS // GROUP, ROWS) + 0.5) / 64).half()
    zeros = torch.randint(0, 16, scales.shape).half()
    codes = torch.randint(0, 16, (COLUMNS, ROWS)).float()
    wide = [each.repeat_interleave(GROUP, 0).float() for each in (zeros, scales)]
    linear.weight.data = ((codes - wide[0]) * wide[1]).half().t().contiguous()
    layer = gemm.WQLinear_GEMM.from_linear(linear, 4, GROUP, scales=scales, zeros=zeros)
    stored = {"qweight": layer.qweight, "qzeros": layer.qzeros, "scales": layer.scales}
    expected = packing.dequantize_gemm(layer.qweight, layer.qzeros, layer.scales.float(), 4, GROUP).t()
    config = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
    save(name, stored, expected, config)


def main(auto_gptq: Path, autoawq: Path) -> None:
    """Write all files."""
    torch.manual_seed(23)
    group = {"strategy": "group", "group_size": GROUP}
    token = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
    token_fp8 = token | {"type": "float"}
    compressed("w4a16", "pack-quantized", num_bits=4, **group)
    compressed("w4a16_zero_points", "pack-quantized", num_bits=4, symmetric=False, **group)
    compressed("w8a16_channel", "pack-quantized", num_bits=8, strategy="channel")
    compressed("w8a16_zero_points", "pack-quantized", torch.float16, num_bits=8, symmetric=False, strategy="channel")
    compressed("w8a8", "int-quantized", num_bits=8, strategy="channel", activations=token)
    compressed("w8_tensor_zero_point", "naive-quantized", torch.float32, num_bits=8, symmetric=False, strategy="tensor")
    fp8 = {"num_bits": 8, "type": "float", "activations": token_fp8}
    compressed("fp8_channel", "float-quantized", strategy="channel", **fp8)
    compressed("fp8_tensor", "float-quantized", torch.float32, strategy="tensor", **fp8)
    compressed("fp8_block", "float-quantized", torch.float32, strategy="block", block_structure=[16, 32], **fp8)
    compressed("mxfp4", "mxfp4-pack-quantized", torch.float32, num_bits=4, type="float", **group)
    gptq("gptq_4", auto_gptq, 4, symmetric=True, desc_act=False)
    gptq("gptq_4_desc_act", auto_gptq, 4, symmetric=False, desc_act=True)
    gptq("gptq_8", auto_gptq, 8, symmetric=False, desc_act=False)
    awq("awq", autoawq)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
