"""Adapters that peft itself makes and saves, with random weights, and the models that peft makes of them."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from executor_svc.models.adapters.adapter import Adapter, TokenRows
from executor_svc.models.adapters.contents import AdapterLimits
from executor_svc.models.adapters.reading import read_adapter
from executor_svc.models.base import StoredWeight
from executor_svc.models.files.checkpoint import SafetensorsWeights
from executor_svc.models.registry import ARCHITECTURES
from executor_svc.models.specs.spec import DecoderSpec


def spec_of(base: Path) -> DecoderSpec:
    """Return the structure of a checkpoint's model."""
    content = json.loads((base / "config.json").read_text(encoding="utf-8"))
    return ARCHITECTURES[content["architectures"][0]](content)


def save_peft_adapter(base: Path, folder: Path, seed: int = 0, from_start: bool = False, **config: Any) -> Any:
    """Save an adapter whose numbers are all random and not 0; return peft's model with it, in float64.

    from_start: save the difference from the adapter before training, as peft does for inits that change the base;
    config: fields of peft's LoraConfig.
    """
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft warns of tied weights, and of copies of tables
        import peft

        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        model.config._experts_implementation = "eager"  # grouped products are not of float64
        adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **config))
        start = {}
        if from_start:
            start["path_initial_model_for_weight_conversion"] = str(folder / "start")
            adapted.peft_config["default"].init_lora_weights = True  # or loading it would change the base again
            adapted.save_pretrained(folder / "start")
            adapted.peft_config["default"].init_lora_weights = config["init_lora_weights"]
        random = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in adapted.parameters():
                if parameter.requires_grad:
                    parameter.copy_(torch.randn(parameter.shape, generator=random) * 0.3)
        adapted.save_pretrained(folder, **start)
    return adapted.double().eval()


def read(base: Path, folder: Path, **limits: Any) -> Adapter:
    """Read an adapter as a server does: beside the base's table."""
    spec = spec_of(base)
    weights = SafetensorsWeights(base, torch.float32, torch.device("cpu"))

    def base_table(name: str) -> StoredWeight:
        return weights.open(f"{name}.weight", (spec.vocab_size, spec.hidden_size))

    return read_adapter(folder, spec, AdapterLimits(**limits), base_table=base_table)


def base_tensors(base: Path) -> dict[str, Tensor]:
    """Return a checkpoint's tensors in float64; a tied head is there, too."""
    from safetensors.torch import load_file

    found = {name: tensor.double() for name, tensor in load_file(base / "model.safetensors").items()}
    found.setdefault("lm_head.weight", found["model.embed_tokens.weight"])
    return found


_FUSED = {
    "attention.qkv": [["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], ["self_attn.qkv_proj"]],
    "attention.output": [["self_attn.o_proj"]],
    "mlp.gate_up": [["mlp.gate_proj", "mlp.up_proj"], ["mlp.gate_up_proj"]],
    "mlp.down": [["mlp.down_proj"]],
}


def linears_of(tensors: dict[str, Tensor], num_layers: int) -> dict[tuple[int, str], Tensor]:
    """Return the weights of all layers' linears as Cadenza runs them, of a checkpoint's tensors."""
    found = {}
    for layer in range(num_layers):
        for linear, kinds in _FUSED.items():
            for names in kinds:
                full = [f"model.layers.{layer}.{name}.weight" for name in names]
                if full[0] in tensors:
                    found[layer, linear] = torch.cat([tensors[name] for name in full])
    return found


def adapted_linear(adapter: Adapter, use: Any, weight: Tensor) -> Tensor:
    """Return a linear's weight and what an adapter adds to it, in float64."""
    result = weight.double().clone()
    for part in adapter.linears.get(use, ()):
        rows = slice(part.first_row, part.first_row + len(part.b))
        result[rows] += part.b.double() @ part.a.double() * part.scale
    return result


def adapted_table(adapter: Adapter, table: Tensor) -> Tensor:
    """Return the table of embeddings as an adapter makes it, in float64."""
    result = _with_rows(table, adapter.embedding_rows)
    part = adapter.embedding
    return result if part is None else result + part.a.double() @ part.b.double().t() * part.scale


def adapted_head(adapter: Adapter, weight: Tensor) -> Tensor:
    """Return the head's weight as an adapter makes it, in float64."""
    return adapted_linear(adapter, (None, "lm_head"), _with_rows(weight, adapter.head_rows))


def _with_rows(table: Tensor, rows: TokenRows | None) -> Tensor:
    result = table.double().clone()
    if rows is not None:
        result[rows.token_ids] = rows.rows.double()
    return result
