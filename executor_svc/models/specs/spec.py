"""The structure of a decoder-only transformer: `models.families` read it from config.json."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from executor_svc.device.kernels import HeadNormKind
from executor_svc.models.layers.mlp import Activation
from executor_svc.models.layers.rope import LATER, QueryScaling, RopeConfig
from executor_svc.models.layers.rope_scaling import DynamicScaling, LongScaling
from executor_svc.models.specs.file_form import HEAD as HEAD
from executor_svc.models.specs.file_form import TABLE as TABLE
from executor_svc.models.specs.file_form import FileForm
from executor_svc.models.specs.layer_spec import ExpertNames as ExpertNames
from executor_svc.models.specs.layer_spec import ExpertsSpec as ExpertsSpec
from executor_svc.models.specs.layer_spec import LayerInputs as LayerInputs
from executor_svc.models.specs.layer_spec import LayerNames as LayerNames
from executor_svc.models.specs.layer_spec import LayerSizes as LayerSizes
from executor_svc.models.specs.layer_spec import LayerSpec as LayerSpec
from executor_svc.models.specs.layer_spec import LinearFactors as LinearFactors

MTP_LAYERS_FIELD = "num_nextn_predict_layers"
"""Of config.json: the number of layers of a head of multi-token prediction."""
LAYER_TABLE = "model.embed_tokens_per_layer"
"""The name of the table of inputs of layers in checkpoints."""
EMBEDDINGS = "embed_tokens"
"""The table of embeddings for `models.base.Builder`."""


@dataclass(frozen=True, slots=True)
class LearnedPositions:
    """A table whose row at a token's position is added to its embedding."""

    count: int
    first_row: int = 0
    """The row of position 0 (OPT: 2)."""


