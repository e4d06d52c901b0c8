"""Tiny seeded MiMo checkpoints with a head of multi-token prediction, and what the head computes, in float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoints import edit_config, make_checkpoint
from tests.helpers.models.eagle3_heads import ReferenceHead

PREFIX = "model.mtp_layers.0."
_SMALL = 0.005
"""Factor of all but embeddings in a model whose head predicts well."""


def make_mimo(folder: Path, *, seed: int = 0, predicts: bool = False, num_mtp_layers: int = 1, **options: Any) -> Path:
    """Save a random MiMo checkpoint to a folder and return it: transformers' Qwen2, and layers of a head.

    predicts: the head's drafts are mostly right: a token says nearly all about the next one, and the head's own linear
    lets the token pass. options: of `make_checkpoint`.
    """
    make_checkpoint(folder, "qwen2", seed=seed, **{"use_sliding_window": False, **options})
    path = next(iter(sorted(folder.glob("*.safetensors"))))
    for layer in range(num_mtp_layers):
        _add(
            folder, path, {f"model.mtp_layers.{layer}.{name}": tensor for name, tensor in _layer(folder, seed).items()}
        )
    if predicts:
        _let_predict(folder)
    architectures = ["MiMoForCausalLM"]
    edit_config(folder, architectures=architectures, model_type="mimo", num_nextn_predict_layers=num_mtp_layers or None)
    return folder


def _layer(folder: Path, seed: int) -> dict[str, Tensor]:
    """Return a layer's tensors by their names in it."""
    first = "model.layers.0."
    found = {name.removeprefix(first): tensor for name, tensor in all_tensors(folder).items() if name.startswith(first)}
    hidden, like = len(found["input_layernorm.weight"]), found["input_layernorm.weight"]
    sizes = {name: tuple(tensor.shape) for name, tensor in found.items()} | {
        "input_proj.weight": (hidden, 2 * hidden),
        **{f"{name}_layernorm.weight": (hidden,) for name in ("token", "hidden", "final")},
    }
    generator = torch.Generator().manual_seed(1000 + seed)
    drawn = {}
    for name, size in sizes.items():
        if "norm" in name:
            drawn[name] = torch.rand(size, generator=generator) + 0.5
        else:
            drawn[name] = torch.randn(size, generator=generator) * (0.1 if name.endswith("bias") else 0.3)
    return {name: tensor.to(like.dtype) for name, tensor in drawn.items()}


def _let_predict(folder: Path) -> None:
    """Let layers add little to an embedding, and the head's result be nearly the embedding that it reads.

    So both compute nearly the same logits, of the token before alone.
    """
    for path in sorted(folder.glob("*.safetensors")):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                tensor *= _SMALL
        if f"{PREFIX}input_proj.weight" in tensors:
            hidden = len(tensors[f"{PREFIX}input_proj.weight"])
            tensors[f"{PREFIX}input_proj.weight"][:, :hidden] *= _SMALL
            tensors[f"{PREFIX}input_proj.weight"][:, hidden:] = torch.eye(hidden)
            tensors[f"{PREFIX}token_layernorm.weight"].fill_(1)
            tensors[f"{PREFIX}final_layernorm.weight"] = all_tensors(folder)["model.norm.weight"].clone()
        save_file(tensors, path, {"format": "pt"})


def edit_tensors(folder: Path, **tensors: Tensor | None) -> None:
    """Replace tensors of the head in a folder with one file, by names with _ for each dot; None removes one."""
    path = folder / "model.safetensors"
    stored = load_file(path)
    for name, tensor in tensors.items():
        (key,) = [each for each in stored if each.removeprefix(PREFIX).replace(".", "_") == name and PREFIX in each]
        del stored[key]
        if tensor is not None:
            stored[key] = tensor
    save_file(stored, path, {"format": "pt"})


def all_tensors(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of all files."""
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def _add(folder: Path, path: Path, tensors: dict[str, Tensor]) -> None:
    """Add tensors to a file, and to the index if there is one."""
    save_file({**load_file(path), **tensors}, path, {"format": "pt"})
    index = folder / "model.safetensors.index.json"
    if index.exists():
        content = json.loads(index.read_text())
        content["weight_map"] |= dict.fromkeys(tensors, path.name)
        index.write_text(json.dumps(content))


class ReferenceMtp(ReferenceHead):
    """A head in float64, over a whole sequence at once."""

    def __init__(self, folder: Path) -> None:
        tensors = {name: tensor.double() for name, tensor in all_tensors(folder).items()}
        self._tensors = {"layers.0." + name.removeprefix(PREFIX): t for name, t in tensors.items() if PREFIX in name}
        self._embedding = tensors["model.embed_tokens.weight"]
        self._head = tensors.get("lm_head.weight", self._embedding)
        content = json.loads((folder / "config.json").read_text())
        rope_theta = (content.get("rope_parameters") or content)["rope_theta"]
        head_dim = content["hidden_size"] // content["num_attention_heads"]
        self._fields = {"head_dim": head_dim, **content, "rope_theta": rope_theta}
        self.target_ids = torch.arange(len(self._embedding))

    def combine(self, states: Tensor) -> Tensor:
        return states.double()

    def forward(self, token_ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        embedded = self._norm(self._embedding[token_ids], "layers.0.token_layernorm")
        both = torch.cat([self._norm(hidden.double(), "layers.0.hidden_layernorm"), embedded], 1)
        x = self._linear(both, "layers.0.input_proj")
        x = x + self._attention(self._norm(x, "layers.0.input_layernorm"), 0)
        normed = self._norm(x, "layers.0.post_attention_layernorm")
        gate, up = (self._linear(normed, f"layers.0.mlp.{part}_proj") for part in ("gate", "up"))
        x = x + self._linear(torch.nn.functional.silu(gate) * up, "layers.0.mlp.down_proj")
        result = self._norm(x, "layers.0.final_layernorm")
        return result, result @ self._head.T
