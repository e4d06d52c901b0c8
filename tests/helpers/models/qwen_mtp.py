"""Tiny seeded checkpoints of Qwen's with a head of multi-token prediction, and what it computes by transformers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoints import edit_config, make_checkpoint
from tests.helpers.models.golden import transformers_model

PREFIX = "mtp."
_SMALL = 0.005
"""Factor of all but embeddings in a model whose head predicts well."""
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")
_NORMS = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")


def make_qwen_mtp(
    folder: Path, family: str, *, seed: int = 0, num_layers: int | None = 1, predicts: bool = False, **shape: Any
) -> Path:
    """Save a random checkpoint of `family`, with a head, to a folder and return it.

    num_layers: what config.json says of it; None: nothing. predicts: the head's drafts are mostly right: a token says
    nearly all about the next one, and the head's own linear lets the token pass.
    """
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
    for name in _NORMS:
        tensors[f"{PREFIX}{name}.weight"] = torch.randn(hidden, generator=generator) * 0.3
    if predicts:
        _let_predict(tensors)
    dtype = tensors["model.norm.weight"].dtype
    save_file({name: tensor.to(dtype) for name, tensor in tensors.items()}, path, {"format": "pt"})
    if num_layers is not None:
        edit_config(folder, mtp_num_hidden_layers=num_layers)
    return folder


def _attending(tensors: dict[str, Tensor]) -> str:
    """Return what the names of a layer with attention begin with."""
    name = next(name for name in tensors if name.endswith(".self_attn.q_proj.weight") and name.startswith("model."))
    return name.removesuffix("self_attn.q_proj.weight")


def _let_predict(tensors: dict[str, Tensor]) -> None:
    """Let layers add little to an embedding, and the head's result be nearly the embedding that it reads.

    So both compute nearly the same logits, of the token before alone.
    """
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "o_proj.bias", "out_proj.weight", "down_proj.weight", "down_proj")):
            tensor *= _SMALL
    hidden = tensors["model.norm.weight"].shape[0]
    tensors[f"{PREFIX}fc.weight"][:, hidden:] *= _SMALL
    tensors[f"{PREFIX}fc.weight"][:, :hidden] = torch.eye(hidden)
    tensors[f"{PREFIX}pre_fc_norm_embedding.weight"].zero_()
    tensors[f"{PREFIX}norm.weight"] = tensors["model.norm.weight"].clone()


class ReferenceQwenMtp:
    """A head over a whole sequence at once, in fp32."""

    def __init__(self, folder: Path) -> None:
        self._model = transformers_model(folder)
        config, inner = self._model.config, self._model.model
        tensors = {
            name.removeprefix(PREFIX): tensor
            for name, tensor in load_file(folder / "model.safetensors").items()
            if name.startswith(PREFIX)
        }
        index = config.layer_types.index("full_attention")
        self._layer: Any = type(inner.layers[index])(config, index)
        of_layer = {name.removeprefix("layers.0."): each for name, each in tensors.items() if "layers.0." in name}
        self._layer.load_state_dict(stacked(of_layer))
        self._norms: dict[str, Any] = {}
        for name in _NORMS:
            self._norms[name] = type(inner.norm)(config.hidden_size, eps=config.rms_norm_eps)
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


def stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a layer's tensors as transformers' modules have them: those of all experts in one."""
    found = {name: _EXPERT.fullmatch(name) for name in tensors}
    by_part = {(match[2], int(match[1])): tensors[name] for name, match in found.items() if match}
    rest = {name: tensor for name, tensor in tensors.items() if found[name] is None}
    if not by_part:
        return rest
    experts = range(1 + max(expert for _, expert in by_part))
    gate_up = [torch.cat([by_part["gate", expert], by_part["up", expert]]) for expert in experts]
    down = torch.stack([by_part["down", expert] for expert in experts])
    return rest | {"mlp.experts.gate_up_proj": torch.stack(gate_up), "mlp.experts.down_proj": down}