NormKind = Literal["rms", "layer", "layer with bias"]
"""Root mean square, or mean and variance (Ba et al., 2016)."""


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
    norm_eps: float
    attention_scale: float
    activation: Activation = "silu"
    tied: bool = False
    """Whether the head's weight is that of the embedding."""

    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    gated_mlp: bool = True
    """Whether the MLP multiplies the activation of one linear, the gate, with another, up."""
    names: LayerNames = field(default=LayerNames())

    rotary_pairs: int = 0
    """Leading columns of a head that the checkpoint rotates as neighbouring pairs, not as halves: their rows in the
    weights of q and k, and the biases, norms and adapters of these, change places when they are read."""

    head_norms: HeadNormKind | None = None
    """RMS norms of queries and keys."""
    norm: NormKind = "rms"
    norm_weight_offset: float = 0.0
    """Offset of the weights of all norms, added in fp32; if not 0, norms also multiply in fp32."""
    norms_in_fp32: bool = False
    """Whether norms multiply in fp32, and round once."""
    parallel: bool = False
    """Whether attention and MLP both read the layer's input, and both are added to it."""

    embedding_scale: float = 1.0
    embedding_scale_rounded: bool = False
    """Whether the scale is rounded to the model's dtype first."""
    residual_scale: float = 1.0
    """Factor of the outputs of attention and feed-forward before they are added to the residual."""
    logits_divisor: float = 1.0
    attention_softcap: float | None = None
    logits_softcap: float | None = None

    head_norm_weights: bool = field(default=True, repr=False, metadata=LATER)
    """Whether the norms of heads have weights."""
    attention_gate: bool = field(default=False, repr=False, metadata=LATER)
    """Whether the output of attention is multiplied with the sigmoid of a gate, whose rows for a head follow those of
    its query in the linear of q."""
    value_norm: bool = field(default=False, repr=False, metadata=LATER)
    """Whether values are divided by the root mean square of their head."""
    layer_scalars: bool = field(default=False, repr=False, metadata=LATER)
    """Whether each layer's results are multiplied with a number, `layer_scalar` in checkpoints."""
    layer_inputs: LayerInputs | None = field(default=None, repr=False, metadata=LATER)
    factors: LinearFactors | None = field(default=None, repr=False, metadata=LATER)
    """None: all are 1."""
    head_bias: bool = field(default=False, repr=False)
    """Whether logits have a bias. Not in the digest, as this and the following add tensors to that of the weights."""
    positions: LearnedPositions | None = field(default=None, repr=False)
    """None: there are none."""
    files: FileForm = field(default=FileForm(), repr=False)
    """Names and orders in files: of other forms the same model is read."""

    num_mtp_layers: int = field(default=0, repr=False)
    """Layers of a head of multi-token prediction that the checkpoint also holds. The decoder does not read them, so
    that `digest`, which is over the representation, leaves them out."""

    ignored: tuple[str, ...] = field(default=(), repr=False)
    """What the names of tensors begin with that the checkpoint holds for images and sounds."""

    adaptable: bool = field(default=True, repr=False)
    """Whether adapters fit the weights: not where factors are in these, which an adapter's numbers need, too."""

    may_lack_biases: bool = field(default=False, repr=False)
    """Whether config.json may name biases of a kind of which the files hold none, as transformers' code has none."""

    absent_biases: frozenset[str] = field(default=frozenset(), repr=False)
    """Tensors of biases that the checkpoint does not hold: they are 0. The digest of the weights leaves them out."""

    @property
    def has_experts(self) -> bool:
        """Whether a layer has experts."""
        return any(layer.experts is not None for layer in self.layers)

    @property
    def has_latents(self) -> bool:
        """Whether keys and values of a layer are made of latents."""
        return any(layer.latent is not None for layer in self.layers)

    @property
    def has_states(self) -> bool:
        """Whether a layer is recurrent: sequences have states."""
        return any(layer.recurrent is not None for layer in self.layers)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_linear_elements(self) -> int:
        """The number of elements of embedding, head and linears: nearly all of the weights."""
        first = {layer: index for index, layer in enumerate(self.layers)}  # of thousands of layers few differ
        shapes = [(count, _layer_shapes(self, first[layer])) for layer, count in Counter(self.layers).items()]
        shapes.append((1, dict(end_shapes(self))))
        return sum(count * rows * columns for count, each in shapes for rows, columns in each.values())

    @property
    def num_unchosen_elements(self) -> int:
        """The number of elements of the experts that a token does not choose."""
        return sum(
            (each.router.num_experts - each.router.num_chosen) * self._elements_of_one(each)
            for each in self._layers_of_experts()
        )

    @property
    def num_expert_elements(self) -> int:
        """The number of elements of the linears of experts, without what all tokens share."""
        return sum(len(each.own) * self._elements_of_one(each) for each in self._layers_of_experts())

    def _layers_of_experts(self) -> list[ExpertsSpec]:
        return [layer.experts for layer in self.layers if layer.experts is not None]

    def _elements_of_one(self, experts: ExpertsSpec) -> int:
        return sum(math.prod(shape) for _, shape in shapes_of_expert(experts, 0, self.hidden_size))

    def sizes(self, index: int) -> LayerSizes:
        """Return the sizes of a layer."""
        own = self.layers[index].sizes
        return own or LayerSizes(self.num_kv_heads, self.head_size, self.intermediate_size)

    def num_rotary_elements(self, max_model_len: int) -> int:
        """Return the number of elements of the rotary tables."""
        tables = {rope for rope in self._ropes if not isinstance(rope.scaling, DynamicScaling)}
        return sum(2 * max_model_len * rope.size for rope in tables)

    @property
    def _ropes(self) -> list[RopeConfig]:
        """The rotary embedding of each layer that has one."""
        return [layer.rope for layer in self.layers if layer.rope is not None]

    def shares_prefixes(self, max_model_len: int) -> bool:
        """Return whether a token's keys and values depend only on it and the tokens before it.

        With dynamic scaling they also depend on the prompt's length, if that can exceed the original length.
        """
        scalings = [rope.scaling for rope in self._ropes if isinstance(rope.scaling, DynamicScaling)]
        return all(max_model_len <= scaling.original_max_position for scaling in scalings)

    def digest(self, max_model_len: int) -> bytes:
        """Return sha256 over everything, besides the tensors, that the computation depends on."""
        scalings = [rope.scaling for rope in self._ropes]
        lists = [scaling.is_long(max_model_len) for scaling in scalings if isinstance(scaling, LongScaling)]
        later = [each for part in self._parts for each in _later_values(part)]
        return hashlib.sha256(repr((self, lists, later) if later else (self, lists)).encode()).digest()

    @property
    def _parts(self) -> list[Any]:
        return [self, *self.layers, *self._layers_of_experts(), *self._query_scalings]

    @property
    def _query_scalings(self) -> list[QueryScaling]:
        return [rope.query_scaling for rope in self._ropes if rope.query_scaling is not None]


def _later_values(part: Any) -> list[tuple[str, Any]]:
    """Return the fields of `LATER` with other values than their defaults."""
    later = (each for each in fields(part) if each.metadata == LATER)
    return [(each.name, value) for each in later if (value := getattr(part, each.name)) != each.default]


def bias_names(spec: DecoderSpec) -> list[list[list[str]]]:
    """Return the names of biases that the model may have: of attention and MLP, of each linear, of each layer."""
    names, layers = spec.names, range(spec.num_layers)
    biased = [_biased_rows(spec, index) for index in layers] if spec.qkv_bias else []
    found = dict.fromkeys(name for rows in biased for name in rows)
    attention = [(name, [index for index in layers if name in biased[index]]) for name in found]
    attending = [index for index in layers if spec.layers[index].has_attention]
    attention += [(names.output, attending)] if spec.output_bias else []
    with_mlp = [index for index in layers if spec.layers[index].has_mlp]
    mlp = [(name, with_mlp) for name in (*names.into_mlp, names.down)] if spec.mlp_bias else []
    return [
        [[f"model.layers.{layer}.{name}.bias" for layer in found] for name, found in kind if found]
        for kind in (attention, mlp)
    ]


