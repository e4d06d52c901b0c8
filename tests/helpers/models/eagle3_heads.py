"""Tiny seeded EAGLE-3 heads in both formats, and what they compute, in float64 and from the format's definition."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Format = Literal["old", "new"]

DECODER: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 131,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}
"""Of a head for a target of 40 numbers and 131 ids."""

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


@dataclass
class HeadShape:
    """What a head is made of."""

    layout: Format = "new"
    decoder: dict[str, Any] = field(default_factory=dict)
    """Fields over those of `DECODER`."""
    draft_vocab_size: int = 50
    target_hidden_size: int = 40
    layer_ids: tuple[int, ...] = (0, 1, 2)
    flags: dict[str, bool] = field(default_factory=dict)
    own_embedding: bool = True
    own_head: bool = True

    @property
    def fields(self) -> dict[str, Any]:
        return {**DECODER, **self.decoder}

    def flag(self, name: str) -> bool:
        return self.flags.get(name, False)

    @property
    def config(self) -> dict[str, Any]:
        """The content of config.json."""
        common = {
            "draft_vocab_size": self.draft_vocab_size,
            "target_hidden_size": self.target_hidden_size,
            "eagle_aux_hidden_state_layer_ids": list(self.layer_ids),
        }
        if self.layout == "old":
            return {**self.fields, "architectures": ["LlamaForCausalLMEagle3"], **common, **self.flags}
        return {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_config": {"algorithm": "eagle3", "default_proposal_method": "greedy"},
            "transformer_layer_config": self.fields,
            **common,
            **{name: self.flag(name) for name in FLAGS},
        }


def make_head(folder: Path, shape: HeadShape, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """Save a random head of this shape to a folder and return it; the same seed is the same head in both formats."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: _drawn(name, size, seed).to(dtype) for name, size in _sizes(shape).items()}
    if shape.draft_vocab_size < shape.fields["vocab_size"]:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randperm(shape.fields["vocab_size"], generator=generator)[: shape.draft_vocab_size].sort().values
        tensors["d2t"] = ids - torch.arange(shape.draft_vocab_size)
        tensors["t2d"] = torch.zeros(shape.fields["vocab_size"], dtype=torch.bool).index_fill(0, ids, True)
    if shape.layout == "old":
        tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**shape.config, "torch_dtype": str(dtype)[6:]}))
    return folder


