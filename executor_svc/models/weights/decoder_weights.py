"""Reads a decoder's tensors by their names in transformers' checkpoints, and builds its layers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import softplus

from executor_svc.device.kernels import AttentionShape, Embedding, HeadNorms, KVScales, Linear
from executor_svc.device.ranks import HeadNormRanks
from executor_svc.device.stored_linear import StoredLinear
from executor_svc.models.base import Builder, WeightSource
from executor_svc.models.layers.attention import Attention, HeadRows
from executor_svc.models.layers.experts import ExpertsBeside
from executor_svc.models.layers.inputs import LayerInput, TokenInputs
from executor_svc.models.layers.latent import LatentAttention
from executor_svc.models.layers.mlp import GATED, PLAIN, GatedMlp, Mlp, PlainMlp
from executor_svc.models.layers.norm import LayerNorm, Norm, RmsNorm
from executor_svc.models.parallel.building import RankBuilder
from executor_svc.models.specs.file_form import FINAL_NORM, POSITIONS
from executor_svc.models.specs.spec import EMBEDDINGS, HEAD, LAYER_TABLE, TABLE, DecoderSpec, mlp_rows, qkv_rows
from executor_svc.models.weights.experts_weights import ExpertsWeights
from executor_svc.models.weights.latent_weights import LatentWeights
from executor_svc.models.weights.linear_weight import (
    LinearWeight,
    StoredPart,
    head_gate_weight,
    linear_weight,
    output_weight,
    qkv_weight,
)
from executor_svc.models.weights.recurrent_weights import RecurrentLayer, RecurrentWeights, scaled


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """A layer, ready to run."""

    attention: Attention | LatentAttention | None
    recurrent: RecurrentLayer | None
    """In the place of attention, or beside it."""
    mlp: Mlp | None
    before_attention: Norm | None
    """None: the layer has no such norm, here and in the following ones."""
    after_attention: Norm | None
    before_mlp: Norm | None
    after_mlp: Norm | None
    experts_beside: ExpertsBeside | None = None
    """None: all experts of the layer are in the MLP's place."""
    input: LayerInput | None = None
    scalar: Tensor | None = None
    """[1]: what the layer's results are multiplied with."""

    @property
    def mixes(self) -> bool:
        """As of `LayerSpec`."""
        return self.attention is not None or self.recurrent is not None


