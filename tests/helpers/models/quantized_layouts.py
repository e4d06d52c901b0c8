"""Quantizes the linears of a checkpoint in the layout of a package; written apart from the readers.

tests/executor_svc/models/quantized_files holds files that the packages themselves wrote.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoints import edit_config

GROUP = 32
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
Packed = tuple[dict[str, Tensor], Tensor]
"""A linear's tensors by the last part of their names, and its weight [N, K] as these tensors say."""


LINEARS = tuple(
    f"{end}.weight"
    for end in (
        *("proj", "_with_mqa", "_linear", "query_key_value", "dense", "_h_to_4h", "_4h_to_h"),
        *("_proj_qkv", "_proj_z", "_proj_qkvz", "_proj_ba", ".w1", ".w2", ".w3"),
    )
)


def quantize_checkpoint(folder: Path, layout: str, quantized: Path, dense: Path) -> None:
    """Save a checkpoint twice: its layers' linears in a layout of `LAYOUTS`, and the same numbers dense in float32."""
    config, pack = LAYOUTS[layout]
    few_bits, wide = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.endswith(LINEARS) and not name.endswith("router.proj.weight"):
            tensors, wide[name] = pack(tensor.float())
            prefix = name.removesuffix("weight")
            few_bits.update({prefix + key: each.contiguous() for key, each in tensors.items()})
        else:
            few_bits[name] = wide[name] = tensor
    for target, tensors in ((quantized, few_bits), (dense, wide)):
        shutil.copytree(folder, target)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors")
    edit_config(quantized, quantization_config=config)


def words(codes: Tensor, bits: int) -> Tensor:
    """Pack codes [R, C] into int32 [R, C * bits / 32], the first code in the lowest bits."""
    per_word = 32 // bits
    packed = sum(codes[:, place::per_word].long() << (bits * place) for place in range(per_word))
    assert isinstance(packed, Tensor)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)