def _sizes(shape: HeadShape) -> dict[str, tuple[int, ...]]:
    fields, hidden = shape.fields, shape.fields["hidden_size"]
    inner, size = fields["intermediate_size"], fields["head_dim"]
    q, kv = fields["num_attention_heads"] * size, fields["num_key_value_heads"] * size
    width = len(shape.layer_ids) * shape.target_hidden_size
    found: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, width), "norm.weight": (hidden,)}
    found["layers.0.hidden_norm.weight"] = (hidden,)
    if shape.own_embedding:
        found["embed_tokens.weight"] = (fields["vocab_size"], hidden)
    if shape.own_head:
        found["lm_head.weight"] = (shape.draft_vocab_size, hidden)
    if shape.flag("norm_before_fc"):
        found["input_norm.weight"] = (width,)
    if shape.flag("fc_norm"):
        found |= {f"fc_norm.{index}.weight": (shape.target_hidden_size,) for index in range(len(shape.layer_ids))}
    for index in range(fields["num_hidden_layers"]):
        columns = hidden if index else 2 * hidden
        linears = {"q_proj": (q, columns), "k_proj": (kv, columns), "v_proj": (kv, columns), "o_proj": (hidden, q)}
        layer: dict[str, tuple[int, ...]] = {f"self_attn.{name}.weight": each for name, each in linears.items()}
        if fields["attention_bias"]:
            layer |= {f"self_attn.{name}.bias": each[:1] for name, each in linears.items()}
        if fields["model_type"] == "qwen3":
            layer |= {f"self_attn.{name}.weight": (size,) for name in ("q_norm", "k_norm")}
        layer |= {f"mlp.{name}.weight": (inner, hidden) for name in ("gate_proj", "up_proj")}
        layer |= {"mlp.down_proj.weight": (hidden, inner)}
        layer |= {f"{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
        found |= {f"layers.{index}.{name}": each for name, each in layer.items()}
    return found


def _drawn(name: str, size: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(name.encode()))
    if "norm" in name:
        return torch.rand(size, generator=generator) + 0.5
    return torch.randn(size, generator=generator) * (0.1 if name.endswith("bias") else 0.3)


class ReferenceHead:
    """A head in float64, over a whole sequence at once."""

    def __init__(
        self, folder: Path, shape: HeadShape, embedding: Tensor | None = None, head: Tensor | None = None
    ) -> None:
        """embedding, head: weights of the target, where the head has none."""
        stored = load_file(folder / "model.safetensors")
        self._tensors = {name.replace("midlayer.", "layers.0."): tensor.double() for name, tensor in stored.items()}
        if embedding is not None:
            self._tensors["embed_tokens.weight"] = embedding.double()
        if head is not None:
            self._tensors["lm_head.weight"] = head.double()
        self._shape, self._fields = shape, shape.fields
        offsets = stored.get("d2t", torch.zeros(shape.draft_vocab_size, dtype=torch.int64))
        self.target_ids = torch.arange(shape.draft_vocab_size) + offsets

    def combine(self, states: Tensor) -> Tensor:
        """Return hidden states [T, hidden] for states [T, layers * target hidden]."""
        states = states.double()
        if self._shape.flag("norm_before_fc"):
            states = self._norm(states, "input_norm")
        if self._shape.flag("fc_norm"):
            parts = states.chunk(len(self._shape.layer_ids), 1)
            states = torch.cat([self._norm(part, f"fc_norm.{index}") for index, part in enumerate(parts)], 1)
        return states @ self._tensors["fc.weight"].T

    def forward(self, token_ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the hidden states [T, hidden] for the next draft, and logits [T, draft vocabulary]."""
        embedded = self._tensors["embed_tokens.weight"][token_ids]
        x = hidden.double()
        for index in range(self._fields["num_hidden_layers"]):
            name = f"layers.{index}"
            normed = self._norm(embedded if index == 0 else x, f"{name}.input_layernorm")
            if index == 0:
                below = self._norm(x, f"{name}.hidden_norm")
                normed = torch.cat([normed, below], 1)
                x = below if self._shape.flag("norm_before_residual") else x
            x = x + self._attention(normed, index)
            normed = self._norm(x, f"{name}.post_attention_layernorm")
            gate, up = (self._linear(normed, f"{name}.mlp.{part}_proj") for part in ("gate", "up"))
            x = x + self._linear(torch.nn.functional.silu(gate) * up, f"{name}.mlp.down_proj")
        normed = self._norm(x, "norm")
        return normed if self._shape.flag("norm_output") else x, self._linear(normed, "lm_head")

    def drafts(self, token_ids: list[int], states: Tensor, count: int) -> tuple[list[int], Tensor]:
        """Return `count` likeliest tokens after a text, one after the other, and the logits of each.

        token_ids: of the text, its first one left out, and the token after it; states: at each of its positions.
        """
        tokens, rows, inputs = list(token_ids), [], self.combine(states)
        for _ in range(count):
            hidden, logits = self.forward(torch.tensor(tokens), inputs)
            rows.append(logits[-1])
            tokens.append(int(self.target_ids[int(logits[-1].argmax())]))
            inputs = torch.cat([inputs, hidden[-1:]])
        return tokens[len(token_ids) :], torch.stack(rows)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        bias = self._tensors.get(f"{name}.bias")
        product = x @ self._tensors[f"{name}.weight"].T
        return product if bias is None else product + bias

    def _norm(self, x: Tensor, name: str) -> Tensor:
        inverse = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self._fields["rms_norm_eps"])
        return x * inverse * self._tensors[f"{name}.weight"]

    def _attention(self, x: Tensor, index: int) -> Tensor:
        name, size, count = f"layers.{index}.self_attn", self._fields["head_dim"], len(x)
        q, k, v = (self._linear(x, f"{name}.{part}_proj").view(count, -1, size) for part in "qkv")
        if self._fields["model_type"] == "qwen3":
            q, k = self._norm(q, f"{name}.q_norm"), self._norm(k, f"{name}.k_norm")
        q, k = self._rotated(q), self._rotated(k)
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / size**0.5
        distance = torch.arange(count)[:, None] - torch.arange(count)
        seen = distance >= 0
        if "layer_types" in self._fields and self._fields["layer_types"][index] == "sliding_attention":
            seen &= distance < self._fields["sliding_window"]
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        return self._linear(torch.einsum("hqk,khd->qhd", weights, v).flatten(1), f"{name}.o_proj")

    def _rotated(self, x: Tensor) -> Tensor:
        half = x.shape[2] // 2
        frequencies = self._fields["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = (torch.arange(len(x), dtype=torch.float64)[:, None] * frequencies)[:, None]
        left, right = x[..., :half], x[..., half:]
        return torch.cat([left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()], -1)