class DecoderWeights:
    """Loads layer by layer. The device reads the weight of each linear, so that no second copy of it is needed."""

    def __init__(self, spec: DecoderSpec, weights: WeightSource, builder: Builder) -> None:
        self._spec = spec
        self._weights = weights
        self._builder = builder

    def ends(self) -> tuple[Embedding, Linear]:
        """Return the table of embeddings and the linear from hidden states to logits, which may have one weight."""
        if self._spec.tied:
            return self._builder.prepare_tied(HEAD, self._end(TABLE), self._head_bias())
        linear = self.head()  # read by threads, beside the table
        return self.embedding(), linear

    def embedding(self) -> Embedding:
        """Return the table of embeddings alone."""
        return self._builder.prepare_embedding(EMBEDDINGS, self._end(TABLE))

    def head(self) -> Linear:
        """Return the linear from hidden states to logits alone."""
        return self._builder.prepare_linear(HEAD, self._end(TABLE if self._spec.tied else HEAD), self._head_bias())

    def positions(self, max_model_len: int) -> Tensor | None:
        """Return the learned position of each token, [at least max_model_len, hidden]; None if the model has none.

        Beyond its last one, which drafts alone may be, that one counts.
        """
        spec = self._spec.positions
        if spec is None:
            return None
        table = self._weights.get(f"{POSITIONS}.weight", (spec.first_row + spec.count, self._spec.hidden_size))
        table = table[spec.first_row :].contiguous()
        beyond = max(0, max_model_len - spec.count)
        return torch.cat([table, table[-1:].expand(beyond, -1)]) if beyond else table

    def _head_bias(self) -> Tensor | None:
        return self._bias(HEAD, self._spec.vocab_size) if self._spec.head_bias else None

    def _end(self, name: str) -> LinearWeight | StoredLinear:
        size = (self._spec.vocab_size, self._spec.hidden_size)
        return linear_weight([self._weights.open_linear(name, size)], self._builder.dtype)

    def final_norm(self) -> Norm:
        return self.norm(FINAL_NORM, self._spec.hidden_size)

    def layer(
        self, index: int, shape: AttentionShape, scales: KVScales | None, columns: int | None = None
    ) -> LayerWeights:
        """Return a layer; scales: of its keys and values; columns: of q, k and v, by default the hidden size."""
        prefix, names, layer, scalar = f"model.layers.{index}.", self._spec.names, self._spec.layers[index], None
        if self._spec.layer_scalars:
            scalar = self._weights.get(f"{prefix}layer_scalar", (1,))
        recurrent, attention, size = None, None, columns or self._spec.hidden_size
        if layer.recurrent is not None:
            recurrent = RecurrentWeights(self._spec, self._weights, self._builder).layer(prefix, layer.recurrent)
        if layer.has_attention:
            attention = self._attention(prefix, index, shape, scales, size)
        return LayerWeights(
            before_attention=self._norm_if(prefix, names.before_attention if layer.mixes else None),
            attention=attention,
            recurrent=recurrent,
            after_attention=self._norm_if(prefix, names.after_attention if layer.mixes else None),
            before_mlp=self._norm_if(prefix, names.before_mlp if layer.has_mlp else None),
            mlp=self._mlp(prefix, index) if layer.has_mlp else None,
            after_mlp=self._norm_if(prefix, names.after_mlp if layer.has_mlp else None),
            experts_beside=self._experts_beside(prefix, index),
            input=self._layer_input(prefix),
            scalar=scalar,
        )

    def token_inputs(self) -> TokenInputs | None:
        """Return what makes the inputs of layers; None: they have none."""
        spec, inputs, builder = self._spec, self._spec.layer_inputs, self._builder
        if inputs is None:
            return None
        columns, dtype = spec.num_layers * inputs.size, builder.dtype
        table = linear_weight([self._weights.open_linear(LAYER_TABLE, (inputs.vocab_size, columns))], dtype)
        projection = self._weights.open_linear(inputs.from_embedding, (columns, spec.hidden_size))
        return TokenInputs(
            builder.prepare_embedding("embed_tokens_per_layer", table),
            float(torch.tensor(math.sqrt(inputs.size), dtype=dtype)),
            builder.prepare_linear("layer_inputs", linear_weight([projection], dtype)),
            self._norm_weight(inputs.from_embedding_norm, inputs.size),
            spec.norm_eps,
            builder.kernels,
        )

    def _layer_input(self, prefix: str) -> LayerInput | None:
        spec, inputs, builder = self._spec, self._spec.layer_inputs, self._builder
        if inputs is None:
            return None
        shapes = {inputs.gate: (inputs.size, spec.hidden_size), inputs.projection: (spec.hidden_size, inputs.size)}
        gate, projection = (
            builder.prepare_linear(
                "layer_input", linear_weight([self._weights.open_linear(prefix + name, shape)], builder.dtype)
            )
            for name, shape in shapes.items()
        )
        assert spec.activation == "gelu_tanh"
        return LayerInput(
            gate, projection, self.norm(prefix + inputs.norm, spec.hidden_size), spec.activation, builder.kernels
        )

    def _norm_if(self, prefix: str, name: str | None) -> Norm | None:
        return None if name is None else self.norm(prefix + name, self._spec.hidden_size)

    def norm(self, name: str, size: int) -> Norm:
        """Return a norm of rows of `size` numbers."""
        spec, kernels = self._spec, self._builder.kernels
        if spec.norm == "rms":
            return self._rms_norm(name, size)
        wide = self._norm_weight(name, size).float()
        bias = torch.zeros_like(wide) if spec.norm == "layer" else self._weights.get(f"{name}.bias", (size,)).float()
        return LayerNorm(wide, bias, spec.norm_eps, kernels)

    def _rms_norm(self, name: str, size: int) -> RmsNorm:
        return RmsNorm(self._norm_weight(name, size), self._spec.norm_eps, self._builder.kernels)

    def _norm_weight(self, name: str, size: int) -> Tensor:
        """Return a norm's weight, in fp32 where the kernels multiply in fp32."""
        weight = self._weights.get(f"{name}.weight", (size,))
        offset = self._spec.norm_weight_offset
        return weight.float() + offset if offset or self._spec.norms_in_fp32 else weight

    def _attention(
        self, prefix: str, index: int, shape: AttentionShape, scales: KVScales | None, columns: int
    ) -> Attention | LatentAttention:
        spec, dtype, names = self._spec, self._builder.dtype, self._spec.names
        latent = spec.layers[index].latent
        if latent is not None:
            return LatentWeights(spec, latent, self._weights, self._builder, self._norm_weight).layer(
                prefix, shape, scales
            )
        rows = qkv_rows(spec, index)
        heads = self._head_rows(shape, len(rows))
        qkv = qkv_weight(self._linears(prefix, rows, columns), dtype, heads)
        qkv_bias = output_bias = sinks = None
        if spec.qkv_bias:
            qkv_bias = torch.cat([put(bias) for put, bias in zip(heads, self._biases(prefix, rows), strict=True)])
        stored = self._weights.open_linear(prefix + names.output, (spec.hidden_size, spec.num_heads * shape.head_size))
        output = output_weight(stored, dtype, shape, self._builder.torch_device)
        if spec.output_bias:
            output_bias = self._bias(prefix + names.output, spec.hidden_size)
        if spec.layers[index].sinks:
            sinks = self._weights.get(f"{prefix}self_attn.sinks", (spec.num_heads,)).float()
        qkv_linear = self._builder.prepare_linear("attention.qkv", qkv, qkv_bias)
        output_linear = self._builder.prepare_linear("attention.output", output, output_bias)
        if spec.factors is not None:
            output_linear = scaled(output_linear, [(spec.factors.output, spec.hidden_size)], self._builder)
        return Attention(
            shape,
            qkv_linear,
            output_linear,
            self._head_norms(prefix, index, shape),
            scales,
            self._builder.kernels,
            sinks,
            spec.attention_gate,
            self._ranks_of_norms(),
            self._head_gate(prefix, shape),
        )

    def _head_gate(self, prefix: str, shape: AttentionShape) -> Linear | None:
        """Return what gates heads; None: the model has no such linear."""
        spec, builder, name = self._spec, self._builder, self._spec.names.head_gate
        if name is None:
            return None
        stored = self._weights.open_linear(prefix + name, (spec.num_heads, spec.hidden_size))
        weight = head_gate_weight(stored, builder.dtype, shape, builder.torch_device)
        return builder.prepare_linear("attention.gate", weight)

    def _ranks_of_norms(self) -> HeadNormRanks | None:
        """Return the ranks whose heads are normalized together."""
        if self._spec.head_norms != "all heads" or not isinstance(self._builder, RankBuilder):
            return None
        assert isinstance(self._builder.ranks, HeadNormRanks), "these ranks have no norm of all heads"
        return self._builder.ranks

    def _head_rows(self, shape: AttentionShape, count: int) -> list[HeadRows]:
        """Return what becomes of the rows of each stored linear of q, k and v."""
        pairs = self._spec.rotary_pairs
        assert len(self._spec.names.qkv) == 3 or not pairs, "pairs are of q and k alone"
        assert len(self._spec.names.qkv) == 3 or not self._spec.attention_gate, "gates are beside q alone"
        rows = HeadRows(shape.head_size, shape.padded_head_size, 0)
        gated = self._spec.attention_gate
        return [replace(rows, pairs=pairs if index < 2 else 0, gated=gated and not index) for index in range(count)]

    def _head_norms(self, prefix: str, index: int, shape: AttentionShape) -> HeadNorms | None:
        spec, layer = self._spec, self._spec.layers[index]
        if spec.head_norms is None or not layer.head_norms:
            return None
        size, padded, all_heads = shape.head_size, shape.padded_head_size, spec.head_norms == "all heads"
        rows = HeadRows(size, padded if all_heads else size, spec.rotary_pairs)
        names, counts = (spec.names.q_norm, spec.names.k_norm), (shape.num_heads, shape.num_kv_heads)
        if not spec.head_norm_weights:
            ones = torch.ones(size, dtype=torch.float32, device=self._builder.torch_device)
            return HeadNorms(ones, ones, spec.norm_eps, spec.head_norms)
        weights = [
            rows(self._norm_weight(prefix + name, count * size if all_heads else size))
            for name, count in zip(names[: 1 if layer.kv_of is not None else 2], counts, strict=False)
        ]
        value = torch.zeros(padded, dtype=weights[0].dtype, device=weights[0].device) if spec.value_norm else None
        if value is not None:
            value[:size] = 1.0
        return HeadNorms(weights[0], weights[-1], spec.norm_eps, spec.head_norms, value)

    def _mlp(self, prefix: str, index: int) -> Mlp:
        spec, dtype, builder = self._spec, self._builder.dtype, self._builder
        experts = spec.layers[index].experts
        if experts is not None and experts.names.beside is None:
            return ExpertsWeights(spec, self._weights, builder).layer(prefix, experts)
        rows, down_name = mlp_rows(spec, index), prefix + spec.names.down
        into = linear_weight(self._linears(prefix, rows, spec.hidden_size), dtype)
        down_shape = (spec.hidden_size, spec.sizes(index).intermediate_size)
        down = linear_weight([self._weights.open_linear(down_name, down_shape)], dtype)
        into_bias = down_bias = None
        if spec.mlp_bias:
            into_bias = torch.cat(self._biases(prefix, rows))
            down_bias = self._bias(down_name, spec.hidden_size)
        first = builder.prepare_linear("mlp.gate_up", into, into_bias)
        second = builder.prepare_linear("mlp.down", down, down_bias)
        if (factors := spec.factors) is not None:
            size = down_shape[1]
            first = scaled(first, [(factors.gate, size), (1.0, size)], builder)
            second = scaled(second, [(factors.down, spec.hidden_size)], builder)
        activation = spec.activation
        if spec.gated_mlp:
            assert activation in GATED
            return GatedMlp(first, second, activation, builder.kernels)
        assert activation in PLAIN
        scalars = self._xielu_scalars(f"{prefix}mlp.act_fn") if activation == "xielu" else None
        return PlainMlp(first, second, activation, scalars, builder.kernels)

    def _experts_beside(self, prefix: str, index: int) -> ExpertsBeside | None:
        spec, experts = self._spec, self._spec.layers[index].experts
        if experts is None or experts.names.beside is None:
            return None
        weights = ExpertsWeights(spec, self._weights, self._builder)
        return weights.beside(prefix, experts, lambda name: self._rms_norm(prefix + name, spec.hidden_size))

    def _xielu_scalars(self, name: str) -> Tensor:
        """Return the scalars of a layer's xIELU, as in `Kernels.activate`; it learns two before a softplus."""
        stored = (self._weights.get(f"{name}.{each}", (1,)).float() for each in ("alpha_p", "alpha_n", "beta", "eps"))
        alpha_p, alpha_n, beta, eps = stored
        return torch.cat([softplus(alpha_p), beta + softplus(alpha_n), beta, eps])

    def _linears(self, prefix: str, rows: dict[str, int], columns: int) -> list[StoredPart]:
        """Return the weights [rows, columns] of one fused linear."""
        return [self._weights.open_linear(prefix + name, (count, columns)) for name, count in rows.items()]

    def _biases(self, prefix: str, rows: dict[str, int]) -> list[Tensor]:
        """Return the biases [rows] of one fused linear, likewise."""
        return [self._bias(prefix + name, count) for name, count in rows.items()]

    def _bias(self, module: str, size: int) -> Tensor:
        name = f"{module}.bias"
        if name in self._spec.absent_biases:
            return torch.zeros(size, dtype=self._builder.dtype, device=self._builder.torch_device)
        return self._weights.get(name, (size,))
