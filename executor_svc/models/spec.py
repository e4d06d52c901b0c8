"""The structure of a decoder-only transformer: `models.families` read it from config.json."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from executor_svc.models.layers.mlp import Activation
from executor_svc.models.layers.rope import RopeConfig
from executor_svc.models.layers.rope_scaling import DynamicScaling, LongScaling

MTP_LAYERS_FIELD = "num_nextn_predict_layers"
"""Of config.json: the number of layers of a head of multi-token prediction."""
HEAD = "lm_head"
"""The linear whose results are logits: its name in checkpoints, and for `models.base.Builder`."""
TABLE = "model.embed_tokens"
"""The name of the table of embeddings in checkpoints."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The parameters that may differ between layers."""

    rope: RopeConfig
    window: int | None = None
    """Maximum number of positions that a token attends to, its own included; None: all up to its own."""


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """Sizes and parts of a model. The defaults are Llama's."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    layers: tuple[LayerSpec, ...]
    context_limit: int
    """Maximum number of positions of the checkpoint: the default of max_model_len and its bound."""
    rms_norm_eps: float
    attention_scale: float
    activation: Activation = "silu"
    tied: bool = False
    """Whether the head's weight is that of the embedding."""

    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    fused_tensors: bool = False
    """Whether checkpoints hold q, k and v as one tensor, and gate and up as one."""

    head_norms: bool = False
    """Whether query and key heads are normalized before the rotary embedding."""
    norms_after: bool = False
    """Whether outputs of attention and feed-forward are normalized before they are added to the residual."""
    norm_weight_offset: float = 0.0
    """Offset of the weights of all norms, added in fp32; if not 0, norms also multiply in fp32."""

    embedding_scale: float = 1.0
    embedding_scale_rounded: bool = False
    """Whether the scale is rounded to the model's dtype first."""
    residual_scale: float = 1.0
    """Factor of the outputs of attention and feed-forward before they are added to the residual."""
    logits_divisor: float = 1.0
    attention_softcap: float | None = None
    logits_softcap: float | None = None

    num_mtp_layers: int = field(default=0, repr=False)
    """Layers of a head of multi-token prediction that the checkpoint also holds. The decoder does not read them, so
    that `digest`, which is over the representation, leaves them out."""

    absent_biases: frozenset[str] = field(default=frozenset(), repr=False)
    """Tensors of biases that the checkpoint does not hold: they are 0. The digest of the weights leaves them out."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_linear_elements(self) -> int:
        """The number of elements of embedding, head and linears: nearly all of the weights."""
        qkv_and_output = 2 * (self.num_heads + self.num_kv_heads) * self.head_size
        layer = self.hidden_size * (qkv_and_output + 3 * self.intermediate_size)
        vocabularies = self.vocab_size * self.hidden_size * (1 if self.tied else 2)
        return vocabularies + self.num_layers * layer

    def num_rotary_elements(self, max_model_len: int) -> int:
        """Return the number of elements of the rotary tables."""
        tables = {layer.rope for layer in self.layers if not isinstance(layer.rope.scaling, DynamicScaling)}
        return sum(2 * max_model_len * rope.size for rope in tables)

    def shares_prefixes(self, max_model_len: int) -> bool:
        """Return whether a token's keys and values depend only on it and the tokens before it.

        With dynamic scaling they also depend on the prompt's length, if that can exceed the original length.
        """
        scalings = [layer.rope.scaling for layer in self.layers if isinstance(layer.rope.scaling, DynamicScaling)]
        return all(max_model_len <= scaling.original_max_position for scaling in scalings)

    def digest(self, max_model_len: int) -> bytes:
        """Return sha256 over everything, besides the tensors, that the computation depends on."""
        scalings = [layer.rope.scaling for layer in self.layers]
        lists = [scaling.is_long(max_model_len) for scaling in scalings if isinstance(scaling, LongScaling)]
        return hashlib.sha256(repr((self, lists)).encode()).digest()


def bias_names(spec: DecoderSpec) -> list[list[list[str]]]:
    """Return the names of biases that the model may have: of attention and MLP, of each linear, of each layer."""
    attention = ["q_proj", "k_proj", "v_proj"] if spec.qkv_bias else []
    attention += ["o_proj"] if spec.output_bias else []
    mlp = ["gate_proj", "up_proj", "down_proj"] if spec.mlp_bias else []
    kinds = [[f"self_attn.{name}" for name in attention], [f"mlp.{name}" for name in mlp]]
    layers = range(spec.num_layers)
    return [[[f"model.layers.{layer}.{name}.bias" for layer in layers] for name in names] for names in kinds]


def linear_shapes(spec: DecoderSpec) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the name and shape [rows, columns] of each weight with two dimensions."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q, kv = spec.num_heads * spec.head_size, spec.num_kv_heads * spec.head_size
    if spec.fused_tensors:
        into, mlp = {"qkv_proj": q + 2 * kv}, {"gate_up_proj": 2 * inner}
    else:
        into, mlp = {"q_proj": q, "k_proj": kv, "v_proj": kv}, {"gate_proj": inner, "up_proj": inner}
    layer = {f"self_attn.{name}": (rows, hidden) for name, rows in into.items()} | {"self_attn.o_proj": (hidden, q)}
    layer |= {f"mlp.{name}": (rows, hidden) for name, rows in mlp.items()} | {"mlp.down_proj": (hidden, inner)}
    yield f"{TABLE}.weight", (spec.vocab_size, hidden)
    if not spec.tied:
        yield f"{HEAD}.weight", (spec.vocab_size, hidden)
    for index in range(spec.num_layers):
        for name, shape in layer.items():
            yield f"model.layers.{index}.{name}.weight", shape
