"""The fields of published config.json files: read, and each tensor of the model asked for by name and shape.

No weights are there: tensors are shapes alone. The names are those of transformers' own model of the same fields.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from executor_svc.cpu.kernels.states.kernels import CpuStateKernels
from executor_svc.models.decoder import Decoder, is_ignored
from executor_svc.models.files.stored_names import decoder_names
from executor_svc.models.registry import ARCHITECTURES, own_architecture
from executor_svc.models.specs.spec import DecoderSpec, linear_shapes

FILES = sorted((Path(__file__).parents[2] / "data" / "published_configs").iterdir())
MIXTURE_LAYERS = 4
"""As many of one whose layers have hundreds of experts."""
LISTS = ("hybrid_override_pattern", "layer_types", "no_rope_layers", "layer_rope_theta")
RENAMED = {
    "kimi_linear": {".mlp.": ".block_sparse_moe.", "layers.0.block_sparse_moe.": "layers.0.mlp.", ".forget_gate.": "."},
    "nemotron_h": {"model.": "backbone."},
    "phimoe": {".mlp.router.": ".block_sparse_moe.gate."},
}
"""What transformers calls otherwise than files do."""
MOST_LAYERS = 8
"""Of a model that is built: more are alike."""


@dataclass
class Shapes:
    """Implements `models.base.WeightSource` with tensors that have no numbers, and notes what was asked for."""

    asked: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        self.asked[name] = shape
        return torch.empty(shape, device="meta")

    def open(self, name: str, shape: tuple[int, ...]) -> Stored:
        return Stored(self.get(name, shape))

    def open_linear(self, prefix: str, shape: tuple[int, int]) -> Stored:
        return self.open(f"{prefix}.weight", shape)


@dataclass
class Stored:
    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def blocks(self, rows: int) -> Iterator[Tensor]:
        raise AssertionError("nothing is read")

    def whole(self) -> Tensor:
        return self.tensor


class Kernels(CpuStateKernels):
    """Those that weights are prepared for need none."""

    def head_linear(self, weight: Tensor) -> Any:
        return tuple(weight.shape)

    def expert_linear(self, linears: Any) -> Any:
        return tuple(linears)


@dataclass
class Prepared:
    """A weight as kernels would have it."""

    out_features: int
    in_features: int


class Builder:
    """Implements `models.base.Builder` without memory."""

    torch_device, dtype, kernels = torch.device("cpu"), torch.bfloat16, Kernels()

    def prepare_linear(self, name: str, weight: Any, bias: Tensor | None = None) -> Any:
        return Prepared(*weight.shape)

    prepare_embedding = prepare_linear

    def prepare_tied(self, name: str, weight: Any, bias: Tensor | None = None) -> Any:
        return weight.shape, weight.shape


def few_layers(content: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a model with its first layers alone."""
    lists: dict[str, Any] = {name: content[name][:MOST_LAYERS] for name in LISTS if content.get(name)}
    if content.get("moe_layers"):
        lists["moe_layers"] = [layer for layer in content["moe_layers"] if layer < MOST_LAYERS]
    if content.get("num_kv_shared_layers"):
        lists["num_kv_shared_layers"] = 2
    has_many = content.get("n_routed_experts") and "hybrid_override_pattern" not in content
    most = MIXTURE_LAYERS if has_many or (content.get("num_experts") or 0) >= 256 else MOST_LAYERS
    if section := content.get("linear_attn_config"):
        kinds = {
            name: [layer for layer in section[name] if layer <= most] for name in ("full_attn_layers", "kda_layers")
        }
        lists["linear_attn_config"] = section | kinds
    return {**content, count_of_layers(content): min(most, content[count_of_layers(content)]), **lists}


def count_of_layers(content: dict[str, Any]) -> str:
    return "n_layer" if "n_layer" in content else "num_hidden_layers"


def by_transformers(content: dict[str, Any], spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the tensors of the text part."""
    from transformers import AutoConfig, AutoModelForCausalLM, Mistral4Config, Mistral4ForCausalLM

    AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)
    known = ("architectures", "model_type", "quantization_config", *(["rope_scaling"] if _is_plain(content) else []))
    fields = {name: value for name, value in content.items() if name not in known}
    config = AutoConfig.for_model(content["model_type"].replace("kimi_k2", "deepseek_v3"), **fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = {name: tuple(value.shape) or (1,) for name, value in model.state_dict().items()}
    for old, new in RENAMED.get(content["model_type"], {}).items():
        shapes = {name.replace(old, new): shape for name, shape in shapes.items()}
    if content["model_type"] == "kimi_linear":
        shapes = by_part(shapes)
    shapes = by_expert(shapes, spec)
    names = decoder_names(shapes, spec.names.first, spec.files)
    own = {name: stored for name, stored in names.items() if not is_ignored(name, spec)}
    assert all(spec.files.stored_name(name) == stored or name == stored for name, stored in own.items())
    return {name: in_order(name, shapes[stored], spec) for name, stored in own.items()}


def by_part(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the shapes with three convolutions in the place of one of queries, keys and values."""
    whole = {name: size for name, size in shapes.items() if name.endswith(".conv1d.weight")}
    parts = {
        name.replace(".conv1d.", f".{part}_conv1d."): (channels // 3, *rest)
        for name, (channels, *rest) in whole.items()
        for part in "qkv"
    }
    return {name: size for name, size in shapes.items() if name not in whole} | parts


def _is_plain(content: dict[str, Any]) -> bool:
    """Return whether there is no scaling, of which transformers warns where a model has no rotary embedding."""
    return content.get("rope_scaling") is None


def by_expert(shapes: dict[str, tuple[int, ...]], spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """Return the shapes with those of single experts in the place of the tensors of all."""
    found = {name: shape for name, shape in shapes.items() if len(shape) != 3 or "conv" in name}
    for name, (count, *size) in shapes.items() - found.items():
        layer = int(name.split(".")[2])
        experts = spec.layers[layer].experts
        assert experts is not None
        own, hidden = experts.intermediate_size, spec.hidden_size
        into = "gate_up" in name or (not experts.gated and "up_proj" in name)
        rows = 2 * own if into and experts.gated else own
        assert (count, sorted(size)) == (experts.router.num_experts, sorted((rows, hidden)))
        shape = (own, hidden) if into else (hidden, own)
        modules = experts.names.into if into else (experts.names.down,)
        found |= {f"model.layers.{layer}.{each.format(expert)}.weight": shape
                  for each in modules for expert in range(count)}  # fmt: skip
    return found


def in_order(name: str, shape: tuple[int, ...], spec: DecoderSpec) -> tuple[int, ...]:
    return shape[::-1] if spec.files.transposed and name.startswith("model.layers.") else shape


@pytest.mark.sampled(5)
@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_every_tensor_has_its_name_and_shape(path: Path) -> None:
    content = json.loads(path.read_text())
    name = own_architecture(content["architectures"])
    assert name is not None
    whole = ARCHITECTURES[name](content)
    text = content.get("text_config", content)
    assert whole.num_layers == text[count_of_layers(text)]
    assert whole.num_linear_elements == sum(rows * columns for _, (rows, columns) in linear_shapes(whole))
    small = few_layers(text)
    spec = ARCHITECTURES[name]({**content, "text_config": small} if text is not content else small)
    source = Shapes()
    Decoder(spec, 64, source, Builder())
    assert source.asked == by_transformers(small, spec)
