"""Tiny seeded Qwen3.5 checkpoints with a head of multi-token prediction, and what it computes by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoints import edit_config, make_checkpoint
from tests.helpers.models.golden import transformers_model

PREFIX = "mtp."


def make_qwen_mtp(folder: Path, family: str, *, seed: int = 0, num_layers: int = 1, **shape: Any) -> Path:
    """Save a random checkpoint of `family`, with layers of a head, to a folder and return it."""
    make_checkpoint(folder, family, seed=seed, **shape)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    generator = torch.Generator().manual_seed(1000 + seed)
    for name, like in list(tensors.items()):
        if name.startswith(_attending(tensors)):
            own = f"{PREFIX}layers.0.{name.split('.', 3)[3]}"
            tensors[own] = torch.randn(like.shape, generator=generator) * (0.1 if like.ndim == 1 else 0.2)
    hidden = tensors["model.norm.weight"].shape[0]
    tensors[f"{PREFIX}fc.weight"] = torch.randn(hidden, 2 * hidden, generator=generator) * 0.2
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        tensors[f"{PREFIX}{name}.weight"] = torch.randn(hidden, generator=generator) * 0.3
    save_file(tensors, path, {"format": "pt"})
    edit_config(folder, mtp_num_hidden_layers=num_layers)
    return folder


def _attending(tensors: dict[str, Tensor]) -> str:
    """Return what the names of a layer with attention begin with."""
    name = next(name for name in tensors if name.endswith(".self_attn.q_proj.weight") and name.startswith("model."))
    return name.removesuffix("self_attn.q_proj.weight")


class ReferenceQwenMtp:
    """A head over a whole sequence at once, in fp32."""

    def __init__(self, folder: Path) -> None:
        from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm

        self._model = transformers_model(folder)
        config = self._model.config
        tensors = {
            name.removeprefix(PREFIX): tensor
            for name, tensor in load_file(folder / "model.safetensors").items()
            if name.startswith(PREFIX)
        }
        self._layer: Any = Qwen3_5DecoderLayer(config, config.layer_types.index("full_attention"))
        of_layer = {name.removeprefix("layers.0."): each for name, each in tensors.items() if "layers.0." in name}
        self._layer.load_state_dict(of_layer)
        self._norms: dict[str, Any] = {}
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            self._norms[name] = Qwen3_5RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
            self._norms[name].load_state_dict({"weight": tensors[f"{name}.weight"]})
        self._fc = tensors["fc.weight"]

    @torch.no_grad()
    def forward(self, token_ids: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return results and logits of rows: the tokens behind them, and states before the target's final norm."""
        inner, count = self._model.model, len(token_ids)
        embedded = self._norms["pre_fc_norm_embedding"](inner.embed_tokens(token_ids))
        hidden = self._norms["pre_fc_norm_hidden"](inner.norm(states))
        x = torch.cat([embedded, hidden], 1) @ self._fc.T
        positions = torch.arange(count)[None]
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        angles = inner.rotary_emb(x[None], positions)
        x = self._layer(x[None], position_embeddings=angles, attention_mask=mask, position_ids=positions)[0]
        result = self._norms["norm"](x)
        return result, self._model.lm_head(result)