def integers(weight: Tensor, bits: int, *, symmetric: bool, groups: Tensor | None = None) -> tuple[Tensor, ...]:
    """Return codes [N, K], zero points [N, G], scales [N, G] in fp16 and the numbers [N, K]; groups: [K] of columns."""
    groups = torch.arange(weight.shape[1]) // GROUP if groups is None else groups
    gathered = weight[:, groups.argsort(stable=True)].unflatten(1, (-1, GROUP))
    largest = (1 << bits) - 1
    if symmetric:
        scales = (gathered.abs().amax(2) / (largest // 2)).half()
        zeros = torch.full_like(scales, (largest + 1) // 2, dtype=torch.float32)
    else:
        low, high = gathered.amin(2).clamp(max=0), gathered.amax(2).clamp(min=0)
        scales = ((high - low) / largest).half()
        zeros = (-low / scales).round().clamp(1, largest)
    scale, zero = scales.float()[:, groups], zeros[:, groups]
    codes = (weight / scale + zero).round().clamp(0, largest)
    return codes.to(torch.uint8), zeros.to(torch.uint8), scales, (codes - zero) * scale


def shuffled(columns: int) -> Tensor:
    """Return groups of columns as activation ordering leaves them, [columns] int32."""
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(columns))
    return (torch.arange(columns, dtype=torch.int32) // GROUP)[order]


def packed_w4(weight: Tensor, *, symmetric: bool, actorder: bool = False) -> Packed:
    groups = shuffled(weight.shape[1]) if actorder else None
    codes, zeros, scales, numbers = integers(weight, 4, symmetric=symmetric, groups=groups)
    tensors = {"weight_packed": words(codes, 4), "weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}
    if not symmetric:
        tensors["weight_zero_point"] = words(zeros.t(), 4).t()
    return tensors | ({} if groups is None else {"weight_g_idx": groups}), numbers


def int8_per_channel(weight: Tensor) -> Packed:
    scales = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
    codes = (weight / scales.float()).round().clamp(-127, 127)
    return {"weight": codes.to(torch.int8), "weight_scale": scales}, codes * scales.float()


def gptq(weight: Tensor, bits: int, *, version: int, desc_act: bool) -> Packed:
    groups = shuffled(weight.shape[1]) if desc_act else torch.arange(weight.shape[1], dtype=torch.int32) // GROUP
    codes, zeros, scales, numbers = integers(weight, bits, symmetric=False, groups=groups)
    stored = zeros.t().int() - (1 if version == 1 else 0)
    tensors = {"qweight": words(codes, bits).t(), "qzeros": words(stored, bits), "scales": scales.t(), "g_idx": groups}
    return tensors, numbers


def awq(weight: Tensor) -> Packed:
    codes, zeros, scales, numbers = integers(weight, 4, symmetric=False)
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    qweight, qzeros = (words(each.t().unflatten(1, (-1, 8))[:, :, order].flatten(1), 4) for each in (codes, zeros))
    return {"qweight": qweight, "qzeros": qzeros, "scales": scales.t()}, numbers


def fp8(weight: Tensor, block: tuple[int, int] | None) -> Packed:
    height, width = block or weight.shape
    scales = torch.stack(
        [torch.stack([part.abs().amax() / 448 for part in row.split(width, 1)]) for row in weight.split(height)]
    )
    wide = scales.repeat_interleave(height, 0)[: len(weight)].repeat_interleave(width, 1)[:, : weight.shape[1]]
    codes = (weight / wide).to(torch.float8_e4m3fn)
    if block is None:
        return {
            "weight": codes,
            "weight_scale": scales.reshape(()),
            "input_scale": torch.ones(()),
        }, codes.float() * wide
    return {"weight": codes, "weight_scale_inv": scales}, codes.float() * wide


def mxfp4(weight: Tensor) -> Packed:
    groups = weight.unflatten(1, (-1, GROUP))
    exponents = groups.abs().amax(2, keepdim=True).log2().floor() - 2
    scaled = groups / exponents.exp2()
    codes = (scaled.abs().unsqueeze(3) - E2M1).abs().argmin(3)
    numbers = E2M1[codes] * scaled.sign() * exponents.exp2()
    codes = codes + 8 * (scaled < 0)
    blocks = (codes[:, :, 0::2] | codes[:, :, 1::2] << 4).to(torch.uint8)
    scales = (exponents[:, :, 0] + 127).to(torch.uint8)
    return {"weight_packed": blocks.flatten(1), "weight_scale": scales}, numbers.flatten(1)


def _compressed(form: str, weights: dict[str, Any], **group: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, **group}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}


_W4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True}
_W8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
_MXFP4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": GROUP, "symmetric": True}
_TOKENS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False}

LAYOUTS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Packed]]] = {
    "w4a16": (_compressed("pack-quantized", _W4), lambda weight: packed_w4(weight, symmetric=True)),
    "w4a16 with zero points": (
        _compressed("pack-quantized", _W4 | {"symmetric": False}),
        lambda weight: packed_w4(weight, symmetric=False),
    ),
    "w4a16 with actorder": (
        _compressed("pack-quantized", _W4 | {"actorder": "group"}),
        lambda weight: packed_w4(weight, symmetric=True, actorder=True),
    ),
    "w8a8": (_compressed("int-quantized", _W8, input_activations=_TOKENS), int8_per_channel),
    "gptq": (_GPTQ, lambda weight: gptq(weight, 4, version=1, desc_act=False)),
    "gptq with desc_act": (_GPTQ | {"desc_act": True}, lambda weight: gptq(weight, 4, version=1, desc_act=True)),
    "gptq of 8 bits": (_GPTQ | {"bits": 8}, lambda weight: gptq(weight, 8, version=1, desc_act=False)),
    "gptq v2": (
        _GPTQ | {"checkpoint_format": "gptq_v2"},
        lambda weight: gptq(weight, 4, version=2, desc_act=False),
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}, awq),
    "fp8": ({"quant_method": "fp8", "activation_scheme": "static"}, lambda weight: fp8(weight, None)),
    "fp8 in blocks": ({"quant_method": "fp8", "weight_block_size": [48, 64]}, lambda weight: fp8(weight, (48, 64))),
    "mxfp4": (_compressed("mxfp4-pack-quantized", _MXFP4), mxfp4),
}
"""The `quantization_config` of each layout, and how it packs a linear."""
