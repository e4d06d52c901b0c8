"""A tiny target and an EAGLE-3 head that drafts what the target says, by construction."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoints import make_llama
from tests.helpers.models.eagle3_heads import HeadShape, make_head

_SMALL = 0.005
"""Factor of what the target's layers add to an embedding."""
_SHARP = 3.0
"""Factor of queries and keys: each row attends to itself, and to rows of the same token, whose values are the same."""
SHAPE = HeadShape(
    "old",
    decoder={"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 24},
    draft_vocab_size=110,
    layer_ids=(0, 1),
    own_embedding=False,
)


def make_agreeing(folder: Path, **options: Any) -> tuple[Path, Path]:
    """Save a Llama of one layer of 40 numbers and 131 ids and its head; return their folders.

    Both compute nearly the same logits, of the token before alone; the head has some of the ids. options: of
    `make_llama`.
    """
    target, head = folder / "target", folder / "head"
    make_llama(target, num_hidden_layers=1, **options)
    stored = load_file(target / "model.safetensors")
    for name, tensor in stored.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor *= _SMALL
    save_file(stored, target / "model.safetensors", {"format": "pt"})
    make_head(head, SHAPE)
    tensors = load_file(head / "model.safetensors")
    ids = torch.arange(SHAPE.draft_vocab_size) + tensors["d2t"]
    tensors |= {
        "fc.weight": torch.zeros_like(tensors["fc.weight"]),
        "norm.weight": stored["model.norm.weight"].clone(),
        "lm_head.weight": stored.get("lm_head.weight", stored["model.embed_tokens.weight"])[ids].clone(),
    }
    of_layer = {
        "input_layernorm.weight": torch.ones(40),
        "mlp.down_proj.weight": torch.zeros(40, SHAPE.fields["intermediate_size"]),
        "self_attn.q_proj.weight": _SHARP * _of_embedding(),
        "self_attn.k_proj.weight": _SHARP * _of_embedding(),
        "self_attn.v_proj.weight": _of_embedding(),
        "self_attn.o_proj.weight": torch.eye(40, 48),
    }
    tensors |= {f"midlayer.{name}": tensor for name, tensor in of_layer.items()}
    save_file(tensors, head / "model.safetensors")
    return target, head


def _of_embedding() -> Tensor:
    """Return a linear from an embedding beside a hidden state to the embedding."""
    return torch.eye(48, 40) @ torch.eye(40, 80)