def linear_shapes(spec: DecoderSpec) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the name and shape [rows, columns] of each weight with two dimensions."""
    yield from end_shapes(spec)
    for index in range(spec.num_layers):
        for name, shape in _layer_shapes(spec, index).items():
            yield f"model.layers.{index}.{name}.weight", shape


def end_shapes(spec: DecoderSpec) -> Iterator[tuple[str, tuple[int, int]]]:
    """As `linear_shapes`, of those that belong to no layer."""
    hidden, inputs = spec.hidden_size, spec.layer_inputs
    for module in (TABLE,) if spec.tied else (TABLE, HEAD):
        yield f"{module}.weight", (spec.vocab_size, hidden)
    if inputs is not None:
        yield f"{LAYER_TABLE}.weight", (inputs.vocab_size, spec.num_layers * inputs.size)
        yield f"{inputs.from_embedding}.weight", (spec.num_layers * inputs.size, hidden)


def _layer_shapes(spec: DecoderSpec, index: int) -> dict[str, tuple[int, int]]:
    hidden, names, inputs, sizes = spec.hidden_size, spec.names, spec.layer_inputs, spec.sizes(index)
    layer = spec.layers[index]
    experts, found = layer.experts, dict[str, tuple[int, int]]()
    if layer.recurrent is not None:
        found |= layer.recurrent.shapes(hidden)
    if layer.latent is not None:
        found |= layer.latent.shapes(hidden, spec.num_heads, names.output)
    elif layer.has_attention:
        found |= {name: (rows, hidden) for name, rows in qkv_rows(spec, index).items()}
        found[names.output] = (hidden, spec.num_heads * sizes.head_size)
        found |= {} if names.head_gate is None else {names.head_gate: (spec.num_heads, hidden)}
    if experts is not None:
        found |= dict(expert_shapes(experts, hidden))
    if layer.has_mlp and (experts is None or experts.names.beside is not None):
        found |= {name: (rows, hidden) for name, rows in mlp_rows(spec, index).items()}
        found[names.down] = (hidden, sizes.intermediate_size)
    if inputs is not None:
        found |= {inputs.gate: (inputs.size, hidden), inputs.projection: (hidden, inputs.size)}
    return found


def _biased_rows(spec: DecoderSpec, index: int) -> Iterable[str]:
    """Return the linears of a layer's attention that `qkv_bias` is of."""
    latent = spec.layers[index].latent
    if latent is None:
        return qkv_rows(spec, index)
    return (latent.kv,) if latent.query_size is None else (latent.q[0], latent.kv)


def expert_shapes(experts: ExpertsSpec, hidden: int) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the name in a layer and the shape of each linear of experts; the router's is dense and none of them."""
    for expert in experts.own:
        yield from shapes_of_expert(experts, expert, hidden)
    if experts.shared_size:
        for name, rows in into_rows(experts.names.shared_into, experts.shared_size, experts.gated).items():
            yield name, (rows, hidden)
        yield experts.names.shared_down, (hidden, experts.shared_size)


def shapes_of_expert(experts: ExpertsSpec, expert: int, hidden: int) -> Iterator[tuple[str, tuple[int, int]]]:
    """As `expert_shapes`, of one expert."""
    for name, rows in into_rows(experts.names.into, experts.intermediate_size, experts.gated).items():
        yield name.format(expert), (rows, hidden)
    yield experts.names.down.format(expert), (hidden, experts.intermediate_size)


def into_rows(names: tuple[str, ...], size: int, gated: bool = True) -> dict[str, int]:
    """Return the rows of the linears that an MLP begins with by their names."""
    return _rows(names, (size, size) if gated else (size,))


def qkv_rows(spec: DecoderSpec, index: int) -> dict[str, int]:
    """Return the rows of a layer's linears of q, k and v by their names in it: of those that it has."""
    layer, sizes = spec.layers[index], spec.sizes(index)
    if not layer.has_attention:
        return {}
    q, kv = spec.num_heads * sizes.head_size, sizes.num_kv_heads * sizes.head_size
    q *= 2 if spec.attention_gate else 1
    if layer.kv_of is not None:
        return _rows(spec.names.qkv, (q,))
    return _rows(spec.names.qkv, (q, kv) if layer.values_are_keys else (q, kv, kv))


def mlp_rows(spec: DecoderSpec, index: int) -> dict[str, int]:
    """Return the rows of the linears that a layer's MLP begins with by their names in it."""
    return _rows(spec.names.into_mlp, (spec.sizes(index).intermediate_size,) * (2 if spec.gated_mlp else 1))


def _rows(names: tuple[str, ...], rows: tuple[int, ...]) -> dict[str, int]:
    return dict(zip(names, rows, strict=False)) if len(names) >= len(rows) else {names[0]: sum(rows)}
