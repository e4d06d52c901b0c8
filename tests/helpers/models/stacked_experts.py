"""Checkpoints whose tensors have the matrices of all experts, with one for each, and the other way round."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

TRANSPOSED = re.compile(r"mlp\.experts\.\w+_proj|feed_forward\.experts\.\w+_proj")
"""Of gpt-oss and Llama 4; Granite's and Gemma 4's are not."""
_STACK = re.compile(r"(.+\.experts)\.(gate_up|down)_proj")
_GRANITE = {"input_linear.weight": "experts.gate_up_proj", "output_linear.weight": "experts.down_proj"}
_ROUTER = "router.layer.weight", "router.weight"
_KEPT = "stacked.safetensors"
"""The names and shapes that a file had."""


def by_expert(folder: Path) -> None:
    """Divide the tensors of all experts among names of single ones; `stack_again` needs what is kept beside."""
    path = folder / "model.safetensors"
    tensors, kept = load_file(path), {}
    for name in list(tensors):
        if tensors[name].ndim == 3 and "conv" not in name:
            kept[name] = tensors[name]
            tensors |= _matrices(name, tensors.pop(name))
        elif name.endswith((".experts.gate_up_proj_bias", ".experts.down_proj_bias")):
            kept[name] = tensors[name]
            tensors |= _biases(name, tensors.pop(name))
        elif name.endswith(_ROUTER[0]):
            kept[name] = tensors[name]
            tensors[name.removesuffix(_ROUTER[0]) + _ROUTER[1]] = tensors.pop(name)
    if kept:
        save_file(tensors, path, {"format": "pt"})
        save_file(kept, folder / _KEPT)


def _matrices(name: str, stack: Tensor) -> dict[str, Tensor]:
    for end, own in _GRANITE.items():
        name = name.removesuffix(end) + own if name.endswith(end) else name
    found = _STACK.fullmatch(name)
    assert found is not None, name
    rows = stack.transpose(1, 2) if TRANSPOSED.search(name) and "block_sparse" not in name else stack
    made = {}
    for expert, matrix in enumerate(rows):
        for module, part in _parts(found[2], matrix, interleaved="mlp.experts" in name).items():
            made[f"{found[1]}.{expert}.{module}.weight"] = part.contiguous()
    return made


def _biases(name: str, stack: Tensor) -> dict[str, Tensor]:
    found = _STACK.fullmatch(name.removesuffix("_bias"))
    assert found is not None, name
    return {
        f"{found[1]}.{expert}.{module}.bias": part.contiguous()
        for expert, bias in enumerate(stack)
        for module, part in _parts(found[2], bias, interleaved=True).items()
    }


def _parts(kind: str, rows: Tensor, interleaved: bool) -> dict[str, Tensor]:
    if kind == "down":
        return {"down_proj": rows}
    gate, up = (rows[::2], rows[1::2]) if interleaved else rows.chunk(2)
    return {"gate_proj": gate, "up_proj": up}


def stack_again(folder: Path) -> None:
    """Put what `by_expert` divided together again, with the numbers of now."""
    if not (folder / _KEPT).exists():
        return
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, before in load_file(folder / _KEPT).items():
        if name.endswith(_ROUTER[0]):
            tensors[name] = tensors.pop(name.removesuffix(_ROUTER[0]) + _ROUTER[1])
            continue
        made = _biases(name, before) if name.endswith("_bias") else _matrices(name, before)
        numbers = torch.cat([tensors.pop(each).flatten() for each in made])
        # Where each number of the stack is among those of the single matrices.
        places = torch.arange(before.numel(), dtype=torch.float64).view(before.shape)
        order = _biases(name, places) if name.endswith("_bias") else _matrices(name, places)
        flat = torch.cat([order[each].flatten() for each in made]).long()
        stack = torch.empty(before.numel())
        stack[flat] = numbers.float()
        tensors[name] = stack.view(before.shape)
    (folder / _KEPT).unlink()
    save_file(tensors, path, {"format": "pt"})
