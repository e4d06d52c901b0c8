"""A decoder-only transformer, assembled from its `DecoderSpec`: the model of all supported architectures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from executor_svc.device.kernels import AttentionPlan, AttentionShape, Kernels, KVScales, Rope
from executor_svc.device.latent import latent_shape
from executor_svc.device.states import StateMemory, StatePlan
from executor_svc.models.base import Builder, WeightSource
from executor_svc.models.fused_layers import fused_layers
from executor_svc.models.kv_scales import SCALES
from executor_svc.models.layers.fused import FusedLayers
from executor_svc.models.layers.mlp import Mlp
from executor_svc.models.layers.norm import Norm
from executor_svc.models.layers.rope import make_rotary
from executor_svc.models.specs.spec import HEAD, DecoderSpec, LayerSizes, LayerSpec
from executor_svc.models.weights.decoder_weights import DecoderWeights, LayerWeights
from executor_svc.plan.description import LayerHeads
from executor_svc.plan.state_sizes import LayerState

_Keep = Callable[[int, Tensor], None]
"""Is called before each layer, and after the last, with the index and the residual."""


class _Step(NamedTuple):
    """What all layers of a step share, as in `models.base.CausalLM.forward`."""

    ropes: Sequence[Rope]
    kv_layers: Sequence[Tensor]
    plans: Sequence[AttentionPlan]
    tables: Sequence[int]
    states: Sequence[StateMemory | None]
    state_plan: StatePlan | None

    def of_layer(self, index: int, rotary: int, plan: int) -> tuple[Rope, Tensor, AttentionPlan, int]:
        """Return what attention takes beside its input."""
        table = self.tables[index] if self.tables else 0
        return self.ropes[rotary], self.kv_layers[index], self.plans[plan], table


class Decoder:
    """Implements `models.base.CausalLM`. Rounds where transformers rounds, so that results in bf16 stay close."""

    def __init__(
        self,
        spec: DecoderSpec,
        max_model_len: int,
        weights: WeightSource,
        builder: Builder,
        kv_scales: Sequence[KVScales | None] | None = None,
    ) -> None:
        """Load the weights; raises LoaderError for a tensor that is missing or has another shape.

        kv_scales: scales of each layer, for a cache in fp8.
        """
        self._spec = spec
        self._kernels = builder.kernels
        self.num_layers = spec.num_layers
        self.vocab_size = spec.vocab_size
        self.hidden_size = spec.hidden_size
        shapes = [attention_shape(spec, layer, builder.kernels) for layer in spec.layers]
        self.layer_heads = layer_heads(spec)
        self.layer_states = layer_states(spec)
        attending = [index for index, layer in enumerate(spec.layers) if layer.has_attention]
        self.attention_shapes: tuple[AttentionShape, ...] = tuple(dict.fromkeys(shapes[index] for index in attending))
        ropes = {index: (spec.layers[index].rope, _unrotated(spec.layers[index])) for index in attending}
        distinct_ropes = list(dict.fromkeys(ropes.values()))
        self.windows = tuple(shape.window for shape in shapes)
        self._plan_of = {index: self.attention_shapes.index(shapes[index]) for index in attending}
        self._rotary_of = {index: distinct_ropes.index(rope) for index, rope in ropes.items()}
        # Before the weights: threads read those, and would wait for Python's lock while this thread computes.
        self._rotaries = [
            make_rotary(rope, max_model_len, builder.dtype, builder.torch_device, columns)
            for rope, columns in distinct_ropes
        ]
        reader = DecoderWeights(spec, weights, builder)
        # First, because its weight takes longest: on the CPU each weight is read by one thread.
        self.embedding, self.head = reader.ends()
        """A draft head may share them."""
        self._positions = reader.positions(max_model_len)
        self._token_inputs = reader.token_inputs()
        scales = list(kv_scales or [None] * spec.num_layers)
        for index, layer in enumerate(spec.layers):
            scales[index] = scales[index if layer.kv_of is None else layer.kv_of]
        self._layers = [reader.layer(i, *each) for i, each in enumerate(zip(shapes, scales, strict=True))]
        self._fused = fused_layers(spec, self._layers, builder.kernels)
        self.final_norm = reader.final_norm()
        """A head of multi-token prediction may read what it returns."""
        self._embedding_scale = spec.embedding_scale
        if spec.embedding_scale_rounded:
            self._embedding_scale = float(torch.tensor(spec.embedding_scale, dtype=builder.dtype))

    def new_ropes(self, positions: Tensor) -> list[Rope]:
        """As in `models.base.CausalLM`."""
        return [rotary.new(positions) for rotary in self._rotaries]

    def fill_ropes(self, positions: Tensor, rope_lens: Tensor, ropes: Sequence[Rope]) -> None:
        """As in `models.base.CausalLM`."""
        for rotary, rope in zip(self._rotaries, ropes, strict=True):
            rotary.fill(positions, rope_lens, rope)

    def forward(
        self,
        token_ids: Tensor,
        ropes: Sequence[Rope],
        kv_layers: Sequence[Tensor],
        plans: Sequence[AttentionPlan],
        tables: Sequence[int] = (),
        states: Sequence[StateMemory | None] = (),
        state_plan: StatePlan | None = None,
    ) -> Tensor:
        """Return hidden states [T, hidden] before the final norm; arguments as in `models.base.CausalLM`."""
        return self.forward_with_states(token_ids, ropes, kv_layers, plans, (), tables, states, state_plan)[0]

    def forward_with_states(
        self,
        token_ids: Tensor,
        ropes: Sequence[Rope],
        kv_layers: Sequence[Tensor],
        plans: Sequence[AttentionPlan],
        state_layers: Sequence[int],
        tables: Sequence[int] = (),
        states: Sequence[StateMemory | None] = (),
        state_plan: StatePlan | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the result of `forward` and the hidden states between layers, which an EAGLE-3 head reads.

        state_layers: ascending, 0 to num_layers: the sum before each of these layers, attention and feed-forward of the
        layers before it included, and for num_layers the result of `forward`. It is what vLLM's auxiliary hidden states
        are. Their shape is [T, len(state_layers) * hidden], side by side. They change no bit of the other result.
        """
        kernels, hidden_size = self._kernels, self._spec.hidden_size
        residual, inputs = self._embedded(token_ids, ropes)
        kept = kernels.new_rows("states", len(token_ids), len(state_layers) * hidden_size, residual.dtype)

        def keep(index: int, residual: Tensor) -> None:
            if index in state_layers:
                kernels.copy_columns(residual, 0, kept, state_layers.index(index) * hidden_size, hidden_size)

        step = _Step(ropes, kv_layers, plans, tables, states, state_plan)
        if self._fused is None:
            return self._run_layers(residual, inputs, step, keep), kept
        fused = self._fused
        return fused.either(
            residual,
            kv_layers,
            plans,
            lambda: self._run_fused(fused, residual, step, keep),
            lambda: self._run_layers(residual, inputs, step, keep),
        ), kept

    def _run_fused(self, fused: FusedLayers, residual: Tensor, step: _Step, keep: _Keep) -> None:
        """Add the results of all layers to the residual."""
        fused.begin(residual)
        for index in range(self.num_layers):
            keep(index, residual)
            fused.run(index, residual, *step.of_layer(index, self._rotary_of[index], self._plan_of[index]))
        keep(self.num_layers, residual)

    def _run_layers(self, residual: Tensor, inputs: Tensor | None, step: _Step, keep: _Keep) -> Tensor:
        """Return the residual with the results of all layers."""
        kernels, scale = self._kernels, self._spec.residual_scale
        delta: Tensor | None = None
        for index, layer in enumerate(self._layers):
            first = layer.before_attention if layer.mixes else layer.before_mlp
            normed, residual = self._read(first, delta, residual)
            keep(index, residual)
            if layer.mixes:
                delta = self._mixed(index, layer, normed, step)
                if layer.mlp is not None:
                    normed, residual = self._read_for_mlp(layer, normed, delta, residual)
            if layer.mlp is not None:
                delta, residual = self._fed_forward(index, layer, layer.mlp, normed, residual, inputs)
        if delta is not None:
            residual = kernels.add(delta, residual, scale)
        keep(self.num_layers, residual)
        return residual

    def _embedded(self, token_ids: Tensor, ropes: Sequence[Rope]) -> tuple[Tensor, Tensor | None]:
        """Return the embeddings of a step's tokens, and the inputs of layers beside them, if there are such."""
        kernels, inputs = self._kernels, None
        if self._token_inputs is not None:
            inputs = self._token_inputs.of_tokens(token_ids)
        residual = self.embedding(token_ids, self._embedding_scale)
        if self._token_inputs is not None and inputs is not None:
            inputs = self._token_inputs.complete(inputs, residual)
        if self._positions is not None:
            residual = kernels.add(kernels.take_rows(self._positions, ropes[0].rows), residual)
        return residual, inputs

    def _mixed(self, index: int, layer: LayerWeights, normed: Tensor, step: _Step) -> Tensor:
        """Return what attention, or a recurrence, or the sum of both, makes of a layer's input."""
        kernels, attended = self._kernels, None
        if layer.attention is not None:
            around = step.of_layer(index, self._rotary_of[index], self._plan_of[index])
            attended = layer.attention(normed, *around)
            if layer.after_attention is not None:
                attended = layer.after_attention(attended)
        if layer.recurrent is None:
            assert attended is not None
            return attended
        memory, state_plan = step.states[index], step.state_plan
        assert memory is not None, "a recurrent layer has memory"
        assert state_plan is not None
        if attended is None:
            mixed = layer.recurrent(normed, memory, state_plan)
            return mixed if layer.after_attention is None else layer.after_attention(mixed)
        # Both end with results of one shape, which have one memory when they are recorded.
        kept = kernels.new_rows("attended", len(normed), attended.shape[1], attended.dtype)
        kernels.copy_columns(attended, 0, kept, 0, attended.shape[1])
        return kernels.add(layer.recurrent(normed, memory, state_plan), kept)

    def _read_for_mlp(
        self, layer: LayerWeights, normed: Tensor, mixed: Tensor, residual: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return what the MLP reads, and the residual, to which what was mixed is added."""
        if not self._spec.parallel:
            return self._read(layer.before_mlp, mixed, residual)
        normed = normed if layer.before_mlp is None else layer.before_mlp(residual)
        return normed, self._kernels.add(mixed, residual, self._spec.residual_scale)

    def _fed_forward(
        self, index: int, layer: LayerWeights, mlp: Mlp, normed: Tensor, residual: Tensor, inputs: Tensor | None
    ) -> tuple[Tensor | None, Tensor]:
        """Return what a layer's MLP, experts and input make, None: it is in the residual already, and the residual."""
        kernels, scale = self._kernels, self._spec.residual_scale
        delta: Tensor | None = mlp(normed)
        assert delta is not None
        if layer.experts_beside is not None:
            delta = layer.experts_beside(delta, residual)
        if layer.after_mlp is not None:
            delta = layer.after_mlp(delta)
        if layer.input is not None and inputs is not None:
            residual = kernels.add(delta, residual, scale)
            delta = layer.input(residual, inputs, index)
        if layer.scalar is not None:
            residual, delta = kernels.add(delta, residual, scale, layer.scalar), None
        return delta, residual

    def _read(self, norm: Norm | None, delta: Tensor | None, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return what attention or feed-forward reads, and the residual to which the output before it is added."""
        scale = self._spec.residual_scale
        if norm is None:
            residual = residual if delta is None else self._kernels.add(delta, residual, scale)
            return residual, residual
        return (norm(residual), residual) if delta is None else norm.of_sum(delta, residual, scale)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [R, vocab_size] for hidden [R, hidden]: rounded to the model's dtype, as float32."""
        spec = self._spec
        logits = self.head(self.final_norm(hidden), torch.float32)
        return self._kernels.finish_logits(logits, hidden.dtype, spec.logits_divisor, spec.logits_softcap)


def _unrotated(layer: LayerSpec) -> int:
    """Return the columns of a layer's queries and keys that rotation is of, and which are not rotated."""
    return layer.latent.rope_size if layer.rope is None and layer.latent is not None else 0


def attention_shape(spec: DecoderSpec, layer: LayerSpec, kernels: Kernels) -> AttentionShape:
    """Return the shape of a layer's attention."""
    if layer.latent is not None:
        return latent_shape(spec.num_heads, layer.latent.size, layer.latent.rope_size, spec.attention_scale)
    sizes = layer.sizes or LayerSizes(spec.num_kv_heads, spec.head_size, spec.intermediate_size)
    return AttentionShape(
        spec.num_heads,
        sizes.num_kv_heads,
        sizes.head_size,
        kernels.padded_head_size(sizes.head_size),
        spec.attention_scale,
        layer.window,
        spec.attention_softcap,
        layer.chunk,
    )


def layer_heads(spec: DecoderSpec) -> tuple[LayerHeads, ...]:
    """Return what each layer keeps in the cache: one without attention no heads."""
    sizes = [spec.sizes(index) for index in range(spec.num_layers)]
    return tuple(
        LayerHeads(each.num_kv_heads if layer.has_attention else 0, each.head_size, layer.kv_of)
        if layer.latent is None
        else LayerHeads(1, layer.latent.size + layer.latent.rope_size, latent=layer.latent.size)
        for each, layer in zip(sizes, spec.layers, strict=True)
    )


def layer_states(spec: DecoderSpec) -> tuple[LayerState | None, ...]:
    """Return what each layer keeps of a sequence beside the cache; None: nothing."""
    recurrent = (layer.recurrent for layer in spec.layers)
    return tuple(None if each is None else each.state(spec.hidden_size) for each in recurrent)


def is_ignored(name: str, spec: DecoderSpec) -> bool:
    """Return whether a tensor is one that checkpoints may hold and the model does not need."""
    endings = ("rotary_emb.inv_freq", *spec.files.masks, *(f".{spec.names.attention}{ending}" for ending in SCALES))
    if spec.tied and name.startswith(f"{HEAD}.") and not name.endswith(".bias"):  # a copy of the table
        return True
    beginnings = (*map(mtp_prefix, range(spec.num_mtp_layers)), *spec.ignored)
    return name.endswith(endings) or name.startswith(beginnings)


def mtp_prefix(layer: int) -> str:
    """Return what the names of a layer's tensors of a head of multi-token prediction begin with."""
    return f"model.mtp_layers.{layer}."
