"""What a decoder-only transformer is made of: read from config.json by `models.families`, built by `models.decoder`."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from executor_svc.models.layers.mlp import Activation
from executor_svc.models.layers.rope import RopeConfig
from executor_svc.models.layers.rope_scaling import DynamicScaling, LongScaling


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What may differ from layer to layer."""

    rope: RopeConfig
    window: int | None = None
    """Positions that a token sees at most, its own included; None: all before it."""


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
    """Most positions that the checkpoint was made for: the default of max_model_len and its bound."""
    rms_norm_eps: float
    attention_scale: float
    activation: Activation = "silu"
    tied: bool = False
    """The head is the embedding's weight."""

    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    fused_tensors: bool = False
    """Checkpoints hold q, k and v as one tensor, and gate and up as one."""

    head_norms: bool = False
    """Query and key heads are normalized before the rotary embedding."""
    norms_after: bool = False
    """Attention and feed-forward are normalized after themselves too, before they are added to the residual."""
    norm_weight_offset: float = 0.0
    """Added to the weights of all norms, in fp32, and then the product is taken in fp32 as well."""

    embedding_scale: float = 1.0
    embedding_scale_rounded: bool = False
    """The scale is rounded to the model's dtype before it is used."""
    residual_scale: float = 1.0
    """What attention and feed-forward give is multiplied by this before it is added to the residual."""
    logits_divisor: float = 1.0
    attention_softcap: float | None = None
    logits_softcap: float | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def least_numbers(self, max_model_len: int) -> int:
        """Return how many numbers embedding, head, linears and rotary tables hold: nearly all that there are."""
        qkv_and_output = 2 * (self.num_heads + self.num_kv_heads) * self.head_size
        layer = self.hidden_size * (qkv_and_output + 3 * self.intermediate_size)
        vocabularies = self.vocab_size * self.hidden_size * (1 if self.tied else 2)
        tables = {layer.rope for layer in self.layers if not isinstance(layer.rope.scaling, DynamicScaling)}
        return vocabularies + self.num_layers * layer + sum(2 * max_model_len * rope.size for rope in tables)

    def shares_prefixes(self, max_model_len: int) -> bool:
        """Return whether a token's keys and values depend on nothing but the tokens before it.

        Angles that go by the length of the prompt make them depend on that, once it may exceed the original length.
        """
        scalings = [layer.rope.scaling for layer in self.layers if isinstance(layer.rope.scaling, DynamicScaling)]
        return all(max_model_len <= scaling.original_max_position for scaling in scalings)

    def digest(self, max_model_len: int) -> bytes:
        """Return sha256 over all that the same tensors may be computed differently by."""
        scalings = [layer.rope.scaling for layer in self.layers]
        lists = [scaling.is_long(max_model_len) for scaling in scalings if isinstance(scaling, LongScaling)]
        return hashlib.sha256(repr((self, lists)).encode()).digest()
