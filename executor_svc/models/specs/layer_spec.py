"""The parts of a decoder's layer: sizes, names in checkpoints, experts; `models.specs.spec` has the model."""

from __future__ import annotations

from dataclasses import dataclass, field

from executor_svc.device.experts import Router, own_experts
from executor_svc.device.ranks import WHOLE, Share
from executor_svc.models.layers.experts import ClippedSwiglu
from executor_svc.models.layers.rope import LATER, RopeConfig
from executor_svc.models.specs.file_form import BesideNames, StackedForm
from executor_svc.models.specs.latent_spec import LatentSpec
from executor_svc.models.specs.recurrent_spec import RecurrentSpec


@dataclass(frozen=True, slots=True)
class LayerNames:
    """The modules of a layer by their names in checkpoints. The defaults are Llama's."""

    before_attention: str | None = "input_layernorm"
    """Norms; None: the model has no such one, here and in the following three."""
    after_attention: str | None = None
    """Of the output of attention, before it is added to the residual."""
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """Three linears, or one of all three, one below the other."""
    output: str = "self_attn.o_proj"
    into_mlp: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    """Gate and up, or one linear of both; of an MLP without gate up alone."""
    down: str = "mlp.down_proj"
    head_gate: str | None = field(default=None, repr=False)
    """A linear of one row for each head, whose sigmoid multiplies what attention finds for the head (LFM3). Not in the
    digest, for that of the weights has the tensor."""

    renamed: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """Endings of names that files may have in the place of these."""

    @property
    def attention(self) -> str:
        """The module that holds the linears of attention, sinks, and scales of keys and values."""
        return self.qkv[0].rpartition(".")[0]

    @property
    def first(self) -> str:
        """The module whose name in layer 0 shows what stands before `layers` in a file."""
        return self.before_attention or self.after_attention or self.output


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """The modules of a layer of experts by their names in checkpoints; `{}` is an expert's number."""

    router: str = "mlp.gate"
    router_scale: str | None = None
    """A tensor [hidden]: the router reads the norm of its rows times it, over the root of the hidden size."""
    weight_scales: str | None = None
    """A tensor [E]: factors of the weights of the chosen."""
    choice_bias: str | None = None
    """A tensor [E], added to scores for the choice alone."""
    choice_bias_row: bool = False
    """Whether it has the shape [1, E]."""
    into: tuple[str, ...] = ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj")
    """Gate and up, or one linear of both."""
    down: str = "mlp.experts.{}.down_proj"
    shared_into: tuple[str, ...] = ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj")
    """Of what all tokens share, likewise."""
    shared_down: str = "mlp.shared_experts.down_proj"
    shared_gate: str | None = None
    """A linear of one row, whose sigmoid multiplies what is shared."""
    beside: BesideNames | None = None
    """None: experts are in the place of the layer's MLP."""
    stacked: StackedForm = field(default=StackedForm(), repr=False)
    """Of files that have the matrices of all experts in one tensor."""
    renamed: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """Ends of names that tensors of a layer may also have in files, and what they are here."""


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """A layer's experts, in the place of its MLP or beside it."""

    router: Router
    intermediate_size: int
    """Of an expert."""
    names: ExpertNames = ExpertNames()
    router_in_float32: bool = False
    """Whether rows and weight of the router are float32, in a narrower model too."""
    shared_size: int = 0
    """The intermediate size of what all tokens share; 0: nothing."""
    shared_biased: bool = field(default=False, repr=False, metadata=LATER)
    """Whether what all tokens share has biases."""
    biased: bool = False
    """Whether the router and the experts have biases."""
    activation: ClippedSwiglu | None = None
    """None: the model's."""
    gated: bool = field(default=True, repr=False)
    """Whether each, and what is shared, multiplies the activation of one linear with another; else it has one alone.
    Not in the digest, for that of the weights has the tensors."""
    share: Share = field(default=WHOLE, repr=False)
    """Of a rank: it has these experts alone."""

    @property
    def own(self) -> range:
        """The experts that there are here."""
        return own_experts(self.router.num_experts, self.share)


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """The sizes that may differ between layers."""

    num_kv_heads: int
    head_size: int
    intermediate_size: int


@dataclass(frozen=True, slots=True)
class LinearFactors:
    """What the results of the linears of all layers are multiplied with (Falcon-H1)."""

    output: float
    """Of attention."""
    gate: float
    """Of the MLP, like the following one."""
    down: float


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """An input of each layer beside the hidden states, of `size` numbers (Gemma 3n, Gemma 4).

    It is made of the token's row of a table and a projection of its embedding, and added at the layer's end.
    """

    size: int
    vocab_size: int
    """Rows of the table."""
    gate: str = "per_layer_input_gate"
    """Modules of a layer by their names in checkpoints."""
    projection: str = "per_layer_projection"
    norm: str = "post_per_layer_input_norm"
    from_embedding: str = "model.per_layer_model_projection"
    """A linear for all layers."""
    from_embedding_norm: str = "model.per_layer_projection_norm"


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The parameters that may differ between layers."""

    rope: RopeConfig | None
    """None: queries and keys are not rotated."""
    window: int | None = None
    """Maximum number of positions that a token attends to, its own included; None: all up to its own."""
    sinks: bool = field(default=False, repr=False)
    """Whether each head has one more score, of no value (gpt-oss). Not in the digest, for the weights' has its tensor:
    those of models without stay as they were."""
    experts: ExpertsSpec | None = None
    """None: the layer has the model's MLP alone."""
    chunk: int | None = field(default=None, repr=False, metadata=LATER)
    """Positions of a chunk: a token attends to those of its own chunk; None: there are no chunks."""
    sizes: LayerSizes | None = field(default=None, repr=False, metadata=LATER)
    """None: those of the whole model."""
    values_are_keys: bool = field(default=False, repr=False, metadata=LATER)
    """Whether values are the keys before their norm and rotation: there is no linear for them."""
    kv_of: int | None = field(default=None, repr=False, metadata=LATER)
    """Index of an earlier layer of the same heads, whose keys and values it reads; None: it has its own."""
    head_norms: bool = field(default=True, repr=False, metadata=LATER)
    """Whether it has the norms of heads that the model has."""
    latent: LatentSpec | None = field(default=None, repr=False, metadata=LATER)
    """None: its keys and values are those of heads."""
    recurrent: RecurrentSpec | None = field(default=None, repr=False, metadata=LATER)
    """None: it is not recurrent."""
    has_attention: bool = field(default=True, repr=False, metadata=LATER)
    """Whether it has attention, alone or beside a recurrence."""
    has_mlp: bool = field(default=True, repr=False, metadata=LATER)
    """Whether it has an MLP, or experts in its place."""

    @property
    def mixes(self) -> bool:
        """Whether its first part is there, which reads other tokens: attention, a recurrence, or both."""
        return self.has_attention or self.recurrent is not None
