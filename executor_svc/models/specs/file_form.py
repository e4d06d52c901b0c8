"""What a family's files call the parts that every decoder has, and in which order they hold numbers."""

from __future__ import annotations

from dataclasses import dataclass

HEAD = "lm_head"
"""The linear whose results are logits: its name in Cadenza, and for `models.base.Builder`."""
TABLE = "model.embed_tokens"
"""The name of the table of embeddings in Cadenza."""
POSITIONS = "model.embed_positions"
"""The name of the table of learned positions in Cadenza."""
FINAL_NORM = "model.norm"
LAYERS = "model.layers"
QWEN_MTP_LAYERS_FIELD = "mtp_num_hidden_layers"
"""Of Qwen's config.json: the number of layers of a head of multi-token prediction."""


@dataclass(frozen=True, slots=True)
class FileForm:
    """Names in files, which Cadenza reads under its own names, and orders of numbers. The defaults are Llama's.

    Files that Cadenza writes have its own names, and then its own order.
    """

    before: str = "model."
    """What transformers writes before the names that follow; files may have other words there."""
    layers: str = "layers"
    table: str = "embed_tokens"
    positions: str = "embed_positions"
    norm: str = "norm"
    head: str = HEAD
    transposed: bool = False
    """Whether weights of linears in layers are [in_features, out_features] (GPT-2)."""
    qkv_by_head: bool = False
    """Whether the one linear of q, k and v has, for each KV head, the rows of its query heads, its key, its value."""
    masks: tuple[str, ...] = ()
    """What the names of tensors end with that are no weights."""

    @property
    def parts(self) -> dict[str, str]:
        """The names in files, without what stands before them, by those in Cadenza; the head's is left out."""
        return {TABLE: self.table, POSITIONS: self.positions, FINAL_NORM: self.norm, LAYERS: self.layers}

    def stored_name(self, name: str) -> str:
        """Return what transformers calls a module or tensor."""
        if name == HEAD or name.startswith(f"{HEAD}."):
            return self.head + name.removeprefix(HEAD)
        for own, part in self.parts.items():
            if name == own or name.startswith(f"{own}."):
                return self.before + part + name.removeprefix(own)
        return name


@dataclass(frozen=True, slots=True)
class StackedForm:
    """How files hold the matrices of all experts in one tensor, gate_up_proj or down_proj [E, rows, columns]."""

    transposed: bool = False
    """Whether dense ones are [E, columns, rows]."""
    interleaved: bool = False
    """Whether rows of gate and up take turns; else those of gate are first."""


@dataclass(frozen=True, slots=True)
class BesideNames:
    """The norms of experts that are beside the layer's MLP (Gemma 4)."""

    after_mlp: str = "post_feedforward_layernorm_1"
    before: str = "pre_feedforward_layernorm_2"
    after: str = "post_feedforward_layernorm_2"
