"""Checkpoints of Qwen3.5 as they are published: a text model among the parts of one that takes images."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def wrap_text(text: Path, wrapped: Path, model_type: str, architecture: str) -> Path:
    """Save the text model of a folder, with a tower beside it, to another one and return that."""
    wrapped.mkdir()
    tensors = {
        "model.language_model." + name.removeprefix("model.") if name.startswith("model.") else name: tensor
        for name, tensor in load_file(text / "model.safetensors").items()
    }
    tensors["model.visual.blocks.0.norm1.weight"] = torch.ones(3)
    save_file(tensors, wrapped / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((text / "config.json").read_text())
    tied = {"tie_word_embeddings": config.pop("tie_word_embeddings")}
    content = {"architectures": [architecture], "model_type": model_type, "text_config": config, "vision_config": {}}
    (wrapped / "config.json").write_text(json.dumps(content | tied))
    return wrapped
