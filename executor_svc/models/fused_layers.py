"""Whether a decoder's layers are of the kind that a device may fuse: those of Llama, Qwen3 and many others."""

from __future__ import annotations

from collections.abc import Sequence

from executor_svc.device.kernels import Kernels
from executor_svc.models.layers.attention import Attention
from executor_svc.models.layers.fused import FusableLayer, FusedLayers, FusingKernels
from executor_svc.models.layers.mlp import GatedMlp
from executor_svc.models.layers.norm import RmsNorm
from executor_svc.models.specs.spec import DecoderSpec
from executor_svc.models.weights.decoder_weights import LayerWeights


def fused_layers(spec: DecoderSpec, layers: Sequence[LayerWeights], kernels: Kernels) -> FusedLayers | None:
    """Return what computes all layers in fewer operations where a step has few rows; None: nothing does."""
    if not isinstance(kernels, FusingKernels) or spec.parallel:
        return None
    found = [_fusable(spec, layer) for layer in layers]
    if None in found or any(layer.kv_of is not None for layer in spec.layers):
        return None
    return kernels.fuse([each for each in found if each is not None])


def _fusable(spec: DecoderSpec, layer: LayerWeights) -> FusableLayer | None:
    """Return the parts of a layer; None: it has others."""
    attention, mlp, first, second = layer.attention, layer.mlp, layer.before_attention, layer.before_mlp
    others = layer.recurrent, layer.after_attention, layer.after_mlp, layer.experts_beside, layer.input, layer.scalar
    if any(each is not None for each in others):
        return None
    if not (isinstance(attention, Attention) and isinstance(mlp, GatedMlp)):
        return None
    if not (isinstance(first, RmsNorm) and isinstance(second, RmsNorm) and first.eps == second.eps):
        return None
    if not attention.is_plain:
        return None
    return FusableLayer(
        attention.shape,
        first.weight,
        attention.qkv,
        attention.norms,
        attention.output,
        second.weight,
        mlp.gate_up,
        mlp.activation,
        mlp.down,
        first.eps,
        spec.residual_scale,
    )
